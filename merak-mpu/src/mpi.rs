//! Ranks as processes that an MPI runtime has started (feature `mpi`).
//!
//! `mpirun` says which process has which rank, and carries all data. Everything else is as between
//! the processes of [`tcp`](crate::tcp): members compare their calls before data move, each member
//! folds its part of a reduction in ascending rank and sends the sum to all, and a second line to
//! rank 0 carries heartbeats and failures. So sums have the bits of the other engines, and a wrong
//! length or another collective is [`Error::Mismatch`] and no crash. MPI's own reductions promise
//! neither.
//!
//! ```text
//! frames ──> slots of 128 KiB ──MPI_Isend──> slots of the receiver ──> buffers
//! ```
//!
//! The bytes between two processes are one stream, which MPI carries in slots: one communicator,
//! one tag, and MPI's promise that messages between two ranks keep their order. So groups cost MPI
//! nothing, may be made and used in any order, and counts stay far below 2^31 whatever the length
//! of a buffer. One thread of a process makes all calls of MPI, which makes no progress between
//! calls: it looks for messages without a pause while they come, and ever more rarely where none
//! do, up to once in a millisecond. A process keeps a slot for each other one with which it
//! exchanges anything ([`Member::shared_bytes`]), and up to 2 MiB of slots where both send without
//! a pause.
//!
//! The address of rank 0's second line travels by MPI, so no `MASTER_ADDR` is needed, on several
//! hosts either. [`JoinOptions::host`] adds to the addresses that rank 0 finds for itself.
//!
//! # The end
//! [`Member::end`] returns when all ranks have ended, since an MPI program ends together. A world
//! that has failed cannot end MPI: the process that has failed exits half a second after its last
//! words, and by this the runtime ends the job with its status; the other processes wait up to
//! three seconds for that when they exit. A process that is killed takes the job with it at once:
//! the default of Open MPI and MPICH. What the others say then may be cut off.

mod desk;
mod exit;
mod lane;
mod library;
mod port;

pub use crate::control::JoinOptions;

use crate::{
    Error, Member, Rank, Result,
    control::{
        Meeting, meet, this_host,
        wire::{Decoder, Encoder, Malformed},
    },
    mill::{Link, ProcessRank, Session, Start, Woven},
};
use desk::Desk;
use lane::{Lane, LaneWire};
use std::{
    hash::{BuildHasher, DefaultHasher, Hash, Hasher, RandomState},
    io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, TcpListener, UdpSocket},
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
};

/// Bytes of one message of MPI.
const SLOT_BYTES: usize = 128 << 10;

/// Whether this process has started MPI, which works once.
static STARTED: AtomicBool = AtomicBool::new(false);

/// Joins the world of all processes that an MPI runtime has started with this one, and returns when
/// all have come. A process can do this once.
///
/// The rank and the world size of the options must be those of MPI; the host, where it is not
/// empty, is one more address at which the other hosts may reach rank 0; the port is not used.
///
/// # Errors
/// [`Error::UnfitEngine`] where MPI does not start, or says another rank or size;
/// [`Error::Rendezvous`], [`Error::Refused`], [`Error::Timeout`] and [`Error::Aborted`] as
/// [`tcp::join`](crate::tcp::join).
///
/// ```no_run
/// use merak_mpu::{Launch, ReduceOp, mpi};
/// // mpirun -n 4 PROGRAM
/// let launch = Launch::from_env()?;
/// let member = mpi::join(&mpi::JoinOptions::new(launch.rank, launch.world_size, "", 0))?;
/// let sum = member.world_group()?.all_reduce_scalar(1.0_f32, ReduceOp::Sum)?;
/// assert_eq!(sum, 4.0);
/// member.end();
/// # Ok::<(), merak_mpu::Error>(())
/// ```
pub fn join(options: &JoinOptions) -> Result<Member> {
    join_with(options, SLOT_BYTES)
}

/// [`join`] with messages of MPI of at most `slot_bytes` bytes, alike on all ranks, as tests need
/// it to see that nothing depends on where bytes are cut.
///
/// # Errors
/// As [`join`].
#[cfg(feature = "testing")]
pub fn join_in_slots(options: &JoinOptions, slot_bytes: usize) -> Result<Member> {
    join_with(options, slot_bytes.max(1))
}

fn join_with(options: &JoinOptions, slot_bytes: usize) -> Result<Member> {
    if STARTED.swap(true, Ordering::AcqRel) {
        return Err(unfit(
            "this process has joined a world by MPI before, and MPI starts once in a process",
        ));
    }
    let joined = enter(options, slot_bytes);
    if let Err(error) = &joined {
        // Rank 0 has told the others, or none of them can come.
        exit::keep_order(match error {
            Error::Refused { .. } => false,
            Error::Aborted { by, .. } => *by == options.rank,
            _ => true,
        });
    }
    joined
}

fn enter(options: &JoinOptions, slot_bytes: usize) -> Result<Member> {
    let options = &options.bounded();
    let failed = |error: io::Error| unfit(error.to_string());
    let desk = Desk::open(options.timeout).map_err(failed)?;
    let (rank, size) = (desk.rank, desk.size);
    if (rank.0, size) != (options.rank, options.world_size) {
        return Err(unfit(format!(
            "MPI says that this process is rank {rank} of {size}, its launcher that it is rank {} \
             of {}: start it by the mpirun of the MPI library that it was built with",
            options.rank, options.world_size
        )));
    }
    let (options, listener) = invite(options, &desk).map_err(failed)?;
    let meeting = meet(&options, listener)?;
    let session = Session::start("mpi", &options, meeting, |meeting, _, _| {
        Ok(weave(meeting, options.rank, desk, slot_bytes))
    })?;
    Ok(Member::new(Arc::new(ProcessRank(Arc::new(session)))))
}

fn unfit(reason: impl Into<String>) -> Error {
    Error::UnfitEngine {
        engine: "mpi",
        reason: reason.into(),
    }
}

/// Tells every rank where rank 0 takes connections. Rank 0 gets its listener.
fn invite(options: &JoinOptions, desk: &Desk) -> io::Result<(JoinOptions, Option<TcpListener>)> {
    let mut hasher = DefaultHasher::new();
    this_host().hash(&mut hasher);
    let own = hasher.finish();
    let hosts = desk.ask(move |library| library.all_gather(own))?;
    let (mut listener, mut invitation) = (None, Encoder::default());
    if desk.rank == 0 {
        let is_one_host = hosts.iter().all(|host| *host == own);
        let opened = open(is_one_host)?;
        invitation
            .number(opened.local_addr()?.port().into())
            .number(RandomState::new().build_hasher().finish())
            .text(&addresses(&options.host));
        listener = Some(opened);
    }
    let invitation = desk.ask(move |library| library.broadcast(invitation.0))?;
    let mut decoder = Decoder(&invitation);
    let mut read = || Ok::<_, Malformed>((decoder.number()?, decoder.number()?, decoder.text()?));
    let (port, nonce, addresses) = read().map_err(io::Error::other)?;
    let here = Ipv4Addr::LOCALHOST.to_string();
    let options = JoinOptions {
        host: if hosts[0] == own { here } else { addresses },
        port: u16::try_from(port).map_err(io::Error::other)?,
        run: format!("{} {nonce:016x}", options.run),
        ..options.clone()
    };
    Ok((options, listener))
}

/// Opens a free port for this host alone, or for all.
fn open(is_one_host: bool) -> io::Result<TcpListener> {
    if is_one_host {
        return TcpListener::bind((Ipv4Addr::LOCALHOST, 0));
    }
    // Where the system has both, this one takes connections of both.
    TcpListener::bind((Ipv6Addr::UNSPECIFIED, 0))
        .or_else(|_| TcpListener::bind((Ipv4Addr::UNSPECIFIED, 0)))
}

/// Where other hosts may reach this one: as the user says, by its name, and by the address from
/// which it speaks to the rest of the network.
fn addresses(given: &str) -> String {
    let name = rustix::system::uname();
    let name = name.nodename().to_string_lossy().into_owned();
    // A socket of this kind that is connected has sent nothing yet; the address is one of those for
    // documentation.
    let outward = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0)).and_then(|socket| {
        socket.connect((Ipv4Addr::new(192, 0, 2, 1), 9))?;
        socket.local_addr()
    });
    let outward = outward.map(|address| address.ip()).ok();
    let outward = outward.filter(|ip: &IpAddr| !ip.is_unspecified());
    let outward = outward.map(|ip| ip.to_string());
    let all = [given.to_owned(), name].into_iter().chain(outward);
    all.filter(|one| !one.is_empty())
        .collect::<Vec<_>>()
        .join(",")
}

/// A lane to each other process, which the thread of MPI serves.
fn weave(meeting: &Meeting, own: usize, desk: Desk, slot_bytes: usize) -> (Woven, Start) {
    let lane = |rank| (rank != own).then(|| Arc::new(Mutex::new(Lane::new(slot_bytes))));
    let lanes: Vec<_> = (0..meeting.hosts.len()).map(lane).collect();
    let wires = lanes.iter().cloned();
    let others = lanes.iter().flatten().count();
    let place = meeting.locality(Rank(own));
    let woven = Woven {
        links: wires
            .map(|lane| lane.map(|lane| Link::new(LaneWire(lane))))
            .collect(),
        // The port looks for messages itself.
        spins: false,
        ends_together: true,
        // Each process keeps a slot at least for each other one, and more by what they send. MPI
        // says nothing of its memory.
        shared_bytes: place.local_size * others * slot_bytes,
    };
    (woven, Box::new(move |grind| desk.grind(lanes, grind)))
}
