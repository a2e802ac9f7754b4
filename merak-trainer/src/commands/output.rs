//! Results on standard output.

pub(crate) use merak_ckpt::cli::columns;
use merak_ckpt::words::{folded, plain};
use merak_trainer::{Error, Result};
use std::{
    borrow::Cow,
    io::{self, IsTerminal, Write},
    path::Path,
};

/// Writes results to standard output; what a terminal would act on is escaped there. A reader that
/// went away, such as `head`, is not a failure.
///
/// # Errors
/// [`Error::Write`].
pub(crate) fn print(text: impl AsRef<[u8]>) -> Result<()> {
    print_as_is(shown(&io::stdout(), text.as_ref()))
}

/// As [`print()`] without escapes, for a text that is our own, colours included.
pub(crate) fn print_as_is(text: impl AsRef<[u8]>) -> Result<()> {
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
        outcome => outcome.map_err(Error::writing(Path::new("standard output"))),
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
    folded(text, columns())
}
