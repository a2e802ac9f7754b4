//! Products of a few rows, as a decode step makes them: the right operand is read once, in the order in which it
//! lies, so the speed is that of the memory.
//!
//! ```text
//! rows of b contiguous      c = Σ over chunks of k: a[:, chunk] · b[chunk, :]       a chunk per item, then the sum
//! columns of b contiguous   c[i, j] = a[i, :] · b[:, j]                             a block of columns per item
//! ```
//!
//! Chunks and blocks follow from the shapes alone, and so do the bits of the result.
#![expect(
    clippy::inline_always,
    reason = "sums stay in registers only where they are inlined into their dispatch"
)]

use std::array;

use pulp::x86::V4;

use super::super::{Float, MatMut, MatRef, Threads};
use super::Start;

/// Most rows that are few.
const MAX_ROWS: usize = 8;
/// Elements of the right operand from which on its way from memory is what takes time.
const MIN_ELEMENTS: usize = 1 << 14;
/// Chunks of k, each of whole steps.
const CHUNKS: usize = 8;
/// Rows of the right operand that are read side by side.
const STEP: usize = 4;
/// Columns of an item of dots.
const BLOCK_COLS: usize = 64;
/// Columns of an item of sums.
const SUM_COLS: usize = 1024;

/// Whether this is such a product.
pub(super) fn pays<T: Float>(a: &MatRef<'_, T>, b: &MatRef<'_, T>) -> bool {
    a.rows() <= MAX_ROWS
        && b.rows() * b.cols() >= MIN_ELEMENTS
        && a.has_contiguous_rows()
        && (b.has_contiguous_rows() || b.has_contiguous_cols())
}

/// Computes `c = alpha a b + start`.
pub(super) fn product<T: Float>(
    simd: V4,
    threads: &Threads,
    alpha: T,
    (a, b): (MatRef<'_, T>, MatRef<'_, T>),
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
fn dots<T: Float>(
    simd: V4,
    threads: &Threads,
    alpha: T,
    (a, b): (MatRef<'_, T>, MatRef<'_, T>),
    start: Start<'_, T>,
    c: MatMut<'_, T>,
) {
    let blocks = c.col_blocks(BLOCK_COLS).enumerate();
    threads.for_each(blocks, |(block, mut out)| {
        let first = block * BLOCK_COLS;
        simd.vectorize(
            #[inline(always)]
            || {
                let mut col = 0;
                while col < out.cols() {
                    let own = if out.cols() - col >= STEP {
                        dot_columns::<T, STEP>(simd, alpha, (a, b), start, (first, col), &mut out);
                        STEP
                    } else {
                        dot_columns::<T, 1>(simd, alpha, (a, b), start, (first, col), &mut out);
                        1
                    };
                    col += own;
                }
            },
        );
    });
}

/// All rows of `N` columns from `first + col` on.
#[inline(always)]
fn dot_columns<T: Float, const N: usize>(
    simd: V4,
    alpha: T,
    (a, b): (MatRef<'_, T>, MatRef<'_, T>),
    start: Start<'_, T>,
    (first, col): (usize, usize),
    out: &mut MatMut<'_, T>,
) {
    let columns: [&[T]; N] = array::from_fn(|j| b.row(first + col + j));
    let mut row = 0;
    while row < a.rows() {
        let mut put = |row: usize, sums: [T; N]| {
            let out = &mut out.row_mut(row)[col..col + N];
            for (j, (out, sum)) in out.iter_mut().zip(sums).enumerate() {
                *out = sum.fma(alpha, begin(start, first + col + j, *out));
            }
        };
        if a.rows() - row >= 4 {
            let sums = multiply::<T, 4, N>(simd, array::from_fn(|i| a.row(row + i)), columns);
            sums.into_iter()
                .enumerate()
                .for_each(|(i, sums)| put(row + i, sums));
            row += 4;
        } else {
            let [sums] = multiply::<T, 1, N>(simd, [a.row(row)], columns);
            put(row, sums);
            row += 1;
        }
    }
}

/// The products of `R` rows with `N` columns: a register of sums for each, whose lanes are added in the end.
#[inline(always)]
fn multiply<T: Float, const R: usize, const N: usize>(
    simd: V4,
    rows: [&[T]; R],
    columns: [&[T]; N],
) -> [[T; N]; R] {
    let len = rows[0].len();
    let rows = rows.map(|row| &row[..len]);
    let columns = columns.map(|column| &column[..len]);
    let whole = T::registers(rows[0]).len();
    let row_registers = rows.map(|row| &T::registers(row)[..whole]);
    let column_registers = columns.map(|column| &T::registers(column)[..whole]);
    let mut sums = [[T::splat(simd, T::ZERO); N]; R];
    for k in 0..whole {
        let column: [T::Register; N] = array::from_fn(
            #[inline(always)]
            |j| column_registers[j][k],
        );
        for (sums, row) in sums.iter_mut().zip(&row_registers) {
            let x = row[k];
            for (sum, &w) in sums.iter_mut().zip(&column) {
                *sum = T::mul_add(simd, x, w, *sum);
            }
        }
    }
    let lanes = size_of::<T::Register>() / size_of::<T>();
    array::from_fn(|i| {
        array::from_fn(|j| {
            let mut total = T::ZERO;
            for &lane in bytemuck::cast_slice::<T::Register, T>(&sums[i][j..=j]) {
                total += lane;
            }
            for k in whole * lanes..len {
                total = rows[i][k].fma(columns[j][k], total);
            }
            total
        })
    })
}

/// `c = Σ a[:, k] b[k, :]`
fn streams<T: Float>(
    simd: V4,
    threads: &Threads,
    alpha: T,
    (a, b): (MatRef<'_, T>, MatRef<'_, T>),
    start: Start<'_, T>,
    c: MatMut<'_, T>,
) {
    let (m, k, n) = (a.rows(), a.cols(), b.cols());
    let depth = k.div_ceil(CHUNKS).next_multiple_of(STEP);
    let chunks = k.div_ceil(depth);
    threads.with_scratch(chunks * m * n, |partial: &mut [T]| {
        let items = partial.chunks_exact_mut(m * n).enumerate();
        threads.for_each(items, |(chunk, sums)| {
            let first = chunk * depth;
            let depth = depth.min(k - first);
            simd.vectorize(
                #[inline(always)]
                || {
                    sums.fill(T::ZERO);
                    let mut row = first;
                    while row < first + depth {
                        if first + depth - row >= STEP {
                            add_rows::<T, STEP>(simd, (a, b), row, sums);
                            row += STEP;
                        } else {
                            add_rows::<T, 1>(simd, (a, b), row, sums);
                            row += 1;
                        }
                    }
                },
            );
        });
        let partial = &*partial;
        let blocks = c.col_blocks(SUM_COLS).enumerate();
        threads.for_each(blocks, |(block, mut out)| {
            let first = block * SUM_COLS;
            simd.vectorize(
                #[inline(always)]
                || {
                    for row in 0..m {
                        let out = out.row_mut(row);
                        let cols = row * n + first..row * n + first + out.len();
                        gather(alpha, partial, (m * n, cols), start, first, out);
                    }
                },
            );
        });
    });
}

/// Adds the products with `N` rows of `b` from `row` on.
#[inline(always)]
fn add_rows<T: Float, const N: usize>(
    simd: V4,
    (a, b): (MatRef<'_, T>, MatRef<'_, T>),
    row: usize,
    sums: &mut [T],
) {
    let n = b.cols();
    let rows: [&[T]; N] = array::from_fn(|p| &b.row(row + p)[..n]);
    let registers = rows.map(T::registers);
    let whole = registers[0].len();
    let registers = registers.map(|row| &row[..whole]);
    let lanes = size_of::<T::Register>() / size_of::<T>();
    for (i, sums) in sums.chunks_exact_mut(n).enumerate() {
        let x: [T; N] = array::from_fn(|p| a.row(i)[row + p]);
        let wide = x.map(|x| T::splat(simd, x));
        let (body, tail) = sums.split_at_mut(whole * lanes);
        for (j, sum) in T::registers_mut(body).iter_mut().enumerate() {
            let mut total = *sum;
            for (wide, row) in wide.iter().zip(&registers) {
                total = T::mul_add(simd, *wide, row[j], total);
            }
            *sum = total;
        }
        for (j, sum) in tail.iter_mut().enumerate() {
            for (x, row) in x.iter().zip(&rows) {
                *sum = x.fma(row[whole * lanes + j], *sum);
            }
        }
    }
}

/// A row of the result from the sums of all chunks, in their order.
#[inline(always)]
fn gather<T: Float>(
    alpha: T,
    partial: &[T],
    (stride, cols): (usize, std::ops::Range<usize>),
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

/// What an element of a column begins with.
#[inline(always)]
fn begin<T: Float>(start: Start<'_, T>, col: usize, out: T) -> T {
    match start {
        Start::Zero => T::ZERO,
        Start::Output => out,
        Start::Row(row) => row[col],
    }
}
