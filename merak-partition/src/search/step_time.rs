//! How long a step of a partition takes.

use super::StageLoad;
use crate::{Error, Result, limits::is_cost};

/// The objective that a search minimises.
pub trait StepTime {
    /// The step time of stages with these loads, or `None` if they are not allowed: a stage needs
    /// more memory than its rank has, say.
    ///
    /// A search counts on two properties that every pipeline has: a stage runs its forward and
    /// backward once per microbatch, and starts when the forwards of the stages before it have run
    /// once.
    fn step_time(&self, stages: &[StageLoad]) -> Option<f64>;

    /// Microbatches of a step, 1 or more.
    fn num_microbatches(&self) -> usize;

    /// Checks the objective's own options before a search begins; nothing by default.
    ///
    /// # Errors
    /// When an option is invalid.
    fn check(&self) -> Result<()> {
        Ok(())
    }
}

/// The step of the 1F1B schedule ([PipeDream](https://arxiv.org/abs/1806.03377), section 3.2): an
/// operation starts when the one before on its stage has ended and its input has come.
///
/// It is a path beside [`simulate`](fn@merak_pipe::simulate) that needs no schedule. A property
/// test holds it equal to the simulator's makespan.
///
/// Its step time is `None` if a cost is negative or not a number, or there is no microbatch; a
/// search refuses such options.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct OneFOneB {
    /// Microbatches of a step.
    pub num_microbatches: usize,
    /// Time of a message between neighbours, in the unit of the costs.
    pub comm_cost: f64,
}

impl StepTime for OneFOneB {
    fn step_time(&self, stages: &[StageLoad]) -> Option<f64> {
        let loads = stages.iter().flat_map(|load| [load.forward, load.backward]);
        let legal = loads
            .chain([self.comm_cost])
            .all(|cost| cost.is_finite() && cost >= 0.0);
        let any = legal && self.num_microbatches > 0 && !stages.is_empty();
        any.then(|| Clock::new(self, stages).run())
    }

    fn num_microbatches(&self) -> usize {
        self.num_microbatches
    }

    fn check(&self) -> Result<()> {
        let found = self.comm_cost;
        if is_cost(found) {
            Ok(())
        } else {
            Err(Error::NotACommCost { found })
        }
    }
}

/// A 1F1B step being timed.
struct Clock<'a> {
    options: &'a OneFOneB,
    stages: &'a [StageLoad],
    /// When forward m of stage s has ended, at `s * M + m`.
    forwards: Vec<f64>,
    /// The same for backwards.
    backwards: Vec<f64>,
    /// Per stage: operations done, and when the last one ended.
    done: Vec<(usize, f64)>,
}

impl<'a> Clock<'a> {
    fn new(options: &'a OneFOneB, stages: &'a [StageLoad]) -> Self {
        let ends = vec![f64::NAN; stages.len() * options.num_microbatches];
        Self {
            options,
            stages,
            forwards: ends.clone(),
            backwards: ends,
            done: vec![(0, 0.0); stages.len()],
        }
    }

    fn run(mut self) -> f64 {
        let operations = 2 * self.options.num_microbatches;
        // Forwards become ready from first to last stage and backwards from last to first.
        while self.done.iter().any(|&(done, _)| done < operations) {
            (0..self.stages.len()).for_each(|stage| self.advance(stage));
            (0..self.stages.len())
                .rev()
                .for_each(|stage| self.advance(stage));
        }
        self.done.iter().map(|&(_, end)| end).fold(0.0, f64::max)
    }

    /// Runs operations of a stage as long as their input is there.
    fn advance(&mut self, stage: usize) {
        let (num_microbatches, last) = (self.options.num_microbatches, self.stages.len() - 1);
        let at = |stage: usize, microbatch: usize| stage * num_microbatches + microbatch;
        while self.done[stage].0 < 2 * num_microbatches {
            let (position, free) = self.done[stage];
            let (forward, microbatch) = operation(position, last - stage, num_microbatches);
            let here = at(stage, microbatch);
            let input = match (forward, stage) {
                (true, 0) => 0.0,
                (true, _) => self.forwards[at(stage - 1, microbatch)] + self.options.comm_cost,
                (false, _) if stage == last => self.forwards[here],
                (false, _) => self.backwards[at(stage + 1, microbatch)] + self.options.comm_cost,
            };
            if input.is_nan() {
                return;
            }
            let load = &self.stages[stage];
            let (ends, time) = if forward {
                (&mut self.forwards, load.forward)
            } else {
                (&mut self.backwards, load.backward)
            };
            ends[here] = free.max(input) + time;
            self.done[stage] = (position + 1, ends[here]);
        }
    }
}

/// The operation at a position of a stage with `later` stages after it: whether it is a forward,
/// and its microbatch.
fn operation(position: usize, later: usize, num_microbatches: usize) -> (bool, usize) {
    let warmup = later.min(num_microbatches);
    let steady = position - position.min(warmup);
    let alternating = 2 * (num_microbatches - warmup);
    if position < warmup {
        (true, position)
    } else if steady >= alternating {
        (false, steady - alternating + num_microbatches - warmup)
    } else if steady.is_multiple_of(2) {
        (true, warmup + steady / 2)
    } else {
        (false, steady / 2)
    }
}
