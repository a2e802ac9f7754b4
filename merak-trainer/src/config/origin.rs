//! Where a value came from: the text that its layer notes in `config::Value`, and what it tells.

use ::config::Value;
use merak_ckpt::words::{brief, file};
use std::{fmt, path::Path};

/// The layer that set a key, with the place in it as messages name it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Origin<'a> {
    /// No layer set the key.
    Default,
    /// A configuration file, as it was named, with the line of the key where it is known:
    /// `merak.toml:3`.
    File(&'a str),
    /// A variable: `environment MERAK_TP`.
    Environment(&'a str),
    /// An option or argument as it was written, without its value: `command line --tp`.
    CommandLine(&'a str),
    /// The command itself, independent of its options.
    Command,
}

const ENVIRONMENT: &str = "environment ";
const COMMAND_LINE: &str = "command line ";
pub(super) const COMMAND: &str = "set by the command";

pub(super) fn in_file(path: &Path, line: Option<usize>) -> String {
    let path = file(path);
    // A relative path must not read like another layer.
    let is_other = [ENVIRONMENT, COMMAND_LINE, COMMAND]
        .iter()
        .any(|layer| path.starts_with(layer));
    let here = if is_other { "./" } else { "" };
    let line = line.map_or_else(String::new, |line| format!(":{line}"));
    format!("{here}{path}{line}")
}

pub(super) fn in_environment(variable: &str) -> String {
    format!("{ENVIRONMENT}{}", brief(variable))
}

pub(super) fn on_command_line(option: &str) -> String {
    format!("{COMMAND_LINE}{}", brief(option))
}

impl<'a> Origin<'a> {
    /// The origin of a value, from its layer's text.
    pub(super) fn of(value: &'a Value) -> Self {
        match value.origin() {
            None => Self::Default,
            Some(COMMAND) => Self::Command,
            Some(place) if place.starts_with(ENVIRONMENT) => Self::Environment(place),
            Some(place) if place.starts_with(COMMAND_LINE) => Self::CommandLine(place),
            Some(place) => Self::File(place),
        }
    }

    /// How likely a value from here is the mistake, where several keys may be to blame: highest for
    /// the command line, lowest for values that the user did not set.
    pub(super) fn suspicion(self) -> u8 {
        match self {
            Self::Default | Self::Command => 0,
            Self::File(_) => 1,
            Self::Environment(_) => 2,
            Self::CommandLine(_) => 3,
        }
    }
}

impl fmt::Display for Origin<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match *self {
            Self::Default => "default",
            Self::File(place) | Self::Environment(place) | Self::CommandLine(place) => place,
            Self::Command => COMMAND,
        })
    }
}
