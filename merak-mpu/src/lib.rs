//! Ranks, process groups and collectives for data, tensor, pipeline and sequence parallelism.
//!
//! A training run splits its work along four axes: copies of the model that see different samples
//! (data), parts of each layer (tensor), consecutive stages of layers (pipeline) and parts of each
//! sample (sequence). This crate says which rank stands where, which ranks form a group, and
//! carries what the members of a group tell each other. It knows nothing of models, so any Rust
//! program can use it.
//!
//! ```
//! use merak_mpu::{Degrees, Mpu, ReduceOp, threads};
//!
//! // Four ranks, each a thread: two stages of layers that are split in two.
//! let degrees = Degrees { tp: 2, pp: 2, ..Degrees::default() };
//! let sums = threads::run(4, threads::WorldOptions::default(), |member| {
//!     let mpu = Mpu::new(member, degrees)?;
//!     let partial = vec![mpu.rank().0 as f32; 3];
//!     mpu.tensor_parallel_group().all_reduce_vec(partial, ReduceOp::Sum)
//! })?;
//! assert_eq!(sums, [[1.0; 3], [1.0; 3], [5.0; 3], [5.0; 3]]);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # Main types
//! - [`Degrees`] and [`Topology`]: sizes of the axes; pure arithmetic between ranks, places and
//!   groups.
//! - [`Mpu`]: one rank's place, its neighbours and all its groups. [`init`] makes it for a process.
//! - [`Group`]: collectives and messages among some ranks, blocking or [`Pending`].
//! - [`Buffer`]: memory of a [`DType`] that a collective reads and writes where it lies.
//! - [`HostTensor`]: a tensor of another library, for the `*_tensor` methods of a [`Group`].
//! - [`threads`]: the engine whose ranks are threads of one process. `tcp`: the one whose ranks are
//!   processes, on Unix. Others implement [`Engine`] and [`Communicator`].
//!
//! # How it fits together
//! ```text
//!      Degrees ─────> Topology            places of the ranks (pure)
//!                        │
//! threads::run ┬> Member ─> Mpu ─> Group ─> dyn Communicator     one rank's handles
//! tcp::join    ┘    │                           │
//!              dyn Engine ──────────────────────┘                threads | tcp | your own
//! ```
//!
//! # Engines and their order of summation
//! | engine | ranks | order of summation |
//! |---|---|---|
//! | `threads` | threads of one process | ascending group rank, in f32 for 16-bit floats |
//! | `tcp` | processes, on one host or several | the same, hence the same bits |
//!
//! Processes have a control plane beside the connections that carry data: a star of sockets to
//! rank 0, over which they find each other, compare versions and digests, beat, tell what they wait
//! for, and hear who is to blame for a failure. A process that dies is named at once, one that is
//! stopped or cut off when its heart has been silent for some seconds.
//!
//! # Guarantees
//! - **Fixed order.** A sum runs in ascending group rank, in f32 for 16-bit floats, for any number
//!   of threads, so every member, every run and both engines give the same bits.
//! - **No rank waits for ever.** An error or a panic on one rank poisons the world: every pending
//!   or later call on the others returns [`Error::Aborted`], which names the culprit. A peer that
//!   never comes is an [`Error::Timeout`], which names the waiting and the missing ranks.
//! - **No call is mistaken for another.** Members that call different operations, types or lengths
//!   get [`Error::Mismatch`] with both sides.
//! - **A started operation owns its buffer** until [`Pending::wait`] gives it back, once.
//! - **No hidden state.** Worlds are values: two of them fit in one process. Only
//!   [`Launch::from_env`] (under [`init`]) reads the environment. With the feature `candle` the
//!   process has one table, of the storages that are lent at the moment.
//!
//! # Features
//! - `candle`: collectives and messages of candle's tensors, in the module `candle`.
//! - `testing`: worlds with deadlines, tolerances, and the suite that every engine must pass.
//!
//! # Papers
//! The axes and their order follow [Megatron-LM](https://arxiv.org/abs/2104.04473), sections 2 and
//! 3; the sequence axis is that of [DeepSpeed-Ulysses](https://arxiv.org/abs/2309.14509),
//! section 3.

mod axis;
mod bell;
mod buffer;
mod call;
#[cfg(feature = "candle")]
pub mod candle;
mod communicator;
#[cfg(unix)]
mod control;
mod degrees;
mod dtype;
mod error;
mod group;
mod kernel;
mod launch;
mod mailbox;
mod member;
mod mpu;
mod pages;
mod rank;
mod run;
#[cfg(unix)]
pub mod tcp;
mod tensor;
#[cfg(feature = "testing")]
pub mod testing;
pub mod threads;
mod topology;

pub use axis::{Axis, Coord};
pub use buffer::{Buffer, Memory, into_vec, zeros};
pub use communicator::{Communicator, Message, Packet, Pending, ReduceOp, Turn};
pub use degrees::Degrees;
pub use dtype::{DType, Element};
pub use error::{Error, Result};
pub use group::Group;
pub use launch::{
    BadHostList, Built, ChosenEngine, EngineKind, HostList, InitOptions, Launch, LaunchVariables,
    Launcher, init,
};
pub use member::{Engine, Failure, Locality, Member};
pub use mpu::{EMBEDDING, Mpu};
pub use rank::{Rank, Wait};
pub use run::{RunError, run_members};
pub use tensor::HostTensor;
pub use topology::{GroupKind, Topology};

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
