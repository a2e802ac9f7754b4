//! The generators: one small pure function for each schedule.
//!
//! Each takes a checked size (see `ScheduleKind::generate`) and lists the actions of every rank.

mod dualpipe_v;
mod gpipe;
mod inference;
mod interleaved;
mod one_f_one_b;
mod recompute;
mod v_shape;
mod zb_v;
mod zero_bubble;

pub(crate) use dualpipe_v::dualpipe_v;
pub(crate) use gpipe::gpipe;
pub(crate) use inference::inference;
pub(crate) use interleaved::interleaved;
pub(crate) use one_f_one_b::{ds_default, one_f_one_b};
pub(crate) use recompute::{last_no_recompute, pre_recompute, shifted_critical_path};
pub(crate) use v_shape::{v_half, v_min};
pub(crate) use zb_v::zb_v;
pub(crate) use zero_bubble::{zb_h1, zb_h2};

use crate::{Action, Kind, MicrobatchId, Size, StageId};

/// Makes the actions of one stage by short names: `stage.forward(3)`.
#[derive(Debug, Clone, Copy)]
struct Stage(usize);

impl Stage {
    fn forward(self, microbatch: usize) -> Action {
        self.action(Kind::Forward, microbatch)
    }

    fn backward(self, microbatch: usize) -> Action {
        self.action(Kind::Backward, microbatch)
    }

    fn input_grad(self, microbatch: usize) -> Action {
        self.action(Kind::InputGrad, microbatch)
    }

    fn weight_grad(self, microbatch: usize) -> Action {
        self.action(Kind::WeightGrad, microbatch)
    }

    fn recompute(self, microbatch: usize) -> Action {
        self.action(Kind::Recompute, microbatch)
    }

    fn action(self, kind: Kind, microbatch: usize) -> Action {
        Action::new(StageId(self.0), kind, MicrobatchId(microbatch))
    }
}

/// Buffers of each stage under the schedules that alternate forwards and backwards: one more than
/// live microbatches, so that a receive can be posted while all of them are in use.
fn alternating_buffers(size: Size) -> Vec<usize> {
    let buffers = |stage: usize| (size.ranks - stage + 1).min(size.microbatches).max(2);
    (0..size.ranks).map(buffers).collect()
}

/// The same order without microbatches from `microbatches` on. The others do not need the missing
/// ones, since microbatches wait for each other only through the order of a rank.
fn only_microbatches(mut actions: Vec<Vec<Action>>, microbatches: usize) -> Vec<Vec<Action>> {
    for order in &mut actions {
        order.retain(|action| action.microbatch.0 < microbatches);
    }
    actions
}
