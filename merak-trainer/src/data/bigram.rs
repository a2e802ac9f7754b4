//! The loss of a model that knows only the last token, as a baseline.

use indexmap::IndexMap;

/// Cross-entropy on `validation`, in nats per token, of the bigram model of `train`; `None` when
/// either has fewer than two tokens.
///
/// Smoothed as by [Witten and Bell 1991](https://doi.org/10.1109/18.87000): with c the counts, T(a)
/// the number of different tokens seen after a, N all tokens and V = `vocab_size`,
///
/// ```text
/// p(b | a) = (c(ab) + T(a) p(b)) / (c(a) + T(a))      p(b) = (c(b) + 1) / (N + V)
/// ```
///
/// Memory grows with the different pairs that occur, not with V squared.
///
/// # Examples
///
/// ```
/// use merak_trainer::data::bigram_loss;
///
/// let text: Vec<u32> = b"to be or not to be ".repeat(50).iter().map(|b| u32::from(*b)).collect();
/// let loss = bigram_loss(&text, &text, 256).expect("tokens");
/// assert!(loss < 1.0);
/// ```
pub fn bigram_loss(train: &[u32], validation: &[u32], vocab_size: usize) -> Option<f64> {
    if train.len() < 2 || validation.len() < 2 {
        return None;
    }
    let model = Bigrams::count(train, vocab_size);
    let total: f64 = validation
        .windows(2)
        .map(|pair| -model.probability(pair[0], pair[1]).ln())
        .sum();
    Some(total / (validation.len() - 1) as f64)
}

struct Bigrams {
    /// c(ab)
    pairs: IndexMap<(u32, u32), u64>,
    /// c(a), of tokens that another one follows, and T(a)
    contexts: IndexMap<u32, (u64, u64)>,
    /// c(b)
    tokens: IndexMap<u32, u64>,
    /// N
    total: usize,
    /// V
    vocab_size: usize,
}

impl Bigrams {
    fn count(train: &[u32], vocab_size: usize) -> Self {
        let mut pairs = IndexMap::new();
        for pair in train.windows(2) {
            *pairs.entry((pair[0], pair[1])).or_insert(0) += 1;
        }
        let mut contexts = IndexMap::new();
        for ((context, _), count) in &pairs {
            let (seen, followers) = contexts.entry(*context).or_insert((0, 0));
            *seen += count;
            *followers += 1;
        }
        let mut tokens = IndexMap::new();
        for token in train {
            *tokens.entry(*token).or_insert(0) += 1;
        }
        Self {
            pairs,
            contexts,
            tokens,
            total: train.len(),
            vocab_size,
        }
    }

    fn probability(&self, context: u32, token: u32) -> f64 {
        let occurrences = self.tokens.get(&token).copied().unwrap_or(0);
        let alone = (occurrences + 1) as f64 / (self.total + self.vocab_size) as f64;
        let Some(&(seen, followers)) = self.contexts.get(&context) else {
            return alone;
        };
        let together = self.pairs.get(&(context, token)).copied().unwrap_or(0);
        (together as f64 + followers as f64 * alone) / (seen + followers) as f64
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::rng::hash;

    #[test]
    fn probabilities_of_each_context_sum_to_one() {
        let train: Vec<u32> = (0..200).map(|i| (hash(&[i]) % 7) as u32).collect();
        let model = Bigrams::count(&train, 9);
        for context in 0..9 {
            let sum: f64 = (0..9).map(|token| model.probability(context, token)).sum();
            assert!((sum - 1.0).abs() < 1e-12, "context {context}: {sum}");
        }
    }

    #[test]
    fn noise_costs_the_logarithm_of_the_vocabulary_and_a_cycle_nearly_nothing() {
        let noise =
            |key| -> Vec<u32> { (0..50_000).map(|i| (hash(&[key, i]) % 16) as u32).collect() };
        let loss = bigram_loss(&noise(1), &noise(2), 16).unwrap();
        assert!((loss - 16_f64.ln()).abs() < 0.01, "{loss}");
        let cycle: Vec<u32> = (0..5000).map(|i| i % 10).collect();
        assert!(bigram_loss(&cycle, &cycle, 10).unwrap() < 0.01);
    }

    #[test]
    fn unseen_tokens_of_a_huge_vocabulary_have_a_finite_cost() {
        let loss = bigram_loss(&[1, 2, 1, 2], &[3, 1, 9, 9], u32::MAX as usize).unwrap();
        assert!(loss.is_finite());
        assert_eq!(bigram_loss(&[1], &[1, 2], 3), None);
    }
}
