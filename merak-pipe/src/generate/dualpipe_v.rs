//! Two directions of one pipeline, folded into a V.

use super::{Stage, only_microbatches};
use crate::{Action, Schedule, Size};

/// `dualpipe_v`, the V shape of DualPipe: [DeepSeek-V3](https://arxiv.org/abs/2412.19437), section 3.2.1,
/// folded in half as in [Cut-in-half](https://hackmd.io/@ufotalent/r1lVXsa9Jg). Rank `r` runs stage `r` on the way
/// down and stage `2P-1-r` on the way back; in the steady phase each forward of one stage stands beside a
/// backward of the other, so that a rank can compute one while it communicates for the other.
///
/// The bubble without that overlap is the published `(P-1)(F + 2B - 3W)` of one stage, with at most
/// `2P + 1` live stages per rank. The reference splits the first backwards of the way back too, which
/// would save the half of it where nothing overlaps; here they are full, so that the pairs stay whole. The construction is one for `M >= 2P`; fewer microbatches run the order of `2P` without
/// the missing ones.
pub(crate) fn dualpipe_v(size: Size) -> Schedule {
    let microbatches = size.microbatches.max(2 * size.ranks);
    let order = |rank| {
        let mut order = Order::new(size.ranks, rank);
        order.run(size.ranks, rank, microbatches);
        order.actions
    };
    let actions = (0..size.ranks).map(order).collect();
    let actions = only_microbatches(actions, size.microbatches);
    Schedule::new("dualpipe_v", size, actions)
}

/// The order of one rank while it is written: what comes next on its stage on the way down and back.
struct Order {
    stages: [Stage; 2],
    forwards: [usize; 2],
    backwards: [usize; 2],
    /// Weight gradients that were put off, oldest first.
    put_off: std::collections::VecDeque<Action>,
    actions: Vec<Action>,
}

/// The stage of a rank on the way down, and the one on the way back.
const DOWN: usize = 0;
const BACK: usize = 1;

impl Order {
    fn new(ranks: usize, rank: usize) -> Self {
        Self {
            stages: [Stage(rank), Stage(2 * ranks - 1 - rank)],
            forwards: [0; 2],
            backwards: [0; 2],
            put_off: std::collections::VecDeque::new(),
            actions: Vec::new(),
        }
    }

    fn run(&mut self, ranks: usize, rank: usize, microbatches: usize) {
        let behind = ranks - 1 - rank;
        // Down alone until the first microbatch is back, then both ways.
        self.repeat(2 * behind, |o| o.forward(DOWN));
        self.repeat(rank + 1, |o| {
            o.forward(DOWN);
            o.forward(BACK);
        });
        // The way back begins its backwards.
        self.repeat(behind, |o| {
            o.backward(BACK);
            o.forward(BACK);
        });
        // A forward beside every backward.
        self.repeat(microbatches - ranks - behind, |o| {
            o.forward(DOWN);
            o.backward(BACK);
            o.backward(DOWN);
            o.forward(BACK);
        });
        self.repeat(behind, |o| {
            o.backward(BACK);
            o.forward(BACK);
            o.backward(DOWN);
        });
        // Backwards alone; their second half puts the weight gradients off, to fill the end.
        for turn in 0..=rank {
            for (half, stage) in [BACK, DOWN].into_iter().enumerate() {
                if 2 * turn + half > rank {
                    self.input_grad(stage);
                } else {
                    self.backward(stage);
                }
            }
        }
        self.repeat(behind, |o| {
            o.weight_grad();
            o.input_grad(DOWN);
        });
        while !self.put_off.is_empty() {
            self.weight_grad();
        }
    }

    fn repeat(&mut self, times: usize, turn: impl Fn(&mut Self)) {
        (0..times).for_each(|_| turn(self));
    }

    fn forward(&mut self, way: usize) {
        self.actions
            .push(self.stages[way].forward(self.forwards[way]));
        self.forwards[way] += 1;
    }

    fn backward(&mut self, way: usize) {
        self.actions
            .push(self.stages[way].backward(self.backwards[way]));
        self.backwards[way] += 1;
    }

    fn input_grad(&mut self, way: usize) {
        let (stage, microbatch) = (self.stages[way], self.backwards[way]);
        self.actions.push(stage.input_grad(microbatch));
        self.put_off.push_back(stage.weight_grad(microbatch));
        self.backwards[way] += 1;
    }

    fn weight_grad(&mut self) {
        self.actions.extend(self.put_off.pop_front());
    }
}
