//! The operations of nodes, and the facts about each that other modules use.

mod autocast;
mod cost;

pub use autocast::Autocast;
pub use cost::Cost;

use crate::{TensorType, placement::Shard};
use merak_mpu::{Axis, Coord, DType};
use serde::{Deserialize, Serialize};
use std::ops::Range;

/// The label of a position that does not count, as in PyTorch.
pub const IGNORED_LABEL: i64 = -100;

/// How the matrix of a linear layer is stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum WeightLayout {
    /// `[out, in]`, as `torch.nn.Linear`: `y = x Wᵀ`.
    OutIn,
    /// `[in, out]`, as GPT-2's `Conv1D`: `y = x W`.
    InOut,
}

impl WeightLayout {
    /// The dimension of the matrix that holds the output features.
    pub fn out_dim(self) -> usize {
        match self {
            Self::OutIn => 0,
            Self::InOut => 1,
        }
    }

    /// The dimension of the matrix that holds the input features.
    pub fn in_dim(self) -> usize {
        1 - self.out_dim()
    }

    /// The layout in which the transposed matrix multiplies.
    #[must_use]
    pub fn transposed(self) -> Self {
        match self {
            Self::OutIn => Self::InOut,
            Self::InOut => Self::OutIn,
        }
    }
}

/// An elementwise function with its own gradient kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Activation {
    /// The approximation `x/2 (1 + tanh(√(2/π) (x + 0.044715 x³)))` of [`Self::GeluErf`].
    GeluTanh,
    /// `x/2 (1 + erf(x/√2))` ([GELU](https://arxiv.org/abs/1606.08415)).
    GeluErf,
    /// `x / (1 + e^-x)`, also called swish.
    Silu,
    /// `max(x, 0)`, with slope 0 at 0.
    Relu,
    /// `tanh(x)`.
    Tanh,
}

impl Activation {
    /// The names of the function and of its gradient.
    fn names(self) -> (&'static str, &'static str) {
        match self {
            Self::GeluTanh => ("gelu_tanh", "gelu_tanh_grad"),
            Self::GeluErf => ("gelu", "gelu_grad"),
            Self::Silu => ("silu", "silu_grad"),
            Self::Relu => ("relu", "relu_grad"),
            Self::Tanh => ("tanh", "tanh_grad"),
        }
    }
}

/// Where a slice of a tensor that is cut over the ranks of an axis lies in the whole tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct AxisSlice {
    /// The mesh axis over which the dimension is cut.
    pub axis: Axis,
    /// The dimension.
    pub dim: usize,
    /// Its size in the whole tensor.
    pub full: usize,
}

impl AxisSlice {
    /// The indices of the whole dimension that the rank at `place` holds, of which each rank's
    /// tensor has room for `local`. Behind the end of the dimension lies padding.
    pub fn own(&self, place: Coord, local: usize) -> Range<usize> {
        let start = place.get(self.axis) * local;
        start.min(self.full)..(start + local).min(self.full)
    }
}

/// How an all-reduce joins the values of all ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Reduction {
    /// Their sum.
    Sum,
    /// The largest of them. No gradient passes: it counts as a constant.
    Max,
}

/// Random zeroing with rescaling; the mask is a function of the run's seed, the step, the number of
/// the sample (dimension 0), this node's key and the logical element index within the sample.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct DropoutSpec {
    /// Probability that an element becomes zero.
    pub p: f64,
    /// Hash of the name of the node that drew the mask; its gradient uses the same.
    pub key: u64,
    /// Set when the value is a slice of a logical tensor.
    pub slice: Option<AxisSlice>,
}

/// Scaled dot-product attention over packed heads.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Attention {
    /// Query heads in the local tensors.
    pub heads: usize,
    /// Key and value heads; divides `heads`.
    pub kv_heads: usize,
    /// Size of one head.
    pub head_dim: usize,
    /// Factor of the scores, usually `1/√head_dim`.
    pub scale: f64,
    /// Whether a query sees only keys at its own and earlier positions.
    pub causal: bool,
    /// With a sliding window, how many keys a query sees, its own included.
    pub window: Option<usize>,
    /// Dropout of the probabilities; `slice` refers to the heads (dimension 1 of `[B, H, S, S]`).
    pub dropout: Option<DropoutSpec>,
}

/// Positions of an attention's optional operands, where present.
///
/// The required operands may be followed by `seen [B, Sk] i64` (0 hides a key from all queries of
/// its sample), then by a pair of `table [R, heads]` and `index [Sq, Sk] i64`: the score of (head,
/// query, key) gets `table[index[query, key], head]` added.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct AttentionOptions {
    /// Position of `seen`.
    pub seen: Option<usize>,
    /// Position of `table`; `index` is the next.
    pub table: Option<usize>,
}

impl AttentionOptions {
    /// Finds them by their types after the first `required` operands.
    pub fn find<'a>(types: impl IntoIterator<Item = &'a TensorType>, required: usize) -> Self {
        let mut found = Self::default();
        let mut types = types.into_iter().enumerate().skip(required).peekable();
        found.seen = types
            .next_if(|(_, ty)| !ty.dtype.is_float())
            .map(|(position, _)| position);
        found.table = types.next().map(|(position, _)| position);
        found
    }

    /// The number of optional operands that are present.
    pub fn count(self) -> usize {
        usize::from(self.seen.is_some()) + 2 * usize::from(self.table.is_some())
    }
}

/// Buckets of relative positions: small distances have one each, larger ones share them by their
/// logarithm ([Raffel et al. 2019](https://arxiv.org/abs/1910.10683), section 2.1).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct RelativeBuckets {
    /// Queries.
    pub q_len: usize,
    /// Keys.
    pub k_len: usize,
    /// Number of buckets.
    pub buckets: usize,
    /// Distances from here on share the last bucket.
    pub max_distance: usize,
    /// Whether keys after the query have buckets of their own, half of them all; otherwise they
    /// share bucket 0.
    pub bidirectional: bool,
}

impl RelativeBuckets {
    /// Buckets of one direction, half of which are for single distances.
    fn of_direction(&self) -> usize {
        self.buckets / if self.bidirectional { 2 } else { 1 }
    }

    /// Whether there are buckets for single and for shared distances.
    pub fn is_valid(&self) -> bool {
        self.of_direction() >= 2 && self.max_distance > self.of_direction() / 2
    }

    /// The bucket of each query and key: `[q_len, k_len]`.
    pub fn indices(&self) -> Vec<i64> {
        let mut indices = vec![0; self.q_len * self.k_len];
        self.write_indices(&mut indices);
        indices
    }

    /// Writes the same to `indices`, `q_len * k_len` elements.
    pub(crate) fn write_indices(&self, indices: &mut [i64]) {
        // A row of all distances; each query copies its part.
        let last_query = self.q_len.saturating_sub(1);
        let row: Vec<_> = (0..self.q_len + self.k_len)
            .map(|key| self.bucket(key, last_query))
            .collect();
        let queries = indices.chunks_exact_mut(self.k_len.max(1));
        for (query, indices) in queries.enumerate() {
            let start = self.q_len - 1 - query;
            indices.copy_from_slice(&row[start..start + self.k_len]);
        }
    }

    /// The bucket of a key at `key` for a query at `query`.
    fn bucket(&self, key: usize, query: usize) -> i64 {
        let of_direction = self.of_direction();
        let (start, distance) = match key.checked_sub(query) {
            Some(ahead) if ahead > 0 && self.bidirectional => (of_direction, ahead),
            Some(_) => (0, 0),
            None => (0, query - key),
        };
        let exact = of_direction / 2;
        let within = if distance < exact {
            distance
        } else {
            // In f32, so that borders fall where PyTorch has them.
            let ratio = (distance as f32 / exact as f32).ln()
                / (self.max_distance as f64 / exact as f64).ln() as f32;
            let shared = (ratio * (of_direction - exact) as f32) as usize;
            (exact + shared).min(of_direction - 1)
        };
        i64::try_from(start + within).expect("a bucket fits an i64")
    }
}

/// What the gradient of a joined value is on each of the ranks that join it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum JoinedGrad {
    /// The whole gradient, since all ranks do the same work: a rank keeps its own slice.
    #[default]
    Whole,
    /// A summand, since each rank does a part of the work: the slices are summed.
    Summand,
}

/// Rotary position embedding, rotate-half convention.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Rope {
    /// Size of one head.
    pub head_dim: usize,
    /// Angle per position for each pair of elements; `2 * inv_freq.len()` elements of a head are
    /// rotated.
    pub inv_freq: Vec<f32>,
    /// Factor of the rotated elements, 1 for a plain turn.
    pub scale: f64,
    /// Turns the other way, which is the gradient.
    pub inverse: bool,
}

/// What a node computes. Operands and results are listed as `operands -> results`.
///
/// Statistics (`mean`, `rstd`, `lse`) of 16-bit tensors are `f32`.
///
/// Composite operations stay whole, because fused kernels, placement rules and good gradients live
/// there. Gradient operations are operations like any other, so that a differentiated program is a
/// graph too.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Op {
    /// `-> [len] i64`: the position of each element of a sequence, counted from `first` plus the
    /// run's position offset.
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
    /// `x [B, S, H*D], positions [S] i64 -> x`.
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

/// Where the results of an operation lie.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ResultMemory {
    /// In memory of their own.
    Own,
    /// In the memory of the first operand.
    View,
    /// Sums: a kernel can add them straight to their accumulator; otherwise in memory of their own.
    Sum,
}

impl Op {
    /// The name in renderings and messages.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Positions { .. } => "positions",
            Self::SeenPositions { .. } => "seen_positions",
            Self::RelativeBuckets(_) => "relative_buckets",
            Self::Linear { .. } => "linear",
            Self::LinearGradInput { .. } => "linear_grad_input",
            Self::LinearGradWeight { .. } => "linear_grad_weight",
            Self::MatMul { .. } => "matmul",
            Self::Embedding { .. } => "embedding",
            Self::EmbeddingGrad { .. } => "embedding_grad",
            Self::LayerNorm { .. } => "layer_norm",
            Self::LayerNormGradInput => "layer_norm_grad_input",
            Self::LayerNormGradParams => "layer_norm_grad_params",
            Self::RmsNorm { .. } => "rms_norm",
            Self::RmsNormGradInput => "rms_norm_grad_input",
            Self::RmsNormGradParams => "rms_norm_grad_params",
            Self::Attention(_) => "attention",
            Self::AttentionGrad(_) => "attention_grad",
            Self::Rope(rope) if rope.inverse => "rope_inverse",
            Self::Rope(_) => "rope",
            Self::Activation(kind) => kind.names().0,
            Self::ActivationGrad(kind) => kind.names().1,
            Self::SiluMul => "silu_mul",
            Self::SiluMulGrad => "silu_mul_grad",
            Self::InverseRoot => "inverse_root",
            Self::Softmax => "softmax",
            Self::SoftmaxGrad => "softmax_grad",
            Self::Dropout(_) => "dropout",
            Self::CrossEntropy { .. } => "cross_entropy",
            Self::CrossEntropyGrad { .. } => "cross_entropy_grad",
            Self::VocabMax { .. } => "vocab_max",
            Self::VocabSums { .. } => "vocab_sums",
            Self::VocabLoss { .. } => "vocab_loss",
            Self::Add => "add",
            Self::Mul => "mul",
            Self::Scale { .. } => "scale",
            Self::SumLeading { .. } => "sum_leading",
            Self::SumAll => "sum_all",
            Self::SumAllGrad => "sum_all_grad",
            Self::Identity => "identity",
            Self::Cast { .. } => "cast",
            Self::Reshape { .. } => "reshape",
            Self::Transpose { .. } => "transpose",
            Self::Split { .. } => "split",
            Self::Concat { .. } => "concat",
            Self::Zeros { .. } => "zeros",
            Self::CopyTo { .. } => "copy_to",
            Self::AllReduce {
                op: Reduction::Sum, ..
            } => "all_reduce",
            Self::AllReduce {
                op: Reduction::Max, ..
            } => "all_reduce_max",
            Self::AllGather { .. } => "all_gather",
            Self::Scatter { .. } => "scatter",
            Self::ReduceScatter { .. } => "reduce_scatter",
            Self::AllToAll { .. } => "all_to_all",
        }
    }

    /// Where the results lie.
    pub fn result_memory(&self) -> ResultMemory {
        match self {
            Self::Identity | Self::Reshape { .. } | Self::CopyTo { .. } => ResultMemory::View,
            Self::LinearGradWeight { .. }
            | Self::LayerNormGradParams
            | Self::RmsNormGradParams
            | Self::SumLeading { .. }
            | Self::EmbeddingGrad { .. } => ResultMemory::Sum,
            Self::Positions { .. }
            | Self::SeenPositions { .. }
            | Self::RelativeBuckets(_)
            | Self::Linear { .. }
            | Self::LinearGradInput { .. }
            | Self::MatMul { .. }
            | Self::Embedding { .. }
            | Self::LayerNorm { .. }
            | Self::LayerNormGradInput
            | Self::RmsNorm { .. }
            | Self::RmsNormGradInput
            | Self::Attention(_)
            | Self::AttentionGrad(_)
            | Self::Rope(_)
            | Self::Activation(_)
            | Self::ActivationGrad(_)
            | Self::SiluMul
            | Self::SiluMulGrad
            | Self::Softmax
            | Self::SoftmaxGrad
            | Self::InverseRoot
            | Self::Dropout(_)
            | Self::CrossEntropy { .. }
            | Self::CrossEntropyGrad { .. }
            | Self::VocabMax { .. }
            | Self::VocabSums { .. }
            | Self::VocabLoss { .. }
            | Self::Add
            | Self::Mul
            | Self::Scale { .. }
            | Self::SumAll
            | Self::SumAllGrad
            | Self::Cast { .. }
            | Self::Transpose { .. }
            | Self::Split { .. }
            | Self::Concat { .. }
            | Self::Zeros { .. }
            | Self::AllReduce { .. }
            | Self::AllGather { .. }
            | Self::Scatter { .. }
            | Self::ReduceScatter { .. }
            | Self::AllToAll { .. } => ResultMemory::Own,
        }
    }

    /// Whether the operation is a border between whole and sharded work, which the interpreter runs
    /// itself.
    pub fn is_region(&self) -> bool {
        matches!(
            self,
            Self::CopyTo { .. }
                | Self::AllReduce { .. }
                | Self::AllGather { .. }
                | Self::Scatter { .. }
                | Self::ReduceScatter { .. }
                | Self::AllToAll { .. }
        )
    }

    /// The mesh axis that this operation communicates over, forward.
    pub fn communicates(&self) -> Option<Axis> {
        match self {
            Self::AllReduce { axis, .. }
            | Self::AllGather { axis, .. }
            | Self::ReduceScatter { axis, .. }
            | Self::AllToAll { axis, .. } => Some(*axis),
            _ => None,
        }
    }

    /// Whether the results count as constants: no gradient passes to the operands.
    pub fn stops_gradient(&self) -> bool {
        matches!(
            self,
            Self::InverseRoot
                | Self::VocabMax { .. }
                | Self::VocabSums { .. }
                | Self::AllReduce {
                    op: Reduction::Max,
                    ..
                }
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The buckets of the keys up to `reach` before and behind a query.
    fn around(buckets: usize, max_distance: usize, bidirectional: bool, reach: usize) -> Vec<i64> {
        let spec = RelativeBuckets {
            q_len: reach + 1,
            k_len: 2 * reach + 1,
            buckets,
            max_distance,
            bidirectional,
        };
        assert!(spec.is_valid());
        spec.indices().split_off(reach * spec.k_len)
    }

    #[test]
    fn near_keys_have_buckets_of_their_own_and_far_ones_share() {
        // The results of T5Attention._relative_position_bucket in transformers 5.23.
        assert_eq!(
            around(8, 6, true, 8),
            [3, 3, 3, 3, 3, 2, 2, 1, 0, 5, 6, 6, 7, 7, 7, 7, 7]
        );
        let behind = [7; 11]
            .into_iter()
            .chain([6; 5])
            .chain([5; 3])
            .chain([4; 2]);
        let expected: Vec<_> = behind.chain([3, 2, 1]).chain([0; 25]).collect();
        assert_eq!(around(8, 20, false, 24), expected);
        // Distances at which the usual buckets change, powers of two among them.
        let borders = |bidirectional, side: fn(&i64) -> bool| -> Vec<i64> {
            let found = around(32, 128, bidirectional, 200);
            let changes = (1..401).filter(|&i| found[i] != found[i - 1]);
            changes
                .map(|i| i64::try_from(i).unwrap() - 200)
                .filter(side)
                .collect()
        };
        assert_eq!(borders(true, |&d| d > 7), [8, 12, 16, 23, 32, 46, 64, 91]);
        assert_eq!(
            borders(false, |&d| d < -15),
            [
                -112, -98, -86, -76, -66, -58, -51, -45, -39, -34, -30, -26, -23, -20, -18
            ]
        );
    }
}
