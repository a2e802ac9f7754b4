//! Result types of operations, and the checks of their operands.

mod attention;
mod checks;
mod loss;
mod moves;
mod products;

use self::checks::{
    Types, ensure, has_dim, has_ndim, is_f64_scalar, is_float, is_ids, is_vector_for, operands,
    rows_of, same,
};
use crate::{
    Op, TensorType,
    op::{DropoutSpec, RelativeBuckets},
};
use merak_mpu::DType;

/// The result types of `op` on operands of the given types.
#[expect(
    clippy::too_many_lines,
    reason = "a table with one entry per operation"
)]
pub(crate) fn infer(op: &Op, inputs: &[TensorType]) -> Types {
    match op {
        Op::Positions { len, .. } => source(TensorType::new([*len], DType::I64), inputs),
        Op::Zeros { shape, dtype } => source(TensorType::new(shape.clone(), *dtype), inputs),
        Op::RelativeBuckets(spec) => relative_buckets(spec, inputs),
        Op::SeenPositions { .. } | Op::DocumentPositions { .. } => seen(operands(inputs)?),
        Op::Linear { layout, bias } => products::linear(*layout, *bias, inputs),
        Op::LinearGradInput { layout } => products::linear_grad_input(*layout, operands(inputs)?),
        Op::LinearGradWeight { layout } => products::linear_grad_weight(*layout, operands(inputs)?),
        Op::MatMul {
            transpose_a,
            transpose_b,
        } => products::matmul(*transpose_a, *transpose_b, operands(inputs)?),
        Op::Embedding { padding, slice } => {
            products::embedding(*padding, *slice, operands(inputs)?)
        }
        Op::EmbeddingGrad {
            rows,
            padding,
            slice,
        } => products::embedding_grad(*rows, *padding, *slice, operands(inputs)?),
        Op::LayerNorm { .. } => layer_norm(operands(inputs)?),
        Op::LayerNormGradInput => {
            let [dy, x, w, _, _] = operands(inputs)?;
            norm_grad_input([dy, x, w])
        }
        Op::LayerNormGradParams => {
            let [dy, x, _, _] = operands(inputs)?;
            norm_grad_params([dy, x], 2)
        }
        Op::RmsNorm { .. } => rms_norm(operands(inputs)?),
        Op::RmsNormGradInput => {
            let [dy, x, w, _] = operands(inputs)?;
            norm_grad_input([dy, x, w])
        }
        Op::RmsNormGradParams => {
            let [dy, x, _] = operands(inputs)?;
            norm_grad_params([dy, x], 1)
        }
        Op::Attention(spec) => attention::attention(spec, inputs),
        Op::AttentionGrad(spec) => attention::attention_grad(spec, inputs),
        Op::JoinAttention => attention::join_attention(operands(inputs)?),
        Op::Rope(rope) => attention::rotated(rope, operands(inputs)?),
        Op::Activation(_) | Op::Softmax | Op::InverseRoot | Op::Scale { .. } => {
            float_map(operands(inputs)?)
        }
        Op::Dropout(spec) => dropout(spec, operands(inputs)?),
        Op::Identity | Op::ShareGrad { .. } | Op::CopyTo { .. } | Op::AllReduce { .. } => {
            let [x] = operands(inputs)?;
            Ok(vec![x.clone()])
        }
        Op::ActivationGrad(_) | Op::SoftmaxGrad | Op::SiluMul => float_pair(operands(inputs)?),
        Op::SiluMulGrad => silu_mul_grad(operands(inputs)?),
        Op::CrossEntropy { .. } => loss::cross_entropy(operands(inputs)?),
        Op::CrossEntropyGrad { .. } => loss::cross_entropy_grad(operands(inputs)?),
        Op::VocabMax { .. } => loss::vocab_max(operands(inputs)?),
        Op::VocabSums {
            label_smoothing, ..
        } => loss::vocab_sums(*label_smoothing, operands(inputs)?),
        Op::VocabLoss {
            label_smoothing, ..
        } => loss::vocab_loss(*label_smoothing, operands(inputs)?),
        Op::Add | Op::Mul => repeated(operands(inputs)?),
        Op::SumLeading { shape } => sum_leading(shape, operands(inputs)?),
        Op::SumAll => sum_all(operands(inputs)?),
        Op::SumAllGrad => {
            let [x, dy] = operands(inputs)?;
            is_f64_scalar(dy)?;
            Ok(vec![x.clone()])
        }
        Op::Cast { dtype } => {
            let [x] = operands(inputs)?;
            Ok(vec![TensorType::new(x.shape.clone(), *dtype)])
        }
        Op::Reshape { shape } => moves::reshape(shape, operands(inputs)?),
        Op::Transpose { perm } => moves::transpose(perm, operands(inputs)?),
        Op::Split { dim, sizes } => moves::split(*dim, sizes, operands(inputs)?),
        Op::Concat { dim } => moves::concat(*dim, inputs),
        Op::AllGather { shard, .. } => moves::all_gather(shard, operands(inputs)?),
        Op::Scatter { local, shard, .. } | Op::ReduceScatter { local, shard, .. } => {
            moves::scatter(*local, shard, operands(inputs)?)
        }
        Op::AllToAll { from, to, .. } => moves::all_to_all(from, to, operands(inputs)?),
    }
}

/// What a node without operands makes.
fn source(result: TensorType, inputs: &[TensorType]) -> Types {
    operands::<0>(inputs)?;
    Ok(vec![result])
}

fn relative_buckets(spec: &RelativeBuckets, inputs: &[TensorType]) -> Types {
    operands::<0>(inputs)?;
    ensure(spec.is_valid(), || {
        format!(
            "{} buckets cannot tell distances up to {} apart",
            spec.buckets, spec.max_distance
        )
    })?;
    Ok(vec![TensorType::new([spec.q_len, spec.k_len], DType::I64)])
}

fn seen([ids]: [&TensorType; 1]) -> Types {
    is_ids(ids)?;
    has_ndim(ids, 2)?;
    Ok(vec![ids.clone()])
}

fn layer_norm([x, w, b]: [&TensorType; 3]) -> Types {
    is_float(x)?;
    is_vector_for(w, x)?;
    is_vector_for(b, x)?;
    Ok(vec![x.clone(), rows_of(x), rows_of(x)])
}

fn rms_norm([x, w]: [&TensorType; 2]) -> Types {
    is_float(x)?;
    is_vector_for(w, x)?;
    Ok(vec![x.clone(), rows_of(x)])
}

fn norm_grad_input([dy, x, w]: [&TensorType; 3]) -> Types {
    same(dy, x)?;
    is_vector_for(w, x)?;
    Ok(vec![x.clone()])
}

/// The gradients of a norm's vectors.
fn norm_grad_params([dy, x]: [&TensorType; 2], num_vectors: usize) -> Types {
    same(dy, x)?;
    Ok(vec![x.with_shape([x.last_dim()]); num_vectors])
}

fn float_map([x]: [&TensorType; 1]) -> Types {
    is_float(x)?;
    Ok(vec![x.clone()])
}

fn dropout(spec: &DropoutSpec, [x]: [&TensorType; 1]) -> Types {
    is_float(x)?;
    // It numbers the samples.
    has_dim(x, 0)?;
    if let Some(slice) = spec.slice {
        has_dim(x, slice.dim)?;
        let fits = |dim: usize| dim == slice.dim || dim + 1 == slice.dim;
        ensure(spec.nested.is_none_or(|nested| fits(nested.dim)), || {
            format!(
                "a slice along dimension {} is cut once more there or along the one before it alone",
                slice.dim
            )
        })?;
    }
    Ok(vec![x.clone()])
}

fn float_pair([x, dy]: [&TensorType; 2]) -> Types {
    is_float(x)?;
    same(x, dy)?;
    Ok(vec![x.clone()])
}

fn silu_mul_grad([gate, up, dy]: [&TensorType; 3]) -> Types {
    same(gate, up)?;
    same(gate, dy)?;
    Ok(vec![gate.clone(); 2])
}

fn repeated([a, b]: [&TensorType; 2]) -> Types {
    ensure(a.dtype == b.dtype && a.shape.ends_with(&b.shape), || {
        format!("{b} does not repeat over {a}")
    })?;
    Ok(vec![a.clone()])
}

fn sum_leading(shape: &[usize], [x]: [&TensorType; 1]) -> Types {
    ensure(x.shape.ends_with(shape), || {
        format!("{shape:?} are not the last dimensions of {x}")
    })?;
    Ok(vec![x.with_shape(shape)])
}

fn sum_all([x]: [&TensorType; 1]) -> Types {
    is_float(x)?;
    Ok(vec![TensorType::scalar(DType::F64)])
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        op::{AxisSlice, JoinedGrad, WeightLayout},
        placement::Shard,
    };
    use merak_mpu::Axis;

    fn ty<const N: usize>(shape: [usize; N], dtype: DType) -> TensorType {
        TensorType::new(shape, dtype)
    }

    /// Why operations refuse their operands.
    fn reasons(cases: &[(Op, Vec<TensorType>)]) -> String {
        let reason = |(op, inputs): &(Op, Vec<TensorType>)| {
            let reason = infer(op, inputs).expect_err(op.name());
            format!("{}: {reason}", op.name())
        };
        cases.iter().map(reason).collect::<Vec<_>>().join("\n")
    }

    #[test]
    fn operands_of_other_element_types_than_kernels_take_are_refused() {
        let (f32s, ids) = (|| ty([2, 3], DType::F32), || ty([2, 3], DType::I64));
        let vector = |dtype| ty([3], dtype);
        let layer_norm = Op::LayerNorm { eps: 1e-5 };
        let layout = WeightLayout::OutIn;
        let loss = Op::CrossEntropy {
            label_smoothing: 0.0,
        };
        let cases = [
            (
                layer_norm.clone(),
                vec![ids(), vector(DType::I64), vector(DType::I64)],
            ),
            (
                layer_norm,
                vec![f32s(), vector(DType::F32), vector(DType::F64)],
            ),
            (Op::RmsNorm { eps: 1e-5 }, vec![f32s(), vector(DType::F64)]),
            (Op::SiluMul, vec![ids(), ids()]),
            (loss, vec![ty([2, 3, 5], DType::I64), ids()]),
            (
                Op::Linear { layout, bias: true },
                vec![f32s(), ty([4, 3], DType::F32), ty([4], DType::F64)],
            ),
            (
                Op::LinearGradInput { layout },
                vec![f32s(), ty([3, 4], DType::F64)],
            ),
        ];
        insta::assert_snapshot!(reasons(&cases), @"
        layer_norm: i64[2, 3] is not of a float type
        layer_norm: expected f32[3], found f64[3]
        rms_norm: expected f32[3], found f64[3]
        silu_mul: i64[2, 3] is not of a float type
        cross_entropy: i64[2, 3, 5] is not of a float type
        linear: expected f32[4], found f64[4]
        linear_grad_input: f32[2, 3] cannot be multiplied by f64[3, 4]
        ");
    }

    #[test]
    fn norms_may_be_kept_in_f32_beside_16_bit_rows() {
        let (narrow, wide) = (DType::BF16, DType::F32);
        for (rows, weight) in [(narrow, wide), (wide, narrow), (narrow, narrow)] {
            let (x, w) = (ty([2, 3], rows), ty([3], weight));
            let normed = infer(&Op::RmsNorm { eps: 1e-5 }, &[x.clone(), w.clone()]);
            assert_eq!(normed.unwrap(), [x.clone(), ty([2], wide)]);
            let normed = infer(&Op::LayerNorm { eps: 1e-5 }, &[x.clone(), w.clone(), w]);
            assert_eq!(normed.unwrap()[0], x);
        }
    }

    #[test]
    fn scalars_have_no_rows_features_or_samples() {
        let scalar = TensorType::scalar;
        let layout = WeightLayout::OutIn;
        let dropout = DropoutSpec {
            p: 0.5,
            key: 1,
            slice: None,
            nested: None,
        };
        let lookup = Op::EmbeddingGrad {
            rows: 4,
            padding: None,
            slice: None,
        };
        let float = || scalar(DType::F32);
        let cases = [
            (
                Op::LinearGradInput { layout },
                vec![float(), ty([4, 3], DType::F32)],
            ),
            (Op::LinearGradWeight { layout }, vec![float(), float()]),
            (lookup, vec![scalar(DType::I64), float()]),
            (Op::Dropout(dropout), vec![float()]),
        ];
        insta::assert_snapshot!(reasons(&cases), @"
        linear_grad_input: f32[] cannot be multiplied by f32[4, 3]
        linear_grad_weight: f32[] has no dimension 0
        embedding_grad: f32[] has no dimension 0
        dropout: f32[] has no dimension 0
        ");
    }

    #[test]
    fn slices_along_other_dimensions_and_sizes_beyond_all_are_refused() {
        let along = |dim| Some(AxisSlice::new(Axis::Tensor, dim, 8));
        let dropout = |slice, nested| {
            Op::Dropout(DropoutSpec {
                p: 0.5,
                key: 1,
                slice,
                nested,
            })
        };
        let x = || vec![ty([2, 4], DType::F32)];
        let most = usize::MAX;
        let sizes = vec![most, 9];
        let shard = Shard::new(1, sizes.clone());
        let (axis, grad) = (Axis::Tensor, JoinedGrad::default());
        let cases = [
            (dropout(along(2), None), x()),
            (dropout(along(1), along(2)), x()),
            (
                Op::Reshape {
                    shape: vec![most, most],
                },
                x(),
            ),
            (Op::Split { dim: 1, sizes }, x()),
            (Op::AllGather { axis, shard, grad }, x()),
        ];
        insta::assert_snapshot!(reasons(&cases), @"
        dropout: f32[2, 4] has no dimension 2
        dropout: a slice along dimension 1 is cut once more there or along the one before it alone
        reshape: f32[2, 4] has not as many elements as [18446744073709551615, 18446744073709551615]
        split: pieces [18446744073709551615, 9] do not make up dimension 1 of f32[2, 4]
        all_gather: no dimension has parts of [18446744073709551615, 9]
        ");
    }
}
