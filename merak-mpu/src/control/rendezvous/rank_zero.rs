//! Rank 0 of a meeting: waits for the other ranks, and tells each where the others are.

use super::{
    Lines, MOST_PAUSE, Meeting, PAUSE, PING, PONG, PORTS, READY, Star, TRY, at, connect, hello,
    open_data, resolve, welcome,
};
use crate::{
    Error, Rank, Result, Sides, Wait,
    affinity::num_sharers,
    control::{
        JoinOptions,
        door::{Door, Hello, MOST_GREETING, Visitor},
        poll,
        wire::{Encoder, Malformed},
    },
    in_words,
};
use std::{
    collections::BTreeMap,
    hash::{BuildHasher, Hasher, RandomState},
    io::{self, ErrorKind},
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener},
    thread,
    time::{Duration, Instant},
};

/// How long rank 0 stays after it has given up, to tell the reason to processes that come later.
/// They would look for it until their deadline.
const LAST_CALL: Duration = Duration::from_secs(2);

/// Opens the first free port from the given one on, once the name of this host is known.
pub(super) fn open_port(options: &JoinOptions, deadline: Instant) -> Result<TcpListener> {
    let addresses = look_up(options, deadline, || resolve(options, options.port))?;
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

/// Asks for the addresses of this host until there are some: where a cluster gives a process its
/// name, the name may come later than the process. The other ranks ask as long.
fn look_up(
    options: &JoinOptions,
    deadline: Instant,
    mut ask: impl FnMut() -> io::Result<Vec<SocketAddr>>,
) -> Result<Vec<SocketAddr>> {
    let mut pause = PAUSE;
    loop {
        let error = match ask() {
            Ok(addresses) => return Ok(addresses),
            Err(error) => error,
        };
        if Instant::now() + pause > deadline {
            return Err(options.refuse(format!(
                "no address of that host was found within {:?}: {error}",
                options.timeout
            )));
        }
        if pause == PAUSE {
            // An error, since a mistyped name never has one.
            let (host, seconds) = (options.host.as_str(), options.timeout.as_secs());
            tracing::error!(
                host, %error, seconds,
                "the host of rank 0 has no address yet: it is looked up for as many seconds"
            );
        }
        thread::sleep(pause);
        pause = (pause * 2).min(MOST_PAUSE);
    }
}

/// Where this host reaches a listener of an address.
fn loopback(ip: IpAddr) -> IpAddr {
    match ip {
        IpAddr::V4(ip) if ip.is_unspecified() => Ipv4Addr::LOCALHOST.into(),
        IpAddr::V6(ip) if ip.is_unspecified() => Ipv6Addr::LOCALHOST.into(),
        ip => ip,
    }
}

/// Waits until all other ranks have come, and tells each where the others are.
pub(super) fn host(
    options: &JoinOptions,
    epoch: Instant,
    listener: TcpListener,
) -> Result<Meeting> {
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
            let reason = format!("it left while the ranks met: {error}");
            let error = Error::aborted(Rank(number), reason);
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
                    op: Wait::JOIN.into(),
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
                door.send_away(visitor.channel, &error.to_string(), None);
                return Err(error);
            }
            answer(&mut visitor, epoch);
            visitors.insert(visitor.hello.rank.0, visitor);
        }
        if let Some((reason, channel)) = door.take_complaint() {
            let error = options.refuse(reason);
            door.send_away(channel, &error.to_string(), None);
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

/// Which ranks have another `name` than the others, in words; none where all have the same.
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
    let (reason, lost) = word_of(error);
    for visitor in visitors.into_values() {
        door.send_away(visitor.channel, &reason, lost);
    }
    door.see_off(options.world_size - 1, (&reason, lost), LAST_CALL);
}

/// What the others are told of an error: the reason, and the rank that is lost where one is. What
/// is wrong with the launch itself is no rank's loss.
fn word_of(error: &Error) -> (String, Option<Rank>) {
    match error {
        Error::Aborted { by, reason } => (reason.clone(), Some(Rank(*by))),
        Error::Timeout { wait, .. } => (error.to_string(), wait.missing.first().copied()),
        _ => (error.to_string(), None),
    }
}

/// Where a visitor takes connections, as rank 0 sees it.
fn data_address(visitor: &Visitor) -> SocketAddr {
    let mut address = visitor.from;
    address.set_port(visitor.hello.data_port);
    address
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_that_comes_late_is_waited_for_and_one_that_never_does_until_the_deadline() {
        let timeout = Duration::from_millis(300);
        let options = JoinOptions::new(0, 2, "n1", 29_500).with_timeout(timeout);
        let address = SocketAddr::from(([10, 0, 0, 1], 29_500));
        let mut asked = 0;
        let unknown = || Err(io::Error::other("name or service not known"));
        let late = || {
            asked += 1;
            if asked == 3 {
                Ok(vec![address])
            } else {
                unknown()
            }
        };
        let patience = Duration::from_secs(20);
        let found = look_up(&options, Instant::now() + patience, late);
        assert_eq!(found.unwrap(), [address]);
        let start = Instant::now();
        let error = look_up(&options, start + timeout, unknown).unwrap_err();
        assert!(start.elapsed() > timeout / 4 && start.elapsed() < patience);
        assert_eq!(
            error.to_string(),
            "rank 0 cannot meet the others at n1:29500: no address of that host was found within \
             300ms: name or service not known"
        );
    }
}
