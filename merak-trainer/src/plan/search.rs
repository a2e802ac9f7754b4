//! `train_schedule = "auto"`: a schedule for the model's own stages.

use crate::{CostModel, Error, Result};
use merak_pipe::{Auto, AutoLimits, Costs, Schedule, ScheduleKind, Size, auto, simulate};
use merak_trace::{Graph, RecomputePlan, StageCuts, StageProgram};

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

/// Searches a schedule for the stages.
///
/// A rank keeps at most the activations that `interleaved_1f1b` would keep on any rank (with one
/// stage per rank that is `1f1b`). What is recomputed decides the costs, and may in turn depend on
/// the schedule: it is chosen under `interleaved_1f1b`, and again under the schedule that was
/// found. Where only the former keeps a budget of bytes, it stays: the halves of backwards lie
/// apart under the latter.
///
/// # Errors
/// When the size is not legal, an operation has no gradient, or `interleaved_1f1b` does not keep
/// the budget.
pub(super) fn search(
    stages: &Stages<'_>,
    size: Size,
    recompute_under: impl Fn(&Schedule) -> Result<Vec<RecomputePlan>>,
) -> Result<Found> {
    let usual = ScheduleKind::Interleaved.generate(size)?;
    let recompute = recompute_under(&usual)?;
    let costs = stages.costs(&recompute)?;
    let peaks = simulate(&usual, &costs)?.peak_activations;
    let limit = peaks.into_iter().fold(0.0, f64::max);
    let limits = AutoLimits {
        peak_activations: vec![limit; size.ranks],
        ..AutoLimits::default()
    };
    let found = auto(size, &costs, &limits)?;
    match recompute_under(&found.schedule) {
        Ok(recompute) => Ok(Found {
            schedule: found.schedule.clone(),
            recompute,
            search: Some(found),
        }),
        Err(Error::ActivationBudget { .. }) => Ok(Found {
            schedule: usual,
            recompute,
            search: None,
        }),
        Err(error) => Err(error),
    }
}

impl Stages<'_> {
    /// The costs of each stage's phases and of the messages between them.
    pub(super) fn costs(&self, recompute: &[RecomputePlan]) -> Result<Costs> {
        let mut phases = Vec::new();
        let mut hop = Vec::new();
        for (stage, plan) in recompute.iter().enumerate() {
            let program = StageProgram::training(self.graph, self.cuts, stage, plan)?;
            phases.push(self.costs.phases(&program));
            if stage + 1 < recompute.len() {
                hop.push(self.costs.hop(&program.send));
            }
        }
        Ok(Costs {
            forward: phases.iter().map(|costs| costs.forward).collect(),
            input_grad: phases.iter().map(|costs| costs.input_grad).collect(),
            weight_grad: phases.iter().map(|costs| costs.weight_grad).collect(),
            recompute: phases.iter().map(|costs| costs.recompute).collect(),
            hop,
            overlap: 1.0,
        })
    }
}
