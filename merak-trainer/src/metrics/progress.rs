//! Progress for people: a bar on a terminal, lines elsewhere.

use std::{
    fmt,
    io::{self, Write},
    time::Duration,
};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use super::times::{Readable, StepTimes};

/// Steps whose times make up the estimate of the time left.
const WINDOW: usize = 20;

/// The progress of a run, reported by one rank.
///
/// On a terminal a bar is redrawn at each step. Elsewhere a line is written at each step that is
/// logged: `step 20/100  loss 3.2184  1024 tokens/s  1m 20s left`.
pub struct Progress {
    total: usize,
    times: StepTimes,
    output: Output,
}

enum Output {
    Bar(ProgressBar),
    Lines(Box<dyn Write + Send>),
}

impl Progress {
    /// A bar on standard error, for a run of `total` steps of which `done` are done already.
    pub fn bar(total: usize, done: usize) -> Self {
        let bar = ProgressBar::with_draw_target(Some(total as u64), ProgressDrawTarget::stderr());
        // The template is a constant of ours; without it the bar keeps its default style.
        if let Ok(style) = ProgressStyle::with_template("{bar:24} {pos}/{len}  {msg}") {
            bar.set_style(style);
        }
        bar.set_position(done as u64);
        Self {
            total,
            times: StepTimes::new(WINDOW),
            output: Output::Bar(bar),
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
            Output::Bar(bar) => {
                bar.set_position(step as u64);
                bar.set_message(text);
            }
            Output::Lines(output) if is_logged => {
                writeln!(output, "step {step}/{}  {text}", self.total)?;
                output.flush()?;
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
            Output::Bar(bar) => {
                bar.println(line);
                Ok(())
            }
            Output::Lines(output) => {
                writeln!(output, "{line}")?;
                output.flush()
            }
        }
    }

    /// Ends the report and leaves its last state on the screen.
    pub fn finish(self) {
        if let Output::Bar(bar) = self.output {
            bar.abandon();
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
