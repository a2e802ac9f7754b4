//! Table lookups, losses and sums.

use super::{
    Kept,
    accumulate::Slots,
    elements, kept,
    run::{Node, Number, Results},
    steal,
};
use crate::{
    Result, TensorType, Value,
    kernels::{self, Float, TableRows, Targets},
    op::AxisSlice,
};

impl Node<'_> {
    /// Rows of a table, of which the rank may have a slice.
    pub(super) fn embedding<T: Number>(
        &self,
        inputs: &[Value],
        slice: Option<AxisSlice>,
    ) -> Results {
        let ids = elements::<i64>(&inputs[0])?;
        let rows = self.table_rows(inputs[1].ty().shape[0], slice);
        let mut y = self.out::<T>(0);
        let threads = &self.backend.threads;
        match kept::<T, T::Narrow>(&inputs[1])? {
            Kept::Wide(table) => kernels::embedding(threads, &rows, &table, &ids, &mut y),
            Kept::Narrow(table) => kernels::embedding(threads, &rows, &table, &ids, &mut y),
        }
        .map_err(|e| self.kernel_error(e))?;
        self.done([y])
    }

    /// The gradient of a table of a number of rows, of which one may not train.
    pub(super) fn embedding_grad<T: Number>(
        &self,
        inputs: &[Value],
        rows: usize,
        (padding, slice): (Option<usize>, Option<AxisSlice>),
        slots: Option<Slots<'_>>,
    ) -> Results {
        let rows = TableRows {
            padding,
            ..self.table_rows(rows, slice)
        };
        self.sum::<T, 1>(slots, |[table]| {
            let (ids, dy) = (elements::<i64>(&inputs[0])?, elements(&inputs[1])?);
            kernels::embedding_grad(&self.backend.threads, &rows, &dy, &ids, table)
                .map_err(|e| self.kernel_error(e))
        })
    }

    /// The rows that a table of `local` rows has of the whole one.
    pub(super) fn table_rows(&self, local: usize, slice: Option<AxisSlice>) -> TableRows {
        let Some(slice) = slice else {
            return TableRows::all(local);
        };
        let start = self.call.context.place.get(slice.axis) * local;
        TableRows {
            total: slice.full,
            // Padding after the last row has no id.
            local: start..start + local,
            padding: None,
        }
    }

    /// The loss, and the logarithm of each row's sum of exponentials.
    pub(super) fn cross_entropy<T: Number>(
        &self,
        inputs: &[Value],
        label_smoothing: f64,
    ) -> Results {
        let (logits, labels) = (elements::<T>(&inputs[0])?, elements::<i64>(&inputs[1])?);
        let mut lse = self.out::<T>(1);
        let threads = &self.backend.threads;
        let loss = kernels::cross_entropy(threads, &logits, &labels, label_smoothing, &mut lse)
            .map_err(|e| self.kernel_error(e))?;
        Ok(vec![
            self.scalar(loss)?,
            self.backend.wrap(self.ty(1), lse)?,
        ])
    }

    /// What a loss of logits of type `ty`, cut as `slice` says, predicts.
    fn targets<'a>(
        &self,
        ty: &TensorType,
        labels: &'a [i64],
        smoothing: f64,
        slice: Option<AxisSlice>,
    ) -> Targets<'a> {
        let local = ty.last_dim();
        match slice {
            None => Targets::all(labels, smoothing, local),
            Some(slice) => Targets {
                labels,
                smoothing,
                total: slice.full,
                own: slice.own(self.call.context.place, local),
            },
        }
    }

    /// The largest logit of each row, of this rank's classes.
    pub(super) fn vocab_max<T: Number>(&self, inputs: &[Value], slice: AxisSlice) -> Results {
        let (logits, mut largest) = (elements::<T>(&inputs[0])?, self.out::<T>(0));
        let targets = self.targets(inputs[0].ty(), &[], 0.0, Some(slice));
        let threads = &self.backend.threads;
        kernels::vocab_max(threads, targets.own.len(), &logits, &mut largest);
        self.done([largest])
    }

    /// What this rank's classes add to the loss of each row.
    pub(super) fn vocab_sums<T: Number>(
        &self,
        inputs: &[Value],
        smoothing: f64,
        slice: AxisSlice,
    ) -> Results {
        let (logits, labels) = (elements::<T>(&inputs[0])?, elements::<i64>(&inputs[1])?);
        let (largest, mut sums) = (elements::<T>(&inputs[2])?, self.out::<T>(0));
        let targets = self.targets(inputs[0].ty(), &labels, smoothing, Some(slice));
        let threads = &self.backend.threads;
        kernels::vocab_sums(threads, &targets, &logits, &largest, &mut sums)
            .map_err(|e| self.kernel_error(e))?;
        self.done([sums])
    }

    /// The loss by the sums of all ranks, and the logarithm of each row's sum of exponentials.
    pub(super) fn vocab_loss<T: Number>(
        &self,
        inputs: &[Value],
        smoothing: f64,
        slice: AxisSlice,
    ) -> Results {
        let labels = elements::<i64>(&inputs[1])?;
        let (largest, sums) = (elements::<T>(&inputs[2])?, elements::<T>(&inputs[3])?);
        let targets = self.targets(inputs[0].ty(), &labels, smoothing, Some(slice));
        let mut lse = self.out::<T>(1);
        let loss = kernels::vocab_loss(&targets, &largest, &sums, &mut lse)
            .map_err(|e| self.kernel_error(e))?;
        Ok(vec![
            self.scalar(loss)?,
            self.backend.wrap(self.ty(1), lse)?,
        ])
    }

    /// Overwrites the logits where nothing else needs them.
    pub(super) fn cross_entropy_grad<T: Number>(
        &self,
        mut inputs: Vec<Value>,
        smoothing: f64,
        slice: Option<AxisSlice>,
    ) -> Results {
        let threads = &self.backend.threads;
        let logits = inputs.remove(0);
        let (labels, lse) = (elements::<i64>(&inputs[0])?, elements::<T>(&inputs[1])?);
        let scale = <T as Float>::from_f64(elements::<f64>(&inputs[2])?[0]);
        let failed = |e| self.kernel_error(e);
        let targets = self.targets(logits.ty(), &labels, smoothing, slice);
        let dlogits = match steal::<T>(logits) {
            Ok(mut x) => {
                kernels::cross_entropy_grad(threads, &targets, None, &lse, scale, &mut x)
                    .map_err(failed)?;
                x
            }
            Err(x) => {
                let (x, mut dx) = (elements::<T>(&x)?, self.out::<T>(0));
                kernels::cross_entropy_grad(threads, &targets, Some(&x), &lse, scale, &mut dx)
                    .map_err(failed)?;
                dx
            }
        };
        self.done([dlogits])
    }

    pub(super) fn sum_leading<T: Number>(
        &self,
        inputs: &[Value],
        slots: Option<Slots<'_>>,
    ) -> Results {
        self.sum::<T, 1>(slots, |[sum]| {
            kernels::sum_rows(&self.backend.threads, &elements(&inputs[0])?, sum);
            Ok(())
        })
    }

    pub(super) fn sum_all<T: Number>(&self, inputs: &[Value]) -> Results {
        let x = elements::<T>(&inputs[0])?;
        let sum = x.iter().map(|&x| Float::to_f64(x)).sum::<f64>();
        Ok(vec![self.scalar(sum)?])
    }

    pub(super) fn sum_all_grad<T: Number>(&self, inputs: &[Value]) -> Results {
        let dy = <T as Float>::from_f64(elements::<f64>(&inputs[1])?[0]);
        let mut dx = self.out::<T>(0);
        dx.fill(dy);
        self.done([dx])
    }

    /// The first result, a single number.
    fn scalar(&self, number: f64) -> Result<Value> {
        let mut memory = self.backend.result::<f64>(self.ty(0));
        memory.fill(number);
        self.backend.wrap(self.ty(0), memory)
    }
}
