//! The operations of nodes.
//!
//! `op/facts.rs` has a row for each, with what passes, backends and planners ask about it.

mod autocast;
mod cost;
mod exchange;
mod facts;
mod fields;
mod region;
mod relative_buckets;

pub use autocast::Autocast;
pub use cost::Cost;
pub use exchange::Exchange;
pub use facts::{Class, ResultMemory};
pub use fields::{
    Activation, Attention, AttentionOptions, AxisSlice, Direction, DropoutSpec, JoinedGrad, Keys,
    Places, Reduction, Ring, Rope, WeightLayout,
};
pub use region::{Collective, Region, RegionKind};
pub use relative_buckets::RelativeBuckets;

use crate::placement::Shard;
use merak_mpu::{Axis, DType};
use serde::{Deserialize, Serialize};

/// The label of a position that does not count, as in PyTorch.
pub const IGNORED_LABEL: i64 = -100;

/// What a node computes. Operands and results are listed as `operands -> results`.
///
/// Statistics (`mean`, `rstd`, `lse`) of 16-bit tensors are `f32`. No gradient passes through them:
/// a loss may depend on the first result of an operation, and on all pieces of a [`Op::Split`].
///
/// Composite operations stay whole, because fused kernels, placement rules and good gradients live
/// there. Gradient operations are operations like any other, so that a differentiated program is a
/// graph too.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Op {
    /// `-> [len] i64`: the position of each element of a sequence, counted from `first`. Sequences
    /// that [pass in pieces](crate::Interpreter::forward_cached) go on where they were.
    Positions {
        /// Length of the sequence.
        len: usize,
        /// Number of the first position.
        first: usize,
    },
    /// `seen [B, S] i64 -> [B, S] i64`: the number of each position among those of its sample that
    /// are not 0, counted from `first`; `first - 1` where it is 0.
    SeenPositions {
        /// Number of the first position that is seen.
        first: usize,
    },
    /// `document_ids [B, S] i64 -> [B, S] i64`: the number of each position in its document, a run
    /// of equal ids, counted from `first`.
    DocumentPositions {
        /// Number of the first position of each document.
        first: usize,
    },
    /// `-> [Sq, Sk] i64`: the bucket of each query's distance to each key.
    RelativeBuckets(RelativeBuckets),

    /// `x [.., in], w, (b [out]) -> [.., out]`.
    Linear {
        /// How `w` is stored.
        layout: WeightLayout,
        /// Whether there is a bias operand.
        bias: bool,
    },
    /// `dy [.., out], w -> dx [.., in]`.
    LinearGradInput {
        /// How `w` is stored.
        layout: WeightLayout,
    },
    /// `x [.., in], dy [.., out] -> dw`.
    LinearGradWeight {
        /// How `w` is stored.
        layout: WeightLayout,
    },
    /// `a [.., m, k], b [.., k, n] -> [.., m, n]`, each operand optionally stored transposed.
    MatMul {
        /// `a` is `[.., k, m]`.
        transpose_a: bool,
        /// `b` is `[.., n, k]`.
        transpose_b: bool,
    },

    /// `ids [..] i64, table [rows, width] -> [.., width]`.
    Embedding {
        /// A row that lookups do not train (`padding_idx` of `torch.nn.Embedding`), counted in the
        /// whole table.
        padding: Option<usize>,
        /// Set when the table is a slice of its rows. Ids then count in the whole table, and those
        /// of other ranks' rows give zeros, so that the results of all ranks are summands.
        slice: Option<AxisSlice>,
    },
    /// `ids [..] i64, dy [.., width] -> [rows, width]`.
    EmbeddingGrad {
        /// Rows of the table, here of its slice.
        rows: usize,
        /// The row whose gradient stays zero, counted in the whole table.
        padding: Option<usize>,
        /// Set when the table is a slice of its rows.
        slice: Option<AxisSlice>,
    },

    /// `x [.., n], w [n], b [n] -> y [.., n], mean [rows], rstd [rows]`.
    LayerNorm {
        /// Added to the variance.
        eps: f64,
    },
    /// `dy, x, w, mean, rstd -> dx`.
    LayerNormGradInput,
    /// `dy, x, mean, rstd -> dw [n], db [n]`.
    LayerNormGradParams,
    /// `x [.., n], w [n] -> y [.., n], rstd [rows]`.
    RmsNorm {
        /// Added to the mean square.
        eps: f64,
    },
    /// `dy, x, w, rstd -> dx`.
    RmsNormGradInput,
    /// `dy, x, rstd -> dw [n]`.
    RmsNormGradParams,

    /// `q [B, Sq, heads*D], k [B, Sk, kv_heads*D], v [B, Sk, kv_heads*D], (seen), (table, index) ->
    /// out [B, Sq, heads*D], lse [B, heads, Sq]`; [`AttentionOptions`] describes the optional
    /// operands.
    Attention(Attention),
    /// `dout, q, k, v, out, lse, (seen), (table, index) -> dq, dk, dv, (dtable)`.
    AttentionGrad(Attention),
    /// `out, lse, out, lse -> out, lse`: the attention of queries to two sets of keys, from the
    /// results of [`Op::Attention`] for each set. It has no gradient.
    JoinAttention,
    /// `x [B, S, H*D], positions [S] or [B, S] i64 -> x`.
    Rope(Rope),

    /// `x -> y`, elementwise.
    Activation(Activation),
    /// `x, dy -> dx`.
    ActivationGrad(Activation),
    /// `gate, up -> silu(gate) * up`.
    SiluMul,
    /// `gate, up, dy -> dgate, dup`.
    SiluMulGrad,
    /// `x -> softmax over the last dimension`.
    Softmax,
    /// `y, dy -> dx`.
    SoftmaxGrad,
    /// `x -> 1/√x`, elementwise. No gradient passes: it counts as a constant.
    InverseRoot,
    /// `x -> y`; its gradient is the same operation. The identity outside training.
    Dropout(DropoutSpec),

    /// `logits [.., V], labels [..] i64 -> sum of token losses [] f64, lse [rows]`;
    /// [`IGNORED_LABEL`] does not count.
    CrossEntropy {
        /// Share of probability spread over all classes.
        label_smoothing: f64,
    },
    /// `logits, labels, lse, dloss [] f64 -> dlogits`.
    CrossEntropyGrad {
        /// Share of probability spread over all classes.
        label_smoothing: f64,
        /// Set when the logits are a slice of the classes; the gradient of padding is zero.
        slice: Option<AxisSlice>,
    },

    /// `logits [.., local] -> max [rows]`: the largest logit of each row among the classes of this
    /// rank, minus infinity where it has none. No gradient passes: it counts as a constant.
    VocabMax {
        /// How the classes are cut.
        slice: AxisSlice,
    },
    /// `logits [.., local], labels [..] i64, max [rows] -> sums [rows, n]`: what the classes of
    /// this rank add to the loss of each row, `max` being the largest logit of all classes: the
    /// logit of the label, the sum of `exp(x - max)`, and under label smoothing the sum of logits,
    /// so `n` is 2 or 3. No gradient passes: it counts as a constant.
    VocabSums {
        /// Share of probability spread over all classes.
        label_smoothing: f64,
        /// How the classes are cut.
        slice: AxisSlice,
    },
    /// `logits [.., local], labels [..] i64, max [rows], sums [rows, n] -> sum of token losses []
    /// f64, lse [rows]`, as [`Op::CrossEntropy`] of the logits of all ranks. The logits are an
    /// operand because the gradient goes to them.
    VocabLoss {
        /// Share of probability spread over all classes.
        label_smoothing: f64,
        /// How the classes are cut.
        slice: AxisSlice,
    },

    /// `a, b -> a + b`; the shape of `b` equals the last dimensions of `a`.
    Add,
    /// `a, b -> a * b`; the shape of `b` equals the last dimensions of `a`.
    Mul,
    /// `x -> factor * x`.
    Scale {
        /// The factor.
        factor: f64,
    },
    /// `x -> x` summed over its leading dimensions until `shape` is left.
    SumLeading {
        /// The last dimensions of `x`.
        shape: Vec<usize>,
    },
    /// `x -> []`: the sum of all elements, in f64.
    SumAll,
    /// `x, dy [] f64 -> x`: every element is `dy`.
    SumAllGrad,
    /// `x -> x`.
    Identity,
    /// `x -> x`; backward divides the gradient by a number of ranks, each of which does the same
    /// with `x` and gets the same gradient, where their gradients are summed as summands.
    ShareGrad {
        /// The number of ranks.
        ranks: usize,
    },
    /// `x -> x` in another element type.
    Cast {
        /// The new element type.
        dtype: DType,
    },

    /// `x -> x` with another shape.
    Reshape {
        /// The new shape.
        shape: Vec<usize>,
    },
    /// `x -> x` with its dimensions in another order.
    Transpose {
        /// `result.shape[i] = x.shape[perm[i]]`.
        perm: Vec<usize>,
    },
    /// `x -> pieces` along a dimension.
    Split {
        /// The dimension.
        dim: usize,
        /// Sizes of the pieces.
        sizes: Vec<usize>,
    },
    /// `pieces -> x` along a dimension.
    Concat {
        /// The dimension.
        dim: usize,
    },
    /// `-> zeros`: the gradient of a value that no node uses.
    Zeros {
        /// Shape of the result.
        shape: Vec<usize>,
        /// Element type of the result.
        dtype: DType,
    },

    /// `x -> x`; backward all-reduces the gradient. Opens a region whose work is split over the
    /// axis.
    CopyTo {
        /// The mesh axis.
        axis: Axis,
    },
    /// `x -> sum over the ranks of the axis`, or the largest of them; backward passes the gradient
    /// of a sum on.
    AllReduce {
        /// The mesh axis.
        axis: Axis,
        /// How the values of the ranks are joined.
        op: Reduction,
    },
    /// `x -> x` joined from the slices of all ranks; backward keeps the rank's own slice, or that
    /// of the sum over the ranks.
    AllGather {
        /// The mesh axis.
        axis: Axis,
        /// How the result is cut.
        shard: Shard,
        /// What the gradient of the result is.
        #[serde(default)]
        grad: JoinedGrad,
    },
    /// `x -> own slice`; backward joins the slices.
    Scatter {
        /// The mesh axis.
        axis: Axis,
        /// How the operand is cut.
        shard: Shard,
        /// Size of one slice.
        local: usize,
    },
    /// `x -> own slice of the sum over the ranks of the axis`; backward joins the slices.
    ReduceScatter {
        /// The mesh axis.
        axis: Axis,
        /// How the operand is cut.
        shard: Shard,
        /// Size of one slice.
        local: usize,
    },
    /// `own slice of x along one dimension -> own slice of x along another`; backward goes the
    /// other way.
    AllToAll {
        /// The mesh axis.
        axis: Axis,
        /// How the operand is cut.
        from: Shard,
        /// How the result is cut; another dimension.
        to: Shard,
    },
}
