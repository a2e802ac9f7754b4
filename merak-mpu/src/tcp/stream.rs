//! A stream of bytes to another process: a socket, or memory that both map.

#[cfg(target_os = "linux")]
use super::shared::Shared;
use crate::mill::Wire;
use std::{
    io::{self, ErrorKind, Read, Write},
    net::TcpStream,
    os::fd::{AsFd, BorrowedFd},
};

/// A stream of bytes in both directions.
#[derive(Debug)]
pub(super) struct Stream {
    /// Carries the bytes; beside shared memory, the calls that wake a process, and the end.
    socket: TcpStream,
    #[cfg(target_os = "linux")]
    shared: Option<Shared>,
}

impl Stream {
    pub(super) fn new(socket: TcpStream) -> io::Result<Self> {
        socket.set_nonblocking(true)?;
        socket.set_nodelay(true)?;
        Ok(Self {
            socket,
            #[cfg(target_os = "linux")]
            shared: None,
        })
    }

    /// Has all bytes go through shared memory from now on, as on the other side.
    #[cfg(target_os = "linux")]
    pub(super) fn share(&mut self, shared: Shared) {
        self.shared = Some(shared);
    }
}

impl Wire for Stream {
    fn socket(&self) -> Option<(BorrowedFd<'_>, bool)> {
        #[cfg(target_os = "linux")]
        let tells_of_room = self.shared.is_none();
        #[cfg(not(target_os = "linux"))]
        let tells_of_room = true;
        Some((self.socket.as_fd(), tells_of_room))
    }

    fn can_move(&self, writes: bool) -> bool {
        #[cfg(target_os = "linux")]
        if let Some(shared) = &self.shared {
            return shared.can_move(writes);
        }
        let _ = writes;
        false
    }

    fn begin_sleep(&self, writes: bool) -> bool {
        #[cfg(target_os = "linux")]
        if let Some(shared) = &self.shared {
            return shared.begin_sleep(writes);
        }
        let _ = writes;
        false
    }

    fn has_bytes(&self) -> bool {
        #[cfg(target_os = "linux")]
        if let Some(shared) = &self.shared {
            shared.end_sleep();
            return shared.has_bytes();
        }
        false
    }

    fn write(&mut self, bytes: &[u8]) -> io::Result<Option<usize>> {
        #[cfg(target_os = "linux")]
        if let Some(shared) = &mut self.shared {
            if bytes.is_empty() {
                return Ok(Some(0));
            }
            let (written, sleeps) = shared.write(bytes)?;
            if sleeps {
                call(&self.socket)?;
            }
            return Ok((written > 0).then_some(written));
        }
        write(&self.socket, bytes)
    }

    fn read(&mut self, bytes: &mut [u8]) -> io::Result<Option<usize>> {
        #[cfg(target_os = "linux")]
        if let Some(shared) = &mut self.shared {
            let (mut got, mut sleeps) = shared.read(bytes)?;
            let mut is_open = true;
            if got == 0 {
                // What was written before the end is still there.
                is_open = read(&self.socket, &mut [0; 64])?.is_some();
                (got, sleeps) = shared.read(bytes)?;
            }
            if sleeps && is_open {
                call(&self.socket)?;
            }
            return Ok((is_open || got > 0).then_some(got));
        }
        read(&self.socket, bytes)
    }
}

/// Wakes the process on the other side.
#[cfg(target_os = "linux")]
fn call(socket: &TcpStream) -> io::Result<()> {
    // A socket that is full wakes it as well.
    write(socket, &[1]).map(drop)
}

/// Writes some bytes; none where the socket takes none now.
fn write(mut socket: &TcpStream, bytes: &[u8]) -> io::Result<Option<usize>> {
    loop {
        match socket.write(bytes) {
            Ok(0) if !bytes.is_empty() => return Err(ErrorKind::WriteZero.into()),
            Ok(written) => return Ok(Some(written)),
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(None),
            Err(error) => return Err(error),
        }
    }
}

/// Reads some bytes: 0 where none are there now, and none at the end of the stream.
pub(super) fn read(mut socket: &TcpStream, bytes: &mut [u8]) -> io::Result<Option<usize>> {
    loop {
        match socket.read(bytes) {
            Ok(0) => return Ok(None),
            Ok(read) => return Ok(Some(read)),
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(Some(0)),
            Err(error) => return Err(error),
        }
    }
}
