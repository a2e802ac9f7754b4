//! The `adapter_config.json` of a PEFT folder.

use crate::Result;
use crate::hf::{foreign, read_json};
use regex::Regex;
use serde_json::{Map, Value};
use std::path::Path;

/// Name of the file.
pub(super) const FILE: &str = "adapter_config.json";

/// Fields that say how an adapter is trained or where it came from, which its weights do not depend on.
const OTHERS: [&str; 18] = [
    "auto_mapping",
    "base_model_name_or_path",
    "bias",
    "ensure_weight_tying",
    "exclude_modules",
    "inference_mode",
    "layers_pattern",
    "layers_to_transform",
    "lora_dropout",
    "megatron_core",
    "modules_to_save",
    "peft_version",
    "qalora_group_size",
    "r",
    "revision",
    "runtime_config",
    "target_modules",
    "task_type",
];

/// Ways to initialise that leave the base weights as they are.
const PLAIN_INITS: [&str; 3] = ["gaussian", "eva", "orthogonal"];

/// What merging asks the configuration about.
#[derive(Debug, Clone)]
pub(super) struct Config {
    alpha: f64,
    alpha_pattern: Vec<(Regex, f64)>,
    use_rslora: bool,
    /// Whether adapted weights are stored `[in, out]`.
    pub(super) fan_in_fan_out: bool,
}

impl Config {
    /// Reads the file and refuses what would be merged wrongly: fields that are active and unknown here.
    pub(super) fn read(path: &Path) -> Result<Self> {
        let json = read_json(path)?;
        let fields = json.as_object();
        let fields = fields.ok_or_else(|| foreign(path, "it is no JSON object"))?;
        Self::from_fields(fields).map_err(|reason| foreign(path, reason))
    }

    fn from_fields(fields: &Map<String, Value>) -> Result<Self, String> {
        let mut config = Self {
            alpha: 8.0,
            alpha_pattern: Vec::new(),
            use_rslora: false,
            fan_in_fan_out: false,
        };
        let mut is_lora = false;
        for (name, value) in fields {
            let wrong = |expected: &str| format!("`{name}` is {value}, expected {expected}");
            let number = || value.as_f64().ok_or_else(|| wrong("a number"));
            let flag = || value.as_bool().ok_or_else(|| wrong("true or false"));
            match name.as_str() {
                "peft_type" if value == "LORA" => is_lora = true,
                "peft_type" => return Err(wrong("`LORA`, the one kind of adapter that is read")),
                "lora_alpha" => config.alpha = number()?,
                "use_rslora" => config.use_rslora = flag()?,
                "fan_in_fan_out" => config.fan_in_fan_out = flag()?,
                "alpha_pattern" => config.alpha_pattern = patterns(name, value)?,
                // The shapes of the factors tell their ranks.
                "rank_pattern" => drop(patterns(name, value)?),
                "init_lora_weights" => {
                    let is_plain = value
                        .as_str()
                        .is_none_or(|init| PLAIN_INITS.contains(&init));
                    if !is_plain {
                        return Err(wrong(
                            "true, false, gaussian, eva or orthogonal: others change the base weights",
                        ));
                    }
                }
                name if OTHERS.contains(&name) || is_inactive(value) => {}
                _ => return Err(format!("`{name}` is {value}, which is not supported")),
            }
        }
        if !is_lora {
            return Err("it has no `peft_type`, expected `LORA`".to_owned());
        }
        Ok(config)
    }

    /// The factor of a module's product: alpha / rank, or alpha / sqrt(rank).
    pub(super) fn scale(&self, module: &str, rank: usize) -> f64 {
        let own = self.alpha_pattern.iter().find(|(p, _)| p.is_match(module));
        let alpha = own.map_or(self.alpha, |(_, alpha)| *alpha);
        let rank = rank as f64;
        alpha / if self.use_rslora { rank.sqrt() } else { rank }
    }
}

/// Patterns that match the end of a module's name, from a dot or the start, with their numbers.
fn patterns(name: &str, value: &Value) -> Result<Vec<(Regex, f64)>, String> {
    if value.is_null() {
        return Ok(Vec::new());
    }
    let wrong = || format!("`{name}` is {value}, expected patterns and numbers");
    let pattern = |(pattern, number): (&String, &Value)| {
        let number = number.as_f64().ok_or_else(wrong)?;
        let regex = Regex::new(&format!(r"^(?:.*\.)?(?:{pattern})$"))
            .map_err(|_| format!("`{pattern}` in `{name}` is no regular expression"))?;
        Ok((regex, number))
    };
    value
        .as_object()
        .ok_or_else(wrong)?
        .iter()
        .map(pattern)
        .collect()
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

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn config(fields: &Value) -> Result<Config, String> {
        Config::from_fields(fields.as_object().expect("an object"))
    }

    #[test]
    fn the_scale_follows_the_first_pattern_that_matches_from_a_dot() {
        let config = config(&json!({
            "peft_type": "LORA", "lora_alpha": 16, "use_dora": false, "loftq_config": {},
            "alpha_pattern": {"h.0.attn.c_attn": 4, "c_.*": 8, "attn": 100},
        }))
        .unwrap();
        let scales = [
            "transformer.h.0.attn.c_attn",
            "h.10.attn.c_attn",
            "xc_attn",
            "lm_head",
        ]
        .map(|module| config.scale(module, 4));
        assert_eq!(format!("{scales:?}"), "[1.0, 2.0, 4.0, 4.0]");
        let root = Config {
            use_rslora: true,
            ..config
        };
        assert_eq!(root.scale("lm_head", 4).to_string(), "8");
    }

    #[test]
    fn what_would_be_merged_wrongly_is_refused_by_name() {
        let refusal = |field: &str, value: Value| {
            let mut fields = json!({"peft_type": "LORA"});
            fields[field] = value;
            config(&fields).unwrap_err()
        };
        let messages = [
            refusal("peft_type", json!("IA3")),
            refusal("use_dora", json!(true)),
            refusal("layer_replication", json!([[0, 2]])),
            refusal("init_lora_weights", json!("pissa_niter_16")),
            refusal("lora_alpha", json!("x")),
            refusal("alpha_pattern", json!({"(": 1})),
            config(&json!({})).unwrap_err(),
        ];
        insta::assert_snapshot!(messages.join("\n"), @r#"
        `peft_type` is "IA3", expected `LORA`, the one kind of adapter that is read
        `use_dora` is true, which is not supported
        `layer_replication` is [[0,2]], which is not supported
        `init_lora_weights` is "pissa_niter_16", expected true, false, gaussian, eva or orthogonal: others change the base weights
        `lora_alpha` is "x", expected a number
        `(` in `alpha_pattern` is no regular expression
        it has no `peft_type`, expected `LORA`
        "#);
    }
}
