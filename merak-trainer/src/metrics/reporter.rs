//! Reports of a run while it trains.

use std::{
    path::Path,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use merak_ckpt::words;
use serde::Serialize;

use super::{EvaluationMetrics, METRICS_FILE, MetricsFile, Progress, StepMetrics, resident_bytes};
use crate::{
    config::CheckedArguments,
    error::{Error, FolderError, Result},
    trainer::{Callback, MerakTrainer, Rollback, StepReport, TrainerControl},
};

/// Writes `metrics.jsonl` and shows progress, on the rank that it is given to.
///
/// Clones share their state: one goes to the trainer as a [`Callback`], another stays with the
/// caller that runs the trainer. Until [`Reporter::start`] it reports nothing.
#[derive(Debug, Clone, Default)]
pub struct Reporter(Arc<Mutex<Option<Report>>>);

#[derive(Debug)]
struct Report {
    file: MetricsFile,
    progress: Option<Progress>,
    logging_steps: usize,
    first_step: usize,
    total_steps: usize,
    flops_per_token: f64,
    /// Tokens since the run's first step.
    tokens: u64,
    /// Seconds of earlier parts of the run.
    earlier_s: f64,
    start: Instant,
    window: Window,
    /// The step of the last record.
    logged: usize,
    /// Whether it was reported that the file cannot be written.
    has_failed: bool,
}

/// The steps since the last record.
#[derive(Debug, Default)]
struct Window {
    tokens: u64,
    time: Duration,
}

impl Reporter {
    /// Starts to report a trainer's run, in `metrics.jsonl` of its output folder and on `progress`.
    /// After resuming, the records of later steps are removed, and counts go on where they stood.
    ///
    /// # Errors
    ///
    /// [`FolderError::OutputDir`] when the file cannot be read or written.
    pub fn start(
        &self,
        trainer: &MerakTrainer,
        args: &CheckedArguments,
        output_dir: &Path,
        progress: Progress,
    ) -> Result<()> {
        let first_step = trainer.global_step();
        let file = MetricsFile::open(&output_dir.join(METRICS_FILE), first_step);
        // Nothing has run yet: the folder is at fault.
        let file = file.map_err(|error| match error {
            Error::Write { path, source } => Error::Folder(FolderError::OutputDir { path, source }),
            other => other,
        })?;
        let mut report = Report {
            earlier_s: file.earlier_time_s(),
            file,
            progress: Some(progress),
            logging_steps: args.logging_steps,
            first_step,
            total_steps: trainer.total_steps(),
            flops_per_token: trainer.plan().flops_per_token(),
            tokens: trainer.tokens(),
            start: Instant::now(),
            window: Window::default(),
            logged: first_step,
            has_failed: false,
        };
        if let Some(from) = trainer.resumed_from() {
            let (step, path) = (from.global_step, words::file(&from.path));
            report.say(&if args.finetune {
                format!("weights of step {step} of {path}")
            } else {
                format!("resumed from step {step} of {path}")
            });
        }
        *self.lock() = Some(report);
        Ok(())
    }

    /// Ends the progress; records are still written.
    pub fn finish(&self) {
        let mut report = self.lock();
        let Some(report) = report.as_mut() else {
            return;
        };
        if let Some(progress) = report.progress.take() {
            progress.finish();
        }
        let renewed = report.file.renew();
        report.note(renewed);
    }

    fn lock(&self) -> MutexGuard<'_, Option<Report>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Report {
    fn step(&mut self, report: &StepReport) {
        self.tokens += report.tokens;
        self.window.tokens += report.tokens;
        self.window.time += report.time;
        let is_logged = report.step.is_multiple_of(self.logging_steps)
            || report.step == self.total_steps
            || report.step == self.first_step + 1;
        if let Some(progress) = &mut self.progress {
            let tokens = usize::try_from(report.tokens).unwrap_or(usize::MAX);
            // A closed standard error does not end the training.
            let _ = progress.step(report.step, report.loss, tokens, report.time, is_logged);
        }
        if !is_logged {
            // A file that is removed is back before the next record, which may never come.
            let renewed = self.file.renew();
            self.note(renewed);
            return;
        }
        self.log(report);
    }

    /// Makes the record of a step.
    fn log(&mut self, report: &StepReport) {
        self.logged = report.step;
        let Window { tokens, time } = std::mem::take(&mut self.window);
        let tokens_per_s = tokens as f64 / time.as_secs_f64().max(f64::MIN_POSITIVE);
        self.record(&StepMetrics {
            step: report.step,
            loss: report.loss,
            grad_norm: report.grad_norm,
            lr: report.lr,
            tokens: self.tokens,
            tokens_per_s,
            tflops: Some(tokens_per_s * self.flops_per_token / 1e12),
            mfu: None,
            memory_bytes: resident_bytes(),
            loss_scale: report.loss_scale,
            time_s: self.earlier_s + self.start.elapsed().as_secs_f64(),
        });
    }

    fn record(&mut self, record: &impl Serialize) {
        let appended = self.file.append(record);
        self.note(appended);
    }

    /// A file that cannot be written does not stop the run, and is reported once until it can be.
    fn note(&mut self, written: Result<()>) {
        let had_failed = std::mem::replace(&mut self.has_failed, written.is_err());
        if let (Err(error), false) = (written, had_failed) {
            let error: &dyn std::error::Error = &error;
            tracing::error!(error, "metrics cannot be written");
        }
    }

    fn say(&mut self, line: &str) {
        if let Some(progress) = &mut self.progress {
            let _ = progress.say(line);
        }
    }
}

impl Callback for Reporter {
    fn on_step(&mut self, report: &StepReport, _: &mut TrainerControl) {
        if let Some(this) = &mut *self.lock() {
            this.step(report);
        }
    }

    fn on_log(&mut self, report: &StepReport) {
        let mut this = self.lock();
        if let Some(this) = this.as_mut().filter(|this| this.logged != report.step) {
            this.log(report);
        }
    }

    fn on_rollback(&mut self, rollback: &Rollback) {
        if let Some(this) = &mut *self.lock() {
            let Rollback {
                step,
                loss,
                cause,
                to_step,
            } = rollback;
            this.say(&format!("step {step}: back to step {to_step}, as {cause}"));
            this.record(&serde_json::json!({
                "step": to_step, "rolled_back_from": step, "diverged_loss": loss,
                "cause": cause.to_string(),
            }));
        }
    }

    fn on_evaluate(&mut self, metrics: &EvaluationMetrics, _: &mut TrainerControl) {
        if let Some(this) = &mut *self.lock() {
            let (step, loss) = (metrics.step, metrics.eval_loss);
            this.say(&format!("step {step}: validation loss {loss:.4}"));
            this.record(metrics);
        }
    }

    fn on_evaluation_step(&mut self, done: usize, total: usize) {
        if let Some(progress) = self.lock().as_mut().and_then(|this| this.progress.as_mut()) {
            progress.evaluation(done, total);
        }
    }

    fn on_save_start(&mut self, step: usize) {
        if let Some(progress) = self.lock().as_mut().and_then(|this| this.progress.as_mut()) {
            progress.saving(step);
        }
    }

    fn on_save(&mut self, path: &Path, _: &mut TrainerControl) {
        if let Some(progress) = self.lock().as_mut().and_then(|this| this.progress.as_mut()) {
            let _ = progress.saved(path);
        }
    }
}
