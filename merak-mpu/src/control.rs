//! The control plane of worlds whose ranks are processes: how they find each other, and how all of
//! them hear that one has failed.
//!
//! ```text
//!      rank 1        rank 2        rank 3      each: a thread of its own that beats, tells what
//!         \            |             /         the rank waits for, and hears the verdict
//!          `-------  rank 0  -------'          the hub: judges, alone, who is to blame
//! ```
//!
//! **Rendezvous.** Rank 0 listens on the port of the launch, or on the next free one where another
//! program holds it. It greets each process that connects with a magic word, its version and the
//! name of the run; so the others recognize it, and leave alone what else they find. A rank then
//! says its number, the size of the world, its host, where it takes connections, and digests of
//! what must be equal everywhere. A connection that says anything else, more than 64 KiB, or
//! nothing for ten seconds, is dropped. Two processes with one rank, another world size, another
//! digest, or a process that says why it cannot join, as one of another version does that finds
//! rank 0 on the port of the launch, end the rendezvous with one error that every rank reports.
//! Round trips on the same connection give the offset of the clocks. When all have come, rank 0
//! tells each the addresses of all and a random number, which the connections between the ranks
//! begin with. A rank that is lost or missing is named to all that have come, as in a verdict: what
//! is wrong with the launch is another kind of error than the loss of a rank.
//!
//! **Verdict.** The first of these is the verdict, which rank 0 sends to all:
//!
//! | what happens | who is to blame |
//! |---|---|
//! | a rank reports a failure | the culprit that it names |
//! | a control connection ends without a goodbye | its rank, at once |
//! | no heartbeat within the limit | its rank: it is stopped or cut off |
//! | a rank has lost its connection to another | that one, unless it has a word of its own soon |
//! | a wait is too long | the rank at the end of the chain of waits |
//! | the hub itself is gone or silent | rank 0, by each other rank |
//!
//! A rank that reports a failure waits a moment for the verdict, so that all ranks name the same
//! culprit. Silence counts while the one that listens is awake: a process that was stopped blames
//! nobody for what it has slept through. Rank 0 hears from the others that they have given it up,
//! and blames itself.
//!
//! **Goodbye.** A rank that ends well says so. Rank 0 leaves last.

mod door;
mod hub;
mod join_options;
mod note;
pub(crate) mod poll;
mod rendezvous;
mod state;
pub(crate) mod wire;

pub use join_options::JoinOptions;

pub(crate) use note::Verdict;
#[cfg(feature = "mpi")]
pub(crate) use rendezvous::this_host;
pub(crate) use rendezvous::{Meeting, Star, complain, meet};
pub(crate) use state::{LAST_WORD, State};

use crate::{Error, Failure, Rank, Wait, bell::lock};
use hub::{Desk, Hub, Outbox, Ray};
use note::Note;
use poll::Waker;
use rendezvous::Lines;
use std::{
    fmt, io,
    sync::{Arc, Mutex, atomic::Ordering},
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

/// This process's line to the hub.
pub(crate) struct Control {
    state: Arc<State>,
    outbox: Arc<Outbox>,
    waker: Arc<Waker>,
    thread: Mutex<Option<JoinHandle<()>>>,
    beat_timeout: Duration,
}

impl Control {
    /// Starts the control thread over the connections of a meeting.
    pub(crate) fn start(
        state: &Arc<State>,
        star: Star,
        beat_timeout: Duration,
    ) -> io::Result<Self> {
        let (outbox, waker) = (Arc::<Outbox>::default(), Arc::new(Waker::new()?));
        let desk = Desk {
            state: Arc::clone(state),
            outbox: Arc::clone(&outbox),
            waker: Arc::clone(&waker),
            beat_timeout,
        };
        let name = format!("control-{}", state.rank);
        let builder = thread::Builder::new().name(name);
        let thread = match star.0 {
            Lines::Center { door, channels } => {
                let hub = Hub::new(desk, door, channels);
                builder.spawn(move || hub.run())?
            }
            Lines::Ray(channel) => {
                let ray = Ray::new(desk, channel);
                builder.spawn(move || ray.run())?
            }
        };
        Ok(Self {
            state: Arc::clone(state),
            outbox,
            waker,
            thread: Mutex::new(Some(thread)),
            beat_timeout,
        })
    }

    fn post(&self, note: Note) {
        self.outbox.post(note);
        self.waker.wake();
    }

    /// Fails the world, unless it has failed before, and returns when the hub has been told.
    pub(crate) fn fail(&self, culprit: Rank, reason: &str) {
        if self.state.verdict().is_some() {
            return;
        }
        self.poison(culprit, reason);
        self.outbox.flush();
    }

    /// [`Control::fail`], which returns at once.
    pub(crate) fn fail_soon(&self, culprit: Rank, reason: &str) {
        if self.state.verdict().is_none() {
            self.poison(culprit, reason);
        }
    }

    fn poison(&self, culprit: Rank, reason: &str) {
        self.state.poison(Verdict {
            failure: Failure {
                culprit,
                reporter: self.state.rank,
                reason: reason.to_owned(),
            },
            lost: false,
            others: Vec::new(),
        });
        self.post(Note::Fail {
            culprit,
            reason: reason.to_owned(),
        });
    }

    /// Says that the connection to a rank is lost; the hub finds out why.
    pub(crate) fn suspect(&self, peer: Rank, reason: &str) {
        self.post(Note::Suspect {
            peer,
            reason: reason.to_owned(),
        });
    }

    /// Says that a wait was too long, and returns its error when the hub has judged.
    pub(crate) fn late(&self, wait: Wait) -> Error {
        let after = self.state.timeout;
        self.post(Note::Late {
            after,
            wait: wait.clone(),
        });
        // A silent hub is found by its missing beats.
        let deadline = Instant::now() + 2 * self.beat_timeout;
        self.state
            .bell
            .sleep(deadline, &|| self.state.judged().is_some());
        let others = match self.state.verdict() {
            Some(verdict) if verdict.lost || verdict.failure.reporter != self.state.rank => {
                return self.explain(Some(&wait));
            }
            Some(verdict) => verdict.others.clone(),
            None => Vec::new(),
        };
        Error::Timeout {
            after,
            wait: Box::new(wait),
            others,
        }
    }

    /// The error of a poisoned world. Where another rank is to blame, it names what this one does.
    pub(crate) fn explain(&self, doing: Option<&dyn fmt::Display>) -> Error {
        let Some(Verdict { failure, lost, .. }) = self.state.settled() else {
            return Error::aborted(self.state.rank, "the world has ended");
        };
        let reason = match doing {
            Some(doing) if *lost || failure.culprit != self.state.rank => {
                format!("{} ({doing})", failure.reason)
            }
            _ => failure.reason.clone(),
        };
        Error::aborted(failure.culprit, reason)
    }

    /// Says goodbye and waits until the control thread has left; on rank 0 that is when all others
    /// have. A rank that is to blame for the failure of a world that `ends_together` leaves last,
    /// since the others end with it.
    pub(crate) fn leave(&self, ends_together: bool) {
        let outbox = &self.outbox;
        outbox.leaves_last.store(ends_together, Ordering::Release);
        self.outbox.leaving.store(true, Ordering::Release);
        self.waker.wake();
        if let Some(thread) = lock(&self.thread).take() {
            // A control thread that panics has poisoned nothing that is used again.
            let _ = thread.join();
        }
    }
}
