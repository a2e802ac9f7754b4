//! What each stage recomputes in its backward.

use super::{LaidOut, ScheduleChoice, program};
use crate::{
    Error, Result,
    memory::{activation_bytes, held_at_most},
    recompute_plan,
};
use merak_pipe::{Schedule, ScheduleKind, StageId};
use merak_trace::{
    Op, RecomputePlan,
    op::{Class, RegionKind},
};
use std::collections::BTreeMap;

/// The values that backwards recompute.
#[derive(Debug, Clone, PartialEq)]
pub enum Recompute {
    /// Nothing.
    Nothing,
    /// Everything inside chunks of `chunk` segments; 0 is nothing.
    Full {
        /// Segments of a chunk.
        chunk: usize,
        /// The part of each stage's segments that is recomputed. One value `r` is that of the first
        /// stage; stage `s` of `S` takes `1 - (1 - r) (S-1) / (S-1-s)`, as fewer of its
        /// microbatches are alive, and the last stage 0. Several values go to the stages in order,
        /// the last of them to the rest. Without a value everything is recomputed.
        ratios: Vec<f64>,
    },
    /// The results of operations.
    Selective {
        /// The operations.
        ops: Vec<RecomputeOp>,
    },
    /// As few chunks on each rank as keep a budget.
    Budget {
        /// Segments of a chunk.
        chunk: usize,
        /// The most bytes of a rank's activations.
        bytes: usize,
    },
}

merak_mpu::named_enum! {
    /// A kind of operation whose results can be recomputed.
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    pub enum RecomputeOp {
        /// The core of attention: scores, softmax and their product with the values.
        Attention = "attention",
        /// Activation functions, gated ones included.
        Activation = "activation",
        /// Layer and RMS norms.
        Norm = "norm",
        /// Dropout.
        Dropout = "dropout",
        /// The joins of slices of the sequence, in front of split layers and of attentions.
        Gather = "gather",
    }
}

/// What the stages of a schedule recompute is chosen for that schedule.
struct Choice<'a> {
    stages: LaidOut<'a>,
    schedule: &'a Schedule,
    /// The rank of each stage.
    placement: Vec<usize>,
}

impl LaidOut<'_> {
    /// The recomputation of each stage under a schedule.
    ///
    /// # Errors
    /// [`Error::ActivationBudget`] when full recomputation is still above the budget.
    pub(super) fn recompute(&self, schedule: &Schedule) -> Result<Vec<RecomputePlan>> {
        let choice = Choice {
            stages: *self,
            schedule,
            placement: schedule.placement()?,
        };
        let stages = 0..choice.placement.len();
        Ok(match &self.options.recompute {
            Recompute::Nothing => vec![RecomputePlan::default(); stages.len()],
            Recompute::Full {
                chunk,
                ratios: given,
            } => {
                let ratios = ratios(given, self.options.schedule, stages.len());
                let most = |stage: usize| {
                    let segments = self.partition.segments_of(stage).len();
                    (segments as f64 * ratios[stage] + 1e-9).floor() as usize
                };
                let plan = |stage| choice.full(*chunk, stage, most(stage));
                stages.map(plan).collect()
            }
            Recompute::Selective { ops } => {
                stages.map(|stage| choice.selective(ops, stage)).collect()
            }
            Recompute::Budget { chunk, bytes } => choice.within_budget(*chunk, *bytes)?,
        })
    }
}

impl Choice<'_> {
    fn recomputes(&self, stage: usize) -> bool {
        !self.schedule.no_recompute.contains(&StageId(stage))
    }

    /// The first `most` segments that may be recomputed, in chunks.
    fn full(&self, chunk: usize, stage: usize, most: usize) -> RecomputePlan {
        let most = if self.recomputes(stage) { most } else { 0 };
        recompute_plan(self.stages.graph, self.stages.partition, stage, chunk, most)
    }

    fn selective(&self, ops: &[RecomputeOp], stage: usize) -> RecomputePlan {
        let nodes = self.stages.cuts.nodes(stage).filter(|&node| {
            let op = &self.stages.graph.nodes()[node].op;
            self.recomputes(stage) && ops.iter().any(|chosen| chosen.is(op))
        });
        RecomputePlan {
            nodes: nodes.collect(),
            ..RecomputePlan::default()
        }
    }

    /// Recomputes the fewest segments per stage with which each rank keeps the budget.
    fn within_budget(&self, chunk: usize, budget: usize) -> Result<Vec<RecomputePlan>> {
        let LaidOut {
            graph,
            partition,
            cuts,
            ..
        } = self.stages;
        let mut plans = vec![RecomputePlan::default(); self.placement.len()];
        for rank in 0..self.schedule.size.ranks {
            let owned = self.placement.iter().enumerate();
            let owned = owned.filter(|(_, owner)| **owner == rank);
            let stages: Vec<_> = owned.map(|(stage, _)| stage).collect();
            let segments = stages
                .iter()
                .map(|&stage| partition.segments_of(stage).len());
            let mut least = usize::MAX;
            let mut fits = |most: usize| -> Result<bool> {
                let mut held = BTreeMap::new();
                for &stage in &stages {
                    plans[stage] = self.full(chunk, stage, most);
                    let program = program(graph, cuts, stage, &plans[stage])?;
                    let microbatches = self.schedule.size.microbatches;
                    held.insert(stage, held_at_most(&program, microbatches));
                }
                let actions = &self.schedule.actions[rank];
                let needed = activation_bytes(actions, &held);
                least = least.min(needed);
                Ok(needed <= budget)
            };
            let mut most = 0..=segments.max().unwrap_or(0);
            let found = most.try_fold(false, |found, most| Ok::<_, Error>(found || fits(most)?))?;
            if !found {
                return Err(Error::ActivationBudget {
                    rank,
                    budget,
                    least,
                });
            }
        }
        Ok(plans)
    }
}

impl RecomputeOp {
    /// Those with large results that are cheap to compute.
    pub const USUAL: [Self; 3] = [Self::Attention, Self::Activation, Self::Norm];

    /// Whether an operation is of this kind.
    fn is(self, op: &Op) -> bool {
        let class = op.class();
        match self {
            Self::Attention => class == Class::Attention,
            Self::Activation => class == Class::Activation,
            Self::Norm => matches!(class, Class::LayerNorm | Class::RmsNorm),
            Self::Dropout => class == Class::Dropout,
            Self::Gather => {
                matches!(class, Class::Region(region) if matches!(region.kind, RegionKind::AllGather { .. }))
            }
        }
    }
}

/// The part of each stage's segments that is recomputed, by [`Recompute::Full`]. Under
/// `shifted_critical_path` the last stage but one, which holds a microbatch more, takes the value
/// of the stage before it.
fn ratios(given: &[f64], schedule: ScheduleChoice, stages: usize) -> Vec<f64> {
    let last = stages - 1;
    let mut ratios: Vec<f64> = match given {
        [] => vec![1.0; stages],
        [first] => {
            let of = |stage: usize| match last - stage {
                0 => 0.0,
                behind => 1.0 - (1.0 - first) * last as f64 / behind as f64,
            };
            (0..stages).map(|stage| of(stage).clamp(0.0, 1.0)).collect()
        }
        [head @ .., tail] => {
            let padded = head.iter().chain(std::iter::repeat(tail));
            padded.take(stages).copied().collect()
        }
    };
    let shifted = ScheduleChoice::Named(ScheduleKind::ShiftedCriticalPath);
    if schedule == shifted && stages > 2 && !given.is_empty() {
        ratios[stages - 2] = ratios[stages - 3];
    }
    ratios
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rounded(given: &[f64], kind: ScheduleKind, stages: usize) -> Vec<f64> {
        let ratios = ratios(given, ScheduleChoice::Named(kind), stages).into_iter();
        ratios.map(|ratio| (ratio * 1e6).round() / 1e6).collect()
    }

    #[test]
    fn a_ratio_falls_with_the_microbatches_that_are_alive() {
        let plain = ScheduleKind::OneFOneB;
        assert_eq!(rounded(&[0.6], plain, 4), [0.6, 0.4, 0.0, 0.0]);
        assert_eq!(rounded(&[1.0], plain, 4), [1.0, 1.0, 1.0, 0.0]);
        assert_eq!(rounded(&[0.6], plain, 1), [0.0]);
        assert_eq!(rounded(&[], plain, 3), [1.0; 3]);
    }

    #[test]
    fn the_last_stage_but_one_of_a_shifted_critical_path_does_as_the_one_before() {
        let shifted = ScheduleKind::ShiftedCriticalPath;
        assert_eq!(rounded(&[0.6], shifted, 4), [0.6, 0.4, 0.4, 0.0]);
        assert_eq!(rounded(&[0.6], shifted, 2), [0.6, 0.0]);
        assert_eq!(
            rounded(&[0.5, 0.25, 0.0], shifted, 4),
            [0.5, 0.25, 0.25, 0.0]
        );
    }

    #[test]
    fn a_list_is_padded_with_its_last_value() {
        let plain = ScheduleKind::OneFOneB;
        assert_eq!(rounded(&[0.5, 0.25], plain, 4), [0.5, 0.25, 0.25, 0.25]);
        assert_eq!(rounded(&[0.5, 0.25], plain, 2), [0.5, 0.25]);
    }
}
