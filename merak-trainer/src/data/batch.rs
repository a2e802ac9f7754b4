//! Batches, and how samples become one.

use std::{collections::BTreeMap, fmt, sync::Arc};

use super::{
    dataset::{Dataset, IGNORED_LABEL, LABELS, Names, Sample},
    order::Microbatch,
    packed::DOCUMENT_IDS,
    sample_tensor::SampleTensor,
};
use crate::error::{DataError, Error, Result};

/// A microbatch with its tensors.
///
/// # Shapes
///
/// A tensor `[..]` of the samples is `[B, ..]` here, with B = `microbatch.rows`.
#[derive(Debug, Clone, PartialEq)]
pub struct Batch {
    /// Which samples these are.
    pub microbatch: Microbatch,
    /// The stacked tensors, by name.
    pub tensors: BTreeMap<String, SampleTensor>,
}

impl Batch {
    /// Moves each label one to the left. The last token of a row has none then, and the last of a
    /// document none of the next one.
    fn shift_labels(&mut self) {
        let documents = self.tensors.get(DOCUMENT_IDS).map(SampleTensor::ints);
        let documents = documents.map(<[i64]>::to_vec).unwrap_or_default();
        let Some(labels) = self.tensors.get_mut(LABELS) else {
            return;
        };
        let width = labels.shape().last().copied().unwrap_or(1).max(1);
        let Some(values) = labels.ints_mut() else {
            return;
        };
        for (row, labels) in values.chunks_mut(width).enumerate() {
            labels.rotate_left(1);
            labels[width - 1] = IGNORED_LABEL;
            let documents = documents.get(row * width..).unwrap_or_default();
            for (label, pair) in labels.iter_mut().zip(documents.windows(2)) {
                if pair[0] != pair[1] {
                    *label = IGNORED_LABEL;
                }
            }
        }
    }
}

/// Makes the tensors of a microbatch of its samples: by name, each with the rows first. Rows after
/// the samples are to be filled up, with [`IGNORED_LABEL`] in [`LABELS`]; an empty microbatch gets
/// no samples and still needs its tensors.
pub type Collator =
    Arc<dyn Fn(&[Sample], usize) -> Result<BTreeMap<String, SampleTensor>> + Send + Sync>;

/// How samples become batches.
#[derive(Clone, Default)]
pub struct Collation {
    /// Makes microbatches of samples; unset: [`collate`].
    pub collator: Option<Collator>,
    /// Whether each label stands at its own token and moves to the token before it, which predicts
    /// it.
    pub shift_labels: bool,
    /// The tensors that are needed of each sample, where data sets may leave out others.
    pub names: Option<Arc<Names>>,
}

impl Collation {
    /// A sample with the tensors that are needed, or all of them.
    fn sample(&self, dataset: &dyn Dataset, index: usize, epoch: u64) -> Result<Sample> {
        if let Some(names) = &self.names
            && let Some(sample) = dataset.get_tensors(index, epoch, names)?
        {
            return Ok(sample);
        }
        dataset.get_in_epoch(index, epoch)
    }

    /// Reads the samples of a microbatch and makes its tensors.
    ///
    /// # Errors
    ///
    /// As [`collate`], or those of the collator; [`DataError::UnlikeSamples`] for a tensor of other
    /// rows than the microbatch's.
    pub fn batch(&self, dataset: &dyn Dataset, microbatch: Microbatch) -> Result<Batch> {
        let epoch = microbatch.epoch;
        let mut batch = if let Some(collator) = &self.collator {
            collated_by(collator, dataset, microbatch)?
        } else {
            stacked(|index| self.sample(dataset, index, epoch), microbatch)?
        };
        if self.shift_labels {
            batch.shift_labels();
        }
        Ok(batch)
    }
}

impl fmt::Debug for Collation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Collation")
            .field("shift_labels", &self.shift_labels)
            .field("names", &self.names)
            .finish_non_exhaustive()
    }
}

/// Reads the samples of a microbatch and stacks them by name. Missing rows are zeros, and
/// [`IGNORED_LABEL`] in [`LABELS`].
///
/// # Errors
///
/// When a sample cannot be read, its tensors differ in name or shape from those of the first, or
/// there is none in the data set.
pub fn collate(dataset: &dyn Dataset, microbatch: Microbatch) -> Result<Batch> {
    if microbatch.indices.is_empty() && dataset.is_empty() {
        let error = DataError::out_of_range("samples of the data set", 0, "at least 1");
        return Err(Error::Data(error));
    }
    let epoch = microbatch.epoch;
    stacked(|index| dataset.get_in_epoch(index, epoch), microbatch)
}

/// As [`collate`], of the samples that `read` gives.
fn stacked(read: impl Fn(usize) -> Result<Sample>, microbatch: Microbatch) -> Result<Batch> {
    let indices = microbatch.indices.iter();
    let samples: Vec<Sample> = indices.map(|&index| read(index)).collect::<Result<_>>()?;
    // An empty microbatch still needs the names and shapes.
    let pattern = match samples.first() {
        Some(first) => first.clone(),
        None => read(0)?,
    };
    let mut tensors = BTreeMap::new();
    for (name, like) in &pattern {
        let rows = samples.iter().zip(&microbatch.indices);
        let rows = rows.map(|(sample, index)| matching(sample, *index, name, like));
        let rows = rows.collect::<Result<Vec<_>>>()?;
        let padding = if name == LABELS { IGNORED_LABEL } else { 0 };
        tensors.insert(name.clone(), like.stack(&rows, microbatch.rows, padding));
    }
    for (sample, index) in samples.iter().zip(&microbatch.indices) {
        if let Some(name) = sample.keys().find(|name| !pattern.contains_key(*name)) {
            let found = sample[name].describe();
            return Err(Error::Data(DataError::UnlikeSamples {
                name: name.clone(),
                sample: *index,
                found,
                expected: "absent".into(),
            }));
        }
    }
    Ok(Batch {
        microbatch,
        tensors,
    })
}

fn collated_by(
    collator: &Collator,
    dataset: &dyn Dataset,
    microbatch: Microbatch,
) -> Result<Batch> {
    let indices = microbatch.indices.iter();
    let samples = indices.map(|&index| dataset.get_in_epoch(index, microbatch.epoch));
    let samples = samples.collect::<Result<Vec<_>>>()?;
    let tensors = collator(&samples, microbatch.rows)?;
    for (name, tensor) in &tensors {
        if tensor.shape().first() != Some(&microbatch.rows) {
            return Err(Error::Data(DataError::UnlikeSamples {
                name: name.clone(),
                sample: microbatch.indices.first().copied().unwrap_or_default(),
                found: tensor.describe(),
                expected: format!("{} rows from the collator", microbatch.rows),
            }));
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
    like: &SampleTensor,
) -> Result<&'a SampleTensor> {
    let tensor = sample.get(name);
    let is_like =
        |tensor: &SampleTensor| tensor.shape() == like.shape() && tensor.dtype() == like.dtype();
    match tensor {
        Some(tensor) if is_like(tensor) => Ok(tensor),
        _ => Err(Error::Data(DataError::UnlikeSamples {
            name: name.to_owned(),
            sample: index,
            found: tensor.map_or("absent".into(), SampleTensor::describe),
            expected: like.describe(),
        })),
    }
}

#[cfg(test)]
mod tests {
    use super::{
        super::dataset::tests::{Samples, sample},
        *,
    };

    fn take(indices: &[usize], rows: usize) -> Microbatch {
        Microbatch {
            first_position: 0,
            indices: indices.to_vec(),
            rows,
            epoch: 0,
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
            (ids.shape(), ids.ints()),
            (&[3, 2][..], &[4, 5, 1, 2, 0, 0][..])
        );
        assert_eq!(batch.tensors["labels"].ints(), [5, 6, 2, 3, -100, -100]);
        let empty = collate(&data, take(&[], 1)).unwrap();
        assert_eq!(empty.tensors["labels"].ints(), [-100, -100]);
    }

    #[test]
    fn labels_at_their_own_tokens_move_to_those_that_predict_them() {
        let data = Samples(vec![
            sample(&[("labels", &[1, 2, -100, 4]), ("document_ids", &[7; 4])]),
            sample(&[("labels", &[5, 6, 7, 8]), ("document_ids", &[1, 1, 0, 0])]),
        ]);
        let shifts = Collation {
            shift_labels: true,
            ..Collation::default()
        };
        let batch = shifts.batch(&data, take(&[0, 1], 2)).unwrap();
        let expected = [2, -100, 4, -100, 6, -100, 8, -100];
        assert_eq!(batch.tensors["labels"].ints(), expected);
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
        insta::assert_snapshot!(refuse(1), @r#"the tensor "a" of sample 1 is i64 of shape [1], but must be i64 of shape [2] as in the batch's first sample"#);
        insta::assert_snapshot!(refuse(2), @r#"the tensor "b" of sample 2 is i64 of shape [1], but must be absent as in the batch's first sample"#);
        insta::assert_snapshot!(refuse(3), @r#"the tensor "a" of sample 3 is absent, but must be i64 of shape [2] as in the batch's first sample"#);
    }

    #[test]
    fn floats_are_stacked_beside_integers_and_filled_up_with_zeros() {
        let image = |pixels| SampleTensor::floats(vec![1, 2], pixels).unwrap();
        let samples = [vec![0.5, 1.5], vec![2.5, 3.5]]
            .map(|pixels| Sample::from([("pixels".to_owned(), image(pixels))]));
        let data = Samples(samples.to_vec());
        let batch = collate(&data, take(&[1, 0], 3)).unwrap();
        let expected = SampleTensor::floats(vec![3, 1, 2], vec![2.5, 3.5, 0.5, 1.5, 0.0, 0.0]);
        assert_eq!(Some(&batch.tensors["pixels"]), expected.as_ref());

        let mut mixed = samples.to_vec();
        mixed[1].insert(
            "pixels".to_owned(),
            SampleTensor::new(vec![1, 2], vec![1, 2]).unwrap(),
        );
        let error = collate(&Samples(mixed), take(&[0, 1], 2)).unwrap_err();
        insta::assert_snapshot!(error, @r#"the tensor "pixels" of sample 1 is i64 of shape [1, 2], but must be f32 of shape [1, 2] as in the batch's first sample"#);
    }
}
