//! What the commands `merak` and `merak-ckpt` have in common: how a line is read, and how messages
//! reach the terminal.

use crate::words::{brief, folded, message, pasted_dash};
use clap::{
    Command, CommandFactory, FromArgMatches,
    error::{ContextKind, ContextValue, Error, ErrorKind},
};
use signal_hook::{consts::SIGXFSZ, flag};
use std::{
    borrow::Cow,
    env,
    error::Error as _,
    ffi::OsString,
    fmt::Display,
    io::{self, IsTerminal, Write},
    num::{IntErrorKind, NonZeroUsize, ParseFloatError, ParseIntError},
    ops::RangeInclusive,
    os::fd::AsFd,
    process::ExitCode,
    str::FromStr,
    sync::Arc,
};
use tracing_subscriber::{
    filter::{LevelFilter, Targets},
    fmt::MakeWriter,
    layer::SubscriberExt,
    util::SubscriberInitExt,
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
        _ => harmless(expecting(error, &mut command, &words), &mut command, &words),
    })?;
    C::from_arg_matches(&matches)
        .map_err(|error| harmless(error.format(&mut command), &mut command, &words))
}

/// What is expected in place of a number that is too large to be read.
const BEYOND: &str = "a whole number below 2^64";

/// Reads the value of an option that counts what there is at least one of.
///
/// # Errors
/// The numbers that are expected, for any other text.
pub fn at_least_one(text: &str) -> Result<usize, String> {
    let number = text.parse().map(NonZeroUsize::get);
    number.map_err(|error: ParseIntError| {
        let expected = match error.kind() {
            IntErrorKind::PosOverflow => BEYOND,
            _ => "a whole number of at least 1",
        };
        format!("expected {expected}")
    })
}

/// What reads the value of an option that is a whole number of a range.
pub fn whole_number<T: FromStr + PartialOrd + Display + Clone>(
    range: RangeInclusive<T>,
) -> impl Fn(&str) -> Result<T, String> + Clone {
    move |text: &str| {
        let number = text.parse::<T>().ok();
        let legal = number.filter(|number| range.contains(number));
        legal.ok_or_else(|| {
            let (least, most) = (range.start(), range.end());
            format!("expected a whole number from {least} to {most}")
        })
    }
}

/// Prints what [`parse`] returned in place of a command, and returns the exit status: 0 for a help
/// text, 2 for an error.
pub fn refused(error: &Error) -> ExitCode {
    // As for every message, a reader that went away is no failure.
    if !error.use_stderr() {
        let _ = error.print();
        return ExitCode::SUCCESS;
    }
    let text = error.render();
    let text = if has_colours() {
        text.ansi().to_string()
    } else {
        text.to_string()
    };
    let _ = StandardError.write_all(text.as_bytes());
    ExitCode::from(u8::try_from(error.exit_code()).unwrap_or(2))
}

/// Standard error, for log lines and messages. On a terminal lines are folded to its columns; in
/// files and pipes they stay whole.
///
/// A line is written by one call, as `write_all` does.
#[derive(Debug, Clone, Copy, Default)]
pub struct StandardError;

impl Write for StandardError {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let mut out = io::stderr();
        let columns = columns_of(&out);
        // A text without an end of line goes on: where its last line ends is not known.
        let text = str::from_utf8(bytes)
            .ok()
            .filter(|text| text.ends_with('\n'));
        let shown = match text.filter(|_| columns.is_some()) {
            Some(text) => Cow::Owned(folded(text, columns).into_bytes()),
            None => Cow::Borrowed(bytes),
        };
        out.write_all(&shown)?;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        io::stderr().flush()
    }
}

/// Writes a message to standard error, with words that a terminal can show safely. A closed one is
/// not an error.
pub fn report(text: &str) {
    let line = message(text) + "\n";
    let _ = StandardError.write_all(line.as_bytes());
}

/// Whether what goes to standard error may have colours.
pub fn has_colours() -> bool {
    io::stderr().is_terminal() && env::var_os("NO_COLOR").is_none()
}

/// Sends events to a writer: those that the filter in `RUST_LOG` names, or else `filter`, such as
/// `info` and `warn,merak_trainer=debug`. A variable that is empty or no filter does not count.
///
/// # Errors
/// The reason why `filter` is none.
pub fn log_events<W>(filter: &str, writer: W) -> Result<(), String>
where
    W: for<'a> MakeWriter<'a> + Send + Sync + 'static,
{
    let variable = env::var_os("RUST_LOG").filter(|text| !text.is_empty());
    let variable = variable.and_then(|text| targets(text.to_str()?).ok());
    let filter = match variable {
        Some(filter) => filter,
        None => targets(filter)?,
    };
    tracing_subscriber::fmt()
        .with_max_level(LevelFilter::TRACE)
        .with_ansi(has_colours())
        // Where nobody reads any more, it would panic about that.
        .log_internal_errors(false)
        .with_writer(writer)
        .finish()
        .with(filter)
        .init();
    Ok(())
}

/// Reads a filter of targets and levels. [`Targets`] would take a span for the name of a target,
/// which no event has, and nothing behind a last comma for the level `error`.
fn targets(filter: &str) -> Result<Targets, String> {
    let parts = filter.split(',').map(str::trim);
    let parts: Vec<_> = parts.filter(|part| !part.is_empty()).collect();
    if let Some(part) = parts.iter().find(|part| part.contains('[')) {
        return Err(format!(
            "{part} names spans or fields, expected targets and levels alone"
        ));
    }
    let parsed = parts.join(",").parse::<Targets>();
    parsed.map_err(|error| error.to_string())
}

/// Adds the expected number to the error of an option with another value; leaves other errors as
/// they are.
fn expecting(error: Error, command: &mut Command, words: &[OsString]) -> Error {
    let number = error.source().and_then(|source| {
        let float = source.downcast_ref::<ParseFloatError>();
        let float = float.map(|_| "a number such as 0.5");
        let integer = source.downcast_ref::<ParseIntError>();
        let integer = integer.map(|error| match error.kind() {
            IntErrorKind::PosOverflow => BEYOND,
            _ => "a whole number of at least 0",
        });
        float.or(integer)
    });
    let context = |kind| match error.get(kind) {
        Some(ContextValue::String(text)) => Some(brief(text)),
        _ => None,
    };
    let named = context(ContextKind::InvalidValue).zip(context(ContextKind::InvalidArg));
    let Some((expected, (value, option))) = number.zip(named) else {
        return error;
    };
    let message = format!("invalid value '{value}' for '{option}': expected {expected}");
    innermost(command, words).error(ErrorKind::ValueValidation, message)
}

/// The command that a line names within others, whose usage its errors show.
fn innermost<'a>(mut command: &'a mut Command, words: &[OsString]) -> &'a mut Command {
    for name in words.iter().skip(1).filter_map(|word| word.to_str()) {
        if command.find_subcommand(name).is_some() {
            let inner = command.find_subcommand_mut(name);
            command = inner.expect("it was just found");
        }
    }
    command
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

/// The columns of the terminal that standard output goes to, if it goes to one.
pub fn columns() -> Option<usize> {
    columns_of(&io::stdout())
}

/// The columns of a terminal.
fn columns_of(output: &impl AsFd) -> Option<usize> {
    let (width, _) = terminal_size::terminal_size_of(output)?;
    Some(usize::from(width.0))
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

/// The message about an option before the file of a command whose keys come after that file.
fn without_file(error: &Error, command: &Command, words: &[OsString]) -> Option<String> {
    let Some(ContextValue::String(word)) = error.get(ContextKind::InvalidArg) else {
        return None;
    };
    let is_slip = error.get(ContextKind::SuggestedArg).is_some();
    if error.kind() != ErrorKind::UnknownArgument || is_slip || !word.starts_with("--") {
        return None;
    }
    let subcommand = |word: &OsString| command.find_subcommand(word.to_str()?);
    let command = words.iter().skip(1).find_map(subcommand)?;
    let mut places = command.get_positionals();
    let file = places.next()?.get_id().as_str().to_uppercase();
    let keys = places.find(|place| place.is_trailing_var_arg_set())?;
    let keys = keys.get_id().as_str();
    Some(format!(
        "{file} is missing before '{}': {keys} come after it",
        brief(word)
    ))
}

/// The message about an option that was pasted with another dash.
fn with_other_dash(error: &Error) -> Option<String> {
    match error.get(ContextKind::InvalidArg) {
        Some(ContextValue::String(word)) => pasted_dash(word),
        _ => None,
    }
}

/// The error with the words of the line escaped for a terminal. Clap's tip to put `--` before a
/// word is left out: it is wrong for an option's value, and quotes the word as it is.
fn harmless(mut error: Error, command: &mut Command, words: &[OsString]) -> Error {
    if let Some(message) = without_file(&error, command, words) {
        return command.error(ErrorKind::MissingRequiredArgument, message);
    }
    if let Some(message) = with_other_dash(&error) {
        return command.error(ErrorKind::UnknownArgument, message);
    }
    error.remove(ContextKind::Suggested);
    let shown: Vec<_> = error
        .context()
        .filter_map(|(kind, value)| match value {
            ContextValue::String(text) => Some((kind, ContextValue::String(brief(text)))),
            ContextValue::Strings(texts) => {
                let mut texts: Vec<_> = texts.iter().map(|text| brief(text)).collect();
                if kind == ContextKind::SuggestedSubcommand {
                    // Clap has the nearest one last.
                    texts.reverse();
                }
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
            #[arg(long, value_parser = at_least_one, allow_negative_numbers = true)]
            ranks: Option<usize>,
        },
        /// A folder.
        ImportHf,
        /// To a folder.
        ExportHf,
        /// A file, and keys after it.
        Keys {
            config: Option<String>,
            #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
            keys: Vec<String>,
        },
    }

    #[test]
    fn a_filter_is_of_targets_and_levels_and_may_have_blanks_and_a_last_comma() {
        let expected = targets("warn,merak_mpu=error").unwrap();
        assert_eq!(targets(" warn, merak_mpu=error,").unwrap(), expected);
        assert_eq!(targets(""), targets("error"));
        assert_eq!(
            targets("info,merak_trainer[step]=debug").unwrap_err(),
            "merak_trainer[step]=debug names spans or fields, expected targets and levels alone"
        );
        targets("x==").unwrap_err();
    }

    #[test]
    fn an_option_has_one_meaning_with_dashes_and_with_underscores() {
        for option in ["--max-size=2", "--max_size=2"] {
            let line = parse(["x", "go", option].map(OsString::from)).unwrap();
            assert!(matches!(line, Line::Go { max_size: 2, .. }));
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

    #[test]
    fn an_option_that_counts_from_one_says_so() {
        for (value, expected) in [
            ("four", "a whole number of at least 1"),
            ("0", "a whole number of at least 1"),
            ("-1", "a whole number of at least 1"),
            ("99999999999999999999", "a whole number below 2^64"),
        ] {
            let words = ["x", "go", "--max-size=1", &format!("--ranks={value}")];
            let error = parse::<Line>(words.map(OsString::from)).unwrap_err();
            let start = format!(
                "error: invalid value '{value}' for '--ranks <RANKS>': expected {expected}"
            );
            assert!(error.to_string().starts_with(&start), "{error}");
        }
    }

    #[test]
    fn the_nearest_command_is_proposed_first_and_another_dash_is_named() {
        let told = |words: [&str; 3]| {
            let error = parse::<Line>(words.map(OsString::from)).unwrap_err();
            error.to_string()
        };
        let text = told(["x", "import-hg", "a"]);
        assert!(text.contains("exist: 'import-hf', 'export-hf'"), "{text}");
        let text = told(["x", "import-hf", "\u{2014}max-size"]);
        let expected = "error: \"\u{2014}max-size\" begins with an em dash: write \"--max-size\"";
        assert!(text.starts_with(expected), "{text}");
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

    #[test]
    fn an_unknown_word_is_shortened_and_no_tip_quotes_it_or_advises_a_wrong_dash() {
        let long = "k".repeat(20_000);
        for word in [&format!("--{long}"), "-1", "--\u{1b}]0;x\u{7}"] {
            let words = ["x", "go", word].map(OsString::from);
            let text = parse::<Line>(words).unwrap_err().to_string();
            assert!(text.len() < 1000 && !text.contains("tip"), "{text:?}");
        }
    }

    #[test]
    fn a_key_before_the_file_says_that_the_file_is_missing() {
        let words = ["x", "keys", "--set", "tp=2"].map(OsString::from);
        let text = parse::<Line>(words).unwrap_err().to_string();
        let expected = "error: CONFIG is missing before '--set': keys come after it";
        assert!(text.starts_with(expected), "{text}");
        let words = ["x", "keys", "a.toml", "--set", "tp=2"].map(OsString::from);
        let line = parse(words).unwrap();
        let Line::Keys { config, keys } = line else {
            panic!("another command");
        };
        assert_eq!((config.as_deref(), keys.len()), (Some("a.toml"), 2));
    }
}
