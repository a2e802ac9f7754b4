//! The model that a configuration names.

use merak_ckpt::{GenerateOptions, HfFolder, words::brief};
use merak_trace::models::{self, Model, SizeFields};
use merak_trainer::{
    CheckedArguments, Config, ConfigError, Error, Origin, PlanError, Result,
    data::{DataTokens, Tokenizer},
};
use serde_json::{Map, Value};
use std::{
    path::{Path, PathBuf},
    sync::Arc,
};

/// A model and the configuration that made it.
#[derive(Debug, Clone)]
pub(crate) struct Loaded {
    pub(crate) model: Arc<dyn Model>,
    /// The content of its `config.json`, overrides included.
    pub(crate) json: Value,
    /// The content of the `generation_config.json` beside it, if there is one.
    generation: Value,
    /// That file, and the key that names the configuration.
    generation_file: (&'static str, PathBuf),
}

impl Loaded {
    /// Reads the model's configuration, with the sizes that the arguments override.
    pub(crate) fn of(args: &CheckedArguments) -> Result<Self> {
        let (key, file) = config_file(args)?;
        if let Some(folder) = &args.model.hf_dir
            && !file.exists()
        {
            HfFolder::refuse_others(&folder.0).map_err(|error| blamed(key, error))?;
        }
        let mut json = read(key, &file)?;
        let beside = file.with_file_name("generation_config.json");
        let generation = if beside.is_file() {
            read(key, &beside)?
        } else {
            Value::Null
        };
        check_ends(&json, key, &file)?;
        check_ends(&generation, key, &beside)?;
        // A folder that cannot be opened is refused where its weights are read.
        if let Some(Ok(folder)) = weights_folder(args).map(HfFolder::open) {
            folder.correct(&mut json);
        }
        let names = json["model_type"].as_str().and_then(models::size_fields);
        let stated = json.clone();
        let mut overridden = Vec::new();
        if let (Some(fields), Some(names)) = (json.as_object_mut(), names) {
            overridden = override_sizes(fields, names, args);
        }
        if args.no_tie_modules && json.is_object() {
            // The configuration keeps it, so that a checkpoint alone makes the same model again.
            merak_ckpt::set_tie(&mut json, false);
        }
        Ok(Self {
            model: models::from_config(&json)
                .map_err(|error| match by_override(&error, &stated, &overridden) {
                    Some(key) => blamed(key, error),
                    None => blamed(
                        key,
                        Error::Plan(PlanError::ModelContent {
                            path: file,
                            reason: Box::new(error),
                        }),
                    ),
                })?
                .into(),
            json,
            generation,
            generation_file: (key, beside),
        })
    }

    /// Completes the arguments from the model's configuration.
    pub(crate) fn complete(&self, args: CheckedArguments) -> Result<CheckedArguments> {
        let mut args = args.into_arguments();
        if args.pad_token_id.is_none() {
            args.pad_token_id = self.tokens(&self.json, "pad_token_id").first().copied();
        }
        args.check()
    }

    /// Completes the arguments for generation, also from `generation_config.json`.
    pub(crate) fn complete_to_generate(
        &self,
        args: CheckedArguments,
        config: &Config,
    ) -> Result<CheckedArguments> {
        let mut args = self.complete(args)?.into_arguments();
        let is_open = |key: &str| config.origin(key) == Origin::Default;
        self.check_generation(&is_open)?;
        let penalty = self.generation["repetition_penalty"].as_f64();
        if let Some(penalty) = penalty.filter(|_| is_open("repetition_penalty")) {
            args.repetition_penalty = penalty;
        }
        if args.num_beams > 1 {
            args.temperature.0 = searched(args.temperature.0, is_open("temperature"), config)?;
        }
        let args = args.check()?;
        let fields = self.not_applied(&args, &is_open);
        if !fields.is_empty() {
            tracing::warn!(
                ?fields,
                "generation_config.json has fields that are not applied"
            );
        }
        Ok(args)
    }

    /// Refuses what `generation_config.json` says in a form that cannot be applied, except where
    /// the user has said it.
    fn check_generation(&self, is_open: &dyn Fn(&str) -> bool) -> Result<()> {
        /// Field, what it may be, and that in words.
        type Rule = (&'static str, fn(&Value) -> bool, &'static str);
        const RULES: [Rule; 4] = [
            ("repetition_penalty", is_above_0, "a number above 0"),
            (
                "min_new_tokens",
                Value::is_u64,
                "a whole number of at least 0",
            ),
            (ENDS, |ends| each(ends, Value::is_u64), EXPECTED_ENDS),
            (
                "suppress_tokens",
                |tokens| each(tokens, is_id),
                "a list of tokens' numbers",
            ),
        ];
        let (key, path) = &self.generation_file;
        if !self.generation.is_null() && !self.generation.is_object() {
            let found = brief(&self.generation.to_string());
            let message = format!("it is {found}, expected an object of fields");
            return Err(wrong_content(key, path, message));
        }
        for (name, is_legal, expected) in RULES {
            let stated = &self.generation[name];
            if !stated.is_null() && is_open(name) && !is_legal(stated) {
                return Err(wrong_field(key, path, name, stated, expected));
            }
        }
        Ok(())
    }

    /// Fields of `generation_config.json` that ask for other tokens than these arguments do, where
    /// the user has not said it either.
    fn not_applied(
        &self,
        args: &CheckedArguments,
        is_open: &dyn Fn(&str) -> bool,
    ) -> Vec<&'static str> {
        let has_no_limit = is_open("max_new_tokens") && is_open("out_seq_length");
        let limit = args.new_token_limit() as f64;
        let numbers = [
            ("num_beams", args.num_beams as f64, is_open("num_beams")),
            (
                "no_repeat_ngram_size",
                args.no_repeat_ngram_size as f64,
                is_open("no_repeat_ngram_size"),
            ),
            ("temperature", args.temperature.0, is_open("temperature")),
            ("top_k", args.top_k as f64, is_open("top_k")),
            ("top_p", args.top_p, is_open("top_p")),
            ("min_p", args.min_p, is_open("min_p")),
            ("max_new_tokens", limit, has_no_limit),
        ];
        let is_other = |(name, used, is_open): &(&str, f64, bool)| {
            let stated = &self.generation[*name];
            let is_same = stated
                .as_f64()
                .is_some_and(|stated| stated.total_cmp(used).is_eq());
            *is_open && !stated.is_null() && !is_same
        };
        let numbers = numbers.into_iter().filter(is_other).map(|(name, ..)| name);
        // In transformers, the limit of the whole text counts where there is none of new tokens.
        let has_length = has_no_limit
            && self.generation["max_new_tokens"].is_null()
            && !self.generation["max_length"].is_null();
        let draws = self.generation["do_sample"].as_bool();
        let is_drawn = args.temperature.0 > 0.0;
        let has_draws = is_open("temperature") && draws.is_some_and(|draws| draws != is_drawn);
        numbers
            .chain(has_length.then_some("max_length"))
            .chain(has_draws.then_some("do_sample"))
            .chain(self.unapplied())
            .collect()
    }

    /// Fields of `generation_config.json` that change the chosen tokens in transformers and have no
    /// effect here.
    fn unapplied(&self) -> impl Iterator<Item = &'static str> {
        // A field is inactive at this number, and where it is null, false or empty.
        const FIELDS: &[(&str, Option<f64>)] = &[
            ("bad_words_ids", None),
            ("begin_suppress_tokens", None),
            ("constraints", None),
            ("dola_layers", None),
            ("encoder_no_repeat_ngram_size", Some(0.0)),
            ("encoder_repetition_penalty", Some(1.0)),
            ("epsilon_cutoff", Some(0.0)),
            ("eta_cutoff", Some(0.0)),
            ("exponential_decay_length_penalty", None),
            ("force_words_ids", None),
            ("forced_bos_token_id", None),
            ("forced_decoder_ids", None),
            ("forced_eos_token_id", None),
            ("guidance_scale", Some(1.0)),
            ("min_length", Some(0.0)),
            ("penalty_alpha", Some(0.0)),
            ("sequence_bias", None),
            ("stop_strings", None),
            ("token_healing", None),
            ("top_h", None),
            ("typical_p", Some(1.0)),
            ("watermarking_config", None),
        ];
        let is_active = |(name, neutral): &&(&str, Option<f64>)| match &self.generation[*name] {
            Value::Null | Value::Bool(false) => false,
            Value::Array(items) => !items.is_empty(),
            Value::Object(items) => !items.is_empty(),
            Value::Number(number) => number.as_f64() != *neutral,
            Value::Bool(true) | Value::String(_) => true,
        };
        FIELDS.iter().filter(is_active).map(|(name, _)| *name)
    }

    /// The options of generation: the sampling options of the arguments, the tokens that end a
    /// text, and the tokens and least length that `generation_config.json` prescribes.
    pub(crate) fn generate_options(
        &self,
        args: &CheckedArguments,
        tokenizer: Option<&Tokenizer>,
    ) -> GenerateOptions {
        let stated = || self.generation["min_new_tokens"].as_u64().unwrap_or(0);
        let stated = || usize::try_from(stated()).unwrap_or(usize::MAX);
        GenerateOptions {
            eos_token_ids: self.ends(args, tokenizer),
            min_new_tokens: args.min_new_tokens.unwrap_or_else(stated),
            decoder_start_token_id: Some(self.data_tokens(args).decoder_start),
            suppress_tokens: self.tokens(&self.generation, "suppress_tokens"),
            ..options_of(args)
        }
    }

    /// The settings of the configuration about data; `args` are complete.
    pub(crate) fn data_tokens(&self, args: &CheckedArguments) -> DataTokens {
        let pad = args.pad_token_id.unwrap_or(0);
        let start = self.tokens(&self.json, "decoder_start_token_id");
        let classes = self.json.get("label2id").and_then(Value::as_object);
        let classes = classes.into_iter().flatten();
        DataTokens {
            pad,
            decoder_start: start.first().copied().unwrap_or(pad),
            label2id: classes
                .filter_map(|(name, class)| Some((name.clone(), class.as_i64()?)))
                .collect(),
        }
    }

    /// The tokens that end a text: the one that the arguments name, else the model's and the
    /// tokenizer's. The model's are those of `generation_config.json`, as in transformers, where
    /// that file names some.
    fn ends(&self, args: &CheckedArguments, tokenizer: Option<&Tokenizer>) -> Vec<u32> {
        if let Some(ends) = &args.eos_token_id {
            return ends.0.clone();
        }
        let stated = self.generation.get(ENDS).filter(|ends| !ends.is_null());
        let config = stated.map_or(&self.json, |_| &self.generation);
        let mut ends = self.tokens(config, ENDS);
        ends.extend(tokenizer.and_then(Tokenizer::end_of_document));
        ends
    }

    /// The tokens under a name of the model's configuration, which has one or a list. Negative ones
    /// stand for none.
    fn tokens(&self, config: &Value, name: &str) -> Vec<u32> {
        let stated = match config.get(name) {
            Some(Value::Array(tokens)) => tokens.as_slice(),
            Some(token) => std::slice::from_ref(token),
            None => &[],
        };
        let vocab = self.model.info().vocab_size as u64;
        let (known, unknown): (Vec<_>, Vec<_>) = stated
            .iter()
            .filter_map(Value::as_u64)
            .partition(|&token| token < vocab);
        if !unknown.is_empty() {
            tracing::warn!(
                name,
                ?unknown,
                vocab,
                "the model's configuration names tokens beyond its vocabulary"
            );
        }
        let ids = known
            .into_iter()
            .filter_map(|token| u32::try_from(token).ok());
        ids.collect()
    }
}

/// The temperature of a beam search, which draws nothing: 0, or refused where another is asked for.
fn searched(temperature: f64, is_open: bool, config: &Config) -> Result<f64> {
    const KEY: &str = "temperature";
    if is_open || temperature == 0.0 {
        return Ok(0.0);
    }
    Err(Error::Config(ConfigError::IllegalValue {
        key: KEY,
        found: temperature.to_string(),
        place: config.origin(KEY).to_string(),
        expected: "0 or unset: with several \"num_beams\" no token is drawn".to_owned(),
    }))
}

/// The field of the tokens that end a text.
const ENDS: &str = "eos_token_id";

/// What [`ENDS`] is, for messages.
const EXPECTED_ENDS: &str = "a token's number or a list of them";

/// Refuses an end of texts that is not a token.
fn check_ends(config: &Value, key: &'static str, path: &Path) -> Result<()> {
    let is_token = |value: &Value| value.is_null() || is_id(value);
    let stated = config.get(ENDS).unwrap_or(&Value::Null);
    if each(stated, is_token) {
        return Ok(());
    }
    Err(wrong_field(key, path, ENDS, stated, EXPECTED_ENDS))
}

/// Whether a value is a token's number, or a negative one, which stands for no token.
fn is_id(value: &Value) -> bool {
    value.is_i64() || value.is_u64()
}

fn is_above_0(value: &Value) -> bool {
    value.as_f64().is_some_and(|number| number > 0.0)
}

/// Whether a value, or each of the values in a list, is legal.
fn each(value: &Value, is_legal: impl Fn(&Value) -> bool) -> bool {
    match value {
        Value::Array(values) => values.iter().all(is_legal),
        value => is_legal(value),
    }
}

/// The error about a field of a model's configuration, which this key names.
fn wrong_field(key: &'static str, path: &Path, name: &str, found: &Value, expected: &str) -> Error {
    let found = brief(&found.to_string());
    let message = format!("`{name}` is {found}, expected {expected}");
    wrong_content(key, path, message)
}

fn wrong_content(key: &'static str, path: &Path, message: String) -> Error {
    let path = path.to_owned();
    blamed(key, Error::Plan(PlanError::ModelSyntax { path, message }))
}

/// An error with the key that is to blame for it.
fn blamed(key: &'static str, error: impl Into<Error>) -> Error {
    Error::Blamed {
        key,
        place: None,
        source: Box::new(error.into()),
    }
}

/// The key of the size that caused an error, if the file's own sizes make a model: then one of the
/// overrides is to blame.
fn by_override(
    error: &merak_trace::Error,
    stated: &Value,
    overridden: &[(&'static str, &'static str)],
) -> Option<&'static str> {
    let merak_trace::Error::ModelConfig { field, .. } = error else {
        return None;
    };
    let own = overridden.iter().find(|(_, name)| name == field);
    // A width that was set may not divide by the heads of the configuration.
    let width = || overridden.iter().find(|(key, _)| *key == "hidden_size");
    let (key, _) = own.or_else(width).or(overridden.first())?;
    models::from_config(stated).is_ok().then_some(*key)
}

/// Replaces the configuration's sizes by those of the arguments; returns the replaced ones as key
/// and field.
fn override_sizes(
    fields: &mut Map<String, Value>,
    names: SizeFields,
    args: &CheckedArguments,
) -> Vec<(&'static str, &'static str)> {
    let overrides = [
        ("num_layers", names.layers, args.num_layers),
        ("hidden_size", names.hidden, args.hidden_size),
        ("num_heads", names.heads, args.num_heads),
    ];
    let mut overridden = Vec::new();
    for (key, names, size) in overrides {
        let Some(size) = size else { continue };
        let field = names[0];
        tracing::debug!(field, size, "overrides the model's configuration");
        for name in names {
            fields.remove(*name);
        }
        fields.insert(field.to_owned(), size.into());
        overridden.push((key, field));
    }
    overridden
}

/// The Hugging Face folder that the weights come from, if it is one.
fn weights_folder(args: &CheckedArguments) -> Option<&Path> {
    let resumed = args.resume_from_checkpoint.as_deref().map(Path::new);
    let folder = args.model.hf_dir.as_ref().map(|folder| &*folder.0);
    folder.or(resumed).filter(|path| HfFolder::is_one(path))
}

/// The file that describes the model, and the key that names it.
fn config_file(args: &CheckedArguments) -> Result<(&'static str, PathBuf)> {
    match (&args.model.config, &args.model.hf_dir) {
        (Some(file), _) => Ok((CONFIG, file.0.clone())),
        (None, Some(folder)) => Ok(("model.hf_dir", folder.0.join("config.json"))),
        (None, None) => Err(Error::Config(ConfigError::MissingKey {
            key: CONFIG,
            advice: "name a Hugging Face config.json".to_owned(),
        })),
    }
}

/// The most bytes of a file beside weights: vocabularies are the largest.
const MAX_COMPANION_BYTES: u64 = 256 << 20;

/// The model's files beside the weights of `model.hf_dir`, which checkpoints take along.
pub(crate) fn companions(args: &CheckedArguments) -> Result<Vec<(String, Vec<u8>)>> {
    let Some(folder) = &args.model.hf_dir else {
        return Ok(Vec::new());
    };
    let folder = HfFolder::open(&folder.0)?;
    let mut files = Vec::new();
    // The configuration in use and the tokenizer in use are written by the run itself.
    let kept = |name: &&str| !matches!(*name, "config.json" | "tokenizer.json");
    for name in folder.companions().into_iter().filter(kept) {
        let path = folder.path().join(name);
        let content = merak_ckpt::read_regular(&path, MAX_COMPANION_BYTES)
            .map_err(|source| Error::Read { path, source })?;
        files.push((name.to_owned(), content));
    }
    Ok(files)
}

/// The key of a model's description.
pub(crate) const CONFIG: &str = "model.config";

/// Reads a model's `config.json`, which this key names.
pub(crate) fn read(key: &'static str, path: &Path) -> Result<Value> {
    let text = merak_ckpt::read_text(path, merak_ckpt::MAX_CONFIG_BYTES)
        .map_err(Error::reading_input(key, path))?;
    serde_json::from_str(&text).map_err(|error| wrong_content(key, path, error.to_string()))
}

/// The sampling options of a configuration. The model and the tokenizer decide where texts end.
fn options_of(args: &CheckedArguments) -> GenerateOptions {
    GenerateOptions {
        max_new_tokens: args.new_token_limit(),
        temperature: args.temperature.0,
        top_k: args.top_k,
        top_p: args.top_p,
        min_p: args.min_p,
        repetition_penalty: args.repetition_penalty,
        no_repeat_ngram_size: args.no_repeat_ngram_size,
        num_beams: args.num_beams,
        length_penalty: args.length_penalty,
        early_stopping: args.early_stopping.0,
        seed: args.seed,
        ..GenerateOptions::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use merak_trainer::Config;

    #[test]
    fn every_option_of_generation_follows_its_key_and_has_the_default_of_merak_ckpt() {
        let options = |line: &[String]| {
            let config = Config::load(None, [], line).and_then(|config| config.check());
            options_of(&config.unwrap())
        };
        let usual = options(&[]);
        assert_eq!(usual, GenerateOptions::default());
        for (key, value) in [
            ("out_seq_length", "7"),
            ("max_new_tokens", "7"),
            ("temperature", "0.5"),
            ("top_k", "7"),
            ("top_p", "0.5"),
            ("min_p", "0.5"),
            ("repetition_penalty", "2"),
            ("no_repeat_ngram_size", "3"),
            ("num_beams", "2"),
            ("length_penalty", "2"),
            ("early_stopping", "true"),
            ("seed", "7"),
        ] {
            assert_ne!(options(&[format!("--{key}={value}")]), usual, "{key}");
        }
    }
}
