//! The attention of queries to two sets of keys, from those to each.

use super::{Float, forward::finite_or_zero};
use crate::kernels::Threads;

/// Rows per unit of parallel work.
const ROWS: usize = 64;

/// Joins the attentions of the same queries to two sets of keys, as of
/// [FlashAttention-2](https://arxiv.org/abs/2307.08691), section 2.3.1:
///
/// ```text
/// lse = ln(exp(lse_a) + exp(lse_b))     out = exp(lse_a - lse) out_a + exp(lse_b - lse) out_b
/// ```
///
/// # Shapes
///
/// `out`: `[B, Sq, H D]`, with `[B, H, Sq] = [batch, heads, q_len]` of `lse`; each is overwritten.
///
/// # Panics
///
/// If the lengths do not fit.
pub fn join_attention<T: Float>(
    threads: &Threads,
    (heads, q_len): (usize, usize),
    [a, b]: [(&[T], &[T]); 2],
    (out, lse): (&mut [T], &mut [T]),
) {
    assert!(
        [a.0.len(), b.0.len()] == [out.len(); 2] && [a.1.len(), b.1.len()] == [lse.len(); 2],
        "the results of both attentions have one shape"
    );
    if lse.is_empty() {
        return;
    }
    for ((lse, &a), &b) in lse.iter_mut().zip(a.1).zip(b.1) {
        let most = finite_or_zero(if a > b { a } else { b });
        *lse = most + Float::ln(Float::exp(a - most) + Float::exp(b - most));
    }
    let width = out.len() / (lse.len() / heads);
    let dim = width / heads;
    let lse = &*lse;
    let blocks = out.chunks_mut(ROWS * width.max(1)).enumerate();
    threads.for_each(blocks, |(block, out)| {
        T::vectorize(
            #[inline(always)]
            || {
                for (i, out) in out.chunks_mut(dim.max(1)).enumerate() {
                    let (row, head) = (block * ROWS + i / heads, i % heads);
                    let at = (row / q_len * heads + head) * q_len + row % q_len;
                    let start = row * width + head * dim;
                    let shift = finite_or_zero(lse[at]);
                    let (of_a, of_b) = (Float::exp(a.1[at] - shift), Float::exp(b.1[at] - shift));
                    let rows = a.0[start..].iter().zip(&b.0[start..]);
                    for (out, (&a, &b)) in out.iter_mut().zip(rows) {
                        *out = of_a * a + of_b * b;
                    }
                }
            },
        );
    });
}
