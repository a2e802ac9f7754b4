//! The proof that an instruction stream cannot deadlock when a send waits for its receiver.

use crate::{
    Error, Instruction, Result, Schedule, Tag,
    dataflow::{Slots, Worklist},
};

/// The ends of a message that are ready for it.
#[derive(Debug, Clone, Copy, Default)]
struct Meeting {
    sender: bool,
    receiver: bool,
}

impl Meeting {
    fn is_over(self) -> bool {
        self.sender && self.receiver
    }
}

/// Runs the streams with sends that wait for their receiver; both halves of an exchange begin at
/// once.
///
/// # Errors
/// When some ranks wait for each other; the first of them is named.
pub(crate) fn check(
    schedule: &Schedule,
    placement: &[usize],
    streams: &[Vec<Instruction>],
) -> Result<()> {
    let stages = placement.len();
    let slots = Slots::new(schedule);
    let mut meetings = vec![Meeting::default(); slots.count()];
    let mut cursors = vec![0; streams.len()];
    let mut queue = Worklist::all(streams.len());
    let remote = |tag: &Tag| placement[tag.from.0] != placement[tag.to.0];
    let messages = |instruction: &Instruction| {
        let (sent, received) = instruction.messages(stages);
        (sent.filter(remote), received.filter(remote))
    };
    while let Some(rank) = queue.pop() {
        while let Some(instruction) = streams[rank].get(cursors[rank]) {
            let (sent, received) = messages(instruction);
            // Only news wakes the other end, so each message does so at most twice.
            if let Some(tag) = sent
                && !std::mem::replace(&mut meetings[slots.of(tag)].sender, true)
            {
                queue.push(placement[tag.to.0]);
            }
            if let Some(tag) = received
                && !std::mem::replace(&mut meetings[slots.of(tag)].receiver, true)
            {
                queue.push(placement[tag.from.0]);
            }
            let mut waits = sent.into_iter().chain(received);
            if waits.any(|tag| !meetings[slots.of(tag)].is_over()) {
                break;
            }
            cursors[rank] += 1;
        }
    }
    for (rank, (stream, &position)) in streams.iter().zip(&cursors).enumerate() {
        if let Some(instruction) = stream.get(position) {
            let (sent, received) = messages(instruction);
            let mut waits = sent.into_iter().chain(received);
            if let Some(needs) = waits.find(|tag| !meetings[slots.of(*tag)].is_over()) {
                return Err(Error::BlockingDeadlock {
                    rank,
                    position,
                    instruction: instruction.name(),
                    needs,
                });
            }
        }
    }
    Ok(())
}
