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
    buffer: Box<dyn Buffer>,
    lengths: Option<Arc<[usize]>>,
    communicator: &'a dyn Communicator,
}

impl Start<'_> {
    /// Bytes of the buffer that the member brings.
    pub(crate) fn bytes(&self) -> usize {
        self.buffer.size_bytes()
    }

    /// Starts it on the engine beneath.
    pub(crate) fn go(self) -> Started {
        self.communicator
            .start(self.call, self.buffer, self.lengths)
    }
}

/// Stands between a member and its engine, and starts its collectives.
pub(crate) trait Between: Send + Sync {
    /// Starts a collective.
    fn start(&self, start: Start<'_>) -> Started;

    /// Sees the bytes of a message to a member of a group.
    fn sees_message(&self, _group: &str, _bytes: usize) {}
}

/// An engine that is reached through a [`Between`].
struct Wrapped {
    engine: Arc<dyn Engine>,
    between: Arc<dyn Between>,
}

/// A group of such an engine.
struct WrappedGroup {
    communicator: Arc<dyn Communicator>,
    name: String,
    between: Arc<dyn Between>,
}

impl Member {
    /// The same member, with `between` before its engine.
    pub(crate) fn behind(&self, between: impl Between + 'static) -> Self {
        Self::new(Arc::new(Wrapped {
            engine: Arc::clone(self.engine()),
            between: Arc::new(between),
        }))
    }
}

impl Engine for Wrapped {
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
            between: Arc::clone(&self.between),
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

    fn moves_device_memory(&self) -> bool {
        self.engine.moves_device_memory()
    }

    fn epoch(&self) -> Instant {
        self.engine.epoch()
    }
}

impl fmt::Debug for Wrapped {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.engine.fmt(f)
    }
}

impl Communicator for WrappedGroup {
    fn rank(&self) -> usize {
        self.communicator.rank()
    }

    fn members(&self) -> &[Rank] {
        self.communicator.members()
    }

    fn start(&self, call: Call, buffer: Box<dyn Buffer>, lengths: Option<Arc<[usize]>>) -> Started {
        self.between.start(Start {
            group: &self.name,
            call,
            buffer,
            lengths,
            communicator: &*self.communicator,
        })
    }

    fn start_send(&self, to: usize, tag: u64, message: Message) -> Result<Pending<()>> {
        let bytes = message.iter().map(|packet| packet.data.size_bytes()).sum();
        self.between.sees_message(&self.name, bytes);
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

impl fmt::Debug for WrappedGroup {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.communicator.fmt(f)
    }
}
