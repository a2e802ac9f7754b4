//! Memory as a limit on the segments of a stage.

use crate::{CheckedArguments, Error, Result};
use merak_partition::StageLoad;
use merak_pipe::Schedule;
use merak_trace::StageProgram;
use merak_zero::ZeroStage;
use std::cell::Cell;

/// The bytes that segments need, and those that a rank has for weights, gradients, optimizer state
/// and activations.
#[derive(Debug)]
pub(super) struct Room {
    limit: usize,
    segments: Vec<Segment>,
    /// For each stage its rank, and the microbatches whose values it keeps at once.
    placement: Vec<usize>,
    live: Vec<usize>,
    /// The fewest bytes that the fullest rank needed under any partition.
    least: Cell<usize>,
}

#[derive(Debug)]
struct Segment {
    /// Bytes of each parameter that it uses, and the last earlier segment that uses it too.
    params: Vec<(usize, Option<usize>)>,
    /// Bytes that a microbatch keeps until its backward, and the most that it needs besides.
    kept: usize,
    besides: usize,
}

impl Room {
    /// Takes the figures from the segments' programs.
    ///
    /// # Errors
    /// When the schedule has no place for a stage.
    pub(super) fn new(
        limit: usize,
        programs: &[StageProgram],
        schedule: &Schedule,
        args: &CheckedArguments,
    ) -> Result<Self> {
        let replicas = match args.zero_stage {
            ZeroStage::Replicated => 1,
            ZeroStage::OptimizerState => args.dp,
        };
        let states = args.zero_config(1).optimizer.state_names().len();
        let uses = |program: &StageProgram, name: &str| {
            program.params().iter().any(|param| param.name == name)
        };
        let segment = |(index, program): (usize, &StageProgram)| {
            let params = program.params().iter().map(|param| {
                let bytes = param.kept_bytes();
                // Gradients and state have four bytes an element.
                let trained = if param.trainable {
                    4 * param.local.numel()
                } else {
                    0
                };
                let before = (0..index)
                    .rev()
                    .find(|&other| uses(&programs[other], &param.name));
                (bytes + trained + trained * states / replicas, before)
            });
            let live = program.live_bytes();
            let most = live.forward.max(live.backward);
            Segment {
                params: params.collect(),
                kept: live.kept,
                besides: most.saturating_sub(live.kept),
            }
        };
        Ok(Self {
            limit,
            segments: programs.iter().enumerate().map(segment).collect(),
            placement: schedule.placement()?,
            live: schedule.live_microbatches(),
            least: Cell::new(usize::MAX),
        })
    }

    /// Whether every rank has room for its stages.
    pub(super) fn holds(&self, stages: &[StageLoad]) -> bool {
        let ranks = self.placement.iter().max().map_or(0, |last| last + 1);
        let mut needed = vec![(0_usize, 0_usize); ranks];
        for ((stage, &rank), &live) in stages.iter().zip(&self.placement).zip(&self.live) {
            let (sum, besides) = &mut needed[rank];
            for segment in &self.segments[stage.segments.clone()] {
                let first = |before: Option<usize>| before.is_none_or(|b| b < stage.segments.start);
                let own = segment.params.iter().filter(|(_, before)| first(*before));
                let params = own.fold(0_usize, |sum, (bytes, _)| sum.saturating_add(*bytes));
                *sum = sum
                    .saturating_add(params)
                    .saturating_add(live.saturating_mul(segment.kept));
                *besides = segment.besides.max(*besides);
            }
        }
        let totals = needed
            .iter()
            .map(|(sum, besides)| sum.saturating_add(*besides));
        let fullest = totals.max().unwrap_or(0);
        self.least.set(self.least.get().min(fullest));
        fullest <= self.limit
    }

    /// The error where no partition was found.
    pub(super) fn refusal(&self) -> Error {
        Error::StageMemory {
            limit: self.limit,
            least: self.least.get(),
        }
    }
}
