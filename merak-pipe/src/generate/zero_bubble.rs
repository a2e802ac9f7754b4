//! One stage per rank, with weight gradients put off to where the rank would wait.
//!
//! ```text
//! P = 3, zb_h1   F F F . . I W F I W F ..    the first rank runs ahead, W follows I at once
//!                  F F . I F I W F I ..
//!                    F I F I F I W F ..    the last rank puts P-1 weight gradients off
//! ```

use super::Stage;
use crate::{Action, Schedule, Size};

/// `zb_h1`, from [Zero Bubble](https://arxiv.org/abs/2401.10241), section 2.3 (which writes B for
/// our `I`): the forwards of `1f1b`, its memory on the first rank, and a third of its bubble,
/// `(P-1)(F + I - W)`.
pub(crate) fn zb_h1(size: Size) -> Schedule {
    schedule("zb_h1", size, 1)
}

/// `zb_h2`, from the same section: enough forwards ahead to keep every rank busy from its first
/// action to its last, with up to `2P - 1` live microbatches. Ranks start and end one after
/// another, so that the bubble is zero where the optimizer step does not wait for all of them.
pub(crate) fn zb_h2(size: Size) -> Schedule {
    schedule("zb_h2", size, 2)
}

/// Rank `r` is `per_hop` forwards ahead for each rank after it, and puts as many weight gradients
/// off for each rank before it: the work under way at once is the same on every rank.
fn schedule(name: &str, size: Size, per_hop: usize) -> Schedule {
    let order = |rank| {
        rank_order(
            size,
            rank,
            per_hop * (size.ranks - 1 - rank),
            per_hop * rank,
        )
    };
    Schedule::new(name, size, (0..size.ranks).map(order).collect())
}

/// `ahead` forwards, then a forward and an input gradient in turn, with a weight gradient after
/// each but the first `put_off`.
fn rank_order(size: Size, rank: usize, ahead: usize, put_off: usize) -> Vec<Action> {
    let microbatches = size.microbatches;
    let stage = Stage(rank);
    let ahead = ahead.min(microbatches);
    let mut actions: Vec<Action> = (0..ahead).map(|m| stage.forward(m)).collect();
    for m in 0..microbatches {
        actions.extend((ahead + m < microbatches).then(|| stage.forward(ahead + m)));
        actions.push(stage.input_grad(m));
        actions.extend(m.checked_sub(put_off).map(|m| stage.weight_grad(m)));
    }
    let left = microbatches.saturating_sub(put_off)..microbatches;
    actions.extend(left.map(|m| stage.weight_grad(m)));
    actions
}
