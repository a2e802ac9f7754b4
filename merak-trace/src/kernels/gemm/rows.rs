//! Products of a few rows, as a decode step makes them: the right operand is read once, in the
//! order in which it lies, so the speed is that of the memory.
//!
//! ```text
//! rows of b contiguous      c = Σ a[:, chunk] · b[chunk, :]   a chunk of k per item, then the sum
//! columns of b contiguous   c[i, j] = a[i, :] · b[:, j]       a block of columns per item
//! ```
//!
//! Chunks and blocks follow from the shapes alone, and each element is a sum over k in one order,
//! independent of the other rows and columns: a sequence gets the same bits alone and in a batch.
#![expect(
    clippy::inline_always,
    reason = "sums stay in registers only where they are inlined into their dispatch"
)]

use std::{array, ops::Range};

use super::super::{Float, MatMut, MatRef, Threads, simd::Body};
use super::{Isa, Operand, Start, prefetch::prefetch};

/// Largest number of rows for these kernels; above it packing pays.
const MAX_ROWS: usize = 47;
/// Right operands of at least this many elements are limited by memory speed.
const MIN_ELEMENTS: usize = 1 << 14;
/// Largest number of chunks of k, and smallest number of rows of all chunks but the last.
const CHUNKS: usize = 8;
const CHUNK_ROWS: usize = 128;
/// Rows of the right operand that are read side by side: the sums of all columns are loaded and
/// stored once per such group.
const DEPTH: usize = 16;
/// Columns of the right operand that are read side by side.
const STEP: usize = 4;
/// Columns per work item of [`dots`].
const BLOCK_COLS: usize = 64;
/// Elements of partial sums that a work item adds up.
const SUM_ELEMENTS: usize = 1 << 15;

/// Whether these kernels suit the product.
pub(super) fn pays<T: Float, W: Operand<T>>(a: &MatRef<'_, T>, b: &MatRef<'_, W>) -> bool {
    (1..=MAX_ROWS).contains(&a.rows())
        && b.rows() * b.cols() >= MIN_ELEMENTS
        && a.has_contiguous_rows()
        && (b.has_contiguous_rows() || b.has_contiguous_cols())
}

/// Computes `c = alpha a b + start`.
pub(super) fn product<S: Isa, T: Float, W: Operand<T>>(
    simd: S,
    threads: &Threads,
    alpha: T,
    (a, b): (MatRef<'_, T>, MatRef<'_, W>),
    start: Start<'_, T>,
    c: MatMut<'_, T>,
) {
    if b.has_contiguous_cols() {
        dots(simd, threads, alpha, (a, b.transposed()), start, c);
    } else {
        streams(simd, threads, alpha, (a, b), start, c);
    }
}

/// `c[i, j] = a[i, :] · b[j, :]`
fn dots<S: Isa, T: Float, W: Operand<T>>(
    simd: S,
    threads: &Threads,
    alpha: T,
    (a, b): (MatRef<'_, T>, MatRef<'_, W>),
    start: Start<'_, T>,
    c: MatMut<'_, T>,
) {
    let blocks = c.col_blocks(BLOCK_COLS).enumerate();
    threads.for_each(blocks, |(block, mut out)| {
        let first = block * BLOCK_COLS;
        simd.vectorize(Body(
            #[inline(always)]
            || {
                let mut col = 0;
                while col < out.cols() {
                    let own = if out.cols() - col >= STEP {
                        dot_columns::<S, T, W, STEP>(
                            simd,
                            alpha,
                            (a, b),
                            start,
                            (first, col),
                            &mut out,
                        );
                        STEP
                    } else {
                        dot_columns::<S, T, W, 1>(
                            simd,
                            alpha,
                            (a, b),
                            start,
                            (first, col),
                            &mut out,
                        );
                        1
                    };
                    col += own;
                }
            },
        ));
    });
}

/// All rows of `N` columns from `first + col` on.
#[inline(always)]
fn dot_columns<S: Isa, T: Float, W: Operand<T>, const N: usize>(
    simd: S,
    alpha: T,
    (a, b): (MatRef<'_, T>, MatRef<'_, W>),
    start: Start<'_, T>,
    (first, col): (usize, usize),
    out: &mut MatMut<'_, T>,
) {
    let column = |j: usize| b.row(j.min(b.rows() - 1));
    let columns: [&[W]; N] = array::from_fn(|j| column(first + col + j));
    let mut next: [&[W]; N] = array::from_fn(|j| column(first + col + N + j));
    let mut row = 0;
    while row < a.rows() {
        let (left, right) = ((a, row), (columns, next));
        let out = (&mut *out, first, col);
        // As many rows as the registers hold sums for.
        row += match a.rows() - row {
            4.. if S::REGISTER_COUNT >= 32 => {
                dot_rows::<S, T, W, 4, N>(simd, alpha, left, right, start, out)
            }
            2.. => dot_rows::<S, T, W, 2, N>(simd, alpha, left, right, start, out),
            _ => dot_rows::<S, T, W, 1, N>(simd, alpha, left, right, start, out),
        };
        next = columns;
    }
}

/// `R` rows from `row` on of `N` columns from `first + col` on; returns R.
#[inline(always)]
fn dot_rows<S: Isa, T: Float, W: Operand<T>, const R: usize, const N: usize>(
    simd: S,
    alpha: T,
    (a, row): (MatRef<'_, T>, usize),
    (columns, next): ([&[W]; N], [&[W]; N]),
    start: Start<'_, T>,
    (out, first, col): (&mut MatMut<'_, T>, usize, usize),
) -> usize {
    let rows = array::from_fn(
        #[inline(always)]
        |i| a.row(row + i),
    );
    let sums = multiply::<S, T, W, R, N>(simd, rows, columns, next);
    for (i, sums) in sums.into_iter().enumerate() {
        let out = &mut out.row_mut(row + i)[col..col + N];
        for (j, (out, sum)) in out.iter_mut().zip(sums).enumerate() {
            *out = sum.fma(alpha, begin(start, first + col + j, *out));
        }
    }
    R
}

/// The products of `R` rows with `N` columns: each has a register of sums, whose lanes are added in
/// the end.
#[inline(always)]
fn multiply<S: Isa, T: Float, W: Operand<T>, const R: usize, const N: usize>(
    simd: S,
    rows: [&[T]; R],
    columns: [&[W]; N],
    next: [&[W]; N],
) -> [[T; N]; R] {
    let len = rows[0].len();
    let rows = rows.map(|row| &row[..len]);
    let columns = columns.map(|column| &column[..len]);
    let whole = T::registers::<S>(rows[0]).len();
    let row_registers = rows.map(|row| &T::registers::<S>(row)[..whole]);
    let column_groups = columns.map(|column| &W::groups::<S>(column)[..whole]);
    let mut sums = [[T::splat(simd, T::ZERO); N]; R];
    let lanes = size_of::<T::Register<S>>() / size_of::<T>();
    for k in 0..whole {
        for next in next {
            prefetch(next, k * lanes);
        }
        let column: [T::Register<S>; N] = array::from_fn(
            #[inline(always)]
            |j| W::widen(simd, column_groups[j][k]),
        );
        for (sums, row) in sums.iter_mut().zip(&row_registers) {
            let x = row[k];
            for (sum, &w) in sums.iter_mut().zip(&column) {
                *sum = T::mul_add(simd, x, w, *sum);
            }
        }
    }
    let mut totals = [[T::ZERO; N]; R];
    for (i, totals) in totals.iter_mut().enumerate() {
        for (j, total) in totals.iter_mut().enumerate() {
            for &lane in bytemuck::cast_slice::<T::Register<S>, T>(&sums[i][j..=j]) {
                *total += lane;
            }
            for k in whole * lanes..len {
                *total = rows[i][k].fma(columns[j][k].wide(), *total);
            }
        }
    }
    totals
}

/// `c = Σ a[:, k] b[k, :]`
fn streams<S: Isa, T: Float, W: Operand<T>>(
    simd: S,
    threads: &Threads,
    alpha: T,
    (a, b): (MatRef<'_, T>, MatRef<'_, W>),
    start: Start<'_, T>,
    c: MatMut<'_, T>,
) {
    let (m, k, n) = (a.rows(), a.cols(), b.cols());
    let depth = k.div_ceil(CHUNKS).max(CHUNK_ROWS).next_multiple_of(DEPTH);
    let chunks = k.div_ceil(depth);
    threads.with_scratch(chunks * m * n, |partial: &mut [T]| {
        let items = partial.chunks_exact_mut(m * n).enumerate();
        threads.for_each(items, |(chunk, sums)| {
            let rows = chunk * depth..k.min((chunk + 1) * depth);
            simd.vectorize(Body(
                #[inline(always)]
                || {
                    sums.fill(T::ZERO);
                    add_chunk(simd, (a, b), rows.clone(), sums);
                },
            ));
        });
        let partial = &*partial;
        let cols = (SUM_ELEMENTS / (chunks * m)).max(1).next_multiple_of(64);
        threads.for_each(c.col_blocks(cols).enumerate(), |(block, mut out)| {
            let first = block * cols;
            simd.vectorize(Body(
                #[inline(always)]
                || {
                    for row in 0..m {
                        let out = out.row_mut(row);
                        let cols = row * n + first..row * n + first + out.len();
                        gather(alpha, partial, (m * n, cols), start, first, out);
                    }
                },
            ));
        });
    });
}

/// Adds the products with some rows of `b` to all sums.
#[inline(always)]
fn add_chunk<S: Isa, T: Float, W: Operand<T>>(
    simd: S,
    (a, b): (MatRef<'_, T>, MatRef<'_, W>),
    rows: Range<usize>,
    sums: &mut [T],
) {
    let mut k = rows.start;
    while k < rows.end {
        // The last rows are added in smaller groups.
        k += match rows.end - k {
            DEPTH.. => add_rows::<S, T, W, DEPTH>(simd, (a, b), k, sums),
            4.. => add_rows::<S, T, W, 4>(simd, (a, b), k, sums),
            _ => add_rows::<S, T, W, 1>(simd, (a, b), k, sums),
        };
    }
}

/// Adds the products with `D` rows of `b` from row `k` on; returns D.
#[inline(always)]
fn add_rows<S: Isa, T: Float, W: Operand<T>, const D: usize>(
    simd: S,
    (a, b): (MatRef<'_, T>, MatRef<'_, W>),
    k: usize,
    sums: &mut [T],
) -> usize {
    let n = b.cols();
    let row = |p: usize| &b.row(p.min(b.rows() - 1))[..n];
    let rows: [&[W]; D] = array::from_fn(|p| row(k + p));
    // The next rows are prefetched while these rows are used for the first time.
    let mut next: [&[W]; D] = array::from_fn(|p| row(k + D + p));
    let mut first = 0;
    while first < a.rows() {
        let sums = &mut sums[first * n..];
        first += match a.rows() - first {
            8.. if S::REGISTER_COUNT >= 32 => {
                add_group::<S, T, W, 8, D>(simd, (a, first), k, (&rows, &next), sums)
            }
            4.. => add_group::<S, T, W, 4, D>(simd, (a, first), k, (&rows, &next), sums),
            2.. => add_group::<S, T, W, 2, D>(simd, (a, first), k, (&rows, &next), sums),
            _ => add_group::<S, T, W, 1, D>(simd, (a, first), k, (&rows, &next), sums),
        };
        next = rows;
    }
    D
}

/// Adds the products of `R` rows of `a` from `first` on with `D` rows of `b`; returns R.
///
/// Two registers of columns at a time: the sums of R rows stay in registers while the D rows pass.
#[inline(always)]
fn add_group<S: Isa, T: Float, W: Operand<T>, const R: usize, const D: usize>(
    simd: S,
    (a, first): (MatRef<'_, T>, usize),
    k: usize,
    (rows, next): (&[&[W]; D], &[&[W]; D]),
    sums: &mut [T],
) -> usize {
    let n = rows[0].len();
    let mut x = [[T::ZERO; R]; D];
    for i in 0..R {
        let row = &a.row(first + i)[k..k + D];
        for (x, &value) in x.iter_mut().zip(row) {
            x[i] = value;
        }
    }
    let lanes = size_of::<T::Register<S>>() / size_of::<T>();
    let (whole, pairs) = (n / lanes, n / lanes / 2 * 2);
    let groups = rows.map(|row| &W::groups::<S>(row)[..whole]);
    for j in (0..pairs).step_by(2) {
        let mut total: [[T::Register<S>; 2]; R] = array::from_fn(
            #[inline(always)]
            |i| {
                let sums = T::registers::<S>(&sums[i * n + j * lanes..][..2 * lanes]);
                [sums[0], sums[1]]
            },
        );
        for ((x, row), next) in x.iter().zip(&groups).zip(next) {
            prefetch(next, j * lanes);
            prefetch(next, (j + 1) * lanes);
            let (b0, b1) = (W::widen(simd, row[j]), W::widen(simd, row[j + 1]));
            for (&x, [s0, s1]) in x.iter().zip(&mut total) {
                let x = T::splat(simd, x);
                *s0 = T::mul_add(simd, x, b0, *s0);
                *s1 = T::mul_add(simd, x, b1, *s1);
            }
        }
        for (i, [s0, s1]) in total.into_iter().enumerate() {
            let sums = T::registers_mut::<S>(&mut sums[i * n + j * lanes..][..2 * lanes]);
            (sums[0], sums[1]) = (s0, s1);
        }
    }
    for j in pairs * lanes..n {
        for i in 0..R {
            let sum = &mut sums[i * n + j];
            for (x, row) in x.iter().zip(rows) {
                *sum = x[i].fma(row[j].wide(), *sum);
            }
        }
    }
    R
}

/// A row of the result from the sums of all chunks, in their order.
#[inline(always)]
fn gather<T: Float>(
    alpha: T,
    partial: &[T],
    (stride, cols): (usize, Range<usize>),
    start: Start<'_, T>,
    first: usize,
    out: &mut [T],
) {
    let mut total = [T::ZERO; 64];
    for (block, out) in out.chunks_mut(64).enumerate() {
        let total = &mut total[..out.len()];
        total.fill(T::ZERO);
        let from = cols.start + block * 64;
        for chunk in partial.chunks_exact(stride) {
            let chunk = &chunk[from..from + out.len()];
            for (total, x) in total.iter_mut().zip(chunk) {
                *total += *x;
            }
        }
        for (j, (out, total)) in out.iter_mut().zip(total).enumerate() {
            *out = total.fma(alpha, begin(start, first + block * 64 + j, *out));
        }
    }
}

/// Start value of an element in column `col`.
#[inline(always)]
fn begin<T: Float>(start: Start<'_, T>, col: usize, out: T) -> T {
    match start {
        Start::Zero => T::ZERO,
        Start::Output => out,
        Start::Row(row) => row[col],
    }
}

#[cfg(test)]
mod tests {
    use super::super::super::testing::{assert_close, noise, on_any_threads};
    use super::super::gemm_bias;
    use super::*;

    #[test]
    fn up_to_47_rows_of_odd_sizes_match_the_definition() {
        for (m, k, n) in [
            (0, 128, 128),
            (2, 1203, 45),
            (15, 260, 129),
            (31, 2070, 34),
            (47, 64, 301),
        ] {
            let (a, b) = (noise::<f32>(1, m * k), noise::<f32>(2, k * n));
            let bias = noise::<f32>(3, n);
            for is_transposed in [false, true] {
                let at = |p: usize, j: usize| b[if is_transposed { j * k + p } else { p * n + j }];
                let b = if is_transposed {
                    MatRef::new(&b, n, k).transposed()
                } else {
                    MatRef::new(&b, k, n)
                };
                let c = on_any_threads(|threads| {
                    let mut c = vec![f32::NAN; m * n];
                    let out = MatMut::new(&mut c, m, n);
                    gemm_bias(threads, MatRef::new(&a, m, k), b, &bias, out);
                    c
                });
                let element = |i: usize| {
                    let products =
                        (0..k).map(|p| f64::from(a[i / n * k + p]) * f64::from(at(p, i % n)));
                    products.sum::<f64>() + f64::from(bias[i % n])
                };
                let expected: Vec<f64> = (0..m * n).map(element).collect();
                assert_close(&c, &expected, 1e-4);
            }
        }
    }

    #[test]
    fn a_row_has_the_same_bits_alone_and_among_others() {
        let (m, k, n) = (15, 333, 130);
        let (a, b) = (noise::<f32>(1, m * k), noise::<f32>(2, k * n));
        let bias = noise::<f32>(3, n);
        let layouts = [MatRef::new(&b, k, n), MatRef::new(&b, n, k).transposed()];
        for b in layouts {
            let product = |first: usize, rows: usize| {
                let mut c = vec![0.0; rows * n];
                let a = MatRef::new(&a[first * k..], rows, k);
                let out = MatMut::new(&mut c, rows, n);
                gemm_bias(&Threads::one(), a, b, &bias, out);
                c
            };
            let all = product(0, m);
            for (first, rows) in [(0, 1), (7, 1), (14, 1), (3, 2), (5, 7), (0, 12)] {
                assert!(product(first, rows) == all[first * n..][..rows * n]);
            }
        }
    }
}
