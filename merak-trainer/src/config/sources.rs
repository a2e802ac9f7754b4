//! Where the tokenizer and the chat template come from.

use std::{
    ffi::OsStr,
    path::{Path, PathBuf},
};

use serde_json::{Map, Value, json};

use super::{
    choice::refuse,
    range::Range,
    refusal::Refusal,
    setting::{Setting, absolute, whole},
    strict,
};

/// How text becomes token ids.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum TokenizerSource {
    /// One token per byte, and one that ends a document.
    Bytes,
    /// A Hugging Face `tokenizer.json`; a file names it relative to itself.
    File(PathBuf),
    /// Byte-level BPE of at most this number of tokens, trained on the data.
    TrainBpe(usize),
}

impl TokenizerSource {
    /// The entry of a tokenizer that is to be trained.
    const TRAIN_BPE: &'static str = "train_bpe";

    /// Least tokens of byte-level BPE: the bytes and the end of a document.
    const LEAST_TOKENS: usize = 257;

    /// Most tokens that are trained: four times the largest vocabularies in use.
    const MOST_TOKENS: usize = 1 << 20;

    /// A tokenizer that is to be trained, from its table.
    fn from_table(table: &Map<String, Value>) -> Result<Self, Refusal> {
        if let Some(unknown) = table.keys().find(|name| *name != Self::TRAIN_BPE) {
            return Err(refuse(unknown, [Self::TRAIN_BPE].into_iter(), &[]));
        }
        let found = table.get(Self::TRAIN_BPE).ok_or(Refusal::Type)?;
        let tokens = whole(found).and_then(|tokens| usize::try_from(tokens).ok());
        let range = Self::LEAST_TOKENS..=Self::MOST_TOKENS;
        tokens
            .filter(|tokens| range.contains(tokens))
            .map(Self::TrainBpe)
            .ok_or_else(|| Refusal::Entry {
                name: Self::TRAIN_BPE,
                expected: format!("an integer from {} to {}", range.start(), range.end()),
                found: found.clone(),
            })
    }
}

impl Setting for TokenizerSource {
    fn expected(_: Range) -> String {
        r#""bytes", the path of a tokenizer.json, or a table such as { train_bpe = 8192 }, outside of a file {"train_bpe":8192}"#.into()
    }

    fn from_value(value: &Value) -> Result<Self, Refusal> {
        match value {
            Value::String(text) => Self::from_text(text),
            Value::Object(table) => Self::from_table(table),
            _ => Err(Refusal::Type),
        }
    }

    fn from_text(text: &str) -> Result<Self, Refusal> {
        match text {
            "bytes" => Ok(Self::Bytes),
            "" => Err(Refusal::Type),
            table if table.starts_with('{') => Self::from_value(&strict::parse_text(table)?),
            path => Ok(Self::File(path.into())),
        }
    }

    fn to_value(&self) -> Value {
        match self {
            Self::Bytes => Value::from("bytes"),
            Self::File(path) => path.to_value(),
            Self::TrainBpe(tokens) => json!({ Self::TRAIN_BPE: tokens }),
        }
    }

    fn rebase(&mut self, base: &Path) {
        if let Self::File(path) = self {
            *path = absolute(base, path);
        }
    }
}

/// Which chat template makes prompts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum TemplateSource {
    /// A file with one; a configuration file names it relative to itself.
    File(PathBuf),
    /// The template of this name beside the tokenizer.
    Name(String),
}

impl Setting for TemplateSource {
    fn expected(_: Range) -> String {
        "a path, a name".into()
    }

    fn from_text(text: &str) -> Result<Self, Refusal> {
        // A path with folders is no name.
        let is_name = Path::new(text).file_name() == Some(OsStr::new(text));
        Ok(if is_name {
            Self::Name(text.to_owned())
        } else {
            Self::File(text.into())
        })
    }

    fn to_value(&self) -> Value {
        match self {
            Self::File(path) => path.to_value(),
            Self::Name(name) => name.to_value(),
        }
    }

    /// A name is that of a file where there is one.
    fn rebase(&mut self, base: &Path) {
        let (is_file, path) = match self {
            Self::File(path) => (true, absolute(base, path)),
            Self::Name(name) => (false, absolute(base, Path::new(name.as_str()))),
        };
        if is_file || path.is_file() {
            *self = Self::File(path);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_template_is_a_file_where_there_is_one_and_else_a_name_unless_it_has_folders() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        std::fs::write(at("chat.jinja"), "").unwrap();
        std::fs::create_dir(at("rag")).unwrap();
        let of = |text: &str| {
            let mut source = TemplateSource::from_text(text).unwrap();
            source.rebase(folder.path());
            assert_eq!(
                TemplateSource::from_value(&source.to_value()),
                Ok(source.clone())
            );
            source
        };
        assert_eq!(of("chat.jinja"), TemplateSource::File(at("chat.jinja")));
        for name in ["default", "rag"] {
            assert_eq!(of(name), TemplateSource::Name(name.to_owned()));
        }
        for path in ["templates/default", "rag/"] {
            assert_eq!(of(path), TemplateSource::File(at(path)));
        }
        assert_eq!(of("./default"), TemplateSource::File(at("default")));
    }

    #[test]
    fn a_tokenizer_to_train_has_a_size() {
        let train = json!({"train_bpe": 4096});
        for read in [
            TokenizerSource::from_value(&train),
            TokenizerSource::from_text(r#"{"train_bpe": 4096}"#),
        ] {
            assert_eq!(read, Ok(TokenizerSource::TrainBpe(4096)));
        }
        assert_eq!(TokenizerSource::TrainBpe(4096).to_value(), train);
        for wrong in [json!(256), json!(2_000_000), json!("many"), json!(300.5)] {
            let refused = TokenizerSource::from_value(&json!({"train_bpe": wrong}));
            assert!(matches!(refused, Err(Refusal::Entry { .. })), "{refused:?}");
        }
        let unknown = TokenizerSource::from_value(&json!({"train_bpes": 4096}));
        assert!(
            matches!(unknown, Err(Refusal::Choice { .. })),
            "{unknown:?}"
        );
        assert_eq!(TokenizerSource::from_value(&json!({})), Err(Refusal::Type));
    }
}
