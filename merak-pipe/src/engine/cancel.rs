//! Ending a run from outside.

use crate::Error;
use std::{
    collections::BTreeMap,
    fmt,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

/// Ends the waits of a link's ranks from any thread, with a reason; see
/// [`Link::interrupter`](crate::Link::interrupter).
pub type Interrupter = Box<dyn Fn(&str) + Send + Sync>;

/// A handle that ends runs from outside: from another thread, after a signal, at a time limit.
///
/// Clones are the same handle. A [`PipelineEngine`](crate::PipelineEngine) that [has
/// one](crate::PipelineEngine::with_cancel) ends with [`Error::Cancelled`] before its next action,
/// or at once where it waits for a message over a link that can be interrupted, as those of this
/// crate can. The other ranks of its pipeline end with it. A handle that was used stays so: what
/// runs next needs a new one, and new links.
///
/// ```
/// use merak_pipe::{Cancel, Error};
/// let cancel = Cancel::new();
/// let elsewhere = cancel.clone();
/// assert!(cancel.check().is_ok());
/// elsewhere.cancel("the machine shuts down");
/// let error = cancel.check().unwrap_err();
/// assert_eq!(error.to_string(), "the run was cancelled: the machine shuts down");
/// ```
#[derive(Clone, Default)]
pub struct Cancel(Arc<Mutex<State>>);

#[derive(Default)]
struct State {
    reason: Option<String>,
    /// What wakes the runs in progress, by number.
    interrupters: BTreeMap<u64, Interrupter>,
    begun: u64,
}

impl Cancel {
    /// A handle that is not used yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// Ends every run that has this handle, now and later. The first reason counts.
    pub fn cancel(&self, reason: &str) {
        let interrupters = {
            let mut state = self.lock();
            state.reason.get_or_insert_with(|| reason.into());
            std::mem::take(&mut state.interrupters)
        };
        for interrupt in interrupters.values() {
            interrupt(&format!("cancelled: {reason}"));
        }
    }

    /// Succeeds until [`Cancel::cancel`] is called.
    ///
    /// # Errors
    /// [`Error::Cancelled`].
    pub fn check(&self) -> Result<(), Error> {
        match &self.lock().reason {
            Some(reason) => Err(Error::Cancelled {
                reason: reason.clone(),
            }),
            None => Ok(()),
        }
    }

    /// Lets the handle interrupt a link until the guard is dropped.
    pub(super) fn watch(&self, interrupter: Option<Interrupter>) -> Watch<'_> {
        let mut state = self.lock();
        let number = state.begun;
        state.begun += 1;
        if let Some(interrupter) = interrupter {
            state.interrupters.insert(number, interrupter);
        }
        Watch {
            cancel: self,
            number,
        }
    }

    /// The state stays consistent when a thread panics, as no user code runs under the lock.
    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for Cancel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let reason = &self.lock().reason;
        f.debug_struct("Cancel").field("reason", reason).finish()
    }
}

/// A run that a handle can interrupt.
pub(super) struct Watch<'a> {
    cancel: &'a Cancel,
    number: u64,
}

impl Drop for Watch<'_> {
    fn drop(&mut self) {
        let interrupter = self.cancel.lock().interrupters.remove(&self.number);
        // Dropping it may take longer than this lock should be held.
        drop(interrupter);
    }
}
