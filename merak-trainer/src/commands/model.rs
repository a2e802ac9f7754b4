//! The model that a configuration names.

use merak_ckpt::HfFolder;
use merak_trace::models::{self, Model, SizeFields};
use merak_trainer::{
    CheckedArguments, Error, Result,
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
}

impl Loaded {
    /// Reads the model's configuration, with the sizes that the arguments override.
    pub(crate) fn of(args: &CheckedArguments) -> Result<Self> {
        let file = config_file(args)?;
        let mut json = read(&file)?;
        let beside = file.with_file_name("generation_config.json");
        let generation = if beside.is_file() {
            read(&beside)?
        } else {
            Value::Null
        };
        // A folder that cannot be opened is refused where its weights are read.
        if let Some(Ok(folder)) = weights_folder(args).map(HfFolder::open) {
            folder.correct(&mut json);
        }
        let names = json["model_type"].as_str().and_then(models::size_fields);
        if let (Some(fields), Some(names)) = (json.as_object_mut(), names) {
            override_sizes(fields, names, args);
        }
        if args.no_tie_modules && json.is_object() {
            // Part of the configuration, so that a checkpoint alone makes the same model again.
            merak_ckpt::set_tie(&mut json, false);
        }
        Ok(Self {
            model: models::from_config(&json)?.into(),
            json,
            generation,
        })
    }

    /// The arguments with what they leave to the model's configuration.
    pub(crate) fn complete(&self, args: CheckedArguments) -> Result<CheckedArguments> {
        let mut args = args.into_arguments();
        if args.pad_token_id.is_none() {
            args.pad_token_id = self.tokens(&self.json, "pad_token_id").first().copied();
        }
        args.check()
    }

    /// What the configuration says about data; `args` are complete.
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

    /// The tokens that end a text: the one that the arguments name, else the model's and the tokenizer's. The model's
    /// are those of `generation_config.json`, as in transformers, where that file names some.
    pub(crate) fn ends(&self, args: &CheckedArguments, tokenizer: Option<&Tokenizer>) -> Vec<u32> {
        const NAME: &str = "eos_token_id";
        if let Some(end) = args.eos_token_id {
            return vec![end];
        }
        let stated = self.generation.get(NAME).filter(|ends| !ends.is_null());
        let config = stated.map_or(&self.json, |_| &self.generation);
        let mut ends = self.tokens(config, NAME);
        ends.extend(tokenizer.and_then(Tokenizer::end_of_document));
        ends
    }

    /// What a configuration of the model says under a name: a token or a list of them. Negative ones stand for none.
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

fn override_sizes(fields: &mut Map<String, Value>, names: SizeFields, args: &CheckedArguments) {
    let overrides = [
        (names.layers, args.num_layers),
        (names.hidden, args.hidden_size),
        (names.heads, args.num_heads),
    ];
    for (names, size) in overrides {
        let Some(size) = size else { continue };
        let field = names[0];
        tracing::debug!(field, size, "overrides the model's configuration");
        for name in names {
            fields.remove(*name);
        }
        fields.insert(field.to_owned(), size.into());
    }
}

/// The Hugging Face folder that the weights come from, if it is one.
fn weights_folder(args: &CheckedArguments) -> Option<&Path> {
    let resumed = args.resume_from_checkpoint.as_deref().map(Path::new);
    let folder = args.model.hf_dir.as_ref().map(|folder| &*folder.0);
    folder.or(resumed).filter(|path| HfFolder::is_one(path))
}

/// The file that describes the model.
fn config_file(args: &CheckedArguments) -> Result<PathBuf> {
    match (&args.model.config, &args.model.hf_dir) {
        (Some(_), Some(_)) => Err(Error::TwoModels),
        (Some(file), None) => Ok(file.0.clone()),
        (None, Some(folder)) => Ok(folder.0.join("config.json")),
        (None, None) => Err(Error::MissingKey {
            key: "model.config",
            advice: "name a Hugging Face config.json".to_owned(),
        }),
    }
}

/// What lies beside the weights of `model.hf_dir` and belongs to the model: it travels with checkpoints.
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
        let content = std::fs::read(&path).map_err(|source| Error::Read { path, source })?;
        files.push((name.to_owned(), content));
    }
    Ok(files)
}

/// Reads a model's `config.json`.
pub(crate) fn read(path: &Path) -> Result<Value> {
    let text = std::fs::read_to_string(path).map_err(|source| Error::ReadInput {
        key: "model.config",
        path: path.to_owned(),
        source,
    })?;
    serde_json::from_str(&text).map_err(|error| Error::ModelSyntax {
        path: path.to_owned(),
        message: error.to_string(),
    })
}
