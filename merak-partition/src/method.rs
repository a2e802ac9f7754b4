//! The names of the methods.

use serde::{Deserialize, Serialize};
use std::fmt;

merak_mpu::named_enum! {
    /// The method that cuts a graph into segments.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
    #[serde(rename_all = "snake_case")]
    #[non_exhaustive]
    pub enum SplitMethod {
        /// Where one value crosses, as far on as a budget of parameters allows.
        #[default]
        FarthestMinDeps = "farthest_min_deps",
        /// Wherever the number of crossing values is lowest in its neighbourhood.
        NearestMinDeps = "nearest_min_deps",
        /// Before each layer, by module path.
        LayerSplit = "layer_split",
    }
}

/// The method that lays segments out over stages.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum StageMethod {
    /// Equal counts; the first stages take what is left over.
    #[default]
    Uniform,
    /// Equal counts; the stages after the first take what is left over.
    UniformFloor,
    /// The smallest possible largest number of parameters.
    Parameters,
    /// These boundaries, in segments: one more than stages, from 0 to the number of segments.
    Custom(Vec<usize>),
}

impl StageMethod {
    /// The rule that it is, without what it needs.
    pub const fn rule(&self) -> PartitionMethod {
        match self {
            Self::Uniform => PartitionMethod::Uniform,
            Self::UniformFloor => PartitionMethod::UniformFloor,
            Self::Parameters => PartitionMethod::Parameters,
            Self::Custom(_) => PartitionMethod::Custom,
        }
    }

    /// The name that users write.
    pub const fn as_str(&self) -> &'static str {
        self.rule().as_str()
    }
}

impl fmt::Display for StageMethod {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}

merak_mpu::named_enum! {
    /// Which rule gives the segments to the pipeline stages.
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    pub enum PartitionMethod {
        /// Equal counts of segments; the first stages take the remainder.
        Uniform = "uniform",
        /// Equal counts of segments; the first stage never takes an extra one.
        UniformFloor = "uniform_floor",
        /// Smallest possible maximum of parameters per stage.
        Parameters = "parameters",
        /// Boundaries that are given.
        Custom = "custom",
        /// Shortest simulated step of the schedule, by moves around the stage with the most work.
        Autopipe = "autopipe",
        /// Shortest simulated step of the schedule, by trying every partition that may be the best.
        Exact = "exact",
    }
}

impl PartitionMethod {
    /// Whether it searches, by the costs of segments.
    pub const fn searches(self) -> bool {
        matches!(self, Self::Autopipe | Self::Exact)
    }
}
