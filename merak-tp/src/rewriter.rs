//! The walk over a model that places every value and builds the graph of one rank.

mod convert;
mod sums;

use crate::{
    Error, Options, Report, Result, SplitKind,
    layers::{Matches, Role},
    report::SplitModule,
    rules::{self, Need, NodePlacement, Site},
};
use merak_trace::{Axis, Graph, Node, NodeId, Op, ParamId, Placement, Shard, ValueId, needs_grad};
use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

/// A model as each rank of the tensor axis runs it.
#[derive(Debug, Clone)]
pub struct Rewritten {
    /// Local types, placed parameters, collectives as nodes; the same on all ranks.
    pub graph: Graph,
    /// What was split, gathered and communicated.
    pub report: Report,
}

/// A value of the model in the new graph.
#[derive(Debug, Clone)]
pub(crate) struct Placed {
    value: ValueId,
    pub(crate) placement: Placement,
    /// Whether a node uses it in this placement, which must then stay.
    is_fixed: bool,
    /// Whether it is cut along the sequence, or lies as if it were
    /// ([`Sequence::WholeLikeCut`](crate::Sequence::WholeLikeCut)).
    along_sequence: bool,
    /// Other forms of it that were made already.
    forms: Vec<(Need, ValueId)>,
}

impl Placed {
    fn new(value: ValueId, placement: Placement) -> Self {
        Self {
            value,
            placement,
            is_fixed: false,
            along_sequence: false,
            forms: Vec::new(),
        }
    }

    /// A value that is cut along the sequence.
    fn along_sequence(value: ValueId, shard: Shard) -> Self {
        Self {
            along_sequence: true,
            ..Self::new(value, Placement::Shard(shard))
        }
    }
}

/// The state of a rewrite.
pub(crate) struct Rewriter<'a> {
    model: &'a Graph,
    degree: usize,
    options: &'a Options,
    pub(crate) graph: Graph,
    pub(crate) report: Report,
    /// The counterpart of each value of the model that is known so far.
    pub(crate) placed: BTreeMap<ValueId, Placed>,
    /// Split values of the model that were made whole since someone looked.
    pub(crate) gathered: Vec<ValueId>,
    /// Values of the model that are used.
    used: BTreeSet<ValueId>,
    /// Values that follow from parameters alone, where every rank has all of these: their gradients
    /// are summands where those of the parameters are.
    weights: BTreeSet<ValueId>,
    /// Parameters, as values of the model, with a use by different work on each rank, whose
    /// gradients are summed once per step.
    summed: BTreeSet<ValueId>,
    /// Those with another use.
    unsummed: BTreeSet<ValueId>,
    /// Those with both kinds, whose gradients are summed at each use.
    pub(crate) copied: BTreeSet<ValueId>,
}

impl<'a> Rewriter<'a> {
    pub(crate) fn new(model: &'a Graph, options: &'a Options, report: Report) -> Result<Self> {
        let mut used: BTreeSet<_> = model
            .nodes()
            .iter()
            .flat_map(|node| node.inputs.iter().copied())
            .collect();
        used.extend(model.outputs().iter().map(|port| port.value));
        let mut graph = Graph::new().with_overlap(model.overlap());
        graph.reserve_names(model.nodes().iter().map(|node| &node.name));
        let mut rewriter = Self {
            model,
            degree: options.degree,
            options,
            graph,
            report,
            placed: BTreeMap::new(),
            gathered: Vec::new(),
            used,
            weights: BTreeSet::new(),
            summed: BTreeSet::new(),
            unsummed: BTreeSet::new(),
            copied: BTreeSet::new(),
        };
        rewriter.copy_sources()?;
        Ok(rewriter)
    }

    /// Adds the inputs and parameters of the model, whole and in its order.
    fn copy_sources(&mut self) -> Result<()> {
        let count = u32::try_from(self.model.num_values()).expect("value ids are u32");
        for id in (0..count).map(ValueId) {
            if let Some(value) = self.graph.add_source(self.model, id)? {
                let placed = Placed::new(value, Placement::Replicate);
                self.placed.insert(id, placed);
            }
        }
        Ok(())
    }

    /// Places the whole model.
    pub(crate) fn place_all(&mut self, matches: &Matches) -> Result<()> {
        self.slice(&matches.slices)?;
        let mut nodes = self.model.node_ids();
        nodes.try_for_each(|id| self.place(id, matches.roles.get(&id)))
    }

    /// Places the parameters that are sliced whatever uses them, before anything does.
    fn slice(&mut self, slices: &BTreeMap<ParamId, Shard>) -> Result<()> {
        let placed = self.placed.iter_mut();
        for (value, placed) in placed {
            let shard = self.model.param_of(*value).and_then(|id| slices.get(&id));
            let (Some(shard), Some(id)) = (shard, self.graph.param_of(placed.value)) else {
                continue;
            };
            placed.placement = Placement::Shard(shard.clone());
            placed.is_fixed = true;
            let placement = placed.placement.clone();
            self.graph
                .place_param(id, Axis::Tensor, placement, self.degree)?;
        }
        Ok(())
    }

    /// Adds the counterpart of a node, and the conversions before and after it.
    pub(crate) fn place(&mut self, id: NodeId, role: Option<&Role>) -> Result<()> {
        let model = self.model;
        let node = model.node(id);
        let mut plan = rules::plan(&self.site(node, role))?;
        if let Some(role) = role {
            self.report
                .modules
                .push(split_module(model, node, role, self.degree));
        }
        let along_sequence = plan.cuts_sequence || self.keeps_sequence(node, &plan);
        let has_all = self.is_whole_sequence(along_sequence);
        if has_all {
            plan.op = node.op.clone();
        }
        let sums = self.cut_sums(node, &plan)?;
        if plan.adds_last && sums[0].is_some() {
            // Each rank adds it to its slice.
            *plan.needs.last_mut().expect("it is an operand") = Need::Copied;
        }
        let mut inputs = self.operands(node, &plan.needs, along_sequence)?;
        let last = if plan.adds_last { inputs.pop() } else { None };
        inputs.extend(self.sums_of_loss(&node.scope, &plan.op, &inputs)?);
        let values = self.graph.add_counterpart(node, plan.op.clone(), inputs)?;
        let results = node.outputs.iter().zip(values).zip(plan.results).zip(sums);
        let mut turns = plan.turns;
        for (((&result, value), placement), sum) in results {
            self.check_local(node, result, value, (&placement, has_all))?;
            let along_sequence = along_sequence && placement.as_shard().is_some();
            let placed = match (placement, turns.take()) {
                (Placement::Partial, _) => {
                    self.summed_up(value, sum, has_all, last, &node.scope)?
                }
                (Placement::Shard(have), Some(to)) => {
                    let own =
                        self.turn(value, (&have, along_sequence), (&to, true), &node.scope)?;
                    Placed::along_sequence(own, to)
                }
                (placement, _) => Placed {
                    along_sequence,
                    ..Placed::new(value, placement)
                },
            };
            self.placed.insert(result, placed);
        }
        Ok(())
    }

    /// The operands of a node in the forms that it needs.
    fn operands(
        &mut self,
        node: &Node,
        needs: &[Need],
        along_sequence: bool,
    ) -> Result<Vec<ValueId>> {
        let mut of_weights = node.inputs.iter().map(|&input| self.is_weight(input));
        if self.options.axis == Axis::Sequence
            && !node.inputs.is_empty()
            && of_weights.all(|is_weight| is_weight)
        {
            self.weights.extend(&node.outputs);
            let whole = node.inputs.iter().map(|input| self.placed[input].value);
            return Ok(whole.collect());
        }
        let operands = node.inputs.iter().zip(needs).map(|(&input, need)| {
            self.convert(input, need, along_sequence, &node.scope, &node.name)
        });
        operands.collect()
    }

    /// Whether a value is a parameter, or follows from parameters as [`Self::weights`] do.
    fn is_weight(&self, value: ValueId) -> bool {
        self.model.param_of(value).is_some() || self.weights.contains(&value)
    }

    /// Whether an operand is cut along the sequence, and the node takes it that way.
    fn keeps_sequence(&self, node: &Node, plan: &NodePlacement) -> bool {
        let mut needs = node.inputs.iter().zip(&plan.needs);
        needs.any(|(input, need)| {
            let placed = &self.placed[input];
            let as_it_lies = matches!((need, &placed.placement),
                (Need::Cut(shard), Placement::Shard(have)) if have == shard);
            placed.along_sequence && as_it_lies
        })
    }

    /// How each partial result is cut once it is summed.
    fn cut_sums(&self, node: &Node, plan: &NodePlacement) -> Result<Vec<Option<Shard>>> {
        let results = node.outputs.iter().zip(&plan.results);
        let cut = results.map(|(&result, placement)| match placement {
            Placement::Partial => self.options.cut_sum(self.model.ty(result), &node.scope),
            Placement::Replicate | Placement::Shard(_) => Ok(None),
        });
        cut.collect()
    }

    /// The parameters with both kinds of use: uses of which each rank does a part, and whole ones.
    pub(crate) fn mixed_params(&self) -> impl Iterator<Item = ValueId> {
        self.summed.intersection(&self.unsummed).copied()
    }

    /// The facts that a rule reads.
    fn site<'s>(&'s self, node: &'s Node, role: Option<&'s Role>) -> Site<'s> {
        fn each<T>(values: &[ValueId], fact: impl Fn(&ValueId) -> T) -> Vec<T> {
            values.iter().map(fact).collect()
        }
        Site {
            node,
            types: each(&node.inputs, |&input| self.model.ty(input)),
            placements: each(&node.inputs, |input| &self.placed[input].placement),
            along_sequence: each(&node.inputs, |input| self.placed[input].along_sequence),
            are_weights: each(&node.inputs, |&input| self.is_weight(input)),
            results: each(&node.outputs, |&output| self.model.ty(output)),
            used: each(&node.outputs, |output| self.used.contains(output)),
            role,
            degree: self.degree,
            options: self.options,
        }
    }

    /// Adds a node that the model does not have.
    fn add(&mut self, scope: &Arc<str>, op: Op, inputs: Vec<ValueId>) -> Result<Vec<ValueId>> {
        Ok(self.graph.add_node(scope, op, inputs)?)
    }

    /// Checks that a rule's operation makes the type of its placement.
    fn check_local(
        &self,
        node: &Node,
        result: ValueId,
        value: ValueId,
        (placement, has_all): (&Placement, bool),
    ) -> Result<()> {
        let whole = self.model.ty(result);
        let expected = if has_all {
            whole.clone()
        } else {
            placement.local_type(whole, self.degree)
        };
        let found = self.graph.ty(value);
        if *found == expected {
            return Ok(());
        }
        Err(Error::LocalType {
            node: node.name.to_string(),
            expected: expected.to_string(),
            found: found.to_string(),
        })
    }

    /// Makes the outputs whole and counts what is communicated.
    pub(crate) fn finish(mut self) -> Result<Rewritten> {
        let root: Arc<str> = "".into();
        for port in self.model.outputs() {
            let user = format!("output {}", port.name);
            let value = self.convert(port.value, &Need::Whole, false, &root, &user)?;
            self.graph.add_output(port.name.clone(), value);
        }
        if self.options.axis == Axis::Sequence {
            self.refuse_whole_layers()?;
            self.summed.clear();
        }
        let summed = self.summed.iter().filter_map(|&param| {
            let name = &self.model.param(self.model.param_of(param)?).name;
            self.graph.find_param(name)
        });
        let summed: Vec<ParamId> = summed.collect();
        for param in summed {
            self.graph.param_mut(param).summed = true;
        }
        self.report.count_collectives(&self.graph);
        Ok(Rewritten {
            graph: self.graph,
            report: self.report,
        })
    }

    /// Refuses layers of which every rank of the sequence axis does all the work: they have whole
    /// sequences `[.., .., width]`, or nothing is cut. What follows from a few positions, such as
    /// classes, is little work.
    fn refuse_whole_layers(&self) -> Result<()> {
        if self.options.is_whole() {
            return Ok(());
        }
        let needs_grad = needs_grad(self.model, &[]);
        let is_whole = |value: &ValueId| self.placed[value].placement == Placement::Replicate;
        let cuts_none = self.placed.values().all(|placed| !placed.along_sequence);
        let is_trained = |&&input: &&ValueId| self.is_weight(input) && needs_grad[input.index()];
        for node in self.model.nodes() {
            let result = node.outputs[0];
            let has_sequence = cuts_none || self.model.ty(result).ndim() > 2;
            let does_all = has_sequence && !self.is_weight(result) && is_whole(&result);
            if let (true, Some(&weight)) = (does_all, node.inputs.iter().find(is_trained)) {
                return Err(Error::WholeSequence {
                    degree: self.degree,
                    param: self.name_of(weight),
                    node: node.name.to_string(),
                });
            }
        }
        Ok(())
    }
}

fn split_module(model: &Graph, node: &Node, role: &Role, degree: usize) -> SplitModule {
    let features = |value: ValueId| model.ty(value).last_dim();
    SplitModule {
        module: node.scope.to_string(),
        kind: role.kind,
        matched_by: role.list.clone(),
        in_features: match node.op.summed_dim() {
            Some(dim) => model.ty(node.inputs[1]).shape[dim],
            None => features(node.inputs[0]),
        },
        out_features: features(node.outputs[0]),
        padding: match role.parts[..] {
            [size] if role.pads => size.div_ceil(degree) * degree - size,
            _ => 0,
        },
        parts: if role.kind == SplitKind::Col {
            role.parts.len()
        } else {
            1
        },
    }
}
