//! `train_schedule = "auto"`: a schedule for the model's own stages.

use crate::Result;
use merak_partition::cost;
use merak_pipe::{Auto, AutoLimits, Costs, ScheduleKind, Size, auto, simulate};
use merak_trace::{Graph, Phase, RecomputePlan, StageCuts, StageProgram};

/// Searches a schedule for the work of the stages, counted in floating-point operations, with free messages.
///
/// A rank keeps at most the activations that `interleaved_1f1b` would keep on any rank (with one stage per rank that
/// is `1f1b`). Counts and not times decide, so that every rank, and every run, comes to the same schedule.
///
/// # Errors
/// When the size is not legal, or an operation has no gradient.
pub(super) fn search(
    graph: &Graph,
    cuts: &StageCuts,
    recompute: &[RecomputePlan],
    size: Size,
) -> Result<Auto> {
    let costs = costs(graph, cuts, recompute)?;
    let usual = ScheduleKind::Interleaved.generate(size)?;
    let peaks = simulate(&usual, &costs)?.peak_activations;
    let limit = peaks.into_iter().fold(0.0, f64::max);
    let limits = AutoLimits {
        peak_activations: vec![limit; size.ranks],
        ..AutoLimits::default()
    };
    Ok(auto(size, &costs, &limits)?)
}

/// The floating-point operations of each stage's phases, in billions.
fn costs(graph: &Graph, cuts: &StageCuts, recompute: &[RecomputePlan]) -> Result<Costs> {
    let mut phases = <[Vec<f64>; 4]>::default();
    for (stage, plan) in recompute.iter().enumerate() {
        let program = StageProgram::training(graph, cuts, stage, plan)?;
        let nodes = program.graph.nodes().iter().zip(&program.phases);
        let mut sums = [0.0; 4];
        for (node, phase) in nodes {
            let place = match phase {
                Phase::Forward => 0,
                Phase::BackwardInput => 1,
                Phase::BackwardWeight => 2,
                Phase::Recompute => 3,
            };
            sums[place] += cost::node(&program.graph, node).flops as f64 * 1e-9;
        }
        for (list, sum) in phases.iter_mut().zip(sums) {
            list.push(sum);
        }
    }
    let [forward, input_grad, weight_grad, recompute] = phases;
    Ok(Costs {
        hop: vec![0.0; forward.len() - 1],
        forward,
        input_grad,
        weight_grad,
        recompute,
    })
}
