//! The newest position of sequences, as a decode step computes it.
#![expect(
    clippy::inline_always,
    reason = "a body is compiled for an instruction set only where it is inlined into its dispatch"
)]

use super::super::simd::{dot, max, sum};
use super::{AttentionShape, AttentionSpec, Float};
use crate::kernels::Threads;

/// Elements of keys from which on several threads are worth waking.
const MIN_ELEMENTS: usize = 1 << 14;

/// One query with its keys and values.
#[derive(Debug)]
pub struct Newest<'a, T> {
    /// `[Hq D]`
    pub query: &'a [T],
    /// `[Sk, Hkv D]`, the query's own position last.
    pub keys: &'a [T],
    /// `[Sk, Hkv D]`
    pub values: &'a [T],
    /// `[Hq D]`
    pub out: &'a mut [T],
}

/// Computes attention of one query per sequence; the sequences may differ in length.
///
/// A result depends on its own sequence alone.
///
/// # Shapes
///
/// See [`Newest`]. Of the spec, only the heads, the scale, the window and the bias are used. A
/// query sees all keys, as the last position of a causal attention does; where there are none, the
/// result is zero. A row of the bias has an
/// element for each key of the longest sequence; a shorter sequence takes the last ones.
///
/// # Panics
///
/// If the lengths do not fit, or the spec has a mask or dropout.
pub fn attention_newest<T: Float>(
    threads: &Threads,
    spec: &AttentionSpec<'_, T>,
    sequences: Vec<Newest<'_, T>>,
) {
    spec.shape.check();
    assert!(
        spec.mask.is_none() && spec.dropout.is_none(),
        "a decode step hides and drops nothing"
    );
    let AttentionShape {
        q_heads,
        kv_heads,
        head_dim,
        ..
    } = spec.shape;
    let width = (q_heads / kv_heads * head_dim).max(1);
    let elements: usize = sequences.iter().map(|newest| newest.keys.len()).sum();
    let heads = sequences.into_iter().flat_map(|newest| {
        let Newest {
            query,
            keys,
            values,
            out,
        } = newest;
        assert_eq!(keys.len(), values.len(), "a value for each key");
        assert_eq!(query.len(), out.len(), "a result for each query");
        let shared = query.chunks_exact(width).zip(out.chunks_exact_mut(width));
        shared.enumerate().map(move |(head, (query, out))| Head {
            first: head * (q_heads / kv_heads),
            column: head * head_dim,
            query,
            keys,
            values,
            out,
        })
    });
    let compute = |scores: &mut Vec<T>, mut head: Head<'_, T>| {
        T::vectorize(
            #[inline(always)]
            || head.compute(spec, scores),
        );
    };
    if elements < MIN_ELEMENTS {
        let mut scores = Vec::new();
        heads.for_each(|head| compute(&mut scores, head));
    } else {
        threads.for_each_with(heads, Vec::new, compute);
    }
}

/// The query heads that share a key head.
struct Head<'a, T> {
    /// The first of them.
    first: usize,
    /// First column of the key head.
    column: usize,
    query: &'a [T],
    keys: &'a [T],
    values: &'a [T],
    out: &'a mut [T],
}

impl<T: Float> Head<'_, T> {
    #[inline(always)]
    fn compute(&mut self, spec: &AttentionSpec<'_, T>, scores: &mut Vec<T>) {
        let (dim, width) = (spec.shape.head_dim, spec.shape.kv_width());
        let positions = self.keys.len() / width;
        let first = positions - spec.window.unwrap_or(positions).min(positions);
        let columns = self.column..self.column + dim;
        let (keys, values) = (&self.keys[first * width..], &self.values[first * width..]);
        let scale = T::from_f64(spec.scale);
        let shared = self
            .query
            .chunks_exact(dim)
            .zip(self.out.chunks_exact_mut(dim));
        for (head, (query, out)) in (self.first..).zip(shared) {
            scores.clear();
            for key in keys.chunks_exact(width) {
                scores.push(scale * dot(query, &key[columns.clone()]));
            }
            if let Some(bias) = &spec.bias {
                let longest = bias.row_stride;
                let row = bias.row(0, head, 0, longest - scores.len()..longest);
                for (score, &bias) in scores.iter_mut().zip(row) {
                    *score += bias;
                }
            }
            let largest = max(scores);
            for score in &mut *scores {
                *score = Float::exp(*score - largest);
            }
            let total = sum([&scores[..]], |[p]| p);
            // Without keys, the result is zero.
            let inverse = if total == T::ZERO {
                T::ZERO
            } else {
                T::ONE / total
            };
            out.fill(T::ZERO);
            for (&p, value) in scores.iter().zip(values.chunks_exact(width)) {
                for (out, &value) in out.iter_mut().zip(&value[columns.clone()]) {
                    *out = p.fma(value, *out);
                }
            }
            for out in out {
                *out *= inverse;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::super::testing::{assert_close, noise, on_any_threads, to_f64};
    use super::super::{AttentionMask, MatMut, Strided, attention};
    use super::*;

    #[test]
    fn the_newest_position_of_each_sequence_is_the_last_one_of_blockwise_attention() {
        // The longer ones occupy several threads.
        for (lengths, (q_heads, kv_heads), dim, window, biased) in [
            (&[1, 9, 200][..], (6, 3), 24, None, false),
            (&[300, 5, 290, 70], (4, 1), 64, None, true),
            (&[33, 40], (2, 2), 5, Some(7), true),
            // An encoder that has read nothing.
            (&[0, 3], (2, 1), 4, None, false),
        ] {
            // The last keys of the longest sequence are those of the others.
            let longest = lengths.iter().copied().max().unwrap_or(0);
            let bias: Vec<f32> = noise(5, q_heads * longest);
            let bias_of = |len: usize| AttentionMask {
                data: &bias[longest - len..],
                batch_stride: 0,
                head_stride: longest,
                row_stride: longest,
            };
            let shape = |k_len| AttentionShape {
                batch: 1,
                q_len: 1,
                k_len,
                q_heads,
                kv_heads,
                head_dim: dim,
            };
            let spec = |k_len| AttentionSpec {
                window,
                bias: biased.then(|| bias_of(k_len)),
                ..AttentionSpec::<f32>::causal(shape(k_len))
            };
            let operands: Vec<[Vec<f32>; 3]> = (7..)
                .zip(lengths)
                .map(|(seed, &len)| {
                    let (q, kv) = (q_heads * dim, len * kv_heads * dim);
                    [(0, q), (100, kv), (200, kv)].map(|(more, len)| noise(seed + more, len))
                })
                .collect();
            let width = q_heads * dim;
            let found = on_any_threads(|threads| {
                let mut out = vec![f32::NAN; lengths.len() * width];
                let sequences = operands.iter().zip(out.chunks_exact_mut(width));
                let sequences = sequences.map(|([query, keys, values], out)| Newest {
                    query,
                    keys,
                    values,
                    out,
                });
                attention_newest(threads, &spec(longest), sequences.collect());
                out
            });
            for (([q, k, v], &len), found) in
                operands.iter().zip(lengths).zip(found.chunks_exact(width))
            {
                let (mut out, mut lse) = (vec![0.0; width], vec![0.0; q_heads]);
                let kv = |x| Strided::contiguous(x, len, kv_heads * dim);
                let to = MatMut::new(&mut out, 1, width);
                let q = Strided::contiguous(q, 1, width);
                attention(&Threads::one(), &spec(len), q, kv(k), kv(v), to, &mut lse);
                assert_close(found, &to_f64(&out), 1e-5);
            }
        }
    }
}
