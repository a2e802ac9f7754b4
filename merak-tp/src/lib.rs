//! Splits a traced model over the ranks of the tensor axis and of the sequence axis.
//!
//! In 3D parallelism this is the step between tracing and cutting into stages: it reads a graph,
//! which knows nothing of ranks, and returns the graph that every rank of a tensor-parallel group
//! runs. Layers named by the user, or by the defaults of the model family, are split by columns or
//! rows as in [Megatron-LM](https://arxiv.org/abs/1909.08053) (section 3); everything else follows
//! from the placement of their outputs.
//!
//! ```
//! use merak_tp::{LayerLists, rewrite};
//! use merak_trace::{DType, Init, TensorType, fx, op::{Activation, WeightLayout}};
//!
//! let mlp = fx::trace(DType::F32, |module| {
//!     let x = module.input("x", TensorType::new([4, 8], DType::F32));
//!     let up = module.sub("up").linear(&x, 32, WeightLayout::OutIn, true, Init::Normal(0.02))?;
//!     let up = module.activation(&up, Activation::GeluTanh)?;
//!     let y = module.sub("down").linear(&up, 8, WeightLayout::OutIn, true, Init::Normal(0.02))?;
//!     module.output("y", &y);
//!     Ok(())
//! })?;
//!
//! let split = rewrite(&mlp, &LayerLists::col_row(["up"], ["down"]), 2)?;
//! let ops: Vec<_> = split.graph.nodes().iter().map(|node| node.op.name()).collect();
//! assert_eq!(ops, ["copy_to", "linear", "gelu_tanh", "linear", "all_reduce", "add"]);
//! assert_eq!(split.graph.params()[0].local.shape, [16, 8]); // of [32, 8]
//! assert!(split.report.gathers.is_empty());
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! - [`LayerLists`] say which linear layers are split; [`default_lists`] has them for known
//!   families, [`auto_lists`] chooses them for any graph, and [`set_tp_layer_lists`] keeps a user's
//!   for later callers.
//! - [`rewrite`] makes the [`Rewritten`] graph, with a [`Report`].
//!
//! # The algorithm
//!
//! Nodes are visited in order. Every value has a [`Placement`](merak_trace::Placement) on the
//! tensor axis; a rule per operation says how it needs its operands, what a rank runs, and how its
//! results lie. Where need and placement differ, a conversion is inserted, a node that knows its
//! own gradient:
//!
//! ```text
//!   x ────► copy_to ──► linear [W₀|W₁] ──► gelu ──► linear [V₀;V₁] ──► all_reduce ──► add b ──► y
//!   replicate           column: shard(out)  shard    row: partial        replicate      once
//!   backward: all_reduce                                                 identity
//! ```
//!
//! A column layer whose output is cut into pieces (a fused query, key and value projection) is
//! split piece by piece. Attention has `heads / T` heads per rank; fewer key and value heads than
//! ranks are repeated.
//!
//! # Sequence parallelism
//!
//! With [`Sequence::Cut`] each rank has a slice of the sequence between the regions, where
//! otherwise all ranks do the same: norms, dropout, residual sums, lookups and losses. The sum
//! after a row layer becomes a reduce-scatter, and an all-gather precedes a column layer; their
//! gradients are an all-gather and a reduce-scatter. A parameter that is used on slices alone is
//! marked ([`Param::summed`](merak_trace::Param::summed)): the optimizer sums its gradient over
//! the ranks first.
//!
//! # The sequence axis
//!
//! With [`Options::ulysses`] the ranks of another axis share all work along the sequence
//! ([Jacobs et al. 2023](https://arxiv.org/abs/2309.14509)); the graph may be that of a tensor rank
//! already. Attention needs all positions, so there each rank has its share of the heads:
//!
//! ```text
//! q, k, v [B, S/N, H] ──► all_to_all ──► [B, S, H/N] ──► attention ──► all_to_all ──► [B, S/N, H]
//! backward: all_to_all                                                 all_to_all
//! ```
//!
//! By [`SequenceMethod::AllGather`] a rank keeps its queries and gathers keys and values, so that
//! there may be more ranks than heads:
//!
//! ```text
//! k, v [B, S/N, H] ──► all_gather ──► [B, S, H] ──► attention of q [B, S/N, H] ──► [B, S/N, H]
//! backward: reduce_scatter
//! ```
//!
//! By [`SequenceMethod::Ring`] they go round the ranks, which compute with those of one at a time:
//!
//! ```text
//! q, k, v [B, S/N, H] ──► attention to the own keys, those of the rank before, ... ──► [B, S/N, H]
//! backward: k and v once more, dk and dv after them
//! ```
//!
//! Every rank has all parameters and a summand of each gradient.
//!
//! # Guarantees
//!
//! - Values are sliced, never made anew: forward, loss and gradients are those of one rank up to
//!   the order of summation. Dropout draws each rank's part of the mask of the whole tensor.
//! - An operation without a rule gets whole operands. The report lists the values that are gathered
//!   for it.
//! - The result depends on the arguments alone, so all ranks compute the same graph.

mod auto;
mod error;
mod layers;
mod lists;
mod matching;
mod options;
mod report;
mod rewrite;
mod rewriter;
mod rules;
mod sequence;
mod slices;
mod traffic;
mod vocab;

pub use auto::{AutoLists, auto_lists};
pub use error::{Error, Result};
pub use lists::{
    LayerLists, Mapping, SplitKind, default_lists, set_tp_layer_lists, tp_layer_lists,
};
pub use options::{Options, Sequence, SequenceMethod};
pub use report::{Choice, CollectiveBytes, Gather, KeptWhole, Report, SplitModule};
pub use rewrite::{cuts, cuts_with, rewrite, rewrite_with};
pub use rewriter::Rewritten;
pub use traffic::{LayerTraffic, Traffic};

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
