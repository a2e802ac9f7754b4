//! Cross entropy of rows of logits, whose loss is summed in f64.

use super::run::{Outcome, stat_kind};
use crate::kernels::IGNORED_LABEL;
use tch::{Kind, Tensor};

/// `logits [.., V], labels [..] -> sum of lse - (1 - e) x[label] - e mean(x), lse [rows]`.
pub(super) fn cross_entropy(
    logits: &Tensor,
    labels: &Tensor,
    smoothing: f64,
) -> Outcome<Vec<Tensor>> {
    let logits = rows(logits)?;
    let kind = stat_kind(logits.kind());
    let lse = logits.f_to_kind(kind)?.f_logsumexp(-1, false)?;
    // A row with an infinite logit is NaN, as in PyTorch's loss: infinity minus itself.
    let lse = lse.f_add(&lse.f_sub(&lse)?)?;
    let (counts, classes) = targets(labels)?;
    let mut target = logits
        .f_gather(1, &classes.f_unsqueeze(1)?, false)?
        .f_squeeze_dim(1)?
        .f_to_kind(Kind::Double)?;
    if smoothing != 0.0 {
        let mean = logits.f_mean_dim(&[-1_i64][..], false, kind)?;
        target = target
            .f_mul_scalar(1.0 - smoothing)?
            .f_add(&mean.f_to_kind(Kind::Double)?.f_mul_scalar(smoothing)?)?;
    }
    let losses = lse.f_to_kind(Kind::Double)?.f_sub(&target)?;
    let ignored = counts.f_logical_not()?;
    let loss = losses.f_masked_fill(&ignored, 0.0)?.f_sum(Kind::Double)?;
    Ok(vec![loss, lse])
}

/// `logits, labels, lse, dloss -> dloss (exp(x - lse) - (1 - e) [class = label] - e / V)`.
pub(super) fn cross_entropy_grad(
    [logits, labels, lse, dloss]: [&Tensor; 4],
    smoothing: f64,
) -> Outcome {
    let shaped = rows(logits)?;
    let (counts, classes) = targets(labels)?;
    let column = lse.f_reshape([-1, 1])?;
    let mut grad = shaped.f_sub(&column)?;
    let mut grad = grad.f_exp_()?;
    let width = shaped.size()[1];
    if smoothing != 0.0 {
        let _ = grad.f_add_scalar_(-smoothing / width as f64)?;
    }
    let ones = Tensor::f_full(
        [classes.size()[0], 1],
        smoothing - 1.0,
        (grad.kind(), grad.device()),
    )?;
    let _ = grad.f_scatter_add_(1, &classes.f_unsqueeze(1)?, &ones)?;
    let _ = grad.f_mul_(&dloss.f_to_kind(grad.kind())?)?;
    let ignored = counts.f_logical_not()?.f_unsqueeze(1)?;
    grad.f_masked_fill_(&ignored, 0.0)?.f_to_kind(logits.kind())
}

fn rows(logits: &Tensor) -> Outcome {
    logits.f_reshape([-1, logits.size().last().copied().unwrap_or(1)])
}

/// Which rows count, and their labels, with class 0 where they do not.
fn targets(labels: &Tensor) -> Outcome<(Tensor, Tensor)> {
    let labels = labels.f_reshape(-1)?;
    let counts = labels.f_ne(IGNORED_LABEL)?;
    let classes = labels.f_masked_fill(&labels.f_eq(IGNORED_LABEL)?, 0_i64)?;
    Ok((counts, classes))
}
