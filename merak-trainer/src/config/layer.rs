//! A layer of the configuration: the entries that a file, the environment or the command line
//! gives.

use std::path::{Path, PathBuf};

use merak_ckpt::words::pasted_dash;
use serde_json::Value;

use super::{
    key::Raw,
    keys::{SECTIONS, keys},
    origin::Origin,
    reserved::RESERVED,
    setting::Setting,
    strict,
};
use crate::error::{ConfigError, Error, Result};

/// One key with its value, not yet looked up.
#[derive(Debug, Clone)]
pub(crate) struct Entry {
    /// Full name with underscores: `data.path`.
    pub(crate) name: String,
    /// The value.
    pub(crate) raw: Raw,
    /// Where it stands.
    pub(crate) origin: Origin,
}

/// A value that the command itself gives a key, besides the layers: from one of the command's own
/// options or arguments, or always.
#[derive(Debug, Clone)]
pub struct Given {
    key: &'static str,
    text: String,
    origin: Origin,
}

impl Given {
    /// The value of a key that has another name on the command, such as `--schedule` or
    /// `CHECKPOINT`. Messages use that name.
    pub fn by(option: impl Into<String>, key: &'static str, text: impl Into<String>) -> Self {
        let option = option.into();
        Self {
            origin: Origin::CommandLine { option },
            ..Self::always(key, text)
        }
    }

    /// The value that a key always has under this command.
    pub fn always(key: &'static str, text: impl Into<String>) -> Self {
        Self {
            key,
            text: text.into(),
            origin: Origin::Command,
        }
    }
}

/// Entries of the command's own values.
pub(crate) fn from_command(given: impl IntoIterator<Item = Given>) -> Vec<Entry> {
    let entry = |given: Given| Entry {
        name: given.key.to_owned(),
        raw: Raw::Text(given.text),
        origin: given.origin,
    };
    given.into_iter().map(entry).collect()
}

/// The folder that an entry's relative input paths start from.
pub(crate) fn base_of(origin: &Origin) -> PathBuf {
    match origin {
        Origin::File { path, .. } => path.parent().map(Path::to_path_buf).unwrap_or_default(),
        _ => PathBuf::new(),
    }
}

/// Prefix of the environment variables that set keys.
pub const VARIABLES: &str = "MERAK_";

/// Entries of the environment: `MERAK_TP`, `MERAK_DATA__PATH`; `MERAK_LOG` is the log filter.
pub(crate) fn from_environment(
    environment: impl IntoIterator<Item = (String, String)>,
) -> Result<Vec<Entry>> {
    let mut variables: Vec<_> = environment
        .into_iter()
        .filter(|(variable, _)| variable.starts_with(VARIABLES) && variable != "MERAK_LOG")
        .collect();
    // The operating system decides the order of the environment.
    variables.sort();
    let mut entries = Vec::new();
    for (variable, text) in variables {
        let name = variable[VARIABLES.len()..]
            .to_ascii_lowercase()
            .replace("__", ".");
        push_text(&mut entries, name, text, Origin::Environment { variable })?;
    }
    Ok(entries)
}

/// Entries of the command line: `--key value`, `--key=value`, `--set key=value`, a bare `--flag`.
pub(crate) fn from_command_line(arguments: &[String]) -> Result<Vec<Entry>> {
    let mut entries = Vec::new();
    let mut rest = arguments.iter().peekable();
    while let Some(argument) = rest.next() {
        let Some(option) = argument
            .strip_prefix("--")
            .filter(|option| !option.is_empty())
        else {
            return Err(Error::Config(match pasted_dash(argument) {
                Some(message) => ConfigError::PastedDash { message },
                None => ConfigError::UnexpectedArgument {
                    argument: argument.clone(),
                },
            }));
        };
        let (key, attached) = match option.split_once('=') {
            Some((key, value)) => (key, Some(value.to_owned())),
            None => (option, None),
        };
        let is_word = |next: &&String| !next.starts_with("--");
        if key == "set" {
            let pair = attached.or_else(|| rest.next_if(is_word).cloned());
            let (key, value) = split_pair(pair)?;
            let origin = Origin::CommandLine {
                option: format!("--set {key}"),
            };
            push_text(&mut entries, spelled(&key), value, origin)?;
            continue;
        }
        let (name, option) = (spelled(key), format!("--{key}"));
        let is_choice = |next: &str| Option::<bool>::from_text(next).is_ok();
        let belongs = |next: &&String| is_word(next) && (!is_flag(&name) || is_choice(next));
        let text = match attached.or_else(|| rest.next_if(belongs).cloned()) {
            Some(text) => text,
            None if needs_value(&name) => {
                let example = format!("{option} VALUE");
                return Err(Error::Config(ConfigError::MissingValue { option, example }));
            }
            None => "true".into(),
        };
        push_text(&mut entries, name, text, Origin::CommandLine { option })?;
    }
    Ok(entries)
}

/// Key and value of the word after `--set`.
fn split_pair(pair: Option<String>) -> Result<(String, String)> {
    let Some(pair) = pair else {
        return Err(Error::Config(ConfigError::MissingValue {
            option: "--set".into(),
            example: "--set tp=2".into(),
        }));
    };
    if let Some((key, value)) = pair.split_once('=') {
        return Ok((key.to_owned(), value.to_owned()));
    }
    let example = match pair.split_once(':') {
        Some((key, value)) => format!("--set {key}={value}"),
        None => format!("--set {pair}=VALUE"),
    };
    let option = format!("--set {pair}");
    Err(Error::Config(ConfigError::MissingValue { option, example }))
}

/// Short names that keys have on the command line.
const SHORT: [(&str, &str); 1] = [("resume", "resume_from_checkpoint")];

/// The full name of a key on the command line, with underscores.
fn spelled(key: &str) -> String {
    let key = key.replace('-', "_");
    let short = SHORT.iter().find(|(short, _)| *short == key);
    short.map_or(key, |(_, name)| (*name).to_owned())
}

fn is_flag(name: &str) -> bool {
    keys().any(|key| key.name == name && key.is_flag)
        || RESERVED.iter().any(|key| key.name == name && key.is_flag())
}

/// Whether the option needs a value. Flags do not, nor do unknown keys, which get their own error.
fn needs_value(name: &str) -> bool {
    keys().any(|key| key.name == name && !key.is_flag)
        || RESERVED
            .iter()
            .any(|key| key.name == name && !key.is_flag())
        || SECTIONS.contains(&name)
}

fn push_text(entries: &mut Vec<Entry>, name: String, text: String, origin: Origin) -> Result<()> {
    if SECTIONS.contains(&name.as_str()) {
        // A whole section, as a JSON object.
        let value = strict::parse(&text).unwrap_or(Value::String(text));
        return push_section(entries, &name, value, &origin);
    }
    entries.push(Entry {
        name: full_name(name),
        raw: Raw::Text(text),
        origin,
    });
    Ok(())
}

/// Adds a typed value, a section key by key.
pub(crate) fn push_value(
    entries: &mut Vec<Entry>,
    name: String,
    value: Value,
    origin: Origin,
) -> Result<()> {
    if SECTIONS.contains(&name.as_str()) {
        return push_section(entries, &name, value, &origin);
    }
    entries.push(Entry {
        name: full_name(name),
        raw: Raw::Typed(value),
        origin,
    });
    Ok(())
}

fn push_section(entries: &mut Vec<Entry>, name: &str, value: Value, origin: &Origin) -> Result<()> {
    if name == "tp_layer_lists" && value == "auto" {
        entries.push(Entry {
            name: format!("{name}.auto"),
            raw: Raw::Typed(Value::Bool(true)),
            origin: origin.clone(),
        });
        return Ok(());
    }
    let Value::Object(table) = value else {
        return Err(Error::Config(ConfigError::WrongType {
            key: name.to_owned(),
            expected: table_of(name),
            found: value.to_string(),
            place: origin.to_string(),
        }));
    };
    for (key, value) in table {
        let name = format!("{name}.{key}");
        entries.push(Entry {
            name,
            raw: Raw::Typed(value),
            origin: origin.clone(),
        });
    }
    Ok(())
}

/// A section, with the keys that it begins with.
fn table_of(section: &str) -> String {
    const NAMES: usize = 2;
    let is_within = |name: &&str| name.rsplit_once('.').is_some_and(|(of, _)| of == section);
    let mut names = keys().map(|key| key.name).filter(is_within);
    let first: Vec<_> = names.by_ref().take(NAMES).collect();
    let rest = names.next().map_or("", |_| ", ..");
    let table = format!("a table of \"{}\"{rest}", first.join("\", \""));
    match section {
        "tp_layer_lists" => format!("\"auto\" or {table}"),
        _ => table,
    }
}

/// The full name of a key: the tensor-parallel lists may stand outside their table.
fn full_name(name: String) -> String {
    const LISTS: &[&str] = &[
        "col_para_list",
        "row_para_list",
        "input_output_mapping",
        "weight_change_list",
        "tp_attr_list",
        "conv_para_list",
    ];
    if LISTS.contains(&name.as_str()) {
        format!("tp_layer_lists.{name}")
    } else {
        name
    }
}
