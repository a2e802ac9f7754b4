//! The output of ranks on its way to that of the command.

use merak_ckpt::words::plain;
use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    io::Errno,
};
use std::{
    io::{self, IsTerminal, PipeReader, Read, Write},
    sync::Arc,
};

/// The most bytes of a line that are kept in memory; a longer line is cut into several.
const LONGEST: usize = 16 << 10;

/// How long output of a process that a rank has left behind is waited for, after the rank's end.
const AFTERWARDS: Timespec = Timespec {
    tv_sec: 0,
    tv_nsec: 200_000_000,
};

/// The most bytes that are copied after that: more than a pipe holds.
const MOST_AFTERWARDS: usize = 4 << 20;

/// An output of the command.
#[derive(Debug, Clone, Copy)]
pub(super) enum Out {
    Standard,
    Error,
}

impl Out {
    pub(super) fn is_terminal(self) -> bool {
        match self {
            Self::Standard => io::stdout().is_terminal(),
            Self::Error => io::stderr().is_terminal(),
        }
    }

    /// Writes all bytes at once, so that no other rank's come between.
    fn write(self, bytes: &[u8]) -> io::Result<()> {
        fn all(mut out: impl Write, bytes: &[u8]) -> io::Result<()> {
            out.write_all(bytes)?;
            out.flush()
        }
        match self {
            Self::Standard => all(io::stdout().lock(), bytes),
            Self::Error => all(io::stderr().lock(), bytes),
        }
    }
}

/// How the bytes of a rank are shown.
#[derive(Debug)]
pub(super) struct Form {
    /// What stands before each line; without it bytes pass as they come.
    pub(super) prefix: Option<String>,
    /// Whether a terminal would act on them.
    pub(super) escapes: bool,
}

/// Copies a rank's output until its end, or until `ended` is closed and nothing more comes.
///
/// # Errors
/// When the output of the command cannot be written. The caller then closes the rank's, so that the
/// rank meets the same fate.
pub(super) fn copy(
    mut from: PipeReader,
    to: Out,
    form: Form,
    ended: &Arc<PipeReader>,
) -> io::Result<()> {
    let mut lines = Lines::new(form);
    let (mut buffer, mut text) = (vec![0; 64 << 10], Vec::new());
    let mut left = MOST_AFTERWARDS;
    while left > 0 {
        let ready = is_readable(&from, ended)?;
        if ready == Ready::Never {
            break;
        }
        let count = match from.read(&mut buffer) {
            Ok(0) => break,
            Ok(count) => count,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Err(error) => return Err(error),
        };
        if ready == Ready::Last {
            left = left.saturating_sub(count);
        }
        lines.push(&buffer[..count], &mut text);
        to.write(&text)?;
        text.clear();
    }
    lines.finish(&mut text);
    to.write(&text)
}

/// Whether there is output.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Ready {
    Now,
    /// There is, and the rank has ended.
    Last,
    Never,
}

/// Waits for output.
fn is_readable(from: &PipeReader, ended: &PipeReader) -> io::Result<Ready> {
    let mut both = [
        PollFd::new(from, PollFlags::IN),
        PollFd::new(ended, PollFlags::IN),
    ];
    wait(&mut both, None)?;
    if both[1].revents().is_empty() {
        return Ok(Ready::Now);
    }
    let mut one = [PollFd::new(from, PollFlags::IN)];
    Ok(match wait(&mut one, Some(&AFTERWARDS))? {
        0 => Ready::Never,
        _ => Ready::Last,
    })
}

fn wait(fds: &mut [PollFd<'_>], limit: Option<&Timespec>) -> io::Result<usize> {
    loop {
        match poll(fds, limit) {
            Err(Errno::INTR) => {}
            other => return Ok(other?),
        }
    }
}

/// Cuts bytes into lines with a prefix.
#[derive(Debug)]
struct Lines {
    form: Form,
    /// The beginning of a line whose end has not come; without prefixes, of a character.
    begun: Vec<u8>,
    /// Whether the last line ended with a carriage return, to which a line feed may belong.
    after_return: bool,
}

impl Lines {
    fn new(form: Form) -> Self {
        Self {
            form,
            begun: Vec::new(),
            after_return: false,
        }
    }

    /// Adds to `out` what `bytes` complete.
    fn push(&mut self, bytes: &[u8], out: &mut Vec<u8>) {
        if self.form.prefix.is_none() {
            self.begun.extend_from_slice(bytes);
            let whole = if self.form.escapes {
                whole_characters(&self.begun)
            } else {
                self.begun.len()
            };
            let rest = self.begun.split_off(whole);
            self.show(out, false);
            self.begun = rest;
            return;
        }
        let mut rest = bytes;
        while let Some(&first) = rest.first() {
            let is_end = |byte: &u8| matches!(byte, b'\n' | b'\r');
            // A line feed after a carriage return belongs to it.
            if std::mem::take(&mut self.after_return) && first == b'\n' {
                rest = &rest[1..];
                continue;
            }
            let end = rest.iter().position(is_end);
            let room = LONGEST - self.begun.len();
            let taken = end.unwrap_or(rest.len()).min(room);
            self.begun.extend_from_slice(&rest[..taken]);
            rest = &rest[taken..];
            match rest.first() {
                Some(end) if is_end(end) => {
                    self.after_return = *end == b'\r';
                    // Programs that draw a line anew begin it with a carriage return.
                    if !self.after_return || !self.begun.is_empty() {
                        self.show(out, true);
                    }
                    rest = &rest[1..];
                }
                Some(_) => {
                    let later = self.begun.split_off(whole_characters(&self.begun));
                    self.show(out, true);
                    self.begun = later;
                }
                None => {}
            }
        }
    }

    /// Adds what has begun.
    fn finish(&mut self, out: &mut Vec<u8>) {
        if !self.begun.is_empty() {
            let is_line = self.form.prefix.is_some();
            self.show(out, is_line);
        }
    }

    fn show(&mut self, out: &mut Vec<u8>, is_line: bool) {
        let prefix = self.form.prefix.as_deref().unwrap_or_default().as_bytes();
        // The lines of our own commands have it.
        if !self.begun.starts_with(prefix) {
            out.extend_from_slice(prefix);
        }
        if self.form.escapes {
            let text = String::from_utf8_lossy(&self.begun);
            out.extend_from_slice(plain(&text).as_bytes());
        } else {
            out.extend_from_slice(&self.begun);
        }
        if is_line {
            out.push(b'\n');
        }
        self.begun.clear();
    }
}

/// The number of bytes up to a character at the end that is not whole; all of them where the end is
/// no text.
fn whole_characters(bytes: &[u8]) -> usize {
    const MOST: usize = 3;
    let begins = |byte: &u8| byte & 0xc0 != 0x80;
    let tail = &bytes[bytes.len().saturating_sub(MOST)..];
    let Some(at) = tail.iter().rposition(begins) else {
        return bytes.len();
    };
    let error = std::str::from_utf8(&tail[at..]).err();
    let is_cut = error.is_some_and(|error| error.error_len().is_none());
    bytes.len() - if is_cut { tail.len() - at } else { 0 }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// The bytes shown, given in pieces.
    fn shown(form: Form, pieces: &[&[u8]]) -> Vec<u8> {
        let (mut lines, mut out) = (Lines::new(form), Vec::new());
        for piece in pieces {
            lines.push(piece, &mut out);
            assert!(lines.begun.capacity() <= 4 * LONGEST, "memory is bounded");
        }
        lines.finish(&mut out);
        out
    }

    fn prefixed(pieces: &[&[u8]]) -> String {
        let form = Form {
            prefix: Some("[rank 2] ".to_owned()),
            escapes: true,
        };
        String::from_utf8(shown(form, pieces)).unwrap()
    }

    #[test]
    fn every_line_gets_the_prefix_once_however_its_bytes_come() {
        let whole = prefixed(&[b"one\ntwo\n\nfour"]);
        assert_eq!(
            whole,
            "[rank 2] one\n[rank 2] two\n[rank 2] \n[rank 2] four\n"
        );
        let bytes: Vec<&[u8]> = b"one\ntwo\n\nfour".chunks(1).collect();
        assert_eq!(prefixed(&bytes), whole);
        assert_eq!(prefixed(&[]), "");
        assert_eq!(prefixed(&[whole.as_bytes()]), whole);
    }

    #[test]
    fn a_carriage_return_ends_a_line_too() {
        let told = prefixed(&[b"\r 1%\r 2%\r", b"\nend\r\n"]);
        assert_eq!(told, "[rank 2]  1%\n[rank 2]  2%\n[rank 2] end\n");
    }

    #[test]
    fn a_terminal_does_not_act_on_what_a_rank_prints() {
        assert_eq!(
            prefixed(&[b"\x1b[2J\xff\n"]),
            "[rank 2] \\u{1b}[2J\u{fffd}\n"
        );
        let form = || Form {
            prefix: None,
            escapes: true,
        };
        let pieces: Vec<_> = "né€😀\u{1b}\n".as_bytes().chunks(1).collect();
        let told = String::from_utf8(shown(form(), &pieces)).unwrap();
        assert_eq!(told, "né€😀\\u{1b}\n");
        assert_eq!(shown(form(), &[b"a\xe2\x82"]), "a\u{fffd}".as_bytes());
    }

    #[test]
    fn a_line_without_end_is_cut_between_characters_and_loses_nothing() {
        let line = "€".repeat(LONGEST);
        let told = prefixed(&line.as_bytes().chunks(1000).collect::<Vec<_>>());
        assert!(told.lines().all(|line| line.len() <= LONGEST + 9));
        let lines = told
            .lines()
            .map(|line| line.strip_prefix("[rank 2] ").unwrap());
        assert!(lines.collect::<String>() == line);
    }

    proptest! {
        #[test]
        fn without_a_prefix_bytes_pass_as_they_are(bytes: Vec<u8>, size in 1_usize..8) {
            let form = Form { prefix: None, escapes: false };
            prop_assert_eq!(shown(form, &bytes.chunks(size).collect::<Vec<_>>()), bytes);
        }

        #[test]
        fn lines_are_the_same_however_the_bytes_are_cut(text in "[ab€\r\n]{0,30}", size in 1_usize..8) {
            let bytes = text.as_bytes();
            prop_assert_eq!(prefixed(&bytes.chunks(size).collect::<Vec<_>>()), prefixed(&[bytes]));
        }
    }
}
