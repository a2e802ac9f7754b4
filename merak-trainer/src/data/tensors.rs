//! Tensors from files as the samples of a model.

use merak_ckpt::DType;
use merak_trace::models::Objective;

use super::{
    dataset::{Dataset, IGNORED_LABEL, LABELS, Names, Sample},
    inputs::{ATTENTION_MASK, ModelInput, ModelInputs},
    packed::DOCUMENT_IDS,
    sample_tensor::SampleTensor,
    tensor_files::TensorFiles,
    translation::moved_right,
};
use crate::error::{DataError, Error, Result};
use merak_mpu::names::nearest;

/// The name of what a decoder reads.
const DECODER_INPUT_IDS: &str = "decoder_input_ids";

/// A tensor that samples lack and that is made from their others.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Derived {
    Nothing,
    /// `labels`: the token after each.
    NextTokens,
    /// `decoder_input_ids`: the labels moved one to the right.
    DecoderInputs {
        start: u32,
        pad: u32,
    },
}

/// The samples of [`TensorFiles`] as a model reads them.
///
/// Integers of any width become 64-bit ones, floats `f32`; where a model reads floats, bytes (`u8`)
/// are pixels and become `x / 127.5 - 1`, as `ViTImageProcessor` has them.
///
/// Labels of models that predict the next token stand at the position that predicts them; without
/// labels they are made of `input_ids` (the next token, none after the last or where one of the
/// two is padding or in another document by `document_ids`). `decoder_input_ids` are made of
/// `labels` where they are missing.
#[derive(Debug)]
pub struct TensorDataset {
    files: TensorFiles,
    /// Names of the tensors, and whether each is read as floats.
    read: Vec<(String, bool)>,
    derived: Derived,
}

impl TensorDataset {
    /// Checks the tensors against the inputs of a model, their integers one by one. A decoder
    /// starts from the token `start`; the token `pad` fills sequences up. With `shift_labels` the
    /// labels are those of Hugging Face, which [`Collation`](super::Collation) moves.
    ///
    /// # Errors
    ///
    /// A tensor that is missing, of another type or size, or with a value that the model cannot
    /// take; one that the model does not read.
    pub fn new(
        files: TensorFiles,
        model: &ModelInputs,
        (start, pad): (u32, u32),
        shift_labels: bool,
    ) -> Result<Self> {
        let is_there = |name: &str| files.shape(name).is_some();
        if shift_labels && !is_there(LABELS) {
            return Err(Error::Data(DataError::NothingToShift));
        }
        let derived = match model.objective {
            Objective::CausalLm if !is_there(LABELS) => Derived::NextTokens,
            Objective::SequenceToSequence if !is_there(DECODER_INPUT_IDS) => {
                Derived::DecoderInputs { start, pad }
            }
            _ => Derived::Nothing,
        };
        let mut read = Vec::new();
        for input in &model.inputs {
            let is_derived = match derived {
                Derived::Nothing => false,
                Derived::NextTokens => input.name == LABELS,
                Derived::DecoderInputs { .. } => input.name == DECODER_INPUT_IDS,
            };
            if is_derived || input.is_optional && !is_there(&input.name) {
                continue;
            }
            read.push((input.name.clone(), check_type(&files, model, input)?));
        }
        check_names(&files, model)?;
        let data = Self {
            files,
            read,
            derived,
        };
        data.check_values(model, shift_labels)?;
        Ok(data)
    }

    /// Reads every integer once.
    fn check_values(&self, model: &ModelInputs, shift_labels: bool) -> Result<()> {
        let is_read = |input: &&ModelInput| self.read.iter().any(|(name, _)| *name == input.name);
        let limited = model.inputs.iter().filter(|input| input.limit.is_some());
        for input in limited.filter(is_read) {
            for sample in 0..self.files.samples() {
                let tensor = self.files.read(&input.name, sample, false)?;
                model.check_values(input, sample, tensor.ints())?;
            }
        }
        if model.objective == Objective::CausalLm {
            self.check_mask(model)?;
            if !shift_labels {
                self.check_shift(model)?;
            }
        }
        Ok(())
    }

    /// Checks a mask that says where padding is, though the model does not read it.
    fn check_mask(&self, model: &ModelInputs) -> Result<()> {
        if self.files.shape(ATTENTION_MASK).is_none() || model.get(ATTENTION_MASK).is_some() {
            return Ok(());
        }
        let mask = ModelInput {
            name: ATTENTION_MASK.to_owned(),
            shape: vec![model.lengths.input],
            dtype: merak_mpu::DType::I64,
            limit: Some(2),
            is_label: false,
            is_optional: true,
        };
        check_type(&self.files, model, &mask)?;
        for sample in 0..self.files.samples() {
            let values = self.files.read(ATTENTION_MASK, sample, false)?;
            model.check_values(&mask, sample, values.ints())?;
        }
        Ok(())
    }

    /// Labels that repeat the tokens, as Hugging Face has them, would teach a model to repeat its
    /// input.
    fn check_shift(&self, model: &ModelInputs) -> Result<()> {
        if self.derived == Derived::NextTokens || self.files.samples() == 0 {
            return Ok(());
        }
        let ids = self.files.read("input_ids", 0, false)?;
        let labels = self.files.read(LABELS, 0, false)?;
        let repeats = |(id, label): (&i64, &i64)| label == id || *label == IGNORED_LABEL;
        let is_labelled = labels.ints().iter().any(|&label| label != IGNORED_LABEL);
        if is_labelled && ids.ints().len() > 1 && ids.ints().iter().zip(labels.ints()).all(repeats)
        {
            return Err(Error::Data(DataError::UnshiftedLabels {
                family: model.family,
            }));
        }
        Ok(())
    }

    /// Reads the tensors that are wanted, and those that they are made of.
    fn read(&self, index: usize, is_wanted: impl Fn(&str) -> bool) -> Result<Sample> {
        let sources: &[&str] = match self.derived {
            Derived::NextTokens if is_wanted(LABELS) => &["input_ids", DOCUMENT_IDS],
            Derived::DecoderInputs { .. } if is_wanted(DECODER_INPUT_IDS) => &[LABELS],
            _ => &[],
        };
        let mut sample = Sample::new();
        for (name, as_floats) in &self.read {
            if is_wanted(name) || sources.contains(&&**name) {
                sample.insert(name.clone(), self.files.read(name, index, *as_floats)?);
            }
        }
        if sources.is_empty() {
            return Ok(sample);
        }
        match self.derived {
            Derived::Nothing => {}
            Derived::NextTokens => {
                let labels = self.next_tokens(&sample, index)?;
                sample.insert(LABELS.to_owned(), labels);
            }
            Derived::DecoderInputs { start, pad } => {
                let ids = moved_right(sample[LABELS].ints(), start, pad);
                let ids = SampleTensor::vector(ids);
                sample.insert(DECODER_INPUT_IDS.to_owned(), ids);
            }
        }
        Ok(sample)
    }

    /// The token after each, none where there is none or one of the two is padding or in another
    /// document.
    fn next_tokens(&self, sample: &Sample, index: usize) -> Result<SampleTensor> {
        let ids = sample["input_ids"].ints();
        let mut labels = ids.get(1..).unwrap_or_default().to_vec();
        if let Some(documents) = sample.get(DOCUMENT_IDS) {
            for (label, pair) in labels.iter_mut().zip(documents.ints().windows(2)) {
                if pair[0] != pair[1] {
                    *label = IGNORED_LABEL;
                }
            }
        }
        if self.files.shape(ATTENTION_MASK).is_some() {
            let mask = self.files.read(ATTENTION_MASK, index, false)?;
            for (label, seen) in labels.iter_mut().zip(mask.ints().windows(2)) {
                if seen.contains(&0) {
                    *label = IGNORED_LABEL;
                }
            }
        }
        labels.push(IGNORED_LABEL);
        Ok(SampleTensor::vector(labels))
    }
}

impl Dataset for TensorDataset {
    fn len(&self) -> usize {
        self.files.samples()
    }

    fn get(&self, index: usize) -> Result<Sample> {
        self.read(index, |_| true)
    }

    fn mask(&self, index: usize) -> Result<Option<Vec<i64>>> {
        let is_there = self.files.shape(ATTENTION_MASK).is_some();
        let mask = is_there.then(|| self.files.read(ATTENTION_MASK, index, false));
        Ok(mask.transpose()?.map(|mask| mask.ints().to_vec()))
    }

    fn reads_tensors(&self) -> bool {
        true
    }

    fn get_tensors(&self, index: usize, _epoch: u64, names: &Names) -> Result<Option<Sample>> {
        let mut sample = self.read(index, |name| names.contains(name))?;
        sample.retain(|name, _| names.contains(name));
        Ok(Some(sample))
    }
}

/// Refuses tensors that are not read: a mistyped name, or an input that `transformers` would use.
fn check_names(files: &TensorFiles, model: &ModelInputs) -> Result<()> {
    let mut read: Vec<_> = model.inputs.iter().map(|input| &*input.name).collect();
    // A mask may be there although the model does not read it: it is checked and serves to make
    // labels.
    if model.objective == Objective::CausalLm && !read.contains(&ATTENTION_MASK) {
        read.push(ATTENTION_MASK);
    }
    match files.names().find(|name| !read.contains(name)) {
        None => Ok(()),
        Some(name) => Err(Error::Data(DataError::UnreadTensor {
            name: name.to_owned(),
            family: model.family,
            read: read.join(", "),
            nearest: nearest(name, read).map(str::to_owned),
        })),
    }
}

/// Whether a tensor is read as floats; an error where its type or sizes are not the model's.
fn check_type(files: &TensorFiles, model: &ModelInputs, input: &ModelInput) -> Result<bool> {
    let (Some(dtype), Some(shape)) = (files.dtype(&input.name), files.shape(&input.name)) else {
        return Err(model.missing(input, &files.names().collect::<Vec<_>>()));
    };
    let as_floats = input.dtype != merak_mpu::DType::I64;
    let fits = if as_floats {
        dtype.is_float() || dtype == DType::U8
    } else {
        !dtype.is_float()
    };
    if !fits || shape != input.shape {
        let found = format!("{dtype} of shape {shape:?} per sample");
        return Err(model.mistyped(input, found));
    }
    Ok(as_floats)
}
