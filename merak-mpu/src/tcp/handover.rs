//! Handing shared memory from process to process of one host.

use super::{link::Link, shared::Shared};
use crate::{Rank, control::State};
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

    /// Shares memory with every other process of this host.
    pub(super) fn share(
        &self,
        state: &State,
        nonce: u64,
        hosts: &[usize],
        links: &mut [Option<Link>],
    ) -> io::Result<()> {
        let own = state.rank;
        let here = |rank: &usize| hosts[*rank] == hosts[own.0];
        for rank in (0..own.0).filter(here) {
            let mut stream = UnixStream::connect_addr(&name(nonce, Rank(rank))?)?;
            stream.set_read_timeout(Some(PATIENCE))?;
            let (shared, file) = Shared::create()?;
            send_file(&stream, own, &file)?;
            stream.read_exact(&mut [0])?;
            if let Some(link) = &mut links[rank] {
                link.wire.share(shared);
            }
        }
        let mut missing: Vec<usize> = (own.0 + 1..hosts.len()).filter(here).collect();
        let deadline = Instant::now() + PATIENCE;
        while !missing.is_empty() && state.verdict().is_none() {
            let mut stream = match self.0.accept() {
                Ok((stream, _)) => stream,
                Err(error)
                    if error.kind() == ErrorKind::WouldBlock && Instant::now() < deadline =>
                {
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
                if let Some(link) = &mut links[rank.0] {
                    link.wire.share(Shared::open(&file)?);
                }
                stream.write_all(&[1])?;
            }
        }
        Ok(())
    }
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
