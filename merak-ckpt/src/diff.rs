//! Comparing two checkpoints, whichever topologies wrote them.

use crate::{Checkpoint, DType, Kind, Layout, Piece, Result};
use serde::Serialize;
use std::cmp::Ordering;
use std::collections::BTreeSet;
use std::ops::Range;

/// Elements that are compared at once.
const BLOCK_ELEMENTS: usize = 1 << 18;

/// The distance that two values may have: `|a - b| <= atol + rtol * |b|`.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Tolerance {
    /// Relative to the second checkpoint's value.
    pub rtol: f64,
    /// Absolute.
    pub atol: f64,
}

/// The agreement and the differences of two checkpoints.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct DiffReport {
    /// Number of tensors that both have and that agree.
    pub equal: usize,
    /// The others, by kind, then name.
    pub different: Vec<TensorDiff>,
    /// Where values are furthest apart, among the floating-point tensors beyond the tolerance.
    pub largest: Option<Largest>,
}

/// A tensor that differs.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct TensorDiff {
    /// What it is.
    pub kind: Kind,
    /// Its name.
    pub name: String,
    /// How it differs.
    #[serde(flatten)]
    pub difference: Difference,
}

/// The difference between two tensors of a name.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(tag = "difference", rename_all = "snake_case")]
#[non_exhaustive]
pub enum Difference {
    /// Only the first checkpoint has it.
    OnlyInFirst,
    /// Only the second checkpoint has it.
    OnlyInSecond,
    /// The global shapes differ.
    Shape {
        /// In the first.
        first: Vec<usize>,
        /// In the second.
        second: Vec<usize>,
    },
    /// The element types differ.
    DType {
        /// In the first.
        first: DType,
        /// In the second.
        second: DType,
    },
    /// Values are further apart than the tolerance allows.
    Values(ValueDiff),
}

/// The distances between the values of two tensors.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize)]
pub struct ValueDiff {
    /// Elements of the tensor.
    pub elements: usize,
    /// Elements beyond the tolerance.
    pub beyond: usize,
    /// Greatest `|a - b|`; not a number counts as infinitely far.
    pub max_absolute: f64,
    /// Flat index of the first element with that difference.
    pub at: usize,
    /// Greatest `|a - b| / |b|`.
    pub max_relative: f64,
}

/// A [`DiffReport`] in a few numbers.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct DiffSummary {
    /// Number of tensors that both have and that agree.
    pub equal: usize,
    /// Number of tensors that both have and that differ.
    pub different: usize,
    /// Number of tensors that only the first checkpoint has.
    pub only_in_first: usize,
    /// Number of tensors that only the second checkpoint has.
    pub only_in_second: usize,
    /// Where values are furthest apart.
    pub largest: Option<Largest>,
}

/// The element whose values are furthest apart.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Largest {
    /// What its tensor is.
    pub kind: Kind,
    /// The tensor's name.
    pub name: String,
    /// Its index in each dim of the tensor.
    pub index: Vec<usize>,
    /// `|a - b|`.
    pub absolute: f64,
}

impl DiffReport {
    /// Counts the tensors.
    pub fn summary(&self) -> DiffSummary {
        let count = |is_one: fn(&Difference) -> bool| {
            let found = self.different.iter();
            found.filter(|tensor| is_one(&tensor.difference)).count()
        };
        let only_in_first = count(|found| matches!(found, Difference::OnlyInFirst));
        let only_in_second = count(|found| matches!(found, Difference::OnlyInSecond));
        DiffSummary {
            equal: self.equal,
            different: self.different.len() - only_in_first - only_in_second,
            only_in_first,
            only_in_second,
            largest: self.largest.clone(),
        }
    }

    /// Adds a tensor that differs; `shape` is its shape in the first checkpoint.
    fn add(&mut self, tensor: TensorDiff, shape: &[usize]) {
        let known = self.largest.as_ref().map_or(0.0, |known| known.absolute);
        if let Difference::Values(values) = &tensor.difference
            && values.max_absolute > known
        {
            self.largest = Some(Largest {
                kind: tensor.kind.clone(),
                name: tensor.name.clone(),
                index: index_of(values.at, shape),
                absolute: values.max_absolute,
            });
        }
        self.different.push(tensor);
    }
}

/// The index in each dim of the element with this flat index.
fn index_of(flat: usize, shape: &[usize]) -> Vec<usize> {
    let mut rest = flat;
    let from_last = shape.iter().rev().map(|size| {
        let index = rest % size;
        rest /= size;
        index
    });
    let mut index: Vec<_> = from_last.collect();
    index.reverse();
    index
}

/// Compares two checkpoints tensor by tensor: names, shapes, element types and values.
///
/// Floating-point values are compared as `f64` under the tolerance, and not-a-number equals
/// itself; values of other types must be equal. Memory is a few MiB, whatever the size.
///
/// # Errors
/// [`Error::Damaged`](crate::Error::Damaged) where a slice of either has a wrong checksum.
pub fn diff(first: &Checkpoint, second: &Checkpoint, tolerance: Tolerance) -> Result<DiffReport> {
    let keys = |checkpoint: &Checkpoint| {
        let tensors = checkpoint.manifest().tensors.iter();
        tensors
            .map(|t| (t.kind.clone(), t.name.clone()))
            .collect::<BTreeSet<_>>()
    };
    let all: BTreeSet<_> = keys(first).into_iter().chain(keys(second)).collect();
    let mut report = DiffReport {
        equal: 0,
        different: Vec::new(),
        largest: None,
    };
    for (kind, name) in all {
        let Some(difference) = tensor_difference(first, second, &kind, &name, tolerance)? else {
            report.equal += 1;
            continue;
        };
        let entry = first.manifest().tensor(&kind, &name);
        let shape = entry.map_or(&[][..], |entry| &entry.shape);
        let tensor = TensorDiff {
            kind,
            name,
            difference,
        };
        report.add(tensor, shape);
    }
    Ok(report)
}

fn tensor_difference(
    first: &Checkpoint,
    second: &Checkpoint,
    kind: &Kind,
    name: &str,
    tolerance: Tolerance,
) -> Result<Option<Difference>> {
    let Some(a) = first.manifest().tensor(kind, name) else {
        return Ok(Some(Difference::OnlyInSecond));
    };
    let Some(b) = second.manifest().tensor(kind, name) else {
        return Ok(Some(Difference::OnlyInFirst));
    };
    if a.shape != b.shape {
        let (first, second) = (a.shape.clone(), b.shape.clone());
        return Ok(Some(Difference::Shape { first, second }));
    }
    if a.dtype != b.dtype {
        return Ok(Some(Difference::DType {
            first: a.dtype,
            second: b.dtype,
        }));
    }
    let layout = Layout::whole(&a.shape);
    let mut values = ValueDiff::default();
    for begin in (0..a.num_elements()).step_by(BLOCK_ELEMENTS) {
        let range = begin..(begin + BLOCK_ELEMENTS).min(a.num_elements());
        let read = |checkpoint: &Checkpoint, range: Range<usize>| {
            let mut out = vec![0; range.len() * a.dtype.size_bytes()];
            let piece = Piece {
                kind,
                name,
                dtype: a.dtype,
                layout: &layout,
                range: Some(range),
            };
            checkpoint.read(&piece, &mut out).map(|()| out)
        };
        values.add(
            a.dtype,
            &read(first, range.clone())?,
            &read(second, range)?,
            tolerance,
        );
    }
    Ok((values.beyond > 0).then_some(Difference::Values(values)))
}

impl ValueDiff {
    fn add(&mut self, dtype: DType, a: &[u8], b: &[u8], tolerance: Tolerance) {
        let width = dtype.size_bytes();
        let begin = self.elements;
        self.elements += a.len() / width;
        if a == b {
            return;
        }
        let pairs = a.chunks_exact(width).zip(b.chunks_exact(width));
        for (nth, (a, b)) in pairs.enumerate() {
            if a == b {
                continue;
            }
            let is_beyond = match (dtype.to_f64(a), dtype.to_f64(b)) {
                (Some(a), Some(b)) => self.add_floats(begin + nth, a, b, tolerance),
                _ => true,
            };
            self.beyond += usize::from(is_beyond);
        }
    }

    /// Whether two floats with different bits are too far apart.
    fn add_floats(&mut self, at: usize, a: f64, b: f64, tolerance: Tolerance) -> bool {
        if a.is_nan() && b.is_nan() || a.partial_cmp(&b) == Some(Ordering::Equal) {
            return false;
        }
        let distance = if (a - b).is_nan() {
            f64::INFINITY
        } else {
            (a - b).abs()
        };
        if distance > self.max_absolute {
            (self.max_absolute, self.at) = (distance, at);
        }
        self.max_relative = self.max_relative.max(distance / b.abs());
        // Infinite allowances (of an infinite `b`) allow nothing.
        let allowed = tolerance.atol + tolerance.rtol * b.abs();
        !allowed.is_finite() || distance > allowed
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn values(a: &[f32], b: &[f32], rtol: f64, atol: f64) -> ValueDiff {
        let bytes = |v: &[f32]| v.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<_>>();
        let mut values = ValueDiff::default();
        values.add(DType::F32, &bytes(a), &bytes(b), Tolerance { rtol, atol });
        values
    }

    #[test]
    fn tolerances_add_up_and_are_relative_to_the_second() {
        assert_eq!(values(&[1.0, 2.0], &[1.0, 2.5], 0.1, 0.25).beyond, 0);
        let far = values(&[1.0, 2.0], &[1.0, 2.5], 0.1, 0.2);
        assert_eq!((far.elements, far.beyond), (2, 1));
        assert_eq!((far.max_absolute, far.at, far.max_relative), (0.5, 1, 0.2));
    }

    #[test]
    fn not_a_number_and_infinity_equal_themselves_only() {
        let nan = f32::from_bits(0x7FC0_0001);
        assert_eq!(values(&[nan, 0.0], &[f32::NAN, -0.0], 0.0, 0.0).beyond, 0);
        let odd = values(&[nan, f32::INFINITY], &[1.0, 1.0], 1e9, 1e9);
        assert_eq!((odd.beyond, odd.max_absolute), (2, f64::INFINITY));
        assert_eq!(values(&[1.0], &[f32::INFINITY], 1.0, 0.0).beyond, 1);
    }
}
