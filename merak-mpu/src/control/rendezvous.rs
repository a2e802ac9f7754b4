//! How the processes of a world find each other: all of them come to rank 0.

use super::{
    door::{Door, Hello, MOST_GREETING, REFUSED, Visitor, complaint, read_greeting},
    poll,
    wire::{Channel, Decoder, Encoder, MOST_BYTES, Malformed},
};
use crate::{
    Error, Locality, Rank, Result, Sides, Wait,
    affinity::{num_sharers, processors},
    in_words,
};
use std::{
    collections::BTreeMap,
    fs,
    hash::{BuildHasher, Hasher, RandomState},
    io::{self, ErrorKind},
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream, ToSocketAddrs},
    process, thread,
    time::{Duration, Instant},
};

/// How many ports from the given one on rank 0 may take, where others hold the first ones.
const PORTS: u16 = 16;

/// Longest wait for a connection to one address, and for the first word of the process that
/// listens there.
const TRY: Duration = Duration::from_secs(1);

/// How long rank 0 stays after it has given up, to tell the reason to processes that come later.
/// They would look for it until their deadline.
const LAST_CALL: Duration = Duration::from_secs(2);

/// Round trips from which the offset of two clocks is taken.
const PINGS: usize = 8;

/// Which world a process joins, and as what.
#[derive(Debug, Clone)]
pub struct JoinOptions {
    /// This process's rank.
    pub rank: usize,
    /// The number of processes.
    pub world_size: usize,
    /// The name or address of the host of rank 0, or several with commas between them, of which
    /// each rank takes one that answers.
    pub host: String,
    /// The port where rank 0 takes connections. It takes one of the next where another program,
    /// as `torchrun`'s agent, holds it, and the other ranks find it there.
    pub port: u16,
    /// Longest wait for a peer.
    pub timeout: Duration,
    /// Longest silence of a process before the others count it as lost.
    pub beat_timeout: Duration,
    /// Whether processes of one host share memory, the same on every rank. They do where the system
    /// is Linux; without it they use sockets as processes of several hosts do.
    pub shared_memory: bool,
    /// A name of the run, the same on every rank. Runs of different names may use one port.
    pub run: String,
    /// What must be equal on every rank, by name, as `("configuration", bytes)`.
    pub digests: Vec<(String, Vec<u8>)>,
}

impl JoinOptions {
    /// The options for one of `world_size` processes that meet at a host and port.
    pub fn new(rank: usize, world_size: usize, host: &str, port: u16) -> Self {
        let timeout = crate::threads::WorldOptions::default().timeout;
        Self {
            rank,
            world_size,
            host: host.to_owned(),
            port,
            timeout,
            beat_timeout: default_beat(timeout),
            shared_memory: true,
            run: String::new(),
            digests: Vec::new(),
        }
    }

    /// Sets the longest wait for a peer, and the silence after which a process counts as lost to
    /// half of it, from 2 to 30 seconds.
    #[must_use]
    pub fn with_timeout(self, timeout: Duration) -> Self {
        Self {
            timeout,
            beat_timeout: default_beat(timeout),
            ..self
        }
    }

    pub(super) fn place(&self) -> String {
        format!("{}:{}", self.host, self.port)
    }

    fn refuse(&self, reason: impl Into<String>) -> Error {
        Error::Rendezvous {
            rank: self.rank,
            address: self.place(),
            reason: reason.into(),
        }
    }

    /// Whether rank 0 takes connections of its own host alone.
    fn is_local(&self) -> bool {
        self.host == "localhost" || self.host.parse().is_ok_and(|ip: IpAddr| ip.is_loopback())
    }
}

fn default_beat(timeout: Duration) -> Duration {
    (timeout / 2).clamp(Duration::from_secs(2), Duration::from_secs(30))
}

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
    /// By rank, how many ranks of its host share its processors; see [`num_sharers`].
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
/// [`Error::Rendezvous`] with what was found, [`Error::Timeout`] on rank 0 when a rank does not
/// come.
pub(crate) fn meet(options: &JoinOptions, listener: Option<TcpListener>) -> Result<Meeting> {
    let (rank, n) = (options.rank, options.world_size);
    if rank >= n {
        return Err(options.refuse(format!(
            "rank {rank} does not exist in a world of {n} ranks"
        )));
    }
    if rank == 0 {
        let listener = match listener {
            Some(listener) => listener,
            None => open_port(options)?,
        };
        host(options, listener)
    } else {
        visit(options)
    }
}

/// Opens the first free port from the given one on.
fn open_port(options: &JoinOptions) -> Result<TcpListener> {
    let addresses = resolve(options, options.port).map_err(|error| at(options, &error))?;
    let wide = match addresses.first() {
        Some(SocketAddr::V6(_)) => IpAddr::V6(Ipv6Addr::UNSPECIFIED),
        _ => IpAddr::V4(Ipv4Addr::UNSPECIFIED),
    };
    let ip = match addresses.first() {
        Some(address) if options.is_local() => address.ip(),
        _ => wide,
    };
    for offset in 0..PORTS {
        let Some(port) = options.port.checked_add(offset) else {
            break;
        };
        match TcpListener::bind((ip, port)) {
            Ok(listener) => return Ok(listener),
            Err(error) if error.kind() == ErrorKind::AddrInUse => {
                let greeted = connect(SocketAddr::new(loopback(ip), port));
                if let Some((_, version, run)) = greeted.ok().flatten()
                    && run == options.run
                {
                    return Err(options.refuse(format!(
                        "rank 0 of another run (merak-mpu {version}) holds port {port}: \
                         give each run a port of its own"
                    )));
                }
            }
            Err(error) => return Err(at(options, &error)),
        }
    }
    Err(options.refuse(format!(
        "other programs hold this port and the next {}",
        PORTS - 1
    )))
}

/// Where this host reaches a listener of an address.
fn loopback(ip: IpAddr) -> IpAddr {
    match ip {
        IpAddr::V4(ip) if ip.is_unspecified() => Ipv4Addr::LOCALHOST.into(),
        IpAddr::V6(ip) if ip.is_unspecified() => Ipv6Addr::LOCALHOST.into(),
        ip => ip,
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

/// Rank 0: waits until all others have come, and tells each where the others are.
fn host(options: &JoinOptions, listener: TcpListener) -> Result<Meeting> {
    let epoch = Instant::now();
    let failed = |error: io::Error| at(options, &error);
    let data = open_data(options, listener.local_addr().map_err(failed)?.ip()).map_err(failed)?;
    let mut door = Door::new(listener, &options.run).map_err(failed)?;
    let own = hello(options, &data).map_err(failed)?;
    let mut visitors = BTreeMap::new();
    let outcome = gather(options, &own, epoch, &mut door, &mut visitors);
    let outcome = outcome.and_then(|()| compare(options, &own, &visitors));
    if let Err(error) = outcome {
        send_all_away(door, visitors, options, &error);
        return Err(error);
    }
    let mut names: Vec<&str> = Vec::new();
    let mut hosts = Vec::new();
    for host in [own.host.as_str()]
        .into_iter()
        .chain(visitors.values().map(|visitor| visitor.hello.host.as_str()))
    {
        let known = names.iter().position(|name| *name == host);
        hosts.push(known.unwrap_or(names.len()));
        if known.is_none() {
            names.push(host);
        }
    }
    let others = visitors.values().map(|visitor| &visitor.hello);
    let processors = std::iter::once(&own).chain(others);
    let processors: Vec<_> = processors.map(|hello| &*hello.processors).collect();
    let sharers = num_sharers(&hosts, &processors);
    let nonce = RandomState::new().build_hasher().finish();
    for number in visitors.keys().copied().collect::<Vec<_>>() {
        let table = table_for(&own, &visitors, &visitors[&number]);
        let frame = welcome(nonce, &table, (&hosts, &sharers));
        let visitor = visitors.get_mut(&number).expect("its number was just read");
        if let Err(error) = visitor.channel.send(&frame) {
            let error = options.refuse(format!("rank {number} left while the ranks met: {error}"));
            send_all_away(door, visitors, options, &error);
            return Err(error);
        }
    }
    let mut peers = vec![data.local_addr().map_err(failed)?];
    peers.extend(visitors.values().map(data_address));
    let channels = visitors.into_values().map(|visitor| visitor.channel);
    Ok(Meeting {
        nonce,
        epoch,
        peers,
        hosts,
        sharers,
        data,
        star: Some(Star(Lines::Center {
            door,
            channels: channels.collect(),
        })),
    })
}

/// Lets all ranks in.
fn gather(
    options: &JoinOptions,
    own: &Hello,
    epoch: Instant,
    door: &mut Door,
    visitors: &mut BTreeMap<usize, Visitor>,
) -> Result<()> {
    let n = options.world_size;
    while visitors.len() + 1 < n || visitors.values().any(|visitor| !visitor.is_ready) {
        let left = options.timeout.saturating_sub(epoch.elapsed());
        if left.is_zero() {
            let has_come = |rank: &usize| visitors.get(rank).is_some_and(|one| one.is_ready);
            let missing = (1..n).filter(|rank| !has_come(rank));
            return Err(Error::Timeout {
                after: options.timeout,
                wait: Box::new(Wait {
                    rank: Rank(0),
                    op: "join".into(),
                    group: format!("world of {n} at {}", options.place()),
                    sequence: 0,
                    missing: missing.map(Rank).collect(),
                }),
                others: Vec::new(),
            });
        }
        let sockets = visitors.values().map(|visitor| &visitor.channel);
        let sockets: Vec<_> = door
            .sockets()
            .chain(sockets.map(std::os::fd::AsFd::as_fd))
            .collect();
        poll::readable(&sockets, left.min(TRY)).map_err(|error| at(options, &error))?;
        // One that leaves before all have come may come again.
        visitors.retain(|_, visitor| answer(visitor, epoch));
        for mut visitor in door.turn() {
            if let Err(error) = admit(options, own, &visitor.hello, visitors) {
                door.send_away(visitor.channel, &error.to_string());
                return Err(error);
            }
            answer(&mut visitor, epoch);
            visitors.insert(visitor.hello.rank.0, visitor);
        }
        if let Some((reason, channel)) = door.take_complaint() {
            let error = options.refuse(reason);
            door.send_away(channel, &error.to_string());
            return Err(error);
        }
    }
    Ok(())
}

/// Answers a visitor's questions for the time; false when it has left.
fn answer(visitor: &mut Visitor, epoch: Instant) -> bool {
    let open = visitor.channel.read().unwrap_or(false);
    loop {
        let frame = match visitor.channel.next(MOST_GREETING) {
            Ok(Some(frame)) => frame,
            Ok(None) => return open,
            Err(Malformed) => return false,
        };
        match frame.as_slice() {
            [PING] => {}
            [READY] => {
                visitor.is_ready = true;
                return open;
            }
            _ => return false,
        }
        let mut pong = Encoder::of(PONG);
        pong.number(epoch.elapsed().as_nanos() as u64);
        if visitor.channel.send(&pong.0).is_err() {
            return false;
        }
    }
}

/// Checks that a visitor is one of the missing ranks.
fn admit(
    options: &JoinOptions,
    own: &Hello,
    hello: &Hello,
    visitors: &BTreeMap<usize, Visitor>,
) -> Result<()> {
    let (rank, n) = (hello.rank, options.world_size);
    if hello.world_size != n {
        return Err(options.refuse(format!(
            "rank {rank} (process {}) says that the world has {} ranks, rank 0 that it has {n}",
            hello.process, hello.world_size
        )));
    }
    let first = if rank == 0 {
        own
    } else {
        match visitors.get(&rank.0) {
            Some(visitor) => &visitor.hello,
            None if rank.0 < n => return Ok(()),
            None => {
                let reason = format!("rank {rank} does not exist in a world of {n} ranks");
                return Err(options.refuse(reason));
            }
        }
    };
    Err(options.refuse(format!(
        "two processes are rank {rank} ({} and {}): each process needs a rank of its own, and each \
         run a port of its own",
        first.process, hello.process
    )))
}

/// Checks that all ranks brought the same digests.
fn compare(options: &JoinOptions, own: &Hello, visitors: &BTreeMap<usize, Visitor>) -> Result<()> {
    let others = visitors.values().map(|visitor| &visitor.hello);
    let hellos: Vec<&Hello> = [own].into_iter().chain(others).collect();
    let mut names: Vec<&str> = Vec::new();
    for (name, _) in hellos.iter().flat_map(|hello| &hello.digests) {
        if !names.contains(&name.as_str()) {
            names.push(name);
        }
    }
    for name in names {
        let values = hellos.iter().map(|hello| {
            let found = hello.digests.iter().find(|(other, _)| other == name);
            (hello.rank, found.map(|(_, value)| value))
        });
        if let Some(difference) = difference(name, &Sides::of(values)) {
            return Err(options.refuse(difference));
        }
    }
    Ok(())
}

/// Who has another `name` than the others, if somebody has.
fn difference(name: &str, sides: &Sides) -> Option<String> {
    let has = |ranks: &[Rank]| {
        let verb = if ranks.len() == 1 { "has" } else { "have" };
        format!("{} {verb}", in_words(ranks))
    };
    let mut all = sides.iter();
    let first = all.next().unwrap_or_default();
    match sides.odd() {
        Some(odd) if odd.is_empty() => None,
        Some(odd) => Some(format!(
            "{} another {name} than {}",
            has(&odd),
            in_words(first)
        )),
        None => {
            let others: Vec<_> = all.map(|ranks| format!("{} another", has(ranks))).collect();
            let others = others.join(", ");
            Some(format!("{} one {name}, {others}", has(first)))
        }
    }
}

/// Tells all ranks that have come, and those that do meanwhile, why they cannot meet.
fn send_all_away(
    mut door: Door,
    visitors: BTreeMap<usize, Visitor>,
    options: &JoinOptions,
    error: &Error,
) {
    let reason = error.to_string();
    for visitor in visitors.into_values() {
        door.send_away(visitor.channel, &reason);
    }
    door.see_off(options.world_size - 1, &reason, LAST_CALL);
}

/// Where a visitor takes connections, as rank 0 sees it.
fn data_address(visitor: &Visitor) -> SocketAddr {
    SocketAddr::new(visitor.from.ip(), visitor.hello.data_port)
}

/// Where each rank takes connections, as `reader` sees it: those that came over the loopback are
/// where rank 0 is.
fn table_for(
    own: &Hello,
    visitors: &BTreeMap<usize, Visitor>,
    reader: &Visitor,
) -> Vec<SocketAddr> {
    let center = reader.to.ip();
    let others = visitors.values().map(|visitor| {
        let address = data_address(visitor);
        if address.ip().is_loopback() {
            SocketAddr::new(center, address.port())
        } else {
            address
        }
    });
    [SocketAddr::new(center, own.data_port)]
        .into_iter()
        .chain(others)
        .collect()
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

/// Tells rank 0 of a meeting that this process cannot join, and why, if it is found.
pub(crate) fn complain(options: &JoinOptions, reason: &str) {
    let deadline = Instant::now() + options.timeout;
    if let Ok(mut channel) = find(options, deadline) {
        complain_to(&mut channel, reason, deadline);
    }
}

/// The same, to a rank 0 that was found. Returns when it has heard.
fn complain_to(channel: &mut Channel, reason: &str, deadline: Instant) {
    let name = rustix::system::uname();
    let name = name.nodename().to_string_lossy();
    // Where rank 0 has met the others or has ended, nobody waits for this process.
    let _ = channel.send(&complaint(reason, &name));
    let _ = channel.wait(MOST_BYTES, deadline);
}

/// Another rank: finds rank 0 and waits until all have come.
fn visit(options: &JoinOptions) -> Result<Meeting> {
    let deadline = Instant::now() + options.timeout;
    let mut channel = find(options, deadline)?;
    let failed = |error: io::Error| at(options, &error);
    let local = channel.stream().local_addr().map_err(failed)?;
    let data = open_data(options, local.ip()).map_err(failed)?;
    let hello = hello(options, &data).map_err(failed)?;
    // Where rank 0 has ended, its last word says more than a broken connection.
    let _ = channel.send(&hello.encode());
    let epoch = read_clock(options, &mut channel)?;
    let _ = channel.send(&[READY]);
    // Rank 0 knows who is missing, so it has the first word at the deadline.
    let frame = reply(options, &mut channel, deadline + 2 * TRY)?;
    let mut decoder = Decoder(&frame);
    let strange = |Malformed| options.refuse("rank 0 sent bytes that no rank sends");
    if decoder.byte().map_err(strange)? != WELCOME {
        return Err(strange(Malformed));
    }
    let (nonce, table) = read_welcome(&mut decoder).map_err(strange)?;
    if table.len() != options.world_size {
        return Err(strange(Malformed));
    }
    let (peers, places): (_, Vec<_>) = table.into_iter().unzip();
    let (hosts, sharers) = places.into_iter().unzip();
    Ok(Meeting {
        nonce,
        epoch,
        peers,
        hosts,
        sharers,
        data,
        star: Some(Star(Lines::Ray(channel))),
    })
}

/// Looks for rank 0 on each of the ports that it may have.
fn find(options: &JoinOptions, deadline: Instant) -> Result<Channel> {
    let mut pause = Duration::from_millis(10);
    let mut seen = "nothing listens there: it has not started, or has ended before".to_owned();
    loop {
        for offset in 0..PORTS {
            let Some(port) = options.port.checked_add(offset) else {
                break;
            };
            let addresses = match resolve(options, port) {
                Ok(addresses) => addresses,
                Err(error) => {
                    seen = error.to_string();
                    break;
                }
            };
            for address in addresses {
                match connect(address) {
                    Ok(Some((mut channel, version, run)))
                        if run == options.run && version != env!("CARGO_PKG_VERSION") =>
                    {
                        let reason = format!(
                            "rank 0 runs merak-mpu {version}, rank {} runs {}",
                            options.rank,
                            env!("CARGO_PKG_VERSION")
                        );
                        if offset == 0 {
                            // Nobody waits for it then.
                            complain_to(&mut channel, &reason, Instant::now() + TRY);
                            return Err(options.refuse(reason));
                        }
                        // It may be of another run, which has this port for its own.
                        seen = format!("at port {port} {reason}");
                    }
                    Ok(Some((channel, _, run))) if run == options.run => return Ok(channel),
                    Ok(Some((_, _, run))) => seen = format!("run {run:?} is at port {port}"),
                    Ok(None) => seen = format!("another program is at port {port}"),
                    Err(error) if error.kind() == ErrorKind::ConnectionRefused => {}
                    Err(error) => seen = error.to_string(),
                }
            }
        }
        if Instant::now() + pause > deadline {
            return Err(options.refuse(format!(
                "no rank 0 was found on this port or the next {} within {:?}: {seen}",
                PORTS - 1,
                options.timeout
            )));
        }
        thread::sleep(pause);
        pause = (pause * 2).min(TRY / 2);
    }
}

/// The moment that rank 0 counts from, on this process's clock.
fn read_clock(options: &JoinOptions, channel: &mut Channel) -> Result<Instant> {
    let mut best: Option<(Duration, Instant)> = None;
    for _ in 0..PINGS {
        let asked = Instant::now();
        // Where rank 0 has sent this rank away, its last word is still there to be read.
        let _ = channel.send(&[PING]);
        let frame = reply(options, channel, asked + options.beat_timeout)?;
        let took = asked.elapsed();
        let mut decoder = Decoder(&frame);
        let elapsed = match (decoder.byte(), decoder.number()) {
            (Ok(PONG), Ok(nanos)) => Duration::from_nanos(nanos),
            _ => return Err(options.refuse("rank 0 sent bytes that no rank sends")),
        };
        let epoch = (asked + took / 2).checked_sub(elapsed).unwrap_or(asked);
        if best.is_none_or(|(least, _)| took < least) {
            best = Some((took, epoch));
        }
    }
    Ok(best.map_or_else(Instant::now, |(_, epoch)| epoch))
}

/// The next frame of rank 0, unless it sends this rank away.
fn reply(options: &JoinOptions, channel: &mut Channel, deadline: Instant) -> Result<Vec<u8>> {
    let frame = match channel.wait(MOST_BYTES, deadline) {
        Ok(frame) => frame,
        Err(error) if is_gone(&error) => None,
        Err(error) => return Err(at(options, &error)),
    };
    let Some(frame) = frame else {
        let reason = if Instant::now() < deadline {
            "rank 0 ended before all ranks had come"
        } else {
            "rank 0 did not say who is missing"
        };
        return Err(options.refuse(reason));
    };
    if let Some((&REFUSED, mut rest)) = frame
        .split_first()
        .map(|(kind, rest)| (kind, Decoder(rest)))
    {
        let reason = rest.text().unwrap_or_else(|Malformed| "no reason".into());
        return Err(Error::Refused {
            rank: options.rank,
            reason,
        });
    }
    Ok(frame)
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

    /// Greets as rank 0 of another version.
    fn greet(stream: TcpStream, run: &str) -> Channel {
        let mut channel = Channel::new(stream).unwrap();
        let mut greeting = Encoder(MAGIC.to_vec());
        greeting.text("0.0.1").text(run);
        channel.send(&greeting.0).unwrap();
        channel
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
