//! The terminal that bars and lines share.

use crate::trainer::Callback;
use indicatif::{MultiProgress, ProgressBar, ProgressStyle};
use merak_ckpt::cli::StandardError;
use std::{
    fs::{self, File},
    io::{self, Write},
    path::Path,
    sync::{Arc, Mutex, OnceLock, PoisonError},
    time::Duration,
};

/// Time between two drawings of a bar without steps.
const TICK: Duration = Duration::from_millis(120);

/// Standard error with bars at its end: text written to it stands above them. Clones share it.
///
/// On a terminal text is folded to the columns. Where standard error is none, no bar is shown, and
/// text is written unchanged. In a process of another rank than the first, lines begin with the
/// rank and stand in a log file too.
#[derive(Debug, Clone, Default)]
pub struct Screen {
    bars: MultiProgress,
    log: Arc<OnceLock<RankLog>>,
}

/// Where the lines of a rank in a process of its own go.
#[derive(Debug)]
struct RankLog {
    rank: usize,
    file: Mutex<Option<File>>,
}

impl Screen {
    /// Says that this process runs a rank alone, and not the first. Only the first call counts.
    pub fn of_rank(&self, rank: usize) {
        let _ = self.log.set(RankLog {
            rank,
            file: Mutex::new(None),
        });
    }

    /// Keeps the lines of this process in `rank-N.log` of a folder, which is made if need be. Does
    /// nothing without [`Screen::of_rank`].
    ///
    /// # Errors
    /// When the file cannot be written.
    pub fn keep_log(&self, folder: &Path) -> io::Result<()> {
        let Some(log) = self.log.get() else {
            return Ok(());
        };
        fs::create_dir_all(folder)?;
        let path = folder.join(format!("rank-{}.log", log.rank));
        let file = File::options().append(true).create(true).open(path)?;
        *log.file.lock().unwrap_or_else(PoisonError::into_inner) = Some(file);
        Ok(())
    }

    /// Whether this process runs a rank alone, and not the first.
    pub fn is_of_rank(&self) -> bool {
        self.log.get().is_some()
    }

    /// A line as it is written to standard error.
    pub fn marked(&self, line: &str) -> String {
        let mark = self.log.get().map(RankLog::mark);
        format!("{}{line}", mark.unwrap_or_default())
    }

    /// Writes a line that only the log of this rank needs to have; nothing in the process of the
    /// first rank.
    pub fn note(&self, line: &str) {
        if let Some(log) = self.log.get() {
            log.keep(format!("{line}\n").as_bytes());
        }
    }

    #[cfg(test)]
    fn of(terminal: impl indicatif::TermLike + 'static) -> Self {
        let target = indicatif::ProgressDrawTarget::term_like(Box::new(terminal));
        Self {
            bars: MultiProgress::with_draw_target(target),
            ..Self::default()
        }
    }

    /// Whether bars are shown.
    pub(crate) fn has_bars(&self) -> bool {
        !self.bars.is_hidden()
    }

    /// Does `work` while the bars are off the screen.
    fn above<T>(&self, work: impl FnOnce() -> T) -> T {
        self.bars.suspend(work)
    }

    /// A new bar of `steps` steps below the others.
    pub fn bar(&self, steps: u64, template: &str) -> ProgressBar {
        let bar = self.bars.add(ProgressBar::new(steps));
        // Templates are constants of ours; without one a bar keeps its default style.
        if let Ok(style) = ProgressStyle::with_template(template) {
            bar.set_style(style);
        }
        bar
    }

    /// A bar of the `total` iterations of an evaluation.
    pub(super) fn evaluation(&self, total: usize) -> ProgressBar {
        self.bar(total as u64, "{bar:24} {pos}/{len}  evaluating, {eta} left")
    }

    /// A new bar for work without counted steps.
    pub(super) fn spinner(&self, message: String) -> ProgressBar {
        let bar = self.bar(0, "{spinner} {msg}  {elapsed}");
        bar.set_message(message);
        bar.enable_steady_tick(TICK);
        bar
    }
}

impl RankLog {
    /// What stands before a line of this rank.
    fn mark(&self) -> String {
        format!("[rank {}] ", self.rank)
    }

    /// The rank before each line.
    fn marked(&self, text: &[u8]) -> Vec<u8> {
        let mark = self.mark().into_bytes();
        let lines = text.split_inclusive(|byte| *byte == b'\n');
        lines
            .flat_map(|line| [mark.as_slice(), line].concat())
            .collect()
    }

    /// Adds text to the file. A file that cannot be written does not stop a rank.
    fn keep(&self, text: &[u8]) {
        let mut file = self.file.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(file) = file.as_mut() {
            let _ = file.write_all(text);
        }
    }
}

/// Each call writes to standard error, above the bars.
impl Write for Screen {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if let Some(log) = self.log.get() {
            log.keep(bytes);
            io::stderr().write_all(&log.marked(bytes))?;
            return Ok(bytes.len());
        }
        // All bytes at once, as bars would be drawn over a partial line.
        self.above(|| StandardError.write_all(bytes))?;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        StandardError.flush()
    }
}

/// The bar of an evaluation outside of a training.
#[derive(Debug)]
pub struct EvaluationProgress {
    screen: Screen,
    bar: Option<ProgressBar>,
}

impl EvaluationProgress {
    /// A bar on a screen, for one rank.
    pub fn on(screen: &Screen) -> Self {
        Self {
            screen: screen.clone(),
            bar: None,
        }
    }
}

impl Callback for EvaluationProgress {
    fn on_evaluation_step(&mut self, done: usize, total: usize) {
        if self.screen.has_bars() {
            let bar = self
                .bar
                .get_or_insert_with(|| self.screen.evaluation(total));
            bar.set_position(done as u64);
            if done == total {
                bar.finish_and_clear();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        StepReport,
        metrics::{Progress, Rates, memory::resident_bytes},
    };

    /// A terminal of some columns that records what is written to it.
    #[derive(Debug, Clone)]
    struct Recorder(Arc<Mutex<Vec<String>>>, u16);

    impl Recorder {
        fn of_width(columns: u16) -> Self {
            Self(Arc::default(), columns)
        }

        fn note(&self, what: &str) {
            self.0.lock().unwrap().push(what.to_owned());
        }
    }

    impl indicatif::TermLike for Recorder {
        fn width(&self) -> u16 {
            self.1
        }

        fn move_cursor_up(&self, _: usize) -> io::Result<()> {
            Ok(())
        }

        fn move_cursor_down(&self, _: usize) -> io::Result<()> {
            Ok(())
        }

        fn move_cursor_right(&self, _: usize) -> io::Result<()> {
            Ok(())
        }

        fn move_cursor_left(&self, _: usize) -> io::Result<()> {
            Ok(())
        }

        fn write_line(&self, text: &str) -> io::Result<()> {
            self.note(text);
            Ok(())
        }

        fn write_str(&self, text: &str) -> io::Result<()> {
            self.note(text);
            Ok(())
        }

        fn clear_line(&self) -> io::Result<()> {
            self.note("clear");
            Ok(())
        }

        fn flush(&self) -> io::Result<()> {
            Ok(())
        }
    }

    /// A step of long figures.
    fn report() -> StepReport {
        StepReport {
            step: 100_000,
            loss: 11.0,
            grad_norm: 1.25,
            lr: 3e-4,
            loss_scale: None,
            tokens: 655_360,
            skipped: None,
            skipped_steps: 0,
            data_wait: Duration::ZERO,
            time: Duration::from_secs(5),
        }
    }

    #[test]
    fn a_line_takes_the_bar_off_the_screen_and_puts_it_back_below() {
        let terminal = Recorder::of_width(80);
        let screen = Screen::of(terminal.clone());
        let bar = screen.bar(10, "{pos}/{len} steps");
        bar.set_position(3);
        bar.tick();
        terminal.0.lock().unwrap().clear();
        screen.above(|| terminal.note("a log line"));
        let told = terminal.0.lock().unwrap().join("|");
        let place = |what: &str| told.find(what).unwrap_or_else(|| panic!("{what}: {told}"));
        assert!(place("clear") < place("a log line"), "{told}");
        assert!(place("a log line") < place("3/10 steps"), "{told}");
    }

    #[test]
    fn the_bar_of_the_steps_has_the_figures_of_a_run_in_one_line() {
        let rates = Rates {
            samples_per_step: 64,
            flops_per_token: 1e9,
            peak: Some(1e15),
        };
        for columns in [80, 140] {
            let terminal = Recorder::of_width(columns);
            let progress = Progress::on(&Screen::of(terminal.clone()), 200_000, 99_999);
            let mut progress = progress.with_rates(rates);
            progress.step(&report(), false).unwrap();
            progress.finish();
            let told = terminal.0.lock().unwrap().clone();
            let line = told.iter().rfind(|line| line.contains("loss")).unwrap();
            let memory = resident_bytes().map(|_| "iB  ");
            let wanted = [
                "100000/200000  ",
                "loss 11.0000  ",
                "131.1k tokens/s  ",
                "MFU 13 %  ",
                memory.unwrap_or_default(),
                "138h 53m left",
            ];
            let mut rest = line.as_str();
            for figure in wanted {
                let found = rest.split_once(figure);
                rest = found.unwrap_or_else(|| panic!("no {figure}: {line}")).1;
            }
            let widest = told.iter().map(|line| line.chars().count()).max();
            assert!(widest <= Some(columns.into()), "{told:?}");
        }
    }

    #[test]
    fn evaluating_and_saving_have_bars_of_their_own_while_they_last() {
        let terminal = Recorder::of_width(80);
        let screen = Screen::of(terminal.clone());
        let mut progress = Progress::on(&screen, 20, 4);
        let mut shown = |act: &mut dyn FnMut(&mut Progress)| {
            // Bars are drawn some times a second.
            std::thread::sleep(Duration::from_millis(150));
            terminal.0.lock().unwrap().clear();
            act(&mut progress);
            terminal.0.lock().unwrap().join("|")
        };
        let evaluating = shown(&mut |progress| progress.evaluation(0, 3));
        assert!(evaluating.contains("0/3  evaluating"), "{evaluating}");
        assert!(evaluating.contains("4/20"), "{evaluating}");
        let evaluated = shown(&mut |progress| progress.evaluation(3, 3));
        assert!(!evaluated.contains("evaluating"), "{evaluated}");
        let saving = shown(&mut |progress| progress.saving(4));
        assert!(saving.contains("saving step 4"), "{saving}");
    }
}
