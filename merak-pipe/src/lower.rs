//! Lowering: from a rank's actions to its instruction stream.
//!
//! Communication follows from the computation: a receive stands before the action that needs it, a send
//! behind the action that made it. Three rules keep streams free of deadlock when a send waits for its
//! receiver:
//!
//! 1. Where both ends of a hop send one way and then receive the other way, back to back, the two become
//!    one exchange. With [`Exchanges::Split`] both go the same way first: activations, then gradients.
//! 2. Elsewhere the later stage keeps its natural order, and the earlier stage holds an activation back
//!    until it has taken all gradients that the later stage sends first.
//! 3. A schedule of forwards alone is staggered: even stages send the last result before they receive,
//!    odd stages receive first.

use crate::{
    Action, Exchanges, Instruction, Kind, Result, Schedule, Slot, StageId, Tag, dataflow::Slots,
};
use std::collections::VecDeque;

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
    /// assert_eq!(names[..5], ["RecvActivation", "LoadMicroBatch", "ForwardPass", "BackwardPass", "SendGrad"]);
    /// # Ok::<(), merak_pipe::Error>(())
    /// ```
    pub fn instructions(&self) -> Result<Vec<Vec<Instruction>>> {
        self.instructions_loading(&[])
    }

    /// As [`Schedule::instructions`], with loads on further stages, those that own inputs of the model.
    ///
    /// # Errors
    /// As [`Schedule::instructions`].
    pub fn instructions_loading(&self, loading: &[StageId]) -> Result<Vec<Vec<Instruction>>> {
        let placement = self.placement()?;
        Ok(lower(self, &placement, loading))
    }
}

/// Lowers a schedule whose actions lie within its size.
pub(crate) fn lower(
    schedule: &Schedule,
    placement: &[usize],
    loading: &[StageId],
) -> Vec<Vec<Instruction>> {
    let lowering = Lowering::new(schedule, placement, loading);
    let staggered = schedule.exchanges == Exchanges::Staggered
        && schedule.size.chunks == 1
        && schedule.is_forward_only();
    let ranks = 0..schedule.actions.len();
    if staggered {
        ranks.map(|rank| lowering.staggered(rank)).collect()
    } else {
        ranks.map(|rank| lowering.rank(rank)).collect()
    }
}

/// What the streams of all ranks need to know of each other.
struct Lowering<'a> {
    schedule: &'a Schedule,
    placement: &'a [usize],
    slots: Slots,
    /// By stage: whether it loads.
    loads: Vec<bool>,
    /// By stage: its index among its rank's stages.
    chunks: Vec<usize>,
    /// By stage and microbatch: whether an `R` is there.
    recomputed: Vec<bool>,
    /// By message that is sent: the message received back to back with it.
    partners: Vec<Option<Tag>>,
    /// By activation: the gradients that its receiver sends before it.
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
            recomputed: vec![false; stages * schedule.size.microbatches],
            partners: vec![None; slots.count()],
            gradients_before: vec![0; slots.count()],
        };
        for action in schedule.actions.iter().flatten() {
            if action.kind == Kind::Recompute {
                let index = lowering.index(*action);
                lowering.recomputed[index] = true;
            }
        }
        lowering.find_partners();
        lowering.count_gradients();
        lowering
    }

    fn index(&self, action: Action) -> usize {
        action.stage.0 * self.schedule.size.microbatches + action.microbatch.0
    }

    fn recomputed(&self, action: Action) -> bool {
        self.recomputed[self.index(action)]
    }

    /// The message to another rank that follows an action.
    fn sent(&self, action: Action) -> Option<Tag> {
        let tag = action.output(self.placement.len());
        tag.filter(|tag| self.is_remote(*tag))
    }

    /// The message from another rank directly before an action; a gradient that comes with `R` is not.
    fn received(&self, action: Action) -> Option<Tag> {
        let tag = action.input(self.placement.len());
        let with_recompute = action.kind.moves_gradient() && self.recomputed(action);
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

    fn rank(&self, rank: usize) -> Vec<Instruction> {
        let actions = &self.schedule.actions[rank];
        let is = |kind| move |action: &Action| action.kind == kind;
        let mut stream = Stream {
            lowering: self,
            out: Vec::with_capacity(3 * actions.len() + 4),
            last_forward: actions.iter().rposition(is(Kind::Forward)).unwrap_or(0),
            held_back: vec![VecDeque::new(); self.placement.len()],
            gradients: vec![0; self.placement.len()],
        };
        for (position, &action) in actions.iter().enumerate() {
            stream.receive(action);
            stream.compute(action, position, actions);
            stream.send(action, actions.get(position + 1).copied());
        }
        let mut out = stream.out;
        if actions.iter().any(is(Kind::Recompute)) {
            out.push(Instruction::RestoreRecomputeStatus);
        }
        if !self.schedule.is_forward_only() {
            out.extend([
                Instruction::ReduceTiedGrads,
                Instruction::ReduceGrads,
                Instruction::OptimizerStep,
            ]);
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

/// The stream of one rank while it is written.
struct Stream<'a> {
    lowering: &'a Lowering<'a>,
    out: Vec<Instruction>,
    /// Position of the rank's last forward: what is recomputed before it is recomputed early.
    last_forward: usize,
    /// By stage: activations that wait until so many gradients were received.
    held_back: Vec<VecDeque<(usize, Slot)>>,
    /// By stage: gradients received so far.
    gradients: Vec<usize>,
}

impl Stream<'_> {
    fn receive(&mut self, action: Action) {
        let Some(tag) = self.lowering.received(action) else {
            return;
        };
        if self.lowering.partner_of_received(tag).is_some() {
            return;
        }
        let slot = self.lowering.slot(action);
        if tag.is_activation() {
            self.out.push(Instruction::RecvActivation(slot));
        } else {
            self.out.push(Instruction::RecvGrad(slot));
            self.gradient_received(action.stage);
        }
    }

    fn compute(&mut self, action: Action, position: usize, actions: &[Action]) {
        let slot = self.lowering.slot(action);
        let early = position < self.last_forward;
        match action.kind {
            Kind::Forward => {
                if self.lowering.loads[action.stage.0] {
                    self.out.push(Instruction::LoadMicroBatch(slot));
                }
                if self.lowering.recomputed(action) {
                    self.out.push(Instruction::PreCheckpointForwardPass(slot));
                    if self.recompute_is_early(action, position, actions) {
                        self.out.push(Instruction::RestoreRecomputeStatus);
                    }
                } else {
                    self.out.push(Instruction::ForwardPass(slot));
                }
            }
            Kind::Recompute => {
                self.out.push(Instruction::RecomputeRecvGrad(slot));
                self.gradient_received(action.stage);
                if early {
                    self.out.push(Instruction::RestoreRecomputeStatus);
                }
            }
            Kind::Backward => self.out.push(Instruction::BackwardPass(slot)),
            Kind::InputGrad => self.out.push(Instruction::BackwardInput(slot)),
            Kind::WeightGrad => self.out.push(Instruction::BackwardWeight(slot)),
        }
    }

    /// Whether the `R` of a forward comes before the rank's last forward.
    fn recompute_is_early(&self, forward: Action, position: usize, actions: &[Action]) -> bool {
        let kind = Kind::Recompute;
        let recompute = Action { kind, ..forward };
        let until = self.last_forward.max(position);
        actions[position..until].contains(&recompute)
    }

    fn send(&mut self, action: Action, next: Option<Action>) {
        let Some(tag) = self.lowering.sent(action) else {
            return;
        };
        let sent = self.lowering.slot(action);
        if let (Some(_), Some(next)) = (self.lowering.partner(tag), next) {
            self.exchange(tag, sent, self.lowering.slot(next));
        } else if tag.is_activation() {
            let needed = self.lowering.gradients_before[self.lowering.slots.of(tag)];
            self.held_back[action.stage.0].push_back((needed, sent));
            self.release(action.stage);
        } else {
            self.out.push(Instruction::SendGrad(sent));
        }
    }

    fn exchange(&mut self, tag: Tag, sent: Slot, received: Slot) {
        let split = self.lowering.schedule.exchanges == Exchanges::Split;
        match (tag.is_activation(), split) {
            (true, false) => self
                .out
                .push(Instruction::SendActivationRecvGrad { sent, received }),
            (false, false) => self
                .out
                .push(Instruction::SendGradRecvActivation { sent, received }),
            (true, true) => self.out.extend([
                Instruction::SendActivation(sent),
                Instruction::RecvGrad(received),
            ]),
            (false, true) => self.out.extend([
                Instruction::RecvActivation(received),
                Instruction::SendGrad(sent),
            ]),
        }
        if tag.is_activation() {
            self.gradient_received(tag.from);
        }
    }

    fn gradient_received(&mut self, stage: StageId) {
        self.gradients[stage.0] += 1;
        self.release(stage);
    }

    /// Sends the activations of a stage that need wait no longer.
    fn release(&mut self, stage: StageId) {
        let received = self.gradients[stage.0];
        let waiting = &mut self.held_back[stage.0];
        while let Some((_, slot)) = waiting.pop_front_if(|(needed, _)| *needed <= received) {
            self.out.push(Instruction::SendActivation(slot));
        }
    }
}
