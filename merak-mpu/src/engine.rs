//! What every engine offers to one rank of a world.

use crate::{Communicator, Rank, Result};
use serde::{Deserialize, Serialize};
use std::{fmt, sync::Arc, time::Instant};

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

    /// Poisons the world: each pending and later call on any rank returns
    /// [`Error::Aborted`](crate::Error::Aborted).
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
