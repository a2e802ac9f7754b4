//! One node at a time: which kernel computes which operation.

use super::{Candle, Pooled, Scalar, elements, moves::seen_positions};
use crate::{
    Call, Error, Op, Result, TensorType, Value,
    kernels::{Float, KernelError, Operand},
};
use half::bf16;
use merak_mpu::DType;

/// An element type that the kernels compute with.
pub(super) trait Number: Float + Pooled {
    /// What values of frozen parameters may be kept in; itself where there is nothing narrower.
    type Narrow: Operand<Self> + Scalar;
}

impl Number for f32 {
    type Narrow = bf16;
}

impl Number for f64 {
    type Narrow = f64;
}

/// Runs a node.
pub(super) fn run(backend: &Candle, call: Call<'_>, inputs: Vec<Value>) -> Result<Vec<Value>> {
    let node = Node { backend, call };
    match call.op {
        Op::Positions { len, first } => {
            let start = *first;
            let positions = (start..start + len)
                .map(|i| i64::try_from(i).expect("a position fits an i64"))
                .collect();
            return Ok(vec![backend.wrap_once::<i64>(&call.results[0], positions)?]);
        }
        Op::SeenPositions { first } => {
            let positions = seen_positions(&elements::<i64>(&inputs[0])?, &call, *first);
            return Ok(vec![backend.wrap_once::<i64>(&call.results[0], positions)?]);
        }
        Op::RelativeBuckets(spec) => {
            let mut indices = backend.result(&call.results[0]);
            spec.write_indices(&mut indices);
            return Ok(vec![backend.wrap::<i64>(&call.results[0], indices)?]);
        }
        Op::Identity | Op::CopyTo { .. } => return Ok(inputs),
        Op::Reshape { .. } => return node.reshape(&inputs[0]),
        Op::Transpose { perm } => return node.transpose(&inputs[0], perm),
        Op::Cast { dtype } => return node.cast(&inputs[0], *dtype),
        Op::AllReduce { .. } | Op::AllGather { .. } | Op::Scatter { .. } => {
            return Err(node.unsupported(&inputs));
        }
        _ => {}
    }
    let float = match call.op {
        // The loss is always f64; its operands decide.
        Op::CrossEntropy { .. } | Op::SumAll => inputs[0].ty().dtype,
        _ => call.results[0].dtype,
    };
    match float {
        DType::F32 => node.run::<f32>(inputs),
        DType::F64 => node.run::<f64>(inputs),
        DType::I64 => node.move_data::<i64>(
            &inputs,
            |ty| vec![0; ty.numel()],
            |ty, data| backend.wrap_once(ty, data),
        ),
        DType::BF16 | DType::F16 | DType::U32 | DType::U8 => Err(node.unsupported(&inputs)),
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

    pub(super) fn zeros<T: Number>(&self, result: usize) -> Vec<T> {
        let mut zeros = self.out::<T>(result);
        zeros.fill(T::ZERO);
        zeros
    }

    /// Wraps the results, in their order.
    pub(super) fn done<T: Number, const N: usize>(
        &self,
        results: [Vec<T>; N],
    ) -> Result<Vec<Value>> {
        results
            .into_iter()
            .zip(self.call.results)
            .map(|(data, ty)| self.backend.wrap(ty, data))
            .collect()
    }

    fn run<T: Number>(&self, inputs: Vec<Value>) -> Result<Vec<Value>> {
        match self.call.op {
            Op::Zeros { .. } => self.done([self.zeros::<T>(0)]),
            Op::Linear { .. }
            | Op::LinearGradInput { .. }
            | Op::LinearGradWeight { .. }
            | Op::MatMul { .. } => self.product::<T>(&inputs),
            Op::LayerNorm { .. }
            | Op::LayerNormGradInput
            | Op::RmsNorm { .. }
            | Op::RmsNormGradInput => self.norm::<T>(&inputs),
            Op::Activation(_)
            | Op::ActivationGrad(_)
            | Op::SiluMul
            | Op::SiluMulGrad
            | Op::Softmax
            | Op::SoftmaxGrad
            | Op::Mul
            | Op::InverseRoot
            | Op::Scale { .. } => self.elementwise::<T>(&inputs),
            Op::Add => self.add::<T>(inputs),
            Op::Dropout(spec) => self.dropout::<T>(spec, inputs),
            Op::Rope(rope) => self.rope::<T>(rope, &inputs),
            Op::Attention(spec) => self.attention::<T>(spec, &inputs),
            Op::AttentionGrad(spec) => self.attention_grad::<T>(spec, &inputs),
            Op::Embedding { .. } => self.embedding::<T>(&inputs),
            Op::CrossEntropy { label_smoothing } => {
                self.cross_entropy::<T>(*label_smoothing, &inputs)
            }
            Op::CrossEntropyGrad { label_smoothing } => {
                self.cross_entropy_grad::<T>(*label_smoothing, inputs)
            }
            Op::SumAll => self.sum_all::<T>(&inputs[0]),
            Op::SumAllGrad => {
                let dy = <T as Float>::from_f64(elements::<f64>(&inputs[1])?[0]);
                let mut dx = self.out::<T>(0);
                dx.fill(dy);
                self.done([dx])
            }
            Op::LayerNormGradParams
            | Op::RmsNormGradParams
            | Op::SumLeading { .. }
            | Op::EmbeddingGrad { .. } => self.sums::<T>(&inputs),
            Op::Split { .. } | Op::Concat { .. } => self.move_data::<T>(
                &inputs,
                |ty| self.backend.result(ty),
                |ty, data| self.backend.wrap(ty, data),
            ),
            Op::Positions { .. }
            | Op::SeenPositions { .. }
            | Op::RelativeBuckets(_)
            | Op::Identity
            | Op::Cast { .. }
            | Op::Reshape { .. }
            | Op::Transpose { .. }
            | Op::CopyTo { .. }
            | Op::AllReduce { .. }
            | Op::AllGather { .. }
            | Op::Scatter { .. } => Err(self.unsupported(&inputs)),
        }
    }
}
