//! Results on standard output.

use std::io::{self, Write};

/// Writes results to standard output. A reader that went away, such as `head`, is no failure.
pub(crate) fn print(text: &str) -> io::Result<()> {
    let mut out = io::stdout().lock();
    let written = out.write_all(text.as_bytes()).and_then(|()| {
        if text.ends_with('\n') {
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
pub(crate) fn stream(text: &str) {
    let mut out = io::stdout().lock();
    // A reader that went away is told at the end.
    let _ = out.write_all(text.as_bytes()).and_then(|()| out.flush());
}
