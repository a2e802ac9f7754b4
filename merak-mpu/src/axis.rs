//! The four axes along which work is split, and places on them.

use serde::{Deserialize, Serialize};

crate::named_enum! {
    /// A direction of the rank mesh, slowest first.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
    #[serde(rename_all = "lowercase")]
    pub enum Axis {
        /// Stages of the model.
        Pipeline = "pipeline",
        /// Replicas that see different samples.
        Data = "data",
        /// Parts of one sample.
        Sequence = "sequence",
        /// Parts of one layer; neighbours in rank.
        Tensor = "tensor",
    }
}

impl Axis {
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
