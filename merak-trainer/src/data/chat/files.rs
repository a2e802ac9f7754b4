//! Where a chat template stands in files.

use std::{
    collections::BTreeMap,
    fs, io,
    path::{Path, PathBuf},
};

use merak_ckpt::{
    Checksum,
    words::{brief, file},
};
use merak_mpu::names::did_you_mean;
use serde_json::{Map, Value, json};

use super::{ChatTemplate, Tokenizer};
use crate::{
    config::{DataArguments, TemplateSource, TokenizerSource},
    error::{DataError, Error, Result},
};

/// The file of the default template alone.
const JINJA: &str = "chat_template.jinja";

/// The folder of further templates, each a file `NAME.jinja`.
const FURTHER: &str = "additional_chat_templates";

/// The name of the template that is used where none is chosen.
const DEFAULT: &str = "default";

/// The name of the template that chats with tools then take, if it is there.
const TOOL_USE: &str = "tool_use";

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

/// A template as it stands in a file.
#[derive(Debug, PartialEq, Eq)]
pub(in crate::data) struct Written {
    pub(in crate::data) path: PathBuf,
    text: String,
    /// Whether the file has several templates.
    is_one_of_several: bool,
}

impl Written {
    /// Its file's name in a fingerprint, with what tells it from others in the file.
    pub(in crate::data) fn name(&self) -> String {
        if self.is_one_of_several {
            format!("{JINJA}:{}", Checksum::of(self.text.as_bytes()))
        } else {
            JINJA.to_owned()
        }
    }
}

impl ChatTemplate {
    /// The template that a configuration gives, else that beside its tokenizer, if there is one.
    ///
    /// # Errors
    ///
    /// Files that cannot be read, a template that is none, and a name that no template has.
    pub(crate) fn load(arguments: &DataArguments) -> Result<Option<Self>> {
        Self::of(arguments.chat_template.as_ref(), folder(arguments))
    }

    /// A sentence for each special token that this template names and the tokenizer lacks, so that
    /// it would become the tokens of its text.
    pub(in crate::data) fn lacking_tokens(&self, tokenizer: &Tokenizer) -> Vec<String> {
        let named = self.named_tokens();
        let lacking = named.filter(|(_, token)| !token.is_empty() && !tokenizer.has(token));
        let told = lacking.map(|(name, token)| {
            let nearest = tokenizer.nearest_added(token);
            format!(
                "the chat template names \"{name}\", which is \"{}\", and the tokenizer {} does not have that token: it becomes \
                 those of its text{}",
                brief(token),
                tokenizer.name(),
                did_you_mean(nearest.as_deref())
            )
        });
        told.collect()
    }

    /// The template beside a tokenizer, if there is one.
    ///
    /// # Errors
    ///
    /// As for [`ChatTemplate::load`].
    pub(super) fn beside(folder: &Path) -> Result<Option<Self>> {
        Self::of(None, Some(folder))
    }

    /// The default template beside a tokenizer for prompts of chats; none where no template is.
    ///
    /// # Errors
    ///
    /// As for [`ChatTemplate::load`], and templates without a default.
    pub(super) fn for_prompts(folder: &Path) -> Result<Option<Self>> {
        if let Some(found) = Self::beside(folder)? {
            return Ok(Some(found));
        }
        let others = templates(Some(folder))?;
        if others.is_empty() {
            return Ok(None);
        }
        let names = names(&others);
        Err(Error::Data(DataError::ChatTemplate {
            path: folder.to_path_buf(),
            reason: format!("no template there is called {DEFAULT}, but {names}"),
        }))
    }

    /// The template in use of those that are given or in a tokenizer's folder, if there is one.
    pub(super) fn of(
        given: Option<&TemplateSource>,
        folder: Option<&Path>,
    ) -> Result<Option<Self>> {
        let special_tokens = special_tokens(&config(folder)?);
        let parsed = |Written { path, text, .. }: Written| {
            Self::new(&text, special_tokens.clone())
                .map_err(|reason| Error::Data(DataError::ChatTemplate { path, reason }))
        };
        let mut templates = in_use(given, folder)?.into_iter().map(parsed);
        let Some(template) = templates.next().transpose()? else {
            return Ok(None);
        };
        let tool_use = templates.next().transpose()?;
        Ok(Some(template.with_tool_use(tool_use)))
    }
}

/// The folder of the tokenizer's files.
fn folder(arguments: &DataArguments) -> Option<&Path> {
    match &arguments.tokenizer {
        TokenizerSource::File(path) => path.parent(),
        _ => None,
    }
}

/// The configuration of the tokenizer in a folder; null where there is none.
fn config(folder: Option<&Path>) -> Result<Value> {
    match folder.map(|folder| folder.join(CONFIG)) {
        Some(path) if path.is_file() => json(&path),
        _ => Ok(Value::Null),
    }
}

/// The templates in use: the one that is given; else the default of the tokenizer in a folder, and
/// that of chats with tools, as in transformers.
fn in_use(given: Option<&TemplateSource>, folder: Option<&Path>) -> Result<Vec<Written>> {
    if let Some(given) = given {
        return Ok(vec![chosen(given, folder)?]);
    }
    let mut templates = templates(folder)?;
    let Some(default) = templates.remove(DEFAULT) else {
        return Ok(Vec::new());
    };
    let tool_use = templates.remove(TOOL_USE);
    Ok([default].into_iter().chain(tool_use).collect())
}

/// The templates in use that are set, or have files of their own beside the tokenizer: its
/// configuration has the others.
pub(in crate::data) fn templates_in_use(arguments: &DataArguments) -> Result<Vec<Written>> {
    let (given, folder) = (arguments.chat_template.as_ref(), folder(arguments));
    if given.is_none() && template_files(folder).is_empty() {
        return Ok(Vec::new());
    }
    in_use(given, folder)
}

/// The template of a file, or the tokenizer's template of a name.
fn chosen(given: &TemplateSource, folder: Option<&Path>) -> Result<Written> {
    let name = match given {
        TemplateSource::File(path) => {
            return read_template(path, Error::reading_input("data.chat_template", path));
        }
        TemplateSource::Name(name) => name,
    };
    let mut templates = templates(folder)?;
    if let Some(found) = templates.remove(name) {
        return Ok(found);
    }
    let path = PathBuf::from(name);
    if templates.is_empty() {
        let reason = "there is no such file, and no template beside the tokenizer";
        return Err(Error::ReadInput {
            key: "data.chat_template",
            path,
            source: io::Error::new(io::ErrorKind::NotFound, reason),
        });
    }
    let names = names(&templates);
    let reason = format!("there is no such file, and the tokenizer's templates are called {names}");
    Err(Error::Data(DataError::ChatTemplate { path, reason }))
}

/// The names of templates, as messages list them.
fn names(templates: &BTreeMap<String, Written>) -> String {
    let names: Vec<_> = templates.keys().map(String::as_str).collect();
    names.join(", ")
}

/// The templates beside a tokenizer by name. As in transformers, files of templates alone hide
/// those in the tokenizer's configuration.
fn templates(folder: Option<&Path>) -> Result<BTreeMap<String, Written>> {
    let files = template_files(folder);
    match folder {
        Some(folder) if files.is_empty() => {
            Ok(in_config(&config(Some(folder))?, &folder.join(CONFIG)))
        }
        _ => {
            let read = |(name, path): (String, PathBuf)| {
                let written = read_template(&path, Error::reading(&path))?;
                Ok((name, written))
            };
            files.into_iter().map(read).collect()
        }
    }
}

/// The files of templates alone beside a tokenizer, each with the template's name.
fn template_files(folder: Option<&Path>) -> Vec<(String, PathBuf)> {
    let Some(folder) = folder else {
        return Vec::new();
    };
    let mut files = vec![(DEFAULT.to_owned(), folder.join(JINJA))];
    let further = fs::read_dir(folder.join(FURTHER)).into_iter().flatten();
    for path in further.filter_map(|entry| Some(entry.ok()?.path())) {
        if path.extension() == Some("jinja".as_ref())
            && let Some(name) = path.file_stem().and_then(|name| name.to_str())
        {
            files.push((name.to_owned(), path));
        }
    }
    files.retain(|(_, path)| path.is_file());
    files
}

/// The templates in a `tokenizer_config.json`, where a lone one is the default.
fn in_config(config: &Value, path: &Path) -> BTreeMap<String, Written> {
    let found = &config["chat_template"];
    let entries = found.as_array().map(Vec::as_slice).unwrap_or_default();
    let written = |name: &str, text: &str| {
        let written = Written {
            path: path.to_path_buf(),
            text: text.to_owned(),
            is_one_of_several: entries.len() > 1,
        };
        (name.to_owned(), written)
    };
    if let Some(text) = found.as_str() {
        return BTreeMap::from([written(DEFAULT, text)]);
    }
    let named = |entry: &Value| {
        Some(written(
            entry["name"].as_str()?,
            entry["template"].as_str()?,
        ))
    };
    entries.iter().filter_map(named).collect()
}

/// The files beside a tokenizer that make its prompts, by their names there: the templates in use,
/// and the special tokens that they may name.
pub(in crate::data) fn prompt_files(arguments: &DataArguments) -> Result<Vec<(String, Vec<u8>)>> {
    let mut in_use = templates_in_use(arguments)?;
    if in_use.len() > 1 {
        let config = config_with(in_use, config(folder(arguments))?);
        return Ok(vec![(CONFIG.to_owned(), config)]);
    }
    let mut files = Vec::new();
    if let Some(written) = in_use.pop() {
        files.push((JINJA.to_owned(), written.text.into_bytes()));
    }
    let config = folder(arguments).map(|folder| folder.join(CONFIG));
    if let Some(path) = config.filter(|path| path.is_file()) {
        files.push((CONFIG.to_owned(), bytes_of(path)?));
    }
    Ok(files)
}

/// A tokenizer's configuration that has the templates in use: a checkpoint has no folder for
/// further ones, and the file of one would hide those here.
fn config_with(in_use: Vec<Written>, config: Value) -> Vec<u8> {
    let entry =
        |(name, written): (&str, Written)| json!({ "name": name, "template": written.text });
    let templates: Value = [DEFAULT, TOOL_USE]
        .into_iter()
        .zip(in_use)
        .map(entry)
        .collect();
    let mut table = match config {
        Value::Object(table) => table,
        _ => Map::new(),
    };
    table.insert("chat_template".to_owned(), templates);
    format!("{:#}\n", Value::Object(table)).into_bytes()
}

fn bytes_of(path: PathBuf) -> Result<Vec<u8>> {
    merak_ckpt::read_regular(&path, MAX_BYTES).map_err(|source| Error::Read { path, source })
}

fn read_template(path: &Path, failed: impl Fn(io::Error) -> Error) -> Result<Written> {
    let text = merak_ckpt::read_text(path, MAX_BYTES);
    Ok(Written {
        path: path.to_path_buf(),
        text: text.map_err(failed)?,
        is_one_of_several: false,
    })
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
    let text = merak_ckpt::read_text(path, MAX_BYTES).map_err(Error::reading(path))?;
    serde_json::from_str(&text).map_err(|error| {
        Error::Data(DataError::ChatTemplate {
            path: path.to_path_buf(),
            reason: format!("{} is no JSON: {error}", file(path)),
        })
    })
}
