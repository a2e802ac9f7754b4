//! One process's membership of a world.

use super::{Command, Counter, Link, Mill, Port, communicator::Handle, groups::Groups};
use crate::{
    Communicator, Engine, Error, Failure, Locality, Rank, Result, Wait,
    bell::lock,
    control::{Control, JoinOptions, LAST_WORD, Meeting, State},
};
use std::{
    fmt, io, panic,
    sync::{Arc, Mutex, atomic::Ordering},
    thread::JoinHandle,
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

/// The wires of a process to all others, and how its mill is to run.
pub(crate) struct Woven {
    /// By world rank; none for this process itself.
    pub(crate) links: Vec<Option<Link>>,
    /// Whether the thread looks for bytes for a moment before it sleeps: there is a core for each
    /// rank that shares this one's cores, and wires that have bytes no socket tells of.
    pub(crate) spins: bool,
    /// Whether no process may leave before all have ended.
    pub(crate) ends_together: bool,
    /// Bytes of the memory through which the processes of this one's host move data.
    pub(crate) shared_bytes: usize,
}

/// Starts a thread that runs a mill, or has one that there is run it.
pub(crate) type Start = Box<dyn FnOnce(Grind) -> io::Result<JoinHandle<()>>>;

/// All work of a mill, on the thread that calls it.
pub(crate) type Grind = Box<dyn FnOnce(&mut dyn Port) -> Outcome + Send>;

/// How the work of a mill has ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Outcome {
    /// All is done that this process and its peers have started.
    Drained,
    /// The world has failed, by this rank's fault or another's, or its end was not waited for.
    Failed {
        /// This rank is to blame.
        here: bool,
    },
}

/// The threads and connections of this process. They end with it.
pub(crate) struct Session {
    engine: &'static str,
    pub(super) state: Arc<State>,
    pub(super) groups: Arc<Groups>,
    pub(super) counter: Arc<Counter>,
    control: Arc<Control>,
    mill: Mutex<Option<JoinHandle<()>>>,
    ends_together: bool,
    shared_bytes: usize,
    locality: Locality,
}

impl Session {
    /// Connects to the others that were met, as `weave` says, and starts the threads.
    ///
    /// # Errors
    /// When the system has no thread or socket, and those of `weave`, which reach the other ranks.
    pub(crate) fn start(
        engine: &'static str,
        options: &JoinOptions,
        mut meeting: Meeting,
        weave: impl FnOnce(&Meeting, &State, &Control) -> Result<(Woven, Start)>,
    ) -> Result<Self> {
        let rank = Rank(options.rank);
        let state = State::new(rank, options.world_size, options.timeout, meeting.epoch);
        let state = Arc::new(state);
        let star = meeting.star.take().expect("it is taken once");
        let control = Control::start(&state, star, options.beat_timeout);
        let control = Arc::new(control.map_err(|error| lacks(rank, "control thread", &error))?);
        let woven = weave(&meeting, &state, &control);
        let session = woven.and_then(|(woven, start)| {
            let place = meeting.locality(rank);
            Self::run((engine, place), woven, start, &state, &control)
        });
        session.map_err(|error| {
            let error = Self::not_started(error, &state, &control);
            // The control thread ends.
            control.leave(false);
            error
        })
    }

    /// Tells the others why this rank has no session. Where another one is lost, the error is what
    /// the world finds out about it.
    fn not_started(error: Error, state: &State, control: &Control) -> Error {
        let Error::Aborted { by, reason } = &error else {
            control.fail(state.rank, &error.to_string());
            return error;
        };
        control.suspect(Rank(*by), reason);
        let deadline = Instant::now() + LAST_WORD;
        let is_judged = || state.verdict().is_some();
        state.bell.sleep(deadline, &is_judged);
        if is_judged() {
            control.explain(None)
        } else {
            error
        }
    }

    fn run(
        (engine, locality): (&'static str, Locality),
        woven: Woven,
        start: Start,
        state: &Arc<State>,
        control: &Arc<Control>,
    ) -> Result<Self> {
        let rank = state.rank;
        let counter = Counter::new().map_err(|error| lacks(rank, "socket", &error))?;
        let (counter, groups) = (Arc::new(counter), Arc::<Groups>::default());
        let alarm = Arc::clone(&counter);
        state.on_poison(move || alarm.waker.wake());
        let Woven {
            ends_together,
            shared_bytes,
            ..
        } = woven;
        let mill = Mill::new(state, control, &groups, &counter, woven);
        let (of_state, of_control) = (Arc::clone(state), Arc::clone(control));
        let drained = Arc::clone(&counter);
        let mill = start(Box::new(move |port| {
            // The world fails with its progress, so no broken invariant is seen.
            let run = panic::AssertUnwindSafe(|| mill.run(port));
            if panic::catch_unwind(run).is_err() {
                of_control.fail_soon(rank, "its progress thread panicked");
            }
            match of_state.settled() {
                None if drained.is_drained.load(Ordering::Acquire) => Outcome::Drained,
                verdict => Outcome::Failed {
                    here: verdict.is_none_or(|verdict| verdict.failure.culprit == rank),
                },
            }
        }));
        Ok(Self {
            engine,
            state: Arc::clone(state),
            groups,
            counter,
            control: Arc::clone(control),
            mill: Mutex::new(Some(
                mill.map_err(|error| lacks(rank, "progress thread", &error))?,
            )),
            ends_together,
            shared_bytes,
            locality,
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
            let ended = absent.find(|rank| state.has_ended(*rank))?;
            // What a rank sent before its end is here when its end is known, and may have come
            // since the first look.
            let is_absent = awaited.absent().contains(&ended) && !awaited.is_ready();
            is_absent.then_some(ended)
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
            let state = &self.state;
            let sleep = || state.bell.sleep(Instant::now() + state.timeout, &is_over);
            sleep();
            // One that ends far earlier than another waits for it, as rank 0 does elsewhere. A rank
            // that is lost meanwhile ends the wait.
            if self.ends_together && !is_over() {
                let others = (0..state.size).map(Rank).filter(|rank| *rank != state.rank);
                let missing = others.filter(|rank| !state.has_ended(*rank));
                state.warn_of_late_ends(&missing.collect::<Vec<_>>());
                while !is_over() {
                    sleep();
                }
            }
        }
        self.control.leave(self.ends_together);
        if self.ends_together {
            self.stop();
        }
    }

    fn stop(&self) {
        self.counter.stop.store(true, Ordering::Release);
        self.counter.waker.wake();
        if let Some(mill) = lock(&self.mill).take() {
            // A progress thread that panics has poisoned nothing that is used again.
            let _ = mill.join();
        }
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        self.end();
        self.stop();
    }
}

fn lacks(rank: Rank, what: &'static str, error: &io::Error) -> Error {
    Error::NoResource {
        rank: rank.0,
        what,
        reason: error.to_string(),
    }
}

/// One rank's handle on its world.
pub(crate) struct ProcessRank(pub(crate) Arc<Session>);

impl fmt::Debug for ProcessRank {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let State { rank, size, .. } = &*self.0.state;
        write!(f, "{} rank {rank} of {size}", self.0.engine)
    }
}

impl Engine for ProcessRank {
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
            group: crate::rank::describe_group(name, members),
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
        let verdict = self.0.state.settled();
        verdict.map(|verdict| verdict.failure.clone())
    }

    fn locality(&self) -> Locality {
        self.0.locality
    }

    fn shared_bytes(&self) -> usize {
        self.0.shared_bytes
    }

    fn epoch(&self) -> Instant {
        self.0.state.epoch
    }
}
