//! Reading a configuration file: TOML with line numbers, YAML and JSON.

use std::{collections::BTreeMap, mem, path::Path};

use ::config::{Map, Value, ValueKind};
use merak_ckpt::{MAX_CONFIG_BYTES, read_text};
use toml::de::{DeTable, DeValue};

use super::{
    folders::no_configuration,
    layer::Layer,
    lines::{Lines, document, kind_of_float},
    origin::in_file,
    strict,
};
use crate::error::{ConfigError, Error, Result};

/// The layer of a file, in the file's order where its format keeps one.
pub(crate) fn read(path: &Path) -> Result<Layer> {
    if path.is_dir() {
        return Err(no_configuration(path).into());
    }
    let mut layer = Layer::default();
    for (name, value) in read_table(path)? {
        layer.add_typed(name, value)?;
    }
    refuse_duplicates(path, &layer)?;
    Ok(layer)
}

/// The table of a file, whatever its keys.
pub(crate) fn read_table(path: &Path) -> Result<Map<String, Value>> {
    let text = read_text(path, MAX_CONFIG_BYTES).map_err(Error::reading(path))?;
    // Some editors put a byte-order mark before a text.
    parse(path, text.strip_prefix('\u{feff}').unwrap_or(&text))
}

/// Refuses a key that is given in two ways, such as in its section and with the section's name
/// before it.
fn refuse_duplicates(path: &Path, layer: &Layer) -> Result<()> {
    let mut seen = BTreeMap::new();
    for (name, value) in &layer.0 {
        let place = value.origin().unwrap_or_default();
        if let Some(first) = seen.insert(name, place) {
            // Lines of JSON are looked up by the full name, which both share.
            let places = if first == place {
                ", in its section and beside it".to_owned()
            } else {
                let places = [first, place].map(|place| place.rsplit(':').next());
                let [first, second] = places.map(Option::unwrap_or_default);
                format!(" at line {first} and at line {second}")
            };
            let message = format!("{}{places}", strict::twice(name));
            return Err(syntax(path, &message));
        }
    }
    Ok(())
}

/// The table of a text, whose format the file's name tells, with the places of its keys.
fn parse(path: &Path, text: &str) -> Result<Map<String, Value>> {
    let extension = path
        .extension()
        .and_then(|extension| extension.to_str())
        .unwrap_or_default();
    match extension.to_ascii_lowercase().as_str() {
        "toml" => parse_toml(path, text),
        "yaml" | "yml" => {
            let (value, lines) = document(text).map_err(|error| syntax(path, &error))?;
            placed(path, value, &lines)
        }
        "json" => {
            let value = strict::parse(text).map_err(|error| syntax(path, &error))?;
            let lines = document(text).map(|(_, lines)| lines).unwrap_or_default();
            placed(path, value, &lines)
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

/// The file's table, its keys and those of its tables with their places.
fn placed(path: &Path, value: Value, lines: &Lines) -> Result<Map<String, Value>> {
    let mut table = match value.kind {
        ValueKind::Table(table) => table,
        ValueKind::String(text) if text.contains(':') => {
            let message =
                "the file holds no table of keys: put a blank after each key's colon, as in tp: 2";
            return Err(syntax(path, &message));
        }
        _ => return Err(syntax(path, &"the file holds no table of keys")),
    };
    let place = |name: &str, value: &mut Value| {
        let origin = in_file(path, lines.get(name).copied());
        *value = Value::new(Some(&origin), mem::take(&mut value.kind));
    };
    for (name, value) in &mut table {
        if let ValueKind::Table(section) = &mut value.kind {
            for (inner, value) in section {
                place(&format!("{name}.{inner}"), value);
            }
        }
        place(name, value);
    }
    Ok(table)
}

fn parse_toml(path: &Path, text: &str) -> Result<Map<String, Value>> {
    let ends: Vec<_> = text.match_indices('\n').map(|(end, _)| end).collect();
    let line_of = |start: usize| ends.partition_point(|end| *end < start) + 1;
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
    let place = |start| in_file(path, Some(line_of(start)));
    Ok(table_of_toml(table.get_ref(), &place))
}

fn table_of_toml(table: &DeTable<'_>, place: &dyn Fn(usize) -> String) -> Map<String, Value> {
    let entries = table.iter().map(|(key, value)| {
        let value = kind_of_toml(value.get_ref(), place);
        (
            key.get_ref().to_string(),
            Value::new(Some(&place(key.span().start)), value),
        )
    });
    entries.collect()
}

/// Values that JSON lacks (dates, infinities, integers beyond 64 bits) become their text, which
/// only keys of strings accept.
fn kind_of_toml(value: &DeValue<'_>, place: &dyn Fn(usize) -> String) -> ValueKind {
    match value {
        DeValue::String(text) => text.as_ref().into(),
        DeValue::Integer(integer) => {
            let (digits, radix) = (integer.as_str(), integer.radix());
            let number = i64::from_str_radix(digits, radix).map(ValueKind::from);
            let number = number.or_else(|_| u64::from_str_radix(digits, radix).map(Into::into));
            number.unwrap_or_else(|_| kind_of_float(digits))
        }
        DeValue::Float(float) => kind_of_float(float.as_str()),
        DeValue::Boolean(flag) => (*flag).into(),
        DeValue::Datetime(date) => date.to_string().into(),
        DeValue::Array(items) => {
            let items = items.iter().map(|item| kind_of_toml(item.get_ref(), place));
            items.collect::<Vec<_>>().into()
        }
        DeValue::Table(table) => table_of_toml(table, place).into(),
    }
}
