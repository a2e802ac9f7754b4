//! Data sets and the batches that are made of them.

use std::{
    borrow::Cow,
    collections::{BTreeMap, BTreeSet},
    fmt,
    sync::Arc,
};

use half::{bf16, f16};
use merak_mpu::DType;

use super::{order::Microbatch, packed::DOCUMENT_IDS};
use crate::error::{DataError, Error, Result};

/// The name of the tensor with the targets; padding is [`IGNORED_LABEL`] there.
pub const LABELS: &str = "labels";

pub use merak_trace::op::IGNORED_LABEL;

/// Numbers in row-major order: integers (tokens, labels, masks) or floats (pixels).
#[derive(Debug, Clone, PartialEq)]
pub struct SampleTensor {
    shape: Vec<usize>,
    values: Values,
}

#[derive(Debug, Clone, PartialEq)]
enum Values {
    Ints(Vec<i64>),
    Floats(Vec<f32>),
}

impl SampleTensor {
    /// A vector of integers.
    pub fn vector(values: Vec<i64>) -> Self {
        Self {
            shape: vec![values.len()],
            values: Values::Ints(values),
        }
    }

    /// Integers of any shape; `None` unless `values` fill it exactly.
    pub fn new(shape: Vec<usize>, values: Vec<i64>) -> Option<Self> {
        fills(&shape, values.len()).then_some(Self {
            shape,
            values: Values::Ints(values),
        })
    }

    /// Floats of any shape; `None` unless `values` fill it exactly.
    pub fn floats(shape: Vec<usize>, values: Vec<f32>) -> Option<Self> {
        fills(&shape, values.len()).then_some(Self {
            shape,
            values: Values::Floats(values),
        })
    }

    /// The sizes, outermost first.
    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// The type of the elements.
    pub fn dtype(&self) -> DType {
        match self.values {
            Values::Ints(_) => DType::I64,
            Values::Floats(_) => DType::F32,
        }
    }

    /// The integers; empty for a tensor of floats.
    pub fn ints(&self) -> &[i64] {
        match &self.values {
            Values::Ints(values) => values,
            Values::Floats(_) => &[],
        }
    }

    /// The bytes of the elements, in the machine's order.
    pub fn as_bytes(&self) -> &[u8] {
        match &self.values {
            Values::Ints(values) => bytemuck::cast_slice(values),
            Values::Floats(values) => bytemuck::cast_slice(values),
        }
    }

    /// The bytes of the elements, with floats converted to the floating-point type `dtype`.
    pub(crate) fn bytes_as(&self, dtype: DType) -> Cow<'_, [u8]> {
        let Values::Floats(values) = &self.values else {
            return Cow::Borrowed(self.as_bytes());
        };
        let values = values.iter();
        match dtype {
            DType::BF16 => values
                .flat_map(|&x| bf16::from_f32(x).to_ne_bytes())
                .collect(),
            DType::F16 => values
                .flat_map(|&x| f16::from_f32(x).to_ne_bytes())
                .collect(),
            DType::F64 => values.flat_map(|&x| f64::from(x).to_ne_bytes()).collect(),
            _ => Cow::Borrowed(self.as_bytes()),
        }
    }

    pub(crate) fn describe(&self) -> String {
        format!("{} of shape {:?}", self.dtype(), self.shape)
    }

    /// Tensors like this one stacked along a new first dimension of `rows`, filled up with
    /// `padding`.
    fn stack(&self, tensors: &[&Self], rows: usize, padding: i64) -> Self {
        let len = rows * self.shape.iter().product::<usize>();
        let values = match self.values {
            Values::Ints(_) => {
                let ints = tensors.iter().flat_map(|tensor| tensor.ints());
                let mut ints: Vec<_> = ints.copied().collect();
                ints.resize(len, padding);
                Values::Ints(ints)
            }
            Values::Floats(_) => {
                let mut all = Vec::with_capacity(len);
                for tensor in tensors {
                    if let Values::Floats(floats) = &tensor.values {
                        all.extend_from_slice(floats);
                    }
                }
                all.resize(len, 0.0);
                Values::Floats(all)
            }
        };
        Self {
            shape: [&[rows], &self.shape[..]].concat(),
            values,
        }
    }
}

fn fills(shape: &[usize], len: usize) -> bool {
    let mut sizes = shape.iter();
    sizes.try_fold(1_usize, |count, size| count.checked_mul(*size)) == Some(len)
}

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

    /// The same samples in the order of another seed, for data sets that order them themselves;
    /// `None` for others, and where the seed is the same. A resumed run goes on in the order that
    /// it began with.
    fn reseeded(&self, seed: u64) -> Option<Arc<dyn Dataset>> {
        let _ = seed;
        None
    }

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

    /// The file or the like that a sample is, for people.
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

/// Reads the samples of a microbatch and stacks them by name. Missing rows are zeros, and
/// [`IGNORED_LABEL`] in [`LABELS`].
///
/// # Errors
///
/// When a sample cannot be read, or its tensors differ in name or shape from those of the first.
pub fn collate(dataset: &dyn Dataset, microbatch: Microbatch) -> Result<Batch> {
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

/// Makes the tensors of a microbatch of its samples: by name, each with the rows first. Rows behind
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

impl Batch {
    /// Moves each label one to the left. The last token of a row has none then, and the last of a
    /// document none of the next one.
    fn shift_labels(&mut self) {
        let documents = self.tensors.get(DOCUMENT_IDS).map(SampleTensor::ints);
        let documents = documents.map(<[i64]>::to_vec).unwrap_or_default();
        let Some(labels) = self.tensors.get_mut(LABELS) else {
            return;
        };
        let width = labels.shape.last().copied().unwrap_or(1).max(1);
        let Values::Ints(values) = &mut labels.values else {
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
        |tensor: &SampleTensor| tensor.shape == like.shape && tensor.dtype() == like.dtype();
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
            .map(|(name, values)| ((*name).to_owned(), SampleTensor::vector(values.to_vec())))
            .collect()
    }

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
    fn one_label_among_many_samples_is_enough() {
        let labels = |labels: &[i64]| sample(&[("labels", labels)]);
        let data = Samples(vec![labels(&[-100; 2]), labels(&[-100, 0])]);
        let found = [0, 1, 2].map(|samples| has_labels(&data, samples).unwrap());
        assert_eq!(found, [true, false, true]);
        let without = Samples(vec![sample(&[("input_ids", &[1])])]);
        assert!(has_labels(&without, 1).unwrap());
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
    fn floats_come_in_the_type_that_a_model_computes_in() {
        let tensor = SampleTensor::floats(vec![2], vec![0.5, -3.0]).unwrap();
        let bytes = |values: [u16; 2]| values.map(u16::to_ne_bytes).concat();
        assert_eq!(*tensor.bytes_as(DType::BF16), bytes([0x3f00, 0xc040]));
        assert_eq!(*tensor.bytes_as(DType::F16), bytes([0x3800, 0xc200]));
        assert_eq!(*tensor.bytes_as(DType::F32), *tensor.as_bytes());
        let ints = SampleTensor::vector(vec![1, 2]);
        assert_eq!(*ints.bytes_as(DType::BF16), *ints.as_bytes());
    }

    #[test]
    fn a_tensor_is_filled_exactly() {
        assert!(SampleTensor::new(vec![2, 3], vec![0; 6]).is_some());
        assert!(SampleTensor::new(vec![2, 3], vec![0; 5]).is_none());
        assert!(SampleTensor::floats(vec![2, 3], vec![0.0; 5]).is_none());
        assert!(SampleTensor::new(vec![usize::MAX, 2], vec![]).is_none());
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
