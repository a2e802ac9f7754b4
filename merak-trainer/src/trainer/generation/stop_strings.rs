//! Strings that end a text.

use crate::data::Tokenizer;

/// Looks for strings at the end of a text that grows by tokens.
///
/// A text ends when one of the strings ends within its last token. The string may begin in a prompt
/// or in the middle of a token. `stop_strings` of transformers has the same meaning.
///
/// ```
/// use merak_trainer::{StopStrings, data::Tokenizer};
///
/// let tokenizer = Tokenizer::bytes();
/// let strings = ["end".to_owned()];
/// let stops = StopStrings::new(&tokenizer, &strings);
/// let encode = |text: &str| tokenizer.encode(text.as_bytes()).expect("bytes have tokens");
/// let ends = |text: &str| stops.end(&encode(text));
/// assert!(ends("the end") && !ends("the end.") && !ends("the en"));
/// ```
#[derive(Debug, Clone, Copy)]
pub struct StopStrings<'a> {
    tokenizer: &'a Tokenizer,
    strings: &'a [String],
    /// The last tokens that a string and the token in which it ends can take.
    window: usize,
}

impl<'a> StopStrings<'a> {
    /// Looks for these strings; empty ones are never found.
    pub fn new(tokenizer: &'a Tokenizer, strings: &'a [String]) -> Self {
        // A token of text has at least one byte.
        let longest = strings.iter().map(String::len).max().unwrap_or(0);
        Self {
            tokenizer,
            strings,
            window: longest + 1,
        }
    }

    /// Whether one of the strings ends within the last of these tokens.
    pub fn end(&self, tokens: &[u32]) -> bool {
        if self.strings.is_empty() {
            return false;
        }
        let window = &tokens[tokens.len().saturating_sub(self.window)..];
        let Some((_, before)) = window.split_last() else {
            return false;
        };
        let decode = |ids: &[u32]| self.tokenizer.decode(ids).unwrap_or_default();
        let (text, before) = (decode(window), decode(before));
        // A character that the last token completes does not belong to the text before it.
        let before = before.trim_end_matches(char::REPLACEMENT_CHARACTER).len();
        self.strings
            .iter()
            .any(|stop| ends_after(&text, stop, before))
    }
}

/// Whether an occurrence of `stop` ends after the first `before` bytes.
fn ends_after(text: &str, stop: &str, before: usize) -> bool {
    let first = (before + 1).saturating_sub(stop.len()).min(text.len());
    let first = (0..=first).rev().find(|&at| text.is_char_boundary(at));
    let rest = &text[first.unwrap_or(0)..];
    let mut ends = rest.match_indices(stop);
    !stop.is_empty() && ends.any(|(at, _)| text.len() - rest.len() + at + stop.len() > before)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_occurrence_counts_when_its_end_is_new() {
        assert!(ends_after("xaa", "aa", 2));
        assert!(ends_after("aaa", "aa", 2), "it overlaps an older one");
        assert!(!ends_after("aab", "aa", 2));
        assert!(ends_after("aabc", "ab", 2), "more may follow in the token");
        assert!(!ends_after("abcd", "ab", 2));
        assert!(!ends_after("ab", "", 1) && !ends_after("a", "ab", 0));
        assert!(ends_after("größe", "öße", 5));
    }

    #[test]
    fn characters_of_several_tokens_are_found_when_they_are_whole() {
        let tokenizer = Tokenizer::bytes();
        let stops = ["ß".to_owned(), "!?".to_owned()];
        let stops = StopStrings::new(&tokenizer, &stops);
        let tokens = tokenizer.encode("a ß!?".as_bytes()).unwrap();
        let ends: Vec<_> = (0..=tokens.len())
            .filter(|&len| stops.end(&tokens[..len]))
            .collect();
        assert_eq!(ends, [4, 6]);
        assert!(!StopStrings::new(&tokenizer, &[]).end(&tokens));
    }
}
