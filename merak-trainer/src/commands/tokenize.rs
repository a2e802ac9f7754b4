//! `merak tokenize`: token files of the configured text.

use super::{Outcome, environment, keys::Keys, output};
use clap::Args as ClapArgs;
use merak_ckpt::words::{Bytes, file};
use merak_trainer::{
    Config, ConfigError, Error, Result, RunFolder,
    data::{Tokenized, tokenize},
    metrics::{Screen, TokenizingProgress},
};
use serde_json::json;
use std::{
    path::{Path, PathBuf},
    process::ExitCode,
};

/// Writes the tokens of the data into files that training reads by range.
#[derive(Debug, ClapArgs)]
pub(crate) struct Args {
    /// The configuration file (.toml, .yaml or .json).
    config: PathBuf,
    /// The folder to write [default: that of the data's path with ".tokens" after it].
    #[arg(short, long, value_name = "FOLDER")]
    output: Option<PathBuf>,
    /// Prints one JSON document.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    keys: Keys,
}

pub(crate) fn run(mut args: Args, screen: &Screen) -> Outcome {
    for name in ["-o", "--output"] {
        if let Some(path) = args.keys.take_option(name) {
            args.output = Some(path.into());
        }
    }
    let json = args.keys.take_flag("--json") || args.json;
    let config = args.keys.load(&args.config)?;
    let checked = config.check()?;
    check(&config)?;
    let Some(folder) = args.output.or_else(|| beside(&config)) else {
        return Err("-o FOLDER is missing: it names the folder that the tokens go to".into());
    };
    RunFolder::check_outside_data(&checked, "-o", &folder)?;
    let crates = environment::crate_sources(config.file());
    let mut progress = TokenizingProgress::on(screen);
    let tokenized = tokenize(&checked.data, &crates, &folder, &mut |now| {
        progress.show(now);
    });
    drop(progress);
    let tokenized = tokenized.map_err(|error| config.locate(error))?;
    output::print(&if json {
        format!("{:#}", as_json(&folder, &tokenized))
    } else {
        described(&folder, &tokenized)
    })?;
    Ok(ExitCode::SUCCESS)
}

/// Refuses data that are no text, or have several parts, each of which gets a folder of its own.
fn check(config: &Config) -> Result<()> {
    let data = &config.arguments().data;
    let refuse = |key: &'static str, found: String, expected: &str| {
        Err(Error::Config(ConfigError::IllegalValue {
            key,
            found,
            place: config.origin(key).to_string(),
            expected: expected.to_owned(),
        }))
    };
    if !data.format.is_text() {
        let found = data.format.to_string();
        return refuse("data.format", found, "a format that holds text");
    }
    let apart = "unset: tokenize each part alone, with --data.path and -o, and name the folders here for training";
    if data.mixture.is_some() {
        return refuse("data.mixture", "a list".to_owned(), apart);
    }
    match &data.validation_path {
        Some(path) => refuse("data.validation_path", file(path.first()), apart),
        None => Ok(()),
    }
}

/// The folder beside the data.
fn beside(config: &Config) -> Option<PathBuf> {
    let path = config.arguments().data.path.as_ref()?.first();
    let name = path.file_name()?.to_string_lossy();
    Some(path.with_file_name(format!("{name}.tokens")))
}

fn described(folder: &Path, found: &Tokenized) -> String {
    let Tokenized {
        tokens, documents, ..
    } = found;
    let (folder, vocab, dtype) = (file(folder), found.vocab_size, found.dtype);
    if found.is_current {
        return format!(
            "{folder} is up to date: {tokens} tokens of {documents} documents, as {dtype}"
        );
    }
    let per_token = found.bytes as f64 / (*tokens).max(1) as f64;
    format!(
        "wrote     {folder}\ntokens    {tokens} of {documents} documents, as {dtype}; {per_token:.2} bytes each\n\
         text      {}, {}\ntokenizer {vocab} tokens, {folder}/tokenizer.json\ntrain     --data.format tokens --data.path {folder}",
        found.description,
        Bytes(found.bytes)
    )
}

fn as_json(folder: &Path, found: &Tokenized) -> serde_json::Value {
    json!({
        "folder": folder,
        "tokens": found.tokens,
        "documents": found.documents,
        "bytes": found.bytes,
        "vocab_size": found.vocab_size,
        "dtype": found.dtype,
        "is_current": found.is_current,
    })
}
