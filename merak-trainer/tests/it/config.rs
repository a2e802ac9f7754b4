//! Layers, keys, messages and checks of the configuration.

mod checks; // illegal values, and rules between keys
mod every_key; // laws of every key, and the defaults
mod layers; // files, environment, command line

use std::{fs, path::PathBuf};

use merak_trainer::{Config, Error};
use tempfile::TempDir;

/// A configuration file in a folder of its own.
struct ConfigFile {
    _folder: TempDir,
    path: PathBuf,
}

fn file(name: &str, text: &str) -> ConfigFile {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let path = folder.path().join(name);
    fs::write(&path, text).expect("a writable folder");
    ConfigFile {
        _folder: folder,
        path,
    }
}

fn load_file(name: &str, text: &str) -> Result<Config, Error> {
    Config::load(Some(&file(name, text).path), [], &[])
}

fn load_line(line: &str) -> Result<Config, Error> {
    let words: Vec<String> = line.split_whitespace().map(Into::into).collect();
    Config::load(None, [], &words)
}

fn load_environment(variable: &str, value: &str) -> Result<Config, Error> {
    Config::load(None, [(variable.to_owned(), value.to_owned())], &[])
}

/// The error of a configuration, with the folder of its file left out.
fn message(result: Result<Config, Error>) -> String {
    let Err(error) = result.and_then(|config| config.check()) else {
        return "no error".into();
    };
    assert!(error.is_user_error());
    let text = error.to_string();
    let Some(start) = text.find("/tmp") else {
        return text;
    };
    let end = text.rfind('/').expect("a slash at least there");
    format!("{}{}", &text[..start], &text[end + 1..])
}
