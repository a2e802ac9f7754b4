//! One node at a time: which kernels of ATen compute which operation.

use super::{
    Tch,
    accumulate::{Sum, rows_by_number},
    at, elementwise, loss, norm, products,
    storage::{Handle, int, ints, kind, kind_of, shape_of, steal, tensor},
};
use crate::{Call, Error, Op, Result, TensorType, Value};
use merak_mpu::DType;
use tch::{Kind, TchError, Tensor};

/// The result of a kernel.
pub(super) type Outcome<T = Tensor> = Result<T, TchError>;

/// Runs a node. Where there is a sum that its kernel can add to, it has no results.
#[expect(
    clippy::too_many_lines,
    reason = "a table with one entry per operation"
)]
pub(super) fn run(
    backend: &Tch,
    call: Call<'_>,
    inputs: Vec<Value>,
    sum: Option<Sum<'_>>,
) -> Result<Vec<Value>> {
    let node = Node { backend, call };
    if call.results.iter().any(|ty| kind(ty.dtype).is_none()) {
        return Err(node.unsupported(&inputs));
    }
    let x = |i: usize| tensor(&inputs[i]);
    let one = |outcome: Outcome| Ok(vec![node.at(outcome)?]);
    let device = backend.device;
    // Arms that return give results that share memory with operands; other results are fresh.
    let results: Result<Vec<Tensor>> = match call.op {
        Op::Identity | Op::ShareGrad { .. } | Op::CopyTo { .. } => return Ok(inputs),
        Op::Dropout(_) if !call.context.training => return Ok(inputs),
        Op::Cast { dtype } if inputs[0].ty().dtype == *dtype => return Ok(inputs),
        Op::Add => return node.add(inputs),
        Op::Reshape { shape } => return node.reshape(&inputs[0], shape),
        Op::Transpose { perm } => {
            let view = x(0)?.f_permute(ints(perm));
            return node.views(&inputs[0], view.map(|view| vec![view]));
        }
        Op::Split { dim, sizes } => {
            let views = x(0)?.f_split_with_sizes(ints(sizes), int(*dim));
            return node.views(&inputs[0], views);
        }
        Op::Positions { len, first } => {
            let (start, end) = (int(*first), int(first + len));
            one(Tensor::f_arange_start(start, end, (Kind::Int64, device)))
        }
        Op::DocumentPositions { first } => one(document_positions(x(0)?, *first)),
        Op::SeenPositions { first } => one(seen_positions(x(0)?, *first)),
        Op::RelativeBuckets(spec) => one(Tensor::from_slice(&spec.indices()).f_to_device(device)),
        Op::Linear { layout, bias } => {
            let bias = if *bias { Some(x(2)?) } else { None };
            one(products::linear(*layout, x(0)?, x(1)?, bias))
        }
        Op::LinearGradInput { layout } => {
            one(products::linear(layout.transposed(), x(0)?, x(1)?, None))
        }
        Op::LinearGradWeight { layout } => {
            let (a, b) = node.at(products::weight_factors(*layout, x(0)?, x(1)?))?;
            match sum {
                Some(sum) if node.add_product(&a, &b, sum)? => return Ok(Vec::new()),
                _ => one(a.f_mm(&b)),
            }
        }
        Op::MatMul {
            transpose_a,
            transpose_b,
        } => one(products::matmul(
            [x(0)?, x(1)?],
            [*transpose_a, *transpose_b],
        )),
        Op::Zeros { .. } => {
            let ty = node.ty(0);
            one(Tensor::f_zeros(shape_of(ty), (kind_of(ty)?, device)))
        }
        Op::Embedding { slice: None, .. } => {
            let rows = Tensor::f_embedding(x(1)?, x(0)?, -1, false, false);
            if rows.is_err() && backend.is_cpu() {
                node.check_ids(x(0)?, inputs[1].ty().shape[0])?;
            }
            one(rows)
        }
        Op::Embedding {
            slice: Some(slice), ..
        } => Ok(vec![node.vocab_embedding(&inputs, *slice)?]),
        Op::EmbeddingGrad {
            rows,
            padding,
            slice: Some(slice),
        } => Ok(vec![
            node.vocab_embedding_grad(&inputs, *rows, *padding, *slice)?,
        ]),
        Op::EmbeddingGrad {
            rows,
            padding,
            slice: None,
        } => {
            let (dy, ids) = (x(1)?, x(0)?);
            if let Some(sum) = sum
                && padding.is_none()
            {
                node.add_rows(ids, dy, sum)?;
                return Ok(Vec::new());
            }
            // No row has number -1.
            one(rows_by_number(dy, ids, int(*rows), padding.map_or(-1, int)))
        }
        Op::LayerNorm { eps } => node.layer_norm([x(0)?, x(1)?, x(2)?], *eps),
        Op::LayerNormGradInput => node.layer_norm_grad_input([x(0)?, x(1)?, x(2)?, x(3)?, x(4)?]),
        Op::LayerNormGradParams => node.layer_norm_grad_params([x(0)?, x(1)?, x(2)?, x(3)?]),
        Op::RmsNorm { eps } => node.at(norm::rms_norm([x(0)?, x(1)?], *eps)),
        Op::RmsNormGradInput => one(norm::rms_norm_grad_input([x(0)?, x(1)?, x(2)?, x(3)?])),
        Op::RmsNormGradParams => one(norm::rms_norm_grad_params([x(0)?, x(1)?, x(2)?])),
        Op::Attention(spec) => node.attention(spec, &inputs),
        Op::AttentionGrad(spec) => node.attention_grad(spec, &inputs),
        Op::JoinAttention => node.join_attention(&inputs),
        Op::Rope(spec) => one(elementwise::rope(spec, x(0)?, x(1)?)),
        Op::Activation(kind) => one(elementwise::activation(*kind, x(0)?)),
        Op::ActivationGrad(kind) => one(elementwise::activation_grad(*kind, x(0)?, x(1)?)),
        Op::SiluMul => one(elementwise::silu_mul(x(0)?, x(1)?)),
        Op::SiluMulGrad => node.at(elementwise::silu_mul_grad([x(0)?, x(1)?, x(2)?])),
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
        Op::Dropout(spec) => Ok(vec![node.dropout(spec, x(0)?)?]),
        Op::CrossEntropy { label_smoothing } => {
            let loss = loss::cross_entropy(x(0)?, x(1)?, *label_smoothing);
            if loss.is_err() && backend.is_cpu() {
                node.check_labels(x(1)?, inputs[0].ty().last_dim())?;
            }
            node.at(loss)
        }
        Op::CrossEntropyGrad {
            label_smoothing,
            slice: Some(slice),
        } => Ok(vec![node.vocab_loss_grad(
            &inputs,
            *label_smoothing,
            *slice,
        )?]),
        Op::VocabMax { slice } => Ok(vec![node.vocab_max(&inputs, *slice)?]),
        Op::VocabSums {
            label_smoothing,
            slice,
        } => Ok(vec![node.vocab_sums(&inputs, *label_smoothing, *slice)?]),
        Op::VocabLoss {
            label_smoothing,
            slice,
        } => node.vocab_loss(&inputs, *label_smoothing, *slice),
        Op::CrossEntropyGrad {
            label_smoothing,
            slice: None,
        } => {
            let operands = [x(0)?, x(1)?, x(3)?];
            one(loss::cross_entropy_grad(operands, *label_smoothing))
        }
        Op::Mul => one(x(0)?.f_mul(x(1)?)),
        Op::Scale { factor } => one(x(0)?.f_mul_scalar(*factor)),
        Op::SumLeading { shape } => one(sum_leading(x(0)?, shape)),
        Op::SumAll => one(x(0)?.f_sum(Kind::Double)),
        Op::SumAllGrad => one(filled_like(x(0)?, x(1)?)),
        Op::Cast { .. } => one(x(0)?.f_to_kind(kind_of(node.ty(0))?)),
        Op::Concat { dim } => {
            let pieces = inputs.iter().map(tensor).collect::<Result<Vec<_>>>()?;
            one(Tensor::f_cat(&pieces, int(*dim)))
        }
        // The interpreter runs these itself if the axis has more than one rank.
        Op::AllReduce { .. }
        | Op::AllGather { .. }
        | Op::Scatter { .. }
        | Op::ReduceScatter { .. }
        | Op::AllToAll { .. } => {
            return Err(node.unsupported(&inputs));
        }
    };
    let results = results?;
    drop(inputs);
    let wrapped = results.into_iter().zip(call.results);
    wrapped
        .map(|(tensor, ty)| {
            let shaped = node.at(tensor.f_reshape(shape_of(ty)))?;
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

    /// A view of the operand where its strides allow the shape, else a copy.
    fn reshape(&self, input: &Value, shape: &[usize]) -> Result<Vec<Value>> {
        let x = tensor(input)?;
        let shaped = self.at(x.f_reshape(ints(shape)))?;
        if shaped.data_ptr() == x.data_ptr() {
            self.views(input, Ok(vec![shaped]))
        } else {
            Ok(vec![self.backend.wrap(self.ty(0), shaped)])
        }
    }

    /// Results that are views of the operand.
    fn views(&self, input: &Value, views: Outcome<Vec<Tensor>>) -> Result<Vec<Value>> {
        let handle = Handle::of(input)?;
        let views = self.at(views)?.into_iter().zip(self.call.results);
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

/// The number of each position among those that the mask shows, from `first` on.
fn seen_positions(mask: &Tensor, first: usize) -> Outcome {
    let seen = mask.f_ne(0)?;
    let numbers = seen.f_cumsum(1, Kind::Int64)?.f_mul(&seen)?;
    numbers.f_add_scalar(int(first) - 1)
}

/// 1 where a position of `[B, S]` ids starts another document than the first: a run of equal ids.
fn document_starts(ids: &Tensor) -> Outcome {
    let starts = ids.f_ne_tensor(&ids.f_roll(1, 1)?)?;
    let mut first = starts.f_narrow(1, 0, ids.size()[1].min(1))?;
    let _ = first.f_fill_(0_i64)?;
    starts.f_to_kind(Kind::Int64)
}

/// The number of each position's document, from 0 on.
pub(super) fn document_numbers(ids: &Tensor) -> Outcome {
    document_starts(ids)?.f_cumsum(1, Kind::Int64)
}

/// The number of each position in its document, from `first` on.
fn document_positions(ids: &Tensor, first: usize) -> Outcome {
    let positions = Tensor::f_arange(ids.size()[1], (Kind::Int64, ids.device()))?;
    let (starts, _) = document_starts(ids)?.f_mul(&positions)?.f_cummax(1)?;
    positions.f_sub(&starts)?.f_add_scalar(int(first))
}

/// A tensor of `x`'s shape whose elements are all `value`.
fn filled_like(x: &Tensor, value: &Tensor) -> Outcome {
    let mut filled = x.f_empty_like()?;
    filled.f_copy_(value)?;
    Ok(filled)
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
