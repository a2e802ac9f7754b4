//! How the processes of a world find each other: all of them come to rank 0.

mod other_rank;
mod rank_zero;

pub(crate) use other_rank::complain;

use super::{
    JoinOptions,
    door::{Door, Hello, MOST_GREETING, read_greeting},
    wire::{Channel, Decoder, Encoder, Malformed},
};
use crate::{Error, Locality, Rank, Result, affinity::processors};
use std::{
    fs,
    io::{self, ErrorKind},
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream, ToSocketAddrs},
    process,
    time::{Duration, Instant},
};

/// How many ports from the given one on rank 0 may take, where others hold the first ones.
const PORTS: u16 = 16;

/// Shortest pause between two looks for rank 0, or for its host's name; each is twice as long.
const PAUSE: Duration = Duration::from_millis(10);

/// Longest of these pauses.
const MOST_PAUSE: Duration = Duration::from_millis(500);

/// Longest wait for a connection to one address, and for the first word of the process that
/// listens there.
const TRY: Duration = Duration::from_secs(1);

/// What a process knows once all have come.
pub(crate) struct Meeting {
    /// Names this world on the connections between its ranks.
    pub(crate) nonce: u64,
    /// The moment at which rank 0 began to wait for the others.
    pub(crate) epoch: Instant,
    /// Where each rank takes connections.
    pub(crate) peers: Vec<SocketAddr>,
    /// The number of each rank's host.
    pub(crate) hosts: Vec<usize>,
    /// By rank, how many ranks of its host share its processors; see `affinity::num_sharers`.
    sharers: Vec<usize>,
    /// Takes the connections of this process.
    pub(crate) data: TcpListener,
    /// Taken by the control plane.
    pub(crate) star: Option<Star>,
}

impl Meeting {
    /// Where a rank runs.
    pub(crate) fn locality(&self, rank: Rank) -> Locality {
        let host = self.hosts[rank.0];
        let count = |hosts: &[usize]| hosts.iter().filter(|other| **other == host).count();
        Locality {
            host,
            local_rank: count(&self.hosts[..rank.0]),
            local_size: count(&self.hosts),
            core_sharers: self.sharers[rank.0],
        }
    }
}

/// This process's connections of the control plane.
pub(crate) struct Star(pub(super) Lines);

/// The connections of a star.
pub(super) enum Lines {
    /// Of rank 0: to each other rank, in ascending rank.
    Center { door: Door, channels: Vec<Channel> },
    /// To rank 0.
    Ray(Channel),
}

/// Meets the other processes. Rank 0 may bring a listener.
///
/// # Errors
/// [`Error::Rendezvous`] or [`Error::Refused`] with what was found; where a rank does not come or
/// is lost meanwhile, [`Error::Timeout`] on rank 0 and [`Error::Aborted`].
pub(crate) fn meet(options: &JoinOptions, listener: Option<TcpListener>) -> Result<Meeting> {
    let (rank, n) = (options.rank, options.world_size);
    if rank >= n {
        return Err(options.refuse(format!(
            "rank {rank} does not exist in a world of {n} ranks"
        )));
    }
    if rank == 0 {
        let epoch = Instant::now();
        let listener = match listener {
            Some(listener) => listener,
            None => rank_zero::open_port(options, epoch + options.timeout)?,
        };
        rank_zero::host(options, epoch, listener)
    } else {
        other_rank::visit(options)
    }
}

fn resolve(options: &JoinOptions, port: u16) -> io::Result<Vec<SocketAddr>> {
    let mut addresses = Vec::new();
    let mut failure = None;
    for host in options.host.split(',') {
        match (host, port).to_socket_addrs() {
            Ok(found) => addresses.extend(found),
            Err(error) => failure = Some(error),
        }
    }
    match failure {
        Some(error) if addresses.is_empty() => Err(error),
        _ => Ok(addresses),
    }
}

fn at(options: &JoinOptions, error: &dyn std::error::Error) -> Error {
    options.refuse(error.to_string())
}

/// Connects and hears who listens there: none where that is no rank of this crate.
fn connect(address: SocketAddr) -> io::Result<Option<(Channel, String, String)>> {
    let mut channel = Channel::new(TcpStream::connect_timeout(&address, TRY)?)?;
    let frame = match channel.wait(MOST_GREETING, Instant::now() + TRY) {
        Ok(Some(frame)) => frame,
        Err(error) if is_gone(&error) => return Err(ErrorKind::ConnectionRefused.into()),
        Ok(None) | Err(_) => return Ok(None),
    };
    let greeting = read_greeting(&frame).ok();
    Ok(greeting.map(|(version, run)| (channel, version, run)))
}

/// Whether the process on the other side has closed a connection or has ended.
fn is_gone(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        ErrorKind::ConnectionReset | ErrorKind::BrokenPipe
    )
}

const PING: u8 = 1;
const PONG: u8 = 2;
const WELCOME: u8 = 3;
const READY: u8 = 5;

fn welcome(nonce: u64, table: &[SocketAddr], (hosts, sharers): (&[usize], &[usize])) -> Vec<u8> {
    let mut frame = Encoder::of(WELCOME);
    frame.number(nonce).size(table.len());
    for ((address, host), sharers) in table.iter().zip(hosts).zip(sharers) {
        frame.text(&address.to_string()).size(*host).size(*sharers);
    }
    frame.0
}

type Welcome = (u64, Vec<(SocketAddr, (usize, usize))>);

fn read_welcome(decoder: &mut Decoder<'_>) -> Result<Welcome, Malformed> {
    let nonce = decoder.number()?;
    let table = decoder.list(|item| {
        let address = item.text()?.parse().map_err(|_| Malformed)?;
        Ok((address, (item.size()?, item.size()?)))
    })?;
    decoder.end()?;
    Ok((nonce, table))
}

/// Opens the port where the other ranks connect to this one.
fn open_data(options: &JoinOptions, ip: IpAddr) -> io::Result<TcpListener> {
    let ip = match ip {
        ip if options.is_local() => ip,
        IpAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
        IpAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
    };
    TcpListener::bind((ip, 0))
}

fn hello(options: &JoinOptions, data: &TcpListener) -> io::Result<Hello> {
    Ok(Hello {
        rank: Rank(options.rank),
        world_size: options.world_size,
        run: options.run.clone(),
        process: process::id(),
        host: this_host(),
        processors: processors(),
        data_port: data.local_addr()?.port(),
        digests: options.digests.clone(),
    })
}

/// Tells hosts apart, and containers that cannot reach each other's sockets.
pub(crate) fn this_host() -> String {
    let name = rustix::system::uname();
    let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    let network = fs::read_link("/proc/self/ns/net").unwrap_or_default();
    let name = name.nodename().to_string_lossy().into_owned();
    format!("{name} {} {}", boot.trim(), network.display())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::control::door::{MAGIC, read_complaint};
    use std::thread;

    #[test]
    fn a_process_that_cannot_join_ends_the_rendezvous_with_its_reason() {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let port = listener.local_addr().unwrap().port();
        let options = |rank| {
            let options = JoinOptions::new(rank, 3, "127.0.0.1", port);
            options.with_timeout(Duration::from_secs(20))
        };
        let start = Instant::now();
        let told = thread::scope(|scope| {
            let others = [
                scope.spawn(|| meet(&options(0), Some(listener))),
                scope.spawn(|| meet(&options(1), None)),
            ];
            complain(&options(0), "RANK is \"7\"");
            others.map(|rank| rank.join().unwrap().err().map(|error| error.to_string()))
        });
        let reason = "cannot join: RANK is \"7\"";
        assert!(start.elapsed() < Duration::from_secs(15));
        for told in told.map(Option::unwrap_or_default) {
            assert!(told.ends_with(reason), "{told}");
        }
    }

    /// Greets as rank 0 of a version.
    fn greet_as(version: &str, stream: TcpStream, run: &str) -> Channel {
        let mut channel = Channel::new(stream).unwrap();
        let mut greeting = Encoder(MAGIC.to_vec());
        greeting.text(version).text(run);
        channel.send(&greeting.0).unwrap();
        channel
    }

    /// Greets as rank 0 of another version.
    fn greet(stream: TcpStream, run: &str) -> Channel {
        greet_as("0.0.1", stream, run)
    }

    /// What rank 1 says of a rank 0 that greets it, hears its hello, and then does `deed`.
    fn told_of_rank_0(beat_timeout: Duration, deed: impl FnOnce(Channel) + Send) -> Error {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let port = listener.local_addr().unwrap().port();
        let options = JoinOptions {
            beat_timeout,
            ..JoinOptions::new(1, 3, "127.0.0.1", port)
        };
        let start = Instant::now();
        let error = thread::scope(|scope| {
            scope.spawn(move || {
                let stream = listener.accept().unwrap().0;
                let mut channel = greet_as(env!("CARGO_PKG_VERSION"), stream, "");
                let deadline = Instant::now() + Duration::from_secs(20);
                channel.wait(MOST_GREETING, deadline).unwrap().unwrap();
                deed(channel);
            });
            meet(&options, None).err().unwrap()
        });
        assert!(start.elapsed() < Duration::from_secs(15));
        error
    }

    #[test]
    fn a_rank_0_that_is_lost_while_the_ranks_meet_is_to_blame() {
        let silent = |channel| {
            thread::sleep(Duration::from_secs(1));
            drop(channel);
        };
        let gone = told_of_rank_0(Duration::from_secs(10), drop);
        let silent = told_of_rank_0(Duration::from_millis(200), silent);
        for (error, how) in [(gone, "its process ended"), (silent, "no answer within")] {
            let told = format!("rank 0 failed: {how} ");
            assert_eq!(error.culprit(), Some(Rank(0)), "{error}");
            assert!(error.to_string().starts_with(&told), "{error}");
        }
    }

    #[test]
    fn a_rank_that_does_not_come_is_to_blame_and_a_wrong_launch_is_nobodys_loss() {
        let told = |sizes: [usize; 2]| {
            let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
            let port = listener.local_addr().unwrap().port();
            let meet_as = |rank, listener| {
                let options = JoinOptions::new(rank, sizes[rank], "127.0.0.1", port);
                let options = options.with_timeout(Duration::from_secs(1));
                meet(&options, listener).err().unwrap()
            };
            thread::scope(|scope| {
                let first = scope.spawn(|| meet_as(0, Some(listener)));
                [meet_as(1, None), first.join().unwrap()]
            })
        };
        let [other, first] = told([3, 3]);
        assert!(matches!(first, Error::Timeout { .. }), "{first}");
        assert!(matches!(other, Error::Aborted { by: 2, .. }), "{other}");
        assert_eq!(other.to_string(), format!("rank 2 failed: {first}"));
        let [other, first] = told([3, 4]);
        assert!(matches!(first, Error::Rendezvous { .. }), "{first}");
        assert!(matches!(other, Error::Refused { .. }), "{other}");
    }

    #[test]
    fn a_rank_0_of_another_version_at_the_next_port_is_let_be() {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let port = listener.local_addr().unwrap().port() - 1;
        let run = "let-be";
        thread::spawn(move || {
            for stream in listener.incoming() {
                greet(stream.unwrap(), run);
            }
        });
        let options = JoinOptions {
            run: run.to_owned(),
            timeout: Duration::from_millis(300),
            ..JoinOptions::new(1, 2, "127.0.0.1", port)
        };
        let error = meet(&options, None).err().map(|error| error.to_string());
        let told = "no rank 0 was found on this port or the next 15";
        assert!(error.is_some_and(|error| error.contains(told)));
    }

    #[test]
    fn a_rank_of_another_version_tells_rank_0_and_ends() {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let port = listener.local_addr().unwrap().port();
        let rank_0 = thread::spawn(move || {
            let mut channel = greet(listener.accept().unwrap().0, "");
            let deadline = Instant::now() + Duration::from_secs(20);
            channel.wait(MOST_GREETING, deadline).unwrap().unwrap()
        });
        let options = JoinOptions::new(1, 2, "127.0.0.1", port);
        let start = Instant::now();
        let error = meet(&options, None).err().map(|error| error.to_string());
        assert!(start.elapsed() < Duration::from_secs(15));
        let own = env!("CARGO_PKG_VERSION");
        let reason = format!("rank 0 runs merak-mpu 0.0.1, rank 1 runs {own}");
        assert!(error.is_some_and(|error| error.ends_with(&reason)));
        let told = read_complaint(&rank_0.join().unwrap()).unwrap();
        assert!(told.ends_with(&format!("cannot join: {reason}")), "{told}");
    }
}
