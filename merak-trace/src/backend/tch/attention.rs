//! Attention by blockwise kernels, ATen's for the most part, or by products and a softmax where
//! these do not apply.
//!
//! The blockwise kernels never hold all scores. The composed form does. It computes dropout, whose
//! masks are drawn per score, the gradient of a table of relative positions, and on a device all
//! that its blockwise kernel lacks.

mod composed;
mod own;
mod terms;

use super::{
    accumulate::rows_by_number,
    run::{Node, Outcome, document_numbers, is_half, stat_kind},
    shim,
    storage::{elements, elements_mut, int, tensor},
};
use crate::{
    Result, Runs, Value,
    kernels::SampleSlice,
    op::{self, Keys, Places},
};
use composed::Composed;
use merak_mpu::Coord;
use tch::{Device, Kind, Tensor};
use terms::Terms;

/// Sizes of a node's operands.
#[derive(Debug, Clone, Copy)]
struct Sizes {
    batch: i64,
    q_len: i64,
    k_len: i64,
    /// Where queries and keys lie; unset: the last query lies at the last key.
    places: Option<Places>,
    heads: i64,
    kv_heads: i64,
    head_dim: i64,
}

impl Sizes {
    fn of(spec: &op::Attention, q: &Tensor, k: &Tensor, place: Coord) -> Self {
        let (q_len, k_len) = (q.size()[1], k.size()[1]);
        Self {
            batch: q.size()[0],
            q_len,
            k_len,
            places: spec.places(place, q_len as usize),
            heads: int(spec.heads),
            kv_heads: int(spec.kv_heads),
            head_dim: int(spec.head_dim),
        }
    }

    /// The places of the queries, `[Sq]`.
    fn of_queries(&self, device: Device) -> Outcome {
        match &self.places {
            Some(places) => indices(places.queries, self.q_len, device),
            None => {
                Tensor::f_arange_start(self.k_len - self.q_len, self.k_len, (Kind::Int64, device))
            }
        }
    }

    /// The places of the keys, `[Sk]`.
    fn of_keys(&self, device: Device) -> Outcome {
        let runs = self.places.map_or(Runs::one(0), |places| places.keys);
        indices(runs, self.k_len, device)
    }

    /// Whether the queries lie at the keys, one for one.
    fn is_aligned(&self) -> bool {
        self.places.is_none() && self.q_len == self.k_len
    }

    /// `[B, S, H*D]` as `[B, H, S, D]`.
    fn split(&self, x: &Tensor, heads: i64) -> Outcome {
        let len = x.size()[1];
        x.f_reshape([self.batch, len, heads, self.head_dim])?
            .f_transpose(1, 2)
    }

    /// Keys or values as `[B, H, S, D]`, repeated for the query heads that share them.
    fn shared(&self, x: &Tensor) -> Outcome {
        let x = self.split(x, self.kv_heads)?;
        if self.heads == self.kv_heads {
            return Ok(x);
        }
        x.f_repeat_interleave_self_int(self.heads / self.kv_heads, 1, None)
    }

    /// Queries, keys and values by heads, each query head with keys of its own.
    fn heads(&self, [q, k, v]: [&Tensor; 3]) -> Outcome<[Tensor; 3]> {
        let q = self.split(q, self.heads)?;
        Ok([q, self.shared(k)?, self.shared(v)?])
    }

    /// `[B, H, S, D]` as `[B, S, H*D]`.
    fn join(&self, x: &Tensor) -> Outcome {
        x.f_transpose(1, 2)?.f_reshape([self.batch, self.q_len, -1])
    }

    /// Gradients of keys or values as `[B, S, kv_heads*D]`, summed over the query heads that share
    /// them.
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

/// The indices of a slice in the whole, `[len]`.
fn indices(runs: Runs, len: i64, device: Device) -> Outcome {
    let parts = runs.parts(0..len as usize);
    let parts = parts.map(|(local, first)| {
        let last = int(first + local.len());
        Tensor::f_arange_start(int(first), last, (Kind::Int64, device))
    });
    Tensor::f_cat(&parts.collect::<Result<Vec<_>, _>>()?, 0)
}

/// Which kernel computes a node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kernel {
    /// ATen's blockwise one for the processor.
    Host,
    /// ATen's blockwise one for CUDA devices.
    Device,
    /// Products and a softmax.
    Composed,
}

/// The gradients of queries, keys and values by the device's blockwise kernel.
fn flash_backward(
    [dout, q, k, v, out, lse]: [&Tensor; 6],
    sizes: &Sizes,
    spec: &op::Attention,
) -> Outcome<(Tensor, Tensor, Tensor)> {
    // The operands for samples of unequal lengths and for dropout stay undefined.
    let none = Tensor::new();
    Tensor::f_internal_scaled_dot_product_flash_attention_backward(
        dout,
        q,
        k,
        v,
        out,
        lse,
        &none,
        &none,
        sizes.q_len,
        sizes.k_len,
        0.0,
        spec.causal,
        &none,
        &none,
        spec.scale,
    )
}

impl Node<'_> {
    /// `q, k, v, (seen), (table, index) -> out, lse`. The `lse` of a query that sees no key is 0,
    /// and its result too.
    pub(super) fn attention(&self, spec: &op::Attention, inputs: &[Value]) -> Result<Vec<Tensor>> {
        let x = |i: usize| tensor(&inputs[i]);
        let (q, k, v) = (x(0)?, x(1)?, x(2)?);
        let sizes = Sizes::of(spec, q, k, self.call.context.place);
        let terms = Terms::find(inputs, 3)?;
        if sizes.k_len == 0 {
            // ATen's kernels divide by the number of keys.
            let rows = [sizes.batch, sizes.heads, sizes.q_len];
            let lse = Tensor::f_zeros(rows, (stat_kind(q.kind()), q.device()));
            return Ok(vec![self.at(q.f_zeros_like())?, self.at(lse)?]);
        }
        let factors = self.attention_mask(spec, &sizes, stat_kind(q.kind()))?;
        if factors.is_none() && self.has_own_attention(spec, &sizes, &terms, q) {
            let (out, lse) = self.own_attention(spec, &sizes, [q, k, v])?;
            return Ok(vec![out, lse]);
        }
        let [q, k, v] = self.at(sizes.heads([q, k, v]))?;
        let (out, lse) = match self.attention_kernel(spec, &sizes, &terms, factors.as_ref(), &q) {
            Kernel::Host => {
                let outcome = || {
                    let (causal, added) = terms.visibility(spec, &sizes, &q)?;
                    Tensor::f_internal_scaled_dot_product_flash_attention_for_cpu(
                        &q, &k, &v, 0.0, causal, added, spec.scale,
                    )
                };
                self.at(outcome())?
            }
            Kernel::Device => {
                shim::flash_attention(self.call.name, [&q, &k, &v], spec.causal, spec.scale)?
            }
            Kernel::Composed => {
                let outcome = || {
                    let scores = terms.scores(spec, &sizes, &q, &k)?;
                    composed::attention(&scores, &v, factors.as_ref())
                };
                self.at(outcome())?
            }
        };
        let lse = match spec.keys {
            Keys::OfRank(_) => self.at(terms.without_unseeing(spec, &sizes, lse))?,
            Keys::All | Keys::Ring => lse,
        };
        Ok(vec![self.at(sizes.join(&out))?, lse])
    }

    /// `out, lse, out, lse -> out, lse`.
    pub(super) fn join_attention(&self, inputs: &[Value]) -> Result<Vec<Tensor>> {
        let x = |i: usize| tensor(&inputs[i]);
        self.at(composed::join([x(0)?, x(2)?], [x(1)?, x(3)?]))
    }

    /// `dout, q, k, v, out, lse, (seen), (table, index) -> dq, dk, dv, (dtable)`.
    pub(super) fn attention_grad(
        &self,
        spec: &op::Attention,
        inputs: &[Value],
    ) -> Result<Vec<Tensor>> {
        let x = |i: usize| tensor(&inputs[i]);
        let (q, k, v) = (x(1)?, x(2)?, x(3)?);
        // The joined `lse` of a query that saw no key; see `Node::attention`.
        let lse = &match spec.keys {
            Keys::OfRank(_) => self.at(composed::finite(x(5)?))?,
            Keys::All | Keys::Ring => x(5)?.shallow_clone(),
        };
        let sizes = Sizes::of(spec, q, k, self.call.context.place);
        let terms = Terms::find(inputs, 6)?;
        if sizes.k_len == 0 {
            return self.grads_without_keys([q, k, v], &terms);
        }
        let factors = self.attention_mask(spec, &sizes, stat_kind(q.kind()))?;
        if factors.is_none() && self.has_own_attention(spec, &sizes, &terms, q) {
            return self.own_attention_grad(spec, &sizes, [x(0)?, q, k, v, x(4)?], lse);
        }
        let [q, k, v] = self.at(sizes.heads([q, k, v]))?;
        let dout = self.at(sizes.split(x(0)?, sizes.heads))?;
        let out = self.at(sizes.split(x(4)?, sizes.heads))?;
        let kernel = match self.attention_kernel(spec, &sizes, &terms, factors.as_ref(), &q) {
            Kernel::Host if terms.table.is_some() => Kernel::Composed,
            kernel => kernel,
        };
        let mut dtable = None;
        let (dq, dk, dv) = match kernel {
            Kernel::Host => {
                let outcome = || {
                    let (causal, added) = terms.visibility(spec, &sizes, &q)?;
                    Tensor::f_internal_scaled_dot_product_flash_attention_for_cpu_backward(
                        &dout, &q, &k, &v, &out, lse, 0.0, causal, added, spec.scale,
                    )
                };
                self.at(outcome())?
            }
            Kernel::Device => {
                let operands = [&dout, &q, &k, &v, &out, lse];
                self.at(flash_backward(operands, &sizes, spec))?
            }
            Kernel::Composed => {
                let mut outcome = || {
                    let node = Composed {
                        scale: spec.scale,
                        scores: terms.scores(spec, &sizes, &q, &k)?,
                        operands: [&q, &k, &v],
                        results: [&dout, &out, lse],
                        factors: factors.as_ref(),
                    };
                    let (grads, dscores) = node.grads()?;
                    dtable = terms.table_grad(&dscores)?;
                    Ok(grads)
                };
                self.at(outcome())?
            }
        };
        let outcome = || {
            let dq = sizes.join(&dq)?;
            Ok(vec![dq, sizes.join_shared(&dk)?, sizes.join_shared(&dv)?])
        };
        let mut grads = self.at(outcome())?;
        grads.extend(dtable);
        Ok(grads)
    }

    /// The gradients of an attention without keys, which are zeros.
    fn grads_without_keys(&self, qkv: [&Tensor; 3], terms: &Terms<'_>) -> Result<Vec<Tensor>> {
        let table = terms.table.map(|[table, _]| table);
        let operands = qkv.into_iter().chain(table);
        operands.map(|x| self.at(x.f_zeros_like())).collect()
    }

    /// Whether this crate's kernel computes the node without dropout, as the fastest: see [`own`].
    fn has_own_attention(
        &self,
        spec: &op::Attention,
        sizes: &Sizes,
        terms: &Terms<'_>,
        q: &Tensor,
    ) -> bool {
        let plain = terms.is_empty() && sizes.places.is_none() && spec.keys == Keys::All;
        plain && self.backend.vectors.is_some() && q.kind() == Kind::BFloat16
    }

    fn attention_kernel(
        &self,
        spec: &op::Attention,
        sizes: &Sizes,
        terms: &Terms<'_>,
        factors: Option<&Tensor>,
        q: &Tensor,
    ) -> Kernel {
        if factors.is_some() {
            return Kernel::Composed;
        }
        if self.backend.is_cpu() {
            return Kernel::Host;
        }
        // What FlashAttention-2 takes: no terms, and queries that end where the keys do.
        let plain = terms.is_empty() && spec.window.is_none();
        let aligned = !spec.causal || sizes.is_aligned();
        let width = sizes.head_dim % 8 == 0 && sizes.head_dim <= 256;
        if plain && aligned && width && is_half(q.kind()) {
            Kernel::Device
        } else {
            Kernel::Composed
        }
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
        // A slice takes its rows and columns from the mask of all.
        let lens = sizes.places.map(|places| [int(places.len); 2]);
        let [rows, columns] = lens.unwrap_or([sizes.q_len, sizes.k_len]);
        let shape = [sizes.batch, sizes.heads, rows, columns].map(|size| size as usize);
        let slice = SampleSlice {
            first_sample: context.sample_base,
            outer: 1,
            rows: Runs::one(0),
            dim_full: dropout.cut_dim().map_or(spec.heads, |(_, full)| full),
            runs: dropout.runs(context.place, spec.heads),
            dim_local: spec.heads,
            inner: shape[2] * shape[3],
        };
        let mask = self.mask(&dropout, slice, &shape, kind)?;
        if sizes.places.is_none() {
            return Ok(Some(mask));
        }
        let outcome = || {
            let rows = mask.f_index_select(2, &sizes.of_queries(mask.device())?)?;
            rows.f_index_select(3, &sizes.of_keys(mask.device())?)
        };
        self.at(outcome()).map(Some)
    }
}
