//! Norms over the last dimension.

use super::{
    accumulate::Slots,
    elements,
    run::{Node, Number, Results},
};
use crate::{Value, kernels};

impl Node<'_> {
    pub(super) fn layer_norm<T: Number>(&self, inputs: &[Value], eps: f64) -> Results {
        let x = |i: usize| elements::<T>(&inputs[i]);
        let (mut y, mut mean, mut rstd) = (self.out(0), self.out(1), self.out(2));
        kernels::layer_norm::<T>(
            &self.backend.threads,
            &x(0)?,
            &x(1)?,
            Some(&x(2)?),
            eps,
            &mut y,
            &mut mean,
            &mut rstd,
        );
        self.done([y, mean, rstd])
    }

    pub(super) fn layer_norm_grad_input<T: Number>(&self, inputs: &[Value]) -> Results {
        let x = |i: usize| elements::<T>(&inputs[i]);
        let mut dx = self.out::<T>(0);
        kernels::layer_norm_grad_input(
            &self.backend.threads,
            &x(0)?,
            &x(1)?,
            &x(2)?,
            &x(3)?,
            &x(4)?,
            &mut dx,
        );
        self.done([dx])
    }

    pub(super) fn layer_norm_grad_params<T: Number>(
        &self,
        inputs: &[Value],
        slots: Option<Slots<'_>>,
    ) -> Results {
        let x = |i: usize| elements::<T>(&inputs[i]);
        self.sum::<T, 2>(slots, |[dw, db]| {
            kernels::layer_norm_grad_params(
                &self.backend.threads,
                &x(0)?,
                &x(1)?,
                &x(2)?,
                &x(3)?,
                dw,
                Some(db),
            );
            Ok(())
        })
    }

    pub(super) fn rms_norm<T: Number>(&self, inputs: &[Value], eps: f64) -> Results {
        let x = |i: usize| elements::<T>(&inputs[i]);
        let (mut y, mut rstd) = (self.out(0), self.out(1));
        let threads = &self.backend.threads;
        kernels::rms_norm::<T>(threads, &x(0)?, &x(1)?, eps, &mut y, &mut rstd);
        self.done([y, rstd])
    }

    pub(super) fn rms_norm_grad_input<T: Number>(&self, inputs: &[Value]) -> Results {
        let x = |i: usize| elements::<T>(&inputs[i]);
        let mut dx = self.out::<T>(0);
        let threads = &self.backend.threads;
        kernels::rms_norm_grad_input(threads, &x(0)?, &x(1)?, &x(2)?, &x(3)?, &mut dx);
        self.done([dx])
    }

    pub(super) fn rms_norm_grad_params<T: Number>(
        &self,
        inputs: &[Value],
        slots: Option<Slots<'_>>,
    ) -> Results {
        let x = |i: usize| elements::<T>(&inputs[i]);
        self.sum::<T, 1>(slots, |[dw]| {
            let threads = &self.backend.threads;
            kernels::rms_norm_grad_params(threads, &x(0)?, &x(1)?, &x(2)?, dw);
            Ok(())
        })
    }
}
