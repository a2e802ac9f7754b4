//! Ranks, process groups and collectives for data, tensor, pipeline and sequence parallelism.

mod buffer;
mod communicator;
mod dtype;
mod error;

pub use buffer::{Buffer, into_vec, zeros};
pub use communicator::{Communicator, Message, Packet, Pending, ReduceOp};
pub use dtype::{DType, Element};
pub use error::{Error, Result};
