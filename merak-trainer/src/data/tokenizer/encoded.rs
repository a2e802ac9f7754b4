//! Texts and pairs of texts with special tokens around them, cut to a length.

use super::{BYTES_END, Kind, Tokenizer, damage::guarded, failure};
use crate::error::Result;

/// Tokens of a text or a pair of texts, with the special tokens around them, and the text that each
/// belongs to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Encoded {
    /// The tokens.
    pub ids: Vec<u32>,
    /// 0 for the first text, 1 for the second.
    pub types: Vec<u32>,
    /// Number of tokens before any were cut off.
    pub uncut: usize,
}

impl Tokenizer {
    /// Texts or pairs of texts, each with the special tokens that a tokenizer file puts around it,
    /// in at most `max_len` tokens: the longer text of a pair is cut first. The byte vocabulary
    /// puts its end of a document before the first text and after each.
    ///
    /// # Errors
    ///
    /// When the tokenizer refuses a text, or `max_len` leaves no room for any.
    pub fn encode_with_special(
        &self,
        texts: &[(&str, Option<&str>)],
        max_len: usize,
    ) -> Result<Vec<Encoded>> {
        let Kind::File { path, inner, .. } = &self.0 else {
            let encode =
                |&(text, pair): &(&str, Option<&str>)| bytes_with_special(text, pair, max_len);
            return Ok(texts.iter().map(encode).collect());
        };
        let special = |is_pair| {
            let processor = inner.get_post_processor();
            processor.map_or(0, |p| tokenizers::PostProcessor::added_tokens(p, is_pair))
        };
        if max_len <= special(true) {
            let message = format!(
                "it puts {} special tokens around texts, which leaves no room in {max_len}",
                special(true)
            );
            return Err(failure(path, &message));
        }
        // Texts are cut here: the library's own cut depends on its version.
        let encode = |&(text, pair): &(&str, Option<&str>)| -> tokenizers::Result<Encoded> {
            let mut first = inner.encode(text, false)?;
            let mut second = pair.map(|pair| inner.encode(pair, false)).transpose()?;
            let lens = [
                first.len(),
                second.as_ref().map_or(0, tokenizers::Encoding::len),
            ];
            let special = special(pair.is_some());
            let kept = cut(lens, max_len - special);
            let right = tokenizers::TruncationDirection::Right;
            first.truncate(kept[0], 0, right);
            if let Some(second) = &mut second {
                second.truncate(kept[1], 0, right);
                second.set_type_ids(vec![1; second.len()]);
            }
            let encoding = inner.post_process(first, second, true)?;
            Ok(Encoded {
                ids: encoding.get_ids().to_vec(),
                types: encoding.get_type_ids().to_vec(),
                uncut: lens[0] + lens[1] + special,
            })
        };
        let encoded = texts.iter().map(encode);
        guarded(path, || encoded.collect())
    }
}

/// Lengths of two texts that make at most `room` together, the longer one cut first; where both are
/// cut, the longer one keeps an odd token.
fn cut([first, second]: [usize; 2], room: usize) -> [usize; 2] {
    if first > second {
        let [second, first] = cut([second, first], room);
        return [first, second];
    }
    let first = first.min(room / 2);
    [first, second.min(room - first)]
}

fn bytes_with_special(text: &str, pair: Option<&str>, max_len: usize) -> Encoded {
    let special = 2 + usize::from(pair.is_some());
    let lens = [text.len(), pair.map_or(0, str::len)];
    let kept = cut(lens, max_len.saturating_sub(special));
    let mut encoded = Encoded {
        ids: vec![BYTES_END],
        types: vec![0],
        uncut: lens[0] + lens[1] + special,
    };
    for (number, (text, kept)) in [Some(text), pair].iter().flatten().zip(kept).enumerate() {
        let bytes = text.as_bytes()[..kept].iter();
        encoded.ids.extend(bytes.map(|&byte| u32::from(byte)));
        encoded.ids.push(BYTES_END);
        encoded.types.resize(encoded.ids.len(), number as u32);
    }
    encoded.ids.truncate(max_len);
    encoded.types.truncate(max_len);
    encoded
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Map, Value, json};
    use std::fs;

    #[test]
    fn a_pair_of_texts_is_cut_to_its_length_longest_first() {
        let bytes = Tokenizer::bytes();
        let encode = |text, pair, len| {
            let mut encoded = bytes.encode_with_special(&[(text, pair)], len).unwrap();
            encoded.remove(0)
        };
        let encoded = encode("abc", Some("d"), 16);
        assert_eq!(encoded.ids, [256, 97, 98, 99, 256, 100, 256]);
        assert_eq!(encoded.types, [0, 0, 0, 0, 0, 1, 1]);
        let encoded = encode("abcdef", Some("gh"), 7);
        assert_eq!(encoded.ids, [256, 97, 98, 256, 103, 104, 256]);
        assert_eq!(encode("abc", None, 2).ids, [256, 256]);
        for (lens, kept) in [
            ([9, 9], [4, 5]),
            ([10, 9], [5, 4]),
            ([2, 9], [2, 7]),
            ([9, 0], [9, 0]),
            ([10, 0], [9, 0]),
            ([2, 3], [2, 3]),
        ] {
            assert_eq!(cut(lens, 9), kept, "{lens:?}");
        }
    }

    #[test]
    fn a_tokenizer_file_puts_its_own_tokens_around_texts() {
        let names = [
            "[PAD]",
            "[CLS]",
            "[SEP]",
            "[MASK]",
            "a",
            "b",
            "<extra_id_0>",
            "<extra_id_1>",
        ];
        let vocab: Map<String, Value> = (0..)
            .zip(names)
            .map(|(id, name)| (name.into(), Value::from(id)))
            .collect();
        let special = |name: &str, id: usize| json!({"id": name, "ids": [id], "tokens": [name]});
        let piece = |name: &str, kind| json!({"SpecialToken": {"id": name, "type_id": kind}});
        let text = |name: &str, kind| json!({"Sequence": {"id": name, "type_id": kind}});
        let file = json!({
            "version": "1.0", "truncation": {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0},
            "padding": {"strategy": {"Fixed": 9}, "direction": "Right", "pad_to_multiple_of": null, "pad_id": 0, "pad_type_id": 0, "pad_token": "[PAD]"},
            "added_tokens": [], "normalizer": null, "pre_tokenizer": {"type": "Whitespace"}, "decoder": null,
            "post_processor": {"type": "TemplateProcessing",
                "single": [piece("[CLS]", 0), text("A", 0), piece("[SEP]", 0)],
                "pair": [piece("[CLS]", 0), text("A", 0), piece("[SEP]", 0), text("B", 1), piece("[SEP]", 1)],
                "special_tokens": {"[CLS]": special("[CLS]", 1), "[SEP]": special("[SEP]", 2)}},
            "model": {"type": "WordLevel", "vocab": vocab, "unk_token": "[PAD]"},
        });
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("tokenizer.json");
        fs::write(&path, file.to_string()).unwrap();
        let tokenizer = Tokenizer::from_file(&path).unwrap();
        assert_eq!(tokenizer.mask_token(), Some(3));
        assert_eq!(tokenizer.sentinels(), [6, 7]);
        // What the file says about lengths does not cut documents.
        assert_eq!(tokenizer.encode(b"a b a b a b").unwrap().len(), 6);
        let texts = [("a b a", Some("b")), ("a", None)];
        let encoded = tokenizer.encode_with_special(&texts, 6).unwrap();
        assert_eq!(encoded[0].ids, [1, 4, 5, 2, 5, 2]);
        assert_eq!(encoded[0].types, [0, 0, 0, 0, 1, 1]);
        assert_eq!(encoded[1].ids, [1, 4, 2]);
        let error = tokenizer.encode_with_special(&texts, 3).unwrap_err();
        assert!(error.to_string().contains("no room in 3"), "{error}");
    }
}
