//! Layer norm over the rows of a matrix.
//!
//! `y = (x - mean) rstd w + b` with `rstd = (variance + eps)^(-1/2)`
//! ([paper](https://arxiv.org/abs/1607.06450)).

use super::rows::{add_over_rows, check_lengths, rows_per_chunk, sum_rows};
use super::simd::{dot, sum};
use super::{Float, Threads};

/// Normalises rows to zero mean and unit variance, then scales and shifts.
///
/// # Shapes
///
/// `x`, `y`: `[R, C]`; `weight`, `bias`: `[C]`; `mean`, `rstd`: `[R]`, kept for the gradients.
///
/// # Panics
///
/// If the lengths do not fit.
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
        T::vectorize(
            #[inline(always)]
            || {
                let statistics = mean.iter_mut().zip(&mut *rstd);
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

/// Gradient of [`layer_norm`] with respect to its input.
///
/// With `g = dy w` and the normalised row `n`: `dx = rstd (g - mean(g) - n mean(g n))`.
///
/// # Shapes
///
/// `dy`, `x`, `dx`: `[R, C]`; `weight`: `[C]`; `mean`, `rstd`: `[R]`.
///
/// # Panics
///
/// If the lengths do not fit.
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
        T::vectorize(
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

/// Adds the gradients of [`layer_norm`] with respect to its parameters to `dw` and `db`.
///
/// `dw = sum over rows of dy n` and `db = sum over rows of dy`, in blocks of 64 rows.
///
/// # Shapes
///
/// `dy`, `x`: `[R, C]`; `mean`, `rstd`: `[R]`; `dw`, `db`: `[C]`.
///
/// # Panics
///
/// If the lengths do not fit.
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
