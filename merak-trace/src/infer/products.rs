//! Products with matrices, and lookups in tables.

use super::checks::{Reason, Types, ensure, has_dim, has_ndim, is_ids, is_vector_of, operands};
use crate::{
    TensorType,
    op::{AxisSlice, WeightLayout},
};

pub(super) fn linear(layout: WeightLayout, bias: bool, inputs: &[TensorType]) -> Types {
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

pub(super) fn linear_grad_input(layout: WeightLayout, [dy, w]: [&TensorType; 2]) -> Types {
    can_multiply(dy, w)?;
    matches_dim(dy.last_dim(), w, layout.out_dim())?;
    Ok(vec![dy.with_dim(dy.ndim() - 1, w.shape[layout.in_dim()])])
}

pub(super) fn linear_grad_weight(layout: WeightLayout, [x, dy]: [&TensorType; 2]) -> Types {
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

pub(super) fn matmul(transpose_a: bool, transpose_b: bool, [a, b]: [&TensorType; 2]) -> Types {
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

pub(super) fn embedding(
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

pub(super) fn embedding_grad(
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

fn is_row(row: Option<usize>, rows: usize) -> Result<(), Reason> {
    match row {
        Some(row) if row >= rows => Err(format!(
            "padding row {row} is not in a table of {rows} rows"
        )),
        _ => Ok(()),
    }
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
