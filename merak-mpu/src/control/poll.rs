//! Waiting for sockets, and waking a thread that does.

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::{
    io::{self, Read, Write},
    os::{
        fd::{AsFd, BorrowedFd},
        unix::net::UnixStream,
    },
    time::Duration,
};

/// What a thread waits for on one socket.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Interest {
    pub(crate) read: bool,
    pub(crate) write: bool,
}

/// Waits until a socket can be read or written as asked, or has failed, for at most `timeout`.
/// Returns by socket what it can do now; a signal ends the wait early.
pub(crate) fn wait(
    sockets: &[(BorrowedFd<'_>, Interest)],
    timeout: Duration,
) -> io::Result<Vec<Interest>> {
    let mut fds: Vec<_> = sockets
        .iter()
        .map(|(fd, interest)| {
            let mut flags = PollFlags::empty();
            flags.set(PollFlags::IN, interest.read);
            flags.set(PollFlags::OUT, interest.write);
            PollFd::from_borrowed_fd(*fd, flags)
        })
        .collect();
    // Less than a millisecond more, so that a deadline has passed when this returns.
    let timeout = Timespec::try_from(timeout).map_err(io::Error::other)?;
    match poll(&mut fds, Some(&timeout)) {
        Ok(_) | Err(rustix::io::Errno::INTR) => {}
        Err(error) => return Err(error.into()),
    }
    let failed = PollFlags::ERR | PollFlags::HUP | PollFlags::NVAL;
    let found = fds.iter().map(|fd| {
        let events = fd.revents();
        Interest {
            read: events.intersects(PollFlags::IN | failed),
            write: events.intersects(PollFlags::OUT | failed),
        }
    });
    Ok(found.collect())
}

/// Waits until a socket can be read, for at most `timeout`; says which can.
pub(crate) fn readable(sockets: &[BorrowedFd<'_>], timeout: Duration) -> io::Result<Vec<bool>> {
    let interest = Interest {
        read: true,
        write: false,
    };
    let sockets: Vec<_> = sockets.iter().map(|fd| (*fd, interest)).collect();
    let found = wait(&sockets, timeout)?;
    Ok(found.into_iter().map(|found| found.read).collect())
}

/// Waits until a socket can be written, for at most `timeout`.
pub(crate) fn writable(socket: BorrowedFd<'_>, timeout: Duration) -> io::Result<()> {
    let interest = Interest {
        read: false,
        write: true,
    };
    wait(&[(socket, interest)], timeout).map(drop)
}

/// Wakes a thread that polls.
#[derive(Debug)]
pub(crate) struct Waker {
    send: UnixStream,
    receive: UnixStream,
}

impl Waker {
    pub(crate) fn new() -> io::Result<Self> {
        let (send, receive) = UnixStream::pair()?;
        send.set_nonblocking(true)?;
        receive.set_nonblocking(true)?;
        Ok(Self { send, receive })
    }

    /// Ends the current or the next poll of [`Waker::as_fd`].
    pub(crate) fn wake(&self) {
        // A full socket wakes as well as another byte.
        let _ = (&self.send).write(&[1]);
    }

    /// Forgets the wakes so far.
    pub(crate) fn rest(&self) {
        let mut bytes = [0; 64];
        while matches!((&self.receive).read(&mut bytes), Ok(64)) {}
    }
}

impl AsFd for Waker {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.receive.as_fd()
    }
}
