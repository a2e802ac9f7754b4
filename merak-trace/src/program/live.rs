//! Bytes of values that are alive while a program runs.

use super::StageProgram;
use crate::{Graph, Op, Source, ValueId};

/// What the values of one microbatch take at least: what no backend gets around that keeps what a later node
/// reads. Scratch memory of kernels, parameters and gradients of parameters are not in it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct LiveBytes {
    /// Alive between the forward and the backward.
    pub kept: usize,
    /// Most alive at once in the forward.
    pub forward: usize,
    /// Most alive at once in the backward, with what the forward kept.
    pub backward: usize,
}

impl StageProgram {
    /// Walks the program as the interpreter does, with sizes in place of values.
    ///
    /// An operation may write its result over an operand that nobody reads any more, and a view takes nothing.
    ///
    /// ```
    /// use merak_trace::{RecomputePlan, StageCuts, StageProgram, models::{self, TraceOptions}};
    ///
    /// let config = serde_json::json!({ "model_type": "gpt2", "n_embd": 64, "n_layer": 4, "n_head": 4, "vocab_size": 10 });
    /// let graph = models::from_config(&config)?.trace(&TraceOptions::training(1, 128))?;
    /// let live = |chunks| StageProgram::training(&graph, &StageCuts::whole(&graph), 0, &RecomputePlan { chunks, ..Default::default() })
    ///     .map(|program| program.live_bytes());
    /// let (all, least) = (live(vec![])?, live(vec![0..graph.nodes().len()])?);
    /// assert!(least.kept < all.kept && all.kept <= all.forward && all.forward <= all.backward);
    /// # Ok::<(), merak_trace::Error>(())
    /// ```
    pub fn live_bytes(&self) -> LiveBytes {
        let mut walk = Walk::new(self);
        let given = self.inputs.iter().map(|port| port.value);
        given
            .chain(self.recv.iter().map(|hop| hop.value))
            .for_each(|value| walk.give(value));
        self.forward.iter().for_each(|&node| walk.step(node));
        let leaving = self.send.iter().map(|hop| hop.value);
        leaving
            .chain(self.outputs.iter().map(|port| port.value))
            .for_each(|value| walk.take(value));
        let (kept, forward) = (walk.now, walk.peak);
        walk.peak = walk.now;
        let grads = self.send.iter().filter_map(|hop| hop.grad);
        grads
            .chain(self.loss_grad)
            .for_each(|value| walk.give(value));
        self.backward.iter().for_each(|&node| walk.step(node));
        LiveBytes {
            kept,
            forward,
            backward: walk.peak,
        }
    }
}

struct Walk<'a> {
    graph: &'a Graph,
    /// Reads of each value that are still to come.
    remaining: Vec<u32>,
    /// The value whose memory each value lies in.
    storage: Vec<ValueId>,
    /// Living values in each value's memory.
    holders: Vec<u32>,
    now: usize,
    peak: usize,
}

impl<'a> Walk<'a> {
    fn new(program: &'a StageProgram) -> Self {
        let count = program.graph.num_values();
        Self {
            graph: &program.graph,
            remaining: program.use_counts(),
            storage: (0..count).map(|value| ValueId(value as u32)).collect(),
            holders: vec![0; count],
            now: 0,
            peak: 0,
        }
    }

    /// Bytes of a value's own memory; parameters are counted elsewhere.
    fn bytes(&self, value: ValueId) -> usize {
        match self.graph.value(value).source {
            Source::Param(_) => 0,
            Source::Input(_) | Source::Node { .. } => self.graph.ty(value).size_bytes(),
        }
    }

    /// A value begins to live, if anybody reads it.
    fn give(&mut self, value: ValueId) {
        if self.remaining[value.index()] == 0 {
            return;
        }
        let storage = self.storage[value.index()];
        self.holders[storage.index()] += 1;
        if self.holders[storage.index()] == 1 {
            self.now = self.now.saturating_add(self.bytes(storage));
            self.peak = self.peak.max(self.now);
        }
    }

    /// One read of a value; it ends with the last one.
    fn take(&mut self, value: ValueId) {
        let remaining = &mut self.remaining[value.index()];
        *remaining = remaining.saturating_sub(1);
        if *remaining > 0 {
            return;
        }
        let storage = self.storage[value.index()];
        let holders = &mut self.holders[storage.index()];
        // Parameters are read without being given.
        if *holders > 0 {
            *holders -= 1;
            if *holders == 0 {
                self.now = self.now.saturating_sub(self.bytes(storage));
            }
        }
    }

    fn step(&mut self, node: crate::NodeId) {
        let node = self.graph.node(node);
        let is_view = matches!(
            node.op,
            Op::Identity | Op::Reshape { .. } | Op::CopyTo { .. }
        );
        if is_view {
            self.storage[node.outputs[0].index()] = self.storage[node.inputs[0].index()];
            self.give(node.outputs[0]);
        }
        node.inputs.iter().for_each(|&value| self.take(value));
        if !is_view {
            node.outputs.iter().for_each(|&value| self.give(value));
        }
    }
}
