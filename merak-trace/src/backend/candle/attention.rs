//! Attention nodes as calls of the blockwise kernels.

use super::{
    elements,
    run::{Node, Number},
};
use crate::{
    Result, Value,
    kernels::{
        self, AttentionDropout, AttentionGrads, AttentionShape, AttentionSpec, MatMut, Strided,
    },
    op,
};

impl Node<'_> {
    /// `q, k, v -> out, lse`.
    pub(super) fn attention<T: Number>(
        &self,
        spec: &op::Attention,
        inputs: &[Value],
    ) -> Result<Vec<Value>> {
        let spec = self.attention_spec::<T>(spec, &inputs[0], &inputs[1]);
        let [q, k, v] = [&inputs[0], &inputs[1], &inputs[2]].map(elements::<T>);
        let (q, k, v) = (q?, k?, v?);
        let (mut out, mut lse) = (self.out::<T>(0), self.out::<T>(1));
        let (q, k, v) = (queries(&spec, &q), keys(&spec, &k), keys(&spec, &v));
        let rows = spec.shape.batch * spec.shape.q_len;
        let to = MatMut::new(&mut out, rows, spec.shape.q_heads * spec.shape.head_dim);
        kernels::attention(&self.backend.threads, &spec, q, k, v, to, &mut lse);
        self.done([out, lse])
    }

    /// `dout, q, k, v, out, lse -> dq, dk, dv`.
    pub(super) fn attention_grad<T: Number>(
        &self,
        spec: &op::Attention,
        inputs: &[Value],
    ) -> Result<Vec<Value>> {
        let spec = self.attention_spec::<T>(spec, &inputs[1], &inputs[2]);
        let x = |i: usize| elements::<T>(&inputs[i]);
        let (dout, q, k, v, out, lse) = (x(0)?, x(1)?, x(2)?, x(3)?, x(4)?, x(5)?);
        let (mut dq, mut dk, mut dv) = (self.out::<T>(0), self.out::<T>(1), self.out::<T>(2));
        let AttentionShape {
            batch,
            q_len,
            k_len,
            q_heads,
            kv_heads,
            head_dim,
        } = spec.shape;
        let grads = AttentionGrads {
            dq: MatMut::new(&mut dq, batch * q_len, q_heads * head_dim),
            dk: MatMut::new(&mut dk, batch * k_len, kv_heads * head_dim),
            dv: MatMut::new(&mut dv, batch * k_len, kv_heads * head_dim),
        };
        let operands = [queries(&spec, &q), keys(&spec, &k), keys(&spec, &v)];
        let results = [queries(&spec, &out), queries(&spec, &dout)];
        kernels::attention_grad(&self.backend.threads, &spec, operands, results, &lse, grads);
        self.done([dq, dk, dv])
    }

    fn attention_spec<T: Number>(
        &self,
        spec: &op::Attention,
        q: &Value,
        k: &Value,
    ) -> AttentionSpec<'static, T> {
        let shape = AttentionShape {
            batch: q.ty().shape[0],
            q_len: q.ty().shape[1],
            k_len: k.ty().shape[1],
            q_heads: spec.heads,
            kv_heads: spec.kv_heads,
            head_dim: spec.head_dim,
        };
        let context = self.call.context;
        let dropout = spec
            .dropout
            .filter(|_| context.training)
            .map(|dropout| AttentionDropout {
                dropout: self.dropout(&dropout),
                first_sample: context.sample_base,
                first_head: dropout.slice.map_or(0, |slice| {
                    (context.coordinate(slice.axis) * spec.heads) as u64
                }),
            });
        AttentionSpec {
            shape,
            scale: spec.scale,
            causal: spec.causal,
            window: spec.window,
            mask: None,
            dropout,
        }
    }
}

fn queries<'a, T: Number>(spec: &AttentionSpec<'_, T>, data: &'a [T]) -> Strided<'a, T> {
    Strided::contiguous(
        data,
        spec.shape.q_len,
        spec.shape.q_heads * spec.shape.head_dim,
    )
}

fn keys<'a, T: Number>(spec: &AttentionSpec<'_, T>, data: &'a [T]) -> Strided<'a, T> {
    Strided::contiguous(
        data,
        spec.shape.k_len,
        spec.shape.kv_heads * spec.shape.head_dim,
    )
}
