//! One process's membership of a world over sockets.

#[cfg(target_os = "linux")]
use super::handover::Desk;
use super::{
    communicator::Handle,
    groups::Groups,
    mesh,
    mill::{Command, Counter, Mill},
};
use crate::{
    Communicator, Engine, Error, Failure, Locality, Rank, Result, Wait,
    bell::lock,
    control::{Control, JoinOptions, Meeting, State},
};
use std::{
    fmt, panic,
    sync::{Arc, Mutex, atomic::Ordering},
    thread::{self, JoinHandle},
    time::Instant,
};

/// What a thread waits for.
pub(super) trait Awaited {
    /// The wait is over.
    fn is_ready(&self) -> bool;
    /// The ranks without which it never will be, and that have not come.
    fn absent(&self) -> Vec<Rank>;
    /// The wait, for messages.
    fn describe(&self) -> Wait;
}

/// The threads and connections of this process. They end with it.
pub(super) struct Session {
    pub(super) state: Arc<State>,
    pub(super) groups: Arc<Groups>,
    pub(super) counter: Arc<Counter>,
    control: Arc<Control>,
    mill: Mutex<Option<JoinHandle<()>>>,
    hosts: Vec<usize>,
}

impl Session {
    /// Connects to the others that were met, and starts the threads.
    pub(super) fn start(options: &JoinOptions, mut meeting: Meeting) -> Result<Self> {
        let rank = Rank(options.rank);
        let state = State::new(rank, options.world_size, options.timeout, meeting.epoch);
        let state = Arc::new(state);
        let star = meeting.star.take().expect("it is taken once");
        let control = Control::start(&state, star, options.beat_timeout);
        let control = control.map_err(|error| Error::NoResource {
            rank: rank.0,
            what: "control thread",
            reason: error.to_string(),
        })?;
        let control = Arc::new(control);
        let session = Self::connect(options, meeting, &state, &control);
        if let Err(error) = &session {
            // The others hear of it, and the control thread ends.
            control.fail(rank, &error.to_string());
            control.leave();
        }
        session
    }

    fn connect(
        options: &JoinOptions,
        meeting: Meeting,
        state: &Arc<State>,
        control: &Arc<Control>,
    ) -> Result<Self> {
        let lacks = |what, error: &std::io::Error| Error::NoResource {
            rank: options.rank,
            what,
            reason: error.to_string(),
        };
        let Meeting {
            nonce,
            peers,
            hosts,
            data,
            ..
        } = meeting;
        let rank = state.rank;
        let counter = Counter::new().map_err(|error| lacks("socket", &error))?;
        let counter = Arc::new(counter);
        let groups = Arc::<Groups>::default();
        #[cfg(target_os = "linux")]
        let desk = Desk::open(nonce, rank).map_err(|error| lacks("Unix socket", &error))?;
        #[cfg_attr(
            not(target_os = "linux"),
            expect(unused_mut, reason = "this system has no memory to share")
        )]
        let mut links = mesh::connect(state, control, nonce, &peers, &data)?;
        #[cfg(target_os = "linux")]
        if options.shared_memory {
            desk.share(state, nonce, &hosts, &mut links)
                .map_err(|error| lacks("shared memory", &error))?;
        }
        let here = hosts.iter().filter(|host| **host == hosts[rank.0]).count();
        let cores = thread::available_parallelism().map_or(1, usize::from);
        let alarm = Arc::clone(&counter);
        state.on_poison(move || alarm.waker.wake());
        let mill = Mill::new(
            Arc::clone(state),
            Arc::clone(control),
            Arc::clone(&groups),
            Arc::clone(&counter),
            links,
            options.shared_memory && here <= cores,
        );
        let builder = thread::Builder::new().name(format!("mill-{rank}"));
        let mill = builder
            .spawn(move || {
                let (control, rank) = (Arc::clone(mill.control()), mill.rank());
                // The world fails with its progress, so no broken invariant is seen.
                let run = panic::AssertUnwindSafe(|| mill.run());
                if panic::catch_unwind(run).is_err() {
                    control.fail_soon(rank, "its progress thread panicked");
                }
            })
            .map_err(|error| lacks("progress thread", &error))?;
        Ok(Self {
            state: Arc::clone(state),
            groups,
            counter,
            control: Arc::clone(control),
            mill: Mutex::new(Some(mill)),
            hosts,
        })
    }

    /// The error of a poisoned world.
    pub(super) fn check(&self) -> Result<()> {
        self.state.check()
    }

    /// The error of a poisoned world for a rank that starts an operation.
    pub(super) fn check_start(&self, op: &dyn Fn() -> String) -> Result<()> {
        if self.state.verdict().is_none() {
            return Ok(());
        }
        let doing = format!("rank {} calls {}", self.state.rank, op());
        Err(self.control.explain(Some(&doing)))
    }

    pub(super) fn fail(&self, culprit: Rank, reason: &str) {
        self.control.fail(culprit, reason);
    }

    /// Waits until `awaited` is ready, at most as long as the world allows.
    ///
    /// # Errors
    /// [`Error::Aborted`] when the world is poisoned or a rank that is needed has ended,
    /// [`Error::Timeout`].
    pub(super) fn wait(&self, awaited: &dyn Awaited) -> Result<()> {
        if awaited.is_ready() {
            return Ok(());
        }
        let state = &self.state;
        let deadline = Instant::now() + state.timeout;
        let note = state.note_wait(awaited.describe());
        let deserter = || {
            let mut absent = awaited.absent().into_iter();
            // What a rank sent before its end is here when its end is known.
            absent.find(|rank| state.has_ended(*rank) && !awaited.is_ready())
        };
        let is_poisoned = || state.verdict().is_some();
        state.bell.sleep(deadline, &|| {
            awaited.is_ready() || is_poisoned() || deserter().is_some()
        });
        let outcome = if awaited.is_ready() {
            Ok(())
        } else if is_poisoned() {
            Err(self.control.explain(Some(&awaited.describe())))
        } else if let Some(deserter) = deserter() {
            let reason = format!("it ended before it came ({})", awaited.describe());
            self.fail(deserter, &reason);
            Err(self.control.explain(None))
        } else {
            Err(self.control.late(awaited.describe()))
        };
        state.forget_wait(note);
        outcome
    }

    /// Ends this process's part: nothing more is started, and what was started has ended.
    fn end(&self) {
        if lock(&self.mill).is_none() {
            return;
        }
        let is_over =
            || self.counter.is_drained.load(Ordering::Acquire) || self.state.verdict().is_some();
        if !is_over() {
            self.counter.ask(Command::End);
            let deadline = Instant::now() + self.state.timeout;
            self.state.bell.sleep(deadline, &is_over);
        }
        self.control.leave();
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        self.end();
        self.counter.stop.store(true, Ordering::Release);
        self.counter.waker.wake();
        if let Some(mill) = lock(&self.mill).take() {
            // A progress thread that panics has poisoned nothing that is used again.
            let _ = mill.join();
        }
    }
}

/// One rank's handle on its world.
pub(super) struct TcpRank(pub(super) Arc<Session>);

impl fmt::Debug for TcpRank {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let State { rank, size, .. } = &*self.0.state;
        write!(f, "tcp rank {rank} of {size}")
    }
}

impl Engine for TcpRank {
    fn rank(&self) -> Rank {
        self.0.state.rank
    }

    fn world_size(&self) -> usize {
        self.0.state.size
    }

    fn communicator(&self, name: &str, members: &[Rank]) -> Result<Arc<dyn Communicator>> {
        self.0.check()?;
        let group = self.0.groups.make(name, members, self.rank());
        let group = group.ok_or_else(|| Error::NoSuchRank {
            rank: self.rank().0,
            group: crate::group::describe(name, members),
            size: members.len(),
        })?;
        Ok(Arc::new(Handle::new(Arc::clone(&self.0), group)))
    }

    fn abort(&self, reason: &str) {
        self.0.fail(self.rank(), reason);
    }

    fn end(&self) {
        self.0.end();
    }

    fn failure(&self) -> Option<Failure> {
        self.0
            .state
            .verdict()
            .map(|verdict| verdict.failure.clone())
    }

    fn locality(&self) -> Locality {
        let hosts = &self.0.hosts;
        let own = self.rank().0;
        let host = hosts[own];
        let place = |hosts: &[usize]| hosts.iter().filter(|other| **other == host).count();
        Locality {
            host,
            local_rank: place(&hosts[..own]),
            local_size: place(hosts),
        }
    }

    fn epoch(&self) -> Instant {
        self.0.state.epoch
    }
}
