//! Which segments each stage of the pipeline takes.

use super::{Draft, room::Room};
use crate::{
    CheckedArguments, CostModel, Error, PartitionMethod, Recompute, Result, TrainSchedule,
    costs::PhaseCosts,
};
use merak_partition::{
    ExactOptions, Partition, SegmentCosts, StageLoad, StageMethod, StepTime, autopipe, exact,
    stages,
};
use merak_pipe::{Costs, Schedule, ScheduleKind, Size, simulate_on};

/// Lays the segments of a graph out over stages, by the method of the arguments.
///
/// # Errors
/// Those of [`stages`] and of the searches.
pub(super) fn partition(
    draft: &Draft,
    args: &CheckedArguments,
    costs: &CostModel,
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
            return searched(draft, args, costs);
        }
    };
    Ok(Partition {
        stage_bounds: stages(&draft.segments, &method, args.num_stages())?,
        segments: draft.segments.clone(),
        method: method.to_string(),
    })
}

/// Searches the stages whose step is shortest under the schedule of the run.
fn searched(draft: &Draft, args: &CheckedArguments, model: &CostModel) -> Result<Partition> {
    let step = Simulated::new(draft, args, model)?;
    // Some stages may keep what they could recompute, so a bound counts only the work that all do.
    let backward = |costs: PhaseCosts| {
        if step.schedule.no_recompute.is_empty() {
            costs.backward()
        } else {
            costs.input_grad + costs.weight_grad
        }
    };
    let segments = step.segments.iter();
    let costs = SegmentCosts::new(
        segments.clone().map(|costs| costs.forward).collect(),
        segments.map(|costs| backward(*costs)).collect(),
    )?;
    let num_stages = args.num_stages();
    let found = match args.partition_method {
        PartitionMethod::Exact => exact(&costs, num_stages, &step, &ExactOptions::default()),
        _ => autopipe(&costs, num_stages, &step),
    };
    let found = found.map_err(|error| step.explain(error))?;
    let search = format!("{} by {}", args.partition_method, model.unit());
    Ok(Partition::found(draft.segments.clone(), &search, found))
}

/// The simulated step of a schedule.
struct Simulated {
    schedule: Schedule,
    segments: Vec<PhaseCosts>,
    /// Costs of the segments before each border.
    sums: Vec<PhaseCosts>,
    /// A message over each border.
    hops: Vec<f64>,
    cores: f64,
    room: Option<Room>,
}

impl Simulated {
    fn new(draft: &Draft, args: &CheckedArguments, model: &CostModel) -> Result<Self> {
        let options = &args.autopipe;
        let size = Size {
            microbatches: options
                .micro_batches
                .unwrap_or(args.gradient_accumulation_steps),
            ..args.pipeline_size()
        };
        // The search for a schedule needs stages, so they are laid out for the schedule that it
        // starts from.
        let kind = match args.train_schedule {
            TrainSchedule::Named(kind) => kind,
            TrainSchedule::Auto => ScheduleKind::Interleaved,
        };
        let schedule = kind.generate(size)?;
        // Other kinds of recomputation cost about as much as none.
        let recomputes = args.activation_checkpointing
            && args.recompute == Recompute::Full
            && args.checkpoint_num_layers > 0;
        let recompute = if recomputes {
            draft.full_recomputation()
        } else {
            Vec::new()
        };
        let programs = draft.segment_programs(&recompute)?;
        let segments: Vec<_> = programs
            .iter()
            .map(|program| model.phases(program))
            .collect();
        let mut sums = vec![PhaseCosts::default()];
        for costs in &segments {
            sums.push(sums[sums.len() - 1] + *costs);
        }
        let hop = |program| options.comm_cost.unwrap_or_else(|| model.hop(program));
        let room = options.memory_limit;
        Ok(Self {
            room: room
                .map(|limit| Room::new(limit, &programs, &schedule, args))
                .transpose()?,
            hops: programs.iter().map(|program| hop(&program.recv)).collect(),
            cores: model.cores(args),
            schedule,
            segments,
            sums,
        })
    }

    /// The costs of stages with these segments.
    fn costs(&self, stages: &[StageLoad]) -> Costs {
        let of = |part: fn(&PhaseCosts) -> f64| {
            let sum = |stage: &StageLoad| {
                let [before, behind] = [stage.segments.start, stage.segments.end];
                // Sums of positive numbers ascend, but for rounding.
                (part(&self.sums[behind]) - part(&self.sums[before])).max(0.0)
            };
            stages.iter().map(sum).collect()
        };
        let borders = stages.iter().skip(1).map(|stage| stage.segments.start);
        Costs {
            forward: of(|costs| costs.forward),
            input_grad: of(|costs| costs.input_grad),
            weight_grad: of(|costs| costs.weight_grad),
            recompute: of(|costs| costs.recompute),
            hop: borders.map(|border| self.hops[border]).collect(),
            overlap: 1.0,
        }
    }

    /// Names the needed memory where no partition was allowed.
    fn explain(&self, error: merak_partition::Error) -> Error {
        match (error, &self.room) {
            (merak_partition::Error::NoPartition { .. }, Some(room)) => room.refusal(),
            (error, _) => error.into(),
        }
    }
}

impl StepTime for Simulated {
    fn step_time(&self, stages: &[StageLoad]) -> Option<f64> {
        if let Some(room) = &self.room
            && !room.holds(stages)
        {
            return None;
        }
        let simulation = simulate_on(&self.schedule, &self.costs(stages), self.cores);
        Some(simulation.ok()?.makespan)
    }

    fn micro_batches(&self) -> usize {
        self.schedule.size.microbatches
    }
}
