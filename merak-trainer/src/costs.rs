//! What the work of a step costs: by counts of operations, or by times that were measured on this machine.
//!
//! ```text
//! graph ─► segments, one of each kind ─► a short run of their nodes ─► seconds by kind of node ─► file
//!                                                                              │
//!   partition, schedule: sums over the nodes of segments ◄─────────────────────┤
//!   prediction: sums over the nodes of stages, simulated on the machine's cores ◄┘
//! ```
//!
//! Times are kept by what decides them: the operation and the types of operands and results. A transformer has some
//! thirty kinds of nodes however deep it is, and any cut into stages and any recomputation is a sum of them.

mod cache;
mod measure;
mod profile;
mod timed;

pub use profile::Profile;

use crate::{CheckedArguments, CostSource, Device, Result, threads_per_rank, world::num_cores};
use merak_partition::cost;
use merak_trace::{Graph, Hop, Node, Phase, StageProgram, models::Model};
use serde::{Deserialize, Serialize};
use std::{ops::Add, path::PathBuf, sync::Arc};

/// What decides how long the parts of a step take.
#[derive(Debug, Clone, Default)]
pub enum CostModel {
    /// Floating-point operations, in billions, on ranks that each have a core; messages are free.
    #[default]
    Counted,
    /// Seconds on this machine, whose cores the ranks share.
    Measured(Arc<Profile>),
}

/// What the phases of one microbatch cost on a part of the model.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
pub(crate) struct PhaseCosts {
    pub(crate) forward: f64,
    pub(crate) recompute: f64,
    pub(crate) input_grad: f64,
    pub(crate) weight_grad: f64,
}

impl PhaseCosts {
    /// The whole backward, recomputation included.
    pub(crate) fn backward(self) -> f64 {
        self.recompute + self.input_grad + self.weight_grad
    }
}

impl Add for PhaseCosts {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self {
            forward: self.forward + other.forward,
            recompute: self.recompute + other.recompute,
            input_grad: self.input_grad + other.input_grad,
            weight_grad: self.weight_grad + other.weight_grad,
        }
    }
}

impl CostModel {
    /// The costs of a program's phases.
    pub(crate) fn phases(&self, program: &StageProgram) -> PhaseCosts {
        let mut costs = PhaseCosts::default();
        let nodes = program.graph.nodes().iter().zip(&program.phases);
        for (node, phase) in nodes {
            let place = match phase {
                Phase::Forward => &mut costs.forward,
                Phase::Recompute => &mut costs.recompute,
                Phase::BackwardInput => &mut costs.input_grad,
                Phase::BackwardWeight => &mut costs.weight_grad,
            };
            *place += self.node(&program.graph, node);
        }
        costs
    }

    fn node(&self, graph: &Graph, node: &Node) -> f64 {
        match self {
            Self::Counted => cost::node(graph, node).flops as f64 * 1e-9,
            Self::Measured(profile) => profile.node(graph, node),
        }
    }

    /// A message between stages with these values.
    pub(crate) fn hop(&self, values: &[Hop]) -> f64 {
        let bytes = values.iter().map(|hop| hop.ty.size_bytes());
        match self {
            Self::Counted => 0.0,
            Self::Measured(profile) => profile.network.send.seconds(bytes.sum()),
        }
    }

    /// The cores that the ranks of one pipeline share; a rank with several threads needs as many for each of them.
    pub(crate) fn cores(&self, args: &CheckedArguments) -> f64 {
        match self {
            Self::Counted => f64::INFINITY,
            Self::Measured(_) => {
                let beside = args.dp * args.tp * threads_per_rank(args);
                num_cores() as f64 / beside as f64
            }
        }
    }

    /// The seconds of an optimizer step on a rank, reduction of gradients included; `None` where nothing was measured.
    pub(crate) fn update(
        &self,
        args: &CheckedArguments,
        trained: usize,
        tied: usize,
    ) -> Option<f64> {
        match self {
            Self::Counted => None,
            Self::Measured(profile) => Some(profile.update(args, trained, tied)),
        }
    }

    /// The unit of the costs, for people.
    pub fn unit(&self) -> &'static str {
        match self {
            Self::Counted => "operation counts",
            Self::Measured(_) => "measured times",
        }
    }

    /// What the arguments ask for: times from a file that keeps them, or measured now. Operations are counted on CUDA
    /// devices, which run behind the clock's back, and where a measurement needs more memory than there is.
    ///
    /// # Errors
    /// When the work cannot be planned, or a measurement fails.
    pub fn of(
        model: &Arc<dyn Model>,
        args: &CheckedArguments,
        cache: Option<&CostCache>,
    ) -> Result<Self> {
        if args.cost_model == CostSource::Counted || args.compute.device != Device::Cpu {
            return Ok(Self::Counted);
        }
        let profile = Profile::of(model, args, cache)?;
        Ok(profile.map_or(Self::Counted, |profile| Self::Measured(Arc::new(profile))))
    }
}

/// A file that keeps measured times.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CostCache {
    /// The file; there need not be one yet.
    pub file: PathBuf,
    /// Whether it may be written.
    pub keeps: bool,
}
