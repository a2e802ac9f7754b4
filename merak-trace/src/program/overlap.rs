//! Collectives that pass while ranks compute: which nodes run on the two halves of a microbatch,
//! and in which order, as in the sub-pipelined tensor parallelism of [Lai et al.
//! 2023](https://arxiv.org/abs/2206.04959).
//!
//! ```text
//! compute   a: attention | b: attention | a: MLP | b: MLP | a: attention of the next block | ...
//! wire                   | a: sum       | b: sum | a: sum | b: sum                         | ...
//! ```
//!
//! Halves are halves of the samples. Nodes of one kind run on them one after the other between two
//! collectives; nodes that need all samples wait for both halves.

use super::StageProgram;
use crate::{
    Graph, Node, NodeId, Op, Overlap, TensorType, ValueId,
    autodiff::Phase,
    infer::infer,
    op::{Class, Collective},
};
use std::collections::{BTreeMap, BTreeSet};

/// A part of a pass over some nodes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Step {
    /// A node runs on the whole microbatch.
    Whole(NodeId),
    /// A node runs on one half, 0 or 1.
    Half(NodeId, usize),
    /// All collectives so far are waited for.
    Wait,
}

/// How a node runs on halves.
#[derive(Debug)]
pub(crate) struct HalfNode {
    /// The operation on each half, where it differs from that on the whole.
    pub(crate) ops: Option<[Op; 2]>,
    /// The types of the results on each half.
    pub(crate) results: [Vec<TensorType>; 2],
}

/// Which nodes of a program run on halves of the microbatch.
#[derive(Debug)]
pub(crate) struct Halves {
    /// Samples of each half.
    pub(crate) samples: [usize; 2],
    /// Nodes that run on halves.
    pub(crate) nodes: BTreeMap<NodeId, HalfNode>,
    /// For each value, whether its first dimension holds the samples, or their rows.
    pub(crate) batched: Vec<bool>,
}

/// What an operation does with samples.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Samples {
    /// Each is treated alone: results are of single samples.
    Alone(Operands),
    /// The results are sums over them.
    Summed,
    /// All are needed at once, for results of single samples.
    Together,
    /// All are needed at once.
    Mixed,
}

/// Which operands of an operation that treats samples alone have halves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Operands {
    /// Any.
    All,
    /// Those with a row of the masks for each sample.
    BySample,
    /// Matrices and higher ones: a vector is one whole row.
    Rows,
    /// Lookups in a table that is whole.
    WholeTable,
    /// Products of rows and a weight that is whole.
    WholeWeight,
}

impl StageProgram {
    /// The same program with collectives that pass while other nodes run: each is waited for where
    /// its result is read first. Weight gradients of layers whose input gradients are summed over
    /// ranks come after the start of that sum, since they need no other rank.
    ///
    /// A microbatch of one sample has no halves; then weight gradients alone pass beside sums.
    #[must_use]
    pub(crate) fn overlapping(mut self, overlap: Overlap) -> Self {
        self.overlap = overlap;
        if overlap == Overlap::None {
            return self;
        }
        let behind = self.weights_behind_sums();
        let delayed: BTreeSet<_> = behind.values().flatten().copied().collect();
        let nodes = std::mem::take(&mut self.backward).into_iter();
        for node in nodes.filter(|node| !delayed.contains(node)) {
            self.backward.push(node);
            self.backward
                .extend(behind.get(&node).into_iter().flatten());
        }
        self
    }

    /// For each collective of the backward, in order, the nodes of weight gradients that come
    /// before it and read what its operand was computed from.
    fn weights_behind_sums(&self) -> BTreeMap<NodeId, Vec<NodeId>> {
        let mut readers: BTreeMap<ValueId, Vec<NodeId>> = BTreeMap::new();
        let (mut seen, mut behind) = (BTreeSet::new(), BTreeMap::new());
        for &id in &self.backward {
            let node = self.graph.node(id);
            if self.phases[id.index()] == Phase::BackwardWeight {
                let inputs = node.inputs.iter();
                inputs.for_each(|&input| readers.entry(input).or_default().push(id));
            } else if is_sum(node) {
                let products = Terms::of(&self.graph, node.inputs[0]).products;
                let grads = products.iter().map(|&id| self.graph.node(id).inputs[0]);
                let weights = grads.filter_map(|grad| readers.get(&grad)).flatten();
                let weights = weights.filter(|&&weight| seen.insert(weight));
                let mut weights: Vec<_> = weights.copied().collect();
                weights.sort_unstable();
                behind.insert(id, weights);
            }
        }
        behind
    }

    /// The order in which a pass over some nodes runs.
    pub fn steps(&self, nodes: &[NodeId]) -> Vec<Step> {
        self.steps_of(nodes, self.halves().as_ref())
    }

    /// The same with the halves that are known.
    pub(crate) fn steps_of(&self, nodes: &[NodeId], halves: Option<&Halves>) -> Vec<Step> {
        let Some(halves) = halves else {
            return nodes.iter().copied().map(Step::Whole).collect();
        };
        let mut steps = Vec::with_capacity(2 * nodes.len());
        let (mut stretch, mut layer) = (Vec::new(), None);
        for &id in nodes {
            let node = self.graph.node(id);
            if !halves.nodes.contains_key(&id) {
                run_stretch(&mut stretch, &mut steps);
                steps.push(Step::Whole(id));
                continue;
            }
            if self.overlap == Overlap::Block && layer != Some(node.layer()) {
                run_stretch(&mut stretch, &mut steps);
                steps.push(Step::Wait);
                layer = Some(node.layer());
            }
            stretch.push(id);
            if node.op.communicates().is_some() {
                run_stretch(&mut stretch, &mut steps);
            }
        }
        run_stretch(&mut stretch, &mut steps);
        steps
    }

    /// The halves of the microbatch, if some nodes run on them.
    pub(crate) fn halves(&self) -> Option<Halves> {
        if self.overlap == Overlap::None {
            return None;
        }
        let given = self.recv.iter().map(|hop| hop.value);
        let given: Vec<_> = given
            .chain(self.inputs.iter().map(|port| port.value))
            .collect();
        let samples = given.iter().find_map(|&value| {
            let ty = self.graph.ty(value);
            (ty.ndim() >= 2).then(|| ty.shape[0])
        })?;
        if samples < 2 {
            return None;
        }
        let mut halves = Halves {
            samples: [samples.div_ceil(2), samples / 2],
            nodes: BTreeMap::new(),
            batched: vec![false; self.graph.num_values()],
        };
        let grads = self.send.iter().filter_map(|hop| hop.grad);
        // Zeros for each sample, as of a position before all others.
        let is_zeros = |node: &&Node| matches!(node.op, Op::Zeros { .. });
        let zeros = self.graph.nodes().iter().filter(is_zeros);
        let zeros = zeros.map(|node| node.outputs[0]);
        for value in given.into_iter().chain(grads).chain(zeros) {
            let first = self.graph.ty(value).shape.first();
            halves.batched[value.index()] = first == Some(&samples);
        }
        let backward = self.backward.iter().copied();
        for id in self.forward.iter().copied().chain(backward) {
            halves.visit(self, id);
        }
        let wanted = match self.overlap {
            Overlap::None | Overlap::Linear => self.summed_products(&halves),
            Overlap::Block | Overlap::Blocks => self.layers_with_sums(&halves),
        };
        halves.nodes.retain(|id, _| wanted.contains(id));
        (!halves.nodes.is_empty()).then_some(halves)
    }

    /// The sums over ranks of products, and what adds up to these.
    fn summed_products(&self, halves: &Halves) -> BTreeSet<NodeId> {
        let sums = self.graph.node_ids().filter(|id| halves.sums(self, *id));
        let with_terms = sums.filter_map(|id| {
            let terms = Terms::of(&self.graph, self.graph.node(id).inputs[0]);
            let all = terms.products.iter().chain(&terms.additions).copied();
            (!terms.products.is_empty()).then(|| all.chain([id]).collect::<Vec<_>>())
        });
        with_terms.flatten().collect()
    }

    /// The nodes from the first region of split layers to the last sum over ranks, and those of the
    /// backward in the same modules.
    fn layers_with_sums(&self, halves: &Halves) -> BTreeSet<NodeId> {
        let begins = |id: &NodeId| self.graph.node(*id).op.region().is_some();
        let first = self
            .forward
            .iter()
            .position(|id| begins(id) && halves.nodes.contains_key(id));
        let last = self.forward.iter().rposition(|&id| halves.sums(self, id));
        let (Some(first), Some(last)) = (first, last) else {
            return BTreeSet::new();
        };
        let own = self.forward.get(first..=last).unwrap_or_default();
        let scopes: BTreeSet<_> = own.iter().map(|&id| &self.graph.node(id).scope).collect();
        let backward = self.backward.iter();
        let backward = backward.filter(|&&id| scopes.contains(&self.graph.node(id).scope));
        own.iter().chain(backward).copied().collect()
    }
}

impl Halves {
    /// Notes whether a node can run on halves, and which of its results have samples.
    fn visit(&mut self, program: &StageProgram, id: NodeId) {
        let (graph, node) = (&program.graph, program.graph.node(id));
        if !node.inputs.iter().any(|input| self.batched[input.index()]) {
            return;
        }
        let is_weight = program.phases[id.index()] == Phase::BackwardWeight;
        let samples = samples(&node.op);
        let half = match samples {
            Samples::Alone(operands) if !is_weight && self.have_halves(graph, node, operands) => {
                self.half(graph, node, true)
            }
            Samples::Summed if is_weight && accumulates(program, node) => {
                self.half(graph, node, false)
            }
            Samples::Alone(_) | Samples::Summed | Samples::Together | Samples::Mixed => None,
        };
        self.nodes.extend(half.map(|half| (id, half)));
        if let Samples::Alone(_) | Samples::Together = samples {
            let all: usize = self.samples.iter().sum();
            for (index, &output) in node.outputs.iter().enumerate() {
                // The gradient of a table of biases is a sum.
                let is_sum = matches!(node.op, Op::AttentionGrad(_)) && index > 2;
                let first = graph.ty(output).shape.first();
                let holds = first.is_some_and(|first| first.is_multiple_of(all));
                self.batched[output.index()] = holds && !is_sum;
            }
        }
    }

    /// Whether halves of the operands are operands of the halves: rows have their place in the
    /// masks of their sample, tables and vectors are whole.
    fn have_halves(&self, graph: &Graph, node: &Node, operands: Operands) -> bool {
        let ty = |operand: usize| graph.ty(node.inputs[operand]);
        let is_whole = |operand: usize| !self.batched[node.inputs[operand].index()];
        match operands {
            Operands::All => true,
            Operands::BySample => ty(0).shape[0] == self.samples[0] + self.samples[1],
            Operands::Rows => ty(0).ndim() > 1,
            Operands::WholeTable => is_whole(1),
            Operands::WholeWeight => ty(0).ndim() > 1 && is_whole(1),
        }
    }

    /// The node on halves, if its results are those of the halves, or sums of the whole's type.
    fn half(&self, graph: &Graph, node: &Node, of_samples: bool) -> Option<HalfNode> {
        let all: usize = self.samples.iter().sum();
        let share = |size: usize, half: usize| {
            let whole = size.is_multiple_of(all);
            whole.then(|| size / all * self.samples[half])
        };
        let of = |ty: &TensorType, half| Some(ty.with_dim(0, share(*ty.shape.first()?, half)?));
        let op = |half| match &node.op {
            Op::Reshape { shape } => {
                let mut shape = shape.clone();
                let first = shape.first_mut()?;
                *first = share(*first, half)?;
                Some(Op::Reshape { shape })
            }
            op => Some(op.clone()),
        };
        let results = |half: usize| {
            let operand = |value: &ValueId| {
                let ty = graph.ty(*value);
                if self.batched[value.index()] {
                    of(ty, half)
                } else {
                    Some(ty.clone())
                }
            };
            let operands: Vec<_> = node.inputs.iter().map(operand).collect::<Option<_>>()?;
            let results = infer(&op(half)?, &operands).ok()?;
            let whole = node.outputs.iter().map(|&output| graph.ty(output));
            let expected = whole.map(|ty| {
                if of_samples {
                    of(ty, half)
                } else {
                    Some(ty.clone())
                }
            });
            (expected.collect::<Option<Vec<_>>>()? == results).then_some(results)
        };
        let ops = match &node.op {
            Op::Reshape { .. } => Some([op(0)?, op(1)?]),
            _ => None,
        };
        Some(HalfNode {
            ops,
            results: [results(0)?, results(1)?],
        })
    }

    /// Whether a node that runs on halves is a sum over ranks.
    fn sums(&self, program: &StageProgram, id: NodeId) -> bool {
        self.nodes.contains_key(&id) && is_sum(program.graph.node(id))
    }
}

/// Whether the results of a node are gradients that the stage accumulates.
fn accumulates(program: &StageProgram, node: &Node) -> bool {
    let is_grad = |output: &ValueId| program.grads.iter().any(|grad| grad.value == *output);
    node.outputs.iter().all(is_grad)
}

/// Runs the nodes between two collectives on one half, then on the other.
fn run_stretch(stretch: &mut Vec<NodeId>, steps: &mut Vec<Step>) {
    for half in 0..2 {
        steps.extend(stretch.iter().map(|&node| Step::Half(node, half)));
    }
    stretch.clear();
}

/// Whether a node sums over ranks.
fn is_sum(node: &Node) -> bool {
    let region = node.op.region().and_then(|region| region.kind.forward());
    region.is_some_and(Collective::reduces)
}

/// What adds up to a value.
#[derive(Debug, Default)]
struct Terms {
    /// Products of linear layers, or gradients of their inputs.
    products: Vec<NodeId>,
    /// The additions.
    additions: Vec<NodeId>,
}

impl Terms {
    fn of(graph: &Graph, sum: ValueId) -> Self {
        let mut found = Self::default();
        let mut terms = vec![sum];
        while let Some(term) = terms.pop() {
            let Some(id) = graph.producer(term) else {
                continue;
            };
            let node = graph.node(id);
            match node.op.class() {
                Class::Add | Class::Identity => {
                    found.additions.push(id);
                    terms.extend(&node.inputs);
                }
                Class::Linear(_) => found.products.push(id),
                Class::Gradient if matches!(node.op, Op::LinearGradInput { .. }) => {
                    found.products.push(id);
                }
                Class::Source
                | Class::Lookup
                | Class::LayerNorm
                | Class::RmsNorm
                | Class::Attention
                | Class::Rope
                | Class::Activation
                | Class::Dropout
                | Class::Loss(_)
                | Class::Mul
                | Class::Form
                | Class::Transpose
                | Class::Total
                | Class::Function
                | Class::Constant
                | Class::Gradient
                | Class::Region(_) => {}
            }
        }
        found
    }
}

/// What an operation does with the samples of its operands, which are their first dimension.
fn samples(op: &Op) -> Samples {
    let alone = |is_alone: bool| {
        if is_alone {
            Samples::Alone(Operands::All)
        } else {
            Samples::Mixed
        }
    };
    match op {
        Op::Dropout(_) | Op::Attention(_) | Op::AttentionGrad(_) => {
            Samples::Alone(Operands::BySample)
        }
        Op::Embedding { .. } => Samples::Alone(Operands::WholeTable),
        Op::Linear { .. } | Op::LinearGradInput { .. } => Samples::Alone(Operands::WholeWeight),
        Op::Softmax | Op::SoftmaxGrad | Op::LayerNorm { .. } | Op::RmsNorm { .. } => {
            Samples::Alone(Operands::Rows)
        }
        Op::SeenPositions { .. }
        | Op::DocumentPositions { .. }
        | Op::LayerNormGradInput
        | Op::RmsNormGradInput
        | Op::JoinAttention
        | Op::Rope(_)
        | Op::Activation(_)
        | Op::ActivationGrad(_)
        | Op::SiluMul
        | Op::SiluMulGrad
        | Op::InverseRoot
        | Op::Add
        | Op::Mul
        | Op::Scale { .. }
        | Op::Identity
        | Op::ShareGrad { .. }
        | Op::Cast { .. }
        | Op::Reshape { .. }
        | Op::CopyTo { .. }
        | Op::AllReduce { .. } => Samples::Alone(Operands::All),
        Op::Transpose { perm } => alone(perm.first() == Some(&0)),
        Op::Split { dim, .. } | Op::Concat { dim } => alone(*dim != 0),
        Op::AllGather { shard, .. }
        | Op::Scatter { shard, .. }
        | Op::ReduceScatter { shard, .. } => alone(shard.dim != 0),
        Op::AllToAll { from, to, .. } => alone(from.dim != 0 && to.dim != 0),
        Op::LinearGradWeight { .. }
        | Op::EmbeddingGrad { .. }
        | Op::LayerNormGradParams
        | Op::RmsNormGradParams
        | Op::SumLeading { .. } => Samples::Summed,
        Op::CrossEntropyGrad { .. } | Op::SumAllGrad => Samples::Together,
        Op::Positions { .. }
        | Op::RelativeBuckets(_)
        | Op::Zeros { .. }
        | Op::MatMul { .. }
        | Op::CrossEntropy { .. }
        | Op::VocabMax { .. }
        | Op::VocabSums { .. }
        | Op::VocabLoss { .. }
        | Op::SumAll => Samples::Mixed,
    }
}
