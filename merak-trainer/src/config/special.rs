//! Keys whose values have a shape of their own.

use std::{
    collections::BTreeMap,
    ffi::OsStr,
    num::NonZeroUsize,
    path::{Path, PathBuf},
};

use merak_ckpt::{ADAPTER_NAMES, EarlyStopping, is_adapter_name};
use serde_json::{Map, Value, json};

use super::{
    range::Range,
    setting::{Refusal, Setting, absolute, whole},
    strict,
};

/// Name of an adapter, which becomes part of the names of tensors and of a folder.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AdapterName(pub String);

impl Setting for AdapterName {
    fn expected(_: Range) -> String {
        ADAPTER_NAMES.into()
    }

    fn from_value(value: &Value) -> Result<Self, Refusal> {
        Self::from_text(value.as_str().ok_or(Refusal::Type)?)
    }

    fn from_text(text: &str) -> Result<Self, Refusal> {
        let name = Some(text).filter(|text| is_adapter_name(text));
        name.map(|name| Self(name.into())).ok_or(Refusal::Type)
    }

    fn to_value(&self) -> Value {
        Value::from(self.0.as_str())
    }
}

/// Name of a metric of evaluations, which begins with `eval_`; that beginning may be left out where
/// it is given.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MetricName(pub String);

impl MetricName {
    /// What the names of evaluations' metrics begin with.
    pub(crate) const PREFIX: &str = "eval_";

    /// Whether more of it is better: not of a loss, whose name ends in `loss`, and not of its
    /// exponential.
    pub(crate) fn greater_is_better(&self) -> bool {
        !["loss", "perplexity"]
            .iter()
            .any(|end| self.0.ends_with(end))
    }
}

impl Setting for MetricName {
    fn expected(_: Range) -> String {
        "the name of a metric, such as eval_loss".into()
    }

    fn from_value(value: &Value) -> Result<Self, Refusal> {
        Self::from_text(value.as_str().ok_or(Refusal::Type)?)
    }

    fn from_text(text: &str) -> Result<Self, Refusal> {
        let name = text.strip_prefix(Self::PREFIX).unwrap_or(text);
        let is_name = !name.is_empty() && !name.contains(char::is_whitespace);
        let full = || Self(format!("{}{name}", Self::PREFIX));
        is_name.then(full).ok_or(Refusal::Type)
    }

    fn to_value(&self) -> Value {
        Value::from(self.0.as_str())
    }
}

/// How text becomes token ids.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum TokenizerSource {
    /// One token per byte, and one that ends a document.
    Bytes,
    /// A Hugging Face `tokenizer.json`; a file names it relative to itself.
    File(PathBuf),
    /// Byte-level BPE of at most this number of tokens, trained on the data.
    TrainBpe(usize),
}

impl TokenizerSource {
    /// The entry of a tokenizer that is to be trained.
    const TRAIN_BPE: &'static str = "train_bpe";

    /// Least tokens of byte-level BPE: the bytes and the end of a document.
    const LEAST_TOKENS: usize = 257;

    /// Most tokens that are trained: four times the largest vocabularies in use.
    const MOST_TOKENS: usize = 1 << 20;

    /// A tokenizer that is to be trained, from its table.
    fn from_table(table: &Map<String, Value>) -> Result<Self, Refusal> {
        if let Some(unknown) = table.keys().find(|name| *name != Self::TRAIN_BPE) {
            return Err(super::choice::refuse(
                unknown,
                [Self::TRAIN_BPE].into_iter(),
                &[],
            ));
        }
        let found = table.get(Self::TRAIN_BPE).ok_or(Refusal::Type)?;
        let tokens = whole(found).and_then(|tokens| usize::try_from(tokens).ok());
        let range = Self::LEAST_TOKENS..=Self::MOST_TOKENS;
        tokens
            .filter(|tokens| range.contains(tokens))
            .map(Self::TrainBpe)
            .ok_or_else(|| Refusal::Entry {
                name: Self::TRAIN_BPE,
                expected: format!("an integer from {} to {}", range.start(), range.end()),
                found: found.clone(),
            })
    }
}

impl Setting for TokenizerSource {
    fn expected(_: Range) -> String {
        r#""bytes", the path of a tokenizer.json, or a table such as { train_bpe = 8192 }, outside of a file {"train_bpe":8192}"#.into()
    }

    fn from_value(value: &Value) -> Result<Self, Refusal> {
        match value {
            Value::String(text) => Self::from_text(text),
            Value::Object(table) => Self::from_table(table),
            _ => Err(Refusal::Type),
        }
    }

    fn from_text(text: &str) -> Result<Self, Refusal> {
        match text {
            "bytes" => Ok(Self::Bytes),
            "" => Err(Refusal::Type),
            table if table.starts_with('{') => Self::from_value(&strict::parse_text(table)?),
            path => Ok(Self::File(path.into())),
        }
    }

    fn to_value(&self) -> Value {
        match self {
            Self::Bytes => Value::from("bytes"),
            Self::File(path) => path.to_value(),
            Self::TrainBpe(tokens) => json!({ Self::TRAIN_BPE: tokens }),
        }
    }

    fn rebase(&mut self, base: &Path) {
        if let Self::File(path) = self {
            *path = absolute(base, path);
        }
    }
}

/// Which chat template makes prompts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum TemplateSource {
    /// A file with one; a configuration file names it relative to itself.
    File(PathBuf),
    /// The template of this name beside the tokenizer.
    Name(String),
}

impl Setting for TemplateSource {
    fn expected(_: Range) -> String {
        "a path, a name".into()
    }

    fn from_value(value: &Value) -> Result<Self, Refusal> {
        Self::from_text(value.as_str().ok_or(Refusal::Type)?)
    }

    fn from_text(text: &str) -> Result<Self, Refusal> {
        // A path with folders is no name.
        let is_name = Path::new(text).file_name() == Some(OsStr::new(text));
        Ok(if is_name {
            Self::Name(text.to_owned())
        } else {
            Self::File(text.into())
        })
    }

    fn to_value(&self) -> Value {
        match self {
            Self::File(path) => path.to_value(),
            Self::Name(name) => name.to_value(),
        }
    }

    /// A name is that of a file where there is one.
    fn rebase(&mut self, base: &Path) {
        let (is_file, path) = match self {
            Self::File(path) => (true, absolute(base, path)),
            Self::Name(name) => (false, absolute(base, Path::new(name.as_str()))),
        };
        if is_file || path.is_file() {
            *self = Self::File(path);
        }
    }
}

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

/// When a beam search ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EarlyStop(pub EarlyStopping);

impl Setting for EarlyStop {
    fn expected(_: Range) -> String {
        r#"true, false or "never""#.into()
    }

    fn from_value(value: &Value) -> Result<Self, Refusal> {
        match value {
            Value::Bool(true) => Ok(Self(EarlyStopping::Yes)),
            Value::Bool(false) => Ok(Self(EarlyStopping::No)),
            Value::String(text) => Self::from_text(text),
            _ => Err(Refusal::Type),
        }
    }

    fn from_text(text: &str) -> Result<Self, Refusal> {
        match text {
            "never" => Ok(Self(EarlyStopping::Never)),
            flag => Self::from_value(&Value::Bool(bool::from_text(flag)?)),
        }
    }

    fn to_value(&self) -> Value {
        match self.0 {
            EarlyStopping::No => Value::Bool(false),
            EarlyStopping::Yes => Value::Bool(true),
            EarlyStopping::Never => Value::from("never"),
        }
    }
}

/// How many compute threads each rank has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ThreadsPerRank {
    /// The machine's cores divided by the ranks on it.
    Auto,
    /// This many.
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

    #[test]
    fn a_template_is_a_file_where_there_is_one_and_else_a_name_unless_it_has_folders() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        std::fs::write(at("chat.jinja"), "").unwrap();
        std::fs::create_dir(at("rag")).unwrap();
        let of = |text: &str| {
            let mut source = TemplateSource::from_text(text).unwrap();
            source.rebase(folder.path());
            assert_eq!(
                TemplateSource::from_value(&source.to_value()),
                Ok(source.clone())
            );
            source
        };
        assert_eq!(of("chat.jinja"), TemplateSource::File(at("chat.jinja")));
        for name in ["default", "rag"] {
            assert_eq!(of(name), TemplateSource::Name(name.to_owned()));
        }
        for path in ["templates/default", "rag/"] {
            assert_eq!(of(path), TemplateSource::File(at(path)));
        }
        assert_eq!(of("./default"), TemplateSource::File(at("default")));
    }

    #[test]
    fn a_tokenizer_to_train_has_a_size() {
        let train = json!({"train_bpe": 4096});
        for read in [
            TokenizerSource::from_value(&train),
            TokenizerSource::from_text(r#"{"train_bpe": 4096}"#),
        ] {
            assert_eq!(read, Ok(TokenizerSource::TrainBpe(4096)));
        }
        assert_eq!(TokenizerSource::TrainBpe(4096).to_value(), train);
        for wrong in [json!(256), json!(2_000_000), json!("many"), json!(300.5)] {
            let refused = TokenizerSource::from_value(&json!({"train_bpe": wrong}));
            assert!(matches!(refused, Err(Refusal::Entry { .. })), "{refused:?}");
        }
        let unknown = TokenizerSource::from_value(&json!({"train_bpes": 4096}));
        assert!(
            matches!(unknown, Err(Refusal::Choice { .. })),
            "{unknown:?}"
        );
        assert_eq!(TokenizerSource::from_value(&json!({})), Err(Refusal::Type));
    }
}
