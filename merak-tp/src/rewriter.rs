//! The walk over a model that places every value and builds the graph of one rank.

use crate::{
    Error, LayerLists, Report, Result, SplitKind,
    error::MOST_LISTED,
    matching::{self, Role},
    report::SplitModule,
    rules::{self, Need, Site},
};
use merak_trace::{Axis, Graph, Node, NodeId, Op, Placement, Shard, ValueId, op::Reduction};
use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

/// What is split.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct SplitOptions {
    /// Linear layers.
    pub lists: LayerLists,
    /// Entries of a vocabulary that is split too: tables with as many rows in which ids of an input
    /// are looked up, and output layers with as many features. Every rank has room for the same
    /// number of entries; padding makes up where the degree does not divide them.
    pub vocab: Option<usize>,
}

impl From<&LayerLists> for SplitOptions {
    fn from(lists: &LayerLists) -> Self {
        Self {
            lists: lists.clone(),
            vocab: None,
        }
    }
}

/// A model as each rank of the tensor axis runs it.
#[derive(Debug, Clone)]
pub struct Rewritten {
    /// Local types, placed parameters, collectives as nodes; the same on all ranks.
    pub graph: Graph,
    /// What was split, gathered and communicated.
    pub report: Report,
}

/// Splits a model over `degree` ranks of the tensor axis by the given lists.
///
/// Names, scopes and random keys of the model's nodes stay; parameters keep their names, full types
/// and initialisers and get a placement. Inputs and outputs are whole on every rank. A `degree` of
/// 1 returns the graph unchanged.
///
/// # Communication
/// Per microbatch and split region, forward one all-reduce (after the row layer) and backward one
/// (before the column layers), each of the bytes of one activation; [`Report::traffic`] has the
/// sums.
///
/// # Errors
/// When the lists are incomplete, ask for what is not available, match nothing or one layer both
/// ways; when features or heads are no multiple of `degree`; when the model was rewritten before.
pub fn rewrite(model: &Graph, lists: &LayerLists, degree: usize) -> Result<Rewritten> {
    rewrite_with(model, &lists.into(), degree)
}

/// [`rewrite`] with further options.
///
/// # Communication
/// As of [`rewrite`]. Where the vocabulary is split, forward an all-reduce after each lookup, and
/// two of some numbers per row in the loss, which takes the place of the gathered logits.
///
/// # Errors
/// As of [`rewrite`].
pub fn rewrite_with(model: &Graph, options: &SplitOptions, degree: usize) -> Result<Rewritten> {
    match degree {
        0 => return Err(Error::ZeroDegree),
        1 => {
            return Ok(Rewritten {
                graph: model.clone(),
                report: Report::new(1),
            });
        }
        _ => options.lists.check(degree)?,
    }
    refuse_rewritten(model)?;
    split(model, options, degree).map_err(|mut error| {
        if let Some(legal) = error.legal_mut() {
            // What suits one layer may not suit the others.
            let suits = |&degree: &usize| degree == 1 || split(model, options, degree).is_ok();
            *legal = legal
                .iter()
                .copied()
                .filter(suits)
                .take(MOST_LISTED + 1)
                .collect();
        }
        error
    })
}

/// The rewrite itself, for a degree above 1.
fn split(model: &Graph, options: &SplitOptions, degree: usize) -> Result<Rewritten> {
    let matches = matching::find(model, options, degree)?;
    let mut report = Report::new(degree);
    report.kept_whole = matches.kept_whole;
    report.unmatched = matches.unmatched;
    let mut rewriter = Rewriter::new(model, degree, report)?;
    rewriter.slice(&matches.slices);
    for id in model.node_ids() {
        rewriter.place(id, matches.roles.get(&id))?;
    }
    rewriter.finish()
}

/// How the lists cut each parameter, for any degree: the dimension and the sizes of its parts.
/// Parameters that every rank keeps whole are left out. For writers of checkpoints that another
/// degree reads.
///
/// # Errors
/// As [`rewrite`], except that lists that are empty or match nothing cut nothing.
pub fn cuts(model: &Graph, lists: &LayerLists) -> Result<BTreeMap<String, Shard>> {
    cuts_with(model, &lists.into())
}

/// [`cuts`] with further options.
///
/// # Errors
/// As of [`cuts`].
pub fn cuts_with(model: &Graph, options: &SplitOptions) -> Result<BTreeMap<String, Shard>> {
    if options.lists == LayerLists::default() {
        return Ok(BTreeMap::new());
    }
    options.lists.check(1)?;
    refuse_rewritten(model)?;
    let matches = match matching::find(model, options, 1) {
        Err(Error::NothingMatched { .. }) => return Ok(BTreeMap::new()),
        matches => matches?,
    };
    // Degree 1 divides every size.
    let mut rewriter = Rewriter::new(model, 1, Report::new(1))?;
    rewriter.slice(&matches.slices);
    for id in model.node_ids() {
        rewriter.place(id, matches.roles.get(&id))?;
    }
    let params = rewriter.graph.params().iter();
    Ok(params
        .filter_map(|param| {
            let shard = param.placements.on(Axis::Tensor).as_shard()?;
            Some((param.name.clone(), shard.clone()))
        })
        .collect())
}

/// A value of the model in the new graph.
#[derive(Debug, Clone)]
pub(crate) struct Placed {
    pub(crate) value: ValueId,
    pub(crate) placement: Placement,
    /// Whether a node uses it in this placement, which must then stay.
    pub(crate) is_fixed: bool,
    /// Other forms of it that were made already.
    pub(crate) forms: Vec<(Need, ValueId)>,
}

impl Placed {
    fn new(value: ValueId, placement: Placement) -> Self {
        Self {
            value,
            placement,
            is_fixed: false,
            forms: Vec::new(),
        }
    }
}

/// The state of a rewrite.
pub(crate) struct Rewriter<'a> {
    pub(crate) model: &'a Graph,
    pub(crate) degree: usize,
    pub(crate) graph: Graph,
    pub(crate) report: Report,
    /// The counterpart of each value of the model that is known so far.
    pub(crate) placed: BTreeMap<ValueId, Placed>,
    /// Split values of the model that were made whole since someone looked.
    pub(crate) gathered: Vec<ValueId>,
    /// Values of the model that are used.
    used: BTreeSet<ValueId>,
}

impl<'a> Rewriter<'a> {
    pub(crate) fn new(model: &'a Graph, degree: usize, report: Report) -> Result<Self> {
        let mut used: BTreeSet<_> = model
            .nodes()
            .iter()
            .flat_map(|node| node.inputs.iter().copied())
            .collect();
        used.extend(model.outputs().iter().map(|port| port.value));
        let mut graph = Graph::new();
        graph.reserve_names(model.nodes().iter().map(|node| &node.name));
        let mut rewriter = Self {
            model,
            degree,
            graph,
            report,
            placed: BTreeMap::new(),
            gathered: Vec::new(),
            used,
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

    /// Adds the counterpart of a node, and the conversions before and after it.
    pub(crate) fn place(&mut self, id: NodeId, role: Option<&Role>) -> Result<()> {
        let model = self.model;
        let node = model.node(id);
        let plan = rules::plan(&self.site(node, role))?;
        if let Some(role) = role {
            self.report
                .modules
                .push(split_module(model, node, role, self.degree));
        }
        let mut inputs = Vec::with_capacity(node.inputs.len());
        for (&input, need) in node.inputs.iter().zip(&plan.needs) {
            inputs.push(self.convert(input, need, &node.scope, &node.name)?);
        }
        let last = if plan.adds_last { inputs.pop() } else { None };
        if let Op::VocabLoss {
            label_smoothing,
            slice,
        } = plan.op
        {
            let operands = [inputs[0], inputs[1]];
            let sums = self.vocab_sums(&node.scope, operands, label_smoothing, slice)?;
            inputs.extend(sums);
        }
        let values = self.graph.add_counterpart(node, plan.op.clone(), inputs)?;
        for ((&result, value), placement) in node.outputs.iter().zip(values).zip(&plan.results) {
            self.check_local(node, result, value, placement)?;
            let (value, placement) = match placement {
                Placement::Partial => {
                    (self.reduce(value, last, &node.scope)?, Placement::Replicate)
                }
                Placement::Replicate | Placement::Shard(_) => (value, placement.clone()),
            };
            self.placed.insert(result, Placed::new(value, placement));
        }
        Ok(())
    }

    /// The facts that a rule reads.
    fn site<'s>(&'s self, node: &'s Node, role: Option<&'s Role>) -> Site<'s> {
        Site {
            node,
            types: node
                .inputs
                .iter()
                .map(|&input| self.model.ty(input))
                .collect(),
            placements: node
                .inputs
                .iter()
                .map(|input| &self.placed[input].placement)
                .collect(),
            results: node
                .outputs
                .iter()
                .map(|&output| self.model.ty(output))
                .collect(),
            used: node
                .outputs
                .iter()
                .map(|output| self.used.contains(output))
                .collect(),
            role,
            degree: self.degree,
        }
    }

    /// Sums the parts of all ranks, then adds `once`.
    fn reduce(
        &mut self,
        value: ValueId,
        once: Option<ValueId>,
        scope: &Arc<str>,
    ) -> Result<ValueId> {
        let reduced = Op::AllReduce {
            axis: Axis::Tensor,
            op: Reduction::Sum,
        };
        let sum = self.add(scope, reduced, vec![value])?[0];
        match once {
            Some(once) => Ok(self.add(scope, Op::Add, vec![sum, once])?[0]),
            None => Ok(sum),
        }
    }

    /// Adds a node that the model does not have.
    pub(crate) fn add(
        &mut self,
        scope: &Arc<str>,
        op: Op,
        inputs: Vec<ValueId>,
    ) -> Result<Vec<ValueId>> {
        Ok(self.graph.add_node(scope, op, inputs)?)
    }

    /// Checks that a rule's operation makes the type of its placement.
    fn check_local(
        &self,
        node: &Node,
        result: ValueId,
        value: ValueId,
        placement: &Placement,
    ) -> Result<()> {
        let expected = placement.local_type(self.model.ty(result), self.degree);
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
    fn finish(mut self) -> Result<Rewritten> {
        let root: Arc<str> = "".into();
        for port in self.model.outputs() {
            let value = self.convert(
                port.value,
                &Need::Whole,
                &root,
                &format!("output {}", port.name),
            )?;
            self.graph.add_output(port.name.clone(), value);
        }
        self.report.count_traffic(&self.graph);
        Ok(Rewritten {
            graph: self.graph,
            report: self.report,
        })
    }
}

fn split_module(model: &Graph, node: &Node, role: &Role, degree: usize) -> SplitModule {
    let features = |value: ValueId| model.ty(value).last_dim();
    SplitModule {
        module: node.scope.to_string(),
        kind: role.kind,
        matched_by: role.list.clone(),
        in_features: match node.op {
            Op::Embedding { .. } => model.ty(node.inputs[1]).shape[0],
            _ => features(node.inputs[0]),
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

/// Refuses a rewritten model: a second rewrite would split it again.
fn refuse_rewritten(model: &Graph) -> Result<()> {
    let param = model
        .params()
        .iter()
        .find(|param| *param.placements.on(Axis::Tensor) != Placement::Replicate)
        .map(|param| param.name.clone());
    let node = model.nodes().iter().find(|node| match &node.op {
        Op::CopyTo { axis }
        | Op::AllReduce { axis, .. }
        | Op::AllGather { axis, .. }
        | Op::Scatter { axis, .. } => *axis == Axis::Tensor,
        _ => false,
    });
    match param.or_else(|| node.map(|node| node.name.to_string())) {
        Some(place) => Err(Error::AlreadySplit { place }),
        None => Ok(()),
    }
}
