//! What a mill needs of the transport below it.

use crate::Rank;
use std::{fmt, io, os::fd::BorrowedFd, time::Duration};

/// A stream of bytes to and from one other process.
pub(crate) trait Wire: Send + fmt::Debug {
    /// Writes some bytes; none where there is no room now.
    fn write(&mut self, bytes: &[u8]) -> io::Result<Option<usize>>;

    /// Has what was written leave, where it was held back for more.
    fn flush(&mut self) {}

    /// Reads some bytes: 0 where none are there now, and none at the end of the stream.
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<Option<usize>>;

    /// The socket to poll for bytes, if there is one, and whether it reports room to write too.
    fn socket(&self) -> Option<(BorrowedFd<'_>, bool)>;

    /// Whether bytes are there that no poll of the socket tells of.
    fn has_bytes(&self) -> bool;

    /// Whether, aside from the socket, there is something to read, or room to write where `writes`.
    fn can_move(&self, writes: bool) -> bool;

    /// Has the peer wake this process, which is about to sleep, when there is something to read, or
    /// room to write where `writes`. Says whether there is already.
    fn begin_sleep(&self, writes: bool) -> bool;
}

/// Moves the bytes of all wires of a process, for wires that do not move them by themselves.
pub(crate) trait Port {
    /// Moves what can be moved now.
    ///
    /// # Errors
    /// [`Unreachable`] with the rank to which nothing moves any more.
    fn turn(&mut self) -> Result<(), Unreachable>;

    /// The longest sleep before the next turn; none where something wakes a sleeper.
    fn longest_sleep(&self) -> Option<Duration>;
}

/// A rank that bytes do not reach any more.
#[derive(Debug)]
pub(crate) struct Unreachable {
    pub(crate) rank: Rank,
    pub(crate) error: io::Error,
}

/// The port of wires that move their bytes themselves.
pub(crate) struct NoPort;

impl Port for NoPort {
    fn turn(&mut self) -> Result<(), Unreachable> {
        Ok(())
    }

    fn longest_sleep(&self) -> Option<Duration> {
        None
    }
}
