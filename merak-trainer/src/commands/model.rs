//! The model that a configuration names.

use merak_trace::models::{self, Model};
use merak_trainer::{CheckedArguments, Error, Result};
use serde_json::Value;
use std::{path::Path, sync::Arc};

/// Reads the model's configuration, with the sizes that the arguments override.
pub(crate) fn load(args: &CheckedArguments) -> Result<(Arc<dyn Model>, Value)> {
    let missing = || Error::MissingKey {
        key: "model.config",
        advice: "name a Hugging Face config.json".to_owned(),
    };
    let path = &args.model.config.as_ref().ok_or_else(missing)?.0;
    let mut config = read(path)?;
    let names = config["model_type"].as_str().and_then(models::size_fields);
    if let (Some(fields), Some(names)) = (config.as_object_mut(), names) {
        let overrides = [
            (names.layers, args.num_layers),
            (names.hidden, args.hidden_size),
            (names.heads, args.num_heads),
        ];
        for (names, size) in overrides {
            let Some(size) = size else { continue };
            tracing::debug!(
                field = names[0],
                size,
                "overrides the model's configuration"
            );
            for name in names {
                fields.remove(*name);
            }
            fields.insert(names[0].to_owned(), size.into());
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
