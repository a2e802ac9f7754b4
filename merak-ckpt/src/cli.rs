//! What the commands `merak` and `merak-ckpt` have in common: how a line is read.

use crate::words::brief;
use clap::{
    Command, CommandFactory, FromArgMatches,
    error::{ContextKind, ContextValue, Error, ErrorKind},
};
use signal_hook::{consts::SIGXFSZ, flag};
use std::{
    error::Error as _,
    ffi::OsString,
    io,
    num::{IntErrorKind, ParseFloatError, ParseIntError},
    sync::Arc,
};

/// Reads a command line. Options of all commands are taken with dashes and with underscores.
///
/// # Errors
/// Clap's error, help texts included, with words that a terminal can show safely.
pub fn parse<C: CommandFactory + FromArgMatches>(
    words: impl IntoIterator<Item = OsString>,
) -> Result<C, Error> {
    let mut command = with_underscores(C::command());
    let words: Vec<_> = words.into_iter().collect();
    let matches = command.try_get_matches_from_mut(&words);
    let matches = matches.map_err(|error| match no_text(&words) {
        Some(word) if error.kind() == ErrorKind::InvalidUtf8 => {
            command.error(ErrorKind::InvalidUtf8, word)
        }
        _ => harmless(expecting(error, &mut command)),
    })?;
    C::from_arg_matches(&matches).map_err(|error| harmless(error.format(&mut command)))
}

/// Adds the expected number to the error of an option with another value; leaves other errors as
/// they are.
fn expecting(error: Error, command: &mut Command) -> Error {
    let number = error.source().and_then(|source| {
        let float = source.downcast_ref::<ParseFloatError>();
        let float = float.map(|_| "a number such as 0.5");
        let integer = source.downcast_ref::<ParseIntError>();
        let integer = integer.map(|error| match error.kind() {
            IntErrorKind::PosOverflow => "a whole number below 2^64",
            _ => "a whole number of at least 0",
        });
        float.or(integer)
    });
    let context = |kind| match error.get(kind) {
        Some(ContextValue::String(text)) => Some(brief(text)),
        _ => None,
    };
    let words = context(ContextKind::InvalidValue).zip(context(ContextKind::InvalidArg));
    let Some((expected, (value, option))) = number.zip(words) else {
        return error;
    };
    let message = format!("invalid value '{value}' for '{option}': expected {expected}");
    command.error(ErrorKind::ValueValidation, message)
}

/// The message about the first word that is not UTF-8.
fn no_text(words: &[OsString]) -> Option<String> {
    let (at, word) = words
        .iter()
        .enumerate()
        .find(|(_, word)| word.to_str().is_none())?;
    let word = brief(&word.to_string_lossy());
    let before = at.checked_sub(1).filter(|before| *before > 0);
    let before = before.map_or_else(String::new, |before| {
        format!(" behind \"{}\"", brief(&words[before].to_string_lossy()))
    });
    Some(format!(
        "argument {at}, \"{word}\"{before}, is no UTF-8 text"
    ))
}

/// Makes a write beyond the limit on file sizes (`ulimit -f`) an error that names the file, which
/// the signal SIGXFSZ would end the process without.
///
/// # Errors
/// When the system refuses to change what the signal does.
pub fn survive_size_limit() -> io::Result<()> {
    flag::register(SIGXFSZ, Arc::default()).map(drop)
}

/// Gives every option with dashes a second name with underscores, in all subcommands.
fn with_underscores(command: Command) -> Command {
    let command = command.mut_args(|arg| match arg.get_long() {
        Some(name) if name.contains('-') => {
            let other = name.replace('-', "_");
            arg.alias(other)
        }
        _ => arg,
    });
    command.mut_subcommands(with_underscores)
}

/// The error with the words of the line escaped for a terminal.
fn harmless(mut error: Error) -> Error {
    let shown: Vec<_> = error
        .context()
        .filter_map(|(kind, value)| match value {
            ContextValue::String(text) => Some((kind, ContextValue::String(brief(text)))),
            ContextValue::Strings(texts) => {
                let texts = texts.iter().map(|text| brief(text)).collect();
                Some((kind, ContextValue::Strings(texts)))
            }
            _ => None,
        })
        .collect();
    for (kind, value) in shown {
        error.insert(kind, value);
    }
    error
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Debug, Parser)]
    enum Line {
        /// Two words in an option.
        Go {
            #[arg(long)]
            max_size: usize,
        },
    }

    #[test]
    fn an_option_has_one_meaning_with_dashes_and_with_underscores() {
        for option in ["--max-size=2", "--max_size=2"] {
            let Line::Go { max_size } = parse(["x", "go", option].map(OsString::from)).unwrap();
            assert_eq!(max_size, 2);
        }
    }

    #[test]
    fn an_option_says_which_number_it_expects() {
        for (value, expected) in [
            ("x", "a whole number of at least 0"),
            ("-1", "a whole number of at least 0"),
            ("", "a whole number of at least 0"),
            ("1.5", "a whole number of at least 0"),
            ("99999999999999999999", "a whole number below 2^64"),
        ] {
            let words = ["x", "go", &format!("--max-size={value}")].map(OsString::from);
            let error = parse::<Line>(words).unwrap_err().to_string();
            let start = format!(
                "error: invalid value '{value}' for '--max-size <MAX_SIZE>': expected {expected}"
            );
            assert!(error.starts_with(&start), "{error}");
        }
    }

    #[cfg(unix)]
    #[test]
    fn an_argument_that_is_no_text_is_named() {
        use std::os::unix::ffi::OsStringExt;
        let word = OsString::from_vec(b"\xff2".to_vec());
        let words = ["x", "go", "--max-size"].map(OsString::from).into_iter();
        let error = parse::<Line>(words.chain([word])).unwrap_err().to_string();
        let expected = "error: argument 3, \"\u{fffd}2\" behind \"--max-size\", is no UTF-8 text";
        assert!(error.starts_with(expected), "{error}");
    }

    #[test]
    fn what_somebody_typed_does_not_act_on_the_terminal() {
        for word in ["--\u{1b}[2Jx", "\u{9b}31m", "--max-size=\u{1b}c"] {
            let error = parse::<Line>(["x", "go", word].map(OsString::from)).unwrap_err();
            let text = error.render().to_string();
            let acts = |c: char| c.is_control() && c != '\n';
            assert!(!text.contains(acts), "{text:?}");
        }
    }
}
