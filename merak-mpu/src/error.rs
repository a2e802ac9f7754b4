//! What can go wrong between ranks.

use crate::{Axis, DType, Degrees, Rank, Wait};
use std::time::Duration;

/// The result of an operation of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// A failed group operation.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A buffer has another element type than the operation needs.
    #[error("expected elements of type {expected}, found {found}")]
    DTypeMismatch {
        /// The type that was needed.
        expected: DType,
        /// The type of the buffer.
        found: DType,
    },
    /// A rank failed, and all its peers with it.
    #[error("rank {by} failed: {reason}")]
    Aborted {
        /// World rank of the culprit.
        by: usize,
        /// What happened there.
        reason: String,
    },
    /// A peer did not come before the deadline.
    #[error("no answer within {after:?}: {wait}{}", also(.others))]
    Timeout {
        /// The time for which this rank waited.
        after: Duration,
        /// What it waited for.
        wait: Box<Wait>,
        /// What the other ranks were waiting for at that moment.
        others: Vec<Wait>,
    },
    /// Two members of a group called different operations where the same was due.
    #[error(
        "operation {sequence} of group {group} differs: rank {first} called {first_call}, rank {second} called {second_call}"
    )]
    Mismatch {
        /// The group, with its members.
        group: String,
        /// Which operation of the group, counted from 0.
        sequence: u64,
        /// World rank that made the call of most members.
        first: usize,
        /// Its operation, element type, length and reduction or root.
        first_call: String,
        /// World rank that made another call, and is to blame.
        second: usize,
        /// Its operation.
        second_call: String,
    },
    /// The processes of a world did not find each other.
    #[error("rank {rank} cannot meet the others at {address}: {reason}")]
    Rendezvous {
        /// The rank that could not.
        rank: usize,
        /// Host and port of rank 0, as given.
        address: String,
        /// What was found and what was expected.
        reason: String,
    },
    /// Rank 0 sent this rank away, for the reason that ended the rendezvous.
    #[error("rank 0 sent rank {rank} away: {reason}")]
    Refused {
        /// The rank that was sent away.
        rank: usize,
        /// What rank 0 reported.
        reason: String,
    },
    /// The system refused what an engine needs.
    #[error("rank {rank} has no {what}: {reason}")]
    NoResource {
        /// The rank.
        rank: usize,
        /// A thread, a socket or the like.
        what: &'static str,
        /// The system's message.
        reason: String,
    },
    /// The degrees do not multiply to the number of ranks.
    #[error("{degrees} = {}, but the world has {}{}", .degrees.world_size(), ranks(*.world_size), fitting(.nearest.as_ref()))]
    WorldSize {
        /// The degrees as given.
        degrees: Degrees,
        /// The number of ranks there are.
        world_size: usize,
        /// The closest degrees that do fit.
        nearest: Option<Degrees>,
    },
    /// A degree is zero.
    #[error("{} is 0, but a degree is at least 1", .axis.degree_name())]
    ZeroDegree {
        /// The axis of the degree.
        axis: Axis,
    },
    /// The world was set up with other degrees before.
    #[error("this world was set up with {first}, so it cannot be set up with {second}")]
    OtherDegrees {
        /// The degrees in use.
        first: Degrees,
        /// The degrees of the later call.
        second: Degrees,
    },
    /// A coordinate lies outside its axis.
    #[error("{} {index} does not exist: {} is {degree}, so the last is {}", .axis, .axis.degree_name(), .degree - 1)]
    NoSuchCoordinate {
        /// The axis.
        axis: Axis,
        /// The index asked for.
        index: usize,
        /// The degree of the axis.
        degree: usize,
    },
    /// A rank lies outside its group or world.
    #[error("rank {rank} does not exist in {group}, which has {}", ranks(*.size))]
    NoSuchRank {
        /// The rank asked for.
        rank: usize,
        /// The group or world.
        group: String,
        /// The number of its ranks.
        size: usize,
    },
    /// A list of ranks is not the members of a group.
    #[error("{members:?} cannot be group {name}: {reason}")]
    BadGroup {
        /// The name of the group.
        name: String,
        /// The members asked for, as world ranks.
        members: Vec<usize>,
        /// What is wrong with them.
        reason: String,
    },
    /// A buffer cannot be cut into one part for each member.
    #[error("{op} over {parts} ranks needs a multiple of {parts} elements, found {len}; nearest is {}", nearest_multiple(*.len, *.parts))]
    UnevenLength {
        /// The operation.
        op: &'static str,
        /// The number of elements.
        len: usize,
        /// The number of members.
        parts: usize,
    },
    /// The lengths of the members' parts do not fit their group or a buffer.
    #[error("{op} cannot cut the parts of {members} ranks: {reason}")]
    BadParts {
        /// The operation.
        op: &'static str,
        /// The number of members.
        members: usize,
        /// What is wrong with the lengths.
        reason: String,
    },
    /// A tied group was asked for that does not exist.
    #[error("no tied group is named {key:?}; there are {known:?}")]
    UnknownTiedGroup {
        /// The key asked for.
        key: String,
        /// The keys that exist.
        known: Vec<String>,
    },
    /// A tied group was created twice.
    #[error("tied group {key:?} exists already")]
    TiedGroupExists {
        /// The key of the group.
        key: String,
    },
    /// A buffer did not show the memory that its length and element type promise.
    #[error("a buffer of {len} {dtype} on rank {rank} did not open as {expected} aligned bytes")]
    BadBuffer {
        /// World rank of the owner.
        rank: usize,
        /// The number of elements it claims.
        len: usize,
        /// Its element type.
        dtype: DType,
        /// The number of bytes that makes.
        expected: usize,
    },
    /// A buffer did not show all of its elements to be taken out.
    #[error("{found} of the {len} elements of a buffer of {dtype} could be read")]
    UnreadBuffer {
        /// Its element type.
        dtype: DType,
        /// The number of elements it claims.
        len: usize,
        /// The number that it showed.
        found: usize,
    },
    /// A tensor of another library cannot take part in a collective or a message.
    #[error("a tensor of shape {shape:?} cannot be used here: {reason}")]
    BadTensor {
        /// Its shape.
        shape: Vec<usize>,
        /// What was found and what was expected.
        reason: String,
    },
    /// A message has another number of packets than its receiver expects.
    #[error("expected a message of {expected} packets, found {found}")]
    PacketCount {
        /// The number that the receiver expects.
        expected: usize,
        /// The number that came.
        found: usize,
    },
    /// A launcher's environment variable cannot be read.
    #[error("{variable} is {value:?}, but should be {expected}")]
    BadVariable {
        /// The name of the variable.
        variable: &'static str,
        /// Its value.
        value: String,
        /// What it should be.
        expected: String,
    },
    /// Only some of the variables are set that a launcher sets.
    #[error("{found} is set, but {}: {}", are_not(.variables), remedy(.variables, .found))]
    MissingVariable {
        /// The names of the missing variables.
        variables: Vec<&'static str>,
        /// The name of one that is set.
        found: &'static str,
    },
    /// A library that an engine loads was not found.
    #[error("no {library} library: {}", .tried.join("; "))]
    NoLibrary {
        /// What was looked for, as `NCCL`.
        library: &'static str,
        /// Each file that was tried, with what the system said.
        tried: Vec<String>,
    },
    /// A library that was found is not one that an engine can use.
    #[error("{path} is no {library} library that fits: {reason}")]
    UnfitLibrary {
        /// What was looked for, as `NCCL`.
        library: &'static str,
        /// The file as it was asked for.
        path: String,
        /// What was found and what is needed.
        reason: String,
    },
    /// A call of a device's library failed.
    #[error("{call} failed: {reason}")]
    Device {
        /// The function of the library.
        call: &'static str,
        /// What the library says.
        reason: String,
    },
    /// A buffer lies on another device than the one that its rank uses.
    #[error("a buffer lies on CUDA device {found}, but this rank uses device {expected}")]
    OtherDevice {
        /// The device of the rank, by its number on the host.
        expected: usize,
        /// The device of the buffer.
        found: usize,
    },
    /// A link that would carry a collective for ever.
    #[error(
        "a link of {bytes_per_second} bytes a second and a latency of {latency:?} is too slow: expected at least 1 byte a second, and a latency of at most {longest:?}"
    )]
    LinkSpeed {
        /// Its speed.
        bytes_per_second: f64,
        /// Its latency.
        latency: Duration,
        /// The longest latency.
        longest: Duration,
    },
    /// An engine that this build does not have.
    #[error("the engine {engine} is not in this build: build with --features {engine}, or choose {}", one_of(.instead))]
    EngineNotBuilt {
        /// Its name.
        engine: &'static str,
        /// The engines that are built in.
        instead: Vec<&'static str>,
    },
    /// An engine that cannot connect the processes that were launched.
    #[error("the engine {engine} does not fit: {reason}")]
    UnfitEngine {
        /// Its name.
        engine: &'static str,
        /// Why not, and what does.
        reason: String,
    },
}

impl Error {
    /// The error of a world in which rank `by` has failed.
    pub(crate) fn aborted(by: Rank, reason: impl Into<String>) -> Self {
        Self::Aborted {
            by: by.0,
            reason: reason.into(),
        }
    }

    /// The rank to blame where another one may meet the error.
    pub(crate) fn culprit(&self) -> Option<Rank> {
        match self {
            Self::Mismatch { second: rank, .. }
            | Self::BadBuffer { rank, .. }
            | Self::Aborted { by: rank, .. } => Some(Rank(*rank)),
            _ => None,
        }
    }
}

/// A number of ranks.
fn ranks(count: usize) -> String {
    match count {
        1 => "1 rank".to_owned(),
        count => format!("{count} ranks"),
    }
}

fn are_not(variables: &[&str]) -> String {
    let verb = if variables.len() == 1 { "is" } else { "are" };
    format!("{} {verb} not", variables.join(" and "))
}

/// What to do where one variable of a launcher is set and others are missing.
fn remedy(missing: &[&str], found: &str) -> String {
    let value_of = |name: &str| match name {
        "MASTER_ADDR" => "the host of rank 0",
        "MASTER_PORT" => "a free port on the host of rank 0",
        "SLURM_JOB_ID" => "the number of the job",
        "SLURM_PROCID" => "the number of this process, from 0",
        name if name.ends_with("RANK") => "the number of this process, from 0",
        _ => "the number of processes",
    };
    let values = missing
        .iter()
        .map(|name| format!("{name} to {}", value_of(name)));
    let found = match missing {
        ["MASTER_ADDR" | "MASTER_PORT", ..] => "RANK and WORLD_SIZE",
        _ => found,
    };
    let values = values.collect::<Vec<_>>().join(" and ");
    format!("set {values}, or unset {found} to run this process by itself")
}

fn also(others: &[Wait]) -> String {
    let mut text = String::new();
    for wait in others {
        text.push_str("; ");
        text.push_str(&wait.to_string());
    }
    text
}

fn one_of(names: &[&str]) -> String {
    match names {
        [] => "none".to_owned(),
        [only] => (*only).to_owned(),
        [head @ .., last] => format!("{} or {last}", head.join(", ")),
    }
}

fn fitting(nearest: Option<&Degrees>) -> String {
    nearest.map_or_else(String::new, |degrees| {
        format!("; nearest that fits: {degrees}")
    })
}

fn nearest_multiple(len: usize, parts: usize) -> usize {
    let below = len - len % parts;
    if below > 0 && len - below <= below + parts - len {
        below
    } else {
        below + parts
    }
}
