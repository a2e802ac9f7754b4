//! The model that a configuration names.

use merak_trace::models::{self, Model};
use merak_trainer::{CheckedArguments, Error, Result};
use serde_json::Value;
use std::{path::Path, sync::Arc};

/// Sizes that a configuration may override, and the names that model configurations have for them.
const ALIASES: [(&str, &[&str]); 3] = [
    (
        "num_layers",
        &["num_hidden_layers", "n_layer", "n_layers", "num_layers"],
    ),
    ("hidden_size", &["hidden_size", "n_embd", "d_model", "dim"]),
    ("num_heads", &["num_attention_heads", "n_head", "num_heads"]),
];

/// Reads the model's configuration, with the sizes that the arguments override.
pub(crate) fn load(args: &CheckedArguments) -> Result<(Arc<dyn Model>, Value)> {
    let missing = || Error::MissingKey {
        key: "model.config",
        advice: "name a Hugging Face config.json".to_owned(),
    };
    let path = &args.model.config.as_ref().ok_or_else(missing)?.0;
    let mut config = read(path)?;
    let given = [args.num_layers, args.hidden_size, args.num_heads];
    if let Some(fields) = config.as_object_mut() {
        for ((name, aliases), size) in ALIASES.iter().zip(given) {
            let Some(size) = size else { continue };
            // The name that the file uses, or the usual ones of all families where it states none.
            let stated: Vec<_> = aliases
                .iter()
                .filter(|alias| fields.contains_key(**alias))
                .collect();
            let names = if stated.is_empty() {
                aliases.iter().collect()
            } else {
                stated
            };
            tracing::debug!(key = name, size, "overrides the model's configuration");
            for alias in names {
                fields.insert((*alias).to_owned(), size.into());
            }
        }
    }
    if args.no_tie_modules
        && let Some(fields) = config.as_object_mut()
    {
        // Part of the configuration, so that a checkpoint alone makes the same model again.
        fields.insert("tie_word_embeddings".to_owned(), false.into());
    }
    Ok((models::from_config(&config)?.into(), config))
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
