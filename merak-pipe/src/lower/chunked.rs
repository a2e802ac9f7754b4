//! Streams of ranks that run several stages.
//!
//! Such a rank exchanges messages of several stages with the same neighbour. With sends and
//! receives beside their actions, as in `natural.rs`, two ranks could wait for each other. Here
//! all ranks use one common order instead: actions by the time at which they start when each
//! takes one unit, and each message directly before the action that reads it. Sender and receiver
//! put a message at the same place, so the first instruction of the common order that is not yet
//! done can always run. Two actions that run at once read their messages at one place, first that
//! of the forward.

use super::Lowering;
use crate::{
    Action, Instruction, Kind, Pair, Result, Tag,
    dataflow::{Visit, walk_with},
};

/// Place in the common order: time, then rank of the action; the action's message comes before it.
type Place = (usize, usize, bool);

impl Lowering<'_> {
    /// The streams of all ranks.
    ///
    /// # Errors
    /// When the ranks wait for each other.
    pub(super) fn chunked(&self) -> Result<Vec<Vec<Instruction>>> {
        let times = self.times()?;
        let mut streams: Vec<Vec<(Place, Instruction)>> = vec![Vec::new(); times.len()];
        for (rank, actions) in self.schedule.actions.iter().enumerate() {
            for (position, &action) in actions.iter().enumerate() {
                let time = times[rank][position];
                if let Some(tag) = self.taken(action) {
                    let place = (time, rank, false);
                    let sender = self.placement[tag.from.0];
                    streams[sender].push((place, self.sending(tag)));
                    if action.kind != Kind::Recompute {
                        streams[rank].push((place, self.receiving(tag)));
                    }
                }
                let place = (time, rank, true);
                let computation = self.passes(rank, position);
                streams[rank].extend(computation.map(|instruction| (place, instruction)));
                if self.is_early_recompute(rank, position) {
                    streams[rank].push((place, Instruction::RestoreRecomputeStatus));
                }
            }
        }
        let finished = streams.into_iter().enumerate().map(|(rank, mut stream)| {
            stream.sort_by_key(|(place, _)| *place);
            let ordered = stream.into_iter().map(|(_, instruction)| instruction);
            ordered.chain(self.closing(rank)).collect()
        });
        Ok(finished.collect())
    }

    /// The instructions of the computation at a position of a rank's list; those of a pair stand at
    /// its backward.
    fn passes(&self, rank: usize, position: usize) -> impl Iterator<Item = Instruction> {
        let pair_at = |position| self.schedule.pair(rank, position);
        // A forward that is recomputed on its own keeps its own instruction.
        let at_once = |pair: &Pair| self.recompute(pair.forward).is_none();
        let ends = position.checked_sub(1).and_then(pair_at).filter(at_once);
        let begins = pair_at(position).as_ref().is_some_and(at_once);
        let alone = ends.is_none() && !begins;
        let single = alone.then(|| self.computation(self.schedule.actions[rank][position]));
        let joint = ends.map(|Pair { forward, backward }| {
            let pass = Instruction::ForwardBackwardPass {
                forward: self.slot(forward),
                backward: self.slot(backward),
            };
            let load = Instruction::LoadMicroBatch(self.slot(forward));
            self.loads[forward.stage.0]
                .then_some(load)
                .into_iter()
                .chain([pass])
        });
        single
            .into_iter()
            .flatten()
            .chain(joint.into_iter().flatten())
    }

    /// When each action of each rank starts.
    fn times(&self) -> Result<Vec<Vec<usize>>> {
        let schedule = self.schedule;
        let stages = self.placement.len();
        let mut times: Vec<Vec<usize>> = vec![Vec::new(); schedule.actions.len()];
        let mut arrivals = vec![0; self.slots.count()];
        // An `R` that receives the gradient has to wait for it.
        let input = |action: Action| self.taken(action).or_else(|| action.input(stages));
        let visit = |Visit { rank, cell }: Visit| {
            let free = times[rank].last().map_or(0, |time| time + 1);
            let needs = cell.actions().filter_map(input);
            let arrival = needs.map(|tag| arrivals[self.slots.of(tag)]).max();
            let time = free.max(arrival.unwrap_or(0));
            for action in cell.actions() {
                times[rank].push(time);
                if let Some(tag) = action.output(stages) {
                    arrivals[self.slots.of(tag)] = time + 1;
                }
            }
        };
        walk_with(schedule, self.placement, input, visit)?;
        Ok(times)
    }

    /// The message from another rank that an action reads. A recomputation directly before its
    /// backward reads the message of the backward.
    fn taken(&self, action: Action) -> Option<Tag> {
        if action.kind != Kind::Recompute {
            return self.received(action);
        }
        if !self.receives_with_recompute(action) {
            return None;
        }
        let backward = Action {
            kind: Kind::Backward,
            ..action
        };
        let tag = backward.input(self.placement.len());
        tag.filter(|tag| self.is_remote(*tag))
    }

    fn sending(&self, tag: Tag) -> Instruction {
        let slot = |kind| self.slot(Action::new(tag.from, kind, tag.microbatch));
        if tag.is_activation() {
            Instruction::SendActivation(slot(Kind::Forward))
        } else {
            Instruction::SendGrad(slot(Kind::Backward))
        }
    }

    fn receiving(&self, tag: Tag) -> Instruction {
        let slot = |kind| self.slot(Action::new(tag.to, kind, tag.microbatch));
        if tag.is_activation() {
            Instruction::RecvActivation(slot(Kind::Forward))
        } else {
            Instruction::RecvGrad(slot(Kind::Backward))
        }
    }
}
