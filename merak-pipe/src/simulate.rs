//! The simulator: what a schedule costs before anything runs.

mod shared;

use crate::{
    Action, Costs, Error, Kind, Result, Schedule, Span, Tag, Timeline,
    action::Cell,
    dataflow::{self, Slots, Visit},
    limits::LEAST_CORES,
    validate,
};

/// The result of [`simulate`], in the units of the costs.
#[derive(Debug, Clone, PartialEq)]
pub struct Simulation {
    /// When each action starts and ends.
    pub timeline: Timeline,
    /// When the last action ends.
    pub makespan: f64,
    /// For each rank the most microbatches whose activations it keeps at once, from `F` to the end
    /// of `W` or `B`; a chunk of a microbatch counts as its share, so that schedules with different
    /// numbers of chunks compare.
    pub peak_activations: Vec<f64>,
    /// The chain of actions that ends the run: each starts when the message of the one before it
    /// arrives, or when that one frees its rank or its core.
    pub critical_path: Vec<Action>,
}

impl Simulation {
    /// The idle share of all ranks over the makespan; see [`Timeline::bubble`].
    pub fn bubble(&self) -> f64 {
        self.timeline.bubble()
    }

    /// The longest time that one rank takes from its first start to its last end.
    pub fn longest_rank_time(&self) -> f64 {
        self.timeline.rank_times().into_iter().fold(0.0, f64::max)
    }
}

/// Times every action: it starts when the previous one of its rank has ended and its message is
/// there, a hop after the action that made it. Sends cost their rank nothing.
///
/// A forward and a backward that stand as a [pair](crate::Pair) take [`Costs::overlap`] of the sum
/// of their times and begin when both messages are there; where nothing is won that way, with an
/// overlap of 1, they run one after the other, and the forward sends its result before the backward
/// begins.
///
/// `B` costs `I + W`. A recompute without an `R` of its own is charged within the backward, but not
/// on a stage that the schedule says never recomputes. Takes time proportional to the number of
/// actions.
///
/// # Errors
/// When the schedule's actions are out of order, incomplete or deadlock, or the costs do not fit
/// it.
///
/// ```
/// use merak_pipe::{Costs, ScheduleKind, Size, UnitCosts, simulate};
/// let schedule = ScheduleKind::ShiftedCriticalPath.generate(Size::new(4, 8))?;
/// let simulation = simulate(&schedule, &Costs::uniform(UnitCosts::default(), 4))?;
/// assert_eq!(simulation.makespan, 38.0);
/// # Ok::<(), merak_pipe::Error>(())
/// ```
pub fn simulate(schedule: &Schedule, costs: &Costs) -> Result<Simulation> {
    simulate_on(schedule, costs, f64::INFINITY)
}

/// [`simulate`] for ranks that share `cores` cores: an action that finds none free waits in a
/// queue, first come, first served, and then runs to its end, as under the
/// [engine](crate::PipelineEngine) with a link that has turns. Costs are times on a core of one's
/// own; hops need no core.
///
/// Where every rank has a core, the result is that of [`simulate`]; otherwise time grows by the
/// logarithm of the number of ranks. A fraction is a share: two pipelines side by side on three
/// cores have one and a half each, on which two actions at once run at three quarters of their
/// speed.
///
/// # Errors
/// As [`simulate`], and [`Error::Cores`] when the number is less than a millionth.
///
/// ```
/// use merak_pipe::{Costs, ScheduleKind, Size, UnitCosts, simulate_on};
/// // All forwards, then all backwards, on one core: the sum of all work.
/// let schedule = ScheduleKind::Gpipe.generate(Size::new(4, 8))?;
/// let costs = Costs::uniform("F=1,I=1,W=1,R=0".parse()?, 4);
/// assert_eq!(simulate_on(&schedule, &costs, 1.0)?.makespan, 96.0);
/// # Ok::<(), merak_pipe::Error>(())
/// ```
pub fn simulate_on(schedule: &Schedule, costs: &Costs, cores: f64) -> Result<Simulation> {
    if cores.is_nan() || cores < LEAST_CORES {
        return Err(Error::Cores { found: cores });
    }
    let placement = schedule.placement()?;
    costs.check(schedule.size)?;
    validate::check_actions(schedule, &placement)?;
    let mut clock = Clock::new(schedule, &placement, costs);
    if cores >= schedule.size.ranks as f64 {
        dataflow::walk(schedule, &placement, |visit| clock.run(visit))?;
    } else {
        // Sharing cores changes when actions run, not whether they can.
        dataflow::walk(schedule, &placement, |_| ())?;
        shared::run(&mut clock, cores);
    }
    let critical_path = clock.critical_path();
    let timeline = Timeline { ranks: clock.spans };
    Ok(Simulation {
        makespan: timeline.makespan(),
        peak_activations: peak_activations(schedule),
        critical_path,
        timeline,
    })
}

struct Clock<'a> {
    schedule: &'a Schedule,
    placement: &'a [usize],
    costs: &'a Costs,
    slots: Slots,
    spans: Vec<Vec<Span>>,
    /// By rank and position: the rank and position of the action after which this one could begin.
    after: Vec<Vec<Option<(usize, usize)>>>,
    /// By message: when it arrives, and the rank and position that made it.
    messages: Vec<(f64, usize, usize)>,
    /// By stage and microbatch: whether the backward recomputes.
    recomputes: Vec<bool>,
}

impl<'a> Clock<'a> {
    fn new(schedule: &'a Schedule, placement: &'a [usize], costs: &'a Costs) -> Self {
        let slots = Slots::new(schedule);
        let lists = &schedule.actions;
        let microbatches = schedule.size.microbatches;
        let mut recomputes = vec![true; placement.len() * microbatches];
        for stage in &schedule.no_recompute {
            let first = stage.0 * microbatches;
            if let Some(stage) = recomputes.get_mut(first..first + microbatches) {
                stage.fill(false);
            }
        }
        let explicit = lists.iter().flatten().filter(|a| a.kind == Kind::Recompute);
        for action in explicit {
            recomputes[action.stage.0 * microbatches + action.microbatch.0] = false;
        }
        Self {
            schedule,
            placement,
            costs,
            slots,
            spans: lists
                .iter()
                .map(|list| Vec::with_capacity(list.len()))
                .collect(),
            after: lists
                .iter()
                .map(|list| Vec::with_capacity(list.len()))
                .collect(),
            messages: vec![(f64::INFINITY, 0, 0); slots.count()],
            recomputes,
        }
    }

    fn run(&mut self, visit: Visit) {
        let Visit { rank, cell } = visit;
        for cell in self.parts(cell) {
            let free = self.spans[rank].last().map_or(0.0, |span| span.end);
            let start = self.arrival(cell).map_or(free, |arrival| arrival.max(free));
            let end = start + self.cost(cell);
            let after = self.cause(rank, cell);
            self.record(rank, cell, (start, end), after);
        }
    }

    /// The parts that run one after the other: both actions of a pair where running at once gains
    /// nothing.
    fn parts(&self, cell: Cell) -> impl Iterator<Item = Cell> + use<> {
        let at_once = self.costs.overlaps();
        let whole = at_once.then_some(cell);
        let apart = cell.actions().filter(move |_| !at_once).map(Cell::Alone);
        whole.into_iter().chain(apart)
    }

    /// The next part that the rank runs.
    fn next(&self, rank: usize) -> Option<Cell> {
        let position = self.spans[rank].len();
        // The second action of a pair stands alone here.
        self.parts(self.schedule.cell(rank, position)?).next()
    }

    /// When the last message of a cell arrives; `None` where it needs no message.
    fn arrival(&self, cell: Cell) -> Option<f64> {
        let message = self.last_message(cell)?;
        Some(message.0)
    }

    fn last_message(&self, cell: Cell) -> Option<(f64, usize, usize)> {
        let stages = self.placement.len();
        let tags = cell.actions().filter_map(|action| action.input(stages));
        let messages = tags.map(|tag| self.messages[self.slots.of(tag)]);
        messages.reduce(|last, message| if message.0 > last.0 { message } else { last })
    }

    /// The action that the next one of a rank waits for last: the maker of its message, or the one
    /// before it on the rank.
    fn cause(&self, rank: usize, cell: Cell) -> Option<(usize, usize)> {
        let free = self.spans[rank].last().map(|span| span.end);
        match self.last_message(cell) {
            Some((arrival, maker, position)) if free.is_none_or(|free| arrival > free) => {
                Some((maker, position))
            }
            _ => self.spans[rank]
                .len()
                .checked_sub(1)
                .map(|last| (rank, last)),
        }
    }

    fn cost(&self, cell: Cell) -> f64 {
        let cost = |action: Action| {
            let index = action.stage.0 * self.schedule.size.microbatches + action.microbatch.0;
            self.costs.of(action, self.recomputes[index])
        };
        let sum: f64 = cell.actions().map(cost).sum();
        if cell.second().is_some() {
            sum * self.costs.overlap
        } else {
            sum
        }
    }

    /// Records what a rank did next, and sends the results. Returns the messages and their
    /// arrivals.
    fn record(
        &mut self,
        rank: usize,
        cell: Cell,
        (start, end): (f64, f64),
        after: Option<(usize, usize)>,
    ) -> [Option<(Tag, f64)>; 2] {
        let stages = self.placement.len();
        [Some(cell.first()), cell.second()].map(|action| {
            let action = action?;
            let position = self.spans[rank].len();
            self.spans[rank].push(Span { action, start, end });
            self.after[rank].push(after);
            let tag = action.output(stages)?;
            let arrival = end + self.hop(tag);
            self.messages[self.slots.of(tag)] = (arrival, rank, position);
            Some((tag, arrival))
        })
    }

    fn hop(&self, tag: Tag) -> f64 {
        if self.placement[tag.from.0] == self.placement[tag.to.0] {
            0.0
        } else {
            self.costs.hop[tag.from.0.min(tag.to.0)]
        }
    }

    /// Follows from the last end back to the start what each action waited for.
    fn critical_path(&self) -> Vec<Action> {
        let end = |rank: usize| self.spans[rank].last().map_or(0.0, |span| span.end);
        let ranks = 0..self.spans.len();
        let latest = ranks.fold(
            0,
            |best, rank| if end(rank) > end(best) { rank } else { best },
        );
        let mut path = Vec::new();
        let mut at = self.spans[latest].len().checked_sub(1).map(|p| (latest, p));
        while let Some((rank, position)) = at {
            path.push(self.spans[rank][position].action);
            at = self.after[rank][position];
        }
        path.reverse();
        path
    }
}

fn peak_activations(schedule: &Schedule) -> Vec<f64> {
    let chunks = schedule.size.chunks as f64;
    let forward_only = schedule.is_forward_only();
    let peak = |actions: &Vec<Action>| {
        let (mut live, mut peak) = (0_usize, 0);
        for action in actions {
            if action.kind == Kind::Forward {
                live += 1;
                peak = peak.max(live);
            }
            if action.kind.ends_microbatch() || forward_only {
                live -= 1;
            }
        }
        peak as f64 / chunks
    };
    schedule.actions.iter().map(peak).collect()
}
