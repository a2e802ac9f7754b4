//! Byte-level BPE, trained on texts.

use std::{
    cmp::Reverse,
    collections::{BTreeMap, BinaryHeap},
};

use indexmap::{IndexMap, IndexSet};
use tokenizers::{
    OffsetReferential, OffsetType, PreTokenizedString, PreTokenizer,
    pre_tokenizers::byte_level::ByteLevel,
};

/// How often each word occurs, its bytes as the characters of byte-level BPE.
pub(super) type WordCounts = BTreeMap<String, u64>;

/// Least times that two tokens stand together to become one.
const LEAST_COUNT: u64 = 2;

/// Counts the words of a text, by the pattern of GPT-2.
pub(super) fn count_words(text: &str) -> tokenizers::Result<WordCounts> {
    let mut words = PreTokenizedString::from(text);
    ByteLevel::new(false, false, true).pre_tokenize(&mut words)?;
    let mut counts = WordCounts::new();
    for (word, ..) in words.get_splits(OffsetReferential::Original, OffsetType::None) {
        match counts.get_mut(word) {
            Some(count) => *count += 1,
            None => {
                counts.insert(word.to_owned(), 1);
            }
        }
    }
    Ok(counts)
}

/// Adds the words of a text to those of others.
pub(super) fn add_words(counts: &mut WordCounts, more: WordCounts) {
    for (word, count) in more {
        *counts.entry(word).or_default() += count;
    }
}

/// Two tokens side by side.
type Pair = (u32, u32);

/// A vocabulary, and which pairs of its tokens become one, the first ones first.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Merges {
    /// The tokens by their ids.
    pub(super) tokens: IndexSet<String>,
    pub(super) merges: IndexSet<Pair>,
}

impl Merges {
    /// Learns merges from words until there are `most` tokens, beginning with `tokens`, or until no
    /// pair occurs twice. The most frequent pair becomes a token first, of equally frequent ones
    /// that with the smallest ids
    /// ([Sennrich et al. 2016](https://arxiv.org/abs/1508.07909), section 3.2). The result depends
    /// on the counts alone.
    pub(super) fn learn(words: &WordCounts, tokens: IndexSet<String>, most: usize) -> Self {
        let mut learner = Learner::new(words, &tokens);
        let mut learned = Self {
            tokens,
            merges: IndexSet::new(),
        };
        while learned.tokens.len() < most
            && let Some(pair) = learner.most_frequent()
        {
            let [first, second] = [pair.0, pair.1].map(|id| &learned.tokens[id as usize]);
            // Two merges may spell the same token.
            let (id, _) = learned.tokens.insert_full(format!("{first}{second}"));
            learned.merges.insert(pair);
            learner.merge(pair, id as u32);
        }
        learned
    }
}

/// A word as tokens, and how often it occurs.
#[derive(Debug)]
struct Word {
    tokens: Vec<u32>,
    count: u64,
}

/// Where a pair stands.
#[derive(Debug, Default)]
struct Occurrences {
    count: u64,
    /// The words that have had it; each may be there more than once.
    words: Vec<usize>,
}

#[derive(Debug, Default)]
struct Learner {
    words: Vec<Word>,
    pairs: IndexMap<Pair, Occurrences>,
    /// Counts as they were once; of each pair, the greatest is at least that of now.
    queue: BinaryHeap<(u64, Reverse<Pair>)>,
}

impl Learner {
    fn new(words: &WordCounts, tokens: &IndexSet<String>) -> Self {
        let mut learner = Self::default();
        let mut name = [0; 4];
        for (place, (word, &count)) in words.iter().enumerate() {
            let ids = word.chars().filter_map(|c| {
                let id = tokens.get_index_of(&*c.encode_utf8(&mut name));
                id.map(|id| id as u32)
            });
            let tokens: Vec<_> = ids.collect();
            for pair in pairs(&tokens) {
                let found = learner.pairs.entry(pair).or_default();
                found.count += count;
                found.words.push(place);
            }
            learner.words.push(Word { tokens, count });
        }
        let all = learner.pairs.iter();
        learner.queue = all.map(|(&pair, of)| (of.count, Reverse(pair))).collect();
        learner
    }

    /// The most frequent pair, if there is one that occurs often enough.
    fn most_frequent(&mut self) -> Option<Pair> {
        loop {
            let (count, Reverse(pair)) = self.queue.pop()?;
            let now = self.pairs[&pair].count;
            if now == count && count >= LEAST_COUNT {
                return Some(pair);
            }
            if now >= LEAST_COUNT {
                self.queue.push((now, Reverse(pair)));
            }
        }
    }

    /// Makes one token of a pair in all words.
    fn merge(&mut self, pair: Pair, id: u32) {
        let mut places = std::mem::take(&mut self.pairs[&pair].words);
        places.sort_unstable();
        places.dedup();
        let mut formed = IndexSet::new();
        for place in places {
            let Word { tokens, count } = &mut self.words[place];
            for pair in pairs(tokens) {
                self.pairs[&pair].count -= *count;
            }
            *tokens = merged(tokens, pair, id);
            for pair in pairs(tokens) {
                let found = self.pairs.entry(pair).or_default();
                found.count += *count;
                if pair.0 == id || pair.1 == id {
                    found.words.push(place);
                    formed.insert(pair);
                }
            }
        }
        for pair in formed {
            self.queue.push((self.pairs[&pair].count, Reverse(pair)));
        }
    }
}

fn pairs(tokens: &[u32]) -> impl Iterator<Item = Pair> {
    tokens.windows(2).map(|pair| (pair[0], pair[1]))
}

/// Tokens with one token in place of each pair, from left to right.
fn merged(tokens: &[u32], pair: Pair, id: u32) -> Vec<u32> {
    let mut merged = Vec::with_capacity(tokens.len());
    let mut rest = tokens;
    while let [first, behind @ ..] = rest {
        if behind.first() == Some(&pair.1) && *first == pair.0 {
            merged.push(id);
            rest = &behind[1..];
        } else {
            merged.push(*first);
            rest = behind;
        }
    }
    merged
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokenizers::{
        Trainer as _,
        models::bpe::{BPE, BpeTrainer},
    };

    fn alphabet() -> IndexSet<String> {
        let mut names: Vec<_> = ByteLevel::alphabet()
            .into_iter()
            .map(String::from)
            .collect();
        names.sort_unstable();
        names.into_iter().collect()
    }

    /// The sources of this module, as text.
    fn text() -> String {
        include_str!("tokenizer.rs").replace("    ", " ")
    }

    #[test]
    fn the_first_merges_are_those_of_the_tokenizers_crate() {
        let words = count_words(&text()).unwrap();
        let learned = Merges::learn(&words, alphabet(), 256 + 150);
        let mut theirs = BPE::default();
        let mut trainer = BpeTrainer::builder()
            .initial_alphabet(ByteLevel::alphabet().into_iter().collect())
            .vocab_size(256 + 150)
            .min_frequency(LEAST_COUNT)
            .show_progress(false)
            .build();
        let split = |text: &str| {
            let counts = count_words(text)?;
            let all = counts.into_iter();
            Ok(all.flat_map(|(word, n)| vec![word; n as usize]).collect())
        };
        trainer.feed([text()].iter(), split).unwrap();
        trainer.train(&mut theirs).unwrap();
        let theirs = theirs.get_vocab();
        for (id, token) in learned.tokens.iter().enumerate() {
            assert_eq!(theirs.get(token), Some(&(id as u32)), "{token}");
        }
    }

    #[test]
    fn merges_go_on_until_nothing_occurs_twice_and_depend_on_the_counts_alone() {
        let learn = |words: &WordCounts| Merges::learn(words, alphabet(), 100_000);
        let words = count_words(&text()).unwrap();
        let learned = learn(&words);
        assert!(learned.tokens.len() < 100_000);
        let mut halves = WordCounts::new();
        let text = text();
        let middle = text.find("\nimpl ").unwrap();
        for half in [&text[middle..], &text[..middle]] {
            add_words(&mut halves, count_words(half).unwrap());
        }
        assert_eq!(halves, words);
        assert_eq!(learn(&halves), learned);
        // Each word that occurs twice is one token in the end.
        for (word, _) in words.iter().filter(|(_, count)| **count >= LEAST_COUNT) {
            assert!(learned.tokens.contains(word), "{word}");
        }
    }

    #[test]
    fn repeated_characters_merge_from_left_to_right() {
        let words = WordCounts::from([("aaaaa".to_owned(), 1), ("baaa".to_owned(), 1)]);
        let learned = Merges::learn(&words, ["a", "b"].map(String::from).into(), 4);
        assert_eq!(learned.tokens.get_index(2).unwrap(), "aa");
        assert_eq!(merged(&[0, 0, 0, 1, 0, 0], (0, 0), 2), [2, 0, 1, 2]);
    }
}
