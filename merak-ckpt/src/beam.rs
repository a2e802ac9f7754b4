//! Beam search: the likeliest continuations of each prompt are kept beside each other.

use crate::{
    Completion, EarlyStopping, Error, GenerateOptions, LogitsSource, Reason, Result, Row, Sampler,
    generate_options::Prompt,
};
use std::cmp::Ordering;

/// The score of a beam that does not count, as in transformers.
const NEVER: f32 = -1.0e9;

/// Continues prompts by beam search, with `num_beams` beams each.
///
/// Rows are beams: from one call to the next a row may continue the tokens of another one, so a
/// source that keeps a cache by [`Row::prompt`] compares the tokens.
///
/// ```
/// use merak_ckpt::{BoxError, GenerateOptions, LogitsSource, Row, generate_beams};
///
/// /// After 0, token 1 is likelier than 2; what follows 2 is certain, what follows 1 is not.
/// struct Trap;
///
/// impl LogitsSource for Trap {
///     fn next_logits(&mut self, rows: &[Row<'_>]) -> Result<Vec<Vec<f32>>, BoxError> {
///         let logits = |row: &Row<'_>| match row.tokens.last() {
///             Some(0) => vec![-9.0, 0.6, 0.5, -9.0],
///             Some(1) => vec![0.0; 4],
///             _ => vec![-9.0, -9.0, -9.0, 9.0],
///         };
///         Ok(rows.iter().map(logits).collect())
///     }
/// }
///
/// # fn main() -> Result<(), merak_ckpt::Error> {
/// let options = GenerateOptions { max_new_tokens: 2, num_beams: 2, ..Default::default() };
/// let found = generate_beams(&mut Trap, &[vec![0]], &options)?;
/// assert_eq!(found[0].ids, [2, 3]);
/// # Ok(())
/// # }
/// ```
///
/// # Errors
/// As [`generate`](crate::generate).
pub fn generate_beams(
    source: &mut dyn LogitsSource,
    prompts: &[Vec<u32>],
    options: &GenerateOptions,
) -> Result<Vec<Completion>> {
    let mut search = BeamSearch::new(prompts, options)?;
    loop {
        let waiting: Vec<_> = search.waiting().collect();
        if waiting.is_empty() {
            return Ok(search.finish());
        }
        let rows: Vec<_> = waiting.iter().flat_map(|&p| search.rows(p)).collect();
        let expected = rows.len();
        let logits = source.next_logits(&rows).map_err(Error::Source)?;
        if logits.len() != expected {
            return Err(Error::SourceLength {
                expected,
                found: logits.len(),
            });
        }
        let mut logits = logits.iter();
        for prompt in waiting {
            let mut candidates = Vec::new();
            for (row, logits) in search.rows(prompt).iter().zip(&mut logits) {
                candidates.extend(search.candidates(row.prompt, logits)?);
            }
            search.advance(prompt, candidates);
        }
    }
}

/// A token that may follow a beam.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Continued {
    /// Which of the prompt's beams it follows.
    pub beam: usize,
    /// The token.
    pub id: u32,
    /// Sum of the log probabilities of the continuation and this token.
    pub score: f32,
}

/// The state of a beam search, without a model. The rules are those of transformers: of the
/// continuations of all beams of a prompt the likeliest are kept, those that end are set aside
/// under `score / length ^ length_penalty`, and a prompt is done when no running beam can become
/// better than they are.
///
/// A beam is a sequence of its own: that of number `n` of prompt `p` has the sequence number
/// `p * num_beams + n` in [`Row::prompt`], counted from 0. Beams change places at each step, so a
/// cache follows [`BeamSearch::advance`].
#[derive(Debug, Clone)]
pub struct BeamSearch {
    first_prompt: u64,
    num_beams: usize,
    length_penalty: f64,
    early_stopping: EarlyStopping,
    eos_token_ids: Vec<u32>,
    min_new_tokens: usize,
    suppressed: [Vec<u32>; 2],
    sampler: Sampler,
    prompts: Vec<Beams>,
}

/// The beams of one prompt.
#[derive(Debug, Clone)]
struct Beams {
    prompt_length: usize,
    limit: usize,
    running: Vec<Hypothesis>,
    /// The best that have ended, best first; at most as many as there are beams.
    ended: Vec<Hypothesis>,
    /// Whether a running beam may still become better than those that have ended.
    improves: bool,
    is_done: bool,
}

/// Tokens, prompt included, and their score.
#[derive(Debug, Clone)]
struct Hypothesis {
    tokens: Vec<u32>,
    score: f32,
}

impl BeamSearch {
    /// The state before the first token. Each prompt has one beam until it has one token.
    ///
    /// # Errors
    /// As [`Decoding::new`](crate::Decoding::new).
    pub fn new(prompts: &[Vec<u32>], options: &GenerateOptions) -> Result<Self> {
        let sampler = Sampler::new(options)?;
        let beams = |Prompt { tokens, limit }: Prompt<'_>| Beams {
            prompt_length: tokens.len(),
            limit,
            running: vec![Hypothesis {
                tokens: tokens.to_vec(),
                score: 0.0,
            }],
            ended: Vec::new(),
            improves: true,
            is_done: false,
        };
        Ok(Self {
            first_prompt: options.first_prompt,
            num_beams: options.num_beams,
            length_penalty: options.length_penalty,
            early_stopping: options.early_stopping,
            eos_token_ids: options.eos_token_ids.clone(),
            min_new_tokens: options.min_new_tokens,
            suppressed: options.suppressed(),
            sampler,
            prompts: options.prompts(prompts)?.into_iter().map(beams).collect(),
        })
    }

    /// Most candidates of a step: enough that as many beams go on where each has ended in every
    /// end token.
    pub fn num_candidates(&self) -> usize {
        (1 + self.eos_token_ids.len()).max(2) * self.num_beams
    }

    /// The prompts that are not done.
    pub fn waiting(&self) -> impl Iterator<Item = u64> + '_ {
        let numbered = (self.first_prompt..).zip(&self.prompts);
        numbered
            .filter(|(_, beams)| !beams.is_done)
            .map(|(prompt, _)| prompt)
    }

    /// The beams of a prompt that wait for a token; none when the prompt is done.
    pub fn rows(&self, prompt: u64) -> Vec<Row<'_>> {
        let beams = self.num_beams as u64;
        let numbers = (0..beams).filter_map(|beam| prompt.checked_mul(beams)?.checked_add(beam));
        numbers.filter_map(|number| self.row(number)).collect()
    }

    /// A beam by its sequence number, while it waits for a token.
    pub fn row(&self, sequence: u64) -> Option<Row<'_>> {
        let (prompt, beam) = self.beam_of(sequence);
        let index = usize::try_from(prompt.checked_sub(self.first_prompt)?).ok()?;
        let beams = self.prompts.get(index)?;
        let tokens = &beams.running.get(beam).filter(|_| !beams.is_done)?.tokens;
        let is_short = tokens.len() - beams.prompt_length < self.min_new_tokens;
        Some(Row {
            prompt: sequence,
            tokens,
            forbidden: &self.suppressed[usize::from(is_short)],
        })
    }

    /// The likeliest continuations of one beam, likeliest first, at most
    /// [`BeamSearch::num_candidates`]: the likeliest of the prompt are among those of all its
    /// beams.
    ///
    /// # Shapes
    /// As [`Sampler::pick`].
    ///
    /// # Errors
    /// [`Error::BadLogits`] where a logit is not a number or plus infinity, or none is finite.
    ///
    /// # Panics
    /// Where the sequence does not wait for a token.
    pub fn candidates(&self, sequence: u64, logits: &[f32]) -> Result<Vec<Continued>> {
        let (prompt, beam) = self.beam_of(sequence);
        let before = self.prompts[self.index(prompt)].running[beam].score;
        let row = self.row(sequence).expect("it waits for a token");
        let scores = row.scores(&self.sampler, logits)?;
        let finite = (0..).zip(&scores).filter(|(_, score)| score.is_finite());
        let continued = finite.map(|(id, score)| Continued {
            beam,
            id,
            score: before + score,
        });
        let mut all: Vec<_> = continued.collect();
        likeliest(&mut all, self.num_candidates());
        Ok(all)
    }

    /// Goes on with the candidates of all beams of a prompt. Returns the sequences that go on, each
    /// with the one that it continues: `(before, after)`.
    ///
    /// # Panics
    /// Where the prompt is done, or a candidate follows no beam.
    pub fn advance(&mut self, prompt: u64, mut candidates: Vec<Continued>) -> Vec<(u64, u64)> {
        let index = self.index(prompt);
        let beams = &self.prompts[index];
        assert!(!beams.is_done, "prompt {prompt} is done");
        likeliest(&mut candidates, self.num_candidates());
        let length = beams.running[0].tokens.len() + 1;
        let ends = |candidate: &Continued| {
            length >= beams.limit || self.eos_token_ids.contains(&candidate.id)
        };
        let follow = |candidate: &Continued, score| {
            let mut tokens = beams.running[candidate.beam].tokens.clone();
            tokens.push(candidate.id);
            Hypothesis { tokens, score }
        };
        let going: Vec<_> = candidates.iter().filter(|next| !ends(next)).collect();
        let going = &going[..going.len().min(self.num_beams)];
        let is_full = self.early_stopping == EarlyStopping::Yes && self.is_full(beams);
        let mut ended = beams.ended.clone();
        if beams.improves && !is_full {
            let best = candidates.iter().take(self.num_beams);
            let scored = |next: &Continued| follow(next, self.scaled(next.score, length, beams));
            ended.extend(best.filter(|next| ends(next)).map(scored));
            ended.sort_by(|a, b| b.score.total_cmp(&a.score));
            ended.truncate(self.num_beams);
        }
        let running: Vec<_> = going.iter().map(|next| follow(next, next.score)).collect();
        let first = prompt * self.num_beams as u64;
        let follows = |(number, next): (u64, &&Continued)| (first + next.beam as u64, number);
        let parents: Vec<_> = (first..).zip(going).map(follows).collect();
        let beams = Beams {
            running,
            ended,
            ..self.prompts[index].clone()
        };
        let improves = beams.improves && self.may_improve(&beams, length);
        let stops = self.early_stopping == EarlyStopping::Yes && self.is_full(&beams);
        self.prompts[index] = Beams {
            improves,
            is_done: !improves || stops || beams.running.is_empty(),
            ..beams
        };
        if self.prompts[index].is_done {
            return Vec::new();
        }
        parents
    }

    /// The best continuation of each prompt, in order of prompts.
    pub fn finish(self) -> Vec<Completion> {
        let complete = |beams: Beams| {
            let mut best = beams.ended.into_iter().chain(beams.running);
            let mut tokens = best.next().map(|best| best.tokens).unwrap_or_default();
            let ids = tokens.split_off(beams.prompt_length);
            let is_end = ids.last().is_some_and(|id| self.eos_token_ids.contains(id));
            Completion {
                prompt_ids: tokens,
                ids,
                reason: if is_end { Reason::Eos } else { Reason::Length },
            }
        };
        self.prompts.into_iter().map(complete).collect()
    }

    /// The prompt of a sequence, and which of its beams it is.
    fn beam_of(&self, sequence: u64) -> (u64, usize) {
        let beams = self.num_beams as u64;
        (sequence / beams, (sequence % beams) as usize)
    }

    fn index(&self, prompt: u64) -> usize {
        (prompt - self.first_prompt) as usize
    }

    fn is_full(&self, beams: &Beams) -> bool {
        beams.ended.len() >= self.num_beams
    }

    /// A score over the power of its number of new tokens.
    fn scaled(&self, score: f32, length: usize, beams: &Beams) -> f32 {
        let new = (length - beams.prompt_length) as f64;
        (f64::from(score) / new.powf(self.length_penalty)) as f32
    }

    /// Whether the best running beam may become better than the worst that has ended.
    fn may_improve(&self, beams: &Beams, length: usize) -> bool {
        let Some(best) = beams.running.first() else {
            return false;
        };
        let grows = self.early_stopping == EarlyStopping::Never && self.length_penalty > 0.0;
        let length = if grows { beams.limit } else { length };
        let worst = match beams.ended.last() {
            Some(worst) if self.is_full(beams) => worst.score,
            _ => NEVER,
        };
        self.scaled(best.score, length, beams) > worst
    }
}

/// Brings the likeliest to the front, in their order, and drops the rest.
fn likeliest(candidates: &mut Vec<Continued>, len: usize) {
    if len < candidates.len() {
        candidates.select_nth_unstable_by(len, likelier);
        candidates.truncate(len);
    }
    candidates.sort_unstable_by(likelier);
}

/// Greater scores first, then earlier beams and lower ids.
fn likelier(a: &Continued, b: &Continued) -> Ordering {
    let by_score = b.score.total_cmp(&a.score);
    by_score.then((a.beam, a.id).cmp(&(b.beam, b.id)))
}
