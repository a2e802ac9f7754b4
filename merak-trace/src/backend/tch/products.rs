//! Products of matrices.

use super::run::Outcome;
use crate::op::WeightLayout;
use tch::Tensor;

/// `x W (+ bias)` for any layout of `W`.
pub(super) fn linear(
    layout: WeightLayout,
    x: &Tensor,
    w: &Tensor,
    bias: Option<&Tensor>,
) -> Outcome {
    match layout {
        WeightLayout::OutIn => x.f_linear(w, bias),
        WeightLayout::InOut => x.f_linear(&w.f_transpose(0, 1)?, bias),
    }
}

/// The factors of the gradient of a linear layer's matrix, which is their product.
pub(super) fn weight_factors(
    layout: WeightLayout,
    x: &Tensor,
    dy: &Tensor,
) -> Outcome<(Tensor, Tensor)> {
    let rows = |x: &Tensor| x.f_reshape([-1, x.size().last().copied().unwrap_or(1)]);
    let (x, dy) = (rows(x)?, rows(dy)?);
    match layout {
        WeightLayout::OutIn => Ok((dy.f_transpose(0, 1)?, x)),
        WeightLayout::InOut => Ok((x.f_transpose(0, 1)?, dy)),
    }
}

/// The product of two operands, each of which may be stored transposed.
pub(super) fn matmul([a, b]: [&Tensor; 2], transposed: [bool; 2]) -> Outcome {
    oriented(a, transposed[0])?.f_matmul(&oriented(b, transposed[1])?)
}

fn oriented(x: &Tensor, transpose: bool) -> Outcome {
    if transpose {
        x.f_transpose(-1, -2)
    } else {
        Ok(x.shallow_clone())
    }
}
