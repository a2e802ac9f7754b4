//! Attention over past positions.

use super::{Backend, Call};
use crate::{Op, Result, TensorType, Value, op::RelativeBuckets};
use merak_mpu::DType;
use std::{any::Any, fmt};

/// Keys and values of the past positions of one sequence at one attention, in memory of the
/// backend's choice.
#[derive(Default)]
pub struct Past {
    store: Option<Box<dyn Store>>,
}

/// A backend's type for keys and values.
trait Store: Send + Sync {
    fn as_any(&mut self) -> &mut dyn Any;

    fn copy(&self) -> Box<dyn Store>;
}

impl<S: Clone + Send + Sync + 'static> Store for S {
    fn as_any(&mut self) -> &mut dyn Any {
        self
    }

    fn copy(&self) -> Box<dyn Store> {
        Box::new(self.clone())
    }
}

impl Past {
    /// The backend's own store of these, empty at first.
    ///
    /// # Panics
    /// If the store holds another type: one backend uses one type.
    pub fn store<S: Default + Clone + Send + Sync + 'static>(&mut self) -> &mut S {
        let store = self.store.get_or_insert_with(|| Box::new(S::default()));
        (**store)
            .as_any()
            .downcast_mut()
            .expect("a cache stays with the backend that filled it")
    }
}

impl Clone for Past {
    fn clone(&self) -> Self {
        Self {
            store: self.store.as_ref().map(|store| (**store).copy()),
        }
    }
}

impl fmt::Debug for Past {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Past").finish_non_exhaustive()
    }
}

/// The next positions of a sequence, and its past.
#[derive(Debug)]
pub struct Following<'a> {
    /// Number of next queries, at least one.
    pub queries: usize,
    /// Number of next keys.
    pub keys: usize,
    /// Keys and values before them.
    pub past: &'a mut Past,
}

/// A bias of an attention's scores by the distance of query and key.
#[derive(Debug)]
pub struct RelativeBias {
    /// `[buckets, heads]`.
    pub table: Value,
    /// The rows of the table for distances; the lengths are not those of the sequences.
    pub buckets: RelativeBuckets,
}

impl RelativeBias {
    /// The rows of the table for the last queries of a sequence and all its keys.
    pub fn between(&self, q_len: usize, k_len: usize) -> RelativeBuckets {
        RelativeBuckets {
            q_len,
            k_len,
            ..self.buckets
        }
    }
}

/// [`Backend::attend`] by operations that every backend has: it joins past and new positions of
/// each sequence.
pub(super) fn attend<B: Backend + ?Sized>(
    backend: &B,
    call: Call<'_>,
    operands: [Value; 3],
    bias: Option<&RelativeBias>,
    sequences: &mut [Following<'_>],
) -> Result<Value> {
    let run = |op: &Op, results: &[TensorType], inputs| {
        backend.run(
            Call {
                op,
                results,
                ..call
            },
            inputs,
        )
    };
    let split = |value: Value, sizes: &[usize]| {
        let types: Vec<_> = sizes
            .iter()
            .map(|&len| value.ty().with_dim(1, len))
            .collect();
        let sizes = sizes.to_vec();
        run(&Op::Split { dim: 1, sizes }, &types, vec![value])
    };
    let join = |past: &mut Option<Value>, new: Value| {
        let all = match past.take() {
            None => new,
            Some(past) if new.ty().shape[1] == 0 => past,
            Some(past) => {
                let positions = past.ty().shape[1] + new.ty().shape[1];
                let ty = new.ty().with_dim(1, positions);
                run(&Op::Concat { dim: 1 }, &[ty], vec![past, new])?.swap_remove(0)
            }
        };
        Ok::<_, crate::Error>(past.insert(all).clone())
    };
    let [queries, keys, values] = operands;
    let of_queries: Vec<_> = sequences.iter().map(|next| next.queries).collect();
    let of_keys: Vec<_> = sequences.iter().map(|next| next.keys).collect();
    let queries = split(queries, &of_queries)?;
    let (keys, values) = (split(keys, &of_keys)?, split(values, &of_keys)?);
    let own = queries.into_iter().zip(keys).zip(values);
    let mut outs = Vec::with_capacity(sequences.len());
    for (((query, key), value), next) in own.zip(&mut *sequences) {
        let [past_keys, past_values] = next.past.store::<[Option<Value>; 2]>();
        let types = [
            call.results[0].with_dim(1, next.queries),
            call.results[1].with_dim(2, next.queries),
        ];
        let mut inputs = vec![query, join(past_keys, key)?, join(past_values, value)?];
        if let Some(bias) = bias {
            let buckets = bias.between(next.queries, inputs[1].ty().shape[1]);
            let ty = TensorType::new([buckets.q_len, buckets.k_len], DType::I64);
            inputs.push(bias.table.clone());
            inputs.extend(run(&Op::RelativeBuckets(buckets), &[ty], Vec::new())?);
        }
        outs.push(run(call.op, &types, inputs)?.swap_remove(0));
    }
    Ok(run(&Op::Concat { dim: 1 }, &call.results[..1], outs)?.swap_remove(0))
}
