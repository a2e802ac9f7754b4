//! Measured times, by kind of node.

use super::{
    AGREEMENT, Doubt, Measurement,
    calls::{calls, of_node, ranks_of},
};
use crate::{config::CheckedArguments, network::Network, plan::param_bytes};
use merak_trace::{
    Graph, Node, StageProgram,
    op::{Class, Cost, Exchange, RegionKind},
};
use serde::{Deserialize, Serialize};
use std::{
    collections::BTreeMap,
    time::{Duration, SystemTime},
};

/// One measurement: how long this machine takes for each kind of node of a model, with the ranks of
/// a run side by side.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct Profile {
    /// When it was measured, in seconds since 1970.
    pub(super) measured_at: u64,
    /// Width of the middle half of its repetitions' times, divided by their median.
    pub(super) spread: f64,
    pub(super) doubt: Doubt,
    /// Seconds by the signature of the call (`calls.rs`).
    pub(super) nodes: BTreeMap<String, f64>,
    /// Seconds between one node and the next.
    pub(super) per_node: f64,
    /// Seconds of an optimizer step for each parameter.
    pub(super) per_param: f64,
    /// [`pipeline_cores`] on the host of the first rank, for the plans of all ranks.
    pub(super) cores: f64,
    pub(crate) network: Network,
}

/// Whether two measurements of one step agree: the differences of their parts are a small share of
/// the whole.
fn agree(one: [f64; 3], other: [f64; 3]) -> bool {
    let differs: f64 = one.iter().zip(other).map(|(a, b)| (a - b).abs()).sum();
    let whole = one.iter().sum::<f64>().min(other.iter().sum());
    differs <= AGREEMENT * whole
}

/// Upper bound on the seconds of a node, a message or the update of a parameter: more than a day.
const MOST_SECONDS: f64 = 1e5;
/// Speed of a present-day core, for kinds of nodes that were not timed.
const FLOPS_PER_SECOND: f64 = 1e11;
/// Operations of such a core while a byte passes through its memory.
const FLOPS_PER_BYTE: f64 = 16.0;

impl Profile {
    /// Judges it by the doubted one that it replaces.
    pub(super) fn judge(
        &mut self,
        doubted: Option<&Self>,
        programs: &[StageProgram],
        args: &CheckedArguments,
    ) {
        let agrees =
            |doubted: &Self| agree(doubted.parts(programs, args), self.parts(programs, args));
        self.doubt = if doubted.is_some_and(agrees) {
            Doubt::Settled
        } else {
            Doubt::None
        };
    }

    /// Seconds of a step over all stages by what they are spent on: nodes, the update of the
    /// parameters, messages.
    fn parts(&self, programs: &[StageProgram], args: &CheckedArguments) -> [f64; 3] {
        let microbatches = args.gradient_accumulation_steps as f64;
        let nodes = programs.iter().map(|program| {
            let nodes = program.graph.nodes().iter();
            nodes
                .map(|node| self.node(&program.graph, node))
                .sum::<f64>()
        });
        let mut trained = BTreeMap::new();
        for param in programs.iter().flat_map(StageProgram::params) {
            if param.trainable {
                trained.insert(&param.name, param.local.numel());
            }
        }
        let cuts = programs.len().saturating_sub(1).max(1);
        let hops = programs.iter().map(|program| {
            let bytes = program.send.iter().map(|hop| hop.ty.size_bytes());
            self.network.send.seconds(bytes.sum())
        });
        // Stages are cut at some of the borders between segments.
        let cut = (args.num_stages() - 1) as f64 / cuts as f64;
        [
            microbatches * nodes.sum::<f64>(),
            self.update(args, trained.values().sum(), 0),
            2.0 * microbatches * cut * hops.take(cuts).sum::<f64>(),
        ]
    }

    /// When and how steadily it was measured.
    pub(super) fn measurement(&self) -> Measurement {
        let at = SystemTime::UNIX_EPOCH.checked_add(Duration::from_secs(self.measured_at));
        Measurement {
            at: at.unwrap_or(SystemTime::UNIX_EPOCH),
            spread: self.spread,
            is_contradicted: self.doubt == Doubt::Settled,
        }
    }

    /// The first number of the profile that is no time, in words.
    pub(super) fn fault(&self) -> Option<String> {
        let nodes = self.nodes.iter();
        let nodes = nodes.map(|(node, seconds)| (format!("nodes of {node:?}"), *seconds));
        let own = [
            ("spread", self.spread),
            ("per_node", self.per_node),
            ("per_param", self.per_param),
        ];
        let own = own.map(|(key, number)| (key.to_owned(), number));
        let network = self.network.numbers();
        let mut numbers = own.into_iter().chain(network).chain(nodes);
        let (key, found) = numbers.find(|(_, number)| !(0.0..=MOST_SECONDS).contains(number))?;
        Some(format!(
            "{key} is {found:e}, expected 0 to {MOST_SECONDS} seconds"
        ))
    }

    /// Whether every node of the programs was timed.
    pub(super) fn covers(&self, programs: &[StageProgram]) -> bool {
        programs.iter().all(|program| {
            let nodes = program.graph.nodes().iter();
            let mut calls = nodes.flat_map(|node| calls(&program.graph, node));
            calls.all(|(call, _)| self.nodes.contains_key(&call))
        })
    }

    /// Seconds of a node.
    pub(super) fn node(&self, graph: &Graph, node: &Node) -> f64 {
        if let Some(exchanged) = exchanged(&self.network, graph, node) {
            let rounds = node.op.ring().map(|_| self.rounds(graph, node));
            return rounds.unwrap_or_default() + exchanged;
        }
        let region = node.op.region().map(|region| region.kind);
        if node.op.class() == Class::Identity || region == Some(RegionKind::CopyTo) {
            return self.per_node;
        }
        let timed = self.nodes.get(&of_node(graph, node)).copied();
        self.per_node + timed.unwrap_or_else(|| Self::estimate(Cost::of(graph, node)))
    }

    /// Seconds of an attention whose keys and values go round, or of its gradient, without those of
    /// the messages between its rounds.
    fn rounds(&self, graph: &Graph, node: &Node) -> f64 {
        let mut timed = calls(graph, node).into_iter();
        let compute = timed.try_fold(0.0, |sum, (call, count)| {
            Some(sum + count * self.nodes.get(&call)?)
        });
        self.per_node + compute.unwrap_or_else(|| Self::estimate(Cost::of(graph, node)))
    }

    /// Estimated seconds of a node whose kind no segment has: an addition where gradients of
    /// several segments meet.
    fn estimate(cost: Cost) -> f64 {
        (cost.flops as f64 + FLOPS_PER_BYTE * cost.bytes as f64) / FLOPS_PER_SECOND
    }

    /// Seconds of an optimizer step on a rank with `trained` trained parameters; other ranks of the
    /// pipeline use `tied` of them too. Ranks that share cores all update at the same time.
    pub(super) fn update(&self, args: &CheckedArguments, trained: usize, tied: usize) -> f64 {
        let bytes = size_of::<f32>();
        // A rank updates the elements whose state it keeps.
        let owned = trained.div_ceil(param_bytes(args, args.replicas()).state.ranks);
        let sum = |count: usize| {
            if count == 0 {
                0.0
            } else {
                self.network.copies.seconds(count * bytes)
            }
        };
        let reduced = if args.replicas() > 1 {
            sum(trained)
        } else {
            0.0
        };
        self.per_param * owned as f64 + reduced + sum(tied)
    }
}

/// Seconds of what the ranks exchange in a node; none where they exchange nothing.
pub(super) fn exchanged(network: &Network, graph: &Graph, node: &Node) -> Option<f64> {
    let axis = node.op.communicates()?;
    let bytes = Exchange::of(graph, node)?.rank_bytes;
    let Some(ring) = node.op.ring() else {
        // Each collective counts as the reduction of as many bytes.
        return Some(network.sum_over(axis).seconds(bytes));
    };
    let messages = ring.messages(ranks_of(graph, node, &ring));
    Some(messages as f64 * network.send.seconds(bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn measurements_agree_where_what_differs_is_a_small_part_of_the_step() {
        assert!(agree([1.0, 0.5, 0.0], [1.2, 0.6, 0.1]));
        assert!(!agree([1.0, 0.5, 0.0], [1.6, 0.5, 0.0]));
        // Only the nodes agree.
        assert!(!agree([1.0, 0.5, 0.0], [1.0, 9.0, 0.0]));
        assert!(!agree([1.0, 0.1, 0.0], [1.0, 0.1, 0.9]));
        // Errors do not make up for each other.
        assert!(!agree([1.0, 0.5, 0.0], [0.5, 1.0, 0.0]));
        // A part that takes no time may differ by any factor.
        assert!(agree([1.0, 1e-6, 0.0], [1.0, 9e-6, 0.0]));
    }

    #[test]
    fn the_first_number_that_is_no_time_is_named() {
        assert_eq!(Profile::default().fault(), None);
        let negative = Profile {
            nodes: BTreeMap::from([("Add: f32[2]".to_owned(), -0.5)]),
            ..Profile::default()
        };
        insta::assert_snapshot!(negative.fault().unwrap(), @r#"nodes of "Add: f32[2]" is -5e-1, expected 0 to 100000 seconds"#);
        let absurd = Profile {
            per_param: 1e300,
            ..Profile::default()
        };
        insta::assert_snapshot!(absurd.fault().unwrap(), @"per_param is 1e300, expected 0 to 100000 seconds");
    }
}
