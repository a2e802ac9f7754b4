//! Handing shared memory from process to process of one host.
//!
//! Processes that seem to be on one host, and that do not reach each other's Unix sockets, go on
//! with sockets: the higher rank says so on the connection that both have already.

use super::{shared::Shared, stream::Stream};
pub(super) use crate::mill::Unreachable;
use crate::{
    Rank,
    control::{State, poll},
    mill::Wire,
};
use rustix::{
    fd::OwnedFd,
    net::{
        RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
        SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
    },
};
use std::{
    io::{self, ErrorKind, IoSlice, IoSliceMut, Read, Write},
    mem::{self, MaybeUninit},
    os::{
        fd::AsFd,
        linux::net::SocketAddrExt,
        unix::net::{SocketAddr, UnixListener, UnixStream},
    },
    thread,
    time::{Duration, Instant},
};

/// Longest wait for a process of the same host, which has connected by socket already, in a world
/// whose waits are no shorter.
const PATIENCE: Duration = Duration::from_secs(20);

/// How long a process waits for another before it looks how the world fares.
const LOOK: Duration = Duration::from_millis(100);

/// The word of a rank that cannot reach the socket of another one.
const NO_MEMORY: u8 = 0;

/// Takes the connections of the higher ranks of this host.
pub(super) struct Desk(UnixListener);

fn name(nonce: u64, rank: Rank) -> io::Result<SocketAddr> {
    SocketAddr::from_abstract_name(format!("merak-mpu-{nonce:016x}-{rank}"))
}

impl Desk {
    pub(super) fn open(nonce: u64, own: Rank) -> io::Result<Self> {
        let listener = UnixListener::bind_addr(&name(nonce, own)?)?;
        listener.set_nonblocking(true)?;
        Ok(Self(listener))
    }

    /// Shares memory with every other process of this host that is within reach, or gives up
    /// where the world fails meanwhile.
    ///
    /// # Errors
    /// [`Unreachable`] with the rank that broke off or does not come, or with this one where the
    /// system has no memory to share.
    pub(super) fn share(
        &self,
        state: &State,
        nonce: u64,
        hosts: &[usize],
        streams: &mut [Option<Stream>],
    ) -> Result<(), Unreachable> {
        let own = state.rank;
        let here = |rank: &usize| hosts[*rank] == hosts[own.0];
        for rank in (0..own.0).filter(here) {
            let Some(other) = &mut streams[rank] else {
                continue;
            };
            let away = |error| Unreachable {
                rank: Rank(rank),
                error,
            };
            let address = name(nonce, Rank(rank)).map_err(away)?;
            match UnixStream::connect_addr(&address) {
                Ok(stream) => {
                    let here = |error| Unreachable { rank: own, error };
                    let (shared, file) = Shared::create().map_err(here)?;
                    hand_over(state, stream, &file).map_err(away)?;
                    other.share(shared);
                }
                // A rank listens before it takes connections, so this one never will.
                Err(error) => {
                    let error = error.to_string();
                    tracing::debug!(rank = own.0, peer = rank, error, "no memory is shared");
                    other.write(&[NO_MEMORY]).map_err(away)?;
                }
            }
        }
        let missing = (own.0 + 1..hosts.len()).filter(here).collect();
        self.take_over(state, missing, streams)
    }

    /// Takes the memory of the missing ranks, or their word that there is none.
    fn take_over(
        &self,
        state: &State,
        mut missing: Vec<usize>,
        streams: &mut [Option<Stream>],
    ) -> Result<(), Unreachable> {
        let deadline = Instant::now() + patience(state);
        let of = |rank| move |error| Unreachable { rank, error };
        let mut guests = Vec::new();
        while state.verdict().is_none()
            && let Some(first) = missing.first().copied()
        {
            if Instant::now() >= deadline {
                return Err(of(Rank(first))(late(state)));
            }
            match self.0.accept() {
                Ok((guest, _)) => guests.push(guest),
                Err(error) if error.kind() == ErrorKind::WouldBlock => {
                    thread::sleep(Duration::from_millis(1));
                }
                Err(error) => return Err(of(state.rank)(error)),
            }
            for mut guest in mem::take(&mut guests) {
                let (rank, file) = match receive_file(&guest) {
                    Ok(received) => received,
                    Err(error) => {
                        // A stranger does not know the name, and has no such file.
                        guests.extend((error.kind() == ErrorKind::WouldBlock).then_some(guest));
                        continue;
                    }
                };
                if let Some(place) = missing.iter().position(|other| *other == rank.0) {
                    missing.remove(place);
                    if let Some(other) = &mut streams[rank.0] {
                        other.share(Shared::open(&file).map_err(of(state.rank))?);
                    }
                    guest.write_all(&[1]).map_err(of(rank))?;
                }
            }
            excuse(&mut missing, streams)?;
        }
        Ok(())
    }
}

/// Takes out those of the missing ranks that say that they share no memory.
fn excuse(missing: &mut Vec<usize>, streams: &mut [Option<Stream>]) -> Result<(), Unreachable> {
    let mut first_end = Ok(());
    missing.retain(|rank| match streams[*rank].as_mut().map(has_no_memory) {
        Some(Ok(has_none)) => !has_none,
        Some(Err(error)) => {
            if first_end.is_ok() {
                let rank = Rank(*rank);
                first_end = Err(Unreachable { rank, error });
            }
            true
        }
        None => false,
    });
    first_end
}

/// Gives memory to the process on the other side.
fn hand_over(state: &State, mut stream: UnixStream, file: &OwnedFd) -> io::Result<()> {
    send_file(&stream, state.rank, file)?;
    let deadline = Instant::now() + patience(state);
    while state.verdict().is_none() {
        if poll::readable(&[stream.as_fd()], LOOK)?[0] {
            return stream.read_exact(&mut [0]);
        }
        if Instant::now() >= deadline {
            return Err(late(state));
        }
    }
    Ok(())
}

/// Longest wait for one process.
fn patience(state: &State) -> Duration {
    PATIENCE.min(state.timeout)
}

fn late(state: &State) -> io::Error {
    let reason = format!("no answer within {:?}", patience(state));
    io::Error::new(ErrorKind::TimedOut, reason)
}

/// Whether the process on the other side says that it shares no memory. It says nothing else before
/// it does.
fn has_no_memory(stream: &mut Stream) -> io::Result<bool> {
    let read = stream.read(&mut [0])?;
    let read = read.ok_or_else(|| io::Error::new(ErrorKind::UnexpectedEof, "it ended"))?;
    Ok(read == 1)
}

fn send_file(stream: &UnixStream, own: Rank, file: &OwnedFd) -> io::Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let files = [file.as_fd()];
    control.push(SendAncillaryMessage::ScmRights(&files));
    let rank = (own.0 as u64).to_le_bytes();
    sendmsg(
        stream,
        &[IoSlice::new(&rank)],
        &mut control,
        SendFlags::empty(),
    )?;
    Ok(())
}

/// Receives the rank and the file of a process that has connected; [`ErrorKind::WouldBlock`] where
/// they have not come yet.
fn receive_file(stream: &UnixStream) -> io::Result<(Rank, OwnedFd)> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let mut rank = [0; 8];
    let mut parts = [IoSliceMut::new(&mut rank)];
    let flags = RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT;
    let got = recvmsg(stream, &mut parts, &mut control, flags)?;
    let file = control.drain().find_map(|message| match message {
        RecvAncillaryMessage::ScmRights(mut files) => files.next(),
        _ => None,
    });
    match file {
        Some(file) if got.bytes == rank.len() => {
            let rank = usize::try_from(u64::from_le_bytes(rank)).map_err(io::Error::other)?;
            Ok((Rank(rank), file))
        }
        _ => Err(ErrorKind::InvalidData.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Failure, control::Verdict};
    use std::net::{Ipv4Addr, TcpListener, TcpStream};

    /// The streams of a rank of two, and the other end.
    fn streams_of(own: usize) -> ([Option<Stream>; 2], TcpStream) {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let peer = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let mut streams = [None, None];
        streams[1 - own] = Some(Stream::new(listener.accept().unwrap().0).unwrap());
        (streams, peer)
    }

    /// The error of one of two ranks whose peer connects and then ends.
    fn left_alone(own: usize, nonce: u64) -> Unreachable {
        let (mut streams, peer) = streams_of(own);
        let desk = Desk::open(nonce, Rank(own)).unwrap();
        let state = State::new(Rank(own), 2, Duration::from_secs(5), Instant::now());
        drop(peer);
        desk.share(&state, nonce, &[0, 0], &mut streams)
            .unwrap_err()
    }

    #[test]
    fn a_peer_that_ends_while_memory_is_shared_is_to_blame() {
        let nonce = 0x7e57_0000 + u64::from(std::process::id());
        let other = Desk::open(nonce, Rank(0)).unwrap();
        let thread = thread::spawn(move || {
            while other.0.accept().is_err() {
                thread::sleep(Duration::from_millis(1));
            }
        });
        assert_eq!(left_alone(1, nonce).rank, Rank(0));
        thread.join().unwrap();
        assert_eq!(left_alone(0, nonce + (1 << 32)).rank, Rank(1));
    }

    #[test]
    fn a_world_that_fails_while_memory_is_shared_ends_the_wait_for_a_silent_peer() {
        let nonce = 0x5113_0000 + u64::from(std::process::id());
        for own in [0, 1] {
            let (mut streams, _peer) = streams_of(own);
            let [desk, _other] = [own, 1 - own].map(|rank| Desk::open(nonce, Rank(rank)).unwrap());
            let _stranger = UnixStream::connect_addr(&name(nonce, Rank(own)).unwrap()).unwrap();
            let timeout = Duration::from_mins(1);
            let state = State::new(Rank(own), 2, timeout, Instant::now());
            let start = Instant::now();
            let shared = thread::scope(|scope| {
                scope.spawn(|| {
                    thread::sleep(Duration::from_millis(50));
                    let (culprit, reason) = (Rank(1 - own), "no heartbeat".to_owned());
                    state.poison(Verdict {
                        failure: Failure {
                            culprit,
                            reporter: culprit,
                            reason,
                        },
                        lost: true,
                        others: Vec::new(),
                    });
                });
                desk.share(&state, nonce, &[0, 0], &mut streams)
            });
            assert!(shared.is_ok() && start.elapsed() < PATIENCE / 4);
        }
    }
}
