//! The job shop of a search: actions as numbers, what each costs and waits for, and how long an
//! order of them takes. A search times thousands of orders.

use super::{Memory, search::Candidate};
use crate::{Action, Costs, Kind, MicrobatchId, Schedule, StageId, memory::Change};

/// No action.
const NONE: u32 = u32::MAX;

/// The actions of a candidate, what each costs, and which message it waits for.
///
/// A backward is there whole and in halves, and lists hold one or the other. Messages name the
/// number of the input gradient for both, the action's [key](JobShop::key).
#[derive(Debug)]
pub(super) struct JobShop {
    stages: usize,
    microbatches: usize,
    /// By action: its time; the key of the action that makes its message, with the time of that
    /// message.
    cost: Vec<f64>,
    before: Vec<u32>,
    lag: Vec<f64>,
    /// By key: that of the action that takes its message.
    after: Vec<u32>,
    /// By stage: its rank.
    placement: Vec<usize>,
    /// By action: the bytes of its microbatch; empty without limits of bytes.
    changes: Vec<Change>,
    /// By rank: the bytes that it has for microbatches; empty without limits of bytes.
    room: Vec<u64>,
    /// Whether whole backwards save memory.
    pub(super) fuses: bool,
}

/// The length of an order.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Length {
    /// When the last rank ends.
    pub(super) makespan: f64,
    /// When ranks end, summed up.
    pub(super) ends: f64,
}

/// When the actions of an order end.
#[derive(Debug)]
pub(super) struct Times {
    /// By key: when the action ends (NaN while it is still to come), and its place in its rank's
    /// list.
    ends: Vec<f64>,
    places: Vec<u32>,
    /// By rank: how far it has come, and when it is free.
    cursors: Vec<usize>,
    free: Vec<f64>,
    /// Ranks to look at.
    open: Vec<usize>,
}

impl JobShop {
    /// The actions of a candidate.
    pub(super) fn new(candidate: &Candidate, costs: &Costs, memory: &Memory) -> Self {
        let size = candidate.schedule.size;
        let (stages, microbatches) = (size.stages(), size.microbatches);
        let count = Kind::ALL.len() * stages * microbatches;
        let bytes = memory.bytes.as_ref();
        let mut shop = Self {
            stages,
            microbatches,
            cost: vec![0.0; count],
            before: vec![NONE; count],
            lag: vec![0.0; count],
            after: vec![NONE; count],
            placement: candidate.placement.clone(),
            changes: vec![Change::default(); bytes.map_or(0, |_| count)],
            room: bytes.map_or_else(Vec::new, |bytes| bytes.room(&candidate.placement)),
            fuses: bytes.is_some_and(|bytes| bytes.fuses),
        };
        let lists = candidate.schedule.actions.iter().flatten();
        let mut ahead = vec![false; stages * microbatches];
        for action in lists.filter(|a| a.kind == Kind::Recompute) {
            ahead[action.stage.0 * microbatches + action.microbatch.0] = true;
        }
        for (pair, &is_ahead) in ahead.iter().enumerate() {
            let (stage, microbatch) = (StageId(pair / microbatches), pair % microbatches);
            let recomputes = !is_ahead && !candidate.schedule.no_recompute.contains(&stage);
            for kind in Kind::ALL {
                let action = Action::new(stage, kind, MicrobatchId(microbatch));
                let this = shop.number(action);
                shop.cost[this as usize] = costs.of(action, recomputes);
                if let Some(bytes) = bytes {
                    shop.changes[this as usize] = bytes.stages[stage.0].change(kind, is_ahead);
                }
                shop.link(this, action, costs);
            }
        }
        shop
    }

    /// Enters the message that an action waits for.
    fn link(&mut self, this: u32, action: Action, costs: &Costs) {
        let Some(tag) = action.input(self.stages) else {
            return;
        };
        let before = self.key(self.number(Action {
            stage: tag.from,
            ..action
        }));
        self.before[this as usize] = before;
        self.after[before as usize] = self.key(this);
        if self.placement[tag.from.0] != self.placement[tag.to.0] {
            self.lag[this as usize] = costs.hop[tag.from.0.min(tag.to.0)];
        }
    }

    /// The number of an action, and for a whole backward that of its input gradient.
    fn key(&self, number: u32) -> u32 {
        let of_kind = (self.stages * self.microbatches) as u32;
        let first = Kind::Backward as u32 * of_kind;
        if (first..first + of_kind).contains(&number) {
            number + (Kind::InputGrad as u32 - Kind::Backward as u32) * of_kind
        } else {
            number
        }
    }

    /// Makes one backward of the halves that stand at a place and right after it.
    pub(super) fn fuse(&self, list: &mut Vec<u32>, at: usize) {
        let kind = Kind::Backward;
        list[at] = self.number(Action {
            kind,
            ..self.action(list[at])
        });
        list.remove(at + 1);
    }

    /// Makes halves of the backward at a place.
    pub(super) fn split(&self, list: &mut Vec<u32>, at: usize) {
        let whole = self.action(list[at]);
        let half = |kind| self.number(Action { kind, ..whole });
        list[at] = half(Kind::InputGrad);
        list.insert(at + 1, half(Kind::WeightGrad));
    }

    /// Whether a backward stands at a place in halves, one right after the other (`Some(false)`),
    /// or whole (`Some(true)`).
    pub(super) fn is_whole(&self, list: &[u32], at: usize) -> Option<bool> {
        let action = self.action(*list.get(at)?);
        match action.kind {
            Kind::Backward => Some(true),
            Kind::InputGrad => {
                let next = self.action(*list.get(at + 1)?);
                let kind = Kind::WeightGrad;
                (next == Action { kind, ..action }).then_some(false)
            }
            _ => None,
        }
    }

    /// The lists of a schedule as numbers.
    pub(super) fn numbers(&self, schedule: &Schedule) -> Vec<Vec<u32>> {
        let ranks = schedule.actions.iter();
        ranks
            .map(|list| list.iter().map(|action| self.number(*action)).collect())
            .collect()
    }

    /// The actions that lists of numbers stand for.
    pub(super) fn actions(&self, lists: &[Vec<u32>]) -> Vec<Vec<Action>> {
        let ranks = lists.iter();
        ranks
            .map(|list| list.iter().map(|number| self.action(*number)).collect())
            .collect()
    }

    fn number(&self, action: Action) -> u32 {
        let row = action.kind as usize * self.stages + action.stage.0;
        // A schedule has at most 2^26 pairs of a stage and a microbatch, and five kinds.
        u32::try_from(row * self.microbatches + action.microbatch.0).unwrap_or(NONE)
    }

    pub(super) fn action(&self, number: u32) -> Action {
        let (row, microbatch) = (
            number as usize / self.microbatches,
            number as usize % self.microbatches,
        );
        let kind = Kind::ALL[row / self.stages];
        Action::new(StageId(row % self.stages), kind, MicrobatchId(microbatch))
    }

    /// A table for [`JobShop::time`].
    pub(super) fn times(&self, ranks: usize) -> Times {
        Times {
            ends: vec![f64::NAN; self.cost.len()],
            places: vec![0; self.cost.len()],
            cursors: vec![0; ranks],
            free: vec![0.0; ranks],
            open: Vec::with_capacity(ranks),
        }
    }

    /// Times lists of actions, or finds that they wait for each other.
    pub(super) fn time(&self, lists: &[Vec<u32>], times: &mut Times) -> Option<Length> {
        times.ends.fill(f64::NAN);
        times.cursors.fill(0);
        times.free.fill(0.0);
        times.open.clear();
        times.open.extend((0..lists.len()).rev());
        while let Some(rank) = times.open.pop() {
            while let Some(&number) = lists[rank].get(times.cursors[rank]) {
                let this = number as usize;
                let mut start = times.free[rank];
                let before = self.before[this];
                if before != NONE {
                    let arrival = times.ends[before as usize] + self.lag[this];
                    if arrival.is_nan() {
                        break;
                    }
                    start = start.max(arrival);
                }
                let end = start + self.cost[this];
                let key = self.key(number) as usize;
                times.ends[key] = end;
                times.free[rank] = end;
                times.places[key] = times.cursors[rank] as u32;
                times.cursors[rank] += 1;
                let after = self.after[key];
                if after != NONE {
                    let other = self.placement[after as usize / self.microbatches % self.stages];
                    let next = lists[other].get(times.cursors[other]);
                    if other != rank && next.is_some_and(|next| self.key(*next) == after) {
                        times.open.push(other);
                    }
                }
            }
        }
        let mut cursors = times.cursors.iter().zip(lists);
        if cursors.any(|(cursor, list)| *cursor < list.len()) {
            return None;
        }
        Some(Length {
            makespan: times.free.iter().copied().fold(0.0, f64::max),
            ends: times.free.iter().sum(),
        })
    }

    /// Follows the chain of waits from the last end back to the start. Lists, by rank and index,
    /// the actions that waited for the one before them in their rank's list.
    pub(super) fn critical(
        &self,
        lists: &[Vec<u32>],
        times: &Times,
        places: &mut Vec<(usize, usize)>,
    ) {
        places.clear();
        let last = |best: usize, rank| {
            if times.free[rank] > times.free[best] {
                rank
            } else {
                best
            }
        };
        let mut rank = (0..lists.len()).fold(0, last);
        let Some(mut place) = lists[rank].len().checked_sub(1) else {
            return;
        };
        loop {
            let this = lists[rank][place] as usize;
            let free = place.checked_sub(1);
            let free_at = free.map_or(0.0, |p| times.ends[self.key(lists[rank][p]) as usize]);
            let before = self.before[this];
            if before != NONE {
                let arrival = times.ends[before as usize] + self.lag[this];
                if arrival > free_at || free.is_none() {
                    rank = self.placement[before as usize / self.microbatches % self.stages];
                    place = times.places[before as usize] as usize;
                    continue;
                }
            }
            let Some(free) = free else { return };
            places.push((rank, place));
            place = free;
        }
    }

    /// Whether an action may pass these others of its list: actions of one stage keep their order
    /// within a kind, and within a microbatch.
    pub(super) fn may_pass(&self, moved: u32, passed: &[u32]) -> bool {
        let moved = self.action(moved);
        !passed.iter().map(|other| self.action(*other)).any(|other| {
            let both = |is: fn(Kind) -> bool| is(moved.kind) && is(other.kind);
            other.stage == moved.stage
                && (other.kind == moved.kind
                    || other.microbatch == moved.microbatch
                    || both(Kind::moves_gradient)
                    || both(Kind::ends_microbatch))
        })
    }

    /// The mean time of the actions of some lists.
    pub(super) fn mean_cost(&self, lists: &[Vec<u32>]) -> f64 {
        let costs = lists
            .iter()
            .flatten()
            .map(|number| self.cost[*number as usize]);
        let count = lists.iter().map(Vec::len).sum::<usize>().max(1);
        costs.sum::<f64>() / count as f64
    }

    /// Whether a rank with this list keeps its limits.
    pub(super) fn keeps(&self, rank: usize, list: &[u32], memory: &Memory) -> bool {
        let limit = memory.activations[rank];
        let mut live = 0;
        let kind = |number: &u32| Kind::ALL[*number as usize / self.microbatches / self.stages];
        let few = list.iter().map(kind).all(|kind| {
            match kind {
                Kind::Forward => live += 1,
                Kind::WeightGrad | Kind::Backward => live -= 1,
                _ => {}
            }
            live <= limit
        });
        let mut total = 0;
        few && self.room.get(rank).is_none_or(|room| {
            list.iter().all(|number| {
                let (during, after) = self.changes[*number as usize].apply(total);
                total = after;
                during <= *room
            })
        })
    }
}
