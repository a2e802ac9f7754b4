//! Names that a run gives: of its adapter, and of a metric.

use merak_ckpt::{ADAPTER_NAMES, is_adapter_name};
use merak_mpu::names::nearest;
use merak_trace::models::known_classes;
use serde_json::Value;

use super::{choice::one_of, range::Range, refusal::Refusal, setting::Setting};

/// Name of an adapter, which becomes part of the names of tensors and of a folder.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AdapterName(pub String);

impl Setting for AdapterName {
    fn expected(_: Range) -> String {
        ADAPTER_NAMES.into()
    }

    fn from_text(text: &str) -> Result<Self, Refusal> {
        let name = Some(text).filter(|text| is_adapter_name(text));
        name.map(|name| Self(name.into())).ok_or(Refusal::Type)
    }

    fn to_value(&self) -> Value {
        Value::from(self.0.as_str())
    }
}

/// Classes of models in `transformers`, all of which can be traced.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ModelClasses(pub Vec<String>);

impl Setting for ModelClasses {
    fn expected(_: Range) -> String {
        "classes of models such as Qwen2ForCausalLM, separated by commas".into()
    }

    fn from_text(text: &str) -> Result<Self, Refusal> {
        let names = text.split(',').map(str::trim);
        let names: Vec<_> = names.filter(|name| !name.is_empty()).collect();
        let is_unknown = |name: &&&str| !known_classes().any(|known| known == **name);
        match names.iter().find(is_unknown) {
            None => Ok(Self(names.into_iter().map(Into::into).collect())),
            Some(name) => Err(Refusal::Choice {
                choices: one_of(&known_classes().collect::<Vec<_>>()),
                nearest: nearest(name, known_classes()).map(Into::into),
            }),
        }
    }

    fn to_value(&self) -> Value {
        Value::from(self.0.join(","))
    }
}

/// Name of a metric of evaluations, which begins with `eval_`; that beginning may be left out where
/// it is given.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MetricName(pub String);

impl MetricName {
    /// What the names of evaluations' metrics begin with.
    pub(crate) const PREFIX: &str = "eval_";

    /// The name without the `eval_` that all of them begin with.
    pub fn short(&self) -> &str {
        self.0.strip_prefix(Self::PREFIX).unwrap_or(&self.0)
    }

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
