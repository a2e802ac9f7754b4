//! Terms added to attention scores: minus infinity for hidden keys, and biases.

use super::{Outcome, Sizes, document_numbers, rows_by_number, stat_kind, tensor};
use crate::{
    Result, Value,
    op::{self, AttentionOptions},
};
use tch::Tensor;

/// The optional operands of an attention.
#[derive(Debug, Clone, Copy)]
pub(super) struct Terms<'a> {
    /// `[B, Sk]`: 0 hides a key; or the ids of documents.
    seen: Option<&'a Tensor>,
    /// `[R, H]`, and the row for each query and key, `[Sq, Sk]`.
    pub(super) table: Option<[&'a Tensor; 2]>,
}

impl<'a> Terms<'a> {
    /// Finds them after the first `required` operands.
    pub(super) fn find(inputs: &'a [Value], required: usize) -> Result<Self> {
        let options = AttentionOptions::find(inputs.iter().map(Value::ty), required);
        let operand = |i: usize| tensor(&inputs[i]);
        let table = options.table.map(|i| Ok([operand(i)?, operand(i + 1)?]));
        Ok(Self {
            seen: options.seen.map(operand).transpose()?,
            table: table.transpose()?,
        })
    }

    pub(super) fn is_empty(&self) -> bool {
        self.seen.is_none() && self.table.is_none()
    }

    /// Visibility for the blockwise kernel: its own causal rule, or values to add to the scores.
    pub(super) fn visibility(
        &self,
        spec: &op::Attention,
        sizes: &Sizes,
        q: &Tensor,
    ) -> Outcome<(bool, Option<Tensor>)> {
        let causal = spec.causal && spec.window.is_none() && sizes.is_aligned();
        if causal && self.is_empty() {
            return Ok((true, None));
        }
        Ok((false, self.added(spec, sizes, q)?))
    }

    /// The scores `scale q k^T` and their terms, in the type of statistics.
    pub(super) fn scores(
        &self,
        spec: &op::Attention,
        sizes: &Sizes,
        q: &Tensor,
        k: &Tensor,
    ) -> Outcome {
        let scores = q.f_matmul(&k.f_transpose(2, 3)?)?;
        let scores = scores.f_to_kind(stat_kind(q.kind()))?;
        let mut scores = scores.f_mul_scalar(spec.scale)?;
        match self.added(spec, sizes, &scores)? {
            Some(added) => scores.f_add_(&added),
            None => Ok(scores),
        }
    }

    /// The sum of all terms, of the type and on the device of `like`; it broadcasts to
    /// `[B, H, Sq, Sk]`.
    fn added(&self, spec: &op::Attention, sizes: &Sizes, like: &Tensor) -> Outcome<Option<Tensor>> {
        let mut sum = by_position(spec, sizes, like)?;
        let mut add = |term: Tensor| -> Outcome<()> {
            sum = Some(match sum.take() {
                Some(sum) => sum.f_add(&term)?,
                None => term,
            });
            Ok(())
        };
        if let Some([table, index]) = self.table {
            let bias = Tensor::f_embedding(table, index, -1, false, false)?;
            let bias = bias.f_permute([2, 0, 1])?.f_unsqueeze(0)?;
            add(bias.f_to_kind(like.kind())?.f_contiguous()?)?;
        }
        if let Some(seen) = self.seen {
            let hides = if spec.documents {
                let numbers = document_numbers(seen)?.f_unsqueeze(1)?;
                let of = |places: Tensor| numbers.f_index_select(2, &places);
                let of_queries = of(sizes.of_queries(seen.device())?)?.f_unsqueeze(3)?;
                of_queries.f_ne_tensor(&of(sizes.of_keys(seen.device())?)?.f_unsqueeze(2)?)?
            } else {
                let hides = seen.f_eq(0_i64)?;
                let hides = hides.f_index_select(1, &sizes.of_keys(seen.device())?)?;
                hides.f_reshape([sizes.batch, 1, 1, sizes.k_len])?
            };
            let zeros = Tensor::f_zeros(hides.size(), (like.kind(), like.device()))?;
            add(zeros.f_masked_fill(&hides, f64::NEG_INFINITY)?)?;
        }
        Ok(sum)
    }

    /// The `lse [B, H, Sq]` of queries that see no key as minus infinity, which joins as nothing;
    /// the kernels give 0.
    pub(super) fn without_unseeing(
        &self,
        spec: &op::Attention,
        sizes: &Sizes,
        lse: Tensor,
    ) -> Outcome {
        let Some(added) = self.added(spec, sizes, &lse)? else {
            return Ok(lse);
        };
        let sees_none = added.f_amax([-1_i64], false)?.f_eq(f64::NEG_INFINITY)?;
        lse.f_masked_fill(&sees_none, f64::NEG_INFINITY)
    }

    /// The gradient of the table from that of the scores; none without a table.
    pub(super) fn table_grad(&self, dscores: &Tensor) -> Outcome<Option<Tensor>> {
        let Some([table, index]) = self.table else {
            return Ok(None);
        };
        let of_pairs = dscores.f_sum_dim_intlist(0_i64, false, None)?;
        let of_pairs = of_pairs.f_permute([1, 2, 0])?.f_contiguous()?;
        let rows = table.size()[0];
        let grad = rows_by_number(&of_pairs, index, rows, -1)?;
        grad.f_to_kind(table.kind()).map(Some)
    }
}

/// `[Sq, Sk]` of zeros, and minus infinity where a query does not see a key.
fn by_position(spec: &op::Attention, sizes: &Sizes, like: &Tensor) -> Outcome<Option<Tensor>> {
    if !spec.causal && spec.window.is_none() {
        return Ok(None);
    }
    let queries = sizes.of_queries(like.device())?.f_unsqueeze(1)?;
    let keys = sizes.of_keys(like.device())?;
    let ahead = keys.f_sub(&queries)?;
    let mut mask = Tensor::f_zeros([sizes.q_len, sizes.k_len], (like.kind(), like.device()))?;
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
