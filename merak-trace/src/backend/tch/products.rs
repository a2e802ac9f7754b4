//! Products of matrices.

use super::{
    run::{Node, Outcome},
    storage::tensor,
};
use crate::{Op, Result, Value, op::WeightLayout};
use tch::Tensor;

impl Node<'_> {
    /// Runs a product.
    pub(super) fn product(&self, inputs: &[Value]) -> Result<Outcome> {
        let x = |i: usize| tensor(&inputs[i]);
        Ok(match self.call.op {
            Op::Linear { layout, bias } => {
                let bias = if *bias { Some(x(2)?) } else { None };
                linear(*layout, x(0)?, x(1)?, bias)
            }
            Op::LinearGradInput { layout } => linear(layout.transposed(), x(0)?, x(1)?, None),
            Op::LinearGradWeight { layout } => {
                let (a, b) = self.weight_factors(*layout, x(0)?, x(1)?)?;
                a.f_mm(&b)
            }
            Op::MatMul {
                transpose_a,
                transpose_b,
            } => {
                let a = self.at(oriented(x(0)?, *transpose_a))?;
                let b = self.at(oriented(x(1)?, *transpose_b))?;
                a.f_matmul(&b)
            }
            _ => return Err(self.unsupported(inputs)),
        })
    }

    /// The factors of the gradient of a linear layer's matrix, which is their product.
    pub(super) fn weight_factors(
        &self,
        layout: WeightLayout,
        x: &Tensor,
        dy: &Tensor,
    ) -> Result<(Tensor, Tensor)> {
        let rows = |x: &Tensor| x.f_reshape([-1, x.size().last().copied().unwrap_or(1)]);
        let (x, dy) = (self.at(rows(x))?, self.at(rows(dy))?);
        match layout {
            WeightLayout::OutIn => Ok((self.at(dy.f_transpose(0, 1))?, x)),
            WeightLayout::InOut => Ok((self.at(x.f_transpose(0, 1))?, dy)),
        }
    }
}

/// `x W (+ bias)` for any layout of `W`.
fn linear(layout: WeightLayout, x: &Tensor, w: &Tensor, bias: Option<&Tensor>) -> Outcome {
    match layout {
        WeightLayout::OutIn => x.f_linear(w, bias),
        WeightLayout::InOut => x.f_linear(&w.f_transpose(0, 1)?, bias),
    }
}

fn oriented(x: &Tensor, transpose: bool) -> Outcome {
    if transpose {
        x.f_transpose(-1, -2)
    } else {
        Ok(x.shallow_clone())
    }
}
