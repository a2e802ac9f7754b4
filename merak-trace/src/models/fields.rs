//! Typed access to the fields of a `config.json`.

use super::inert::INERT;
use crate::{Error, Result, op::Activation};
use merak_mpu::names::nearest;
use serde_json::{Map, Value as Json};
use std::{cell::RefCell, collections::BTreeSet, fmt};

/// The most layers that are traced.
pub(super) const MAX_LAYERS: usize = 1 << 14;

/// The fields of one configuration; records which were read.
#[derive(Debug)]
pub(super) struct Fields<'a> {
    object: &'a Map<String, Json>,
    /// Prefix of names in messages: the path of a nested object.
    prefix: String,
    asked: RefCell<BTreeSet<String>>,
}

impl<'a> Fields<'a> {
    /// Wraps a JSON object.
    pub(super) fn new(config: &'a Json) -> Result<Self> {
        let object = config
            .as_object()
            .ok_or_else(|| error("(root)", "is no JSON object"))?;
        Ok(Self::nested(object, String::new()))
    }

    fn nested(object: &'a Map<String, Json>, prefix: String) -> Self {
        Self {
            object,
            prefix,
            asked: RefCell::default(),
        }
    }

    /// The field, unless it is absent or null.
    fn get(&self, name: &str) -> Option<&'a Json> {
        self.asked.borrow_mut().insert(name.to_owned());
        self.object.get(name).filter(|value| !value.is_null())
    }

    /// Whether the field is `true`.
    pub(super) fn is_set(&self, name: &str) -> bool {
        self.get(name)
            .is_some_and(|value| value == &Json::Bool(true))
    }

    /// An error about a field of this object.
    pub(super) fn error(&self, name: &str, reason: &str) -> Error {
        error(&format!("{}{name}", self.prefix), reason)
    }

    fn wrong(&self, name: &str, expected: &str, found: &Json) -> Error {
        self.error(name, &format!("is {found}, expected {expected}"))
    }

    /// Refuses fields that were not read, unless they are known to change no number.
    pub(super) fn finish(&self) -> Result<()> {
        let asked = self.asked.borrow();
        let is_known = |name: &str| asked.contains(name) || INERT.binary_search(&name).is_ok();
        let mut set = self.object.iter().filter(|(_, value)| !value.is_null());
        match set.find(|(name, _)| !is_known(name)) {
            None => Ok(()),
            Some((name, value)) => {
                let shown = value.to_string();
                let shown = if shown.len() > 60 { "set" } else { &shown };
                let nearest = nearest(name, asked.iter().map(String::as_str));
                let advice = nearest.map_or_else(String::new, |name| {
                    format!("; the nearest known field is \"{name}\"")
                });
                let reason = format!("is {shown}, but this model has no such field{advice}");
                Err(self.error(name, &reason))
            }
        }
    }

    /// Checks the fields that a configuration of any family may have.
    pub(super) fn check_common(&self) -> Result<()> {
        self.refuse("add_cross_attention", &[false.into()])?;
        self.refuse("tie_encoder_decoder", &[false.into()])?;
        self.refuse("pruned_heads", &[Json::Object(Map::new())])?;
        self.check_tokens()?;
        self.check_dtype()
    }

    /// Checks the special tokens, which a run may read: one id or a list; a negative id means none.
    fn check_tokens(&self) -> Result<()> {
        for name in ["eos_token_id", "pad_token_id", "decoder_start_token_id"] {
            let Some(value) = self.object.get(name).filter(|value| !value.is_null()) else {
                continue;
            };
            let is_list = |list: &Vec<Json>| list.iter().all(Json::is_i64);
            if !value.is_i64() && !value.as_array().is_some_and(is_list) {
                return Err(self.wrong(name, "an integer or a list of integers", value));
            }
        }
        Ok(())
    }

    /// Checks the element type in which the weights were saved; training has one of its own.
    fn check_dtype(&self) -> Result<()> {
        const KNOWN: [&str; 5] = ["float32", "float16", "bfloat16", "float64", "auto"];
        let dtype = |name| -> Result<Option<&'static str>> {
            if self.get(name).is_none() {
                return Ok(None);
            }
            let found = self.string(name)?;
            let plain = found.strip_prefix("torch.").unwrap_or(&found);
            let known = KNOWN.into_iter().find(|known| *known == plain);
            known.map(Some).ok_or_else(|| {
                let reason = format!("is \"{found}\", expected one of {}", KNOWN.join(", "));
                self.error(name, &reason)
            })
        };
        match (dtype("dtype")?, dtype("torch_dtype")?) {
            (Some(a), Some(b)) if a != b => Err(self.differ("torch_dtype", b, "dtype", a)),
            _ => Ok(()),
        }
    }

    /// The error of a field that has two names and two values.
    fn differ(
        &self,
        name: &str,
        value: impl fmt::Display,
        other: &str,
        expected: impl fmt::Display,
    ) -> Error {
        let reason = format!("is {value}, but {other}, which is the same, is {expected}");
        self.error(name, &reason)
    }

    /// Which of two names of one field the configuration uses.
    pub(super) fn renamed(&self, name: &'static str, other: &'static str) -> Result<&'static str> {
        match (self.get(name), self.get(other)) {
            (Some(a), Some(b)) if a != b => Err(self.differ(other, b, name, a)),
            (None, Some(_)) => Ok(other),
            _ => Ok(name),
        }
    }

    /// A field of text.
    pub(super) fn string(&self, name: &str) -> Result<String> {
        let value = self
            .get(name)
            .ok_or_else(|| self.error(name, "is missing"))?;
        value
            .as_str()
            .map(str::to_owned)
            .ok_or_else(|| self.wrong(name, "a string", value))
    }

    /// A field of text, or a default.
    pub(super) fn string_or(&self, name: &str, default: &str) -> Result<String> {
        match self.get(name) {
            Some(_) => self.string(name),
            None => Ok(default.to_owned()),
        }
    }

    /// A list of texts, empty where the field is absent.
    pub(super) fn strings(&self, name: &str) -> Result<Vec<&'a str>> {
        let Some(value) = self.get(name) else {
            return Ok(Vec::new());
        };
        let list = value.as_array().map(Vec::as_slice);
        list.and_then(|list| list.iter().map(Json::as_str).collect())
            .ok_or_else(|| self.wrong(name, "a list of strings", value))
    }

    /// A positive integer.
    pub(super) fn size(&self, name: &str) -> Result<usize> {
        self.opt_size(name)?
            .ok_or_else(|| self.error(name, "is missing"))
    }

    /// A number of layers, at most [`MAX_LAYERS`]: lists have this length, and larger graphs take
    /// too long to plan.
    pub(super) fn layers(&self, name: &str) -> Result<usize> {
        self.bounded(name, self.size(name)?, (MAX_LAYERS, "layers"))
    }

    /// A number of layers, or a default.
    pub(super) fn layers_or(&self, name: &str, default: usize) -> Result<usize> {
        self.bounded(name, self.size_or(name, default)?, (MAX_LAYERS, "layers"))
    }

    /// The `size` in the field `name`, if it is at most `most`.
    pub(super) fn bounded(
        &self,
        name: &str,
        size: usize,
        (most, what): (usize, &str),
    ) -> Result<usize> {
        if size <= most {
            return Ok(size);
        }
        let reason = format!("is {size}, expected at most {most} {what}");
        Err(self.error(name, &reason))
    }

    /// A positive integer, or a default.
    pub(super) fn size_or(&self, name: &str, default: usize) -> Result<usize> {
        Ok(self.opt_size(name)?.unwrap_or(default))
    }

    /// A positive integer of 32 bits, if the field is there: sizes may then be multiplied.
    pub(super) fn opt_size(&self, name: &str) -> Result<Option<usize>> {
        let Some(value) = self.get(name) else {
            return Ok(None);
        };
        match value.as_u64().map(u32::try_from) {
            Some(Ok(n)) if n > 0 => Ok(Some(n as usize)),
            Some(Err(_)) => {
                let expected = format!("a positive integer of at most {}", u32::MAX);
                Err(self.wrong(name, &expected, value))
            }
            _ => Err(self.wrong(name, "a positive integer", value)),
        }
    }

    /// A positive integer: the default where it is absent, none where it is null.
    pub(super) fn size_unless_null(
        &self,
        name: &str,
        default: Option<usize>,
    ) -> Result<Option<usize>> {
        let default = default.filter(|_| !self.object.contains_key(name));
        Ok(self.opt_size(name)?.or(default))
    }

    /// An integer, or a default.
    pub(super) fn count_or(&self, name: &str, default: usize) -> Result<usize> {
        Ok(self.count_unless_null(name, None)?.unwrap_or(default))
    }

    /// An integer: the default where it is absent, none where it is null.
    pub(super) fn count_unless_null(
        &self,
        name: &str,
        default: Option<usize>,
    ) -> Result<Option<usize>> {
        let default = default.filter(|_| !self.object.contains_key(name));
        let Some(value) = self.get(name) else {
            return Ok(default);
        };
        let count = value.as_u64().and_then(|n| usize::try_from(n).ok());
        count
            .map(Some)
            .ok_or_else(|| self.wrong(name, "an integer of at least 0", value))
    }

    /// A positive number.
    pub(super) fn positive(&self, name: &str) -> Result<f64> {
        self.opt_positive(name)?
            .ok_or_else(|| self.error(name, "is missing"))
    }

    /// A positive number, if the field is there.
    pub(super) fn opt_positive(&self, name: &str) -> Result<Option<f64>> {
        match self.opt_number(name)? {
            Some(n) if n <= 0.0 => Err(self.error(name, &format!("is {n}, expected more than 0"))),
            number => Ok(number),
        }
    }

    /// A list of positive numbers.
    pub(super) fn positives(&self, name: &str) -> Result<Vec<f64>> {
        let value = self
            .get(name)
            .ok_or_else(|| self.error(name, "is missing"))?;
        let positive = |value: &Json| {
            let number = value.as_f64();
            number.filter(|n| n.is_finite() && *n > 0.0)
        };
        let list = value.as_array().map(Vec::as_slice);
        list.and_then(|list| list.iter().map(positive).collect())
            .ok_or_else(|| self.error(name, "is no list of positive numbers"))
    }

    /// A number that is not negative, or a default.
    pub(super) fn not_negative_or(&self, name: &str, default: f64) -> Result<f64> {
        Ok(self.opt_not_negative(name)?.unwrap_or(default))
    }

    /// A number that is not negative, if the field is there.
    pub(super) fn opt_not_negative(&self, name: &str) -> Result<Option<f64>> {
        match self.opt_number(name)? {
            Some(n) if n < 0.0 => Err(self.error(name, &format!("is {n}, expected at least 0"))),
            number => Ok(number),
        }
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
            .ok_or_else(|| self.wrong(name, "a number", value))
    }

    /// A probability below 1, 0 where it is absent.
    pub(super) fn probability(&self, name: &str, default: f64) -> Result<f64> {
        let p = self.opt_number(name)?.unwrap_or(default);
        if (0.0..1.0).contains(&p) {
            Ok(p)
        } else {
            let reason = format!("is {p}, expected at least 0 and below 1");
            Err(self.error(name, &reason))
        }
    }

    /// A truth value, or a default.
    pub(super) fn flag_or(&self, name: &str, default: bool) -> Result<bool> {
        self.get(name).map_or(Ok(default), |value| {
            value
                .as_bool()
                .ok_or_else(|| self.wrong(name, "true or false", value))
        })
    }

    /// A nested object, if the field is there.
    pub(super) fn object(&self, name: &str) -> Result<Option<Fields<'a>>> {
        self.get(name)
            .map(|value| {
                value
                    .as_object()
                    .map(|object| Self::nested(object, format!("{}{name}.", self.prefix)))
                    .ok_or_else(|| self.wrong(name, "an object", value))
            })
            .transpose()
    }

    /// A token id, or the first of a list of them.
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
        let found = self.string_or(name, default)?;
        Self::activation_named(&found).ok_or_else(|| {
            let known = "gelu, gelu_new, gelu_pytorch_tanh, relu, silu or tanh";
            self.error(name, &format!("is \"{found}\", expected {known}"))
        })
    }

    /// The activation of a Hugging Face name.
    pub(super) fn activation_named(name: &str) -> Option<Activation> {
        Some(match name {
            "gelu" => Activation::GeluErf,
            "gelu_new" | "gelu_pytorch_tanh" | "gelu_fast" => Activation::GeluTanh,
            "relu" => Activation::Relu,
            "silu" | "swish" => Activation::Silu,
            "tanh" => Activation::Tanh,
            _ => return None,
        })
    }

    /// Refuses a number other than zero, which asks for an unsupported feature.
    pub(super) fn refuse_unless_zero(&self, name: &str) -> Result<()> {
        self.refuse(name, &[Json::from(0), Json::from(0.0)])
    }

    /// Notes fields that change no number of this model.
    pub(super) fn ignore(&self, names: &[&str]) {
        let names = names.iter().map(|&name| name.to_owned());
        self.asked.borrow_mut().extend(names);
    }

    /// The index in `known` of the first of `architectures`; 0 without that field.
    pub(super) fn architecture(&self, known: &[&str]) -> Result<usize> {
        let name = "architectures";
        let found = self.strings(name)?;
        let Some(first) = found.first() else {
            return Ok(0);
        };
        let position = known.iter().position(|known| known == first);
        position.ok_or_else(|| {
            let reason = format!("names {first}, expected {}", known.join(" or "));
            self.error(name, &reason)
        })
    }

    /// The number of classes: `num_labels`, or the entries of `id2label`, or 2.
    pub(super) fn num_labels(&self) -> Result<usize> {
        self.refuse("problem_type", &["single_label_classification".into()])?;
        let named = self.object("id2label")?;
        self.object("label2id")?;
        let named = named.map(|names| names.object.len());
        let (field, classes) = match (self.opt_size("num_labels")?, named) {
            (Some(stated), _) => ("num_labels", stated),
            (None, named) => ("id2label", named.unwrap_or(2)),
        };
        let reason = match classes {
            0 => "names no class, expected at least 2 classes",
            1 if field == "num_labels" => {
                "is 1, which asks for a regression, expected at least 2 classes"
            }
            1 => "names 1 class, which asks for a regression, expected at least 2 classes",
            _ => return Ok(classes),
        };
        Err(self.error(field, reason))
    }

    /// Height and width, stated as one number for both or as a pair, of 32 bits as all sizes.
    pub(super) fn pair_or(&self, name: &str, default: usize) -> Result<[usize; 2]> {
        let Some(value) = self.get(name) else {
            return Ok([default; 2]);
        };
        let size = |value: &Json| {
            let size = value.as_u64().and_then(|size| u32::try_from(size).ok());
            size.filter(|&size| size > 0).map(|size| size as usize)
        };
        let pair = match value.as_array().map(Vec::as_slice) {
            Some([height, width]) => size(height).zip(size(width)),
            Some(_) => None,
            None => size(value).map(|size| (size, size)),
        };
        pair.map(Into::into)
            .ok_or_else(|| self.wrong(name, "a positive integer or a pair of them", value))
    }

    /// Refuses a field that asks for an unsupported feature.
    pub(super) fn refuse(&self, name: &str, inactive: &[Json]) -> Result<()> {
        match self.get(name) {
            Some(value) if !inactive.contains(value) => {
                Err(self.error(name, &format!("is {value}, which is not supported")))
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
