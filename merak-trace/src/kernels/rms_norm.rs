//! RMS norm over the rows of a matrix.
//!
//! `y = x rstd w` with `rstd = (mean of squares + eps)^(-1/2)`
//! ([paper](https://arxiv.org/abs/1910.07467)).

use super::rows::{add_over_rows, check_lengths, rows_per_chunk};
use super::simd::{dot, sum};
use super::{Float, Threads};

/// Divides rows by the root of their mean square, then scales.
///
/// # Shapes
///
/// `x`, `y`: `[R, C]`; `weight`: `[C]`; `rstd`: `[R]`, kept for the gradients.
///
/// # Panics
///
/// If the lengths do not fit.
pub fn rms_norm<T: Float>(
    threads: &Threads,
    x: &[T],
    weight: &[T],
    eps: f64,
    y: &mut [T],
    rstd: &mut [T],
) {
    let cols = weight.len();
    check_lengths(cols, rstd.len(), [x.len(), y.len()]);
    if cols == 0 {
        return;
    }
    let (eps, scale) = (T::from_f64(eps), T::from_f64(1.0 / cols as f64));
    let rows = rows_per_chunk(cols);
    let items = x.chunks(rows * cols).zip(y.chunks_mut(rows * cols));
    threads.for_each(items.zip(rstd.chunks_mut(rows)), |((x, y), rstd)| {
        T::vectorize(
            #[inline(always)]
            || {
                let row_pairs = x.chunks_exact(cols).zip(y.chunks_exact_mut(cols));
                for ((x, y), rstd) in row_pairs.zip(&mut *rstd) {
                    *rstd = T::ONE / dot(x, x).fma(scale, eps).sqrt();
                    for ((y, &x), &w) in y.iter_mut().zip(x).zip(weight) {
                        *y = x * *rstd * w;
                    }
                }
            },
        );
    });
}

/// Gradient of [`rms_norm`] with respect to its input.
///
/// With `g = dy w` and the normalised row `n`: `dx = rstd (g - n mean(g n))`.
///
/// # Shapes
///
/// `dy`, `x`, `dx`: `[R, C]`; `weight`: `[C]`; `rstd`: `[R]`.
///
/// # Panics
///
/// If the lengths do not fit.
pub fn rms_norm_grad_input<T: Float>(
    threads: &Threads,
    dy: &[T],
    x: &[T],
    weight: &[T],
    rstd: &[T],
    dx: &mut [T],
) {
    let cols = weight.len();
    check_lengths(cols, rstd.len(), [dy.len(), x.len(), dx.len()]);
    if cols == 0 {
        return;
    }
    let scale = T::from_f64(1.0 / cols as f64);
    let rows = rows_per_chunk(cols);
    let inputs = dy.chunks(rows * cols).zip(x.chunks(rows * cols));
    let items = dx
        .chunks_mut(rows * cols)
        .zip(inputs.zip(rstd.chunks(rows)));
    threads.for_each(items, |(dx, ((dy, x), rstd))| {
        T::vectorize(
            #[inline(always)]
            || {
                let rows = dy.chunks_exact(cols).zip(x.chunks_exact(cols)).zip(rstd);
                for (dx, ((dy, x), &rstd)) in dx.chunks_exact_mut(cols).zip(rows) {
                    let along_x = sum([dy, weight, x], |[dy, w, x]| dy * w * x);
                    let slope = along_x * rstd * rstd * scale;
                    let row = dy.iter().zip(x).zip(weight);
                    for (dx, ((&dy, &x), &w)) in dx.iter_mut().zip(row) {
                        *dx = rstd * (dy * w - x * slope);
                    }
                }
            },
        );
    });
}

/// Adds the gradient of [`rms_norm`] with respect to its weight, `sum over rows of dy n`, to `dw`.
///
/// # Shapes
///
/// `dy`, `x`: `[R, C]`; `rstd`: `[R]`; `dw`: `[C]`.
///
/// # Panics
///
/// If the lengths do not fit.
pub fn rms_norm_grad_params<T: Float>(
    threads: &Threads,
    dy: &[T],
    x: &[T],
    rstd: &[T],
    dw: &mut [T],
) {
    let cols = dw.len();
    check_lengths(cols, rstd.len(), [dy.len(), x.len()]);
    add_over_rows(threads, rstd.len(), dw, |row, from, partial| {
        let range = row * cols + from..row * cols + from + partial.len();
        let rstd = rstd[row];
        let elements = dy[range.clone()].iter().zip(&x[range]);
        for (partial, (&dy, &x)) in partial.iter_mut().zip(elements) {
            *partial = (x * rstd).fma(dy, *partial);
        }
    });
}

#[cfg(test)]
mod tests {
    use super::super::testing::{assert_close, assert_gradient, noise, on_any_threads, to_f64};
    use super::*;

    #[test]
    fn parameter_gradients_are_added_to_what_is_there() {
        let mut dw = [10.0_f64, 20.0];
        let (dy, x) = ([1.0, 2.0], [3.0, 4.0]);
        rms_norm_grad_params(&Threads::one(), &dy, &x, &[2.0], &mut dw);
        assert_eq!(dw, [16.0, 36.0]);
    }

    fn rms_norm_f64(x: &[f64], w: &[f64]) -> Vec<f64> {
        let mut y = vec![0.0; x.len()];
        rms_norm(
            &Threads::one(),
            x,
            w,
            1e-2,
            &mut y,
            &mut vec![0.0; x.len() / w.len()],
        );
        y
    }

    #[test]
    fn rms_norm_matches_its_definition_and_finite_differences() {
        for (rows, cols) in [(1, 1), (5, 67), (131, 300)] {
            let x = noise::<f32>(1, rows * cols);
            let w = noise::<f32>(2, cols);
            let y = on_any_threads(|threads| {
                let mut y = vec![0.0; x.len()];
                rms_norm(threads, &x, &w, 1e-2, &mut y, &mut vec![0.0; rows]);
                y
            });
            let (x, w) = (to_f64(&x), to_f64(&w));
            let expected: Vec<f64> = (0..rows * cols)
                .map(|i| {
                    let row = &x[i / cols * cols..][..cols];
                    let square = row.iter().map(|x| x * x).sum::<f64>() / cols as f64;
                    x[i] / (square + 1e-2).sqrt() * w[i % cols]
                })
                .collect();
            assert_close(&y, &expected, 1e-6);

            let dy = noise::<f64>(3, x.len());
            let (mut y, mut rstd) = (vec![0.0; x.len()], vec![0.0; rows]);
            rms_norm(&Threads::one(), &x, &w, 1e-2, &mut y, &mut rstd);
            let both = on_any_threads(|threads| {
                let (mut dx, mut dw) = (vec![0.0; x.len()], vec![0.0; cols]);
                rms_norm_grad_input(threads, &dy, &x, &w, &rstd, &mut dx);
                rms_norm_grad_params(threads, &dy, &x, &rstd, &mut dw);
                [dx, dw].concat()
            });
            let (dx, dw) = both.split_at(x.len());
            assert_gradient(&x, &dy, |x| rms_norm_f64(x, &w), dx);
            assert_gradient(&w, &dy, |w| rms_norm_f64(&x, w), dw);
        }
    }
}
