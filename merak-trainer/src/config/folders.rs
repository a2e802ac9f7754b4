//! Folders given in place of a file in them.

use super::{Config, Origin, choice::DataFormat, sources::TokenizerSource};
use crate::error::ConfigError;
use merak_ckpt::{format::CONFIG, words::file};
use std::{
    fs,
    path::{Path, PathBuf},
};

pub(crate) use merak_ckpt::format::RUN_CONFIG as RESOLVED;

/// File name of the tokenizer in a model's folder.
const TOKENIZER: &str = "tokenizer.json";

impl Config {
    /// Replaces a folder given for `model.config` or `data.tokenizer` by the file of that kind in
    /// it. Where no layer sets a tokenizer, a model that starts from weights gets the one beside
    /// them, and another one that of its token files.
    pub(super) fn look_into_folders(&mut self) {
        if let Some(path) = &mut self.arguments.model.config {
            path.0 = inside(&path.0, CONFIG);
        }
        if let TokenizerSource::File(path) = &mut self.arguments.data.tokenizer {
            *path = inside(path, TOKENIZER);
        }
        if self.origin("data.tokenizer") != Origin::Default {
            return;
        }
        let of_model = self.arguments.model.hf_dir.as_ref();
        let of_model = of_model.map(|folder| ("model.hf_dir", folder.0.join(TOKENIZER)));
        // Weights know the tokens of one tokenizer: text has no other without that being said.
        // Prompts may be token ids.
        let is_text = self.arguments.data.format.is_text() && !self.arguments.text_generation;
        let is_needed = |file: &Path| is_text && file.with_file_name(CONFIG).is_file();
        let of_model = of_model.filter(|(_, file)| file.is_file() || is_needed(file));
        let of_tokens = self.tokenizer_of_tokens();
        let of_tokens = of_tokens.filter(|(_, file)| file.is_file());
        if let Some((key, file)) = of_model.or(of_tokens) {
            self.arguments.data.tokenizer = TokenizerSource::File(file);
            let place = self.values.get(key).cloned();
            self.values
                .extend(place.map(|place| ("data.tokenizer".to_owned(), place)));
        }
    }

    /// The tokenizer that the first token files lie beside, and the key that names them.
    fn tokenizer_of_tokens(&self) -> Option<(&'static str, PathBuf)> {
        let data = &self.arguments.data;
        if data.format != DataFormat::Tokens {
            return None;
        }
        let (key, paths) = match (&data.mixture, &data.path) {
            (Some(mixture), _) => ("data.mixture", &mixture.parts()[0].path),
            (None, Some(path)) => ("data.path", path),
            (None, None) => return None,
        };
        let first = paths.first();
        let folder = if first.is_dir() {
            first
        } else {
            first.parent()?
        };
        Some((key, folder.join(TOKENIZER)))
    }
}

/// The error of a folder given in place of a configuration file, with the way on.
pub(super) fn no_configuration(folder: &Path) -> ConfigError {
    ConfigError::ConfigFolder {
        path: folder.to_owned(),
        advice: way_on(folder),
    }
}

/// What a folder has that a configuration could be, or that one could name.
fn way_on(folder: &Path) -> String {
    // A checkpoint lies two levels below its run, and the folder of all checkpoints one.
    let runs = folder.ancestors().take(3);
    let mut resolved = runs.map(|run| run.join(RESOLVED));
    if let Some(resolved) = resolved.find(|resolved| resolved.is_file()) {
        let from = if resolved.parent() == Some(folder) {
            "latest".to_owned()
        } else {
            file(folder)
        };
        let resolved = file(&resolved);
        return format!(
            "its run has {resolved}, and `merak train {resolved} --resume {from}` goes on with it"
        );
    }
    if folder.join(CONFIG).is_file() {
        return "it is that of a model: name it in a configuration file, as \"model.hf_dir\" to start from its weights, \
            or as \"model.config\""
            .to_owned();
    }
    let is_configuration = |path: &PathBuf| {
        let extension = path.extension().and_then(|extension| extension.to_str());
        matches!(extension, Some("toml" | "yaml" | "yml")) && path.is_file()
    };
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let files = entries.map(|entry| entry.path()).filter(is_configuration);
    match files.min() {
        Some(first) => format!("name a file, for example {}", file(&first)),
        None => "name a file (.toml, .yaml or .json)".to_owned(),
    }
}

/// The file of this name in a folder; any other path as it is.
fn inside(path: &Path, name: &str) -> PathBuf {
    if path.is_dir() {
        path.join(name)
    } else {
        path.to_owned()
    }
}
