//! Which checkpoint of a run has the best evaluation.

use super::{EvaluationMetrics, MerakTrainer};
use crate::{
    config::{MetricName, one_of},
    error::{ConfigError, Error, Result, ResumeError},
};
use merak_ckpt::{ADAPTER_FOLDER, Checkpoint, Store, replace_lora};
use merak_mpu::ReduceOp;
use merak_mpu::names::nearest;
use merak_zero::EMA;
use serde::{Deserialize, Serialize};
use std::path::Path;

/// A checkpoint that was evaluated better than all before it.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct BestModel {
    /// Its step.
    pub step: usize,
    /// The value of `metric_for_best_model`; finite.
    pub score: f64,
}

impl MetricName {
    /// The value of this metric.
    ///
    /// # Errors
    /// When the evaluation has no such metric.
    fn of(&self, metrics: &EvaluationMetrics) -> Result<f64> {
        let value = metrics.get(&self.0);
        value.ok_or_else(|| self.unknown(&metrics.names()))
    }

    /// The error that this is none of the metrics.
    pub(super) fn unknown(&self, known: &[&str]) -> Error {
        Error::Config(ConfigError::UnknownMetric {
            key: "metric_for_best_model",
            found: self.0.clone(),
            known: one_of(known),
            nearest: nearest(&self.0, known.iter().copied()).map(Into::into),
        })
    }
}

/// Whether a value is finite and better than the best so far.
pub(super) fn is_better(value: f64, best: Option<f64>, greater_is_better: bool) -> bool {
    let surpasses = |best: f64| {
        if greater_is_better {
            value > best
        } else {
            value < best
        }
    };
    value.is_finite() && best.is_none_or(surpasses)
}

impl BestModel {
    /// Whether this is the checkpoint that was judged: another run may have saved the same step
    /// since.
    fn is_of(self, checkpoint: &Checkpoint) -> bool {
        let state = &checkpoint.manifest().header.state;
        serde_json::from_value(state["best"].clone()).is_ok_and(|best: Self| best == self)
    }
}

impl MerakTrainer {
    /// The step just evaluated, if it is the best model so far.
    ///
    /// # Errors
    /// When the evaluation lacks the metric that models are judged by.
    pub(super) fn judge(&self, metrics: &EvaluationMetrics) -> Result<Option<BestModel>> {
        let score = self.args.metric_for_best_model.of(metrics)?;
        let step = self.progress.global_step;
        let best = self.best.map(|best| best.score);
        let is_best = is_better(score, best, self.args.greater_is_better());
        Ok(is_best.then_some(BestModel { step, score }))
    }

    /// Makes the file `best` agree with the state of the run that was saved last. For rank 0.
    pub(super) fn name_best(&self, store: &Store) -> Result<()> {
        let step = self.best.map(|best| best.step as u64);
        // Without `load_best_model_at_end`, the best checkpoint may be deleted.
        let step = step.filter(|&step| store.path_of(step).is_dir());
        let named = store.best().ok().flatten();
        if named != step.map(|step| store.path_of(step)) {
            store.set_best(step)?;
        }
        Ok(())
    }

    /// Restores the best model as of a saved checkpoint, if this run's folder has both.
    ///
    /// # Communication
    /// An all-reduce of 8 bytes over the world.
    pub(super) fn restore_best(&mut self, best: Option<BestModel>, saved: &Path) -> Result<()> {
        let is_ours = |best: BestModel| {
            let store = Store::in_output_dir(self.args.output_dir.as_ref()?);
            let there = Checkpoint::open_damaged(store.path_of(best.step as u64)).ok()?;
            (store.holds(saved) && best.is_of(&there)).then_some(best)
        };
        let found = best.and_then(is_ours);
        let world = self.stages.mpu.world_group();
        let is_found = world.all_reduce_scalar(i64::from(found.is_some()), ReduceOp::Min)? == 1;
        self.best = found.filter(|_| is_found);
        if let Some(best) = best.filter(|_| self.best.is_none() && self.stages.mpu.is_rank_0()) {
            tracing::warn!(
                step = best.step,
                score = best.score,
                "the best checkpoint so far is not in this run's folder any more: evaluations from here on are judged afresh"
            );
        }
        Ok(())
    }

    /// Takes the weights of the best checkpoint, and their averages where these are kept, in place
    /// of those of the last step.
    ///
    /// # Communication
    /// An all-reduce of 8 bytes over the world, and what the last step has not gathered yet.
    pub(super) fn load_best(&mut self) -> Result<Option<BestModel>> {
        let Some(best) = self.best else {
            if self.stages.mpu.is_rank_0() {
                tracing::warn!(
                    "no step saved in this run's folder was evaluated as a finite number: the weights stay those of the last step"
                );
            }
            return Ok(None);
        };
        if best.step != self.progress.global_step {
            let loaded = self.load_step(best);
            loaded.map_err(|source| {
                Error::Resume(ResumeError::BestModel {
                    step: best.step,
                    last: self.progress.global_step,
                    source: Box::new(source),
                })
            })?;
        }
        Ok(Some(best))
    }

    fn load_step(&mut self, best: BestModel) -> Result<()> {
        let folder = self.args.run_folder()?;
        let store = Store::in_output_dir(&folder);
        let read = Checkpoint::open(store.path_of(best.step as u64))
            .map_err(Error::from)
            .and_then(|checkpoint| {
                if !best.is_of(&checkpoint) {
                    let path = checkpoint.path().to_owned();
                    let difference = format!("it is not the one that was judged: {}", best.score);
                    return Err(Error::Resume(ResumeError::OtherModel { path, difference }));
                }
                let weights = self.read_weights(&checkpoint, false)?;
                let averages = if self.stages.keeps_average() {
                    Some(self.read_optimizer(&checkpoint, |name| name == EMA)?)
                } else {
                    None
                };
                Ok((checkpoint, weights, averages))
            });
        let (checkpoint, weights, averages) = self.on_all_ranks(read)?;
        self.set_weights(&weights)?;
        // A checkpoint without optimizer state has no averages: they begin as its weights.
        self.stages.start_average()?;
        if let Some(averages) = averages {
            self.set_optimizer(averages)?;
        }
        if self.stages.mpu.is_rank_0() && self.stages.plan.draft.lora.is_some() {
            replace_lora(&checkpoint, folder.join(ADAPTER_FOLDER))?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_of_equal_scores_stays_the_best_and_what_is_not_finite_never_is() {
        let best = Some(1.5);
        let surpassed = |score, greater| is_better(score, best, greater);
        assert!(surpassed(1.0, false) && surpassed(2.0, true));
        assert!(!surpassed(1.0, true) && !surpassed(2.0, false));
        assert!(!surpassed(1.5, false) && !surpassed(1.5, true));
        for score in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY] {
            for greater in [false, true] {
                assert!(!surpassed(score, greater));
                assert!(!is_better(score, None, greater));
            }
        }
        assert!(is_better(9.0, None, false));
    }
}
