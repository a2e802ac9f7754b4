//! Stages for any schedule: one per rank, several in turn, or two in a V.

use super::{
    Found, RankMemory, SegmentCosts, StageLoad, StepTime, Stopped, autopipe, autopipe::most_tried,
};
use crate::{
    Error, Result,
    costs::{PhaseCosts, of_stages},
    limits::is_cost,
};
use merak_pipe::{Costs, Schedule, simulate_on};

/// The simulated step of a schedule, whose ranks may run several stages, with a limit of memory for
/// each rank.
///
/// Stages are those of the model in order; the schedule's [placement](Scheduled::placement) says
/// which rank runs which. The work of ranks has to be even, not that of stages: [`lay_out`]
/// searches for that.
#[derive(Debug, Clone)]
pub struct Scheduled {
    schedule: Schedule,
    placement: Vec<usize>,
    segments: Vec<PhaseCosts>,
    /// Costs of the segments before each border.
    sums: Vec<PhaseCosts>,
    /// For each segment a message into it.
    hops: Vec<f64>,
    cores: f64,
    memory: Option<RankMemory>,
}

impl Scheduled {
    /// The step of a schedule over segments with these costs, with free messages, on ranks that
    /// each have a core.
    ///
    /// # Errors
    /// [`Error::Schedule`] when the schedule is not valid.
    pub fn new(schedule: Schedule, segments: Vec<PhaseCosts>) -> Result<Self> {
        schedule.validate()?;
        let mut sums = vec![PhaseCosts::default()];
        for costs in &segments {
            sums.push(sums[sums.len() - 1] + *costs);
        }
        Ok(Self {
            placement: schedule.placement()?,
            schedule,
            hops: vec![0.0; segments.len()],
            segments,
            sums,
            cores: f64::INFINITY,
            memory: None,
        })
    }

    /// For each segment the time of a message into it, in the unit of the costs.
    #[must_use]
    pub fn with_hops(mut self, hops: Vec<f64>) -> Self {
        self.hops = hops;
        self
    }

    /// The number of ranks that compute at once.
    #[must_use]
    pub fn on_cores(mut self, cores: f64) -> Self {
        self.cores = cores;
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

    /// The times of the segments, for a search. Where some stages may keep what others recompute, a
    /// backward counts only the work that all do.
    ///
    /// # Errors
    /// [`Error::NotACost`].
    pub fn segment_costs(&self) -> Result<SegmentCosts> {
        let keeps_all = self.schedule.no_recompute.is_empty();
        let backward = |costs: &PhaseCosts| {
            if keeps_all {
                costs.backward()
            } else {
                costs.input_grad + costs.weight_grad
            }
        };
        let segments = self.segments.iter();
        SegmentCosts::new(
            segments.clone().map(|costs| costs.forward).collect(),
            segments.map(backward).collect(),
        )
    }

    /// The time of each rank for one microbatch, all its stages together.
    ///
    /// # Panics
    /// If there are more loads than stages.
    pub fn rank_loads(&self, stages: &[StageLoad]) -> Vec<f64> {
        let mut loads = vec![0.0; self.schedule.size.ranks];
        for (stage, load) in stages.iter().enumerate() {
            loads[self.placement[stage]] += load.total();
        }
        loads
    }

    /// The costs of stages with these segments.
    fn costs(&self, stages: &[StageLoad]) -> Costs {
        let phases = stages.iter().map(|stage| {
            let [before, behind] =
                [stage.segments.start, stage.segments.end].map(|border| self.sums[border]);
            // Sums of positive numbers ascend, except for rounding.
            let part = |behind: f64, before: f64| (behind - before).max(0.0);
            PhaseCosts {
                forward: part(behind.forward, before.forward),
                recompute: part(behind.recompute, before.recompute),
                input_grad: part(behind.input_grad, before.input_grad),
                weight_grad: part(behind.weight_grad, before.weight_grad),
            }
        });
        let borders = stages.iter().skip(1).map(|stage| stage.segments.start);
        let hops = borders.map(|border| self.hops[border]);
        of_stages(&phases.collect::<Vec<_>>(), hops.collect())
    }

    /// Names the needed memory where no partition was allowed.
    pub(crate) fn explain(&self, error: Error) -> Error {
        match (error, &self.memory) {
            (Error::NoPartition { .. }, Some(memory)) => memory.refusal(),
            (error, _) => error,
        }
    }
}

impl StepTime for Scheduled {
    fn step_time(&self, stages: &[StageLoad]) -> Option<f64> {
        let memory = self.memory.as_ref();
        let fits = || memory.is_none_or(|of| of.holds(&self.schedule, &self.placement, stages));
        if stages.len() != self.placement.len() || !fits() {
            return None;
        }
        let simulation = simulate_on(&self.schedule, &self.costs(stages), self.cores);
        Some(simulation.ok()?.makespan)
    }

    fn num_microbatches(&self) -> usize {
        self.schedule.size.microbatches
    }

    fn check(&self) -> Result<()> {
        let expected = self.segments.len();
        let lists = [
            ("messages", self.hops.len()),
            (
                "bytes",
                self.memory.as_ref().map_or(expected, RankMemory::len),
            ),
        ];
        if let Some((what, found)) = lists.into_iter().find(|(_, found)| *found != expected) {
            return Err(Error::PerSegment {
                what,
                expected,
                found,
            });
        }
        if let Some(&found) = self.hops.iter().find(|hop| !is_cost(**hop)) {
            return Err(Error::NotACommCost { found });
        }
        // Times that the simulator refuses.
        let stages = vec![self.sums[expected]; self.placement.len()];
        let hop = self.hops.iter().copied().fold(0.0, f64::max);
        let hops = vec![hop; stages.len() - 1];
        simulate_on(&self.schedule, &of_stages(&stages, hops), self.cores)?;
        Ok(())
    }
}

/// The partition with the shortest simulated step into the stages of a schedule, several per rank
/// included. The search starts from the result of [`autopipe`](fn@autopipe) and, if that could not
/// try all partitions and ranks run several stages, improves it by further moves. A move shifts
/// neighbouring borders by one segment, so that work goes from one rank to another whose stages lie
/// elsewhere.
///
/// # Errors
/// As [`autopipe`](fn@autopipe), [`Error::PerSegment`] for lists of messages or bytes of another
/// length, and [`Error::Schedule`] for times that the simulator refuses.
///
/// ```
/// use merak_partition::{PhaseCosts, Scheduled, lay_out};
/// use merak_pipe::{ScheduleKind, Size};
///
/// // Rank 0 runs the first and the last stage of a V, and so the embeddings and the head.
/// let cost = |forward| PhaseCosts {
///     forward,
///     input_grad: forward,
///     weight_grad: forward,
///     recompute: 0.0,
/// };
/// let mut segments = vec![cost(1.0); 10];
/// segments[9] = cost(3.0);
/// let schedule = ScheduleKind::ZbV.generate(Size::new(2, 8).with_chunks(2))?;
/// let step = Scheduled::new(schedule, segments)?;
/// let found = lay_out(&step)?;
/// assert_eq!(step.placement(), [0, 1, 1, 0]);
/// let loads = step.segment_costs()?.loads(&found.bounds);
/// assert_eq!(step.rank_loads(&loads), [18.0, 18.0]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn lay_out(step: &Scheduled) -> Result<Found> {
    let costs = step.segment_costs()?;
    let num_stages = step.placement.len();
    let mut best = autopipe(&costs, num_stages, step)?;
    if best.stopped == Stopped::Proven || num_stages == step.schedule.size.ranks {
        return Ok(best);
    }
    let limit = best.tried + most_tried(num_stages, step);
    loop {
        let before = best.step_time;
        for bounds in shifted(&best.bounds) {
            best.tried += 1;
            let time = step.step_time(&costs.loads(&bounds));
            if let Some(time) = time.filter(|time| *time < best.step_time) {
                (best.bounds, best.step_time) = (bounds, time);
            }
        }
        best.stopped = if best.step_time >= before {
            Stopped::NoMoves
        } else if best.tried >= limit {
            Stopped::Limit
        } else {
            continue;
        };
        return Ok(best);
    }
}

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
