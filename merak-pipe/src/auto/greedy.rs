//! List scheduling: a free rank takes the ready action that its rule puts first.

use super::{Bytes, Memory};
use crate::{Action, Costs, Kind, MicrobatchId, Schedule, Size, StageId};
use std::{cmp::Reverse, collections::BinaryHeap};

/// What a free rank prefers.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Rule<'a> {
    /// For each rank the most activations of stages that it keeps.
    pub(super) limits: Vec<usize>,
    /// The limits of their bytes, if there are any.
    pub(super) bytes: Option<&'a Bytes>,
    /// Whether forwards go before input gradients.
    pub(super) forward_first: bool,
    /// Whether, among the stages of a rank, the forward of the oldest microbatch goes first instead
    /// of that of the last stage.
    pub(super) oldest_first: bool,
    /// A weight gradient waits if a message comes before this share of it would be done.
    pub(super) patience: f64,
    /// Whether backwards are whole wherever that saves memory, and not only where there is no room
    /// for the halves.
    pub(super) whole_first: bool,
}

impl<'a> Rule<'a> {
    /// The full limits of memory, for a search that chooses the actions itself.
    pub(super) fn within(memory: &'a Memory) -> Self {
        Self {
            limits: memory.activations.clone(),
            bytes: memory.bytes.as_ref(),
            whole_first: false,
            forward_first: false,
            oldest_first: false,
            patience: 0.0,
        }
    }
}

/// What is scheduled, and on which ranks.
#[derive(Debug)]
pub(super) struct Problem<'a> {
    pub(super) size: Size,
    /// By stage: its rank.
    pub(super) placement: &'a [usize],
    pub(super) costs: &'a Costs,
    /// For each rank its stages.
    pub(super) stages: Vec<Vec<usize>>,
    /// For each rank the bytes that it has for microbatches, and the part of them that stays free
    /// for what a microbatch needs besides while it runs; empty without limits of bytes.
    room: Vec<u64>,
    besides: Vec<u64>,
}

impl<'a> Problem<'a> {
    pub(super) fn new(
        size: Size,
        placement: &'a [usize],
        costs: &'a Costs,
        memory: &Memory,
    ) -> Self {
        let mut stages = vec![Vec::new(); size.ranks];
        for (stage, &rank) in placement.iter().enumerate() {
            stages[rank].push(stage);
        }
        let (mut room, mut besides) = (Vec::new(), Vec::new());
        if let Some(bytes) = &memory.bytes {
            let most = |stages: &Vec<usize>| {
                let besides = stages.iter().map(|&stage| bytes.stages[stage].besides());
                besides.max().unwrap_or(0)
            };
            (room, besides) = (bytes.room(placement), stages.iter().map(most).collect());
        }
        Self {
            size,
            placement,
            costs,
            stages,
            room,
            besides,
        }
    }

    /// The time of a message between a stage and the next one.
    pub(super) fn hop(&self, stage: usize) -> f64 {
        if self.placement[stage] == self.placement[stage + 1] {
            0.0
        } else {
            self.costs.hop[stage]
        }
    }

    /// Actions of all ranks if all backwards are in halves.
    pub(super) fn num_halves(&self) -> usize {
        3 * self.placement.len() * self.size.microbatches
    }
}

/// How many actions an action is if backwards are in halves.
pub(super) fn halves(kind: Kind) -> usize {
    if kind == Kind::Backward { 2 } else { 1 }
}

/// The schedule that a rule gives, or `None` where its limits let no microbatch through.
pub(super) fn greedy(problem: &Problem<'_>, rule: &Rule<'_>) -> Option<Schedule> {
    let ranks = problem.size.ranks;
    let mut board = Board::new(problem, rule);
    let mut actions = vec![Vec::new(); ranks];
    // The times at which ranks decide. Times are not negative, so their bits ascend with them.
    let mut events: BinaryHeap<_> = (0..ranks).map(|rank| Reverse((0_u64, rank))).collect();
    let mut done = 0;
    while let Some(Reverse((bits, rank))) = events.pop() {
        let now = f64::from_bits(bits);
        if board.free[rank] > now {
            continue;
        }
        if let Some(action) = board.choose(rank, now) {
            let message = board.carry_out(rank, action, now);
            events.push(Reverse((board.free[rank].to_bits(), rank)));
            events.extend(message.map(|(at, receiver)| Reverse((at.to_bits(), receiver))));
            actions[rank].push(action);
            done += halves(action.kind);
        }
    }
    (done == problem.num_halves()).then(|| Schedule::new("auto", problem.size, actions))
}

/// How far the ranks have come.
#[derive(Debug, Clone)]
pub(super) struct Board<'a> {
    problem: &'a Problem<'a>,
    rule: &'a Rule<'a>,
    /// By stage: the next microbatch of each kind.
    pub(super) next: Vec<[usize; 3]>,
    /// By kind (forward, input gradient), stage and microbatch: when it is ready.
    ready: Vec<f64>,
    /// By rank: activations that are kept, their bytes, and when the rank is free.
    live: Vec<u64>,
    live_bytes: Vec<u64>,
    pub(super) free: Vec<f64>,
}

pub(super) const FORWARD: usize = 0;
pub(super) const INPUT: usize = 1;
pub(super) const WEIGHT: usize = 2;

impl<'a> Board<'a> {
    pub(super) fn new(problem: &'a Problem<'a>, rule: &'a Rule<'a>) -> Self {
        let size = problem.size;
        let stages = problem.placement.len();
        let mut ready = vec![f64::INFINITY; 2 * stages * size.microbatches];
        // The first stage loads its microbatches.
        ready[..size.microbatches].fill(0.0);
        Self {
            problem,
            rule,
            next: vec![[0; 3]; stages],
            ready,
            live: vec![0; size.ranks],
            live_bytes: vec![0; size.ranks],
            free: vec![0.0; size.ranks],
        }
    }

    fn choose(&self, rank: usize, now: f64) -> Option<Action> {
        let forward = || {
            let deepest = self.problem.stages[rank].iter().enumerate().rev();
            let mut open = deepest.filter(|(chunk, stage)| {
                self.is_ready(FORWARD, **stage, now) && self.has_room(rank, *chunk)
            });
            let first = if self.rule.oldest_first {
                open.min_by_key(|(_, stage)| self.next[**stage][FORWARD])
            } else {
                open.next()
            };
            first.map(|(_, stage)| self.action(Kind::Forward, *stage))
        };
        let input = || {
            let open = self.problem.stages[rank]
                .iter()
                .filter(|stage| self.is_ready(INPUT, **stage, now))
                .filter_map(|stage| Some((*stage, self.backward(rank, *stage)?)));
            // The oldest microbatch; among its stages the one with the longest way back.
            let first = open.min_by_key(|(stage, _)| (self.next[*stage][INPUT], Reverse(*stage)));
            first.map(|(stage, kind)| self.action(kind, stage))
        };
        let wanted = if self.rule.forward_first {
            forward().or_else(input)
        } else {
            input().or_else(forward)
        };
        wanted.or_else(|| self.weight(rank, now))
    }

    fn weight(&self, rank: usize, now: f64) -> Option<Action> {
        let owed = self.problem.stages[rank]
            .iter()
            .filter(|stage| self.next[**stage][WEIGHT] < self.next[**stage][INPUT]);
        let stage = *owed.min_by_key(|stage| self.next[**stage][WEIGHT])?;
        let soon = now + self.rule.patience * self.problem.costs.weight_grad[stage];
        let comes = |kind| {
            let mut stages = self.problem.stages[rank].iter().enumerate();
            stages.any(|(chunk, &stage)| {
                let fits = match kind {
                    INPUT => self.backward(rank, stage).is_some(),
                    _ => self.has_room(rank, chunk),
                };
                fits && self.is_ready(kind, stage, soon)
            })
        };
        let waits = self.rule.patience > 0.0 && (comes(INPUT) || comes(FORWARD));
        (!waits).then(|| self.action(Kind::WeightGrad, stage))
    }

    fn is_ready(&self, kind: usize, stage: usize, by: f64) -> bool {
        self.ready_at(kind, stage) <= by
    }

    /// When the next microbatch of a kind is ready on a stage: infinite before its message was
    /// sent, and where there is none.
    pub(super) fn ready_at(&self, kind: usize, stage: usize) -> f64 {
        let microbatch = self.next[stage][kind];
        if microbatch < self.problem.size.microbatches {
            self.ready[self.index(kind, stage, microbatch)]
        } else {
            f64::INFINITY
        }
    }

    /// The kind of the next backward of a stage that its rank prefers and has room for.
    fn backward(&self, rank: usize, stage: usize) -> Option<Kind> {
        let [halves, whole] = self.backwards(rank, stage);
        if self.rule.whole_first {
            whole.or(halves)
        } else {
            halves.or(whole)
        }
    }

    /// The input gradient and the whole backward that a stage can do next, each if its rank has
    /// room for it; the whole one only where it can save memory.
    pub(super) fn backwards(&self, rank: usize, stage: usize) -> [Option<Kind>; 2] {
        let Some(bytes) = self.rule.bytes else {
            return [Some(Kind::InputGrad), None];
        };
        let allowed = |kind| Some(kind).filter(|kind| self.allows(bytes, rank, stage, *kind));
        // Weight gradients keep the order of the microbatches.
        let [_, inputs, weights] = self.next[stage];
        let whole = bytes.fuses && inputs == weights;
        let whole = whole.then(|| allowed(Kind::Backward)).flatten();
        [allowed(Kind::InputGrad), whole]
    }

    /// Whether a rank has room for an action, and after it for each weight gradient that waits.
    fn allows(&self, bytes: &Bytes, rank: usize, stage: usize, kind: Kind) -> bool {
        let room = self.problem.room[rank];
        let change = bytes.stages[stage].change(kind, false);
        let (during, after) = change.apply(self.live_bytes[rank]);
        let fits = |&other: &usize| {
            let [_, inputs, weights] = self.next[other];
            let waits = weights < inputs || (other == stage && kind == Kind::InputGrad);
            let weight = bytes.stages[other].change(Kind::WeightGrad, false);
            !waits || weight.apply(after).0 <= room
        };
        during <= room && self.problem.stages[rank].iter().all(fits)
    }

    /// Whether another activation fits such that every microbatch that was begun can still end.
    ///
    /// A microbatch needs room on all stages of a rank at once. The oldest microbatch that has not
    /// reached the rank's last stage therefore has its room on all stages reserved. Younger ones
    /// share what is left; older ones only have to fit.
    ///
    /// Weight gradients that wait can always run, so bytes that wait for them do not count here.
    /// What a microbatch needs besides while it runs stays free.
    pub(super) fn has_room(&self, rank: usize, chunk: usize) -> bool {
        let limit = self.rule.limits[rank] as u64;
        self.fits(rank, chunk, (self.live[rank], limit), |_| 1)
            && self.rule.bytes.is_none_or(|bytes| {
                let stages = &self.problem.stages[rank];
                let kept = |stage: usize| bytes.stages[stage].kept;
                let waiting = stages.iter().map(|&stage| {
                    let [entered, inputs, _] = self.next[stage];
                    kept(stage).saturating_mul((entered - inputs) as u64)
                });
                let waiting = waiting.fold(0, u64::saturating_add);
                let limit = self.problem.room[rank].checked_sub(self.problem.besides[rank]);
                let stage = stages[chunk];
                limit.is_some_and(|limit| self.fits(rank, chunk, (waiting, limit), kept))
                    && self.allows(bytes, rank, stage, Kind::Forward)
            })
    }

    /// Whether all ranks are free, and all messages for what is to come there, no later than on a
    /// board with the same number of actions of each stage and kind.
    pub(super) fn is_no_later_than(&self, other: &Self) -> bool {
        let no_later = |own: &[f64], others: &[f64]| own.iter().zip(others).all(|(a, b)| a <= b);
        let last = self.problem.size.microbatches - 1;
        let mut stages = self.next.iter().enumerate();
        no_later(&self.free, &other.free)
            && stages.all(|(stage, next)| {
                [FORWARD, INPUT].into_iter().all(|kind| {
                    let first = self.index(kind, stage, next[kind]);
                    let open = first..=self.index(kind, stage, last);
                    no_later(&self.ready[open.clone()], &other.ready[open])
                })
            })
    }

    /// Whether stages of a rank compete for its memory.
    pub(super) fn is_short(&self, rank: usize) -> bool {
        let stages = self.problem.stages[rank].len();
        let all = stages * self.problem.size.microbatches;
        stages > 1 && (self.rule.bytes.is_some() || self.rule.limits[rank] < all)
    }

    /// [`Board::has_room`] for a memory in which an activation of a stage takes its `weight`.
    fn fits(
        &self,
        rank: usize,
        chunk: usize,
        (live, limit): (u64, u64),
        weight: impl Fn(usize) -> u64,
    ) -> bool {
        let stages = &self.problem.stages[rank];
        let stage = stages[chunk];
        if live.saturating_add(weight(stage)) > limit {
            return false;
        }
        let oldest = self.next[stages[stages.len() - 1]][FORWARD];
        if self.next[stage][FORWARD] <= oldest {
            return true;
        }
        let all = stages.iter().map(|&stage| {
            let [entered, _, left] = self.next[stage];
            let younger = entered.saturating_sub(left.max(oldest + 1)) as u64;
            weight(stage).saturating_mul(younger + 1)
        });
        all.fold(weight(stage), u64::saturating_add) <= limit
    }

    pub(super) fn action(&self, kind: Kind, stage: usize) -> Action {
        let row = match kind {
            Kind::Forward => FORWARD,
            Kind::WeightGrad => WEIGHT,
            Kind::Backward | Kind::InputGrad | Kind::Recompute => INPUT,
        };
        let microbatch = self.next[stage][row];
        Action::new(StageId(stage), kind, MicrobatchId(microbatch))
    }

    /// Carries out the next action of this kind and stage. Returns when its message comes, and to
    /// which rank.
    pub(super) fn carry_out(
        &mut self,
        rank: usize,
        action: Action,
        now: f64,
    ) -> Option<(f64, usize)> {
        let (stage, microbatch) = (action.stage.0, action.microbatch.0);
        let end = now + self.problem.costs.of(action, true);
        self.free[rank] = end;
        if let Some(bytes) = self.rule.bytes {
            let change = bytes.stages[stage].change(action.kind, false);
            self.live_bytes[rank] = change.apply(self.live_bytes[rank]).1;
        }
        match action.kind {
            Kind::Forward => {
                self.next[stage][FORWARD] += 1;
                self.live[rank] += 1;
                if stage + 1 < self.problem.placement.len() {
                    return Some(self.send(FORWARD, (stage, stage + 1), microbatch, end));
                }
                let own = self.index(INPUT, stage, microbatch);
                self.ready[own] = end;
                None
            }
            Kind::WeightGrad => {
                self.next[stage][WEIGHT] += 1;
                self.live[rank] -= 1;
                None
            }
            Kind::InputGrad | Kind::Backward | Kind::Recompute => {
                self.next[stage][INPUT] += 1;
                if action.kind == Kind::Backward {
                    self.next[stage][WEIGHT] += 1;
                    self.live[rank] -= 1;
                }
                (stage > 0).then(|| self.send(INPUT, (stage, stage - 1), microbatch, end))
            }
        }
    }

    fn send(
        &mut self,
        kind: usize,
        (from, to): (usize, usize),
        microbatch: usize,
        end: f64,
    ) -> (f64, usize) {
        let at = end + self.problem.hop(from.min(to));
        let place = self.index(kind, to, microbatch);
        self.ready[place] = at;
        (at, self.problem.placement[to])
    }

    fn index(&self, kind: usize, stage: usize, microbatch: usize) -> usize {
        (kind * self.problem.placement.len() + stage) * self.problem.size.microbatches + microbatch
    }
}
