//! Configuration keys at the end of a command line.

use super::environment;
use clap::Args as ClapArgs;
use merak_trainer::{Config, Given, Result};
use std::path::Path;

/// Keys of the configuration, after everything else.
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
    /// The command's own options that were looked for among the words.
    #[arg(skip)]
    options: Vec<&'static str>,
    /// What the command gives by itself.
    #[arg(skip)]
    given: Vec<Given>,
}

impl Keys {
    /// Removes a flag of the command and says whether it was there. All words after the first key
    /// are among these words.
    pub(crate) fn take_flag(&mut self, flag: &'static str) -> bool {
        self.options.push(flag);
        let before = self.words.len();
        self.words.retain(|word| dashed(word) != flag);
        self.words.len() < before
    }

    /// Removes an option of the command and its value, as `--name VALUE` or `--name=VALUE`.
    pub(crate) fn take_option(&mut self, name: &'static str) -> Option<String> {
        self.options.push(name);
        let is_option = |word: &String| {
            let word = dashed(word);
            let rest = word.strip_prefix(name);
            rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('='))
        };
        let at = self.words.iter().position(is_option)?;
        let word = self.words.remove(at);
        match word.split_once('=') {
            Some((_, value)) => Some(value.to_owned()),
            None if at < self.words.len() => Some(self.words.remove(at)),
            None => Some(String::new()),
        }
    }

    /// Whether the command line has none.
    pub(crate) fn is_empty(&self) -> bool {
        self.words.is_empty()
    }

    /// Adds a value that the command gives a key.
    pub(crate) fn give(&mut self, given: Given) {
        self.given.push(given);
    }

    /// Resolves the file, the environment and these keys.
    pub(crate) fn load(&self, file: &Path) -> Result<Config> {
        self.resolve(Some(file))
    }

    /// Resolves the environment and these keys, over a file if there is one.
    pub(crate) fn resolve(&self, file: Option<&Path>) -> Result<Config> {
        let given = self.given.iter().cloned();
        let options = [&self.options[..], &["--log"]].concat();
        Config::load_with(file, environment::variables()?, &self.words, given)
            .map_err(|error| error.or_option(&options))
    }
}

/// An option with dashes, as the command's own are spelled; its value stays.
fn dashed(word: &str) -> String {
    match word.split_once('=') {
        Some((name, value)) => format!("{}={value}", name.replace('_', "-")),
        None => word.replace('_', "-"),
    }
}
