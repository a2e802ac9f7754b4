//! Which segments each stage of the pipeline takes.

use crate::{CheckedArguments, Error, PartitionMethod, Recompute, Result, TrainSchedule};
use merak_partition::{
    ExactOptions, Partition, SegmentCosts, SegmentOptions, StageLoad, StageMethod, StepTime,
    autopipe, exact, segment,
};
use merak_pipe::{Costs, Schedule, ScheduleKind, Size, simulate};
use merak_trace::Graph;

/// Floating-point operations in the unit of `autopipe.comm_cost`.
const UNIT: f64 = 1e9;

/// Lays the segments of a graph out over stages, by the method of the arguments.
///
/// # Errors
/// Those of [`Partition::new`] and of the searches.
pub(super) fn partition(
    graph: &Graph,
    options: &SegmentOptions,
    args: &CheckedArguments,
) -> Result<Partition> {
    let method = match args.partition_method {
        PartitionMethod::Uniform => StageMethod::Uniform,
        PartitionMethod::UniformFloor => StageMethod::UniformFloor,
        PartitionMethod::Parameters => StageMethod::Parameters,
        PartitionMethod::Custom => {
            let missing = || Error::MissingKey {
                key: "custom_partition",
                advice: "partition_method = \"custom\" needs its boundaries".to_owned(),
            };
            StageMethod::Custom(args.custom_partition.clone().ok_or_else(missing)?.0)
        }
        PartitionMethod::Autopipe | PartitionMethod::Exact => {
            return searched(graph, options, args);
        }
    };
    Ok(Partition::new(graph, options, &method)?)
}

/// Searches the stages whose step is shortest under the schedule of the run, by counts of operations: so every
/// rank comes to the same stages.
fn searched(graph: &Graph, options: &SegmentOptions, args: &CheckedArguments) -> Result<Partition> {
    let segments = segment(graph, options)?;
    // Other kinds of recomputation cost about as much as none.
    let recomputes = args.activation_checkpointing
        && args.recompute == Recompute::Full
        && args.checkpoint_num_layers > 0;
    let costs = SegmentCosts::counted(graph, &segments, recomputes)?;
    let size = Size {
        microbatches: args
            .autopipe
            .micro_batches
            .unwrap_or(args.gradient_accumulation_steps),
        ..args.pipeline_size()
    };
    // A searched schedule is made for stages, so they are laid out for the one it starts from.
    let kind = match args.train_schedule {
        TrainSchedule::Named(kind) => kind,
        TrainSchedule::Auto => ScheduleKind::Interleaved,
    };
    let step = Simulated {
        schedule: kind.generate(size)?,
        recomputes,
        comm_cost: args.autopipe.comm_cost,
    };
    let num_stages = options.num_stages;
    let found = match args.partition_method {
        PartitionMethod::Exact => exact(&costs, num_stages, &step, &ExactOptions::default())?,
        _ => autopipe(&costs, num_stages, &step)?,
    };
    Ok(Partition::found(
        segments,
        args.partition_method.as_str(),
        found,
    ))
}

/// The simulated step of a schedule.
struct Simulated {
    schedule: Schedule,
    recomputes: bool,
    comm_cost: f64,
}

impl StepTime for Simulated {
    fn step_time(&self, stages: &[StageLoad]) -> Option<f64> {
        let parts = if self.recomputes { 3.0 } else { 2.0 };
        let of = |part: fn(&StageLoad, f64) -> f64| {
            let times = stages.iter().map(|stage| part(stage, parts) / UNIT);
            times.collect::<Vec<_>>()
        };
        let share = of(|stage, parts| stage.backward / parts);
        let costs = Costs {
            forward: of(|stage, _| stage.forward),
            recompute: if self.recomputes {
                share.clone()
            } else {
                vec![0.0; stages.len()]
            },
            input_grad: share.clone(),
            weight_grad: share,
            hop: vec![self.comm_cost; stages.len() - 1],
        };
        Some(simulate(&self.schedule, &costs).ok()?.makespan)
    }

    fn micro_batches(&self) -> usize {
        self.schedule.size.microbatches
    }
}
