//! Reading a configuration file: TOML with line numbers, YAML and JSON.

use std::{collections::BTreeMap, path::Path};

use merak_ckpt::{MAX_CONFIG_BYTES, read_text};
use serde_json::{Map, Value};
use toml::{
    Spanned,
    de::{DeTable, DeValue},
};
use yaml_rust2::{Yaml, YamlLoader};

use super::{
    folders::no_configuration,
    keys::SECTIONS,
    layer::{Entry, push_value},
    lines::{Lines, key_lines},
    origin::Origin,
    strict,
};
use crate::error::{ConfigError, Error, Result};

/// The entries of a file, in the file's order where its format keeps one.
pub(crate) fn read(path: &Path) -> Result<Vec<Entry>> {
    if path.is_dir() {
        return Err(no_configuration(path).into());
    }
    let text = read_text(path, MAX_CONFIG_BYTES).map_err(|source| Error::Read {
        path: path.to_path_buf(),
        source,
    })?;
    // Some editors put a byte-order mark before a text.
    let text = text.strip_prefix('\u{feff}').unwrap_or(&text);
    let entries = parse(path, text)?;
    refuse_duplicates(path, &entries)?;
    Ok(entries)
}

/// Refuses a key that is given in two ways, such as in its section and with the section's name
/// before it.
fn refuse_duplicates(path: &Path, entries: &[Entry]) -> Result<()> {
    let mut seen = BTreeMap::new();
    for entry in entries {
        let Origin::File { line, .. } = entry.origin else {
            continue;
        };
        if let Some(first) = seen.insert(&entry.name, line) {
            let at = |line: Option<usize>| line.map(|line| format!(" at line {line}"));
            // Lines of JSON are looked up by the full name, which both entries share.
            let places = [first, line].map(|line| at(line).unwrap_or_default());
            let places = if first == line {
                ", in its section and beside it".to_owned()
            } else {
                places.join(" and")
            };
            let message = format!("{}{places}", strict::twice(&entry.name));
            return Err(syntax(path, &message));
        }
    }
    Ok(())
}

/// The entries of a text, whose format the file's name tells.
fn parse(path: &Path, text: &str) -> Result<Vec<Entry>> {
    let extension = path
        .extension()
        .and_then(|extension| extension.to_str())
        .unwrap_or_default();
    match extension.to_ascii_lowercase().as_str() {
        "toml" => parse_toml(path, text),
        "yaml" | "yml" => {
            let lines = key_lines(text).map_err(|error| syntax(path, &error))?;
            entries_of(path, parse_yaml(path, text, &lines)?, &lines)
        }
        "json" => {
            let value = strict::parse(text).map_err(|error| syntax(path, &error))?;
            // JSON is YAML, with rare exceptions.
            entries_of(path, value, &key_lines(text).unwrap_or_default())
        }
        _ => Err(Error::Config(ConfigError::ConfigFormat {
            path: path.to_path_buf(),
        })),
    }
}

fn syntax(path: &Path, message: &dyn std::fmt::Display) -> Error {
    Error::Config(ConfigError::ConfigSyntax {
        path: path.to_path_buf(),
        message: message.to_string(),
    })
}

fn entries_of(path: &Path, value: Value, lines: &Lines) -> Result<Vec<Entry>> {
    let table = match value {
        Value::Object(table) => table,
        Value::String(text) if text.contains(':') => {
            let message =
                "the file holds no table of keys: put a blank behind each key's colon, as in tp: 2";
            return Err(syntax(path, &message));
        }
        _ => return Err(syntax(path, &"the file holds no table of keys")),
    };
    let origin = |key: &str| Origin::File {
        path: path.to_path_buf(),
        line: lines.get(key).copied(),
    };
    let mut entries = Vec::new();
    for (name, value) in table {
        match value {
            Value::Object(section) if SECTIONS.contains(&name.as_str()) => {
                for (inner, value) in section {
                    let name = format!("{name}.{inner}");
                    let origin = origin(&name);
                    push_value(&mut entries, name, value, origin)?;
                }
            }
            value => {
                let origin = origin(&name);
                push_value(&mut entries, name, value, origin)?;
            }
        }
    }
    Ok(entries)
}

fn parse_toml(path: &Path, text: &str) -> Result<Vec<Entry>> {
    let line_of = |start: usize| text[..start].matches('\n').count() + 1;
    let table = DeTable::parse(text).map_err(|error| {
        let line = error
            .span()
            .map(|span| format!("line {}: ", line_of(span.start)));
        let key = error.span().and_then(|span| text.get(span));
        let message = match (error.message(), key) {
            ("duplicate key", Some(key)) => strict::twice(key),
            (message, _) => message.to_owned(),
        };
        syntax(path, &format!("{}{message}", line.unwrap_or_default()))
    })?;
    let mut entries = Vec::new();
    for (key, value) in table.get_ref() {
        let origin = |key: &Spanned<_>| Origin::File {
            path: path.to_path_buf(),
            line: Some(line_of(key.span().start)),
        };
        match value.get_ref() {
            DeValue::Table(section) if SECTIONS.contains(&key.get_ref().as_ref()) => {
                for (inner, value) in section {
                    let name = format!("{}.{}", key.get_ref(), inner.get_ref());
                    push_value(
                        &mut entries,
                        name,
                        json_of_toml(value.get_ref()),
                        origin(inner),
                    )?;
                }
            }
            value => {
                let name = key.get_ref().to_string();
                push_value(&mut entries, name, json_of_toml(value), origin(key))?;
            }
        }
    }
    Ok(entries)
}

/// Values that JSON lacks (dates, infinities, integers beyond 64 bits) become their text, which
/// only keys of strings accept.
fn json_of_toml(value: &DeValue<'_>) -> Value {
    match value {
        DeValue::String(text) => Value::from(text.as_ref()),
        DeValue::Integer(integer) => {
            let (digits, radix) = (integer.as_str(), integer.radix());
            let number = i64::from_str_radix(digits, radix).map(Value::from);
            let number = number.or_else(|_| u64::from_str_radix(digits, radix).map(Value::from));
            number.unwrap_or_else(|_| json_of_float(digits))
        }
        DeValue::Float(float) => json_of_float(float.as_str()),
        DeValue::Boolean(flag) => Value::Bool(*flag),
        DeValue::Datetime(date) => Value::from(date.to_string()),
        DeValue::Array(items) => items
            .iter()
            .map(|item| json_of_toml(item.get_ref()))
            .collect(),
        DeValue::Table(table) => Value::Object(
            table
                .iter()
                .map(|(key, value)| (key.get_ref().to_string(), json_of_toml(value.get_ref())))
                .collect(),
        ),
    }
}

fn json_of_float(text: &str) -> Value {
    match text.parse::<f64>() {
        Ok(number) if number.is_finite() => Value::from(number),
        _ => Value::from(text),
    }
}

fn parse_yaml(path: &Path, text: &str, lines: &Lines) -> Result<Value> {
    let documents = YamlLoader::load_from_str(text).map_err(|error| syntax(path, &error))?;
    match documents.as_slice() {
        [] => Ok(Value::Object(Map::new())),
        [document] => json_of_yaml(document, None, lines).map_err(|message| syntax(path, &message)),
        _ => Err(syntax(path, &"more than one YAML document")),
    }
}

/// The value as JSON; `key` is the file's key that it belongs to.
fn json_of_yaml(value: &Yaml, key: Option<&str>, lines: &Lines) -> Result<Value, String> {
    let place = || match key.and_then(|key| lines.get(key)) {
        Some(line) => format!(" at line {line} or below"),
        None => String::new(),
    };
    Ok(match value {
        Yaml::Real(text) => json_of_float(text),
        Yaml::Integer(number) => Value::from(*number),
        Yaml::String(text) => Value::from(text.as_str()),
        Yaml::Boolean(flag) => Value::Bool(*flag),
        Yaml::Array(items) => items
            .iter()
            .map(|item| json_of_yaml(item, key, lines))
            .collect::<Result<_, _>>()?,
        Yaml::Hash(table) => {
            let mut object = Map::new();
            for (name, value) in table {
                let Yaml::String(name) = name else {
                    let name = scalar(name);
                    // Lines are stored under the text of their keys.
                    let line = lines.get(&name).filter(|_| key.is_none());
                    let place = line.map_or_else(&place, |line| format!(" at line {line}"));
                    return Err(format!(
                        "the key {name}{place} is no string: put it in quotes"
                    ));
                };
                let key = key.unwrap_or(name);
                object.insert(name.clone(), json_of_yaml(value, Some(key), lines)?);
            }
            Value::Object(object)
        }
        Yaml::Null | Yaml::BadValue => Value::Null,
        Yaml::Alias(_) => {
            return Err(format!("an alias{} to a node that does not exist", place()));
        }
    })
}

/// A key that is not a string, as it was written.
fn scalar(key: &Yaml) -> String {
    match key {
        Yaml::Real(text) => text.clone(),
        Yaml::Integer(number) => number.to_string(),
        Yaml::Boolean(flag) => flag.to_string(),
        Yaml::Null => "~".to_owned(),
        _ => "with parts".to_owned(),
    }
}
