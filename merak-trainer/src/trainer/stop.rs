//! The end of training before its last step, on which the ranks agree.

use super::{MerakTrainer, TrainerControl};
use crate::error::Result;
use merak_mpu::{Group, ReduceOp};
use std::sync::atomic::Ordering;

/// Why training ends before its last step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stop {
    /// A signal, which wins over other reasons.
    Signal {
        /// Its number.
        signal: i64,
        /// The lowest world rank that got it.
        rank: usize,
    },
    /// A callback or `early_stopping_patience` asked for it.
    Asked,
}

/// Agrees on a signal (0 for none) and on requests: what one rank asks for, all do.
///
/// # Communication
/// An all-reduce of 40 bytes.
fn agree(
    world: &Group,
    signal: i64,
    control: TrainerControl,
) -> Result<(Option<Stop>, TrainerControl)> {
    // One number for both: the larger signal first, then the lower rank.
    let number = |ranks| i64::try_from(ranks).expect("a world has fewer ranks");
    let size = number(world.world_size());
    let place = size - 1 - number(world.rank());
    let own = if signal == 0 {
        0
    } else {
        signal * size + place
    };
    let [stop, save, evaluate, log] = control.bits();
    let own = vec![own, stop, save, evaluate, log];
    let agreed = world.all_reduce_vec(own, ReduceOp::Max)?;
    let control = TrainerControl::from_bits([agreed[1], agreed[2], agreed[3], agreed[4]]);
    let signal = (agreed[0] != 0).then(|| Stop::Signal {
        signal: agreed[0].div_euclid(size),
        rank: (size - 1 - agreed[0].rem_euclid(size)) as usize,
    });
    let asked = control.should_training_stop.then_some(Stop::Asked);
    Ok((signal.or(asked), control))
}

impl MerakTrainer {
    /// Whether training ends, by the signals and the requests that any rank has seen. The requests
    /// of all ranks then stand in `control`, from where they are taken as they are met; one to stop
    /// stays.
    ///
    /// # Communication
    /// An all-reduce of 40 bytes over the world.
    pub(super) fn agree(&mut self) -> Result<Option<Stop>> {
        let signal = self.parts.stop.load(Ordering::Relaxed);
        let (stop, control) = agree(self.stages.mpu.world_group(), signal, self.control)?;
        self.control = control;
        Ok(stop)
    }
}
