//! Beam search: the lists of all ranks grow side by side. Each step extends every beginning by
//! every choice, and keeps the most promising results.

use super::greedy::{Board, FORWARD, INPUT, Problem, Rule, halves};
use crate::{Action, Kind, Schedule};
use std::collections::BTreeMap;

/// The settings of a beam search: which beginnings it keeps.
#[derive(Debug, Clone, Copy)]
pub(super) struct Beam {
    /// The beginnings of each length that stay.
    pub(super) width: usize,
    /// Only beginnings whose lower bound is below this makespan stay.
    pub(super) below: f64,
    /// Weight of the mean over ranks of their earliest ends, beside the latest of these ends, in
    /// the estimate of a beginning.
    pub(super) mean: f64,
    /// The beginnings with the same number of actions of each stage and kind that stay.
    pub(super) alike: usize,
}

/// The shortest schedule that goes on from the most promising beginnings of each length, or `None`
/// where none is shorter than [`Beam::below`].
///
/// The rank whose next action can end first chooses among all actions that it can begin before that
/// end. Such choices make every schedule in which no action could run earlier ([Giffler and
/// Thompson](https://doi.org/10.1287/opre.8.4.487)). A forward that takes the last room of a rank
/// can also be put off, as a later one may be the better one to have that room.
pub(super) fn beam(problem: &Problem<'_>, rule: &Rule<'_>, beam: Beam) -> Option<Schedule> {
    let guide = Guide::new(problem, beam);
    let mut beginnings = vec![Beginning::new(problem, rule)];
    let mut path: Vec<(Action, Option<usize>)> = Vec::new();
    // The shortest schedule that is complete: its makespan, and its last action.
    let mut shortest: Option<(f64, Option<usize>)> = None;
    for _ in 0..problem.num_halves() {
        let mut next = Vec::new();
        for beginning in &beginnings {
            beginning.go_on(&guide, &mut next);
        }
        let mut next = best_of(next, beam);
        for beginning in &mut next {
            path.extend(beginning.done.map(|action| (action, beginning.last)));
            beginning.last = path.len().checked_sub(1);
        }
        for complete in next.extract_if(.., |beginning| beginning.to_do == 0) {
            let makespan = complete.board.free.iter().copied().fold(0.0, f64::max);
            if shortest.is_none_or(|(least, _)| makespan < least) {
                shortest = Some((makespan, complete.last));
            }
        }
        beginnings = next;
    }
    let mut actions = vec![Vec::new(); problem.size.ranks];
    let (_, mut last) = shortest?;
    while let Some(at) = last {
        let (action, before) = path[at];
        actions[problem.placement[action.stage.0]].push(action);
        last = before;
    }
    for list in &mut actions {
        list.reverse();
    }
    Some(Schedule::new("auto", problem.size, actions))
}

/// The most promising beginnings, without those that another one with the same number of actions of
/// each stage and kind makes needless.
fn best_of(mut next: Vec<Beginning<'_>>, beam: Beam) -> Vec<Beginning<'_>> {
    next.sort_by(|one, other| one.value.total_cmp(&other.value));
    // By shape: where its beginnings stand among the best.
    let mut shapes = BTreeMap::<u64, Vec<usize>>::new();
    let mut best: Vec<Beginning<'_>> = Vec::new();
    for beginning in next {
        if best.len() == beam.width {
            break;
        }
        let alike = shapes.entry(beginning.shape).or_default();
        let needless = |&at: &usize| best[at].is_as_good_as(&beginning);
        if alike.len() < beam.alike && !alike.iter().any(needless) {
            alike.push(best.len());
            best.push(beginning);
        }
    }
    best
}

/// Lower bounds on the time after an action, for any beginning.
struct Guide<'a> {
    problem: &'a Problem<'a>,
    beam: Beam,
    /// By stage: the least time from the end of a forward to the end of its input gradient, and the
    /// least time after that.
    back: Vec<f64>,
    tail: Vec<f64>,
}

impl<'a> Guide<'a> {
    fn new(problem: &'a Problem<'a>, beam: Beam) -> Self {
        let costs = problem.costs;
        let input = |stage: usize| costs.recompute[stage] + costs.input_grad[stage];
        let last = problem.placement.len() - 1;
        let mut back = vec![costs.input_grad[last]; last + 1];
        for stage in (0..last).rev() {
            let there = problem.hop(stage) + costs.forward[stage + 1];
            back[stage] = there + back[stage + 1] + problem.hop(stage) + costs.input_grad[stage];
        }
        let mut tail = vec![costs.weight_grad[0]; last + 1];
        for stage in 1..=last {
            let upstream = problem.hop(stage - 1) + input(stage - 1) + tail[stage - 1];
            tail[stage] = costs.weight_grad[stage].max(upstream);
        }
        Self {
            problem,
            beam,
            back,
            tail,
        }
    }
}

/// The first actions of all ranks.
#[derive(Clone)]
struct Beginning<'a> {
    board: Board<'a>,
    /// By rank: the time of the actions that are still to do.
    left: Vec<f64>,
    /// Actions that are still to do on all ranks, a whole backward as its two halves.
    to_do: usize,
    /// By stage: whether its rank puts off its forward until it has done something else.
    held: Vec<bool>,
    /// The last action, and the index of the one before it in the path.
    done: Option<Action>,
    last: Option<usize>,
    /// An estimate of the makespan with this beginning; less is better.
    value: f64,
    /// A hash, equal for beginnings with the same number of actions of each stage and kind, a whole
    /// backward as its two halves.
    shape: u64,
}

/// An action that can be done next.
#[derive(Debug, Clone, Copy)]
struct Choice {
    rank: usize,
    action: Action,
    start: f64,
    end: f64,
}

impl<'a> Beginning<'a> {
    fn new(problem: &'a Problem<'a>, rule: &'a Rule<'a>) -> Self {
        let costs = problem.costs;
        let of_stage = |&stage: &usize| {
            let early = costs.forward[stage] + costs.recompute[stage];
            early + costs.input_grad[stage] + costs.weight_grad[stage]
        };
        let left = problem.stages.iter().map(|stages| {
            let once: f64 = stages.iter().map(of_stage).sum();
            once * problem.size.microbatches as f64
        });
        Self {
            board: Board::new(problem, rule),
            left: left.collect(),
            to_do: problem.num_halves(),
            held: vec![false; problem.placement.len()],
            done: None,
            last: None,
            value: 0.0,
            shape: 0,
        }
    }

    /// Adds the beginning that each choice of the next action gives, if its bound is below
    /// [`Beam::below`].
    fn go_on(&self, guide: &Guide<'_>, next: &mut Vec<Self>) {
        let mut held = self.held.clone();
        let mut seen: Vec<Action> = Vec::new();
        loop {
            let choices = self.choices(guide.problem, &held);
            let ends = |one: &&Choice, other: &&Choice| one.end.total_cmp(&other.end);
            let Some(&first) = choices.iter().min_by(ends) else {
                return;
            };
            let own = choices.iter().filter(|choice| {
                choice.rank == first.rank
                    && (choice.start < first.end || choice.action == first.action)
            });
            let mut waits = false;
            for choice in own {
                if choice.action.kind == Kind::Forward && self.board.is_short(choice.rank) {
                    (waits, held[choice.action.stage.0]) = (true, true);
                }
                if !seen.contains(&choice.action) {
                    seen.push(choice.action);
                    next.extend(self.with(choice, &held, guide));
                }
            }
            if !waits {
                return;
            }
        }
    }

    /// Whether every continuation of `other`, which has the same shape, fits this one and ends no
    /// later.
    fn is_as_good_as(&self, other: &Self) -> bool {
        let mut held = self.held.iter().zip(&other.held);
        held.all(|(own, others)| own <= others) && self.board.is_no_later_than(&other.board)
    }

    fn choices(&self, problem: &Problem<'_>, held: &[bool]) -> Vec<Choice> {
        let board = &self.board;
        let mut choices = Vec::new();
        for (rank, stages) in problem.stages.iter().enumerate() {
            let free = board.free[rank];
            let mut add = |kind, stage: usize, ready: f64| {
                let (action, start) = (board.action(kind, stage), free.max(ready));
                choices.push(Choice {
                    rank,
                    action,
                    start,
                    end: start + problem.costs.of(action, true),
                });
            };
            for (chunk, &stage) in stages.iter().enumerate() {
                let [_, inputs, weights] = board.next[stage];
                let ready = [FORWARD, INPUT].map(|kind| board.ready_at(kind, stage));
                if ready[FORWARD].is_finite() && !held[stage] && board.has_room(rank, chunk) {
                    add(Kind::Forward, stage, ready[FORWARD]);
                }
                if ready[INPUT].is_finite() {
                    for kind in board.backwards(rank, stage).into_iter().flatten() {
                        add(kind, stage, ready[INPUT]);
                    }
                }
                if weights < inputs {
                    add(Kind::WeightGrad, stage, free);
                }
            }
        }
        choices
    }

    fn with(&self, choice: &Choice, held: &[bool], guide: &Guide<'_>) -> Option<Self> {
        let &Choice {
            rank,
            action,
            start,
            end,
        } = choice;
        let mut after = self.clone();
        after.board.carry_out(rank, action, start);
        after.left[rank] -= end - start;
        after.to_do -= halves(action.kind);
        after.held.copy_from_slice(held);
        for &stage in &guide.problem.stages[rank] {
            after.held[stage] = false;
        }
        after.done = Some(action);
        let (bound, mean) = after.bound(guide);
        after.value = bound + guide.beam.mean * mean;
        let kinds = match action.kind {
            Kind::Backward => &[Kind::InputGrad, Kind::WeightGrad][..],
            ref kind => std::slice::from_ref(kind),
        };
        for kind in kinds {
            let row = (action.stage.0 * Kind::ALL.len() + *kind as usize) as u64;
            let mixed = (row + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15);
            after.shape = after.shape.wrapping_add(mixed ^ (mixed >> 29));
        }
        (bound < guide.beam.below).then_some(after)
    }

    /// A lower bound on the makespan with this beginning, and the mean of the bounds of its ranks.
    fn bound(&self, guide: &Guide<'_>) -> (f64, f64) {
        let (forward, by_forwards) = self.next_forwards(guide);
        let (input, by_inputs) = self.next_inputs(guide, &forward);
        let (by_ranks, mean) = self.ends(guide, &forward, &input);
        (by_forwards.max(by_inputs).max(by_ranks), mean)
    }

    /// When the next forward of each stage can begin, infinite where all are done, and the bound
    /// on the makespan that follows from the forwards that are left.
    fn next_forwards(&self, guide: &Guide<'_>) -> (Vec<f64>, f64) {
        let (board, problem) = (&self.board, guide.problem);
        let (cost, placement) = (&problem.costs.forward, problem.placement);
        let microbatches = problem.size.microbatches;
        let mut begins = vec![f64::INFINITY; placement.len()];
        let mut longest = 0.0_f64;
        for stage in 0..placement.len() {
            let [entered, ..] = board.next[stage];
            if entered == microbatches {
                continue;
            }
            let mut ready = board.ready_at(FORWARD, stage);
            if ready.is_infinite() && stage > 0 {
                let next = board.next[stage - 1][FORWARD];
                let before = after(begins[stage - 1], next, entered, cost[stage - 1]);
                ready = before + problem.hop(stage - 1);
            }
            begins[stage] = ready.max(board.free[placement[stage]]);
            let all = (microbatches - entered) as f64 * cost[stage];
            longest = longest.max(begins[stage] + all + guide.back[stage] + guide.tail[stage]);
        }
        (begins, longest)
    }

    /// The same for input gradients, given when the next forwards can begin.
    fn next_inputs(&self, guide: &Guide<'_>, forward: &[f64]) -> (Vec<f64>, f64) {
        let (board, problem) = (&self.board, guide.problem);
        let (costs, placement) = (problem.costs, problem.placement);
        let microbatches = problem.size.microbatches;
        let cost = |stage: usize| costs.recompute[stage] + costs.input_grad[stage];
        let last = placement.len() - 1;
        let mut begins = vec![f64::INFINITY; last + 1];
        let mut longest = 0.0_f64;
        for stage in (0..=last).rev() {
            let [entered, left, _] = board.next[stage];
            if left == microbatches {
                continue;
            }
            let mut ready = board.ready_at(INPUT, stage);
            if ready.is_infinite() {
                ready = if stage == last {
                    after(forward[last], entered, left, costs.forward[last])
                } else {
                    let next = board.next[stage + 1][INPUT];
                    let behind = after(begins[stage + 1], next, left, cost(stage + 1));
                    behind + problem.hop(stage)
                };
            }
            begins[stage] = ready.max(board.free[placement[stage]]);
            let all = (microbatches - left) as f64 * cost(stage);
            longest = longest.max(begins[stage] + all + guide.tail[stage]);
        }
        (begins, longest)
    }

    /// The latest end of the ranks and the mean of their ends: a rank idles until its next forward
    /// or input gradient can begin, except while it runs the weight gradients that it owes.
    fn ends(&self, guide: &Guide<'_>, forward: &[f64], input: &[f64]) -> (f64, f64) {
        let Self { board, left, .. } = self;
        let problem = guide.problem;
        let (mut latest, mut sum) = (0.0_f64, 0.0);
        for (rank, stages) in problem.stages.iter().enumerate() {
            let owed = |&stage: &usize| {
                let [_, left, over] = board.next[stage];
                (left - over) as f64 * problem.costs.weight_grad[stage]
            };
            let owed: f64 = stages.iter().map(owed).sum();
            let begins = stages.iter().map(|&stage| forward[stage].min(input[stage]));
            let begins = begins.fold(f64::INFINITY, f64::min);
            let idle = if begins.is_finite() {
                (begins - board.free[rank] - owed).max(0.0)
            } else {
                0.0
            };
            let end = board.free[rank] + idle + left[rank];
            latest = latest.max(end);
            sum += end;
        }
        (latest, sum / left.len() as f64)
    }
}

/// When microbatch `to` is done on a stage whose microbatch `from` begins then.
fn after(begin: f64, from: usize, to: usize, cost: f64) -> f64 {
    begin + (to + 1).saturating_sub(from) as f64 * cost
}
