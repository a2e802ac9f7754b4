//! Reports of a run while it trains.

use std::{
    path::{Path, PathBuf},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use merak_ckpt::{replace_file, words};
use serde::Serialize;
use serde_json::Value;

use super::{
    EvaluationMetrics, EventFile, METRICS_FILE, MetricsFile, Page, Peak, Progress, Ran, Rates,
    StepMetrics, resident_bytes,
};
use crate::{
    config::{CheckedArguments, ReportTo},
    error::{Error, FolderError, Result},
    folder::{EVENTS, REPORT_FILE, TRACE_FILE},
    trainer::{
        Breakdown, Callback, MerakTrainer, Rollback, StepProfile, StepReport, TrainerControl,
    },
};

/// Writes `metrics.jsonl` and what else the arguments ask for, and shows progress, on the rank that
/// it is given to.
///
/// Clones share their state: one goes to the trainer as a [`Callback`], another stays with the
/// caller that runs the trainer. Until [`Reporter::start`] it reports nothing.
#[derive(Debug, Clone, Default)]
pub struct Reporter(Arc<Mutex<Option<Report>>>);

#[derive(Debug)]
struct Report {
    file: MetricsFile,
    events: Option<EventFile>,
    output_dir: PathBuf,
    page: Option<Page>,
    /// The step of the last record on the page that was written last.
    paged: usize,
    progress: Option<Progress>,
    args: CheckedArguments,
    first_step: usize,
    total_steps: usize,
    rates: Rates,
    /// Of the last record.
    mfu: Option<f64>,
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
    steps: u32,
    tokens: u64,
    time: Duration,
    data_wait: Duration,
}

impl Reporter {
    /// Starts to report a trainer's run, in `metrics.jsonl` of its output folder and on `progress`.
    /// After resuming, the records of later steps are removed, and counts go on where they stood.
    /// `peak` is what speeds are a share of.
    ///
    /// # Errors
    ///
    /// [`FolderError::OutputDir`] when the file cannot be read or written;
    /// [`FolderError::LoggingDir`] when the folder of event files cannot.
    pub fn start(
        &self,
        trainer: &MerakTrainer,
        args: &CheckedArguments,
        output_dir: &Path,
        peak: Option<Peak>,
        progress: Progress,
    ) -> Result<()> {
        let first_step = trainer.global_step();
        let file = MetricsFile::open(&output_dir.join(METRICS_FILE), first_step);
        let file = file.map_err(folder_at_fault)?;
        let events = events(args, output_dir, first_step)?;
        let rates = Rates {
            samples_per_step: args.global_batch(),
            flops_per_token: trainer.plan().flops_per_token(),
            peak: peak.map(|peak| peak.flops_per_s),
        };
        let mut report = Report {
            earlier_s: file.earlier_time_s(),
            file,
            events,
            output_dir: output_dir.to_path_buf(),
            page: None,
            paged: 0,
            progress: Some(progress.with_rates(rates)),
            args: args.clone(),
            first_step,
            total_steps: trainer.total_steps(),
            rates,
            mfu: None,
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

    /// Writes `report.html` too, by [`Reporter::write_page`] and at saves, if the run has become a
    /// twentieth longer: a page has all records, and most of them stay. Call it once the report has
    /// started.
    pub fn with_page(&self, page: Page) {
        if let Some(report) = self.lock().as_mut() {
            report.page = Some(page);
        }
    }

    /// Writes `report.html`, with what the ranks ran and held if that is known. A page that cannot
    /// be written is reported and ends nothing.
    pub fn write_page(&self, ran: Option<&Ran>) {
        if let Some(report) = self.lock().as_mut() {
            report.write_page(ran);
        }
    }

    /// The share of the peak at the last record.
    pub fn mfu(&self) -> Option<f64> {
        self.lock().as_ref()?.mfu
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
        self.window.steps += 1;
        self.window.data_wait += report.data_wait;
        let is_logged = self
            .args
            .logs_after(report.step, self.first_step, self.total_steps);
        if let Some(progress) = &mut self.progress {
            // A closed standard error does not end the training.
            let _ = progress.step(report, is_logged);
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
        let window = std::mem::take(&mut self.window);
        let seconds = window.time.as_secs_f64().max(f64::MIN_POSITIVE);
        let steps = f64::from(window.steps);
        let tokens_per_s = window.tokens as f64 / seconds;
        self.mfu = self.rates.mfu(tokens_per_s);
        self.record(&StepMetrics {
            step: report.step,
            loss: report.loss,
            grad_norm: report.grad_norm,
            lr: report.lr,
            tokens: self.tokens,
            tokens_per_s,
            tflops: Some(self.rates.flops(tokens_per_s) / 1e12),
            mfu: self.mfu,
            memory_bytes: resident_bytes(),
            loss_scale: report.loss_scale,
            skipped_steps: report.skipped_steps,
            step_time_s: window.time.as_secs_f64() / steps,
            data_wait_s: window.data_wait.as_secs_f64() / steps,
            samples_per_s: steps * self.rates.samples_per_step as f64 / seconds,
            time_s: self.earlier_s + self.start.elapsed().as_secs_f64(),
        });
    }

    fn record(&mut self, record: &impl Serialize) {
        let mut written = self.file.append(record);
        if let Some(events) = &mut self.events {
            let (step, scalars) = scalars(record);
            written = written.and(events.append(step, &scalars));
        }
        self.note(written);
    }

    fn write_page(&mut self, ran: Option<&Ran>) {
        let Some(page) = &self.page else {
            return;
        };
        let path = self.output_dir.join(REPORT_FILE);
        let page = self.file.records().and_then(|records| {
            let html = page.to_html(&records, ran)?;
            replace_file(&path, html.as_bytes()).map_err(|source| Error::Write { path, source })
        });
        if page.is_ok() {
            self.paged = self.logged;
        }
        self.note(page);
    }

    fn write_trace(&mut self, profile: &StepProfile) {
        let path = self.output_dir.join(TRACE_FILE);
        match replace_file(&path, profile.to_trace().as_bytes()) {
            Ok(()) => self.say(&format!("profile {}", words::file(&path))),
            Err(source) => self.note(Err(Error::Write { path, source })),
        }
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

/// Whether a run that has recorded up to a step is a twentieth longer, or shorter, than the page of
/// the step `paged`.
fn is_page_due(logged: usize, paged: usize) -> bool {
    logged.abs_diff(paged) >= paged.div_ceil(20)
}

/// Nothing has run yet: the folder is at fault.
fn folder_at_fault(error: Error) -> Error {
    match error {
        Error::Write { path, source } => Error::Folder(FolderError::OutputDir { path, source }),
        other => other,
    }
}

/// The event file that the arguments ask for.
fn events(
    args: &CheckedArguments,
    output_dir: &Path,
    first_step: usize,
) -> Result<Option<EventFile>> {
    if args.report_to != ReportTo::Tensorboard {
        return Ok(None);
    }
    let folder = match &args.logging_dir {
        Some(folder) => folder.clone(),
        None => output_dir.join(EVENTS),
    };
    let events = EventFile::open(&folder, first_step as u64 + 1);
    let events = events.map_err(|error| match error {
        Error::Write { path, source } if args.logging_dir.is_some() => {
            Error::Folder(FolderError::LoggingDir { path, source })
        }
        error => folder_at_fault(error),
    })?;
    Ok(Some(events))
}

/// The step of a record, and its numbers under the tags that TensorBoard shows.
fn scalars(record: &impl Serialize) -> (u64, Vec<(String, f64)>) {
    let record = serde_json::to_value(record).unwrap_or_default();
    let fields = record.as_object().into_iter().flatten();
    let tagged = fields.filter_map(|(name, value)| {
        let tag = match (name.as_str(), name.strip_prefix("eval_")) {
            ("step", _) => return None,
            ("lr", _) => "Train/learning_rate".to_owned(),
            (_, Some(name)) => format!("Eval/{name}"),
            (name, None) => format!("Train/{name}"),
        };
        Some((tag, value.as_f64()?))
    });
    let step = record.get("step").and_then(Value::as_u64);
    (step.unwrap_or(0), tagged.collect())
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
                tokens,
            } = rollback;
            this.tokens = *tokens;
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
            let average = metrics.get("eval_ema_loss");
            let average = average.map(|loss| format!(", of the average {loss:.4}"));
            let average = average.unwrap_or_default();
            this.say(&format!("step {step}: validation loss {loss:.4}{average}"));
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

    fn on_breakdown(&mut self, breakdown: &Breakdown) {
        if let Some(this) = &mut *self.lock() {
            this.say(&breakdown.to_string());
        }
    }

    fn on_profile(&mut self, profile: &StepProfile) {
        if let Some(this) = &mut *self.lock() {
            this.write_trace(profile);
        }
    }

    fn on_save(&mut self, path: &Path, _: &mut TrainerControl) {
        if let Some(this) = &mut *self.lock() {
            if let Some(progress) = &mut this.progress {
                let _ = progress.saved(path);
            }
            if is_page_due(this.logged, this.paged) {
                this.write_page(None);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::is_page_due;

    #[test]
    fn a_page_is_due_where_the_run_is_a_twentieth_longer() {
        // The first one, also of a part that goes on.
        assert!(is_page_due(0, 0) && is_page_due(10, 0) && is_page_due(1000, 0));
        assert!(!is_page_due(20, 20) && is_page_due(21, 20));
        assert!(!is_page_due(104, 100) && is_page_due(105, 100));
        // The run went back.
        assert!(is_page_due(50, 100));
    }
}
