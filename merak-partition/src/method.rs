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
    /// The name that users write.
    pub const fn as_str(&self) -> &'static str {
        match self {
            Self::Uniform => "uniform",
            Self::UniformFloor => "uniform_floor",
            Self::Parameters => "parameters",
            Self::Custom(_) => "custom",
        }
    }
}

impl fmt::Display for StageMethod {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}
