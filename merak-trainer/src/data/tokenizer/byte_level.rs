//! Byte-level BPE as the content of a `tokenizer.json`.

use super::BYTES_END;
use serde_json::{Map, Value, json};

/// Name of the token that ends a document in the byte vocabulary.
pub(super) const END_NAME: &str = "<|endoftext|>";

/// The characters that byte-level BPE writes for bytes: visible Latin-1 characters stand for
/// themselves, the others count on from U+0100.
pub(super) fn byte_names() -> Vec<char> {
    let mut hidden = (0x100_u32..).filter_map(char::from_u32);
    (0..=u8::MAX)
        .map(|byte| match byte {
            b'!'..=b'~' | 0xA1..=0xAC | 0xAE..=0xFF => Some(char::from(byte)),
            _ => hidden.next(),
        })
        .map(|name| name.expect("68 characters follow U+0100"))
        .collect()
}

/// Byte-level BPE as the content of a `tokenizer.json`: its tokens, the pairs that become one, the
/// token that ends a document, and whether words are parted by the pattern of GPT-2.
pub(super) fn byte_level_bpe(
    vocab: &Map<String, Value>,
    merges: &[Value],
    end: u32,
    parts_words: bool,
) -> Value {
    let byte_level = json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false, "use_regex": parts_words});
    json!({
        "version": "1.0",
        "truncation": null,
        "padding": null,
        "added_tokens": [{
            "id": end, "content": END_NAME, "single_word": false, "lstrip": false,
            "rstrip": false, "normalized": false, "special": true,
        }],
        "normalizer": null,
        "pre_tokenizer": byte_level,
        "post_processor": null,
        "decoder": byte_level,
        "model": {
            "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false,
            "ignore_merges": false, "vocab": vocab, "merges": merges,
        },
    })
}

/// The byte vocabulary as byte-level BPE without merges.
pub(super) fn bytes_as_hugging_face() -> Value {
    let vocab: Map<String, Value> = byte_names()
        .into_iter()
        .enumerate()
        .map(|(byte, name)| (name.to_string(), Value::from(byte)))
        .collect();
    byte_level_bpe(&vocab, &[], BYTES_END, false)
}

/// Whether this is the byte vocabulary as [`to_json`](super::Tokenizer::to_json) writes it.
pub(super) fn is_of_bytes(json: &[u8]) -> bool {
    let written = bytes_as_hugging_face();
    // Most files are megabytes larger and need no parsing.
    json.len() < 4 * written.to_string().len()
        && serde_json::from_slice::<Value>(json).is_ok_and(|read| read == written)
}
