//! Operations on each element or each row.

use super::{
    elements,
    run::{Node, Number, Results},
    steal,
};
use crate::{
    Value,
    kernels::{self, Float, Threads, Turn},
    op::{Activation, DropoutSpec, Rope},
};

impl Node<'_> {
    /// The first result, which a kernel makes of the first operand.
    pub(super) fn unary<T: Number>(
        &self,
        inputs: &[Value],
        kernel: impl FnOnce(&Threads, &[T], &mut [T]),
    ) -> Results {
        let mut y = self.out::<T>(0);
        kernel(&self.backend.threads, &elements(&inputs[0])?, &mut y);
        self.done([y])
    }

    /// The first result, which a kernel makes of two operands.
    pub(super) fn binary<T: Number>(
        &self,
        inputs: &[Value],
        kernel: impl FnOnce(&Threads, &[T], &[T], &mut [T]),
    ) -> Results {
        let mut y = self.out::<T>(0);
        let (a, b) = (elements(&inputs[0])?, elements(&inputs[1])?);
        kernel(&self.backend.threads, &a, &b, &mut y);
        self.done([y])
    }

    pub(super) fn activation<T: Number>(&self, inputs: &[Value], kind: Activation) -> Results {
        self.unary::<T>(inputs, |on, x, y| kernels::activation(on, kind, x, y))
    }

    pub(super) fn activation_grad<T: Number>(&self, inputs: &[Value], kind: Activation) -> Results {
        let kernel = kernels::activation_grad;
        self.binary::<T>(inputs, |on, x, dy, dx| kernel(on, kind, x, dy, dx))
    }

    pub(super) fn softmax<T: Number>(&self, inputs: &[Value]) -> Results {
        let width = self.ty(0).last_dim();
        self.unary::<T>(inputs, |on, x, y| kernels::softmax(on, width, x, y))
    }

    pub(super) fn softmax_grad<T: Number>(&self, inputs: &[Value]) -> Results {
        let (width, kernel) = (self.ty(0).last_dim(), kernels::softmax_grad);
        self.binary::<T>(inputs, |on, y, dy, dx| kernel(on, width, y, dy, dx))
    }

    pub(super) fn scale<T: Number>(&self, inputs: &[Value], factor: f64) -> Results {
        let factor = <T as Float>::from_f64(factor);
        self.unary::<T>(inputs, |on, x, y| kernels::scale(on, factor, x, y))
    }

    pub(super) fn silu_mul_grad<T: Number>(&self, inputs: &[Value]) -> Results {
        let x = |i: usize| elements::<T>(&inputs[i]);
        let (mut dgate, mut dup) = (self.out(0), self.out(1));
        let threads = &self.backend.threads;
        kernels::silu_mul_grad(threads, &x(0)?, &x(1)?, &x(2)?, &mut dgate, &mut dup);
        self.done([dgate, dup])
    }

    /// Drops elements while training.
    pub(super) fn dropout<T: Number>(&self, inputs: Vec<Value>, spec: &DropoutSpec) -> Results {
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
    pub(super) fn rope<T: Number>(&self, inputs: &[Value], rope: &Rope) -> Results {
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
    pub(super) fn add<T: Number>(&self, mut inputs: Vec<Value>) -> Results {
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

/// Multiplies; the second operand repeats over the first.
pub(super) fn mul<T: Number>(threads: &Threads, a: &[T], b: &[T], y: &mut [T]) {
    if a.len() == b.len() {
        kernels::mul(threads, a, b, y);
        return;
    }
    let width = b.len().max(1);
    let repeats = y.chunks_exact_mut(width).zip(a.chunks_exact(width));
    repeats.for_each(|(y, a)| kernels::mul(threads, a, b, y));
}

pub(super) fn inverse_root<T: Number>(_: &Threads, x: &[T], y: &mut [T]) {
    for (y, &x) in y.iter_mut().zip(x) {
        *y = <T as Float>::from_f64(1.0 / Float::to_f64(x).sqrt());
    }
}
