//! The simulator: what a schedule costs before anything runs.

mod shared;

use crate::{
    Action, Costs, Error, Kind, Result, Schedule, Span, Tag, Timeline,
    dataflow::{self, Slots, Visit},
    validate,
};

/// What [`simulate`] finds, in the units of the costs.
#[derive(Debug, Clone, PartialEq)]
pub struct Simulation {
    /// When each action starts and ends.
    pub timeline: Timeline,
    /// When the last action ends.
    pub makespan: f64,
    /// For each rank the most microbatches whose activations it keeps at once, from `F` to the end of `W`
    /// or `B`; a chunk of a microbatch counts as its share, so that schedules with different numbers of
    /// chunks compare.
    pub peak_activations: Vec<f64>,
    /// The chain of actions, each starting when its message comes from the one before or when its rank has
    /// done the one before, that ends the run.
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

/// Times every action: it starts when the previous one of its rank has ended and its message is there, a
/// hop after the action that made it. Sends cost their rank nothing.
///
/// `B` costs `I + W`. A recompute without an `R` of its own is charged within the backward, but not on a
/// stage that the schedule says never recomputes. Takes time proportional to the number of actions.
///
/// # Errors
/// When the schedule's actions are out of order, incomplete or deadlock, or the costs do not fit it.
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

/// [`simulate`] for ranks that share so many cores: while more ranks compute than there are cores, all of them
/// slow down alike, as threads do under an operating system that is fair to them. Costs are times on a core of
/// one's own; hops need no core.
///
/// Where every rank has a core, the result is that of [`simulate`]; otherwise time grows by the logarithm of the
/// number of ranks. A fraction is a share: two pipelines side by side on three cores have one and a half each.
///
/// # Errors
/// As [`simulate`], and [`Error::Cores`] when the number is not above 0.
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
    if cores.is_nan() || cores <= 0.0 {
        return Err(Error::Cores { found: cores });
    }
    let placement = schedule.placement()?;
    costs.check(schedule)?;
    validate::check_actions(schedule, &placement)?;
    let mut clock = Clock::new(schedule, &placement, costs);
    if cores >= schedule.size.ranks as f64 {
        dataflow::walk(schedule, &placement, |visit| clock.run(visit))?;
    } else {
        // Who shares cores decides when things happen, and not whether they can.
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
    /// By rank and position: whether the action had to wait for its message.
    waited: Vec<Vec<bool>>,
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
            waited: lists
                .iter()
                .map(|list| Vec::with_capacity(list.len()))
                .collect(),
            messages: vec![(f64::INFINITY, 0, 0); slots.count()],
            recomputes,
        }
    }

    fn run(&mut self, visit: Visit) {
        let Visit {
            rank,
            position,
            action,
        } = visit;
        let free = self.spans[rank].last().map_or(0.0, |span| span.end);
        let arrival = action
            .input(self.placement.len())
            .map(|tag| self.messages[self.slots.of(tag)].0);
        let start = arrival.map_or(free, |arrival| arrival.max(free));
        let end = start + self.cost(action);
        let waits = arrival.is_some_and(|arrival| arrival > free || position == 0);
        self.record(rank, Span { action, start, end }, waits);
    }

    fn cost(&self, action: Action) -> f64 {
        let index = action.stage.0 * self.schedule.size.microbatches + action.microbatch.0;
        self.costs.of(action, self.recomputes[index])
    }

    /// Writes down the next action of a rank, and sends what it made; gives the message and its arrival.
    fn record(&mut self, rank: usize, span: Span, waited: bool) -> Option<(Tag, f64)> {
        let position = self.spans[rank].len();
        self.spans[rank].push(span);
        self.waited[rank].push(waited);
        let tag = span.action.output(self.placement.len())?;
        let arrival = span.end + self.hop(tag);
        self.messages[self.slots.of(tag)] = (arrival, rank, position);
        Some((tag, arrival))
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
            let action = self.spans[rank][position].action;
            path.push(action);
            let input = action.input(self.placement.len());
            at = match input.filter(|_| self.waited[rank][position]) {
                Some(tag) => {
                    let (_, rank, position) = self.messages[self.slots.of(tag)];
                    Some((rank, position))
                }
                None => position.checked_sub(1).map(|position| (rank, position)),
            };
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
