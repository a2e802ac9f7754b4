//! Forwards alone.

use super::Stage;
use crate::{Exchanges, Result, Schedule, Size};

impl Schedule {
    /// Forwards alone of `microbatches` over the same stages on the same ranks, for evaluation and
    /// generation.
    ///
    /// # Errors
    /// As [`Schedule::placement`].
    ///
    /// ```
    /// use merak_pipe::{ScheduleKind, Size};
    /// let schedule = ScheduleKind::ZbV.generate(Size::new(2, 4).with_chunks(2))?;
    /// assert_eq!(schedule.forwards(2)?.to_csv(), "0F0,0F1,3F0,3F1\n1F0,1F1,2F0,2F1\n");
    /// # Ok::<(), merak_pipe::Error>(())
    /// ```
    pub fn forwards(&self, microbatches: usize) -> Result<Self> {
        let placement = self.placement()?;
        let size = Size {
            microbatches,
            ..self.size
        };
        size.check()?;
        Ok(inference(size, &placement))
    }
}

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
