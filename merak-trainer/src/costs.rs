//! The cost of a step's work, as counts of operations or as times measured on this machine.
//!
//! ```text
//! graph ─► segments, one of each kind ─► run of their nodes ─► seconds by kind of node ─► file
//!                                                                         │
//!   partition, schedule: sums over the nodes of segments ◄────────────────┤
//!   prediction: sums over nodes of stages, simulated on this machine ◄────┘
//! ```
//!
//! A time is kept per kind of node: the operation and the types of operands and results. A
//! transformer of any depth has some thirty kinds of nodes. The cost of any cut into stages, with
//! any recomputation, is a sum of their times.
//!
//! Other load on the machine makes times mislead. A measurement whose repetitions differ widely is
//! repeated at once. A measurement that the first steps of a run contradict is repeated by the next
//! run; the run itself keeps its plan. Where the new measurement agrees with the old one, the cause
//! lies elsewhere, and the new one stays until it is a week old.

mod cache;
mod first_steps;
mod measure;
mod profile;
mod timed;

pub use first_steps::FirstSteps;
pub use profile::Profile;

use crate::{CheckedArguments, CostSource, Device, Result, threads_per_rank, world::num_cores};
use indicatif::HumanDuration;
use merak_trace::{Graph, Hop, Node, Phase, StageProgram, models::Model, op::Cost};
use serde::{Deserialize, Serialize};
use std::{
    ops::Add,
    path::PathBuf,
    sync::Arc,
    time::{Duration, SystemTime},
};

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
            Self::Counted => Cost::of(graph, node).flops as f64 * 1e-9,
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

    /// How many ranks of one pipeline the machine has cores for; a rank needs a core per thread.
    pub(crate) fn cores(&self, args: &CheckedArguments) -> f64 {
        match self {
            Self::Counted => f64::INFINITY,
            Self::Measured(_) => {
                let beside = args.dp * args.tp * threads_per_rank(args);
                num_cores() as f64 / beside as f64
            }
        }
    }

    /// The seconds of an optimizer step on a rank, reduction of gradients included; `None` where
    /// nothing was measured.
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

    /// When and how steadily times were measured; `None` where they are counted.
    pub fn measurement(&self) -> Option<Measurement> {
        let Self::Measured(profile) = self else {
            return None;
        };
        Some(profile.measurement())
    }

    /// The unit of the costs, for people.
    pub fn unit(&self) -> &'static str {
        match self {
            Self::Counted => "operation counts",
            Self::Measured(_) => "measured times",
        }
    }

    /// The costs that the arguments ask for: times from a file that keeps them, or measured now.
    /// Operations are counted on CUDA devices, which run asynchronously to the clock, and where a
    /// measurement needs more memory than there is.
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

/// Above this spread, repetitions of a measurement differ widely.
const WIDE_SPREAD: f64 = 0.3;

/// Times that differ by less agree.
const AGREEMENT: f64 = 0.3;

/// Whether two times agree.
fn agree(one: f64, other: f64) -> bool {
    one.max(other) <= one.min(other) * (1.0 + AGREEMENT)
}

/// Whether a measurement predicts how long steps take.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Doubt {
    /// Nothing contradicts it.
    #[default]
    None,
    /// The steps of a run took another time: the next run measures again.
    Open,
    /// The repeated measurement agreed with the one before: the cause lies elsewhere, as long as
    /// the measurement is fresh.
    Settled,
}

/// When and how steadily times were measured.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Measurement {
    /// Time of the measurement.
    pub at: SystemTime,
    /// Width of the middle half of its repetitions' times, divided by their median.
    pub spread: f64,
    /// Whether a run contradicted such times before, and they were measured again with the same
    /// outcome.
    pub is_contradicted: bool,
}

/// Older times may no longer hold: drivers, clocks and neighbours change.
const FRESH: Duration = Duration::from_hours(7 * 24);

impl Measurement {
    /// Whether it is old or unsteady. A run that contradicts it then causes a new measurement, even
    /// after earlier repetitions.
    pub fn is_worn(&self) -> bool {
        self.is_unsteady() || self.at.elapsed().unwrap_or_default() > FRESH
    }

    /// Whether the repetitions differed widely, as on a machine with other load.
    pub fn is_unsteady(&self) -> bool {
        self.spread > WIDE_SPREAD
    }

    /// How long ago it was, for people: `just now`, `3 days ago`.
    pub fn age(&self) -> String {
        // After the clock was set back, the age is unknown and counts as 0.
        let age = self.at.elapsed().unwrap_or_default();
        if age < Duration::from_mins(1) {
            "just now".to_owned()
        } else {
            format!("{} ago", HumanDuration(age))
        }
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
