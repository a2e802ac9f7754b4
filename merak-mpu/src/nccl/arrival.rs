//! What comes from another rank, for two threads that wait for it.

use crate::{Pending, Result, bell::lock};
use std::{fmt, sync::Mutex};

/// A pending value that its caller may wait for, and that the conductor looks after meanwhile.
pub(super) struct Arrival<T>(Mutex<Stage<T>>);

enum Stage<T> {
    Pending(Pending<T>),
    /// The caller waits for it.
    Awaited,
    Came(Result<T>),
    Taken,
}

impl<T> Arrival<T> {
    pub(super) fn new(pending: Pending<T>) -> Self {
        Self(Mutex::new(Stage::Pending(pending)))
    }

    /// Waits for the value on the calling thread, unless it has come. It stays here.
    ///
    /// # Errors
    /// Those of the wait.
    pub(super) fn block(&self) -> Result<()> {
        let pending = {
            let mut stage = lock(&self.0);
            match std::mem::replace(&mut *stage, Stage::Awaited) {
                Stage::Pending(pending) => pending,
                other => {
                    *stage = other;
                    return Ok(());
                }
            }
        };
        let came = pending.wait();
        let outcome = came.as_ref().map(drop).map_err(Clone::clone);
        *lock(&self.0) = Stage::Came(came);
        outcome
    }

    /// Takes the value if it has come and `is_wanted`.
    pub(super) fn take_if(&self, is_wanted: impl FnOnce(&T) -> bool) -> Option<Result<T>> {
        let mut stage = lock(&self.0);
        settle(&mut stage);
        let takes = match &*stage {
            Stage::Came(Ok(value)) => is_wanted(value),
            Stage::Came(Err(_)) => true,
            _ => false,
        };
        match takes.then(|| std::mem::replace(&mut *stage, Stage::Taken)) {
            Some(Stage::Came(value)) => Some(value),
            _ => None,
        }
    }

    /// Whether the value has come and passes a test, or has failed.
    pub(super) fn has(&self, test: impl FnOnce(&T) -> bool) -> bool {
        let mut stage = lock(&self.0);
        settle(&mut stage);
        match &*stage {
            Stage::Came(Ok(value)) => test(value),
            Stage::Came(Err(_)) => true,
            _ => false,
        }
    }

    /// Whether the caller has taken the value.
    pub(super) fn is_taken(&self) -> bool {
        matches!(&*lock(&self.0), Stage::Taken)
    }
}

/// Takes note of a value that is there without a wait.
fn settle<T>(stage: &mut Stage<T>) {
    if !matches!(stage, Stage::Pending(pending) if pending.is_done()) {
        return;
    }
    if let Stage::Pending(pending) = std::mem::replace(stage, Stage::Awaited) {
        *stage = Stage::Came(pending.wait());
    }
}

impl<T> fmt::Debug for Arrival<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Arrival").finish_non_exhaustive()
    }
}
