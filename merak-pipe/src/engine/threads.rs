//! Links between threads of one process.

use super::{Cancel, Interrupter, Link, PipelineEngine, StageModule, panic_message};
use crate::{Error, Result, Schedule, Tag, Timeline};
use std::{
    collections::{BTreeMap, VecDeque},
    fmt,
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
    thread,
    time::{Duration, Instant},
};

/// Makes the links of `ranks` ranks of one process; payloads move without a copy.
///
/// A wait ends by the `deadline`, at once when a rank failed, and at once when the sender's link
/// was dropped.
///
/// ```
/// use merak_pipe::{Link, MicrobatchId, StageId, Tag, threads};
/// use std::time::Duration;
///
/// let mut links = threads::<String>(2, Duration::from_secs(5));
/// let tag = Tag { from: StageId(0), to: StageId(1), microbatch: MicrobatchId(0) };
/// links[0].send(1, tag, "activation".into())?;
/// assert_eq!(links[1].recv(0, tag)?, "activation");
/// # Ok::<(), merak_pipe::Error>(())
/// ```
pub fn threads<P: Send>(ranks: usize, deadline: Duration) -> Vec<ThreadLink<P>> {
    let shared = Arc::new(Shared {
        state: Mutex::new(State {
            mailboxes: (0..ranks).map(|_| BTreeMap::new()).collect(),
            left: vec![false; ranks],
            failure: None,
        }),
        arrivals: (0..ranks).map(|_| Condvar::new()).collect(),
    });
    let link = |rank| ThreadLink {
        rank,
        deadline,
        shared: Arc::clone(&shared),
    };
    (0..ranks).map(link).collect()
}

/// One rank's end of the links that [`threads`] makes.
pub struct ThreadLink<P> {
    rank: usize,
    deadline: Duration,
    shared: Arc<Shared<P>>,
}

struct Shared<P> {
    state: Mutex<State<P>>,
    /// One for each rank, notified when something for it has changed.
    arrivals: Vec<Condvar>,
}

struct State<P> {
    /// For each receiving rank its messages by sender and tag.
    mailboxes: Vec<BTreeMap<(usize, Tag), VecDeque<P>>>,
    /// Ranks whose link was dropped.
    left: Vec<bool>,
    /// The first rank that failed, and why.
    failure: Option<(usize, String)>,
}

impl<P> Shared<P> {
    /// The state stays consistent when a thread panics, as no user code runs under the lock.
    fn lock(&self) -> MutexGuard<'_, State<P>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes every wait end. Only the first failure counts.
    fn fail(&self, rank: usize, reason: &str) {
        let mut state = self.lock();
        state.failure.get_or_insert_with(|| (rank, reason.into()));
        drop(state);
        self.wake_all();
    }

    fn wake_all(&self) {
        for arrival in &self.arrivals {
            arrival.notify_all();
        }
    }
}

impl<P> State<P> {
    fn check(&self) -> Result<()> {
        match &self.failure {
            Some((by, reason)) => Err(Error::Aborted {
                by: *by,
                reason: reason.clone(),
            }),
            None => Ok(()),
        }
    }

    fn take(&mut self, to: usize, from: usize, tag: Tag) -> Option<P> {
        let queue = self.mailboxes[to].get_mut(&(from, tag))?;
        let payload = queue.pop_front();
        if queue.is_empty() {
            self.mailboxes[to].remove(&(from, tag));
        }
        payload
    }
}

impl<P: Send + 'static> Link<P> for ThreadLink<P> {
    fn send(&mut self, to: usize, tag: Tag, payload: P) -> Result<()> {
        let ranks = self.shared.arrivals.len();
        let mut state = self.shared.lock();
        state.check()?;
        let mailbox = state
            .mailboxes
            .get_mut(to)
            .ok_or(Error::NoSuchRank { rank: to, ranks })?;
        mailbox
            .entry((self.rank, tag))
            .or_default()
            .push_back(payload);
        drop(state);
        self.shared.arrivals[to].notify_all();
        Ok(())
    }

    fn recv(&mut self, from: usize, tag: Tag) -> Result<P> {
        let rank = self.rank;
        let ranks = self.shared.arrivals.len();
        if from >= ranks {
            return Err(Error::NoSuchRank { rank: from, ranks });
        }
        let mut outcome = None;
        let arrival = &self.shared.arrivals[rank];
        let waiting = |state: &mut State<P>| {
            outcome = match state.check() {
                Err(error) => Some(Err(error)),
                Ok(()) => match state.take(rank, from, tag) {
                    Some(payload) => Some(Ok(payload)),
                    None if state.left[from] => Some(Err(Error::PeerLeft { rank, from, tag })),
                    None => None,
                },
            };
            outcome.is_none()
        };
        drop(arrival.wait_timeout_while(self.shared.lock(), self.deadline, waiting));
        outcome.unwrap_or(Err(Error::Timeout {
            rank,
            from,
            tag,
            waited: self.deadline,
        }))
    }

    fn abort(&mut self, reason: &str) {
        self.shared.fail(self.rank, reason);
    }

    fn interrupter(&self) -> Option<Interrupter> {
        let (shared, rank) = (Arc::clone(&self.shared), self.rank);
        Some(Box::new(move |reason| shared.fail(rank, reason)))
    }
}

impl<P> Drop for ThreadLink<P> {
    fn drop(&mut self) {
        let mut state = self.shared.lock();
        if thread::panicking() {
            state
                .failure
                .get_or_insert_with(|| (self.rank, "panicked".into()));
        }
        state.left[self.rank] = true;
        drop(state);
        self.shared.wake_all();
    }
}

impl<P> fmt::Debug for ThreadLink<P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ThreadLink")
            .field("rank", &self.rank)
            .field("ranks", &self.shared.arrivals.len())
            .field("deadline", &self.deadline)
            .finish()
    }
}

/// Runs a schedule once with one thread per rank, and returns what ran when, on one time axis in
/// seconds.
///
/// `modules` holds the stages of each rank, in rank order.
///
/// # Errors
/// When the schedule or the number of modules does not fit, a stage fails or panics, or a message
/// does not come within the `deadline`; the error is that of the rank where it began.
pub fn run_threads<M>(
    schedule: &Schedule,
    modules: &mut [M],
    deadline: Duration,
) -> Result<Timeline>
where
    M: StageModule + Send,
{
    run_threads_until(schedule, modules, deadline, &Cancel::new())
}

/// [`run_threads`], with a handle that ends it from outside.
///
/// # Errors
/// As [`run_threads`], and [`Error::Cancelled`]. All modules are then [reset](StageModule::reset).
///
/// ```no_run
/// use merak_pipe::{Cancel, Schedule, StageModule, run_threads_until};
/// use std::{thread, time::Duration};
///
/// # fn step<M: StageModule + Send>(
/// #     schedule: &Schedule,
/// #     modules: &mut [M],
/// # ) -> merak_pipe::Result<()> {
/// let cancel = Cancel::new();
/// let watchdog = cancel.clone();
/// thread::spawn(move || {
///     thread::sleep(Duration::from_mins(10));
///     watchdog.cancel("the step takes too long");
/// });
/// run_threads_until(schedule, modules, Duration::from_mins(1), &cancel)?;
/// # Ok(()) }
/// ```
pub fn run_threads_until<M>(
    schedule: &Schedule,
    modules: &mut [M],
    deadline: Duration,
    cancel: &Cancel,
) -> Result<Timeline>
where
    M: StageModule + Send,
{
    let ranks = schedule.size.ranks;
    if modules.len() != ranks {
        return Err(Error::ModuleCount {
            expected: ranks,
            found: modules.len(),
        });
    }
    let epoch = Instant::now();
    let engines: Vec<PipelineEngine> = (0..ranks)
        .map(|rank| {
            let engine = PipelineEngine::new(schedule, rank)?;
            Ok(engine.with_epoch(epoch).with_cancel(cancel.clone()))
        })
        .collect::<Result<_>>()?;
    let links = threads::<M::Payload>(ranks, deadline);
    let outcomes: Vec<_> = thread::scope(|scope| {
        let ranks = engines.iter().zip(modules.iter_mut()).zip(links);
        let spawned: Vec<_> = ranks
            .map(|((engine, module), mut link)| {
                // A link that is dropped without a thread ends the waits of the others.
                thread::Builder::new().spawn_scoped(scope, move || engine.run(module, &mut link))
            })
            .collect();
        let joined = spawned.into_iter().enumerate();
        joined
            .map(|(rank, spawned)| match spawned {
                Err(source) => Err(Error::NoThread { rank, source }),
                Ok(handle) => handle.join().unwrap_or_else(|panic| {
                    let message = panic_message(&*panic);
                    Err(Error::Panicked { rank, message })
                }),
            })
            .collect()
    });
    if outcomes.iter().any(Result::is_err) {
        // A module that panicked could not be reset by its engine, and one that came to its end did
        // not need to be.
        modules.iter_mut().for_each(StageModule::reset);
    }
    first_cause(outcomes.into_iter())
}

/// The spans of all ranks, or the error that is not just the echo of another rank's.
fn first_cause(outcomes: impl Iterator<Item = Result<Vec<crate::Span>>>) -> Result<Timeline> {
    let mut ranks = Vec::new();
    let (mut left, mut echo) = (None, None);
    for outcome in outcomes {
        match outcome {
            Ok(spans) => ranks.push(spans),
            Err(error @ Error::PeerLeft { .. }) => left = Some(error),
            Err(error @ Error::Aborted { .. }) => echo = Some(error),
            Err(cause) => return Err(cause),
        }
    }
    match left.or(echo) {
        Some(error) => Err(error),
        None => Ok(Timeline { ranks }),
    }
}
