//! Cross entropy of rows of logits, whose loss is summed in f64.

use super::run::{Outcome, stat_kind};
use crate::op::IGNORED_LABEL;
use tch::{Kind, Tensor};

/// `logits [.., V], labels [..] -> sum of -(1 - e) log p[label] - e mean(log p), lse [rows]`.
///
/// A row with an infinite logit is NaN, as in PyTorch's loss.
pub(super) fn cross_entropy(
    logits: &Tensor,
    labels: &Tensor,
    smoothing: f64,
) -> Outcome<Vec<Tensor>> {
    let logits = rows(logits)?;
    let kind = stat_kind(logits.kind());
    let shares = logits.f_log_softmax(-1, kind)?;
    let largest = |x: &Tensor| x.f_amax(-1_i64, false)?.f_to_kind(kind);
    let lse = largest(&logits)?.f_sub(&largest(&shares)?)?;
    let (counts, classes) = targets(labels)?;
    let mut target = shares
        .f_gather(1, &classes.f_unsqueeze(1)?, false)?
        .f_squeeze_dim(1)?
        .f_to_kind(Kind::Double)?;
    if smoothing != 0.0 {
        let mean = shares.f_mean_dim(&[-1_i64][..], false, kind)?;
        target = target
            .f_mul_scalar(1.0 - smoothing)?
            .f_add(&mean.f_to_kind(Kind::Double)?.f_mul_scalar(smoothing)?)?;
    }
    let ignored = counts.f_logical_not()?;
    let sum = target.f_masked_fill(&ignored, 0.0)?.f_sum(Kind::Double)?;
    Ok(vec![sum.f_neg()?, lse])
}

/// `logits, labels, dloss -> dloss (p - (1 - e) [class = label] - e / V)`.
pub(super) fn cross_entropy_grad([logits, labels, dloss]: [&Tensor; 3], smoothing: f64) -> Outcome {
    let kind = stat_kind(logits.kind());
    let mut grad = rows(logits)?.f_softmax(-1, kind)?;
    let (counts, classes) = targets(labels)?;
    let width = grad.size()[1];
    if smoothing != 0.0 {
        let _ = grad.f_add_scalar_(-smoothing / width as f64)?;
    }
    let of_label = Tensor::f_full(
        [classes.size()[0], 1],
        smoothing - 1.0,
        (kind, grad.device()),
    )?;
    let _ = grad.f_scatter_add_(1, &classes.f_unsqueeze(1)?, &of_label)?;
    let scale = counts.f_to_kind(kind)?.f_mul(&dloss.f_to_kind(kind)?)?;
    grad.f_mul_(&scale.f_unsqueeze(1)?)?
        .f_to_kind(logits.kind())
}

fn rows(logits: &Tensor) -> Outcome {
    logits.f_reshape([-1, logits.size().last().copied().unwrap_or(1)])
}

/// Which rows count, and the labels of all rows, with class 0 for those that do not.
fn targets(labels: &Tensor) -> Outcome<(Tensor, Tensor)> {
    let labels = labels.f_reshape(-1)?;
    let counts = labels.f_ne(IGNORED_LABEL)?;
    let classes = labels.f_masked_fill(&labels.f_eq(IGNORED_LABEL)?, 0_i64)?;
    Ok((counts, classes))
}
