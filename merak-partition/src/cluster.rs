//! The machines that a plan is made for, and what the parts of a step take there.

use crate::{Error, ParamBytes, Result, StepCosts};
use merak_mpu::{Axis, Degrees, GroupKind, Topology, names::nearest};
use merak_trace::{
    Graph, Node,
    op::{Collective, Cost, Exchange},
};
use std::collections::BTreeMap;

/// What connects two ranks.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Connection {
    /// Seconds until the first byte arrives.
    pub latency_s: f64,
    /// Bytes a second that a rank sends, while all send.
    pub bytes_per_s: f64,
}

impl Connection {
    /// Seconds of a message.
    fn message(self, bytes: f64) -> f64 {
        self.latency_s + bytes / self.bytes_per_s
    }

    /// Seconds of some rounds among the ranks of a ring, in each of which a rank sends its share of
    /// the bytes.
    fn rounds(self, rounds: usize, ranks: usize, bytes: f64) -> f64 {
        rounds as f64 * self.message(bytes / ranks as f64)
    }

    /// Seconds of a collective over `ranks` ranks whose whole value has `bytes` bytes, as a ring
    /// does it: a reduction and a gather are one round less than there are ranks, and an all-reduce
    /// is both.
    fn collective(self, collective: Collective, ranks: usize, bytes: f64) -> f64 {
        let rounds = ranks.saturating_sub(1);
        let rounds = match collective {
            Collective::AllReduce => 2 * rounds,
            Collective::AllGather | Collective::ReduceScatter | Collective::AllToAll => rounds,
        };
        self.rounds(rounds, ranks, bytes)
    }
}

/// Hosts that are alike, each with as many devices as it runs ranks.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Cluster {
    /// Ranks of a host, one after the other.
    pub ranks_per_host: usize,
    /// Bytes of a device's memory.
    pub memory_bytes: u64,
    /// Operations a second that a device reaches in large products of the type that the run
    /// computes in; a part of what its data sheet says.
    pub flops_per_s: f64,
    /// Bytes a second between a device's memory and its units.
    pub memory_bytes_per_s: f64,
    /// Seconds that a node takes at least, such as the launch of a kernel.
    pub node_latency_s: f64,
    /// What connects the ranks of a host.
    pub inside: Connection,
    /// What connects those of several.
    pub between: Connection,
}

/// The keys of a description, in the order of the fields.
const KEYS: [&str; 9] = [
    "ranks_per_host",
    "memory_bytes",
    "flops_per_s",
    "memory_bytes_per_s",
    "node_latency_s",
    "inside.latency_s",
    "inside.bytes_per_s",
    "between.latency_s",
    "between.bytes_per_s",
];

/// The keys whose numbers may be 0. A description without the first of them means 0.
const MAY_BE_ZERO: [&str; 3] = ["node_latency_s", "inside.latency_s", "between.latency_s"];

impl Cluster {
    /// The cluster of these numbers by key, such as `flops_per_s` or `inside.latency_s`: each field
    /// has the key of its name. Without `node_latency_s`, nodes have none.
    ///
    /// # Errors
    /// [`Error::ClusterKey`] for a key that there is not, or that is missing; [`Error::Cluster`]
    /// with the first key whose number no machine has.
    pub fn of(numbers: &BTreeMap<String, f64>) -> Result<Self> {
        if let Some(unknown) = numbers.keys().find(|key| !KEYS.contains(&key.as_str())) {
            return Err(Error::ClusterKey {
                key: unknown.clone(),
                is_missing: false,
                nearest: nearest(unknown, KEYS).map(str::to_owned),
            });
        }
        let number = |key: &'static str| match numbers.get(key) {
            Some(&found) => checked(key, found),
            None if key == MAY_BE_ZERO[0] => Ok(0.0),
            None => Err(Error::ClusterKey {
                key: key.to_owned(),
                is_missing: true,
                nearest: None,
            }),
        };
        let connection = |latency_s, bytes_per_s| {
            Ok::<_, Error>(Connection {
                latency_s: number(latency_s)?,
                bytes_per_s: number(bytes_per_s)?,
            })
        };
        Ok(Self {
            ranks_per_host: number(KEYS[0])? as usize,
            memory_bytes: number(KEYS[1])? as u64,
            flops_per_s: number(KEYS[2])?,
            memory_bytes_per_s: number(KEYS[3])?,
            node_latency_s: number(KEYS[4])?,
            inside: connection(KEYS[5], KEYS[6])?,
            between: connection(KEYS[7], KEYS[8])?,
        })
    }

    /// What a step with these degrees takes. `param_bytes` says what a rank keeps for each element
    /// and which of it replicas divide, `weight_bytes` how wide weights pass between them.
    ///
    /// # Errors
    /// [`Error::NoStages`] where a degree is 0.
    pub fn costs(
        &self,
        degrees: Degrees,
        microbatches: usize,
        param_bytes: ParamBytes,
        weight_bytes: usize,
    ) -> Result<ClusterCosts> {
        let topology = Topology::new(degrees).map_err(|_| Error::NoStages)?;
        let over = |kind| self.over(&topology, kind);
        Ok(ClusterCosts {
            cluster: *self,
            degrees,
            microbatches,
            param_bytes,
            weight_bytes,
            tensor: over(GroupKind::Tensor),
            sequence: over(GroupKind::Sequence),
            copies: over(GroupKind::DataSequence),
            stages: over(GroupKind::Pipeline),
        })
    }

    /// What the ranks of the groups of a kind pass their data over: what connects hosts, where one
    /// of the groups has ranks on several.
    fn over(&self, topology: &Topology, kind: GroupKind) -> Connection {
        if topology.crosses_hosts(kind, self.ranks_per_host) {
            self.between
        } else {
            self.inside
        }
    }
}

/// The number of a key, if a machine can have it.
fn checked(key: &'static str, found: f64) -> Result<f64> {
    let (is_legal, expected) = match key {
        "ranks_per_host" => (found >= 1.0 && found.fract() == 0.0, "whole and at least 1"),
        key if MAY_BE_ZERO.contains(&key) => (found >= 0.0, "at least 0"),
        _ => (found > 0.0, "above 0"),
    };
    if is_legal && found.is_finite() {
        return Ok(found);
    }
    Err(Error::Cluster {
        key,
        found,
        expected,
    })
}

/// The times of a step on a cluster, whose ranks each have a device. Ring collectives are counted;
/// those between replicas take their whole time after the backward, although a run hides a part of
/// it.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ClusterCosts {
    cluster: Cluster,
    degrees: Degrees,
    microbatches: usize,
    param_bytes: ParamBytes,
    weight_bytes: usize,
    tensor: Connection,
    sequence: Connection,
    copies: Connection,
    stages: Connection,
}

impl ClusterCosts {
    /// What the ranks along an axis pass their data over.
    fn along(&self, axis: Axis) -> Connection {
        match axis {
            Axis::Tensor => self.tensor,
            Axis::Sequence => self.sequence,
            Axis::Data => self.copies,
            Axis::Pipeline => self.stages,
        }
    }

    /// Seconds of what the ranks exchange in a node; 0 where they exchange nothing.
    fn exchanged(&self, graph: &Graph, node: &Node) -> f64 {
        let (Some(axis), Some(exchange)) = (node.op.communicates(), Exchange::of(graph, node))
        else {
            return 0.0;
        };
        let (over, ranks) = (self.along(axis), self.degrees.get(axis));
        let bytes = exchange.rank_bytes as f64;
        if let Some(ring) = node.op.ring() {
            return ring.messages(ranks) as f64 * over.message(bytes);
        }
        let collective = node.op.region().and_then(|region| region.kind.forward());
        collective.map_or(0.0, |collective| over.collective(collective, ranks, bytes))
    }

    /// Seconds of the reduction of gradients over replicas, and of the gathers of their weights.
    fn reduction(&self, trained: usize) -> f64 {
        let replicas = self.degrees.dp * self.degrees.sp;
        let kept = &self.param_bytes;
        let of = |collective, bytes: usize| {
            let bytes = trained as f64 * bytes as f64;
            self.copies.collective(collective, replicas, bytes)
        };
        let gradients = |collective| of(collective, kept.gradient.bytes);
        let weights = of(Collective::AllGather, self.weight_bytes);
        let (each, divides) = (self.microbatches as f64, |ranks: usize| ranks > 1);
        if divides(kept.weight_ranks) {
            // Each microbatch gathers for its forward and again for its backward.
            return each * (gradients(Collective::ReduceScatter) + 2.0 * weights);
        }
        if divides(kept.gradient.ranks) {
            return each * gradients(Collective::ReduceScatter) + weights;
        }
        if divides(kept.state.ranks) {
            return gradients(Collective::ReduceScatter) + weights;
        }
        gradients(Collective::AllReduce)
    }
}

impl StepCosts for ClusterCosts {
    fn node(&self, graph: &Graph, node: &Node) -> f64 {
        let exchanged = self.exchanged(graph, node);
        if !node.op.has_kernel() && node.op.ring().is_none() {
            return exchanged;
        }
        let cost = Cost::of(graph, node);
        let computing = cost.flops as f64 / self.cluster.flops_per_s;
        let moving = cost.bytes as f64 / self.cluster.memory_bytes_per_s;
        exchanged + computing.max(moving) + self.cluster.node_latency_s
    }

    fn message(&self, bytes: usize) -> f64 {
        self.stages.message(bytes as f64)
    }

    fn collectives_pass_alone(&self) -> bool {
        true
    }

    fn update(&self, trained: usize, tied: usize) -> Option<f64> {
        let kept = &self.param_bytes;
        // Weights of 32 bits have no master beside them.
        let is_narrow = self.weight_bytes < kept.master.bytes;
        let master = if is_narrow { kept.master.bytes } else { 0 };
        // A rank reads and writes the state, the master and the weight of its elements, and reads
        // their gradients.
        let both_ways = kept.state.bytes + master + self.weight_bytes;
        let owned = trained.div_ceil(kept.state.ranks.max(1));
        let moved = owned as f64 * (2 * both_ways + kept.gradient.bytes) as f64;
        let tied_bytes = tied as f64 * kept.gradient.bytes as f64;
        let shared = if tied == 0 {
            0.0
        } else {
            self.stages.collective(Collective::AllReduce, 2, tied_bytes)
        };
        let moving = moved / self.cluster.memory_bytes_per_s;
        Some(moving + self.reduction(trained) + shared)
    }

    fn unit(&self) -> &'static str {
        "times of the described cluster"
    }
}
