//! Whether another schedule would make a step shorter.

use super::{Pipeline, PipelineOptions, ScheduleChoice, schedule_search};
use crate::{Result, StepCosts};
use merak_pipe::{Costs, Schedule, ScheduleKind, simulate_on};

/// The least share of a step that another schedule must save to be worth a line.
const WORTH_TELLING: f64 = 0.05;

/// A schedule that makes a step shorter than the pipeline's own.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct FasterSchedule {
    /// The schedule.
    pub kind: ScheduleKind,
    /// The share of the step's time that it saves.
    pub gain: f64,
    /// Bytes that the fullest rank needs: under the pipeline's own schedule, and under this one.
    pub memory: [usize; 2],
}

impl FasterSchedule {
    /// How much more memory the fullest rank may need, as a share. A schedule that keeps as many
    /// microbatches on all ranks as another on the first one needs more by the logits of the last
    /// rank.
    pub const MORE_MEMORY: f64 = 0.1;
}

impl Pipeline {
    /// The named schedule with as many stages per rank that shortens a step most, and by more than
    /// 5 %. The simulator compares them with the same stages and recomputation on the same cores;
    /// other numbers of stages per rank need another cut of the model, and are not compared. The
    /// fullest rank needs at most [a tenth](FasterSchedule::MORE_MEMORY) more memory than now, and
    /// than under a searched schedule, which keeps a limit of bytes, no more.
    ///
    /// # Errors
    /// When an operation has no gradient.
    pub fn faster_schedule(&self, costs: &dyn StepCosts) -> Result<Option<FasterSchedule>> {
        if self.schedule.size.ranks == 1 {
            return Ok(None);
        }
        let (stages, update) = match self.predict(costs)? {
            Some(prediction) => (prediction.costs, prediction.update),
            None => (self.stage_costs(costs)?, 0.0),
        };
        let cores = costs.cores();
        let step = |schedule: &Schedule| {
            Ok::<_, crate::Error>(simulate_on(schedule, &stages, cores)?.makespan + update)
        };
        let own = step(&self.schedule)?;
        let mut shorter = Vec::new();
        for kind in ScheduleKind::ALL {
            let Some(schedule) = self.instead(kind) else {
                continue;
            };
            let gain = 1.0 - step(&schedule)? / own;
            if gain > WORTH_TELLING {
                shorter.push((gain, kind, schedule));
            }
        }
        // Equal gains stay in the order of the names.
        shorter.sort_by(|(one, ..), (other, ..)| other.total_cmp(one));
        let now = self.fullest_rank()?;
        let more = match self.options.schedule {
            ScheduleChoice::Named(_) => FasterSchedule::MORE_MEMORY,
            ScheduleChoice::Searched => 0.0,
        };
        for (gain, kind, schedule) in shorter {
            let then = self.with_schedule(schedule)?.fullest_rank()?;
            if then as f64 <= now as f64 * (1.0 + more) {
                let memory = [now, then];
                return Ok(Some(FasterSchedule { kind, gain, memory }));
            }
        }
        Ok(None)
    }

    /// The costs of the stages as they are cut.
    pub(super) fn stage_costs(&self, costs: &dyn StepCosts) -> Result<Costs> {
        let programs = self.laid_out(&self.options).programs(&self.recompute)?;
        Ok(schedule_search::stage_costs(&programs, costs))
    }

    /// The schedule of this kind with as many stages per rank, if the same is recomputed under it.
    fn instead(&self, kind: ScheduleKind) -> Option<Schedule> {
        let (size, asked) = (self.schedule.size, self.options.virtual_stages);
        let chunks = match kind.fixed_chunks() {
            Some(chunks) if asked == 1 || asked == chunks => Some(chunks),
            Some(_) => None,
            None => Some(asked),
        };
        if !kind.is_training() || chunks != Some(size.chunks) {
            return None;
        }
        let Ok(schedule) = kind.generate(size) else {
            return None;
        };
        let options = PipelineOptions {
            schedule: ScheduleChoice::Named(kind),
            ..self.options.clone()
        };
        let recompute = self.laid_out(&options).recompute(&schedule);
        let is_same = recompute.is_ok_and(|plans| plans == self.recompute);
        is_same.then_some(schedule)
    }

    fn with_schedule(&self, schedule: Schedule) -> Result<Self> {
        Ok(Self {
            placement: schedule.placement()?,
            schedule,
            ..self.clone()
        })
    }

    /// Bytes of the rank that needs most.
    pub(super) fn fullest_rank(&self) -> Result<usize> {
        let ranks = 0..self.schedule.size.ranks;
        let mut totals = ranks.map(|rank| Ok(self.training_bytes(rank)?.total()));
        totals.try_fold(0, |most, total: Result<usize>| Ok(most.max(total?)))
    }
}
