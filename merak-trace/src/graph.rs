//! The graph of a model: typed values in single-assignment form, parameters by name.

mod entries;
mod work;

pub use entries::{Node, NodeId, Overlap, ParamId, Port, Source, ValueId, ValueInfo};

use crate::{
    Axis, Error, Op, Param, ParamRole, Placement, Result, TensorType, infer::infer, op::Class,
};
use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

/// A model, or a rank's part of one, as a list of nodes in an order in which they can run.
///
/// Every value is assigned once, before its first use. The types of all results are inferred and
/// the operands checked when a node is added, so a graph that exists is well typed. It owns no
/// storage: a graph of 175 billion parameters takes a few megabytes.
#[derive(Debug, Clone, Default)]
pub struct Graph {
    nodes: Vec<Node>,
    values: Vec<ValueInfo>,
    params: Vec<Param>,
    param_values: Vec<ValueId>,
    param_ids: BTreeMap<String, ParamId>,
    inputs: Vec<Port>,
    outputs: Vec<Port>,
    names: BTreeSet<Arc<str>>,
    /// Number of requests for each base name.
    name_counts: BTreeMap<Arc<str>, u32>,
    /// The work that runs while the collectives of a training pass.
    overlap: Overlap,
}

impl Graph {
    /// Makes an empty graph.
    pub fn new() -> Self {
        Self::default()
    }

    /// The work that runs while collectives pass in the [training](crate::StageProgram::training)
    /// of this model.
    pub fn overlap(&self) -> Overlap {
        self.overlap
    }

    /// The same model with collectives that pass while other nodes run.
    #[must_use]
    pub fn with_overlap(self, overlap: Overlap) -> Self {
        Self { overlap, ..self }
    }

    /// The nodes, in an order in which they can run.
    pub fn nodes(&self) -> &[Node] {
        &self.nodes
    }

    /// One node.
    pub fn node(&self, id: NodeId) -> &Node {
        &self.nodes[id.index()]
    }

    /// The ids of all nodes, in order.
    pub fn node_ids(&self) -> impl DoubleEndedIterator<Item = NodeId> + ExactSizeIterator + use<> {
        (0..self.nodes.len()).map(NodeId::at)
    }

    /// The type and the source of a value.
    pub fn value(&self, id: ValueId) -> &ValueInfo {
        &self.values[id.index()]
    }

    /// The type of a value.
    pub fn ty(&self, id: ValueId) -> &TensorType {
        &self.values[id.index()].ty
    }

    /// The number of values.
    pub fn num_values(&self) -> usize {
        self.values.len()
    }

    /// The parameters, in the order of their first use.
    pub fn params(&self) -> &[Param] {
        &self.params
    }

    /// One parameter.
    pub fn param(&self, id: ParamId) -> &Param {
        &self.params[id.index()]
    }

    /// One parameter, to be placed or re-initialised by a rewrite.
    pub fn param_mut(&mut self, id: ParamId) -> &mut Param {
        &mut self.params[id.index()]
    }

    /// The parameter of that name.
    pub fn find_param(&self, name: &str) -> Option<ParamId> {
        self.param_ids.get(name).copied()
    }

    /// The parameter that a value reads, if any.
    pub fn param_of(&self, value: ValueId) -> Option<ParamId> {
        match self.value(value).source {
            Source::Param(id) => Some(id),
            Source::Input(_) | Source::Node { .. } => None,
        }
    }

    /// The parameter that holds the weight of a linear layer or a lookup. It is the matrix or table
    /// itself, or is reshaped to it: the kernel of a convolution, whose first two dims are those of
    /// the matrix. Ranks that share sequences may add up its gradients.
    pub fn weight_of(&self, node: &Node) -> Option<ParamId> {
        let mut weight = *node.inputs.get(1)?;
        while let Some(made_by) = self.producer(weight).map(|id| self.node(id))
            && matches!(made_by.op, Op::Reshape { .. } | Op::ShareGrad { .. })
        {
            weight = made_by.inputs[0];
        }
        self.param_of(weight)
    }

    /// The node that produces a value, if any.
    pub fn producer(&self, value: ValueId) -> Option<NodeId> {
        match self.value(value).source {
            Source::Node { node, .. } => Some(node),
            Source::Input(_) | Source::Param(_) => None,
        }
    }

    /// The named inputs.
    pub fn inputs(&self) -> &[Port] {
        &self.inputs
    }

    /// The named outputs.
    pub fn outputs(&self) -> &[Port] {
        &self.outputs
    }

    /// The output of that name.
    pub fn output(&self, name: &str) -> Option<ValueId> {
        self.outputs
            .iter()
            .find(|port| port.name == name)
            .map(|port| port.value)
    }

    /// Elements of all parameters together, tied ones once.
    pub fn num_elements(&self) -> usize {
        self.params.iter().map(|param| param.full.numel()).sum()
    }

    /// The nodes that use each value, in order; a node that uses it twice is listed twice.
    pub fn users(&self) -> Vec<Vec<NodeId>> {
        let mut users = vec![Vec::new(); self.values.len()];
        for (index, node) in self.nodes.iter().enumerate() {
            for input in &node.inputs {
                users[input.index()].push(NodeId::at(index));
            }
        }
        users
    }

    /// Adds a named input.
    pub fn add_input(&mut self, name: impl Into<String>, ty: TensorType) -> ValueId {
        let value = self.new_value(ty, Source::Input(self.inputs.len()));
        self.inputs.push(Port {
            name: name.into(),
            value,
        });
        value
    }

    /// Adds a named output.
    pub fn add_output(&mut self, name: impl Into<String>, value: ValueId) {
        self.outputs.push(Port {
            name: name.into(),
            value,
        });
    }

    /// Adds a parameter, or finds it again by its name.
    ///
    /// # Errors
    /// [`Error::ParamConflict`] when a parameter of that name has another type or initialiser;
    /// [`Error::TooLarge`].
    pub fn add_param(&mut self, param: Param) -> Result<ValueId> {
        if let Some(&id) = self.param_ids.get(&param.name) {
            let first = &self.params[id.index()];
            if first.full != param.full || first.init != param.init {
                return Err(Error::ParamConflict {
                    name: param.name,
                    first: format!("{} ({:?})", first.full, first.init),
                    second: format!("{} ({:?})", param.full, param.init),
                });
            }
            return Ok(self.param_values[id.index()]);
        }
        check_size(&param.full, || format!("parameter {}", param.name))?;
        let id = ParamId::at(self.params.len());
        let value = self.new_value(param.local.clone(), Source::Param(id));
        self.param_ids.insert(param.name.clone(), id);
        self.params.push(param);
        self.param_values.push(value);
        Ok(value)
    }

    /// Places a parameter on the `degree` ranks of an axis, before any node uses it, and gives its
    /// value the local type.
    ///
    /// # Errors
    /// As [`Param::place`].
    pub fn place_param(
        &mut self,
        id: ParamId,
        axis: Axis,
        placement: Placement,
        degree: usize,
    ) -> Result<()> {
        let value = self.param_values[id.index()];
        debug_assert!(
            self.nodes.iter().all(|node| !node.inputs.contains(&value)),
            "the types of its users are inferred"
        );
        let param = &mut self.params[id.index()];
        param.place(axis, placement, degree)?;
        self.values[value.index()].ty = param.local.clone();
        Ok(())
    }

    /// Adds a node and returns its results.
    ///
    /// # Errors
    /// [`Error::Operands`] naming the module path, the operation and the types when they do not
    /// fit; [`Error::TooLarge`].
    pub fn add_node(
        &mut self,
        scope: &Arc<str>,
        op: Op,
        inputs: Vec<ValueId>,
    ) -> Result<Vec<ValueId>> {
        let name = self.unique_name(scope, op.name());
        self.add_named_node(name, scope, op, inputs)
    }

    /// Reserves names for nodes that are added under them later, as in a copy of another graph.
    pub fn reserve_names<'a>(&mut self, names: impl Iterator<Item = &'a Arc<str>>) {
        self.names.extend(names.cloned());
    }

    /// Whether a value is the model's result or enters its loss, possibly after changes of shape,
    /// type or scale. `users` is the result of [`Graph::users`].
    pub fn ends_model(&self, users: &[Vec<NodeId>], value: ValueId) -> bool {
        self.outputs.iter().any(|port| port.value == value)
            || users[value.index()]
                .iter()
                .map(|&user| self.node(user))
                .any(|user| match user.op.class() {
                    Class::Loss(_) => true,
                    Class::Form | Class::Identity => self.ends_model(users, user.outputs[0]),
                    Class::Source
                    | Class::Linear(_)
                    | Class::Lookup
                    | Class::LayerNorm
                    | Class::RmsNorm
                    | Class::Attention
                    | Class::Rope
                    | Class::Activation
                    | Class::Dropout
                    | Class::Add
                    | Class::Mul
                    | Class::Transpose
                    | Class::Total
                    | Class::Function
                    | Class::Constant
                    | Class::Gradient
                    | Class::Region(_) => false,
                })
    }

    /// Whether a linear layer makes the logits: it ends the model, or its matrix is a tied
    /// embedding table.
    pub fn is_head(&self, users: &[Vec<NodeId>], node: &Node) -> bool {
        self.is_tied_head(node) || self.ends_model(users, node.outputs[0])
    }

    /// Whether the matrix of a linear layer is an embedding table.
    pub fn is_tied_head(&self, node: &Node) -> bool {
        let weight = node.inputs.get(1).and_then(|&weight| self.param_of(weight));
        weight.is_some_and(|param| self.param(param).role == ParamRole::Embedding)
    }

    /// The name that the next node of this scope and operation gets.
    pub(crate) fn unique_name(&mut self, scope: &str, op: &str) -> Arc<str> {
        let base: Arc<str> = if scope.is_empty() {
            op.into()
        } else {
            format!("{scope}.{op}").into()
        };
        let count = self.name_counts.entry(Arc::clone(&base)).or_insert(0);
        loop {
            *count += 1;
            let name = if *count == 1 {
                Arc::clone(&base)
            } else {
                format!("{base}_{count}").into()
            };
            if !self.names.contains(&name) {
                return name;
            }
        }
    }

    /// Adds a node under a name that the caller keeps unique, for rewrites that copy nodes.
    ///
    /// # Errors
    /// As [`Graph::add_node`].
    pub(crate) fn add_named_node(
        &mut self,
        name: Arc<str>,
        scope: &Arc<str>,
        op: Op,
        inputs: Vec<ValueId>,
    ) -> Result<Vec<ValueId>> {
        let place = || format!("{scope}: {}", op.name());
        let foreign = inputs.iter().find(|id| id.index() >= self.values.len());
        if let Some(id) = foreign {
            return Err(Error::NoValue {
                place: place(),
                id: id.index(),
                num_values: self.values.len(),
            });
        }
        let types: Vec<_> = inputs.iter().map(|&value| self.ty(value).clone()).collect();
        types.iter().try_for_each(|ty| check_size(ty, place))?;
        let results = infer(&op, &types).map_err(|reason| Error::Operands {
            scope: scope.to_string(),
            op: op.name(),
            reason,
        })?;
        results.iter().try_for_each(|ty| check_size(ty, place))?;
        let node = NodeId::at(self.nodes.len());
        let outputs: Vec<_> = results
            .into_iter()
            .enumerate()
            .map(|(result, ty)| self.new_value(ty, Source::Node { node, result }))
            .collect();
        self.names.insert(Arc::clone(&name));
        self.nodes.push(Node {
            name,
            scope: Arc::clone(scope),
            op,
            inputs,
            outputs: outputs.clone(),
        });
        Ok(outputs)
    }

    /// Adds the counterpart of another graph's node, under the same name and with this operation.
    ///
    /// # Errors
    /// As [`Graph::add_node`].
    pub fn add_counterpart(
        &mut self,
        node: &Node,
        op: Op,
        inputs: Vec<ValueId>,
    ) -> Result<Vec<ValueId>> {
        self.add_named_node(Arc::clone(&node.name), &node.scope, op, inputs)
    }

    /// Adds the counterpart of another graph's input or parameter; `None` for the result of a node.
    ///
    /// # Errors
    /// As [`Graph::add_param`].
    pub fn add_source(&mut self, from: &Graph, value: ValueId) -> Result<Option<ValueId>> {
        Ok(match from.value(value).source {
            Source::Input(index) => {
                let name = from.inputs[index].name.clone();
                Some(self.add_input(name, from.ty(value).clone()))
            }
            Source::Param(id) => Some(self.add_param(from.param(id).clone())?),
            Source::Node { .. } => None,
        })
    }

    /// Replaces the operands of a node by others of the same types.
    pub(crate) fn set_inputs(&mut self, node: NodeId, inputs: Vec<ValueId>) {
        debug_assert!(
            inputs
                .iter()
                .zip(&self.nodes[node.index()].inputs)
                .all(|(a, b)| self.ty(*a) == self.ty(*b))
        );
        self.nodes[node.index()].inputs = inputs;
    }

    fn new_value(&mut self, ty: TensorType, source: Source) -> ValueId {
        let id = ValueId::at(self.values.len());
        self.values.push(ValueInfo { ty, source });
        id
    }
}

fn check_size(ty: &TensorType, place: impl Fn() -> String) -> Result<()> {
    if ty.is_addressable() {
        return Ok(());
    }
    Err(Error::TooLarge {
        place: place(),
        ty: ty.to_string(),
    })
}
