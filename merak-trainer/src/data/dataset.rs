//! Data sets: samples by index.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
    sync::Arc,
};

use super::sample_tensor::SampleTensor;
use crate::error::Result;

/// The name of the tensor with the targets; padding is [`IGNORED_LABEL`] there.
pub const LABELS: &str = "labels";

pub use merak_trace::op::IGNORED_LABEL;

/// Tensors by name: the inputs of the model's graph that a sample gives, without the dimension of
/// the samples.
pub type Sample = BTreeMap<String, SampleTensor>;

/// Names of tensors.
pub type Names = BTreeSet<String>;

/// Samples by index. Ranks that need the same sample call this with the same index and get the same
/// tensors.
pub trait Dataset: Send + Sync + fmt::Debug {
    /// Number of samples; `usize::MAX` for a stream.
    fn len(&self) -> usize;

    /// Whether the number of samples is not known: training then takes them in their order, one
    /// pass without an end.
    fn is_stream(&self) -> bool {
        false
    }

    /// The same samples by another seed, for data sets that draw their order or a part of their
    /// samples, and for those made of such; `None` for others, and where the seed is the same. A
    /// run that is resumed with another seed goes on with the draws that it began with.
    fn reseeded(&self, seed: u64) -> Option<Arc<dyn Dataset>> {
        let _ = seed;
        None
    }

    /// Whether there are no samples.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The sample at `index`, which is less than `len()`.
    ///
    /// # Errors
    ///
    /// When the sample cannot be read.
    fn get(&self, index: usize) -> Result<Sample>;

    /// The sample in pass `epoch` over the data, for data sets that draw a part of their samples.
    /// The draws depend on (seed, epoch, index) only.
    ///
    /// # Errors
    ///
    /// As for [`Dataset::get`].
    fn get_in_epoch(&self, index: usize, epoch: u64) -> Result<Sample> {
        let _ = epoch;
        self.get(index)
    }

    /// The name of a sample, such as that of its file, for people.
    fn name(&self, index: usize) -> Option<String> {
        let _ = index;
        None
    }

    /// Ones for the positions of a sample that are no padding and zeros for the others, for data
    /// sets whose samples have padding that the model is not told of; `None` for others.
    ///
    /// # Errors
    ///
    /// As for [`Dataset::get`].
    fn mask(&self, index: usize) -> Result<Option<Vec<i64>>> {
        let _ = index;
        Ok(None)
    }

    /// Whether [`Dataset::get_tensors`] reads less than whole samples.
    fn reads_tensors(&self) -> bool {
        false
    }

    /// The tensors of these names, of those that the sample has, for data sets that need not read
    /// whole samples (`split_inputs`); `None` for others.
    ///
    /// # Errors
    ///
    /// As for [`Dataset::get`].
    fn get_tensors(&self, index: usize, epoch: u64, names: &Names) -> Result<Option<Sample>> {
        let _ = (index, epoch, names);
        Ok(None)
    }
}

/// A data set that draws by this seed, where it draws.
pub(crate) fn with_seed(data: &Arc<dyn Dataset>, seed: u64) -> Arc<dyn Dataset> {
    data.reseeded(seed).unwrap_or_else(|| Arc::clone(data))
}

/// Whether one of the first `samples` has a label that counts, or none of them has labels at all.
pub(crate) fn has_labels(dataset: &dyn Dataset, samples: usize) -> Result<bool> {
    for index in 0..samples {
        let sample = dataset.get(index)?;
        let labels = sample.get(LABELS).map(SampleTensor::ints);
        if labels.is_none_or(|labels| labels.iter().any(|&label| label != IGNORED_LABEL)) {
            return Ok(true);
        }
    }
    Ok(samples == 0)
}

/// How many of `len` samples are the last `fraction` of them, rounded down.
pub(super) fn held_out(len: usize, fraction: f64) -> usize {
    (len as f64 * fraction) as usize
}

/// The samples of a data set from `first` on.
#[derive(Debug, Clone)]
pub struct Subset {
    data: Arc<dyn Dataset>,
    first: usize,
    len: usize,
}

impl Subset {
    /// Splits off the last `fraction` of the samples, rounded down; none of a stream, which has no
    /// known end.
    pub fn split(data: &Arc<dyn Dataset>, fraction: f64) -> [Self; 2] {
        let held_out = if data.is_stream() {
            0
        } else {
            held_out(data.len(), fraction)
        };
        let kept = data.len() - held_out;
        [(0, kept), (kept, held_out)].map(|(first, len)| Self {
            data: Arc::clone(data),
            first,
            len,
        })
    }
}

impl Dataset for Subset {
    fn len(&self) -> usize {
        self.len
    }

    fn is_stream(&self) -> bool {
        self.len > 0 && self.data.is_stream()
    }

    fn reseeded(&self, seed: u64) -> Option<Arc<dyn Dataset>> {
        let data = self.data.reseeded(seed)?;
        Some(Arc::new(Self { data, ..*self }))
    }

    fn get(&self, index: usize) -> Result<Sample> {
        self.data.get(self.first + index)
    }

    fn get_in_epoch(&self, index: usize, epoch: u64) -> Result<Sample> {
        self.data.get_in_epoch(self.first + index, epoch)
    }

    fn name(&self, index: usize) -> Option<String> {
        self.data.name(self.first + index)
    }

    fn mask(&self, index: usize) -> Result<Option<Vec<i64>>> {
        self.data.mask(self.first + index)
    }

    fn reads_tensors(&self) -> bool {
        self.data.reads_tensors()
    }

    fn get_tensors(&self, index: usize, epoch: u64, names: &Names) -> Result<Option<Sample>> {
        self.data.get_tensors(self.first + index, epoch, names)
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    #[derive(Debug)]
    pub(crate) struct Samples(pub(crate) Vec<Sample>);

    impl Dataset for Samples {
        fn len(&self) -> usize {
            self.0.len()
        }

        fn get(&self, index: usize) -> Result<Sample> {
            Ok(self.0[index].clone())
        }
    }

    pub(crate) fn sample(tensors: &[(&str, &[i64])]) -> Sample {
        tensors
            .iter()
            .map(|(name, values)| ((*name).to_owned(), SampleTensor::vector(values.to_vec())))
            .collect()
    }

    #[test]
    fn one_label_among_many_samples_is_enough() {
        let labels = |labels: &[i64]| sample(&[("labels", labels)]);
        let data = Samples(vec![labels(&[-100; 2]), labels(&[-100, 0])]);
        let found = [0, 1, 2].map(|samples| has_labels(&data, samples).unwrap());
        assert_eq!(found, [true, false, true]);
        let without = Samples(vec![sample(&[("input_ids", &[1])])]);
        assert!(has_labels(&without, 1).unwrap());
    }
}
