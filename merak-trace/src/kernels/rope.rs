//! Rotary position embedding.
#![expect(
    clippy::inline_always,
    reason = "a body is compiled for an instruction set only where it is inlined into its dispatch"
)]

use super::simd::vectorize;
use super::trig::sin_cos;
use super::{Float, Threads};

/// Elements per unit of parallel work.
const CHUNK: usize = 16 * 1024;

/// Turns pairs of elements of each head by angles proportional to the position
/// ([`RoPE`](https://arxiv.org/abs/2104.09864), section 3.2.2, with the two halves of the rotated part
/// as pairs, as Hugging Face stores weights).
///
/// With `n = inv_freq.len()`, elements d and `d + n` of a head, `d < n`, are turned by
/// `position * inv_freq[d]`; elements from `2 n` on stay. `inverse` turns back: the gradient by the
/// input is the inverse turn of the gradient by the output.
///
/// # Shapes
///
/// `x`, `y`: `[R, width]` with heads of `head_dim` elements side by side; `positions`: `[R]`, or one
/// sample's `[S]`, repeated.
///
/// # Panics
///
/// The lengths do not fit.
#[expect(
    clippy::too_many_arguments,
    reason = "a table of frequencies and a tensor with its shape"
)]
pub fn rope<T: Float>(
    threads: &Threads,
    head_dim: usize,
    inv_freq: &[f32],
    inverse: bool,
    positions: &[i64],
    width: usize,
    x: &[T],
    y: &mut [T],
) {
    assert_eq!(x.len(), y.len(), "a turn keeps the length");
    if x.is_empty() {
        return;
    }
    let half = inv_freq.len();
    assert!(
        2 * half <= head_dim && width.is_multiple_of(head_dim),
        "{half} pairs in heads of {head_dim} in rows of {width}"
    );
    assert!(
        !positions.is_empty() && x.len().is_multiple_of(width * positions.len()),
        "{} elements in rows of {width} for {} positions",
        x.len(),
        positions.len()
    );
    let rows = (CHUNK / width).max(1);
    let chunks = x.chunks(rows * width).zip(y.chunks_mut(rows * width));
    let table = || vec![(T::ZERO, T::ZERO); half];
    threads.for_each_with(chunks.enumerate(), table, |table, (chunk, (x, y))| {
        vectorize(
            #[inline(always)]
            || {
                let pairs = x.chunks_exact(width).zip(y.chunks_exact_mut(width));
                for (row, (x, y)) in pairs.enumerate() {
                    let position = positions[(chunk * rows + row) % positions.len()] as f32;
                    for (turn, &frequency) in table.iter_mut().zip(inv_freq) {
                        let (sin, cos) = sin_cos(f64::from(position * frequency));
                        let sin = if inverse { -sin } else { sin };
                        *turn = (T::from_f64(sin), T::from_f64(cos));
                    }
                    let heads = x.chunks_exact(head_dim).zip(y.chunks_exact_mut(head_dim));
                    for (x, y) in heads {
                        turn_head(table, x, y);
                    }
                }
            },
        );
    });
}

#[inline(always)]
fn turn_head<T: Float>(table: &[(T, T)], x: &[T], y: &mut [T]) {
    let half = table.len();
    let ((x_first, x_second), (y_first, y_second)) = (x.split_at(half), y.split_at_mut(half));
    y_second[half..].copy_from_slice(&x_second[half..]);
    let inputs = x_first.iter().zip(x_second);
    let outputs = y_first.iter_mut().zip(y_second);
    for ((&(sin, cos), (&a, &b)), (y_a, y_b)) in table.iter().zip(inputs).zip(outputs) {
        *y_a = a.fma(cos, -(b * sin));
        *y_b = b.fma(cos, a * sin);
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::{assert_close, noise, on_any_threads, to_f64};
    use super::*;

    fn frequencies(half: usize) -> Vec<f32> {
        (0..half)
            .map(|i| 10_000_f32.powf(-(i as f32) / half.max(1) as f32))
            .collect()
    }

    #[test]
    fn pairs_are_turned_by_their_angle_and_back() {
        for (samples, len, heads, dim, half) in [
            (1, 1, 1, 2, 1),
            (2, 7, 3, 6, 3),
            (3, 300, 2, 10, 3),
            (1, 4, 2, 3, 0),
        ] {
            let x = noise::<f32>(1, samples * len * heads * dim);
            let inv_freq = frequencies(half);
            let positions: Vec<i64> = (0..len as i64).map(|i| 5 * i).collect();
            let turn = |x: &[f32], inverse| {
                on_any_threads(|threads| {
                    let mut y = vec![0.0; x.len()];
                    rope(
                        threads,
                        dim,
                        &inv_freq,
                        inverse,
                        &positions,
                        heads * dim,
                        x,
                        &mut y,
                    );
                    y
                })
            };
            let y = turn(&x, false);
            let expected: Vec<f64> = (0..x.len())
                .map(|i| {
                    let (d, position) = (i % dim, positions[i / (heads * dim) % len] as f32);
                    let at = |d: usize| f64::from(x[i / dim * dim + d]);
                    if d >= 2 * half {
                        return at(d);
                    }
                    let (sin, cos) = f64::from(position * inv_freq[d % half]).sin_cos();
                    if d < half {
                        at(d) * cos - at(d + half) * sin
                    } else {
                        at(d) * cos + at(d - half) * sin
                    }
                })
                .collect();
            assert_close(&y, &expected, 3e-7);
            assert_close(&turn(&y, true), &to_f64(&x), 1e-6);
        }
    }

    #[test]
    fn every_sample_may_have_positions_of_its_own() {
        let x = noise::<f64>(1, 4 * 2);
        let mut y = vec![0.0; 8];
        rope(
            &Threads::one(),
            2,
            &[1.0],
            false,
            &[0, 1, 0, 2],
            2,
            &x,
            &mut y,
        );
        assert_eq!((&y[..2], &y[4..6]), (&x[..2], &x[4..6]));
        let (sin, cos) = 2_f64.sin_cos();
        assert_close(
            &y[6..],
            &[x[6] * cos - x[7] * sin, x[7] * cos + x[6] * sin],
            1e-14,
        );
    }
}
