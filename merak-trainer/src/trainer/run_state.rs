//! What a resumed run needs besides tensors.

use super::{BestModel, divergence::RecentLosses, early_stopping::Waiting};
use crate::{
    config::CheckedArguments,
    data::{DataFingerprint, DataPosition},
};
use merak_zero::{OptimizerKind, ScalerState, StepCounts};
use serde::{Deserialize, Serialize};

/// The state of a run in the header of its checkpoint.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct RunState {
    pub(super) global_step: usize,
    /// Tokens of the global batches of these steps.
    pub(super) tokens: u64,
    /// Updates done and skipped, which set the learning rate and the optimizer's time.
    pub(super) progress: StepCounts,
    /// Where a loss scale stands that changes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) scaler: Option<ScalerState>,
    pub(super) position: DataPosition,
    pub(super) seed: u64,
    pub(super) data_seed: u64,
    pub(super) global_batch: usize,
    /// Steps of the run beyond those of its epochs at this global batch.
    #[serde(default)]
    pub(super) extra_steps: isize,
    /// Whether the random state above is to be trusted, and whether there is optimizer state.
    pub(super) has_rng: bool,
    pub(super) has_optimizer: bool,
    /// The optimizer of that state; absent in checkpoints of earlier versions.
    #[serde(default)]
    pub(super) optim: Option<OptimizerKind>,
    /// The name of its rule: that of `optim`, or of the program's own rule in its place; absent in
    /// checkpoints of earlier versions.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) rule: Option<String>,
    /// The best checkpoint so far, this one included.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) best: Option<BestModel>,
    /// With `early_stopping_patience`, how long an improvement is waited for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) early_stopping: Option<Waiting>,
    /// With `divergence_guard`, the losses that the next one is compared with.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) divergence: Option<RecentLosses>,
    /// The training data.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) data: Option<DataFingerprint>,
}

/// The state of a checkpoint that was imported from another program's run.
#[derive(Debug, Deserialize)]
struct Imported {
    /// Updates done.
    step: usize,
    /// The optimizer, where the other program's files tell.
    optimizer: Option<OptimizerKind>,
}

impl RunState {
    /// Reads the state of a checkpoint; `None` for a release. An imported run knows its updates
    /// only: it takes the given seeds, and begins with the first sample of the data.
    pub(super) fn read(
        state: &serde_json::Value,
        args: &CheckedArguments,
    ) -> serde_json::Result<Option<Self>> {
        let Some(imported) = state.get("imported") else {
            return serde_json::from_value(state.clone());
        };
        let Imported { step, optimizer } = serde_json::from_value(imported.clone())?;
        let progress = StepCounts {
            steps: step as u64,
            ..StepCounts::default()
        };
        // Made from field names, so that missing fields are read as in states of earlier versions.
        let fields = serde_json::json!({
            "global_step": step, "tokens": 0, "progress": progress, "position": DataPosition::default(),
            "seed": args.seed, "data_seed": args.data_seed(), "global_batch": args.global_batch(),
            "has_rng": true, "has_optimizer": true, "optim": optimizer,
        });
        serde_json::from_value(fields).map(Some)
    }
}
