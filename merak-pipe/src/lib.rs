//! Pipeline schedules as data: generate, validate, simulate, draw and run them.
//!
//! Pipeline parallelism gives every rank a *stage*, a consecutive part of the model, and sends each
//! *microbatch* of a step through all stages, forward and back. In 3D parallelism it is the axis
//! with the least traffic, one activation per hop, and so the one that spans hosts. Its cost is the
//! *bubble*, the time in which ranks wait for each other. The *schedule* decides how large the
//! bubble is and how many activations are kept: for every rank it lists what the rank computes, in
//! order.
//!
//! # Example
//! ```
//! use merak_pipe::{Costs, GridStyle, ScheduleKind, Size, UnitCosts, grid, simulate};
//!
//! let schedule = ScheduleKind::OneFOneB.generate(Size::new(3, 4))?;
//! schedule.validate()?;
//! let costs: UnitCosts = "F=1,I=1,W=1,R=0,C=0".parse()?;
//! let simulation = simulate(&schedule, &Costs::uniform(costs, 3))?;
//! let picture = "\
//! rank 0  F0 F1 F2 .  .  .  .  B0--- F3 B1--- .  B2--- .  B3---
//! rank 1  .  F0 F1 .  .  B0--- F2 B1--- F3 B2--- .  B3--- .  .
//! rank 2  .  .  F0 B0--- F1 B1--- F2 B2--- F3 B3--- .  .  .  .
//! ";
//! assert_eq!(grid(&simulation.timeline, GridStyle::default()), picture);
//! # Ok::<(), merak_pipe::Error>(())
//! ```
//!
//! # Main types
//! - [`Action`], such as `1F3`: stage 1 runs microbatch 3 forward. [`Kind`] also knows `B`
//!   backward, its halves `I` (input gradient) and `W` (weight gradients), and `R` recompute; a
//!   [`Pair`] of `F` and `B` runs at once.
//! - [`Schedule`]: the actions of every rank, from a [`ScheduleKind`] or from CSV;
//!   [`Schedule::validate`] proves it, [`Schedule::instructions`] adds the communication.
//! - [`simulate`](fn@simulate): [`Costs`] in, makespan, bubble, memory and critical path out;
//!   [`simulate_on`]: the same for ranks that take turns on fewer cores.
//! - [`ActivationBytes`]: what a microbatch keeps for its input and for its weight gradients;
//!   [`Schedule::peak_bytes`] makes it the memory of each rank. [`StageBytes`]: the same where it
//!   is known action by action.
//! - [`auto`](fn@auto): a schedule searched for given costs and memory; [`Costs::measured`] takes
//!   them from a recorded timeline.
//! - [`PipelineEngine`]: carries out one rank's actions over a [`StageModule`] and a [`Link`];
//!   [`run_threads`] runs a whole pipeline in one process; an [`Observer`] is told of each action.
//! - [`compare_with_unpipelined`]: the check for a module of one's own; it runs a step with and
//!   without the pipeline.
//! - [`Timeline`]: what ran when, from the simulator or the engine; [`grid`](fn@grid),
//!   [`svg`](fn@svg) and [`trace`](fn@trace) draw it.
//!
//! # How the parts meet
//! ```text
//! ScheduleKind + Size ─► Schedule ──► validate        once, before anything runs
//!        CSV ────────────┘  │ │ └───► simulate ──► Timeline (planned)  ──► grid, json, svg, trace
//!                           │ └─────► instructions                    ──► json
//!                           └► PipelineEngine + StageModule + Link ─► Timeline (recorded) ─► grid
//! ```
//!
//! # Guarantees
//! - Schedules, proofs, figures and pictures are pure functions: every rank computes the same ones
//!   alone.
//! - A valid schedule cannot deadlock, whether sends are buffered or wait for their receiver.
//! - Every valid schedule adds up the weight gradients of a stage in ascending order of the
//!   microbatches, so the choice of schedule changes no bit of them.
//! - A rank that fails ends all ranks with an error that names it; no wait outlasts the link's
//!   deadline. A [`Cancel`] ends a run from outside.
//!
//! # Features
//! - `candle`: `TensorStages` of a model that is written for candle.
//! - `mpu`: `GroupLink`, a link over the process groups of `merak-mpu`, and `TensorStages` over the
//!   tensors of any library with autograd.
//! - `tch`: `TensorStages` of a model that is written for libtorch; needs libtorch 2.11.
//! - `testing`: `testing::check_links`, the checks that a link of one's own must pass.
//!
//! # Papers
//! [GPipe](https://arxiv.org/abs/1811.06965), [PipeDream-Flush](https://arxiv.org/abs/2006.09503)
//! and [Megatron-LM](https://arxiv.org/abs/2104.04473) for `gpipe` and `1f1b`;
//! [Merak](https://arxiv.org/abs/2206.04959) for recomputation within the schedule; [Zero
//! Bubble](https://arxiv.org/abs/2401.10241) for the split of `B` into `I` and `W` (which it writes
//! B and W), `zb_h1`, `zb_h2` and `zb_v`; [Controllable Memory](https://arxiv.org/abs/2405.15362)
//! for `v_half` and `v_min`; [DeepSeek-V3](https://arxiv.org/abs/2412.19437) for `dualpipe_v`.

mod action;
mod auto;
mod blocking_sends;
#[cfg(feature = "candle")]
mod candle;
mod costs;
mod dataflow;
mod engine;
mod error;
mod figure;
mod generate;
mod instruction;
mod kind;
mod limits;
mod lower;
mod memory;
mod parse;
mod render;
mod rounds;
mod schedule;
mod simulate;
#[cfg(feature = "tch")]
mod tch;
#[cfg(feature = "mpu")]
mod tensors;
#[cfg(feature = "testing")]
pub mod testing;
mod timeline;
mod validate;

pub use action::{Action, Kind, MicrobatchId, Pair, StageId, Tag};
pub use auto::{Auto, AutoLimits, ByteLimits, Stopped, auto};
pub use costs::{Costs, UnitCosts};
#[cfg(feature = "mpu")]
pub use engine::GroupLink;
pub use engine::{
    Cancel, Comparison, Interrupter, Link, Observer, PipelineEngine, StageModule, ThreadLink,
    compare_with_unpipelined, panic_message, run, run_threads, run_threads_until, threads,
};
pub use error::{BoxError, Error, Result, Violation};
pub use figure::Figure;
pub use instruction::{Instruction, Slot};
pub use kind::ScheduleKind;
pub use memory::{ActivationBytes, PeakBytes, StageBytes, rank_peak_bytes};
pub use render::{
    GridStyle, PageOptions, grid, html, json, json_with_bytes, svg, timelines, trace,
};
pub use rounds::{Rounds, Visit};
pub use schedule::{Exchanges, Schedule, Size};
pub use simulate::{Simulation, simulate, simulate_on};
#[cfg(feature = "mpu")]
pub use tensors::{Autograd, TensorModel, TensorStages};
pub use timeline::{Span, Timeline};

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
