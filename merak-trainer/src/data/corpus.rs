//! The text of a run as two streams of tokens.

use std::sync::Arc;

use super::{
    crates::CrateSources,
    text::{self, Document},
    tokenizer::Tokenizer,
};
use crate::{config::DataArguments, error::Result};

/// Tokens for training and validation.
#[derive(Debug, Clone)]
pub struct Corpus {
    /// The vocabulary.
    pub tokenizer: Tokenizer,
    /// All tokens but the last.
    pub train: Arc<[u32]>,
    /// The last tokens: `validation_fraction` of all, rounded down.
    pub validation: Arc<[u32]>,
    /// Where the text came from, for people.
    pub description: String,
}

impl Corpus {
    /// Reads and tokenizes the text that `arguments` name, or the sources of the crates where they name
    /// none. Documents follow each other in the order of their paths, each with the token that ends a
    /// document behind it.
    ///
    /// # Errors
    ///
    /// Missing or empty data, and a tokenizer that cannot be used.
    pub fn load(arguments: &DataArguments, crates: &CrateSources) -> Result<Self> {
        let tokenizer = Tokenizer::load(&arguments.tokenizer)?;
        let (documents, source) = match &arguments.path {
            Some(path) => (
                text::read(&path.0, arguments.max_bytes)?,
                path.0.display().to_string(),
            ),
            None => (
                crates.read(arguments.max_bytes)?,
                "the sources of the crates in Cargo.lock".into(),
            ),
        };
        let tokens = tokenize(&tokenizer, &documents)?;
        let held_out = (tokens.len() as f64 * arguments.validation_fraction) as usize;
        let (train, validation) = tokens.split_at(tokens.len() - held_out);
        let bytes: usize = documents.iter().map(|document| document.text.len()).sum();
        let count = match documents.len() {
            1 => "1 file".to_owned(),
            many => format!("{many} files"),
        };
        let description = format!("{source}: {count}, {bytes} bytes");
        tracing::info!(
            files = documents.len(),
            bytes,
            tokens = tokens.len(),
            "read the data"
        );
        Ok(Self {
            tokenizer,
            train: train.into(),
            validation: validation.into(),
            description,
        })
    }
}

fn tokenize(tokenizer: &Tokenizer, documents: &[Document]) -> Result<Vec<u32>> {
    let mut tokens = Vec::new();
    for document in documents {
        tracing::trace!(path = %document.path.display(), "tokenize");
        tokens.extend(tokenizer.encode(&document.text)?);
        tokens.extend(tokenizer.end_of_document());
    }
    Ok(tokens)
}
