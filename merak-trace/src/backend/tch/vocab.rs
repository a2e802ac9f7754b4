//! Lookups and losses whose vocabulary is cut over ranks.

use super::{
    accumulate::rows_by_number,
    run::{Node, Outcome, stat_kind},
    storage::{int, tensor},
};
use crate::{
    Error, Result, Value,
    kernels::KernelError,
    op::{AxisSlice, IGNORED_LABEL},
};
use std::ops::Range;
use tch::{Kind, Tensor};

impl Node<'_> {
    /// The indices of the whole vocabulary that this rank holds in a tensor with room for `local`.
    fn own(&self, slice: AxisSlice, local: usize) -> Range<usize> {
        slice.own(self.call.context.place, local)
    }

    /// Rows of a table, zeros for rows of other ranks.
    pub(super) fn vocab_embedding(&self, inputs: &[Value], slice: AxisSlice) -> Result<Tensor> {
        let (ids, table) = (tensor(&inputs[0])?, tensor(&inputs[1])?);
        self.check_ids(ids, slice.full)?;
        let own = self.own(slice, inputs[1].ty().shape[0]);
        self.at((|| -> Outcome {
            let (at, elsewhere) = columns(ids, &own)?;
            let rows = Tensor::f_embedding(table, &at, -1, false, false)?;
            rows.f_masked_fill(&elsewhere.f_unsqueeze(-1)?, 0.0)
        })())
    }

    /// The gradient of this rank's rows of a table.
    pub(super) fn vocab_embedding_grad(
        &self,
        inputs: &[Value],
        rows: usize,
        padding: Option<usize>,
        slice: AxisSlice,
    ) -> Result<Tensor> {
        let (ids, dy) = (tensor(&inputs[0])?, tensor(&inputs[1])?);
        self.check_ids(ids, slice.full)?;
        let own = self.own(slice, rows);
        // No row has number -1.
        let padding = padding.filter(|row| own.contains(row));
        let padding = padding.map_or(-1, |row| int(row - own.start));
        self.at((|| -> Outcome {
            let (at, elsewhere) = columns(ids, &own)?;
            let dy = dy.f_masked_fill(&elsewhere.f_unsqueeze(-1)?, 0.0)?;
            rows_by_number(&dy, &at, int(rows), padding)
        })())
    }

    /// The largest logit of each row, of this rank's classes.
    pub(super) fn vocab_max(&self, inputs: &[Value], slice: AxisSlice) -> Result<Tensor> {
        let own = self.own(slice, inputs[0].ty().last_dim());
        let x = tensor(&inputs[0])?;
        self.at((|| -> Outcome {
            let x = of_classes(x, own.len())?;
            if own.is_empty() {
                let options = (x.kind(), x.device());
                return Tensor::f_full([x.size()[0]], f64::NEG_INFINITY, options);
            }
            x.f_amax(-1_i64, false)
        })())
    }

    /// What this rank's classes add to the loss of each row.
    pub(super) fn vocab_sums(
        &self,
        inputs: &[Value],
        smoothing: f64,
        slice: AxisSlice,
    ) -> Result<Tensor> {
        let own = self.own(slice, inputs[0].ty().last_dim());
        let (x, labels, largest) = (
            tensor(&inputs[0])?,
            tensor(&inputs[1])?,
            tensor(&inputs[2])?,
        );
        self.check_labels(labels, slice.full)?;
        self.at((|| -> Outcome {
            let x = of_classes(x, own.len())?;
            let kind = x.kind();
            let target = if own.is_empty() {
                largest.f_zeros_like()?
            } else {
                let (at, elsewhere) = columns(&labels.f_reshape(-1)?, &own)?;
                let target = x
                    .f_gather(1, &at.f_unsqueeze(1)?, false)?
                    .f_squeeze_dim(1)?;
                target.f_masked_fill(&elsewhere, 0.0)?
            };
            let exp = x.f_sub(&finite(largest)?.f_unsqueeze(1)?)?.f_exp()?;
            let mut sums = vec![target, exp.f_sum_dim_intlist(-1_i64, false, kind)?];
            if smoothing != 0.0 {
                sums.push(x.f_sum_dim_intlist(-1_i64, false, kind)?);
            }
            Tensor::f_stack(&sums, 1)
        })())
    }

    /// The loss by the sums of all ranks, and the logarithm of each row's sum of exponentials.
    pub(super) fn vocab_loss(
        &self,
        inputs: &[Value],
        smoothing: f64,
        slice: AxisSlice,
    ) -> Result<Vec<Tensor>> {
        let (labels, largest, sums) = (
            tensor(&inputs[1])?,
            tensor(&inputs[2])?,
            tensor(&inputs[3])?,
        );
        self.check_labels(labels, slice.full)?;
        self.at((|| -> Outcome<Vec<Tensor>> {
            let sum = |index| sums.f_select(1, index);
            let lse = finite(largest)?.f_add(&sum(1)?.f_log()?)?;
            let mut target = sum(0)?.f_to_kind(Kind::Double)?;
            if smoothing != 0.0 {
                let mean = sum(2)?.f_to_kind(Kind::Double)?;
                let mean = mean.f_mul_scalar(smoothing / slice.full as f64)?;
                target = target.f_mul_scalar(1.0 - smoothing)?.f_add(&mean)?;
            }
            let losses = lse.f_to_kind(Kind::Double)?.f_sub(&target)?;
            let ignored = labels.f_reshape(-1)?.f_eq(IGNORED_LABEL)?;
            let loss = losses.f_masked_fill(&ignored, 0.0)?.f_sum(Kind::Double)?;
            Ok(vec![loss, lse])
        })())
    }

    /// The gradient of this rank's logits; zeros in padding.
    pub(super) fn vocab_loss_grad(
        &self,
        inputs: &[Value],
        smoothing: f64,
        slice: AxisSlice,
    ) -> Result<Tensor> {
        let width = inputs[0].ty().last_dim();
        let own = self.own(slice, width);
        let [logits, labels] = [tensor(&inputs[0])?, tensor(&inputs[1])?];
        let [lse, dloss] = [tensor(&inputs[2])?, tensor(&inputs[3])?];
        self.check_labels(labels, slice.full)?;
        self.at((|| -> Outcome {
            let x = of_classes(logits, own.len())?;
            let kind = x.kind();
            let mut grad = x.f_sub(&lse.f_unsqueeze(1)?)?.f_exp()?;
            if smoothing != 0.0 {
                let _ = grad.f_add_scalar_(-smoothing / slice.full as f64)?;
            }
            let labels = labels.f_reshape(-1)?;
            if !own.is_empty() {
                let (at, elsewhere) = columns(&labels, &own)?;
                let of_label = elsewhere.f_logical_not()?.f_to_kind(kind)?;
                let of_label = of_label.f_mul_scalar(smoothing - 1.0)?.f_unsqueeze(1)?;
                let _ = grad.f_scatter_add_(1, &at.f_unsqueeze(1)?, &of_label)?;
            }
            let counts = labels.f_ne(IGNORED_LABEL)?.f_to_kind(kind)?;
            let scale = counts.f_mul(&dloss.f_to_kind(kind)?)?.f_unsqueeze(1)?;
            let ignored = labels.f_eq(IGNORED_LABEL)?.f_unsqueeze(1)?;
            let grad = grad.f_mul(&scale)?.f_masked_fill(&ignored, 0.0)?;
            let padded = grad.f_constant_pad_nd([0, int(width - own.len())])?;
            padded.f_to_kind(logits.kind())
        })())
    }

    /// Refuses ids beyond the whole table, which no rank would look up. It waits for a device.
    pub(super) fn check_ids(&self, ids: &Tensor, rows: usize) -> Result<()> {
        let wrong = self.at(first_outside(ids, rows, None))?;
        wrong.map_or(Ok(()), |(position, id)| {
            Err(self.refused(KernelError::Id { id, position, rows }))
        })
    }

    /// Refuses labels beyond the whole vocabulary, which no rank would count. It waits for a
    /// device.
    pub(super) fn check_labels(&self, labels: &Tensor, classes: usize) -> Result<()> {
        let wrong = self.at(first_outside(labels, classes, Some(IGNORED_LABEL)))?;
        wrong.map_or(Ok(()), |(position, label)| {
            Err(self.refused(KernelError::Label {
                label,
                position,
                classes,
                ignored: IGNORED_LABEL,
            }))
        })
    }

    fn refused(&self, source: KernelError) -> Error {
        Error::Kernel {
            node: self.call.name.to_owned(),
            source,
        }
    }
}

/// The logits of the first classes of each row, in the type of statistics.
fn of_classes(logits: &Tensor, classes: usize) -> Outcome {
    let width = logits.size().last().copied().unwrap_or(1);
    let rows = logits.f_reshape([-1, width])?;
    let own = rows.f_narrow(1, 0, int(classes))?;
    own.f_to_kind(stat_kind(logits.kind()))
}

/// Where numbers of the whole vocabulary lie in this rank's, 0 where they do not, and which do not.
fn columns(numbers: &Tensor, own: &Range<usize>) -> Outcome<(Tensor, Tensor)> {
    let below = numbers.f_lt(int(own.start))?;
    let elsewhere = below.f_logical_or(&numbers.f_ge(int(own.end))?)?;
    let at = numbers.f_sub_scalar(int(own.start))?;
    Ok((at.f_masked_fill(&elsewhere, 0_i64)?, elsewhere))
}

/// What is taken from the logits of a row before they are exponents: nothing if all are minus
/// infinity.
fn finite(largest: &Tensor) -> Outcome {
    largest.f_masked_fill(&largest.f_eq(f64::NEG_INFINITY)?, 0.0)
}

/// The first number that is neither below `limit` nor the allowed one, and its position.
fn first_outside(
    numbers: &Tensor,
    limit: usize,
    allowed: Option<i64>,
) -> Outcome<Option<(usize, i64)>> {
    let numbers = numbers.f_reshape(-1)?;
    let mut wrong = numbers.f_lt(0)?.f_logical_or(&numbers.f_ge(int(limit))?)?;
    if let Some(allowed) = allowed {
        wrong = wrong.f_logical_and(&numbers.f_ne(allowed)?)?;
    }
    let wrong = wrong.f_to_kind(Kind::Int64)?;
    if i64::try_from(wrong.f_sum(Kind::Int64)?)? == 0 {
        return Ok(None);
    }
    let position = i64::try_from(wrong.f_argmax(None, false)?)?;
    let number = numbers.f_int64_value(&[position])?;
    Ok(Some((usize::try_from(position).unwrap_or(0), number)))
}
