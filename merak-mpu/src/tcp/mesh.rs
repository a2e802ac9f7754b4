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

/// Longest wait for the answer to one call, before a look at how the world fares and another call.
const TRY: Duration = Duration::from_secs(1);

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
    let calls = (0..state.rank.0).map(|rank| Ok((rank, mesh.call(rank, deadline)?)));
    let mut calls = calls.collect::<Result<Vec<_>>>()?;
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
    /// Calls a lower rank, and shows it this rank's card.
    fn call(&self, rank: usize, deadline: Instant) -> Result<Guest> {
        loop {
            self.state.check()?;
            let left = deadline.saturating_duration_since(Instant::now());
            let left = left.clamp(Duration::from_millis(1), TRY);
            let call = TcpStream::connect_timeout(&self.peers[rank], left);
            let call = call.and_then(|mut stream| {
                stream.write_all(&card(self.nonce, self.state.rank))?;
                Guest::new(stream)
            });
            match call {
                Ok(call) => return Ok(call),
                // A host that is cut off answers nothing. The control plane finds out whose it is.
                Err(error) if error.kind() == ErrorKind::TimedOut && Instant::now() < deadline => {}
                Err(error) => return Err(self.lost(rank, &error)),
            }
        }
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::control::{JoinOptions, Meeting, meet};
    use std::{io::Read, net::Ipv4Addr, sync::Arc, thread};

    /// Longest wait of a rank for another.
    const TIMEOUT: Duration = Duration::from_secs(30);

    /// The meetings of `n` ranks, by rank.
    fn meetings(n: usize) -> Vec<Meeting> {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let port = listener.local_addr().unwrap().port();
        let mut listener = Some(listener);
        thread::scope(|scope| {
            let join = |rank| {
                let options = JoinOptions::new(rank, n, "127.0.0.1", port).with_timeout(TIMEOUT);
                let listener = listener.take();
                scope.spawn(move || meet(&options, listener).unwrap())
            };
            let joins: Vec<_> = (0..n).map(join).collect();
            let meetings = joins.into_iter().map(|join| join.join().unwrap());
            meetings.collect()
        })
    }

    /// Connects some ranks, and returns what became of it, in their order.
    fn connected(ranks: Vec<(usize, Meeting)>) -> Vec<String> {
        let run = |rank: usize, mut meeting: Meeting| {
            let Meeting { nonce, epoch, .. } = meeting;
            let state = State::new(Rank(rank), meeting.peers.len(), TIMEOUT, epoch);
            let (state, star) = (Arc::new(state), meeting.star.take().unwrap());
            let control = Control::start(&state, star, TIMEOUT).unwrap();
            let streams = connect(&state, &control, nonce, &meeting.peers, &meeting.data);
            control.leave(false);
            streams.map_or_else(|error| error.to_string(), |_| "connected".to_owned())
        };
        thread::scope(|scope| {
            let start = |(rank, meeting)| scope.spawn(move || run(rank, meeting));
            let ranks: Vec<_> = ranks.into_iter().map(start).collect();
            ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
        })
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn a_rank_that_ends_while_others_connect_is_named_by_one_whose_call_nobody_answers_too() {
        // The system takes no call to a listener whose queue is full.
        let deaf = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        rustix::net::listen(&deaf, 0).unwrap();
        let address = deaf.local_addr().unwrap();
        let mut queue = Vec::new();
        while let Ok(call) = TcpStream::connect_timeout(&address, Duration::from_millis(200)) {
            queue.push(call);
        }
        let mut meetings: Vec<_> = meetings(3).into_iter().enumerate().collect();
        meetings[1].1.peers[0] = address;
        drop(meetings.pop());
        let start = Instant::now();
        let told = connected(meetings);
        assert!(start.elapsed() < TIMEOUT / 2);
        assert_eq!(
            told,
            ["rank 2 failed: its process ended without a goodbye"; 2]
        );
    }

    #[test]
    fn a_stranger_between_ranks_that_connect_learns_nothing_and_disturbs_nobody() {
        let meetings: Vec<_> = meetings(2).into_iter().enumerate().collect();
        let Meeting { nonce, peers, .. } = &meetings[0].1;
        // Of another world, of another program, and silent.
        let other = card(!nonce, Rank(1));
        let words = [&other[..], &[0xff; 100], &[]];
        let mut strangers = words.map(|word| {
            let mut stranger = TcpStream::connect(peers[0]).unwrap();
            stranger.write_all(word).unwrap();
            stranger
        });
        assert_eq!(connected(meetings), ["connected"; 2]);
        let mut answer = Vec::new();
        strangers[0].read_to_end(&mut answer).unwrap();
        assert!(answer.is_empty());
    }
}
