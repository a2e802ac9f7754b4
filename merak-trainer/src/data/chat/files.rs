//! Where a chat template stands in files.

use std::path::{Path, PathBuf};

use merak_ckpt::words::file;
use serde_json::{Map, Value};

use super::ChatTemplate;
use crate::{
    config::{DataArguments, TokenizerSource},
    error::{DataError, Error, Result},
};

/// The file of a template alone.
const JINJA: &str = "chat_template.jinja";

/// The file beside a tokenizer that names special tokens, and perhaps a template.
const CONFIG: &str = "tokenizer_config.json";

/// The files of a model's folder that make prompts, of which another tokenizer has others.
pub(in crate::data) const PROMPT_FILES: [&str; 3] = [JINJA, "chat_template.json", CONFIG];

/// The most bytes of each of these files.
const MAX_BYTES: u64 = 16 << 20;

/// The special tokens that templates may name.
const SPECIAL_TOKENS: [&str; 7] = [
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
];

impl ChatTemplate {
    /// The template that a configuration names, else that beside its tokenizer, if there is one.
    ///
    /// # Errors
    ///
    /// Files that cannot be read, and a template that is none.
    pub(crate) fn load(arguments: &DataArguments) -> Result<Option<Self>> {
        Self::of(template_file(arguments), folder(arguments))
    }

    /// The template beside a tokenizer, if there is one.
    ///
    /// # Errors
    ///
    /// As for [`ChatTemplate::load`].
    pub(super) fn beside(folder: &Path) -> Result<Option<Self>> {
        Self::of(file_beside(folder), Some(folder))
    }

    /// The template of a file, else that in the configuration of the tokenizer in a folder.
    fn of(given: Option<PathBuf>, folder: Option<&Path>) -> Result<Option<Self>> {
        let config = match folder.map(|folder| folder.join(CONFIG)) {
            Some(path) if path.is_file() => json(&path)?,
            _ => Value::Null,
        };
        let special_tokens = special_tokens(&config);
        let parsed = |source: &str, path: &Path| {
            Self::new(source, special_tokens.clone()).map_err(|reason| {
                let path = path.to_owned();
                Error::Data(DataError::ChatTemplate { path, reason })
            })
        };
        if let Some(path) = given {
            return parsed(&read_template(&path)?, &path).map(Some);
        }
        let path = folder.map(|folder| folder.join(CONFIG)).unwrap_or_default();
        let own = |name| {
            config
                .get("chat_template")
                .and_then(|found| named(found, name))
        };
        let Some(default) = own("default") else {
            return Ok(None);
        };
        let tool_use = own("tool_use").map(|source| parsed(source, &path));
        Ok(Some(
            parsed(default, &path)?.with_tool_use(tool_use.transpose()?),
        ))
    }
}

/// The folder of the tokenizer's files.
fn folder(arguments: &DataArguments) -> Option<&Path> {
    match &arguments.tokenizer {
        TokenizerSource::File(path) => path.parent(),
        _ => None,
    }
}

/// The file that holds a template alone: the one that is set, or the one beside the tokenizer.
pub(in crate::data) fn template_file(arguments: &DataArguments) -> Option<PathBuf> {
    let given = arguments.chat_template.as_ref().map(|path| path.0.clone());
    given.or_else(|| file_beside(folder(arguments)?))
}

/// The file in the folder of a tokenizer that holds a template alone.
fn file_beside(folder: &Path) -> Option<PathBuf> {
    let path = folder.join(JINJA);
    path.is_file().then_some(path)
}

/// The files beside a tokenizer that make its prompts, by their names there: the template in use,
/// and the special tokens that it may name.
pub(in crate::data) fn prompt_files(arguments: &DataArguments) -> Result<Vec<(String, Vec<u8>)>> {
    let mut files = Vec::new();
    if let Some(path) = template_file(arguments) {
        files.push((JINJA.to_owned(), bytes_of(path)?));
    }
    let config = folder(arguments).map(|folder| folder.join(CONFIG));
    if let Some(path) = config.filter(|path| path.is_file()) {
        files.push((CONFIG.to_owned(), bytes_of(path)?));
    }
    Ok(files)
}

fn bytes_of(path: PathBuf) -> Result<Vec<u8>> {
    merak_ckpt::read_regular(&path, MAX_BYTES).map_err(|source| Error::Read { path, source })
}

fn read_template(path: &Path) -> Result<String> {
    merak_ckpt::read_text(path, MAX_BYTES).map_err(|source| Error::ReadInput {
        key: "data.chat_template",
        path: path.to_path_buf(),
        source,
    })
}

/// The template of a name in a `tokenizer_config.json`, where a lone one is `default`. As in
/// transformers, chats with tools take `tool_use`, if it is there.
fn named<'a>(found: &'a Value, name: &str) -> Option<&'a str> {
    if let Some(text) = found.as_str() {
        return (name == "default").then_some(text);
    }
    let mut entries = found.as_array()?.iter();
    entries.find(|entry| entry["name"] == name)?["template"].as_str()
}

/// The special tokens by name: each is a text, or a table with its `content`.
fn special_tokens(config: &Value) -> Map<String, Value> {
    let token = |name: &&str| {
        let found = config.get(*name)?;
        let text = found.as_str().or_else(|| found["content"].as_str())?;
        Some(((*name).to_owned(), Value::from(text)))
    };
    SPECIAL_TOKENS.iter().filter_map(token).collect()
}

fn json(path: &Path) -> Result<Value> {
    let text = merak_ckpt::read_text(path, MAX_BYTES).map_err(|source| Error::Read {
        path: path.to_path_buf(),
        source,
    })?;
    serde_json::from_str(&text).map_err(|error| {
        Error::Data(DataError::ChatTemplate {
            path: path.to_path_buf(),
            reason: format!("{} is no JSON: {error}", file(path)),
        })
    })
}
