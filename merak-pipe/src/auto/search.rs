//! The search itself: list scheduling, beams and moves, and the shortest schedules that they leave.

use super::{
    Memory, Named,
    beam::{Beam, beam},
    descent::{Draws, Effort, descend},
    greedy::{Problem, Rule, greedy},
    is_optimal,
    job_shop::JobShop,
};
use crate::{Action, Costs, Kind, Result, Schedule, Simulation, Size, StageId, simulate};

/// The rules of list scheduling: within the limits of memory, and with fewer live microbatches than
/// they allow.
fn rules(size: Size, memory: &Memory) -> Vec<Rule<'_>> {
    let ranks = size.ranks;
    let most = size.microbatches.saturating_mul(size.chunks);
    let caps = [ranks / 2, 3 * ranks / 4, ranks, 3 * ranks / 2, 2 * ranks];
    let caps = caps.map(|cap| cap.saturating_mul(size.chunks).max(size.chunks));
    let mut rules: Vec<Rule<'_>> = Vec::new();
    for cap in caps.into_iter().chain([most]) {
        for choice in 0..16 {
            let rule = Rule {
                limits: memory
                    .activations
                    .iter()
                    .map(|kept| cap.min(*kept))
                    .collect(),
                bytes: memory.bytes.as_ref(),
                forward_first: choice % 2 == 1,
                oldest_first: choice / 2 % 2 == 1 && size.chunks > 1,
                patience: f64::from(choice / 4) / 3.0,
                whole_first: false,
            };
            if rules.contains(&rule) {
                continue;
            }
            if rule.bytes.is_some_and(|bytes| bytes.fuses) {
                rules.push(Rule {
                    whole_first: true,
                    ..rule.clone()
                });
            }
            rules.push(rule);
        }
    }
    rules
}

/// Splits every full backward into its two halves. Input gradients leave earlier, so the schedule
/// gets no longer.
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
        ..Schedule::new("auto", schedule.size, actions)
    }
}

/// A schedule, and for each stage its rank.
#[derive(Debug, Clone)]
pub(super) struct Candidate {
    pub(super) schedule: Schedule,
    pub(super) placement: Vec<usize>,
    makespan: f64,
}

impl Candidate {
    /// Moves its actions; returns the number of orders that were timed.
    fn improve(
        &mut self,
        costs: &Costs,
        memory: &Memory,
        effort: Effort,
        mut draws: Draws,
    ) -> usize {
        let shop = JobShop::new(self, costs, memory);
        let lists = shop.numbers(&self.schedule);
        let Some(found) = descend(&shop, lists, memory, effort, &mut draws) else {
            return 0;
        };
        if found.makespan < self.makespan {
            let schedule = rebuilt(&self.schedule, shop.actions(&found.lists));
            if schedule.validate().is_ok() {
                (self.schedule, self.makespan) = (schedule, found.makespan);
            }
        }
        found.moves
    }
}

/// Rounds of moves: the number of schedules improved, and the divisor of all moves that gives their
/// share.
const ROUNDS: [(usize, usize); 4] = [(64, 4), (12, 4), (4, 4), (1, 4)];

/// Budget of a round of beam searches: the width times the square of the schedule's actions, summed
/// over the placements.
const BEAMS: usize = 30_000_000;

/// A round of beam searches.
pub(super) struct BeamRound {
    /// The number of placements, those with the shortest schedules so far. The usual placements are
    /// in every round.
    placements: usize,
    /// Whether it looks for the shortest schedule of each placement. Otherwise it drops what cannot
    /// be shorter than the shortest of all, which leaves more room for the rest.
    of_each: bool,
    /// [`Beam::mean`] and [`Beam::alike`].
    mean: f64,
    alike: usize,
}

/// Rounds before actions are moved: for all placements, then wider for the usual and the best ones.
pub(super) const FIRST_BEAMS: [BeamRound; 3] = [
    BeamRound {
        placements: usize::MAX,
        of_each: true,
        mean: 0.3,
        alike: 1,
    },
    BeamRound {
        placements: 8,
        of_each: false,
        mean: 0.3,
        alike: 1,
    },
    BeamRound {
        placements: 8,
        of_each: false,
        mean: 1.0,
        alike: 1,
    },
];

/// The round after that. Small pipelines have room for several beginnings of a shape: one may have
/// a rank free earlier, another one a message there earlier.
pub(super) const LAST_BEAMS: BeamRound = BeamRound {
    placements: 1,
    of_each: false,
    mean: 1.0,
    alike: 8,
};

/// The largest width of a beam search: the beginnings that it keeps.
const MOST_WIDTH: usize = 2000;

/// The usual placements of the stages: in turn, and there and back.
const USUAL_PLACEMENTS: usize = 2;

/// The shortest schedules so far.
pub(super) struct Search<'a> {
    pub(super) costs: &'a Costs,
    pub(super) memory: &'a Memory,
    pub(super) bound: f64,
    /// Orders that may be timed.
    pub(super) moves: usize,
    /// The shortest schedule of each placement, in the order in which they were found.
    pub(super) found: Vec<Candidate>,
}

impl Search<'_> {
    /// Offers the named schedule, and those of list scheduling for every placement.
    pub(super) fn begin(
        &mut self,
        named: Option<&Named>,
        problems: &[Problem<'_>],
        no_recompute: &[StageId],
    ) -> Result<()> {
        if let Some((_, schedule, _)) = named {
            self.offer(split_backwards(schedule))?;
            self.offer(rebuilt(schedule, schedule.actions.clone()))?;
        }
        for problem in problems {
            for rule in rules(problem.size, self.memory) {
                if let Some(mut schedule) = greedy(problem, &rule) {
                    schedule.no_recompute = no_recompute.to_vec();
                    self.offer(schedule)?;
                }
            }
        }
        Ok(())
    }

    /// Keeps a schedule within the limits that is shorter than those with the same placement.
    fn offer(&mut self, schedule: Schedule) -> Result<()> {
        let mut candidate = Candidate {
            placement: schedule.placement()?,
            schedule,
            makespan: f64::INFINITY,
        };
        let shop = JobShop::new(&candidate, self.costs, self.memory);
        let lists = shop.numbers(&candidate.schedule);
        let mut ranks = lists.iter().enumerate();
        if !ranks.all(|(rank, list)| shop.keeps(rank, list, self.memory)) {
            return Ok(());
        }
        let Some(length) = shop.time(&lists, &mut shop.times(lists.len())) else {
            return Ok(());
        };
        candidate.makespan = length.makespan;
        let same = |found: &&mut Candidate| found.placement == candidate.placement;
        match self.found.iter_mut().find(same) {
            Some(found) if found.makespan <= candidate.makespan => {}
            Some(found) => *found = candidate,
            None => self.found.push(candidate),
        }
        Ok(())
    }

    /// Looks for shorter schedules by rounds of beam search.
    pub(super) fn look_ahead(
        &mut self,
        rounds: &[BeamRound],
        problems: &[Problem<'_>],
        no_recompute: &[StageId],
    ) -> Result<()> {
        let rule = Rule::within(self.memory);
        for round in rounds {
            self.sort();
            let looked = self.looked_at(problems, round.placements);
            for problem in &looked {
                let size = problem.num_halves().saturating_mul(problem.num_halves());
                let width = (BEAMS / size / looked.len()).min(MOST_WIDTH);
                let below =
                    self.makespan(|placement| !round.of_each || *placement == *problem.placement);
                if width == 0 || is_optimal(below, self.bound) {
                    continue;
                }
                let search = Beam {
                    width,
                    below,
                    mean: round.mean,
                    alike: round.alike,
                };
                if let Some(mut schedule) = beam(problem, &rule, search) {
                    schedule.no_recompute = no_recompute.to_vec();
                    self.offer(schedule)?;
                }
            }
        }
        Ok(())
    }

    /// The placements that a round of beam search looks at: those with the shortest schedules, and
    /// the usual ones.
    fn looked_at<'a>(&self, problems: &'a [Problem<'a>], most: usize) -> Vec<&'a Problem<'a>> {
        let places = self.found.iter().filter_map(|found| {
            problems
                .iter()
                .position(|problem| *problem.placement == *found.placement)
        });
        let mut places: Vec<_> = places.take(most).collect();
        for usual in 0..USUAL_PLACEMENTS.min(problems.len()) {
            if !places.contains(&usual) {
                places.push(usual);
            }
        }
        places.into_iter().map(|place| &problems[place]).collect()
    }

    /// The shortest makespan so far, of placements like this.
    fn makespan(&self, is_like: impl Fn(&[usize]) -> bool) -> f64 {
        let found = self.found.iter();
        let like = found.filter(|found| is_like(&found.placement));
        like.map(|found| found.makespan)
            .fold(f64::INFINITY, f64::min)
    }

    fn sort(&mut self) {
        self.found.sort_by(|a, b| a.makespan.total_cmp(&b.makespan));
    }

    /// Moves actions of the shortest schedules: of many in the first round, then of fewer. Returns
    /// the number of orders that were timed.
    pub(super) fn improve(&mut self) -> usize {
        let mut spent = 0;
        for (round, (kept, share)) in (1..).zip(ROUNDS) {
            self.sort();
            self.found.truncate(kept);
            let effort = Effort {
                moves: self.moves / share / self.found.len(),
                bound: self.bound,
            };
            for candidate in &mut self.found {
                spent += candidate.improve(self.costs, self.memory, effort, Draws(round));
                if is_optimal(candidate.makespan, self.bound) {
                    return spent;
                }
            }
        }
        spent
    }

    /// The shortest schedule and its figures.
    pub(super) fn shortest(self) -> Result<(Schedule, Simulation)> {
        let shortest = self
            .found
            .into_iter()
            .min_by(|a, b| a.makespan.total_cmp(&b.makespan));
        let schedule = shortest
            .expect("list scheduling keeps every legal limit")
            .schedule;
        let simulation = simulate(&schedule, self.costs)?;
        Ok((schedule, simulation))
    }
}
