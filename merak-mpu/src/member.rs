//! One rank's membership of a world, for any engine.

use crate::{Communicator, Degrees, Error, Group, Rank, Result};
use std::{
    fmt,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

/// What an engine (threads, later sockets, MPI, NCCL) offers to one rank of a world.
pub trait Engine: Send + Sync + fmt::Debug {
    /// The rank that this handle belongs to.
    fn rank(&self) -> Rank;

    /// The number of ranks.
    fn world_size(&self) -> usize;

    /// Joins the group of `members`, which are ascending world ranks and include this one.
    ///
    /// The n-th call with a name and members meets the n-th such call of the other members. It does
    /// not wait for them.
    ///
    /// # Errors
    /// When the world is poisoned.
    fn communicator(&self, name: &str, members: &[Rank]) -> Result<Arc<dyn Communicator>>;

    /// Poisons the world: each pending and later call on any rank returns [`Error::Aborted`].
    fn abort(&self, reason: &str);

    /// States that this rank will start nothing more, so that peers that wait for it fail at once.
    /// What it has started or sent before is still completed.
    fn end(&self);

    /// The rank whose call poisoned the world, if it is poisoned.
    fn first_failure(&self) -> Option<Rank>;
}

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

    /// Joins a group of world ranks; every member calls this with the same name and list.
    ///
    /// # Communication
    /// None: members meet in their first collective.
    ///
    /// # Errors
    /// [`Error::BadGroup`] unless `members` ascend, exist and include this rank;
    /// [`Error::Aborted`].
    pub fn group(&self, name: &str, members: &[Rank]) -> Result<Group> {
        let bad = |reason: &str| Error::BadGroup {
            name: name.to_owned(),
            members: members.iter().map(|rank| rank.0).collect(),
            reason: reason.to_owned(),
        };
        if !members.is_sorted_by(|a, b| a < b) {
            return Err(bad("members must ascend"));
        }
        if members
            .last()
            .is_some_and(|last| last.0 >= self.world_size())
        {
            return Err(bad(&format!("the world has {} ranks", self.world_size())));
        }
        if !members.contains(&self.rank()) {
            return Err(bad(&format!("rank {} is not among them", self.rank())));
        }
        let communicator = self.engine.communicator(name, members)?;
        Ok(Group::new(name, communicator))
    }

    /// Joins a group of all ranks, named `world`.
    ///
    /// # Errors
    /// [`Error::Aborted`].
    pub fn world_group(&self) -> Result<Group> {
        let everybody: Vec<Rank> = (0..self.world_size()).map(Rank).collect();
        self.group("world", &everybody)
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
