//! Products of matrices, for rules that need them.

use crate::flat;
use std::fmt;

/// Rows of a product that one job computes.
const PANEL: usize = 32;
/// Rows, and columns, of what stays in registers.
const TILE: [usize; 2] = [4, 8];

/// A matrix of f32.
#[derive(Debug, Clone, Copy)]
pub struct Matrix<'a> {
    /// The elements, row by row, or column by column of one that is transposed.
    pub values: &'a [f32],
    /// Rows and columns.
    pub sides: [usize; 2],
    /// Whether the elements lie column by column.
    pub is_transposed: bool,
}

impl<'a> Matrix<'a> {
    /// A matrix that lies row by row.
    pub fn new(values: &'a [f32], sides: [usize; 2]) -> Self {
        Self {
            values,
            sides,
            is_transposed: false,
        }
    }

    /// The same elements with rows and columns exchanged.
    #[must_use]
    pub fn transposed(self) -> Self {
        let [rows, cols] = self.sides;
        Self {
            sides: [cols, rows],
            is_transposed: !self.is_transposed,
            ..self
        }
    }

    fn at(&self, row: usize, col: usize) -> f32 {
        let [rows, cols] = self.sides;
        self.values[if self.is_transposed {
            col * rows + row
        } else {
            row * cols + col
        }]
    }
}

/// What multiplies the matrices of Muon.
///
/// The same operands must give the same bits, whatever the number of threads: ranks that hold the
/// same matrix rely on it.
pub trait MatrixProducts: fmt::Debug + Send + Sync {
    /// Writes the product of `a` and `b` to `out`, row by row.
    fn multiply(&self, a: Matrix<'_>, b: Matrix<'_>, out: &mut [f32]);
}

/// Products by loops that every processor runs.
///
/// ```
/// use merak_zero::{Matrix, MatrixProducts, PlainProducts};
/// let a = Matrix::new(&[1.0, 2.0, 3.0, 4.0], [2, 2]);
/// let mut out = [0.0; 4];
/// PlainProducts { threads: 1 }.multiply(a, a.transposed(), &mut out);
/// assert_eq!(out, [5.0, 11.0, 11.0, 25.0]);
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PlainProducts {
    /// Threads that a product may use.
    pub threads: usize,
}

impl MatrixProducts for PlainProducts {
    fn multiply(&self, a: Matrix<'_>, b: Matrix<'_>, out: &mut [f32]) {
        let cols = b.sides[1];
        if out.is_empty() {
            return;
        }
        let panels = out.chunks_mut(PANEL * cols).enumerate();
        flat::for_each(self.threads, panels.collect(), |(panel, out)| {
            multiply_rows(a, b, panel * PANEL, out);
        });
    }
}

/// The rows of a product from `first` on, as many as `out` has.
fn multiply_rows(a: Matrix<'_>, b: Matrix<'_>, first: usize, out: &mut [f32]) {
    let [inner, cols] = b.sides;
    let rows = out.len() / cols;
    let (mut strip, mut group) = (vec![[0.0; TILE[1]]; inner], vec![[0.0; TILE[0]]; inner]);
    // The rows' elements beside each other, each group of rows by itself.
    let mut groups = Vec::with_capacity(rows.div_ceil(TILE[0]));
    for row in (0..rows).step_by(TILE[0]) {
        for (k, values) in group.iter_mut().enumerate() {
            *values = std::array::from_fn(|r| match row + r {
                row if row < rows => a.at(first + row, k),
                _ => 0.0,
            });
        }
        groups.push(group.clone());
    }
    for col in (0..cols).step_by(TILE[1]) {
        for (k, values) in strip.iter_mut().enumerate() {
            *values = std::array::from_fn(|c| match col + c {
                col if col < cols => b.at(k, col),
                _ => 0.0,
            });
        }
        let width = TILE[1].min(cols - col);
        for (group, row) in groups.iter().zip((0..rows).step_by(TILE[0])) {
            let tile = multiply_tile(group, &strip);
            for (values, row) in tile.iter().zip(row..rows) {
                out[row * cols + col..][..width].copy_from_slice(&values[..width]);
            }
        }
    }
}

/// The product of a few rows and a few columns; sums run along the inner dimension.
fn multiply_tile(rows: &[[f32; TILE[0]]], cols: &[[f32; TILE[1]]]) -> [[f32; TILE[1]]; TILE[0]] {
    let mut sums = [[0.0; TILE[1]]; TILE[0]];
    for (row, col) in rows.iter().zip(cols) {
        for (sums, &x) in sums.iter_mut().zip(row) {
            for (sum, &y) in sums.iter_mut().zip(col) {
                *sum += x * y;
            }
        }
    }
    sums
}

#[cfg(test)]
mod tests {
    use super::*;

    fn numbers(seed: usize, len: usize) -> Vec<f32> {
        let number = |i: usize| ((seed + 7 * i) % 23) as f32 - 11.0;
        (0..len).map(number).collect()
    }

    #[test]
    fn products_of_odd_sizes_are_those_of_plain_sums() {
        for (rows, inner, cols) in [(1, 1, 1), (5, 3, 9), (33, 17, 8), (70, 40, 13), (600, 2, 3)] {
            let (left, right) = (numbers(1, rows * inner), numbers(2, inner * cols));
            let a = Matrix::new(&left, [rows, inner]);
            // The second factor lies column by column.
            let b = Matrix::new(&right, [cols, inner]).transposed();
            let sum = |index: usize| {
                let (row, col) = (index / cols, index % cols);
                (0..inner).map(|k| a.at(row, k) * b.at(k, col)).sum()
            };
            // Sums of small whole numbers are exact.
            let expected: Vec<f32> = (0..rows * cols).map(sum).collect();
            for threads in [1, 3] {
                let mut out = vec![f32::NAN; rows * cols];
                PlainProducts { threads }.multiply(a, b, &mut out);
                assert_eq!(out, expected, "{rows} x {inner} x {cols}");
            }
        }
    }
}
