//! What templates get from Python: `json.dumps`, and which values are sequences.

use std::fmt::Write as _;

use minijinja::{
    Error, ErrorKind, Output, State, escape_formatter,
    value::{Kwargs, Value, ValueKind},
};

/// Whether Python's value has a length and items.
pub(super) fn is_sequence(value: &Value) -> bool {
    use ValueKind as K;
    matches!(value.kind(), K::Seq | K::String | K::Map | K::Iterable)
}

/// Writes a value as Python prints it.
pub(super) fn print(
    out: &mut Output<'_>,
    state: &mut State<'_, '_>,
    value: &Value,
) -> Result<(), Error> {
    let is_float = value.kind() == ValueKind::Number && !value.is_integer();
    match f64::try_from(value.clone()) {
        Ok(number) if is_float && number.is_finite() => Ok(out.write_str(&float(number))?),
        _ => escape_formatter(out, state, value),
    }
}

/// `tojson` as transformers has it: `json.dumps(x, ensure_ascii=False, ..)`.
#[expect(clippy::needless_pass_by_value, reason = "the engine gives options so")]
pub(super) fn tojson(
    value: &Value,
    indent: Option<Value>,
    options: Kwargs,
) -> Result<String, Error> {
    let indent = match indent {
        Some(indent) => Some(indent),
        None => options.get("indent")?,
    };
    let dumps = Dumps {
        indent: indented(indent)?,
        ensure_ascii: options
            .get::<Option<bool>>("ensure_ascii")?
            .unwrap_or(false),
        sort_keys: options.get::<Option<bool>>("sort_keys")?.unwrap_or(false),
        separators: options.get::<Option<Vec<String>>>("separators")?,
    };
    options.assert_all_used()?;
    let value = serde_json::to_value(value)
        .map_err(|error| Error::new(ErrorKind::BadSerialization, error.to_string()))?;
    let mut text = String::new();
    dumps.write(&value, 0, &mut text);
    Ok(text)
}

/// The blanks of a level: as many as the number says, or the text itself.
fn indented(indent: Option<Value>) -> Result<Option<String>, Error> {
    let Some(indent) = indent.filter(|indent| !indent.is_none() && !indent.is_undefined()) else {
        return Ok(None);
    };
    if let Some(text) = indent.as_str() {
        return Ok(Some(text.to_owned()));
    }
    let count = usize::try_from(indent)?;
    Ok(Some(" ".repeat(count.min(64))))
}

struct Dumps {
    indent: Option<String>,
    ensure_ascii: bool,
    sort_keys: bool,
    separators: Option<Vec<String>>,
}

impl Dumps {
    /// Between items, and between a name and its value.
    fn separators(&self) -> [&str; 2] {
        match self.separators.as_deref() {
            Some([item, name]) => [item, name],
            _ if self.indent.is_some() => [",", ": "],
            _ => [", ", ": "],
        }
    }

    fn line(&self, depth: usize, out: &mut String) {
        if let Some(indent) = &self.indent {
            out.push('\n');
            (0..depth).for_each(|_| out.push_str(indent));
        }
    }

    fn write(&self, value: &serde_json::Value, depth: usize, out: &mut String) {
        use serde_json::Value as V;
        let [between, behind_name] = self.separators();
        match value {
            V::Array(items) if !items.is_empty() => {
                out.push('[');
                for (number, item) in items.iter().enumerate() {
                    out.push_str(if number > 0 { between } else { "" });
                    self.line(depth + 1, out);
                    self.write(item, depth + 1, out);
                }
                self.line(depth, out);
                out.push(']');
            }
            V::Object(fields) if !fields.is_empty() => {
                let mut fields: Vec<_> = fields.iter().collect();
                if self.sort_keys {
                    fields.sort_by(|a, b| a.0.cmp(b.0));
                }
                out.push('{');
                for (number, (name, item)) in fields.into_iter().enumerate() {
                    out.push_str(if number > 0 { between } else { "" });
                    self.line(depth + 1, out);
                    self.text(name, out);
                    out.push_str(behind_name);
                    self.write(item, depth + 1, out);
                }
                self.line(depth, out);
                out.push('}');
            }
            V::String(text) => self.text(text, out),
            V::Number(number) if number.is_f64() => {
                out.push_str(&float(number.as_f64().unwrap_or_default()));
            }
            other => out.push_str(&other.to_string()),
        }
    }

    fn text(&self, text: &str, out: &mut String) {
        let json = serde_json::Value::from(text).to_string();
        if !self.ensure_ascii {
            // Python leaves this character as it is, and so does serde_json.
            out.push_str(&json);
            return;
        }
        for c in json.chars() {
            if c.is_ascii() {
                out.push(c);
                continue;
            }
            let mut units = [0; 2];
            for unit in c.encode_utf16(&mut units) {
                let _ = write!(out, "\\u{unit:04x}");
            }
        }
    }
}

/// A number as Python writes it: with an exponent of two digits below 1e-4 and from 1e16 on.
fn float(number: f64) -> String {
    let size = number.abs();
    if size != 0.0 && !(1e-4..1e16).contains(&size) {
        let text = format!("{number:e}");
        let (digits, exponent) = text.split_once('e').unwrap_or((&text, "0"));
        let (sign, exponent) = match exponent.strip_prefix('-') {
            Some(exponent) => ('-', exponent),
            None => ('+', exponent),
        };
        return format!("{digits}e{sign}{exponent:0>2}");
    }
    let text = number.to_string();
    if text.contains('.') {
        text
    } else {
        format!("{text}.0")
    }
}
