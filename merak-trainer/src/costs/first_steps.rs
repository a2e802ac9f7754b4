//! The first steps of a run beside their prediction.

use super::{CostCache, CostModel, obtained::Verdict};
use crate::{
    config::CheckedArguments,
    trainer::{Callback, StepReport, TrainerControl},
};
use std::time::Duration;

/// Steps that are compared, after the first step of the run, which touches memory.
const STEPS: usize = 5;

/// Compares the first steps of a run with their predicted time. Above a difference of 30 %, it
/// warns and marks the times in their file as doubtful, so that the next run measures them again.
/// Where a recent repetition had the same outcome, it only warns.
#[derive(Debug)]
pub struct FirstSteps {
    args: CheckedArguments,
    costs: CostModel,
    cache: CostCache,
    /// Seconds of a step.
    predicted: f64,
    seen: Vec<Duration>,
}

impl FirstSteps {
    /// Expects steps to take `predicted` seconds by `costs`, which `cache` keeps.
    pub fn new(
        args: &CheckedArguments,
        costs: &CostModel,
        cache: CostCache,
        predicted: f64,
    ) -> Self {
        Self {
            args: args.clone(),
            costs: costs.clone(),
            cache,
            predicted,
            seen: Vec::new(),
        }
    }

    /// Marks the times as doubtful where these steps took another time than predicted.
    fn judge(&self, mut steps: Vec<Duration>) {
        steps.sort_unstable();
        let step = steps[steps.len() / 2].as_secs_f64();
        let CostModel::Measured(profile) = &self.costs else {
            return;
        };
        if super::agree(step, self.predicted) {
            return;
        }
        let step_ms = format!("{:.1}", 1e3 * step);
        let predicted_ms = format!("{:.1}", 1e3 * self.predicted);
        let measured = profile.measurement().age();
        match profile.cast_doubt(&self.args, &self.cache) {
            Verdict::None => {}
            Verdict::Noted => tracing::warn!(
                step_ms,
                predicted_ms,
                measured,
                "steps differ from their prediction by more than 30 %: the next run measures costs again"
            ),
            Verdict::Settled => tracing::warn!(
                step_ms,
                predicted_ms,
                measured,
                "steps differ from their prediction by more than 30 %, as they did before costs were measured again: \
                 plans and predictions may be off"
            ),
        }
    }
}

impl Callback for FirstSteps {
    fn on_step(&mut self, report: &StepReport, _: &mut TrainerControl) {
        if self.seen.len() > STEPS {
            return;
        }
        self.seen.push(report.time);
        if self.seen.len() == STEPS + 1 {
            self.judge(self.seen[1..].to_vec());
        }
    }
}
