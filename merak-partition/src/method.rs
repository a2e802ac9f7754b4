//! The names of the methods.

use serde::{Deserialize, Serialize};
use std::fmt;

/// The method that cuts a graph into segments.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum SplitMethod {
    /// Where one value crosses, as far on as a budget of parameters allows.
    #[default]
    FarthestMinDeps,
    /// Wherever the number of crossing values is lowest in its neighbourhood.
    NearestMinDeps,
    /// Before each layer, by module path.
    LayerSplit,
}

impl SplitMethod {
    /// Every method.
    pub const ALL: [Self; 3] = [
        Self::FarthestMinDeps,
        Self::NearestMinDeps,
        Self::LayerSplit,
    ];

    /// The name that users write.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::FarthestMinDeps => "farthest_min_deps",
            Self::NearestMinDeps => "nearest_min_deps",
            Self::LayerSplit => "layer_split",
        }
    }
}

impl fmt::Display for SplitMethod {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
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
    /// Equal counts; the stages behind the first take what is left over.
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

/// Which rule gives the segments to the pipeline stages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PartitionMethod {
    /// Equal counts of segments; the first stages take the remainder.
    Uniform,
    /// Equal counts of segments; the first stage never takes an extra one.
    UniformFloor,
    /// Smallest possible maximum of parameters per stage.
    Parameters,
    /// Boundaries that are given.
    Custom,
    /// Shortest simulated step of the schedule, by moves around the stage with the most work.
    Autopipe,
    /// Shortest simulated step of the schedule, by trying every partition that may be the best.
    Exact,
}

impl PartitionMethod {
    /// Every rule.
    pub const ALL: [Self; 6] = [
        Self::Uniform,
        Self::UniformFloor,
        Self::Parameters,
        Self::Custom,
        Self::Autopipe,
        Self::Exact,
    ];

    /// The name that users write.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Uniform => "uniform",
            Self::UniformFloor => "uniform_floor",
            Self::Parameters => "parameters",
            Self::Custom => "custom",
            Self::Autopipe => "autopipe",
            Self::Exact => "exact",
        }
    }

    /// Whether it searches, by the costs of segments.
    pub const fn searches(self) -> bool {
        matches!(self, Self::Autopipe | Self::Exact)
    }
}

impl fmt::Display for PartitionMethod {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}
