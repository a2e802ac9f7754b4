//! A stream of tokens as a data set for causal language models.

use super::{
    dataset::{Dataset, IGNORED_LABEL, LABELS, Sample},
    packed::{DOCUMENT_IDS, documents_of},
    sample_tensor::SampleTensor,
    store::Tokens,
};
use crate::error::{DataError, Error, Result};

/// Consecutive windows of a token stream.
///
/// Sample i is made of the S + 1 tokens from i·S on: `input_ids` are the first S of them, `labels`
/// the last S, so labels align with the logits and each token is a target once.
///
/// # Shapes
///
/// `input_ids: [S]`, `labels: [S]`; where documents are parted `document_ids: [S]`.
#[derive(Debug, Clone)]
pub struct TokenDataset {
    tokens: Tokens,
    seq_length: usize,
    /// The token that ends a document, where documents are parted.
    end: Option<u32>,
}

impl TokenDataset {
    /// Cuts `tokens` into samples of `seq_length` (S, at least 1); a rest is left out. `part` names
    /// the stream in the error: `training` or `validation`.
    ///
    /// # Errors
    ///
    /// [`DataError::TooFewTokens`] when they do not make one sample.
    pub fn new(tokens: Tokens, seq_length: usize, part: &'static str) -> Result<Self> {
        if seq_length == 0 || tokens.len() <= seq_length {
            return Err(Error::Data(DataError::TooFewTokens {
                part,
                tokens: tokens.len(),
                needed: seq_length + 1,
            }));
        }
        Ok(Self {
            tokens,
            seq_length,
            end: None,
        })
    }

    /// These samples with the number of each token's document, which ends with a token `end`. The
    /// first token of a document is no target: no token before it sees the document.
    #[must_use]
    pub fn parted_by(self, end: u32) -> Self {
        Self {
            end: Some(end),
            ..self
        }
    }
}

impl Dataset for TokenDataset {
    fn len(&self) -> usize {
        (self.tokens.len() - 1) / self.seq_length
    }

    fn get(&self, index: usize) -> Result<Sample> {
        let start = index * self.seq_length;
        let window = self.tokens.read(start..start + self.seq_length + 1)?;
        let tensor = |tokens: &[u32]| {
            SampleTensor::vector(tokens.iter().map(|token| i64::from(*token)).collect())
        };
        let input = &window[..self.seq_length];
        let mut sample = Sample::from([
            ("input_ids".to_owned(), tensor(input)),
            (LABELS.to_owned(), tensor(&window[1..])),
        ]);
        if let Some(end) = self.end {
            let pairs = window.windows(2).map(|pair| match *pair {
                [token, next] if token != end => i64::from(next),
                _ => IGNORED_LABEL,
            });
            let labels = SampleTensor::vector(pairs.collect());
            sample.insert(LABELS.to_owned(), labels);
            sample.insert(DOCUMENT_IDS.to_owned(), documents_of(input, end));
        }
        Ok(sample)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn labels_are_the_next_tokens_and_each_token_is_a_target_once() {
        let data = TokenDataset::new((0..12).collect(), 4, "training").unwrap();
        assert_eq!(data.len(), 2);
        let sample = data.get(1).unwrap();
        assert_eq!(sample["input_ids"].ints(), [4, 5, 6, 7]);
        assert_eq!(sample["labels"].ints(), [5, 6, 7, 8]);
    }

    #[test]
    fn documents_are_numbered_and_no_token_foretells_the_next_one() {
        let tokens = [3, 4, 0, 5, 6, 0, 7, 8, 9].into_iter().collect();
        let data = TokenDataset::new(tokens, 4, "training").unwrap();
        let data = data.parted_by(0);
        let sample = data.get(0).unwrap();
        assert_eq!(sample["document_ids"].ints(), [0, 0, 0, 1]);
        assert_eq!(sample["labels"].ints(), [4, 0, -100, 6]);
        let sample = data.get(1).unwrap();
        assert_eq!(sample["document_ids"].ints(), [0, 0, 1, 1]);
        assert_eq!(sample["labels"].ints(), [0, -100, 8, 9]);
    }

    #[test]
    fn a_stream_shorter_than_a_sample_is_refused() {
        let error = TokenDataset::new((0..4).collect(), 4, "validation").unwrap_err();
        insta::assert_snapshot!(error, @r#"the validation part of the data has 4 tokens, but one sample needs 5: give more data or a smaller "seq_length", or choose another "data.validation_fraction" (0 for no validation)"#);
        assert_eq!(
            TokenDataset::new((0..5).collect(), 4, "validation")
                .unwrap()
                .len(),
            1
        );
    }
}
