//! Links over the process groups of merak-mpu.

use super::{Interrupter, Link};
use crate::{BoxError, Error, Result, Tag};
use merak_mpu::{Communicator, Group, Message, Pending, Turn};
use std::collections::{BTreeMap, VecDeque};

/// One rank's link over a group whose members are the ranks of the pipeline.
///
/// Payloads are [`Message`]s, or anything that converts to and from one. Receives are posted ahead
/// and sends are waited for at the end of a step, so both overlap with computation where the
/// group's engine can. An engine may read a message after its send is done, as
/// [`merak_mpu::Packet::of_tensor`] says. A failure poisons the group's world: errors name the
/// world rank of the culprit.
///
/// ```
/// use merak_mpu::{Message, Packet, into_vec, threads};
/// use merak_pipe::{GroupLink, Link, MicrobatchId, StageId, Tag};
///
/// let tag = Tag { from: StageId(0), to: StageId(1), microbatch: MicrobatchId(0) };
/// threads::run(2, threads::WorldOptions::default(), |member| {
///     let mut link = GroupLink::new(member.world_group()?);
///     if member.rank().0 == 0 {
///         let data = Box::new(vec![1.0_f32, 2.0]);
///         link.send(1, tag, vec![Packet { shape: vec![2], data }])?;
///     } else {
///         let mut message: Message = link.recv(0, tag)?;
///         let packet = message.pop().expect("one packet was sent");
///         assert_eq!(into_vec::<f32>(packet.data)?, [1.0, 2.0]);
///     }
///     Link::<Message>::finish(&mut link)?;
///     Ok::<_, Box<dyn std::error::Error + Send + Sync>>(())
/// })?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct GroupLink {
    group: Group,
    /// Receives that were announced, by sender and tag.
    posted: BTreeMap<(usize, Tag), VecDeque<Pending<Message>>>,
    /// Sends that may still be on their way.
    sends: Vec<(usize, Tag, Pending<()>)>,
    /// The group whose turns the actions are, and the turn in progress.
    turns: Option<Group>,
    turn: Turn,
}

impl GroupLink {
    /// Makes the link of this rank; a pipeline rank is a rank of the group.
    pub fn new(group: Group) -> Self {
        Self {
            group,
            posted: BTreeMap::new(),
            sends: Vec::new(),
            turns: None,
            turn: Turn::default(),
        }
    }

    /// Makes each action a [`turn`](Communicator::turn) of `group`: the ranks that compute one
    /// stage together, or this rank alone. Where ranks share cores, actions then run one after the
    /// other at full speed instead of all at once, as [`simulate_on`](crate::simulate_on) foresees.
    #[must_use]
    pub fn with_turns(mut self, group: Group) -> Self {
        self.turns = Some(group);
        self
    }

    fn error(&self, peer: usize, tag: Tag, source: merak_mpu::Error) -> Error {
        match source {
            merak_mpu::Error::Aborted { by, reason } => Error::Aborted { by, reason },
            source => self.broken(peer, tag, source),
        }
    }

    fn broken(&self, peer: usize, tag: Tag, source: impl Into<BoxError>) -> Error {
        Error::Link {
            rank: self.group.rank(),
            peer,
            tag,
            source: source.into(),
        }
    }

    fn start_recv(&self, from: usize, tag: Tag) -> Result<Pending<Message>> {
        let pending = self.group.start_recv(from, tag.to_u64());
        pending.map_err(|source| self.error(from, tag, source))
    }

    /// The oldest receive that was announced for the tag.
    fn take_posted(&mut self, from: usize, tag: Tag) -> Option<Pending<Message>> {
        let queue = self.posted.get_mut(&(from, tag))?;
        let pending = queue.pop_front();
        if queue.is_empty() {
            self.posted.remove(&(from, tag));
        }
        pending
    }
}

impl<P> Link<P> for GroupLink
where
    P: Into<Message> + TryFrom<Message, Error: Into<BoxError>>,
{
    fn send(&mut self, to: usize, tag: Tag, payload: P) -> Result<()> {
        let pending = self.group.start_send(to, tag.to_u64(), payload.into());
        let pending = pending.map_err(|source| self.error(to, tag, source))?;
        self.sends.push((to, tag, pending));
        Ok(())
    }

    fn recv(&mut self, from: usize, tag: Tag) -> Result<P> {
        let pending = match self.take_posted(from, tag) {
            Some(pending) => pending,
            None => self.start_recv(from, tag)?,
        };
        let message = pending
            .wait()
            .map_err(|source| self.error(from, tag, source))?;
        P::try_from(message).map_err(|source| self.broken(from, tag, source))
    }

    fn post(&mut self, from: usize, tag: Tag) -> Result<()> {
        let pending = self.start_recv(from, tag)?;
        self.posted
            .entry((from, tag))
            .or_default()
            .push_back(pending);
        Ok(())
    }

    fn begin(&mut self) -> Result<()> {
        let Some(group) = &self.turns else {
            return Ok(());
        };
        self.turn = group.turn().map_err(|source| match source {
            merak_mpu::Error::Aborted { by, reason } => Error::Aborted { by, reason },
            source => Error::NoTurn {
                rank: self.group.rank(),
                source: source.into(),
            },
        })?;
        Ok(())
    }

    fn end(&mut self) {
        self.turn = Turn::default();
    }

    fn finish(&mut self) -> Result<()> {
        for (to, tag, pending) in std::mem::take(&mut self.sends) {
            pending
                .wait()
                .map_err(|source| self.error(to, tag, source))?;
        }
        Ok(())
    }

    fn abort(&mut self, reason: &str) {
        self.group.abort(reason);
    }

    fn interrupter(&self) -> Option<Interrupter> {
        let group = self.group.clone();
        Some(Box::new(move |reason| group.abort(reason)))
    }
}
