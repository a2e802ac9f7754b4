//! One rank's membership of a world, for any engine.

use crate::{Communicator, Degrees, Error, Group, Rank, Result};
use serde::{Deserialize, Serialize};
use std::{
    fmt,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Instant,
};

/// The handle of an engine (threads, sockets, MPI or NCCL) for one rank of a world.
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

    /// States that this rank will start nothing more, so that peers that wait for it fail at once,
    /// and returns when the peers need its process no more to complete what it has started or sent.
    /// A world that has failed, or the longest wait, ends this too.
    ///
    /// Ranks that must end last wait for slow ones as long as these take, and log a warning with
    /// their names after the longest wait: rank 0 of processes, which judges failures, and under
    /// MPI every rank. A rank that is lost fails the world.
    fn end(&self);

    /// The failure that poisoned the world, if it is poisoned.
    fn failure(&self) -> Option<Failure>;

    /// The host and the place there that this rank runs on.
    fn locality(&self) -> Locality;

    /// Bytes of the memory through which the processes of this rank's host move data, all of them
    /// together, that they keep to the end of the world, shared or of each: the least where it
    /// grows with what they send. That of a library beneath is not known.
    fn shared_bytes(&self) -> usize;

    /// Whether it moves memory of devices without the host, beside what the devices compute.
    fn moves_device_memory(&self) -> bool {
        false
    }

    /// One moment, the same on every rank, from which the timelines of the ranks count. Between
    /// processes it is as exact as half the time that a message takes there and back.
    fn epoch(&self) -> Instant;
}

/// Why a world is poisoned.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Failure {
    /// The rank that is to blame. It may be one that never came.
    pub culprit: Rank,
    /// The rank that noticed.
    pub reporter: Rank,
    /// The cause.
    pub reason: String,
}

/// The host of a rank, and its place there.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Locality {
    /// The number of the host, from 0 in the order of the hosts' first ranks.
    pub host: usize,
    /// The place of the rank among those of its host, in ascending rank.
    pub local_rank: usize,
    /// The number of ranks on its host.
    pub local_size: usize,
    /// The number of those, itself included, that may run on a core that it may run on: all of
    /// them, unless a launcher binds processes to cores.
    pub core_sharers: usize,
}

impl Locality {
    /// The device of a rank here, among `num_devices` on its host. Ranks share devices where there
    /// are fewer devices than ranks.
    pub fn device(&self, num_devices: usize) -> usize {
        self.local_rank % num_devices.max(1)
    }
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

    /// Joins a group of world ranks; every member calls this with the same name and list. Make a
    /// group once and clone it: each one that is made is kept until the world ends.
    ///
    /// # Communication
    /// None: members meet in their first collective.
    ///
    /// # Errors
    /// [`Error::BadGroup`] unless `members` ascend, exist and include this rank;
    /// [`Error::Aborted`].
    pub fn group(&self, name: &str, members: &[Rank]) -> Result<Group> {
        join_group(&self.engine, name, members)
    }

    /// Joins a group of all ranks, named `world`; as [`Member::group`], a new one with each call.
    ///
    /// # Errors
    /// [`Error::Aborted`].
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

/// Joins a group through an engine's handle, after a check of the members.
pub(crate) fn join_group(engine: &Arc<dyn Engine>, name: &str, members: &[Rank]) -> Result<Group> {
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
        .is_some_and(|last| last.0 >= engine.world_size())
    {
        return Err(bad(&format!("the world has {} ranks", engine.world_size())));
    }
    if !members.contains(&engine.rank()) {
        return Err(bad(&format!("rank {} is not among them", engine.rank())));
    }
    let communicator = engine.communicator(name, members)?;
    Ok(Group::new(name, communicator, Arc::clone(engine)))
}
