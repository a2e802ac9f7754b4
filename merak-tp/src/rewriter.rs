//! The walk over a model that places every value and builds the graph of one rank.

use crate::{
    Error, LayerLists, Options, Report, Result, SplitKind,
    error::{MOST_LISTED, shares_of_heads},
    matching::{self, Role},
    report::SplitModule,
    rules::{self, Need, NodePlacement, Site},
};
use merak_trace::{
    Axis, Graph, Node, NodeId, Op, ParamId, Placement, Shard, ValueId, needs_grad, op::Reduction,
};
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

/// Splits a model over `degree` ranks of the tensor axis by the given lists.
///
/// Names, scopes and random keys of the model's nodes stay; parameters keep their names, full types
/// and initialisers and get a placement. Inputs and outputs are whole on every rank. A `degree` of
/// 1 returns the graph unchanged.
///
/// # Communication
/// Per microbatch and split region, forward one all-reduce (after the row layer) and backward one
/// (before the column layers), each of the bytes of one activation; [`Report::collectives`] has the
/// sums.
///
/// # Errors
/// When the lists are incomplete, ask for what is not available, match nothing or one layer both
/// ways; when features or heads are no multiple of `degree`; when the model was rewritten before.
pub fn rewrite(model: &Graph, lists: &LayerLists, degree: usize) -> Result<Rewritten> {
    rewrite_with(model, &Options::new(degree).with_lists(lists.clone()))
}

/// [`rewrite`] with further [`Options`].
///
/// # Communication
/// As of [`rewrite`]. Where the vocabulary is split, forward an all-reduce after each lookup, and
/// two of some numbers per row in the loss, which takes the place of the gathered logits.
///
/// With [`Sequence::Cut`](crate::Sequence::Cut) instead, per microbatch and split region, forward
/// an all-gather and a reduce-scatter, and backward as many, each of the bytes of one whole
/// activation. The caller sums the gradients of parameters that are
/// [`summed`](merak_trace::Param::summed) over the ranks, once per step. The sum of a lookup in a
/// split vocabulary is then a reduce-scatter, and an all-gather precedes its output layer.
///
/// # Errors
/// As [`rewrite`], and when a sequence that is to be cut is no multiple of the degree.
pub fn rewrite_with(model: &Graph, options: &Options) -> Result<Rewritten> {
    match options.degree {
        0 => return Err(Error::ZeroDegree { axis: options.axis }),
        1 => {
            return Ok(Rewritten {
                graph: model.clone(),
                report: Report::new(options.axis, 1),
            });
        }
        degree => match options.axis {
            Axis::Tensor => options.lists.check(degree)?,
            Axis::Sequence | Axis::Data | Axis::Pipeline => {}
        },
    }
    refuse_rewritten(model, options.axis)?;
    split(model, options).map_err(|mut error| {
        if let Some(legal) = error.legal_mut() {
            // Key heads may be repeated on more ranks than their features divide.
            legal.extend(model.nodes().iter().flat_map(|node| match &node.op {
                Op::Attention(spec) => shares_of_heads(spec),
                _ => Vec::new(),
            }));
            legal.sort_unstable();
            legal.dedup();
            // What suits one layer may not suit the others.
            let suits = |&degree: &usize| {
                degree == 1 || split(model, &options.clone().with_degree(degree)).is_ok()
            };
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
fn split(model: &Graph, options: &Options) -> Result<Rewritten> {
    let matches = match options.axis {
        Axis::Sequence => matching::Matches::default(),
        Axis::Tensor | Axis::Data | Axis::Pipeline => matching::find(model, options)?,
    };
    let mut report = Report::new(options.axis, options.degree);
    report.kept_whole = matches.kept_whole;
    report.unmatched = matches.unmatched;
    let mut copied = BTreeSet::new();
    loop {
        let mut rewriter = Rewriter::new(model, options, report.clone())?;
        rewriter.copied.clone_from(&copied);
        rewriter.slice(&matches.slices);
        for id in model.node_ids() {
            rewriter.place(id, matches.roles.get(&id))?;
        }
        // A gradient is a sum of summands alone, or of whole gradients alone.
        let mixed: Vec<_> = rewriter.mixed_params().collect();
        if mixed.is_empty() || options.axis == Axis::Sequence {
            return rewriter.finish();
        }
        copied.extend(mixed);
    }
}

/// How the lists cut each parameter, for any degree: the dimension and the sizes of its parts.
/// Parameters that every rank keeps whole are left out. For writers of checkpoints that another
/// degree reads.
///
/// # Errors
/// As [`rewrite`], except that lists that are empty or match nothing cut nothing.
pub fn cuts(model: &Graph, lists: &LayerLists) -> Result<BTreeMap<String, Shard>> {
    cuts_with(model, &Options::new(1).with_lists(lists.clone()))
}

/// [`cuts`] with further [`Options`], whose degree and sequence do not matter.
///
/// # Errors
/// As of [`cuts`].
pub fn cuts_with(model: &Graph, options: &Options) -> Result<BTreeMap<String, Shard>> {
    if options.lists == LayerLists::default() {
        return Ok(BTreeMap::new());
    }
    options.lists.check(1)?;
    refuse_rewritten(model, Axis::Tensor)?;
    let options = Options::new(1)
        .with_lists(options.lists.clone())
        .with_vocab(options.vocab);
    let matches = match matching::find(model, &options) {
        Err(Error::NothingMatched { .. }) => return Ok(BTreeMap::new()),
        matches => matches?,
    };
    // Degree 1 divides every size.
    let mut rewriter = Rewriter::new(model, &options, Report::new(options.axis, 1))?;
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
    /// Whether it is cut along the sequence, or lies as if it were
    /// ([`Sequence::WholeLikeCut`](crate::Sequence::WholeLikeCut)).
    pub(crate) along_sequence: bool,
    /// Other forms of it that were made already.
    pub(crate) forms: Vec<(Need, ValueId)>,
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
    pub(crate) model: &'a Graph,
    pub(crate) degree: usize,
    pub(crate) options: &'a Options,
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
    pub(crate) summed: BTreeSet<ValueId>,
    /// Those with another use.
    pub(crate) unsummed: BTreeSet<ValueId>,
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
        if let Op::VocabLoss {
            label_smoothing,
            slice,
        } = plan.op
            && slice.axis == self.options.axis
        {
            let operands = [inputs[0], inputs[1]];
            let sums = self.vocab_sums(&node.scope, operands, label_smoothing, slice)?;
            inputs.extend(sums);
        }
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
    pub(crate) fn is_weight(&self, value: ValueId) -> bool {
        self.model.param_of(value).is_some() || self.weights.contains(&value)
    }

    /// A partial result once it is summed, and cut where it is to be.
    fn summed_up(
        &mut self,
        value: ValueId,
        cut: Option<Shard>,
        has_all: bool,
        last: Option<ValueId>,
        scope: &Arc<str>,
    ) -> Result<Placed> {
        let Some(shard) = cut else {
            let sum = self.reduce(value, has_all, last, scope)?;
            return Ok(Placed::new(sum, Placement::Replicate));
        };
        let sum = self.reduce_scatter(value, &shard, has_all, last, scope)?;
        Ok(Placed::along_sequence(sum, shard))
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
    fn mixed_params(&self) -> impl Iterator<Item = ValueId> {
        self.summed.intersection(&self.unsummed).copied()
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
            along_sequence: node
                .inputs
                .iter()
                .map(|input| self.placed[input].along_sequence)
                .collect(),
            are_weights: node
                .inputs
                .iter()
                .map(|&input| self.is_weight(input))
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
            options: self.options,
        }
    }

    /// Sums the parts of all ranks, unless each has all of them, then adds `once`.
    fn reduce(
        &mut self,
        value: ValueId,
        has_all: bool,
        once: Option<ValueId>,
        scope: &Arc<str>,
    ) -> Result<ValueId> {
        let op = if has_all {
            Op::Identity
        } else {
            Op::AllReduce {
                axis: self.options.axis,
                op: Reduction::Sum,
            }
        };
        let sum = self.add(scope, op, vec![value])?[0];
        self.add_once(sum, once, scope)
    }

    /// Sums the parts of all ranks, keeps this rank's slice of the sum, and adds `once` to it.
    fn reduce_scatter(
        &mut self,
        value: ValueId,
        shard: &Shard,
        has_all: bool,
        once: Option<ValueId>,
        scope: &Arc<str>,
    ) -> Result<ValueId> {
        if self.options.is_whole() {
            return self.reduce(value, has_all, once, scope);
        }
        let op = Op::ReduceScatter {
            axis: self.options.axis,
            shard: shard.clone(),
            local: shard.local_size(self.degree),
        };
        let sum = self.add(scope, op, vec![value])?[0];
        self.add_once(sum, once, scope)
    }

    fn add_once(
        &mut self,
        sum: ValueId,
        once: Option<ValueId>,
        scope: &Arc<str>,
    ) -> Result<ValueId> {
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
    fn finish(mut self) -> Result<Rewritten> {
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

/// Refuses a model that was rewritten for the axis: a second rewrite would split it again.
fn refuse_rewritten(model: &Graph, axis: Axis) -> Result<()> {
    let param = model
        .params()
        .iter()
        .find(|param| *param.placements.on(axis) != Placement::Replicate)
        .map(|param| param.name.clone());
    let is_split = |node: &&Node| {
        let region = node.op.region().map(|region| region.axis);
        region.or(node.op.communicates()) == Some(axis)
    };
    let node = model.nodes().iter().find(is_split);
    match param.or_else(|| node.map(|node| node.name.to_string())) {
        Some(place) => Err(Error::AlreadySplit { place, axis }),
        None => Ok(()),
    }
}
