//! Every key with its type, default and meaning: for `merak config --help-keys` and for a page.

use super::{key::Key, keys::keys, shown, toml_of_json};
use serde_json::Value;
use std::fmt::Write as _;

/// All keys for a terminal, wrapped to `columns` where given: each with its default, its meaning
/// and the values that it expects.
///
/// ```
/// let text = merak_trainer::key_help(Some(80));
/// let entry = "learning_rate = 0.00005\n    Learning rate after warmup.\n";
/// let (_, rest) = text.split_once(entry).expect("an entry");
/// assert!(rest.starts_with("    Expects a number from 0 to 1e37.\n"));
/// assert!(text.lines().all(|line| line.chars().count() <= 80));
/// ```
pub fn key_help(columns: Option<usize>) -> String {
    let mut text = String::from(
        "Keys of a configuration, with their defaults. They stand in a file (.toml, .yaml, .json), in the environment \
         (MERAK_TP, MERAK_DATA__PATH) or on the command line (--tp 2, --data.path DIR, --set tp=2), with dashes or \
         underscores; the later wins.\n\n",
    );
    text = filled(&text, "", columns) + "\n";
    for key in keys() {
        let _ = writeln!(text, "{} = {}", key.name, default(key));
        let expected = format!("Expects {}.", (key.expected)());
        for sentence in [key.doc.to_owned(), expected] {
            text += &filled(&sentence, "    ", columns);
        }
    }
    text
}

/// All keys as a page of documentation.
pub fn key_page() -> String {
    let mut text = String::from(
        "# Keys of a configuration\n\n\
         `merak config --help-keys` prints the same keys; a test keeps this page equal to the code. A file (TOML, YAML, \
         JSON), the environment\n(`MERAK_TP`, `MERAK_DATA__PATH`) and the command line (`--tp 2`, `--data.path DIR`, \
         `--set tp=2`, with dashes or underscores) set them, the later\nwinning. \
         [The README](../README.md#configuration) says what relative paths are relative to.\n",
    );
    let mut section = None;
    for key in keys() {
        let (of, name) = key.name.rsplit_once('.').unwrap_or(("", key.name));
        if section != Some(of) {
            section = Some(of);
            let title = match of {
                "" => "At the top level".to_owned(),
                section => format!("Section `[{section}]`"),
            };
            let _ = write!(
                text,
                "\n## {title}\n\n| key | default | expects | does |\n|---|---|---|---|\n"
            );
        }
        let cell = |text: &str| text.replace('|', "\\|");
        let _ = writeln!(
            text,
            "| `{name}` | `{}` | {} | {} |",
            cell(&default(key)),
            cell(&(key.expected)()),
            cell(key.doc)
        );
    }
    text
}

/// The default of a key in TOML's spelling.
fn default(key: &Key) -> String {
    let value = (key.default)();
    let table = matches!(value, Value::String(_) | Value::Array(_) | Value::Object(_));
    let spelled = toml_of_json(&value).filter(|_| table);
    spelled.map_or_else(|| shown(&value), |value| value.to_string())
}

/// A paragraph in lines of at most `columns` columns, each after `indent`.
fn filled(text: &str, indent: &str, columns: Option<usize>) -> String {
    let columns = columns.unwrap_or(usize::MAX);
    let mut lines = String::new();
    let mut used = 0;
    for word in text.split_whitespace() {
        let length = word.chars().count();
        if used > 0 && used + 1 + length > columns {
            lines.push('\n');
            used = 0;
        }
        let before = if used == 0 { indent } else { " " };
        lines.push_str(before);
        lines.push_str(word);
        used += before.len() + length;
    }
    lines.push('\n');
    lines
}
