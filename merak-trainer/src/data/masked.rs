//! Masked language modelling over a stream of tokens.

use super::{
    dataset::{Dataset, IGNORED_LABEL, LABELS, Sample},
    rng::{below, hash, unit},
    sample_tensor::SampleTensor,
    store::Tokens,
};
use crate::error::{DataError, Error, Result};
use std::sync::Arc;

/// Keeps these draws apart from those of other data sets with the same seed.
const STREAM: u64 = 0x006D_6173_6B65_6400;

/// Which tokens are hidden, and how ([BERT](https://arxiv.org/abs/1810.04805), section 3.1).
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Masking {
    /// Share of the tokens that are to be filled in.
    pub mlm_probability: f64,
    /// Share of these that are replaced by `mask_token`.
    pub mask_replace_prob: f64,
    /// Share of these that are replaced by any token; the rest stay as they are.
    pub random_replace_prob: f64,
    /// The token that stands for a hidden one.
    pub mask_token: u32,
    /// Random tokens are drawn from those below this.
    pub vocab_size: usize,
    /// A token that is never hidden: the end of a document.
    pub kept: Option<u32>,
}

impl Masking {
    fn check(&self) -> Result<(), DataError> {
        let shares = [
            ("mlm_probability", self.mlm_probability),
            ("mask_replace_prob", self.mask_replace_prob),
            ("random_replace_prob", self.random_replace_prob),
        ];
        for (setting, share) in shares {
            if !(0.0..=1.0).contains(&share) {
                return Err(DataError::out_of_range(setting, share, "from 0 to 1"));
            }
        }
        let draws = self.random_replace_prob > 0.0;
        if draws && (self.vocab_size == 0 || u32::try_from(self.vocab_size - 1).is_err()) {
            let expected = "from 1 to 2^32";
            return Err(DataError::out_of_range(
                "vocab_size",
                self.vocab_size,
                expected,
            ));
        }
        Ok(())
    }
}

/// Consecutive windows of a stream of tokens, some tokens of which are hidden.
///
/// What is hidden is drawn from (seed, epoch, sample, position).
///
/// # Shapes
///
/// `input_ids: [S]`; `labels: [S]`, the token where one is to be filled in and [`IGNORED_LABEL`]
/// elsewhere.
///
/// # Examples
///
/// ```
/// use merak_trainer::data::{Dataset, IGNORED_LABEL, MaskedDataset, Masking};
///
/// let masking = Masking { mlm_probability: 0.5, mask_replace_prob: 1.0, random_replace_prob: 0.0,
///     mask_token: 103, vocab_size: 100, kept: None };
/// let data = MaskedDataset::new((0..64).collect(), 32, masking, 42, "training")?;
/// let sample = data.get(0)?;
/// let pairs = sample["input_ids"].ints().iter().zip(sample["labels"].ints());
/// for (position, (&id, &label)) in pairs.enumerate() {
///     let token = position as i64;
///     assert!((id, label) == (token, IGNORED_LABEL) || (id, label) == (103, token));
/// }
/// # Ok::<(), merak_trainer::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct MaskedDataset {
    tokens: Tokens,
    seq_length: usize,
    masking: Masking,
    seed: u64,
}

impl MaskedDataset {
    /// Cuts `tokens` into samples of `seq_length` (S, at least 1); a rest is left out. `part` names
    /// the stream in the error: `training` or `validation`.
    ///
    /// # Errors
    ///
    /// [`DataError::TooFewTokens`] when they do not make one sample; [`DataError::OutOfRange`] for
    /// a share that is none, and a vocabulary whose tokens no `u32` holds.
    pub fn new(
        tokens: Tokens,
        seq_length: usize,
        masking: Masking,
        seed: u64,
        part: &'static str,
    ) -> Result<Self> {
        if seq_length == 0 || tokens.len() < seq_length {
            return Err(Error::Data(DataError::TooFewTokens {
                part,
                tokens: tokens.len(),
                needed: seq_length.max(1),
            }));
        }
        masking.check().map_err(Error::Data)?;
        Ok(Self {
            tokens,
            seq_length,
            masking,
            seed,
        })
    }

    /// What a token becomes, and its label.
    fn hide(&self, token: u32, drawn: [u64; 3]) -> [i64; 2] {
        let masking = &self.masking;
        if Some(token) == masking.kept || unit(drawn[0]) >= masking.mlm_probability {
            return [token.into(), IGNORED_LABEL];
        }
        let how = unit(drawn[1]);
        let shown = if how < masking.mask_replace_prob {
            masking.mask_token
        } else if how < masking.mask_replace_prob + masking.random_replace_prob {
            below(drawn[2], masking.vocab_size) as u32
        } else {
            token
        };
        [shown.into(), token.into()]
    }
}

impl Dataset for MaskedDataset {
    fn len(&self) -> usize {
        self.tokens.len() / self.seq_length
    }

    fn reseeded(&self, seed: u64) -> Option<Arc<dyn Dataset>> {
        if seed == self.seed {
            return None;
        }
        Some(Arc::new(Self {
            seed,
            ..self.clone()
        }))
    }

    fn get(&self, index: usize) -> Result<Sample> {
        self.get_in_epoch(index, 0)
    }

    fn get_in_epoch(&self, index: usize, epoch: u64) -> Result<Sample> {
        let start = index * self.seq_length;
        let window = self.tokens.read(start..start + self.seq_length)?;
        let key = hash(&[STREAM, self.seed, epoch, index as u64]);
        let hidden = window.iter().enumerate().map(|(position, &token)| {
            let drawn = [0, 1, 2].map(|draw| hash(&[key, position as u64, draw]));
            self.hide(token, drawn)
        });
        let (ids, labels) = hidden.map(|[id, label]| (id, label)).unzip();
        Ok(Sample::from([
            ("input_ids".to_owned(), SampleTensor::vector(ids)),
            (LABELS.to_owned(), SampleTensor::vector(labels)),
        ]))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MASK: i64 = 1000;

    fn data(seed: u64) -> MaskedDataset {
        let masking = Masking {
            mlm_probability: 0.15,
            mask_replace_prob: 0.8,
            random_replace_prob: 0.1,
            mask_token: 1000,
            vocab_size: 500,
            kept: Some(7),
        };
        // Tokens of 500 to 599, and some ends of documents.
        let token = |i: u32| if i % 50 == 7 { 7 } else { 500 + i % 100 };
        let tokens = (0..40_000).map(token).collect();
        MaskedDataset::new(tokens, 200, masking, seed, "training").unwrap()
    }

    #[test]
    fn shares_are_those_of_the_paper_and_ends_of_documents_stay() {
        let data = data(1);
        let (mut hidden, mut masked, mut random, mut kept) = (0, 0, 0, 0);
        for index in 0..data.len() {
            let sample = data.get(index).unwrap();
            let (ids, labels) = (sample["input_ids"].ints(), sample["labels"].ints());
            for (position, (&id, &label)) in ids.iter().zip(labels).enumerate() {
                let token = i64::from(
                    data.tokens.read(0..data.tokens.len()).unwrap()[index * 200 + position],
                );
                if label == IGNORED_LABEL {
                    assert_eq!(id, token);
                    continue;
                }
                assert_eq!(label, token);
                assert_ne!(token, 7);
                hidden += 1;
                match id {
                    MASK => masked += 1,
                    id if id == token => kept += 1,
                    id => {
                        assert!((0..500).contains(&id));
                        random += 1;
                    }
                }
            }
        }
        // 39 200 tokens may be hidden: mean 5880, standard deviation 71; of these 4704, 588
        // and 588.
        assert!((5600..6150).contains(&hidden), "{hidden}");
        assert!((4450..4950).contains(&masked), "{masked}");
        for count in [random, kept] {
            assert!((480..700).contains(&count), "{count}");
        }
    }

    #[test]
    fn what_is_hidden_depends_on_seed_epoch_and_sample_only() {
        let (first, again, other) = (data(1), data(1), data(2));
        let labels = |data: &MaskedDataset, index, epoch| {
            let sample = data.get_in_epoch(index, epoch).unwrap();
            let labels = sample["labels"].ints().iter();
            labels
                .map(|&label| label == IGNORED_LABEL)
                .collect::<Vec<_>>()
        };
        assert_eq!(labels(&first, 3, 5), labels(&again, 3, 5));
        assert_ne!(labels(&first, 3, 5), labels(&first, 3, 6));
        assert_ne!(labels(&first, 3, 5), labels(&first, 4, 5));
        assert_ne!(labels(&first, 3, 5), labels(&other, 3, 5));
        assert_eq!(first.get(3).unwrap(), first.get_in_epoch(3, 0).unwrap());
    }

    #[test]
    fn shares_that_are_none_and_tokens_beyond_all_are_refused() {
        let good = data(1).masking;
        let refuse = |masking| {
            let error = MaskedDataset::new((0..9).collect(), 4, masking, 1, "training");
            error.unwrap_err().to_string()
        };
        let mlm_probability = 1.5;
        let refused = refuse(Masking {
            mlm_probability,
            ..good
        });
        assert_eq!(refused, "`mlm_probability` is 1.5, expected from 0 to 1");
        for vocab_size in [0, usize::MAX] {
            let refused = refuse(Masking { vocab_size, ..good });
            assert!(refused.ends_with("expected from 1 to 2^32"), "{refused}");
        }
    }

    #[test]
    fn a_stream_shorter_than_a_sample_is_refused() {
        let masking = data(1).masking;
        let error = MaskedDataset::new((0..3).collect(), 4, masking, 1, "training").unwrap_err();
        assert!(matches!(
            error,
            Error::Data(DataError::TooFewTokens { needed: 4, .. })
        ));
    }
}
