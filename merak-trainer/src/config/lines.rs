//! The lines of the keys in a YAML or JSON file, and the file's size with its aliases followed.

use std::collections::{BTreeMap, BTreeSet};

use super::strict::twice;
use yaml_rust2::{Event, parser::Parser, scanner::Marker};

/// Most levels of nested lists and tables in a configuration.
const MAX_DEPTH: usize = 64;

/// Most values in a configuration; those behind aliases count each time.
const MAX_VALUES: usize = 100_000;

/// The line of each key, from 1; a key in a table is named `table.key`.
pub(super) type Lines = BTreeMap<String, usize>;

/// Reads the places of the keys.
///
/// # Errors
/// What is wrong with the text, with its line.
pub(super) fn key_lines(text: &str) -> Result<Lines, String> {
    let mut parser = Parser::new_from_str(text);
    let mut walk = Walk::default();
    loop {
        let (event, mark) = parser.next_token().map_err(|error| error.to_string())?;
        if event == Event::StreamEnd {
            return Ok(walk.lines);
        }
        walk.take(event, mark)?;
    }
}

/// A list or table that is still open.
#[derive(Debug, Default)]
struct Open {
    anchor: usize,
    /// Values in it so far, itself included.
    values: usize,
    /// In a table, the key whose value comes next.
    key: Option<String>,
    /// Its keys so far.
    keys: BTreeSet<String>,
    is_table: bool,
}

#[derive(Debug, Default)]
struct Walk {
    lines: Lines,
    open: Vec<Open>,
    /// The number of values behind each anchor.
    anchors: BTreeMap<usize, usize>,
    values: usize,
}

impl Walk {
    fn take(&mut self, event: Event, mark: Marker) -> Result<(), String> {
        let line = mark.line();
        match event {
            Event::Scalar(text, _, anchor, _) => {
                let is_key = self.take_key(&text, line)?;
                if !is_key {
                    self.anchors.insert(anchor, 1);
                    self.count(1, line)?;
                }
            }
            Event::Alias(anchor) => {
                let values = self.anchors.get(&anchor).copied().unwrap_or(1);
                self.count(values, line)?;
            }
            Event::SequenceStart(anchor, _) => self.start(anchor, false, line)?,
            Event::MappingStart(anchor, _) => self.start(anchor, true, line)?,
            Event::SequenceEnd | Event::MappingEnd => {
                if let Some(open) = self.open.pop() {
                    self.anchors.insert(open.anchor, open.values);
                    self.count(open.values, line)?;
                }
            }
            _ => {}
        }
        Ok(())
    }

    /// Notes a key of the table that is open, if one is due.
    fn take_key(&mut self, text: &str, line: usize) -> Result<bool, String> {
        let depth = self.open.len();
        let outer = match self.open.as_slice() {
            [outer, _] => outer.key.clone(),
            _ => None,
        };
        let Some(table) = self.open.last_mut().filter(|open| open.is_table) else {
            return Ok(false);
        };
        if table.key.is_some() {
            return Ok(false);
        }
        if !table.keys.insert(text.to_owned()) {
            return Err(format!("{} at line {line}", twice(text)));
        }
        table.key = Some(text.to_owned());
        match (depth, outer) {
            (1, _) => {
                self.lines.entry(text.to_owned()).or_insert(line);
            }
            (2, Some(outer)) => {
                self.lines.entry(format!("{outer}.{text}")).or_insert(line);
            }
            _ => {}
        }
        Ok(true)
    }

    fn start(&mut self, anchor: usize, is_table: bool, line: usize) -> Result<(), String> {
        if self.open.len() == MAX_DEPTH {
            return Err(format!(
                "more than {MAX_DEPTH} lists and tables inside each other at line {line}"
            ));
        }
        // A list or table as a key is refused where values are read.
        if let Some(open) = self.open.last_mut().filter(|open| open.key.is_none()) {
            open.key = open.is_table.then(String::new);
        }
        self.open.push(Open {
            anchor,
            values: 1,
            key: None,
            keys: BTreeSet::new(),
            is_table,
        });
        Ok(())
    }

    /// Counts values that have ended.
    fn count(&mut self, values: usize, line: usize) -> Result<(), String> {
        match self.open.last_mut() {
            Some(open) => {
                open.key = None;
                open.values = open.values.saturating_add(values);
                self.values = self.values.max(open.values);
            }
            None => self.values = self.values.max(values),
        }
        if self.values > MAX_VALUES {
            return Err(format!("more than {MAX_VALUES} values at line {line}"));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fmt::Write as _;

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
