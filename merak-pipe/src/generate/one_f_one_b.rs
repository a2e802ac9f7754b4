//! One forward, one backward.

use super::{Stage, alternating_buffers};
use crate::{Action, Exchanges, Schedule, Size};

/// `1f1b`, from [PipeDream-Flush](https://arxiv.org/abs/2006.09503), section 3.2, and
/// [Megatron-LM](https://arxiv.org/abs/2104.04473), section 2.2: the bubble of `gpipe`, with at
/// most `P - s` live microbatches on stage `s`.
pub(crate) fn one_f_one_b(size: Size) -> Schedule {
    let actions = (0..size.ranks).map(|stage| stage_order(size, stage));
    Schedule {
        buffers: alternating_buffers(size),
        ..Schedule::new("1f1b", size, actions.collect())
    }
}

/// `ds_default`: the computation of `1f1b` with the unmerged exchanges of
/// [DeepSpeed](https://github.com/deepspeedai/DeepSpeed)'s pipeline engine.
pub(crate) fn ds_default(size: Size) -> Schedule {
    Schedule {
        name: "ds_default".into(),
        exchanges: Exchanges::Split,
        ..one_f_one_b(size)
    }
}

/// `min(P-s-1, M)` forwards, then one forward and one backward in turn, then the other backwards.
pub(super) fn stage_order(size: Size, stage: usize) -> Vec<Action> {
    let microbatches = size.microbatches;
    let warmup = (size.ranks - stage - 1).min(microbatches);
    let stage = Stage(stage);
    let mut actions: Vec<Action> = (0..warmup).map(|m| stage.forward(m)).collect();
    for m in warmup..microbatches {
        actions.extend([stage.forward(m), stage.backward(m - warmup)]);
    }
    actions.extend((microbatches - warmup..microbatches).map(|m| stage.backward(m)));
    actions
}
