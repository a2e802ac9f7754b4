//! Another rank of a meeting: finds rank 0, and waits until all have come.

use super::{
    Lines, MOST_PAUSE, Meeting, PAUSE, PING, PONG, PORTS, READY, Star, TRY, WELCOME, at, connect,
    hello, is_gone, open_data, read_welcome, resolve,
};
use crate::{
    Error, Rank, Result,
    control::{
        JoinOptions,
        door::{complaint, read_refusal},
        wire::{Channel, Decoder, MOST_BYTES, Malformed},
    },
};
use std::{
    io::{self, ErrorKind},
    net::SocketAddr,
    thread,
    time::{Duration, Instant},
};

/// Round trips from which the offset of two clocks is taken.
const PINGS: usize = 8;

/// Tells rank 0 of a meeting that this process cannot join, and why, if it is found.
pub(crate) fn complain(options: &JoinOptions, reason: &str) {
    let options = &options.bounded();
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

/// Finds rank 0 and waits until all have come.
pub(super) fn visit(options: &JoinOptions) -> Result<Meeting> {
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
    // Rank 0 knows who is missing, so it has the first word at its deadline, which is not later
    // than if it had begun to wait just now.
    let frame = reply(
        options,
        &mut channel,
        Instant::now() + options.timeout + 2 * TRY,
    )?;
    let mut decoder = Decoder(&frame);
    let strange = |Malformed| options.refuse("rank 0 sent bytes that no rank sends");
    if decoder.byte().map_err(strange)? != WELCOME {
        return Err(strange(Malformed));
    }
    let (nonce, table) = read_welcome(&mut decoder).map_err(strange)?;
    if table.len() != options.world_size {
        return Err(strange(Malformed));
    }
    let (mut peers, places): (Vec<_>, Vec<_>) = table.into_iter().unzip();
    let center = channel.stream().peer_addr().map_err(failed)?;
    for peer in &mut peers {
        take_scope(peer, center);
    }
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

/// Gives an address that counts on one link alone the link on which this process has found rank 0:
/// each host has numbers of its own for its links.
fn take_scope(peer: &mut SocketAddr, center: SocketAddr) {
    if let (SocketAddr::V6(peer), SocketAddr::V6(center)) = (peer, center)
        && peer.ip().is_unicast_link_local()
    {
        peer.set_scope_id(center.scope_id());
    }
}

/// Looks for rank 0 on each of the ports that it may have.
fn find(options: &JoinOptions, deadline: Instant) -> Result<Channel> {
    let mut pause = PAUSE;
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
        pause = (pause * 2).min(MOST_PAUSE);
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
    let asked = Instant::now();
    let frame = match channel.wait(MOST_BYTES, deadline) {
        Ok(Some(frame)) => frame,
        Ok(None) if Instant::now() < deadline => return Err(lost(options, GONE)),
        Ok(None) => {
            let silence = format!(
                "no answer within {:.0?}: its process is stopped or its host is cut off",
                asked.elapsed()
            );
            return Err(lost(options, &silence));
        }
        Err(error) if is_gone(&error) => return Err(lost(options, GONE)),
        // What came is no frame; the system's own errors are of other kinds.
        Err(error) if error.kind() == ErrorKind::Other => return Err(at(options, &error)),
        Err(error) => return Err(lost(options, &error.to_string())),
    };
    match read_refusal(&frame) {
        Some((reason, Some(lost))) => Err(Error::aborted(lost, reason)),
        Some((reason, None)) => Err(Error::Refused {
            rank: options.rank,
            reason,
        }),
        None => Ok(frame),
    }
}

const GONE: &str = "its process ended before all ranks had come";

/// The error where rank 0 was found, and lost again.
fn lost(options: &JoinOptions, reason: &str) -> Error {
    let (rank, place) = (options.rank, options.place());
    Error::aborted(
        Rank(0),
        format!("{reason} (rank {rank} waits for them at {place})"),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_of_one_link_is_sought_on_the_link_of_rank_0_and_others_stay_as_they_are() {
        let found = |peer: &str, center: &str| {
            let mut peer = peer.parse().unwrap();
            take_scope(&mut peer, center.parse().unwrap());
            peer.to_string()
        };
        let center = "[fe80::1%3]:29500";
        assert_eq!(found("[fe80::2]:4000", center), "[fe80::2%3]:4000");
        assert_eq!(found("[fe80::2%7]:4000", center), "[fe80::2%3]:4000");
        assert_eq!(found("[fd77::2]:4000", center), "[fd77::2]:4000");
        assert_eq!(found("10.0.0.2:4000", center), "10.0.0.2:4000");
    }
}
