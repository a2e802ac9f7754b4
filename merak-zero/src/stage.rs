//! The ZeRO stages.

use crate::{Error, Result};
use serde::{Deserialize, Serialize};

/// What the ranks of the data x sequence group divide among themselves, as a number in a
/// configuration.
///
/// Stage numbers are those of [ZeRO](https://arxiv.org/abs/1910.02054), section 5. Each stage
/// divides what the ones before it divide, and more.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize, Deserialize,
)]
#[serde(try_from = "u8", into = "u8")]
pub enum ZeroStage {
    /// Stage 0: nothing; gradients are all-reduced once per step.
    Replicated,
    /// Stage 1: the optimizer state; gradients are reduce-scattered and parameters all-gathered
    /// once per step.
    #[default]
    OptimizerState,
    /// Stage 2: the gradients too; each microbatch reduce-scatters every bucket as soon as it is
    /// complete, and a rank keeps the sum for what it owns.
    Gradients,
    /// Stage 3: the parameters too; each bucket of them is gathered before its use and freed after
    /// it.
    Parameters,
}

impl TryFrom<u8> for ZeroStage {
    type Error = Error;

    fn try_from(stage: u8) -> Result<Self> {
        match stage {
            0 => Ok(Self::Replicated),
            1 => Ok(Self::OptimizerState),
            2 => Ok(Self::Gradients),
            3 => Ok(Self::Parameters),
            _ => Err(Error::out_of_range("stage", stage, "0, 1, 2 or 3")),
        }
    }
}

impl From<ZeroStage> for u8 {
    fn from(stage: ZeroStage) -> Self {
        match stage {
            ZeroStage::Replicated => 0,
            ZeroStage::OptimizerState => 1,
            ZeroStage::Gradients => 2,
            ZeroStage::Parameters => 3,
        }
    }
}
