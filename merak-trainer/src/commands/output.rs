//! Results on standard output.

use super::Failure;
pub(crate) use merak_ckpt::cli::columns;
use merak_ckpt::words::{file, folded, plain};
use merak_trainer::{Error, Result, RunFolder};
use std::{
    borrow::Cow,
    fs,
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

/// Whether a file is one of a run's own in its folder.
fn is_of_run(folder: &Path, file: &Path) -> bool {
    let own = RunFolder::entries(folder).unwrap_or_default();
    own.iter().any(|own| file.starts_with(own))
}

/// Refuses to write over what a command reads. Inputs are files and folders, each behind what names
/// it; `option` names `path`.
///
/// # Errors
/// [`Error::CommandLine`].
pub(crate) fn refuse_input<'a>(
    option: &str,
    path: &Path,
    inputs: impl IntoIterator<Item = (&'static str, &'a Path)>,
) -> Result<()> {
    // What is not there yet, and a pipe or device, loses nothing.
    let Some(there) = fs::canonicalize(path).ok().filter(|there| there.is_file()) else {
        return Ok(());
    };
    // Beside weights there may be what a command has written; of data all files are read.
    let is_own = there
        .extension()
        .is_some_and(|kind| kind == "html" || kind == "jsonl");
    let is_read = |named_by: &str, input: &Path| match fs::canonicalize(input) {
        Ok(input) if input == there => true,
        Ok(input) if there.starts_with(&input) => {
            named_by.starts_with("data.") || !is_own || is_of_run(&input, &there)
        }
        _ => false,
    };
    let mut inputs = inputs.into_iter();
    let Some((named_by, input)) = inputs.find(|(named_by, input)| is_read(named_by, input)) else {
        return Ok(());
    };
    let (path, input) = (file(path), file(input));
    let is_key = named_by.starts_with(char::is_lowercase);
    let named_by = if is_key {
        format!("\"{named_by}\"")
    } else {
        named_by.to_owned()
    };
    Err(Error::CommandLine(format!(
        "{path}, which {option} names, is read as {input}, which {named_by} names: name another file"
    )))
}

/// The failure of a file that cannot be written. Where the path is at fault, it names the option.
pub(crate) fn not_written(option: &str, path: &Path, source: io::Error) -> Failure {
    use io::ErrorKind as K;
    match source.kind() {
        K::NotFound | K::PermissionDenied | K::IsADirectory | K::NotADirectory => format!(
            "cannot write {}, which {option} names: {source}",
            file(path)
        )
        .into(),
        _ => Error::writing(path)(source).into(),
    }
}

/// A text with its lines wrapped to the terminal that results go to.
pub(crate) fn fitted(text: &str) -> String {
    folded(text, columns())
}
