//! Results on standard output.

use std::io::{self, Write};

/// Writes results to standard output. A reader that went away, such as `head`, is no failure.
pub(crate) fn print(text: impl AsRef<[u8]>) -> io::Result<()> {
    let text = text.as_ref();
    let mut out = io::stdout().lock();
    let written = out.write_all(text).and_then(|()| {
        if text.ends_with(b"\n") {
            Ok(())
        } else {
            out.write_all(b"\n")
        }
    });
    match written.and_then(|()| out.flush()) {
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        outcome => outcome,
    }
}

/// Writes a piece of a result that is still coming; whether it arrived is told when the end is written.
pub(crate) fn stream(text: impl AsRef<[u8]>) {
    let mut out = io::stdout().lock();
    // A reader that went away is told at the end.
    let _ = out.write_all(text.as_ref()).and_then(|()| out.flush());
}
