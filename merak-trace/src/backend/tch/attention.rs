//! Attention: ATen's blockwise kernel on the processor, products and a softmax elsewhere and with dropout.
//!
//! The blockwise kernel never holds all scores; the composed form does, since masks of dropout are drawn
//! per score.

use super::{
    run::{Node, Outcome, stat_kind},
    storage::int,
};
use crate::{Result, kernels::SampleSlice, op};
use tch::{Kind, Tensor};

/// Sizes of a node's operands.
#[derive(Debug, Clone, Copy)]
struct Sizes {
    batch: i64,
    q_len: i64,
    k_len: i64,
    heads: i64,
    kv_heads: i64,
    head_dim: i64,
}

impl Sizes {
    fn of(spec: &op::Attention, q: &Tensor, k: &Tensor) -> Self {
        Self {
            batch: q.size()[0],
            q_len: q.size()[1],
            k_len: k.size()[1],
            heads: int(spec.heads),
            kv_heads: int(spec.kv_heads),
            head_dim: int(spec.head_dim),
        }
    }

    /// `[B, S, H*D]` as `[B, H, S, D]`.
    fn split(&self, x: &Tensor, heads: i64) -> Outcome {
        let len = x.size()[1];
        x.f_reshape([self.batch, len, heads, self.head_dim])?
            .f_transpose(1, 2)
    }

    /// Keys or values as `[B, H, S, D]`, those that several query heads share repeated.
    fn shared(&self, x: &Tensor) -> Outcome {
        let x = self.split(x, self.kv_heads)?;
        if self.heads == self.kv_heads {
            return Ok(x);
        }
        x.f_repeat_interleave_self_int(self.heads / self.kv_heads, 1, None)
    }

    /// `[B, H, S, D]` as `[B, S, H*D]`.
    fn join(&self, x: &Tensor) -> Outcome {
        x.f_transpose(1, 2)?.f_reshape([self.batch, self.q_len, -1])
    }

    /// Gradients of keys or values as `[B, S, kv_heads*D]`, those of sharing heads added.
    fn join_shared(&self, grad: &Tensor) -> Outcome {
        let (group, len) = (self.heads / self.kv_heads, self.k_len);
        let grad = if group == 1 {
            grad.shallow_clone()
        } else {
            grad.f_reshape([self.batch, self.kv_heads, group, len, self.head_dim])?
                .f_sum_dim_intlist(2_i64, false, None)?
        };
        grad.f_transpose(1, 2)?.f_reshape([self.batch, len, -1])
    }
}

impl Node<'_> {
    /// `q, k, v -> out, lse`.
    pub(super) fn attention(
        &self,
        spec: &op::Attention,
        [q, k, v]: [&Tensor; 3],
    ) -> Result<Vec<Tensor>> {
        let sizes = Sizes::of(spec, q, k);
        let factors = self.attention_mask(spec, &sizes, stat_kind(q.kind()))?;
        let outcome = || {
            let heads = [
                sizes.split(q, sizes.heads)?,
                sizes.shared(k)?,
                sizes.shared(v)?,
            ];
            let (out, lse) = if self.backend.is_cpu() && factors.is_none() {
                let [q, k, v] = &heads;
                let (causal, hidden) = visibility(spec, &sizes, q)?;
                Tensor::f_internal_scaled_dot_product_flash_attention_for_cpu(
                    q, k, v, 0.0, causal, hidden, spec.scale,
                )?
            } else {
                composed(spec, &sizes, &heads, factors.as_ref())?
            };
            Ok(vec![sizes.join(&out)?, lse])
        };
        self.at(outcome())
    }

    /// `dout, q, k, v, out, lse -> dq, dk, dv`.
    pub(super) fn attention_grad(
        &self,
        spec: &op::Attention,
        [dout, q, k, v, out, lse]: [&Tensor; 6],
    ) -> Result<Vec<Tensor>> {
        let sizes = Sizes::of(spec, q, k);
        let factors = self.attention_mask(spec, &sizes, stat_kind(q.kind()))?;
        let outcome = || {
            let heads = [
                sizes.split(q, sizes.heads)?,
                sizes.shared(k)?,
                sizes.shared(v)?,
            ];
            let [dout, out] = [
                sizes.split(dout, sizes.heads)?,
                sizes.split(out, sizes.heads)?,
            ];
            let (dq, dk, dv) = if self.backend.is_cpu() && factors.is_none() {
                let [q, k, v] = &heads;
                let (causal, hidden) = visibility(spec, &sizes, q)?;
                Tensor::f_internal_scaled_dot_product_flash_attention_for_cpu_backward(
                    &dout, q, k, v, &out, lse, 0.0, causal, hidden, spec.scale,
                )?
            } else {
                composed_grad(spec, &sizes, &heads, [&dout, &out, lse], factors.as_ref())?
            };
            Ok(vec![
                sizes.join(&dq)?,
                sizes.join_shared(&dk)?,
                sizes.join_shared(&dv)?,
            ])
        };
        self.at(outcome())
    }

    /// The factors of the probabilities `[B, H, Sq, Sk]`, where dropout is active.
    fn attention_mask(
        &self,
        spec: &op::Attention,
        sizes: &Sizes,
        kind: Kind,
    ) -> Result<Option<Tensor>> {
        let context = self.call.context;
        let Some(dropout) = spec.dropout.filter(|_| context.training) else {
            return Ok(None);
        };
        let shape = [sizes.batch, sizes.heads, sizes.q_len, sizes.k_len].map(|size| size as usize);
        let slice = SampleSlice {
            first_sample: context.sample_base,
            outer: 1,
            dim_full: dropout.slice.map_or(spec.heads, |slice| slice.full),
            dim_start: dropout
                .slice
                .map_or(0, |slice| context.coordinate(slice.axis) * spec.heads),
            dim_local: spec.heads,
            inner: shape[2] * shape[3],
        };
        self.mask(&dropout, slice, &shape, kind).map(Some)
    }
}

/// What hides keys from queries: the kernel's own causal rule, or values to add to the scores.
fn visibility(spec: &op::Attention, sizes: &Sizes, q: &Tensor) -> Outcome<(bool, Option<Tensor>)> {
    if spec.causal && spec.window.is_none() && sizes.q_len == sizes.k_len {
        return Ok((true, None));
    }
    Ok((false, hidden(spec, sizes, q)?))
}

/// `[Sq, Sk]` of zeros, and minus infinity where a query does not see a key; query i stands at
/// `i + Sk - Sq`.
fn hidden(spec: &op::Attention, sizes: &Sizes, q: &Tensor) -> Outcome<Option<Tensor>> {
    if !spec.causal && spec.window.is_none() {
        return Ok(None);
    }
    let options = (Kind::Int64, q.device());
    let past = sizes.k_len - sizes.q_len;
    let queries = Tensor::f_arange_start(past, sizes.k_len, options)?.f_unsqueeze(1)?;
    let keys = Tensor::f_arange_start(0_i64, sizes.k_len, options)?;
    let ahead = keys.f_sub(&queries)?;
    let mut mask = Tensor::f_zeros([sizes.q_len, sizes.k_len], (q.kind(), q.device()))?;
    let mut hide = |which: Tensor| mask.f_masked_fill_(&which, f64::NEG_INFINITY);
    if spec.causal {
        let _ = hide(ahead.f_gt(0_i64)?)?;
    }
    if let Some(window) = spec.window {
        let window = i64::try_from(window).unwrap_or(i64::MAX);
        let _ = hide(ahead.f_le(-window)?)?;
        let _ = hide(ahead.f_ge(window)?)?;
    }
    Ok(Some(mask))
}

/// The scores in the type of statistics, hidden ones minus infinity.
fn scores(spec: &op::Attention, sizes: &Sizes, q: &Tensor, k: &Tensor) -> Outcome {
    let kind = stat_kind(q.kind());
    let scores = q.f_matmul(&k.f_transpose(2, 3)?)?.f_to_kind(kind)?;
    let mut scores = scores.f_mul_scalar(spec.scale)?;
    match hidden(spec, sizes, &scores)? {
        Some(mask) => scores.f_add_(&mask),
        None => Ok(scores),
    }
}

fn composed(
    spec: &op::Attention,
    sizes: &Sizes,
    [q, k, v]: &[Tensor; 3],
    factors: Option<&Tensor>,
) -> Outcome<(Tensor, Tensor)> {
    let scores = scores(spec, sizes, q, k)?;
    let lse = scores.f_logsumexp(-1, true)?;
    let mut shares = scores.f_sub(&lse)?.f_exp()?;
    if let Some(factors) = factors {
        let _ = shares.f_mul_(factors)?;
    }
    let out = shares.f_to_kind(v.kind())?.f_matmul(v)?;
    Ok((out, lse.f_squeeze_dim(-1)?))
}

fn composed_grad(
    spec: &op::Attention,
    sizes: &Sizes,
    [q, k, v]: &[Tensor; 3],
    [dout, out, lse]: [&Tensor; 3],
    factors: Option<&Tensor>,
) -> Outcome<(Tensor, Tensor, Tensor)> {
    let scores = scores(spec, sizes, q, k)?;
    let (kind, stats) = (q.kind(), scores.kind());
    let shares = scores.f_sub(&lse.f_unsqueeze(-1)?)?.f_exp()?;
    let mut dshares = dout.f_matmul(&v.f_transpose(2, 3)?)?.f_to_kind(stats)?;
    let kept = match factors {
        Some(factors) => {
            dshares = dshares.f_mul(factors)?;
            shares.f_mul(factors)?
        }
        None => shares.shallow_clone(),
    };
    let dv = kept.f_to_kind(kind)?.f_transpose(2, 3)?.f_matmul(dout)?;
    let delta = dout
        .f_to_kind(stats)?
        .f_mul(&out.f_to_kind(stats)?)?
        .f_sum_dim_intlist(-1_i64, true, None)?;
    let dscores = dshares
        .f_sub(&delta)?
        .f_mul(&shares)?
        .f_mul_scalar(spec.scale)?
        .f_to_kind(kind)?;
    let dq = dscores.f_matmul(k)?;
    let dk = dscores.f_transpose(2, 3)?.f_matmul(q)?;
    Ok((dq, dk, dv))
}
