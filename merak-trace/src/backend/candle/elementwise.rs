//! Operations on each element or each row.

use super::{
    elements,
    run::{Node, Number},
    steal,
};
use crate::{
    Op, Result, Value,
    kernels::{self, Float, Turn},
    op::{DropoutSpec, Rope},
};

impl Node<'_> {
    /// Runs an operation on each element, a softmax among them.
    pub(super) fn elementwise<T: Number>(&self, inputs: &[Value]) -> Result<Vec<Value>> {
        let threads = &self.backend.threads;
        let x = |i: usize| elements::<T>(&inputs[i]);
        let mut y = self.out::<T>(0);
        let width = self.ty(0).last_dim();
        match self.call.op {
            Op::Activation(kind) => kernels::activation(threads, *kind, &x(0)?, &mut y),
            Op::ActivationGrad(kind) => {
                kernels::activation_grad(threads, *kind, &x(0)?, &x(1)?, &mut y);
            }
            Op::SiluMul => kernels::silu_mul(threads, &x(0)?, &x(1)?, &mut y),
            Op::SiluMulGrad => {
                let mut dup = self.out::<T>(1);
                kernels::silu_mul_grad(threads, &x(0)?, &x(1)?, &x(2)?, &mut y, &mut dup);
                return self.done([y, dup]);
            }
            Op::Softmax => kernels::softmax(threads, width, &x(0)?, &mut y),
            Op::SoftmaxGrad => kernels::softmax_grad(threads, width, &x(0)?, &x(1)?, &mut y),
            Op::Mul => self.mul(&x(0)?, &x(1)?, &mut y),
            Op::InverseRoot => {
                for (y, &x) in y.iter_mut().zip(x(0)?.iter()) {
                    *y = <T as Float>::from_f64(1.0 / Float::to_f64(x).sqrt());
                }
            }
            Op::Scale { factor } => {
                kernels::scale(threads, <T as Float>::from_f64(*factor), &x(0)?, &mut y);
            }
            _ => return Err(self.unsupported(inputs)),
        }
        self.done([y])
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

    /// Multiplies; the second operand repeats over the first.
    fn mul<T: Number>(&self, a: &[T], b: &[T], y: &mut [T]) {
        let threads = &self.backend.threads;
        if a.len() == b.len() {
            kernels::mul(threads, a, b, y);
            return;
        }
        let width = b.len().max(1);
        let repeats = y.chunks_exact_mut(width).zip(a.chunks_exact(width));
        repeats.for_each(|(y, a)| kernels::mul(threads, a, b, y));
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
