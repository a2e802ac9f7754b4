//! A typed graph of a model: symbolic tracing, autodiff, backends and model definitions.
//!
//! In 3D parallelism everything begins with a graph: it is rewritten for tensor parallelism, cut
//! into pipeline stages, differentiated, and run node by node. This crate owns the graph and what
//! happens to it on one rank. Planning owns no storage: a model of 175 billion parameters is a few
//! megabytes here.
//!
//! # Example
//!
//! A model is ordinary Rust code on symbolic values; tracing it gives a graph, and a program of the
//! graph runs forward and backward.
//!
//! ```
//! use merak_trace::{
//!     Batch, DType, GradSlot, GradStore, Init, Interpreter, RecomputePlan, RunContext, SingleRank,
//!     StageCuts, StageProgram, TensorType, backend::candle::Candle, fx, op::WeightLayout,
//! };
//! use std::sync::Arc;
//!
//! let graph = fx::trace(DType::F32, |module| {
//!     let x = module.input("x", TensorType::new([2, 3], DType::F32));
//!     let classes = module.input("classes", TensorType::new([2], DType::I64));
//!     let logits =
//!         module.sub("head").linear(&x, 5, WeightLayout::OutIn, false, Init::Normal(0.02))?;
//!     module.output("loss", &module.cross_entropy(&logits, &classes, 0.0)?);
//!     Ok(())
//! })?;
//!
//! // One stage, nothing recomputed; the weights lie in one flat buffer, as zeros.
//! let (cuts, plan) = (StageCuts::whole(&graph), RecomputePlan::default());
//! let program = StageProgram::training(&graph, &cuts, 0, &plan)?;
//! let backend: merak_trace::SharedBackend = Arc::new(Candle::new(1)?);
//! let params = backend.param_store(program.params(), &[0], 15)?;
//! let mut grads = GradStore {
//!     buffers: vec![backend.grad_buffer(DType::F32, 15)?],
//!     slots: vec![GradSlot { buffer: 0, offset: 0, len: 15 }],
//! };
//! let runner = Interpreter::new(Arc::new(program), Arc::clone(&backend), Arc::new(SingleRank));
//!
//! let x = backend.from_buffer(&TensorType::new([2, 3], DType::F32), Box::new(vec![1.0_f32; 6]))?;
//! let classes = backend.from_buffer(&TensorType::new([2], DType::I64), Box::new(vec![0_i64, 4]))?;
//! let batch = Batch::from([("x".to_owned(), x), ("classes".to_owned(), classes)]);
//! let mut forward = runner.forward(&params.views, &batch, vec![], RunContext::default())?;
//! runner.backward(&mut forward.frame, &params.views, vec![], 1.0, &mut grads)?;
//!
//! // Equal logits: each class has probability 1/5, so the gradient of class 1 is 1/5 per sample.
//! let grads = merak_mpu::into_vec::<f32>(grads.buffers.remove(0))?;
//! assert!((grads[3] - 0.4).abs() < 1e-6);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # Main types
//!
//! - [`Graph`] of [`Node`]s: an [`Op`], typed values, a module path. [`mod@fx`] traces one,
//!   [`models`] holds the model families, [`render`] writes one out.
//! - [`Param`]: a name, a type, an initialiser, a [`Placement`]; [`initial_values`] fills a rank's
//!   slice.
//! - [`StageCuts`] and [`StageProgram`]: one stage's forward, both halves of its backward, and what
//!   it keeps.
//! - [`Interpreter`]: runs a program; [`Backend`] computes nodes, [`backend::candle`] is the
//!   default one, on fused kernels; with the feature `tch` there is `backend::tch`, on libtorch.
//!
//! # Features
//!
//! - `cpu` (default): the kernels, the backend `candle`, and starting values. Without it the crate
//!   traces, rewrites, differentiates and cuts graphs, with few dependencies.
//! - `tch`: the libtorch backend; needs libtorch when it is built.
//!
//! # From a model to a program
//!
//! ```text
//! model code ── fx ──► Graph ── (merak-tp) ──► Graph ── StageCuts ──► one stage's forward
//!                                                                         │ differentiate
//!                                  F ──► kept values ──► I (input gradients), W (weight gradients)
//!                                  └── not kept: R (recomputed before I) ──┘
//! ```
//!
//! # Guarantees
//!
//! - A graph that exists is well typed; errors name the module path, the operation and the types.
//! - Results do not depend on the number of compute threads.
//! - Cutting into stages, recomputing, and running the backward in halves change no bit of a loss
//!   or a gradient: contributions to a gradient are added in reverse graph order, and each use of a
//!   parameter accumulates apart.
//! - Starting values and dropout masks are functions of (seed, name, logical index), so that a
//!   slice of a tensor has the numbers of the whole one.
//!
//! # Papers
//!
//! [torch.fx](https://arxiv.org/abs/2112.08429) (symbolic tracing), [Chen et
//! al.](https://arxiv.org/abs/1604.06174) (recomputation), [zero bubble
//! pipelines](https://arxiv.org/abs/2401.10241) (the split backward),
//! [FlashAttention-2](https://arxiv.org/abs/2307.08691) (blockwise attention),
//! [Philox](https://doi.org/10.1145/2063384.2063405) (counter-based random numbers).

mod autodiff;
pub mod backend;
mod error;
pub mod fx;
mod graph;
mod infer;
mod interpreter;
#[cfg(all(feature = "cpu", not(feature = "bench")))]
mod kernels;
#[cfg(feature = "bench")]
#[doc(hidden)]
pub mod kernels;
#[cfg(feature = "cpu")]
mod materialise;
pub mod models;
pub mod op;
mod param;
mod placement;
mod program;
pub mod render;
mod runs;
mod types;
mod value;

pub use autodiff::{Phase, needs_grad};
pub use backend::{
    Backend, Call, Following, GradSink, GradSlot, GradStore, ParamStore, Past, RelativeBias,
    RunContext, SharedBackend,
};
pub use error::{Error, KernelError, Result};
pub use graph::{Graph, Node, NodeId, Overlap, ParamId, Port, Source, ValueId, ValueInfo};
pub use interpreter::{
    AxisGroups, Batch, Continuation, Forwarded, Frame, Interpreter, KvCache, NextPositions, Params,
    SingleRank, Tail,
};
#[cfg(feature = "cpu")]
pub use kernels::{Factor, Threads, Units, multiply, take_product_scratch};
#[cfg(feature = "cpu")]
pub use materialise::{each_initial_values, initial_values};
pub use merak_mpu::{Axis, Coord, DType, named_enum};
pub use op::Op;
pub use param::{Beside, Init, Param, ParamRole};
pub use placement::{LocalBox, Placement, Placements, Shard};
pub use program::{
    GradPort, Hop, LiveBytes, RecomputePlan, StageCuts, StageProgram, Step, TiedParam,
};
pub use runs::Runs;
pub use types::TensorType;
pub use value::{Lease, MemoryMeter, Value};

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
