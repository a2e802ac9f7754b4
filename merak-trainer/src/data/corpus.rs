//! The text of a run as two streams of tokens.

use super::{
    bigram::bigram_loss,
    crates::CrateSources,
    dataset::held_out,
    input::Input,
    store::Tokens,
    text::{self, Documents, Need, Reading},
    tokenize::tokenizer_of,
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
    pub train: Tokens,
    /// The last tokens: `validation_fraction` of all, rounded down; or all those of
    /// `validation_path`.
    pub validation: Tokens,
    /// Where the text came from, for people.
    pub description: String,
}

/// Where text comes from that no key names, for people.
pub(super) const CRATES: &str = "the sources of the crates in Cargo.lock";

/// The most tokens of a stream in files that are read to count pairs of them.
const MOST_COUNTED: usize = 16 << 20;

impl Corpus {
    /// Reads and tokenizes the text that `data.path` names, or the sources of the crates where it
    /// names none. Documents follow each other in the order of their paths, each with the token
    /// that ends a document after it.
    ///
    /// # Errors
    ///
    /// Missing or empty data, files that are not text unless `skip_binary` is set, and a tokenizer
    /// that cannot be used.
    pub fn load(arguments: &DataArguments, crates: &CrateSources) -> Result<Self> {
        let tokenizer = tokenizer_of(arguments, crates)?;
        let input = arguments.path.as_ref().map(Input::data);
        let (texts, description) = read(input, arguments, crates, &tokenizer)?;
        Self::of_documents(
            tokenizer,
            &texts,
            arguments.validation_fraction,
            description,
        )
    }

    /// Tokenizes documents, each with the token that ends a document after it.
    pub(super) fn of_documents(
        tokenizer: Tokenizer,
        texts: &Documents,
        validation_fraction: f64,
        description: String,
    ) -> Result<Self> {
        let texts = texts.documents.iter().map(|document| Ok(&document.text));
        Self::of(tokenizer, texts, validation_fraction, description)
    }

    /// Tokenizes texts, each with the token that ends a document after it.
    pub(super) fn of(
        tokenizer: Tokenizer,
        texts: impl Iterator<Item = Result<impl AsRef<[u8]>>>,
        validation_fraction: f64,
        description: String,
    ) -> Result<Self> {
        let mut tokens = Vec::new();
        for text in texts {
            tokenizer.encode_into(text?.as_ref(), &mut tokens)?;
            tokens.extend(tokenizer.end_of_document());
        }
        tracing::info!(tokens = tokens.len(), description, "read the data");
        let tokens = Tokens::from(tokens);
        Ok(Self::split(
            tokenizer,
            &tokens,
            validation_fraction,
            description,
        ))
    }

    /// Splits off the last tokens.
    pub(super) fn split(
        tokenizer: Tokenizer,
        tokens: &Tokens,
        validation_fraction: f64,
        description: String,
    ) -> Self {
        let held_out = held_out(tokens.len(), validation_fraction);
        let [train, validation] = tokens.split_at(tokens.len() - held_out);
        Self {
            tokenizer,
            train,
            validation,
            description,
        }
    }

    /// The loss that counting pairs of tokens reaches ([`bigram_loss`]); none for streams in files
    /// that have too many tokens to count.
    ///
    /// # Errors
    ///
    /// When tokens cannot be read.
    pub fn bigram_loss(&self) -> Result<Option<f64>> {
        let parts = [&self.train, &self.validation];
        if parts
            .iter()
            .any(|part| part.held_bytes() == 0 && part.len() > MOST_COUNTED)
        {
            return Ok(None);
        }
        let [train, validation] = parts.map(|part| part.read(0..part.len()));
        let vocab = self.tokenizer.vocab_size();
        Ok(bigram_loss(&train?, &validation?, vocab))
    }
}

/// Reads the text that an input names, or that of the crates' sources, with a description of it.
pub(super) fn read(
    input: Option<Input<'_>>,
    arguments: &DataArguments,
    crates: &CrateSources,
    tokenizer: &Tokenizer,
) -> Result<(Documents, String)> {
    let kind = tokenizer.text_kind();
    let (found, source) = match input {
        Some(input) => {
            let reading = Reading {
                kind,
                skips: arguments.skip_binary,
            };
            let need = Need {
                per_byte: tokenizer.bytes_per_byte(),
                per_line: 0,
            };
            let room = (need, available_bytes());
            let most = input.most_bytes(arguments);
            (text::read(input, most, reading, room)?, input.describe())
        }
        None => (crates.read(arguments.max_bytes, kind)?, CRATES.to_owned()),
    };
    let bytes: usize = found
        .documents
        .iter()
        .map(|document| document.text.len())
        .sum();
    let description = format!("{source}: {}, {}", found.files(), Bytes::from(bytes));
    Ok((found, description))
}
