//! Rotary position embedding.
#![expect(
    clippy::inline_always,
    reason = "a body is compiled for an instruction set only where it is inlined into its dispatch"
)]

use super::trig::sin_cos;
use super::{Float, Threads};

/// Elements per unit of parallel work.
const CHUNK: usize = 16 * 1024;

/// Rotation of pairs of elements.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Turn<'a> {
    /// Angle per position for each pair.
    pub inv_freq: &'a [f32],
    /// Factor of the turned elements.
    pub scale: f64,
    /// Whether to turn the other way.
    pub inverse: bool,
}

/// Turns pairs of elements of each head by angles proportional to the position
/// ([`RoPE`](https://arxiv.org/abs/2104.09864), section 3.2.2; the two halves of the rotated part
/// form the pairs, as in Hugging Face weights).
///
/// With `n = inv_freq.len()`, elements d and `d + n` of a head, `d < n`, are turned by
/// `position * inv_freq[d]` and multiplied by `scale`; elements from `2 n` on stay. The gradient
/// with respect to the input is the inverse turn of the gradient of the output, with the same
/// scale.
///
/// # Shapes
///
/// `x`, `y`: `[R, width]` with heads of `head_dim` elements side by side; `positions`: `[R]`, or
/// one sample's `[S]`, repeated.
///
/// # Panics
///
/// If the lengths do not fit.
pub fn rope<T: Float>(
    threads: &Threads,
    head_dim: usize,
    turn: &Turn<'_>,
    positions: &[i64],
    width: usize,
    x: &[T],
    y: &mut [T],
) {
    assert_eq!(x.len(), y.len(), "a turn keeps the length");
    if x.is_empty() {
        return;
    }
    let half = turn.inv_freq.len();
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
        T::vectorize(
            #[inline(always)]
            || {
                let pairs = x.chunks_exact(width).zip(y.chunks_exact_mut(width));
                for (row, (x, y)) in pairs.enumerate() {
                    let position = positions[(chunk * rows + row) % positions.len()] as f32;
                    for (entry, &frequency) in table.iter_mut().zip(turn.inv_freq) {
                        let (sin, cos) = sin_cos(f64::from(position * frequency));
                        let sin = if turn.inverse { -sin } else { sin };
                        *entry = (T::from_f64(sin * turn.scale), T::from_f64(cos * turn.scale));
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
    use super::super::testing::{assert_close, noise, on_any_threads};
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
            let scale = 1.0 + half as f64;
            let turned = |x: &[f32], inverse| {
                let turn = Turn {
                    inv_freq: &inv_freq,
                    scale,
                    inverse,
                };
                on_any_threads(|threads| {
                    let mut y = vec![0.0; x.len()];
                    rope(threads, dim, &turn, &positions, heads * dim, x, &mut y);
                    y
                })
            };
            let y = turned(&x, false);
            let expected: Vec<f64> = (0..x.len())
                .map(|i| {
                    let (d, position) = (i % dim, positions[i / (heads * dim) % len] as f32);
                    let at = |d: usize| f64::from(x[i / dim * dim + d]);
                    if d >= 2 * half {
                        return at(d);
                    }
                    let (sin, cos) = f64::from(position * inv_freq[d % half]).sin_cos();
                    let other = if d < half {
                        -at(d + half)
                    } else {
                        at(d - half)
                    };
                    scale * (at(d) * cos + other * sin)
                })
                .collect();
            assert_close(&y, &expected, 3e-7);
            let turned_back: Vec<f64> = (0..x.len())
                .map(|i| {
                    let squared = if i % dim < 2 * half {
                        scale * scale
                    } else {
                        1.0
                    };
                    squared * f64::from(x[i])
                })
                .collect();
            assert_close(&turned(&y, true), &turned_back, 1e-6);
        }
    }

    #[test]
    fn every_sample_may_have_positions_of_its_own() {
        let x = noise::<f64>(1, 4 * 2);
        let mut y = vec![0.0; 8];
        rope(
            &Threads::one(),
            2,
            &Turn {
                inv_freq: &[1.0],
                scale: 1.0,
                inverse: false,
            },
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
