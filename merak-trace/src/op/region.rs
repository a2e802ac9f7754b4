//! Operations between the ranks of a mesh axis.

use super::{JoinedGrad, Reduction};
use crate::placement::Shard;
use merak_mpu::Axis;

/// A border between whole and sharded work, which the interpreter runs itself. It has one operand
/// and one result; where the axis has one rank, they are the same.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Region<'a> {
    /// The mesh axis that the work is sharded over.
    pub axis: Axis,
    /// Which border it is.
    pub kind: RegionKind<'a>,
}

/// The operations between ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RegionKind<'a> {
    /// [`Op::CopyTo`](super::Op::CopyTo).
    CopyTo,
    /// [`Op::AllReduce`](super::Op::AllReduce).
    AllReduce(Reduction),
    /// [`Op::AllGather`](super::Op::AllGather).
    AllGather {
        /// The cut of the result.
        shard: &'a Shard,
        /// The gradient of the result.
        grad: JoinedGrad,
    },
    /// [`Op::Scatter`](super::Op::Scatter) of an operand that is cut in this way.
    Scatter(&'a Shard),
    /// [`Op::ReduceScatter`](super::Op::ReduceScatter) of an operand that is cut in this way.
    ReduceScatter(&'a Shard),
    /// [`Op::AllToAll`](super::Op::AllToAll).
    AllToAll {
        /// The cut of the operand.
        from: &'a Shard,
        /// The cut of the result.
        to: &'a Shard,
    },
}

/// The collectives in which ranks communicate.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Collective {
    /// Each rank gets the sum, or the largest, of all.
    AllReduce,
    /// Each rank gets the slices of all.
    AllGather,
    /// Each rank gets its slice of the sum.
    ReduceScatter,
    /// Each rank gets a part of each rank's slice.
    AllToAll,
}

impl Collective {
    /// The name in reports.
    pub fn name(self) -> &'static str {
        match self {
            Self::AllReduce => "all_reduce",
            Self::AllGather => "all_gather",
            Self::ReduceScatter => "reduce_scatter",
            Self::AllToAll => "all_to_all",
        }
    }

    /// Whether what a rank brings is a part that is complete only with those of the others.
    pub fn reduces(self) -> bool {
        match self {
            Self::AllReduce | Self::ReduceScatter => true,
            Self::AllGather | Self::AllToAll => false,
        }
    }
}

impl RegionKind<'_> {
    /// The collective of the operation itself.
    pub fn forward(self) -> Option<Collective> {
        match self {
            Self::CopyTo | Self::Scatter(_) => None,
            Self::AllReduce(_) => Some(Collective::AllReduce),
            Self::AllGather { .. } => Some(Collective::AllGather),
            Self::ReduceScatter(_) => Some(Collective::ReduceScatter),
            Self::AllToAll { .. } => Some(Collective::AllToAll),
        }
    }

    /// The collective of its gradient.
    pub fn backward(self) -> Option<Collective> {
        match self {
            Self::CopyTo => Some(Collective::AllReduce),
            Self::AllReduce(_) => None,
            Self::AllGather { grad, .. } => match grad {
                JoinedGrad::Whole => None,
                JoinedGrad::Summand => Some(Collective::ReduceScatter),
            },
            Self::Scatter(_) | Self::ReduceScatter(_) => Some(Collective::AllGather),
            Self::AllToAll { .. } => Some(Collective::AllToAll),
        }
    }
}
