//! JSON as configurations have it: no table has a key twice.

use std::fmt;

use super::refusal::Refusal;
use ::config::{Map, Value, ValueKind};
use merak_ckpt::words::brief;
use serde::de::{Deserialize, Deserializer, Error, MapAccess, SeqAccess, Visitor};
use serde_json::Value as Json;

/// The message about a key that stands in a table twice.
pub(super) fn twice(key: &str) -> String {
    format!("duplicate key \"{}\"", brief(key))
}

/// The value that a text stands for.
///
/// # Errors
/// What is wrong with the text, with its line and column.
pub(super) fn parse(text: &str) -> Result<Value, serde_json::Error> {
    serde_json::from_str(text).map(|Strict(value)| value)
}

/// The value that a text of the environment or the command line stands for.
pub(super) fn parse_text(text: &str) -> Result<Json, Refusal> {
    let value = parse(text).map_err(|error| {
        // Text that does not begin like a table or list is a wrong type, not damaged JSON.
        let is_json = text.trim_start().starts_with(['{', '[']);
        let reason = error.to_string();
        if is_json {
            Refusal::Syntax { reason }
        } else {
            Refusal::Type
        }
    })?;
    Ok(json(&value))
}

/// A value as JSON, by its kind.
pub(crate) fn json(value: &Value) -> Json {
    match &value.kind {
        ValueKind::Nil => Json::Null,
        ValueKind::Boolean(flag) => Json::from(*flag),
        ValueKind::I64(number) => Json::from(*number),
        ValueKind::U64(number) => Json::from(*number),
        ValueKind::I128(_) | ValueKind::U128(_) => Json::from(value.to_string()),
        ValueKind::Float(number) => Json::from(*number),
        ValueKind::String(text) => Json::from(text.as_str()),
        ValueKind::Array(items) => items.iter().map(json).collect(),
        ValueKind::Table(table) => {
            let entries = table.iter();
            Json::Object(
                entries
                    .map(|(key, value)| (key.clone(), json(value)))
                    .collect(),
            )
        }
    }
}

/// A value whose tables were read key by key.
struct Strict(Value);

impl<'de> Deserialize<'de> for Strict {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(Reader).map(Self)
    }
}

struct Reader;

impl<'de> Visitor<'de> for Reader {
    type Value = Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a value")
    }

    fn visit_unit<E>(self) -> Result<Value, E> {
        Ok(ValueKind::Nil.into())
    }

    fn visit_bool<E>(self, flag: bool) -> Result<Value, E> {
        Ok(flag.into())
    }

    fn visit_i64<E>(self, number: i64) -> Result<Value, E> {
        Ok(number.into())
    }

    fn visit_u64<E>(self, number: u64) -> Result<Value, E> {
        Ok(number.into())
    }

    fn visit_f64<E>(self, number: f64) -> Result<Value, E> {
        Ok(number.into())
    }

    fn visit_str<E>(self, text: &str) -> Result<Value, E> {
        Ok(text.into())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Value, A::Error> {
        let mut list = Vec::new();
        while let Some(Strict(item)) = items.next_element()? {
            list.push(item);
        }
        Ok(list.into())
    }

    fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<Value, A::Error> {
        let mut table = Map::new();
        while let Some(key) = entries.next_key::<String>()? {
            if table.contains_key(&key) {
                return Err(A::Error::custom(twice(&key)));
            }
            let Strict(value) = entries.next_value()?;
            table.insert(key, value);
        }
        Ok(table.into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_text_without_a_key_twice_is_what_serde_makes_of_it() {
        for text in [
            "null",
            "[1, -2, 3.5, 18446744073709551615, true, \"\\u00f6\\n\", [], {}]",
            "{\"b\": {\"a\": 1}, \"a\": [{\"a\": null}]}",
            "{\"a\": 1",
        ] {
            let expected = serde_json::from_str::<Json>(text);
            let value = parse(text).ok().as_ref().map(json);
            assert_eq!(value, expected.ok(), "{text}");
        }
    }

    #[test]
    fn a_key_that_stands_twice_in_a_table_is_named_with_its_line() {
        let refused = parse("{\n  \"data\": {\"path\": 1,\n  \"path\": 2}\n}")
            .unwrap_err()
            .to_string();
        assert_eq!(refused, "duplicate key \"path\" at line 3 column 8");
    }
}
