//! The state that all ranks of a world share: its groups, and whether it is poisoned.

use super::{
    WorldOptions,
    communicator::{GroupState, Handle},
    helper::Helper,
    turns::Turns,
};
use crate::{
    Communicator, Engine, Error, Failure, Locality, Rank as WorldRank, Result, Wait,
    bell::{FOREVER, lock},
};
use std::{
    collections::BTreeMap,
    fmt,
    sync::{
        Arc, Mutex, OnceLock,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

/// Name, members, and how many groups of this name and members the member made before.
type GroupKey = (String, Vec<WorldRank>, usize);

/// Shared by all ranks.
pub(super) struct World {
    size: usize,
    timeout: Duration,
    epoch: Instant,
    turns: Turns,
    poison: OnceLock<Failure>,
    groups: Mutex<BTreeMap<GroupKey, Arc<GroupState>>>,
    ended: Vec<AtomicBool>,
    waits: Mutex<BTreeMap<usize, Wait>>,
    next_wait: AtomicUsize,
}

impl World {
    pub(super) fn new(size: usize, options: WorldOptions) -> Self {
        Self {
            size,
            timeout: options.timeout.min(FOREVER),
            epoch: Instant::now(),
            turns: Turns::new(size, options.cores),
            poison: OnceLock::new(),
            groups: Mutex::default(),
            ended: (0..size).map(|_| AtomicBool::new(false)).collect(),
            waits: Mutex::default(),
            next_wait: AtomicUsize::new(0),
        }
    }

    pub(super) fn timeout(&self) -> Duration {
        self.timeout
    }

    pub(super) fn turns(&self) -> &Turns {
        &self.turns
    }

    /// The error that every call returns once the world is poisoned.
    pub(super) fn check(&self) -> Result<()> {
        match self.poison.get() {
            None => Ok(()),
            Some(poison) => Err(Error::aborted(poison.culprit, &poison.reason)),
        }
    }

    /// Fails the world for good, unless it has failed before, and wakes all ranks.
    pub(super) fn fail(&self, culprit: usize, reporter: usize, reason: &str) {
        let poison = Failure {
            culprit: WorldRank(culprit),
            reporter: WorldRank(reporter),
            reason: reason.to_owned(),
        };
        if self.poison.set(poison).is_ok() {
            tracing::warn!(rank = reporter, culprit, reason, "world poisoned");
            self.wake_all();
        }
    }

    /// The ranks that will start nothing more.
    pub(super) fn ended(&self) -> Vec<WorldRank> {
        let has_ended = |&rank: &usize| self.ended[rank].load(Ordering::Acquire);
        (0..self.size).filter(has_ended).map(WorldRank).collect()
    }

    /// Notes that a rank sleeps; the number takes the note back.
    pub(super) fn note_wait(&self, wait: Wait) -> usize {
        let number = self.next_wait.fetch_add(1, Ordering::Relaxed);
        lock(&self.waits).insert(number, wait);
        number
    }

    pub(super) fn forget_wait(&self, number: usize) {
        lock(&self.waits).remove(&number);
    }

    /// The waits of all ranks now, by rank.
    pub(super) fn waits(&self) -> Vec<Wait> {
        let mut waits: Vec<Wait> = lock(&self.waits).values().cloned().collect();
        waits.sort_by_key(|wait| wait.rank);
        waits
    }

    fn wake_all(&self) {
        let groups: Vec<_> = lock(&self.groups).values().cloned().collect();
        for group in groups {
            group.wake_all();
        }
        self.turns.wake_all();
    }
}

/// One rank's handle on the world.
pub(super) struct Rank {
    world: Arc<World>,
    helper: Arc<Helper>,
    number: usize,
    /// How many groups of a name and members this rank has made, by the number of the first one.
    made: Mutex<BTreeMap<usize, usize>>,
}

impl Rank {
    pub(super) fn new(world: Arc<World>, helper: Arc<Helper>, number: usize) -> Self {
        Self {
            world,
            helper,
            number,
            made: Mutex::default(),
        }
    }
}

impl fmt::Debug for Rank {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "thread rank {} of {}", self.number, self.world.size)
    }
}

impl Engine for Rank {
    fn rank(&self) -> WorldRank {
        WorldRank(self.number)
    }

    fn world_size(&self) -> usize {
        self.world.size
    }

    fn communicator(&self, name: &str, members: &[WorldRank]) -> Result<Arc<dyn Communicator>> {
        self.world.check()?;
        let place = members
            .iter()
            .position(|&member| member == self.number)
            .ok_or_else(|| Error::NoSuchRank {
                rank: self.number,
                group: crate::rank::describe_group(name, members),
                size: members.len(),
            })?;
        let mut groups = lock(&self.world.groups);
        let mut join = |nth| {
            let number = groups.len();
            let state = groups
                .entry((name.to_owned(), members.to_vec(), nth))
                .or_insert_with(|| Arc::new(GroupState::new(number, name, members)));
            Arc::clone(state)
        };
        let mut state = join(0);
        let nth = {
            let mut made = lock(&self.made);
            let count = made.entry(state.number()).or_default();
            *count += 1;
            *count - 1
        };
        if nth > 0 {
            state = join(nth);
        }
        drop(groups);
        let (world, helper) = (Arc::clone(&self.world), Arc::clone(&self.helper));
        Ok(Arc::new(Handle::new(world, helper, state, place)))
    }

    fn abort(&self, reason: &str) {
        self.world.fail(self.number, self.number, reason);
    }

    fn end(&self) {
        self.world.ended[self.number].store(true, Ordering::Release);
        self.world.wake_all();
    }

    fn failure(&self) -> Option<Failure> {
        self.world.poison.get().cloned()
    }

    fn shared_bytes(&self) -> usize {
        0
    }

    fn locality(&self) -> Locality {
        Locality {
            host: 0,
            local_rank: self.number,
            local_size: self.world.size,
            core_sharers: self.world.size,
        }
    }

    fn epoch(&self) -> Instant {
        self.world.epoch
    }
}
