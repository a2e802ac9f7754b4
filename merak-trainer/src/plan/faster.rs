//! Whether another schedule would make a step shorter.

use super::{Plan, recompute, search};
use crate::{CheckedArguments, CostModel, Result, TrainSchedule, Workload};
use merak_pipe::{Costs, Schedule, ScheduleKind, simulate_on};

/// The least share of a step that another schedule must save to be worth a line.
const WORTH_TELLING: f64 = 0.05;

/// A schedule that makes a step shorter than the plan's own.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct FasterSchedule {
    /// Its name, which `train_schedule` takes.
    pub kind: ScheduleKind,
    /// The share of the step's time that it saves.
    pub gain: f64,
    /// Bytes that the fullest rank needs: under the plan's own schedule, and under this one.
    pub memory: [usize; 2],
}

impl FasterSchedule {
    /// How much more memory the fullest rank may need, as a share. A schedule that keeps as many
    /// microbatches on all ranks as another on the first one needs more by the logits of the last
    /// rank.
    pub const MORE_MEMORY: f64 = 0.1;
}

impl Plan {
    /// The named schedule with as many stages per rank that shortens a step most, and by more than
    /// 5 %. The simulator compares them with the same stages and recomputation on the same cores;
    /// other numbers of stages per rank need another cut of the model, and are not compared. The
    /// fullest rank needs at most [a tenth](FasterSchedule::MORE_MEMORY) more memory than now, and
    /// than under a searched schedule, which keeps a limit of bytes, no more.
    ///
    /// # Errors
    /// When an operation has no gradient.
    pub fn faster_schedule(
        &self,
        args: &CheckedArguments,
        costs: &CostModel,
    ) -> Result<Option<FasterSchedule>> {
        if self.degrees.pp == 1 {
            return Ok(None);
        }
        let (stages, update) = match self.predict(args, costs)? {
            Some(prediction) => (prediction.costs, prediction.update),
            None => (self.stage_costs(costs)?, 0.0),
        };
        let cores = costs.cores(args);
        let step = |schedule: &Schedule| {
            Ok::<_, crate::Error>(simulate_on(schedule, &stages, cores)?.makespan + update)
        };
        let own = step(&self.schedule)?;
        let mut shorter = Vec::new();
        for kind in ScheduleKind::ALL {
            let Some(schedule) = self.instead(kind, args)? else {
                continue;
            };
            let gain = 1.0 - step(&schedule)? / own;
            if gain > WORTH_TELLING {
                shorter.push((gain, kind, schedule));
            }
        }
        // Equal gains stay in the order of the names.
        shorter.sort_by(|(one, ..), (other, ..)| other.total_cmp(one));
        let now = self.fullest_rank(args)?;
        let more = match args.train_schedule {
            TrainSchedule::Named(_) => FasterSchedule::MORE_MEMORY,
            TrainSchedule::Auto => 0.0,
        };
        for (gain, kind, schedule) in shorter {
            let then = self.with_schedule(schedule)?.fullest_rank(args)?;
            if then as f64 <= now as f64 * (1.0 + more) {
                let memory = [now, then];
                return Ok(Some(FasterSchedule { kind, gain, memory }));
            }
        }
        Ok(None)
    }

    /// The costs of the stages as they are cut.
    pub(super) fn stage_costs(&self, costs: &CostModel) -> Result<Costs> {
        let stages = search::Stages {
            graph: &self.graph,
            cuts: &self.cuts,
            costs,
        };
        stages.costs(&self.recompute)
    }

    /// The schedule of this kind with as many stages per rank, if the same is recomputed under it.
    fn instead(&self, kind: ScheduleKind, args: &CheckedArguments) -> Result<Option<Schedule>> {
        let mut arguments = args.clone().into_arguments();
        arguments.train_schedule = TrainSchedule::Named(kind);
        let Ok(args) = arguments.check() else {
            return Ok(None);
        };
        let size = self.schedule.size;
        if !kind.is_training() || args.pipeline_size() != size {
            return Ok(None);
        }
        let Ok(schedule) = kind.generate(size) else {
            return Ok(None);
        };
        let pipeline = recompute::Pipeline {
            graph: &self.graph,
            partition: &self.partition,
            cuts: &self.cuts,
            schedule: &schedule,
            placement: &schedule.placement()?,
        };
        let is_same = matches!(pipeline.recompute(&args), Ok(plans) if plans == self.recompute);
        Ok(is_same.then_some(schedule))
    }

    fn with_schedule(&self, schedule: Schedule) -> Result<Self> {
        Ok(Self {
            placement: schedule.placement()?,
            schedule,
            ..self.clone()
        })
    }

    /// Bytes of the rank that needs most.
    fn fullest_rank(&self, args: &CheckedArguments) -> Result<usize> {
        let needs = self.memory(args, &[Workload::Training])?;
        let totals = needs.into_iter().map(|need| need.total());
        Ok(totals.max().unwrap_or(0))
    }
}
