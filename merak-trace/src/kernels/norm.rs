//! Layer norm and RMS norm over the rows of a matrix, `[R, C]`.
//!
//! [Layer norm](https://arxiv.org/abs/1607.06450): `y = (x - mean) rstd w + b`;
//! [RMS norm](https://arxiv.org/abs/1910.07467): `y = x rstd w`, with
//! `rstd = (mean of squares + eps)^(-1/2)`.

use super::simd::{dot, sum, vectorize};
use super::{Float, Threads};

/// Elements per unit of parallel work.
const CHUNK: usize = 16 * 1024;
/// Columns per unit of the parameters' gradients, and rows per partial sum.
const COLS: usize = 256;
const ROWS: usize = 64;

/// Normalises rows to zero mean and unit variance, then scales and shifts.
///
/// # Shapes
///
/// `x`, `y`: `[R, C]`; `weight`, `bias`: `[C]`; `mean`, `rstd`: `[R]`, kept for the gradients.
///
/// # Panics
///
/// The lengths do not fit.
#[expect(clippy::too_many_arguments, reason = "three inputs, three outputs")]
pub fn layer_norm<T: Float>(
    threads: &Threads,
    x: &[T],
    weight: &[T],
    bias: Option<&[T]>,
    eps: f64,
    y: &mut [T],
    mean: &mut [T],
    rstd: &mut [T],
) {
    let cols = weight.len();
    check_lengths(cols, rstd.len(), [x.len(), y.len()]);
    assert_eq!(mean.len(), rstd.len(), "one mean per row");
    assert!(
        bias.is_none_or(|bias| bias.len() == cols),
        "bias per column"
    );
    if cols == 0 {
        return;
    }
    let (eps, scale) = (T::from_f64(eps), T::from_f64(1.0 / cols as f64));
    let rows = rows_per_chunk(cols);
    let outputs = y.chunks_mut(rows * cols).zip(mean.chunks_mut(rows));
    let items = x
        .chunks(rows * cols)
        .zip(outputs.zip(rstd.chunks_mut(rows)));
    threads.for_each(items, |(x, ((y, mean), rstd))| {
        vectorize(
            #[inline(always)]
            || {
                let statistics = mean.iter_mut().zip(rstd);
                let row_pairs = x.chunks_exact(cols).zip(y.chunks_exact_mut(cols));
                for ((x, y), (mean, rstd)) in row_pairs.zip(statistics) {
                    let center = sum([x], |[x]| x) * scale;
                    let variance = sum([x], |[x]| (x - center) * (x - center)) * scale;
                    let inverse = T::ONE / (variance + eps).sqrt();
                    (*mean, *rstd) = (center, inverse);
                    let normalised = x.iter().map(|&x| (x - center) * inverse);
                    match bias {
                        Some(bias) => {
                            let parameters = weight.iter().zip(bias);
                            for ((y, x), (&w, &b)) in y.iter_mut().zip(normalised).zip(parameters) {
                                *y = x.fma(w, b);
                            }
                        }
                        None => {
                            for ((y, x), &w) in y.iter_mut().zip(normalised).zip(weight) {
                                *y = x * w;
                            }
                        }
                    }
                }
            },
        );
    });
}

/// Gradient of [`layer_norm`] by its input.
///
/// With `g = dy w` and the normalised row `n`: `dx = rstd (g - mean(g) - n mean(g n))`.
///
/// # Shapes
///
/// `dy`, `x`, `dx`: `[R, C]`; `weight`: `[C]`; `mean`, `rstd`: `[R]`.
///
/// # Panics
///
/// The lengths do not fit.
pub fn layer_norm_grad_input<T: Float>(
    threads: &Threads,
    dy: &[T],
    x: &[T],
    weight: &[T],
    mean: &[T],
    rstd: &[T],
    dx: &mut [T],
) {
    assert_eq!(mean.len(), rstd.len(), "one mean per row");
    let cols = weight.len();
    check_lengths(cols, rstd.len(), [dy.len(), x.len(), dx.len()]);
    if cols == 0 {
        return;
    }
    let scale = T::from_f64(1.0 / cols as f64);
    let rows = rows_per_chunk(cols);
    let inputs = dy.chunks(rows * cols).zip(x.chunks(rows * cols));
    let statistics = mean.chunks(rows).zip(rstd.chunks(rows));
    let items = dx.chunks_mut(rows * cols).zip(inputs.zip(statistics));
    threads.for_each(items, |(dx, ((dy, x), (mean, rstd)))| {
        vectorize(
            #[inline(always)]
            || {
                let row_pairs = dy.chunks_exact(cols).zip(x.chunks_exact(cols));
                let rows = row_pairs.zip(mean.iter().zip(rstd));
                for (dx, ((dy, x), (&mean, &rstd))) in dx.chunks_exact_mut(cols).zip(rows) {
                    let along_one = dot(dy, weight) * scale;
                    let along_x = sum([dy, weight, x], |[dy, w, x]| dy * w * (x - mean));
                    let slope = along_x * rstd * scale;
                    let row = dy.iter().zip(x).zip(weight);
                    for (dx, ((&dy, &x), &w)) in dx.iter_mut().zip(row) {
                        *dx = rstd * (dy * w - along_one - (x - mean) * rstd * slope);
                    }
                }
            },
        );
    });
}

/// Adds the gradients of [`layer_norm`] by its parameters to `dw` and `db`.
///
/// `dw = sum over rows of dy n` and `db = sum over rows of dy`, in blocks of 64 rows.
///
/// # Shapes
///
/// `dy`, `x`: `[R, C]`; `mean`, `rstd`: `[R]`; `dw`, `db`: `[C]`.
///
/// # Panics
///
/// The lengths do not fit.
pub fn layer_norm_grad_params<T: Float>(
    threads: &Threads,
    dy: &[T],
    x: &[T],
    mean: &[T],
    rstd: &[T],
    dw: &mut [T],
    db: Option<&mut [T]>,
) {
    let cols = dw.len();
    check_lengths(cols, rstd.len(), [dy.len(), x.len()]);
    assert_eq!(mean.len(), rstd.len(), "one mean per row");
    if let Some(db) = db {
        assert_eq!(db.len(), cols, "one bias per column");
        sum_rows(threads, dy, db);
    }
    add_over_rows(threads, rstd.len(), dw, |row, from, partial| {
        let range = row * cols + from..row * cols + from + partial.len();
        let (mean, rstd) = (mean[row], rstd[row]);
        let elements = dy[range.clone()].iter().zip(&x[range]);
        for (partial, (&dy, &x)) in partial.iter_mut().zip(elements) {
            *partial = ((x - mean) * rstd).fma(dy, *partial);
        }
    });
}

/// Divides rows by the root of their mean square, then scales.
///
/// # Shapes
///
/// `x`, `y`: `[R, C]`; `weight`: `[C]`; `rstd`: `[R]`, kept for the gradients.
///
/// # Panics
///
/// The lengths do not fit.
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
        vectorize(
            #[inline(always)]
            || {
                let row_pairs = x.chunks_exact(cols).zip(y.chunks_exact_mut(cols));
                for ((x, y), rstd) in row_pairs.zip(rstd) {
                    *rstd = T::ONE / dot(x, x).fma(scale, eps).sqrt();
                    for ((y, &x), &w) in y.iter_mut().zip(x).zip(weight) {
                        *y = x * *rstd * w;
                    }
                }
            },
        );
    });
}

/// Gradient of [`rms_norm`] by its input.
///
/// With `g = dy w` and the normalised row `n`: `dx = rstd (g - n mean(g n))`.
///
/// # Shapes
///
/// `dy`, `x`, `dx`: `[R, C]`; `weight`: `[C]`; `rstd`: `[R]`.
///
/// # Panics
///
/// The lengths do not fit.
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
        vectorize(
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

/// Adds the gradient of [`rms_norm`] by its weight, `sum over rows of dy n`, to `dw`.
///
/// # Shapes
///
/// `dy`, `x`: `[R, C]`; `rstd`: `[R]`; `dw`: `[C]`.
///
/// # Panics
///
/// The lengths do not fit.
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

/// Adds the sum over the rows of a matrix to `out`: a bias gradient.
///
/// # Shapes
///
/// `x`: `[R, C]`; `out`: `[C]`.
///
/// # Panics
///
/// `x` holds no whole number of rows.
pub fn sum_rows<T: Float>(threads: &Threads, x: &[T], out: &mut [T]) {
    let cols = out.len();
    if cols == 0 {
        return;
    }
    assert!(x.len().is_multiple_of(cols), "rows of {cols} elements");
    add_over_rows(threads, x.len() / cols, out, |row, from, partial| {
        let start = row * cols + from;
        for (partial, &x) in partial.iter_mut().zip(&x[start..]) {
            *partial += x;
        }
    });
}

/// Adds to `out` what `add_row(row, first column, partial)` adds for each row. Blocks of columns are
/// the unit of parallel work; each block of rows has a partial sum of its own.
fn add_over_rows<T: Float>(
    threads: &Threads,
    num_rows: usize,
    out: &mut [T],
    add_row: impl Fn(usize, usize, &mut [T]) + Send + Sync,
) {
    let blocks = out.chunks_mut(COLS).enumerate();
    threads.for_each(blocks, |(block, out)| {
        vectorize(
            #[inline(always)]
            || {
                let mut partial = [T::ZERO; COLS];
                for first in (0..num_rows).step_by(ROWS) {
                    let partial = &mut partial[..out.len()];
                    partial.fill(T::ZERO);
                    for row in first..num_rows.min(first + ROWS) {
                        add_row(row, block * COLS, partial);
                    }
                    for (out, &partial) in out.iter_mut().zip(&*partial) {
                        *out += partial;
                    }
                }
            },
        );
    });
}

fn rows_per_chunk(cols: usize) -> usize {
    (CHUNK / cols).max(1)
}

fn check_lengths<const N: usize>(cols: usize, rows: usize, lengths: [usize; N]) {
    for len in lengths {
        assert_eq!(len, rows * cols, "{rows} rows of {cols} elements");
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::{assert_close, assert_gradient, noise, on_any_threads, to_f64};
    use super::*;

    const SHAPES: [(usize, usize); 6] = [(1, 1), (3, 5), (1, 130), (200, 1), (131, 300), (0, 4)];

    fn layer_norm_f64(x: &[f64], w: &[f64], b: &[f64], eps: f64) -> Vec<f64> {
        let mut y = vec![0.0; x.len()];
        let rows = x.len() / w.len();
        let (mut mean, mut rstd) = (vec![0.0; rows], vec![0.0; rows]);
        let threads = Threads::one();
        layer_norm(&threads, x, w, Some(b), eps, &mut y, &mut mean, &mut rstd);
        y
    }

    #[test]
    fn layer_norm_matches_its_definition() {
        for (rows, cols) in SHAPES {
            let x = noise::<f32>(1, rows * cols);
            let (w, b) = (noise::<f32>(2, cols), noise::<f32>(3, cols));
            let y = on_any_threads(|threads| {
                let mut y = vec![0.0; x.len()];
                let (mut mean, mut rstd) = (vec![0.0; rows], vec![0.0; rows]);
                let bias = Some(&b[..]);
                layer_norm(threads, &x, &w, bias, 1e-5, &mut y, &mut mean, &mut rstd);
                y
            });
            let expected: Vec<f64> = to_f64(&x)
                .chunks(cols)
                .flat_map(|row| {
                    let mean = row.iter().sum::<f64>() / cols as f64;
                    let var = row.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / cols as f64;
                    let (w, b) = (to_f64(&w), to_f64(&b));
                    row.iter()
                        .enumerate()
                        .map(move |(i, x)| (x - mean) / (var + 1e-5).sqrt() * w[i] + b[i])
                        .collect::<Vec<_>>()
                })
                .collect();
            assert_close(&y, &expected, 3e-6);
        }
    }

    #[test]
    fn layer_norm_gradients_match_finite_differences() {
        for (rows, cols) in [(1, 7), (9, 70), (130, 3)] {
            let x = noise::<f64>(4, rows * cols);
            let (w, b) = (noise::<f64>(5, cols), noise::<f64>(6, cols));
            let dy = noise::<f64>(7, rows * cols);
            let (mut y, mut mean) = (vec![0.0; x.len()], vec![0.0; rows]);
            let mut rstd = mean.clone();
            let one = Threads::one();
            layer_norm(&one, &x, &w, Some(&b), 1e-2, &mut y, &mut mean, &mut rstd);
            let dx = on_any_threads(|threads| {
                let mut dx = vec![0.0; x.len()];
                layer_norm_grad_input(threads, &dy, &x, &w, &mean, &rstd, &mut dx);
                dx
            });
            assert_gradient(&x, &dy, |x| layer_norm_f64(x, &w, &b, 1e-2), &dx);
            let both = on_any_threads(|threads| {
                let (mut dw, mut db) = (vec![0.0; cols], vec![0.0; cols]);
                let bias = Some(&mut db[..]);
                layer_norm_grad_params(threads, &dy, &x, &mean, &rstd, &mut dw, bias);
                [dw, db].concat()
            });
            assert_gradient(&w, &dy, |w| layer_norm_f64(&x, w, &b, 1e-2), &both[..cols]);
            assert_gradient(&b, &dy, |b| layer_norm_f64(&x, &w, b, 1e-2), &both[cols..]);
        }
    }

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

    #[test]
    fn a_nan_spoils_its_row_alone() {
        let mut x = noise::<f32>(1, 30);
        x[3] = f32::NAN;
        let (mut y, mut mean, mut rstd) = ([0.0; 30], [0.0; 3], [0.0; 3]);
        let w = [1.0; 10];
        layer_norm(
            &Threads::one(),
            &x,
            &w,
            None,
            1e-5,
            &mut y,
            &mut mean,
            &mut rstd,
        );
        assert!(y[..10].iter().all(|y| y.is_nan()));
        assert!(y[10..].iter().all(|y| y.is_finite()));
    }
}
