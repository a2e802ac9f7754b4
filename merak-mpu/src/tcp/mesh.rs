//! Connecting every process with every other.

use super::stream::{Stream, read};
use crate::{
    Error, Rank, Result, Wait,
    control::{Control, State, poll},
};
use std::{
    io::{self, ErrorKind, Write},
    net::{SocketAddr, TcpListener, TcpStream},
    os::fd::AsFd,
    time::{Duration, Instant},
};

const MAGIC: &[u8; 8] = b"merakmpd";

/// Bytes with which a connection begins, in both directions: magic word, nonce and rank.
const CARD_BYTES: usize = 24;

/// How long a connection may take to say who it is.
const PATIENCE: Duration = Duration::from_secs(10);

/// Most connections that have not yet said who they are.
const MOST_GUESTS: usize = 1024;

fn card(nonce: u64, rank: Rank) -> [u8; CARD_BYTES] {
    let mut card = [0; CARD_BYTES];
    card[..8].copy_from_slice(MAGIC);
    card[8..16].copy_from_slice(&nonce.to_le_bytes());
    card[16..].copy_from_slice(&(rank.0 as u64).to_le_bytes());
    card
}

/// A connection that has not said who it is.
struct Guest {
    stream: TcpStream,
    card: [u8; CARD_BYTES],
    got: usize,
    since: Instant,
}

impl Guest {
    fn new(stream: TcpStream) -> io::Result<Self> {
        stream.set_nonblocking(true)?;
        Ok(Self {
            stream,
            card: [0; CARD_BYTES],
            got: 0,
            since: Instant::now(),
        })
    }

    /// Reads on; whether the card is complete.
    fn read(&mut self) -> io::Result<bool> {
        match read(&self.stream, &mut self.card[self.got..])? {
            None => Err(ErrorKind::UnexpectedEof.into()),
            Some(read) => {
                self.got += read;
                Ok(self.got == CARD_BYTES)
            }
        }
    }
}

/// Connects to all lower ranks, and takes the connections of all higher ones. A stranger is sent
/// away.
///
/// # Errors
/// [`Error::Aborted`] when the world fails meanwhile; [`Error::Timeout`] with the missing ranks.
pub(super) fn connect(
    state: &State,
    control: &Control,
    nonce: u64,
    peers: &[SocketAddr],
    listener: &TcpListener,
) -> Result<Vec<Option<Stream>>> {
    let mesh = Mesh {
        state,
        control,
        nonce,
        peers,
    };
    let n = state.size;
    let deadline = Instant::now() + state.timeout;
    let mut streams: Vec<Option<Stream>> = (0..n).map(|_| None).collect();
    let mut calls = mesh.call(deadline)?;
    listener
        .set_nonblocking(true)
        .map_err(|error| mesh.lacks(&error))?;
    let mut guests: Vec<Guest> = Vec::new();
    while streams.iter().flatten().count() + 1 < n {
        state.check()?;
        if Instant::now() >= deadline {
            return Err(mesh.late(&streams));
        }
        let waiting = calls.iter().map(|(_, call)| &call.stream);
        let waiting = waiting.chain(guests.iter().map(|guest| &guest.stream));
        let sockets: Vec<_> = [listener.as_fd()]
            .into_iter()
            .chain(waiting.map(AsFd::as_fd))
            .collect();
        poll::readable(&sockets, Duration::from_millis(100)).map_err(|error| mesh.lacks(&error))?;
        calls = mesh.hear(calls, &mut streams)?;
        accept(listener, &mut guests);
        guests = mesh.welcome(guests, &mut streams)?;
    }
    Ok(streams)
}

/// What a rank needs to connect.
struct Mesh<'a> {
    state: &'a State,
    control: &'a Control,
    nonce: u64,
    peers: &'a [SocketAddr],
}

impl Mesh<'_> {
    /// Calls every lower rank, and shows this rank's card.
    fn call(&self, deadline: Instant) -> Result<Vec<(usize, Guest)>> {
        let own = self.state.rank;
        let call = |(rank, address): (usize, &SocketAddr)| {
            let left = deadline.saturating_duration_since(Instant::now());
            let left = left.max(Duration::from_millis(1));
            let call = TcpStream::connect_timeout(address, left).and_then(|mut stream| {
                stream.write_all(&card(self.nonce, own))?;
                Guest::new(stream)
            });
            Ok((rank, call.map_err(|error| self.lost(rank, &error))?))
        };
        let lower = self.peers.iter().enumerate().take(own.0);
        lower.map(call).collect()
    }

    /// Reads the answers to calls. Returns the calls that still wait for theirs.
    fn hear(
        &self,
        calls: Vec<(usize, Guest)>,
        streams: &mut [Option<Stream>],
    ) -> Result<Vec<(usize, Guest)>> {
        let mut waiting = Vec::new();
        for (rank, mut call) in calls {
            match call.read() {
                Ok(true) if call.card == card(self.nonce, Rank(rank)) => {
                    streams[rank] = Some(self.stream(call.stream)?);
                }
                Ok(true) => {
                    return Err(self.lost(rank, &io::Error::other("another program answers")));
                }
                Ok(false) => waiting.push((rank, call)),
                Err(error) => return Err(self.lost(rank, &error)),
            }
        }
        Ok(waiting)
    }

    /// Answers the higher ranks that have shown their cards. Returns the guests that may still show
    /// theirs.
    fn welcome(&self, guests: Vec<Guest>, streams: &mut [Option<Stream>]) -> Result<Vec<Guest>> {
        let (own, n) = (self.state.rank, self.state.size);
        let mut waiting = Vec::new();
        for mut guest in guests {
            match guest.read() {
                Ok(true) => {
                    let is_of = |rank: &usize| guest.card == card(self.nonce, Rank(*rank));
                    let known = (own.0 + 1..n).find(is_of);
                    if let Some(rank) = known.filter(|rank| streams[*rank].is_none()) {
                        let sent = (&guest.stream).write_all(&card(self.nonce, own));
                        sent.map_err(|error| self.lost(rank, &error))?;
                        streams[rank] = Some(self.stream(guest.stream)?);
                    }
                }
                Ok(false) if guest.since.elapsed() < PATIENCE => waiting.push(guest),
                Ok(false) | Err(_) => {}
            }
        }
        Ok(waiting)
    }

    fn stream(&self, stream: TcpStream) -> Result<Stream> {
        Stream::new(stream).map_err(|error| self.lacks(&error))
    }

    /// The end of the world for a rank that cannot be reached.
    fn lost(&self, rank: usize, error: &io::Error) -> Error {
        let (own, address) = (self.state.rank, self.peers[rank]);
        let reason = format!("rank {own} cannot connect to it at {address}: {error}");
        self.control.fail(Rank(rank), &reason);
        self.control.explain(None)
    }

    fn lacks(&self, error: &io::Error) -> Error {
        Error::NoResource {
            rank: self.state.rank.0,
            what: "socket",
            reason: error.to_string(),
        }
    }

    /// The end of the world for the ranks that have not connected.
    fn late(&self, streams: &[Option<Stream>]) -> Error {
        let (own, n) = (self.state.rank, self.state.size);
        let has_none = |rank: &usize| *rank != own.0 && streams[*rank].is_none();
        self.control.late(Wait {
            rank: own,
            op: "connect".into(),
            group: format!("world of {n}"),
            sequence: 0,
            missing: (0..n).filter(has_none).map(Rank).collect(),
        })
    }
}

fn accept(listener: &TcpListener, guests: &mut Vec<Guest>) {
    while guests.len() < MOST_GUESTS {
        match listener.accept() {
            Ok((stream, _)) => guests.extend(Guest::new(stream)),
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            // Nobody is waiting, or the one that did has left.
            Err(_) => break,
        }
    }
}
