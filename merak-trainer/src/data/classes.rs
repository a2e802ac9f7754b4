//! Texts with a class each.

use super::{
    dataset::{Dataset, LABELS, Sample},
    inputs::ATTENTION_MASK,
    sample_tensor::SampleTensor,
    tokenizer::Encoded,
    translation::{filled, mask},
};
use crate::error::Result;

/// A text as tokens, and its class.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LabelledText {
    /// The tokens, at most as many as a sample has.
    pub text: Encoded,
    /// Its class.
    pub label: i64,
}

/// Texts or pairs of texts, each with a class.
///
/// # Shapes
///
/// `input_ids`, `attention_mask`, `token_type_ids`: `[S]`; `labels: []`.
#[derive(Debug, Clone)]
pub struct ClassDataset {
    texts: Vec<LabelledText>,
    seq_length: usize,
    pad: u32,
}

impl ClassDataset {
    /// Fills texts up to `seq_length` (S) with `pad`.
    pub fn new(texts: Vec<LabelledText>, seq_length: usize, pad: u32) -> Self {
        Self {
            texts,
            seq_length,
            pad,
        }
    }
}

impl Dataset for ClassDataset {
    fn len(&self) -> usize {
        self.texts.len()
    }

    fn get(&self, index: usize) -> Result<Sample> {
        let LabelledText { text, label } = &self.texts[index];
        let tensors = [
            (
                "input_ids",
                filled(&text.ids, self.seq_length, self.pad.into()),
            ),
            (ATTENTION_MASK, mask(text.ids.len(), self.seq_length)),
            ("token_type_ids", filled(&text.types, self.seq_length, 0)),
        ];
        let named = tensors.map(|(name, values)| (name.to_owned(), SampleTensor::vector(values)));
        let mut sample = Sample::from(named);
        let label = SampleTensor::new(vec![], vec![*label]).expect("a scalar has one element");
        sample.insert(LABELS.to_owned(), label);
        Ok(sample)
    }
}
