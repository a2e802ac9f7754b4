//! The product of an adapter's factors, laid as the weight that it is added to.

use std::ops::Range;

/// A product that is added to a weight, seen as a matrix of its first dim by all others.
#[derive(Debug)]
pub(super) struct Product {
    rank: usize,
    pub(super) columns: usize,
    /// `[rows, rank]`, scaled.
    left: Vec<f32>,
    /// `[rank, columns]`.
    right: Vec<f32>,
    /// Whether the layer's outputs are the columns of the matrix, else its rows.
    has_outputs_in_columns: bool,
}

impl Product {
    /// The product of `a` `[rank, inputs]` and `b` `[outputs, rank]` times `scale`: `[outputs,
    /// inputs]`, or `[inputs, outputs]` if transposed.
    pub(super) fn new(a: &[f32], b: &[f32], rank: usize, scale: f64, is_transposed: bool) -> Self {
        let scaled = b.iter().map(|b| (f64::from(*b) * scale) as f32);
        let b: Vec<_> = scaled.collect();
        let of_rank = |values: usize| values / rank.max(1);
        let (inputs, outputs) = (of_rank(a.len()), of_rank(b.len()));
        let (left, right, columns) = if is_transposed {
            (turned(a, rank), turned(&b, outputs), outputs)
        } else {
            (b, a.to_vec(), inputs)
        };
        Self {
            rank,
            columns,
            left,
            right,
            has_outputs_in_columns: is_transposed,
        }
    }

    /// `count` elements of a row, from `column` on.
    pub(super) fn row(&self, row: usize, column: usize, count: usize, product: &mut Vec<f32>) {
        product.clear();
        product.resize(count, 0.0);
        for (k, factor) in self.left[row * self.rank..][..self.rank].iter().enumerate() {
            let right = &self.right[k * self.columns + column..][..count];
            for (sum, right) in product.iter_mut().zip(right) {
                *sum += factor * right;
            }
        }
    }

    /// The output that a place of the matrix belongs to.
    pub(super) fn output(&self, row: usize, column: usize) -> usize {
        if self.has_outputs_in_columns {
            column
        } else {
            row
        }
    }

    /// Adds to each output's sum the squares of its updated weights, weight plus product, of
    /// adjacent `elements` of the matrix: the square of the norm that `DoRA` divides by.
    pub(super) fn add_squares(
        &self,
        elements: Range<usize>,
        weights: impl Iterator<Item = f32>,
        squares: &mut [f64],
    ) {
        let mut product = Vec::new();
        // The index of the first element of `product`.
        let mut first = elements.start;
        for (index, weight) in elements.clone().zip(weights) {
            let (row, column) = (index / self.columns, index % self.columns);
            if column == 0 || index == elements.start {
                let count = (self.columns - column).min(elements.end - index);
                self.row(row, column, count, &mut product);
                first = index;
            }
            let updated = f64::from(weight) + f64::from(product[index - first]);
            squares[self.output(row, column)] += updated.powi(2);
        }
    }
}

/// The squares of the norms that `DoRA` divides by ([Liu et al.
/// 2024](https://arxiv.org/abs/2402.09353), section 4): for each output of a layer, the sum of the
/// squares of its updated weights `W + scale * B * A`, of those weights that are given.
///
/// # Shapes
/// `weights`: runs of adjacent elements, each with the index of its first one, of the matrix
/// `[outputs, inputs]`, or `[inputs, outputs]` if `is_transposed`; a kernel's further dims belong
/// to the inputs. `[a, b]`: `[rank, inputs]`, `[outputs, rank]`. Result: `[outputs]`.
///
/// # Panics
/// When the lengths fit no such shapes.
///
/// # Examples
/// ```
/// let (weights, a, b) = ([3.0, 3.0], [1.0, 2.0], [1.0]);
/// let all = [(0, &weights[..])];
/// let squares = merak_ckpt::squares_of_outputs(all, [&a, &b], 1, 1.0, false);
/// assert_eq!(squares, [4.0 * 4.0 + 5.0 * 5.0]);
/// let second = [(1, &weights[1..])];
/// let squares = merak_ckpt::squares_of_outputs(second, [&a, &b], 1, 1.0, false);
/// assert_eq!(squares, [5.0 * 5.0]);
/// ```
pub fn squares_of_outputs<'a>(
    weights: impl IntoIterator<Item = (usize, &'a [f32])>,
    [a, b]: [&[f32]; 2],
    outputs: usize,
    scale: f64,
    is_transposed: bool,
) -> Vec<f64> {
    let mut squares = vec![0.0; outputs];
    let product = Product::new(a, b, b.len() / outputs.max(1), scale, is_transposed);
    for (first, run) in weights {
        let elements = first..first + run.len();
        product.add_squares(elements, run.iter().copied(), &mut squares);
    }
    squares
}

/// The transpose of a matrix of `rows` rows.
fn turned(values: &[f32], rows: usize) -> Vec<f32> {
    let columns = values.len() / rows.max(1);
    (0..values.len())
        .map(|i| values[i % rows * columns + i / rows])
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_layer_has_the_same_norms_however_its_weight_lies() {
        let (inputs, outputs, rank, scale) = (3, 4, 2, 0.5);
        let values = |count: usize, seed: f32| -> Vec<f32> {
            (0..count).map(|i| (i as f32 * seed).sin()).collect()
        };
        let weights = values(outputs * inputs, 1.3);
        let (a, b) = (values(rank * inputs, 0.7), values(outputs * rank, 2.1));
        let squares = squares_of_outputs([(0, &weights[..])], [&a, &b], outputs, scale, false);
        let lying = turned(&weights, outputs);
        // Runs that neither begin nor end where rows do.
        let runs = [(0, &lying[..5]), (5, &lying[5..7]), (7, &lying[7..])];
        let of_lying = squares_of_outputs(runs, [&a, &b], outputs, scale, true);
        for output in 0..outputs {
            let weight = |input: usize| {
                let product = (0..rank).map(|k| b[output * rank + k] * a[k * inputs + input]);
                f64::from(weights[output * inputs + input])
                    + scale * product.map(f64::from).sum::<f64>()
            };
            let expected: f64 = (0..inputs).map(|input| weight(input).powi(2)).sum();
            assert!((squares[output] - expected).abs() < 1e-6, "{output}");
            assert!((of_lying[output] - expected).abs() < 1e-6, "{output}");
        }
    }
}
