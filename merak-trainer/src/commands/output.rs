//! Results on standard output.

use merak_ckpt::words::plain;
use std::{
    borrow::Cow,
    io::{self, IsTerminal, Write},
};

/// Writes results to standard output; what a terminal would act on is escaped there. A reader that
/// went away, such as `head`, is not a failure.
pub(crate) fn print(text: impl AsRef<[u8]>) -> io::Result<()> {
    print_as_is(shown(&io::stdout(), text.as_ref()))
}

/// As [`print()`] without escapes, for a text that is our own, colours included.
pub(crate) fn print_as_is(text: impl AsRef<[u8]>) -> io::Result<()> {
    let mut out = io::stdout().lock();
    let text = text.as_ref();
    let written = out.write_all(text).and_then(|()| {
        if text.ends_with(b"\n") {
            Ok(())
        } else {
            out.write_all(b"\n")
        }
    });
    match written.and_then(|()| out.flush()) {
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        outcome => outcome.map_err(|error| {
            let reason = format!("cannot write to standard output: {error}");
            io::Error::new(error.kind(), reason)
        }),
    }
}

/// Writes a part of a result; a failed write is reported at the end of the result.
pub(crate) fn stream(text: impl AsRef<[u8]>) {
    let mut out = io::stdout().lock();
    let text = shown(&out, text.as_ref());
    // A failed write fails again at the end.
    let _ = out.write_all(&text).and_then(|()| out.flush());
}

/// A text for this output: escaped for a terminal, unchanged elsewhere.
fn shown<'a>(out: &impl IsTerminal, text: &'a [u8]) -> Cow<'a, [u8]> {
    if out.is_terminal() {
        let text = String::from_utf8_lossy(text);
        Cow::Owned(plain(&text).into_owned().into_bytes())
    } else {
        Cow::Borrowed(text)
    }
}

/// A text with its lines wrapped to the terminal that results go to.
pub(crate) fn fitted(text: &str) -> String {
    fitted_to(text, columns())
}

/// A text with its lines wrapped to this many columns. The continuation is indented past the word
/// that a line begins with. A list without blanks that is longer than a line is wrapped behind its
/// commas and colons.
pub(crate) fn fitted_to(text: &str, columns: Option<usize>) -> String {
    const INDENT: usize = 10;
    let columns = columns.unwrap_or(usize::MAX);
    let mut fitted = String::with_capacity(text.len());
    for line in text.lines() {
        let mut used = 0;
        for word in line
            .split_inclusive(' ')
            .flat_map(|word| pieces(word, columns.saturating_sub(INDENT)))
        {
            let length = word.trim_end().chars().count();
            if used > INDENT && used + length > columns {
                fitted.truncate(fitted.trim_end().len());
                fitted.push('\n');
                fitted.push_str(&" ".repeat(INDENT));
                used = INDENT;
            }
            fitted.push_str(word);
            used += word.chars().count();
        }
        fitted.push('\n');
    }
    fitted
}

/// The word, or the parts of a list that has no room.
fn pieces(word: &str, room: usize) -> Vec<&str> {
    if word.chars().count() > room {
        word.split_inclusive([',', ':']).collect()
    } else {
        vec![word]
    }
}

/// The columns of the terminal that results go to, if they go to one.
pub(crate) fn columns() -> Option<usize> {
    let (width, _) = terminal_size::terminal_size_of(io::stdout())?;
    Some(usize::from(width.0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_and_lists_without_blanks_are_wrapped_to_the_columns() {
        let list = vec!["1.25"; 64].join(":");
        let text = format!("costs F={list},I=1\n{}\n", "word ".repeat(40).trim_end());
        let folded = fitted_to(&text, Some(80));
        assert!(folded.lines().all(|line| line.len() <= 80), "{folded}");
        let joined: String = folded.split_whitespace().collect();
        assert_eq!(joined, text.split_whitespace().collect::<String>());
        assert_eq!(fitted_to(&text, None), text);
    }
}
