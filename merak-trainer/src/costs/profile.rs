//! Measured times, by what decides them.

use super::{CostCache, Doubt, cache, measure};
use crate::{CheckedArguments, Result, available_bytes, network::Network, plan::Draft};
use merak_trace::{Graph, Node, Op, StageProgram, TensorType, models::Model, op::Cost};
use merak_zero::ZeroStage;
use serde::{Deserialize, Serialize};
use std::{collections::BTreeMap, sync::Arc};

/// How long this machine takes for the kinds of nodes of a model, with the ranks of a run side by side: one measurement.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct Profile {
    /// When it was measured, in seconds since 1970.
    pub(super) measured_at: u64,
    /// Of the times of its repetitions, the width of the middle half by the median.
    pub(super) spread: f64,
    pub(super) doubt: Doubt,
    /// Seconds by [`signature`].
    pub(super) nodes: BTreeMap<String, f64>,
    /// Seconds between one node and the next.
    pub(super) per_node: f64,
    /// Seconds of an optimizer step for each parameter.
    pub(super) per_param: f64,
    pub(crate) network: Network,
}

/// Profiles that are kept of the same conditions; each model has one.
const KEPT: usize = 32;
/// A core of these years, for kinds of nodes that were not timed.
const FLOPS_PER_SECOND: f64 = 1e11;
/// Operations that it does while a byte passes through its memory.
const FLOPS_PER_BYTE: f64 = 16.0;

impl Profile {
    /// The profile of a model's work under the arguments: from the file that keeps it, or measured now, unless that
    /// needs more memory than there is.
    pub(super) fn of(
        model: &Arc<dyn Model>,
        args: &CheckedArguments,
        cache: Option<&CostCache>,
    ) -> Result<Option<Self>> {
        let draft = Draft::new(Arc::clone(model), args)?;
        let programs = draft.segment_programs(&[])?;
        let mut known = cache
            .map(|cache| cache::read(&cache.file))
            .unwrap_or_default();
        let profiles = known.entry(measure::conditions(args)).or_default();
        let found = profiles.iter().rposition(|found| found.covers(&programs));
        let found = found.map(|at| profiles.remove(at));
        if let Some(found) = found.as_ref().filter(|found| found.doubt != Doubt::Open) {
            return Ok(Some(found.clone()));
        }
        if measure::needed_bytes(&programs, args) > available_bytes() {
            return Ok(found);
        }
        let mut profile = measure::profile(&draft, &programs, args)?;
        profile.doubt = match found {
            Some(doubted) if doubted.agrees(&profile) => Doubt::Settled,
            _ => Doubt::None,
        };
        profiles.push(profile.clone());
        let old = profiles.len().saturating_sub(KEPT);
        profiles.drain(..old);
        if let Some(cache) = cache.filter(|cache| cache.keeps) {
            cache::write(&cache.file, &known);
        }
        Ok(Some(profile))
    }

    /// Whether nodes take as long by both, together.
    fn agrees(&self, other: &Self) -> bool {
        let both = self.nodes.iter();
        let both = both.filter_map(|(node, seconds)| Some((seconds, other.nodes.get(node)?)));
        let sums = both.fold([0.0, 0.0], |[own, others], (a, b)| [own + a, others + b]);
        super::agree(sums[0], sums[1])
    }

    /// Notes in the file that keeps it that a run took another time than it foretells; whether that was noted, which it
    /// is once only.
    pub(super) fn cast_doubt(&self, args: &CheckedArguments, cache: &CostCache) -> bool {
        if self.doubt != Doubt::None || !cache.keeps {
            return false;
        }
        let mut known = cache::read(&cache.file);
        let profiles = known.get_mut(&measure::conditions(args));
        let own = profiles.and_then(|profiles| profiles.iter_mut().find(|found| *found == self));
        let Some(own) = own else {
            return false;
        };
        own.doubt = Doubt::Open;
        cache::write(&cache.file, &known);
        true
    }

    /// Whether every node of the programs was timed.
    fn covers(&self, programs: &[StageProgram]) -> bool {
        programs.iter().all(|program| {
            let nodes = program.graph.nodes().iter();
            let mut timed = nodes.filter(|node| is_timed(&node.op));
            timed.all(|node| self.nodes.contains_key(&of_node(&program.graph, node)))
        })
    }

    /// Seconds of a node.
    pub(super) fn node(&self, graph: &Graph, node: &Node) -> f64 {
        let bytes = || graph.ty(node.outputs[0]).size_bytes();
        match &node.op {
            Op::Identity | Op::CopyTo { .. } => self.per_node,
            Op::AllReduce { .. } | Op::AllGather { .. } | Op::Scatter { .. } => {
                self.network.all_reduce.seconds(bytes())
            }
            _ => {
                let timed = self.nodes.get(&of_node(graph, node)).copied();
                self.per_node + timed.unwrap_or_else(|| Self::estimate(Cost::of(graph, node)))
            }
        }
    }

    /// What a node may take whose kind no segment has: additions where gradients of several segments meet.
    fn estimate(cost: Cost) -> f64 {
        (cost.flops as f64 + FLOPS_PER_BYTE * cost.bytes as f64) / FLOPS_PER_SECOND
    }

    /// Seconds of an optimizer step on a rank with so many trained parameters, of which other ranks of the pipeline
    /// use so many too. Where ranks share cores, all of them are done together.
    pub(super) fn update(&self, args: &CheckedArguments, trained: usize, tied: usize) -> f64 {
        let bytes = size_of::<f32>();
        let owned = match args.zero_stage {
            ZeroStage::Replicated => trained,
            ZeroStage::OptimizerState => trained.div_ceil(args.dp),
        };
        let sum = |count: usize| {
            if count == 0 {
                0.0
            } else {
                self.network.all_reduce.seconds(count * bytes)
            }
        };
        let reduced = if args.dp > 1 { sum(trained) } else { 0.0 };
        self.per_param * owned as f64 + reduced + sum(tied)
    }
}

/// Whether a backend runs such nodes.
pub(super) fn is_timed(op: &Op) -> bool {
    !matches!(
        op,
        Op::Identity
            | Op::CopyTo { .. }
            | Op::AllReduce { .. }
            | Op::AllGather { .. }
            | Op::Scatter { .. }
    )
}

/// What decides the time of a node: its operation and the types of its operands and results.
pub(super) fn signature<'a>(
    op: &Op,
    operands: impl Iterator<Item = &'a TensorType>,
    results: impl Iterator<Item = &'a TensorType>,
) -> String {
    let types = |types: &mut dyn Iterator<Item = &'a TensorType>| {
        let texts: Vec<_> = types.map(ToString::to_string).collect();
        texts.join(" ")
    };
    let operands = types(&mut { operands });
    format!(
        "{:?}: {operands} -> {}",
        without_key(op),
        types(&mut { results })
    )
}

/// The signature of a node of a graph.
pub(super) fn of_node(graph: &Graph, node: &Node) -> String {
    let ty = |value: &merak_trace::ValueId| graph.ty(*value);
    signature(
        &node.op,
        node.inputs.iter().map(ty),
        node.outputs.iter().map(ty),
    )
}

/// The operation without what tells nodes of one kind apart.
fn without_key(op: &Op) -> Op {
    let mut op = op.clone();
    match &mut op {
        Op::Dropout(dropout) => dropout.key = 0,
        Op::Attention(attention) | Op::AttentionGrad(attention) => {
            if let Some(dropout) = &mut attention.dropout {
                dropout.key = 0;
            }
        }
        _ => {}
    }
    op
}

#[cfg(test)]
mod tests {
    use super::*;

    fn profile(nodes: &[(&str, f64)]) -> Profile {
        let nodes = nodes.iter();
        Profile {
            nodes: nodes.map(|(node, s)| ((*node).to_owned(), *s)).collect(),
            ..Profile::default()
        }
    }

    #[test]
    fn measurements_agree_by_the_nodes_that_both_have() {
        let one = profile(&[("a", 1.0), ("b", 2.0), ("c", 9.0)]);
        let agrees = |nodes: &[(&str, f64)]| one.agrees(&profile(nodes));
        assert!(agrees(&[("a", 1.5), ("b", 2.0), ("d", 0.1)]));
        assert!(agrees(&[("a", 0.7), ("b", 1.7)]));
        assert!(!agrees(&[("a", 1.9), ("b", 2.1)]));
        assert!(!agrees(&[("a", 0.2), ("b", 2.0)]));
    }
}
