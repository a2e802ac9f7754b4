//! Losses of whole and of split logits.

use super::checks::{
    Reason, Types, ensure, is_f64_scalar, is_float, is_ids, rows_of, same, stat_dtype,
};
use crate::TensorType;
use merak_mpu::DType;

pub(super) fn cross_entropy([logits, labels]: [&TensorType; 2]) -> Types {
    labels_fit(logits, labels)?;
    Ok(vec![TensorType::scalar(DType::F64), rows_of(logits)])
}

pub(super) fn cross_entropy_grad([logits, labels, _, dloss]: [&TensorType; 4]) -> Types {
    labels_fit(logits, labels)?;
    is_f64_scalar(dloss)?;
    Ok(vec![logits.clone()])
}

pub(super) fn vocab_max([logits]: [&TensorType; 1]) -> Types {
    is_float(logits)?;
    Ok(vec![rows_of(logits)])
}

pub(super) fn vocab_sums(label_smoothing: f64, [logits, labels, max]: [&TensorType; 3]) -> Types {
    labels_fit(logits, labels)?;
    same(&rows_of(logits), max)?;
    Ok(vec![sums_of(logits, label_smoothing)])
}

pub(super) fn vocab_loss(
    label_smoothing: f64,
    [logits, labels, max, sums]: [&TensorType; 4],
) -> Types {
    labels_fit(logits, labels)?;
    same(&rows_of(logits), max)?;
    same(&sums_of(logits, label_smoothing), sums)?;
    Ok(vec![TensorType::scalar(DType::F64), rows_of(logits)])
}

fn labels_fit(logits: &TensorType, labels: &TensorType) -> Result<(), Reason> {
    is_float(logits)?;
    is_ids(labels)?;
    ensure(
        logits.ndim() >= 1 && logits.shape[..logits.ndim() - 1] == labels.shape[..],
        || format!("labels {labels} do not align with logits {logits}"),
    )
}

/// What the classes of one rank add to the loss of each row of logits.
fn sums_of(logits: &TensorType, label_smoothing: f64) -> TensorType {
    let sums = if label_smoothing == 0.0 { 2 } else { 3 };
    TensorType::new([logits.rows(), sums], stat_dtype(logits))
}
