//! Progress for people: a bar on a terminal, lines elsewhere.

use std::{
    fmt,
    io::{self, Write},
    path::Path,
    time::Duration,
};

use indicatif::ProgressBar;
use merak_ckpt::words::file;

use super::{
    screen::Screen,
    times::{Readable, StepTimes},
};

/// Steps whose times make up the estimate of the time left.
const WINDOW: usize = 20;

/// The progress of a run, reported by one rank.
///
/// On a terminal a bar is redrawn at each step, and evaluating and saving have bars of their own
/// below it while they last. Elsewhere a line is written at each step that is logged:
/// `step 20/100  loss 3.2184  1024 tokens/s  1m 20s left`.
pub struct Progress {
    total: usize,
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
        let steps = screen.bar(total as u64, "{bar:24} {pos}/{len}  {msg}");
        steps.set_position(done as u64);
        Self {
            total,
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
            times: StepTimes::new(WINDOW),
            output: Output::Lines(output),
        }
    }

    /// Reports that `step` steps are done, the last one in `time` on `tokens` tokens; `is_logged`
    /// says whether the step is worth a line.
    ///
    /// # Errors
    ///
    /// When the line cannot be written.
    pub fn step(
        &mut self,
        step: usize,
        loss: f64,
        tokens: usize,
        time: Duration,
        is_logged: bool,
    ) -> io::Result<()> {
        self.times.push(time);
        let mean = self.times.mean().unwrap_or_default().as_secs_f64();
        let speed = if mean > 0.0 {
            tokens as f64 / mean
        } else {
            0.0
        };
        let left = self
            .times
            .left(self.total.saturating_sub(step))
            .unwrap_or_default();
        let text = format!(
            "loss {loss:.4}  {speed:.0} tokens/s  {} left",
            Readable(left)
        );
        match &mut self.output {
            Output::Bars { steps, .. } => {
                steps.set_position(step as u64);
                steps.set_message(text);
            }
            Output::Lines(output) if is_logged => {
                write_line(output, &format!("step {step}/{}  {text}", self.total))?;
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
    use std::sync::{Arc, Mutex};

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
        let mut progress = Progress::lines(100, Box::new(shared.clone()));
        let second = Duration::from_secs(1);
        progress.step(1, 5.5, 1000, second, true).unwrap();
        progress.step(2, 5.4, 1000, second, false).unwrap();
        progress.say("validation loss 5.3").unwrap();
        progress.step(3, f64::NAN, 1000, second, true).unwrap();
        progress.finish();
        let text = String::from_utf8(shared.0.lock().unwrap().clone()).unwrap();
        insta::assert_snapshot!(text, @r"
        step 1/100  loss 5.5000  1000 tokens/s  1m 39s left
        validation loss 5.3
        step 3/100  loss NaN  1000 tokens/s  1m 37s left
        ");
    }
}
