//! The thread that starts MPI, makes every call of it, and ends it.

use super::{exit, lane::Lane, library::Library, port::MpiPort};
use crate::{
    Rank,
    mill::{Grind, Outcome},
};
use std::{
    io::{self, ErrorKind},
    sync::{
        Arc, Mutex,
        mpsc::{self, Sender},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

/// What the thread is to do next. It gives the library back unless it has ended it.
type Job = Box<dyn FnOnce(Library) -> Option<Library> + Send>;

/// Hands jobs to the thread of MPI.
pub(super) struct Desk {
    jobs: Sender<Job>,
    thread: JoinHandle<()>,
    deadline: Instant,
    pub(super) rank: Rank,
    pub(super) size: usize,
}

impl Desk {
    /// Starts MPI, together with the other processes.
    ///
    /// # Errors
    /// Where MPI reports one, or the others do not come within `patience`.
    pub(super) fn open(patience: Duration) -> io::Result<Self> {
        let deadline = Instant::now() + patience;
        let (jobs, asked) = mpsc::channel::<Job>();
        let (answer, answered) = mpsc::channel();
        let builder = thread::Builder::new().name("mill-mpi".to_owned());
        let thread = builder.spawn(move || {
            let library = Library::start();
            let place = library.as_ref().map(|library| (library.rank, library.size));
            // Nobody listens any more where the others have come too late.
            let _ = answer.send(place.map_err(|error| io::Error::other(error.to_string())));
            let mut library = library.ok();
            while let Some(held) = library.take() {
                library = asked.recv().ok().and_then(|job| job(held));
            }
        })?;
        let (rank, size) = answered.recv_timeout(patience).map_err(|_| late())??;
        Ok(Self {
            jobs,
            thread,
            deadline,
            rank,
            size,
        })
    }

    /// Makes some calls on the thread of MPI.
    ///
    /// # Errors
    /// As [`Desk::open`].
    pub(super) fn ask<T: Send + 'static>(
        &self,
        calls: impl FnOnce(&mut Library) -> io::Result<T> + Send + 'static,
    ) -> io::Result<T> {
        let (answer, answered) = mpsc::channel();
        let job: Job = Box::new(move |mut library| {
            // As above.
            let _ = answer.send(calls(&mut library));
            Some(library)
        });
        self.jobs.send(job).map_err(|_| late())?;
        let left = self.deadline.saturating_duration_since(Instant::now());
        answered.recv_timeout(left).map_err(|_| late())?
    }

    /// Has the thread run a mill, and end MPI when the world has ended well.
    pub(super) fn grind(
        self,
        lanes: Vec<Option<Arc<Mutex<Lane>>>>,
        grind: Grind,
    ) -> io::Result<JoinHandle<()>> {
        let job: Job = Box::new(move |library| {
            let mut port = MpiPort::new(library, lanes);
            match grind(&mut port) {
                Outcome::Drained => {
                    if let Err(error) = port.finish() {
                        let error = error.to_string();
                        tracing::warn!(error, "MPI has not ended");
                    }
                }
                Outcome::Failed { here } => {
                    exit::keep_order(here);
                    // MPI may still use what it was given.
                    std::mem::forget(port);
                }
            }
            None
        });
        self.jobs.send(job).map_err(|_| late())?;
        Ok(self.thread)
    }
}

fn late() -> io::Error {
    io::Error::new(
        ErrorKind::TimedOut,
        "the other processes of this mpirun have not started MPI in time, or have left it",
    )
}
