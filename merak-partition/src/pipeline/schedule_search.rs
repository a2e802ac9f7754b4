//! A schedule that is searched for the stages of a model.
//!
//! Memory is counted in bytes, rank by rank, as in [`RankPrograms::training_bytes`]. A rank
//! has room for what it needs all the time (weights, gradients, optimizer state, batches) and for
//! its microbatches:
//!
//! - A forward leaves what its backward reads; recomputation makes that little.
//! - A whole backward needs the recomputed values too, but only while it runs.
//! - The half `I` leaves more than it found: the recomputed values and the gradients of layers'
//!   outputs wait for `W`.
//!
//! So the search splits a backward where there is room for it, and leaves it whole elsewhere.

use super::{LaidOut, PipelineOptions, Recompute, program};
use crate::{
    Error, PhaseCosts, RankPrograms, Result, StepCosts,
    costs::{hop, of_stages},
    memory::held_at_most,
};
use merak_pipe::{
    Auto, AutoLimits, ByteLimits, Costs, Schedule, ScheduleKind, Size, auto, simulate,
};
use merak_trace::{RecomputePlan, StageProgram};
use std::sync::Arc;

/// The result of a search.
pub(super) struct Found {
    pub(super) schedule: Schedule,
    /// The recomputation of each stage under that schedule.
    pub(super) recompute: Vec<RecomputePlan>,
    /// The search that found the schedule, unless it is the one that the search starts from.
    pub(super) search: Option<Auto>,
}

/// The programs of all stages.
type Programs = Vec<Arc<StageProgram>>;

/// Searches a schedule for the stages.
///
/// No rank needs more bytes than the limit of memory, or where that is unset, than the fullest rank
/// under `interleaved_1f1b` (which with one stage per rank keeps more microbatches than `1f1b`).
/// Under recomputation by a budget that budget is the limit of each rank's activations instead, and
/// the limit of memory counts where it is set.
///
/// What is recomputed decides costs and bytes, and may in turn depend on the schedule: it is chosen
/// under `interleaved_1f1b`, and again under the schedule that was found. The shortest named
/// schedule within the limits stays where the search finds none, or none that is shorter.
///
/// # Errors
/// When the size is not legal, an operation has no gradient, `interleaved_1f1b` does not keep the
/// budget, or no schedule that was tried keeps the limit of memory.
pub(super) fn search(stages: LaidOut<'_>, costs: &dyn StepCosts) -> Result<Found> {
    let options = stages.options;
    let size = options.size;
    let usual = ScheduleKind::Interleaved.generate(size)?;
    let recompute = stages.recompute(&usual)?;
    let programs = stages.programs(&recompute)?;
    let by_stage = stage_costs(&programs, costs);
    let as_usual = simulate(&usual, &by_stage)?.makespan;
    let keeping = stages.keeping(&recompute, &programs)?;
    let needed = fullest(options, &usual, &programs)?;
    let budget = match options.recompute {
        Recompute::Budget { bytes, .. } => Some(bytes),
        _ => None,
    };
    let limit = match (options.memory_limit, budget) {
        (Some(limit), _) => limit,
        (None, Some(_)) => usize::MAX,
        (None, None) => needed,
    };
    let bytes = match budget {
        Some(budget) => budget_limits(size, budget, [&programs, &keeping]),
        None => all_limits(options, limit, [&programs, &keeping]),
    };
    let limits = AutoLimits {
        bytes: Some(bytes),
        ..AutoLimits::default()
    };
    let found = match auto(size, &by_stage, &limits) {
        Ok(found) => found,
        Err(merak_pipe::Error::ByteLimit { .. }) => return stages.named(costs, limit),
        Err(error) => return Err(error.into()),
    };
    let chosen = match stages.recompute(&found.schedule) {
        Ok(chosen) => chosen,
        Err(Error::ActivationBudget { .. }) => return stages.named(costs, limit),
        Err(error) => return Err(error),
    };
    let programs = stages.programs(&chosen)?;
    let keeps = fullest(options, &found.schedule, &programs)? <= limit;
    // A limit that the usual schedule does not keep is worth a longer step.
    let is_short = found.simulation.makespan <= as_usual || needed > limit;
    if !(keeps && is_short) {
        return stages.named(costs, limit);
    }
    Ok(Found {
        schedule: found.schedule.clone(),
        recompute: chosen,
        search: Some(found),
    })
}

impl LaidOut<'_> {
    /// The shortest named schedule with as many stages per rank under which no rank needs more
    /// bytes.
    fn named(&self, costs: &dyn StepCosts, limit: usize) -> Result<Found> {
        let options = self.options;
        let (mut shortest, mut least) = (None, usize::MAX);
        for kind in ScheduleKind::ALL {
            let schedule = match kind.generate(options.size) {
                Ok(schedule) if kind.is_training() => schedule,
                _ => continue,
            };
            let recompute = match self.recompute(&schedule) {
                Err(Error::ActivationBudget { .. }) => continue,
                chosen => chosen?,
            };
            let programs = self.programs(&recompute)?;
            let needed = fullest(options, &schedule, &programs)?;
            least = least.min(needed);
            let makespan = simulate(&schedule, &stage_costs(&programs, costs))?.makespan;
            let is_shorter = shortest.as_ref().is_none_or(|(time, _)| makespan < *time);
            if needed <= limit && is_shorter {
                let found = Found {
                    schedule,
                    recompute,
                    search: None,
                };
                shortest = Some((makespan, found));
            }
        }
        let none = Error::ScheduleMemory {
            limit,
            needed: least,
        };
        shortest.map(|(_, found)| found).ok_or(none)
    }
}

/// The bytes that the fullest rank needs to train under a schedule.
fn fullest(options: &PipelineOptions, schedule: &Schedule, programs: &Programs) -> Result<usize> {
    let placement = schedule.placement()?;
    let need = |(rank, actions): (usize, &Vec<_>)| {
        let own = placement
            .iter()
            .enumerate()
            .filter(|(_, owner)| **owner == rank);
        let own = own.map(|(stage, _)| (stage, Arc::clone(&programs[stage])));
        let own = RankPrograms::of(own.collect());
        options
            .training_bytes(&own, actions, schedule.size.microbatches)
            .total()
    };
    let ranks = schedule.actions.iter().enumerate();
    Ok(ranks.map(need).max().unwrap_or(0))
}

/// The costs of each stage's phases and of the messages between them.
pub(super) fn stage_costs(programs: &Programs, costs: &dyn StepCosts) -> Costs {
    let phases = programs.iter();
    let phases = phases.map(|program| PhaseCosts::of(program, costs));
    let hops = programs.iter().take(programs.len().saturating_sub(1));
    let hops = hops.map(|program| hop(&program.send, costs));
    of_stages(&phases.collect::<Vec<_>>(), hops.collect())
}

impl LaidOut<'_> {
    /// The programs of the stages with what they recompute.
    pub(super) fn programs(&self, recompute: &[RecomputePlan]) -> Result<Programs> {
        let plans = recompute.iter().enumerate();
        let program = |(stage, plan)| program(self.graph, self.cuts, stage, plan).map(Arc::new);
        plans.map(program).collect()
    }

    /// The programs of stages that recompute nothing.
    fn keeping(&self, recompute: &[RecomputePlan], programs: &Programs) -> Result<Programs> {
        let nothing = RecomputePlan::default();
        let keeping = |(stage, plan): (usize, &RecomputePlan)| {
            if *plan == nothing {
                return Ok(Arc::clone(&programs[stage]));
            }
            program(self.graph, self.cuts, stage, &nothing).map(Arc::new)
        };
        recompute.iter().enumerate().map(keeping).collect()
    }
}

/// Limits of all that a rank needs, for stages as they recompute and as they keep all values.
fn all_limits(options: &PipelineOptions, limit: usize, stages: [&Programs; 2]) -> ByteLimits {
    let size = options.size;
    let fixed = |stage: usize| {
        let needs = stages.map(|programs| {
            let own = RankPrograms::of(vec![(stage, Arc::clone(&programs[stage]))]);
            options.training_bytes(&own, &[], size.microbatches).total()
        });
        needs[0].max(needs[1]) as u64
    };
    let fixed = (0..size.stages()).map(fixed).collect();
    let [stages, without_recompute] = stages.map(|programs| {
        let live = programs.iter().map(|program| program.live_bytes());
        live.map(|live| options.value_width.stage(&live)).collect()
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
        held.collect()
    });
    ByteLimits {
        stages,
        without_recompute,
        fixed: Vec::new(),
        peaks: vec![budget as u64; size.ranks],
    }
}
