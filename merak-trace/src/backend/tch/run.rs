//! One node at a time: which kernels of ATen compute which operation.

use super::{
    Tch, at, elementwise, loss, norm,
    storage::{Handle, int, ints, kind, kind_of, shape_of, steal, tensor},
};
use crate::{Call, Error, Op, Result, TensorType, Value};
use merak_mpu::DType;
use tch::{Kind, TchError, Tensor};

/// The result of a kernel.
pub(super) type Outcome<T = Tensor> = Result<T, TchError>;

/// Runs a node.
pub(super) fn run(backend: &Tch, call: Call<'_>, inputs: Vec<Value>) -> Result<Vec<Value>> {
    let node = Node { backend, call };
    if call.results.iter().any(|ty| kind(ty.dtype).is_none()) {
        return Err(node.unsupported(&inputs));
    }
    match call.op {
        Op::Identity | Op::CopyTo { .. } => return Ok(inputs),
        Op::Dropout(_) if !call.context.training => return Ok(inputs),
        Op::Cast { dtype } if inputs[0].ty().dtype == *dtype => return Ok(inputs),
        Op::Add => return node.add(inputs),
        Op::Reshape { .. } | Op::Transpose { .. } | Op::Split { .. } => return node.views(&inputs),
        _ => {}
    }
    let results = node.compute(&inputs)?;
    drop(inputs);
    let wrapped = results.into_iter().zip(call.results);
    wrapped
        .map(|(tensor, ty)| {
            let shaped = tensor.f_reshape(shape_of(ty)).map_err(at(call.name))?;
            Ok(backend.wrap(ty, shaped))
        })
        .collect()
}

/// A node being computed.
#[derive(Clone, Copy)]
pub(super) struct Node<'a> {
    pub(super) backend: &'a Tch,
    pub(super) call: Call<'a>,
}

impl Node<'_> {
    pub(super) fn unsupported(&self, inputs: &[Value]) -> Error {
        let types: Vec<_> = inputs.iter().map(|value| value.ty().to_string()).collect();
        Error::Unsupported {
            backend: "tch",
            op: self.call.op.name(),
            types: types.join(", "),
        }
    }

    pub(super) fn ty(&self, result: usize) -> &TensorType {
        &self.call.results[result]
    }

    /// Names the node in an error of libtorch.
    pub(super) fn at<T>(&self, outcome: Outcome<T>) -> Result<T> {
        outcome.map_err(at(self.call.name))
    }

    /// The results of an operation that allocates them; nothing else shares their memory.
    pub(super) fn compute(&self, inputs: &[Value]) -> Result<Vec<Tensor>> {
        let x = |i: usize| tensor(&inputs[i]);
        let one = |outcome: Outcome| Ok(vec![self.at(outcome)?]);
        match self.call.op {
            Op::Positions { .. } | Op::SeenPositions { .. } | Op::RelativeBuckets(_) => {
                one(self.numbers(inputs)?)
            }
            Op::Linear { .. }
            | Op::LinearGradInput { .. }
            | Op::LinearGradWeight { .. }
            | Op::MatMul { .. } => one(self.product(inputs)?),
            Op::Zeros { .. } => {
                let ty = self.ty(0);
                let options = (kind_of(ty)?, self.backend.device);
                one(Tensor::f_zeros(shape_of(ty), options))
            }
            Op::Embedding { .. } => one(Tensor::f_embedding(x(1)?, x(0)?, -1, false, false)),
            Op::EmbeddingGrad { rows, padding } => {
                // No row has number -1.
                let padding = padding.map_or(-1, int);
                let (dy, ids, rows) = (x(1)?, x(0)?, int(*rows));
                one(Tensor::f_embedding_dense_backward(
                    dy, ids, rows, padding, false,
                ))
            }
            Op::LayerNorm { eps } => self.layer_norm([x(0)?, x(1)?, x(2)?], *eps),
            Op::LayerNormGradInput => {
                self.layer_norm_grad_input([x(0)?, x(1)?, x(2)?, x(3)?, x(4)?])
            }
            Op::LayerNormGradParams => self.layer_norm_grad_params([x(0)?, x(1)?, x(2)?, x(3)?]),
            Op::RmsNorm { eps } => self.at(norm::rms_norm([x(0)?, x(1)?], *eps)),
            Op::RmsNormGradInput => one(norm::rms_norm_grad_input([x(0)?, x(1)?, x(2)?, x(3)?])),
            Op::RmsNormGradParams => one(norm::rms_norm_grad_params([x(0)?, x(1)?, x(2)?])),
            Op::Attention(spec) => self.attention(spec, inputs),
            Op::AttentionGrad(spec) => self.attention_grad(spec, inputs),
            Op::Rope(spec) => one(elementwise::rope(spec, x(0)?, x(1)?)),
            Op::Activation(kind) => one(elementwise::activation(*kind, x(0)?)),
            Op::ActivationGrad(kind) => one(elementwise::activation_grad(*kind, x(0)?, x(1)?)),
            Op::SiluMul => {
                let up = x(1)?;
                one(x(0)?.f_silu().and_then(|gate| gate.f_mul(up)))
            }
            Op::SiluMulGrad => self.at(elementwise::silu_mul_grad([x(0)?, x(1)?, x(2)?])),
            Op::InverseRoot => one(x(0)?.f_rsqrt()),
            Op::Softmax => one(x(0)?.f_softmax(-1, None)),
            Op::SoftmaxGrad => {
                let (y, dy) = (x(0)?, x(1)?);
                one(Tensor::f_internal_softmax_backward_data(
                    dy,
                    y,
                    -1,
                    y.kind(),
                ))
            }
            Op::Dropout(spec) => Ok(vec![self.dropout(spec, x(0)?)?]),
            Op::CrossEntropy { label_smoothing } => {
                self.at(loss::cross_entropy(x(0)?, x(1)?, *label_smoothing))
            }
            Op::CrossEntropyGrad { label_smoothing } => one(loss::cross_entropy_grad(
                [x(0)?, x(1)?, x(3)?],
                *label_smoothing,
            )),
            Op::Mul => one(x(0)?.f_mul(x(1)?)),
            Op::Scale { factor } => one(x(0)?.f_mul_scalar(*factor)),
            Op::SumLeading { shape } => one(sum_leading(x(0)?, shape)),
            Op::SumAll => one(x(0)?.f_sum(Kind::Double)),
            Op::SumAllGrad => {
                let (x, dy) = (x(0)?, x(1)?);
                one(x.f_empty_like().and_then(|mut dx| {
                    dx.f_copy_(dy)?;
                    Ok(dx)
                }))
            }
            Op::Cast { .. } => one(x(0)?.f_to_kind(kind_of(self.ty(0))?)),
            Op::Concat { dim } => {
                let pieces = inputs.iter().map(tensor).collect::<Result<Vec<_>>>()?;
                one(Tensor::f_cat(&pieces, int(*dim)))
            }
            _ => Err(self.unsupported(inputs)),
        }
    }

    /// Positions and their buckets.
    fn numbers(&self, inputs: &[Value]) -> Result<Outcome> {
        let device = self.backend.device;
        Ok(match self.call.op {
            Op::Positions { len, first } => {
                let (start, end) = (int(*first), int(first + len));
                Tensor::f_arange_start(start, end, (Kind::Int64, device))
            }
            Op::SeenPositions { first } => {
                let seen = self.at(tensor(&inputs[0])?.f_ne(0))?;
                let numbers = self.at(seen.f_cumsum(1, Kind::Int64))?;
                let numbers = self.at(numbers.f_mul(&seen))?;
                numbers.f_add_scalar(int(*first) - 1)
            }
            Op::RelativeBuckets(spec) => Tensor::from_slice(&spec.indices()).f_to_device(device),
            _ => return Err(self.unsupported(inputs)),
        })
    }

    /// Operations whose results are views of their operand.
    fn views(&self, inputs: &[Value]) -> Result<Vec<Value>> {
        let handle = Handle::of(&inputs[0])?;
        let x = tensor(&inputs[0])?;
        let views = match self.call.op {
            Op::Reshape { shape } => {
                let shaped = self.at(x.f_reshape(ints(shape)))?;
                if shaped.data_ptr() != x.data_ptr() {
                    return Ok(vec![self.backend.wrap(self.ty(0), shaped)]);
                }
                vec![shaped]
            }
            Op::Transpose { perm } => vec![self.at(x.f_permute(ints(perm)))?],
            Op::Split { dim, sizes } => self.at(x.f_split_with_sizes(ints(sizes), int(*dim)))?,
            _ => return Err(self.unsupported(inputs)),
        };
        let views = views.into_iter().zip(self.call.results);
        Ok(views
            .map(|(view, ty)| handle.view(view).into_value(ty.clone()))
            .collect())
    }

    /// Adds in place where the first operand may be overwritten.
    fn add(&self, mut inputs: Vec<Value>) -> Result<Vec<Value>> {
        let (b, a) = (inputs.swap_remove(1), inputs.swap_remove(0));
        let sum = match steal(a) {
            Ok(mut a) => self.at(a.f_add_(tensor(&b)?))?,
            Err(a) => self.at(tensor(&a)?.f_add(tensor(&b)?))?,
        };
        Ok(vec![self.backend.wrap(self.ty(0), sum)])
    }
}

/// `x` summed over its leading dimensions until `shape` is left.
pub(super) fn sum_leading(x: &Tensor, shape: &[usize]) -> Outcome {
    let len = int(shape.iter().product());
    let rows = int(x.numel()) / len.max(1);
    x.f_reshape([rows, len])?
        .f_sum_dim_intlist(0_i64, false, None)
}

/// Whether sums of an element type are kept in a wider one.
pub(super) fn is_half(kind: Kind) -> bool {
    matches!(kind, Kind::BFloat16 | Kind::Half)
}

/// The element type in which statistics of a tensor are kept.
pub(super) fn stat_kind(kind: Kind) -> Kind {
    if is_half(kind) { Kind::Float } else { kind }
}

/// Whether gradients of two types are added without a conversion.
pub(super) fn same_kind(a: &Tensor, dtype: DType) -> bool {
    kind(dtype) == Some(a.kind())
}
