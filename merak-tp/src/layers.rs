//! The linear layers of a model, and how each is to be split.

use crate::{Error, SplitKind, report::KeptWhole};
use merak_trace::{Beside, Graph, Node, NodeId, Op, ParamId, Shard, ValueId, op::Class};
use std::collections::BTreeMap;

/// How one linear layer is split.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Role {
    pub(crate) kind: SplitKind,
    /// The entry that matched, as messages show it.
    pub(crate) list: String,
    /// Sizes of the parts of the output features; several in a fused projection.
    pub(crate) parts: Vec<usize>,
    /// Whether padding makes up for a degree that does not divide the features.
    pub(crate) pads: bool,
}

/// The layers of a model that the lists match.
#[derive(Debug, Default)]
pub(crate) struct Matches {
    pub(crate) roles: BTreeMap<NodeId, Role>,
    pub(crate) kept_whole: Vec<KeptWhole>,
    /// Entries that match nothing.
    pub(crate) unmatched: Vec<String>,
    /// Parameters of which each rank keeps a slice, whatever uses them.
    pub(crate) slices: BTreeMap<ParamId, Shard>,
}

/// A linear layer of the model.
pub(crate) struct Layer<'a> {
    pub(crate) id: NodeId,
    pub(crate) node: &'a Node,
    pub(crate) inputs: usize,
    pub(crate) outputs: usize,
    pub(crate) is_head: bool,
    /// The kernel, of a convolution of patches that do not overlap.
    pub(crate) kernel: Option<ParamId>,
}

impl Layer<'_> {
    /// The parts of its output features: the pieces that its only user cuts them into, if it does.
    pub(crate) fn parts(&self, model: &Graph, users: &[Vec<NodeId>]) -> Vec<usize> {
        let output = adapted(model, users, self.node);
        if let [user] = users[output.index()][..]
            && let Op::Split { dim, sizes } = &model.node(user).op
            && dim + 1 == model.ty(output).ndim()
        {
            return sizes.clone();
        }
        vec![self.outputs]
    }

    /// The error where one entry splits it in a way and another entry in the other.
    pub(crate) fn both_kinds(&self, (kind, entry): (SplitKind, &str), other: &str) -> Error {
        let (col, row) = match kind {
            SplitKind::Col => (entry, other),
            SplitKind::Row => (other, entry),
        };
        Error::BothKinds {
            module: self.node.scope.to_string(),
            col: col.to_owned(),
            row: row.to_owned(),
        }
    }
}

/// All linear layers, in order.
pub(crate) fn layers<'a>(model: &'a Graph, users: &[Vec<NodeId>]) -> Vec<Layer<'a>> {
    let mut layers = Vec::new();
    for id in model.node_ids() {
        let node = model.node(id);
        if let Class::Linear(layout) = node.op.class()
            && beside(model, node).is_none()
        {
            let shape = &model.ty(node.inputs[1]).shape;
            let (inputs, outputs) = (shape[layout.in_dim()], shape[layout.out_dim()]);
            layers.push(Layer {
                id,
                node,
                inputs,
                outputs,
                is_head: is_head(model, users, node),
                kernel: kernel(model, node),
            });
        }
    }
    layers
}

/// The layers that make fewer key or value heads than there are ranks, each with its heads.
pub(crate) fn shared_heads(model: &Graph, degree: usize) -> Vec<(NodeId, usize)> {
    let mut layers = Vec::new();
    for node in model.nodes() {
        let Op::Attention(spec) = &node.op else {
            continue;
        };
        if spec.kv_heads >= degree || !degree.is_multiple_of(spec.kv_heads) {
            continue;
        }
        let made = [node.inputs[1], node.inputs[2]].map(|operand| made_by(model, operand));
        layers.extend(
            made.into_iter()
                .flatten()
                .map(|layer| (layer, spec.kv_heads)),
        );
    }
    layers
}

/// The linear layer that makes a value, with nothing between that mixes heads.
pub(crate) fn made_by(model: &Graph, value: ValueId) -> Option<NodeId> {
    let id = model.producer(value)?;
    let node = model.node(id);
    match node.op.class() {
        Class::Linear(_) => Some(id),
        Class::Rope | Class::RmsNorm | Class::Form | Class::Identity => {
            made_by(model, node.inputs[0])
        }
        Class::Add | Class::Mul => {
            made_by(model, node.inputs[0]).filter(|&made| model.node(made).scope == node.scope)
        }
        Class::Source
        | Class::Lookup
        | Class::LayerNorm
        | Class::Attention
        | Class::Activation
        | Class::Dropout
        | Class::Loss(_)
        | Class::Transpose
        | Class::Total
        | Class::Function
        | Class::Constant
        | Class::Gradient
        | Class::Region(_) => None,
    }
}

/// Whether a layer, with its adapters, makes the logits.
fn is_head(model: &Graph, users: &[Vec<NodeId>], node: &Node) -> bool {
    model.is_tied_head(node) || model.ends_model(users, adapted(model, users, node))
}

/// The output of a layer together with its adapters: sums and products within its own module.
fn adapted(model: &Graph, users: &[Vec<NodeId>], layer: &Node) -> ValueId {
    let mut value = layer.outputs[0];
    while let [user] = users[value.index()][..] {
        let node = model.node(user);
        let is_glue =
            matches!(node.op.class(), Class::Add | Class::Mul) && node.scope == layer.scope;
        if !is_glue || node.inputs[0] != value {
            break;
        }
        value = node.outputs[0];
    }
    value
}

/// The [`Beside`] of a linear layer's matrix, if the layer is half of an adapter.
pub(crate) fn beside<'a>(model: &'a Graph, node: &Node) -> Option<&'a Beside> {
    let weight = model.weight_of(node)?;
    model.param(weight).beside.as_ref()
}

/// The kernel of a convolution of patches that do not overlap, which is a linear layer whose matrix
/// is a kernel in another shape.
fn kernel(model: &Graph, layer: &Node) -> Option<ParamId> {
    let made = model.node(model.producer(layer.inputs[1])?);
    let param = model.param_of(*made.inputs.first()?)?;
    let is_kernel = matches!(made.op, Op::Reshape { .. }) && model.param(param).full.ndim() == 4;
    is_kernel.then_some(param)
}
