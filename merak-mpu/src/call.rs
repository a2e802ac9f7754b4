//! What the members of a group must agree on when they call a collective.

use crate::{Buffer, DType, ReduceOp};
use std::{fmt, sync::Arc};

/// Which collective is called.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Call {
    /// The buffers of all members become one, which every member gets.
    AllReduce(ReduceOp),
    /// The same, cut into a part for each member.
    ReduceScatter(ReduceOp),
    /// The buffers of all members are joined on every member.
    AllGather,
    /// The buffers of all members are joined on one.
    Gather {
        /// The group rank of that member.
        root: usize,
    },
    /// The buffer of one member is copied to all.
    Broadcast {
        /// The group rank of that member.
        root: usize,
    },
    /// Each member sends a part of its buffer to each.
    AllToAll,
    /// Each member waits until all have come.
    Barrier,
}

impl Call {
    /// Its name, as in `all_reduce`.
    pub fn name(self) -> &'static str {
        match self {
            Self::AllReduce(_) => "all_reduce",
            Self::ReduceScatter(_) => "reduce_scatter",
            Self::AllGather => "all_gather",
            Self::Gather { .. } => "gather",
            Self::Broadcast { .. } => "broadcast",
            Self::AllToAll => "all_to_all",
            Self::Barrier => "barrier",
        }
    }
}

/// The lengths of what the members bring or get.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Parts {
    /// Each member's buffer is of this length, and where it is cut, it is cut evenly.
    Equal(usize),
    /// By member, the length of its part: of its input where parts are joined, of its output where
    /// a buffer is cut. Of an exchange, by sender and then by receiver, the length of the part.
    Listed(Arc<[usize]>),
}

/// What all members of a group must agree on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Fingerprint {
    pub(crate) call: Call,
    pub(crate) dtype: DType,
    pub(crate) parts: Parts,
}

impl Fingerprint {
    /// That of a call with a buffer, and with the lengths of the parts where they are listed.
    pub(crate) fn new(call: Call, buffer: &dyn Buffer, lengths: Option<Arc<[usize]>>) -> Self {
        Self {
            call,
            dtype: buffer.dtype(),
            parts: lengths.map_or_else(|| Parts::Equal(buffer.len()), Parts::Listed),
        }
    }
}

/// Most lengths of parts that a message lists.
const MOST_LISTED: usize = 16;

impl fmt::Display for Fingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { call, dtype, parts } = self;
        f.write_str(call.name())?;
        match call {
            Call::AllReduce(op) | Call::ReduceScatter(op) => write!(f, "({op})")?,
            Call::Broadcast { root } | Call::Gather { root } => write!(f, "(root {root})")?,
            Call::Barrier => return Ok(()),
            Call::AllGather | Call::AllToAll => {}
        }
        match parts {
            Parts::Equal(len) => write!(f, " of {len} {dtype}"),
            Parts::Listed(lengths) => {
                let listed = &lengths[..lengths.len().min(MOST_LISTED)];
                let more = if listed.len() < lengths.len() {
                    ", .."
                } else {
                    ""
                };
                let whole: usize = lengths.iter().sum();
                let listed: Vec<_> = listed.iter().map(usize::to_string).collect();
                let listed = listed.join(", ");
                write!(f, " of {whole} {dtype} in parts of {listed}{more}")
            }
        }
    }
}
