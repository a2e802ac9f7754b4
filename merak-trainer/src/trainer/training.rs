//! Training: the loop over steps, with the evaluations and saves between them.

use super::{
    BestModel, Callback, EarlyStopping, EvaluationMetrics, MerakTrainer, StepReport, Stop,
    TrainerControl,
};
use crate::error::{ConfigError, Error, PlanError, Result, StepPart};
use std::time::{Duration, Instant};

/// The result of [`MerakTrainer::train`], the same on every rank.
#[derive(Debug, Clone, PartialEq)]
pub struct TrainOutput {
    /// Optimizer steps done since the beginning of the run, resumed parts included.
    pub global_step: usize,
    /// Steps that this call made.
    pub steps: usize,
    /// Mean of the losses of the steps that this call made, skipped ones aside.
    pub training_loss: f64,
    /// Steps of this call that were skipped because a gradient was not finite.
    pub skipped_steps: u64,
    /// Returns to earlier checkpoints in this call, with `divergence_guard`; the steps that they
    /// undid count no more.
    pub rollbacks: usize,
    /// Passes over the data, the last one as a fraction.
    pub epoch: f64,
    /// The time of training, evaluations and saves included.
    pub train_runtime: Duration,
    /// Tokens that were trained on.
    pub tokens: u64,
    /// Samples per second of this time.
    pub train_samples_per_second: f64,
    /// Steps per second of this time.
    pub train_steps_per_second: f64,
    /// Tokens per second of this time.
    pub train_tokens_per_second: f64,
    /// Why training ended before its last step, where it did.
    pub stopped_by: Option<Stop>,
    /// The evaluation of the last step that was made, if it was evaluated.
    pub evaluation: Option<EvaluationMetrics>,
    /// The checkpoint whose weights and averages of them the trainer now has, with
    /// `load_best_model_at_end`; the rest of the optimizer's state stays that of the last step.
    pub best: Option<BestModel>,
}

impl MerakTrainer {
    /// Trains until the last step, evaluating and saving on the way as the arguments say; then
    /// takes the weights of the best model, if that is asked for and no signal ended training.
    ///
    /// # Errors
    /// When everything is frozen; when a rank fails, which ends the run on all of them; when
    /// gradients are not finite in `max_skipped_steps` steps in a row that no lower loss scale
    /// could save, or in every step of this call.
    pub fn train(&mut self) -> Result<TrainOutput> {
        self.expect_trained()?;
        if self.args.saves() {
            self.args.run_folder()?;
        }
        let start = Instant::now();
        let first_step = self.progress.global_step;
        self.progress.first_step = first_step;
        let rollbacks_before = self.rollbacks;
        let skipped_before = self.stages.optimizer.progress().skipped;
        let mut tally = Tally::default();
        let mut evaluation = None;
        self.control = TrainerControl::default();
        let is_over = self.early_stopping.as_ref().map(EarlyStopping::is_over);
        let mut stop = is_over.unwrap_or_default().then_some(Stop::Asked);
        while stop.is_none() && !self.progress.is_done() {
            let report = self.train_step()?;
            tally.add(&report);
            (evaluation, stop) = self.end_step(&report, tally.updates)?;
            let told = self.report_times(stop.is_some() || self.progress.is_done());
            self.placed(StepPart::Train, self.progress.global_step, told)?;
        }
        let is_signal = matches!(stop, Some(Stop::Signal { .. }));
        // A run without steps left does not replace the checkpoint that it came from.
        self.end_saving(self.progress.global_step > self.progress.first_step)?;
        let best = if self.args.load_best_model_at_end && !is_signal {
            self.load_best()?
        } else {
            None
        };
        let train_runtime = start.elapsed();
        let per_second = |count: f64| count / train_runtime.as_secs_f64().max(f64::MIN_POSITIVE);
        let steps = self.progress.global_step.saturating_sub(first_step);
        // A return to an earlier checkpoint takes back what was counted since.
        let skipped = self.stages.optimizer.progress().skipped;
        Ok(TrainOutput {
            global_step: self.progress.global_step,
            steps,
            training_loss: tally.mean_loss(),
            skipped_steps: skipped.saturating_sub(skipped_before),
            rollbacks: self.rollbacks - rollbacks_before,
            epoch: self.progress.epochs(),
            train_runtime,
            tokens: tally.tokens,
            train_samples_per_second: per_second((steps * self.args.global_batch()) as f64),
            train_steps_per_second: per_second(steps as f64),
            train_tokens_per_second: per_second(tally.tokens as f64),
            stopped_by: stop,
            evaluation,
            best,
        })
    }

    /// Refuses to train where everything is frozen.
    fn expect_trained(&self) -> Result<()> {
        if !self.stages.plan.is_frozen() {
            return Ok(());
        }
        if !self.args.text_generation {
            return Err(Error::Plan(PlanError::NothingTrained));
        }
        Err(Error::Config(ConfigError::IllegalValue {
            key: "text_generation",
            found: "true".to_owned(),
            place: "the arguments of this trainer".to_owned(),
            expected: "false to train: a trainer that continues prompts has no optimizer"
                .to_owned(),
        }))
    }

    /// What follows a step: its report, the end of a save under way, its evaluation and checkpoint,
    /// and whether training ends. `updates` counts the steps that were not skipped.
    ///
    /// # Communication
    /// An all-reduce of 40 bytes over the world, and another one after an evaluation and after a
    /// save, during which a signal may have come or callbacks may have asked for more.
    fn end_step(
        &mut self,
        report: &StepReport,
        updates: u32,
    ) -> Result<(Option<EvaluationMetrics>, Option<Stop>)> {
        let done = self.progress.global_step;
        self.within(StepPart::Train, done, |trainer| {
            trainer.tell(|callback, control| callback.on_step(report, control));
            Ok(())
        })?;
        let limit = self.check_skipped(report, updates);
        if self.guard(report, limit)? {
            let stop = self.within(StepPart::Train, done, Self::agree)?;
            return Ok((None, stop));
        }
        self.within(StepPart::Save, done, |trainer| {
            trainer.finish_save_if_written().map(drop)
        })?;
        let mut stop = self.within(StepPart::Train, done, |trainer| {
            let stop = trainer.agree()?;
            let is_asked = std::mem::take(&mut trainer.control.should_log);
            let (first, total) = (trainer.progress.first_step, trainer.total_steps());
            if is_asked || trainer.args.logs_after(done, first, total) {
                trainer.tell(|callback, _| callback.on_log(report));
            }
            Ok(stop)
        })?;
        let evaluation = self.evaluate_if_due()?;
        if evaluation.is_some() {
            stop = self.within(StepPart::Train, done, Self::agree)?;
        }
        if self.save_if_due(evaluation.as_ref())? {
            stop = self.within(StepPart::Train, done, Self::agree)?;
        }
        Ok((evaluation, stop))
    }

    /// Ends a run that skips too many steps where the loss scale cannot fall: as many in a row as
    /// the arguments allow, or more at its end than it has updates; and one that skips all of them.
    /// `updates` counts the steps that were not skipped.
    ///
    /// # Communication
    /// A barrier before the error.
    fn check_skipped(&mut self, report: &StepReport, updates: u32) -> Result<()> {
        let (progress, limit) = (
            self.stages.optimizer.progress(),
            self.args.max_skipped_steps,
        );
        let is_lost = updates == 0 || progress.skipped_at_floor > progress.steps;
        let is_over = self.progress.is_done() && is_lost;
        match &report.skipped {
            Some(param) if is_over || progress.skipped_at_floor >= limit as u64 => {
                // The checkpoint that is being written is of an earlier step.
                self.finish_save()?;
                // The first of these ranks to fail ends the others: by then all have told of the
                // step.
                self.within(StepPart::Train, report.step, |trainer| {
                    Ok(trainer.stages.mpu.world_group().barrier()?)
                })?;
                let key = self.args.loss_scale_key();
                Err(Error::SkippedSteps {
                    steps: progress.skipped_in_a_row,
                    first: (report.step + 1).saturating_sub(progress.skipped_in_a_row as usize),
                    step: report.step,
                    param: param.clone(),
                    limit,
                    loss_scale: report.loss_scale.map(|scale| (scale, key)),
                })
            }
            _ => Ok(()),
        }
    }

    /// Evaluates where a step is due for it or a callback asks for it.
    fn evaluate_if_due(&mut self) -> Result<Option<EvaluationMetrics>> {
        let is_asked = std::mem::take(&mut self.control.should_evaluate);
        let is_due = match self.args.eval_steps {
            Some(steps) => self.progress.global_step.is_multiple_of(steps),
            None => self.progress.ends_epoch(),
        };
        let is_due = self.args.do_eval && (is_due || self.progress.is_done());
        if self.parts.eval_data.is_none() || !(is_due || is_asked) {
            return Ok(None);
        }
        let metrics = self.evaluate()?;
        if let Some(stopping) = &mut self.early_stopping {
            stopping.on_evaluate(&metrics, &mut self.control);
        }
        Ok(Some(metrics))
    }

    /// Saves where a step is due for it or a callback asks for it; returns whether it did. `best`
    /// names the saved step with the best evaluation. Where the best model is loaded in the end, a
    /// step with a new best evaluation is saved too.
    fn save_if_due(&mut self, evaluation: Option<&EvaluationMetrics>) -> Result<bool> {
        let is_asked = std::mem::take(&mut self.control.should_save);
        let best = evaluation.map(|metrics| self.judge(metrics)).transpose()?;
        let best = best.flatten();
        let saves_best = best.is_some() && self.args.load_best_model_at_end;
        let done = self.progress.global_step;
        let is_due = self.args.saves_after(done, self.progress.ends_epoch());
        let is_due = match &mut self.divergence {
            Some(guard) => guard.may_save(is_due),
            None => is_due,
        };
        let must_save = self.progress.is_done() || saves_best || is_asked;
        let saves = is_due || (self.args.saves() && must_save);
        if saves {
            // A save under way records the best of its own step, so it ends first.
            self.finish_save()?;
            self.best = best.or(self.best);
            self.save_during_training()?;
        }
        Ok(saves)
    }
}

/// Sums over the steps of a call of [`MerakTrainer::train`].
#[derive(Debug, Default)]
struct Tally {
    loss: f64,
    /// Steps that were not skipped.
    updates: u32,
    tokens: u64,
}

impl Tally {
    fn add(&mut self, report: &StepReport) {
        if report.skipped.is_none() {
            self.loss += report.loss;
            self.updates += 1;
        }
        self.tokens += report.tokens;
    }

    fn mean_loss(&self) -> f64 {
        if self.updates == 0 {
            0.0
        } else {
            self.loss / f64::from(self.updates)
        }
    }
}
