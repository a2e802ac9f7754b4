//! What the engine asks of one CUDA device and of NCCL.

use super::{
    cuda::{Event, Stream},
    plan::Step,
};
use crate::{Buffer, DType, Result};
use std::fmt;

/// Bytes by which the members of a new communicator find each other.
pub(super) type UniqueId = [u8; 128];

/// A communicator of NCCL, by its address.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Comm(pub(super) u64);

/// The calls, one method for each. [`Gpu`](super::gpu::Gpu) makes them; tests have a device of
/// their own, which notes them and moves host memory.
///
/// Communicators do not block: a call on one may go on by itself, and until
/// [`Calls::is_settled`] there is no other call on it.
pub(super) trait Calls: Send + Sync + fmt::Debug {
    /// The number of the device on this host.
    fn ordinal(&self) -> usize;

    /// What tells the device from all others.
    fn uuid(&self) -> [u8; 16];

    /// Makes the device the one of the calling thread.
    fn enter(&self) -> Result<()>;

    /// A zeroed buffer on the device.
    fn zeros(&self, dtype: DType, len: usize) -> Result<Box<dyn Buffer>>;

    fn stream(&self) -> Result<Stream>;

    fn drop_stream(&self, stream: Stream) -> Result<()>;

    /// The point in a queue after all that it holds.
    fn mark(&self, stream: Stream) -> Result<Event>;

    /// Makes what comes later in a queue wait for an event.
    fn follow(&self, stream: Stream, event: Event) -> Result<()>;

    /// Whether the device has come to an event.
    fn is_past(&self, event: Event) -> Result<bool>;

    fn drop_event(&self, event: Event);

    fn unique_id(&self) -> Result<UniqueId>;

    /// Becomes member `rank` of `n` of a new communicator.
    fn init(&self, n: usize, id: &UniqueId, rank: usize) -> Result<Comm>;

    /// Whether the last call on a communicator is over.
    ///
    /// # Errors
    /// What has failed since.
    fn is_settled(&self, comm: Comm) -> Result<bool>;

    fn group_start(&self) -> Result<()>;

    fn group_end(&self) -> Result<()>;

    /// Puts a step into a queue; its places are addresses.
    fn step(&self, comm: Comm, stream: Stream, dtype: DType, step: Step<u64>) -> Result<()>;

    /// Says that nothing more is put into a communicator's queue.
    fn finalize(&self, comm: Comm) -> Result<()>;

    /// Frees a communicator that is finalized.
    fn destroy(&self, comm: Comm) -> Result<()>;

    /// Ends what a communicator does, wherever its peers are, and frees it.
    fn abort(&self, comm: Comm) -> Result<()>;
}
