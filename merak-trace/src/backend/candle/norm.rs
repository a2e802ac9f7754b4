//! Norms over the last dimension.

use super::{
    elements,
    run::{Node, Number},
};
use crate::{Op, Result, Value, kernels};

impl Node<'_> {
    /// Runs a norm or its gradient with respect to its operand.
    pub(super) fn norm<T: Number>(&self, inputs: &[Value]) -> Result<Vec<Value>> {
        let threads = &self.backend.threads;
        let x = |i: usize| elements::<T>(&inputs[i]);
        match self.call.op {
            Op::LayerNorm { eps } => {
                let (mut y, mut mean, mut rstd) = (self.out(0), self.out(1), self.out(2));
                kernels::layer_norm::<T>(
                    threads,
                    &x(0)?,
                    &x(1)?,
                    Some(&x(2)?),
                    *eps,
                    &mut y,
                    &mut mean,
                    &mut rstd,
                );
                self.done([y, mean, rstd])
            }
            Op::LayerNormGradInput => {
                let mut dx = self.out::<T>(0);
                kernels::layer_norm_grad_input(
                    threads,
                    &x(0)?,
                    &x(1)?,
                    &x(2)?,
                    &x(3)?,
                    &x(4)?,
                    &mut dx,
                );
                self.done([dx])
            }
            Op::RmsNorm { eps } => {
                let (mut y, mut rstd) = (self.out(0), self.out(1));
                kernels::rms_norm::<T>(threads, &x(0)?, &x(1)?, *eps, &mut y, &mut rstd);
                self.done([y, rstd])
            }
            Op::RmsNormGradInput => {
                let mut dx = self.out::<T>(0);
                kernels::rms_norm_grad_input(threads, &x(0)?, &x(1)?, &x(2)?, &x(3)?, &mut dx);
                self.done([dx])
            }
            _ => Err(self.unsupported(inputs)),
        }
    }
}
