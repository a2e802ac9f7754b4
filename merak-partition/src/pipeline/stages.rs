//! Which segments each stage of the pipeline takes.

use super::{PipelineOptions, Recompute, ScheduleChoice, StageLayout};
use crate::{
    ExactOptions, Partition, PartitionMethod, PhaseCosts, RankMemory, Result, Scheduled,
    SegmentBytes, Segments, StepCosts, costs::hop, exact, lay_out, recompute_plan, stages,
};
use merak_pipe::{ScheduleKind, Size};
use merak_trace::{Graph, StageProgram};

/// Lays the segments of a graph out over stages. A search gives no rank more than `limit` bytes, as
/// it counts them.
///
/// # Errors
/// Those of [`stages`] and of the searches.
pub(super) fn partition(
    graph: &Graph,
    segments: Segments,
    options: &PipelineOptions,
    limit: Option<usize>,
    costs: &dyn StepCosts,
) -> Result<Partition> {
    let search = match &options.layout {
        StageLayout::Method(method) => {
            return Ok(Partition {
                stage_bounds: stages(&segments, method, options.size.stages())?,
                segments,
                method: method.to_string(),
            });
        }
        StageLayout::Autopipe => PartitionMethod::Autopipe,
        StageLayout::Exact => PartitionMethod::Exact,
    };
    let step = step(graph, &segments, options, limit, costs)?;
    let found = match options.layout {
        StageLayout::Exact => exact(
            &step.segment_costs()?,
            options.size.stages(),
            &step,
            &ExactOptions::default(),
        ),
        _ => lay_out(&step),
    };
    let found = found.map_err(|error| step.explain(error))?;
    let search = format!("{search} by {}", costs.unit());
    Ok(Partition::found(segments, &search, found))
}

/// The step that a search makes short.
fn step(
    graph: &Graph,
    segments: &Segments,
    options: &PipelineOptions,
    limit: Option<usize>,
    costs: &dyn StepCosts,
) -> Result<Scheduled> {
    let microbatches = options.search_microbatches;
    let size = Size {
        microbatches: microbatches.unwrap_or(options.size.microbatches),
        ..options.size
    };
    // The search for a schedule needs stages, so they are laid out for the schedule that it starts
    // from, or within a limit for one that needs less.
    let kind = match options.schedule {
        ScheduleChoice::Named(kind) => kind,
        ScheduleChoice::Searched if limit.is_some() && size.chunks == 1 => ScheduleKind::OneFOneB,
        ScheduleChoice::Searched => ScheduleKind::Interleaved,
    };
    // Other kinds of recomputation cost about as much as none.
    let recompute = match options.recompute {
        Recompute::Full { chunk: 1.., .. } => {
            let apart = segments.apart();
            let plan = |segment| recompute_plan(graph, &apart, segment, 1, 1);
            (0..segments.len()).map(plan).collect()
        }
        _ => Vec::new(),
    };
    let programs = segments.programs(graph, &recompute)?;
    let phases = programs
        .iter()
        .map(|program| PhaseCosts::of(program, costs));
    let into = |program: &StageProgram| {
        let given = options.comm_cost;
        given.unwrap_or_else(|| hop(&program.recv, costs))
    };
    let step = Scheduled::new(kind.generate(size)?, phases.collect())?
        .with_hops(programs.iter().map(into).collect())
        .on_cores(costs.cores());
    Ok(match limit {
        Some(limit) => {
            let segments = SegmentBytes::of(&programs, options.value_width);
            step.with_memory(RankMemory::new(limit, options.param_bytes, segments))
        }
        None => step,
    })
}
