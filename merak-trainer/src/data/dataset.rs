//! Data sets and the batches that are made of them.

use std::collections::BTreeMap;

use super::order::Microbatch;
use crate::error::{Error, Result};

/// The name of the tensor with the targets; padding is [`IGNORED_LABEL`] there.
pub const LABELS: &str = "labels";

/// The label of a position without a target.
pub const IGNORED_LABEL: i64 = -100;

/// Integers in row-major order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct IntTensor {
    shape: Vec<usize>,
    values: Vec<i64>,
}

impl IntTensor {
    /// A vector.
    pub fn vector(values: Vec<i64>) -> Self {
        Self {
            shape: vec![values.len()],
            values,
        }
    }

    /// A tensor of any shape; `None` unless `values` fill it exactly.
    pub fn new(shape: Vec<usize>, values: Vec<i64>) -> Option<Self> {
        let count = shape
            .iter()
            .try_fold(1_usize, |count, size| count.checked_mul(*size))?;
        (count == values.len()).then_some(Self { shape, values })
    }

    /// The sizes, outermost first.
    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// The values.
    pub fn values(&self) -> &[i64] {
        &self.values
    }

    /// The shape and the values.
    pub fn into_parts(self) -> (Vec<usize>, Vec<i64>) {
        (self.shape, self.values)
    }
}

/// Tensors by name.
pub type Sample = BTreeMap<String, IntTensor>;

/// Samples by index. Ranks that need the same sample call this with the same index and get the same
/// tensors.
pub trait Dataset: Send + Sync + std::fmt::Debug {
    /// Number of samples.
    fn len(&self) -> usize;

    /// Whether there is none.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The sample at `index`, which is less than `len()`.
    ///
    /// # Errors
    ///
    /// When the sample cannot be read.
    fn get(&self, index: usize) -> Result<Sample>;
}

/// A microbatch with its tensors.
///
/// # Shapes
///
/// A tensor `[..]` of the samples is `[B, ..]` here, with B = `microbatch.rows`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Batch {
    /// Which samples these are.
    pub microbatch: Microbatch,
    /// The stacked tensors, by name.
    pub tensors: BTreeMap<String, IntTensor>,
}

/// Reads the samples of a microbatch and stacks them by name. Missing rows are zeros, and
/// [`IGNORED_LABEL`] in [`LABELS`].
///
/// # Errors
///
/// When a sample cannot be read, or its tensors differ in name or shape from those of the first.
pub fn collate(dataset: &dyn Dataset, microbatch: Microbatch) -> Result<Batch> {
    let samples: Vec<Sample> = microbatch
        .indices
        .iter()
        .map(|index| dataset.get(*index))
        .collect::<Result<_>>()?;
    // An empty microbatch still needs the names and shapes.
    let pattern = match samples.first() {
        Some(first) => first.clone(),
        None => dataset.get(0)?,
    };
    let mut tensors = BTreeMap::new();
    for (name, like) in &pattern {
        let mut values = Vec::with_capacity(like.values.len() * microbatch.rows);
        for (sample, index) in samples.iter().zip(&microbatch.indices) {
            values.extend_from_slice(&matching(sample, *index, name, like)?.values);
        }
        let padding = if name == LABELS { IGNORED_LABEL } else { 0 };
        values.resize(like.values.len() * microbatch.rows, padding);
        let shape = [&[microbatch.rows], like.shape()].concat();
        tensors.insert(name.clone(), IntTensor { shape, values });
    }
    for (sample, index) in samples.iter().zip(&microbatch.indices) {
        if let Some(name) = sample.keys().find(|name| !pattern.contains_key(*name)) {
            let found = format!("of shape {:?}", sample[name].shape());
            return Err(Error::UnlikeSamples {
                name: name.clone(),
                sample: *index,
                found,
                expected: "absent".into(),
            });
        }
    }
    Ok(Batch {
        microbatch,
        tensors,
    })
}

fn matching<'a>(
    sample: &'a Sample,
    index: usize,
    name: &str,
    like: &IntTensor,
) -> Result<&'a IntTensor> {
    let tensor = sample.get(name);
    match tensor {
        Some(tensor) if tensor.shape == like.shape => Ok(tensor),
        _ => Err(Error::UnlikeSamples {
            name: name.to_owned(),
            sample: index,
            found: tensor.map_or("absent".into(), |tensor| {
                format!("of shape {:?}", tensor.shape)
            }),
            expected: format!("of shape {:?}", like.shape),
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug)]
    struct Samples(Vec<Sample>);

    impl Dataset for Samples {
        fn len(&self) -> usize {
            self.0.len()
        }

        fn get(&self, index: usize) -> Result<Sample> {
            Ok(self.0[index].clone())
        }
    }

    fn sample(tensors: &[(&str, &[i64])]) -> Sample {
        tensors
            .iter()
            .map(|(name, values)| ((*name).to_owned(), IntTensor::vector(values.to_vec())))
            .collect()
    }

    fn take(indices: &[usize], rows: usize) -> Microbatch {
        Microbatch {
            first_position: 0,
            indices: indices.to_vec(),
            rows,
        }
    }

    #[test]
    fn samples_are_stacked_by_name_and_filled_up_without_labels() {
        let data = Samples(vec![
            sample(&[("input_ids", &[1, 2]), ("labels", &[2, 3])]),
            sample(&[("labels", &[5, 6]), ("input_ids", &[4, 5])]),
        ]);
        let batch = collate(&data, take(&[1, 0], 3)).unwrap();
        let ids = &batch.tensors["input_ids"];
        assert_eq!(
            (ids.shape(), ids.values()),
            (&[3, 2][..], &[4, 5, 1, 2, 0, 0][..])
        );
        assert_eq!(batch.tensors["labels"].values(), [5, 6, 2, 3, -100, -100]);
        let empty = collate(&data, take(&[], 1)).unwrap();
        assert_eq!(empty.tensors["labels"].values(), [-100, -100]);
    }

    #[test]
    fn unlike_samples_are_refused_by_name_and_index() {
        let data = Samples(vec![
            sample(&[("a", &[1, 2])]),
            sample(&[("a", &[1])]),
            sample(&[("a", &[1, 2]), ("b", &[1])]),
            sample(&[("b", &[1])]),
        ]);
        let refuse = |second| collate(&data, take(&[0, second], 2)).unwrap_err();
        insta::assert_snapshot!(refuse(1), @r#"the tensor "a" of sample 1 is of shape [1], but must be of shape [2] as in the batch's first sample"#);
        insta::assert_snapshot!(refuse(2), @r#"the tensor "b" of sample 2 is of shape [1], but must be absent as in the batch's first sample"#);
        insta::assert_snapshot!(refuse(3), @r#"the tensor "a" of sample 3 is absent, but must be of shape [2] as in the batch's first sample"#);
    }

    #[test]
    fn a_tensor_is_filled_exactly() {
        assert!(IntTensor::new(vec![2, 3], vec![0; 6]).is_some());
        assert!(IntTensor::new(vec![2, 3], vec![0; 5]).is_none());
        assert!(IntTensor::new(vec![usize::MAX, 2], vec![]).is_none());
    }
}
