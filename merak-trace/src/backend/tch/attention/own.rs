//! Attention of bf16 by this crate's kernels, whose products multiply bf16 with sums of `f32`, as
//! libtorch's do.
//!
//! Where libtorch's blockwise kernel multiplies by MKL without AVX-512-BF16 or AMX, it computes its
//! products in `f32`, one small copy at a time.

use super::{Node, Outcome, Sizes, elements, elements_mut, shim};
use crate::{
    Result,
    kernels::{self, AttentionGrads, AttentionShape, AttentionSpec, MatMut, Strided, Threads},
    op,
};
use std::iter;
use tch::{Kind, Tensor};

/// The heads of queries that share one of keys, in one sample: the unit of parallel work.
#[derive(Debug, Clone, Copy)]
struct Part {
    sample: usize,
    kv_head: usize,
}

/// A node whose queries see the keys of their sample, or those up to their place.
struct Plain<'a> {
    node: Node<'a>,
    shape: AttentionShape,
    spec: AttentionSpec<'a, f32>,
}

impl Node<'_> {
    /// `q, k, v -> out, lse`.
    pub(super) fn own_attention(
        &self,
        spec: &op::Attention,
        sizes: &Sizes,
        operands: [&Tensor; 3],
    ) -> Result<(Tensor, Tensor)> {
        let plain = Plain::new(*self, spec, sizes);
        let operands = self.at(wide(operands))?;
        let [mut out, mut lse] = self.at(zeros([
            &operands[0].size(),
            &[sizes.batch, sizes.heads, sizes.q_len],
        ]))?;
        plain.forward(&operands, elements_mut(&mut out), elements_mut(&mut lse))?;
        Ok((self.at(out.f_to_kind(Kind::BFloat16))?, lse))
    }

    /// `dout, q, k, v, out, lse -> dq, dk, dv`.
    pub(super) fn own_attention_grad(
        &self,
        spec: &op::Attention,
        sizes: &Sizes,
        operands: [&Tensor; 5],
        lse: &Tensor,
    ) -> Result<Vec<Tensor>> {
        let plain = Plain::new(*self, spec, sizes);
        let operands = self.at(wide(operands))?;
        let lse = self.at(lse.f_contiguous())?;
        let [_, q, k, v, _] = &operands;
        let mut grads = self.at(zeros([&q.size(), &k.size(), &v.size()]))?;
        plain.backward(
            &operands,
            elements(&lse),
            grads.each_mut().map(elements_mut),
        )?;
        let narrow = grads.iter().map(|grad| grad.f_to_kind(Kind::BFloat16));
        self.at(narrow.collect())
    }
}

impl<'a> Plain<'a> {
    fn new(node: Node<'a>, spec: &op::Attention, sizes: &Sizes) -> Self {
        let [batch, q_len, k_len] = [sizes.batch, sizes.q_len, sizes.k_len].map(|x| x as usize);
        let shape = AttentionShape {
            batch,
            q_len,
            k_len,
            q_heads: spec.heads,
            kv_heads: spec.kv_heads,
            head_dim: spec.head_dim,
        };
        let of_part = AttentionShape {
            batch: 1,
            q_heads: spec.heads / spec.kv_heads,
            kv_heads: 1,
            ..shape
        };
        let spec = AttentionSpec {
            shape: of_part,
            scale: spec.scale,
            places: None,
            causal: spec.causal,
            window: spec.window,
            documents: None,
            mask: None,
            bias: None,
            dropout: None,
            rounds: true,
        };
        Self { node, shape, spec }
    }

    fn forward(&self, operands: &[Tensor; 3], out: &mut [f32], lse: &mut [f32]) -> Result<()> {
        let [q, k, v] = operands.each_ref().map(elements::<f32>);
        let lse = lse.chunks_mut(self.spec.shape.q_heads * self.shape.q_len);
        let outs = self.of_queries(out).zip(lse).collect();
        self.each(outs, &|threads, part, (out, lse)| {
            let [k, v] = [k, v].map(|x| self.keys(x, part));
            kernels::attention(threads, &self.spec, self.queries(q, part), k, v, out, lse);
        })
    }

    fn backward(
        &self,
        operands: &[Tensor; 5],
        lse: &[f32],
        [dq, dk, dv]: [&mut [f32]; 3],
    ) -> Result<()> {
        let [dout, q, k, v, out] = operands.each_ref().map(elements::<f32>);
        let of_part = self.spec.shape.q_heads * self.shape.q_len;
        let lse = lse.chunks(of_part);
        let of_keys = self.of_keys(dk).zip(self.of_keys(dv));
        let outs = self.of_queries(dq).zip(of_keys).zip(lse).collect();
        self.each(outs, &|threads, part, ((dq, (dk, dv)), lse)| {
            let operands = [
                self.queries(q, part),
                self.keys(k, part),
                self.keys(v, part),
            ];
            let results = [out, dout].map(|x| self.queries(x, part));
            let dbias = None;
            let grads = AttentionGrads { dq, dk, dv, dbias };
            kernels::attention_grad(threads, &self.spec, operands, results, lse, grads);
        })
    }

    /// Runs `compute` for each part, with what is written there, on libtorch's threads.
    fn each<W: Send>(
        &self,
        outs: Vec<W>,
        compute: &(dyn Fn(&Threads, Part, W) + Sync),
    ) -> Result<()> {
        let alone = self.node.backend.threads.alone();
        shim::for_each_item(self.node.call.name, outs, &|i, out| {
            let part = Part {
                sample: i / self.shape.kv_heads,
                kv_head: i % self.shape.kv_heads,
            };
            compute(&alone, part, out);
        })
    }

    /// `[B, Sq, heads*D]` by parts.
    fn of_queries<'t>(&self, x: &'t mut [f32]) -> impl Iterator<Item = MatMut<'t, f32>> + use<'t> {
        self.by_parts(x, self.shape.q_len, self.spec.shape.q_heads)
    }

    /// `[B, Sk, kv_heads*D]` by parts.
    fn of_keys<'t>(&self, x: &'t mut [f32]) -> impl Iterator<Item = MatMut<'t, f32>> + use<'t> {
        self.by_parts(x, self.shape.k_len, 1)
    }

    fn by_parts<'t>(
        &self,
        x: &'t mut [f32],
        len: usize,
        heads: usize,
    ) -> impl Iterator<Item = MatMut<'t, f32>> + use<'t> {
        let (part, all) = (heads * self.shape.head_dim, self.shape.kv_heads);
        let samples = x.chunks_mut((len * part * all).max(1));
        samples.flat_map(move |x| MatMut::new(x, len, part * all).col_blocks(part))
    }

    fn queries<'t>(&self, x: &'t [f32], part: Part) -> Strided<'t, f32> {
        self.view(x, part, self.shape.q_len, self.spec.shape.q_heads)
    }

    fn keys<'t>(&self, x: &'t [f32], part: Part) -> Strided<'t, f32> {
        self.view(x, part, self.shape.k_len, 1)
    }

    /// The heads of a part in `[B, len, kv_heads*heads*D]`.
    fn view<'t>(&self, x: &'t [f32], part: Part, len: usize, heads: usize) -> Strided<'t, f32> {
        let (own, all) = (heads * self.shape.head_dim, self.shape.kv_heads);
        let mut view = Strided::contiguous(x, len, own * all);
        view.offset = part.sample * view.batch_stride + part.kv_head * own;
        view
    }
}

/// Tensors as `f32`, without gaps.
fn wide<const N: usize>(tensors: [&Tensor; N]) -> Outcome<[Tensor; N]> {
    let mut wide = tensors.map(|_| Tensor::new());
    for (wide, x) in iter::zip(&mut wide, tensors) {
        *wide = x.f_to_kind(Kind::Float)?.f_contiguous()?;
    }
    Ok(wide)
}

/// Tensors of `f32`.
fn zeros<const N: usize>(sizes: [&[i64]; N]) -> Outcome<[Tensor; N]> {
    let mut zeros = sizes.map(|_| Tensor::new());
    for (zeros, size) in iter::zip(&mut zeros, sizes) {
        *zeros = Tensor::f_zeros(size, (Kind::Float, tch::Device::Cpu))?;
    }
    Ok(zeros)
}
