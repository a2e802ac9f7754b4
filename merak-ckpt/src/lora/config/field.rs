//! The fields of an `adapter_config.json`: their names, and how each value is read.

use super::{ALL_LINEAR, InitWeights, Names, TrainedBias};
use merak_mpu::names::{did_you_mean, nearest};
use regex::Regex;
use serde_json::{Value, json};

/// What other programs call fields.
const SYNONYMS: [(&str, &str); 3] = [
    ("alpha", "lora_alpha"),
    ("dropout", "lora_dropout"),
    ("rank", "r"),
];

/// Fields that training or merging depends on.
const FIELDS: [&str; 18] = [
    "alpha_pattern",
    "bias",
    "exclude_modules",
    "fan_in_fan_out",
    "inference_mode",
    "init_lora_weights",
    "layers_pattern",
    "layers_to_transform",
    "lora_alpha",
    "lora_dropout",
    "modules_to_save",
    "peft_type",
    "r",
    "rank_pattern",
    "target_modules",
    "task_type",
    "use_dora",
    "use_rslora",
];

/// Fields that neither training nor merging depends on, kept when the file is written back.
const OTHERS: [&str; 8] = [
    "auto_mapping",
    "base_model_name_or_path",
    "eva_config",
    "megatron_core",
    "peft_version",
    "qalora_group_size",
    "revision",
    "runtime_config",
];

/// The values that PEFT knows for `task_type`.
const TASKS: [&str; 6] = [
    "SEQ_CLS",
    "SEQ_2_SEQ_LM",
    "CAUSAL_LM",
    "TOKEN_CLS",
    "QUESTION_ANS",
    "FEATURE_EXTRACTION",
];

/// The numbers that factors may be scaled by, as messages name them.
const ALPHA: &str = "a number that f32 can hold";

fn is_alpha(alpha: f64) -> bool {
    (alpha as f32).is_finite()
}

/// Refuses a field that nothing here reads, unless it has no effect.
pub(super) fn check_idle(name: &str, value: &Value) -> Result<(), String> {
    if OTHERS.contains(&name) || is_inactive(value) {
        return Ok(());
    }
    let known = FIELDS.iter().chain(&OTHERS).copied();
    let synonym = SYNONYMS.iter().find(|(other, _)| *other == name);
    let hint = synonym.map(|(_, field)| *field);
    let hint = did_you_mean(hint.or_else(|| nearest(name, known)));
    Err(format!("`{name}` is {value}, which is not supported{hint}"))
}

/// The message about a field with a value of the wrong kind.
fn wrong(name: &str, value: &Value, expected: &str) -> String {
    format!("`{name}` is {value}, expected {expected}")
}

pub(super) fn flag(name: &str, value: &Value) -> Result<bool, String> {
    let flag = value.as_bool();
    flag.ok_or_else(|| wrong(name, value, "true or false"))
}

pub(super) fn check_text(name: &str, value: &Value) -> Result<(), String> {
    if value.is_null() || value.is_string() {
        return Ok(());
    }
    Err(wrong(name, value, "a text"))
}

pub(super) fn check_type(name: &str, value: &Value) -> Result<(), String> {
    if value == "LORA" {
        return Ok(());
    }
    let expected = "`LORA`, the one kind of adapter that is read";
    Err(wrong(name, value, expected))
}

pub(super) fn check_task(name: &str, value: &Value) -> Result<(), String> {
    let known = value.as_str().is_some_and(|task| TASKS.contains(&task));
    if value.is_null() || known {
        return Ok(());
    }
    let expected = format!("none or one of {}", TASKS.join(", "));
    Err(wrong(name, value, &expected))
}

pub(super) fn rank(name: &str, value: &Value) -> Result<usize, String> {
    let rank = value.as_u64().and_then(|rank| usize::try_from(rank).ok());
    let rank = rank.filter(|rank| *rank > 0);
    rank.ok_or_else(|| wrong(name, value, "a whole number from 1 on"))
}

fn number(name: &str, value: &Value) -> Result<f64, String> {
    let number = value.as_f64();
    number.ok_or_else(|| wrong(name, value, "a number"))
}

pub(super) fn alpha(name: &str, value: &Value) -> Result<f64, String> {
    let alpha = number(name, value)?;
    let alpha = Some(alpha).filter(|alpha| is_alpha(*alpha));
    alpha.ok_or_else(|| wrong(name, value, ALPHA))
}

pub(super) fn dropout(name: &str, value: &Value) -> Result<f64, String> {
    let dropout = Some(number(name, value)?).filter(|dropout| (0.0..1.0).contains(dropout));
    dropout.ok_or_else(|| wrong(name, value, "a number from 0 to less than 1"))
}

/// Ranks of modules by patterns.
pub(super) fn ranks(name: &str, value: &Value) -> Result<Vec<(Regex, f64)>, String> {
    let ranks = patterns(name, value)?;
    let is_rank = |(_, rank): &(_, f64)| *rank >= 1.0 && rank.fract() == 0.0;
    if ranks.iter().all(is_rank) {
        return Ok(ranks);
    }
    Err(wrong(name, value, "patterns and whole numbers from 1 on"))
}

/// Alphas of modules by patterns.
pub(super) fn alphas(name: &str, value: &Value) -> Result<Vec<(Regex, f64)>, String> {
    let alphas = patterns(name, value)?;
    if alphas.iter().all(|(_, alpha)| is_alpha(*alpha)) {
        return Ok(alphas);
    }
    let expected = format!("patterns, and for each {ALPHA}");
    Err(wrong(name, value, &expected))
}

pub(super) fn trained_bias(name: &str, value: &Value) -> Result<TrainedBias, String> {
    match value.as_str() {
        Some("none") => Ok(TrainedBias::None),
        Some("all") => Ok(TrainedBias::All),
        Some("lora_only") => Ok(TrainedBias::Adapted),
        _ => Err(wrong(name, value, "none, all or lora_only")),
    }
}

pub(super) fn init_weights(name: &str, value: &Value) -> Result<InitWeights, String> {
    match (value, value.as_str()) {
        (Value::Bool(true), _) => Ok(InitWeights::Standard),
        (Value::Bool(false), _) => Ok(InitWeights::Random),
        (_, Some("gaussian")) => Ok(InitWeights::Gaussian),
        (_, Some(other @ ("eva" | "orthogonal"))) => Ok(InitWeights::Other(other.to_owned())),
        _ => {
            let expected =
                "true, false, gaussian, eva or orthogonal: others change the base weights";
            Err(wrong(name, value, expected))
        }
    }
}

/// A name or a list of names; null is none.
pub(super) fn strings(name: &str, value: &Value) -> Result<Vec<String>, String> {
    let text = |item: &Value| item.as_str().map(str::to_owned);
    let found = match value {
        Value::Null => Some(Vec::new()),
        Value::Array(items) => items.iter().map(text).collect(),
        one => text(one).map(|one| vec![one]),
    };
    found.ok_or_else(|| wrong(name, value, "a name or a list of names"))
}

/// Modules: a list of ends, a pattern, or `all-linear`; null leaves them to the family.
pub(super) fn names(name: &str, value: &Value) -> Result<Option<Names>, String> {
    Ok(Some(match value {
        Value::Null => return Ok(None),
        Value::String(text) if text.eq_ignore_ascii_case(ALL_LINEAR) => Names::AllLinear,
        Value::String(text) => Names::Pattern(regex(name, text, &format!("^(?:{text})$"))?),
        _ => Names::Listed(strings(name, value)?),
    }))
}

fn regex(name: &str, text: &str, whole: &str) -> Result<Regex, String> {
    Regex::new(whole).map_err(|error| {
        let error = error.to_string();
        let why = error.lines().last().unwrap_or_default();
        let why = why.trim_start_matches("error: ");
        format!("`{text}` in `{name}` is no regular expression that can be read: {why}")
    })
}

/// A layer or a list of layers; null is all of them.
pub(super) fn layers(name: &str, value: &Value) -> Result<Option<Vec<usize>>, String> {
    let number = |value: &Value| usize::try_from(value.as_u64()?).ok();
    let numbers: Option<_> = match value {
        Value::Null => return Ok(None),
        Value::Array(items) if items.is_empty() => return Ok(None),
        Value::Array(items) => items.iter().map(number).collect(),
        one => number(one).map(|one| vec![one]),
    };
    let expected = "a layer's number or a list of them, counted from 0";
    numbers
        .map(Some)
        .ok_or_else(|| wrong(name, value, expected))
}

/// Patterns of the names after which the numbers of layers stand.
pub(super) fn layers_patterns(name: &str, value: &Value) -> Result<Vec<Regex>, String> {
    let patterns = strings(name, value)?.into_iter();
    let patterns = patterns.filter(|text| !text.is_empty());
    let pattern = |text: String| regex(name, &text, &format!(r"(?:^|\.)(?:{text})\.(\d+)\."));
    patterns.map(pattern).collect()
}

/// Patterns that match the end of a module's name, from a dot or the start, with their numbers.
fn patterns(name: &str, value: &Value) -> Result<Vec<(Regex, f64)>, String> {
    if value.is_null() {
        return Ok(Vec::new());
    }
    let wrong = || wrong(name, value, "patterns and numbers");
    let pattern = |(pattern, number): (&String, &Value)| {
        let number = number.as_f64().ok_or_else(wrong)?;
        let whole = format!(r"^(?:.*\.)?(?:{pattern})$");
        Ok((regex(name, pattern, &whole)?, number))
    };
    value
        .as_object()
        .ok_or_else(wrong)?
        .iter()
        .map(pattern)
        .collect()
}

/// A normal form, in which values of the same meaning are equal: lists have no order, 8 and 8.0 are
/// one number.
pub(super) fn plain(value: &Value) -> Value {
    match value {
        value if is_inactive(value) => Value::Null,
        Value::Number(number) => json!(number.as_f64()),
        Value::Array(items) => {
            let mut items: Vec<_> = items.iter().map(plain).collect();
            items.sort_by_key(Value::to_string);
            Value::Array(items)
        }
        Value::Object(fields) => {
            let fields = fields
                .iter()
                .map(|(name, value)| (name.clone(), plain(value)));
            Value::Object(fields.collect())
        }
        value => value.clone(),
    }
}

/// Whether a field says nothing: `null`, `false`, zero, or empty.
fn is_inactive(value: &Value) -> bool {
    match value {
        Value::Null | Value::Bool(false) => true,
        Value::Bool(true) => false,
        Value::Number(number) => number.as_f64() == Some(0.0),
        Value::String(text) => text.is_empty(),
        Value::Array(items) => items.is_empty(),
        Value::Object(fields) => fields.is_empty(),
    }
}
