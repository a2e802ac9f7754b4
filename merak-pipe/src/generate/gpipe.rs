//! All forwards, then all backwards.

use super::{Stage, one_f_one_b};
use crate::{Schedule, Size};

/// `gpipe`, from [GPipe](https://arxiv.org/abs/1811.06965), section 2.3: the bubble is `P-1` of
/// `M+P-1` slots, and all `M` microbatches are live at once.
///
/// Backwards run in ascending order, where the paper's figure runs them in descending order: weight
/// gradients then add up in the order of every other schedule. On one rank the order is that of
/// `1f1b`.
pub(crate) fn gpipe(size: Size) -> Schedule {
    let actions = |rank| {
        let stage = Stage(rank);
        let forwards = (0..size.microbatches).map(move |m| stage.forward(m));
        let backwards = (0..size.microbatches).map(move |m| stage.backward(m));
        forwards.chain(backwards).collect()
    };
    let actions = match size.ranks {
        1 => one_f_one_b(size).actions,
        ranks => (0..ranks).map(actions).collect(),
    };
    Schedule {
        buffers: vec![size.microbatches; size.ranks],
        ..Schedule::new("gpipe", size, actions)
    }
}
