//! Numbers that may also be a word, a list or a table.

use std::{collections::BTreeMap, num::NonZeroUsize};

use serde_json::Value;

use super::{range::Range, refusal::Refusal, setting::Setting};

/// Divisor of the logits before a token is drawn.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Temperature(pub f64);

/// The temperature that takes the likeliest token instead of drawing one.
const GREEDY: &str = "greedy";

impl Setting for Temperature {
    fn expected(range: Range) -> String {
        format!(r#"{} or "{GREEDY}""#, f64::expected(range))
    }

    fn outside(&self, range: Range) -> Option<String> {
        self.0.outside(range)
    }

    fn from_value(value: &Value) -> Result<Self, Refusal> {
        match value.as_str() {
            Some(GREEDY) => Ok(Self(0.0)),
            _ => f64::from_value(value).map(Self),
        }
    }

    fn from_text(text: &str) -> Result<Self, Refusal> {
        match text {
            GREEDY => Ok(Self(0.0)),
            number => f64::from_text(number).map(Self),
        }
    }

    fn to_value(&self) -> Value {
        self.0.to_value()
    }
}

/// Tokens: one number or a list of them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TokenIds(pub Vec<u32>);

impl Setting for TokenIds {
    const IS_LIST: bool = true;

    fn expected(range: Range) -> String {
        format!("{} or a list of them", u32::expected(range))
    }

    fn from_value(value: &Value) -> Result<Self, Refusal> {
        match value {
            Value::Array(_) => Vec::from_value(value).map(Self),
            token => Ok(Self(vec![u32::from_value(token)?])),
        }
    }

    fn from_text(text: &str) -> Result<Self, Refusal> {
        Vec::from_text(text).map(Self)
    }

    fn to_value(&self) -> Value {
        match self.0.as_slice() {
            [token] => Value::from(*token),
            tokens => Value::from(tokens),
        }
    }
}

/// How many compute threads each rank has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ThreadsPerRank {
    /// The machine's cores divided by the ranks on it.
    Auto,
    /// A given number.
    Count(NonZeroUsize),
}

/// Upper bound on compute threads: more than any machine has cores is a typing mistake.
const MAX_THREADS: usize = 1024;

impl Setting for ThreadsPerRank {
    fn expected(_: Range) -> String {
        format!(r#""auto" or an integer of 1 to {MAX_THREADS}"#)
    }

    fn from_value(value: &Value) -> Result<Self, Refusal> {
        if value.as_str() == Some("auto") {
            return Ok(Self::Auto);
        }
        NonZeroUsize::new(usize::from_value(value)?)
            .filter(|count| count.get() <= MAX_THREADS)
            .map(Self::Count)
            .ok_or(Refusal::Type)
    }

    fn from_text(text: &str) -> Result<Self, Refusal> {
        match text {
            "auto" => Ok(Self::Auto),
            _ => Self::from_value(&usize::from_text(text)?.to_value()),
        }
    }

    fn to_value(&self) -> Value {
        match self {
            Self::Auto => Value::from("auto"),
            Self::Count(count) => Value::from(count.get()),
        }
    }
}

/// Shard boundaries of the stages, as integers in a list, in text (`"0,6,12"`), or in a list of
/// text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Boundaries(pub Vec<usize>);

impl Setting for Boundaries {
    const IS_LIST: bool = true;

    fn expected(_: Range) -> String {
        r#"a list of integers, such as [0, 6, 12] or "0,6,12""#.into()
    }

    fn from_value(value: &Value) -> Result<Self, Refusal> {
        let mut boundaries = Vec::new();
        for item in value.as_array().unwrap_or(&vec![value.clone()]) {
            match item {
                Value::String(text) => boundaries.extend(Vec::<usize>::from_text(text)?),
                _ if value.is_array() => boundaries.push(usize::from_value(item)?),
                _ => return Err(Refusal::Type),
            }
        }
        Ok(Self(boundaries))
    }

    fn from_text(text: &str) -> Result<Self, Refusal> {
        match serde_json::from_str(text) {
            Ok(list @ Value::Array(_)) => Self::from_value(&list),
            _ => Self::from_value(&Value::from(text)),
        }
    }

    fn to_value(&self) -> Value {
        self.0.to_value()
    }
}

/// Longest sequences: of the model's input, and of its decoder's output where that has its own
/// length.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SeqLength {
    /// Tokens of an input.
    pub input: usize,
    /// Tokens of the decoder's output.
    pub target: Option<usize>,
}

impl From<usize> for SeqLength {
    fn from(input: usize) -> Self {
        Self {
            input,
            target: None,
        }
    }
}

impl Setting for SeqLength {
    fn expected(range: Range) -> String {
        let one = usize::expected(range);
        format!("{one} or a pair of them, such as [512, 114]")
    }

    fn outside(&self, range: Range) -> Option<String> {
        let target = || self.target.outside(range);
        self.input.outside(range).or_else(target)
    }

    fn from_value(value: &Value) -> Result<Self, Refusal> {
        let of = |lengths: &[usize]| match *lengths {
            [input] => Ok(Self {
                input,
                target: None,
            }),
            [input, target] => Ok(Self {
                input,
                target: Some(target),
            }),
            _ => Err(Refusal::Type),
        };
        match value {
            Value::Array(_) => of(&Vec::<usize>::from_value(value)?),
            _ => of(&[usize::from_value(value)?]),
        }
    }

    fn from_text(text: &str) -> Result<Self, Refusal> {
        match serde_json::from_str(text) {
            Ok(value) => Self::from_value(&value),
            Err(_) => Self::from_value(&Vec::<usize>::from_text(text)?.to_value()),
        }
    }

    fn to_value(&self) -> Value {
        match self.target {
            Some(target) => vec![self.input, target].to_value(),
            None => self.input.to_value(),
        }
    }
}

/// Fractions of the stages, as one number, a list, or text (`"0.6,0.4"`).
#[derive(Debug, Clone, PartialEq)]
pub struct Ratios(pub Vec<f64>);

impl Setting for Ratios {
    const IS_LIST: bool = true;

    fn expected(range: Range) -> String {
        let one = f64::expected(range);
        format!("{one} or a list of such numbers, such as 0.6 or [0.6, 0.4]")
    }

    fn outside(&self, range: Range) -> Option<String> {
        self.0.outside(range)
    }

    fn from_value(value: &Value) -> Result<Self, Refusal> {
        match value {
            Value::Array(_) => Vec::from_value(value).map(Self),
            Value::String(text) => Self::from_text(text),
            _ => Ok(Self(vec![f64::from_value(value)?])),
        }
    }

    fn from_text(text: &str) -> Result<Self, Refusal> {
        Vec::from_text(text).map(Self)
    }

    fn to_value(&self) -> Value {
        match &self.0[..] {
            [one] => one.to_value(),
            list => list.to_vec().to_value(),
        }
    }
}

/// Factors of the learning rate by parts of parameters' names.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct LrScales(pub BTreeMap<String, f64>);

impl LrScales {
    /// The factor of a parameter.
    pub(crate) fn of(&self, param: &str) -> f64 {
        let named = self
            .0
            .iter()
            .filter(|(part, _)| param.contains(part.as_str()));
        named
            .max_by_key(|(part, _)| part.len())
            .map_or(1.0, |(_, scale)| *scale)
    }
}

impl Setting for LrScales {
    fn expected(_: Range) -> String {
        "a table of numbers from 0 to 1e6 by parts of names".to_owned()
    }

    fn from_value(value: &Value) -> Result<Self, Refusal> {
        let table = value.as_object().ok_or(Refusal::Type)?;
        let scale = |(part, value): (&String, &Value)| {
            let scale = f64::from_value(value)?;
            if (0.0..=1e6).contains(&scale) {
                Ok((part.clone(), scale))
            } else {
                Err(Refusal::Type)
            }
        };
        table.iter().map(scale).collect::<Result<_, _>>().map(Self)
    }

    fn to_value(&self) -> Value {
        let scales = self.0.iter();
        Value::Object(
            scales
                .map(|(part, scale)| (part.clone(), scale.to_value()))
                .collect(),
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn the_longest_part_of_a_name_gives_the_learning_rate() {
        let scales = LrScales::from_text(r#"{"h": 2, "h.1": 0.5}"#).unwrap();
        assert_eq!(scales.to_value(), json!({"h": 2.0, "h.1": 0.5}));
        let of = ["h.1.w", "h.0.w", "wte"].map(|name| scales.of(name).to_bits());
        assert_eq!(of, [0.5_f64, 2.0, 1.0].map(f64::to_bits));
        for wrong in [r#"{"h": -1}"#, r#"{"h": "fast"}"#, "2", r#"{"h": 1e7}"#] {
            assert_eq!(LrScales::from_text(wrong), Err(Refusal::Type), "{wrong}");
        }
    }

    #[test]
    fn ratios_are_one_or_many() {
        assert_eq!(Ratios::from_text("0.6"), Ok(Ratios(vec![0.6])));
        assert_eq!(Ratios::from_value(&json!(1)), Ok(Ratios(vec![1.0])));
        assert_eq!(Ratios(vec![0.6]).to_value(), json!(0.6));
        let two = Ratios(vec![0.6, 0.25]);
        assert_eq!(Ratios::from_text("0.6,0.25"), Ok(two.clone()));
        assert_eq!(Ratios::from_text("[0.6, 0.25]"), Ok(two.clone()));
        assert_eq!(Ratios::from_value(&json!([0.6, 0.25])), Ok(two.clone()));
        assert_eq!(two.to_value(), json!([0.6, 0.25]));
        assert_eq!(Ratios::from_text("most"), Err(Refusal::Type));
    }

    #[test]
    fn a_temperature_is_a_number_or_greedy() {
        for (text, value) in [
            ("greedy", json!("greedy")),
            ("0", json!(0)),
            ("0.7", json!(0.7)),
        ] {
            let temperature = Temperature::from_text(text);
            assert_eq!(temperature, Temperature::from_value(&value));
            let number = text.parse().unwrap_or_default();
            assert_eq!(temperature, Ok(Temperature(number)));
        }
        assert_eq!(Temperature::from_text("cold"), Err(Refusal::Type));
        assert_eq!(Temperature::from_value(&json!("0.7")), Err(Refusal::Type));
    }

    #[test]
    fn boundaries_have_three_spellings() {
        let expected = Ok(Boundaries(vec![0, 6, 12]));
        assert_eq!(Boundaries::from_value(&json!([0, 6.0, 12])), expected);
        assert_eq!(Boundaries::from_value(&json!("0,6,12")), expected);
        assert_eq!(Boundaries::from_value(&json!(["0, 6,12"])), expected);
        assert_eq!(Boundaries::from_text("[0,6,12]"), expected);
        assert_eq!(Boundaries::from_text("0,6,12"), expected);
        assert_eq!(Boundaries::from_text("0;6"), Err(Refusal::Type));
        assert_eq!(Boundaries::from_value(&json!(6)), Err(Refusal::Type));
    }

    #[test]
    fn a_length_is_one_number_or_two() {
        let of = |input, target| Ok(SeqLength { input, target });
        assert_eq!(SeqLength::from_text("512"), of(512, None));
        assert_eq!(SeqLength::from_text("512,114"), of(512, Some(114)));
        assert_eq!(SeqLength::from_text("[512, 114]"), of(512, Some(114)));
        for wrong in ["1,2,3", "[]", "x", "-1"] {
            assert_eq!(SeqLength::from_text(wrong), Err(Refusal::Type), "{wrong}");
        }
        for text in ["512", "512,114"] {
            let length = SeqLength::from_text(text).unwrap();
            assert_eq!(SeqLength::from_value(&length.to_value()), Ok(length));
        }
    }
}
