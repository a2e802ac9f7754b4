//! Ranks, process groups and collectives for data, tensor, pipeline and sequence parallelism.

mod buffer;
mod communicator;
mod degrees;
mod dtype;
mod error;
mod group;
mod launch;
mod member;
mod mpu;
mod rank;
mod run;
#[cfg(feature = "testing")]
pub mod testing;
pub mod threads;
mod topology;

pub use buffer::{Buffer, into_vec, zeros};
pub use communicator::{Communicator, Message, Packet, Pending, ReduceOp};
pub use degrees::Degrees;
pub use dtype::{DType, Element};
pub use error::{Error, Result};
pub use group::Group;
pub use launch::{Backend, InitOptions, Launch, init};
pub use member::{Engine, Member};
pub use mpu::{EMBEDDING, Mpu};
pub use rank::{Rank, Wait};
pub use run::{RunError, run_members};
pub use topology::{Axis, Coord, GroupKind, Topology};
