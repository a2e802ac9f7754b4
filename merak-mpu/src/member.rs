//! One rank's membership of a world, for any engine.

use crate::{Degrees, Engine, Failure, Group, Locality, Rank, Result};
use std::{
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Instant,
};

/// One rank's handle on its world: its number, and how it joins groups.
///
/// Clones are the same member. A member that is dropped while its thread panics poisons the world.
///
/// ```
/// use merak_mpu::{ReduceOp, threads};
/// let sums = threads::run(2, threads::WorldOptions::default(), |member| {
///     let world = member.world_group()?;
///     world.all_reduce_vec(vec![member.rank().0 as f32, 1.0], ReduceOp::Sum)
/// })?;
/// assert_eq!(sums, [[1.0, 2.0], [1.0, 2.0]]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone)]
pub struct Member {
    engine: Arc<dyn Engine>,
    degrees: Arc<Mutex<Option<Degrees>>>,
}

impl Member {
    /// Wraps an engine's handle.
    pub fn new(engine: Arc<dyn Engine>) -> Self {
        Self {
            engine,
            degrees: Arc::default(),
        }
    }

    /// This rank.
    pub fn rank(&self) -> Rank {
        self.engine.rank()
    }

    /// The number of ranks in the world.
    pub fn world_size(&self) -> usize {
        self.engine.world_size()
    }

    /// Joins a group of world ranks; every member calls this with the same name and list. Make a
    /// group once and clone it: each one that is made is kept until the world ends.
    ///
    /// # Communication
    /// None: members meet in their first collective.
    ///
    /// # Errors
    /// [`Error::BadGroup`](crate::Error::BadGroup) unless `members` ascend, exist and include this
    /// rank; [`Error::Aborted`](crate::Error::Aborted).
    pub fn group(&self, name: &str, members: &[Rank]) -> Result<Group> {
        Group::join(&self.engine, name, members)
    }

    /// Joins a group of all ranks, named `world`; as [`Member::group`], a new one with each call.
    ///
    /// # Errors
    /// [`Error::Aborted`](crate::Error::Aborted).
    pub fn world_group(&self) -> Result<Group> {
        let everybody: Vec<Rank> = (0..self.world_size()).map(Rank).collect();
        self.group("world", &everybody)
    }

    /// The host and the place there that this rank runs on.
    pub fn locality(&self) -> Locality {
        self.engine.locality()
    }

    /// Whether memory of devices goes to other ranks without the host; see
    /// [`Engine::moves_device_memory`].
    pub fn moves_device_memory(&self) -> bool {
        self.engine.moves_device_memory()
    }

    /// Bytes of the memory through which the processes of this rank's host move data; see
    /// [`Engine::shared_bytes`].
    pub fn shared_bytes(&self) -> usize {
        self.engine.shared_bytes()
    }

    /// One moment, the same on every rank; see [`Engine::epoch`].
    pub fn epoch(&self) -> Instant {
        self.engine.epoch()
    }

    /// The failure that poisoned the world, if it is poisoned.
    pub fn failure(&self) -> Option<Failure> {
        self.engine.failure()
    }

    /// Ends this rank's part in the world; see [`Engine::end`].
    pub fn end(&self) {
        self.engine.end();
    }

    /// Poisons the world with this rank as the culprit.
    pub fn abort(&self, reason: &str) {
        self.engine.abort(reason);
    }

    pub(crate) fn engine(&self) -> &Arc<dyn Engine> {
        &self.engine
    }

    /// The degrees that an `Mpu` of this member was made with.
    pub(crate) fn degrees(&self) -> MutexGuard<'_, Option<Degrees>> {
        self.degrees.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Member {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.engine.abort("panicked");
        }
    }
}
