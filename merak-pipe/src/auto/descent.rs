//! Local search: moves of single actions along the critical path.

use super::{
    Memory,
    job_shop::{JobShop, Length},
};
use crate::Kind;

/// A linear congruential generator: the same moves on every rank and machine.
#[derive(Debug)]
pub(super) struct Draws(pub(super) u64);

impl Draws {
    fn next(&mut self) -> u64 {
        self.0 = self
            .0
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        self.0 >> 33
    }

    fn below(&mut self, limit: usize) -> usize {
        usize::try_from(self.next()).unwrap_or(0) % limit.max(1)
    }

    /// A number from 0 to 1.
    fn share(&mut self) -> f64 {
        self.next() as f64 / (1_u64 << 31) as f64
    }
}

/// What a search may do.
#[derive(Debug, Clone, Copy)]
pub(super) struct Effort {
    /// Orders that are timed.
    pub(super) moves: usize,
    /// A lower bound on the makespan.
    pub(super) bound: f64,
}

/// The shortest order that moves lead to.
#[derive(Debug)]
pub(super) struct Descended {
    pub(super) lists: Vec<Vec<u32>>,
    pub(super) makespan: f64,
    /// Orders that were timed.
    pub(super) moves: usize,
}

/// The largest increase that a move may cause at the beginning of the search, in actions of mean
/// length; it falls to zero towards the end.
const TOLERANCE: f64 = 1.5;

/// Weight of the mean end of the ranks beside the makespan: many orders have the same makespan.
const ENDS: f64 = 0.02;

/// Moves single actions along their rank's list where the critical path passes, so that some rank
/// no longer waits.
///
/// A move is kept unless it makes the order longer by more than a tolerance, which falls from step
/// to step ([threshold accepting](https://doi.org/10.1016/0021-9991(90)90201-B)). The result is the
/// shortest order of all.
pub(super) fn descend(
    shop: &JobShop,
    mut lists: Vec<Vec<u32>>,
    memory: &Memory,
    effort: Effort,
    draws: &mut Draws,
) -> Option<Descended> {
    let ranks = lists.len();
    let mut times = shop.times(ranks);
    let first = shop.time(&lists, &mut times)?;
    let value = |length: Length| length.makespan + ENDS * length.ends / ranks as f64;
    let mut best = Descended {
        lists: lists.clone(),
        makespan: first.makespan,
        moves: 0,
    };
    let mut present = value(first);
    let mean = shop.mean_cost(&lists);
    let mut critical = Vec::new();
    shop.critical(&lists, &times, &mut critical);
    while best.moves < effort.moves && best.makespan > effort.bound * (1.0 + 1e-12) {
        let share = 1.0 - best.moves as f64 / effort.moves as f64;
        best.moves += 1;
        let rejoins = shop.fuses && draws.below(REJOINED) == 0;
        let step = if rejoins {
            draw_joint(shop, &lists, draws)
        } else {
            draw(shop, &lists, &critical, draws).map(Move::Shift)
        };
        let Some(step) = step else {
            continue;
        };
        let tolerance = TOLERANCE * share * share * mean * draws.share();
        step.apply(shop, &mut lists);
        let rank = step.rank();
        let mut allowed = shop.keeps(rank, &lists[rank], memory);
        // A forward without room may fit after a weight gradient.
        let freeing = match step {
            Move::Shift(step) if !allowed => step.freeing(shop, &lists[rank]),
            _ => None,
        };
        if let Some(freeing) = freeing {
            freeing.apply(&mut lists);
            allowed = shop.keeps(rank, &lists[rank], memory);
        }
        let length = if allowed {
            shop.time(&lists, &mut times)
        } else {
            None
        };
        let Some(length) = length.filter(|length| value(*length) <= present + tolerance) else {
            if let Some(freeing) = freeing {
                freeing.undo(&mut lists);
            }
            step.undo(shop, &mut lists);
            continue;
        };
        present = value(length);
        shop.critical(&lists, &times, &mut critical);
        if length.makespan < best.makespan {
            best.makespan = length.makespan;
            best.lists.clone_from(&lists);
        }
    }
    Some(best)
}

/// Where whole backwards save memory, one move in this number joins two halves, or parts them.
const REJOINED: usize = 4;

/// A change of an order.
#[derive(Debug, Clone, Copy)]
enum Move {
    Shift(Step),
    /// The two halves at this place of a rank's list, one right after the other, become one.
    Fuse {
        rank: usize,
        at: usize,
    },
    /// The backward at this place becomes two halves.
    Split {
        rank: usize,
        at: usize,
    },
}

impl Move {
    fn rank(self) -> usize {
        match self {
            Self::Shift(Step { rank, .. }) | Self::Fuse { rank, .. } | Self::Split { rank, .. } => {
                rank
            }
        }
    }

    fn apply(self, shop: &JobShop, lists: &mut [Vec<u32>]) {
        match self {
            Self::Shift(step) => step.apply(lists),
            Self::Fuse { rank, at } => shop.fuse(&mut lists[rank], at),
            Self::Split { rank, at } => shop.split(&mut lists[rank], at),
        }
    }

    fn undo(self, shop: &JobShop, lists: &mut [Vec<u32>]) {
        match self {
            Self::Shift(step) => step.undo(lists),
            Self::Fuse { rank, at } => shop.split(&mut lists[rank], at),
            Self::Split { rank, at } => shop.fuse(&mut lists[rank], at),
        }
    }
}

/// Draws a backward to join or to part: the first one from some place of a rank on.
fn draw_joint(shop: &JobShop, lists: &[Vec<u32>], draws: &mut Draws) -> Option<Move> {
    let rank = draws.below(lists.len());
    let list = &lists[rank];
    let from = draws.below(list.len());
    let mut found = (from..list.len()).filter_map(|at| Some((at, shop.is_whole(list, at)?)));
    let (at, is_whole) = found.next()?;
    Some(if is_whole {
        Move::Split { rank, at }
    } else {
        Move::Fuse { rank, at }
    })
}

/// One action of a rank goes to another place.
#[derive(Debug, Clone, Copy)]
struct Step {
    rank: usize,
    from: usize,
    to: usize,
}

impl Step {
    fn apply(self, lists: &mut [Vec<u32>]) {
        shift(&mut lists[self.rank], self.from, self.to);
    }

    fn undo(self, lists: &mut [Vec<u32>]) {
        shift(&mut lists[self.rank], self.to, self.from);
    }

    /// The move that puts the next weight gradient before the action that `self` has moved.
    fn freeing(self, shop: &JobShop, list: &[u32]) -> Option<Self> {
        let to = self.to.min(self.from);
        let weight = |number: &u32| shop.action(*number).kind == Kind::WeightGrad;
        let from = to + list[to..].iter().position(weight)?;
        let passes = shop.may_pass(list[from], &list[to..from]);
        (passes && from != to).then_some(Self {
            rank: self.rank,
            from,
            to,
        })
    }
}

fn shift(list: &mut [u32], from: usize, to: usize) {
    if from < to {
        list[from..=to].rotate_left(1);
    } else {
        list[to..=from].rotate_right(1);
    }
}

/// Draws a move that the order of its rank allows. Most moves put an action of the critical path
/// before one that it waits for, or that one after it; now and then a move takes any action.
fn draw(
    shop: &JobShop,
    lists: &[Vec<u32>],
    critical: &[(usize, usize)],
    draws: &mut Draws,
) -> Option<Step> {
    let anywhere = critical.is_empty() || draws.below(8) == 0;
    let (rank, place) = if anywhere {
        let rank = draws.below(lists.len());
        (rank, 1 + draws.below(lists[rank].len().saturating_sub(1)))
    } else {
        critical[draws.below(critical.len())]
    };
    let list = &lists[rank];
    let distance = if draws.below(2) == 0 {
        1
    } else {
        1 + draws.below(10)
    };
    let step = if draws.below(2) == 0 {
        Step {
            rank,
            from: place,
            to: place.saturating_sub(distance),
        }
    } else {
        Step {
            rank,
            from: place.checked_sub(1)?,
            to: (place - 1 + distance).min(list.len() - 1),
        }
    };
    let Step { from, to, .. } = step;
    let moved = *list.get(from)?;
    let passed = if to < from {
        &list[to..from]
    } else {
        &list[from + 1..=to]
    };
    (from != to && shop.may_pass(moved, passed)).then_some(step)
}
