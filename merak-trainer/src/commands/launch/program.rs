//! What the ranks run: a command of `merak`, or another program.

use super::restart::{Saved, words_of_restart};
use crate::Cli;
use clap::{
    CommandFactory,
    error::{ContextKind, ContextValue},
};
use merak_ckpt::words::brief;
use merak_mpu::names::did_you_mean;
use std::{env, ffi::OsString, io, path::PathBuf, process::Command};

/// What the ranks run.
#[derive(Debug)]
pub(super) enum Program {
    /// A command of this executable.
    Merak {
        executable: PathBuf,
        words: Vec<OsString>,
        /// The checkpoints that there were before the first start.
        saved: Option<Saved>,
    },
    /// Another program.
    Other { words: Vec<OsString> },
}

/// What clap answers by itself.
const HELP: [&str; 5] = ["help", "--help", "-h", "--version", "-V"];

/// A command line that cannot be launched.
#[derive(Debug, thiserror::Error)]
pub(super) enum Unfit {
    #[error("no command after the options: write merak launch -n 2 -- train CONFIG")]
    Empty,
    #[error("`merak launch` starts other commands, not itself")]
    Itself,
    #[error("{0} needs no ranks: write `merak {0}`")]
    Help(&'static str),
    #[error("\"{word}\" is neither a command of merak nor a program that is found{hint}")]
    Unknown { word: String, hint: String },
    #[error("cannot find the program of this process: {0}")]
    Lost(io::Error),
}

impl Program {
    /// Looks up the first word: a command of `merak`, with or without that name before it, else a
    /// program by its path or on the search path.
    pub(super) fn of(mut words: Vec<OsString>) -> Result<Self, Unfit> {
        let commands = Cli::command();
        let known = |word: &OsString| {
            let word = word.to_str()?;
            let command = commands.find_subcommand(word)?;
            (!command.is_hide_set()).then_some(command)
        };
        let help = |word: &OsString| HELP.into_iter().find(|help| word == help);
        if words.first().is_some_and(|word| word == "merak")
            && words
                .get(1)
                .is_none_or(|word| known(word).is_some() || help(word).is_some())
        {
            words.remove(0);
        }
        let word = words.first().ok_or(Unfit::Empty)?;
        if let Some(help) = help(word) {
            return Err(Unfit::Help(help));
        }
        if let Some(command) = known(word) {
            if command.get_name() == "launch" {
                return Err(Unfit::Itself);
            }
            let executable = env::current_exe().map_err(Unfit::Lost)?;
            let saved = Saved::by(&words);
            return Ok(Self::Merak {
                executable,
                words,
                saved,
            });
        }
        if is_program(word) {
            return Ok(Self::Other { words });
        }
        let nearest = similar(commands, word);
        Err(Unfit::Unknown {
            word: brief(&word.to_string_lossy()),
            hint: did_you_mean(nearest.as_deref()),
        })
    }

    /// The command of a rank at its first start or after some restarts.
    pub(super) fn command(&self, restart: u32) -> Command {
        match self {
            Self::Merak {
                executable,
                words,
                saved,
            } => {
                let mut command = Command::new(executable);
                match saved {
                    Some(saved) if restart > 0 => command.args(words_of_restart(words, saved)),
                    _ => command.args(words),
                };
                command
            }
            Self::Other { words } => {
                let mut command = Command::new(&words[0]);
                command.args(&words[1..]);
                command
            }
        }
    }

    /// Makes room for another start of a training.
    pub(super) fn prepare_restart(&self) {
        if let Self::Merak {
            saved: Some(saved), ..
        } = self
        {
            saved.make_room();
        }
    }

    /// Whether what a rank prints to standard output is the result of all: commands of `merak` give
    /// it on rank 0.
    pub(super) fn has_results_of(&self, rank: usize) -> bool {
        rank == 0 && matches!(self, Self::Merak { .. })
    }

    /// Whether another start may end otherwise. Input that was wrong stays wrong.
    pub(super) fn may_recover_from(&self, status: u8) -> bool {
        status != 2 || matches!(self, Self::Other { .. })
    }
}

/// The command of `merak` that a word resembles.
fn similar(commands: clap::Command, word: &OsString) -> Option<String> {
    let line = [OsString::from("merak"), word.clone()];
    let error = commands.try_get_matches_from(line).err()?;
    match error.get(ContextKind::SuggestedSubcommand) {
        Some(ContextValue::Strings(names)) => names.last().cloned(),
        _ => None,
    }
}

fn is_program(word: &OsString) -> bool {
    let path = PathBuf::from(word);
    if path.components().count() > 1 {
        return path.is_file();
    }
    let folders = env::var_os("PATH").unwrap_or_else(|| "/bin:/usr/bin".into());
    env::split_paths(&folders).any(|folder| folder.join(&path).is_file())
}
