//! Operations on each element or each row.

use super::{
    elements,
    run::{Node, Number},
    steal,
};
use crate::{
    Result, Value,
    kernels::{self, Float, Threads, Turn},
    op::{Activation, DropoutSpec, Rope},
};

impl Node<'_> {
    /// A first result that a kernel fills.
    fn filled<T: Number>(
        &self,
        fill: impl FnOnce(&Threads, &mut [T]) -> Result<()>,
    ) -> Result<Vec<Value>> {
        let mut y = self.out::<T>(0);
        fill(&self.backend.threads, &mut y)?;
        self.done([y])
    }

    pub(super) fn activation<T: Number>(
        &self,
        inputs: &[Value],
        kind: Activation,
    ) -> Result<Vec<Value>> {
        self.filled::<T>(|threads, y| {
            kernels::activation(threads, kind, &elements(&inputs[0])?, y);
            Ok(())
        })
    }

    pub(super) fn activation_grad<T: Number>(
        &self,
        inputs: &[Value],
        kind: Activation,
    ) -> Result<Vec<Value>> {
        self.filled::<T>(|threads, dx| {
            let (x, dy) = (elements(&inputs[0])?, elements(&inputs[1])?);
            kernels::activation_grad(threads, kind, &x, &dy, dx);
            Ok(())
        })
    }

    pub(super) fn silu_mul<T: Number>(&self, inputs: &[Value]) -> Result<Vec<Value>> {
        self.filled::<T>(|threads, y| {
            let (gate, up) = (elements(&inputs[0])?, elements(&inputs[1])?);
            kernels::silu_mul(threads, &gate, &up, y);
            Ok(())
        })
    }

    pub(super) fn silu_mul_grad<T: Number>(&self, inputs: &[Value]) -> Result<Vec<Value>> {
        let x = |i: usize| elements::<T>(&inputs[i]);
        let (mut dgate, mut dup) = (self.out(0), self.out(1));
        let threads = &self.backend.threads;
        kernels::silu_mul_grad(threads, &x(0)?, &x(1)?, &x(2)?, &mut dgate, &mut dup);
        self.done([dgate, dup])
    }

    pub(super) fn softmax<T: Number>(&self, inputs: &[Value]) -> Result<Vec<Value>> {
        self.filled::<T>(|threads, y| {
            kernels::softmax(threads, self.ty(0).last_dim(), &elements(&inputs[0])?, y);
            Ok(())
        })
    }

    pub(super) fn softmax_grad<T: Number>(&self, inputs: &[Value]) -> Result<Vec<Value>> {
        self.filled::<T>(|threads, dx| {
            let (y, dy) = (elements(&inputs[0])?, elements(&inputs[1])?);
            kernels::softmax_grad(threads, self.ty(0).last_dim(), &y, &dy, dx);
            Ok(())
        })
    }

    pub(super) fn inverse_root<T: Number>(&self, inputs: &[Value]) -> Result<Vec<Value>> {
        self.filled::<T>(|_, y| {
            for (y, &x) in y.iter_mut().zip(elements::<T>(&inputs[0])?.iter()) {
                *y = <T as Float>::from_f64(1.0 / Float::to_f64(x).sqrt());
            }
            Ok(())
        })
    }

    pub(super) fn scale<T: Number>(&self, inputs: &[Value], factor: f64) -> Result<Vec<Value>> {
        let factor = <T as Float>::from_f64(factor);
        self.filled::<T>(|threads, y| {
            kernels::scale(threads, factor, &elements(&inputs[0])?, y);
            Ok(())
        })
    }

    /// Multiplies; the second operand repeats over the first.
    pub(super) fn mul<T: Number>(&self, inputs: &[Value]) -> Result<Vec<Value>> {
        self.filled::<T>(|threads, y| {
            let (a, b) = (elements::<T>(&inputs[0])?, elements::<T>(&inputs[1])?);
            if a.len() == b.len() {
                kernels::mul(threads, &a, &b, y);
                return Ok(());
            }
            let width = b.len().max(1);
            let repeats = y.chunks_exact_mut(width).zip(a.chunks_exact(width));
            repeats.for_each(|(y, a)| kernels::mul(threads, a, &b, y));
            Ok(())
        })
    }

    /// Drops elements while training.
    pub(super) fn dropout<T: Number>(
        &self,
        inputs: Vec<Value>,
        spec: &DropoutSpec,
    ) -> Result<Vec<Value>> {
        let context = self.call.context;
        if !context.training {
            return Ok(inputs);
        }
        let mut y = self.out::<T>(0);
        let slice = context.sample_slice(spec, &self.ty(0).shape);
        let x = elements::<T>(&inputs[0])?;
        kernels::dropout(
            &self.backend.threads,
            context.dropout(spec),
            slice,
            &x,
            &mut y,
        );
        self.done([y])
    }

    /// Turns pairs of elements by their position.
    pub(super) fn rope<T: Number>(&self, inputs: &[Value], rope: &Rope) -> Result<Vec<Value>> {
        let (x, positions) = (elements::<T>(&inputs[0])?, elements::<i64>(&inputs[1])?);
        let mut y = self.out::<T>(0);
        kernels::rope(
            &self.backend.threads,
            rope.head_dim,
            &Turn {
                inv_freq: &rope.inv_freq,
                scale: rope.scale,
                inverse: rope.inverse,
            },
            &positions,
            self.ty(0).last_dim(),
            &x,
            &mut y,
        );
        self.done([y])
    }

    /// Adds in place where the first operand may be overwritten.
    pub(super) fn add<T: Number>(&self, mut inputs: Vec<Value>) -> Result<Vec<Value>> {
        let threads = &self.backend.threads;
        let (b, a) = (inputs.swap_remove(1), inputs.swap_remove(0));
        let same = a.ty() == b.ty();
        match steal::<T>(a) {
            Ok(mut sum) if same => {
                kernels::add_assign(threads, &elements::<T>(&b)?, &mut sum);
                self.done([sum])
            }
            Ok(a) => {
                let mut sum = self.out::<T>(0);
                kernels::add_suffix(threads, &a, &elements::<T>(&b)?, &mut sum);
                drop(self.backend.wrap(self.ty(0), a)?);
                self.done([sum])
            }
            Err(a) => {
                let mut sum = self.out::<T>(0);
                let (a, b) = (elements::<T>(&a)?, elements::<T>(&b)?);
                if same {
                    kernels::add(threads, &a, &b, &mut sum);
                } else {
                    kernels::add_suffix(threads, &a, &b, &mut sum);
                }
                self.done([sum])
            }
        }
    }
}
