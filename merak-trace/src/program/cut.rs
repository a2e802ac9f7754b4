//! Cutting a model's graph into stages.

use super::{GradPort, Hop};
use crate::{
    Error, Graph, NodeId, ParamId, Port, Result, Source, ValueId,
    autodiff::{ParamGrad, needs_grad},
};
use std::{
    collections::{BTreeMap, BTreeSet},
    ops::Range,
};

/// Where a model is cut: stage `s` has nodes `bounds[s]..bounds[s + 1]`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StageCuts {
    bounds: Vec<usize>,
}

/// A parameter that several stages use.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TiedParam {
    /// Name of the parameter.
    pub name: String,
    /// The stages that use it, ascending; the first owns it.
    pub stages: Vec<usize>,
}

impl StageCuts {
    /// The whole model as one stage.
    pub fn whole(model: &Graph) -> Self {
        Self { bounds: vec![0, model.nodes().len()] }
    }

    /// Cuts before the nodes `bounds[1..]`, the first bound being 0 and the last the number of nodes.
    ///
    /// # Errors
    /// [`Error::Cuts`] when the bounds do not rise from 0 to the number of nodes.
    pub fn new(model: &Graph, bounds: Vec<usize>) -> Result<Self> {
        let num_nodes = model.nodes().len();
        let rises = bounds.windows(2).all(|pair| pair[0] < pair[1]);
        if bounds.len() < 2 || bounds[0] != 0 || bounds[bounds.len() - 1] != num_nodes || !rises {
            return Err(Error::Cuts { bounds, num_nodes });
        }
        Ok(Self { bounds })
    }

    /// The number of stages.
    pub fn num_stages(&self) -> usize {
        self.bounds.len() - 1
    }

    /// The nodes of one stage.
    pub fn nodes(&self, stage: usize) -> Range<usize> {
        self.bounds[stage]..self.bounds[stage + 1]
    }

    /// The stage of a node.
    pub fn stage_of(&self, node: NodeId) -> usize {
        self.bounds.partition_point(|&bound| bound <= node.index()) - 1
    }

    /// The parameters that more than one stage uses, in parameter order.
    pub fn tied(&self, model: &Graph) -> Vec<TiedParam> {
        let mut stages = vec![BTreeSet::new(); model.params().len()];
        for id in model.node_ids() {
            for param in model.node(id).inputs.iter().filter_map(|&input| model.param_of(input)) {
                stages[param.index()].insert(self.stage_of(id));
            }
        }
        let shared = model.params().iter().zip(stages).filter(|(_, stages)| stages.len() > 1);
        shared.map(|(param, stages)| TiedParam { name: param.name.clone(), stages: stages.into_iter().collect() }).collect()
    }
}

/// The forward of one stage as a graph of its own.
pub(super) struct Part {
    pub(super) graph: Graph,
    pub(super) inputs: Vec<Port>,
    pub(super) recv: Vec<Hop>,
    pub(super) send: Vec<Hop>,
    pub(super) outputs: Vec<Port>,
    /// Values at the stage's borders through which a gradient flows.
    pub(super) flows: BTreeSet<ValueId>,
    /// For each parameter of the stage, how many uses of it stand before the stage.
    pub(super) uses_before: BTreeMap<ParamId, usize>,
    range: Range<usize>,
}

impl Part {
    /// The nodes of the stage's graph that a range of the model's nodes became.
    pub(super) fn local_range(&self, range: &Range<usize>) -> Range<usize> {
        let clamp = |index: usize| index.clamp(self.range.start, self.range.end) - self.range.start;
        clamp(range.start)..clamp(range.end)
    }
}

/// Takes one stage out of a model. A value that a later stage uses is handed from stage to stage.
pub(super) fn extract(model: &Graph, cuts: &StageCuts, stage: usize) -> Result<Part> {
    let range = cuts.nodes(stage);
    let needs = needs_grad(model, &[]);
    let last_use = last_uses(model);
    // A node's result is alive at the border before `at` when it is made before and used behind it.
    let crosses = |at: usize, value: ValueId| {
        model.producer(value).is_some_and(|node| node.index() < at) && last_use[value.index()].is_some_and(|user| user >= at)
    };
    let crossing = |at: usize| -> Vec<_> { (0..model.num_values()).map(ValueId::at).filter(|&value| crosses(at, value)).collect() };
    let received = if stage == 0 { Vec::new() } else { crossing(range.start) };
    let sent = if stage + 1 == cuts.num_stages() { Vec::new() } else { crossing(range.end) };

    let mut build = Build { model, graph: Graph::new(), local: BTreeMap::new(), inputs: Vec::new() };
    let mut flows = BTreeSet::new();
    let mut recv = Vec::new();
    for value in received {
        let (name, ty) = (hop_name(model, value), model.ty(value).clone());
        let local = build.graph.add_input(format!("recv({name})"), ty.clone());
        build.local.insert(value, local);
        recv.push(Hop { name, value: local, ty, grad: None });
    }
    let mut uses_before = BTreeMap::new();
    for index in range.clone() {
        let node = &model.nodes()[index];
        let inputs = node.inputs.iter().map(|&input| build.operand(input)).collect::<Result<_>>()?;
        let outputs = build.graph.add_named_node(node.name.clone(), &node.scope, node.op.clone(), inputs)?;
        build.local.extend(node.outputs.iter().copied().zip(outputs));
    }
    let before = uses_of_params(model, range.start);
    for (index, param) in build.graph.params().iter().enumerate() {
        let id = model.find_param(&param.name).expect("the stage's parameters are the model's");
        uses_before.insert(ParamId::at(index), before[id.index()]);
    }
    let mut send = Vec::new();
    for value in sent {
        let local = build.local.get(&value).copied().ok_or_else(|| Error::Order { value: hop_name(model, value) })?;
        send.push(Hop { name: hop_name(model, value), value: local, ty: model.ty(value).clone(), grad: None });
    }
    let outputs = model.outputs().iter().filter(|port| model.producer(port.value).is_some_and(|node| range.contains(&node.index())));
    let outputs = outputs.map(|port| Port { name: port.name.clone(), value: build.local[&port.value] }).collect();
    for (value, local) in &build.local {
        if needs[value.index()] {
            flows.insert(*local);
        }
    }
    Ok(Part { graph: build.graph, inputs: build.inputs, recv, send, outputs, flows, uses_before, range })
}

/// Numbers the uses of each parameter over the whole model.
pub(super) fn grad_ports(uses_before: &BTreeMap<ParamId, usize>, grads: &[ParamGrad]) -> Vec<GradPort> {
    let mut next = uses_before.clone();
    let mut ports = Vec::with_capacity(grads.len());
    for grad in grads {
        let count = next.entry(grad.param).or_default();
        ports.push(GradPort { param: grad.param, use_index: *count, value: grad.value });
        *count += 1;
    }
    ports
}

struct Build<'a> {
    model: &'a Graph,
    graph: Graph,
    /// The stage's value for each of the model's.
    local: BTreeMap<ValueId, ValueId>,
    inputs: Vec<Port>,
}

impl Build<'_> {
    fn operand(&mut self, value: ValueId) -> Result<ValueId> {
        if let Some(&local) = self.local.get(&value) {
            return Ok(local);
        }
        let local = match self.model.value(value).source {
            Source::Param(id) => self.graph.add_param(self.model.param(id).clone())?,
            Source::Input(index) => {
                let name = &self.model.inputs()[index].name;
                let local = self.graph.add_input(name.clone(), self.model.ty(value).clone());
                self.inputs.push(Port { name: name.clone(), value: local });
                local
            }
            Source::Node { .. } => return Err(Error::Order { value: hop_name(self.model, value) }),
        };
        self.local.insert(value, local);
        Ok(local)
    }
}

/// How often the first `end` nodes use each parameter.
fn uses_of_params(model: &Graph, end: usize) -> Vec<usize> {
    let mut uses = vec![0; model.params().len()];
    for input in model.nodes()[..end].iter().flat_map(|node| &node.inputs) {
        if let Some(param) = model.param_of(*input) {
            uses[param.index()] += 1;
        }
    }
    uses
}

/// The last node that uses each value.
fn last_uses(model: &Graph) -> Vec<Option<usize>> {
    let mut last = vec![None; model.num_values()];
    for (index, node) in model.nodes().iter().enumerate() {
        for input in &node.inputs {
            last[input.index()] = Some(index);
        }
    }
    last
}

/// The name of a node's result, with its number where there are several.
fn hop_name(model: &Graph, value: ValueId) -> String {
    match model.value(value).source {
        Source::Node { node, result: 0 } => model.node(node).name.to_string(),
        Source::Node { node, result } => format!("{}.{result}", model.node(node).name),
        Source::Input(index) => model.inputs()[index].name.clone(),
        Source::Param(id) => model.param(id).name.clone(),
    }
}
