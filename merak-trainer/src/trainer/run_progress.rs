//! How far a run has come, and what its last steps ran.

use super::run_length::RunLength;
use crate::{
    data::{DataPosition, TrainingOrder},
    error::{ConfigError, Error, Result},
};
use merak_pipe::Span;
use std::{
    collections::VecDeque,
    time::{Duration, Instant},
};

/// The length of a run, and the steps that are done of it.
#[derive(Debug)]
pub(super) struct RunProgress {
    pub(super) length: RunLength,
    /// Optimizer steps done, skipped ones included.
    pub(super) global_step: usize,
    /// Tokens of the global batches of these steps, each at its own size.
    pub(super) tokens: u64,
    /// Steps that were done when training began or went on.
    pub(super) first_step: usize,
}

impl RunProgress {
    /// The start of a run.
    pub(super) fn new(length: RunLength) -> Self {
        Self {
            length,
            global_step: 0,
            tokens: 0,
            first_step: 0,
        }
    }

    /// Counts a step.
    pub(super) fn advance(&mut self, tokens: u64) {
        self.global_step += 1;
        self.tokens += tokens;
    }

    /// Whether all steps are done.
    pub(super) fn is_done(&self) -> bool {
        self.global_step >= self.length.total_steps
    }

    /// The order of training; an error without training data.
    pub(super) fn order(&self) -> Result<&TrainingOrder> {
        self.length
            .order
            .as_ref()
            .ok_or(Error::Config(ConfigError::MissingKey {
                key: "data.path",
                advice: "training needs data".to_owned(),
            }))
    }

    /// How far the run has come in its data.
    pub(super) fn position(&self) -> DataPosition {
        let order = self.length.order.as_ref();
        order
            .map(|order| order.position_after(self.global_step))
            .unwrap_or_default()
    }

    /// Passes over the data, the last one as a fraction.
    pub(super) fn epochs(&self) -> f64 {
        let order = self.length.order.as_ref();
        order.map_or(0.0, |order| order.epochs_after(self.global_step))
    }

    /// Whether the last step done was the last of a pass over the data.
    pub(super) fn ends_epoch(&self) -> bool {
        let order = self.length.order.as_ref();
        order.is_some_and(|order| order.ends_epoch(self.global_step - 1))
    }
}

/// What a rank ran in one step, and how long the step took, update included.
#[derive(Debug, Clone, PartialEq)]
pub struct StepRecord {
    /// What ran when, in seconds since the moment of
    /// [`Member::epoch`](merak_mpu::Member::epoch).
    pub spans: Vec<Span>,
    /// The instructions before and after them.
    pub laps: Vec<Lap>,
    /// When the step began.
    pub start: Instant,
    /// The whole step.
    pub time: Duration,
}

/// An instruction besides the actions of the schedule, by the rank's own clock.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Lap {
    /// The instruction.
    pub instruction: Instruction,
    /// When it began.
    pub start: Instant,
    /// How long it took.
    pub time: Duration,
}

/// What a rank does in a step besides the actions of its schedule.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Instruction {
    /// Waits for the batches of the step.
    LoadMicroBatch,
    /// Adds the gradients of tied weights, and reduces gradients over replicas as far as the
    /// backward has not.
    ReduceGrads,
    /// Steps the optimizer.
    OptimizerStep,
}

/// Steps whose records are kept.
const KEPT: usize = 32;

/// What a rank ran last, and in its last steps.
#[derive(Debug, Default)]
pub(super) struct Records {
    /// The last step or generation.
    pub(super) timeline: Vec<Span>,
    /// The other instructions of the step under way.
    laps: Vec<Lap>,
    steps: VecDeque<StepRecord>,
    has_dropped_first: bool,
}

impl Records {
    /// Keeps the timeline as that of a step. The first step is dropped once there is another.
    pub(super) fn note(&mut self, start: Instant, time: Duration) {
        let is_full = self.steps.len() == KEPT;
        let only_has_first = self.steps.len() == 1 && !self.has_dropped_first;
        if is_full || only_has_first {
            self.steps.pop_front();
            self.has_dropped_first = true;
        }
        self.steps.push_back(StepRecord {
            spans: self.timeline.clone(),
            laps: std::mem::take(&mut self.laps),
            start,
            time,
        });
    }

    /// Keeps the time of an instruction of the step under way, from `start` to now, and returns it.
    pub(super) fn lap(&mut self, instruction: Instruction, start: Instant) -> Duration {
        let time = start.elapsed();
        self.laps.push(Lap {
            instruction,
            start,
            time,
        });
        time
    }

    /// Forgets the instructions of a step that is not made.
    pub(super) fn begin(&mut self) {
        self.laps.clear();
    }

    /// How much of the last step the rank waited for batches.
    pub(super) fn data_wait(&self) -> Duration {
        let laps = self.last().map_or(&[][..], |record| &record.laps);
        let loads = laps
            .iter()
            .filter(|lap| lap.instruction == Instruction::LoadMicroBatch);
        loads.map(|lap| lap.time).sum()
    }

    /// The last step.
    pub(super) fn last(&self) -> Option<&StepRecord> {
        self.steps.back()
    }

    /// The last steps.
    pub(super) fn steps(&self) -> impl ExactSizeIterator<Item = &StepRecord> {
        self.steps.iter()
    }
}
