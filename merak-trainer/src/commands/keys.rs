//! The end of a command line: a configuration file's keys, given over.

use super::environment;
use clap::Args as ClapArgs;
use merak_trainer::{Config, Result};
use std::path::Path;

/// Keys of the configuration, behind everything else.
#[derive(Debug, Clone, ClapArgs)]
pub(crate) struct Keys {
    /// Configuration keys as `--set KEY=VALUE` or `--KEY VALUE`.
    #[arg(
        id = "keys",
        trailing_var_arg = true,
        allow_hyphen_values = true,
        value_name = "KEYS"
    )]
    words: Vec<String>,
}

impl Keys {
    /// Removes a flag of the command and says whether it was there: whatever follows the first key lands here.
    pub(crate) fn take_flag(&mut self, flag: &str) -> bool {
        let before = self.words.len();
        self.words.retain(|word| word != flag);
        self.words.len() < before
    }

    /// Adds a key, as if it stood at the end of the line.
    pub(crate) fn push(&mut self, key: &str, value: impl Into<String>) {
        self.words.extend([format!("--{key}"), value.into()]);
    }

    /// Resolves the file, the environment and these keys.
    pub(crate) fn load(&self, file: &Path) -> Result<Config> {
        let word = |word: &String| {
            // The short name of `resume_from_checkpoint`.
            match word.strip_prefix("--resume") {
                Some(value) if value.is_empty() || value.starts_with('=') => {
                    format!("--resume_from_checkpoint{value}")
                }
                _ => word.clone(),
            }
        };
        let words: Vec<_> = self.words.iter().map(word).collect();
        Config::load(Some(file), environment::variables(), &words)
    }
}
