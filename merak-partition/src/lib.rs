//! Cuts a traced model into segments and balances them over pipeline stages, with a report of why.
//!
//! Pipeline parallelism gives each rank of the pipeline a consecutive part of the model, a *stage*.
//! This crate answers "which layer goes where, and why": it takes the graph of a whole model (or
//! its tensor-parallel rewrite), and returns where to cut it. It neither reads a clock nor talks to
//! other ranks, so every rank computes the same answer from the same graph.
//!
//! ```
//! use merak_partition::{Partition, ReportOptions, SegmentOptions, StageMethod, report};
//! use merak_trace::models::{self, TraceOptions};
//!
//! let config = serde_json::json!({ "model_type": "gpt2", "vocab_size": 101, "n_positions": 32,
//!     "n_embd": 16, "n_layer": 4, "n_head": 2 });
//! let model = models::from_config(&config)?;
//! let graph = model.trace(&TraceOptions::training(2, 32))?;
//!
//! let options = SegmentOptions::for_model(&model.info(), 2);
//! let partition = Partition::new(&graph, &options, &StageMethod::Uniform)?;
//! // Embeddings, 4 x (attention, MLP), final norm with head.
//! assert_eq!(partition.segments.len(), 10);
//! assert_eq!(partition.stage_bounds, [0, 5, 10]);
//!
//! let report = report(&graph, &partition, &ReportOptions::one_f_one_b(2, 8))?;
//! let modules = ["transformer.wte", "transformer.wpe", "transformer.h.0-1"];
//! assert_eq!(report.stages[0].modules, modules);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # Main types
//! - [`segment`] makes [`Segments`] by a [`SplitMethod`]; [`stages`] lays them out by a
//!   [`StageMethod`].
//! - [`autopipe`] and [`exact`] search for the stages with the shortest step: [`SegmentCosts`] hold
//!   the times of segments, and a [`StepTime`] such as [`OneFOneB`] gives the time of a step.
//! - [`lay_out`] searches for the stages of any schedule of merak-pipe, including schedules with
//!   several stages per rank, within the [memory](RankMemory) of each rank.
//! - [`Pipeline`] decides all of it for a graph in segments: stages, schedule, recomputation. It
//!   tells the memory of a rank ([`TrainingBytes`]), the time of a step ([`Prediction`]) and a
//!   shorter schedule ([`FasterSchedule`]). [`StepCosts`] says what nodes and messages cost, also
//!   on a described [`Cluster`]. [`ParamBytes`] says what a rank keeps for each element of its
//!   parameters.
//! - [`Partition`] is segments and stages together, and gives the cuts from which stage programs
//!   are made.
//! - [`recompute_plan`] selects the values that a stage recomputes instead of keeping.
//! - [`report()`] describes each stage: modules, parameters, work, traffic, memory.
//!   [`Cost`](merak_trace::op::Cost) is its model of work.
//!
//! # How it works
//! ```text
//! nodes      wte wpe add | ln qkv split attn proj add | ln fc gelu proj add | .. | ln_f head loss
//! crossing     1   2   1     2   2     4    2    2   1    2  2    2    2   1        1    1
//! segments  └─ apart ───┘ └──────── ~ budget ────────┘ └──── ~ budget ────┘    └──── apart ─────┘
//! stages    └──────────────── stage 0 ───────────────┘ └───────────── stage 1 ──────────────────┘
//! ```
//! The default method walks the nodes and counts the values that cross each border: a good cut is
//! one that a single value crosses. Of these it takes the ones nearest to a budget of parameters
//! per segment. Two kinds of values are not counted, because every stage can have them at little
//! cost: functions of the model's inputs alone, such as position tables, and values with more than
//! five users. Embeddings and the output head get segments of their own, since their number of
//! parameters does not tell their work. Everything is linear in the number of nodes.
//!
//! # Guarantees
//! - Segments cover each node once, in order; no segment and no stage is empty.
//! - The dependency methods never cut right after an embedding lookup. No method cuts between a
//!   summand and the all-reduce that completes it, nor between a copy into a split region and its
//!   use, nor between the uses of an adapter in a layer, nor within a module of
//!   [`SegmentOptions::leaf_modules`].
//! - A parameter counts in full, even if ranks hold slices; a tied one counts once, at its first
//!   use.
//! - Same graph, same options, same result.
//!
//! # Papers
//! [Merak](https://arxiv.org/abs/2206.04959) (automatic model partitioning);
//! [GPipe](https://arxiv.org/abs/1811.06965), section 2 (stages of balanced cost);
//! AutoPipe (Liu et al., IEEE Cluster 2022; moves around the critical stage);
//! [Chen et al. 2016](https://arxiv.org/abs/1604.06174) (recomputation by segments).

mod borders;
mod cluster;
mod costs;
mod error;
mod limits;
mod memory;
mod method;
mod partition;
mod pipeline;
mod rank_programs;
mod report;
mod search;
mod segment;
mod stages;

pub use cluster::{Cluster, ClusterCosts, Connection};
pub use costs::{Counted, PhaseCosts, StepCosts};
pub use error::{Error, Result};
pub use memory::{
    ForwardBytes, ParamBytes, ParamSums, Share, TrainingBytes, ValueWidth, cached_bytes,
    forward_bytes, input_bytes,
};
pub use method::{PartitionMethod, SplitMethod, StageMethod};
pub use partition::{Partition, recompute_plan};
pub use pipeline::{
    FasterSchedule, Pipeline, PipelineOptions, Prediction, Recompute, RecomputeOp, ScheduleChoice,
    StageLayout, StageTimes,
};
pub use rank_programs::{ParamUse, RankPrograms};
pub use report::{HopBytes, PartitionReport, ReportOptions, StageReport, TiedReport, report};
pub use search::{
    ExactOptions, Found, OneFOneB, RankMemory, Scheduled, SegmentBytes, SegmentCosts, StageLoad,
    StepTime, Stopped, autopipe, exact, lay_out,
};
pub use segment::{MovedPoint, SegmentOptions, Segments, SplitRule, head_params, segment};
pub use stages::stages;

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
