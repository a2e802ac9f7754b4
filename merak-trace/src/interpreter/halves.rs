//! Nodes that run on the halves of a microbatch while collectives of the other half pass.

use super::{Frame, Interpreter, Params, regions::Crossing};
use crate::{
    Error, NodeId, Op, Result, Source, Value, ValueId,
    backend::{Call, GradSink, RunContext},
    program::HalfNode,
};
use std::collections::BTreeMap;

/// A value as two halves of the microbatch.
#[derive(Debug)]
pub(super) struct Split {
    parts: [Option<Value>; 2],
    /// Remaining reads of each.
    remaining: [u32; 2],
}

/// The values of a frame that are in halves.
#[derive(Debug, Default)]
pub(super) struct InHalves {
    values: BTreeMap<ValueId, Split>,
    /// Parameters that the nodes which run on the first half have read, for the second one.
    params: BTreeMap<usize, Value>,
}

impl InHalves {
    /// Bytes of the values.
    pub(super) fn bytes(&self) -> usize {
        let parts = self.values.values().flat_map(|split| &split.parts);
        parts.flatten().map(|part| part.ty().size_bytes()).sum()
    }
}

impl Interpreter {
    /// Runs a node on one half.
    pub(super) fn half_step(
        &self,
        frame: &mut Frame,
        params: &dyn Params,
        (id, half): (NodeId, usize),
        store: Option<&mut dyn GradSink>,
    ) -> Result<()> {
        let inputs = self.half_operands(frame, params, (id, half))?;
        let context = self.half_context(frame, half);
        let call = self.half_call(id, half, &context)?;
        if let Some(store) = store {
            return self.accumulate_half(call, (id, half), inputs, store);
        }
        let values = match self.border(call) {
            None => self.execute(call, inputs)?,
            Some((kind, group)) => {
                let operand = super::first(call, inputs)?;
                match self.start_crossing(call, operand, &group, kind)? {
                    Crossing::Done(value) => vec![value],
                    Crossing::Started(started) => {
                        let result = self.program.graph.node(id).outputs[0];
                        frame.started.insert((result, Some(half)), started);
                        Vec::new()
                    }
                }
            }
        };
        self.keep_half(frame, (id, half), values);
        Ok(())
    }

    /// Adds the gradients of one half.
    fn accumulate_half(
        &self,
        call: Call<'_>,
        (id, half): (NodeId, usize),
        inputs: Vec<Value>,
        store: &mut dyn GradSink,
    ) -> Result<()> {
        let slots = self.slots_of(id);
        // Between the halves a sink may have taken memory that these slots share with others.
        slots.iter().try_for_each(|&slot| store.open(slot))?;
        self.backend
            .accumulate(call, inputs, store.store(), &slots)?;
        if half == 1 {
            slots.into_iter().try_for_each(|slot| store.written(slot))?;
        }
        Ok(())
    }

    /// Waits for a collective of one half, if it has not ended.
    pub(super) fn settle_half(
        &self,
        frame: &mut Frame,
        (value, half): (ValueId, usize),
    ) -> Result<()> {
        let started = frame.started.remove(&(value, Some(half)));
        let producer = self.program.graph.producer(value);
        let (Some(started), Some(node)) = (started, producer) else {
            return Ok(());
        };
        let context = self.half_context(frame, half);
        let call = self.half_call(node, half, &context)?;
        if let Some((kind, _)) = self.border(call) {
            let value = self.finish_crossing(call, started, kind)?;
            self.keep_half(frame, (node, half), vec![value]);
        }
        Ok(())
    }

    /// Puts the halves of a value together, if it is in halves.
    pub(super) fn join_halves(&self, frame: &mut Frame, id: ValueId) -> Result<()> {
        self.settle_half(frame, (id, 0))?;
        self.settle_half(frame, (id, 1))?;
        let Some(split) = frame.halves.values.remove(&id) else {
            return Ok(());
        };
        let Split { parts, remaining } = split;
        let [Some(first), Some(second)] = parts else {
            return Err(self.out_of_order(id));
        };
        let ty = self.program.graph.ty(id);
        let call = self.moving(frame, id);
        let whole = self.run_one(call, &Op::Concat { dim: 0 }, ty, vec![first, second])?;
        frame.slots[id.index()] = Some(whole);
        frame.remaining[id.index()] = remaining[0];
        Ok(())
    }

    /// Cuts a value in halves, if it is whole.
    fn split_whole(&self, frame: &mut Frame, id: ValueId) -> Result<()> {
        self.settle(frame, id)?;
        let is_split = frame.halves.values.contains_key(&id)
            || [0, 1]
                .iter()
                .any(|&half| frame.started.contains_key(&(id, Some(half))));
        if is_split {
            return Ok(());
        }
        let whole = frame.slots[id.index()].take();
        let whole = whole.ok_or_else(|| self.out_of_order(id))?;
        let ty = whole.ty().clone();
        let halves = self.halves()?;
        let all: usize = halves.samples.iter().sum();
        let sizes = halves.samples.map(|samples| ty.shape[0] / all * samples);
        let results = sizes.map(|size| ty.with_dim(0, size));
        let op = Op::Split {
            dim: 0,
            sizes: sizes.to_vec(),
        };
        let call = Call {
            op: &op,
            results: &results,
            ..self.moving(frame, id)
        };
        let mut parts = self.backend.run(call, vec![whole])?.into_iter();
        let split = Split {
            parts: [parts.next(), parts.next()],
            remaining: [frame.remaining[id.index()]; 2],
        };
        frame.halves.values.insert(id, split);
        Ok(())
    }

    /// Reads the operands of a node for one half.
    fn half_operands(
        &self,
        frame: &mut Frame,
        params: &dyn Params,
        (id, half): (NodeId, usize),
    ) -> Result<Vec<Value>> {
        let inputs = self.program.graph.node(id).inputs.iter();
        inputs
            .map(|&input| self.half_operand(frame, params, (input, half)))
            .collect()
    }

    fn half_operand(
        &self,
        frame: &mut Frame,
        params: &dyn Params,
        (id, half): (ValueId, usize),
    ) -> Result<Value> {
        if let Source::Param(param) = self.program.graph.value(id).source {
            let known = &mut frame.halves.params;
            if let (1, Some(value)) = (half, known.get(&param.index())) {
                return Ok(value.clone());
            }
            let value = self.param(params, id, param)?;
            known.insert(param.index(), value.clone());
            return Ok(value);
        }
        if !self.halves()?.batched[id.index()] {
            // The second half has the last read.
            return match half {
                0 => {
                    self.settle(frame, id)?;
                    let value = frame.slots[id.index()].clone();
                    value.ok_or_else(|| self.out_of_order(id))
                }
                _ => self.take(frame, params, id),
            };
        }
        self.split_whole(frame, id)?;
        self.settle_half(frame, (id, half))?;
        let split = frame.halves.values.get_mut(&id);
        let Some(Split { parts, remaining }) = split else {
            return Err(self.out_of_order(id));
        };
        remaining[half] = remaining[half].saturating_sub(1);
        let value = if remaining[half] == 0 {
            parts[half].take()
        } else {
            parts[half].clone()
        };
        if *remaining == [0, 0] {
            frame.halves.values.remove(&id);
        }
        value.ok_or_else(|| self.out_of_order(id))
    }

    /// Keeps the results of a node on one half that are read later.
    fn keep_half(&self, frame: &mut Frame, (id, half): (NodeId, usize), values: Vec<Value>) {
        let outputs = &self.program.graph.node(id).outputs;
        for (&output, value) in outputs.iter().zip(values) {
            let reads = frame.remaining[output.index()];
            if reads > 0 {
                let split = frame.halves.values.entry(output).or_insert_with(|| Split {
                    parts: [None, None],
                    remaining: [reads; 2],
                });
                split.parts[half] = Some(value);
            }
        }
    }

    /// Forgets the parameters that nodes on the first half have read.
    pub(super) fn end_stretch(frame: &mut Frame) {
        frame.halves.params.clear();
    }

    /// The run around one half: its samples follow those before.
    fn half_context(&self, frame: &Frame, half: usize) -> RunContext {
        let before = self.halves.iter().filter(|_| half == 1);
        let before: usize = before.map(|halves| halves.samples[0]).sum();
        RunContext {
            sample_base: frame.context.sample_base + before as u64,
            ..frame.context
        }
    }

    fn half_call<'a>(
        &'a self,
        id: NodeId,
        half: usize,
        context: &'a RunContext,
    ) -> Result<Call<'a>> {
        let node = self.program.graph.node(id);
        let halves = self.halves()?;
        let missing = || self.out_of_order(node.outputs[0]);
        let HalfNode { ops, results } = halves.nodes.get(&id).ok_or_else(missing)?;
        Ok(Call {
            name: &node.name,
            op: ops.as_ref().map_or(&node.op, |ops| &ops[half]),
            results: &results[half],
            context,
        })
    }

    /// The call around a copy of a value.
    fn moving<'a>(&'a self, frame: &'a Frame, id: ValueId) -> Call<'a> {
        let producer = self.program.graph.producer(id);
        Call {
            name: producer.map_or("", |node| &self.program.graph.node(node).name),
            op: &Op::Identity,
            results: &[],
            context: &frame.context,
        }
    }

    fn halves(&self) -> Result<&crate::program::Halves> {
        self.halves.as_deref().ok_or_else(|| Error::Order {
            value: "half".to_owned(),
        })
    }

    fn out_of_order(&self, id: ValueId) -> Error {
        Error::Order {
            value: self.describe(id),
        }
    }
}
