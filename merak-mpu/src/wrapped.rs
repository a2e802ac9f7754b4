//! Members whose collectives start in another way than those of the engine beneath.

use crate::{
    Buffer, Call, Communicator, Engine, Failure, Locality, Member, Message, Pending, Rank, Result,
    Started, Turn,
};
use std::{fmt, sync::Arc, time::Instant};

/// What a collective is started with, and the group beneath, with its name.
pub(crate) struct Start<'a> {
    pub(crate) group: &'a str,
    pub(crate) call: Call,
    pub(crate) buffer: Box<dyn Buffer>,
    lengths: Option<Arc<[usize]>>,
    communicator: &'a dyn Communicator,
}

impl Start<'_> {
    /// Starts it on the engine beneath.
    pub(crate) fn go(self) -> Started {
        self.communicator
            .start(self.call, self.buffer, self.lengths)
    }
}

/// An engine whose groups start their collectives by a function.
struct Wrapped<S> {
    engine: Arc<dyn Engine>,
    start: Arc<S>,
}

/// A group of such an engine.
struct WrappedGroup<S> {
    communicator: Arc<dyn Communicator>,
    name: String,
    start: Arc<S>,
}

impl Member {
    /// The same member, whose collectives `start` starts.
    pub(crate) fn started_by<S>(&self, start: S) -> Self
    where
        S: Fn(Start<'_>) -> Started + Send + Sync + 'static,
    {
        Self::new(Arc::new(Wrapped {
            engine: Arc::clone(self.engine()),
            start: Arc::new(start),
        }))
    }
}

impl<S> Engine for Wrapped<S>
where
    S: Fn(Start<'_>) -> Started + Send + Sync + 'static,
{
    fn rank(&self) -> Rank {
        self.engine.rank()
    }

    fn world_size(&self) -> usize {
        self.engine.world_size()
    }

    fn communicator(&self, name: &str, members: &[Rank]) -> Result<Arc<dyn Communicator>> {
        Ok(Arc::new(WrappedGroup {
            communicator: self.engine.communicator(name, members)?,
            name: name.to_owned(),
            start: Arc::clone(&self.start),
        }))
    }

    fn abort(&self, reason: &str) {
        self.engine.abort(reason);
    }

    fn end(&self) {
        self.engine.end();
    }

    fn failure(&self) -> Option<Failure> {
        self.engine.failure()
    }

    fn locality(&self) -> Locality {
        self.engine.locality()
    }

    fn shared_bytes(&self) -> usize {
        self.engine.shared_bytes()
    }

    fn epoch(&self) -> Instant {
        self.engine.epoch()
    }
}

impl<S> fmt::Debug for Wrapped<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.engine.fmt(f)
    }
}

impl<S> Communicator for WrappedGroup<S>
where
    S: Fn(Start<'_>) -> Started + Send + Sync,
{
    fn rank(&self) -> usize {
        self.communicator.rank()
    }

    fn members(&self) -> &[Rank] {
        self.communicator.members()
    }

    fn is_on_devices(&self) -> bool {
        self.communicator.is_on_devices()
    }

    fn start(&self, call: Call, buffer: Box<dyn Buffer>, lengths: Option<Arc<[usize]>>) -> Started {
        (self.start)(Start {
            group: &self.name,
            call,
            buffer,
            lengths,
            communicator: &*self.communicator,
        })
    }

    fn start_send(&self, to: usize, tag: u64, message: Message) -> Result<Pending<()>> {
        self.communicator.start_send(to, tag, message)
    }

    fn start_recv(&self, from: usize, tag: u64) -> Result<Pending<Message>> {
        self.communicator.start_recv(from, tag)
    }

    fn turn(&self) -> Result<Turn> {
        self.communicator.turn()
    }

    fn abort(&self, reason: &str) {
        self.communicator.abort(reason);
    }
}

impl<S> fmt::Debug for WrappedGroup<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.communicator.fmt(f)
    }
}
