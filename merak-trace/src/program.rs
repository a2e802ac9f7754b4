//! The program of a rank's stage: the forward, the values that it keeps, and both halves of the
//! backward.

mod cut;
mod live;
mod overlap;
mod recompute;

use crate::{
    Graph, NodeId, Overlap, Param, ParamId, Port, Result, TensorType, ValueId, autodiff::Phase,
};
use std::{collections::BTreeSet, ops::Range};

pub use cut::{StageCuts, TiedParam};
pub use live::LiveBytes;
pub use overlap::Step;
pub(crate) use overlap::{HalfNode, Halves};

/// A value that passes from one stage to the next.
#[derive(Debug, Clone, PartialEq)]
pub struct Hop {
    /// The name of the value in the whole model.
    pub name: String,
    /// The value in the stage's graph.
    pub value: ValueId,
    /// Its type.
    pub ty: TensorType,
    /// Its gradient, which passes the other way, if one flows.
    pub grad: Option<ValueId>,
}

/// A gradient that the stage accumulates.
#[derive(Debug, Clone, PartialEq)]
pub struct GradPort {
    /// The parameter, in the stage's graph.
    pub param: ParamId,
    /// Which use of the parameter this is, counted over the whole model. Uses of a tied weight
    /// accumulate apart and are added in this order at the end of a step, on one rank too.
    pub use_index: usize,
    /// The value that holds the gradient of one microbatch.
    pub value: ValueId,
}

/// The program of one stage: one graph, and which of its nodes run when.
///
/// ```text
///   recv ─┐                      ┌─ send            forward: F nodes in order
///  inputs ┴─► F ─┬─► saved ──┐   └─ outputs
///                │   (R)     ▼
///  recv.grad ◄── I ◄─────────┴──── send.grad, loss_grad
///                └─► W ─► grads                     backward: R, I, W nodes, each before its use
/// ```
///
/// A value of the forward that a later phase uses is kept until its last use. Nodes of the
/// recompute phase are copies of forward nodes whose results are not kept.
#[derive(Debug, Clone)]
pub struct StageProgram {
    /// All nodes and values, gradients included.
    pub graph: Graph,
    /// The phase of each node.
    pub phases: Vec<Phase>,
    /// Nodes of the forward, in order.
    pub forward: Vec<NodeId>,
    /// Nodes of the other phases, in an order in which all of them can run.
    pub backward: Vec<NodeId>,
    /// Data that the stage loads.
    pub inputs: Vec<Port>,
    /// Values that come from the stage before.
    pub recv: Vec<Hop>,
    /// Values that go to the next stage.
    pub send: Vec<Hop>,
    /// Outputs of the model that this stage computes.
    pub outputs: Vec<Port>,
    /// Where the gradient of output `loss` enters, `f64[]` as the loss.
    pub loss_grad: Option<ValueId>,
    /// Gradients of parameters, one per use, in graph order of the uses.
    pub grads: Vec<GradPort>,
    /// What runs while collectives pass.
    pub overlap: Overlap,
}

/// The results of a stage's forward that are recomputed instead of kept.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct RecomputePlan {
    /// Ranges of nodes of the whole model, each recomputed as one chunk: only results that leave it
    /// are kept.
    pub chunks: Vec<Range<usize>>,
    /// Further nodes of the whole model, ascending, whose results are not kept for any reader.
    pub nodes: Vec<usize>,
}

impl RecomputePlan {
    /// Whether nothing is recomputed.
    pub fn is_empty(&self) -> bool {
        self.chunks.is_empty() && self.nodes.is_empty()
    }
}

impl StageProgram {
    /// The forward alone, for evaluation and generation.
    ///
    /// # Errors
    /// When the nodes of the graph are not in order, the cuts are another graph's, or have no such
    /// stage.
    pub fn inference(model: &Graph, cuts: &StageCuts, stage: usize) -> Result<Self> {
        let part = cut::extract(model, cuts, stage)?;
        let phases = vec![Phase::Forward; part.graph.nodes().len()];
        let forward = part.graph.node_ids().collect();
        Ok(Self {
            phases,
            forward,
            backward: Vec::new(),
            inputs: part.inputs,
            recv: part.recv,
            send: part.send,
            outputs: part.outputs,
            loss_grad: None,
            grads: Vec::new(),
            overlap: Overlap::None,
            graph: part.graph,
        })
    }

    /// Forward and backward of one stage.
    ///
    /// # Errors
    /// [`Error::NoGradient`](crate::Error::NoGradient) when an operation on the way has none;
    /// [`Error::LossType`](crate::Error::LossType) when output `loss` is not `f64[]`;
    /// as [`StageProgram::inference`].
    pub fn training(
        model: &Graph,
        cuts: &StageCuts,
        stage: usize,
        recompute: &RecomputePlan,
    ) -> Result<Self> {
        let mut part = cut::extract(model, cuts, stage)?;
        let num_forward = part.graph.nodes().len();
        let (loss_grad, mut found) = part.differentiate()?;
        let backward = (num_forward..part.graph.nodes().len())
            .map(NodeId::at)
            .collect();
        let chunks: Vec<_> = recompute
            .chunks
            .iter()
            .map(|chunk| part.local_range(chunk))
            .filter(|chunk| !chunk.is_empty())
            .collect();
        let single: BTreeSet<_> = recompute
            .nodes
            .iter()
            .flat_map(|&node| part.local_range(&(node..node + 1)))
            .collect();
        let pinned: Vec<_> = part.send.iter().map(|hop| hop.value).collect();
        let again = recompute::Again {
            chunks: &chunks,
            single: &single,
            pinned: &pinned,
        };
        let backward = recompute::rewrite(&mut part.graph, &mut found.phases, backward, &again)?;
        let program = Self {
            forward: (0..num_forward).map(NodeId::at).collect(),
            backward,
            grads: cut::grad_ports(&part.uses_before, &found.params),
            phases: found.phases,
            inputs: part.inputs,
            recv: part.recv,
            send: part.send,
            outputs: part.outputs,
            loss_grad,
            overlap: Overlap::None,
            graph: part.graph,
        };
        Ok(program.overlapping(model.overlap()))
    }

    /// The parameters that the stage holds.
    pub fn params(&self) -> &[Param] {
        self.graph.params()
    }

    /// The parameters that a pass reads, in order: that of the forward, or that of some phases of
    /// the backward.
    pub fn param_reads(&self, phases: &[Phase]) -> Vec<ParamId> {
        let nodes = self.forward.iter().chain(&self.backward);
        let nodes = nodes.filter(|node| phases.contains(&self.phases[node.index()]));
        let operands = nodes.flat_map(|&node| &self.graph.node(node).inputs);
        operands
            .filter_map(|&value| self.graph.param_of(value))
            .collect()
    }

    /// How often each value is read: by nodes, by sends and as an output.
    pub fn use_counts(&self) -> Vec<u32> {
        let mut uses = vec![0; self.graph.num_values()];
        let mut count = |value: ValueId| uses[value.index()] += 1;
        for node in self.graph.nodes() {
            node.inputs.iter().copied().for_each(&mut count);
        }
        self.send.iter().for_each(|hop| count(hop.value));
        self.outputs.iter().for_each(|port| count(port.value));
        self.recv
            .iter()
            .filter_map(|hop| hop.grad)
            .for_each(&mut count);
        uses
    }
}
