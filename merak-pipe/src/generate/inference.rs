//! Forwards alone.

use super::Stage;
use crate::{Exchanges, Schedule, Size};

/// `inference`: with one stage per rank, stage `s` forwards microbatch `t - s` at step `t`, in
/// `M+P-1` steps.
///
/// With several, microbatches go in rounds of `P`: a rank runs a round through one of its stages,
/// then through the next. The order (round, stage, microbatch) is one for all ranks, and every
/// message goes forward in it.
pub(crate) fn inference(size: Size, placement: &[usize]) -> Schedule {
    let mut actions = vec![Vec::new(); size.ranks];
    for first in (0..size.microbatches).step_by(size.ranks) {
        let round = first..(first + size.ranks).min(size.microbatches);
        for (stage, &rank) in placement.iter().enumerate() {
            actions[rank].extend(round.clone().map(|m| Stage(stage).forward(m)));
        }
    }
    Schedule {
        buffers: vec![2; size.stages()],
        exchanges: Exchanges::Staggered,
        ..Schedule::new("inference", size, actions)
    }
}
