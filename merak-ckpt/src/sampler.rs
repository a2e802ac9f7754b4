//! From logits to a token.

use crate::uniform::uniform;
use crate::{Error, GenerateOptions, Result};
use std::cmp::Ordering;
use std::collections::BTreeSet;

/// Chooses the next token of a sequence from its logits.
///
/// The choice depends on the logits, the options, the prompt's index and the token's position
/// only, so it does not matter with which other prompts, on how many ranks, or with which cache
/// the logits were computed. The order of operations is: repetition penalty, runs that may not
/// repeat, temperature, top-k, top-p, min-p, draw. Temperature 0 takes the greatest logit, the
/// lowest id among equals.
///
/// ```
/// use merak_ckpt::{GenerateOptions, Sampler};
///
/// # fn main() -> Result<(), merak_ckpt::Error> {
/// let sampler = Sampler::new(&GenerateOptions { temperature: 0.0, ..Default::default() })?;
/// assert_eq!(sampler.pick(&[0.5, 2.0, 2.0, -1.0], 0, &[3])?, 1);
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone)]
pub struct Sampler {
    temperature: f64,
    top_k: usize,
    top_p: f64,
    min_p: f64,
    repetition_penalty: f32,
    no_repeat_ngram_size: usize,
    seed: u64,
}

/// A token that may be drawn. Its weight is its probability over that of the likeliest.
#[derive(Debug, Clone, Copy)]
struct Candidate {
    id: u32,
    logit: f32,
    weight: f64,
}

impl Sampler {
    /// A sampler with these options.
    ///
    /// # Errors
    /// [`Error::InvalidOption`] for an option that is out of range.
    pub fn new(options: &GenerateOptions) -> Result<Self> {
        options.check()?;
        Ok(Self {
            temperature: options.temperature,
            top_k: options.top_k,
            top_p: options.top_p,
            min_p: options.min_p,
            repetition_penalty: options.repetition_penalty as f32,
            no_repeat_ngram_size: options.no_repeat_ngram_size,
            seed: options.seed,
        })
    }

    /// The token that follows `tokens` (the prompt and what was generated so far).
    ///
    /// # Shapes
    /// `logits: [V]`, the whole vocabulary; padded entries are minus infinity.
    ///
    /// # Errors
    /// [`Error::BadLogits`] where a logit is not a number or plus infinity, or none is finite.
    pub fn pick(&self, logits: &[f32], prompt: u64, tokens: &[u32]) -> Result<u32> {
        let position = tokens.len();
        let bad = |reason| Error::BadLogits {
            prompt,
            position,
            reason,
        };
        let greatest = Greatest::of(logits)
            .ok_or_else(|| bad("hold a value that is not a number, or infinite"))?;
        if self.temperature == 0.0 && !self.penalises(tokens) && self.repeated(tokens).is_empty() {
            return greatest
                .first(logits)
                .ok_or_else(|| bad("leave no token possible"));
        }
        let candidates = self.candidates(logits, tokens);
        match candidates.as_slice() {
            [] => Err(bad("leave no token possible")),
            [only] => Ok(only.id),
            _ => Ok(draw(
                &candidates,
                uniform(self.seed, prompt, position as u64),
            )),
        }
    }

    /// The tokens that may follow `tokens` and their probabilities, likeliest first.
    ///
    /// ```
    /// use merak_ckpt::{GenerateOptions, Sampler};
    ///
    /// # fn main() -> Result<(), merak_ckpt::Error> {
    /// let options = GenerateOptions {
    ///     temperature: 1.0,
    ///     top_p: 1.0,
    ///     top_k: 2,
    ///     ..Default::default()
    /// };
    /// let found = Sampler::new(&options)?.probabilities(&[1.0, 0.0, 2.0], 0, &[]);
    /// assert_eq!(found?.iter().map(|(id, _)| *id).collect::<Vec<_>>(), [2, 0]);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Shapes
    /// As [`Sampler::pick`].
    ///
    /// # Errors
    /// As [`Sampler::pick`].
    pub fn probabilities(
        &self,
        logits: &[f32],
        prompt: u64,
        tokens: &[u32],
    ) -> Result<Vec<(u32, f64)>> {
        // Where no token can be chosen, there are no probabilities either.
        self.pick(logits, prompt, tokens)?;
        let mut candidates = self.candidates(logits, tokens);
        candidates.sort_unstable_by(likelier);
        let total = total(&candidates);
        let share = |candidate: &Candidate| (candidate.id, candidate.weight / total);
        Ok(candidates.iter().map(share).collect())
    }

    /// The logarithms of the probabilities of all tokens after `tokens`, with the repetition
    /// penalty and without runs that may not repeat; not drawn from, so neither temperature nor
    /// cuts count.
    ///
    /// # Shapes
    /// As [`Sampler::pick`]; returns `[V]`.
    pub(crate) fn log_probabilities(
        &self,
        logits: &[f32],
        prompt: u64,
        tokens: &[u32],
    ) -> Result<Vec<f32>> {
        // Where no token can be chosen, there are no probabilities either.
        Greatest::of(logits)
            .and_then(|greatest| greatest.first(logits))
            .ok_or(Error::BadLogits {
                prompt,
                position: tokens.len(),
                reason: "hold a value that is not a number, or leave no token possible",
            })?;
        let most = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let exp = |logit: &f32| f64::from(logit - most).exp();
        let log_sum = logits.iter().map(exp).sum::<f64>().ln();
        let of_one = |&logit: &f32| (f64::from(logit) - f64::from(most) - log_sum) as f32;
        let candidates = self.possible(logits.iter().map(of_one), tokens);
        Ok(candidates.iter().map(|candidate| candidate.logit).collect())
    }

    /// All tokens, with the repetition penalty and without runs that may not repeat.
    fn possible(&self, logits: impl Iterator<Item = f32>, tokens: &[u32]) -> Vec<Candidate> {
        let candidate = |(logit, id): (f32, u32)| Candidate {
            id,
            logit,
            weight: 1.0,
        };
        let mut candidates: Vec<_> = logits.zip(0..).map(candidate).collect();
        self.penalise(&mut candidates, tokens);
        self.forbid_repeated(&mut candidates, tokens);
        candidates
    }

    /// The tokens that may be drawn; none where no logit is finite.
    fn candidates(&self, logits: &[f32], tokens: &[u32]) -> Vec<Candidate> {
        let mut candidates = self.possible(logits.iter().copied(), tokens);
        candidates.retain(|candidate| candidate.logit > f32::NEG_INFINITY);
        let Some(&best) = candidates.iter().min_by(|a, b| likelier(a, b)) else {
            return candidates;
        };
        if self.temperature == 0.0 {
            return vec![best];
        }
        self.weigh(&mut candidates, best.logit);
        self.cut(&mut candidates);
        candidates
    }

    /// Makes tokens that have occurred less likely: positive logits are divided by the penalty,
    /// negative ones multiplied ([CTRL](https://arxiv.org/abs/1909.05858), section 4.1).
    fn penalise(&self, candidates: &mut [Candidate], tokens: &[u32]) {
        if !self.penalises(tokens) {
            return;
        }
        for id in tokens.iter().collect::<BTreeSet<_>>() {
            if let Some(Candidate { logit, .. }) = candidates.get_mut(*id as usize) {
                let penalty = self.repetition_penalty;
                *logit = if *logit < 0.0 {
                    *logit * penalty
                } else {
                    *logit / penalty
                };
            }
        }
    }

    /// Tokens that would end a run of `no_repeat_ngram_size` tokens that has occurred already.
    fn repeated(&self, tokens: &[u32]) -> BTreeSet<u32> {
        let size = self.no_repeat_ngram_size;
        if size == 0 || tokens.len() < size {
            return BTreeSet::new();
        }
        let begun = &tokens[tokens.len() + 1 - size..];
        let runs = tokens.windows(size).filter(|run| run[..size - 1] == *begun);
        runs.map(|run| run[size - 1]).collect()
    }

    fn forbid_repeated(&self, candidates: &mut [Candidate], tokens: &[u32]) {
        for id in self.repeated(tokens) {
            if let Some(candidate) = candidates.get_mut(id as usize) {
                candidate.logit = f32::NEG_INFINITY;
            }
        }
    }

    fn penalises(&self, tokens: &[u32]) -> bool {
        !tokens.is_empty() && (self.repetition_penalty - 1.0).abs() >= f32::EPSILON
    }

    fn weigh(&self, candidates: &mut [Candidate], best: f32) {
        for candidate in candidates {
            let below = f64::from(candidate.logit) - f64::from(best);
            candidate.weight = (below / self.temperature).exp();
        }
    }

    /// Keeps the candidates that top-k, top-p and min-p allow; the likeliest is always among them.
    fn cut(&self, candidates: &mut Vec<Candidate>) {
        if self.top_k > 0 && self.top_k < candidates.len() {
            put_likeliest_first(candidates, self.top_k);
            candidates.truncate(self.top_k);
        }
        if self.top_p < 1.0 {
            let enough = self.top_p * total(candidates);
            // Few tokens have most of the probability, so only these are sorted.
            let mut len = 64;
            while !truncate_at(candidates, len.min(candidates.len()), enough) {
                len *= 8;
            }
        }
        // The likeliest has a weight of 1.
        candidates.retain(|candidate| candidate.weight >= self.min_p);
    }
}

/// Brings the `len` likeliest to the front, in their order.
fn put_likeliest_first(candidates: &mut [Candidate], len: usize) {
    if len < candidates.len() {
        candidates.select_nth_unstable_by(len, likelier);
    }
    candidates[..len].sort_unstable_by(likelier);
}

/// Keeps the fewest of the likeliest whose weights reach `enough`, if they are among the `len`
/// likeliest.
fn truncate_at(candidates: &mut Vec<Candidate>, len: usize, enough: f64) -> bool {
    put_likeliest_first(candidates, len);
    let mut sum = 0.0;
    let reaches = |candidate: &Candidate| {
        sum += candidate.weight;
        sum >= enough
    };
    let kept = match candidates[..len].iter().position(reaches) {
        Some(last) => last + 1,
        None if len == candidates.len() => len,
        None => return false,
    };
    candidates.truncate(kept);
    true
}

/// The greatest of each block of logits: finding the greatest of a vocabulary is most of what
/// greedy decoding does beside the model, so the loop over a block has no branch.
struct Greatest(Vec<f32>);

impl Greatest {
    const BLOCK: usize = 256;

    /// `None` where a logit is not a number or plus infinity.
    fn of(logits: &[f32]) -> Option<Self> {
        let mut are_legal = true;
        let greatest = |block: &[f32]| {
            let mut greatest = f32::NEG_INFINITY;
            for &logit in block {
                are_legal &= logit < f32::INFINITY;
                greatest = if logit > greatest { logit } else { greatest };
            }
            greatest
        };
        let blocks = logits.chunks(Self::BLOCK).map(greatest).collect();
        are_legal.then_some(Self(blocks))
    }

    /// The lowest id of the greatest logit; `None` where all are minus infinity.
    fn first(&self, logits: &[f32]) -> Option<u32> {
        let greatest = self.0.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        if greatest == f32::NEG_INFINITY {
            return None;
        }
        let block = self.0.iter().position(|&block| block >= greatest)?;
        let start = block * Self::BLOCK;
        let within = logits[start..]
            .iter()
            .position(|&logit| logit >= greatest)?;
        u32::try_from(start + within).ok()
    }
}

/// Greater logits first, then lower ids.
fn likelier(a: &Candidate, b: &Candidate) -> Ordering {
    let by_logit = b.logit.partial_cmp(&a.logit).unwrap_or(Ordering::Equal);
    by_logit.then(a.id.cmp(&b.id))
}

fn total(candidates: &[Candidate]) -> f64 {
    candidates.iter().map(|candidate| candidate.weight).sum()
}

/// The candidate in whose share of the unit interval `at` lies.
fn draw(candidates: &[Candidate], at: f64) -> u32 {
    let target = at * total(candidates);
    let mut sum = 0.0;
    let hit = candidates.iter().find(|candidate| {
        sum += candidate.weight;
        target < sum
    });
    // Rounding may leave nothing for the last number below 1.
    let likeliest = || candidates.iter().min_by(|a, b| likelier(a, b));
    hit.or_else(likeliest)
        .expect("the likeliest is never cut")
        .id
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sampler(change: impl FnOnce(&mut GenerateOptions)) -> Sampler {
        let mut options = GenerateOptions {
            temperature: 1.0,
            top_p: 1.0,
            ..Default::default()
        };
        change(&mut options);
        Sampler::new(&options).unwrap()
    }

    /// How often each of five tokens is drawn, in 20,000 draws.
    fn shares(sampler: &Sampler) -> [f64; 5] {
        let logits: [f32; 5] = [0.4_f32, 0.1, 0.3, 0.15, 0.05].map(f32::ln);
        let mut counts = [0.0; 5];
        for prompt in 0..20_000 {
            counts[sampler.pick(&logits, prompt, &[1]).unwrap() as usize] += 1.0 / 20_000.0;
        }
        counts
    }

    fn assert_near(found: [f64; 5], expected: [f64; 5]) {
        // Four standard deviations of a share of 20,000 draws are at most 0.0142.
        let near = found
            .iter()
            .zip(&expected)
            .all(|(a, b)| (a - b).abs() < 0.015);
        assert!(near, "{found:?}, expected {expected:?}");
    }

    #[test]
    fn draws_follow_the_distribution() {
        assert_near(shares(&sampler(|_| ())), [0.4, 0.1, 0.3, 0.15, 0.05]);
    }

    #[test]
    fn temperature_raises_probabilities_to_its_inverse() {
        let total = 0.16 + 0.01 + 0.09 + 0.0225 + 0.0025;
        let expected = [0.16, 0.01, 0.09, 0.0225, 0.0025].map(|p: f64| p / total);
        assert_near(shares(&sampler(|o| o.temperature = 0.5)), expected);
    }

    #[test]
    fn top_k_keeps_the_k_likeliest() {
        let found = shares(&sampler(|o| o.top_k = 2));
        assert_near(found, [4.0 / 7.0, 0.0, 3.0 / 7.0, 0.0, 0.0]);
        assert!(found[1] <= 0.0);
    }

    #[test]
    fn top_p_keeps_the_fewest_tokens_that_reach_it() {
        let found = shares(&sampler(|o| o.top_p = 0.75));
        assert_near(found, [0.4 / 0.85, 0.0, 0.3 / 0.85, 0.15 / 0.85, 0.0]);
        assert!(found[1] + found[4] <= 0.0);
        // 0.4 alone reaches 0.3.
        assert!(shares(&sampler(|o| o.top_p = 0.3))[2] <= 0.0);
    }

    #[test]
    fn top_p_counts_what_top_k_has_left() {
        // Of 0.4 and 0.3 the first is 0.57 of the rest, so 0.5 is reached by it alone.
        let found = shares(&sampler(|o| (o.top_k, o.top_p) = (2, 0.5)));
        assert_near(found, [1.0, 0.0, 0.0, 0.0, 0.0]);
    }

    #[test]
    fn min_p_keeps_tokens_near_the_likeliest() {
        let found = shares(&sampler(|o| o.min_p = 0.3));
        assert_near(found, [0.4 / 0.85, 0.0, 0.3 / 0.85, 0.15 / 0.85, 0.0]);
    }

    #[test]
    fn greedy_takes_the_lowest_id_among_equals_even_signed_zeros() {
        let sampler = sampler(|o| o.temperature = 0.0);
        assert_eq!(sampler.pick(&[-1.0, -0.0, 0.0], 0, &[]).unwrap(), 1);
        assert_eq!(sampler.pick(&[f32::NEG_INFINITY, -9.0], 0, &[]).unwrap(), 1);
    }

    #[test]
    fn the_repetition_penalty_lowers_positive_and_negative_logits_once() {
        let sampler = sampler(|o| (o.temperature, o.repetition_penalty) = (0.0, 2.0));
        assert_eq!(sampler.pick(&[3.0, 2.0, 1.6], 0, &[0, 0]).unwrap(), 1);
        assert_eq!(sampler.pick(&[-1.0, -1.5], 0, &[0]).unwrap(), 1);
    }

    #[test]
    fn a_run_of_tokens_comes_once() {
        let sampler = sampler(|o| (o.temperature, o.no_repeat_ngram_size) = (0.0, 2));
        // After 1 came 2 already; after 3 came nothing yet.
        assert_eq!(sampler.pick(&[0.0, 1.0, 9.0], 0, &[1, 2, 1]).unwrap(), 1);
        assert_eq!(sampler.pick(&[0.0, 1.0, 9.0], 0, &[1, 2, 3]).unwrap(), 2);
        let once = Sampler {
            no_repeat_ngram_size: 1,
            ..sampler
        };
        assert_eq!(once.pick(&[0.0, 1.0, 9.0], 0, &[2, 1]).unwrap(), 0);
    }

    #[test]
    fn useless_logits_are_refused() {
        let sampler = sampler(|_| ());
        let message = |logits: &[f32]| sampler.pick(logits, 3, &[1, 2]).unwrap_err().to_string();
        insta::assert_snapshot!(message(&[0.0, f32::NAN]),
            @"the logits of prompt 3 at position 2 hold a value that is not a number, or infinite");
        insta::assert_snapshot!(message(&[f32::NEG_INFINITY]),
            @"the logits of prompt 3 at position 2 leave no token possible");
    }
}
