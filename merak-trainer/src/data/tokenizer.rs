//! Text to tokens and back.

use std::{
    fmt, fs,
    path::{Path, PathBuf},
};

use serde_json::{Map, Value, json};

use crate::{
    config::TokenizerSource,
    error::{Error, Result},
};

/// Id of the token that ends a document in the byte vocabulary, after the 256 bytes.
const BYTES_END: u32 = 256;

/// Tokens of the byte vocabulary.
const BYTES_VOCAB: usize = 257;

/// Name of the token that ends a document in the byte vocabulary.
const END_NAME: &str = "<|endoftext|>";

/// Names under which a tokenizer file may hold its end of a document, the likeliest first.
const END_NAMES: &[&str] = &[
    END_NAME,
    "<|end_of_text|>",
    "</s>",
    "<eos>",
    "<|eot_id|>",
    "<|im_end|>",
    "[SEP]",
];

/// A vocabulary with the rule that turns text into its tokens.
#[derive(Clone)]
pub struct Tokenizer(Kind);

#[derive(Clone)]
enum Kind {
    Bytes,
    File {
        path: PathBuf,
        inner: Box<tokenizers::Tokenizer>,
        end: Option<u32>,
    },
}

impl Tokenizer {
    /// The byte vocabulary: 256 bytes, and 256 ends a document.
    pub fn bytes() -> Self {
        Self(Kind::Bytes)
    }

    /// The tokenizer that a configuration names.
    ///
    /// # Errors
    ///
    /// An unreadable or damaged `tokenizer.json`.
    pub fn load(source: &TokenizerSource) -> Result<Self> {
        match source {
            TokenizerSource::Bytes => Ok(Self::bytes()),
            TokenizerSource::File(path) => Self::from_file(path),
        }
    }

    /// A Hugging Face `tokenizer.json`.
    ///
    /// # Errors
    ///
    /// An unreadable or damaged file.
    pub fn from_file(path: &Path) -> Result<Self> {
        let bytes = fs::read(path).map_err(|source| Error::ReadInput {
            key: "data.tokenizer",
            path: path.to_path_buf(),
            source,
        })?;
        let inner = tokenizers::Tokenizer::from_bytes(bytes).map_err(|e| failure(path, &e))?;
        let end = END_NAMES.iter().find_map(|name| inner.token_to_id(name));
        Ok(Self(Kind::File {
            path: path.to_path_buf(),
            inner: Box::new(inner),
            end,
        }))
    }

    /// Number of different tokens; ids are smaller.
    pub fn vocab_size(&self) -> usize {
        match &self.0 {
            Kind::Bytes => BYTES_VOCAB,
            // Ids may have gaps, so the count of names is not enough.
            Kind::File { inner, .. } => inner
                .get_vocab(true)
                .into_values()
                .max()
                .map_or(0, |id| id as usize + 1),
        }
    }

    /// The token that ends a document, where the vocabulary has one.
    pub fn end_of_document(&self) -> Option<u32> {
        match &self.0 {
            Kind::Bytes => Some(BYTES_END),
            Kind::File { end, .. } => *end,
        }
    }

    /// The tokens of a text, without special ones. Bytes that are not UTF-8 stay as they are in the byte
    /// vocabulary and become U+FFFD in others.
    ///
    /// # Errors
    ///
    /// When the tokenizer refuses the text.
    pub fn encode(&self, text: &[u8]) -> Result<Vec<u32>> {
        match &self.0 {
            Kind::Bytes => Ok(text.iter().map(|byte| u32::from(*byte)).collect()),
            Kind::File { path, inner, .. } => {
                let text = String::from_utf8_lossy(text);
                let encoding = inner.encode(text, false).map_err(|e| failure(path, &e))?;
                Ok(encoding.get_ids().to_vec())
            }
        }
    }

    /// The text of tokens; special ones and unknown ids are left out.
    ///
    /// # Errors
    ///
    /// When the tokenizer refuses the ids.
    pub fn decode(&self, ids: &[u32]) -> Result<String> {
        match &self.0 {
            Kind::Bytes => {
                let bytes: Vec<u8> = ids.iter().filter_map(|id| u8::try_from(*id).ok()).collect();
                Ok(String::from_utf8_lossy(&bytes).into_owned())
            }
            Kind::File { path, inner, .. } => {
                inner.decode(ids, true).map_err(|e| failure(path, &e))
            }
        }
    }

    /// The tokenizer as the content of a Hugging Face `tokenizer.json`, to be kept beside a model's
    /// weights. The byte vocabulary is written as byte-level BPE without merges, whose ids are the
    /// bytes.
    ///
    /// # Errors
    ///
    /// When a tokenizer that was read cannot be written.
    pub fn to_json(&self) -> Result<String> {
        match &self.0 {
            Kind::Bytes => Ok(bytes_as_hugging_face().to_string()),
            Kind::File { path, inner, .. } => inner.to_string(true).map_err(|e| failure(path, &e)),
        }
    }
}

impl fmt::Debug for Tokenizer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0 {
            Kind::Bytes => f.write_str("Tokenizer(bytes)"),
            Kind::File { path, .. } => write!(f, "Tokenizer({})", path.display()),
        }
    }
}

fn failure(path: &Path, error: &dyn fmt::Display) -> Error {
    Error::Tokenizer {
        path: path.to_path_buf(),
        message: error.to_string(),
    }
}

/// The characters that byte-level BPE writes for bytes: visible Latin-1 characters stand for
/// themselves, the others count on from U+0100.
fn byte_names() -> Vec<char> {
    let mut hidden = (0x100_u32..).filter_map(char::from_u32);
    (0..=u8::MAX)
        .map(|byte| match byte {
            b'!'..=b'~' | 0xA1..=0xAC | 0xAE..=0xFF => Some(char::from(byte)),
            _ => hidden.next(),
        })
        .map(|name| name.expect("68 characters follow U+0100"))
        .collect()
}

fn bytes_as_hugging_face() -> Value {
    let vocab: Map<String, Value> = byte_names()
        .into_iter()
        .enumerate()
        .map(|(byte, name)| (name.to_string(), Value::from(byte)))
        .collect();
    let byte_level = json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false, "use_regex": false});
    json!({
        "version": "1.0",
        "truncation": null,
        "padding": null,
        "added_tokens": [{
            "id": BYTES_END, "content": END_NAME, "single_word": false, "lstrip": false,
            "rstrip": false, "normalized": false, "special": true,
        }],
        "normalizer": null,
        "pre_tokenizer": byte_level,
        "post_processor": null,
        "decoder": byte_level,
        "model": {
            "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false,
            "ignore_merges": false, "vocab": vocab, "merges": [],
        },
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn written_and_read() -> Tokenizer {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("tokenizer.json");
        fs::write(&path, Tokenizer::bytes().to_json().unwrap()).unwrap();
        Tokenizer::from_file(&path).unwrap()
    }

    #[test]
    fn bytes_are_their_own_tokens() {
        let tokenizer = Tokenizer::bytes();
        assert_eq!(tokenizer.encode(&[0, 104, 255]).unwrap(), [0, 104, 255]);
        assert_eq!(
            tokenizer.decode(&[104, 105, BYTES_END, 9999]).unwrap(),
            "hi"
        );
        assert_eq!(
            (tokenizer.vocab_size(), tokenizer.end_of_document()),
            (257, Some(256))
        );
    }

    #[test]
    fn the_byte_vocabulary_written_as_a_tokenizer_file_gives_the_same_tokens() {
        let (bytes, file) = (Tokenizer::bytes(), written_and_read());
        assert_eq!(file.vocab_size(), bytes.vocab_size());
        assert_eq!(file.end_of_document(), bytes.end_of_document());
        let text = "fn main() {\n\tprintln!(\"größer — 模型\u{0}\u{7f}\");\r\n}  ";
        let ids = bytes.encode(text.as_bytes()).unwrap();
        assert_eq!(file.encode(text.as_bytes()).unwrap(), ids);
        assert_eq!(file.decode(&ids).unwrap(), text);
        let again: Value = serde_json::from_str(&file.to_json().unwrap()).unwrap();
        assert_eq!(again["model"]["vocab"]["a"], 97);
    }

    #[test]
    fn a_damaged_tokenizer_is_refused_with_its_path() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("tokenizer.json");
        fs::write(&path, "{}").unwrap();
        let error = Tokenizer::load(&TokenizerSource::File(path.clone())).unwrap_err();
        assert!(
            error.to_string().contains(&path.display().to_string()),
            "{error}"
        );
        let error = Tokenizer::from_file(&folder.path().join("none.json")).unwrap_err();
        assert!(matches!(error, Error::ReadInput { .. }));
    }
}
