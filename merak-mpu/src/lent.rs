//! The storages of other libraries' tensors that are lent at the moment.

use std::{
    collections::BTreeSet,
    sync::{Mutex, PoisonError},
};

/// Addresses of the storages that are lent. An engine holds the memory of all members at once, so
/// two of them may not be the same.
static LENT: Mutex<BTreeSet<usize>> = Mutex::new(BTreeSet::new());

/// The address of a storage that is lent, until this is dropped.
#[derive(Debug)]
pub(crate) struct Lent(usize);

impl Lent {
    /// Notes that a storage is lent; the reason against it where it is already.
    pub(crate) fn new(storage: usize) -> Result<Self, &'static str> {
        let mut lent = LENT.lock().unwrap_or_else(PoisonError::into_inner);
        if lent.insert(storage) {
            Ok(Self(storage))
        } else {
            Err(
                "its memory is lent to another operation, on this rank or another: copy the tensor \
                 before one of the two",
            )
        }
    }
}

impl Drop for Lent {
    fn drop(&mut self) {
        let mut lent = LENT.lock().unwrap_or_else(PoisonError::into_inner);
        lent.remove(&self.0);
    }
}
