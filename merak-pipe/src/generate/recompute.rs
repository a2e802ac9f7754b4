//! `1f1b` that recomputes before the gradient arrives.
//!
//! Where a stage waits for a gradient anyway, it recomputes the activations meanwhile, with an `R`
//! before the `B`. From [Merak](https://arxiv.org/abs/2206.04959). A sketch of the critical path
//! for `P = 2`, which the three schedules shorten step by step (`b` is a backward with its
//! recompute):
//!
//! ```text
//! 1f1b                 F0 F1 .. .. .. b0    F2 ..     the last stage recomputes within b0
//!                         F0 b0       F1 b1
//! last_no_recompute    F0 F1 R0 B0 F2                 R0 runs under B0 of the last stage
//!                         F0 B0 F1 B1
//! shifted              F0 F1 F2 R0 B0 R1 B1 F3        a forward more hides the next turn too
//!                         F0 B0 F1 B1 F2 B2
//! ```

use super::{Stage, alternating_buffers, one_f_one_b::stage_order};
use crate::{Action, Kind, Schedule, Size, StageId};

/// `pre_recompute_1f1b`: in the cooldown of every stage but the last, recompute comes before the
/// wait.
pub(crate) fn pre_recompute(size: Size) -> Schedule {
    let last = size.ranks - 1;
    let actions = (0..size.ranks).map(|stage| {
        let order = stage_order(size, stage);
        if stage < last {
            with_recompute(order, |m| in_cooldown(size, stage, m))
        } else {
            order
        }
    });
    schedule("pre_recompute_1f1b", size, actions.collect(), Vec::new())
}

/// `last_no_recompute_1f1b`: besides, the last stage never recomputes, and the stage before it
/// hides one recompute under the last stage's first backward.
pub(crate) fn last_no_recompute(size: Size) -> Schedule {
    let last = size.ranks - 1;
    let actions = (0..size.ranks).map(|stage| {
        let order = stage_order(size, stage);
        match last - stage {
            0 => order,
            1 => with_recompute(order, |m| m == 0),
            _ => with_recompute(order, |m| in_cooldown(size, stage, m)),
        }
    });
    let actions = actions.collect();
    schedule("last_no_recompute_1f1b", size, actions, last_stage(size))
}

/// `shifted_critical_path`: besides, the last stage but one runs three forwards before its first
/// backward, so that it hides two recomputes.
pub(crate) fn shifted_critical_path(size: Size) -> Schedule {
    let last = size.ranks - 1;
    let actions = (0..size.ranks).map(|stage| {
        let order = stage_order(size, stage);
        match last - stage {
            0 => order,
            1 => shifted_order(size, stage),
            2 => with_recompute(order, |m| m == 0 || in_cooldown(size, stage, m)),
            _ => with_recompute(order, |m| in_cooldown(size, stage, m)),
        }
    });
    let actions = actions.collect();
    schedule("shifted_critical_path", size, actions, last_stage(size))
}

fn shifted_order(size: Size, stage: usize) -> Vec<Action> {
    let stage = Stage(stage);
    let mut actions: Vec<Action> = (0..3).map(|m| stage.forward(m)).collect();
    for m in 0..2 {
        actions.extend([stage.recompute(m), stage.backward(m)]);
    }
    for m in 3..size.microbatches {
        actions.extend([stage.forward(m), stage.backward(m - 1)]);
    }
    actions.push(stage.backward(size.microbatches - 1));
    actions
}

/// Whether the stage meets the microbatch's backward after its last forward.
fn in_cooldown(size: Size, stage: usize, microbatch: usize) -> bool {
    microbatch >= size.microbatches - (size.ranks - 1 - stage)
}

/// Puts an `R` before the backward of every microbatch that is `chosen`.
fn with_recompute(actions: Vec<Action>, chosen: impl Fn(usize) -> bool) -> Vec<Action> {
    let mut out = Vec::with_capacity(actions.len());
    for action in actions {
        if action.kind == Kind::Backward && chosen(action.microbatch.0) {
            out.push(Action {
                kind: Kind::Recompute,
                ..action
            });
        }
        out.push(action);
    }
    out
}

/// The stage that keeps its activations; the only one of a single rank is the last one too.
fn last_stage(size: Size) -> Vec<StageId> {
    vec![StageId(size.ranks - 1)]
}

fn schedule(
    name: &str,
    size: Size,
    actions: Vec<Vec<Action>>,
    no_recompute: Vec<StageId>,
) -> Schedule {
    Schedule {
        buffers: alternating_buffers(size),
        no_recompute,
        ..Schedule::new(name, size, actions)
    }
}
