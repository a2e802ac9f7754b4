//! Two directions of one pipeline, folded into a V.

use super::Stage;
use crate::{Action, Pair, Schedule, Size, action::Cell};

/// `dualpipe_v`, the V shape of DualPipe: [DeepSeek-V3](https://arxiv.org/abs/2412.19437), section
/// 3.2.1, folded in half as in [Cut-in-half](https://hackmd.io/@ufotalent/r1lVXsa9Jg). Rank `r`
/// runs stage `r` on the way down and stage `2P-1-r` on the way back; in the steady phase each
/// forward of one stage runs at once with a backward of the other, so that a rank can compute one
/// while it communicates for the other.
///
/// Without a gain from that, the extra time is half of the published `(P-1)(F + 2B - 3W)` of one
/// stage, with at most `2P + 1` live stages per rank: the first backwards of the way back are split
/// too, so that their input gradients leave a weight gradient earlier. The construction is one for
/// `M >= 2P`; fewer microbatches run the order of `2P` without the missing ones.
pub(crate) fn dualpipe_v(size: Size) -> Schedule {
    let microbatches = size.microbatches.max(2 * size.ranks);
    let order = |rank| {
        let mut order = Order::new(size.ranks, rank);
        order.run(size.ranks, rank, microbatches);
        order.cells
    };
    let cells: Vec<Vec<Cell>> = (0..size.ranks).map(order).collect();
    Schedule::of_cells(
        "dualpipe_v",
        size,
        &only_microbatches(cells, size.microbatches),
    )
}

/// The order of one rank while it is written: what comes next on its stage on the way down and
/// back.
struct Order {
    stages: [Stage; 2],
    forwards: [usize; 2],
    backwards: [usize; 2],
    /// Weight gradients that were put off, oldest first.
    put_off: std::collections::VecDeque<Action>,
    cells: Vec<Cell>,
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
            cells: Vec::new(),
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
        // The way back begins its backwards; other ranks wait for their input gradients.
        self.repeat(behind, |o| {
            o.input_grad(BACK);
            o.weight_grad();
            o.forward(BACK);
        });
        // A forward at once with every backward except the first on the rank where the V turns:
        // the backward has its message at once, while others wait for the forward.
        for turn in 0..microbatches - ranks - behind {
            if turn == 0 && behind == 0 {
                self.forward(DOWN);
                self.backward(BACK);
            } else {
                self.pair(DOWN, BACK);
            }
            self.pair(BACK, DOWN);
        }
        self.repeat(behind, |o| {
            o.backward(BACK);
            o.pair(BACK, DOWN);
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
        let action = self.next_forward(way);
        self.cells.push(Cell::Alone(action));
    }

    fn backward(&mut self, way: usize) {
        let action = self.next_backward(way);
        self.cells.push(Cell::Alone(action));
    }

    /// The forward of one way at once with the backward of the other.
    fn pair(&mut self, forward: usize, backward: usize) {
        let forward = self.next_forward(forward);
        let backward = self.next_backward(backward);
        self.cells.push(Cell::Paired(Pair { forward, backward }));
    }

    fn next_forward(&mut self, way: usize) -> Action {
        self.forwards[way] += 1;
        self.stages[way].forward(self.forwards[way] - 1)
    }

    fn next_backward(&mut self, way: usize) -> Action {
        self.backwards[way] += 1;
        self.stages[way].backward(self.backwards[way] - 1)
    }

    fn input_grad(&mut self, way: usize) {
        let (stage, microbatch) = (self.stages[way], self.backwards[way]);
        self.cells.push(Cell::Alone(stage.input_grad(microbatch)));
        self.put_off.push_back(stage.weight_grad(microbatch));
        self.backwards[way] += 1;
    }

    fn weight_grad(&mut self) {
        self.cells.extend(self.put_off.pop_front().map(Cell::Alone));
    }
}

/// The same order without microbatches from `microbatches` on; what ran at once with one of them
/// runs alone.
fn only_microbatches(cells: Vec<Vec<Cell>>, microbatches: usize) -> Vec<Vec<Cell>> {
    let cut = |cell: Cell| {
        let mut kept = cell
            .actions()
            .filter(|action| action.microbatch.0 < microbatches);
        match (kept.next(), kept.next()) {
            (Some(_), Some(_)) => Some(cell),
            (action, _) => action.map(Cell::Alone),
        }
    };
    let of_rank = |list: Vec<Cell>| list.into_iter().filter_map(cut).collect();
    cells.into_iter().map(of_rank).collect()
}
