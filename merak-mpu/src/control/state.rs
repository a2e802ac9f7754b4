//! What the threads of one process know of their world.

use super::note::Verdict;
use crate::{
    Error, Rank, Result, Wait,
    bell::{Bell, lock},
};
use std::{
    collections::BTreeMap,
    sync::{
        Mutex, OnceLock,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

/// Longest wait for the verdict on what this process has reported, and for the others' last word by
/// a rank that leaves a poisoned world.
pub(crate) const LAST_WORD: Duration = Duration::from_secs(1);

/// Most waits of one rank that its heartbeat lists.
const MOST_WAITS: usize = 16;

/// Whether the world is poisoned, who has ended, and who waits in this process.
pub(crate) struct State {
    pub(crate) rank: Rank,
    pub(crate) size: usize,
    pub(crate) timeout: Duration,
    pub(crate) epoch: Instant,
    /// Rings for everything that a wait of this process may wait for.
    pub(crate) bell: Bell,
    /// The first failure that this process has heard of, or has met.
    alarm: OnceLock<Verdict>,
    /// What counts for all ranks.
    judged: OnceLock<Verdict>,
    ended: Vec<AtomicBool>,
    waits: Mutex<BTreeMap<usize, Wait>>,
    next_wait: AtomicUsize,
    /// Called when the world is poisoned.
    alarms: Mutex<Vec<Box<dyn Fn() + Send>>>,
}

impl State {
    pub(crate) fn new(rank: Rank, size: usize, timeout: Duration, epoch: Instant) -> Self {
        Self {
            rank,
            size,
            timeout,
            epoch,
            bell: Bell::default(),
            alarm: OnceLock::new(),
            judged: OnceLock::new(),
            ended: (0..size).map(|_| AtomicBool::new(false)).collect(),
            waits: Mutex::default(),
            next_wait: AtomicUsize::new(0),
            alarms: Mutex::default(),
        }
    }

    /// What poisoned the world: what the hub has decided, or what this process has met while it
    /// waits for that.
    pub(crate) fn verdict(&self) -> Option<&Verdict> {
        self.judged.get().or_else(|| self.alarm.get())
    }

    /// What the hub has decided.
    pub(crate) fn judged(&self) -> Option<&Verdict> {
        self.judged.get()
    }

    /// [`State::verdict`], after a wait for the hub where this process knows no more than what it
    /// has met: two ranks that fail at once must not blame each other.
    pub(crate) fn settled(&self) -> Option<&Verdict> {
        if self.alarm.get().is_some() {
            let deadline = Instant::now() + LAST_WORD;
            self.bell.sleep(deadline, &|| self.judged().is_some());
        }
        self.verdict()
    }

    /// The error that every call returns once the world is poisoned.
    pub(crate) fn check(&self) -> Result<()> {
        match self.verdict() {
            None => Ok(()),
            Some(Verdict { failure, .. }) => Err(Error::aborted(failure.culprit, &failure.reason)),
        }
    }

    /// Notes the hub's verdict, and fails the world of this process by it. The first verdict is the
    /// one that counts; false where there was one.
    pub(crate) fn judge(&self, verdict: Verdict) -> bool {
        let is_first = self.judged.set(verdict.clone()).is_ok();
        self.poison(verdict);
        self.bell.ring();
        is_first
    }

    /// Notes that no verdict of the hub will come any more: what this process has met counts.
    pub(crate) fn settle(&self) {
        if let Some(own) = self.alarm.get() {
            self.judge(own.clone());
        }
    }

    /// Fails the world of this process for good, unless it has failed before, and wakes all its
    /// threads.
    pub(crate) fn poison(&self, verdict: Verdict) {
        let failure = verdict.failure.clone();
        if self.alarm.set(verdict).is_ok() {
            let (culprit, reason) = (failure.culprit.0, failure.reason.as_str());
            tracing::warn!(rank = self.rank.0, culprit, reason, "world poisoned");
            self.bell.ring();
            for alarm in lock(&self.alarms).iter() {
                alarm();
            }
        }
    }

    /// Has `alarm` called when the world is poisoned.
    pub(crate) fn on_poison(&self, alarm: impl Fn() + Send + 'static) {
        let mut alarms = lock(&self.alarms);
        if self.verdict().is_none() {
            // The verdict comes before its alarms are called, under this lock.
            alarms.push(Box::new(alarm));
            return;
        }
        drop(alarms);
        alarm();
    }

    /// Notes that a rank will start nothing more, and that all it has sent is here.
    pub(crate) fn note_end(&self, rank: Rank) {
        self.ended[rank.0].store(true, Ordering::Release);
        self.bell.ring();
    }

    pub(crate) fn has_ended(&self, rank: Rank) -> bool {
        self.ended[rank.0].load(Ordering::Acquire)
    }

    /// Logs that this rank's end waits for others for longer than the longest wait.
    pub(crate) fn warn_of_late_ends(&self, missing: &[Rank]) {
        let (rank, after) = (self.rank.0, self.timeout);
        tracing::warn!(
            rank,
            ?missing,
            ?after,
            "this rank has ended, and waits for ranks that have not"
        );
    }

    /// Notes that a thread sleeps; the number takes the note back.
    pub(crate) fn note_wait(&self, wait: Wait) -> usize {
        let number = self.next_wait.fetch_add(1, Ordering::Relaxed);
        lock(&self.waits).insert(number, wait);
        number
    }

    pub(crate) fn forget_wait(&self, number: usize) {
        lock(&self.waits).remove(&number);
    }

    /// What the threads of this process wait for, oldest first.
    pub(super) fn waits(&self) -> Vec<Wait> {
        let waits = lock(&self.waits);
        waits.values().take(MOST_WAITS).cloned().collect()
    }
}
