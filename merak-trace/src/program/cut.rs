//! Cutting a model's graph into stages.

use super::{GradPort, Hop};
use crate::{
    DType, Error, Graph, Node, NodeId, Param, ParamId, Port, Result, Source, TensorType, ValueId,
    autodiff::{Gradients, ParamGrad, differentiate, needs_grad},
};
use std::{
    collections::{BTreeMap, BTreeSet},
    ops::Range,
};

/// The cuts of a model: stage `s` has nodes `bounds[s]..bounds[s + 1]`.
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
        Self {
            bounds: vec![0, model.nodes().len()],
        }
    }

    /// Cuts before the nodes `bounds[1..]`, the first bound being 0 and the last the number of
    /// nodes.
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
            for param in model
                .node(id)
                .inputs
                .iter()
                .filter_map(|&input| model.param_of(input))
            {
                stages[param.index()].insert(self.stage_of(id));
            }
        }
        let shared = model
            .params()
            .iter()
            .zip(stages)
            .filter(|(_, stages)| stages.len() > 1);
        shared
            .map(|(param, stages)| TiedParam {
                name: param.name.clone(),
                stages: stages.into_iter().collect(),
            })
            .collect()
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
    /// For each parameter of the stage, the number of its uses before the stage.
    pub(super) uses_before: BTreeMap<ParamId, usize>,
    range: Range<usize>,
}

impl Part {
    /// The nodes of the stage's graph for a range of the model's nodes.
    pub(super) fn local_range(&self, range: &Range<usize>) -> Range<usize> {
        let clamp = |index: usize| index.clamp(self.range.start, self.range.end) - self.range.start;
        clamp(range.start)..clamp(range.end)
    }

    /// Adds the backward to the graph, with inputs for the gradients of the loss and of the values
    /// that are sent. Returns the input for the loss, if it is computed here, and the gradients.
    pub(super) fn differentiate(&mut self) -> Result<(Option<ValueId>, Gradients)> {
        let mut seeds = Vec::new();
        for hop in &mut self.send {
            if self.flows.contains(&hop.value) {
                let name = format!("grad({})", hop.name);
                let grad = self.graph.add_input(name, hop.ty.clone());
                hop.grad = Some(grad);
                seeds.push((hop.value, grad));
            }
        }
        let loss = self.outputs.iter().find(|port| port.name == "loss");
        let mut loss_grad = None;
        if let Some(port) = loss {
            let (expected, found) = (TensorType::scalar(DType::F64), self.graph.ty(port.value));
            if *found != expected {
                return Err(Error::LossType {
                    expected: expected.to_string(),
                    found: found.to_string(),
                });
            }
            let grad = self.graph.add_input("grad(loss)", expected);
            seeds.push((port.value, grad));
            loss_grad = Some(grad);
        }
        let received = self.recv.iter().map(|hop| hop.value);
        let wanted: Vec<_> = received
            .filter(|value| self.flows.contains(value))
            .collect();
        let found = differentiate(&mut self.graph, &seeds, &wanted)?;
        let of_recv: BTreeMap<_, _> = wanted.iter().zip(&found.wanted).collect();
        for hop in &mut self.recv {
            hop.grad = of_recv.get(&hop.value).map(|grad| **grad);
        }
        Ok((loss_grad, found))
    }
}

/// Takes one stage out of a model. A value that a later stage uses is handed from stage to stage.
pub(super) fn extract(model: &Graph, cuts: &StageCuts, stage: usize) -> Result<Part> {
    let (num_stages, num_nodes) = (cuts.num_stages(), model.nodes().len());
    if stage >= num_stages {
        return Err(Error::NoStage { stage, num_stages });
    }
    if cuts.bounds[num_stages] != num_nodes {
        let bounds = cuts.bounds.clone();
        return Err(Error::Cuts { bounds, num_nodes });
    }
    let range = cuts.nodes(stage);
    let mut build = Build {
        model,
        graph: Graph::new(),
        local: BTreeMap::new(),
        inputs: Vec::new(),
    };
    let recv = crossing(model, cuts, range.start);
    let recv = recv.into_iter().map(|value| build.receive(value)).collect();
    for node in &model.nodes()[range.clone()] {
        build.copy(node)?;
    }
    let sent = crossing(model, cuts, range.end);
    let send = sent
        .into_iter()
        .map(|value| build.send(value))
        .collect::<Result<_>>()?;
    let made_here = |port: &&Port| {
        let producer = model.producer(port.value);
        producer.is_some_and(|node| range.contains(&node.index()))
    };
    let outputs = model.outputs().iter().filter(made_here).map(|port| Port {
        name: port.name.clone(),
        value: build.local[&port.value],
    });
    let outputs = outputs.collect();
    let (needs, reaches) = (needs_grad(model, &[]), reaches_loss(model));
    let has_grad = |value: ValueId| needs[value.index()] && reaches[value.index()];
    let flows = build.local.iter().filter(|(value, _)| has_grad(**value));
    Ok(Part {
        flows: flows.map(|(_, &local)| local).collect(),
        uses_before: build.uses_before(range.start),
        graph: build.graph,
        inputs: build.inputs,
        recv,
        send,
        outputs,
        range,
    })
}

/// For each value of a model, whether output `loss` depends on it: what only a metric reads has no
/// gradient. Without a loss, any value may have one.
fn reaches_loss(model: &Graph) -> Vec<bool> {
    let loss = model.output("loss");
    let mut reaches = vec![loss.is_none(); model.num_values()];
    if let Some(loss) = loss {
        reaches[loss.index()] = true;
    }
    for node in model.nodes().iter().rev() {
        let is_on_the_way = node.outputs.iter().any(|output| reaches[output.index()]);
        if is_on_the_way && !node.op.stops_gradient() {
            for input in &node.inputs {
                reaches[input.index()] = true;
            }
        }
    }
    reaches
}

/// The results of nodes before the border `at` that are used after it.
fn crossing(model: &Graph, cuts: &StageCuts, at: usize) -> Vec<ValueId> {
    if at == 0 || at == cuts.nodes(cuts.num_stages() - 1).end {
        return Vec::new();
    }
    let mut used = BTreeSet::new();
    for node in &model.nodes()[at..] {
        used.extend(node.inputs.iter().copied());
    }
    let made_before =
        |value: &ValueId| model.producer(*value).is_some_and(|node| node.index() < at);
    used.into_iter().filter(made_before).collect()
}

/// Numbers the uses of each parameter over the whole model.
pub(super) fn grad_ports(
    uses_before: &BTreeMap<ParamId, usize>,
    grads: &[ParamGrad],
) -> Vec<GradPort> {
    let mut next = uses_before.clone();
    let mut ports = Vec::with_capacity(grads.len());
    for grad in grads {
        let count = next.entry(grad.param).or_default();
        ports.push(GradPort {
            param: grad.param,
            use_index: *count,
            value: grad.value,
        });
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
    /// Takes a value from the stage before.
    fn receive(&mut self, value: ValueId) -> Hop {
        let (name, ty) = (hop_name(self.model, value), self.model.ty(value).clone());
        let local = self.graph.add_input(format!("recv({name})"), ty.clone());
        self.local.insert(value, local);
        Hop {
            name,
            value: local,
            ty,
            grad: None,
        }
    }

    /// Hands a value to the next stage.
    fn send(&self, value: ValueId) -> Result<Hop> {
        let (name, ty) = (hop_name(self.model, value), self.model.ty(value).clone());
        match self.local.get(&value) {
            Some(&value) => Ok(Hop {
                name,
                value,
                ty,
                grad: None,
            }),
            None => Err(Error::Order { value: name }),
        }
    }

    fn copy(&mut self, node: &Node) -> Result<()> {
        let inputs = node.inputs.iter().map(|&input| self.operand(input));
        let inputs = inputs.collect::<Result<_>>()?;
        let outputs = self.graph.add_counterpart(node, node.op.clone(), inputs)?;
        self.local.extend(node.outputs.iter().copied().zip(outputs));
        Ok(())
    }

    /// For each parameter of the stage, how often the model's first `end` nodes use it.
    fn uses_before(&self, end: usize) -> BTreeMap<ParamId, usize> {
        let mut uses = vec![0; self.model.params().len()];
        for input in self.model.nodes()[..end]
            .iter()
            .flat_map(|node| &node.inputs)
        {
            if let Some(param) = self.model.param_of(*input) {
                uses[param.index()] += 1;
            }
        }
        let params = self.graph.params().iter().enumerate();
        let count = |(index, param): (usize, &Param)| {
            let id = self.model.find_param(&param.name);
            let id = id.expect("the stage's parameters are the model's");
            (ParamId::at(index), uses[id.index()])
        };
        params.map(count).collect()
    }

    fn operand(&mut self, value: ValueId) -> Result<ValueId> {
        if let Some(&local) = self.local.get(&value) {
            return Ok(local);
        }
        let local = self.graph.add_source(self.model, value)?;
        let local = local.ok_or_else(|| Error::Order {
            value: hop_name(self.model, value),
        })?;
        if let Source::Input(index) = self.model.value(value).source {
            let name = self.model.inputs()[index].name.clone();
            self.inputs.push(Port { name, value: local });
        }
        self.local.insert(value, local);
        Ok(local)
    }
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
