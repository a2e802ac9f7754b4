//! A YAML file with the lines of its keys. JSON is YAML, with rare exceptions: its lines are read
//! here too.

use std::collections::BTreeMap;

use super::strict::twice;
use ::config::{Map, Value, ValueKind};
use yaml_rust2::{
    Event, Yaml,
    parser::{Parser, Tag},
    scanner::{Marker, TScalarStyle},
};

/// Most levels of nested lists and tables in a configuration.
const MAX_DEPTH: usize = 64;

/// Most values in a configuration; those behind aliases count each time.
const MAX_VALUES: usize = 100_000;

/// The line of each key, from 1; a key in a table is named `table.key`.
pub(super) type Lines = BTreeMap<String, usize>;

/// Reads the value of the only document, and the places of its keys.
///
/// # Errors
/// What is wrong with the text, with its line.
pub(super) fn document(text: &str) -> Result<(Value, Lines), String> {
    let mut parser = Parser::new_from_str(text);
    let mut walk = Walk::default();
    loop {
        let (event, mark) = parser.next_token().map_err(|error| error.to_string())?;
        if event == Event::StreamEnd {
            let empty = || Map::<String, Value>::new().into();
            return Ok((walk.root.unwrap_or_else(empty), walk.lines));
        }
        walk.take(event, mark)?;
    }
}

/// A list or table that is still open.
#[derive(Debug)]
struct Open {
    anchor: usize,
    /// Values in it so far, itself included.
    values: usize,
    /// In a table, the key whose value comes next.
    key: Option<String>,
    so_far: ValueKind,
}

impl Open {
    fn awaits_key(&self) -> bool {
        matches!(self.so_far, ValueKind::Table(_)) && self.key.is_none()
    }
}

#[derive(Debug, Default)]
struct Walk {
    root: Option<Value>,
    lines: Lines,
    open: Vec<Open>,
    /// The number of values behind each anchor, and the value.
    anchors: BTreeMap<usize, (usize, Value)>,
}

impl Walk {
    fn take(&mut self, event: Event, mark: Marker) -> Result<(), String> {
        let line = mark.line();
        match event {
            Event::DocumentStart if self.root.is_some() => {
                Err("more than one YAML document".to_owned())
            }
            Event::Scalar(text, style, anchor, tag) => {
                let value = scalar(text.clone(), style, tag.as_ref()).into();
                self.add(anchor, 1, value, &text, line)
            }
            Event::Alias(anchor) => {
                let (values, value) = self.anchors.get(&anchor).cloned().unwrap_or_default();
                self.add(0, values.max(1), value, "with parts", line)
            }
            Event::SequenceStart(anchor, _) => self.start(anchor, Vec::<Value>::new().into(), line),
            Event::MappingStart(anchor, _) => {
                self.start(anchor, Map::<String, Value>::new().into(), line)
            }
            Event::SequenceEnd | Event::MappingEnd => match self.open.pop() {
                Some(open) => self.add(open.anchor, open.values, open.so_far.into(), "", line),
                None => Ok(()),
            },
            _ => Ok(()),
        }
    }

    fn start(&mut self, anchor: usize, empty: ValueKind, line: usize) -> Result<(), String> {
        if self.open.len() == MAX_DEPTH {
            return Err(format!(
                "more than {MAX_DEPTH} lists and tables inside each other at line {line}"
            ));
        }
        if self.open.last().is_some_and(Open::awaits_key) {
            return Err(no_string("with parts", line));
        }
        self.open.push(Open {
            anchor,
            values: 1,
            key: None,
            so_far: empty,
        });
        Ok(())
    }

    /// Adds a value that has ended to what is open; `text` is how it was written. In a table, keys
    /// and values take turns.
    fn add(
        &mut self,
        anchor: usize,
        values: usize,
        value: Value,
        text: &str,
        line: usize,
    ) -> Result<(), String> {
        if anchor > 0 {
            self.anchors.insert(anchor, (values, value.clone()));
        }
        let outer = match self.open.as_slice() {
            [] | [_] => Some(String::new()),
            [outer, _] => outer.key.as_ref().map(|outer| format!("{outer}.")),
            _ => None,
        };
        let Some(open) = self.open.last_mut() else {
            self.root = Some(value);
            return Ok(());
        };
        let awaits_key = open.awaits_key();
        match &mut open.so_far {
            ValueKind::Table(table) if awaits_key => {
                let ValueKind::String(key) = value.kind else {
                    return Err(no_string(text, line));
                };
                if table.contains_key(&key) {
                    return Err(format!("{} at line {line}", twice(&key)));
                }
                let full = outer.map(|outer| outer + &key);
                self.lines.extend(full.map(|full| (full, line)));
                open.key = Some(key);
                return Ok(());
            }
            ValueKind::Table(table) => table.extend(open.key.take().map(|key| (key, value))),
            ValueKind::Array(items) => items.push(value),
            _ => {}
        }
        open.values = open.values.saturating_add(values);
        if open.values > MAX_VALUES {
            return Err(format!("more than {MAX_VALUES} values at line {line}"));
        }
        Ok(())
    }
}

/// The error of a key that is not a string.
fn no_string(key: &str, line: usize) -> String {
    let key = if key.is_empty() { "~" } else { key };
    format!("the key {key} at line {line} is no string: put it in quotes")
}

/// A value without parts: text in quotes or of a tag that is not YAML's own is a string.
fn scalar(text: String, style: TScalarStyle, tag: Option<&Tag>) -> ValueKind {
    let is_typed = |tag: &Tag| {
        tag.handle == "tag:yaml.org,2002:"
            && ["bool", "int", "float", "null"].contains(&tag.suffix.as_str())
    };
    if style != TScalarStyle::Plain || !tag.is_none_or(is_typed) {
        return text.into();
    }
    match Yaml::from_str(&text) {
        Yaml::Real(number) => kind_of_float(&number),
        Yaml::Integer(number) => number.into(),
        Yaml::Boolean(flag) => flag.into(),
        Yaml::Null => ValueKind::Nil,
        _ => text.into(),
    }
}

/// The number that digits stand for. One that is not finite stays a text, which keys refuse.
pub(super) fn kind_of_float(text: &str) -> ValueKind {
    match text.parse::<f64>() {
        Ok(number) if number.is_finite() => number.into(),
        _ => text.into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fmt::Write as _;

    fn key_lines(text: &str) -> Result<Lines, String> {
        document(text).map(|(_, lines)| lines)
    }

    #[test]
    fn keys_of_the_file_and_of_its_tables_have_lines() {
        let yaml =
            "# a run\ntp: 2\ndata:\n  path: x # y\n  list: [a, {b: c}]\nmodel: {config: m}\n";
        let lines = key_lines(yaml).unwrap();
        let expected = [
            ("data", 3),
            ("data.list", 5),
            ("data.path", 4),
            ("model", 6),
            ("model.config", 6),
            ("tp", 2),
        ];
        let expected = expected.map(|(key, line)| (key.to_owned(), line));
        assert_eq!(lines, Lines::from(expected));
        let json = "{\n  \"tp\": 2,\n  \"data\": {\n    \"path\": \"x\"\n  }\n}\n";
        assert_eq!(key_lines(json).unwrap()["data.path"], 4);
    }

    #[test]
    fn nesting_without_end_and_aliases_that_multiply_are_refused() {
        let deep = "- ".repeat(100_000);
        let refused = key_lines(&deep).unwrap_err();
        assert!(refused.starts_with("more than 64 lists"), "{refused}");
        let mut bomb = String::from("a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n");
        for level in 1..30 {
            let before = format!("*a{}, ", level - 1).repeat(10);
            writeln!(bomb, "a{level}: &a{level} [{before}]").unwrap();
        }
        let refused = key_lines(&bomb).unwrap_err();
        assert!(
            refused.starts_with("more than 100000 values at line "),
            "{refused}"
        );
    }
}
