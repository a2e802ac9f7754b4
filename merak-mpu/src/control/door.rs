//! Where rank 0 lets the other ranks in, and keeps strangers out.

use super::{
    poll,
    wire::{Channel, Decoder, Encoder, Malformed},
};
use crate::Rank;
use std::{
    io::{self, ErrorKind},
    mem,
    net::{SocketAddr, TcpListener, TcpStream},
    os::fd::{AsFd, BorrowedFd},
    time::{Duration, Instant},
};

/// First bytes of every connection, in both directions.
pub(super) const MAGIC: &[u8; 8] = b"merakmpu";

/// Longest first frame of a stranger.
pub(super) const MOST_GREETING: usize = 4 << 10;

/// Longest first frame of a rank, with its digests.
const MOST_HELLO: usize = 64 << 10;

/// First bytes of a process that cannot join, before the reason.
const COMPLAINT: &[u8; 8] = b"merakbad";

/// How long a connection may take to say who it is, or to close once it was sent away.
const PATIENCE: Duration = Duration::from_secs(10);

/// First byte of the frame that sends a rank away, before the reason.
const REFUSED: u8 = 4;

/// Most connections that have not yet said who they are, or have been sent away; further ones wait
/// in the system's queue.
const MOST_GUESTS: usize = 256;

/// Says who listens here: the first frame of rank 0.
pub(super) fn greeting(run: &str) -> Vec<u8> {
    let mut frame = Encoder(MAGIC.to_vec());
    frame.text(env!("CARGO_PKG_VERSION")).text(run);
    frame.0
}

/// The version and the run of a greeting.
pub(super) fn read_greeting(frame: &[u8]) -> Result<(String, String), Malformed> {
    let mut decoder = Decoder(frame);
    if decoder.take(MAGIC.len())? != MAGIC {
        return Err(Malformed);
    }
    let greeting = (decoder.text()?, decoder.text()?);
    decoder.end()?;
    Ok(greeting)
}

/// What a rank says of itself.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Hello {
    pub(super) rank: Rank,
    pub(super) world_size: usize,
    pub(super) run: String,
    pub(super) process: u32,
    /// Names the host.
    pub(super) host: String,
    /// The processors on which the rank may run.
    pub(super) processors: Vec<usize>,
    /// Where the rank takes connections of the others.
    pub(super) data_port: u16,
    pub(super) digests: Vec<(String, Vec<u8>)>,
}

impl Hello {
    pub(super) fn encode(&self) -> Vec<u8> {
        let mut frame = Encoder(MAGIC.to_vec());
        frame
            .size(self.rank.0)
            .size(self.world_size)
            .text(&self.run)
            .number(self.process.into())
            .text(&self.host)
            .bytes(&bits(&self.processors))
            .number(self.data_port.into())
            .size(self.digests.len());
        for (name, value) in &self.digests {
            frame.text(name).bytes(value);
        }
        frame.0
    }

    fn decode(frame: &[u8]) -> Result<Self, Malformed> {
        let mut decoder = Decoder(frame);
        if decoder.take(MAGIC.len())? != MAGIC {
            return Err(Malformed);
        }
        let hello = Self {
            rank: decoder.rank()?,
            world_size: decoder.size()?,
            run: decoder.text()?,
            process: u32::try_from(decoder.number()?).map_err(|_| Malformed)?,
            host: decoder.text()?,
            processors: numbers(decoder.bytes()?),
            data_port: u16::try_from(decoder.number()?).map_err(|_| Malformed)?,
            digests: decoder.list(|item| Ok((item.text()?, item.bytes()?.to_vec())))?,
        };
        decoder.end()?;
        Ok(hello)
    }
}

/// The complaint of a process that cannot join.
pub(super) fn complaint(reason: &str, host: &str) -> Vec<u8> {
    let mut frame = Encoder(COMPLAINT.to_vec());
    frame
        .number(std::process::id().into())
        .text(host)
        .text(reason);
    frame.0
}

/// A complaint in words.
pub(super) fn read_complaint(frame: &[u8]) -> Result<String, Malformed> {
    let mut decoder = Decoder(frame);
    if decoder.take(COMPLAINT.len())? != COMPLAINT {
        return Err(Malformed);
    }
    let (process, host, reason) = (decoder.number()?, decoder.text()?, decoder.text()?);
    decoder.end()?;
    Ok(format!(
        "process {process} of host {host} cannot join: {reason}"
    ))
}

/// Sends a rank away: why, and which rank is lost where that is the reason.
fn refusal(reason: &str, lost: Option<Rank>) -> Vec<u8> {
    let mut frame = Encoder::of(REFUSED);
    frame.text(reason).ranks(lost.as_slice());
    frame.0
}

/// The reason and the lost rank of a frame that sends this rank away; none for another frame.
pub(super) fn read_refusal(frame: &[u8]) -> Option<(String, Option<Rank>)> {
    let (&REFUSED, rest) = frame.split_first()? else {
        return None;
    };
    let mut rest = Decoder(rest);
    let reason = rest.text().unwrap_or_else(|Malformed| "no reason".into());
    let lost = rest.list(Decoder::rank).unwrap_or_default();
    Some((reason, lost.first().copied()))
}

/// Numbers as the bits of a string that are set: a greeting is short.
fn bits(numbers: &[usize]) -> Vec<u8> {
    let mut bits = vec![0; numbers.iter().max().map_or(0, |most| most / 8 + 1)];
    for number in numbers {
        bits[number / 8] |= 1 << (number % 8);
    }
    bits
}

fn numbers(bits: &[u8]) -> Vec<usize> {
    let all = 0..8 * bits.len();
    all.filter(|number| bits[number / 8] >> (number % 8) & 1 == 1)
        .collect()
}

/// A connection that has said who it is.
#[derive(Debug)]
pub(super) struct Visitor {
    pub(super) channel: Channel,
    pub(super) hello: Hello,
    /// Where it comes from, and which address of this host it found.
    pub(super) from: SocketAddr,
    pub(super) to: SocketAddr,
    /// It has no more questions.
    pub(super) is_ready: bool,
}

/// A connection that has not said who it is.
#[derive(Debug)]
struct Guest {
    channel: Channel,
    from: SocketAddr,
    to: SocketAddr,
    since: Instant,
}

/// A connection that was sent away, until it closes. What it still sends is read, since a close
/// before would have the system take back what it was told.
#[derive(Debug)]
struct Leaver {
    channel: Channel,
    since: Instant,
}

/// The listener of rank 0 and the connections that have come.
#[derive(Debug)]
pub(super) struct Door {
    listener: TcpListener,
    greeting: Vec<u8>,
    /// How long a connection may take to say who it is.
    patience: Duration,
    guests: Vec<Guest>,
    leavers: Vec<Leaver>,
    num_sent_away: usize,
    /// Why a process cannot join, and its connection.
    complaint: Option<(String, Channel)>,
}

impl Door {
    pub(super) fn new(listener: TcpListener, run: &str) -> io::Result<Self> {
        listener.set_nonblocking(true)?;
        Ok(Self {
            listener,
            greeting: greeting(run),
            patience: PATIENCE,
            guests: Vec::new(),
            leavers: Vec::new(),
            num_sent_away: 0,
            complaint: None,
        })
    }

    /// What to poll before [`Door::turn`].
    pub(super) fn sockets(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        let listener = self.has_room().then(|| self.listener.as_fd());
        let guests = self.guests.iter().map(|guest| guest.channel.as_fd());
        let leavers = self.leavers.iter().map(|leaver| leaver.channel.as_fd());
        listener.into_iter().chain(guests).chain(leavers)
    }

    fn has_room(&self) -> bool {
        self.guests.len() + self.leavers.len() < MOST_GUESTS
    }

    /// Greets those that come, and returns those that have said who they are. A stranger is dropped
    /// after one frame, which may be as long as a rank's first one, or some seconds.
    pub(super) fn turn(&mut self) -> Vec<Visitor> {
        self.leavers
            .retain_mut(|leaver| leaver.channel.discard() && leaver.since.elapsed() < PATIENCE);
        while self.has_room() {
            match self.listener.accept() {
                Ok((stream, from)) => self.guests.extend(self.greet(stream, from)),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                // Nobody is waiting, or the one that did has left.
                Err(_) => break,
            }
        }
        let mut visitors = Vec::new();
        for mut guest in mem::take(&mut self.guests) {
            let open = guest.channel.read_up_to(MOST_HELLO).unwrap_or(false);
            match guest.channel.next(MOST_HELLO) {
                Ok(Some(frame)) => {
                    if let Ok(hello) = Hello::decode(&frame) {
                        let Guest {
                            channel, from, to, ..
                        } = guest;
                        visitors.push(Visitor {
                            channel,
                            hello,
                            from,
                            to,
                            is_ready: false,
                        });
                    } else if let Ok(reason) = read_complaint(&frame) {
                        self.complaint = Some((reason, guest.channel));
                    }
                }
                Ok(None) if open && guest.since.elapsed() < self.patience => {
                    self.guests.push(guest);
                }
                Ok(None) | Err(Malformed) => {}
            }
        }
        visitors
    }

    /// The complaint of the last process that has come and cannot join, and its connection.
    pub(super) fn take_complaint(&mut self) -> Option<(String, Channel)> {
        self.complaint.take()
    }

    /// Tells a rank that it cannot join, and why: where `lost` is a rank, because that one is.
    pub(super) fn send_away(&mut self, mut channel: Channel, reason: &str, lost: Option<Rank>) {
        // One that has left needs no word.
        let _ = channel.send(&refusal(reason, lost));
        channel.finish();
        self.num_sent_away += 1;
        self.leavers.push(Leaver {
            channel,
            since: Instant::now(),
        });
    }

    /// Tells the reason to those that still come, until `most` ranks in all have been sent away and
    /// have left, for at most `patience`.
    pub(super) fn see_off(
        mut self,
        most: usize,
        (reason, lost): (&str, Option<Rank>),
        patience: Duration,
    ) {
        let deadline = Instant::now() + patience;
        while self.num_sent_away < most || !self.leavers.is_empty() {
            let left = deadline.saturating_duration_since(Instant::now());
            let sockets: Vec<_> = self.sockets().collect();
            if left.is_zero() || poll::readable(&sockets, left).is_err() {
                return;
            }
            for visitor in self.turn() {
                self.send_away(visitor.channel, reason, lost);
            }
        }
    }

    fn greet(&self, stream: TcpStream, from: SocketAddr) -> Option<Guest> {
        let to = stream.local_addr().ok()?;
        let mut channel = Channel::new(stream).ok()?;
        channel.send(&self.greeting).ok()?;
        Some(Guest {
            channel,
            from,
            to,
            since: Instant::now(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::{
        io::{Read, Write},
        thread,
    };

    fn hello() -> Hello {
        Hello {
            rank: Rank(3),
            world_size: 4,
            run: "job 7".into(),
            process: 99,
            host: "a".into(),
            processors: vec![0, 7, 8, 130],
            data_port: 4000,
            digests: vec![("plan".into(), vec![1, 2])],
        }
    }

    #[test]
    fn a_hello_comes_out_as_it_went_in() {
        let hello = hello();
        assert_eq!(Hello::decode(&hello.encode()), Ok(hello));
        let (version, run) = read_greeting(&greeting("job 7")).unwrap();
        assert_eq!(
            (version.as_str(), run.as_str()),
            (env!("CARGO_PKG_VERSION"), "job 7")
        );
    }

    #[test]
    fn a_rank_that_comes_when_the_others_are_sent_away_hears_the_reason() {
        let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
        let address = listener.local_addr().unwrap();
        let door = Door::new(listener, "job").unwrap();
        let late = thread::spawn(move || {
            let mut channel = Channel::new(TcpStream::connect(address).unwrap()).unwrap();
            let deadline = Instant::now() + Duration::from_secs(20);
            channel.wait(MOST_GREETING, deadline).unwrap().unwrap();
            // Rank 0 has refused the others by now, and this rank asks on before it listens.
            channel.send(&hello().encode()).unwrap();
            for _ in 0..100 {
                channel.send(&[1]).unwrap();
                thread::sleep(Duration::from_millis(1));
            }
            channel.wait(MOST_GREETING, deadline).unwrap()
        });
        let word = ("the world has 4 ranks", Some(Rank(2)));
        door.see_off(1, word, Duration::from_secs(20));
        let told = late.join().unwrap().unwrap();
        assert_eq!(read_refusal(&told), Some((word.0.to_owned(), word.1)));
    }

    #[test]
    fn strangers_that_say_too_much_too_little_or_nothing_are_dropped() {
        let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
        let address = listener.local_addr().unwrap();
        let mut door = Door::new(listener, "job").unwrap();
        door.patience = Duration::from_millis(200);
        let length = |len: usize| (len as u32).to_le_bytes();
        let too_long = length(MOST_HELLO + 1);
        // A frame that never ends, beside a stranger who goes on and on.
        let unfinished = [&length(MOST_HELLO)[..], &[7; 100]].concat();
        let endless = vec![0xff_u8; 1 << 20];
        for word in [&too_long[..], &unfinished, &endless, b""] {
            let mut stranger = TcpStream::connect(address).unwrap();
            let dropped = thread::scope(|scope| {
                let stranger = scope.spawn(move || {
                    let patience = Some(Duration::from_secs(20));
                    stranger.set_read_timeout(patience).unwrap();
                    // It may be dropped while it speaks, and find its connection broken.
                    let _ = stranger.write_all(word);
                    let told = stranger.read_to_end(&mut Vec::new());
                    told.err()
                        .is_none_or(|error| error.kind() != ErrorKind::WouldBlock)
                });
                while !stranger.is_finished() {
                    assert!(door.turn().is_empty());
                    thread::sleep(Duration::from_millis(1));
                }
                stranger.join().unwrap()
            });
            assert!(dropped && door.guests.is_empty());
        }
    }

    proptest! {
        #[test]
        fn bytes_of_a_stranger_are_no_hello(bytes in prop::collection::vec(any::<u8>(), 0..100)) {
            let _ = Hello::decode(&[MAGIC.as_slice(), &bytes].concat());
            let _ = read_complaint(&[COMPLAINT.as_slice(), &bytes].concat());
            let _ = read_refusal(&[&[REFUSED], bytes.as_slice()].concat());
            let _ = read_greeting(&[MAGIC.as_slice(), &bytes].concat());
        }
    }
}
