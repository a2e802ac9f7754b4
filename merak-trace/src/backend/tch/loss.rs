//! Cross entropy of rows of logits, whose loss is summed in f64.

use super::run::{Outcome, stat_kind};
use crate::op::IGNORED_LABEL;
use tch::{Device, Kind, Tensor};

/// `logits [.., V], labels [..] -> sum of -(1 - e) log p[label] - e mean(log p), lse [rows]`.
///
/// A row with an infinite logit is NaN, as in PyTorch's loss.
pub(super) fn cross_entropy(
    logits: &Tensor,
    labels: &Tensor,
    smoothing: f64,
) -> Outcome<Vec<Tensor>> {
    let logits = rows(logits)?;
    let (counts, classes) = targets(labels)?;
    let mut parts = [Vec::new(), Vec::new()];
    for chunk in Chunk::all(&logits) {
        let results = rows_loss(&chunk.of(&logits)?, &chunk.of(&classes)?, smoothing)?;
        for (part, result) in parts.iter_mut().zip(results) {
            part.push(result);
        }
    }
    let [target, lse] = parts.map(|parts| Tensor::f_cat(&parts, 0));
    let ignored = counts.f_logical_not()?;
    let sum = target?.f_masked_fill(&ignored, 0.0)?.f_sum(Kind::Double)?;
    Ok(vec![sum.f_neg()?, lse?])
}

/// `logits [rows, V], classes [rows] -> (1 - e) log p[class] + e mean(log p) [rows], lse [rows]`.
fn rows_loss(logits: &Tensor, classes: &Tensor, smoothing: f64) -> Outcome<[Tensor; 2]> {
    let kind = stat_kind(logits.kind());
    let shares = logits.f_log_softmax(-1, kind)?;
    let largest = |x: &Tensor| x.f_amax(-1_i64, false)?.f_to_kind(kind);
    let lse = largest(logits)?.f_sub(&largest(&shares)?)?;
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
    Ok([target, lse])
}

/// `logits, labels, dloss -> dloss (p - (1 - e) [class = label] - e / V)`.
pub(super) fn cross_entropy_grad([logits, labels, dloss]: [&Tensor; 3], smoothing: f64) -> Outcome {
    let logits = rows(logits)?;
    let kind = stat_kind(logits.kind());
    let (counts, classes) = targets(labels)?;
    let scale = counts.f_to_kind(kind)?.f_mul(&dloss.f_to_kind(kind)?)?;
    let [scale, of_class] = [&scale, &classes].map(|x| x.f_unsqueeze(1));
    let (scale, of_class) = (scale?, of_class?);
    let (num_rows, width) = (logits.size()[0], logits.size()[1]);
    let options = (logits.kind(), logits.device());
    let mut grads = Tensor::f_empty([num_rows, width], options)?;
    let mut at_labels = Vec::new();
    for chunk in Chunk::all(&logits) {
        let scale = chunk.of(&scale)?;
        let mut grad = chunk.of(&logits)?.f_softmax(-1, kind)?;
        if smoothing != 0.0 {
            let _ = grad.f_add_scalar_(-smoothing / width as f64)?;
        }
        let at_label = grad.f_gather(1, &chunk.of(&of_class)?, false)?;
        at_labels.push(at_label.f_add_scalar(smoothing - 1.0)?.f_mul(&scale)?);
        let _ = grad.f_mul_out(&chunk.of(&grads)?, &scale)?;
    }
    let at_labels = Tensor::f_cat(&at_labels, 0)?.f_reshape(-1)?;
    let numbers = Tensor::f_arange(num_rows, (Kind::Int64, logits.device()))?;
    let places = [Some(numbers), Some(classes)];
    grads.f_index_put_(&places, &at_labels.f_to_kind(logits.kind())?, false)
}

/// Adjacent rows whose shares are computed together.
///
/// The shares of 16-bit logits have twice their bytes, and the copy that they are computed of has
/// as many. On a device a part of the rows at a time bounds both; on an H100 it takes as long as
/// all rows at once. The processor takes all.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Chunk {
    start: i64,
    len: i64,
}

impl Chunk {
    /// Elements of a chunk on a device: 512 MiB of `f32`.
    const MOST_ELEMENTS: i64 = 128 << 20;

    /// Those of a matrix, at least one.
    fn all(x: &Tensor) -> impl Iterator<Item = Self> + use<> {
        let (rows, width) = (x.size()[0], x.size()[1]);
        match x.device() {
            Device::Cpu => Self::of_rows(rows, rows),
            _ => Self::of_rows(rows, Self::MOST_ELEMENTS / width.max(1)),
        }
    }

    /// The chunks of at most this number of rows.
    fn of_rows(rows: i64, most: i64) -> impl Iterator<Item = Self> + use<> {
        let most = most.max(1);
        let count = ((rows + most - 1) / most).max(1);
        (0..count).map(move |number| {
            let start = number * most;
            let len = most.min(rows - start);
            Self { start, len }
        })
    }

    /// These rows of a tensor.
    fn of(self, x: &Tensor) -> Outcome {
        x.f_narrow(0, self.start, self.len)
    }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunks_cover_all_rows_once() {
        let chunks = |rows, most| {
            let chunks = Chunk::of_rows(rows, most);
            chunks.map(|x| (x.start, x.len)).collect::<Vec<_>>()
        };
        assert_eq!(chunks(7, 3), [(0, 3), (3, 3), (6, 1)]);
        assert_eq!(chunks(6, 3), [(0, 3), (3, 3)]);
        assert_eq!(chunks(2, 0), [(0, 1), (1, 1)]);
        assert_eq!(chunks(0, 3), [(0, 0)]);
    }
}
