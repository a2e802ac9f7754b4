//! The forward pass.
#![expect(
    clippy::inline_always,
    reason = "a body is compiled for an instruction set only where it is inlined into its dispatch"
)]

use std::ops::Range;

use super::super::gemm::Write;
use super::super::simd::{max, sum};
use super::{
    AttentionDropout, AttentionSpec, Float, KEYS, Mask, MatMut, MatRef, Products, QUERIES, Strided,
    clip, padded, per_head,
};
use crate::kernels::Threads;

/// Computes attention.
///
/// A query that sees no key, or only keys with a mask of minus infinity, gives zeros.
///
/// # Shapes
///
/// `q`: `[B, Sq, Hq D]`; `k`, `v`: `[B, Sk, Hkv D]`; `out`: `[B Sq, Hq D]`; `lse`: `[B, Hq, Sq]`,
/// the logarithms of the softmax denominators (minus infinity where no key is seen), kept for
/// [`attention_grad`](super::attention_grad).
///
/// # Panics
///
/// If the shapes do not fit.
pub fn attention<T: Float>(
    threads: &Threads,
    spec: &AttentionSpec<'_, T>,
    q: Strided<'_, T>,
    k: Strided<'_, T>,
    v: Strided<'_, T>,
    out: MatMut<'_, T>,
    lse: &mut [T],
) {
    let shape = spec.shape;
    shape.check();
    assert_eq!(out.rows(), shape.batch * shape.q_len, "one row per query");
    assert_eq!(
        out.cols(),
        shape.q_width(),
        "one column per element of the heads"
    );
    assert_eq!(
        lse.len(),
        out.rows() * shape.q_heads,
        "one sum per query and head"
    );
    if lse.is_empty() {
        return;
    }
    let dropout = spec.mask_draw();
    let heads = per_head(out, shape.q_len, shape.head_dim).zip(lse.chunks_mut(shape.q_len));
    let items = heads.enumerate().flat_map(|(i, (out, lse))| {
        let place = (i / shape.q_heads, i % shape.q_heads);
        out.row_blocks(QUERIES)
            .zip(lse.chunks_mut(QUERIES))
            .enumerate()
            .map(move |(block, (out, lse))| Block {
                place,
                first: block * QUERIES,
                out,
                lse,
            })
    });
    let products = Products {
        alone: &threads.alone(),
        rounds: spec.rounds,
    };
    threads.for_each(items, |block| {
        Scratch::with(threads, |scratch| {
            block.compute((spec, products), dropout.as_ref(), [q, k, v], scratch);
        });
    });
}

/// A block of queries of one head.
struct Block<'a, T> {
    place: (usize, usize),
    first: usize,
    out: MatMut<'a, T>,
    lse: &'a mut [T],
}

/// One tile of scores, and the running softmax of each query.
struct Scratch<'s, T> {
    scores: &'s mut [T],
    maximum: [T; QUERIES],
    sum: [T; QUERIES],
}

impl<T: Float> Scratch<'_, T> {
    fn with(threads: &Threads, f: impl FnOnce(&mut Scratch<'_, T>)) {
        threads.with_scratch(QUERIES * KEYS, |scores| {
            f(&mut Scratch {
                scores,
                maximum: [T::NEG_INFINITY; QUERIES],
                sum: [T::ZERO; QUERIES],
            });
        });
    }
}

impl<T: Float> Block<'_, T> {
    fn compute(
        mut self,
        (spec, products): (&AttentionSpec<'_, T>, Products<'_>),
        dropout: Option<&(Mask<T>, AttentionDropout)>,
        [q, k, v]: [Strided<'_, T>; 3],
        scratch: &mut Scratch<'_, T>,
    ) {
        let shape = spec.shape;
        let (dim, (batch, head)) = (shape.head_dim, self.place);
        let queries = self.first..self.first + self.lse.len();
        let kv_col = head / (shape.q_heads / shape.kv_heads) * dim;
        let q = q.block(batch, queries.clone(), head * dim, dim);
        let mut write = Write::Replace;
        for keys in spec.tiles(batch, &queries) {
            let tile_keys = k.block(batch, keys.clone(), kv_col, dim).transposed();
            let scores = MatMut::with_row_stride(scratch.scores, queries.len(), keys.len(), KEYS);
            let scale = T::from_f64(spec.scale);
            products.write(scale, q, tile_keys, Write::Replace, scores);
            T::vectorize(
                #[inline(always)]
                || self.softmax_step(spec, dropout, &keys, scratch),
            );
            let probabilities =
                MatRef::with_row_stride(scratch.scores, queries.len(), keys.len(), KEYS);
            let values = v.block(batch, keys, kv_col, dim);
            products.write(T::ONE, probabilities, values, write, self.out.reborrow());
            write = Write::Add;
        }
        if write == Write::Replace {
            self.out.fill(T::ZERO);
        }
        T::vectorize(
            #[inline(always)]
            || self.finish(scratch),
        );
    }

    /// Turns the scores of a tile into probabilities relative to the new running maximum, and
    /// rescales the running sums to it.
    #[inline(always)]
    fn softmax_step(
        &mut self,
        spec: &AttentionSpec<'_, T>,
        dropout: Option<&(Mask<T>, AttentionDropout)>,
        tile: &Range<usize>,
        scratch: &mut Scratch<'_, T>,
    ) {
        let (batch, head) = self.place;
        for i in 0..self.lse.len() {
            let query = self.first + i;
            let seen = clip(&spec.visible(batch, query), tile);
            let (first_key, past_key) = (tile.start + seen.start, tile.start + seen.end);
            let scores = &mut scratch.scores[i * KEYS..][..padded(tile.len())];
            scores[..seen.start].fill(T::NEG_INFINITY);
            scores[seen.end..].fill(T::NEG_INFINITY);
            let place = (batch, head, query);
            spec.add_terms(place, &(first_key..past_key), &mut scores[seen.clone()]);
            let (old, here) = (scratch.maximum[i], max(scores));
            let new = if here > old { here } else { old };
            let shift = finite_or_zero(new);
            for score in &mut *scores {
                *score = Float::exp(*score - shift);
            }
            let correction = Float::exp(old - shift);
            scratch.sum[i] = scratch.sum[i].fma(correction, sum([scores], |[p]| p));
            scratch.maximum[i] = new;
            if old > T::NEG_INFINITY && new > old {
                for out in self.out.row_mut(i) {
                    *out *= correction;
                }
            }
            if let Some(dropout) = dropout {
                let scores = &mut scores[seen];
                spec.drop_row(dropout, place, first_key, scores);
            }
        }
    }

    /// Divides the outputs by the softmax denominators and stores the logarithms of these.
    #[inline(always)]
    fn finish(&mut self, scratch: &Scratch<'_, T>) {
        for i in 0..self.lse.len() {
            let sum = scratch.sum[i];
            self.lse[i] = finite_or_zero(scratch.maximum[i]) + Float::ln(sum);
            if sum != T::ZERO {
                let inverse = T::ONE / sum;
                for out in self.out.row_mut(i) {
                    *out *= inverse;
                }
            }
        }
    }
}

/// Zero for minus infinity, the maximum of no scores: its difference with itself would be NaN.
#[inline(always)]
pub(super) fn finite_or_zero<T: Float>(x: T) -> T {
    if x == T::NEG_INFINITY { T::ZERO } else { x }
}
