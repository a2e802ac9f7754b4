//! Stages by search: the partition whose simulated step is shortest.

mod autopipe;
mod exact;
mod loads;
mod memory_limit;
mod scheduled;
mod step_time;

pub use autopipe::autopipe;
pub use exact::{ExactOptions, exact};
pub use loads::{SegmentCosts, StageLoad};
pub use memory_limit::{RankMemory, SegmentBytes};
pub use scheduled::{Scheduled, lay_out};
pub use step_time::{OneFOneB, StepTime};

use crate::{Error, Result};
use merak_pipe::Size;
use serde::Serialize;
use std::fmt;

/// Checks what a search assumes of its objective.
///
/// # Errors
/// [`Error::Microbatches`], and those of [`StepTime::check`].
fn check_objective(objective: &impl StepTime, num_stages: usize) -> Result<()> {
    let found = objective.num_microbatches();
    let most = Size::MAX_MICROBATCHES_TIMES_STAGES / num_stages.max(1);
    if !(1..=most).contains(&found) {
        return Err(Error::Microbatches {
            found,
            most,
            num_stages,
        });
    }
    objective.check()
}

/// The partition that a search found.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[non_exhaustive]
pub struct Found {
    /// Stage `s` has segments `bounds[s]..bounds[s + 1]`.
    pub bounds: Vec<usize>,
    /// Its step time, in the unit of the costs.
    pub step_time: f64,
    /// Partitions whose step was simulated.
    pub tried: usize,
    /// Why the search ended.
    pub stopped: Stopped,
}

/// Why a search ended; prints as a clause of a report.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Stopped {
    /// No partition is better.
    Proven,
    /// No move from the partitions found leads to a new one.
    NoMoves,
    /// The limit of partitions was reached; there may be a better one.
    Limit,
}

impl fmt::Display for Stopped {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Proven => "no partition is better",
            Self::NoMoves => "no move led further",
            Self::Limit => "the limit of the search was reached",
        })
    }
}

/// The best partition so far.
#[derive(Debug)]
struct Best {
    bounds: Vec<usize>,
    step_time: f64,
    tried: usize,
}

impl Best {
    fn new() -> Self {
        Self {
            bounds: Vec::new(),
            step_time: f64::INFINITY,
            tried: 0,
        }
    }

    /// Simulates a partition and keeps it where it is better than all before; gives its step time,
    /// if it is allowed.
    ///
    /// # Errors
    /// [`Error::NotAStepTime`].
    fn offer(
        &mut self,
        costs: &SegmentCosts,
        bounds: &[usize],
        objective: &impl StepTime,
    ) -> Result<Option<f64>> {
        self.tried += 1;
        let Some(time) = objective.step_time(&costs.loads(bounds)) else {
            return Ok(None);
        };
        if !(time.is_finite() && time >= 0.0) {
            return Err(Error::NotAStepTime {
                bounds: bounds.to_vec(),
                found: time,
            });
        }
        if self.bounds.is_empty() || time < self.step_time {
            (self.bounds, self.step_time) = (bounds.to_vec(), time);
        }
        Ok(Some(time))
    }

    fn found(self, stopped: Stopped) -> Found {
        Found {
            bounds: self.bounds,
            step_time: self.step_time,
            tried: self.tried,
            stopped,
        }
    }
}
