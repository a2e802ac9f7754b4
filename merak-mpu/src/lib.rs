//! Ranks, process groups and collectives for data, tensor, pipeline and sequence parallelism.
//!
//! A training run splits its work along four axes: copies of the model that see different samples
//! (data), parts of each layer (tensor), consecutive stages of layers (pipeline) and parts of each
//! sample (sequence). This crate gives each rank its place on these axes, forms groups of ranks,
//! and carries their collectives and messages. It knows nothing of models, so any Rust program can
//! use it.
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
//! - [`threads`]: the engine whose ranks are threads of one process. `tcp` and `mpi`: those whose
//!   ranks are processes, on Unix. `nccl`: the same with CUDA devices. Others implement [`Engine`]
//!   and [`Communicator`].
//!
//! # How it fits together
//! ```text
//!      Degrees ─────> Topology            places of the ranks (pure)
//!                        │
//! threads::run ┬> Member ─> Mpu ─> Group ─> dyn Communicator     one rank's handles
//! tcp::join    ┤    │                           │
//! mpi::join    ┘ dyn Engine ────────────────────┘                threads | tcp | mpi | your own
//! ```
//!
//! # Engines and their order of summation
//! | engine | ranks | order of summation |
//! |---|---|---|
//! | `threads` | threads of one process | ascending group rank, in f32 for 16-bit floats |
//! | `tcp` | processes, on one host or several | the same, hence the same bits |
//! | `mpi` (a feature) | processes that `mpirun` or `srun` started | the same, so the same bits |
//! | `nccl` (a feature) | processes with a CUDA device each | NCCL's own on devices: other bits |
//!
//! Processes have a control plane beside the connections that carry data: a star of sockets to
//! rank 0. Over it they find each other, compare versions and digests, send heartbeats, report
//! what they wait for, and learn which rank caused a failure. A process that dies is named at once;
//! a process that is stopped or cut off is named when its heartbeats have been absent for some
//! seconds.
//!
//! # Guarantees
//! - **Fixed order.** A sum runs in ascending group rank, in f32 for 16-bit floats, for any number
//!   of threads, so every member, every run and every engine but `nccl` give the same bits.
//! - **No rank waits for ever.** An error or a panic on one rank poisons the world: every pending
//!   or later call on the others returns [`Error::Aborted`], which names the culprit. A peer that
//!   never comes is an [`Error::Timeout`], which names the waiting and the missing ranks. Ranks
//!   that [end](Engine::end) last wait for slow ones, and say so; one that is lost ends this too.
//! - **No call is mistaken for another.** Members that call different operations, types or lengths
//!   get [`Error::Mismatch`] with both sides. The call of most members counts as right, and the
//!   first member with another one as the culprit.
//! - **A started operation owns its buffer** until [`Pending::wait`] gives it back, once. It makes
//!   progress meanwhile, whether or not a rank waits for it.
//! - **No hidden state.** Worlds are values: two of them fit in one process. Only
//!   [`Launch::from_env`] (under [`init`]) reads the environment. With the features `candle`
//!   and `tch` the process has one table, of the storages that are lent at the moment.
//!
//! # Features
//! - `candle`: collectives and messages of candle's tensors, in the module `candle`.
//! - `tch`: the same for tensors of libtorch, in the module `tch`; needs libtorch 2.11.
//! - `mpi`: the engine of that name, over Open MPI, MPICH or another MPI library; the build needs
//!   its `mpicc`, and libclang.
//! - `nccl`: the engine of that name; needs no CUDA to build.
//! - `testing`: worlds with deadlines, tolerances, and the suite that every engine must pass.
//!
//! # Papers
//! The axes and their order follow [Megatron-LM](https://arxiv.org/abs/2104.04473), sections 2 and
//! 3; the sequence axis is that of [DeepSpeed-Ulysses](https://arxiv.org/abs/2309.14509),
//! section 3.

mod affinity;
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
mod engine;
mod error;
mod fold;
mod group;
pub mod hash;
mod launch;
#[cfg(any(feature = "candle", feature = "tch"))]
mod lent;
mod mailbox;
mod member;
#[cfg(unix)]
mod mill;
#[cfg(all(unix, feature = "mpi"))]
pub mod mpi;
mod mpu;
pub mod names;
#[cfg(all(unix, feature = "nccl"))]
pub mod nccl;
mod pages;
pub mod philox;
mod rank;
mod run;
mod sides;
mod slow;
#[cfg(unix)]
mod staged;
#[cfg(feature = "tch")]
pub mod tch;
#[cfg(unix)]
pub mod tcp;
mod tensor;
#[cfg(feature = "testing")]
pub mod testing;
pub mod threads;
mod topology;
mod wrapped;

pub use axis::{Axis, Coord};
pub use buffer::{Buffer, Memory, StepRange, copy_parts, into_vec, put_parts, zeros};
pub use call::{Call, ReduceOp};
pub use communicator::{Communicator, Message, Packet, Pending, Started, Turn};
pub use degrees::{Degrees, divisors};
pub use dtype::{DType, Element};
pub use engine::{Engine, Failure, Locality};
pub use error::{Error, Result};
pub use group::Group;
pub use launch::{
    BadHostList, Built, ChosenEngine, EngineKind, HostList, InitOptions, Launch, LaunchVariables,
    Launcher, init,
};
pub use member::Member;
pub use mpu::{EMBEDDING, Mpu};
pub use pages::zeroed;
pub use rank::{Rank, Wait};
pub use run::{RunError, run_members};
pub use sides::{Sides, in_words};
pub use slow::{LinkSpeed, SlowLink};
pub use tensor::HostTensor;
pub use topology::{GroupKind, Topology};

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
