//! The backward pass.
#![expect(
    clippy::inline_always,
    reason = "a body is compiled for an instruction set only where it is inlined into its dispatch"
)]

use std::ops::Range;

use super::super::gemm::Write;
use super::super::simd::dot;
use super::forward::finite_or_zero;
use super::{
    AttentionDropout, AttentionShape, AttentionSpec, Float, KEYS, Mask, MatMut, MatRef, Products,
    QUERIES, Strided, clip, padded, per_head,
};
use crate::kernels::Threads;

/// Outputs for the gradients of an attention; each is overwritten.
#[derive(Debug)]
pub struct AttentionGrads<'a, T> {
    /// `[B Sq, Hq D]`.
    pub dq: MatMut<'a, T>,
    /// `[B Sk, Hkv D]`.
    pub dk: MatMut<'a, T>,
    /// `[B Sk, Hkv D]`.
    pub dv: MatMut<'a, T>,
    /// `[Hq, Sq, Sk]`: the gradient of the bias, summed over the samples, if requested.
    pub dbias: Option<&'a mut [T]>,
}

/// Computes the gradients of [`attention`](super::attention) with respect to queries, keys and
/// values.
///
/// Probabilities are recomputed tile by tile from `lse`:
/// `dv = p^T dout`, `ds = p (dout v^T - rowsum(dout out))`, `dq = scale ds k`, `dk = scale ds^T q`,
/// `dbias = sum over samples of ds`. The samples of a head then run one after the other.
///
/// # Shapes
///
/// As in [`attention`](super::attention), with `out` and `dout`: `[B, Sq, Hq D]`.
///
/// # Panics
///
/// If the shapes do not fit.
pub fn attention_grad<T: Float>(
    threads: &Threads,
    spec: &AttentionSpec<'_, T>,
    [q, k, v]: [Strided<'_, T>; 3],
    [out, dout]: [Strided<'_, T>; 2],
    lse: &[T],
    grads: AttentionGrads<'_, T>,
) {
    check(spec.shape, lse, &grads);
    let dropout = spec.mask_draw();
    let products = Products {
        alone: &threads.alone(),
        rounds: spec.rounds,
    };
    let inputs = Inputs {
        spec,
        products,
        dropout: dropout.as_ref(),
        q,
        k,
        v,
        out,
        dout,
        lse,
    };
    let AttentionGrads { dq, dk, dv, dbias } = grads;
    let heads = kv_heads(spec.shape, [dq, dk, dv]);
    match dbias.filter(|dbias| !dbias.is_empty()) {
        None => threads.for_each(heads, |head| {
            Scratch::with(threads, |scratch| head.compute(&inputs, &mut [], scratch));
        }),
        Some(dbias) => {
            dbias.fill(T::ZERO);
            threads.for_each(by_bias(spec.shape, heads, dbias), |(samples, dbias)| {
                Scratch::with(threads, |scratch| {
                    for head in samples {
                        head.compute(&inputs, dbias, scratch);
                    }
                });
            });
        }
    }
}

/// Panics where the outputs do not have the shapes of the tensors.
fn check<T: Float>(shape: AttentionShape, lse: &[T], grads: &AttentionGrads<'_, T>) {
    shape.check();
    let expected = [
        (shape.batch * shape.q_len, shape.q_width()),
        (shape.batch * shape.k_len, shape.kv_width()),
        (shape.batch * shape.k_len, shape.kv_width()),
    ];
    let found = [&grads.dq, &grads.dk, &grads.dv].map(|grad| (grad.rows(), grad.cols()));
    assert_eq!(
        found, expected,
        "gradients have the shapes of their tensors"
    );
    assert_eq!(
        lse.len(),
        shape.batch * shape.q_heads * shape.q_len,
        "one sum per query and head"
    );
    if let Some(dbias) = &grads.dbias {
        assert_eq!(
            dbias.len(),
            shape.q_heads * shape.q_len * shape.k_len,
            "one gradient per head, query and key"
        );
    }
}

/// The key-value heads of all samples, each with its part of the gradients.
fn kv_heads<T: Float>(
    shape: AttentionShape,
    [dq, dk, dv]: [MatMut<'_, T>; 3],
) -> impl Iterator<Item = KvHead<'_, T>> {
    let group_width = shape.q_heads / shape.kv_heads * shape.head_dim;
    // Without queries (or keys), `dq` (or `dk` and `dv`) has no blocks.
    let mut dq = per_head(dq, shape.q_len, group_width);
    let mut dk = per_head(dk, shape.k_len, shape.head_dim);
    let mut dv = per_head(dv, shape.k_len, shape.head_dim);
    (0..shape.batch * shape.kv_heads).map(move |i| KvHead {
        batch: i / shape.kv_heads,
        index: i % shape.kv_heads,
        dq: dq.next(),
        dkv: dk.next().zip(dv.next()),
    })
}

/// For each key-value head all samples, with the bias gradients of its query heads.
fn by_bias<'a, T>(
    shape: AttentionShape,
    heads: impl Iterator<Item = KvHead<'a, T>>,
    dbias: &'a mut [T],
) -> Vec<(Vec<KvHead<'a, T>>, &'a mut [T])> {
    let elements = shape.q_heads / shape.kv_heads * shape.q_len * shape.k_len;
    let mut samples: Vec<_> = dbias
        .chunks_mut(elements)
        .map(|dbias| (Vec::with_capacity(shape.batch), dbias))
        .collect();
    for head in heads {
        samples[head.index].0.push(head);
    }
    samples
}

/// Inputs that all heads read.
struct Inputs<'a, T> {
    spec: &'a AttentionSpec<'a, T>,
    products: Products<'a>,
    dropout: Option<&'a (Mask<T>, AttentionDropout)>,
    q: Strided<'a, T>,
    k: Strided<'a, T>,
    v: Strided<'a, T>,
    out: Strided<'a, T>,
    dout: Strided<'a, T>,
    lse: &'a [T],
}

/// A key-value head of a sample, with the query heads that it serves.
struct KvHead<'a, T> {
    batch: usize,
    index: usize,
    dq: Option<MatMut<'a, T>>,
    dkv: Option<(MatMut<'a, T>, MatMut<'a, T>)>,
}

/// One tile of scores, which become probabilities, and of their gradients.
struct Scratch<'s, T> {
    scores: &'s mut [T],
    grads: &'s mut [T],
    dropped: &'s mut [T],
}

impl<T: Float> Scratch<'_, T> {
    fn with(threads: &Threads, f: impl FnOnce(&mut Scratch<'_, T>)) {
        threads.with_scratch((2 * QUERIES + 1) * KEYS, |memory| {
            let (scores, memory) = memory.split_at_mut(QUERIES * KEYS);
            let (grads, dropped) = memory.split_at_mut(QUERIES * KEYS);
            f(&mut Scratch {
                scores,
                grads,
                dropped,
            });
        });
    }
}

impl<T: Float> KvHead<'_, T> {
    /// Adds to `dbias: [heads, Sq, Sk]` of the query heads served, unless it is empty.
    fn compute(self, inputs: &Inputs<'_, T>, dbias: &mut [T], scratch: &mut Scratch<'_, T>) {
        let shape = inputs.spec.shape;
        let Some((mut dk, mut dv)) = self.dkv else {
            // Without keys the output is zero for all queries.
            self.dq.into_iter().for_each(|mut dq| dq.fill(T::ZERO));
            return;
        };
        dk.fill(T::ZERO);
        dv.fill(T::ZERO);
        let Some(dq) = self.dq else { return };
        let first_head = self.index * (shape.q_heads / shape.kv_heads);
        let mut dbias = dbias.chunks_mut((shape.q_len * shape.k_len).max(1));
        for (i, dq) in dq.col_blocks(shape.head_dim).enumerate() {
            let dbias = dbias.next().unwrap_or_default();
            for (block, dq) in dq.row_blocks(QUERIES).enumerate() {
                let first = block * QUERIES;
                let block = Block {
                    batch: self.batch,
                    head: first_head + i,
                    kv_col: self.index * shape.head_dim,
                    queries: first..first + dq.rows(),
                };
                block.compute(inputs, dq, [&mut dk, &mut dv], dbias, scratch);
            }
        }
    }
}

/// A block of queries of one head.
struct Block {
    batch: usize,
    head: usize,
    kv_col: usize,
    queries: Range<usize>,
}

impl Block {
    fn compute<T: Float>(
        &self,
        inputs: &Inputs<'_, T>,
        mut dq: MatMut<'_, T>,
        [dk, dv]: [&mut MatMut<'_, T>; 2],
        dbias: &mut [T],
        scratch: &mut Scratch<'_, T>,
    ) {
        let (spec, products) = (inputs.spec, inputs.products);
        let dim = spec.shape.head_dim;
        let (rows, col) = (self.queries.len(), self.head * dim);
        let q = inputs.q.block(self.batch, self.queries.clone(), col, dim);
        let dout = inputs
            .dout
            .block(self.batch, self.queries.clone(), col, dim);
        let delta = self.delta(inputs);
        let scale = T::from_f64(spec.scale);
        let mut write = Write::Replace;
        for keys in spec.tiles(self.batch, &self.queries) {
            let k = inputs.k.block(self.batch, keys.clone(), self.kv_col, dim);
            let v = inputs.v.block(self.batch, keys.clone(), self.kv_col, dim);
            let scores = MatMut::with_row_stride(scratch.scores, rows, keys.len(), KEYS);
            products.write(scale, q, k.transposed(), Write::Replace, scores);
            let grads = MatMut::with_row_stride(scratch.grads, rows, keys.len(), KEYS);
            products.write(T::ONE, dout, v.transposed(), Write::Replace, grads);
            T::vectorize(
                #[inline(always)]
                || {
                    let factor = if dbias.is_empty() { scale } else { T::ONE };
                    self.softmax_grad(inputs, &keys, &delta, factor, scratch);
                    if !dbias.is_empty() {
                        self.add_and_scale(spec, &keys, dbias, scratch);
                    }
                },
            );
            let p = MatRef::with_row_stride(scratch.scores, rows, keys.len(), KEYS);
            let ds = MatRef::with_row_stride(scratch.grads, rows, keys.len(), KEYS);
            let (_, dk) = dk.reborrow().split_rows(keys.start);
            let (dk, _) = dk.split_rows(keys.len());
            let (_, dv) = dv.reborrow().split_rows(keys.start);
            let (dv, _) = dv.split_rows(keys.len());
            products.write(T::ONE, p.transposed(), dout, Write::Add, dv);
            products.write(T::ONE, ds.transposed(), q, Write::Add, dk);
            products.write(T::ONE, ds, k, write, dq.reborrow());
            write = Write::Add;
        }
        if write == Write::Replace {
            dq.fill(T::ZERO);
        }
    }

    /// `rowsum(dout out)`, which is also `sum over keys of p dp`.
    fn delta<T: Float>(&self, inputs: &Inputs<'_, T>) -> [T; QUERIES] {
        let dim = inputs.spec.shape.head_dim;
        let mut delta = [T::ZERO; QUERIES];
        T::vectorize(
            #[inline(always)]
            || {
                for (delta, query) in delta.iter_mut().zip(self.queries.clone()) {
                    let out = inputs.out.row(self.batch, query, self.head * dim, dim);
                    let dout = inputs.dout.row(self.batch, query, self.head * dim, dim);
                    *delta = dot(out, dout);
                }
            },
        );
        delta
    }

    /// Turns scores into (dropped) probabilities, and the gradients of these into gradients of the
    /// scores, times `scale`.
    #[inline(always)]
    fn softmax_grad<T: Float>(
        &self,
        inputs: &Inputs<'_, T>,
        tile: &Range<usize>,
        delta: &[T; QUERIES],
        scale: T,
        scratch: &mut Scratch<'_, T>,
    ) {
        let (spec, shape) = (inputs.spec, inputs.spec.shape);
        let lse = &inputs.lse[(self.batch * shape.q_heads + self.head) * shape.q_len..];
        for (i, query) in self.queries.clone().enumerate() {
            let seen = clip(&spec.visible(self.batch, query), tile);
            let keys = tile.start + seen.start..tile.start + seen.end;
            let scores = &mut scratch.scores[i * KEYS..][..padded(tile.len())];
            let grads = &mut scratch.grads[i * KEYS..][..padded(tile.len())];
            scores[..seen.start].fill(T::NEG_INFINITY);
            scores[seen.end..].fill(T::NEG_INFINITY);
            grads[..seen.start].fill(T::ZERO);
            grads[seen.end..].fill(T::ZERO);
            let place = (self.batch, self.head, query);
            spec.add_terms(place, &keys, &mut scores[seen.clone()]);
            let (shift, delta) = (finite_or_zero(lse[query]), delta[i]);
            let Some(dropout) = inputs.dropout else {
                for (score, grad) in scores.iter_mut().zip(grads) {
                    *score = Float::exp(*score - shift);
                    *grad = *score * (*grad - delta) * scale;
                }
                continue;
            };
            let factors = &mut scratch.dropped[..scores.len()];
            factors.fill(T::ONE);
            spec.drop_row(dropout, place, keys.start, &mut factors[seen]);
            for ((score, grad), &factor) in scores.iter_mut().zip(grads).zip(&*factors) {
                let p = Float::exp(*score - shift);
                *score = p * factor;
                *grad = p * grad.fma(factor, -delta) * scale;
            }
        }
    }

    /// Adds the gradients of the scores to those of the bias, then scales them.
    #[inline(always)]
    fn add_and_scale<T: Float>(
        &self,
        spec: &AttentionSpec<'_, T>,
        tile: &Range<usize>,
        dbias: &mut [T],
        scratch: &mut Scratch<'_, T>,
    ) {
        let scale = T::from_f64(spec.scale);
        for (i, query) in self.queries.clone().enumerate() {
            let grads = &mut scratch.grads[i * KEYS..][..tile.len()];
            let row = &mut dbias[query * spec.shape.k_len..][tile.clone()];
            for (grad, sum) in grads.iter_mut().zip(row) {
                *sum += *grad;
                *grad *= scale;
            }
        }
    }
}
