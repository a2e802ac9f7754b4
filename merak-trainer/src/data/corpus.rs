//! The text of a run as two streams of tokens.

use std::sync::Arc;

use super::{
    crates::CrateSources,
    text::{self, Need, Reading},
    tokenizer::Tokenizer,
};
use crate::{config::DataArguments, error::Result, machine::available_bytes};
use merak_ckpt::words::Bytes;

/// Tokens for training and validation.
#[derive(Debug, Clone)]
pub struct Corpus {
    /// The vocabulary.
    pub tokenizer: Tokenizer,
    /// All tokens before those of `validation`.
    pub train: Arc<[u32]>,
    /// The last tokens: `validation_fraction` of all, rounded down.
    pub validation: Arc<[u32]>,
    /// Where the text came from, for people.
    pub description: String,
}

impl Corpus {
    /// Reads and tokenizes the text that `arguments` name, or the sources of the crates where they
    /// name none. Documents follow each other in the order of their paths, each with the token that
    /// ends a document behind it.
    ///
    /// # Errors
    ///
    /// Missing or empty data, files that are not text unless `skip_binary` is set, and a tokenizer
    /// that cannot be used.
    pub fn load(arguments: &DataArguments, crates: &CrateSources) -> Result<Self> {
        let tokenizer = Tokenizer::load(&arguments.tokenizer)?;
        let kind = tokenizer.text_kind();
        let need = Need {
            per_byte: tokenizer.bytes_per_byte(),
            per_line: 0,
        };
        let (found, source) = match &arguments.path {
            Some(path) => {
                let reading = Reading {
                    kind,
                    skips: arguments.skip_binary,
                };
                let room = (need, available_bytes());
                let found = text::read(&path.0, arguments.max_bytes, reading, room)?;
                (found, path.0.display().to_string())
            }
            None => (
                crates.read(arguments.max_bytes, kind)?,
                "the sources of the crates in Cargo.lock".into(),
            ),
        };
        let documents = &found.documents;
        let bytes: usize = documents.iter().map(|document| document.text.len()).sum();
        let description = format!("{source}: {}, {}", found.files(), Bytes::from(bytes));
        let texts = documents.iter().map(|document| Ok(&document.text));
        Self::of(tokenizer, texts, arguments.validation_fraction, description)
    }

    /// Tokenizes documents, each with the token that ends a document behind it.
    pub(super) fn of(
        tokenizer: Tokenizer,
        texts: impl Iterator<Item = Result<impl AsRef<[u8]>>>,
        validation_fraction: f64,
        description: String,
    ) -> Result<Self> {
        let mut tokens = Vec::new();
        for text in texts {
            tokens.extend(tokenizer.encode(text?.as_ref())?);
            tokens.extend(tokenizer.end_of_document());
        }
        let held_out = (tokens.len() as f64 * validation_fraction) as usize;
        let (train, validation) = tokens.split_at(tokens.len() - held_out);
        tracing::info!(tokens = tokens.len(), description, "read the data");
        Ok(Self {
            tokenizer,
            train: train.into(),
            validation: validation.into(),
            description,
        })
    }
}
