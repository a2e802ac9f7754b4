//! Texts with places for values: Python's operator `%`, the filter `format`, and the bounds of
//! `str.format`.

use minijinja::{
    Error, ErrorKind, State,
    formatting::{FormatStyle, format},
    value::{Kwargs, Rest, Tuple, Value, ValueKind},
};

use super::python;

/// The most characters that the widths and precisions of one text may ask for.
const MAX_CHARS: usize = 1 << 24;

/// The values for the places of a text.
enum Given<'a> {
    /// One for each place, and perhaps further ones that a text need not have places for.
    InTurn(&'a [Value], bool),
    /// A table, whose values places name.
    Named(&'a Value),
}

/// The operator `%`: a text with values, or the rest of a division.
pub(super) fn rem(state: &State<'_, '_>, left: &Value, right: &Value) -> Result<Value, Error> {
    let Some(text) = left.as_str() else {
        return rest(state, left, right);
    };
    let one = std::slice::from_ref(right);
    let filled = if let Some(values) = right.downcast_object_ref::<Tuple>() {
        filled(text, &Given::InTurn(values, false))
    } else if right.kind() == ValueKind::Map {
        filled(text, &Given::Named(right))
    } else {
        filled(text, &Given::InTurn(one, right.kind() == ValueKind::Seq))
    };
    filled.map(Value::from)
}

/// The rest of a division, as the engine has it.
fn rest(state: &State<'_, '_>, left: &Value, right: &Value) -> Result<Value, Error> {
    let whole = |value: &Value| {
        let is_whole = value.kind() == ValueKind::Number && value.is_integer();
        i64::try_from(value.clone()).ok().filter(|_| is_whole)
    };
    // The usual case, which needs no code.
    if let (Some(left), Some(right @ 1..)) = (whole(left), whole(right)) {
        return Ok(left.rem_euclid(right).into());
    }
    let divided = state.env().compile_expression("a % b");
    let names = Value::from_pairs([("a", left.clone()), ("b", right.clone())]);
    let rest = divided.and_then(|divided| divided.eval(names));
    // The place of the failure is that in the template.
    rest.map_err(|error| Error::new(error.kind(), error.detail().unwrap_or_default().to_owned()))
}

/// The filter `format`.
#[expect(
    clippy::needless_pass_by_value,
    reason = "the engine gives arguments so"
)]
pub(super) fn filter(text: &str, values: Rest<Value>, named: Kwargs) -> Result<String, Error> {
    let names: Vec<_> = named.args().collect();
    if names.is_empty() {
        return filled(text, &Given::InTurn(&values, false));
    }
    if !values.is_empty() {
        let reason = "can't handle positional and keyword arguments at the same time";
        return Err(wrong(reason.to_owned()));
    }
    let pairs = names
        .into_iter()
        .map(|name| Ok((name, named.get::<Value>(name)?)));
    let table = Value::from_pairs(pairs.collect::<Result<Vec<_>, Error>>()?);
    filled(text, &Given::Named(&table))
}

fn wrong(reason: String) -> Error {
    Error::new(ErrorKind::InvalidOperation, reason)
}

/// A text with values in its places.
fn filled(text: &str, given: &Given<'_>) -> Result<String, Error> {
    let (mut out, mut rest, mut used, mut asked) = (String::new(), text, 0, 0);
    while let Some(at) = rest.find('%') {
        out.push_str(&rest[..at]);
        rest = &rest[at + 1..];
        if let Some(behind) = rest.strip_prefix('%') {
            out.push('%');
            rest = behind;
            continue;
        }
        let (place, behind) = Place::of(rest)?;
        bounded(&mut asked, place.width.unwrap_or(0))?;
        bounded(&mut asked, place.precision.unwrap_or(0))?;
        let value = match (given, place.name) {
            (Given::Named(table), Some(name)) => table.get_item(&name.into())?,
            (Given::InTurn(..), Some(_)) => {
                return Err(wrong("format requires a mapping".to_owned()));
            }
            (Given::Named(table), None) if used == 0 => (*table).clone(),
            (Given::InTurn(values, _), None) if used < values.len() => values[used].clone(),
            _ => return Err(wrong("not enough arguments for format string".to_owned())),
        };
        used += usize::from(place.name.is_none());
        out.push_str(&place.filled(&value)?);
        rest = behind;
    }
    out.push_str(rest);
    match given {
        Given::InTurn(values, false) if used < values.len() => Err(wrong(
            "not all arguments converted during string formatting".to_owned(),
        )),
        _ => Ok(out),
    }
}

/// Counts characters that a text asks for, up to the bound.
fn bounded(asked: &mut usize, count: usize) -> Result<(), Error> {
    *asked = asked.saturating_add(count);
    if *asked <= MAX_CHARS {
        return Ok(());
    }
    Err(wrong(format!(
        "the widths and precisions of a format ask for {asked} characters, more than {MAX_CHARS}"
    )))
}

/// A place in a text for a value, as `%(name)-5.2f`.
struct Place<'a> {
    name: Option<&'a str>,
    flags: &'a str,
    width: Option<usize>,
    precision: Option<usize>,
    kind: char,
}

impl<'a> Place<'a> {
    /// A place whose `%` was read, and what follows it.
    fn of(text: &'a str) -> Result<(Self, &'a str), Error> {
        let (mut name, mut rest) = (None, text);
        if let Some(named) = text.strip_prefix('(') {
            let parts = named.split_once(')');
            let (key, behind) = parts.ok_or_else(|| wrong("incomplete format key".to_owned()))?;
            (name, rest) = (Some(key), behind);
        }
        let behind = rest.trim_start_matches(['#', '0', '-', ' ', '+']);
        let flags = &rest[..rest.len() - behind.len()];
        let (width, mut rest) = digits(behind);
        let mut precision = None;
        if let Some(behind) = rest.strip_prefix('.') {
            let (count, behind) = digits(behind);
            // A point alone is no digit after the point.
            (precision, rest) = (Some(count.unwrap_or(0)), behind);
        }
        rest = rest.strip_prefix(['h', 'l', 'L']).unwrap_or(rest);
        let kind = rest.chars().next();
        let kind = kind.ok_or_else(|| wrong("incomplete format".to_owned()))?;
        let place = Self {
            name,
            flags,
            width,
            precision,
            kind,
        };
        Ok((place, &rest[kind.len_utf8()..]))
    }

    /// A value as this place asks for it.
    fn filled(&self, value: &Value) -> Result<String, Error> {
        let text = match self.kind {
            's' => python::text(value)?,
            'r' => python::repr(value)?,
            _ => return self.number(value),
        };
        let text: String = match self.precision {
            Some(most) => text.chars().take(most).collect(),
            None => text,
        };
        let missing = self.width.unwrap_or(0).saturating_sub(text.chars().count());
        let blanks = " ".repeat(missing);
        Ok(if self.flags.contains('-') {
            text + &blanks
        } else {
            blanks + &text
        })
    }

    /// A value as a number, or as one character.
    fn number(&self, value: &Value) -> Result<String, Error> {
        let kind = match self.kind {
            'i' | 'u' => 'd',
            kind => kind,
        };
        if self.precision.is_some() && matches!(kind, 'd' | 'x' | 'X' | 'o') {
            let reason =
                format!("a whole number with a precision, as in %.3{kind}, is not known here");
            return Err(wrong(reason));
        }
        let width = self.width.map_or(String::new(), |width| width.to_string());
        let precision = self
            .precision
            .map_or(String::new(), |most| format!(".{most}"));
        let spec = format!("%{}{width}{precision}{kind}", self.flags);
        let whole = match f64::try_from(value.clone()) {
            // Python leaves the fraction out. Numbers of this size are whole, and fit.
            Ok(number) if kind == 'd' && !value.is_integer() && number.abs() < 1e38 => {
                Some(Value::from(number.trunc() as i128))
            }
            _ => None,
        };
        format(
            FormatStyle::Printf,
            &spec,
            &[whole.unwrap_or_else(|| value.clone())],
        )
    }
}

/// The number that a text begins with, and what follows it.
fn digits(text: &str) -> (Option<usize>, &str) {
    let rest = text.trim_start_matches(|c: char| c.is_ascii_digit());
    let digits = &text[..text.len() - rest.len()];
    // More digits than fit ask for more than any bound.
    let number = (!digits.is_empty()).then(|| digits.parse().unwrap_or(usize::MAX));
    (number, rest)
}

/// The method `str.format`, within the bounds.
pub(super) fn str_format(text: &str, values: &[Value]) -> Result<Value, Error> {
    let (mut rest, mut asked, mut has_paths) = (text, 0, false);
    while let Some((_, field)) = rest.split_once('{') {
        if let Some(behind) = field.strip_prefix('{') {
            rest = behind;
            continue;
        }
        let (field, behind) = field.split_once('}').unwrap_or((field, ""));
        let (name, mut spec) = field.split_once(':').unwrap_or((field, ""));
        has_paths |= name.contains(['.', '[']);
        while let Some(at) = spec.find(|c: char| c.is_ascii_digit()) {
            let (count, behind) = digits(&spec[at..]);
            bounded(&mut asked, count.unwrap_or(0))?;
            spec = behind;
        }
        rest = behind;
    }
    if has_paths {
        return format(FormatStyle::StrFormat, text, values).map(Value::from);
    }
    let printed = values.iter().map(|value| match value.kind() {
        ValueKind::Seq | ValueKind::Iterable | ValueKind::Map if !value.is_kwargs() => {
            python::text(value).map(Value::from)
        }
        _ => Ok(value.clone()),
    });
    let printed = printed.collect::<Result<Vec<_>, _>>()?;
    format(FormatStyle::StrFormat, text, &printed).map(Value::from)
}
