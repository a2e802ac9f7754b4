//! The decode loop.

use crate::generate_options::Prompt;
use crate::{BoxError, Error, GenerateOptions, Result, Sampler};
use serde::{Deserialize, Serialize};
use std::{borrow::Cow, ops::ControlFlow};

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
