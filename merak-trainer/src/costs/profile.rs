//! Measured times, by what decides them.

use super::{CostCache, cache, measure};
use crate::{CheckedArguments, Result, available_bytes, network::Network, plan::Draft};
use merak_partition::cost::{self, Cost};
use merak_trace::{Graph, Node, Op, StageProgram, TensorType, models::Model};
use merak_zero::ZeroStage;
use serde::{Deserialize, Serialize};
use std::{collections::BTreeMap, sync::Arc};

/// How long this machine takes for the kinds of nodes of a model, with the ranks of a run side by side.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct Profile {
    /// Seconds by [`signature`].
    pub(super) nodes: BTreeMap<String, f64>,
    /// Seconds between one node and the next.
    pub(super) per_node: f64,
    /// Seconds of an optimizer step for each parameter.
    pub(super) per_param: f64,
    pub(crate) network: Network,
}

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
        let key = measure::conditions(args);
        let mut profile = known.remove(&key).unwrap_or_default();
        if profile.covers(&programs) {
            return Ok(Some(profile));
        }
        if measure::needed_bytes(&programs, args) > available_bytes() {
            return Ok(None);
        }
        let measured = measure::profile(&draft, &programs, args)?;
        profile.nodes.extend(measured.nodes);
        profile = Self {
            nodes: profile.nodes,
            ..measured
        };
        if let Some(cache) = cache.filter(|cache| cache.keeps) {
            known.insert(key, profile.clone());
            cache::write(&cache.file, &known);
        }
        Ok(Some(profile))
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
                self.per_node + timed.unwrap_or_else(|| Self::estimate(cost::node(graph, node)))
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
