//! Reading a configuration file: TOML with line numbers, YAML and JSON.

use std::path::Path;

use merak_ckpt::{MAX_CONFIG_BYTES, read_text};
use serde_json::{Map, Value};
use toml::{
    Spanned,
    de::{DeTable, DeValue},
};
use yaml_rust2::{Yaml, YamlLoader};

use super::{
    arguments::SECTIONS,
    layer::{Entry, push_value},
    origin::Origin,
};
use crate::error::{Error, Result};

/// The entries of a file, in the file's order where its format keeps one.
pub(crate) fn read(path: &Path) -> Result<Vec<Entry>> {
    let text = read_text(path, MAX_CONFIG_BYTES).map_err(|source| Error::Read {
        path: path.to_path_buf(),
        source,
    })?;
    let extension = path
        .extension()
        .and_then(|extension| extension.to_str())
        .unwrap_or_default();
    match extension.to_ascii_lowercase().as_str() {
        "toml" => parse_toml(path, &text),
        "yaml" | "yml" => entries_of(path, parse_yaml(path, &text)?),
        "json" => {
            let value = serde_json::from_str(&text).map_err(|error| syntax(path, &error))?;
            entries_of(path, value)
        }
        _ => Err(Error::ConfigFormat {
            path: path.to_path_buf(),
        }),
    }
}

fn syntax(path: &Path, message: &dyn std::fmt::Display) -> Error {
    Error::ConfigSyntax {
        path: path.to_path_buf(),
        message: message.to_string(),
    }
}

fn entries_of(path: &Path, value: Value) -> Result<Vec<Entry>> {
    let Value::Object(table) = value else {
        return Err(syntax(path, &"the file holds no table of keys"));
    };
    let mut entries = Vec::new();
    for (name, value) in table {
        let origin = Origin::File {
            path: path.to_path_buf(),
            line: None,
        };
        push_value(&mut entries, name, value, origin)?;
    }
    Ok(entries)
}

fn parse_toml(path: &Path, text: &str) -> Result<Vec<Entry>> {
    let line_of = |start: usize| text[..start].matches('\n').count() + 1;
    let table = DeTable::parse(text).map_err(|error| {
        let line = error
            .span()
            .map(|span| format!("line {}: ", line_of(span.start)));
        syntax(
            path,
            &format!("{}{}", line.unwrap_or_default(), error.message()),
        )
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

/// Values that JSON lacks (dates, infinities, integers beyond 64 bits) become their text, which no
/// key but a string takes.
fn json_of_toml(value: &DeValue<'_>) -> Value {
    match value {
        DeValue::String(text) => Value::from(text.as_ref()),
        DeValue::Integer(integer) => i64::from_str_radix(integer.as_str(), integer.radix())
            .map_or_else(|_| Value::from(integer.as_str()), Value::from),
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

fn parse_yaml(path: &Path, text: &str) -> Result<Value> {
    let documents = YamlLoader::load_from_str(text).map_err(|error| syntax(path, &error))?;
    match documents.as_slice() {
        [] => Ok(Value::Object(Map::new())),
        [document] => json_of_yaml(document).map_err(|message| syntax(path, &message)),
        _ => Err(syntax(path, &"more than one YAML document")),
    }
}

fn json_of_yaml(value: &Yaml) -> Result<Value, String> {
    Ok(match value {
        Yaml::Real(text) => json_of_float(text),
        Yaml::Integer(number) => Value::from(*number),
        Yaml::String(text) => Value::from(text.as_str()),
        Yaml::Boolean(flag) => Value::Bool(*flag),
        Yaml::Array(items) => items.iter().map(json_of_yaml).collect::<Result<_, _>>()?,
        Yaml::Hash(table) => {
            let mut object = Map::new();
            for (key, value) in table {
                let Yaml::String(key) = key else {
                    return Err(format!("the key {key:?} is no string"));
                };
                object.insert(key.clone(), json_of_yaml(value)?);
            }
            Value::Object(object)
        }
        Yaml::Null | Yaml::BadValue => Value::Null,
        Yaml::Alias(_) => return Err("an alias to a node that does not exist".into()),
    })
}
