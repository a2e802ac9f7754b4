//! `auto`: a schedule built for given costs and a limit of memory.
//!
//! The search starts from the best schedule that keeps the limit, of the named ones and of those that list
//! scheduling makes for these costs. It splits its backwards, and moves single actions along their rank's list as
//! long as that pays:
//!
//! ```text
//! named schedules ─┐
//! list scheduling ─┴► simulate ──► best one within the limit ──► B = I, W
//!                                                                  │
//!            ┌──── keep it if no worse ◄── simulate ◄── move one action up or down
//!            └──────────────────────────────────────────────────────┘   until bound or budget
//! ```
//!
//! List scheduling lets each rank, whenever it is free, do the first of its ready actions under one of several rules
//! (input gradients first or forwards first, up to how many live microbatches, whether weight gradients wait for a
//! message that is about to come), with the stages placed in turn and, where a rank has two, in a V.
//!
//! The budget counts simulations and the draws come from a fixed seed, so the same question always has the
//! same answer.

mod greedy;

use crate::{
    Action, Costs, Error, Kind, Result, Schedule, ScheduleKind, Simulation, Size, simulate,
};
use greedy::{Rule, greedy};

/// What [`auto`](fn@auto) may use.
#[derive(Debug, Clone, PartialEq)]
pub struct AutoLimits {
    /// For each rank the most microbatches whose activations it may keep, as in
    /// [`Simulation::peak_activations`]; empty for no limit.
    pub peak_activations: Vec<f64>,
    /// Most moves that are simulated.
    pub moves: usize,
}

impl Default for AutoLimits {
    /// No limit of memory, and 2,000 moves.
    fn default() -> Self {
        Self {
            peak_activations: Vec::new(),
            moves: 2000,
        }
    }
}

/// A schedule that [`auto`](fn@auto) found, and how.
#[derive(Debug, Clone)]
pub struct Auto {
    /// The schedule, under the name `auto`.
    pub schedule: Schedule,
    /// Its figures.
    pub simulation: Simulation,
    /// The best named schedule, and its makespan.
    pub start: (ScheduleKind, f64),
    /// With the same stages on each rank and recomputations, no schedule is shorter than this.
    pub bound: f64,
    /// Moves that were simulated.
    pub moves: usize,
    /// Why the search ended.
    pub stopped: Stopped,
}

/// Why a search ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stopped {
    /// The makespan is the lower bound: nothing is shorter.
    Optimal,
    /// All moves of the budget were simulated.
    Budget,
}

impl std::fmt::Display for Stopped {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Optimal => "the lower bound is reached",
            Self::Budget => "the budget of moves is spent",
        })
    }
}

/// Searches a schedule for the given costs that keeps the limits, at least as short as every named
/// training schedule of the same size that does, where no two actions run at once: it makes no pairs, and gains nothing
/// by [`Costs::overlap`].
///
/// # Errors
/// When the size or the costs are not legal, or no named schedule keeps the limit of memory.
///
/// ```
/// use merak_pipe::{AutoLimits, Costs, Size, UnitCosts, auto};
/// // A slow last stage: the search fits the schedule to it.
/// let mut costs = Costs::uniform("F=1,I=1,W=1,R=0".parse()?, 3);
/// costs.forward[2] = 2.0;
/// let found = auto(Size::new(3, 6), &costs, &AutoLimits::default())?;
/// assert!(found.bound <= found.simulation.makespan && found.simulation.makespan <= found.start.1);
/// # Ok::<(), merak_pipe::Error>(())
/// ```
pub fn auto(size: Size, costs: &Costs, limits: &AutoLimits) -> Result<Auto> {
    let costs = &Costs {
        overlap: 1.0,
        ..costs.clone()
    };
    let (kind, named, simulation) = best_named(size, costs, limits)?;
    let start = (kind, simulation.makespan);
    let (schedule, simulation) = best_listed(size, costs, limits, (named, simulation));
    let placement = schedule.placement()?;
    let mut search = Search {
        bound: lower_bound(&placement, costs, &simulation),
        schedule,
        simulation,
        costs,
        limits,
    };
    let split = split_backwards(&search.schedule);
    search.offer(split);
    let mut draws = Draws(1);
    let mut moves = 0;
    while moves < limits.moves && !search.is_optimal() {
        moves += 1;
        if let Some(moved) = draws.neighbour(&search.schedule) {
            search.offer(moved);
        }
    }
    let stopped = if search.is_optimal() {
        Stopped::Optimal
    } else {
        Stopped::Budget
    };
    Ok(Auto {
        schedule: search.schedule,
        simulation: search.simulation,
        start,
        bound: search.bound,
        moves,
        stopped,
    })
}

fn best_named(
    size: Size,
    costs: &Costs,
    limits: &AutoLimits,
) -> Result<(ScheduleKind, Schedule, Simulation)> {
    size.check()?;
    if !limits.peak_activations.is_empty() && limits.peak_activations.len() != size.ranks {
        return Err(Error::LimitCount {
            expected: size.ranks,
            found: limits.peak_activations.len(),
        });
    }
    let mut best: Option<(ScheduleKind, Schedule, Simulation)> = None;
    let mut least = f64::INFINITY;
    let kinds = ScheduleKind::ALL.into_iter().filter(|kind| {
        let chunks = kind.fixed_chunks().unwrap_or(size.chunks);
        kind.is_training()
            && chunks == size.chunks
            && size.microbatches >= kind.min_microbatches(size.ranks)
    });
    for kind in kinds {
        let schedule = kind.generate(size)?;
        let simulation = simulate(&schedule, costs)?;
        let peak = simulation.peak_activations.iter().copied();
        least = least.min(peak.fold(0.0, f64::max));
        let shorter = best
            .as_ref()
            .is_none_or(|(_, _, b)| simulation.makespan < b.makespan);
        if shorter && keeps(&simulation, limits) {
            best = Some((kind, schedule, simulation));
        }
    }
    let (kind, mut schedule, simulation) = best.ok_or(Error::MemoryLimit { least })?;
    schedule.name = "auto".into();
    Ok((kind, schedule, simulation))
}

/// The best of `best` and of what list scheduling makes.
fn best_listed(
    size: Size,
    costs: &Costs,
    limits: &AutoLimits,
    mut best: (Schedule, Simulation),
) -> (Schedule, Simulation) {
    let in_turn: Vec<_> = (0..size.stages()).map(|stage| stage % size.ranks).collect();
    let mut placements = vec![in_turn];
    if size.chunks == 2 && size.ranks > 1 {
        let last = size.ranks - 1;
        placements.push((0..=last).chain((0..=last).rev()).collect());
    }
    for placement in &placements {
        for rule in rules(size, limits) {
            let Some(schedule) = greedy(size, placement, costs, &rule) else {
                continue;
            };
            let Ok(simulation) = simulate(&schedule, costs) else {
                continue;
            };
            let shorter = simulation.makespan < best.1.makespan;
            if shorter && keeps(&simulation, limits) && schedule.validate().is_ok() {
                best = (schedule, simulation);
            }
        }
    }
    best
}

/// The rules of list scheduling: within the limits of memory, and with fewer live microbatches than they allow.
fn rules(size: Size, limits: &AutoLimits) -> Vec<Rule> {
    let most = size.microbatches.saturating_mul(size.chunks);
    let allowed = |rank: usize| {
        let limit = limits.peak_activations.get(rank);
        limit.map_or(most, |limit| (limit * size.chunks as f64 + 1e-9) as usize)
    };
    let mut rules: Vec<Rule> = Vec::new();
    for cap in [size.ranks, 3 * size.ranks / 2, 2 * size.ranks, most] {
        let cap = cap.saturating_mul(size.chunks);
        let limits: Vec<_> = (0..size.ranks).map(|rank| allowed(rank).min(cap)).collect();
        for (forward_first, patient) in [(false, false), (false, true), (true, false), (true, true)]
        {
            let rule = Rule {
                limits: limits.clone(),
                forward_first,
                patient,
            };
            if !rules.contains(&rule) {
                rules.push(rule);
            }
        }
    }
    rules
}

fn keeps(simulation: &Simulation, limits: &AutoLimits) -> bool {
    let peaks = simulation.peak_activations.iter();
    let mut pairs = peaks.zip(&limits.peak_activations);
    pairs.all(|(peak, limit)| *peak <= *limit + 1e-9)
}

/// Each rank has to wait for its first message and then to do its work.
fn lower_bound(placement: &[usize], costs: &Costs, simulation: &Simulation) -> f64 {
    let mut arrival = 0.0_f64;
    let mut bound = vec![f64::INFINITY; simulation.timeline.ranks.len()];
    for (stage, &rank) in placement.iter().enumerate() {
        bound[rank] = arrival.min(bound[rank]);
        let crosses = placement.get(stage + 1).is_some_and(|next| *next != rank);
        arrival += costs.forward[stage] + if crosses { costs.hop[stage] } else { 0.0 };
    }
    let busy = simulation.timeline.busy_times();
    bound
        .iter()
        .zip(busy)
        .map(|(wait, work)| wait + work)
        .fold(0.0, f64::max)
}

/// Every full backward as its two halves. An input gradient leaves earlier then, so nothing gets longer.
fn split_backwards(schedule: &Schedule) -> Schedule {
    let split = |action: &Action| {
        let with = |kind| Action { kind, ..*action };
        match action.kind {
            Kind::Backward => vec![with(Kind::InputGrad), with(Kind::WeightGrad)],
            _ => vec![*action],
        }
    };
    let ranks = schedule.actions.iter();
    rebuilt(
        schedule,
        ranks
            .map(|list| list.iter().flat_map(split).collect())
            .collect(),
    )
}

/// The same schedule with other lists of actions, and the buffers that they need.
fn rebuilt(schedule: &Schedule, actions: Vec<Vec<Action>>) -> Schedule {
    Schedule {
        no_recompute: schedule.no_recompute.clone(),
        ..Schedule::new(schedule.name.clone(), schedule.size, actions)
    }
}

/// The best schedule so far.
struct Search<'a> {
    schedule: Schedule,
    simulation: Simulation,
    bound: f64,
    costs: &'a Costs,
    limits: &'a AutoLimits,
}

impl Search<'_> {
    fn is_optimal(&self) -> bool {
        self.simulation.makespan <= self.bound * (1.0 + 1e-12)
    }

    /// Takes a schedule that is valid, keeps the limits and is no worse: later moves may pay on a plateau.
    fn offer(&mut self, schedule: Schedule) {
        let Ok(simulation) = simulate(&schedule, self.costs) else {
            return;
        };
        let ends = |simulation: &Simulation| -> f64 {
            let last = simulation
                .timeline
                .ranks
                .iter()
                .filter_map(|spans| spans.last());
            last.map(|span| span.end).sum()
        };
        let better = (simulation.makespan, ends(&simulation))
            <= (self.simulation.makespan, ends(&self.simulation));
        if better && keeps(&simulation, self.limits) && schedule.validate().is_ok() {
            self.schedule = schedule;
            self.simulation = simulation;
        }
    }
}

/// A linear congruential generator: the same moves on every rank and machine.
struct Draws(u64);

impl Draws {
    fn below(&mut self, limit: usize) -> usize {
        self.0 = self
            .0
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        usize::try_from(self.0 >> 33).unwrap_or(0) % limit.max(1)
    }

    /// The schedule with one action elsewhere in its rank's list, or `None` if it may not go there.
    fn neighbour(&mut self, schedule: &Schedule) -> Option<Schedule> {
        let rank = self.below(schedule.actions.len());
        let list = &schedule.actions[rank];
        let from = self.below(list.len());
        let distance = 1 + self.below(8);
        let to = if self.below(2) == 0 {
            from.checked_sub(distance)?
        } else {
            from + distance
        };
        let moved = *list.get(from).filter(|_| to < list.len())?;
        let passed = if to < from {
            &list[to..from]
        } else {
            &list[from + 1..=to]
        };
        // Actions of one stage keep their order within a kind, and within a microbatch.
        let bound = |other: &Action| {
            other.stage == moved.stage
                && (other.kind == moved.kind || other.microbatch == moved.microbatch)
        };
        if passed.iter().any(bound) {
            return None;
        }
        let mut actions = schedule.actions.clone();
        let action = actions[rank].remove(from);
        actions[rank].insert(to, action);
        Some(rebuilt(schedule, actions))
    }
}
