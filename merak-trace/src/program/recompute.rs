//! Activation recomputation: the backward reads copies of forward nodes instead of kept results
//! ([Chen et al. 2016](https://arxiv.org/abs/1604.06174)).

use crate::{Graph, NodeId, Result, ValueId, autodiff::Phase};
use std::{
    collections::{BTreeMap, BTreeSet},
    ops::Range,
};

/// The nodes of the stage's forward that are recomputed.
#[derive(Debug, Clone, Copy)]
pub(super) struct Again<'a> {
    /// Ascending and disjoint; results that another chunk, or no chunk, reads are kept.
    pub(super) chunks: &'a [Range<usize>],
    /// Nodes whose results are not kept for any reader.
    pub(super) single: &'a BTreeSet<usize>,
    /// Values that are always kept.
    pub(super) pinned: &'a [ValueId],
}

/// Rewrites the backward so that it reads copies of values that are not kept.
///
/// Returns the backward with the copies in front of their first use.
pub(super) fn rewrite(
    graph: &mut Graph,
    phases: &mut Vec<Phase>,
    backward: Vec<NodeId>,
    again: &Again<'_>,
) -> Result<Vec<NodeId>> {
    if again.chunks.is_empty() && again.single.is_empty() {
        return Ok(backward);
    }
    let mut plan = Rewrite {
        graph,
        phases,
        kept: again.pinned.iter().copied().collect(),
        again,
        copies: BTreeMap::new(),
        order: Vec::new(),
    };
    plan.keep_values_that_leave_their_chunk(backward.first().map_or(0, |node| node.index()));
    for node in backward {
        let inputs = plan.graph.node(node).inputs.clone();
        let inputs = inputs
            .into_iter()
            .map(|value| plan.available(value))
            .collect::<Result<_>>()?;
        plan.graph.set_inputs(node, inputs);
        plan.order.push(node);
    }
    Ok(plan.order)
}

struct Rewrite<'a> {
    graph: &'a mut Graph,
    phases: &'a mut Vec<Phase>,
    /// Results of forward nodes that are kept.
    kept: BTreeSet<ValueId>,
    again: &'a Again<'a>,
    copies: BTreeMap<ValueId, ValueId>,
    /// The backward so far.
    order: Vec<NodeId>,
}

impl Rewrite<'_> {
    fn chunk_of(&self, node: NodeId) -> Option<usize> {
        self.again
            .chunks
            .iter()
            .position(|chunk| chunk.contains(&node.index()))
    }

    fn is_single(&self, node: NodeId) -> bool {
        self.again.single.contains(&node.index())
    }

    fn keep_values_that_leave_their_chunk(&mut self, num_forward: usize) {
        for user in (0..num_forward).map(NodeId::at) {
            let chunk = self.chunk_of(user);
            let inputs = self.graph.node(user).inputs.clone();
            let outside = |value: &ValueId| {
                self.graph
                    .producer(*value)
                    .is_some_and(|node| !self.is_single(node) && self.chunk_of(node) != chunk)
            };
            let leaving: Vec<_> = inputs.into_iter().filter(outside).collect();
            self.kept.extend(leaving);
        }
    }

    /// The value that the backward reads instead of `value`: itself, or a copy that is computed
    /// again.
    fn available(&mut self, value: ValueId) -> Result<ValueId> {
        if let Some(&copy) = self.copies.get(&value) {
            return Ok(copy);
        }
        let Some(node) = self.graph.producer(value) else {
            return Ok(value);
        };
        let is_forward = self.phases[node.index()] == Phase::Forward;
        let is_again = self.is_single(node) || self.chunk_of(node).is_some();
        if !is_forward || self.kept.contains(&value) || !is_again {
            return Ok(value);
        }
        let original = self.graph.node(node).clone();
        let inputs = original
            .inputs
            .iter()
            .map(|&input| self.available(input))
            .collect::<Result<_>>()?;
        let name = self.graph.unique_name(&original.name, "recompute");
        let outputs = self
            .graph
            .add_named_node(name, &original.scope, original.op, inputs)?;
        self.phases.push(Phase::Recompute);
        self.order.push(NodeId::at(self.graph.nodes().len() - 1));
        for (old, &new) in original.outputs.iter().zip(&outputs) {
            // A kept result is read as it is: its copy is computed too and dropped.
            if !self.kept.contains(old) {
                self.copies.insert(*old, new);
            }
        }
        Ok(self.copies[&value])
    }
}
