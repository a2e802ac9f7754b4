//! Forwards alone.

use super::Stage;
use crate::{Exchanges, Schedule, Size};

/// `inference`: stage `s` forwards microbatch `t - s` at step `t`, in `M+P-1` steps.
pub(crate) fn inference(size: Size) -> Schedule {
    let forwards = |stage| (0..size.microbatches).map(move |m| Stage(stage).forward(m));
    let actions = (0..size.ranks).map(|stage| forwards(stage).collect());
    Schedule {
        buffers: vec![2; size.ranks],
        exchanges: Exchanges::Staggered,
        ..Schedule::new("inference", size, actions.collect())
    }
}
