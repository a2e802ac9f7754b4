//! What a configuration value may be: the types of keys, and how each is read from a file or from
//! text.

use std::{
    fmt::Display,
    path::{Path, PathBuf},
};

use super::{
    range::{Number, Range},
    refusal::Refusal,
    strict,
};
use serde_json::Value;

/// A type that a configuration key can have.
pub(crate) trait Setting: Sized {
    /// Whether a bare `--key` on the command line means true.
    const IS_FLAG: bool = false;

    /// Whether a value may have several items.
    const IS_LIST: bool = false;

    /// What a key with this range accepts, with its article: `an integer of at least 1`.
    fn expected(range: Range) -> String;

    /// The number in the value that lies outside the range, if there is one, as messages show it.
    fn outside(&self, range: Range) -> Option<String> {
        let _ = range;
        None
    }

    /// Reads a typed value, as files give it: where a type does not say otherwise, a text.
    fn from_value(value: &Value) -> Result<Self, Refusal> {
        Self::from_text(value.as_str().ok_or(Refusal::Type)?)
    }

    /// Reads text, as the environment and the command line give it: where a type does not say
    /// otherwise, a value. A type has at least one of the two.
    fn from_text(text: &str) -> Result<Self, Refusal> {
        let value = strict::parse_text(text)?;
        Self::from_value(&value)
    }

    /// The value as data; `from_value` reads it back.
    fn to_value(&self) -> Value;

    /// Makes a path that is relative to `base`, the folder of the file that gave it, absolute.
    fn rebase(&mut self, base: &Path) {
        let _ = base;
    }
}

impl Setting for bool {
    const IS_FLAG: bool = true;

    fn expected(_: Range) -> String {
        "true or false".into()
    }

    fn from_value(value: &Value) -> Result<Self, Refusal> {
        value.as_bool().ok_or(Refusal::Type)
    }

    fn from_text(text: &str) -> Result<Self, Refusal> {
        match text.to_ascii_lowercase().as_str() {
            "true" => Ok(true),
            "false" => Ok(false),
            _ => Err(Refusal::Type),
        }
    }

    fn to_value(&self) -> Value {
        Value::Bool(*self)
    }
}

/// The largest magnitude up to which every whole number is an exact `f64`.
const LARGEST_EXACT: f64 = 9_007_199_254_740_992.0;

/// A number as a whole one: integers as they are, floats when they are integral (`5e8`).
pub(crate) fn whole(value: &Value) -> Option<i128> {
    if let Some(number) = value.as_u64() {
        return Some(i128::from(number));
    }
    if let Some(number) = value.as_i64() {
        return Some(i128::from(number));
    }
    let number = value.as_f64()?;
    (number.fract() == 0.0 && number.abs() <= LARGEST_EXACT).then_some(number as i128)
}

macro_rules! integer_setting {
    ($($type:ty: $expected:literal, $beyond:expr;)+) => {$(
        impl Setting for $type {
            fn expected(range: Range) -> String {
                if range == Range::ANY {
                    $expected.into()
                } else {
                    range.of("an integer")
                }
            }

            fn outside(&self, range: Range) -> Option<String> {
                let number = self.to_value().as_f64();
                let is_inside = number.is_some_and(|number| range.contains(number));
                (!is_inside).then(|| self.to_string())
            }

            fn from_value(value: &Value) -> Result<Self, Refusal> {
                let number = whole(value).and_then(|number| Self::try_from(number).ok());
                // A value that is no number is less than every number.
                let is_beyond = || value.as_f64() >= Self::MAX.to_value().as_f64();
                number.ok_or_else(|| if is_beyond() { $beyond } else { Refusal::Type })
            }

            fn to_value(&self) -> Value {
                Value::from(*self)
            }
        }
    )+};
}

integer_setting!(
    usize: "an integer of at least 0", beyond(usize::MAX);
    // What is expected has the largest number.
    u32: "an integer from 0 to 4294967295", Refusal::Type;
    i64: "an integer", beyond(i64::MAX);
);

fn beyond(most: impl Display) -> Refusal {
    let most = most.to_string();
    Refusal::Beyond { most }
}

/// Seeds are limited to what a TOML file can hold.
impl Setting for u64 {
    fn expected(_: Range) -> String {
        format!("an integer from 0 to {}", i64::MAX)
    }

    fn from_value(value: &Value) -> Result<Self, Refusal> {
        // What is expected has the largest number.
        let number = i64::from_value(value).map_err(|_| Refusal::Type)?;
        number.try_into().map_err(|_| Refusal::Type)
    }

    fn to_value(&self) -> Value {
        Value::from(*self)
    }
}

impl Setting for f64 {
    fn expected(range: Range) -> String {
        range.of("a number")
    }

    fn outside(&self, range: Range) -> Option<String> {
        (!range.contains(*self)).then(|| Number(*self).to_string())
    }

    fn from_value(value: &Value) -> Result<Self, Refusal> {
        value.as_f64().ok_or(Refusal::Type)
    }

    fn from_text(text: &str) -> Result<Self, Refusal> {
        match text.parse::<f64>() {
            Ok(number) if number.is_finite() => Ok(number),
            _ => Err(Refusal::Type),
        }
    }

    fn to_value(&self) -> Value {
        Value::from(*self)
    }
}

impl Setting for String {
    fn expected(_: Range) -> String {
        "a string".into()
    }

    fn from_text(text: &str) -> Result<Self, Refusal> {
        Ok(text.into())
    }

    fn to_value(&self) -> Value {
        Value::String(self.clone())
    }
}

impl Setting for PathBuf {
    fn expected(_: Range) -> String {
        "a path".into()
    }

    fn from_text(text: &str) -> Result<Self, Refusal> {
        Ok(text.into())
    }

    fn to_value(&self) -> Value {
        Value::String(self.to_string_lossy().into_owned())
    }
}

/// A file or folder that a run reads: relative to the configuration file that names it, or to the
/// current folder when the environment or the command line does.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct InputPath(pub PathBuf);

impl Setting for InputPath {
    fn expected(range: Range) -> String {
        PathBuf::expected(range)
    }

    fn from_text(text: &str) -> Result<Self, Refusal> {
        PathBuf::from_text(text).map(Self)
    }

    fn to_value(&self) -> Value {
        self.0.to_value()
    }

    fn rebase(&mut self, base: &Path) {
        self.0 = absolute(base, &self.0);
    }
}

/// `path` seen from `base`, as an absolute path; it need not exist.
pub(crate) fn absolute(base: &Path, path: &Path) -> PathBuf {
    let joined = base.join(path);
    // Fails for an empty path and without a current folder: opening the path then says so.
    std::path::absolute(&joined).unwrap_or(joined)
}

/// Whether text stands for the absent value.
fn is_none(text: &str) -> bool {
    ["none", "null", "unset"]
        .iter()
        .any(|word| text.eq_ignore_ascii_case(word))
}

impl<T: Setting> Setting for Option<T> {
    const IS_FLAG: bool = T::IS_FLAG;
    const IS_LIST: bool = T::IS_LIST;

    fn expected(range: Range) -> String {
        format!("{} or none", T::expected(range))
    }

    fn outside(&self, range: Range) -> Option<String> {
        self.as_ref().and_then(|value| value.outside(range))
    }

    fn from_value(value: &Value) -> Result<Self, Refusal> {
        match value {
            Value::Null => Ok(None),
            Value::String(text) if is_none(text) => Ok(None),
            _ => T::from_value(value).map(Some),
        }
    }

    fn from_text(text: &str) -> Result<Self, Refusal> {
        if is_none(text) {
            Ok(None)
        } else {
            T::from_text(text).map(Some)
        }
    }

    fn to_value(&self) -> Value {
        self.as_ref().map_or(Value::Null, T::to_value)
    }

    fn rebase(&mut self, base: &Path) {
        if let Some(value) = self {
            value.rebase(base);
        }
    }
}

/// Text may give a list as JSON (`["a", "b"]`, `[1, 2]`) or separated by commas (`a,b`).
impl<T: Setting> Setting for Vec<T> {
    const IS_LIST: bool = true;

    fn expected(range: Range) -> String {
        format!("a list whose items are each {}", T::expected(range))
    }

    fn outside(&self, range: Range) -> Option<String> {
        self.iter().find_map(|item| item.outside(range))
    }

    fn from_value(value: &Value) -> Result<Self, Refusal> {
        value
            .as_array()
            .ok_or(Refusal::Type)?
            .iter()
            .map(T::from_value)
            .collect()
    }

    fn from_text(text: &str) -> Result<Self, Refusal> {
        let text = text.trim();
        if text.starts_with('[') {
            let value = strict::parse_text(text)?;
            return Self::from_value(&value);
        }
        text.split(',')
            .map(str::trim)
            .filter(|item| !item.is_empty())
            .map(T::from_text)
            .collect()
    }

    fn to_value(&self) -> Value {
        self.iter().map(T::to_value).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn integral_floats_are_integers_and_others_are_not() {
        assert_eq!(usize::from_value(&json!(5e8)), Ok(500_000_000));
        assert_eq!(usize::from_text("5e8"), Ok(500_000_000));
        assert_eq!(i64::from_value(&json!(-1.0)), Ok(-1));
        assert_eq!(usize::from_value(&json!(1.5)), Err(Refusal::Type));
        assert_eq!(usize::from_value(&json!(-1)), Err(Refusal::Type));
        assert_eq!(usize::from_value(&json!("2")), Err(Refusal::Type));
        assert_eq!(u64::from_value(&json!(i64::MAX)), Ok(i64::MAX as u64));
        assert_eq!(u64::from_value(&json!(u64::MAX)), Err(Refusal::Type));
        assert_eq!(usize::from_value(&json!(1e300)), Err(beyond(usize::MAX)));
        assert_eq!(i64::from_value(&json!(u64::MAX)), Err(beyond(i64::MAX)));
        assert_eq!(i64::from_value(&json!(-1e300)), Err(Refusal::Type));
    }

    #[test]
    fn lists_are_read_from_json_and_from_commas() {
        let expected = Ok(vec!["c_attn".to_owned(), "c_fc".to_owned()]);
        assert_eq!(Vec::from_text("c_attn, c_fc"), expected);
        assert_eq!(Vec::from_text(r#"["c_attn","c_fc"]"#), expected);
        assert_eq!(Vec::<usize>::from_text("0,6,12"), Ok(vec![0, 6, 12]));
        assert_eq!(Vec::<usize>::from_text("0,six"), Err(Refusal::Type));
    }

    #[test]
    fn none_and_null_are_the_absent_value() {
        for text in ["none", "None", "null", "unset"] {
            assert_eq!(Option::<usize>::from_text(text), Ok(None));
            assert_eq!(Option::<String>::from_value(&json!(text)), Ok(None));
        }
        assert_eq!(Option::<usize>::from_value(&Value::Null), Ok(None));
        assert_eq!(usize::from_value(&Value::Null), Err(Refusal::Type));
    }

    #[test]
    fn text_that_is_no_finite_number_is_refused() {
        for text in ["nan", "inf", "1e999", "fast", ""] {
            assert_eq!(f64::from_text(text), Err(Refusal::Type), "{text}");
        }
    }
}
