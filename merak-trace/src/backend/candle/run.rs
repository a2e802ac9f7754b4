//! One node at a time: which kernel computes which operation.

use super::{
    Candle, Pooled, Scalar,
    accumulate::Slots,
    elementwise::{inverse_root, mul},
};
use crate::{
    Call, Error, Op, Result, TensorType, Value,
    kernels::{self, Float, KernelError, Operand},
};
use half::bf16;
use merak_mpu::DType;

/// An element type that the kernels compute with.
pub(super) trait Number: Float + Pooled {
    /// Element type in which frozen parameters may be kept: a narrower one, or this one.
    type Narrow: Operand<Self> + Scalar;
}

impl Number for f32 {
    type Narrow = bf16;
}

impl Number for f64 {
    type Narrow = f64;
}

/// The results of a node.
pub(super) type Results = Result<Vec<Value>>;

/// Calls a method of a node in the element type that its kernel computes with.
macro_rules! in_float {
    ($node:ident in $dtype:expr, $method:ident($inputs:expr $(, $rest:expr)*)) => {
        match $dtype {
            DType::F32 => $node.$method::<f32>($inputs $(, $rest)*),
            DType::F64 => $node.$method::<f64>($inputs $(, $rest)*),
            _ => Err($node.unsupported(&$inputs)),
        }
    };
    ($node:ident, $method:ident($inputs:expr $(, $rest:expr)*)) => {
        in_float!($node in $node.ty(0).dtype, $method($inputs $(, $rest)*))
    };
}

/// Runs a node. Sums are added to the slots, where there are some, and are then no results.
#[expect(clippy::too_many_lines, reason = "an entry per operation")]
pub(super) fn run(
    backend: &Candle,
    call: Call<'_>,
    inputs: Vec<Value>,
    slots: Option<Slots<'_>>,
) -> Results {
    let node = Node { backend, call };
    match call.op {
        Op::Positions { len, first } => node.positions(*first, *len),
        Op::DocumentPositions { first } => node.document_positions(&inputs[0], *first),
        Op::SeenPositions { first } => node.seen_positions(&inputs[0], *first),
        Op::RelativeBuckets(spec) => node.relative_buckets(spec),
        Op::Identity | Op::ShareGrad { .. } | Op::CopyTo { .. } => Ok(inputs),
        Op::Reshape { .. } => node.reshape(&inputs[0]),
        Op::Transpose { perm } => node.transpose(&inputs[0], perm),
        Op::Cast { dtype } => node.cast(&inputs[0], *dtype),
        Op::Split { dim, .. } => node.split(&inputs[0], *dim),
        Op::Concat { dim } => node.concat(&inputs, *dim),
        Op::Zeros { .. } => node.blank(),
        Op::Linear { layout, bias } => in_float!(node, linear(&inputs, *layout, *bias)),
        Op::LinearGradInput { layout } => in_float!(node, linear_grad_input(&inputs, *layout)),
        Op::LinearGradWeight { layout } => {
            in_float!(node, linear_grad_weight(&inputs, *layout, slots))
        }
        Op::MatMul {
            transpose_a,
            transpose_b,
        } => in_float!(node, matmul(&inputs, *transpose_a, *transpose_b)),
        Op::LayerNorm { eps } => in_float!(node, layer_norm(&inputs, *eps)),
        Op::LayerNormGradInput => in_float!(node, layer_norm_grad_input(&inputs)),
        Op::LayerNormGradParams => in_float!(node, layer_norm_grad_params(&inputs, slots)),
        Op::RmsNorm { eps } => in_float!(node, rms_norm(&inputs, *eps)),
        Op::RmsNormGradInput => in_float!(node, rms_norm_grad_input(&inputs)),
        Op::RmsNormGradParams => in_float!(node, rms_norm_grad_params(&inputs, slots)),
        Op::Activation(kind) => in_float!(node, activation(&inputs, *kind)),
        Op::ActivationGrad(kind) => in_float!(node, activation_grad(&inputs, *kind)),
        Op::SiluMul => in_float!(node, binary(&inputs, kernels::silu_mul)),
        Op::SiluMulGrad => in_float!(node, silu_mul_grad(&inputs)),
        Op::Softmax => in_float!(node, softmax(&inputs)),
        Op::SoftmaxGrad => in_float!(node, softmax_grad(&inputs)),
        Op::InverseRoot => in_float!(node, unary(&inputs, inverse_root)),
        Op::Scale { factor } => in_float!(node, scale(&inputs, *factor)),
        Op::Add => in_float!(node, add(inputs)),
        Op::Mul => in_float!(node, binary(&inputs, mul)),
        Op::SumLeading { .. } => in_float!(node, sum_leading(&inputs, slots)),
        Op::Dropout(spec) => in_float!(node, dropout(inputs, spec)),
        Op::Rope(rope) => in_float!(node, rope(&inputs, rope)),
        Op::Attention(spec) => in_float!(node, attention(&inputs, spec)),
        Op::AttentionGrad(spec) => in_float!(node, attention_grad(&inputs, spec)),
        Op::JoinAttention => in_float!(node, join_attention(&inputs)),
        Op::Embedding { slice, .. } => in_float!(node, embedding(&inputs, *slice)),
        Op::EmbeddingGrad {
            rows,
            padding,
            slice,
        } => in_float!(
            node,
            embedding_grad(&inputs, *rows, (*padding, *slice), slots)
        ),
        // The loss is always f64, so the type of its operands decides.
        Op::CrossEntropy { label_smoothing } => {
            in_float!(node in inputs[0].ty().dtype, cross_entropy(&inputs, *label_smoothing))
        }
        Op::SumAll => in_float!(node in inputs[0].ty().dtype, sum_all(&inputs)),
        Op::CrossEntropyGrad {
            label_smoothing,
            slice,
        } => in_float!(node, cross_entropy_grad(inputs, *label_smoothing, *slice)),
        Op::VocabMax { slice } => in_float!(node, vocab_max(&inputs, *slice)),
        Op::VocabSums {
            label_smoothing,
            slice,
        } => in_float!(node, vocab_sums(&inputs, *label_smoothing, *slice)),
        Op::VocabLoss {
            label_smoothing,
            slice,
        } => {
            in_float!(node in inputs[0].ty().dtype, vocab_loss(&inputs, *label_smoothing, *slice))
        }
        Op::SumAllGrad => in_float!(node, sum_all_grad(&inputs)),
        // The interpreter runs these itself if the axis has more than one rank.
        Op::AllReduce { .. }
        | Op::AllGather { .. }
        | Op::Scatter { .. }
        | Op::ReduceScatter { .. }
        | Op::AllToAll { .. } => Err(node.unsupported(&inputs)),
    }
}

/// A node being computed.
pub(super) struct Node<'a> {
    pub(super) backend: &'a Candle,
    pub(super) call: Call<'a>,
}

impl Node<'_> {
    pub(super) fn unsupported(&self, inputs: &[Value]) -> Error {
        let types: Vec<_> = inputs.iter().map(|value| value.ty().to_string()).collect();
        Error::Unsupported {
            backend: "candle",
            op: self.call.op.name(),
            types: types.join(", "),
        }
    }

    pub(super) fn kernel_error(&self, source: KernelError) -> Error {
        Error::Kernel {
            node: self.call.name.to_owned(),
            source,
        }
    }

    pub(super) fn ty(&self, result: usize) -> &TensorType {
        &self.call.results[result]
    }

    pub(super) fn out<T: Number>(&self, result: usize) -> Vec<T> {
        self.backend.result(self.ty(result))
    }

    /// Wraps the results, in their order.
    pub(super) fn done<T: Number, const N: usize>(&self, results: [Vec<T>; N]) -> Results {
        results
            .into_iter()
            .zip(self.call.results)
            .map(|(data, ty)| self.backend.wrap(ty, data))
            .collect()
    }
}
