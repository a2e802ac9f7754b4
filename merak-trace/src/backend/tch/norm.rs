//! Norms over the last dimension: ATen's layer norm, and a root-mean-square norm of ATen
//! operations.
//!
//! Statistics of 16-bit tensors are `f32`.

use super::{
    run::{Node, Outcome, stat_kind},
    shim,
};
use crate::Result;
use tch::{Kind, Tensor};

impl Node<'_> {
    /// `x, w, b -> y, mean [rows], rstd [rows]`.
    pub(super) fn layer_norm(&self, [x, w, b]: [&Tensor; 3], eps: f64) -> Result<Vec<Tensor>> {
        let kind = self.param_kind(x);
        let outcome = || {
            let (w, b) = (w.f_to_kind(kind)?, b.f_to_kind(kind)?);
            x.f_native_layer_norm(w.size(), Some(&w), Some(&b), eps)
        };
        let (y, mean, rstd) = self.at(outcome())?;
        Ok(vec![y, mean, rstd])
    }

    /// `dy, x, w, mean, rstd -> dx`.
    pub(super) fn layer_norm_grad_input(
        &self,
        [dy, x, w, mean, rstd]: [&Tensor; 5],
    ) -> Result<Vec<Tensor>> {
        let (mean, rstd) = (self.column(x, mean)?, self.column(x, rstd)?);
        let norm = shim::LayerNorm {
            grad: &self.at(dy.f_contiguous())?,
            input: &self.at(x.f_contiguous())?,
            mean: &mean,
            rstd: &rstd,
            weight: &self.at(w.f_to_kind(self.param_kind(x)))?,
        };
        Ok(vec![norm.of_input(self.call.name)?])
    }

    /// `dy, x, mean, rstd -> dw, db`.
    pub(super) fn layer_norm_grad_params(
        &self,
        [dy, x, mean, rstd]: [&Tensor; 4],
    ) -> Result<Vec<Tensor>> {
        let (mean, rstd) = (self.column(x, mean)?, self.column(x, rstd)?);
        let width = x.size().last().copied().unwrap_or(1);
        // Only its type and shape matter here.
        let weight = Tensor::f_ones(width, (self.param_kind(x), x.device()));
        let norm = shim::LayerNorm {
            grad: &self.at(dy.f_contiguous())?,
            input: &self.at(x.f_contiguous())?,
            mean: &mean,
            rstd: &rstd,
            weight: &self.at(weight)?,
        };
        Ok(norm.of_params(self.call.name)?.into())
    }

    /// The type of weights with which libtorch keeps statistics of 16-bit tensors in `f32`. On the
    /// processor the statistics follow the weights. On a device they are always `f32`, and the
    /// weights are of the tensor's type.
    fn param_kind(&self, x: &Tensor) -> Kind {
        if self.backend.is_cpu() {
            stat_kind(x.kind())
        } else {
            x.kind()
        }
    }

    /// Statistics per row, shaped as libtorch keeps them.
    fn column(&self, x: &Tensor, rows: &Tensor) -> Result<Tensor> {
        self.at(column(x, rows))
    }
}

/// `[rows]` as `[.., 1]`.
fn column(x: &Tensor, rows: &Tensor) -> Outcome {
    let mut shape = x.size();
    if let Some(last) = shape.last_mut() {
        *last = 1;
    }
    rows.f_reshape(shape)
}

fn mean(x: &Tensor) -> Outcome {
    x.f_mean_dim(&[-1_i64][..], true, None)
}

/// `x, w -> x rstd w, rstd [rows]` with `rstd = (mean(x^2) + eps)^(-1/2)`.
pub(super) fn rms_norm([x, w]: [&Tensor; 2], eps: f64) -> Outcome<Vec<Tensor>> {
    let kind = stat_kind(x.kind());
    let wide = x.f_to_kind(kind)?;
    let rstd = mean(&wide.f_square()?)?.f_add_scalar_(eps)?.f_rsqrt_()?;
    let y = wide.f_mul(&rstd)?.f_mul_(&w.f_to_kind(kind)?)?;
    Ok(vec![y.f_to_kind(x.kind())?, rstd])
}

/// `dy, x, w, rstd -> rstd (g - u mean(g u))` with `u = x rstd` and `g = dy w`.
pub(super) fn rms_norm_grad_input([dy, x, w, rstd]: [&Tensor; 4]) -> Outcome {
    let kind = stat_kind(x.kind());
    let rstd = column(x, rstd)?;
    let unit = x.f_to_kind(kind)?.f_mul(&rstd)?;
    let grad = dy.f_to_kind(kind)?.f_mul(&w.f_to_kind(kind)?)?;
    let slope = mean(&grad.f_mul(&unit)?)?;
    let dx = grad.f_sub(&unit.f_mul(&slope)?)?.f_mul_(&rstd)?;
    dx.f_to_kind(x.kind())
}

/// `dy, x, rstd -> sum of dy x rstd over the rows`.
pub(super) fn rms_norm_grad_params([dy, x, rstd]: [&Tensor; 3]) -> Outcome {
    let kind = stat_kind(x.kind());
    let mut unit = x.f_to_kind(kind)?.f_mul(&column(x, rstd)?)?;
    let width = x.size().last().copied().unwrap_or(1);
    let sums = unit.f_mul_(&dy.f_to_kind(kind)?)?.f_reshape([-1, width])?;
    sums.f_sum_dim_intlist(0_i64, false, None)?
        .f_to_kind(x.kind())
}
