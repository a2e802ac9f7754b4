//! Engines whose groups do more than those beneath them.

use crate::{Communicator, Engine, Failure, Locality, Member, Rank, Result};
use std::{fmt, sync::Arc, time::Instant};

/// An engine whose groups are wrapped.
struct Wrapped<W> {
    engine: Arc<dyn Engine>,
    wrap: W,
}

impl Member {
    /// The same member; `wrap` gets the name and the handle of each group that it joins.
    pub(crate) fn wrapped<W>(&self, wrap: W) -> Self
    where
        W: Fn(&str, Arc<dyn Communicator>) -> Arc<dyn Communicator> + Send + Sync + 'static,
    {
        Self::new(Arc::new(Wrapped {
            engine: Arc::clone(self.engine()),
            wrap,
        }))
    }
}

impl<W> Engine for Wrapped<W>
where
    W: Fn(&str, Arc<dyn Communicator>) -> Arc<dyn Communicator> + Send + Sync,
{
    fn rank(&self) -> Rank {
        self.engine.rank()
    }

    fn world_size(&self) -> usize {
        self.engine.world_size()
    }

    fn communicator(&self, name: &str, members: &[Rank]) -> Result<Arc<dyn Communicator>> {
        let communicator = self.engine.communicator(name, members)?;
        Ok((self.wrap)(name, communicator))
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

impl<W> fmt::Debug for Wrapped<W> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.engine.fmt(f)
    }
}
