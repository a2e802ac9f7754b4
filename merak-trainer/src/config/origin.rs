//! Where a value came from.

use merak_ckpt::words::{brief, file};
use std::{fmt, path::PathBuf};

/// The layer, and the place in it, that set a key.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Origin {
    /// No layer set the key.
    Default,
    /// A configuration file.
    File {
        /// The file, as it was named.
        path: PathBuf,
        /// Line of the key, where it is known.
        line: Option<usize>,
    },
    /// The environment.
    Environment {
        /// The variable.
        variable: String,
    },
    /// The command line.
    CommandLine {
        /// The option or argument as it was written, without its value.
        option: String,
    },
    /// The command itself, independent of its options.
    Command,
}

impl Origin {
    /// How likely a value from here is the mistake, where several keys may be to blame: highest for
    /// the command line, lowest for values that the user did not set.
    pub(super) fn suspicion(&self) -> u8 {
        match self {
            Self::Default | Self::Command => 0,
            Self::File { .. } => 1,
            Self::Environment { .. } => 2,
            Self::CommandLine { .. } => 3,
        }
    }
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Default => f.write_str("default"),
            Self::File {
                path,
                line: Some(line),
            } => write!(f, "{}:{line}", file(path)),
            Self::File { path, line: None } => f.write_str(&file(path)),
            Self::Environment { variable } => write!(f, "environment {}", brief(variable)),
            Self::CommandLine { option } => write!(f, "command line {}", brief(option)),
            Self::Command => f.write_str("set by the command"),
        }
    }
}
