//! Folders given in place of a file in them.

use super::{Config, Origin, special::TokenizerSource};
use std::path::{Path, PathBuf};

/// File name of the tokenizer in a model's folder.
const TOKENIZER: &str = "tokenizer.json";

impl Config {
    /// Replaces a folder given for `model.config` or `data.tokenizer` by the file of that kind in
    /// it. Where no layer sets a tokenizer, a model that starts from weights gets the one beside
    /// them.
    pub(super) fn look_into_folders(&mut self) {
        if let Some(path) = &mut self.arguments.model.config {
            path.0 = inside(&path.0, "config.json");
        }
        if let TokenizerSource::File(path) = &mut self.arguments.data.tokenizer {
            *path = inside(path, TOKENIZER);
        }
        let Some(folder) = &self.arguments.model.hf_dir else {
            return;
        };
        let file = folder.0.join(TOKENIZER);
        if *self.origin("data.tokenizer") == Origin::Default && file.is_file() {
            self.arguments.data.tokenizer = TokenizerSource::File(file);
            let origin = self.origin("model.hf_dir").clone();
            self.origins.insert("data.tokenizer", origin);
        }
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
