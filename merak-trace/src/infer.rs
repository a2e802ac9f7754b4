//! Result types of operations, and the checks of their operands.

use crate::{
    Op, TensorType,
    op::{
        Attention, AttentionOptions, AxisSlice, DropoutSpec, RelativeBuckets, Rope, WeightLayout,
    },
    placement::Shard,
};
use merak_mpu::DType;

/// Why operands do not fit an operation.
pub(crate) type Reason = String;
type Types = Result<Vec<TensorType>, Reason>;

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
        Op::Linear { layout, bias } => linear(*layout, *bias, inputs),
        Op::LinearGradInput { layout } => linear_grad_input(*layout, operands(inputs)?),
        Op::LinearGradWeight { layout } => linear_grad_weight(*layout, operands(inputs)?),
        Op::MatMul {
            transpose_a,
            transpose_b,
        } => matmul(*transpose_a, *transpose_b, operands(inputs)?),
        Op::Embedding { padding, slice } => embedding(*padding, *slice, operands(inputs)?),
        Op::EmbeddingGrad {
            rows,
            padding,
            slice,
        } => embedding_grad(*rows, *padding, *slice, operands(inputs)?),
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
        Op::Attention(spec) => {
            attention_options(spec, inputs, [0, 1], 3)?;
            attention(spec, operands(&inputs[..inputs.len().min(3)])?)
        }
        Op::AttentionGrad(spec) => attention_grad(spec, inputs),
        Op::JoinAttention => join_attention(operands(inputs)?),
        Op::Rope(rope) => rotated(rope, operands(inputs)?),
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
        Op::CrossEntropy { .. } => cross_entropy(operands(inputs)?),
        Op::CrossEntropyGrad { .. } => cross_entropy_grad(operands(inputs)?),
        Op::VocabMax { .. } => vocab_max(operands(inputs)?),
        Op::VocabSums {
            label_smoothing, ..
        } => vocab_sums(*label_smoothing, operands(inputs)?),
        Op::VocabLoss {
            label_smoothing, ..
        } => vocab_loss(*label_smoothing, operands(inputs)?),
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
        Op::Reshape { shape } => reshape(shape, operands(inputs)?),
        Op::Transpose { perm } => transpose(perm, operands(inputs)?),
        Op::Split { dim, sizes } => split(*dim, sizes, operands(inputs)?),
        Op::Concat { dim } => concat(*dim, inputs),
        Op::AllGather { shard, .. } => all_gather(shard, operands(inputs)?),
        Op::Scatter { local, shard, .. } | Op::ReduceScatter { local, shard, .. } => {
            scatter(*local, shard, operands(inputs)?)
        }
        Op::AllToAll { from, to, .. } => all_to_all(from, to, operands(inputs)?),
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

fn linear_grad_input(layout: WeightLayout, [dy, w]: [&TensorType; 2]) -> Types {
    can_multiply(dy, w)?;
    matches_dim(dy.last_dim(), w, layout.out_dim())?;
    Ok(vec![dy.with_dim(dy.ndim() - 1, w.shape[layout.in_dim()])])
}

fn linear_grad_weight(layout: WeightLayout, [x, dy]: [&TensorType; 2]) -> Types {
    has_dim(x, 0)?;
    has_dim(dy, 0)?;
    ensure(x.rows() == dy.rows() && x.dtype == dy.dtype, || {
        format!("{x} and {dy} have different rows or element types")
    })?;
    let mut shape = vec![0; 2];
    shape[layout.in_dim()] = x.last_dim();
    shape[layout.out_dim()] = dy.last_dim();
    Ok(vec![x.with_shape(shape)])
}

fn embedding(
    padding: Option<usize>,
    slice: Option<AxisSlice>,
    [ids, table]: [&TensorType; 2],
) -> Types {
    is_ids(ids)?;
    has_ndim(table, 2)?;
    is_row(padding, slice.map_or(table.shape[0], |slice| slice.full))?;
    let mut shape = ids.shape.clone();
    shape.push(table.shape[1]);
    Ok(vec![table.with_shape(shape)])
}

fn embedding_grad(
    rows: usize,
    padding: Option<usize>,
    slice: Option<AxisSlice>,
    [ids, dy]: [&TensorType; 2],
) -> Types {
    is_ids(ids)?;
    is_row(padding, slice.map_or(rows, |slice| slice.full))?;
    has_dim(dy, 0)?;
    ensure(ids.shape[..] == dy.shape[..dy.ndim() - 1], || {
        format!("ids {ids} do not index {dy}")
    })?;
    Ok(vec![dy.with_shape([rows, dy.last_dim()])])
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

fn attention_grad(spec: &Attention, inputs: &[TensorType]) -> Types {
    let table = attention_options(spec, inputs, [1, 2], 6)?;
    let [dout, q, k, v, _, _] = operands(&inputs[..inputs.len().min(6)])?;
    attention(spec, [q, k, v])?;
    same(dout, q)?;
    Ok([q, k, v].into_iter().chain(table).cloned().collect())
}

fn join_attention([out, lse, other, of_other]: [&TensorType; 4]) -> Types {
    same(out, other)?;
    same(lse, of_other)?;
    ensure(out.ndim() == 3 && lse.ndim() == 3, || {
        format!("{out} and {lse} are no results of an attention")
    })?;
    Ok(vec![out.clone(), lse.clone()])
}

fn rotated(rope: &Rope, [x, positions]: [&TensorType; 2]) -> Types {
    has_ndim(x, 3)?;
    ensure(x.last_dim().is_multiple_of(rope.head_dim), || {
        format!("{x} does not consist of heads of {}", rope.head_dim)
    })?;
    ensure(2 * rope.inv_freq.len() <= rope.head_dim, || {
        format!(
            "{} rotated pairs do not fit a head of {}",
            rope.inv_freq.len(),
            rope.head_dim
        )
    })?;
    ensure(
        x.shape[..2].ends_with(&positions.shape)
            && !positions.shape.is_empty()
            && positions.dtype == DType::I64,
        || format!("positions {positions} do not number the sequence of {x}"),
    )?;
    Ok(vec![x.clone()])
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

fn cross_entropy([logits, labels]: [&TensorType; 2]) -> Types {
    labels_fit(logits, labels)?;
    Ok(vec![TensorType::scalar(DType::F64), rows_of(logits)])
}

fn cross_entropy_grad([logits, labels, _, dloss]: [&TensorType; 4]) -> Types {
    labels_fit(logits, labels)?;
    is_f64_scalar(dloss)?;
    Ok(vec![logits.clone()])
}

fn vocab_max([logits]: [&TensorType; 1]) -> Types {
    is_float(logits)?;
    Ok(vec![rows_of(logits)])
}

fn vocab_sums(label_smoothing: f64, [logits, labels, max]: [&TensorType; 3]) -> Types {
    labels_fit(logits, labels)?;
    same(&rows_of(logits), max)?;
    Ok(vec![sums_of(logits, label_smoothing)])
}

fn vocab_loss(label_smoothing: f64, [logits, labels, max, sums]: [&TensorType; 4]) -> Types {
    labels_fit(logits, labels)?;
    same(&rows_of(logits), max)?;
    same(&sums_of(logits, label_smoothing), sums)?;
    Ok(vec![TensorType::scalar(DType::F64), rows_of(logits)])
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

fn reshape(shape: &[usize], [x]: [&TensorType; 1]) -> Types {
    ensure(product(shape) == Some(x.numel()), || {
        format!("{x} has not as many elements as {shape:?}")
    })?;
    Ok(vec![x.with_shape(shape)])
}

fn transpose(perm: &[usize], [x]: [&TensorType; 1]) -> Types {
    let mut sorted = perm.to_vec();
    sorted.sort_unstable();
    ensure(sorted.iter().copied().eq(0..x.ndim()), || {
        format!("{perm:?} does not order the dimensions of {x}")
    })?;
    let shape: Vec<_> = perm.iter().map(|&d| x.shape[d]).collect();
    Ok(vec![x.with_shape(shape)])
}

fn split(dim: usize, sizes: &[usize], [x]: [&TensorType; 1]) -> Types {
    has_dim(x, dim)?;
    ensure(sum(sizes) == Some(x.shape[dim]), || {
        format!("pieces {sizes:?} do not make up dimension {dim} of {x}")
    })?;
    Ok(sizes.iter().map(|&size| x.with_dim(dim, size)).collect())
}

fn all_gather(shard: &Shard, [x]: [&TensorType; 1]) -> Types {
    divides(x, shard, |local, full| local != 0 && local <= full)?;
    Ok(vec![x.with_dim(shard.dim, shard.parts.iter().sum())])
}

fn scatter(local: usize, shard: &Shard, [x]: [&TensorType; 1]) -> Types {
    divides(x, shard, |whole, full| whole == full)?;
    Ok(vec![x.with_dim(shard.dim, local)])
}

fn all_to_all(from: &Shard, to: &Shard, [x]: [&TensorType; 1]) -> Types {
    ensure(from.dim != to.dim, || {
        format!("dimension {} is cut before and after", to.dim)
    })?;
    divides(x, from, |local, full| local != 0 && full % local == 0)?;
    divides(x, to, |whole, full| whole == full)?;
    let joined: usize = from.parts.iter().sum();
    let ranks = joined / x.shape[from.dim];
    let whole = x.shape[to.dim];
    ensure(whole.is_multiple_of(ranks), || {
        format!("dimension {} of {x} has no {ranks} equal slices", to.dim)
    })?;
    Ok(vec![
        x.with_dim(from.dim, joined).with_dim(to.dim, whole / ranks),
    ])
}

fn linear(layout: WeightLayout, bias: bool, inputs: &[TensorType]) -> Types {
    let (x, w) = if bias {
        let [x, w, b] = operands(inputs)?;
        has_ndim(w, 2)?;
        is_vector_of(b, w.shape[layout.out_dim()], w.dtype)?;
        (x, w)
    } else {
        let [x, w] = operands(inputs)?;
        (x, w)
    };
    can_multiply(x, w)?;
    matches_dim(x.last_dim(), w, layout.in_dim())?;
    Ok(vec![x.with_dim(x.ndim() - 1, w.shape[layout.out_dim()])])
}

fn matmul(transpose_a: bool, transpose_b: bool, [a, b]: [&TensorType; 2]) -> Types {
    let n = a.ndim();
    ensure(n >= 2 && b.ndim() == n && a.dtype == b.dtype, || {
        format!("{a} cannot be multiplied by {b}")
    })?;
    ensure(a.shape[..n - 2] == b.shape[..n - 2], || {
        format!("the batches of {a} and {b} differ")
    })?;
    let swap = |ty: &TensorType, t: bool| {
        if t {
            (ty.shape[n - 1], ty.shape[n - 2])
        } else {
            (ty.shape[n - 2], ty.shape[n - 1])
        }
    };
    let ((rows, k), (k2, cols)) = (swap(a, transpose_a), swap(b, transpose_b));
    ensure(k == k2, || {
        format!("the inner dimensions {k} and {k2} of {a} and {b} differ")
    })?;
    Ok(vec![a.with_dim(n - 2, rows).with_dim(n - 1, cols)])
}

fn attention(spec: &Attention, [q, k, v]: [&TensorType; 3]) -> Types {
    has_ndim(q, 3)?;
    has_ndim(k, 3)?;
    same(k, v)?;
    ensure(
        spec.kv_heads > 0 && spec.heads.is_multiple_of(spec.kv_heads),
        || {
            format!(
                "{} query heads cannot share {} key/value heads",
                spec.heads, spec.kv_heads
            )
        },
    )?;
    ensure(
        product(&[spec.heads, spec.head_dim]) == Some(q.last_dim()),
        || {
            format!(
                "{q} does not hold {} heads of {}",
                spec.heads, spec.head_dim
            )
        },
    )?;
    ensure(
        product(&[spec.kv_heads, spec.head_dim]) == Some(k.last_dim()),
        || {
            format!(
                "{k} does not hold {} heads of {}",
                spec.kv_heads, spec.head_dim
            )
        },
    )?;
    ensure(q.shape[0] == k.shape[0] && q.dtype == k.dtype, || {
        format!("the batches of {q} and {k} differ")
    })?;
    // Positions count from the ends of both sequences, so the first queries would come before the
    // first key.
    let by_position = spec.causal || spec.window.is_some();
    ensure(!by_position || q.shape[1] <= k.shape[1], || {
        format!("{} queries see only {} keys", q.shape[1], k.shape[1])
    })?;
    Ok(vec![
        q.clone(),
        TensorType::new([q.shape[0], spec.heads, q.shape[1]], stat_dtype(q)),
    ])
}

/// Checks the operands after the `required` ones and returns the table, if there is one; `qk` are
/// the positions of queries and keys.
fn attention_options<'a>(
    spec: &Attention,
    inputs: &'a [TensorType],
    [q, k]: [usize; 2],
    required: usize,
) -> Result<Option<&'a TensorType>, Reason> {
    if inputs.len() <= required {
        ensure(!spec.documents, || "documents need their ids".to_owned())?;
        return Ok(None);
    }
    let (q, k) = (&inputs[q], &inputs[k]);
    has_ndim(q, 3)?;
    has_ndim(k, 3)?;
    let options = AttentionOptions::find(inputs, required);
    ensure(inputs.len() == required + options.count(), || {
        format!("takes no {} operands", inputs.len())
    })?;
    if let Some(seen) = options.seen {
        let seen = &inputs[seen];
        ensure(
            seen.dtype == DType::I64 && seen.shape == [k.shape[0], spec.positions(k.shape[1])],
            || format!("{seen} does not say which keys of {k} are seen"),
        )?;
    }
    ensure(
        !spec.documents
            || options.seen.is_some() && (q.shape[1] == k.shape[1] || spec.queries.is_some()),
        || format!("documents need an id for each of as many queries {q} as keys {k}"),
    )?;
    let Some(table) = options.table else {
        return Ok(None);
    };
    let (table, index) = (&inputs[table], &inputs[table + 1]);
    ensure(
        table.ndim() == 2 && table.shape[1] == spec.heads && table.dtype == q.dtype,
        || format!("{table} has no bias for {} heads of {q}", spec.heads),
    )?;
    ensure(
        index.dtype == DType::I64 && index.shape == [q.shape[1], k.shape[1]],
        || format!("{index} does not pair the queries of {q} with the keys of {k}"),
    )?;
    Ok(Some(table))
}

fn concat(dim: usize, inputs: &[TensorType]) -> Types {
    let first = inputs.first().ok_or("nothing to join")?;
    has_dim(first, dim)?;
    let mut total = 0;
    for ty in inputs {
        ensure(
            ty.ndim() == first.ndim() && ty.with_dim(dim, 0) == first.with_dim(dim, 0),
            || format!("{first} and {ty} differ outside dimension {dim}"),
        )?;
        total += ty.shape[dim];
    }
    Ok(vec![first.with_dim(dim, total)])
}

/// The operands as an array, if there are `N`.
fn operands<const N: usize>(inputs: &[TensorType]) -> Result<[&TensorType; N], Reason> {
    let refs: Vec<_> = inputs.iter().collect();
    refs.try_into()
        .map_err(|_| format!("takes {N} operands, got {}", inputs.len()))
}

/// The product of sizes, which a user may have named; `None` beyond all integers.
fn product(sizes: &[usize]) -> Option<usize> {
    sizes
        .iter()
        .try_fold(1, |all: usize, &size| all.checked_mul(size))
}

/// Their sum.
fn sum(sizes: &[usize]) -> Option<usize> {
    sizes
        .iter()
        .try_fold(0, |all: usize, &size| all.checked_add(size))
}

fn ensure(holds: bool, reason: impl FnOnce() -> Reason) -> Result<(), Reason> {
    if holds { Ok(()) } else { Err(reason()) }
}

fn same(a: &TensorType, b: &TensorType) -> Result<(), Reason> {
    ensure(a == b, || format!("{a} and {b} differ"))
}

fn is_float(x: &TensorType) -> Result<(), Reason> {
    ensure(x.dtype.is_float(), || format!("{x} is not of a float type"))
}

fn is_ids(ids: &TensorType) -> Result<(), Reason> {
    ensure(ids.dtype == DType::I64, || {
        format!("ids are {ids}, not i64")
    })
}

fn is_row(row: Option<usize>, rows: usize) -> Result<(), Reason> {
    match row {
        Some(row) if row >= rows => Err(format!(
            "padding row {row} is not in a table of {rows} rows"
        )),
        _ => Ok(()),
    }
}

fn is_f64_scalar(x: &TensorType) -> Result<(), Reason> {
    same(&TensorType::scalar(DType::F64), x)
}

fn has_ndim(x: &TensorType, ndim: usize) -> Result<(), Reason> {
    ensure(x.ndim() == ndim, || {
        format!("{x} has not {ndim} dimensions")
    })
}

fn has_dim(x: &TensorType, dim: usize) -> Result<(), Reason> {
    ensure(dim < x.ndim(), || format!("{x} has no dimension {dim}"))
}

/// What scales or moves the elements of each row: a vector of `f32` fits 16-bit rows, and one of 16
/// bits rows of `f32`.
fn is_vector_for(w: &TensorType, x: &TensorType) -> Result<(), Reason> {
    let expected = x.with_shape([x.last_dim()]);
    let fits = w.shape == expected.shape && stat_dtype(w) == stat_dtype(x);
    ensure(fits, || format!("expected {expected}, found {w}"))
}

fn is_vector_of(x: &TensorType, len: usize, dtype: DType) -> Result<(), Reason> {
    let expected = TensorType::new([len], dtype);
    ensure(*x == expected, || format!("expected {expected}, found {x}"))
}

/// Rows and the matrix of a linear layer.
fn can_multiply(x: &TensorType, w: &TensorType) -> Result<(), Reason> {
    has_ndim(w, 2)?;
    ensure(x.ndim() >= 1 && x.dtype == w.dtype, || {
        format!("{x} cannot be multiplied by {w}")
    })
}

fn matches_dim(features: usize, w: &TensorType, dim: usize) -> Result<(), Reason> {
    ensure(w.shape.get(dim) == Some(&features), || {
        format!("{features} features do not match dimension {dim} of {w}")
    })
}

fn labels_fit(logits: &TensorType, labels: &TensorType) -> Result<(), Reason> {
    is_float(logits)?;
    is_ids(labels)?;
    ensure(
        logits.ndim() >= 1 && logits.shape[..logits.ndim() - 1] == labels.shape[..],
        || format!("labels {labels} do not align with logits {logits}"),
    )
}

/// One statistic per row.
fn rows_of(x: &TensorType) -> TensorType {
    TensorType::new([x.rows()], stat_dtype(x))
}

/// What the classes of one rank add to the loss of each row of logits.
fn sums_of(logits: &TensorType, label_smoothing: f64) -> TensorType {
    let sums = if label_smoothing == 0.0 { 2 } else { 3 };
    TensorType::new([logits.rows(), sums], stat_dtype(logits))
}

/// Statistics of 16-bit tensors are kept in `f32`.
fn stat_dtype(x: &TensorType) -> DType {
    match x.dtype {
        DType::BF16 | DType::F16 => DType::F32,
        other => other,
    }
}

/// Checks that `shard` describes dimension `shard.dim` of `x`.
fn divides(
    x: &TensorType,
    shard: &Shard,
    fits: impl Fn(usize, usize) -> bool,
) -> Result<(), Reason> {
    has_dim(x, shard.dim)?;
    let Some(full) = sum(&shard.parts) else {
        return Err(format!("no dimension has parts of {:?}", shard.parts));
    };
    ensure(fits(x.shape[shard.dim], full), || {
        format!("dimension {} of {x} is no slice of {full}", shard.dim)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::op::JoinedGrad;
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
