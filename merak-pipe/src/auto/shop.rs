//! Orders of actions as lists of numbers, for a search that times thousands of them.

use super::{Candidate, Memory};
use crate::{Action, Costs, Kind, MicrobatchId, PeakBytes, Schedule, StageId};

/// No action.
const NONE: u32 = u32::MAX;

/// The actions of a candidate, what each costs, and which message it waits for.
#[derive(Debug)]
pub(super) struct Shop {
    stages: usize,
    microbatches: usize,
    /// By action: its time; the action that makes its message, with the time of that message; the
    /// action that takes its own message.
    cost: Vec<f64>,
    before: Vec<u32>,
    lag: Vec<f64>,
    behind: Vec<u32>,
    /// By stage: its rank.
    placement: Vec<usize>,
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
    /// By action: when it ends (NaN while it is still to come), and its place in its rank's list.
    ends: Vec<f64>,
    places: Vec<u32>,
    /// By rank: how far it has come, and when it is free.
    cursors: Vec<usize>,
    free: Vec<f64>,
    /// Ranks to look at.
    open: Vec<usize>,
}

impl Shop {
    /// The actions of a candidate, whose backwards are all split.
    pub(super) fn new(candidate: &Candidate, costs: &Costs) -> Self {
        let size = candidate.schedule.size;
        let (stages, microbatches) = (size.stages(), size.microbatches);
        let count = Kind::ALL.len() * stages * microbatches;
        let mut shop = Self {
            stages,
            microbatches,
            cost: vec![0.0; count],
            before: vec![NONE; count],
            lag: vec![0.0; count],
            behind: vec![NONE; count],
            placement: candidate.placement.clone(),
        };
        let lists = candidate.schedule.actions.iter().flatten();
        let mut explicit = vec![false; stages * microbatches];
        for action in lists.clone().filter(|a| a.kind == Kind::Recompute) {
            explicit[action.stage.0 * microbatches + action.microbatch.0] = true;
        }
        for &action in lists {
            let recomputes = !explicit[action.stage.0 * microbatches + action.microbatch.0]
                && !candidate.schedule.no_recompute.contains(&action.stage);
            let this = shop.number(action);
            shop.cost[this as usize] = costs.of(action, recomputes);
            let Some(tag) = action.input(stages) else {
                continue;
            };
            let before = shop.number(Action {
                stage: tag.from,
                ..action
            });
            shop.before[this as usize] = before;
            shop.behind[before as usize] = this;
            if shop.placement[tag.from.0] != shop.placement[tag.to.0] {
                shop.lag[this as usize] = costs.hop[tag.from.0.min(tag.to.0)];
            }
        }
        shop
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

    /// A table for [`Shop::time`].
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
                times.ends[this] = end;
                times.free[rank] = end;
                times.places[this] = times.cursors[rank] as u32;
                times.cursors[rank] += 1;
                let behind = self.behind[this];
                if behind != NONE {
                    let other = self.placement[behind as usize / self.microbatches % self.stages];
                    if other != rank && lists[other].get(times.cursors[other]) == Some(&behind) {
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
            let free_at = free.map_or(0.0, |p| times.ends[lists[rank][p] as usize]);
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
            other.stage == moved.stage
                && (other.kind == moved.kind || other.microbatch == moved.microbatch)
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
    pub(super) fn keeps(&self, rank: usize, list: &[u32], memory: &Memory<'_>) -> bool {
        let limit = memory.activations[rank];
        let mut live = 0;
        let kind = |number: &u32| Kind::ALL[*number as usize / self.microbatches / self.stages];
        let few = list.iter().map(kind).all(|kind| {
            match kind {
                Kind::Forward => live += 1,
                Kind::WeightGrad => live -= 1,
                _ => {}
            }
            live <= limit
        });
        few && memory.bytes.is_none_or(|limits| {
            let mut live = PeakBytes::default();
            let mut actions = list.iter().map(|number| self.action(*number));
            actions.all(|Action { stage, kind, .. }| {
                live.begin(&limits.kept, stage.0, kind);
                let fits = live.total() <= limits.peaks[rank];
                live.end(&limits.kept, stage.0, kind);
                fits
            })
        })
    }
}
