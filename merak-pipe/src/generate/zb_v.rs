//! Two stages per rank in the shape of a V, without a wait between a rank's first and last actions.

use super::{Stage, only_microbatches};
use crate::{Action, Schedule, Size};

/// `zb_v`, from [Zero Bubble](https://arxiv.org/abs/2401.10241), section 6: rank `r` runs stage `r`
/// on the way down and stage `2P-1-r` on the way back, with the memory of `1f1b` and a sixth of its
/// bubble. Ranks start and end one after another; in between none waits when `F = I = W`.
///
/// The construction is one for `M >= 2P - 1`; fewer microbatches run the order of `2P - 1` without
/// the missing ones.
///
/// ```text
/// rank 0  f f f F I W F I W f i w F I W ..      P = 2: f, i, w on the way down,
/// rank 1    f F f F I W f i w F I W ..          F, I, W on the way back
/// ```
pub(crate) fn zb_v(size: Size) -> Schedule {
    let order = |rank| Order::new(size.ranks, rank).run(size, rank);
    let actions = (0..size.ranks).map(order).collect();
    let actions = only_microbatches(actions, size.microbatches);
    Schedule::new("zb_v", size, actions)
}

/// The order of one rank while it is written.
struct Order {
    down: Way,
    back: Way,
    actions: Vec<Action>,
}

/// A stage of the rank, and the microbatches that come next on it.
struct Way {
    stage: Stage,
    forwards: usize,
    inputs: usize,
    weights: usize,
}

impl Way {
    fn new(stage: usize) -> Self {
        Self {
            stage: Stage(stage),
            forwards: 0,
            inputs: 0,
            weights: 0,
        }
    }

    fn forward(&mut self) -> Action {
        self.forwards += 1;
        self.stage.forward(self.forwards - 1)
    }

    fn input_grad(&mut self) -> Action {
        self.inputs += 1;
        self.stage.input_grad(self.inputs - 1)
    }

    fn weight_grad(&mut self) -> Action {
        self.weights += 1;
        self.stage.weight_grad(self.weights - 1)
    }

    fn backward(&mut self) -> [Action; 2] {
        [self.input_grad(), self.weight_grad()]
    }
}

impl Order {
    fn new(ranks: usize, rank: usize) -> Self {
        Self {
            down: Way::new(rank),
            back: Way::new(2 * ranks - 1 - rank),
            actions: Vec::new(),
        }
    }

    fn run(mut self, size: Size, rank: usize) -> Vec<Action> {
        let Size { ranks, .. } = size;
        let microbatches = size.microbatches.max(2 * ranks - 1);
        let left = ranks - rank;
        // Down alone until the first microbatch is back, then both ways.
        self.repeat(2 * left - 1, |o| o.actions.push(o.down.forward()));
        self.repeat(rank, |o| {
            o.actions.extend([o.back.forward(), o.down.forward()]);
        });
        // The way back turns around at once.
        self.repeat(left, Self::pass_back);
        while self.back.forwards < microbatches {
            if self.down.forwards < microbatches {
                self.actions.push(self.down.forward());
            }
            self.actions.extend(self.down.backward());
            self.pass_back();
        }
        // Input gradients go ahead of the weight gradients, which fill the waits for the last ones.
        self.repeat(rank, |o| {
            o.actions.extend([o.down.input_grad(), o.back.input_grad()]);
        });
        self.repeat(left, |o| o.actions.extend(o.down.backward()));
        for way in [&mut self.back, &mut self.down] {
            while way.weights < way.inputs {
                self.actions.push(way.weight_grad());
            }
        }
        self.actions
    }

    fn repeat(&mut self, times: usize, turn: impl Fn(&mut Self)) {
        (0..times).for_each(|_| turn(self));
    }

    /// Forward and backward of the next microbatch on the way back.
    fn pass_back(&mut self) {
        self.actions.push(self.back.forward());
        self.actions.extend(self.back.backward());
    }
}
