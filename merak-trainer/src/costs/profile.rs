//! Measured times, by kind of node.

use super::{
    AGREEMENT, CostCache, Doubt, Measurement,
    cache::{self, Profiles},
    conditions::conditions,
    measure, pipeline_cores,
};
use crate::{
    config::CheckedArguments,
    error::Result,
    memory::{Shortage, shortage_beside_threads},
    network::Network,
    plan::{Draft, PlanInputs, SegmentedGraph, param_bytes},
    world::World,
};
use merak_ckpt::words::Bytes;
use merak_trace::{
    Coord, Graph, Node, Op, Overlap, StageProgram, TensorType, ValueId,
    op::{Attention, Class, Cost, Direction, Exchange, Keys, RegionKind, Ring},
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
    /// Seconds by [`signature`].
    pub(super) nodes: BTreeMap<String, f64>,
    /// Seconds between one node and the next.
    pub(super) per_node: f64,
    /// Seconds of an optimizer step for each parameter.
    pub(super) per_param: f64,
    /// [`pipeline_cores`] on the host of the first rank, for the plans of all ranks.
    pub(super) cores: f64,
    pub(crate) network: Network,
}

/// The outcome of a run that contradicts a profile.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Verdict {
    /// Nothing is noted: the file may not be written, or has other times by now.
    None,
    /// The next run measures again.
    Noted,
    /// A repeated measurement gave the same times.
    Settled,
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
/// Profiles that are kept for the same conditions; each model has one.
const KEPT: usize = 32;
/// Speed of a present-day core, for kinds of nodes that were not timed.
const FLOPS_PER_SECOND: f64 = 1e11;
/// Operations of such a core while a byte passes through its memory.
const FLOPS_PER_BYTE: f64 = 16.0;

impl Profile {
    /// The profile of a model's work under the arguments: from the first rank's file that keeps it,
    /// or measured now, unless that needs more memory than there is.
    ///
    /// # Communication
    /// Between processes, what shares the times, and the exchanges and nodes that are timed.
    pub(super) fn of(
        inputs: &PlanInputs,
        args: &CheckedArguments,
        cache: Option<&CostCache>,
        world: &World,
    ) -> Result<Option<Self>> {
        let (_, SegmentedGraph { graph, segments }) = Draft::new(inputs, args)?;
        // Times of nodes on the whole microbatch.
        let graph = graph.with_overlap(Overlap::None);
        let programs = segments.programs(&graph, &[])?;
        // What the file keeps besides, in the process of the first rank.
        let mut known = Profiles::new();
        let found = world.share(|| {
            known = cache.map_or_else(Profiles::new, |cache| cache::read(&cache.file));
            let profiles = known.entry(conditions(args)).or_default();
            let found = profiles.iter().rposition(|found| found.covers(&programs));
            Ok(found.map(|at| Self {
                cores: pipeline_cores(args),
                ..profiles.remove(at)
            }))
        })?;
        let doubt = found.as_ref().map(|found| found.doubt);
        if doubt.is_some_and(|doubt| doubt != Doubt::Open) {
            return Ok(found);
        }
        let by_all = measure::have_cores(args, world)?;
        if !has_room(&programs, args, world, by_all, doubt.is_some())? {
            return Ok(found);
        }
        let network = Network::measure(args, world)?;
        let measured = |world: &World, exchanges: Network| {
            measure::profile(&graph, &programs, args, exchanges, world)
        };
        let by_all = by_all.then(|| measured(world, network)).transpose()?;
        let profile = world.share(|| {
            let mut profile = match by_all {
                Some(profile) => profile,
                // The network lies between processes, and threads exchange in memory: what this
                // takes counts into the time between nodes.
                None if args.are_processes() => measured(&World::of_threads(), Network::default())?,
                None => measured(&World::of_threads(), network)?,
            };
            profile.network = network;
            profile.judge(found.as_ref(), &programs, args);
            let profiles = known.entry(conditions(args)).or_default();
            profiles.push(profile.clone());
            let old = profiles.len().saturating_sub(KEPT);
            profiles.drain(..old);
            if let Some(cache) = cache.filter(|cache| cache.keeps) {
                cache::write(&cache.file, &known);
            }
            Ok(profile)
        })?;
        Ok(Some(profile))
    }

    /// Judges it by the doubted one that it replaces.
    fn judge(
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

    /// Notes in the profile's file that a run took another time than predicted, so that the next
    /// run measures again.
    pub(super) fn cast_doubt(&self, args: &CheckedArguments, cache: &CostCache) -> Verdict {
        if !cache.keeps {
            return Verdict::None;
        }
        // What was settled long ago, or on a busy machine, may have changed.
        if self.doubt == Doubt::Settled && !self.measurement().is_worn() {
            return Verdict::Settled;
        }
        let mut known = cache::read(&cache.file);
        let profiles = known.get_mut(&conditions(args));
        let own = profiles.and_then(|profiles| profiles.iter_mut().find(|found| *found == self));
        let Some(own) = own else {
            return Verdict::None;
        };
        own.doubt = Doubt::Open;
        cache::write(&cache.file, &known);
        Verdict::Noted
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
    fn covers(&self, programs: &[StageProgram]) -> bool {
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

/// Whether every process has memory for its part of a measurement: for the nodes where all time
/// their own (`by_all`), else for those of the first rank. The first process that lacks it warns,
/// and says what the run goes by instead, which are doubted times if there are any.
///
/// # Communication
/// Between processes, an all-gather of a byte.
fn has_room(
    programs: &[StageProgram],
    args: &CheckedArguments,
    world: &World,
    by_all: bool,
    has_doubted: bool,
) -> Result<bool> {
    let needed = if by_all || world.has_first() {
        measure::needed_bytes(programs, args)
    } else {
        Network::needed_bytes(args)
    };
    let holds_all = !by_all && world.has_first();
    let processes = if holds_all { 1 } else { args.processes_here() };
    let shortage = shortage_beside_threads(args, needed, needed.div_ceil(processes as u64));
    let is_short = shortage.is_some();
    // Where a process lacks memory: whether this is the first one that does.
    let is_first = world.together(|member| {
        let group = member.world_group()?;
        let all = group.all_gather_vec(vec![u8::from(is_short)])?;
        let first = all.iter().position(|is_short| *is_short == 1);
        Ok(first.map(|first| first == member.rank().0))
    })?;
    let is_first = is_first.unwrap_or(is_short.then_some(true));
    if let Some(shortage) = shortage.filter(|_| is_first == Some(true)) {
        warn_of(shortage, has_doubted);
    }
    Ok(is_first.is_none())
}

fn warn_of(shortage: Shortage, has_doubted: bool) {
    let Shortage {
        needed,
        what,
        available,
    } = shortage;
    let [needed, available] = [needed, available].map(Bytes);
    let instead = if has_doubted {
        "times that a run contradicted"
    } else {
        "counted operations"
    };
    tracing::warn!(
        %needed, of = what, %available, instead,
        "costs are not measured, as that needs more than this process may use"
    );
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
    let ty = |value: &ValueId| graph.ty(*value);
    signature(
        &node.op,
        node.inputs.iter().map(ty),
        node.outputs.iter().map(ty),
    )
}

/// The calls of a backend that a node is, by their signatures, and how many of each: one for most
/// nodes; in a ring, those of the rounds in which queries meet keys, in the mean of the ranks.
pub(super) fn calls(graph: &Graph, node: &Node) -> Vec<(String, f64)> {
    let Some(ring) = node.op.ring() else {
        let own = node.op.has_kernel().then(|| (of_node(graph, node), 1.0));
        return own.into_iter().collect();
    };
    let (operands, results) = (types(graph, &node.inputs), types(graph, &node.outputs));
    let (slice, ranks) = (ring.slice, ranks_of(graph, node, &ring));
    let local = slice.full / ranks;
    let meets = |rank: usize, owner: usize| {
        let keys = Keys::OfRank(owner);
        let place = Coord::default().with(slice.axis, rank);
        Attention {
            keys,
            ..ring.spec.clone()
        }
        .meets(place, local)
    };
    let pairs = (0..ranks).flat_map(|rank| (0..ranks).map(move |owner| (rank, owner)));
    let met = pairs.filter(|&(rank, owner)| meets(rank, owner)).count();
    let met = met as f64 / ranks as f64;
    let of_one = Attention {
        keys: Keys::OfRank(0),
        ..ring.spec.clone()
    };
    let call = |op: &Op, operands: &[&TensorType], results: &[&TensorType]| {
        signature(op, operands.iter().copied(), results.iter().copied())
    };
    let sum = |ty| call(&Op::Add, &[ty, ty], &[ty]);
    let mut calls = match ring.direction {
        Direction::Forward => {
            let joined = [results[0], results[1], results[0], results[1]];
            vec![
                (call(&Op::Attention(of_one), &operands, &results), met),
                (call(&Op::JoinAttention, &joined, &results), met - 1.0),
            ]
        }
        Direction::Gradient => vec![
            (call(&Op::AttentionGrad(of_one), &operands, &results), met),
            (sum(results[0]), met - 1.0),
            (sum(results[1]), 2.0 * (met - 1.0)),
        ],
    };
    calls.retain(|(_, count)| *count > 0.0);
    calls
}

/// The ranks of a ring, at least one.
fn ranks_of(graph: &Graph, node: &Node, ring: &Ring<'_>) -> usize {
    let keys = graph.ty(node.inputs[ring.keys.start]);
    (ring.slice.full / keys.shape[ring.slice.dim].max(1)).max(1)
}

fn types<'a>(graph: &'a Graph, values: &[ValueId]) -> Vec<&'a TensorType> {
    values.iter().map(|&value| graph.ty(value)).collect()
}

/// The operation without the fields that tell nodes of one kind apart.
fn without_key(op: &Op) -> Op {
    let mut op = op.clone();
    if let Some(dropout) = op.dropout_mut() {
        dropout.key = 0;
    }
    if let Op::Attention(spec) | Op::AttentionGrad(spec) = &mut op
        && let Keys::OfRank(rank) = &mut spec.keys
    {
        *rank = 0;
    }
    op
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{Host, MerakArguments};
    use merak_mpu::{ChosenEngine, testing};

    #[test]
    fn a_process_without_room_keeps_all_from_measuring() {
        let arguments = MerakArguments {
            dp: 2,
            ..MerakArguments::default()
        };
        let args = arguments.check().unwrap();
        let rooms = testing::tcp_world(2, |member| {
            let is_last = member.rank().0 == 1;
            let world = World::of_process(member, ChosenEngine::Tcp).unwrap();
            let room = |shared_bytes, by_all| {
                let args = args.clone().on(Host {
                    shared_bytes,
                    ..Host::of_processes(&[0; 2], 1)
                });
                has_room(&[], &args, &world, by_all, false).unwrap()
            };
            // More than any machine has.
            let too_much = if is_last { 1 << 60 } else { 0 };
            [room(0, true), room(too_much, true), room(too_much, false)]
        });
        assert_eq!(rooms, [[true, false, false]; 2]);
    }

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
