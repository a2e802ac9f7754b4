//! Typed access to the fields of a `config.json`.

use crate::{Error, Result, op::Activation};
use serde_json::{Map, Value as Json};

/// The fields of one configuration.
#[derive(Debug)]
pub(super) struct Fields<'a>(&'a Map<String, Json>);

impl<'a> Fields<'a> {
    /// Wraps a JSON object.
    pub(super) fn new(config: &'a Json) -> Result<Self> {
        config
            .as_object()
            .map(Self)
            .ok_or_else(|| error("(root)", "is no JSON object"))
    }

    /// The field, unless it is absent or null.
    fn get(&self, name: &str) -> Option<&'a Json> {
        self.0.get(name).filter(|value| !value.is_null())
    }

    /// A field of text.
    pub(super) fn string(&self, name: &str) -> Result<String> {
        let value = self.get(name).ok_or_else(|| error(name, "is missing"))?;
        value
            .as_str()
            .map(str::to_owned)
            .ok_or_else(|| wrong(name, "a string", value))
    }

    /// A positive integer.
    pub(super) fn size(&self, name: &str) -> Result<usize> {
        self.opt_size(name)?
            .ok_or_else(|| error(name, "is missing"))
    }

    /// A positive integer, or a default.
    pub(super) fn size_or(&self, name: &str, default: usize) -> Result<usize> {
        Ok(self.opt_size(name)?.unwrap_or(default))
    }

    /// A positive integer, if the field is there.
    pub(super) fn opt_size(&self, name: &str) -> Result<Option<usize>> {
        let Some(value) = self.get(name) else {
            return Ok(None);
        };
        match value.as_u64().and_then(|n| usize::try_from(n).ok()) {
            Some(n) if n > 0 => Ok(Some(n)),
            _ => Err(wrong(name, "a positive integer", value)),
        }
    }

    /// A number, or a default.
    pub(super) fn number_or(&self, name: &str, default: f64) -> Result<f64> {
        Ok(self.opt_number(name)?.unwrap_or(default))
    }

    /// A finite number, if the field is there.
    pub(super) fn opt_number(&self, name: &str) -> Result<Option<f64>> {
        let Some(value) = self.get(name) else {
            return Ok(None);
        };
        value
            .as_f64()
            .filter(|n| n.is_finite())
            .map(Some)
            .ok_or_else(|| wrong(name, "a number", value))
    }

    /// A probability below 1, 0 where it is absent.
    pub(super) fn probability(&self, name: &str, default: f64) -> Result<f64> {
        let p = self.number_or(name, default)?;
        if (0.0..1.0).contains(&p) {
            Ok(p)
        } else {
            Err(error(
                name,
                &format!("is {p}, expected at least 0 and below 1"),
            ))
        }
    }

    /// A truth value, or a default.
    pub(super) fn flag_or(&self, name: &str, default: bool) -> Result<bool> {
        self.get(name).map_or(Ok(default), |value| {
            value
                .as_bool()
                .ok_or_else(|| wrong(name, "true or false", value))
        })
    }

    /// A nested object, if the field is there.
    pub(super) fn object(&self, name: &str) -> Result<Option<Fields<'a>>> {
        self.get(name)
            .map(|value| {
                value
                    .as_object()
                    .map(Fields)
                    .ok_or_else(|| wrong(name, "an object", value))
            })
            .transpose()
    }

    /// The first id of a token id or a list of them.
    pub(super) fn token_id(&self, name: &str) -> Option<u32> {
        let value = self.get(name)?;
        value
            .as_array()
            .and_then(|ids| ids.first())
            .unwrap_or(value)
            .as_u64()
            .and_then(|id| u32::try_from(id).ok())
    }

    /// An activation by its Hugging Face name.
    pub(super) fn activation(&self, name: &str, default: &str) -> Result<Activation> {
        let found = if self.get(name).is_some() {
            self.string(name)?
        } else {
            default.to_owned()
        };
        Ok(match found.as_str() {
            "gelu" => Activation::GeluErf,
            "gelu_new" | "gelu_pytorch_tanh" | "gelu_fast" => Activation::GeluTanh,
            "relu" => Activation::Relu,
            "silu" | "swish" => Activation::Silu,
            "tanh" => Activation::Tanh,
            _ => {
                return Err(error(
                    name,
                    &format!(
                        "is \"{found}\", expected gelu, gelu_new, gelu_pytorch_tanh, relu, silu or tanh"
                    ),
                ));
            }
        })
    }

    /// Refuses a field that asks for something that is not built.
    pub(super) fn refuse(&self, name: &str, inactive: &[Json]) -> Result<()> {
        match self.get(name) {
            Some(value) if !inactive.contains(value) => {
                Err(error(name, &format!("is {value}, which is not supported")))
            }
            _ => Ok(()),
        }
    }
}

pub(super) fn error(field: &str, reason: &str) -> Error {
    Error::ModelConfig {
        field: field.to_owned(),
        reason: reason.to_owned(),
    }
}

fn wrong(field: &str, expected: &str, found: &Json) -> Error {
    error(field, &format!("is {found}, expected {expected}"))
}

/// The size of a head, when the width divides by the number of heads.
pub(super) fn head_dim(width: usize, heads: usize, field: &str) -> Result<usize> {
    if width.is_multiple_of(heads) {
        Ok(width / heads)
    } else {
        Err(error(
            field,
            &format!("is {heads}, which does not divide the width {width}"),
        ))
    }
}
