//! What each stage recomputes in its backward, as the arguments say.

use crate::{
    CheckedArguments, Error, Recompute, RecomputeOp, Result, TrainSchedule,
    memory::{activation_bytes, held_at_most},
};
use merak_partition::{Partition, recompute_plan};
use merak_pipe::{Schedule, ScheduleKind, StageId};
use merak_trace::{Graph, Op, RecomputePlan, StageCuts, StageProgram};
use std::collections::BTreeMap;

/// The inputs of the choice.
#[derive(Debug, Clone, Copy)]
pub(super) struct Pipeline<'a> {
    pub(super) graph: &'a Graph,
    pub(super) partition: &'a Partition,
    pub(super) cuts: &'a StageCuts,
    pub(super) schedule: &'a Schedule,
    /// The rank of each stage.
    pub(super) placement: &'a [usize],
}

impl Pipeline<'_> {
    /// What each stage recomputes.
    ///
    /// # Errors
    /// [`Error::ActivationBudget`] when full recomputation is still above
    /// `activation_memory_budget`.
    pub(super) fn recompute(&self, args: &CheckedArguments) -> Result<Vec<RecomputePlan>> {
        let stages = 0..self.placement.len();
        if !args.activation_checkpointing {
            return Ok(vec![RecomputePlan::default(); stages.len()]);
        }
        match args.recompute {
            Recompute::Full => {
                let given = args.activation_checkpoint_ratio.as_ref();
                let ratios = ratios(
                    given.map(|list| &list.0[..]),
                    args.train_schedule,
                    stages.len(),
                );
                let most = |stage: usize| {
                    let segments = self.partition.segments_of(stage).len();
                    (segments as f64 * ratios[stage] + 1e-9).floor() as usize
                };
                Ok(stages
                    .map(|stage| self.full(args, stage, most(stage)))
                    .collect())
            }
            Recompute::Selective => {
                let ops = args.recompute_ops.as_deref().unwrap_or(&RecomputeOp::USUAL);
                Ok(stages.map(|stage| self.selective(ops, stage)).collect())
            }
            Recompute::Budget => self.within_budget(args),
        }
    }

    fn recomputes(&self, stage: usize) -> bool {
        !self.schedule.no_recompute.contains(&StageId(stage))
    }

    /// The first `most` segments that may be recomputed, in chunks.
    fn full(&self, args: &CheckedArguments, stage: usize, most: usize) -> RecomputePlan {
        let most = if self.recomputes(stage) { most } else { 0 };
        let chunk = args.checkpoint_num_layers;
        recompute_plan(self.graph, self.partition, stage, chunk, most)
    }

    fn selective(&self, ops: &[RecomputeOp], stage: usize) -> RecomputePlan {
        let nodes = self.cuts.nodes(stage).filter(|&node| {
            let op = &self.graph.nodes()[node].op;
            self.recomputes(stage) && ops.iter().any(|chosen| chosen.is(op))
        });
        RecomputePlan {
            nodes: nodes.collect(),
            ..RecomputePlan::default()
        }
    }

    /// Recomputes the fewest segments per stage with which each rank keeps the budget.
    fn within_budget(&self, args: &CheckedArguments) -> Result<Vec<RecomputePlan>> {
        let mut plans = vec![RecomputePlan::default(); self.placement.len()];
        let budget = args.activation_memory_budget.unwrap_or(usize::MAX);
        for rank in 0..self.schedule.size.ranks {
            let owned = self.placement.iter().enumerate();
            let owned = owned.filter(|(_, owner)| **owner == rank);
            let stages: Vec<_> = owned.map(|(stage, _)| stage).collect();
            let segments = stages
                .iter()
                .map(|&stage| self.partition.segments_of(stage).len());
            let mut least = usize::MAX;
            let mut fits = |most: usize| -> Result<bool> {
                let mut held = BTreeMap::new();
                for &stage in &stages {
                    plans[stage] = self.full(args, stage, most);
                    let plan = &plans[stage];
                    let program = StageProgram::training(self.graph, self.cuts, stage, plan)?;
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
    /// The default of `selective`: large results that are cheap to compute.
    const USUAL: [Self; 3] = [Self::Attention, Self::Activation, Self::Norm];

    /// Whether an operation is of this kind.
    fn is(self, op: &Op) -> bool {
        match self {
            Self::Attention => matches!(op, Op::Attention(_)),
            Self::Activation => matches!(op, Op::Activation(_) | Op::SiluMul),
            Self::Norm => matches!(op, Op::LayerNorm { .. } | Op::RmsNorm { .. }),
            Self::Dropout => matches!(op, Op::Dropout(_)),
        }
    }
}

/// The part of each stage's segments that is recomputed.
///
/// One value `r` is that of the first stage; stage `s` of `S` takes `1 - (1 - r) (S-1) / (S-1-s)`,
/// as fewer of its microbatches are alive, and the last stage 0. Several values go to the stages in
/// order, the last of them to the rest. Under `shifted_critical_path` the last stage but one, which
/// holds a microbatch more, takes the value of the stage before it. Without a value everything is
/// recomputed.
fn ratios(given: Option<&[f64]>, schedule: TrainSchedule, stages: usize) -> Vec<f64> {
    let last = stages - 1;
    let mut ratios: Vec<f64> = match given {
        None | Some([]) => vec![1.0; stages],
        Some([first]) => {
            let of = |stage: usize| match last - stage {
                0 => 0.0,
                behind => 1.0 - (1.0 - first) * last as f64 / behind as f64,
            };
            (0..stages).map(|stage| of(stage).clamp(0.0, 1.0)).collect()
        }
        Some([head @ .., tail]) => {
            let padded = head.iter().chain(std::iter::repeat(tail));
            padded.take(stages).copied().collect()
        }
    };
    let shifted = TrainSchedule::Named(ScheduleKind::ShiftedCriticalPath);
    if schedule == shifted && stages > 2 && given.is_some() {
        ratios[stages - 2] = ratios[stages - 3];
    }
    ratios
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rounded(given: Option<&[f64]>, kind: ScheduleKind, stages: usize) -> Vec<f64> {
        let ratios = ratios(given, TrainSchedule::Named(kind), stages).into_iter();
        ratios.map(|ratio| (ratio * 1e6).round() / 1e6).collect()
    }

    #[test]
    fn a_ratio_falls_with_the_microbatches_that_are_alive() {
        let plain = ScheduleKind::OneFOneB;
        assert_eq!(rounded(Some(&[0.6]), plain, 4), [0.6, 0.4, 0.0, 0.0]);
        assert_eq!(rounded(Some(&[1.0]), plain, 4), [1.0, 1.0, 1.0, 0.0]);
        assert_eq!(rounded(Some(&[0.6]), plain, 1), [0.0]);
        assert_eq!(rounded(None, plain, 3), [1.0; 3]);
    }

    #[test]
    fn the_last_stage_but_one_of_a_shifted_critical_path_does_as_the_one_before() {
        let shifted = ScheduleKind::ShiftedCriticalPath;
        assert_eq!(rounded(Some(&[0.6]), shifted, 4), [0.6, 0.4, 0.4, 0.0]);
        assert_eq!(rounded(Some(&[0.6]), shifted, 2), [0.6, 0.0]);
        assert_eq!(
            rounded(Some(&[0.5, 0.25, 0.0]), shifted, 4),
            [0.5, 0.25, 0.25, 0.0]
        );
    }

    #[test]
    fn a_list_is_padded_with_its_last_value() {
        let plain = ScheduleKind::OneFOneB;
        assert_eq!(
            rounded(Some(&[0.5, 0.25]), plain, 4),
            [0.5, 0.25, 0.25, 0.25]
        );
        assert_eq!(rounded(Some(&[0.5, 0.25]), plain, 2), [0.5, 0.25]);
    }
}
