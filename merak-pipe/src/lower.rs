//! Lowering: from a rank's actions to its instruction stream.
//!
//! Communication follows from the computation: a receive stands before the action that needs it, a
//! send after the action that made it. These rules keep streams free of deadlock when a send waits
//! for its receiver:
//!
//! 1. Where both ends of a hop send one way and then receive the other way, back to back, the two
//!    become one exchange. With [`Exchanges::Split`] both go the same way first: activations, then
//!    gradients.
//! 2. Elsewhere the later stage keeps its natural order, and the earlier stage holds an activation
//!    back until it has taken all gradients that the later stage sends first.
//! 3. Where ranks run several stages, or two actions at once, all messages keep one order in time:
//!    see `lower/chunked.rs`.
//! 4. A recompute directly before its backward receives the gradient; an earlier one receives
//!    nothing, and the gradient comes where the backward stands.
//! 5. A schedule of forwards alone is staggered: even stages send the last result before they
//!    receive, odd stages receive first.

mod chunked;
mod natural;

use crate::{
    Action, Exchanges, Instruction, Kind, Result, Schedule, Slot, StageId, Tag, dataflow::Slots,
};

impl Schedule {
    /// The instruction stream of every rank; the first and the last stage load their microbatches.
    ///
    /// # Errors
    /// When the actions do not fit the schedule's size.
    ///
    /// ```
    /// use merak_pipe::{ScheduleKind, Size};
    /// let schedule = ScheduleKind::OneFOneB.generate(Size::new(2, 1))?;
    /// let names: Vec<_> = schedule.instructions()?[1].iter().map(|i| i.name()).collect();
    /// assert_eq!(
    ///     names[..5],
    ///     ["RecvActivation", "LoadMicroBatch", "ForwardPass", "BackwardPass", "SendGrad"],
    /// );
    /// # Ok::<(), merak_pipe::Error>(())
    /// ```
    pub fn instructions(&self) -> Result<Vec<Vec<Instruction>>> {
        self.instructions_loading(&[])
    }

    /// As [`Schedule::instructions`], with loads on further stages: those in `loading`, which own
    /// inputs of the model.
    ///
    /// # Errors
    /// As [`Schedule::instructions`].
    pub fn instructions_loading(&self, loading: &[StageId]) -> Result<Vec<Vec<Instruction>>> {
        let placement = self.placement()?;
        lower(self, &placement, loading)
    }
}

/// Lowers a schedule whose actions lie within its size.
///
/// # Errors
/// When the ranks of a schedule with several stages per rank wait for each other.
pub(crate) fn lower(
    schedule: &Schedule,
    placement: &[usize],
    loading: &[StageId],
) -> Result<Vec<Vec<Instruction>>> {
    let lowering = Lowering::new(schedule, placement, loading);
    let ranks = 0..schedule.actions.len();
    if schedule.size.chunks > 1 || !schedule.pairs.is_empty() {
        lowering.chunked()
    } else if schedule.exchanges == Exchanges::Staggered && schedule.is_forward_only() {
        Ok(ranks.map(|rank| lowering.staggered(rank)).collect())
    } else {
        Ok(ranks.map(|rank| lowering.natural(rank)).collect())
    }
}

/// An `R` in its rank's list.
#[derive(Debug, Clone, Copy)]
struct Recomputed {
    /// Its index in the list.
    position: usize,
    /// Whether its backward comes next: one instruction then recomputes and receives the gradient.
    receives: bool,
}

/// Facts about all ranks that each stream needs.
struct Lowering<'a> {
    schedule: &'a Schedule,
    placement: &'a [usize],
    slots: Slots,
    /// By stage: whether it loads.
    loads: Vec<bool>,
    /// By stage: its index among its rank's stages.
    chunks: Vec<usize>,
    /// By stage and microbatch: its `R`.
    recomputes: Vec<Option<Recomputed>>,
    /// By rank: the position of its last forward; a recompute before it is an early one.
    last_forwards: Vec<usize>,
    /// By message that is sent: the message received back to back with it.
    partners: Vec<Option<Tag>>,
    /// By activation: the number of gradients that its receiver sends before it.
    gradients_before: Vec<usize>,
}

impl<'a> Lowering<'a> {
    fn new(schedule: &'a Schedule, placement: &'a [usize], loading: &[StageId]) -> Self {
        let stages = placement.len();
        let slots = Slots::new(schedule);
        let loads = |stage| stage == 0 || stage + 1 == stages || loading.contains(&StageId(stage));
        let mut per_rank = vec![0; schedule.actions.len()];
        let mut chunk = |rank: &usize| {
            per_rank[*rank] += 1;
            per_rank[*rank] - 1
        };
        let mut lowering = Self {
            schedule,
            placement,
            slots,
            loads: (0..stages).map(loads).collect(),
            chunks: placement.iter().map(&mut chunk).collect(),
            recomputes: vec![None; stages * schedule.size.microbatches],
            last_forwards: vec![0; schedule.actions.len()],
            partners: vec![None; slots.count()],
            gradients_before: vec![0; slots.count()],
        };
        for (rank, actions) in schedule.actions.iter().enumerate() {
            for (position, &action) in actions.iter().enumerate() {
                match action.kind {
                    Kind::Recompute => {
                        let index = lowering.index(action);
                        let next = actions.get(position + 1);
                        let receives = next.is_some_and(|next| {
                            next.kind.moves_gradient() && lowering.index(*next) == index
                        });
                        lowering.recomputes[index] = Some(Recomputed { position, receives });
                    }
                    Kind::Forward => lowering.last_forwards[rank] = position,
                    Kind::Backward | Kind::InputGrad | Kind::WeightGrad => {}
                }
            }
        }
        lowering.find_partners();
        lowering.count_gradients();
        lowering
    }

    fn index(&self, action: Action) -> usize {
        action.stage.0 * self.schedule.size.microbatches + action.microbatch.0
    }

    /// The `R` of the action's stage and microbatch.
    fn recompute(&self, action: Action) -> Option<Recomputed> {
        self.recomputes[self.index(action)]
    }

    /// Whether the `R` of the action's stage and microbatch receives the gradient of its backward.
    fn receives_with_recompute(&self, action: Action) -> bool {
        self.recompute(action).is_some_and(|found| found.receives)
    }

    /// The message to another rank that follows an action.
    fn sent(&self, action: Action) -> Option<Tag> {
        let tag = action.output(self.placement.len());
        tag.filter(|tag| self.is_remote(*tag))
    }

    /// The message from another rank directly before an action, except a gradient that comes with
    /// `R`.
    fn received(&self, action: Action) -> Option<Tag> {
        let tag = action.input(self.placement.len());
        let with_recompute = action.kind.moves_gradient() && self.receives_with_recompute(action);
        tag.filter(|tag| self.is_remote(*tag) && !with_recompute)
    }

    fn is_remote(&self, tag: Tag) -> bool {
        self.placement[tag.from.0] != self.placement[tag.to.0]
    }

    fn find_partners(&mut self) {
        for actions in &self.schedule.actions {
            for pair in actions.windows(2) {
                if let (Some(sent), Some(received)) = (self.sent(pair[0]), self.received(pair[1]))
                    && (sent.from, sent.to) == (received.to, received.from)
                {
                    self.partners[self.slots.of(sent)] = Some(received);
                }
            }
        }
    }

    /// The message that is received in one exchange with a sent one: both ends must agree.
    fn partner(&self, sent: Tag) -> Option<Tag> {
        let partner = self.partners[self.slots.of(sent)]?;
        let back = self.partners[self.slots.of(partner)];
        (back == Some(sent)).then_some(partner)
    }

    fn count_gradients(&mut self) {
        let mut sent_gradients = vec![0_usize; self.placement.len()];
        for actions in &self.schedule.actions {
            for &action in actions {
                if let (Kind::Forward, Some(tag)) = (action.kind, self.received(action)) {
                    let merged = usize::from(self.partner_of_received(tag).is_some());
                    let sent = sent_gradients[action.stage.0];
                    self.gradients_before[self.slots.of(tag)] = sent.saturating_sub(merged);
                } else if action.kind.moves_gradient() && self.sent(action).is_some() {
                    sent_gradients[action.stage.0] += 1;
                }
            }
        }
    }

    /// The message sent in one exchange with a received one.
    fn partner_of_received(&self, received: Tag) -> Option<Tag> {
        // What the other end receives when it sends this message is what this end sends.
        self.partner(received)
    }

    fn slot(&self, action: Action) -> Slot {
        let buffers = self.schedule.buffers.get(action.stage.0).copied();
        let chunked = self.schedule.size.chunks > 1;
        Slot {
            stage: action.stage,
            microbatch: action.microbatch,
            buffer: action.microbatch.0 % buffers.unwrap_or(1).max(1),
            chunk: chunked.then(|| self.chunks[action.stage.0]),
        }
    }

    /// The instructions of the computation alone.
    fn computation(&self, action: Action) -> impl Iterator<Item = Instruction> {
        let slot = self.slot(action);
        let last_forward = self.last_forwards[self.placement[action.stage.0]];
        let recompute = self.recompute(action);
        let early = recompute.is_some_and(|found| found.position < last_forward);
        let receives = recompute.is_some_and(|found| found.receives);
        let loads = action.kind == Kind::Forward && self.loads[action.stage.0];
        let (compute, restores) = match action.kind {
            Kind::Forward if recompute.is_some() => {
                (Instruction::PreCheckpointForwardPass(slot), early)
            }
            Kind::Forward => (Instruction::ForwardPass(slot), false),
            // Its restore comes after the sends that waited for its gradient.
            Kind::Recompute if receives => (Instruction::RecomputeRecvGrad(slot), false),
            Kind::Recompute => (Instruction::RecomputeForwardPass(slot), false),
            Kind::Backward => (Instruction::BackwardPass(slot), false),
            Kind::InputGrad => (Instruction::BackwardInput(slot), false),
            Kind::WeightGrad => (Instruction::BackwardWeight(slot), false),
        };
        let load = loads.then_some(Instruction::LoadMicroBatch(slot));
        let restore = restores.then_some(Instruction::RestoreRecomputeStatus);
        load.into_iter().chain([compute]).chain(restore)
    }

    /// Whether an action is an `R` before its rank's last forward.
    fn is_early_recompute(&self, rank: usize, position: usize) -> bool {
        let action = self.schedule.actions[rank][position];
        action.kind == Kind::Recompute && position < self.last_forwards[rank]
    }

    /// What ends a rank's step.
    fn closing(&self, rank: usize) -> Vec<Instruction> {
        let mut out = Vec::new();
        let mut actions = self.schedule.actions[rank].iter();
        if actions.any(|action| action.kind == Kind::Recompute) {
            out.push(Instruction::RestoreRecomputeStatus);
        }
        if !self.schedule.is_forward_only() {
            out.push(Instruction::ReduceTiedGrads);
            out.push(Instruction::ReduceGrads);
            out.push(Instruction::OptimizerStep);
        }
        out
    }

    /// Step `t` forwards the microbatch that step `t - 1` of the stage before sent.
    fn staggered(&self, rank: usize) -> Vec<Instruction> {
        let actions = &self.schedule.actions[rank];
        let Some(stage) = actions.first().map(|action| action.stage.0) else {
            return Vec::new();
        };
        let mut out = Vec::with_capacity(4 * actions.len());
        for step in stage..=stage + actions.len() {
            let current = actions.get(step - stage).copied();
            let previous = (step > stage).then(|| actions[step - stage - 1]);
            let with_buffer = |action: Action, ahead: usize| Slot {
                buffer: (step + stage + ahead) % 2,
                ..self.slot(action)
            };
            let loaded = current.filter(|_| self.loads[stage]);
            out.extend(loaded.map(|a| Instruction::LoadMicroBatch(with_buffer(a, 0))));
            let sent = previous.filter(|a| self.sent(*a).is_some());
            let sent = sent.map(|a| Instruction::SendActivation(with_buffer(a, 1)));
            let received = current.filter(|a| self.received(*a).is_some());
            let received = received.map(|a| Instruction::RecvActivation(with_buffer(a, 0)));
            if stage % 2 == 0 {
                out.extend(sent.into_iter().chain(received));
            } else {
                out.extend(received.into_iter().chain(sent));
            }
            out.extend(current.map(|a| Instruction::ForwardPass(with_buffer(a, 0))));
        }
        out
    }
}
