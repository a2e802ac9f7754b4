//! The operations that a node can be.

use crate::param::Shard;
use merak_mpu::{Axis, DType};
use serde::{Deserialize, Serialize};

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
}

/// An elementwise function with its own gradient kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Activation {
    /// `x/2 (1 + tanh(√(2/π) (x + 0.044715 x³)))`.
    GeluTanh,
    /// `x/2 (1 + erf(x/√2))`.
    GeluErf,
    /// `x / (1 + e^-x)`.
    Silu,
    /// `max(x, 0)`.
    Relu,
    /// `tanh(x)`.
    Tanh,
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

/// Random zeroing with rescaling; the mask is a function of the run's seed, the step, the global sample
/// index (dimension 0), this node's key and the logical element index within the sample.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Dropout {
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
    pub dropout: Option<Dropout>,
}

/// Rotary position embedding, rotate-half convention.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Rope {
    /// Size of one head.
    pub head_dim: usize,
    /// Angle per position for each pair of elements; `2 * inv_freq.len()` elements of a head are rotated.
    pub inv_freq: Vec<f32>,
    /// Factor of the rotated elements, 1 for a plain turn.
    pub scale: f64,
    /// Turns the other way, which is the gradient.
    pub inverse: bool,
}

/// What a node computes. Operands and results are listed as `operands -> results`.
///
/// Composite operations stay whole, because fused kernels, placement rules and good gradients live there.
/// Gradient operations are operations like any other, so that a differentiated program is a graph too.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Op {
    /// `-> [len] i64`: the position of each element of a sequence, counted from `first` plus the run's position
    /// offset.
    Positions {
        /// Length of the sequence.
        len: usize,
        /// Number of the first position.
        first: usize,
    },

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
        /// A row that looking it up does not train (`padding_idx` of `torch.nn.Embedding`).
        padding: Option<usize>,
    },
    /// `ids [..] i64, dy [.., width] -> [rows, width]`.
    EmbeddingGrad {
        /// Rows of the table.
        rows: usize,
        /// The row whose gradient stays zero.
        padding: Option<usize>,
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

    /// `q [B, S, heads*D], k [B, S, kv_heads*D], v [B, S, kv_heads*D] -> out [B, S, heads*D], lse [B, heads, S]`.
    Attention(Attention),
    /// `dout, q, k, v, out, lse -> dq, dk, dv`.
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
    /// `x -> y`; its gradient is the same operation. The identity outside training.
    Dropout(Dropout),

    /// `logits [.., V], labels [..] i64 -> sum of token losses [] f64, lse [rows]`; label -100 does not count.
    CrossEntropy {
        /// Share of probability spread over all classes.
        label_smoothing: f64,
    },
    /// `logits, labels, lse, dloss [] f64 -> dlogits`.
    CrossEntropyGrad {
        /// Share of probability spread over all classes.
        label_smoothing: f64,
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
    /// `-> zeros`: the gradient of a value that nobody uses.
    Zeros {
        /// Shape of the result.
        shape: Vec<usize>,
        /// Element type of the result.
        dtype: DType,
    },

    /// `x -> x`; backward all-reduces the gradient. Opens a region whose work is split over the axis.
    CopyTo {
        /// The mesh axis.
        axis: Axis,
    },
    /// `x -> sum over the ranks of the axis`; backward passes the gradient on.
    AllReduce {
        /// The mesh axis.
        axis: Axis,
    },
    /// `x -> x` joined from the slices of all ranks; backward keeps the own slice.
    AllGather {
        /// The mesh axis.
        axis: Axis,
        /// How the result is cut.
        shard: Shard,
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
}

impl Op {
    /// The name in renderings and messages.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Positions { .. } => "positions",
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
            Self::Activation(kind) => match kind {
                Activation::GeluTanh => "gelu_tanh",
                Activation::GeluErf => "gelu",
                Activation::Silu => "silu",
                Activation::Relu => "relu",
                Activation::Tanh => "tanh",
            },
            Self::ActivationGrad(kind) => match kind {
                Activation::GeluTanh => "gelu_tanh_grad",
                Activation::GeluErf => "gelu_grad",
                Activation::Silu => "silu_grad",
                Activation::Relu => "relu_grad",
                Activation::Tanh => "tanh_grad",
            },
            Self::SiluMul => "silu_mul",
            Self::SiluMulGrad => "silu_mul_grad",
            Self::Softmax => "softmax",
            Self::SoftmaxGrad => "softmax_grad",
            Self::Dropout(_) => "dropout",
            Self::CrossEntropy { .. } => "cross_entropy",
            Self::CrossEntropyGrad { .. } => "cross_entropy_grad",
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
            Self::AllReduce { .. } => "all_reduce",
            Self::AllGather { .. } => "all_gather",
            Self::Scatter { .. } => "scatter",
        }
    }

    /// Whether the operation is a border between whole and sharded work, which the interpreter runs itself.
    pub fn is_region(&self) -> bool {
        matches!(
            self,
            Self::CopyTo { .. }
                | Self::AllReduce { .. }
                | Self::AllGather { .. }
                | Self::Scatter { .. }
        )
    }

    /// The mesh axis that this operation communicates over, forward.
    pub fn communicates(&self) -> Option<Axis> {
        match self {
            Self::AllReduce { axis } | Self::AllGather { axis, .. } => Some(*axis),
            _ => None,
        }
    }
}
