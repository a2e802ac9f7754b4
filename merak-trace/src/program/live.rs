//! Bytes of values that are alive while a program runs.

use super::StageProgram;
use crate::{
    Graph, Node, NodeId, Source, ValueId,
    autodiff::Phase,
    op::{Class, ResultMemory},
};
use std::collections::BTreeMap;

/// Bytes of the values of one microbatch, without scratch memory of kernels, parameters and
/// gradients of parameters.
///
/// ```text
///   forward ─► kept ─┬─► backward ─────────────────────────────────────────────► nothing
///                    ├─► input_half ──────────────────► between_halves ─► weight_half
///                    └─► recompute ─► recomputed ─► after_recompute (either of the two)
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct LiveBytes {
    /// Peak of the forward.
    pub forward: usize,
    /// Alive after the forward.
    pub kept: usize,
    /// Peak of the whole backward, recomputation and values kept by the forward included.
    pub backward: usize,
    /// Peak of the input half of the backward, recomputation included.
    pub input_half: usize,
    /// Alive between the halves: the values that the weight half reads.
    pub between_halves: usize,
    /// Peak of the weight half.
    pub weight_half: usize,
    /// Peak of a recomputation ahead of the backward.
    pub recompute: usize,
    /// Alive after that recomputation.
    pub recomputed: usize,
    /// Peak of the whole backward after it.
    pub backward_after_recompute: usize,
    /// Peak of the input half after it.
    pub input_half_after_recompute: usize,
}

impl StageProgram {
    /// Lower bound for any backend that keeps a value until its last read. The program is walked as
    /// the interpreter does, with sizes in place of values.
    ///
    /// Operations overwrite operands after their last read where [`ResultMemory`] allows it, and a
    /// view takes no memory.
    ///
    /// ```
    /// use merak_trace::{RecomputePlan, StageCuts, StageProgram, models::{self, TraceOptions}};
    ///
    /// let config = serde_json::json!({ "model_type": "gpt2", "n_embd": 64, "n_layer": 4,
    ///     "n_head": 4, "vocab_size": 10 });
    /// let graph = models::from_config(&config)?.trace(&TraceOptions::training(1, 128))?;
    /// let live = |chunks| {
    ///     let plan = RecomputePlan { chunks, ..Default::default() };
    ///     StageProgram::training(&graph, &StageCuts::whole(&graph), 0, &plan)
    ///         .map(|program| program.live_bytes())
    /// };
    /// let (all, least) = (live(vec![])?, live(vec![0..graph.nodes().len()])?);
    /// assert!(least.kept < all.kept && all.kept <= all.forward && all.forward <= all.backward);
    /// # Ok::<(), merak_trace::Error>(())
    /// ```
    pub fn live_bytes(&self) -> LiveBytes {
        self.walked(true)
    }

    /// The same for a backend that gives every result memory of its own.
    pub fn live_bytes_without_reuse(&self) -> LiveBytes {
        self.walked(false)
    }

    /// Bytes beyond a microbatch's peak in a backend that keeps freed memory by length: lengths
    /// peak at different times.
    pub fn kept_free_bytes(&self) -> usize {
        let mut walk = Walk::new(self, true);
        walk.lengths = Some(BTreeMap::new());
        walk.forward(self);
        let after = walk.backward(
            self,
            &[
                Phase::Recompute,
                Phase::BackwardInput,
                Phase::BackwardWeight,
            ],
        );
        let peaks = after.lengths.iter().flatten();
        let all = peaks.map(|(bytes, length)| bytes.saturating_mul(length.peak));
        let all = all.fold(0, usize::saturating_add);
        all.saturating_sub(after.peak)
    }

    fn walked(&self, overwrites: bool) -> LiveBytes {
        use Phase::{BackwardInput as Input, BackwardWeight as Weight, Recompute};
        let mut walk = Walk::new(self, overwrites);
        walk.forward(self);
        let (kept, forward) = walk.mark();

        let mut ahead = walk.clone();
        ahead.phases(self, &[Recompute]);
        let (recomputed, recompute) = ahead.mark();
        let whole = [Recompute, Input, Weight];
        let mut halves = walk.backward(self, &[Recompute, Input]);
        let returned = self.recv.iter().filter_map(|hop| hop.grad);
        returned.for_each(|value| halves.take(value));
        let (between_halves, input_half) = halves.mark();
        halves.phases(self, &[Weight]);
        LiveBytes {
            forward,
            kept,
            backward: walk.backward(self, &whole).peak,
            input_half,
            between_halves,
            weight_half: halves.peak,
            recompute,
            recomputed,
            backward_after_recompute: ahead.backward(self, &whole[1..]).peak,
            input_half_after_recompute: ahead.backward(self, &[Input]).peak,
        }
    }
}

/// Number of live values of one length.
#[derive(Clone, Default)]
struct Length {
    now: usize,
    peak: usize,
}

#[derive(Clone)]
struct Walk<'a> {
    graph: &'a Graph,
    /// Whether results take the memory of an operand that ends, where the operation allows it.
    overwrites: bool,
    /// Remaining reads of each value.
    remaining: Vec<u32>,
    /// The value whose memory each value lies in.
    storage: Vec<ValueId>,
    /// Living values in each value's memory.
    holders: Vec<u32>,
    now: usize,
    peak: usize,
    /// Live values by their bytes, if asked for.
    lengths: Option<BTreeMap<usize, Length>>,
}

impl<'a> Walk<'a> {
    fn new(program: &'a StageProgram, overwrites: bool) -> Self {
        let count = program.graph.num_values();
        Self {
            graph: &program.graph,
            overwrites,
            remaining: program.use_counts(),
            storage: (0..count).map(|value| ValueId(value as u32)).collect(),
            holders: vec![0; count],
            now: 0,
            peak: 0,
            lengths: None,
        }
    }

    /// Steps through the inputs, the nodes of the forward and the outputs.
    fn forward(&mut self, program: &StageProgram) {
        let given = program.inputs.iter().map(|port| port.value);
        given
            .chain(program.recv.iter().map(|hop| hop.value))
            .for_each(|value| self.give(value));
        program.forward.iter().for_each(|&node| self.step(node));
        let leaving = program.send.iter().map(|hop| hop.value);
        leaving
            .chain(program.outputs.iter().map(|port| port.value))
            .for_each(|value| self.take(value));
    }

    /// Bytes of a value's own memory; parameters are counted elsewhere.
    fn bytes(&self, value: ValueId) -> usize {
        match self.graph.value(value).source {
            Source::Param(_) => 0,
            Source::Input(_) | Source::Node { .. } => self.graph.ty(value).size_bytes(),
        }
    }

    /// Begins the life of a value, if it is read.
    fn give(&mut self, value: ValueId) {
        if self.remaining[value.index()] == 0 {
            return;
        }
        let storage = self.storage[value.index()];
        self.holders[storage.index()] += 1;
        if self.holders[storage.index()] == 1 {
            let bytes = self.bytes(storage);
            self.now = self.now.saturating_add(bytes);
            self.peak = self.peak.max(self.now);
            if let Some(lengths) = &mut self.lengths {
                let length = lengths.entry(bytes).or_default();
                length.now += 1;
                length.peak = length.peak.max(length.now);
            }
        }
    }

    /// Reads a value; the last read ends its life.
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
                let bytes = self.bytes(storage);
                self.now = self.now.saturating_sub(bytes);
                let lengths = self.lengths.as_mut();
                if let Some(length) = lengths.and_then(|lengths| lengths.get_mut(&bytes)) {
                    length.now = length.now.saturating_sub(1);
                }
            }
        }
    }

    /// Live bytes, and their peak since the last mark.
    fn mark(&mut self) -> (usize, usize) {
        (self.now, std::mem::replace(&mut self.peak, self.now))
    }

    /// A copy of the walk that goes on with the incoming gradients and some phases of the backward.
    fn backward(&self, program: &StageProgram, phases: &[Phase]) -> Self {
        let mut walk = self.clone();
        let grads = program.send.iter().filter_map(|hop| hop.grad);
        grads
            .chain(program.loss_grad)
            .for_each(|value| walk.give(value));
        walk.phases(program, phases);
        walk
    }

    /// Steps through the nodes of some phases of the backward.
    fn phases(&mut self, program: &StageProgram, phases: &[Phase]) {
        for &node in &program.backward {
            if phases.contains(&program.phases[node.index()]) {
                self.step(node);
            }
        }
    }

    fn step(&mut self, node: NodeId) {
        let node = self.graph.node(node);
        let memory = node.op.result_memory();
        if memory == ResultMemory::View {
            self.storage[node.outputs[0].index()] = self.storage[node.inputs[0].index()];
        }
        let overwritten = usize::from(memory == ResultMemory::Operand && self.may_overwrite(node));
        let (first, others) = node.inputs.split_at(overwritten);
        for &value in first {
            self.take(value);
        }
        for &value in &node.outputs {
            self.give(value);
        }
        // Unread results live for a moment.
        let for_a_moment = self.dropped(node).saturating_add(self.on_the_way(node));
        self.peak = self.peak.max(self.now.saturating_add(for_a_moment));
        for &value in others {
            self.take(value);
        }
    }

    /// Whether the first operand has the type of the result, and of what is added to it.
    fn may_overwrite(&self, node: &Node) -> bool {
        let result = self.graph.ty(node.outputs[0]);
        let is_like = |&value: &ValueId| self.graph.ty(value) == result;
        self.overwrites
            && match node.op.class() {
                Class::Add => node.inputs.iter().all(is_like),
                Class::Source
                | Class::Linear(_)
                | Class::Lookup
                | Class::LayerNorm
                | Class::RmsNorm
                | Class::Attention
                | Class::Rope
                | Class::Activation
                | Class::Dropout
                | Class::Loss(_)
                | Class::Mul
                | Class::Identity
                | Class::Form
                | Class::Transpose
                | Class::Total
                | Class::Function
                | Class::Constant
                | Class::Gradient
                | Class::Region(_) => is_like(&node.inputs[0]),
            }
    }

    /// Bytes of a ring besides operands and results: keys and values that leave and arrive, and the
    /// results of a round.
    fn on_the_way(&self, node: &Node) -> usize {
        let Some(ring) = node.op.ring() else {
            return 0;
        };
        let pair = node.inputs[ring.keys].iter();
        let values = pair.clone().chain(pair).chain(&node.outputs);
        let sizes = values.map(|value| self.graph.ty(*value).size_bytes());
        sizes.fold(0, usize::saturating_add)
    }

    /// Bytes of results that no node reads, except gradients that kernels add straight to their
    /// sums.
    fn dropped(&self, node: &Node) -> usize {
        if matches!(
            node.op.result_memory(),
            ResultMemory::Sum | ResultMemory::View
        ) {
            return 0;
        }
        let results = node.outputs.iter();
        let unread = results.filter(|value| self.remaining[value.index()] == 0);
        let sizes = unread.map(|value| self.graph.ty(*value).size_bytes());
        sizes.fold(0, usize::saturating_add)
    }
}
