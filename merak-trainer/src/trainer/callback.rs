//! Observers of a run, and what they may ask of it.

use super::{Breakdown, EvaluationMetrics, MerakTrainer, Rollback, StepProfile, StepReport};
use crate::folder::RunFolder;
use merak_pipe::{Action, Observer};
use std::{path::Path, sync::Arc};

/// What a callback asks of the run. Any rank may ask: the ranks agree on it before they act, so a
/// callback may live on one rank alone.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[expect(
    clippy::struct_excessive_bools,
    reason = "any of them may be asked for, as in transformers"
)]
pub struct TrainerControl {
    /// Ends training after this step, as the last step would.
    pub should_training_stop: bool,
    /// Saves a checkpoint of this step; without effect where the arguments ask for no checkpoints.
    pub should_save: bool,
    /// Evaluates after this step; without effect where there is nothing to evaluate.
    pub should_evaluate: bool,
    /// Makes a record of this step ([`Callback::on_log`]).
    pub should_log: bool,
}

impl TrainerControl {
    const LEN: usize = 4;

    pub(super) fn bits(self) -> [i64; Self::LEN] {
        let Self {
            should_training_stop,
            should_save,
            should_evaluate,
            should_log,
        } = self;
        [
            should_training_stop,
            should_save,
            should_evaluate,
            should_log,
        ]
        .map(i64::from)
    }

    pub(super) fn from_bits(bits: [i64; Self::LEN]) -> Self {
        let [
            should_training_stop,
            should_save,
            should_evaluate,
            should_log,
        ] = bits.map(|bit| bit != 0);
        Self {
            should_training_stop,
            should_save,
            should_evaluate,
            should_log,
        }
    }
}

/// Observes a run on the rank that holds it, and may act on it through a [`TrainerControl`]. Every
/// method is optional.
pub trait Callback: Send {
    /// An optimizer step ended.
    fn on_step(&mut self, report: &StepReport, control: &mut TrainerControl) {
        let _ = (report, control);
    }

    /// An action of the pipeline begins on this rank, of training, evaluation or generation: its
    /// message has come. What takes long here delays the pipeline.
    fn on_action_begin(&mut self, action: Action) {
        let _ = action;
    }

    /// An action has ended, or has failed.
    fn on_action_end(&mut self, action: Action) {
        let _ = action;
    }

    /// The step that ended is logged: every `logging_steps`, the first and the last of a run, and
    /// where a callback asked for it. It is told once.
    fn on_log(&mut self, report: &StepReport) {
        let _ = report;
    }

    /// Training went back to an earlier checkpoint.
    fn on_rollback(&mut self, rollback: &Rollback) {
        let _ = rollback;
    }

    /// `done` of the `total` iterations of an evaluation are done: 0 at its start, `total` at its
    /// end. With `ema_decay`, the averages of the weights have iterations of their own behind it.
    fn on_evaluation_step(&mut self, done: usize, total: usize) {
        let _ = (done, total);
    }

    /// An evaluation ended.
    fn on_evaluate(&mut self, metrics: &EvaluationMetrics, control: &mut TrainerControl) {
        let _ = (metrics, control);
    }

    /// A checkpoint of this step begins to be written.
    fn on_save_start(&mut self, step: usize) {
        let _ = step;
    }

    /// The times of each rank's instructions, with `wall_clock_breakdown` after each logged step,
    /// on the first rank.
    fn on_breakdown(&mut self, breakdown: &Breakdown) {
        let _ = breakdown;
    }

    /// What the ranks ran in the steps of `profile_start_step`, on the first rank.
    fn on_profile(&mut self, profile: &StepProfile) {
        let _ = profile;
    }

    /// A checkpoint was written.
    fn on_save(&mut self, path: &Path, control: &mut TrainerControl) {
        let _ = (path, control);
    }
}

/// Tells callbacks of the pipeline's actions.
pub(super) struct Told<'a>(pub(super) &'a mut [Box<dyn Callback>]);

impl Observer for Told<'_> {
    fn begin(&mut self, action: Action) {
        for callback in &mut *self.0 {
            callback.on_action_begin(action);
        }
    }

    fn end(&mut self, action: Action) {
        for callback in &mut *self.0 {
            callback.on_action_end(action);
        }
    }
}

impl Callback for Arc<RunFolder> {
    fn on_step(&mut self, _: &StepReport, _: &mut TrainerControl) {
        self.renew();
    }

    fn on_save(&mut self, _: &Path, _: &mut TrainerControl) {
        self.drop_replaced();
    }
}

impl MerakTrainer {
    /// Tells every callback of this rank of an event. What they ask for is kept until the ranks
    /// agree.
    pub(super) fn tell(&mut self, event: impl Fn(&mut dyn Callback, &mut TrainerControl)) {
        for callback in &mut self.parts.callbacks {
            event(&mut **callback, &mut self.control);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_request_has_a_bit_of_its_own() {
        for place in 0..TrainerControl::LEN {
            let mut bits = [0; TrainerControl::LEN];
            bits[place] = 1;
            assert_eq!(TrainerControl::from_bits(bits).bits(), bits);
        }
    }
}
