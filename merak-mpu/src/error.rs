//! What can go wrong between ranks.

use crate::DType;

/// The result of an operation of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// A failed group operation.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A buffer has another element type than the operation needs.
    #[error("expected elements of type {expected}, found {found}")]
    DTypeMismatch {
        /// The type that was needed.
        expected: DType,
        /// The type of the buffer.
        found: DType,
    },
    /// A rank failed, and all its peers with it.
    #[error("rank {by} failed: {reason}")]
    Aborted {
        /// World rank of the culprit.
        by: usize,
        /// What happened there.
        reason: String,
    },
}
