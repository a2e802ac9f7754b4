//! Table lookups, losses and sums.

use super::{
    Kept, elements, kept,
    run::{Node, Number},
    steal,
};
use crate::{
    Result, Value,
    kernels::{self, Float, TableRows},
};

impl Node<'_> {
    /// Rows of a table.
    pub(super) fn embedding<T: Number>(&self, inputs: &[Value]) -> Result<Vec<Value>> {
        let ids = elements::<i64>(&inputs[0])?;
        let rows = TableRows::all(inputs[1].ty().shape[0]);
        let mut y = self.out::<T>(0);
        let threads = &self.backend.threads;
        match kept::<T, T::Narrow>(&inputs[1])? {
            Kept::Wide(table) => kernels::embedding(threads, &rows, &table, &ids, &mut y),
            Kept::Narrow(table) => kernels::embedding(threads, &rows, &table, &ids, &mut y),
        }
        .map_err(|e| self.kernel_error(e))?;
        self.done([y])
    }

    /// The loss, and the logarithm of each row's sum of exponentials.
    pub(super) fn cross_entropy<T: Number>(
        &self,
        inputs: &[Value],
        label_smoothing: f64,
    ) -> Result<Vec<Value>> {
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

    /// Overwrites the logits where nothing else needs them.
    pub(super) fn cross_entropy_grad<T: Number>(
        &self,
        mut inputs: Vec<Value>,
        smoothing: f64,
    ) -> Result<Vec<Value>> {
        let threads = &self.backend.threads;
        let logits = inputs.remove(0);
        let (labels, lse) = (elements::<i64>(&inputs[0])?, elements::<T>(&inputs[1])?);
        let scale = <T as Float>::from_f64(elements::<f64>(&inputs[2])?[0]);
        let failed = |e| self.kernel_error(e);
        let dlogits = match steal::<T>(logits) {
            Ok(mut x) => {
                kernels::cross_entropy_grad_in_place(
                    threads, &labels, smoothing, &lse, scale, &mut x,
                )
                .map_err(failed)?;
                x
            }
            Err(x) => {
                let (x, mut dx) = (elements::<T>(&x)?, self.out::<T>(0));
                kernels::cross_entropy_grad(threads, &x, &labels, smoothing, &lse, scale, &mut dx)
                    .map_err(failed)?;
                dx
            }
        };
        self.done([dlogits])
    }

    pub(super) fn sum_all<T: Number>(&self, inputs: &[Value]) -> Result<Vec<Value>> {
        let x = elements::<T>(&inputs[0])?;
        let sum = x.iter().map(|&x| Float::to_f64(x)).sum::<f64>();
        Ok(vec![self.scalar(sum)?])
    }

    pub(super) fn sum_all_grad<T: Number>(&self, inputs: &[Value]) -> Result<Vec<Value>> {
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

    /// Runs [`Node::add_to`] on zeros.
    pub(super) fn sums<T: Number>(&self, inputs: &[Value]) -> Result<Vec<Value>> {
        let types = self.call.results;
        let mut sums: Vec<_> = (0..types.len()).map(|i| self.zeros::<T>(i)).collect();
        let mut parts: Vec<_> = sums.iter_mut().map(Vec::as_mut_slice).collect();
        self.add_to::<T>(inputs, &mut parts)?;
        let results = sums.into_iter().zip(types);
        results
            .map(|(data, ty)| self.backend.wrap(ty, data))
            .collect()
    }
}
