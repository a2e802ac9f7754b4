//! Products of matrices.

use super::{
    Kept, Products,
    accumulate::Slots,
    elements, kept,
    run::{Node, Number, Results},
};
use crate::{
    Result, Value,
    kernels::{self, Float, MatMut, MatRef, Operand, Start, Write},
    op::WeightLayout,
};

impl Node<'_> {
    pub(super) fn linear<T: Number>(
        &self,
        inputs: &[Value],
        layout: WeightLayout,
        bias: bool,
    ) -> Results {
        let mut y = self.out::<T>(0);
        let bias = if bias {
            Some(elements::<T>(&inputs[2])?)
        } else {
            None
        };
        self.mapped(layout, &inputs[0], &inputs[1], bias.as_deref(), &mut y)?;
        self.done([y])
    }

    pub(super) fn linear_grad_input<T: Number>(
        &self,
        inputs: &[Value],
        layout: WeightLayout,
    ) -> Results {
        let mut dx = self.out::<T>(0);
        self.mapped(layout.transposed(), &inputs[0], &inputs[1], None, &mut dx)?;
        self.done([dx])
    }

    pub(super) fn linear_grad_weight<T: Number>(
        &self,
        inputs: &[Value],
        layout: WeightLayout,
        slots: Option<Slots<'_>>,
    ) -> Results {
        let (x, dy) = (&inputs[0], &inputs[1]);
        if let Some(slots) = slots {
            let [dw] = slots.parts::<T, 1>();
            self.weight_gradient(layout, x, dy, Write::Add, dw)?;
            return Ok(Vec::new());
        }
        let mut dw = self.out::<T>(0);
        self.weight_gradient(layout, x, dy, Write::Replace, &mut dw)?;
        self.done([dw])
    }

    /// `y = x W (+ bias)` for any layout of `W`; `x: [.., in]`, `y: [.., out]`.
    fn mapped<T: Number>(
        &self,
        layout: WeightLayout,
        x: &Value,
        w: &Value,
        bias: Option<&[T]>,
        y: &mut [T],
    ) -> Result<()> {
        let (rows, width) = (x.ty().rows(), x.ty().last_dim());
        let (w_rows, w_cols) = (w.ty().shape[0], w.ty().shape[1]);
        let x = elements::<T>(x)?;
        let x = MatRef::new(&x, rows, width);
        match kept::<T, T::Narrow>(w)? {
            Kept::Wide(w) => self.times(x, layout, MatRef::new(&w, w_rows, w_cols), bias, y),
            Kept::Narrow(w) => self.times(x, layout, MatRef::new(&w, w_rows, w_cols), bias, y),
        }
        Ok(())
    }

    /// [`Self::mapped`] of matrices.
    fn times<T: Number, W: Operand<T>>(
        &self,
        x: MatRef<'_, T>,
        layout: WeightLayout,
        w: MatRef<'_, W>,
        bias: Option<&[T]>,
        y: &mut [T],
    ) {
        let w = match layout {
            WeightLayout::OutIn => w.transposed(),
            WeightLayout::InOut => w,
        };
        let y = MatMut::new(y, x.rows(), w.cols());
        self.multiply(x, w, bias.map_or(Start::Zero, Start::Row), y);
    }

    /// `c = a b + start` in the backend's precision of products.
    fn multiply<T: Number, W: Operand<T>>(
        &self,
        a: MatRef<'_, T>,
        b: MatRef<'_, W>,
        start: Start<'_, T>,
        c: MatMut<'_, T>,
    ) {
        let threads = &self.backend.threads;
        match (self.backend.products, start) {
            (Products::Rounded, start) => kernels::gemm_of_halves(threads, a, b, start, c),
            (Products::Full, Start::Row(bias)) => kernels::gemm_bias(threads, a, b, bias, c),
            (Products::Full, Start::Zero) => {
                kernels::gemm(threads, T::ONE, a, b, Write::Replace, c);
            }
            (Products::Full, Start::Output) => kernels::gemm(threads, T::ONE, a, b, Write::Add, c),
        }
    }

    /// `dw (+)= xᵀ dy`, laid out as `w` is.
    fn weight_gradient<T: Number>(
        &self,
        layout: WeightLayout,
        x: &Value,
        dy: &Value,
        write: Write,
        dw: &mut [T],
    ) -> Result<()> {
        let (rows, n_in, n_out) = (x.ty().rows(), x.ty().last_dim(), dy.ty().last_dim());
        let (x, dy) = (elements::<T>(x)?, elements::<T>(dy)?);
        let (x, dy) = (MatRef::new(&x, rows, n_in), MatRef::new(&dy, rows, n_out));
        match layout {
            WeightLayout::OutIn => {
                let dw = MatMut::new(dw, n_out, n_in);
                self.multiply(dy.transposed(), x, write.into(), dw);
            }
            WeightLayout::InOut => {
                let dw = MatMut::new(dw, n_in, n_out);
                self.multiply(x.transposed(), dy, write.into(), dw);
            }
        }
        Ok(())
    }

    pub(super) fn matmul<T: Number>(&self, inputs: &[Value], ta: bool, tb: bool) -> Results {
        let shape_of = |value: &Value| {
            let shape = &value.ty().shape;
            (shape[shape.len() - 2], shape[shape.len() - 1])
        };
        let ((a_rows, a_cols), (b_rows, b_cols)) = (shape_of(&inputs[0]), shape_of(&inputs[1]));
        let (a, b) = (elements::<T>(&inputs[0])?, elements::<T>(&inputs[1])?);
        let mut c = self.out::<T>(0);
        let (rows, cols) = (
            if ta { a_cols } else { a_rows },
            if tb { b_rows } else { b_cols },
        );
        if !c.is_empty() {
            let outs = c
                .chunks_exact_mut(rows * cols)
                .map(|c| MatMut::new(c, rows, cols))
                .collect();
            let a = |i: usize| oriented(MatRef::new(&a[i * a_rows * a_cols..], a_rows, a_cols), ta);
            let b = |i: usize| oriented(MatRef::new(&b[i * b_rows * b_cols..], b_rows, b_cols), tb);
            kernels::gemm_batched(&self.backend.threads, T::ONE, a, b, Write::Replace, outs);
        }
        self.done([c])
    }
}

fn oriented<T: Float>(m: MatRef<'_, T>, transpose: bool) -> MatRef<'_, T> {
    if transpose { m.transposed() } else { m }
}
