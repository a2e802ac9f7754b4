//! What the threads of a process share.

use super::{
    Allocate,
    calls::Calls,
    cuda::{Event, Stream},
    job::{Job, Outcome, Slot, device_address, queue_of},
};
use crate::{
    Buffer, Error, Failure, Member, Result, Wait,
    bell::{Bell, lock},
    call::grace,
};
use std::{
    fmt,
    sync::{Arc, Condvar, Mutex},
    thread,
    time::{Duration, Instant},
};

/// Sleep between two looks at the state of the world where nothing is under way.
pub(super) const IDLE: Duration = Duration::from_millis(50);

/// What the threads of a process share.
pub(super) struct Core {
    /// Carries host memory; knows the ranks and who has failed.
    pub(super) inner: Member,
    pub(super) calls: Arc<dyn Calls>,
    pub(super) allocate: Option<Allocate>,
    timeout: Duration,
    /// Rings for each operation that is over.
    pub(super) bell: Bell,
    pub(super) inbox: Mutex<Inbox>,
    /// Wakes the conductor.
    pub(super) wake: Condvar,
}

/// What callers have left for the conductor.
#[derive(Default)]
pub(super) struct Inbox {
    pub(super) jobs: Vec<Job>,
    /// A caller has got what the conductor waits for.
    pub(super) nudged: bool,
    pub(super) stop: bool,
    pub(super) course: Course,
}

/// How far the part of a process in its world has come.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub(super) enum Course {
    #[default]
    Running,
    /// Nothing more is started.
    Ending,
    /// All that was started is over, and the communicators are closed.
    Drained,
}

impl Core {
    pub(super) fn new(
        inner: Member,
        calls: Arc<dyn Calls>,
        allocate: Option<Allocate>,
        timeout: Duration,
    ) -> Self {
        Self {
            inner,
            calls,
            allocate,
            timeout,
            bell: Bell::default(),
            inbox: Mutex::default(),
            wake: Condvar::new(),
        }
    }

    /// Starts an operation.
    pub(super) fn put(&self, job: Job) {
        lock(&self.inbox).jobs.push(job);
        self.wake.notify_one();
    }

    /// Says that something has come.
    pub(super) fn nudge(&self) {
        lock(&self.inbox).nudged = true;
        self.wake.notify_one();
    }

    /// The error of a world that has failed.
    pub(super) fn failure(&self) -> Option<Error> {
        let Failure {
            culprit, reason, ..
        } = self.inner.failure()?;
        Some(Error::aborted(culprit, reason))
    }

    /// Fails the world for an error of this rank, or of a rank that meets the same error, which
    /// gets time to say so itself.
    pub(super) fn fail(&self, error: &Error) {
        let start = Instant::now();
        let is_elsewhere = error.culprit().is_some_and(|it| it != self.inner.rank());
        while is_elsewhere
            && self.inner.failure().is_none()
            && start.elapsed() < grace(self.timeout)
        {
            thread::sleep(Duration::from_millis(1));
        }
        self.inner.abort(&error.to_string());
    }

    /// Waits until an operation is over whose members have all come.
    pub(super) fn wait(&self, slot: &Slot, describe: &dyn Fn() -> Wait) -> Result<Outcome> {
        let deadline = Instant::now() + self.timeout;
        loop {
            let failure = self.failure();
            if (slot.is_done() || failure.is_some())
                && let Some(result) = slot.take()
            {
                return result;
            }
            if let Some(error) = failure {
                return Err(error);
            }
            if Instant::now() >= deadline {
                let error = Error::Timeout {
                    after: self.timeout,
                    wait: Box::new(describe()),
                    others: Vec::new(),
                };
                self.fail(&error);
                return Err(error);
            }
            // The bell does not ring for a failure of the world.
            let look = deadline.min(Instant::now() + IDLE);
            self.bell.sleep(look, &|| slot.is_done());
        }
    }

    /// Waits until all that was started is over, and the communicators are closed.
    pub(super) fn drain(&self) {
        {
            let mut inbox = lock(&self.inbox);
            if inbox.course == Course::Running {
                inbox.course = Course::Ending;
            }
            inbox.nudged = true;
        }
        self.wake.notify_one();
        let deadline = Instant::now() + self.timeout;
        let is_over = || lock(&self.inbox).course == Course::Drained;
        while !is_over() && self.failure().is_none() && Instant::now() < deadline {
            let look = deadline.min(Instant::now() + IDLE);
            self.bell.sleep(look, &is_over);
        }
    }

    pub(super) fn stop(&self) {
        lock(&self.inbox).stop = true;
        self.wake.notify_one();
    }
}

impl fmt::Debug for Core {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?} on {:?}", self.inner.engine(), self.calls)
    }
}

/// Memory on the device.
impl Core {
    /// Where the elements of a buffer of this engine's making lie.
    pub(super) fn address_of(&self, buffer: &mut dyn Buffer) -> Result<u64> {
        let address = device_address(buffer, self.calls.ordinal())?;
        address.ok_or_else(|| Error::Device {
            call: "the allocation of a buffer",
            reason: format!(
                "{} {} found no room on CUDA device {}",
                buffer.len(),
                buffer.dtype(),
                self.calls.ordinal()
            ),
        })
    }

    /// The points from which on buffers hold what they should, one for each queue.
    pub(super) fn mark(&self, buffers: &[Box<dyn Buffer>]) -> Result<Vec<Event>> {
        let mut streams: Vec<Stream> = buffers.iter().map(|one| queue_of(&**one)).collect();
        streams.dedup();
        streams
            .into_iter()
            .map(|stream| self.calls.mark(stream))
            .collect()
    }
}
