//! The files and folders that a key names.

use std::path::Path;

use crate::{
    config::{DataArguments, InputPaths},
    error::{Error, Result},
};
use merak_ckpt::words::file;

/// The key of data to validate on.
const VALIDATION: &str = "data.validation_path";

/// Files and folders, and the key that names them.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Input<'a> {
    pub(crate) key: &'static str,
    pub(crate) paths: &'a InputPaths,
}

impl<'a> Input<'a> {
    /// What `data.path` names.
    pub(crate) fn data(paths: &'a InputPaths) -> Self {
        Self {
            key: "data.path",
            paths,
        }
    }

    /// What `data.validation_path` names.
    pub(crate) fn validation(paths: &'a InputPaths) -> Self {
        Self {
            key: VALIDATION,
            paths,
        }
    }

    /// What a part of `data.mixture` names.
    pub(crate) fn mixture(paths: &'a InputPaths) -> Self {
        Self {
            key: "data.mixture",
            paths,
        }
    }

    /// Whether these are data to validate on.
    pub(crate) fn validates(&self) -> bool {
        self.key == VALIDATION
    }

    /// The most bytes of text that are read of these: `data.max_bytes`, but for validation all that
    /// is there.
    pub(crate) fn most_bytes(&self, arguments: &DataArguments) -> Option<usize> {
        arguments.max_bytes.filter(|_| !self.validates())
    }

    /// The paths, for people.
    pub(crate) fn describe(&self) -> String {
        let paths: Vec<_> = self.paths.iter().map(file).collect();
        paths.join(", ")
    }

    /// Each path.
    pub(crate) fn iter(&self) -> impl Iterator<Item = &'a Path> {
        self.paths.iter()
    }

    /// A result whose error blames the key of this input. Errors of data blame `data.path`
    /// themselves.
    pub(crate) fn blamed<T>(&self, result: Result<T>) -> Result<T> {
        result.map_err(|error| match error {
            Error::Data(_) if self.key != "data.path" => Error::Blamed {
                key: self.key,
                place: None,
                source: Box::new(error),
            },
            error => error,
        })
    }
}
