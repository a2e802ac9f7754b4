//! What the members of a group must agree on when they call a collective.

use crate::{Buffer, DType, Error, Rank, Result, Sides, rank::describe_group};
use std::{fmt, sync::Arc, time::Duration};

/// The operation that joins the elements of several ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum ReduceOp {
    /// Addition, in ascending group rank: `((x0 + x1) + x2) + ...` in f32 for 16-bit floats.
    /// Integers wrap around.
    Sum,
    /// The largest element; a NaN on any rank gives NaN.
    Max,
    /// The smallest element; a NaN on any rank gives NaN.
    Min,
}

impl fmt::Display for ReduceOp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Sum => "sum",
            Self::Max => "max",
            Self::Min => "min",
        })
    }
}

/// Which collective is called.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Call {
    /// The buffers of all members become one, which every member gets.
    AllReduce(ReduceOp),
    /// The same, cut into a part for each member.
    ReduceScatter(ReduceOp),
    /// The buffers of all members are joined on every member.
    AllGather,
    /// The parts of all members are reduced, each in its member's own buffer.
    ReduceScatterInPlace(ReduceOp),
    /// The parts of all members are joined in each one's own buffer.
    AllGatherInPlace,
    /// The buffers of all members are joined on one.
    Gather {
        /// The group rank of that member.
        root: usize,
    },
    /// The part of each member is copied to its place in the buffer of one.
    GatherInPlace {
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
            Self::ReduceScatterInPlace(_) => "reduce_scatter_in_place",
            Self::AllGatherInPlace => "all_gather_in_place",
            Self::Gather { .. } => "gather",
            Self::GatherInPlace { .. } => "gather_in_place",
            Self::Broadcast { .. } => "broadcast",
            Self::AllToAll => "all_to_all",
            Self::Barrier => "barrier",
        }
    }
}

/// The lengths of what the members bring or get.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Parts {
    /// Each member's buffer is of this length, and where it is cut, it is cut evenly.
    Equal(usize),
    /// By member, the length of its part: of its input where parts are joined, of its output where
    /// a buffer is cut; in place, within the buffer of every member. Of an exchange, by sender and
    /// then by receiver, the length of the part.
    Listed(Arc<[usize]>),
}

/// The facts of a call that all members of a group must agree on.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
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

/// How long a member that meets another call waits for those of the others, which say whose call
/// is the odd one, in a world with this longest wait. A rank may have no processor for a while.
pub(crate) fn grace(timeout: Duration) -> Duration {
    Duration::from_secs(2).min(timeout / 4)
}

/// Compares the calls of members, in ascending rank, where the `sequence`-th operation of their
/// group is due. What most have called is right; of two that as many have called, that of the
/// lowest rank.
///
/// # Errors
/// [`Error::Mismatch`] of the first member that is right and the first that is not.
pub(crate) fn compare<T: Ord>(
    (name, members): (&str, &[Rank]),
    sequence: u64,
    calls: &[(Rank, T)],
    text: impl Fn(&T) -> String,
) -> Result<()> {
    let sides = Sides::of(calls.iter().map(|(rank, call)| (*rank, call)));
    let first = sides.iter().flatten().next();
    let Some(second) = sides.iter().skip(1).flatten().min() else {
        return Ok(());
    };
    let of = |rank: &Rank| calls.iter().find(|(other, _)| other == rank);
    let (Some((first, right)), Some((second, wrong))) = (first.and_then(of), of(second)) else {
        return Ok(());
    };
    Err(Error::Mismatch {
        group: describe_group(name, members),
        sequence,
        first: first.0,
        first_call: text(right),
        second: second.0,
        second_call: text(wrong),
    })
}

/// Most lengths of parts that a message lists.
const MOST_LISTED: usize = 16;

impl fmt::Display for Fingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { call, dtype, parts } = self;
        f.write_str(call.name())?;
        match call {
            Call::AllReduce(op) | Call::ReduceScatter(op) | Call::ReduceScatterInPlace(op) => {
                write!(f, "({op})")?;
            }
            Call::Broadcast { root } | Call::Gather { root } | Call::GatherInPlace { root } => {
                write!(f, "(root {root})")?;
            }
            Call::Barrier => return Ok(()),
            Call::AllGather | Call::AllGatherInPlace | Call::AllToAll => {}
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_call_that_most_members_made_is_right() {
        let blamed = |calls: &str| {
            let calls: Vec<_> = calls
                .chars()
                .zip(3..)
                .map(|(call, rank)| (Rank(rank), call))
                .collect();
            match compare(("data", &[]), 0, &calls, char::to_string) {
                Err(Error::Mismatch { first, second, .. }) => Some((first, second)),
                _ => None,
            }
        };
        assert_eq!(blamed(""), None);
        assert_eq!(blamed("aaa"), None);
        assert_eq!(blamed("ab"), Some((3, 4)));
        assert_eq!(blamed("baa"), Some((4, 3)));
        assert_eq!(blamed("aba"), Some((3, 4)));
        assert_eq!(blamed("abab"), Some((3, 4)));
        assert_eq!(blamed("abcc"), Some((5, 3)));
    }
}
