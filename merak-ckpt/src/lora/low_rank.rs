//! The update of one weight, as an adapter's file has it.

use super::contents::Factors;
use super::product::Product;
use crate::error::foreign;
use crate::layout::PartRange;
use crate::{Checkpoint, DType, Kind, Layout, Piece, Result, TensorEntry};
use std::path::Path;

/// What the configuration and the base say of the factors of one module.
#[derive(Debug, Clone, Copy)]
pub(super) struct Expected<'a> {
    /// The weight of the base.
    pub(super) base: &'a TensorEntry,
    /// Whether it is stored `[in, out]`.
    pub(super) is_transposed: bool,
    /// The rank by the configuration.
    pub(super) rank: usize,
    /// The number that the product is multiplied by.
    pub(super) scale: f64,
}

/// A product that is added to a weight, and the magnitudes of its outputs.
#[derive(Debug)]
pub(super) struct LowRank {
    product: Product,
    /// Its magnitudes, if any (`use_dora`), and from [`LowRank::measure`] on the factors that give
    /// each output its magnitude.
    magnitudes: Option<Magnitudes>,
}

#[derive(Debug)]
struct Magnitudes {
    wanted: Vec<f32>,
    factors: Option<Vec<f64>>,
}

impl LowRank {
    /// Reads the factors of a module and lays them as the base weight lies.
    pub(super) fn read(
        tensors: &Checkpoint,
        file: &Path,
        factors: &Factors,
        expected: Expected<'_>,
    ) -> Result<Self> {
        let Expected { base, scale, .. } = expected;
        let (Some(a), Some(b)) = (&factors.a, &factors.b) else {
            let name = &base.name;
            return Err(foreign(file, format!("one factor of `{name}` is missing")));
        };
        let shape = |name: &str| Ok(tensors.tensor(&Kind::Parameter, name)?.shape.clone());
        let (a_shape, b_shape) = (shape(a)?, shape(b)?);
        let is_transposed = expected.is_transposed || factors.is_embedding;
        let fit = Fit::of([&a_shape, &b_shape], base, is_transposed).ok_or_else(|| {
            let shape = &base.shape;
            let reason =
                format!("`{a}` {a_shape:?} and `{b}` {b_shape:?} do not fit the base's {shape:?}");
            foreign(file, reason)
        })?;
        let (rank, expected_rank) = (fit.rank, expected.rank);
        if rank != expected_rank {
            let reason =
                format!("`{a}` has rank {rank}, in the configuration it is {expected_rank}");
            return Err(foreign(file, reason));
        }
        let a = read_f32(tensors, a, &a_shape)?;
        let b = read_f32(tensors, b, &b_shape)?;
        let magnitudes = factors.magnitude.as_ref().map(|name| {
            let found = shape(name)?;
            let expected = match base.shape.len() {
                ..=2 => vec![fit.outputs],
                // Those of a convolution have the shape of its output channels.
                ndim => [&[1, fit.outputs], &vec![1; ndim - 2][..]].concat(),
            };
            if found != expected {
                let reason = format!("`{name}` is {found:?}, expected {expected:?}");
                return Err(foreign(file, reason));
            }
            Ok(Magnitudes {
                wanted: read_f32(tensors, name, &found)?,
                factors: None,
            })
        });
        Ok(Self {
            product: Product::new(&a, &b, rank, scale, fit.is_transposed),
            magnitudes: magnitudes.transpose()?,
        })
    }

    pub(super) fn is_unmeasured(&self) -> bool {
        let magnitudes = self.magnitudes.as_ref();
        magnitudes.is_some_and(|magnitudes| magnitudes.factors.is_none())
    }

    /// Computes the factor of each output: its magnitude, divided by the norm of its updated
    /// weights.
    pub(super) fn measure(&mut self, base: &Checkpoint, name: &str) -> Result<()> {
        const BLOCK_ELEMENTS: usize = 1 << 18;
        let Some(magnitudes) = &mut self.magnitudes else {
            return Ok(());
        };
        let shape = &base.tensor(&Kind::Parameter, name)?.shape;
        let layout = Layout::whole(shape);
        let (rows, columns) = (shape[0], self.product.columns);
        let step = (BLOCK_ELEMENTS / columns.max(1)).max(1);
        let mut squares = vec![0.0_f64; magnitudes.wanted.len()];
        let mut values = Vec::new();
        for first in (0..rows).step_by(step) {
            let end = rows.min(first + step);
            values.resize((end - first) * columns * 4, 0);
            let elements = first * columns..end * columns;
            let piece = Piece {
                range: Some(elements.clone()),
                ..Piece::parameter(name, DType::F32, &layout)
            };
            base.read_as(&piece, &mut values)?;
            self.product
                .add_squares(elements, floats(&values), &mut squares);
        }
        let factors = magnitudes.wanted.iter().zip(squares);
        let factors = factors.map(|(wanted, squares)| f64::from(*wanted) / squares.sqrt());
        magnitudes.factors = Some(factors.collect());
        Ok(())
    }

    /// The factor of the updated weight at a place.
    fn factor(&self, row: usize, column: usize) -> f64 {
        let magnitudes = self.magnitudes.as_ref();
        let factors = magnitudes.and_then(|magnitudes| magnitudes.factors.as_ref());
        factors.map_or(1.0, |all| all[self.product.output(row, column)])
    }

    /// Adds the product to the values of one part of a piece.
    pub(super) fn add(&self, piece: &Piece<'_>, part: &PartRange<'_>, values: &mut [u8]) {
        let region = &part.part.region;
        let inner: usize = piece.layout.shape()[2.min(region.size.len())..]
            .iter()
            .product();
        // Boxes are seen as matrices too, so they must hold all of the dims after the second.
        let width = region.size.get(1).map_or(1, |size| size * inner);
        let first = region.offset.get(1).map_or(0, |offset| offset * inner);
        let size = piece.dtype.size_bytes();
        let mut product = Vec::new();
        part.for_each_run(
            piece.layout.local_shape(),
            &piece.flat_range(),
            |mut local, run, mut len| {
                let mut flat = part.range.start + run;
                while len > 0 {
                    let (row, column) = (flat / width, flat % width);
                    let count = len.min(width - column);
                    let (at_row, at_column) = (region.offset[0] + row, first + column);
                    self.product.row(at_row, at_column, count, &mut product);
                    let out = &mut values[local * size..(local + count) * size];
                    let changed = out.chunks_exact_mut(size).zip(&product).enumerate();
                    for (place, (value, product)) in changed {
                        let sum =
                            piece.dtype.to_f64(value).unwrap_or(f64::NAN) + f64::from(*product);
                        let sum = sum * self.factor(at_row, at_column + place);
                        piece.dtype.put_f64(sum, value);
                    }
                    (flat, local, len) = (flat + count, local + count, len - count);
                }
            },
        );
    }
}

/// How two factors fit a weight of the base.
struct Fit {
    rank: usize,
    outputs: usize,
    is_transposed: bool,
}

impl Fit {
    /// `None` where the factors do not fit. If only one orientation fits, it is used:
    /// configurations are not always right about it.
    fn of(factors: [&[usize]; 2], base: &TensorEntry, is_transposed: bool) -> Option<Self> {
        let weight = (
            *base.shape.first()?,
            base.shape[1..].iter().product::<usize>(),
        );
        let [(rank, inputs), (outputs, same)] = factors.map(matrix).map(Option::unwrap_or_default);
        let expected = |is_transposed: bool| {
            if is_transposed {
                (inputs, outputs)
            } else {
                (outputs, inputs)
            }
        };
        let is_sound = rank == same && rank > 0 && base.dtype.is_float();
        let mut orientations = [is_transposed, !is_transposed].into_iter();
        let is_transposed = orientations.find(|&is| is_sound && expected(is) == weight)?;
        Some(Self {
            rank,
            outputs,
            is_transposed,
        })
    }
}

/// A factor's shape as a matrix: convolutions have further dims, which belong to the inputs.
fn matrix(shape: &[usize]) -> Option<(usize, usize)> {
    let (first, rest) = shape.split_first()?;
    (!rest.is_empty()).then(|| (*first, rest.iter().product()))
}

fn floats(bytes: &[u8]) -> impl Iterator<Item = f32> {
    let values = bytes.chunks_exact(4);
    values.map(|b| f32::from_le_bytes(b.try_into().expect("chunks of four")))
}

fn read_f32(tensors: &Checkpoint, name: &str, shape: &[usize]) -> Result<Vec<f32>> {
    let layout = Layout::whole(shape);
    let mut bytes = vec![0; layout.num_local_elements() * 4];
    let piece = Piece::parameter(name, DType::F32, &layout);
    tensors.read_as(&piece, &mut bytes)?;
    Ok(floats(&bytes).collect())
}
