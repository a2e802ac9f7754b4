//! What is in each stage, what it costs, and why the cuts are where they are.

mod modules;
mod table;

use crate::{Error, ParamBytes, Partition, RankPrograms, Result, ValueWidth, memory::total};
use merak_trace::{Graph, Hop, Phase, RecomputePlan, StageProgram, TiedParam, op::Cost};
use modules::ModuleRanges;
use serde::Serialize;
use std::sync::Arc;

/// Facts of a run that the report needs.
#[derive(Debug, Clone, PartialEq)]
pub struct ReportOptions {
    /// For each stage, the most microbatches whose activations it holds at once under the schedule.
    pub live_microbatches: Vec<usize>,
    /// For each stage, its recomputation; empty when there is none.
    pub recompute: Vec<RecomputePlan>,
    /// For each stage the rank that runs it; empty where each rank runs the stage of its number.
    pub placement: Vec<usize>,
    /// Bytes that a rank keeps for each element of its parameters.
    pub param_bytes: ParamBytes,
    /// How wide values lie in memory.
    pub value_width: ValueWidth,
}

impl ReportOptions {
    /// `1f1b` with `num_microbatches`, gradients in f32, two f32 moments on every rank, no
    /// recomputation.
    pub fn one_f_one_b(num_stages: usize, num_microbatches: usize) -> Self {
        Self {
            live_microbatches: (0..num_stages)
                .map(|stage| (num_stages - stage).min(num_microbatches))
                .collect(),
            recompute: Vec::new(),
            placement: Vec::new(),
            param_bytes: ParamBytes::default(),
            value_width: ValueWidth::default(),
        }
    }
}

/// Bytes that pass between two stages for each microbatch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize)]
pub struct HopBytes {
    /// Values of the forward.
    pub activation_bytes: usize,
    /// Their gradients, which pass the other way.
    pub gradient_bytes: usize,
}

/// One stage of a [`PartitionReport`]. Sizes are those of one rank; work and traffic are per
/// microbatch.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct StageReport {
    /// The stage.
    pub stage: usize,
    /// The rank that runs it.
    pub rank: usize,
    /// Segments that it is made of.
    pub segments: usize,
    /// Paths of its modules in order, as `transformer.h.0-3`.
    pub modules: Vec<String>,
    /// Elements of its parameters in the whole model; a tied one counts on its owner.
    pub parameters: usize,
    /// Elements of parameters that a rank holds: its slices, and copies of tied ones.
    pub local_parameters: usize,
    /// Work of the forward.
    pub forward: Cost,
    /// Work of the backward, without recomputation.
    pub backward: Cost,
    /// Work of the recomputation.
    pub recompute: Cost,
    /// Bytes that it sends: activations to the next stage, gradients to the one before.
    pub sent: HopBytes,
    /// Bytes that it receives: activations from the stage before, gradients from the next.
    pub received: HopBytes,
    /// Bytes of the forward's values that its backward uses.
    pub kept_bytes: usize,
    /// Most microbatches whose values it keeps at once.
    pub live_microbatches: usize,
    /// Bytes of weights, gradients, optimizer state and kept values. Left out are batches and
    /// values that live within a phase, which [`RankPrograms::training_bytes`] counts for a rank,
    /// and what stages on one rank share counts on each.
    pub memory_bytes: usize,
    /// Names of the data that it loads.
    pub inputs: Vec<String>,
}

/// A parameter that several stages use.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct TiedReport {
    /// Name of the parameter.
    pub name: String,
    /// The stage that owns it.
    pub owner: usize,
    /// The stages on the owner's rank that use it where it lies, the owner left out.
    pub shared: Vec<usize>,
    /// The stages on other ranks, each of which holds a copy.
    pub copies: Vec<usize>,
}

/// The stages of a partition; prints as a table.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct PartitionReport {
    /// The stages in order.
    pub stages: Vec<StageReport>,
    /// Parameters that several stages use.
    pub tied: Vec<TiedReport>,
    /// The rule that decided the segments.
    pub split: String,
    /// The method that decided the stages.
    pub layout: String,
}

/// Looks at the program of every stage.
///
/// # Errors
/// [`Error::PerStage`] when a list of the options does not have one entry per stage;
/// [`Error::OtherGraph`]; [`Error::Program`] when a stage cannot be differentiated.
pub fn report(
    graph: &Graph,
    partition: &Partition,
    options: &ReportOptions,
) -> Result<PartitionReport> {
    let num_stages = partition.num_stages();
    check_length(
        "live_microbatches",
        options.live_microbatches.len(),
        num_stages,
    )?;
    for (what, found) in [
        ("recompute", options.recompute.len()),
        ("placement", options.placement.len()),
    ] {
        if found > 0 {
            check_length(what, found, num_stages)?;
        }
    }
    let rank = |stage: usize| options.placement.get(stage).copied().unwrap_or(stage);
    let cuts = partition.cuts(graph)?;
    let ranges = ModuleRanges::of(graph);
    let nothing = RecomputePlan::default();
    let mut stages = Vec::with_capacity(num_stages);
    for stage in 0..num_stages {
        let recompute = options.recompute.get(stage).unwrap_or(&nothing);
        let program = StageProgram::training(graph, &cuts, stage, recompute);
        let program = Arc::new(program.map_err(|source| Error::Program {
            stage,
            source: Box::new(source),
        })?);
        let mut entry = of_program(&program, options, options.live_microbatches[stage]);
        entry.stage = stage;
        entry.rank = rank(stage);
        entry.segments = partition.segments_of(stage).len();
        entry.modules = ranges.names(graph, partition.nodes_of(stage));
        entry.parameters = partition.params_of(stage);
        stages.push(entry);
    }
    let layout = layout(partition, &stages);
    Ok(PartitionReport {
        stages,
        tied: cuts
            .tied(graph)
            .into_iter()
            .map(|param| tied(param, rank))
            .collect(),
        split: split(partition),
        layout,
    })
}

fn check_length(what: &'static str, found: usize, expected: usize) -> Result<()> {
    if found == expected {
        Ok(())
    } else {
        Err(Error::PerStage {
            what,
            expected,
            found,
        })
    }
}

/// The entries that follow from a stage's program.
fn of_program(
    program: &Arc<StageProgram>,
    options: &ReportOptions,
    live_microbatches: usize,
) -> StageReport {
    let in_phases = |wanted: &[Phase]| {
        let nodes = program.graph.nodes().iter().zip(&program.phases);
        nodes
            .filter(|(_, phase)| wanted.contains(phase))
            .map(|(node, _)| Cost::of(&program.graph, node))
            .sum()
    };
    let local_parameters = program
        .params()
        .iter()
        .map(|param| param.local.numel())
        .sum();
    let alone = RankPrograms::of(vec![(0, Arc::clone(program))]);
    let held = options.param_bytes.held(alone.sums());
    let kept_bytes = options.value_width.of(program.live_bytes().kept);
    StageReport {
        stage: 0,
        rank: 0,
        segments: 0,
        modules: Vec::new(),
        parameters: 0,
        local_parameters,
        forward: in_phases(&[Phase::Forward]),
        backward: in_phases(&[Phase::BackwardInput, Phase::BackwardWeight]),
        recompute: in_phases(&[Phase::Recompute]),
        sent: HopBytes {
            activation_bytes: activation_bytes(&program.send),
            gradient_bytes: gradient_bytes(&program.recv),
        },
        received: HopBytes {
            activation_bytes: activation_bytes(&program.recv),
            gradient_bytes: gradient_bytes(&program.send),
        },
        kept_bytes,
        live_microbatches,
        memory_bytes: held
            .total()
            .saturating_add(kept_bytes.saturating_mul(live_microbatches)),
        inputs: program
            .inputs
            .iter()
            .map(|port| port.name.clone())
            .collect(),
    }
}

fn activation_bytes(hops: &[Hop]) -> usize {
    total(hops.iter().map(|hop| hop.ty.size_bytes()))
}

fn gradient_bytes(hops: &[Hop]) -> usize {
    let with_grad = hops.iter().filter(|hop| hop.grad.is_some());
    total(with_grad.map(|hop| hop.ty.size_bytes()))
}

fn tied(param: TiedParam, rank: impl Fn(usize) -> usize) -> TiedReport {
    let owner = param.stages[0];
    let others = param.stages[1..].iter().copied();
    let (shared, copies) = others.partition(|stage| rank(*stage) == rank(owner));
    TiedReport {
        name: param.name,
        owner,
        shared,
        copies,
    }
}

fn split(partition: &Partition) -> String {
    let segments = &partition.segments;
    match segments.refined {
        0 => segments.rule.to_string(),
        more => format!(
            "{}; {more} cuts added, as there were fewer segments than stages",
            segments.rule
        ),
    }
}

fn layout(partition: &Partition, stages: &[StageReport]) -> String {
    let counts: Vec<_> = stages
        .iter()
        .map(|stage| stage.segments.to_string())
        .collect();
    let flops: Vec<_> = stages
        .iter()
        .map(|stage| stage.forward.flops as f64)
        .collect();
    let mean = flops.iter().sum::<f64>() / flops.len() as f64;
    let largest = flops.iter().copied().fold(0.0, f64::max);
    let balance = if mean > 0.0 {
        format!(
            "; the longest forward is {:.2} times the mean",
            largest / mean
        )
    } else {
        String::new()
    };
    format!(
        "{}: {} segments as {}{balance}",
        partition.method,
        partition.segments.len(),
        counts.join(" + ")
    )
}
