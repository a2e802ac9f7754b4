//! Attention nodes as calls of the blockwise kernels.

use super::{
    Candle, Products, elements,
    run::{Node, Number, Results},
};
use crate::{
    Call, Following, Op, RelativeBias, Result, TensorType, Value,
    kernels::{
        self, AttentionDropout, AttentionGrads, AttentionMask, AttentionShape, AttentionSpec,
        MatMut, Newest, Strided,
    },
    op::{self, AttentionOptions},
};
use merak_mpu::{DType, Element};
use std::{iter, ops::Range, sync::Arc};

/// Terms added to the scores of an attention, as numbers.
struct Terms<T> {
    /// `[B, Sk]`: minus infinity for keys that are hidden.
    hidden: Option<Vec<T>>,
    /// `[B, S]`: the document at each position.
    documents: Option<Vec<Range<usize>>>,
    /// `[heads, Sq, Sk]`.
    bias: Option<Vec<T>>,
}

/// Keys and values of a sequence, `[n, kv_heads*D]` each. Copies share them until one grows.
#[derive(Clone, Default)]
struct Kept<T> {
    keys: Arc<Vec<T>>,
    values: Arc<Vec<T>>,
}

/// Attention that includes past positions.
pub(super) fn attend(
    backend: &Candle,
    call: Call<'_>,
    operands: (&[Value; 3], Option<&RelativeBias>),
    sequences: &mut [Following<'_>],
) -> Result<Value> {
    let node = Node { backend, call };
    match (call.op, call.results[0].dtype) {
        (Op::Attention(spec), DType::F32) => node.attend::<f32>(spec, operands, sequences),
        (Op::Attention(spec), DType::F64) => node.attend::<f64>(spec, operands, sequences),
        _ => Err(node.unsupported(operands.0)),
    }
}

impl Node<'_> {
    /// `q, k, v -> out` of the next positions of each sequence.
    fn attend<T: Number>(
        &self,
        spec: &op::Attention,
        (operands, bias): (&[Value; 3], Option<&RelativeBias>),
        sequences: &mut [Following<'_>],
    ) -> Result<Value> {
        let [q, k, v] = operands.each_ref().map(elements::<T>);
        let (q, k, v) = (q?, k?, v?);
        let terms = Terms {
            hidden: None,
            documents: None,
            bias: None,
        };
        let spec = self.attention_spec::<T>(spec, &operands[0], &operands[1], &terms);
        let dim = spec.shape.head_dim;
        let (width, kv_width) = (spec.shape.q_heads * dim, spec.shape.kv_heads * dim);
        let mut out = self.out::<T>(0);
        let (mut rest, mut q, mut k, mut v) = (&mut out[..], &q[..], &k[..], &v[..]);
        let (mut newest, mut longest) = (Vec::new(), 0);
        for next in sequences {
            let kept = next.past.store::<Kept<T>>();
            if next.keys > 0 {
                let [k, v] = [&mut k, &mut v].map(|all| front(all, next.keys * kv_width));
                Arc::make_mut(&mut kept.keys).extend_from_slice(k);
                Arc::make_mut(&mut kept.values).extend_from_slice(v);
            }
            let query = front(&mut q, next.queries * width);
            let (out, others) = std::mem::take(&mut rest).split_at_mut(query.len());
            rest = others;
            let (past_keys, past_values) = (&kept.keys[..], &kept.values[..]);
            let shape = AttentionShape {
                q_len: next.queries,
                k_len: past_keys.len() / kv_width.max(1),
                ..spec.shape
            };
            if next.queries == 1 {
                longest = shape.k_len.max(longest);
                newest.push(Newest {
                    query,
                    keys: past_keys,
                    values: past_values,
                    out,
                });
            } else {
                let operands = [query, past_keys, past_values];
                self.attend_last(&AttentionSpec { shape, ..spec }, operands, bias, out)?;
            }
        }
        // The distances of the longest sequence are those of all.
        let shape = AttentionShape {
            q_len: 1,
            k_len: longest,
            ..spec.shape
        };
        let bias = self.bias_between(bias, shape)?;
        let spec = AttentionSpec {
            bias: bias.as_ref().map(|bias| of_pairs(bias, shape)),
            ..spec
        };
        kernels::attention_newest(&self.backend.threads, &spec, newest);
        self.give_back(bias)?;
        self.backend.wrap(&self.call.results[0], out)
    }

    /// `q, k, v -> out` of the last queries of a sequence, which are several.
    fn attend_last<T: Number>(
        &self,
        spec: &AttentionSpec<'_, T>,
        [q, k, v]: [&[T]; 3],
        bias: Option<&RelativeBias>,
        out: &mut [T],
    ) -> Result<()> {
        let shape = spec.shape;
        let bias = self.bias_between(bias, shape)?;
        let spec = AttentionSpec {
            bias: bias.as_ref().map(|bias| of_pairs(bias, shape)),
            ..*spec
        };
        let mut lse = vec![T::ZERO; shape.q_heads * shape.q_len];
        let to = MatMut::new(out, shape.q_len, shape.q_heads * shape.head_dim);
        let (q, k, v) = (queries(&spec, q), keys(&spec, k), keys(&spec, v));
        kernels::attention(&self.backend.threads, &spec, q, k, v, to, &mut lse);
        self.give_back(bias)
    }

    /// `q, k, v, (seen), (table, index) -> out, lse`.
    pub(super) fn attention<T: Number>(&self, inputs: &[Value], spec: &op::Attention) -> Results {
        let terms = self.terms::<T>(spec, inputs, 3)?;
        let spec = self.attention_spec::<T>(spec, &inputs[0], &inputs[1], &terms);
        let [q, k, v] = [&inputs[0], &inputs[1], &inputs[2]].map(elements::<T>);
        let (q, k, v) = (q?, k?, v?);
        let (mut out, mut lse) = (self.out::<T>(0), self.out::<T>(1));
        let (q, k, v) = (queries(&spec, &q), keys(&spec, &k), keys(&spec, &v));
        let rows = spec.shape.batch * spec.shape.q_len;
        let to = MatMut::new(&mut out, rows, spec.shape.q_heads * spec.shape.head_dim);
        kernels::attention(&self.backend.threads, &spec, q, k, v, to, &mut lse);
        self.give_back(terms.bias)?;
        self.done([out, lse])
    }

    /// `dout, q, k, v, out, lse, (seen), (table, index) -> dq, dk, dv, (dtable)`.
    pub(super) fn attention_grad<T: Number>(
        &self,
        inputs: &[Value],
        spec: &op::Attention,
    ) -> Results {
        let terms = self.terms::<T>(spec, inputs, 6)?;
        let spec = self.attention_spec::<T>(spec, &inputs[1], &inputs[2], &terms);
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
        let mut dbias = terms
            .bias
            .as_ref()
            .map(|bias| self.backend.pool.take::<T>(bias.len()));
        let grads = AttentionGrads {
            dq: MatMut::new(&mut dq, batch * q_len, q_heads * head_dim),
            dk: MatMut::new(&mut dk, batch * k_len, kv_heads * head_dim),
            dv: MatMut::new(&mut dv, batch * k_len, kv_heads * head_dim),
            dbias: dbias.as_deref_mut(),
        };
        let operands = [queries(&spec, &q), keys(&spec, &k), keys(&spec, &v)];
        let results = [queries(&spec, &out), queries(&spec, &dout)];
        let threads = &self.backend.threads;
        kernels::attention_grad(threads, &spec, operands, results, &lse, grads);
        self.give_back(terms.bias)?;
        let Some(dbias) = dbias else {
            return self.done([dq, dk, dv]);
        };
        let index = elements::<i64>(&inputs[inputs.len() - 1])?;
        let mut dtable = self.out::<T>(3);
        kernels::relative_bias_grad(threads, (q_heads, k_len), &dbias, &index, &mut dtable)
            .map_err(|e| self.kernel_error(e))?;
        self.give_back(Some(dbias))?;
        self.done([dq, dk, dv, dtable])
    }

    /// `out, lse, out, lse -> out, lse`.
    pub(super) fn join_attention<T: Number>(&self, inputs: &[Value]) -> Results {
        let x = |i: usize| elements::<T>(&inputs[i]);
        let (a, b) = ((x(0)?, x(1)?), (x(2)?, x(3)?));
        let (mut out, mut lse) = (self.out::<T>(0), self.out::<T>(1));
        let &[_, heads, q_len] = &self.ty(1).shape[..] else {
            return Err(self.unsupported(inputs));
        };
        let both = [(&*a.0, &*a.1), (&*b.0, &*b.1)];
        let results = (&mut out[..], &mut lse[..]);
        kernels::join_attention(&self.backend.threads, (heads, q_len), both, results);
        self.done([out, lse])
    }

    /// The terms from the operands after the `required` ones.
    fn terms<T: Number>(
        &self,
        spec: &op::Attention,
        inputs: &[Value],
        required: usize,
    ) -> Result<Terms<T>> {
        let options = AttentionOptions::find(inputs.iter().map(Value::ty), required);
        let (mut hidden, mut documents) = (None, None);
        if let Some(seen) = options.seen {
            let len = inputs[seen].ty().last_dim().max(1);
            let seen = elements::<i64>(&inputs[seen])?;
            if spec.documents {
                documents = Some(seen.chunks(len).flat_map(documents_of).collect());
            } else {
                // Queries come first, or after their gradient.
                let first = usize::from(required > 3);
                let [q_len, k_len] = [first, first + 1].map(|x| inputs[x].ty().shape[1]);
                let places = spec.places(self.call.context.place, q_len);
                let place = |key| places.map_or(key, |places| places.keys.at(key));
                let term = |seen: i64| if seen == 0 { T::NEG_INFINITY } else { T::ZERO };
                let of_sample =
                    |seen: &[i64]| (0..k_len).map(|key| term(seen[place(key)])).collect();
                let terms: Vec<Vec<T>> = seen.chunks(len).map(of_sample).collect();
                hidden = Some(terms.concat());
            }
        }
        let bias = match options.table {
            Some(table) => {
                let index = elements::<i64>(&inputs[table + 1])?;
                Some(self.bias(spec.heads, &inputs[table], &index)?)
            }
            None => None,
        };
        Ok(Terms {
            hidden,
            documents,
            bias,
        })
    }

    /// The biases of heads from their table, for pairs of queries and keys.
    fn bias<T: Number>(&self, heads: usize, table: &Value, index: &[i64]) -> Result<Vec<T>> {
        let table = elements::<T>(table)?;
        let mut bias = self.backend.pool.take(heads * index.len());
        kernels::relative_bias(&self.backend.threads, heads, &table, index, &mut bias)
            .map_err(|e| self.kernel_error(e))?;
        Ok(bias)
    }

    /// The biases between the last queries of a sequence and all its keys, if there are biases.
    fn bias_between<T: Number>(
        &self,
        bias: Option<&RelativeBias>,
        shape: AttentionShape,
    ) -> Result<Option<Vec<T>>> {
        let of_shape = |bias: &RelativeBias| {
            let index = bias.between(shape.q_len, shape.k_len).indices();
            self.bias(shape.q_heads, &bias.table, &index)
        };
        bias.map(of_shape).transpose()
    }

    /// Returns temporary memory of a node to the pool.
    fn give_back<T: Number>(&self, memory: Option<Vec<T>>) -> Result<()> {
        if let Some(memory) = memory {
            let ty = TensorType::new([memory.len()], <T as Element>::DTYPE);
            drop(self.backend.wrap(&ty, memory)?);
        }
        Ok(())
    }

    fn attention_spec<'t, T: Number>(
        &self,
        spec: &op::Attention,
        q: &Value,
        k: &Value,
        terms: &'t Terms<T>,
    ) -> AttentionSpec<'t, T> {
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
                dropout: context.dropout(&dropout),
                first_sample: context.sample_base,
                first_head: dropout.runs(context.place, spec.heads).at(0) as u64,
            });
        let mask = terms.hidden.as_ref().map(|hidden| AttentionMask {
            data: &hidden[..],
            batch_stride: shape.k_len,
            head_stride: 0,
            row_stride: 0,
        });
        AttentionSpec {
            shape,
            scale: spec.scale,
            places: spec.places(context.place, shape.q_len),
            causal: spec.causal,
            window: spec.window,
            documents: terms.documents.as_deref(),
            mask,
            bias: terms.bias.as_ref().map(|bias| of_pairs(bias, shape)),
            dropout,
            rounds: context.training && self.backend.products == Products::Rounded,
        }
    }
}

/// Takes the first elements.
fn front<'a, T>(all: &mut &'a [T], len: usize) -> &'a [T] {
    let (front, rest) = all.split_at(len);
    *all = rest;
    front
}

/// A term `[heads, Sq, Sk]` of all samples.
fn of_pairs<T>(data: &[T], shape: AttentionShape) -> AttentionMask<'_, T> {
    AttentionMask {
        data,
        batch_stride: 0,
        head_stride: shape.q_len * shape.k_len,
        row_stride: shape.k_len,
    }
}

/// The document of each position of a sequence: the run of ids like its own.
fn documents_of(ids: &[i64]) -> impl Iterator<Item = Range<usize>> {
    let runs = ids.chunk_by(PartialEq::eq).scan(0, |start, run| {
        let first = *start;
        *start += run.len();
        Some(first..*start)
    });
    runs.flat_map(|run| iter::repeat_n(run.clone(), run.len()))
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
