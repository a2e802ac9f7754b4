//! How prompts are continued.

use crate::{Error, Result};
use serde::{Deserialize, Serialize};

/// Settings for the continuation of prompts. The names are those of the configuration keys, and of
/// `generation_config.json`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct GenerateOptions {
    /// Most new tokens per prompt, at least 1.
    pub max_new_tokens: usize,
    /// The longest sequence that the model takes, prompt and new tokens together; `None` where
    /// there is no such limit.
    pub seq_length: Option<usize>,
    /// Divides the logits; 0 takes the likeliest token.
    pub temperature: f64,
    /// Draw from the k likeliest tokens only; 0 is off.
    pub top_k: usize,
    /// Draw from the fewest likeliest tokens whose probabilities reach this sum; 1 is off.
    pub top_p: f64,
    /// Draw from tokens with at least this share of the likeliest one's probability; 0 is off.
    pub min_p: f64,
    /// Divides positive logits (multiplies negative ones) of tokens that occurred; 1 is off.
    pub repetition_penalty: f64,
    /// No run of this many tokens occurs twice in a sequence, prompt included; 0 is off.
    pub no_repeat_ngram_size: usize,
    /// Continuations of a prompt that are kept beside each other; 1 is off. More of them are
    /// searched by [`BeamSearch`](crate::BeamSearch), which draws nothing.
    pub num_beams: usize,
    /// Power of the number of new tokens by which a beam search divides scores.
    pub length_penalty: f64,
    /// When a beam search ends.
    pub early_stopping: EarlyStopping,
    /// The token from which the decoder of an encoder-decoder starts.
    pub decoder_start_token_id: Option<u32>,
    /// Tokens that end a sequence.
    pub eos_token_ids: Vec<u32>,
    /// Fewest new tokens before an end token.
    pub min_new_tokens: usize,
    /// Tokens that are never chosen.
    pub suppress_tokens: Vec<u32>,
    /// Seed of the draws.
    pub seed: u64,
    /// Index of the first prompt, for replicas that share a list of prompts: a draw depends on
    /// the prompt's index in the whole list.
    pub first_prompt: u64,
}

/// When a beam search ends: the `early_stopping` of transformers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum EarlyStopping {
    /// When no running beam would be better than those that have ended if it ended now.
    #[default]
    No,
    /// As soon as the number of ended beams is the number of beams.
    Yes,
    /// When no running beam can become better, however long it grows.
    Never,
}

impl Default for GenerateOptions {
    fn default() -> Self {
        Self {
            max_new_tokens: 1024,
            seq_length: None,
            temperature: 0.9,
            top_k: 0,
            top_p: 0.9,
            min_p: 0.0,
            repetition_penalty: 1.0,
            no_repeat_ngram_size: 0,
            num_beams: 1,
            length_penalty: 1.0,
            early_stopping: EarlyStopping::No,
            decoder_start_token_id: None,
            eos_token_ids: Vec::new(),
            min_new_tokens: 0,
            suppress_tokens: Vec::new(),
            seed: 42,
            first_prompt: 0,
        }
    }
}

impl GenerateOptions {
    /// Upper bound on beams: more than any search profits from is a typing mistake.
    pub const MAX_BEAMS: u32 = 1024;

    /// Upper bound on the number of the first prompt, which leaves room for those of all others.
    pub const MAX_FIRST_PROMPT: u64 = 1 << 48;

    pub(crate) fn check(&self) -> Result<()> {
        let [temperature, top_p, min_p, penalty, power] = [
            self.temperature,
            self.top_p,
            self.min_p,
            self.repetition_penalty,
            self.length_penalty,
        ];
        let count = |count: usize| (count > 0, count.to_string(), "at least 1");
        let number = |is_legal, number: f64, expected| (is_legal, number.to_string(), expected);
        let (beams, first) = (self.num_beams, self.first_prompt);
        let are_few = (1..=Self::MAX_BEAMS as usize).contains(&beams);
        let leaves_room = first <= Self::MAX_FIRST_PROMPT;
        let is_finite = |number: f64| number.is_finite();
        let checks = [
            ("max_new_tokens", count(self.max_new_tokens)),
            (
                "temperature",
                number(
                    is_finite(temperature) && temperature >= 0.0,
                    temperature,
                    "0 or more",
                ),
            ),
            (
                "top_p",
                number(top_p > 0.0 && top_p <= 1.0, top_p, "more than 0, at most 1"),
            ),
            (
                "min_p",
                number((0.0..=1.0).contains(&min_p), min_p, "0 to 1"),
            ),
            (
                "repetition_penalty",
                number(is_finite(penalty) && penalty > 0.0, penalty, "more than 0"),
            ),
            ("num_beams", (are_few, beams.to_string(), "from 1 to 1024")),
            (
                "first_prompt",
                (leaves_room, first.to_string(), "at most 2^48"),
            ),
            (
                "length_penalty",
                number(is_finite(power), power, "a finite number"),
            ),
        ];
        let illegal = checks.into_iter().find(|(_, (is_legal, ..))| !is_legal);
        match illegal {
            Some((key, (_, found, expected))) => Err(Error::InvalidOption {
                key,
                found,
                expected,
            }),
            None => Ok(()),
        }
    }

    /// The prompts, each with the length at which it is full.
    pub(crate) fn prompts<'a>(&self, prompts: &'a [Vec<u32>]) -> Result<Vec<Prompt<'a>>> {
        self.check()?;
        let seq_length = self.seq_length.unwrap_or(usize::MAX);
        let numbered = (self.first_prompt..).zip(prompts);
        let checked = numbered.map(|(prompt, tokens)| match tokens.len() {
            0 => Err(Error::EmptyPrompt { prompt }),
            length if length >= seq_length => Err(Error::PromptTooLong {
                prompt,
                length,
                seq_length,
            }),
            length => Ok(Prompt {
                tokens,
                limit: length.saturating_add(self.max_new_tokens).min(seq_length),
            }),
        });
        checked.collect()
    }

    /// Tokens that are never chosen; tokens that are not chosen before `min_new_tokens`.
    pub(crate) fn suppressed(&self) -> [Vec<u32>; 2] {
        [
            self.suppress_tokens.clone(),
            [&self.suppress_tokens[..], &self.eos_token_ids].concat(),
        ]
    }
}

/// A prompt that leaves room for a token.
pub(crate) struct Prompt<'a> {
    pub(crate) tokens: &'a [u32],
    /// Length in tokens of a sequence that is full.
    pub(crate) limit: usize,
}
