//! What templates get from Python: `json.dumps`, how values print, and which ones are sequences.

use std::fmt::Write as _;

use minijinja::{
    Error, ErrorKind, Output, State, escape_formatter,
    value::{Kwargs, Rest, Tuple, Value, ValueKind},
};

/// The most bytes of a value that is printed, as a list may hold another one many times.
const MAX_BYTES: usize = 64 << 20;

/// The most lists and tables within each other.
const MAX_DEPTH: usize = 200;

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
    if value.as_str().is_some() {
        return escape_formatter(out, state, value);
    }
    let text = text(value)?;
    state.consume_fuel(text.len() as u64 / 64)?;
    Ok(out.write_str(&text)?)
}

/// The operator `~`.
#[expect(
    clippy::needless_pass_by_value,
    reason = "the engine gives arguments so"
)]
pub(super) fn concat(values: Rest<Value>) -> Result<String, Error> {
    values.iter().map(text).collect()
}

/// The filter `string`.
pub(super) fn string(value: &Value) -> Result<String, Error> {
    text(value)
}

/// The filter `join`.
#[expect(clippy::needless_pass_by_value, reason = "the engine gives options so")]
pub(super) fn join(
    value: &Value,
    between: Option<Value>,
    attribute: Option<Value>,
    options: Kwargs,
) -> Result<String, Error> {
    let between = between.map_or_else(|| options.get::<Option<Value>>("d"), |own| Ok(Some(own)))?;
    let attribute =
        attribute.map_or_else(|| options.get("attribute"), |attribute| Ok(Some(attribute)))?;
    options.assert_all_used()?;
    let between = between.as_ref().map_or_else(|| Ok(String::new()), text)?;
    let mut out = String::new();
    for (number, item) in value.try_iter()?.enumerate() {
        if number > 0 {
            out.push_str(&between);
        }
        let item = match &attribute {
            Some(path) => attribute_of(&item, path)?,
            None => item,
        };
        out.push_str(&text(&item)?);
        if out.len() > MAX_BYTES {
            return Err(too_large());
        }
    }
    Ok(out)
}

/// What a path of names and numbers leads to, as `function.name`.
fn attribute_of(value: &Value, path: &Value) -> Result<Value, Error> {
    let Some(path) = path.as_str() else {
        return value.get_item(path);
    };
    path.split('.').try_fold(value.clone(), |value, name| {
        let key = name
            .parse::<u64>()
            .map_or_else(|_| name.into(), Value::from);
        value.get_item(&key)
    })
}

fn too_large() -> Error {
    let reason = format!("a value takes more than {MAX_BYTES} bytes as a text");
    Error::new(ErrorKind::InvalidOperation, reason)
}

/// A value as `str` of Python.
pub(super) fn text(value: &Value) -> Result<String, Error> {
    if let Some(text) = value.as_str() {
        return Ok(text.to_owned());
    }
    let mut out = String::new();
    write_repr(value, 0, &mut out)?;
    Ok(out)
}

/// A value as `repr` of Python.
pub(super) fn repr(value: &Value) -> Result<String, Error> {
    let mut out = String::new();
    write_repr(value, 0, &mut out)?;
    Ok(out)
}

fn write_repr(value: &Value, depth: usize, out: &mut String) -> Result<(), Error> {
    if out.len() > MAX_BYTES {
        return Err(too_large());
    }
    if depth > MAX_DEPTH {
        let reason = format!("a value has more than {MAX_DEPTH} lists within each other");
        return Err(Error::new(ErrorKind::InvalidOperation, reason));
    }
    match value.kind() {
        ValueKind::String => write_text(value.as_str().unwrap_or_default(), out),
        ValueKind::Number if !value.is_integer() => {
            out.push_str(&float(f64::try_from(value.clone())?));
        }
        ValueKind::Undefined if depth > 0 => out.push_str("Undefined"),
        ValueKind::Seq | ValueKind::Iterable if value.len().is_some() => {
            write_items(value, depth, out)?;
        }
        ValueKind::Map => {
            out.push('{');
            for (number, key) in value.try_iter()?.enumerate() {
                out.push_str(if number > 0 { ", " } else { "" });
                write_repr(&key, depth + 1, out)?;
                out.push_str(": ");
                write_repr(&value.get_item(&key)?, depth + 1, out)?;
            }
            out.push('}');
        }
        _ => out.push_str(&value.to_string()),
    }
    Ok(())
}

/// Writes a list, or a tuple.
fn write_items(value: &Value, depth: usize, out: &mut String) -> Result<(), Error> {
    let is_tuple = value.downcast_object_ref::<Tuple>().is_some();
    out.push(if is_tuple { '(' } else { '[' });
    for (number, item) in value.try_iter()?.enumerate() {
        out.push_str(if number > 0 { ", " } else { "" });
        write_repr(&item, depth + 1, out)?;
    }
    if is_tuple && value.len() == Some(1) {
        out.push(',');
    }
    out.push(if is_tuple { ')' } else { ']' });
    Ok(())
}

/// Writes a text in quotes, with escapes for the characters that Python does not print.
fn write_text(text: &str, out: &mut String) {
    let quote = match (text.contains('\''), text.contains('"')) {
        (true, false) => '"',
        _ => '\'',
    };
    out.push(quote);
    for c in text.chars() {
        let code = u32::from(c);
        let written = match c {
            '\n' => "\\n".to_owned(),
            '\r' => "\\r".to_owned(),
            '\t' => "\\t".to_owned(),
            '\\' => "\\\\".to_owned(),
            _ if c == quote => format!("\\{c}"),
            _ if is_printable(c) => c.to_string(),
            _ if code < 0x100 => format!("\\x{code:02x}"),
            _ if code < 0x1_0000 => format!("\\u{code:04x}"),
            _ => format!("\\U{code:08x}"),
        };
        out.push_str(&written);
    }
    out.push(quote);
}

/// Whether Python prints a character. Rust escapes the same ones, and at the start of a text those
/// too that join the character before.
fn is_printable(c: char) -> bool {
    let text = [' ', c].iter().collect::<String>();
    matches!(c, '\'' | '"') || text.escape_debug().count() == 2
}

/// `tojson` as transformers has it:
/// `tojson(x, ensure_ascii=False, indent=None, separators=None, sort_keys=False)`.
#[expect(clippy::needless_pass_by_value, reason = "the engine gives options so")]
pub(super) fn tojson(
    value: &Value,
    in_turn: Rest<Value>,
    options: Kwargs,
) -> Result<String, Error> {
    const NAMES: [&str; 4] = ["ensure_ascii", "indent", "separators", "sort_keys"];
    let [mut ensure_ascii, mut indent, mut separators, mut sort_keys] = [const { None }; 4];
    let found = [
        &mut ensure_ascii,
        &mut indent,
        &mut separators,
        &mut sort_keys,
    ];
    if in_turn.len() > NAMES.len() {
        return Err(Error::from(ErrorKind::TooManyArguments));
    }
    for (number, (name, found)) in NAMES.into_iter().zip(found).enumerate() {
        *found = match in_turn.get(number) {
            Some(given) => Some(given.clone()),
            None => options.get::<Option<Value>>(name)?,
        };
    }
    options.assert_all_used()?;
    let is_true = |given: Option<Value>| given.is_some_and(|given| given.is_true());
    let dumps = Dumps {
        indent: indented(indent)?,
        ensure_ascii: is_true(ensure_ascii),
        sort_keys: is_true(sort_keys),
        separators: separators.map(|given| texts(&given)).transpose()?,
    };
    let value = serde_json::to_value(value)
        .map_err(|error| Error::new(ErrorKind::BadSerialization, error.to_string()))?;
    let mut text = String::new();
    dumps.write(&value, 0, &mut text);
    Ok(text)
}

/// The separators between items, and between a name and its value; none for the usual ones.
fn texts(separators: &Value) -> Result<Vec<String>, Error> {
    let given = separators.try_iter().into_iter().flatten();
    given.map(|item| text(&item)).collect()
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
    if !number.is_finite() {
        return number.to_string().to_lowercase();
    }
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
