//! How the tokens of a replica's prompts are chosen, and how other ranks learn of it.

use crate::error::Result;
use merak_ckpt::{
    BeamSearch, Completion, Continued, Decoding, GenerateOptions, NewToken, Row, Sampler,
};
use std::ops::ControlFlow;

/// The sequences that grow. Each has a number: without beams that of its prompt.
#[derive(Debug)]
pub(super) enum Search {
    /// One sequence for each prompt, whose tokens are drawn or the likeliest.
    Drawn(Decoding, Sampler),
    /// Several for each prompt.
    Beams(BeamSearch),
}

/// The score of an absent candidate.
const ABSENT: f32 = f32::NEG_INFINITY;

impl Search {
    pub(super) fn new(prompts: &[Vec<u32>], options: &GenerateOptions) -> Result<Self> {
        Ok(if options.num_beams > 1 {
            Self::Beams(BeamSearch::new(prompts, options)?)
        } else {
            Self::Drawn(Decoding::new(prompts, options)?, Sampler::new(options)?)
        })
    }

    /// The prompts that are not done.
    pub(super) fn waiting(&self) -> Vec<u64> {
        match self {
            Self::Drawn(decoding, _) => decoding.rows().iter().map(|row| row.prompt).collect(),
            Self::Beams(beams) => beams.waiting().collect(),
        }
    }

    /// The sequences of a prompt that wait for a token; none when it is done.
    pub(super) fn rows(&self, prompt: u64) -> Vec<Row<'_>> {
        match self {
            Self::Drawn(decoding, _) => decoding.row(prompt).into_iter().collect(),
            Self::Beams(beams) => beams.rows(prompt),
        }
    }

    /// The sequence of this number, while it waits for a token.
    pub(super) fn row(&self, sequence: u64) -> Option<Row<'_>> {
        match self {
            Self::Drawn(decoding, _) => decoding.row(sequence),
            Self::Beams(beams) => beams.row(sequence),
        }
    }

    /// Words that [`Search::choose`] makes for a sequence.
    fn num_words(&self) -> usize {
        match self {
            Self::Drawn(..) => 1,
            Self::Beams(beams) => 2 * beams.num_candidates(),
        }
    }

    /// What follows a sequence, in words that tell it to other ranks: a token, or the candidates of
    /// a beam, each as its token and the bits of its score.
    pub(super) fn choose(&self, row: &Row<'_>, logits: &[f32]) -> Result<Vec<u32>> {
        match self {
            Self::Drawn(_, sampler) => Ok(vec![row.pick(sampler, logits)?]),
            Self::Beams(beams) => {
                let found = beams.candidates(row.prompt, logits)?;
                let words = found
                    .iter()
                    .flat_map(|next| [next.id, next.score.to_bits()]);
                let mut words: Vec<_> = words.collect();
                while words.len() < self.num_words() {
                    words.extend([0, ABSENT.to_bits()]);
                }
                Ok(words)
            }
        }
    }

    /// Goes on with the words of a prompt's sequences, which it takes from the front of `words`.
    /// Returns the sequences that go on, each with the one that it continues: `(before, after)`.
    pub(super) fn advance(
        &mut self,
        prompt: u64,
        words: &mut impl Iterator<Item = u32>,
        on_token: &mut dyn FnMut(NewToken) -> ControlFlow<()>,
    ) -> Vec<(u64, u64)> {
        let num_words = self.num_words();
        match self {
            Self::Drawn(decoding, _) => {
                let id = words.next().expect("a token for each sequence");
                if on_token(decoding.push(prompt, id)).is_break() {
                    decoding.stop(prompt);
                }
                let goes_on = decoding.row(prompt).is_some();
                goes_on.then_some((prompt, prompt)).into_iter().collect()
            }
            Self::Beams(beams) => {
                let rows = beams.rows(prompt).len();
                let words: Vec<_> = words.take(rows * num_words).collect();
                let of_beam = |(beam, words): (usize, &[u32])| {
                    let pairs = words.chunks_exact(2);
                    let next = pairs.map(move |pair| Continued {
                        beam,
                        id: pair[0],
                        score: f32::from_bits(pair[1]),
                    });
                    next.filter(|next| next.score > ABSENT).collect::<Vec<_>>()
                };
                let beams_words = words.chunks_exact(num_words).enumerate();
                let candidates = beams_words.flat_map(of_beam).collect();
                beams.advance(prompt, candidates)
            }
        }
    }

    /// The results, in order of prompts.
    pub(super) fn finish(self) -> Vec<Completion> {
        match self {
            Self::Drawn(decoding, _) => decoding.finish(),
            Self::Beams(beams) => beams.finish(),
        }
    }
}
