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
    /// Tokens of the global batches of the steps until there.
    pub tokens: u64,
}

/// The losses that a step's loss is compared with.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub(super) struct RecentLosses(VecDeque<f64>);

/// Losses in a row that are not finite, after which the guard takes the weights to be at fault.
/// Data alone may spoil one step, which is skipped.
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
    /// The last step whose loss was finite, or the step that the run went back to since.
    last_finite: usize,
    /// How often the run went back to each step.
    returns: BTreeMap<usize, usize>,
    /// Whether a checkpoint was due and put off.
    owes_save: bool,
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
            last_finite: 0,
            returns: BTreeMap::new(),
            owes_save: false,
        })
    }

    /// What is wrong with a step's loss; a loss with which nothing is wrong joins the window. A
    /// skipped step changed no weight: its finite loss is not judged, and one that is not finite
    /// counts from [`UNFINITE`] in a row on, or in the last step, after which no other one follows.
    fn judge(&mut self, report: &StepReport, is_last: bool) -> Option<Divergence> {
        let is_skipped = report.skipped.is_some();
        if !report.loss.is_finite() {
            self.unfinite += 1;
            let counts = !is_skipped || is_last || self.unfinite >= UNFINITE;
            return counts.then_some(Divergence::NotFinite);
        }
        (self.unfinite, self.last_finite) = (0, report.step);
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

    /// Whether to make a checkpoint where one `is_due`. One of weights that may be broken, since
    /// the last loss was not finite, is put off.
    pub(super) fn may_save(&mut self, is_due: bool) -> bool {
        let is_due = is_due || self.owes_save;
        self.owes_save = is_due && self.unfinite > 0;
        is_due && !self.owes_save
    }

    /// Forgets the steps after the one that the run goes back to.
    fn go_back(&mut self, to_step: usize) {
        (self.unfinite, self.owes_save) = (0, false);
        self.last_finite = self.last_finite.min(to_step);
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
        let is_last = self.progress.is_done();
        let guard = self.divergence.as_mut();
        let cause = match guard.and_then(|guard| guard.judge(report, is_last)) {
            Some(cause) => cause,
            None if !is_worn_out => return Ok(false),
            None if report.loss.is_finite() => Divergence::Skipped,
            None => Divergence::NotFinite,
        };
        // Without a checkpoint, a run goes on as one without the guard does.
        if report.skipped.is_some() && !is_worn_out {
            self.finish_save()?;
            if self.last_checkpoint()?.is_none() {
                return Ok(false);
            }
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
        let going_back = self.args.going_back();
        let own = std::mem::replace(&mut self.args, going_back);
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
            guard.go_back(to_step);
        }
        let rollback = Rollback {
            step: report.step,
            loss: report.loss,
            cause,
            to_step,
            tokens: self.progress.tokens,
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
    /// ones: those that the run went back to too often, and after which no loss was finite.
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
            let is_broken = passes_over || guard.last_finite <= to_step;
            let earlier = if is_broken && *cause == Divergence::NotFinite {
                self.checkpoint_before(to_step)?
            } else {
                None
            };
            let Some(earlier) = earlier else {
                return Err(diverged(&format!(
                    "training went back to step {to_step} \"divergence_max_rollbacks\" times"
                )));
            };
            (to_step, path) = earlier;
            passes_over = true;
        }
        Ok((to_step, path, passes_over))
    }

    /// The step and the folder of the checkpoint of this run before that of `step`, on every rank;
    /// `None` where there is none, or where the run came from another folder and has saved nothing.
    ///
    /// # Communication
    /// A broadcast of 8 bytes from the first rank.
    fn checkpoint_before(&self, step: usize) -> Result<Option<(usize, PathBuf)>> {
        let store = Store::in_output_dir(self.args.run_folder()?);
        let mut found = None;
        let from = self.resumed_from.as_ref();
        let is_resumed_here = || from.is_some_and(|from| store.holds(&from.path));
        if self.stages.mpu.is_rank_0() && (self.saving.last_step.is_some() || is_resumed_here()) {
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
        // A release has weights alone, and a run that fine-tunes took these alone.
        let from = self.resumed_from.as_ref();
        let from = from.filter(|from| from.has_state && !self.args.finetune);
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

    fn guard(window: usize, most: usize) -> DivergenceGuard {
        DivergenceGuard {
            window,
            factor: 2.0,
            most,
            recent: RecentLosses::default(),
            unfinite: 0,
            last_finite: 0,
            returns: BTreeMap::new(),
            owes_save: false,
        }
    }

    #[test]
    fn a_loss_is_compared_with_the_median_of_a_full_window() {
        let mut guard = guard(3, 1);
        let mut judge = |loss, skipped| guard.judge(&report(loss, skipped), false);
        for loss in [1.0, 9.0, 1.5] {
            assert_eq!(judge(loss, false), None, "the window fills");
        }
        let spike = judge(3.1, false);
        assert_eq!(spike, Some(Divergence::Spike { median: 1.5 }));
        assert_eq!(judge(3.0, false), None, "not above twice 1.5");
        assert_eq!(judge(9.0, true), None, "it was skipped");
        let not_finite = Some(Divergence::NotFinite);
        assert_eq!(judge(f64::NAN, false), not_finite);
        assert_eq!(judge(2.9, true), None, "it was skipped");
        assert_eq!(judge(f64::NAN, true), None, "data alone");
        assert_eq!(judge(f64::NAN, true), not_finite);
        assert_eq!(guard.recent.0, [9.0, 1.5, 3.0]);
    }

    #[test]
    fn a_checkpoint_in_doubt_is_put_off() {
        let mut guard = guard(3, 1);
        assert!(guard.may_save(true) && !guard.may_save(false));
        assert_eq!(guard.judge(&report(f64::NAN, true), false), None);
        assert!(!guard.may_save(true) && !guard.may_save(false));
        assert_eq!(guard.judge(&report(1.0, false), false), None);
        assert!(guard.may_save(false) && !guard.may_save(false));
        // No step follows the last one, which would tell.
        let last = guard.judge(&report(f64::NAN, true), true);
        assert_eq!(last, Some(Divergence::NotFinite));
    }

    #[test]
    fn returns_to_the_same_step_are_counted() {
        let mut guard = guard(3, 2);
        let worn: Vec<_> = [5, 5, 9, 9, 9, 5]
            .map(|step| guard.count_return(step))
            .into();
        assert_eq!(worn, [false, false, false, false, true, true]);
    }
}
