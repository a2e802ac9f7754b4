//! The progress of work on texts.

use std::{
    io::Write as _,
    time::{Duration, Instant},
};

use indicatif::ProgressBar;
use merak_ckpt::words::Bytes;

use super::screen::Screen;
use crate::data::{TextProgress, TextWork};

/// Time between two lines where there is no bar.
const BETWEEN_LINES: Duration = Duration::from_secs(30);

/// How far a tokenizer's training, or tokenizing, has come: a bar on a terminal, a line now and
/// then elsewhere.
#[derive(Debug)]
pub struct TokenizingProgress {
    screen: Screen,
    /// The bar of the work that goes on.
    bar: Option<(TextWork, ProgressBar)>,
    /// When the last line was written, or the work began.
    last: Instant,
}

impl TokenizingProgress {
    /// A bar on a screen; where it shows none, lines.
    pub fn on(screen: &Screen) -> Self {
        Self {
            screen: screen.clone(),
            bar: None,
            last: Instant::now(),
        }
    }

    /// Shows how far the work has come.
    pub fn show(&mut self, progress: TextProgress) {
        let TextProgress { work, done, total } = progress;
        let name = match work {
            TextWork::Training => "training the tokenizer",
            TextWork::Tokenizing => "tokenizing",
        };
        if !self.screen.has_bars() {
            if self.last.elapsed() >= BETWEEN_LINES {
                self.last = Instant::now();
                let line = format!("{name}: {} of {}\n", Bytes(done), Bytes(total));
                // Progress that cannot be written ends no work.
                let _ = self.screen.write_all(line.as_bytes());
            }
            return;
        }
        if self.bar.as_ref().is_some_and(|(shown, _)| *shown != work) {
            self.clear();
        }
        let (_, bar) = self.bar.get_or_insert_with(|| {
            let template =
                format!("{{bar:24}} {{binary_bytes}}/{{binary_total_bytes}}  {name}, {{eta}} left");
            (work, self.screen.bar(total, &template))
        });
        bar.set_position(done);
    }

    fn clear(&mut self) {
        if let Some((_, bar)) = self.bar.take() {
            bar.finish_and_clear();
        }
    }
}

/// Work that has ended or failed leaves no bar.
impl Drop for TokenizingProgress {
    fn drop(&mut self) {
        self.clear();
    }
}
