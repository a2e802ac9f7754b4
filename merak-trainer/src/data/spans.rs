//! Span corruption over a stream of tokens.

use super::{
    dataset::{Dataset, Sample},
    rng::{below, hash},
    store::Tokens,
    translation::PairShape,
};
use crate::error::{DataError, Error, Result};
use std::sync::Arc;

/// Keeps these draws apart from those of other data sets with the same seed.
const STREAM: u64 = 0x0073_7061_6E73_0000;

/// How much of a text is left out, and in which pieces ([T5](https://arxiv.org/abs/1910.10683),
/// section 3.1.4).
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Corruption {
    /// Share of the tokens that are left out.
    pub noise_density: f64,
    /// Mean length of a piece that is left out.
    pub mean_span_length: f64,
}

/// Sizes that follow from the length of a text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SpanCounts {
    /// Tokens of the text.
    pub tokens: usize,
    /// Tokens that are left out.
    pub noise: usize,
    /// Pieces that they make, and sentinels that stand for them.
    pub spans: usize,
}

impl SpanCounts {
    /// Length of the encoder's input: the kept tokens, a sentinel for each piece, the end.
    pub fn input(&self) -> usize {
        self.tokens - self.noise + self.spans + 1
    }

    /// Length of the decoder's output: each piece after its sentinel, the end.
    pub fn target(&self) -> usize {
        self.noise + self.spans + 1
    }
}

impl Corruption {
    /// The sizes for a text of `tokens` tokens, at least 2, which fewer become: some are left out
    /// and some are kept.
    pub fn counts(&self, tokens: usize) -> SpanCounts {
        let tokens = tokens.max(2);
        // As Python rounds.
        let round = |x: f64| x.round_ties_even() as usize;
        let noise = round(tokens as f64 * self.noise_density).clamp(1, tokens - 1);
        let spans = round(noise as f64 / self.mean_span_length);
        // Pieces do not touch, so the kept tokens form as many pieces.
        let spans = spans.clamp(1, noise.min(tokens - noise));
        SpanCounts {
            tokens,
            noise,
            spans,
        }
    }

    /// The longest text that an encoder of `input` positions can read; `None` below 3, which is too
    /// short for any.
    pub fn longest(&self, input: usize) -> Option<SpanCounts> {
        let fits = |tokens: &usize| self.counts(*tokens).input() <= input;
        // The input keeps about this share of a text, which bounds the length of the text.
        let share = (1.0 - self.noise_density).max(1e-3);
        let most = (input as f64 / share).ceil() as usize + 1;
        let tokens = (2..=most).rev().find(fits)?;
        Some(self.counts(tokens))
    }
}

/// Consecutive windows of a stream of tokens; pieces of each are left out and become the target.
///
/// ```text
/// text      Thank you for inviting me to your party last week
/// input     Thank you <X> me to your party <Y> week <end>
/// target    <X> for inviting <Y> last <end>
/// ```
///
/// The pieces are drawn from (seed, epoch, sample).
///
/// # Shapes
///
/// As [`PairShape::sample`].
#[derive(Debug, Clone)]
pub struct SpanDataset {
    tokens: Tokens,
    counts: SpanCounts,
    shape: PairShape,
    special: SpanTokens,
    seed: u64,
}

/// The tokens that span corruption puts in.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SpanTokens {
    /// The tokens that stand for the pieces, in their order: one for each.
    pub sentinels: Vec<u32>,
    /// The token that ends input and target.
    pub end: u32,
}

impl SpanDataset {
    /// Cuts `tokens` into texts as long as `counts` says; a rest is left out. `part` names the
    /// stream in the error: `training` or `validation`.
    ///
    /// # Errors
    ///
    /// [`DataError::TooFewTokens`] when they do not make one sample; [`DataError::OutOfRange`] for
    /// sizes that [`Corruption::counts`] does not give, and for fewer sentinels than pieces.
    pub fn new(
        tokens: Tokens,
        counts: SpanCounts,
        shape: PairShape,
        special: SpanTokens,
        seed: u64,
        part: &'static str,
    ) -> Result<Self> {
        if tokens.len() < counts.tokens {
            return Err(Error::Data(DataError::TooFewTokens {
                part,
                tokens: tokens.len(),
                needed: counts.tokens,
            }));
        }
        let kept = counts.tokens.saturating_sub(counts.noise);
        for (setting, found, legal, expected) in [
            (
                "noise",
                counts.noise,
                counts.noise > 0 && kept > 0,
                "at least 1 and less than the tokens of a text",
            ),
            (
                "spans",
                counts.spans,
                (1..=kept.min(counts.noise)).contains(&counts.spans),
                "at least 1, and a token of each and between them",
            ),
            (
                "sentinels",
                special.sentinels.len(),
                special.sentinels.len() >= counts.spans,
                "one for each piece",
            ),
        ] {
            if !legal {
                return Err(Error::Data(DataError::out_of_range(
                    setting, found, expected,
                )));
            }
        }
        Ok(Self {
            tokens,
            counts,
            shape,
            special,
            seed,
        })
    }
}

impl Dataset for SpanDataset {
    fn len(&self) -> usize {
        self.tokens.len() / self.counts.tokens
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
        let counts = &self.counts;
        let start = index * counts.tokens;
        let window = self.tokens.read(start..start + counts.tokens)?;
        let mut rest = &*window;
        let key = hash(&[STREAM, self.seed, epoch, index as u64]);
        let kept = parts(counts.tokens - counts.noise, counts.spans, hash(&[key, 0]));
        let left_out = parts(counts.noise, counts.spans, hash(&[key, 1]));
        let (mut source, mut target) = (Vec::new(), Vec::new());
        for ((kept, left_out), &sentinel) in kept.zip(left_out).zip(&self.special.sentinels) {
            source.extend_from_slice(&rest[..kept]);
            source.push(sentinel);
            target.push(sentinel);
            target.extend_from_slice(&rest[kept..kept + left_out]);
            rest = &rest[kept + left_out..];
        }
        source.push(self.special.end);
        target.push(self.special.end);
        Ok(self.shape.sample(&source, &target))
    }
}

/// Cuts `items` into `count` parts of at least one, every way about equally likely.
fn parts(items: usize, count: usize, key: u64) -> impl Iterator<Item = usize> {
    // Knuth's selection sampling of the borders among the places between items (TAOCP 3.4.2,
    // algorithm S).
    let (mut borders, mut last) = (count - 1, 0);
    let places = (1..items).filter(move |&place| {
        let is_border = below(hash(&[key, place as u64]), items - place) < borders;
        borders -= usize::from(is_border);
        is_border
    });
    places.chain([items]).map(move |border| {
        let part = border - last;
        last = border;
        part
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const T5: Corruption = Corruption {
        noise_density: 0.15,
        mean_span_length: 3.0,
    };

    fn data(stream: usize, input: usize) -> SpanDataset {
        let counts = T5.longest(input).unwrap();
        let shape = PairShape {
            input,
            target: counts.target(),
            pad: 0,
            start: 0,
        };
        let special = SpanTokens {
            sentinels: (9000..9100).collect(),
            end: 1,
        };
        let tokens = (100..100 + stream as u32).collect();
        SpanDataset::new(tokens, counts, shape, special, 42, "training").unwrap()
    }

    #[test]
    fn lengths_are_those_of_t5() {
        // compute_input_and_target_lengths of transformers' run_t5_mlm_flax.py: 512 gives 568
        // and 114.
        let counts = T5.longest(512).unwrap();
        assert_eq!(
            (counts.tokens, counts.input(), counts.target()),
            (568, 512, 114)
        );
        assert_eq!(T5.longest(2), None);
        let least = T5.longest(3).unwrap();
        assert_eq!((least.tokens, least.noise, least.spans), (2, 1, 1));
    }

    proptest! {
        #[test]
        fn parts_fill_the_whole(items in 1_usize..60, count in 1_usize..60, key: u64) {
            let count = count.min(items);
            let parts: Vec<_> = parts(items, count, key).collect();
            prop_assert_eq!(parts.len(), count);
            prop_assert_eq!(parts.iter().sum::<usize>(), items);
            prop_assert!(parts.iter().all(|&part| part > 0));
        }

        #[test]
        fn input_and_target_together_are_the_text(input in 3_usize..80, index in 0_usize..3, epoch in 0_u64..3) {
            let data = data(600, input);
            let index = index % data.len();
            let sample = data.get_in_epoch(index, epoch).expect("a sample");
            let (mut source, mut target) = (sample["input_ids"].ints().to_vec(), sample["labels"].ints().to_vec());
            source.truncate(data.counts.input());
            prop_assert_eq!((source.pop(), target.pop()), (Some(1), Some(1)));
            let mut text = Vec::new();
            let mut pieces = target.split(|&token| token >= 9000).skip(1);
            for token in source {
                if token >= 9000 {
                    text.extend_from_slice(pieces.next().expect("a piece for each sentinel"));
                } else {
                    text.push(token);
                }
            }
            let from = 100 + i64::try_from(index * data.counts.tokens).expect("small");
            let expected: Vec<_> = (from..from + i64::try_from(data.counts.tokens).expect("small")).collect();
            prop_assert_eq!(text, expected);
        }
    }

    #[test]
    fn sizes_that_no_text_has_are_refused() {
        let refuse = |noise, spans, sentinels: u32| {
            let counts = SpanCounts {
                tokens: 20,
                noise,
                spans,
            };
            let shape = PairShape {
                input: 20,
                target: 20,
                pad: 0,
                start: 0,
            };
            let special = SpanTokens {
                sentinels: (9000..9000 + sentinels).collect(),
                end: 1,
            };
            let tokens = (100..200).collect();
            let data = SpanDataset::new(tokens, counts, shape, special, 42, "training");
            data.err().map(|error| error.to_string())
        };
        insta::assert_debug_snapshot!(
            [refuse(4, 2, 2), refuse(20, 2, 2), refuse(4, 0, 2), refuse(4, 5, 9), refuse(4, 2, 1)],
            @r#"
        [
            None,
            Some(
                "`noise` is 20, expected at least 1 and less than the tokens of a text",
            ),
            Some(
                "`spans` is 0, expected at least 1, and a token of each and between them",
            ),
            Some(
                "`spans` is 5, expected at least 1, and a token of each and between them",
            ),
            Some(
                "`sentinels` is 1, expected one for each piece",
            ),
        ]
        "#
        );
        assert_eq!(T5.counts(0), T5.counts(2));
    }

    #[test]
    fn each_way_to_cut_is_about_equally_likely() {
        let mut counts = [0; 3];
        for key in 0..3000 {
            counts[parts(4, 2, hash(&[key])).next().unwrap() - 1] += 1;
        }
        // Binomial with mean 1000 and standard deviation 26.
        assert!(
            counts.iter().all(|count| (880..1120).contains(count)),
            "{counts:?}"
        );
    }

    #[test]
    fn other_pieces_are_left_out_in_another_epoch() {
        let data = data(2000, 64);
        assert_eq!(
            data.get_in_epoch(1, 2).unwrap(),
            data.get_in_epoch(1, 2).unwrap()
        );
        assert_ne!(
            data.get_in_epoch(1, 2).unwrap(),
            data.get_in_epoch(1, 3).unwrap()
        );
    }
}
