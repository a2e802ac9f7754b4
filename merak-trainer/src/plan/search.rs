//! `train_schedule = "auto"`: a schedule for the model's own stages.
//!
//! Memory is counted in bytes, rank by rank, as in [`Plan::memory`](crate::Plan::memory). A rank
//! has room for what it needs all the time (weights, gradients, optimizer state, batches) and for
//! its microbatches:
//!
//! - A forward leaves what its backward reads; recomputation makes that little.
//! - A whole backward needs the recomputed values too, but only while it runs.
//! - The half `I` leaves more than it found: the recomputed values and the gradients of layers'
//!   outputs wait for `W`.
//!
//! So the search splits a backward where there is room for it, and leaves it whole elsewhere.

use crate::{
    CheckedArguments, CostModel, Error, Recompute, Result,
    memory::{held_at_most, stage_bytes, training_need},
    plan::RankPrograms,
};
use merak_pipe::{
    Auto, AutoLimits, ByteLimits, Costs, Schedule, ScheduleKind, Size, auto, simulate,
};
use merak_trace::{Graph, RecomputePlan, StageCuts, StageProgram};
use std::sync::Arc;

/// The stages that a schedule is searched for, and what decides their costs.
#[derive(Debug, Clone, Copy)]
pub(super) struct Stages<'a> {
    pub(super) graph: &'a Graph,
    pub(super) cuts: &'a StageCuts,
    pub(super) costs: &'a CostModel,
}

/// The result of a search.
pub(super) struct Found {
    pub(super) schedule: Schedule,
    /// What each stage recomputes under that schedule.
    pub(super) recompute: Vec<RecomputePlan>,
    /// How the schedule was found, unless it is the one that the search starts from.
    pub(super) search: Option<Auto>,
}

/// The programs of all stages.
type Programs = Vec<Arc<StageProgram>>;

/// Searches a schedule for the stages.
///
/// No rank needs more bytes than `autopipe.memory_limit`, or where that is unset, than the fullest
/// rank under `interleaved_1f1b` (with one stage per rank that is `1f1b`). Under recomputation by
/// `activation_memory_budget` that budget is the limit of each rank's activations instead, and
/// `autopipe.memory_limit` counts where it is set.
///
/// What is recomputed decides costs and bytes, and may in turn depend on the schedule: it is chosen
/// under `interleaved_1f1b`, and again under the schedule that was found. `interleaved_1f1b` stays
/// where only it keeps the limits, or nothing shorter was found.
///
/// # Errors
/// When the size is not legal, an operation has no gradient, or `interleaved_1f1b` does not keep
/// the budget.
pub(super) fn search(
    stages: &Stages<'_>,
    args: &CheckedArguments,
    recompute_under: impl Fn(&Schedule) -> Result<Vec<RecomputePlan>>,
) -> Result<Found> {
    let size = args.pipeline_size();
    let usual = ScheduleKind::Interleaved.generate(size)?;
    let recompute = recompute_under(&usual)?;
    let programs = stages.programs(&recompute)?;
    let costs = stages.costs_of(&programs);
    let as_usual = simulate(&usual, &costs)?.makespan;
    let keeping = stages.keeping(&recompute, &programs)?;
    let unchanged = Found {
        schedule: usual.clone(),
        recompute,
        search: None,
    };
    let budget = args.activation_memory_budget;
    let budget =
        budget.filter(|_| args.activation_checkpointing && args.recompute == Recompute::Budget);
    let limit = match (args.autopipe.memory_limit, budget) {
        (Some(limit), _) => limit,
        (None, Some(_)) => usize::MAX,
        (None, None) => fullest(args, &usual, &programs)?,
    };
    let bytes = match budget {
        Some(budget) => budget_limits(size, budget, [&programs, &keeping]),
        None => all_limits(args, limit, [&programs, &keeping]),
    };
    let limits = AutoLimits {
        bytes: Some(bytes),
        ..AutoLimits::default()
    };
    let found = match auto(size, &costs, &limits) {
        Ok(found) => found,
        Err(merak_pipe::Error::ByteLimit { .. }) => return Ok(unchanged),
        Err(error) => return Err(error.into()),
    };
    let recompute = match recompute_under(&found.schedule) {
        Ok(recompute) => recompute,
        Err(Error::ActivationBudget { .. }) => return Ok(unchanged),
        Err(error) => return Err(error),
    };
    let programs = stages.programs(&recompute)?;
    if found.simulation.makespan > as_usual || fullest(args, &found.schedule, &programs)? > limit {
        return Ok(unchanged);
    }
    Ok(Found {
        schedule: found.schedule.clone(),
        recompute,
        search: Some(found),
    })
}

/// The bytes that the fullest rank needs to train under a schedule.
fn fullest(args: &CheckedArguments, schedule: &Schedule, programs: &Programs) -> Result<usize> {
    let placement = schedule.placement()?;
    let need = |(rank, actions): (usize, &Vec<_>)| {
        let own = placement
            .iter()
            .enumerate()
            .filter(|(_, owner)| **owner == rank);
        let own = own.map(|(stage, _)| (stage, Arc::clone(&programs[stage])));
        let own = RankPrograms::of(own.collect());
        training_need(args, &own, actions, schedule.size.microbatches).total()
    };
    let ranks = schedule.actions.iter().enumerate();
    Ok(ranks.map(need).max().unwrap_or(0))
}

impl Stages<'_> {
    /// The costs of each stage's phases and of the messages between them.
    pub(super) fn costs(&self, recompute: &[RecomputePlan]) -> Result<Costs> {
        Ok(self.costs_of(&self.programs(recompute)?))
    }

    fn programs(&self, recompute: &[RecomputePlan]) -> Result<Programs> {
        let program = |(stage, plan)| {
            let program = StageProgram::training(self.graph, self.cuts, stage, plan)?;
            Ok(Arc::new(program))
        };
        recompute.iter().enumerate().map(program).collect()
    }

    fn costs_of(&self, programs: &Programs) -> Costs {
        let phases = programs.iter().map(|program| self.costs.phases(program));
        let phases: Vec<_> = phases.collect();
        let hops = programs.iter().take(programs.len().saturating_sub(1));
        Costs {
            forward: phases.iter().map(|costs| costs.forward).collect(),
            input_grad: phases.iter().map(|costs| costs.input_grad).collect(),
            weight_grad: phases.iter().map(|costs| costs.weight_grad).collect(),
            recompute: phases.iter().map(|costs| costs.recompute).collect(),
            hop: hops.map(|program| self.costs.hop(&program.send)).collect(),
            overlap: 1.0,
        }
    }

    /// The programs of stages that recompute nothing.
    fn keeping(&self, recompute: &[RecomputePlan], programs: &Programs) -> Result<Programs> {
        let nothing = RecomputePlan::default();
        let program = |(stage, plan): (usize, &RecomputePlan)| {
            if *plan == nothing {
                return Ok(Arc::clone(&programs[stage]));
            }
            let program = StageProgram::training(self.graph, self.cuts, stage, &nothing)?;
            Ok(Arc::new(program))
        };
        recompute.iter().enumerate().map(program).collect()
    }
}

/// Limits of all that a rank needs, for stages as they recompute and as they keep all values.
fn all_limits(args: &CheckedArguments, limit: usize, stages: [&Programs; 2]) -> ByteLimits {
    let size = args.pipeline_size();
    let fixed = |stage: usize| {
        let needs = stages.map(|programs| {
            let own = RankPrograms::of(vec![(stage, Arc::clone(&programs[stage]))]);
            training_need(args, &own, &[], size.microbatches).total()
        });
        needs[0].max(needs[1]) as u64
    };
    let fixed = (0..size.stages()).map(fixed).collect();
    let [stages, without_recompute] = stages.map(|programs| {
        let live = programs.iter().map(|program| program.live_bytes());
        live.map(|live| stage_bytes(&live)).collect()
    });
    ByteLimits {
        stages,
        without_recompute,
        fixed,
        peaks: vec![limit as u64; size.ranks],
    }
}

/// Limits of activations alone, counted as for the budget.
fn budget_limits(size: Size, budget: usize, stages: [&Programs; 2]) -> ByteLimits {
    let [stages, without_recompute] = stages.map(|programs| {
        let held = programs
            .iter()
            .map(|program| held_at_most(program, size.microbatches));
        held.map(|held| stage_bytes(&held)).collect()
    });
    ByteLimits {
        stages,
        without_recompute,
        fixed: Vec::new(),
        peaks: vec![budget as u64; size.ranks],
    }
}
