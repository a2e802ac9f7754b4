//! What a command writes to a terminal. The tests of `merak` include this file too.

use rustix::{pty, termios};
use std::{
    ffi::OsString,
    fs::File,
    io::Read,
    os::unix::ffi::OsStringExt,
    process::{Command, ExitStatus, Stdio},
};

/// How a command ends, and what it writes to a terminal with that number of columns: its output,
/// with or without its messages.
pub(crate) fn shown(mut command: Command, columns: u16, has_errors: bool) -> (ExitStatus, String) {
    let ours = pty::openpt(pty::OpenptFlags::RDWR | pty::OpenptFlags::NOCTTY).expect("a terminal");
    pty::unlockpt(&ours).expect("it can be opened");
    let name = pty::ptsname(&ours, Vec::new()).expect("it has a name");
    let name = OsString::from_vec(name.into_bytes());
    let theirs = File::options().read(true).write(true).open(name);
    let theirs = theirs.expect("it can be opened");
    let size = termios::Winsize {
        ws_row: 24,
        ws_col: columns,
        ws_xpixel: 0,
        ws_ypixel: 0,
    };
    termios::tcsetwinsize(&theirs, size).expect("it has a size");
    let errors = match theirs.try_clone() {
        Ok(theirs) if has_errors => theirs.into(),
        _ => Stdio::null(),
    };
    let running = command.stdout(theirs).stderr(errors).spawn();
    let mut running = running.expect("the command starts");
    // The command holds the terminal's last other end, whose closing ends the text.
    drop(command);
    let mut shown = Vec::new();
    let _ = File::from(ours).read_to_end(&mut shown);
    let status = running.wait().expect("the command ends");
    (
        status,
        String::from_utf8_lossy(&shown).replace("\r\n", "\n"),
    )
}
