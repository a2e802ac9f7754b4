//! Softmax over rows.

use super::simd::{dot, max, sum};
use super::{Float, Threads};

/// Elements per unit of parallel work.
const CHUNK: usize = 16 * 1024;

/// Computes `y = exp(x - max) / sum exp(x - max)` for each row.
///
/// A row of minus infinities gives NaN, as in PyTorch.
///
/// # Shapes
///
/// `x`, `y`: `[R, cols]`.
///
/// # Panics
///
/// If the lengths differ or are not a whole number of rows.
pub fn softmax<T: Float>(threads: &Threads, cols: usize, x: &[T], y: &mut [T]) {
    let chunk = chunk_len(cols, x.len(), y.len());
    threads.for_each(x.chunks(chunk).zip(y.chunks_mut(chunk)), |(x, y)| {
        T::vectorize(
            #[inline(always)]
            || {
                for (x, y) in x.chunks_exact(cols).zip(y.chunks_exact_mut(cols)) {
                    let largest = max(x);
                    for (y, &x) in y.iter_mut().zip(x) {
                        *y = Float::exp(x - largest);
                    }
                    let inverse = T::ONE / sum([y], |[y]| y);
                    for y in y {
                        *y *= inverse;
                    }
                }
            },
        );
    });
}

/// Computes `dx = y (dy - rowsum(y dy))` from the result of [`softmax`].
///
/// # Shapes
///
/// `y`, `dy`, `dx`: `[R, cols]`.
///
/// # Panics
///
/// If the lengths differ or are not a whole number of rows.
pub fn softmax_grad<T: Float>(threads: &Threads, cols: usize, y: &[T], dy: &[T], dx: &mut [T]) {
    let chunk = chunk_len(cols, y.len(), dx.len());
    assert_eq!(y.len(), dy.len(), "one gradient per element");
    let inputs = y.chunks(chunk).zip(dy.chunks(chunk));
    threads.for_each(inputs.zip(dx.chunks_mut(chunk)), |((y, dy), dx)| {
        T::vectorize(
            #[inline(always)]
            || {
                let rows = y.chunks_exact(cols).zip(dy.chunks_exact(cols));
                for (dx, (y, dy)) in dx.chunks_exact_mut(cols).zip(rows) {
                    let along = dot(y, dy);
                    for (dx, (&y, &dy)) in dx.iter_mut().zip(y.iter().zip(dy)) {
                        *dx = y * (dy - along);
                    }
                }
            },
        );
    });
}

/// Whole rows of about [`CHUNK`] elements.
fn chunk_len(cols: usize, x_len: usize, y_len: usize) -> usize {
    assert_eq!(x_len, y_len, "the result has the length of the input");
    assert!(
        x_len == 0 || (cols > 0 && x_len.is_multiple_of(cols)),
        "{x_len} elements are no whole number of rows of {cols}"
    );
    let cols = cols.max(1);
    (CHUNK / cols).max(1) * cols
}

#[cfg(test)]
mod tests {
    use super::super::testing::{assert_close, assert_gradient, noise, on_any_threads, to_f64};
    use super::*;

    fn definition(x: &[f64], cols: usize) -> Vec<f64> {
        x.chunks(cols)
            .flat_map(|row| {
                let total: f64 = row.iter().map(|x| x.exp()).sum();
                row.iter().map(move |x| x.exp() / total).collect::<Vec<_>>()
            })
            .collect()
    }

    #[test]
    fn softmax_and_its_gradient_match_their_definitions() {
        for (rows, cols) in [(1, 1), (3, 5), (200, 1), (70, 300), (0, 4)] {
            let x = noise::<f32>(1, rows * cols);
            let y = on_any_threads(|threads| {
                let mut y = vec![0.0; x.len()];
                softmax(threads, cols, &x, &mut y);
                y
            });
            assert_close(&y, &definition(&to_f64(&x), cols), 1e-6);

            let (x, dy) = (noise::<f64>(2, rows * cols), noise::<f64>(3, rows * cols));
            let y = definition(&x, cols);
            let dx = on_any_threads(|threads| {
                let mut dx = vec![0.0; x.len()];
                softmax_grad(threads, cols, &y, &dy, &mut dx);
                dx
            });
            assert_gradient(&x, &dy, |x| definition(x, cols), &dx);
        }
    }

    #[test]
    fn special_values_stay_in_their_row() {
        let (nan, down) = (f32::NAN, f32::NEG_INFINITY);
        let x = [nan, 1.0, down, down, down, 2.0, 1e30, 0.0];
        let mut y = [0.0; 8];
        softmax(&Threads::one(), 2, &x, &mut y);
        assert!(y[..4].iter().all(|y| y.is_nan()));
        assert_eq!(y[4..], [0.0, 1.0, 1.0, 0.0]);
    }
}
