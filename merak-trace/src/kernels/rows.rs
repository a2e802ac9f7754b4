//! Helpers of kernels over the rows of a matrix, and the sum over rows.

use super::{Float, Threads};

/// Elements per unit of parallel work.
const CHUNK: usize = 16 * 1024;
/// Columns per unit of a sum over rows, and rows per partial sum.
const COLS: usize = 256;
const ROWS: usize = 64;

/// Adds the sum over the rows of a matrix to `out`: a bias gradient.
///
/// # Shapes
///
/// `x`: `[R, C]`; `out`: `[C]`.
///
/// # Panics
///
/// If the length of `x` is not a whole number of rows.
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

/// Adds to `out` what `add_row(row, first column, partial)` adds for each row. Blocks of columns
/// are the unit of parallel work; each block of rows has a partial sum of its own.
pub(super) fn add_over_rows<T: Float>(
    threads: &Threads,
    num_rows: usize,
    out: &mut [T],
    add_row: impl Fn(usize, usize, &mut [T]) + Send + Sync,
) {
    let blocks = out.chunks_mut(COLS).enumerate();
    threads.for_each(blocks, |(block, out)| {
        T::vectorize(
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

pub(super) fn rows_per_chunk(cols: usize) -> usize {
    (CHUNK / cols).max(1)
}

pub(super) fn check_lengths<const N: usize>(cols: usize, rows: usize, lengths: [usize; N]) {
    for len in lengths {
        assert_eq!(len, rows * cols, "{rows} rows of {cols} elements");
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::{assert_close, noise, on_any_threads, to_f64};
    use super::*;

    #[test]
    fn rows_are_summed_onto_what_is_there() {
        for (rows, cols) in [(1, 1), (0, 3), (130, 5), (65, 300)] {
            let x = noise::<f32>(1, rows * cols);
            let sums = on_any_threads(|threads| {
                let mut sums = vec![1.0; cols];
                sum_rows(threads, &x, &mut sums);
                sums
            });
            let x = to_f64(&x);
            let column = |col| x.iter().skip(col).step_by(cols).sum::<f64>();
            let expected: Vec<f64> = (0..cols).map(|col| 1.0 + column(col)).collect();
            assert_close(&sums, &expected, 3e-6);
        }
    }
}
