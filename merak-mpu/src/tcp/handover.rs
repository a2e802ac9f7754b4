//! Handing shared memory from process to process of one host.
//!
//! Processes that seem to be on one host, and that do not reach each other's Unix sockets, go on
//! with sockets: the higher rank says so on the connection that both have already.

use super::{shared::Shared, stream::Stream};
use crate::{Rank, control::State, mill::Wire};
use rustix::{
    fd::OwnedFd,
    net::{
        RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
        SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
    },
};
use std::{
    io::{self, ErrorKind, IoSlice, IoSliceMut, Read, Write},
    mem::MaybeUninit,
    os::{
        fd::AsFd,
        linux::net::SocketAddrExt,
        unix::net::{SocketAddr, UnixListener, UnixStream},
    },
    thread,
    time::{Duration, Instant},
};

/// Longest wait for a process of the same host, which has connected by socket already.
const PATIENCE: Duration = Duration::from_secs(20);

/// What a rank says that cannot reach the socket of another one.
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

    /// Shares memory with every other process of this host that is within reach.
    pub(super) fn share(
        &self,
        state: &State,
        nonce: u64,
        hosts: &[usize],
        streams: &mut [Option<Stream>],
    ) -> io::Result<()> {
        let own = state.rank;
        let here = |rank: &usize| hosts[*rank] == hosts[own.0];
        for rank in (0..own.0).filter(here) {
            let Some(other) = &mut streams[rank] else {
                continue;
            };
            match UnixStream::connect_addr(&name(nonce, Rank(rank))?) {
                Ok(stream) => other.share(hand_over(stream, own)?),
                // A rank listens before it takes connections, so this one never will.
                Err(error) => {
                    let error = error.to_string();
                    tracing::debug!(rank = own.0, peer = rank, error, "no memory is shared");
                    other.write(&[NO_MEMORY])?;
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
    ) -> io::Result<()> {
        let deadline = Instant::now() + PATIENCE;
        while !missing.is_empty() && state.verdict().is_none() {
            let mut stream = match self.0.accept() {
                Ok((stream, _)) => stream,
                Err(error)
                    if error.kind() == ErrorKind::WouldBlock && Instant::now() < deadline =>
                {
                    missing.retain(|rank| !streams[*rank].as_mut().is_some_and(has_no_memory));
                    thread::sleep(Duration::from_millis(1));
                    continue;
                }
                Err(error) => return Err(error),
            };
            stream.set_read_timeout(Some(PATIENCE))?;
            // A stranger does not know the name, and has no such file.
            let Ok((rank, file)) = receive_file(&stream) else {
                continue;
            };
            if let Some(place) = missing.iter().position(|other| *other == rank.0) {
                missing.swap_remove(place);
                if let Some(other) = &mut streams[rank.0] {
                    other.share(Shared::open(&file)?);
                }
                stream.write_all(&[1])?;
            }
        }
        Ok(())
    }
}

/// Makes memory and gives it to the process on the other side.
fn hand_over(mut stream: UnixStream, own: Rank) -> io::Result<Shared> {
    stream.set_read_timeout(Some(PATIENCE))?;
    let (shared, file) = Shared::create()?;
    send_file(&stream, own, &file)?;
    stream.read_exact(&mut [0])?;
    Ok(shared)
}

/// Whether the process on the other side says that it shares no memory. It says nothing else before
/// it does.
fn has_no_memory(stream: &mut Stream) -> bool {
    // An end or an error is the world's, which the control plane tells.
    matches!(stream.read(&mut [0]), Ok(Some(1)))
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

fn receive_file(stream: &UnixStream) -> io::Result<(Rank, OwnedFd)> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let mut rank = [0; 8];
    let mut parts = [IoSliceMut::new(&mut rank)];
    let got = recvmsg(stream, &mut parts, &mut control, RecvFlags::CMSG_CLOEXEC)?;
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
