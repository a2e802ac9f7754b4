//! Attention, its operands, and the turn of its queries and keys.

use super::checks::{Reason, Types, ensure, has_ndim, operands, product, same, stat_dtype};
use crate::{
    TensorType,
    op::{Attention, AttentionOptions, Rope},
};
use merak_mpu::DType;

pub(super) fn attention(spec: &Attention, inputs: &[TensorType]) -> Types {
    attention_options(spec, inputs, [0, 1], 3)?;
    of_heads(spec, operands(&inputs[..inputs.len().min(3)])?)
}

pub(super) fn attention_grad(spec: &Attention, inputs: &[TensorType]) -> Types {
    let table = attention_options(spec, inputs, [1, 2], 6)?;
    let [dout, q, k, v, _, _] = operands(&inputs[..inputs.len().min(6)])?;
    of_heads(spec, [q, k, v])?;
    same(dout, q)?;
    Ok([q, k, v].into_iter().chain(table).cloned().collect())
}

pub(super) fn join_attention([out, lse, other, of_other]: [&TensorType; 4]) -> Types {
    same(out, other)?;
    same(lse, of_other)?;
    ensure(out.ndim() == 3 && lse.ndim() == 3, || {
        format!("{out} and {lse} are no results of an attention")
    })?;
    Ok(vec![out.clone(), lse.clone()])
}

pub(super) fn rotated(rope: &Rope, [x, positions]: [&TensorType; 2]) -> Types {
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

/// Queries, keys and values of heads, as the spec has them.
fn of_heads(spec: &Attention, [q, k, v]: [&TensorType; 3]) -> Types {
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
