//! Two stages per rank in the shape of a V, ordered by one repeated block.
//!
//! Rank `r` runs stage `r` on the way down and stage `2P-1-r` on the way back, so that the memory
//! of early and late stages evens out. From [Pipeline Parallelism with Controllable
//! Memory](https://arxiv.org/abs/2405.15362), sections 3 and 4: the forwards and input gradients of
//! one microbatch make a *block*, and the same block six units later (three kinds of action on two
//! stages, a unit each) is the next microbatch. How long a block holds a rank's activations, over
//! six, is the memory; weight gradients go where a rank would wait.
//!
//! ```text
//! rank 0  f . . . . . . F I . . . . . . i      P = 4, the block of v_min:
//! rank 1  . f . . . . F . . I . . . . i .      f and i on the way down,
//! rank 2  . . f . . F . . . . I . . i . .      F and I on the way back
//! rank 3  . . . f F . . . . . . I i . . .
//! ```
//!
//! The paper gives regular blocks; here irregular ones are drawn as well, which save some more of
//! the bubble. Playing up to `4P` microbatches shows which one is best.

mod block;
mod play;

use crate::{Schedule, Size};
use block::Block;
use play::{Played, play};

/// `v_half`: half the memory of `1f1b`, `(P+2)/2` microbatches, at half of its bubble.
pub(crate) fn v_half(size: Size) -> Schedule {
    let limit = size.ranks + 2;
    let candidates = Block::halves(size.ranks).chain(Block::drawn(size.ranks, DRAWS));
    let block = best(size, candidates, limit);
    schedule("v_half", size, &block, limit)
}

/// `v_min`: a third of the memory of `1f1b`, `(P+4)/3` microbatches, at two thirds of its bubble.
pub(crate) fn v_min(size: Size) -> Schedule {
    let limit = (2 * (size.ranks + 4)).div_ceil(3);
    let block = Block::shortest(size.ranks);
    schedule("v_min", size, &block, limit)
}

/// Irregular blocks that are tried.
const DRAWS: usize = 20_000;
/// Blocks that fit into the memory and are played.
const PLAYS: usize = 300;

/// The block that fits into the memory and whose schedule takes the shortest time, on all ranks
/// together and then on the slowest rank.
fn best(size: Size, candidates: impl Iterator<Item = Block>, limit: usize) -> Block {
    let trial = Size {
        microbatches: size.microbatches.min(4 * size.ranks),
        ..size
    };
    let fitting = candidates.filter(|block| block.peak() <= limit);
    let mut best: Option<((usize, usize), Block)> = None;
    for block in fitting.take(PLAYS) {
        let Played {
            makespan, longest, ..
        } = play(&block, trial, limit);
        if best
            .as_ref()
            .is_none_or(|(figures, _)| (makespan, longest) < *figures)
        {
            best = Some(((makespan, longest), block));
        }
        // No rank waits, and the last one begins as early as it can.
        if longest == 6 * trial.microbatches && makespan < longest + size.ranks {
            break;
        }
    }
    best.map_or_else(|| Block::shortest(size.ranks), |(_, block)| block)
}

fn schedule(name: &str, size: Size, block: &Block, limit: usize) -> Schedule {
    let played = play(block, size, limit);
    Schedule::new(name, size, played.actions)
}
