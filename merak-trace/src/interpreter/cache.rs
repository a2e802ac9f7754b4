//! What decoding keeps between tokens.

use super::{Batch, Forwarded, Frame, Interpreter};
use crate::{Call, Error, NodeId, Op, Result, RunContext, Value};

/// Keys and values of the positions that have passed, for each attention of a stage of a causal model.
///
/// A prompt passes once and fills it; then one position at a time passes, and every attention sees the
/// keys before it too. All sequences of a batch have the same length. A rank of the tensor axis keeps the
/// keys and values of its own heads, a stage those of its own layers.
///
/// # Shapes
/// After `n` positions, keys and values are `[B, n, kv_heads * head_dim]`.
#[derive(Debug, Clone, Default)]
pub struct KvCache {
    /// In the order of the attentions.
    entries: Vec<[Value; 2]>,
    positions: usize,
}

impl KvCache {
    /// Positions that have passed.
    pub fn positions(&self) -> usize {
        self.positions
    }

    /// Bytes of the keys and values.
    pub fn size_bytes(&self) -> usize {
        let values = self.entries.iter().flatten();
        values.map(|value| value.ty().size_bytes()).sum()
    }
}

impl Interpreter {
    /// Runs the forward of the `positions` positions that follow those in the cache, and adds them to it. The
    /// program is an inference one for sequences of that length; otherwise as [`Interpreter::forward`].
    ///
    /// # Errors
    /// As for [`Interpreter::forward`], and when an attention is not causal or hides or biases keys; the cache
    /// then is as it was.
    pub fn forward_cached(
        &self,
        params: &[Value],
        batch: &Batch,
        received: Vec<Value>,
        context: RunContext,
        (cache, positions): (&mut KvCache, usize),
    ) -> Result<Forwarded> {
        let context = RunContext {
            position_offset: cache.positions,
            ..context
        };
        let mut frame = self.begin(batch, received, context)?;
        let mut entries = Vec::with_capacity(cache.entries.len());
        self.scope(|| {
            for &node in &self.program.forward {
                if matches!(self.program.graph.node(node).op, Op::Attention(_)) {
                    let past = cache.entries.get(entries.len());
                    entries.push(self.attend(&mut frame, params, node, past)?);
                } else {
                    self.step(&mut frame, params, node)?;
                }
            }
            Ok(())
        })?;
        let forwarded = self.end(frame, params)?;
        cache.entries = entries;
        cache.positions += positions;
        Ok(forwarded)
    }

    /// Runs an attention over the keys and values of the past and its own; returns all of them.
    fn attend(
        &self,
        frame: &mut Frame,
        params: &[Value],
        id: NodeId,
        past: Option<&[Value; 2]>,
    ) -> Result<[Value; 2]> {
        let operands = self.operands(frame, params, id)?;
        let (results, context) = (self.result_types(id), frame.context);
        let call = self.call(id, &results, &context);
        // What else an attention can take counts all positions, which pass apart here.
        let causal = matches!(call.op, Op::Attention(spec) if spec.causal);
        let (true, Ok([query, key, value])) = (causal, <[Value; 3]>::try_from(operands)) else {
            return Err(Error::Backend {
                node: call.name.to_owned(),
                reason:
                    "keeps no keys and values: only causal attention without further operands does"
                        .to_owned(),
            });
        };
        let all = match past {
            None => [key, value],
            Some([keys, values]) => [self.join(call, keys, key)?, self.join(call, values, value)?],
        };
        let inputs = vec![query, all[0].clone(), all[1].clone()];
        let values = self.backend.run(call, inputs)?;
        self.keep(frame, id, values);
        Ok(all)
    }

    /// `[B, n, width]` and `[B, m, width]` as `[B, n + m, width]`.
    fn join(&self, call: Call<'_>, past: &Value, new: Value) -> Result<Value> {
        let positions = past.ty().shape[1] + new.ty().shape[1];
        let ty = new.ty().with_dim(1, positions);
        let mut joined =
            self.run_op(call, &Op::Concat { dim: 1 }, &[ty], vec![past.clone(), new])?;
        Ok(joined.swap_remove(0))
    }
}
