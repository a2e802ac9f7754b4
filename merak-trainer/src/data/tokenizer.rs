//! Text to tokens and back.

mod byte_level;
mod damage;
mod encoded;

use std::{
    fmt, io,
    ops::Range,
    path::{Path, PathBuf},
};

use merak_ckpt::words::file;
use merak_mpu::names::{did_you_mean, nearest};
use serde_json::json;

use self::byte_level::{END_NAME, byte_level_bpe, byte_names, bytes_as_hugging_face, is_of_bytes};
use self::damage::guarded;
pub use self::encoded::Encoded;
use super::{
    bpe::{Merges, WordCounts},
    pieces::pieces,
    plain::TextKind,
};
use crate::{
    config::TokenizerSource,
    error::{DataError, Error, Result},
};

/// Id of the token that ends a document in the byte vocabulary, after the 256 bytes.
const BYTES_END: u32 = 256;

/// Tokens of the byte vocabulary.
const BYTES_VOCAB: usize = 257;

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

/// Names under which a tokenizer file may hold its mask token.
const MASK_NAMES: &[&str] = &["[MASK]", "<mask>", "<|mask|>"];

/// What stands for the file of a tokenizer that was trained.
const TRAINED: &str = "train_bpe";

/// The most bytes of a tokenizer file: large vocabularies take 35 MB.
const MAX_FILE_BYTES: u64 = 256 << 20;

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
    /// The byte vocabulary: the 256 bytes, and token 256 ends a document.
    pub fn bytes() -> Self {
        Self(Kind::Bytes)
    }

    /// The tokenizer that a configuration names.
    ///
    /// # Errors
    ///
    /// An unreadable or damaged `tokenizer.json`, and a tokenizer that is yet to be trained.
    pub fn load(source: &TokenizerSource) -> Result<Self> {
        match source {
            TokenizerSource::Bytes => Ok(Self::bytes()),
            TokenizerSource::File(path) => {
                Self::from_file(path).map_err(|error| misspelled(path, error))
            }
            TokenizerSource::TrainBpe(_) => Err(Self::not_trained(
                &"it is trained on text, and there is none here",
            )),
        }
    }

    /// Byte-level BPE of at most `size` tokens, learned from words.
    pub(super) fn trained(words: &WordCounts, size: usize) -> Result<Self> {
        let mut names = byte_names();
        names.sort_unstable();
        let names = names.into_iter().map(String::from);
        let tokens = std::iter::once(END_NAME.to_owned()).chain(names).collect();
        let Merges { tokens, merges } = Merges::learn(words, tokens, size);
        let pair = |&(first, second): &(u32, u32)| {
            json!([tokens[first as usize], tokens[second as usize]])
        };
        let merges: Vec<_> = merges.iter().map(pair).collect();
        let vocab = (0..).zip(&tokens);
        let vocab = vocab.map(|(id, token): (u32, _)| (token.clone(), id.into()));
        let json = byte_level_bpe(&vocab.collect(), &merges, 0, true).to_string();
        Self::parse(Path::new(TRAINED), json.as_bytes())
    }

    /// The error of a tokenizer that is not trained.
    pub(super) fn not_trained(reason: &dyn fmt::Display) -> Error {
        failure(Path::new(TRAINED), reason)
    }

    /// A Hugging Face `tokenizer.json`. A file that [`Tokenizer::to_json`] wrote for the byte
    /// vocabulary gives that vocabulary again, which keeps bytes that are not UTF-8.
    ///
    /// # Errors
    ///
    /// An unreadable or damaged file.
    pub fn from_file(path: &Path) -> Result<Self> {
        let bytes = merak_ckpt::read_regular(path, MAX_FILE_BYTES)
            .map_err(Error::reading_input("data.tokenizer", path))?;
        if is_of_bytes(&bytes) {
            return Ok(Self::bytes());
        }
        Self::parse(path, &bytes)
    }

    /// The content of a `tokenizer.json`.
    fn parse(path: &Path, bytes: &[u8]) -> Result<Self> {
        damage::check(bytes).map_err(|reason| failure(path, &reason))?;
        let mut inner = guarded(path, || tokenizers::Tokenizer::from_bytes(bytes))?;
        // The run decides the length of samples.
        inner
            .with_truncation(None)
            .map_err(|e| failure(path, &e))?
            .with_padding(None);
        damage::try_out(path, &inner)?;
        let end = END_NAMES.iter().find_map(|name| inner.token_to_id(name));
        Ok(Self(Kind::File {
            path: path.to_path_buf(),
            inner: Box::new(inner),
            end,
        }))
    }

    /// Least memory in bytes per byte of text while its tokens are collected.
    pub(super) fn bytes_per_byte(&self) -> u64 {
        match self.0 {
            // The text, and its tokens in memory that doubles as it grows.
            Kind::Bytes => 1 + 2 * size_of::<u32>() as u64,
            // The length of tokens is not known beforehand.
            Kind::File { .. } => 1,
        }
    }

    /// The kind of text that it accepts.
    pub(super) fn text_kind(&self) -> TextKind {
        match &self.0 {
            Kind::Bytes => TextKind::Bytes,
            Kind::File { .. } => TextKind::Utf8,
        }
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

    /// Its name in a configuration: `bytes`, or its file.
    pub(crate) fn name(&self) -> String {
        match &self.0 {
            Kind::Bytes => "bytes".to_owned(),
            Kind::File { path, .. } => file(path),
        }
    }

    /// The token that ends a document, where the vocabulary has one.
    pub fn end_of_document(&self) -> Option<u32> {
        match &self.0 {
            Kind::Bytes => Some(BYTES_END),
            Kind::File { end, .. } => *end,
        }
    }

    /// The token that stands for a hidden one, where the vocabulary has it.
    pub fn mask_token(&self) -> Option<u32> {
        match &self.0 {
            Kind::Bytes => None,
            Kind::File { inner, .. } => {
                let id = |name: &&str| inner.token_to_id(name);
                MASK_NAMES.iter().find_map(id)
            }
        }
    }

    /// Whether a text can write the token of this name. No text can in the byte vocabulary.
    pub(super) fn has(&self, name: &str) -> bool {
        match &self.0 {
            Kind::Bytes => false,
            Kind::File { inner, .. } => inner.token_to_id(name).is_some(),
        }
    }

    /// The token that a mistyped name probably means, among those that a file adds to its
    /// vocabulary, such as `<|endoftext|>`.
    pub(super) fn nearest_added(&self, name: &str) -> Option<String> {
        let Kind::File { inner, .. } = &self.0 else {
            return None;
        };
        let added = inner.get_added_tokens_decoder().into_values();
        let mut names: Vec<_> = added.map(|token| token.content).collect();
        // The first one counts on ties.
        names.sort_unstable();
        nearest(name, names.iter().map(String::as_str)).map(str::to_owned)
    }

    /// The tokens that stand for the pieces that span corruption leaves out, in their order:
    /// `<extra_id_0>` and so on, as many as the vocabulary has.
    pub fn sentinels(&self) -> Vec<u32> {
        match &self.0 {
            Kind::Bytes => Vec::new(),
            Kind::File { inner, .. } => (0..)
                .map_while(|number| inner.token_to_id(&format!("<extra_id_{number}>")))
                .collect(),
        }
    }

    /// The tokens of a text, without special ones. The byte vocabulary takes any bytes.
    ///
    /// # Errors
    ///
    /// When the tokenizer refuses the text, or it is not UTF-8 and the vocabulary is not that of
    /// bytes.
    pub fn encode(&self, text: &[u8]) -> Result<Vec<u32>> {
        match &self.0 {
            Kind::Bytes => Ok(text.iter().map(|byte| u32::from(*byte)).collect()),
            Kind::File { path, inner, .. } => {
                let text = as_utf8(path, text)?;
                let encoding = guarded(path, || inner.encode_fast(text, false))?;
                Ok(encoding.get_ids().to_vec())
            }
        }
    }

    /// Adds the tokens of a text, which is tokenized in pieces, so that its length needs no memory.
    ///
    /// # Errors
    ///
    /// As for [`Tokenizer::encode`].
    pub(super) fn encode_into(&self, text: &[u8], ids: &mut Vec<u32>) -> Result<()> {
        for piece in pieces(text) {
            ids.extend(self.encode(piece)?);
        }
        Ok(())
    }

    /// The tokens of a text with the bytes that each stands for; with `special`, those that a
    /// tokenizer file puts around a text too, which stand for none.
    ///
    /// # Errors
    ///
    /// As for [`Tokenizer::encode`].
    pub(super) fn encode_pieces(
        &self,
        text: &str,
        special: bool,
    ) -> Result<Vec<(u32, Range<usize>)>> {
        match &self.0 {
            Kind::Bytes => {
                let bytes = text.bytes().enumerate();
                Ok(bytes.map(|(at, byte)| (byte.into(), at..at + 1)).collect())
            }
            Kind::File { path, inner, .. } => {
                let encoding = guarded(path, || inner.encode(text, special))?;
                let pieces = encoding.get_ids().iter().zip(encoding.get_offsets());
                Ok(pieces
                    .map(|(&id, &(start, end))| (id, start..end))
                    .collect())
            }
        }
    }

    /// The tokens of a prompt, with the special ones that a tokenizer file puts around a text, as
    /// in transformers. The byte vocabulary takes any bytes.
    ///
    /// # Errors
    ///
    /// As for [`Tokenizer::encode`].
    pub fn encode_prompt(&self, text: impl AsRef<[u8]>) -> Result<Vec<u32>> {
        match &self.0 {
            Kind::Bytes => self.encode(text.as_ref()),
            Kind::File { path, inner, .. } => {
                let text = as_utf8(path, text.as_ref())?;
                let encoding = guarded(path, || inner.encode(text, true))?;
                Ok(encoding.get_ids().to_vec())
            }
        }
    }

    /// The bytes of the tokens after the first `known`: those of the text of
    /// [`Tokenizer::decode_after`], or in the byte vocabulary the bytes unchanged.
    ///
    /// # Errors
    ///
    /// When the tokenizer refuses the ids.
    ///
    /// # Panics
    ///
    /// When there are fewer than `known` tokens.
    pub fn bytes_after(&self, known: usize, ids: &[u32]) -> Result<Vec<u8>> {
        match &self.0 {
            Kind::Bytes => Ok(bytes_of(&ids[known..])),
            Kind::File { .. } => self.decode_after(known, ids).map(String::into_bytes),
        }
    }

    /// The text of the tokens after the first `known`. Decoded alone, they would lack the space
    /// that many tokenizers leave out at the start of a text.
    ///
    /// # Errors
    ///
    /// When the tokenizer refuses the ids.
    ///
    /// # Panics
    ///
    /// When there are fewer than `known` tokens.
    pub fn decode_after(&self, known: usize, ids: &[u32]) -> Result<String> {
        let (before, all) = (self.decode(&ids[..known])?, self.decode(ids)?);
        // A character cut at the end of `before` is a different one in `all`.
        let same = all.chars().zip(before.chars());
        let same = same.take_while(|(all, before)| all == before);
        let same: usize = same.map(|(all, _)| all.len_utf8()).sum();
        Ok(all[same..].to_owned())
    }

    /// The text of tokens; special ones and unknown ids are left out. Bytes that are not UTF-8
    /// become U+FFFD; [`Tokenizer::bytes_after`] leaves them unchanged.
    ///
    /// # Errors
    ///
    /// When the tokenizer refuses the ids.
    pub fn decode(&self, ids: &[u32]) -> Result<String> {
        match &self.0 {
            Kind::Bytes => Ok(String::from_utf8_lossy(&bytes_of(ids)).into_owned()),
            Kind::File { path, inner, .. } => guarded(path, || inner.decode(ids, true)),
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

/// The bytes among the tokens of the byte vocabulary.
fn bytes_of(ids: &[u32]) -> Vec<u8> {
    let bytes = ids.iter().filter_map(|id| u8::try_from(*id).ok());
    bytes.collect()
}

/// The text for a tokenizer that takes UTF-8 only.
fn as_utf8<'t>(path: &Path, text: &'t [u8]) -> Result<&'t str> {
    std::str::from_utf8(text).map_err(|error| {
        let (at, byte) = (error.valid_up_to(), text[error.valid_up_to()]);
        let message = format!("it takes UTF-8, and the text has the byte {byte:#04x} at {at}");
        failure(path, &message)
    })
}

/// The error of a file that is not there, whose name is nearly that of a tokenizer without a file.
fn misspelled(path: &Path, error: Error) -> Error {
    let name = path.file_name().and_then(|name| name.to_str());
    let near = name.and_then(|name| nearest(name, ["bytes"]));
    match error {
        Error::ReadInput { source, .. }
            if source.kind() == io::ErrorKind::NotFound && near.is_some() =>
        {
            failure(
                path,
                &format!("there is no such file{}", did_you_mean(near)),
            )
        }
        error => error,
    }
}

fn failure(path: &Path, error: &dyn fmt::Display) -> Error {
    Error::Data(DataError::Tokenizer {
        path: path.to_path_buf(),
        message: error.to_string(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::Value;
    use std::fs;

    fn written_and_read() -> Tokenizer {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("tokenizer.json");
        let json = Tokenizer::bytes().to_json().unwrap();
        fs::write(&path, &json).unwrap();
        let read = Tokenizer::from_file(&path).unwrap();
        assert!(matches!(read.0, Kind::Bytes));
        Tokenizer::parse(&path, json.as_bytes()).unwrap()
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
    fn a_prompt_begins_as_the_file_says_and_its_continuation_with_its_space() {
        let space = json!({"type": "Metaspace", "replacement": "\u{2581}", "prepend_scheme": "always", "split": true});
        let pieces = json!({"type": "WordPiece", "prefix": "##", "cleanup": true});
        let texts = [
            json!({"Sequence": {"id": "A", "type_id": 0}}),
            json!({"Sequence": {"id": "B", "type_id": 0}}),
        ];
        for (before, name, decoder) in [
            (space.clone(), "\u{2581}", space),
            (json!({"type": "Whitespace"}), "", pieces),
        ] {
            let file = json!({
                "version": "1.0", "truncation": null, "padding": null, "normalizer": null,
                "added_tokens": [{"id": 0, "content": "<s>", "single_word": false, "lstrip": false, "rstrip": false,
                    "normalized": false, "special": true}],
                "pre_tokenizer": before, "decoder": decoder,
                "post_processor": {"type": "TemplateProcessing",
                    "single": [json!({"SpecialToken": {"id": "<s>", "type_id": 0}}), &texts[0]], "pair": texts,
                    "special_tokens": {"<s>": {"id": "<s>", "ids": [0], "tokens": ["<s>"]}}},
                "model": {"type": "WordLevel", "unk_token": "<s>",
                    "vocab": {"<s>": 0, format!("{name}a"): 1, format!("{name}b"): 2}},
            });
            let folder = tempfile::tempdir().unwrap();
            let path = folder.path().join("tokenizer.json");
            fs::write(&path, file.to_string()).unwrap();
            let tokenizer = Tokenizer::from_file(&path).unwrap();
            assert_eq!(tokenizer.encode_prompt("a b").unwrap(), [0, 1, 2]);
            assert_eq!(tokenizer.encode(b"a b").unwrap(), [1, 2]);
            let ids = [0, 1, 2, 2, 1];
            assert_eq!(tokenizer.decode(&ids).unwrap(), "a b b a");
            assert_eq!(tokenizer.decode_after(3, &ids).unwrap(), " b a");
            assert_eq!(tokenizer.decode_after(0, &ids).unwrap(), "a b b a");
        }
        // A character of two bytes, one of them in the prompt.
        let bytes = Tokenizer::bytes();
        let ids = bytes.encode_prompt("f\u{e9}e").unwrap();
        assert_eq!(bytes.decode_after(2, &ids).unwrap(), "\u{e9}e");
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
    fn bytes_that_are_no_utf8_stay_in_the_byte_vocabulary_and_are_refused_by_others() {
        let (bytes, file) = (Tokenizer::bytes(), written_and_read());
        let text = b"caf\xe9 \xff";
        let ids = bytes.encode_prompt(text).unwrap();
        assert_eq!(bytes.bytes_after(0, &ids).unwrap(), text);
        assert_eq!(bytes.bytes_after(3, &ids).unwrap(), text[3..]);
        for error in [file.encode(text), file.encode_prompt(text)] {
            let error = error.unwrap_err().to_string();
            let expected = "it takes UTF-8, and the text has the byte 0xe9 at 3";
            assert!(error.contains(expected), "{error}");
        }
        let whole = file.encode("größer".as_bytes()).unwrap();
        assert_eq!(file.bytes_after(2, &whole).unwrap(), "ößer".as_bytes());
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
