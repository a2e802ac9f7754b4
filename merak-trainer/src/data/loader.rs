//! Reading batches ahead of their use.

use std::{
    fmt,
    sync::{
        Arc,
        mpsc::{Receiver, sync_channel},
    },
    thread,
};

use super::{
    batch::{Batch, Collation},
    dataset::Dataset,
    order::Microbatch,
};
use crate::error::{DataError, Error, Result, no_thread};

/// The n-th microbatch to read; `None` after the last.
pub type Requests = Arc<dyn Fn(usize) -> Option<Microbatch> + Send + Sync>;

/// Batches each worker keeps ready.
pub(super) const AHEAD: usize = 2;

/// Delivers the batches of a list of microbatches in its order, for any number of workers: worker w
/// of W reads the microbatches w, w + W, w + 2W, ..
pub struct Loader {
    dataset: Arc<dyn Dataset>,
    requests: Requests,
    workers: Vec<Receiver<Result<Batch>>>,
    collation: Collation,
    next: usize,
}

impl Loader {
    /// Starts `workers` threads that read ahead; with none, a batch is read when it is asked for.
    ///
    /// # Errors
    ///
    /// [`Error::NoThread`] where the system gives no thread.
    pub fn new(dataset: Arc<dyn Dataset>, requests: Requests, workers: usize) -> Result<Self> {
        Self::with_collation(dataset, requests, workers, Collation::default())
    }

    /// As [`Loader::new`], with batches that `collation` makes.
    ///
    /// # Errors
    ///
    /// As [`Loader::new`].
    pub fn with_collation(
        dataset: Arc<dyn Dataset>,
        requests: Requests,
        workers: usize,
        collation: Collation,
    ) -> Result<Self> {
        let start = |worker| {
            let (sender, receiver) = sync_channel(AHEAD);
            let (dataset, requests) = (Arc::clone(&dataset), Arc::clone(&requests));
            let collation = collation.clone();
            let read = move || {
                for number in (worker..).step_by(workers) {
                    let Some(microbatch) = requests(number) else {
                        return;
                    };
                    // Sending fails once the loader is gone: nothing is left to do.
                    let batch = collation.batch(dataset.as_ref(), microbatch);
                    if sender.send(batch).is_err() {
                        return;
                    }
                }
            };
            let thread = thread::Builder::new().name(format!("merak-data-{worker}"));
            thread.spawn(read).map_err(no_thread("read data ahead"))?;
            Ok(receiver)
        };
        let workers = (0..workers).map(start).collect::<Result<_>>()?;
        Ok(Self {
            dataset,
            requests,
            workers,
            collation,
            next: 0,
        })
    }
}

impl Iterator for Loader {
    type Item = Result<Batch>;

    fn next(&mut self) -> Option<Self::Item> {
        let microbatch = (self.requests)(self.next)?;
        let batch = if self.workers.is_empty() {
            self.collation.batch(self.dataset.as_ref(), microbatch)
        } else {
            let worker = &self.workers[self.next % self.workers.len()];
            worker
                .recv()
                .unwrap_or(Err(Error::Data(DataError::DataThread)))
        };
        self.next += 1;
        Some(batch)
    }
}

impl fmt::Debug for Loader {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Loader")
            .field("dataset", &self.dataset)
            .field("workers", &self.workers.len())
            .field("next", &self.next)
            .finish_non_exhaustive()
    }
}
