//! The `adapter_config.json` of a PEFT folder.

mod field;

use crate::Result;
use crate::disk::read_json;
use crate::error::foreign;
use regex::Regex;
use serde_json::{Map, Value, json};
use std::path::Path;

/// The targets that are all linear layers but the head.
pub(super) const ALL_LINEAR: &str = "all-linear";

/// How the factors of a new adapter start.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum InitWeights {
    /// The first uniform, the second zero: the model starts as it is.
    Standard,
    /// The same with a normal distribution.
    Gaussian,
    /// Both random.
    Random,
    /// Another way, under its name, that leaves the base weights as they are; not for training.
    Other(String),
}

/// Which biases train.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum TrainedBias {
    None,
    All,
    /// Those of adapted layers.
    Adapted,
}

/// Names of modules, as PEFT writes them.
#[derive(Debug, Clone)]
pub(super) enum Names {
    /// Whole names, or their ends from a dot on.
    Listed(Vec<String>),
    /// A pattern for the whole name.
    Pattern(Regex),
    /// All linear layers but the head.
    AllLinear,
}

impl Names {
    /// Whether a module is one of them.
    pub(super) fn has(&self, module: &str) -> bool {
        match self {
            Self::Listed(names) => names.iter().any(|name| ends_with(module, name)),
            Self::Pattern(pattern) => pattern.is_match(module),
            Self::AllLinear => true,
        }
    }
}

/// Whether a module's name is `end`, or ends with it after a dot.
pub(super) fn ends_with(module: &str, end: &str) -> bool {
    let rest = module.strip_suffix(end);
    rest.is_some_and(|rest| rest.is_empty() || rest.ends_with('.'))
}

/// The module, and the modules that it is a part of.
fn wholes(module: &str) -> impl Iterator<Item = &str> + Clone {
    let dots = module.match_indices('.');
    dots.map(|(dot, _)| &module[..dot])
        .chain(std::iter::once(module))
}

/// An `adapter_config.json` of PEFT: which layers get an adapter, and of which size.
///
/// ```
/// let json = serde_json::json!({ "r": 4, "lora_alpha": 8 });
/// let config = merak_ckpt::LoraConfig::from_json(&json)?;
/// assert_eq!(config.to_json()["r"], 4);
/// let error = merak_ckpt::LoraConfig::from_json(&serde_json::json!({ "rank": 4 })).unwrap_err();
/// assert_eq!(error, "`rank` is 4, which is not supported; did you mean \"r\"?");
/// # Ok::<(), String>(())
/// ```
#[derive(Debug, Clone)]
#[expect(
    clippy::struct_excessive_bools,
    reason = "the fields are those of the file"
)]
pub struct LoraConfig {
    /// The fields as they were given.
    fields: Map<String, Value>,
    rank: usize,
    alpha: f64,
    rank_pattern: Vec<(Regex, f64)>,
    alpha_pattern: Vec<(Regex, f64)>,
    use_rslora: bool,
    /// Whether each output of an adapted layer has a magnitude of its own.
    pub(super) use_dora: bool,
    pub(super) dropout: f64,
    pub(super) targets: Option<Names>,
    pub(super) excluded: Option<Names>,
    pub(super) layers: Option<Vec<usize>>,
    layers_patterns: Vec<Regex>,
    pub(super) saved_modules: Vec<String>,
    pub(super) bias: TrainedBias,
    pub(super) init: InitWeights,
    pub(super) is_frozen: bool,
    /// Whether adapted weights are stored `[in, out]`.
    pub(super) fan_in_fan_out: bool,
}

impl LoraConfig {
    /// Reads a file that describes an adapter that is to be trained. A field that is left out has
    /// PEFT's default.
    ///
    /// # Errors
    /// [`Error::Foreign`](crate::Error::Foreign) where the file is missing, is no JSON object, or
    /// has an active field that is unknown or not supported.
    pub fn read(path: &Path) -> Result<Self> {
        Self::from_json(&read_json(path)?).map_err(|reason| foreign(path, reason))
    }

    /// The same from the content of a file.
    ///
    /// # Errors
    /// What is wrong, in a sentence.
    pub fn from_json(json: &Value) -> Result<Self, String> {
        let fields = json.as_object().ok_or("it is no JSON object")?;
        Self::from_fields(fields)
    }

    /// Reads the file of an existing adapter, which must state its `peft_type`.
    pub(super) fn of_adapter(path: &Path) -> Result<Self> {
        let config = Self::read(path)?;
        if !config.fields.contains_key("peft_type") {
            return Err(foreign(path, "it has no `peft_type`, expected `LORA`"));
        }
        Ok(config)
    }

    fn from_fields(fields: &Map<String, Value>) -> Result<Self, String> {
        let mut config = Self {
            fields: fields.clone(),
            rank: 8,
            alpha: 8.0,
            rank_pattern: Vec::new(),
            alpha_pattern: Vec::new(),
            use_rslora: false,
            use_dora: false,
            dropout: 0.0,
            targets: None,
            excluded: None,
            layers: None,
            layers_patterns: Vec::new(),
            saved_modules: Vec::new(),
            bias: TrainedBias::None,
            init: InitWeights::Standard,
            is_frozen: false,
            fan_in_fan_out: false,
        };
        for (name, value) in fields {
            config.set(name, value)?;
        }
        // PEFT refuses both.
        if matches!(config.targets, Some(Names::Pattern(_))) && config.layers.is_some() {
            return Err("`layers_to_transform` needs a list of `target_modules`, found a pattern: name the layers in it".to_owned());
        }
        if !config.layers_patterns.is_empty() && config.layers.is_none() {
            return Err("`layers_pattern` needs `layers_to_transform`".to_owned());
        }
        Ok(config)
    }

    fn set(&mut self, name: &str, value: &Value) -> Result<(), String> {
        match name {
            "peft_type" => field::check_type(name, value)?,
            "r" => self.rank = field::rank(name, value)?,
            "lora_alpha" => self.alpha = field::alpha(name, value)?,
            "lora_dropout" => self.dropout = field::dropout(name, value)?,
            "use_rslora" => self.use_rslora = field::flag(name, value)?,
            "use_dora" => self.use_dora = field::flag(name, value)?,
            "inference_mode" => self.is_frozen = field::flag(name, value)?,
            "fan_in_fan_out" => self.fan_in_fan_out = field::flag(name, value)?,
            "rank_pattern" => self.rank_pattern = field::ranks(name, value)?,
            "alpha_pattern" => self.alpha_pattern = field::alphas(name, value)?,
            "target_modules" => self.targets = field::names(name, value)?,
            "exclude_modules" => self.excluded = field::names(name, value)?,
            "modules_to_save" => self.saved_modules = field::strings(name, value)?,
            "layers_to_transform" => self.layers = field::layers(name, value)?,
            "layers_pattern" => self.layers_patterns = field::layers_patterns(name, value)?,
            "bias" => self.bias = field::trained_bias(name, value)?,
            "init_lora_weights" => self.init = field::init_weights(name, value)?,
            "task_type" => field::check_task(name, value)?,
            "base_model_name_or_path" | "revision" => field::check_text(name, value)?,
            _ => field::check_idle(name, value)?,
        }
        Ok(())
    }

    /// The rank of a module's adapter.
    pub(super) fn rank(&self, module: &str) -> usize {
        let own = self.rank_pattern.iter().find(|(p, _)| p.is_match(module));
        own.map_or(self.rank, |(_, rank)| *rank as usize)
    }

    /// The factor of a module's product: alpha / rank, or alpha / sqrt(rank).
    pub(super) fn scale(&self, module: &str, rank: usize) -> f64 {
        let own = self.alpha_pattern.iter().find(|(p, _)| p.is_match(module));
        let alpha = own.map_or(self.alpha, |(_, alpha)| *alpha);
        let rank = rank as f64;
        alpha / if self.use_rslora { rank.sqrt() } else { rank }
    }

    /// Whether a parameter of the base is trained itself. `is_adapted` tells layers that have an
    /// adapter.
    pub(super) fn trains_whole(&self, param: &str, is_adapted: impl Fn(&str) -> bool) -> bool {
        let Some((module, end)) = param.rsplit_once('.') else {
            return false;
        };
        let trains_bias = match self.bias {
            TrainedBias::None => false,
            TrainedBias::All => true,
            TrainedBias::Adapted => is_adapted(module),
        };
        end == "bias" && trains_bias || self.saves(module)
    }

    /// Whether a module is trained whole, or a part of one that is. As in PEFT, `norm` is every
    /// module whose name ends with it, `layernorm` too.
    pub(super) fn saves(&self, module: &str) -> bool {
        self.saved_modules()
            .any(|saved| wholes(module).any(|whole| whole.ends_with(saved)))
    }

    /// The names of modules that are trained whole.
    fn saved_modules(&self) -> impl Iterator<Item = &str> {
        let is_classifier = matches!(
            self.fields.get("task_type").and_then(Value::as_str),
            Some("SEQ_CLS" | "TOKEN_CLS")
        );
        let heads: &[&'static str] = if is_classifier {
            &["classifier", "score"]
        } else {
            &[]
        };
        let saved = self.saved_modules.iter().map(String::as_str);
        saved.chain(heads.iter().copied())
    }

    /// The first module that is to be trained whole and has none of these parameters.
    #[cfg_attr(not(feature = "graph"), expect(dead_code, reason = "for training"))]
    pub(super) fn saved_without(&self, params: &[&str]) -> Option<&str> {
        let has_some = |saved: &str| {
            let mut modules = params.iter().filter_map(|param| param.rsplit_once('.'));
            modules.any(|(module, _)| wholes(module).any(|whole| whole.ends_with(saved)))
        };
        let mut saved = self.saved_modules.iter().map(String::as_str);
        saved.find(|saved| !has_some(saved))
    }

    /// The factor of the product of a module's adapter.
    pub fn scale_of(&self, module: &str) -> f64 {
        self.scale(module, self.rank(module))
    }

    /// Whether a module is a target by its name, which `all-linear` does not decide.
    pub(super) fn is_target(&self, module: &str) -> bool {
        let by_name = !matches!(self.targets, Some(Names::AllLinear));
        by_name && self.names(module) && self.obstacle(module).is_none()
    }

    /// Whether an adapter may have factors for a module: it is a target by its name, or all
    /// possible layers are targets.
    pub(super) fn may_adapt(&self, module: &str) -> bool {
        let is_open = matches!(self.targets, None | Some(Names::AllLinear));
        is_open || self.is_target(module)
    }

    /// Whether a module is one of the `target_modules`.
    pub(super) fn names(&self, module: &str) -> bool {
        self.targets.as_ref().is_some_and(|names| names.has(module))
    }

    /// The field that keeps a module from being a target though it is named.
    pub(super) fn obstacle(&self, module: &str) -> Option<&'static str> {
        let excluded = self.excluded.as_ref();
        if excluded.is_some_and(|names| names.has(module)) {
            return Some("exclude_modules");
        }
        let is_part = |saved: &str| wholes(module).any(|whole| ends_with(whole, saved));
        if self.saved_modules().any(is_part) {
            return Some("modules_to_save");
        }
        let layers = self.layers.as_ref()?;
        // A full name means that module, in any layer.
        if matches!(&self.targets, Some(Names::Listed(names)) if names.iter().any(|name| name == module))
        {
            return None;
        }
        match self.layer_of(module) {
            Some(number) if layers.contains(&number) => None,
            None if !self.layers_patterns.is_empty() => Some("layers_pattern"),
            _ => Some("layers_to_transform"),
        }
    }

    /// The number of the layer that a module is in.
    fn layer_of(&self, module: &str) -> Option<usize> {
        if self.layers_patterns.is_empty() {
            module.split('.').find_map(|part| part.parse().ok())
        } else {
            let mut found = self
                .layers_patterns
                .iter()
                .filter_map(|p| p.captures(module));
            found.next().and_then(|captures| captures[1].parse().ok())
        }
    }

    /// The first of `fields` that differs in another configuration, with the value here and there.
    pub fn difference(
        &self,
        other: &Self,
        fields: &[&'static str],
    ) -> Option<(&'static str, Value, Value)> {
        let (here, there) = (self.to_json(), other.to_json());
        let differs = |field: &&&str| field::plain(&here[**field]) != field::plain(&there[**field]);
        let field = *fields.iter().find(differs)?;
        Some((field, here[field].clone(), there[field].clone()))
    }

    /// The content of the file, defaults included.
    pub fn to_json(&self) -> Value {
        let mut fields = self.fields.clone();
        let mut default = |name: &str, value: Value| {
            fields.entry(name).or_insert(value);
        };
        default("peft_type", json!("LORA"));
        default("task_type", Value::Null);
        default("base_model_name_or_path", Value::Null);
        default("r", json!(self.rank));
        default("lora_alpha", json!(self.alpha));
        default("lora_dropout", json!(self.dropout));
        default("bias", json!("none"));
        default("fan_in_fan_out", json!(false));
        default("init_lora_weights", json!(true));
        default("inference_mode", json!(false));
        Value::Object(fields)
    }

    /// The same configuration with some fields replaced.
    ///
    /// # Errors
    /// As [`LoraConfig::from_json`].
    pub fn with(&self, name: &str, value: Value) -> Result<Self, String> {
        let mut fields = self.fields.clone();
        fields.insert(name.to_owned(), value);
        Self::from_fields(&fields)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn config(fields: &Value) -> Result<LoraConfig, String> {
        LoraConfig::from_json(fields)
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
        let root = LoraConfig {
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
            refusal("layer_replication", json!([[0, 2]])),
            refusal("init_lora_weights", json!("pissa_niter_16")),
            refusal("lora_alpha", json!("x")),
            refusal("alpha_pattern", json!({"(": 1})),
            refusal("rank_pattern", json!({"c_attn": 2.5})),
            refusal("rank_pattern", json!({"c_attn": 0})),
            refusal("lora_aplha", json!(16)),
            refusal("target_modules", json!(".*(?<!lm_)c_attn")),
            refusal("layers_pattern", json!("h")),
            refusal("task_type", json!("FOO")),
            refusal("lora_alpha", json!(1e39)),
            refusal("alpha_pattern", json!({"c_attn": 1e39})),
            refusal("ensure_weight_tying", json!(true)),
        ];
        let layers_of_a_pattern = json!({"target_modules": ".*q", "layers_to_transform": [0]});
        let messages = messages
            .into_iter()
            .chain([config(&layers_of_a_pattern).unwrap_err()]);
        let messages: Vec<_> = messages.collect();
        insta::assert_snapshot!(messages.join("\n"), @r#"
        `peft_type` is "IA3", expected `LORA`, the one kind of adapter that is read
        `layer_replication` is [[0,2]], which is not supported
        `init_lora_weights` is "pissa_niter_16", expected true, false, gaussian, eva or orthogonal: others change the base weights
        `lora_alpha` is "x", expected a number
        `(` in `alpha_pattern` is no regular expression that can be read: unclosed group
        `rank_pattern` is {"c_attn":2.5}, expected patterns and whole numbers from 1 on
        `rank_pattern` is {"c_attn":0}, expected patterns and whole numbers from 1 on
        `lora_aplha` is 16, which is not supported; did you mean "lora_alpha"?
        `.*(?<!lm_)c_attn` in `target_modules` is no regular expression that can be read: look-around, including look-ahead and look-behind, is not supported
        `layers_pattern` needs `layers_to_transform`
        `task_type` is "FOO", expected none or one of SEQ_CLS, SEQ_2_SEQ_LM, CAUSAL_LM, TOKEN_CLS, QUESTION_ANS, FEATURE_EXTRACTION
        `lora_alpha` is 1e+39, expected a number that f32 can hold
        `alpha_pattern` is {"c_attn":1e+39}, expected patterns, and for each a number that f32 can hold
        `ensure_weight_tying` is true, which is not supported
        `layers_to_transform` needs a list of `target_modules`, found a pattern: name the layers in it
        "#);
        let eva = json!({"init_lora_weights": "eva", "eva_config": {"rho": 2.0}});
        assert!(config(&eva).is_ok(), "it says how the factors started");
    }

    #[test]
    fn modules_are_targets_and_saved_as_in_peft() {
        let config = config(&json!({
            "target_modules": ["q_proj", "lm_head", "layers.3.k_proj"], "layers_to_transform": [1],
            "modules_to_save": ["norm"],
        }))
        .unwrap();
        // A module that is named in full is a target in any layer.
        for (module, is_target) in [
            ("layers.1.q_proj", true),
            ("layers.2.q_proj", false),
            ("lm_head", true),
            ("layers.3.k_proj", true),
            ("model.layers.3.k_proj", false),
        ] {
            assert_eq!(config.is_target(module), is_target, "{module}");
        }
        for module in ["norm", "layers.0.input_layernorm", "layers.0.norm.inner"] {
            assert!(config.saves(module), "{module}");
        }
        assert!(!config.saves("layers.0.norms"));
    }

    #[test]
    fn configurations_differ_in_what_they_mean() {
        let one =
            config(&json!({"r": 8, "modules_to_save": ["a", "b"], "alpha_pattern": {}})).unwrap();
        let other =
            config(&json!({"r": 8, "modules_to_save": ["b", "a"], "lora_alpha": 8.0})).unwrap();
        let fields = [
            "r",
            "modules_to_save",
            "alpha_pattern",
            "lora_alpha",
            "bias",
        ];
        assert_eq!(one.difference(&other, &fields), None);
        let other = config(&json!({"bias": "all"})).unwrap();
        let found = one.difference(&other, &["r", "bias"]);
        assert_eq!(found, Some(("bias", json!("none"), json!("all"))));
    }
}
