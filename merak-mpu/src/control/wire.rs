//! Bytes between processes: numbers and strings of bounded length, and frames of them on a socket.

use super::poll;
use crate::{Rank, Wait};
use std::{
    io::{self, ErrorKind, Read, Write},
    net::{Shutdown, TcpStream},
    os::fd::{AsFd, BorrowedFd},
    time::{Duration, Instant},
};

/// Longest frame of the control plane.
pub(super) const MOST_BYTES: usize = 1 << 20;

/// Bytes that one read takes at most.
const PIECE_BYTES: usize = 16 << 10;

/// Longest time that a frame waits for a peer that does not read.
const SEND_TIMEOUT: Duration = Duration::from_secs(1);

/// What came cannot be what a rank of this crate sends.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("bytes that no rank sends")]
pub(crate) struct Malformed;

/// Appends values to a frame.
#[derive(Debug, Default)]
pub(crate) struct Encoder(pub(crate) Vec<u8>);

impl Encoder {
    pub(crate) fn of(kind: u8) -> Self {
        Self(vec![kind])
    }

    pub(crate) fn number(&mut self, value: u64) -> &mut Self {
        self.0.extend(value.to_le_bytes());
        self
    }

    pub(crate) fn size(&mut self, value: usize) -> &mut Self {
        self.number(value as u64)
    }

    pub(crate) fn bytes(&mut self, bytes: &[u8]) -> &mut Self {
        self.size(bytes.len());
        self.0.extend(bytes);
        self
    }

    pub(crate) fn text(&mut self, text: &str) -> &mut Self {
        self.bytes(text.as_bytes())
    }

    pub(crate) fn sizes(&mut self, values: impl ExactSizeIterator<Item = usize>) -> &mut Self {
        self.size(values.len());
        for value in values {
            self.size(value);
        }
        self
    }

    pub(crate) fn ranks(&mut self, ranks: &[Rank]) -> &mut Self {
        self.sizes(ranks.iter().map(|rank| rank.0))
    }

    pub(crate) fn wait(&mut self, wait: &Wait) -> &mut Self {
        self.size(wait.rank.0)
            .text(&wait.op)
            .text(&wait.group)
            .number(wait.sequence)
            .ranks(&wait.missing)
    }

    pub(crate) fn waits(&mut self, waits: &[Wait]) -> &mut Self {
        self.size(waits.len());
        for wait in waits {
            self.wait(wait);
        }
        self
    }
}

/// Takes values out of a frame. No length that it reads is trusted.
#[derive(Debug)]
pub(crate) struct Decoder<'a>(pub(crate) &'a [u8]);

impl<'a> Decoder<'a> {
    pub(crate) fn take(&mut self, len: usize) -> Result<&'a [u8], Malformed> {
        let (taken, rest) = self.0.split_at_checked(len).ok_or(Malformed)?;
        self.0 = rest;
        Ok(taken)
    }

    pub(crate) fn byte(&mut self) -> Result<u8, Malformed> {
        Ok(self.take(1)?[0])
    }

    pub(crate) fn number(&mut self) -> Result<u64, Malformed> {
        let bytes = self.take(8)?.try_into().map_err(|_| Malformed)?;
        Ok(u64::from_le_bytes(bytes))
    }

    pub(crate) fn size(&mut self) -> Result<usize, Malformed> {
        usize::try_from(self.number()?).map_err(|_| Malformed)
    }

    pub(crate) fn bytes(&mut self) -> Result<&'a [u8], Malformed> {
        let len = self.size()?;
        self.take(len)
    }

    pub(crate) fn text(&mut self) -> Result<String, Malformed> {
        let text = std::str::from_utf8(self.bytes()?).map_err(|_| Malformed)?;
        Ok(text.to_owned())
    }

    /// A list; `item` reads at least one byte, so that the frame bounds its length.
    pub(crate) fn list<T>(
        &mut self,
        mut item: impl FnMut(&mut Self) -> Result<T, Malformed>,
    ) -> Result<Vec<T>, Malformed> {
        let len = self.size()?;
        if len > self.0.len() {
            return Err(Malformed);
        }
        (0..len).map(|_| item(self)).collect()
    }

    pub(crate) fn sizes(&mut self) -> Result<Vec<usize>, Malformed> {
        self.list(Self::size)
    }

    pub(crate) fn rank(&mut self) -> Result<Rank, Malformed> {
        self.size().map(Rank)
    }

    pub(crate) fn wait(&mut self) -> Result<Wait, Malformed> {
        Ok(Wait {
            rank: self.rank()?,
            op: self.text()?,
            group: self.text()?,
            sequence: self.number()?,
            missing: self.list(Self::rank)?,
        })
    }

    pub(crate) fn waits(&mut self) -> Result<Vec<Wait>, Malformed> {
        self.list(Self::wait)
    }

    /// Nothing is left.
    pub(crate) fn end(&self) -> Result<(), Malformed> {
        if self.0.is_empty() {
            Ok(())
        } else {
            Err(Malformed)
        }
    }
}

/// A socket that carries frames, each after its length. It never blocks a reader.
#[derive(Debug)]
pub(super) struct Channel {
    stream: TcpStream,
    incoming: Vec<u8>,
}

impl Channel {
    pub(super) fn new(stream: TcpStream) -> io::Result<Self> {
        stream.set_nonblocking(true)?;
        stream.set_nodelay(true)?;
        Ok(Self {
            stream,
            incoming: Vec::new(),
        })
    }

    pub(super) fn stream(&self) -> &TcpStream {
        &self.stream
    }

    /// Sends one frame, or finds the peer gone or stopped.
    pub(super) fn send(&mut self, frame: &[u8]) -> io::Result<()> {
        let len = u32::try_from(frame.len()).map_err(io::Error::other)?;
        let bytes = [&len.to_le_bytes(), frame].concat();
        let deadline = Instant::now() + SEND_TIMEOUT;
        let mut rest = bytes.as_slice();
        while !rest.is_empty() {
            match self.stream.write(rest) {
                Ok(0) => return Err(ErrorKind::WriteZero.into()),
                Ok(written) => rest = &rest[written..],
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => {
                    let left = deadline.saturating_duration_since(Instant::now());
                    if left.is_zero() {
                        return Err(ErrorKind::TimedOut.into());
                    }
                    poll::writable(self.stream.as_fd(), left)?;
                }
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Reads what has come; false at the end of the stream.
    pub(super) fn read(&mut self) -> io::Result<bool> {
        self.read_up_to(MOST_BYTES)
    }

    /// [`Channel::read`] from a peer whose next frame has at most `most` bytes, and little more.
    pub(super) fn read_up_to(&mut self, most: usize) -> io::Result<bool> {
        let mut piece = [0; PIECE_BYTES];
        // A peer that sends without end is read again at the next turn.
        while self.incoming.len() < 4 + most {
            match self.stream.read(&mut piece) {
                Ok(0) => return Ok(false),
                Ok(read) => self.incoming.extend(&piece[..read]),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                Err(error) => return Err(error),
            }
        }
        Ok(true)
    }

    /// Reads what has come and forgets it; false at the end of the stream.
    pub(super) fn discard(&mut self) -> bool {
        let open = self.read().unwrap_or(false);
        self.incoming.clear();
        open
    }

    /// The next whole frame of at most `most` bytes that was read.
    pub(super) fn next(&mut self, most: usize) -> Result<Option<Vec<u8>>, Malformed> {
        let Some(len) = self.incoming.first_chunk() else {
            return Ok(None);
        };
        let len = u32::from_le_bytes(*len) as usize;
        if len > most {
            return Err(Malformed);
        }
        if self.incoming.len() < 4 + len {
            return Ok(None);
        }
        let frame = self.incoming[4..4 + len].to_vec();
        self.incoming.drain(..4 + len);
        Ok(Some(frame))
    }

    /// Waits for a frame; none when the deadline or the end of the stream comes first.
    pub(super) fn wait(&mut self, most: usize, deadline: Instant) -> io::Result<Option<Vec<u8>>> {
        loop {
            if let Some(frame) = self.next(most).map_err(io::Error::other)? {
                return Ok(Some(frame));
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(None);
            }
            poll::readable(&[self.as_fd()], left)?;
            // What came before the end, or before an error, still counts.
            let open = self.read();
            if !matches!(open, Ok(true)) {
                let last = self.next(most).map_err(io::Error::other)?;
                return if last.is_some() {
                    Ok(last)
                } else {
                    open.map(|_| None)
                };
            }
        }
    }

    /// Says that nothing more will be sent. What was sent still arrives.
    pub(super) fn finish(&self) {
        // A peer that is gone needs no word.
        let _ = self.stream.shutdown(Shutdown::Write);
    }
}

impl AsFd for Channel {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::{
        net::{Ipv4Addr, TcpListener},
        thread,
    };

    #[test]
    fn values_come_out_as_they_went_in() {
        let wait = Wait {
            rank: Rank(2),
            op: "all_reduce".into(),
            group: "tensor [2, 3]".into(),
            sequence: 7,
            missing: vec![Rank(3)],
        };
        let mut frame = Encoder::of(4);
        frame
            .waits(std::slice::from_ref(&wait))
            .sizes([1, 2].into_iter());
        let mut decoder = Decoder(&frame.0);
        assert_eq!(decoder.byte(), Ok(4));
        assert_eq!(decoder.waits(), Ok(vec![wait]));
        assert_eq!(decoder.sizes(), Ok(vec![1, 2]));
        assert_eq!(decoder.end(), Ok(()));
    }

    #[test]
    fn no_more_is_read_than_a_frame_may_have_and_what_has_come_with_it() {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let mut peer = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let mut channel = Channel::new(listener.accept().unwrap().0).unwrap();
        let sender = thread::spawn(move || peer.write_all(&vec![1; 256 << 10]).map(|()| peer));
        let most = 1000;
        let start = Instant::now();
        while channel.incoming.len() < 4 + most {
            assert!(start.elapsed() < Duration::from_secs(20));
            poll::readable(&[channel.as_fd()], Duration::from_secs(1)).unwrap();
            assert!(channel.read_up_to(most).unwrap());
            assert!(channel.incoming.len() < 4 + most + PIECE_BYTES);
        }
        // A frame of this length is none, however much has come.
        assert_eq!(channel.next(most), Err(Malformed));
        assert!(channel.read_up_to(most).unwrap());
        assert!(channel.incoming.len() < 4 + most + PIECE_BYTES);
        drop(channel);
        let _ = sender.join().unwrap();
    }

    proptest! {
        #[test]
        fn bytes_of_a_stranger_are_refused_or_read_and_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            let _ = Decoder(&bytes).waits();
            let _ = Decoder(&bytes).sizes();
            let _ = Decoder(&bytes).text();
        }
    }
}
