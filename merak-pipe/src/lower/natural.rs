//! The stream of a rank with one stage: messages beside the actions that take or make them.

use super::Lowering;
use crate::{Action, Exchanges, Instruction, Kind, Slot, Tag};
use std::collections::VecDeque;

impl Lowering<'_> {
    /// The stream of a rank with one stage.
    pub(super) fn natural(&self, rank: usize) -> Vec<Instruction> {
        let actions = &self.schedule.actions[rank];
        let mut stream = Stream {
            lowering: self,
            out: Vec::with_capacity(3 * actions.len() + 4),
            held_back: VecDeque::new(),
            gradients: 0,
        };
        for (position, &action) in actions.iter().enumerate() {
            stream.receive(action);
            stream.out.extend(self.computation(action));
            if action.kind == Kind::Recompute && self.receives_with_recompute(action) {
                stream.gradient_received();
            }
            if self.is_early_recompute(rank, position) {
                stream.out.push(Instruction::RestoreRecomputeStatus);
            }
            stream.send(action, actions.get(position + 1).copied());
        }
        let mut out = stream.out;
        out.extend(self.closing(rank));
        out
    }
}

/// The stream of a rank with one stage while it is written.
struct Stream<'a> {
    lowering: &'a Lowering<'a>,
    out: Vec<Instruction>,
    /// Activations that wait, each until this number of gradients was received.
    held_back: VecDeque<(usize, Slot)>,
    /// Gradients received so far.
    gradients: usize,
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
            self.gradient_received();
        }
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
            self.held_back.push_back((needed, sent));
            self.release();
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
            self.gradient_received();
        }
    }

    /// Counts a gradient and sends the activations that need wait no longer.
    fn gradient_received(&mut self) {
        self.gradients += 1;
        self.release();
    }

    fn release(&mut self) {
        let received = self.gradients;
        let is_due = |(needed, _): &mut (usize, Slot)| *needed <= received;
        while let Some((_, slot)) = self.held_back.pop_front_if(is_due) {
            self.out.push(Instruction::SendActivation(slot));
        }
    }
}
