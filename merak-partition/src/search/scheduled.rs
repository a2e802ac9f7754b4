//! Stages for any schedule: one per rank, several in turn, or two in a V.

use super::{Found, SegmentCosts, StageLoad, StepTime, Stopped, autopipe, is_cost};
use crate::{Error, Result};
use merak_pipe::{ActivationBytes, Costs, Schedule, ScheduleKind, Size, simulate};

/// The simulated step of a schedule, whose ranks may run several stages, with a limit of memory for
/// each rank.
///
/// Stages are those of the model in order, `P * v` of them; the schedule's
/// [placement](Scheduled::placement) says which rank runs which. The work of ranks has to be even,
/// not that of stages: [`lay_out`] searches for that.
#[derive(Debug, Clone)]
pub struct Scheduled {
    schedule: Schedule,
    placement: Vec<usize>,
    weight_share: f64,
    comm_cost: f64,
    memory: Option<RankMemory>,
}

/// Memory that segments keep, and memory of each rank, in bytes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RankMemory {
    /// For each segment, the bytes that a microbatch keeps until its input gradient is computed.
    pub until_input_grad: Vec<u64>,
    /// For each segment, the bytes that a microbatch keeps until its weight gradients are computed.
    pub until_weight_grad: Vec<u64>,
    /// For each segment, the bytes of its weights, gradients and optimizer state.
    pub fixed: Vec<u64>,
    /// For each rank, its memory.
    pub limits: Vec<u64>,
}

impl Scheduled {
    /// The step of a named schedule.
    ///
    /// # Errors
    /// [`Error::Schedule`] when there is none of this size.
    pub fn new(kind: ScheduleKind, size: Size) -> Result<Self> {
        Self::of(kind.generate(size)?)
    }

    /// The step of any schedule.
    ///
    /// # Errors
    /// [`Error::Schedule`] when it is not valid.
    pub fn of(schedule: Schedule) -> Result<Self> {
        schedule.validate()?;
        Ok(Self {
            placement: schedule.placement()?,
            schedule,
            weight_share: 0.5,
            comm_cost: 0.0,
            memory: None,
        })
    }

    /// The time of a message between two ranks, in the unit of the costs; 0 by default.
    #[must_use]
    pub fn with_comm_cost(mut self, cost: f64) -> Self {
        self.comm_cost = cost;
        self
    }

    /// The share of a backward that computes weight gradients, from 0 to 1; a half by default.
    #[must_use]
    pub fn with_weight_share(mut self, share: f64) -> Self {
        self.weight_share = share;
        self
    }

    /// Allows only partitions that fit the ranks' memory.
    #[must_use]
    pub fn with_memory(mut self, memory: RankMemory) -> Self {
        self.memory = Some(memory);
        self
    }

    /// For each stage, the rank that runs it.
    pub fn placement(&self) -> &[usize] {
        &self.placement
    }

    /// The time of each rank for one microbatch, all its stages together.
    ///
    /// # Panics
    /// There are more loads than stages.
    pub fn rank_loads(&self, stages: &[StageLoad]) -> Vec<f64> {
        let mut loads = vec![0.0; self.schedule.size.ranks];
        for (stage, load) in stages.iter().enumerate() {
            loads[self.placement[stage]] += load.total();
        }
        loads
    }

    /// Whether every rank has the memory for its stages.
    fn fits(&self, stages: &[StageLoad]) -> bool {
        let Some(memory) = &self.memory else {
            return true;
        };
        let sums = |bytes: &[u64]| -> Vec<u64> {
            let of_stage = |load: &StageLoad| bytes.get(load.segments.clone());
            let sum = |bytes: &[u64]| {
                bytes
                    .iter()
                    .fold(0_u64, |sum, more| sum.saturating_add(*more))
            };
            // Lists are checked before a search begins; a missing entry fits nowhere.
            stages
                .iter()
                .map(|load| of_stage(load).map_or(u64::MAX, sum))
                .collect()
        };
        let kept = ActivationBytes {
            until_input_grad: sums(&memory.until_input_grad),
            until_weight_grad: sums(&memory.until_weight_grad),
        };
        let Ok(mut needed) = self.schedule.peak_bytes(&kept) else {
            return false;
        };
        for (stage, fixed) in sums(&memory.fixed).into_iter().enumerate() {
            let needed = &mut needed[self.placement[stage]];
            *needed = needed.saturating_add(fixed);
        }
        needed
            .iter()
            .zip(&memory.limits)
            .all(|(needed, limit)| needed <= limit)
    }

    fn check_memory(&self, num_segments: usize) -> Result<()> {
        let Some(memory) = &self.memory else {
            return Ok(());
        };
        let lists = [
            ("bytes until the input gradient", &memory.until_input_grad),
            (
                "bytes until the weight gradients",
                &memory.until_weight_grad,
            ),
            ("fixed bytes", &memory.fixed),
        ];
        for (what, list) in lists {
            if list.len() != num_segments {
                return Err(Error::PerSegment {
                    what,
                    expected: num_segments,
                    found: list.len(),
                });
            }
        }
        let (expected, found) = (self.schedule.size.ranks, memory.limits.len());
        if expected != found {
            return Err(Error::PerRank {
                what: "limits of memory",
                expected,
                found,
            });
        }
        Ok(())
    }
}

impl StepTime for Scheduled {
    fn step_time(&self, stages: &[StageLoad]) -> Option<f64> {
        if stages.len() != self.placement.len() || !self.fits(stages) {
            return None;
        }
        // Costs in counted operations may exceed the simulator's largest time.
        let longest = stages
            .iter()
            .map(StageLoad::total)
            .fold(self.comm_cost, f64::max);
        let unit = if longest > 1e12 { longest } else { 1.0 };
        let backward = |share: f64| {
            let parts = stages.iter().map(|load| share * load.backward / unit);
            parts.collect()
        };
        let costs = Costs {
            forward: stages.iter().map(|load| load.forward / unit).collect(),
            input_grad: backward(1.0 - self.weight_share),
            weight_grad: backward(self.weight_share),
            recompute: vec![0.0; stages.len()],
            overlap: 1.0,
            hop: vec![self.comm_cost / unit; stages.len().saturating_sub(1)],
        };
        Some(simulate(&self.schedule, &costs).ok()?.makespan * unit)
    }

    fn micro_batches(&self) -> usize {
        self.schedule.size.microbatches
    }

    fn check(&self) -> Result<()> {
        if !is_cost(self.comm_cost) {
            return Err(Error::NotACommCost {
                found: self.comm_cost,
            });
        }
        if !(0.0..=1.0).contains(&self.weight_share) {
            return Err(Error::NotAShare {
                found: self.weight_share,
            });
        }
        Ok(())
    }
}

/// The partition with the shortest simulated step into the stages of a schedule, several per rank
/// included. The search starts from the result of [`autopipe`](fn@autopipe) and, if that could not
/// try all partitions, improves it by further moves. A move shifts neighbouring borders by one
/// segment, so that work goes from one rank to another whose stages lie elsewhere.
///
/// # Errors
/// As [`autopipe`](fn@autopipe), [`Error::PerSegment`] and [`Error::PerRank`] for lists of bytes of
/// another length, and [`Error::NotAShare`].
///
/// ```
/// use merak_partition::{Scheduled, SegmentCosts, lay_out};
/// use merak_pipe::{ScheduleKind, Size};
///
/// // Rank 0 runs the first and the last stage of a V, and so the embeddings and the head.
/// let (mut forward, mut backward) = (vec![1.0; 10], vec![2.0; 10]);
/// (forward[9], backward[9]) = (3.0, 6.0);
/// let costs = SegmentCosts::new(forward, backward)?;
/// let step = Scheduled::new(ScheduleKind::ZbV, Size::new(2, 8).with_chunks(2))?;
/// let found = lay_out(&costs, &step)?;
/// assert_eq!(step.placement(), [0, 1, 1, 0]);
/// assert_eq!(step.rank_loads(&costs.loads(&found.bounds)), [18.0, 18.0]);
/// # Ok::<(), merak_partition::Error>(())
/// ```
pub fn lay_out(costs: &SegmentCosts, step: &Scheduled) -> Result<Found> {
    step.check_memory(costs.len())?;
    let mut best = autopipe(costs, step.placement.len(), step)?;
    if best.stopped == Stopped::Proven {
        return Ok(best);
    }
    for _ in 0..MOST_ROUNDS {
        let before = best.step_time;
        for bounds in shifted(&best.bounds) {
            best.tried += 1;
            let time = step.step_time(&costs.loads(&bounds));
            if let Some(time) = time.filter(|time| *time < best.step_time) {
                (best.bounds, best.step_time) = (bounds, time);
            }
        }
        if best.step_time >= before {
            best.stopped = Stopped::NoMoves;
            return Ok(best);
        }
    }
    best.stopped = Stopped::Limit;
    Ok(best)
}

/// Most rounds of moves.
const MOST_ROUNDS: usize = 50;

/// The partitions in which some neighbouring borders are one segment further on, or back.
fn shifted(bounds: &[usize]) -> Vec<Vec<usize>> {
    let last = bounds.len() - 1;
    let runs = (1..last).flat_map(|first| (first..last).map(move |end| first..=end));
    let moved = runs.flat_map(|run| {
        [1, -1].map(|by| {
            let mut moved = bounds.to_vec();
            for border in run.clone() {
                moved[border] = moved[border].wrapping_add_signed(by);
            }
            moved
        })
    });
    moved
        .filter(|bounds| bounds.is_sorted_by(|a, b| a < b))
        .collect()
}
