//! The four axes along which work is split, and places on them.

use serde::{Deserialize, Serialize};
use std::fmt;

/// A direction of the rank mesh, slowest first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Axis {
    /// Stages of the model.
    Pipeline,
    /// Replicas that see different samples.
    Data,
    /// Parts of one sample.
    Sequence,
    /// Parts of one layer; neighbours in rank.
    Tensor,
}

impl Axis {
    /// All axes, slowest first.
    pub const ALL: [Self; 4] = [Self::Pipeline, Self::Data, Self::Sequence, Self::Tensor];

    /// The name of the axis, as in `pipeline`.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Pipeline => "pipeline",
            Self::Data => "data",
            Self::Sequence => "sequence",
            Self::Tensor => "tensor",
        }
    }

    /// The name of the degree along the axis, as in `pp`.
    pub const fn degree_name(self) -> &'static str {
        match self {
            Self::Pipeline => "pp",
            Self::Data => "dp",
            Self::Sequence => "sp",
            Self::Tensor => "tp",
        }
    }
}

impl fmt::Display for Axis {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// The place of one rank on the axes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default)]
pub struct Coord {
    /// Pipeline stage.
    pub pp: usize,
    /// Data parallel replica.
    pub dp: usize,
    /// Part of the sequence.
    pub sp: usize,
    /// Part of the tensors.
    pub tp: usize,
}

impl Coord {
    /// The index along one axis.
    pub fn get(&self, axis: Axis) -> usize {
        match axis {
            Axis::Pipeline => self.pp,
            Axis::Data => self.dp,
            Axis::Sequence => self.sp,
            Axis::Tensor => self.tp,
        }
    }

    /// The same place with another index along one axis.
    #[must_use]
    pub fn with(mut self, axis: Axis, index: usize) -> Self {
        match axis {
            Axis::Pipeline => self.pp = index,
            Axis::Data => self.dp = index,
            Axis::Sequence => self.sp = index,
            Axis::Tensor => self.tp = index,
        }
        self
    }
}
