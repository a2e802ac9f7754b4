//! Samples of encoder-decoders: pairs of sequences.

use super::{
    dataset::{Dataset, IGNORED_LABEL, LABELS, Sample},
    inputs::ATTENTION_MASK,
    sample_tensor::SampleTensor,
};
use crate::error::Result;

/// How a pair of sequences becomes tensors.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PairShape {
    /// Length of the encoder's input, S.
    pub input: usize,
    /// Length of the decoder's output, T.
    pub target: usize,
    /// The token that fills shorter sequences up.
    pub pad: u32,
    /// The token that the decoder starts from.
    pub start: u32,
}

impl PairShape {
    /// Fills a pair up and moves the target one to the right, as `_shift_right` of `transformers`
    /// does. Longer sequences are cut.
    ///
    /// # Shapes
    ///
    /// `input_ids`, `attention_mask`: `[S]`; `decoder_input_ids`, `labels`: `[T]`, the latter
    /// [`IGNORED_LABEL`] after the target.
    pub fn sample(&self, source: &[u32], target: &[u32]) -> Sample {
        let source = &source[..source.len().min(self.input)];
        let target = &target[..target.len().min(self.target)];
        let labels = filled(target, self.target, IGNORED_LABEL);
        let decoded = moved_right(&labels, self.start, self.pad);
        let tensors = [
            ("input_ids", filled(source, self.input, self.pad.into())),
            (ATTENTION_MASK, mask(source.len(), self.input)),
            ("decoder_input_ids", decoded),
            (LABELS, labels),
        ];
        let named = tensors.map(|(name, values)| (name.to_owned(), SampleTensor::vector(values)));
        Sample::from(named)
    }
}

/// Tokens, then `fill` up to `len`, which is at least their number.
pub(super) fn filled(tokens: &[u32], len: usize, fill: i64) -> Vec<i64> {
    let mut ids: Vec<i64> = tokens.iter().map(|&token| token.into()).collect();
    ids.resize(len, fill);
    ids
}

/// Ones for tokens, zeros for padding.
pub(super) fn mask(tokens: usize, len: usize) -> Vec<i64> {
    (0..len)
        .map(|position| i64::from(position < tokens))
        .collect()
}

/// A decoder's input for `labels`: the label one to the left of each.
pub(super) fn moved_right(labels: &[i64], start: u32, pad: u32) -> Vec<i64> {
    let shown = |&label: &i64| match label {
        IGNORED_LABEL => pad.into(),
        label => label,
    };
    let mut moved = vec![i64::from(start)];
    moved.extend(labels.iter().map(shown));
    moved.pop();
    moved
}

/// Pairs of sequences.
#[derive(Debug, Clone)]
pub struct PairDataset {
    pairs: Vec<[Vec<u32>; 2]>,
    shape: PairShape,
}

impl PairDataset {
    /// Samples of sources and their targets, each with the token that ends it.
    pub fn new(pairs: Vec<[Vec<u32>; 2]>, shape: PairShape) -> Self {
        Self { pairs, shape }
    }
}

impl Dataset for PairDataset {
    fn len(&self) -> usize {
        self.pairs.len()
    }

    fn get(&self, index: usize) -> Result<Sample> {
        let [source, target] = &self.pairs[index];
        Ok(self.shape.sample(source, target))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pair_is_filled_up_and_its_target_moved_to_the_right() {
        let shape = PairShape {
            input: 4,
            target: 3,
            pad: 0,
            start: 9,
        };
        let data = PairDataset::new(vec![[vec![5, 6, 1], vec![7, 1]]], shape);
        let sample = data.get(0).unwrap();
        assert_eq!(sample["input_ids"].ints(), [5, 6, 1, 0]);
        assert_eq!(sample["attention_mask"].ints(), [1, 1, 1, 0]);
        assert_eq!(sample["labels"].ints(), [7, 1, -100]);
        assert_eq!(sample["decoder_input_ids"].ints(), [9, 7, 1]);
        let cut = shape.sample(&[1, 2, 3, 4, 5], &[1, 2, 3, 4]);
        assert_eq!(cut["input_ids"].ints(), [1, 2, 3, 4]);
        assert_eq!(cut["labels"].ints(), [1, 2, 3]);
        assert_eq!(moved_right(&[4, -100, -100], 9, 2), [9, 4, 2]);
    }
}
