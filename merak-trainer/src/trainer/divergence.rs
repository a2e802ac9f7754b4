//! The guard against divergence: back to a checkpoint, and past the data that led away.

use super::{MerakTrainer, StepReport};
use crate::{
    config::CheckedArguments,
    error::{Error, Result, StepPart},
};
use merak_ckpt::{ADAPTER_FOLDER, Checkpoint, Store, replace_lora};
use serde::{Deserialize, Serialize};
use std::{
    collections::{BTreeMap, VecDeque},
    fmt,
    path::PathBuf,
};

/// Why a run went back.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub enum Divergence {
    /// The loss of a step is not finite.
    NotFinite,
    /// The loss of a step exceeds the median of the steps before it by too large a factor.
    Spike {
        /// The median.
        median: f64,
    },
    /// As many steps were skipped as `max_skipped_steps` allows.
    Skipped,
}

impl fmt::Display for Divergence {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NotFinite => f.write_str("the loss is not finite"),
            Self::Spike { median } => {
                write!(
                    f,
                    "the loss is far above the median of {median:.4} before it"
                )
            }
            Self::Skipped => f.write_str("too many steps were skipped"),
        }
    }
}

/// A return to an earlier step, the same on every rank.
#[derive(Debug, Clone, PartialEq)]
pub struct Rollback {
    /// The step that diverged.
    pub step: usize,
    /// Its loss.
    pub loss: f64,
    /// What was wrong with it.
    pub cause: Divergence,
    /// The step of the checkpoint that training goes on from, with the data after those of the
    /// step that diverged.
    pub to_step: usize,
}

/// The losses that a step's loss is compared with.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub(super) struct RecentLosses(VecDeque<f64>);

/// Losses in a row that are not finite, after which the weights are to blame: data alone spoil a
/// step that is skipped.
const UNFINITE: usize = 2;

/// Watches the losses of the first rank, so that its decisions are the same on every rank.
#[derive(Debug, Clone)]
pub(super) struct DivergenceGuard {
    window: usize,
    factor: f64,
    most: usize,
    pub(super) recent: RecentLosses,
    /// The last losses in a row that are not finite.
    unfinite: usize,
    /// How often the run went back to each step.
    returns: BTreeMap<usize, usize>,
}

impl DivergenceGuard {
    /// As the arguments say; `None` without `divergence_guard`.
    pub(super) fn of(args: &CheckedArguments) -> Option<Self> {
        args.divergence_guard.then(|| Self {
            window: args.divergence_window,
            factor: args.divergence_factor,
            most: args.divergence_max_rollbacks,
            recent: RecentLosses::default(),
            unfinite: 0,
            returns: BTreeMap::new(),
        })
    }

    /// What is wrong with a step's loss; a loss with which nothing is wrong joins the window. A
    /// skipped step changed no weight: its finite loss is not judged, and one that is not finite
    /// counts from [`UNFINITE`] in a row on.
    fn judge(&mut self, report: &StepReport) -> Option<Divergence> {
        let is_skipped = report.skipped.is_some();
        if !report.loss.is_finite() {
            self.unfinite += 1;
            let counts = !is_skipped || self.unfinite >= UNFINITE;
            return counts.then_some(Divergence::NotFinite);
        }
        self.unfinite = 0;
        if is_skipped {
            return None;
        }
        let recent = &mut self.recent.0;
        if recent.len() == self.window {
            let median = median(recent);
            if report.loss > self.factor * median {
                return Some(Divergence::Spike { median });
            }
            recent.pop_front();
        }
        recent.push_back(report.loss);
        None
    }

    /// Whether the weights may be broken: the last loss was not finite.
    pub(super) fn doubts_weights(&self) -> bool {
        self.unfinite > 0
    }

    /// Counts a return to a step; says whether there are too many to it.
    fn count_return(&mut self, to_step: usize) -> bool {
        let times = self.returns.entry(to_step).or_default();
        *times += 1;
        *times > self.most
    }
}

/// The middle of the sorted numbers, the lower one of two.
fn median(numbers: &VecDeque<f64>) -> f64 {
    let mut sorted: Vec<_> = numbers.iter().copied().collect();
    sorted.sort_unstable_by(f64::total_cmp);
    sorted[(sorted.len() - 1) / 2]
}

impl MerakTrainer {
    /// Goes back to a checkpoint if the step diverged; says whether it did. `limit` is the outcome
    /// of the limit of skipped steps, an error that the guard takes up.
    ///
    /// # Communication
    /// With the guard, a broadcast of 8 bytes from the first rank; where the step diverged, a
    /// barrier, and that of a save under way and of loading. Where it goes to an earlier checkpoint
    /// than the last one, a broadcast of 8 bytes for each that it passes over, and a barrier.
    pub(super) fn guard(&mut self, report: &StepReport, limit: Result<()>) -> Result<bool> {
        if self.divergence.is_none() {
            return limit.map(|()| false);
        }
        let is_worn_out = match limit {
            Ok(()) => false,
            Err(Error::SkippedSteps { .. }) => true,
            Err(other) => return Err(other),
        };
        // All judge by the loss of one rank: that of unlike processors may differ in its last bits.
        let loss = self.within(StepPart::Train, report.step, |trainer| {
            let world = trainer.stages.mpu.world_group();
            Ok(world.broadcast_vec(vec![report.loss], 0)?[0])
        })?;
        let report = &StepReport {
            loss,
            ..report.clone()
        };
        let guard = self.divergence.as_mut();
        let cause = guard.and_then(|guard| guard.judge(report));
        let Some(cause) = cause.or(is_worn_out.then_some(Divergence::Skipped)) else {
            return Ok(false);
        };
        // Without a checkpoint, a run goes on as one without the guard does.
        let may_go_on = report.skipped.is_some() && !is_worn_out;
        if may_go_on && self.last_checkpoint()?.is_none() {
            return Ok(false);
        }
        self.within(StepPart::Train, report.step, |trainer| {
            trainer.roll_back(report, cause)
        })?;
        Ok(true)
    }

    fn roll_back(&mut self, report: &StepReport, cause: Divergence) -> Result<()> {
        self.finish_save()?;
        // Files are looked for that a rotation might delete.
        self.finish_rotation()?;
        // The first of these ranks to fail ends the others: by then all have told of the step.
        self.stages.mpu.world_group().barrier()?;
        let (to_step, path, passes_over) = self.way_back(report, &cause)?;
        let position = self.progress.position();
        let resuming = self.args.resuming();
        let own = std::mem::replace(&mut self.args, resuming);
        let loaded = self.load_checkpoint(&path);
        self.args = own;
        loaded?;
        if passes_over {
            self.forget_after(to_step)?;
        }
        if let Some(order) = &mut self.progress.length.order {
            order.resume(to_step, position);
        }
        if let Some(guard) = &mut self.divergence {
            guard.unfinite = 0;
        }
        let rollback = Rollback {
            step: report.step,
            loss: report.loss,
            cause,
            to_step,
        };
        if self.stages.mpu.is_rank_0() {
            tracing::warn!(
                step = rollback.step,
                loss = rollback.loss,
                to_step,
                "{}: training goes back to a checkpoint, and on after these data",
                rollback.cause
            );
        }
        self.rollbacks += 1;
        self.tell(|callback, _| callback.on_rollback(&rollback));
        Ok(())
    }

    /// The step and the folder of the checkpoint to go back to, and whether it passes over later
    /// ones: those that the run went back to too often.
    ///
    /// # Errors
    /// [`Error::Diverged`] where there is none.
    fn way_back(
        &mut self,
        report: &StepReport,
        cause: &Divergence,
    ) -> Result<(usize, PathBuf, bool)> {
        let diverged = |reason: &str| Error::Diverged {
            step: report.step,
            loss: report.loss,
            cause: cause.to_string(),
            reason: reason.to_owned(),
        };
        let Some((mut to_step, mut path)) = self.last_checkpoint()? else {
            return Err(diverged("there is no checkpoint to go back to"));
        };
        let mut passes_over = false;
        while let Some(guard) = &mut self.divergence
            && guard.count_return(to_step)
        {
            let Some(earlier) = self.checkpoint_before(to_step, cause)? else {
                return Err(diverged(&format!(
                    "training went back to step {to_step} \"divergence_max_rollbacks\" times"
                )));
            };
            (to_step, path) = earlier;
            passes_over = true;
        }
        Ok((to_step, path, passes_over))
    }

    /// The step and the folder of the checkpoint before that of `step`, on every rank. It is asked
    /// for where the losses after `step` are not finite whatever the data: the weights saved there
    /// are broken. `None` for other causes, and where this run has saved nothing.
    fn checkpoint_before(
        &self,
        step: usize,
        cause: &Divergence,
    ) -> Result<Option<(usize, PathBuf)>> {
        if *cause != Divergence::NotFinite || self.saving.last_step.is_none() {
            return Ok(None);
        }
        let store = Store::in_output_dir(self.args.run_folder()?);
        let mut found = None;
        if self.stages.mpu.is_rank_0() {
            found = store.newest_complete(Some(step as u64))?;
        }
        let found = found.map_or(-1, |found| found.manifest().header.step.cast_signed());
        let world = self.stages.mpu.world_group();
        let found = u64::try_from(world.broadcast_vec(vec![found], 0)?[0]).ok();
        Ok(found.map(|step| (step as usize, store.path_of(step))))
    }

    /// Deletes the checkpoints after that of `step`, and what was made of them.
    ///
    /// # Communication
    /// A barrier.
    fn forget_after(&mut self, step: usize) -> Result<()> {
        self.stages.mpu.world_group().barrier()?;
        self.saving.last_step = Some(step);
        self.progress.first_step = self.progress.first_step.min(step);
        if !self.stages.mpu.is_rank_0() {
            return Ok(());
        }
        let folder = self.args.run_folder()?;
        let store = Store::in_output_dir(&folder);
        let deleted = store.remove_later(step as u64)?;
        tracing::warn!(
            ?deleted,
            "checkpoints after which no loss is finite are deleted"
        );
        self.name_best(&store)?;
        if self.stages.plan.draft.lora.is_some() {
            let checkpoint = Checkpoint::open(store.path_of(step as u64))?;
            replace_lora(&checkpoint, folder.join(ADAPTER_FOLDER))?;
        }
        Ok(())
    }

    /// The step and the folder of the last checkpoint of this run, or of the one that it goes on
    /// from.
    fn last_checkpoint(&self) -> Result<Option<(usize, PathBuf)>> {
        if let Some(step) = self.saving.last_step {
            let store = Store::in_output_dir(self.args.run_folder()?);
            return Ok(Some((step, store.path_of(step as u64))));
        }
        let from = self.resumed_from.as_ref().filter(|_| !self.args.finetune);
        Ok(from.map(|from| (from.global_step, from.path.clone())))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    fn report(loss: f64, skipped: bool) -> StepReport {
        StepReport {
            step: 1,
            loss,
            grad_norm: 1.0,
            lr: 0.1,
            loss_scale: None,
            tokens: 1,
            skipped: skipped.then(|| "w".to_owned()),
            skipped_steps: 0,
            data_wait: Duration::ZERO,
            time: Duration::ZERO,
        }
    }

    #[test]
    fn a_loss_is_compared_with_the_median_of_a_full_window() {
        let mut guard = DivergenceGuard {
            window: 3,
            factor: 2.0,
            most: 1,
            recent: RecentLosses::default(),
            unfinite: 0,
            returns: BTreeMap::new(),
        };
        for loss in [1.0, 9.0, 1.5] {
            assert_eq!(guard.judge(&report(loss, false)), None, "the window fills");
        }
        let spike = guard.judge(&report(3.1, false));
        assert_eq!(spike, Some(Divergence::Spike { median: 1.5 }));
        assert_eq!(
            guard.judge(&report(3.0, false)),
            None,
            "not above twice 1.5"
        );
        assert_eq!(guard.judge(&report(9.0, true)), None, "it was skipped");
        let not_finite = Some(Divergence::NotFinite);
        assert_eq!(guard.judge(&report(f64::NAN, true)), None, "data alone");
        assert!(guard.doubts_weights());
        assert_eq!(guard.judge(&report(f64::NAN, true)), not_finite);
        assert_eq!(guard.judge(&report(2.9, true)), None, "it was skipped");
        assert!(!guard.doubts_weights());
        assert_eq!(guard.judge(&report(f64::NAN, false)), not_finite);
        assert_eq!(guard.recent.0, [9.0, 1.5, 3.0]);
    }

    #[test]
    fn returns_to_the_same_step_are_counted() {
        let mut guard = DivergenceGuard {
            window: 3,
            factor: 2.0,
            most: 2,
            recent: RecentLosses::default(),
            unfinite: 0,
            returns: BTreeMap::new(),
        };
        let worn: Vec<_> = [5, 5, 9, 9, 9, 5]
            .map(|step| guard.count_return(step))
            .into();
        assert_eq!(worn, [false, false, false, false, true, true]);
    }
}
