//! The decode loop.

use crate::{BoxError, Error, Result, Sampler};
use serde::{Deserialize, Serialize};
use std::{borrow::Cow, ops::ControlFlow};

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

/// A sequence that waits for its next token.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Row<'a> {
    /// Index of the prompt. From one call to the next the tokens of a prompt grow at the end only,
    /// so that a cache may be kept per prompt; a prompt that is no longer asked about is done.
    pub prompt: u64,
    /// The prompt and what was generated so far, never empty.
    pub tokens: &'a [u32],
    /// Tokens that may not come next.
    pub forbidden: &'a [u32],
}

impl Row<'_> {
    /// Chooses its next token by these logits.
    ///
    /// # Shapes
    /// As [`Sampler::pick`].
    ///
    /// # Errors
    /// As [`Sampler::pick`].
    pub fn pick(&self, sampler: &Sampler, logits: &[f32]) -> Result<u32> {
        sampler.pick(&self.allowed(logits), self.prompt, self.tokens)
    }

    /// The scores of its next token in a beam search: log probabilities under the sampler's
    /// penalty; minus infinity for tokens that may not come.
    pub(crate) fn scores(&self, sampler: &Sampler, logits: &[f32]) -> Result<Vec<f32>> {
        let scores = sampler.log_probabilities(logits, self.prompt, self.tokens)?;
        Ok(self.allowed(&scores).into_owned())
    }

    /// The logits without those of tokens that may not come next.
    fn allowed<'l>(&self, logits: &'l [f32]) -> Cow<'l, [f32]> {
        let mut allowed = Cow::Borrowed(logits);
        for &id in self.forbidden {
            if let Some(logit) = allowed.to_mut().get_mut(id as usize) {
                *logit = f32::NEG_INFINITY;
            }
        }
        allowed
    }
}

/// Gives the next token of sequences: the seam between the decode loop and a model.
///
/// A type that gives logits implements [`LogitsSource`] and has this trait for free. A model that
/// is spread over ranks implements this one: every rank runs the same loop, the source computes the
/// logits together with the other ranks, the rank that has them calls [`Row::pick`], and the tokens
/// are broadcast, so that every rank returns the same.
pub trait TokenSource {
    /// The next token of each row, in order.
    ///
    /// # Errors
    /// Any failure of the model.
    fn next_tokens(&mut self, rows: &[Row<'_>], sampler: &Sampler) -> Result<Vec<u32>, BoxError>;
}

/// Gives the logits of the next token of sequences.
///
/// ```
/// use merak_ckpt::{BoxError, GenerateOptions, LogitsSource, Reason, Row, generate};
///
/// /// Counts upwards; 5 ends a sequence.
/// struct Counter;
///
/// impl LogitsSource for Counter {
///     fn next_logits(&mut self, rows: &[Row<'_>]) -> Result<Vec<Vec<f32>>, BoxError> {
///         let next = |row: &Row<'_>| row.tokens[row.tokens.len() - 1] + 1;
///         let one_hot = |hot: u32| (0..6).map(|id| f32::from(u8::from(id == hot))).collect();
///         Ok(rows.iter().map(|row| one_hot(next(row))).collect())
///     }
/// }
///
/// # fn main() -> Result<(), merak_ckpt::Error> {
/// let options = GenerateOptions {
///     max_new_tokens: 3,
///     temperature: 0.0,
///     eos_token_ids: vec![5],
///     ..Default::default()
/// };
/// let completions = generate(&mut Counter, &[vec![0], vec![7, 3]], &options)?;
/// assert_eq!(
///     (completions[0].ids.as_slice(), completions[0].reason),
///     (&[1, 2, 3][..], Reason::Length)
/// );
/// assert_eq!(
///     (completions[1].ids.as_slice(), completions[1].reason),
///     (&[4, 5][..], Reason::Eos)
/// );
/// # Ok(())
/// # }
/// ```
pub trait LogitsSource {
    /// The logits of the next token of each row, in order.
    ///
    /// # Shapes
    /// One `[V]` per row: the whole vocabulary, in f32; padded entries are minus infinity.
    ///
    /// # Errors
    /// Any failure of the model.
    fn next_logits(&mut self, rows: &[Row<'_>]) -> Result<Vec<Vec<f32>>, BoxError>;
}

/// Why a sequence ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Reason {
    /// The model gave an end token.
    Eos,
    /// There is no room for another token.
    Length,
    /// The caller's callback ended it (a stop string was seen).
    Stop,
}

/// A prompt and its continuation.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Completion {
    /// The prompt.
    pub prompt_ids: Vec<u32>,
    /// The new tokens; an end token is the last of them.
    pub ids: Vec<u32>,
    /// Why there are no more.
    pub reason: Reason,
}

/// A token that has just been chosen.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NewToken {
    /// Index of the prompt.
    pub prompt: u64,
    /// Position in the sequence; the first token of the prompt has position 0.
    pub position: usize,
    /// The token.
    pub id: u32,
}

/// The state of a decode loop, without a model: which sequences wait for a token, and what
/// happens when they get one.
///
/// [`generate`] drives it in lockstep. A pipeline that keeps several groups of prompts in flight
/// drives it itself.
#[derive(Debug, Clone)]
pub struct Decoding {
    first_prompt: u64,
    eos_token_ids: Vec<u32>,
    min_new_tokens: usize,
    /// Tokens that are never chosen; tokens that are not chosen before `min_new_tokens`.
    suppressed: [Vec<u32>; 2],
    sequences: Vec<Sequence>,
}

#[derive(Debug, Clone)]
struct Sequence {
    tokens: Vec<u32>,
    prompt_length: usize,
    /// Its length in tokens when it is full.
    limit: usize,
    reason: Option<Reason>,
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

impl<T: LogitsSource + ?Sized> TokenSource for T {
    fn next_tokens(&mut self, rows: &[Row<'_>], sampler: &Sampler) -> Result<Vec<u32>, BoxError> {
        let logits = self.next_logits(rows)?;
        let picks = rows
            .iter()
            .zip(&logits)
            .map(|(row, logits)| row.pick(sampler, logits));
        Ok(picks.collect::<Result<_>>()?)
    }
}

impl Decoding {
    /// The state before the first token.
    ///
    /// # Errors
    /// [`Error::InvalidOption`] for an option that is out of range, and for several beams, which
    /// [`BeamSearch`](crate::BeamSearch) has; [`Error::EmptyPrompt`] and [`Error::PromptTooLong`]
    /// where a prompt is empty or leaves no room for a new token.
    pub fn new(prompts: &[Vec<u32>], options: &GenerateOptions) -> Result<Self> {
        let sequence = |Prompt { tokens, limit }: Prompt<'_>| Sequence {
            tokens: tokens.to_vec(),
            prompt_length: tokens.len(),
            limit,
            reason: None,
        };
        let sequences = options.prompts(prompts)?.into_iter().map(sequence);
        if options.num_beams > 1 {
            return Err(Error::InvalidOption {
                key: "num_beams",
                found: options.num_beams.to_string(),
                expected: "1, or a beam search",
            });
        }
        Ok(Self {
            first_prompt: options.first_prompt,
            eos_token_ids: options.eos_token_ids.clone(),
            min_new_tokens: options.min_new_tokens,
            suppressed: options.suppressed(),
            sequences: sequences.collect(),
        })
    }

    /// The sequences that wait for a token, in order of prompts.
    pub fn rows(&self) -> Vec<Row<'_>> {
        let prompts = (self.first_prompt..).take(self.sequences.len());
        prompts.filter_map(|prompt| self.row(prompt)).collect()
    }

    /// The sequence of a prompt, while it waits for a token.
    pub fn row(&self, prompt: u64) -> Option<Row<'_>> {
        let index = usize::try_from(prompt.checked_sub(self.first_prompt)?).ok()?;
        let Sequence {
            tokens,
            reason,
            prompt_length,
            ..
        } = self.sequences.get(index)?;
        let is_short = tokens.len() - prompt_length < self.min_new_tokens;
        reason.is_none().then_some(Row {
            prompt,
            tokens,
            forbidden: &self.suppressed[usize::from(is_short)],
        })
    }

    /// Appends a token to a waiting sequence.
    ///
    /// # Panics
    /// Where the prompt is unknown or done.
    pub fn push(&mut self, prompt: u64, id: u32) -> NewToken {
        let sequence = &mut self.sequences[(prompt - self.first_prompt) as usize];
        assert!(sequence.reason.is_none(), "prompt {prompt} is done");
        let position = sequence.tokens.len();
        sequence.tokens.push(id);
        if self.eos_token_ids.contains(&id) {
            sequence.reason = Some(Reason::Eos);
        } else if sequence.tokens.len() >= sequence.limit {
            sequence.reason = Some(Reason::Length);
        }
        NewToken {
            prompt,
            position,
            id,
        }
    }

    /// Ends a sequence for a reason of the caller's. A sequence that an end token has ended keeps
    /// that reason.
    ///
    /// # Panics
    /// Where the prompt is unknown.
    pub fn stop(&mut self, prompt: u64) {
        let reason = &mut self.sequences[(prompt - self.first_prompt) as usize].reason;
        if *reason != Some(Reason::Eos) {
            *reason = Some(Reason::Stop);
        }
    }

    /// The results, in order of prompts; a sequence that still waits counts as stopped.
    pub fn finish(self) -> Vec<Completion> {
        let complete = |mut sequence: Sequence| Completion {
            ids: sequence.tokens.split_off(sequence.prompt_length),
            prompt_ids: sequence.tokens,
            reason: sequence.reason.unwrap_or(Reason::Stop),
        };
        self.sequences.into_iter().map(complete).collect()
    }
}

/// Continues prompts until each has ended.
///
/// # Communication
/// None of its own. Under several ranks each calls it with equal arguments; see [`TokenSource`].
///
/// # Errors
/// [`Error::InvalidOption`], [`Error::EmptyPrompt`] and [`Error::PromptTooLong`] for wrong
/// arguments; [`Error::Source`] and [`Error::SourceLength`] where the model fails.
pub fn generate(
    source: &mut dyn TokenSource,
    prompts: &[Vec<u32>],
    options: &GenerateOptions,
) -> Result<Vec<Completion>> {
    generate_with(source, prompts, options, &mut |_| ControlFlow::Continue(()))
}

/// Continues prompts, showing each token to `on_token` as it is chosen; [`ControlFlow::Break`]
/// ends that sequence. Under several ranks every rank's callback must decide alike.
///
/// # Errors
/// As for [`generate`].
pub fn generate_with(
    source: &mut dyn TokenSource,
    prompts: &[Vec<u32>],
    options: &GenerateOptions,
    on_token: &mut dyn FnMut(NewToken) -> ControlFlow<()>,
) -> Result<Vec<Completion>> {
    let sampler = Sampler::new(options)?;
    let mut decoding = Decoding::new(prompts, options)?;
    loop {
        let rows = decoding.rows();
        if rows.is_empty() {
            return Ok(decoding.finish());
        }
        let tokens = source.next_tokens(&rows, &sampler).map_err(Error::Source)?;
        let prompts: Vec<u64> = rows.iter().map(|row| row.prompt).collect();
        if tokens.len() != prompts.len() {
            return Err(Error::SourceLength {
                expected: prompts.len(),
                found: tokens.len(),
            });
        }
        for (prompt, id) in prompts.into_iter().zip(tokens) {
            let token = decoding.push(prompt, id);
            if on_token(token).is_break() {
                decoding.stop(prompt);
            }
        }
    }
}
