//! Ranks as processes, on one host or several.
//!
//! The processes meet at the address of rank 0, connect each with every other, and check in every
//! build, before data move, that all members call the same collective. One thread of a process
//! makes progress for all its operations, so a rank that computes holds up no peer.
//!
//! A reduction moves what a ring moves, and gives the bits of the [threads](crate::threads) engine:
//!
//! ```text
//!           buffer of rank 0      of rank 1      of rank 2
//! first     part r of each ─────> rank r, which folds them in ascending rank as they come
//! second    the sum of part r ──> everyone
//! ```
//!
//! Up to 16 KiB travel with the call itself; more wait until the receiver has called too, so that
//! they go straight from buffer to buffer, and nobody has to store them.
//!
//! Processes of one Linux host move bytes through memory that both map, unless
//! [`JoinOptions::shared_memory`] says otherwise; a socket beside it wakes a process that sleeps.
//! Its thread looks for bytes for some microseconds before it sleeps where the host has a core for
//! each of its ranks. All others move bytes through sockets. Up to 256 MiB that collectives have
//! needed for themselves are kept for the next ones, and as much of vectors that were sent for
//! messages that come.
//!
//! A second line to rank 0 carries heartbeats and failures: a process that is killed is missed at
//! once, one that is stopped or cut off after [`JoinOptions::beat_timeout`], and every other rank
//! gets [`Error::Aborted`] with the culprit's rank and its own operation.
//!
//! A process that ends its part ([`Member::end`], or when its last handle is dropped) waits until
//! its peers have what it sent; rank 0 leaves last. A process that ends otherwise counts as failed.

#[cfg(target_os = "linux")]
mod handover;
mod mesh;
#[cfg(target_os = "linux")]
mod shared;
mod stream;

pub use crate::control::JoinOptions;

use crate::{
    Error, Member, Result,
    control::{Control, Meeting, State, meet},
    mill::{Grind, Link, NoPort, ProcessRank, Session, Start, Woven},
};
use std::{
    net::{Ipv4Addr, TcpListener},
    sync::Arc,
    thread,
    time::Duration,
};

/// Joins the world of these options with this process, and returns when all ranks have come.
///
/// # Errors
/// [`Error::Rendezvous`] or [`Error::Refused`] with what kept the processes from meeting; where a
/// rank did not come or was lost meanwhile, [`Error::Timeout`] on rank 0, and [`Error::Aborted`]
/// with that rank.
///
/// ```
/// use merak_mpu::{ReduceOp, tcp};
/// // Another process joins with rank 1 and so on; this world has one rank.
/// let member = tcp::join(&tcp::JoinOptions::new(0, 1, "127.0.0.1", 29_500))?;
/// let sum = member.world_group()?.all_reduce_vec(vec![1.0_f32], ReduceOp::Sum)?;
/// assert_eq!(sum, [1.0]);
/// # Ok::<(), merak_mpu::Error>(())
/// ```
pub fn join(options: &JoinOptions) -> Result<Member> {
    join_at(options, None)
}

fn join_at(options: &JoinOptions, listener: Option<TcpListener>) -> Result<Member> {
    let options = &options.bounded();
    let meeting = meet(options, listener)?;
    let session = Session::start("tcp", options, meeting, |meeting, state, control| {
        weave(options, meeting, state, control)
    })?;
    Ok(Member::new(Arc::new(ProcessRank(Arc::new(session)))))
}

/// Connects with the other processes, over shared memory where they are on this host.
fn weave(
    options: &JoinOptions,
    meeting: &Meeting,
    state: &State,
    control: &Control,
) -> Result<(Woven, Start)> {
    let Meeting {
        nonce,
        peers,
        hosts,
        data,
        ..
    } = meeting;
    let rank = state.rank;
    #[cfg(target_os = "linux")]
    let (lacks, desk) = {
        let lacks = |what| {
            move |error: std::io::Error| Error::NoResource {
                rank: rank.0,
                what,
                reason: error.to_string(),
            }
        };
        let desk = handover::Desk::open(*nonce, rank);
        (lacks, desk.map_err(lacks("Unix socket"))?)
    };
    #[cfg_attr(
        not(target_os = "linux"),
        expect(unused_mut, reason = "this system has no memory to share")
    )]
    let mut streams = mesh::connect(state, control, *nonce, peers, data)?;
    #[cfg(target_os = "linux")]
    if options.shared_memory {
        let shared = desk.share(state, *nonce, hosts, &mut streams);
        shared.map_err(|handover::Unreachable { rank: other, error }| {
            if other == rank {
                return lacks("shared memory")(error);
            }
            Error::aborted(other, format!("no memory could be shared with it: {error}"))
        })?;
        state.check()?;
    }
    let cores = thread::available_parallelism().map_or(1, usize::from);
    let place = meeting.locality(rank);
    let woven = Woven {
        links: streams.into_iter().map(|one| one.map(Link::new)).collect(),
        spins: spins(options.shared_memory, place.core_sharers, cores),
        ends_together: false,
        shared_bytes: shared_bytes(options, place.local_size),
    };
    let start = move |grind: Grind| {
        let builder = thread::Builder::new().name(format!("mill-{rank}"));
        builder.spawn(move || {
            grind(&mut NoPort);
        })
    };
    Ok((woven, Box::new(start)))
}

/// Whether a process looks for news without a pause: where they come through memory, and each of
/// the ranks that share its cores can have one for itself.
fn spins(shared_memory: bool, core_sharers: usize, cores: usize) -> bool {
    shared_memory && core_sharers <= cores
}

/// Bytes of the memory that `ranks` ranks of a host share.
#[cfg(target_os = "linux")]
fn shared_bytes(options: &JoinOptions, ranks: usize) -> usize {
    if options.shared_memory {
        shared::bytes_among(ranks)
    } else {
        0
    }
}

/// This system has no memory to share.
#[cfg(not(target_os = "linux"))]
fn shared_bytes(_: &JoinOptions, _: usize) -> usize {
    0
}

/// Makes a world of `n` ranks of this process that are connected by real sockets, as tests need
/// them. `timeout` is the longest wait for a peer.
///
/// # Errors
/// When the system gives no socket or thread.
///
/// ```
/// use merak_mpu::{run_members, tcp};
/// use std::time::Duration;
/// let members = tcp::world(2, Duration::from_secs(20))?;
/// let ranks = run_members(members, 2 << 20, |member| {
///     member.world_group()?.all_gather_vec(vec![member.rank().0 as u32])
/// })?;
/// assert_eq!(ranks, [[0, 1], [0, 1]]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn world(n: usize, timeout: Duration) -> Result<Vec<Member>> {
    world_of(&JoinOptions::new(0, n, "127.0.0.1", 0).with_timeout(timeout))
}

/// [`world`] of the size of some options; the rank, the host and the port are this function's.
///
/// # Errors
/// As [`world`].
pub fn world_of(options: &JoinOptions) -> Result<Vec<Member>> {
    let n = options.world_size;
    let lacks = |rank, error: std::io::Error| Error::NoResource {
        rank,
        what: "socket",
        reason: error.to_string(),
    };
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0));
    let listener = listener.map_err(|error| lacks(0, error))?;
    let address = listener.local_addr().map_err(|error| lacks(0, error))?;
    let options = |rank| JoinOptions {
        rank,
        host: "127.0.0.1".to_owned(),
        port: address.port(),
        ..options.clone()
    };
    thread::scope(|scope| {
        let mut listener = Some(listener);
        let joins: Vec<_> = (0..n)
            .map(|rank| {
                let listener = listener.take();
                scope.spawn(move || join_at(&options(rank), listener))
            })
            .collect();
        let joined = joins.into_iter().zip(0..).map(|(join, rank)| {
            join.join().unwrap_or_else(|_| {
                let error = std::io::Error::other("the thread that joined panicked");
                Err(lacks(rank, error))
            })
        });
        joined.collect()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_spin_only_where_memory_is_shared_and_each_has_a_core() {
        assert!(spins(true, 2, 2) && spins(true, 1, 8));
        assert!(
            !spins(true, 3, 2),
            "spinning would keep the third one from its core"
        );
        assert!(!spins(false, 1, 8), "a socket wakes its reader");
    }
}
