//! Progress for people: a bar on a terminal, lines elsewhere.

use std::{
    fmt::{self, Write as _},
    io::{self, Write},
    path::Path,
};

use indicatif::ProgressBar;
use merak_ckpt::words::{Bytes, file};

use super::{
    memory::resident_bytes,
    peak::{Percent, Rates},
    screen::Screen,
    times::{Readable, StepTimes},
};
use crate::trainer::StepReport;

/// Steps whose times make up the estimate of the time left.
const WINDOW: usize = 20;

/// Columns of a terminal that a line above the bar fits.
const COLUMNS: usize = 80;

/// The progress of a run, reported by one rank.
///
/// On a terminal a bar is redrawn at each step, and evaluating and saving have bars of their own
/// below it while they last. Elsewhere a line is written at each step that is logged:
/// `step 20/100  loss 3.2184  grad 1.25  lr 3.0e-4  125 ms  32.0 samples/s  1024 tokens/s`, with
/// the loss scale and the skipped steps where there are any, and with the share of the peak and the
/// time left where no bar shows them.
pub struct Progress {
    total: usize,
    rates: Rates,
    times: StepTimes,
    output: Output,
}

enum Output {
    Bars {
        screen: Screen,
        /// The bar of the steps.
        steps: ProgressBar,
        evaluation: Option<ProgressBar>,
        saving: Option<ProgressBar>,
    },
    Lines(Box<dyn Write + Send>),
}

impl Progress {
    /// Bars on a screen, for a run of `total` steps of which `done` are done already; where it
    /// shows none, lines.
    pub fn on(screen: &Screen, total: usize, done: usize) -> Self {
        if !screen.has_bars() {
            return Self::lines(total, Box::new(screen.clone()));
        }
        let steps = screen.bar(total as u64, "{wide_bar} {pos}/{len}  {msg}");
        steps.set_position(done as u64);
        Self {
            total,
            rates: Rates::default(),
            times: StepTimes::new(WINDOW),
            output: Output::Bars {
                screen: screen.clone(),
                steps,
                evaluation: None,
                saving: None,
            },
        }
    }

    /// Lines on `output`, for a run of `total` steps.
    pub fn lines(total: usize, output: Box<dyn Write + Send>) -> Self {
        Self {
            total,
            rates: Rates::default(),
            times: StepTimes::new(WINDOW),
            output: Output::Lines(output),
        }
    }

    /// Shows further speeds, by `rates`.
    #[must_use]
    pub fn with_rates(mut self, rates: Rates) -> Self {
        self.rates = rates;
        self
    }

    /// Reports a step; `is_logged` says whether it is worth a line.
    ///
    /// # Errors
    ///
    /// When the line cannot be written.
    pub fn step(&mut self, report: &StepReport, is_logged: bool) -> io::Result<()> {
        self.times.push(report.time);
        let mean = self.times.mean().unwrap_or_default().as_secs_f64();
        let per_s = |amount: f64| if mean > 0.0 { amount / mean } else { 0.0 };
        let tokens_per_s = per_s(report.tokens as f64);
        let samples_per_s = per_s(self.rates.samples_per_step as f64);
        let mfu = self.rates.mfu(tokens_per_s);
        let mfu = mfu.map_or_else(String::new, |mfu| format!("  MFU {}", Percent(mfu)));
        let left = self.times.left(self.total.saturating_sub(report.step));
        let left = Readable(left.unwrap_or_default());
        let tokens_per_s = Count(tokens_per_s);
        // The bar tells how many steps there are, and leaves the line short enough for a terminal.
        let total = match &self.output {
            Output::Bars { .. } => String::new(),
            Output::Lines(_) => format!("/{}", self.total),
        };
        let figures = figures(report, &total);
        let (ms, samples_per_s) = (1e3 * mean, Count(samples_per_s));
        let mut line =
            format!("{figures}  {ms:.0} ms  {samples_per_s} samples/s  {tokens_per_s} tokens/s");
        if line.len() >= COLUMNS && matches!(self.output, Output::Bars { .. }) {
            line = format!("{figures}  {ms:.0} ms  {tokens_per_s} tokens/s");
        }
        match &mut self.output {
            Output::Bars { steps, screen, .. } => {
                let memory = resident_bytes()
                    .map_or_else(String::new, |bytes| format!("  {}", Bytes(bytes)));
                steps.set_position(report.step as u64);
                steps.set_message(format!(
                    "loss {:.4}  {tokens_per_s} tokens/s{mfu}{memory}  {left} left",
                    report.loss
                ));
                if is_logged {
                    write_line(screen, &line)?;
                }
            }
            Output::Lines(output) if is_logged => {
                write_line(output, &format!("{line}{mfu}  {left} left"))?;
            }
            Output::Lines(_) => {}
        }
        Ok(())
    }

    /// Writes a line of its own, above the bar where there is one.
    ///
    /// # Errors
    ///
    /// When the line cannot be written.
    pub fn say(&mut self, line: &str) -> io::Result<()> {
        match &mut self.output {
            Output::Bars { screen, .. } => write_line(screen, line),
            Output::Lines(output) => write_line(output, line),
        }
    }

    /// Shows that `done` of the `total` iterations of an evaluation are done; the last one ends the
    /// bar.
    pub fn evaluation(&mut self, done: usize, total: usize) {
        let Output::Bars {
            screen, evaluation, ..
        } = &mut self.output
        else {
            return;
        };
        if done == total {
            return clear(evaluation);
        }
        let bar = evaluation.get_or_insert_with(|| screen.evaluation(total));
        bar.set_position(done as u64);
    }

    /// Shows that a checkpoint is being written, until [`Progress::saved`].
    pub fn saving(&mut self, step: usize) {
        if let Output::Bars { screen, saving, .. } = &mut self.output {
            clear(saving);
            *saving = Some(screen.spinner(format!("saving step {step}")));
        }
    }

    /// Says that a checkpoint was written.
    ///
    /// # Errors
    ///
    /// When the line cannot be written.
    pub fn saved(&mut self, path: &Path) -> io::Result<()> {
        if let Output::Bars { saving, .. } = &mut self.output {
            clear(saving);
        }
        self.say(&format!("saved {}", file(path)))
    }

    /// Ends the report and leaves its last state on the screen.
    pub fn finish(mut self) {
        if let Output::Bars {
            steps,
            evaluation,
            saving,
            ..
        } = &mut self.output
        {
            clear(evaluation);
            clear(saving);
            steps.abandon();
        }
    }
}

/// What a step computed, as a line begins.
fn figures(report: &StepReport, total: &str) -> String {
    let StepReport {
        step,
        loss,
        grad_norm,
        lr,
        ..
    } = report;
    let mut line = format!("step {step}{total}  loss {loss:.4}  grad {grad_norm:.2}  lr {lr:.1e}");
    if let Some(scale) = report.loss_scale {
        let _ = write!(line, "  scale {scale}");
    }
    if report.skipped_steps > 0 {
        let _ = write!(line, "  skipped {}", report.skipped_steps);
    }
    line
}

/// An amount per second, as people read it: `0.25`, `32.0`, `1024`, `98.3k`, `1.2M`.
struct Count(f64);

impl fmt::Display for Count {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            n if n < 9.995 => write!(f, "{n:.2}"),
            n if n < 99.95 => write!(f, "{n:.1}"),
            n if n < 9999.5 => write!(f, "{n:.0}"),
            n if n < 999_500.0 => write!(f, "{:.1}k", n / 1e3),
            n => write!(f, "{:.1}M", n / 1e6),
        }
    }
}

/// Writes a line at once: a screen folds whole lines, and draws its bars again after each write.
fn write_line(output: &mut impl Write, line: &str) -> io::Result<()> {
    output.write_all(format!("{line}\n").as_bytes())?;
    output.flush()
}

/// Takes a bar off the screen.
fn clear(bar: &mut Option<ProgressBar>) {
    if let Some(bar) = bar.take() {
        bar.finish_and_clear();
    }
}

/// A run that fails leaves no bar that goes on turning.
impl Drop for Progress {
    fn drop(&mut self) {
        if let Output::Bars {
            evaluation, saving, ..
        } = &mut self.output
        {
            clear(evaluation);
            clear(saving);
        }
    }
}

impl fmt::Debug for Progress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Progress")
            .field("total", &self.total)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use std::{
        sync::{Arc, Mutex},
        time::Duration,
    };

    use super::*;

    #[derive(Clone, Default)]
    struct Shared(Arc<Mutex<Vec<u8>>>);

    impl Write for Shared {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().expect("no writer panicked").write(bytes)
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn lines_are_written_for_logged_steps_only() {
        let shared = Shared::default();
        let rates = Rates {
            samples_per_step: 8,
            flops_per_token: 1e6,
            peak: Some(1e10),
        };
        let mut progress = Progress::lines(100, Box::new(shared.clone())).with_rates(rates);
        let mut report = StepReport {
            step: 1,
            loss: 5.5,
            grad_norm: 1.25,
            lr: 3e-4,
            loss_scale: None,
            tokens: 1000,
            skipped: None,
            skipped_steps: 0,
            data_wait: Duration::ZERO,
            time: Duration::from_secs(1),
        };
        progress.step(&report, true).unwrap();
        report.step = 2;
        progress.step(&report, false).unwrap();
        progress.say("validation loss 5.3").unwrap();
        (report.step, report.loss) = (3, f64::NAN);
        (report.loss_scale, report.skipped_steps) = (Some(65536.0), 2);
        progress.step(&report, true).unwrap();
        progress.finish();
        let text = String::from_utf8(shared.0.lock().unwrap().clone()).unwrap();
        insta::assert_snapshot!(text, @r"
        step 1/100  loss 5.5000  grad 1.25  lr 3.0e-4  1000 ms  8.00 samples/s  1000 tokens/s  MFU 10 %  1m 39s left
        validation loss 5.3
        step 3/100  loss NaN  grad 1.25  lr 3.0e-4  scale 65536  skipped 2  1000 ms  8.00 samples/s  1000 tokens/s  MFU 10 %  1m 37s left
        ");
    }
}
