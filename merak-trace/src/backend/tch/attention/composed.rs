//! Attention by products and a softmax over all scores.

use super::Outcome;
use tch::Tensor;

/// `scores [B, H, Sq, Sk], v -> out, lse`.
pub(super) fn attention(
    scores: &Tensor,
    v: &Tensor,
    factors: Option<&Tensor>,
) -> Outcome<(Tensor, Tensor)> {
    let lse = scores.f_logsumexp(-1, true)?;
    // As in the kernels, 0 if no key is seen: then every probability is exp(-inf - 0).
    let lse = finite(&lse)?;
    let mut shares = scores.f_sub(&lse)?.f_exp()?;
    if let Some(factors) = factors {
        let _ = shares.f_mul_(factors)?;
    }
    let out = shares.f_to_kind(v.kind())?.f_matmul(v)?;
    Ok((out, lse.f_squeeze_dim(-1)?))
}

/// Attentions of the same queries to two sets of keys as one to both: `out [B, S, H*D]` of each,
/// and `lse [B, H, S]`.
pub(super) fn join(outs: [&Tensor; 2], sums: [&Tensor; 2]) -> Outcome<Vec<Tensor>> {
    let joined = sums[0].f_logaddexp(sums[1])?;
    let (batch, heads, len) = joined.size3()?;
    let shift = finite(&joined)?;
    let part = |out: &Tensor, sum: &Tensor| {
        let share = sum.f_sub(&shift)?.f_exp()?.f_transpose(1, 2)?;
        let by_head = out.f_reshape([batch, len, heads, -1])?;
        by_head.f_mul(&share.f_unsqueeze(3)?)
    };
    let out = part(outs[0], sums[0])?.f_add(&part(outs[1], sums[1])?)?;
    let out = out.f_reshape(outs[0].size())?.f_to_kind(outs[0].kind())?;
    Ok(vec![out, joined])
}

/// Zero in place of minus infinity.
pub(super) fn finite(sums: &Tensor) -> Outcome {
    sums.f_masked_fill(&sums.f_eq(f64::NEG_INFINITY)?, 0.0)
}

/// The operands of the gradient.
#[derive(Debug)]
pub(super) struct Composed<'a> {
    /// Factor of the products of queries and keys.
    pub(super) scale: f64,
    /// `[B, H, Sq, Sk]`, in the type of statistics.
    pub(super) scores: Tensor,
    /// Queries, keys and values, `[B, H, S, D]`.
    pub(super) operands: [&'a Tensor; 3],
    /// `dout`, `out` and `lse`.
    pub(super) results: [&'a Tensor; 3],
    /// Dropout of the probabilities.
    pub(super) factors: Option<&'a Tensor>,
}

impl Composed<'_> {
    /// `(dq, dk, dv), dscores`.
    pub(super) fn grads(&self) -> Outcome<((Tensor, Tensor, Tensor), Tensor)> {
        let ([q, k, v], [dout, out, lse]) = (self.operands, self.results);
        let (kind, stats) = (q.kind(), self.scores.kind());
        let shares = self.scores.f_sub(&lse.f_unsqueeze(-1)?)?.f_exp()?;
        let mut dshares = dout.f_matmul(&v.f_transpose(2, 3)?)?.f_to_kind(stats)?;
        let kept = match self.factors {
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
        let dscores = dshares.f_sub(&delta)?.f_mul(&shares)?;
        let scaled = dscores.f_mul_scalar(self.scale)?.f_to_kind(kind)?;
        let dq = scaled.f_matmul(k)?;
        let dk = scaled.f_transpose(2, 3)?.f_matmul(q)?;
        Ok(((dq, dk, dv), dscores))
    }
}
