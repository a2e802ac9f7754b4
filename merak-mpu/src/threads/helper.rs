//! The thread that computes collectives for which nobody waits.
//!
//! A large collective that all members have started is offered to the helper of their world.
//! Members that wait come first: they are awake, and they share the work. The helper leads what
//! none of them has begun after some time. A member that comes later shares the rest with it, as
//! with any leader.
//!
//! The helper starts with the first offer and ends with the last handle on its world. Between jobs
//! it sleeps. While members wait for all collectives, it wakes about once in the time of its
//! patience, however many they are.

use super::{WorldOptions, collective::Collective};
use crate::{affinity::Thread, bell::lock};
use std::{
    collections::VecDeque,
    mem,
    sync::{Arc, Condvar, Mutex, OnceLock, PoisonError, Weak},
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

/// How long members have to begin where the helper has a core of its own.
const PATIENCE: Duration = Duration::from_micros(200);

/// The same where ranks fill the cores. There the helper takes its core from a rank that computes,
/// so it leads only what would be pending for long.
const LONG_PATIENCE: Duration = Duration::from_millis(10);

/// The helper of a world. Handles own it, and its thread owns no handle.
pub(super) struct Helper {
    queue: Arc<Queue>,
    patience: Duration,
    stack_bytes: usize,
    /// Where it may run; empty where the threads of its world are not moved.
    processors: Vec<usize>,
    /// None where the system gave no thread.
    thread: OnceLock<Option<JoinHandle<()>>>,
}

impl Helper {
    /// The helper of a world of `ranks` ranks, without a thread yet. Threads of the world that are
    /// not bound run on these processors.
    pub(super) fn new(ranks: usize, options: WorldOptions, processors: &[usize]) -> Self {
        let has_core = ranks < options.cores;
        Self {
            queue: Arc::default(),
            patience: if has_core { PATIENCE } else { LONG_PATIENCE },
            stack_bytes: options.stack_bytes,
            processors: processors.to_vec(),
            thread: OnceLock::new(),
        }
    }

    /// Offers a collective that all members have started, and `lead`, which computes it unless
    /// another thread has begun to. Returns whether there is a thread for it.
    pub(super) fn offer(
        &self,
        collective: &Arc<Collective>,
        lead: impl FnOnce(&Collective) + Send + 'static,
    ) -> bool {
        if self.thread.get_or_init(|| self.spawn()).is_none() {
            return false;
        }
        self.queue.add(Job {
            due: Instant::now() + self.patience,
            collective: Arc::downgrade(collective),
            lead: Box::new(lead),
        });
        true
    }

    fn spawn(&self) -> Option<JoinHandle<()>> {
        let (queue, processors) = (Arc::clone(&self.queue), self.processors.clone());
        let builder = thread::Builder::new()
            .name("helper".to_owned())
            .stack_size(self.stack_bytes);
        let spawned = builder.spawn(move || {
            // It begins where its parent is bound, as a rank is while its turn lasts.
            if !processors.is_empty() {
                Thread::current().run_on(&processors);
            }
            while let Some(job) = queue.take_due() {
                job.run();
            }
        });
        spawned
            .inspect_err(|error| tracing::debug!(%error, "a world has no helper"))
            .ok()
    }
}

/// A member's share in the helper of its world. Its pending operations hold the share, since ranks
/// on several cores would all write one count.
pub(super) struct Share(pub(super) Arc<Helper>);

impl Drop for Helper {
    fn drop(&mut self) {
        lock(&self.queue.state).has_ended = true;
        self.queue.condvar.notify_one();
        if let Some(Some(thread)) = self.thread.take() {
            // A helper that has panicked has failed its world, which nobody uses any more.
            let _ = thread.join();
        }
    }
}

/// A collective that its members may lead until it is due.
struct Job {
    due: Instant,
    /// Gone once nobody can take a result any more.
    collective: Weak<Collective>,
    lead: Box<dyn FnOnce(&Collective) + Send>,
}

impl Job {
    fn run(self) {
        if let Some(collective) = self.collective.upgrade() {
            (self.lead)(&collective);
        }
    }
}

/// The jobs of a helper.
#[derive(Default)]
struct Queue {
    state: Mutex<State>,
    condvar: Condvar,
}

#[derive(Default)]
struct State {
    /// In the order in which they are due.
    jobs: VecDeque<Job>,
    /// Whether the helper sleeps until it is woken.
    is_idle: bool,
    has_ended: bool,
}

impl Queue {
    fn add(&self, job: Job) {
        // What the last holder of a collective drops are buffers, whose code may come here again:
        // not under the lock.
        let (mut unwanted, mut held) = (Vec::new(), Vec::new());
        let mut state = lock(&self.state);
        // Most collectives are waited for at once, and would pile up until they are due.
        for job in mem::take(&mut state.jobs) {
            let collective = job.collective.upgrade();
            if collective.as_ref().is_some_and(|one| !one.is_led()) {
                state.jobs.push_back(job);
            } else {
                unwanted.push(job);
            }
            held.extend(collective);
        }
        state.jobs.push_back(job);
        let is_idle = mem::take(&mut state.is_idle);
        drop(state);
        if is_idle {
            self.condvar.notify_one();
        }
    }

    /// Sleeps until a job is due, and takes it out; none once the world has ended.
    fn take_due(&self) -> Option<Job> {
        let mut state = lock(&self.state);
        while !state.has_ended {
            let due = state.jobs.front().map(|job| job.due);
            let left = due.map(|due| due.saturating_duration_since(Instant::now()));
            state = match left {
                None => {
                    state.is_idle = true;
                    let woken = self.condvar.wait(state);
                    woken.unwrap_or_else(PoisonError::into_inner)
                }
                Some(left) if left.is_zero() => return state.jobs.pop_front(),
                Some(left) => {
                    let woken = self.condvar.wait_timeout(state, left);
                    woken.unwrap_or_else(PoisonError::into_inner).0
                }
            };
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::call::{Call, Fingerprint};
    use std::sync::mpsc;

    fn collective() -> Arc<Collective> {
        let call = Fingerprint::new(Call::Barrier, &Vec::<u8>::new(), None);
        Arc::new(Collective::new(call, 0, 1))
    }

    #[test]
    fn a_helper_leads_what_is_wanted_in_order_and_ends_with_its_world() {
        let mut helper = Helper::new(2, WorldOptions::default(), &[]);
        // No collective is due before its last holder has dropped it.
        helper.patience = Duration::from_millis(500);
        let queue = Arc::downgrade(&helper.queue);
        let (sender, led) = mpsc::channel();
        let wanted: Vec<_> = (0..3).map(|_| collective()).collect();
        for (number, one) in wanted.iter().enumerate() {
            let (kept, lost) = (sender.clone(), sender.clone());
            // Nobody can take its result.
            let lead = move |_: &Collective| lost.send(usize::MAX).unwrap();
            assert!(helper.offer(&collective(), lead));
            let lead = move |_: &Collective| kept.send(number).unwrap();
            assert!(helper.offer(one, lead));
        }
        drop(sender);
        assert_eq!(led.iter().take(3).collect::<Vec<_>>(), [0, 1, 2]);
        drop(helper);
        // Its thread has ended too, and with it the last job.
        assert!(queue.upgrade().is_none());
        assert!(led.recv().is_err());
    }

    #[test]
    fn what_members_lead_does_not_pile_up() {
        let queue = Queue::default();
        let later = Instant::now() + Duration::from_mins(1);
        let collectives: Vec<_> = (0..5).map(|_| collective()).collect();
        for collective in &collectives {
            queue.add(Job {
                due: later,
                collective: Arc::downgrade(collective),
                lead: Box::new(|_: &Collective| ()),
            });
            assert!(collective.claim_lead());
        }
        assert_eq!(lock(&queue.state).jobs.len(), 1);
    }

    /// Part of a job that looks, when it is dropped, whether the queue can be used.
    struct Looks(Arc<Queue>, mpsc::Sender<bool>);

    impl Drop for Looks {
        fn drop(&mut self) {
            let is_free = self.0.state.try_lock().is_ok();
            // The test has ended where nobody hears it.
            let _ = self.1.send(is_free);
        }
    }

    #[test]
    fn what_an_unwanted_job_drops_may_use_the_queue() {
        let queue = Arc::<Queue>::default();
        let (sender, was_free) = mpsc::channel();
        let looks = Looks(Arc::clone(&queue), sender);
        let job = |lead: Box<dyn FnOnce(&Collective) + Send>| Job {
            due: Instant::now() + Duration::from_mins(1),
            collective: Weak::new(),
            lead,
        };
        queue.add(job(Box::new(move |_: &Collective| drop(looks))));
        queue.add(job(Box::new(|_: &Collective| ())));
        assert_eq!(was_free.try_recv(), Ok(true));
    }
}
