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
mod calls;
mod conditions;
mod first_steps;
mod measure;
mod obtained;
mod profile;
mod timed;

pub use first_steps::FirstSteps;
pub use profile::Profile;

use crate::{
    config::{CheckedArguments, CostSource, Device},
    error::Result,
    plan::PlanInputs,
    world::{World, cores_here, threads_per_rank},
};
use indicatif::HumanDuration;
use merak_mpu::GroupKind;
use merak_partition::{Counted, StepCosts};
use merak_trace::{Graph, Node};
use serde::{Deserialize, Serialize};
use std::{
    path::PathBuf,
    sync::Arc,
    time::{Duration, SystemTime},
};

/// What decides how long the parts of a step take.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(from = "Option<Profile>", into = "Option<Profile>")]
pub enum CostModel {
    /// Floating-point operations, in billions, on ranks that each have a core; messages are free.
    #[default]
    Counted,
    /// Seconds on this machine, whose cores the ranks share.
    Measured(Arc<Profile>),
}

impl From<Option<Profile>> for CostModel {
    fn from(measured: Option<Profile>) -> Self {
        measured.map_or(Self::Counted, |profile| Self::Measured(Arc::new(profile)))
    }
}

impl From<CostModel> for Option<Profile> {
    fn from(costs: CostModel) -> Self {
        match costs {
            CostModel::Counted => None,
            CostModel::Measured(profile) => Some(Arc::unwrap_or_clone(profile)),
        }
    }
}

/// The costs of a run: a model of them under the run's arguments.
#[derive(Debug, Clone, Copy)]
struct RunCosts<'a> {
    model: &'a CostModel,
    args: &'a CheckedArguments,
}

impl StepCosts for RunCosts<'_> {
    fn node(&self, graph: &Graph, node: &Node) -> f64 {
        match self.model {
            CostModel::Counted => Counted.node(graph, node),
            CostModel::Measured(profile) => profile.node(graph, node),
        }
    }

    fn message(&self, bytes: usize) -> f64 {
        match self.model {
            CostModel::Counted => Counted.message(bytes),
            CostModel::Measured(profile) => profile.network.send.seconds(bytes),
        }
    }

    fn cores(&self) -> f64 {
        match self.model {
            CostModel::Counted => Counted.cores(),
            CostModel::Measured(profile) => profile.cores,
        }
    }

    /// Sums of devices need no core, and those over tensor-parallel ranks of several hosts wait for
    /// the network; on the processors of one host they are work of the cores.
    fn collectives_pass_alone(&self) -> bool {
        self.args.compute.device == Device::Cuda || self.args.crosses_hosts(GroupKind::Tensor)
    }

    fn update(&self, trained: usize, tied: usize) -> Option<f64> {
        match self.model {
            CostModel::Counted => Counted.update(trained, tied),
            CostModel::Measured(profile) => Some(profile.update(self.args, trained, tied)),
        }
    }

    fn unit(&self) -> &'static str {
        self.model.unit()
    }
}

/// Ranks of a pipeline that compute at once, each on a core per thread.
fn pipeline_cores(args: &CheckedArguments) -> f64 {
    // A host computes for cores / (ranks · threads) of its ranks at once: that share of a pipeline.
    let needed = args.ranks_here() * threads_per_rank(args);
    (args.pp * cores_here(args)) as f64 / needed as f64
}

impl CostModel {
    /// The costs of a run with these arguments.
    pub fn under<'a>(&'a self, args: &'a CheckedArguments) -> impl StepCosts + use<'a> {
        RunCosts { model: self, args }
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
            Self::Counted => Counted.unit(),
            Self::Measured(_) => "measured times",
        }
    }

    /// The costs that the arguments ask for: times from a file that keeps them, or measured now.
    /// Operations are counted on CUDA devices, which run asynchronously to the clock, and where a
    /// measurement needs more memory than there is.
    ///
    /// All processes of a world call it and have the same costs. The first rank reads and writes
    /// the file. What the ranks exchange is timed over what connects them. Their nodes are timed by
    /// themselves where each has the cores of its threads, in the mean of all; where several share
    /// a core, by threads of the first rank, which take turns, as times of processes without turns
    /// would hold those of others.
    ///
    /// # Communication
    /// Between processes, what shares the times, and the exchanges and nodes that are timed.
    ///
    /// # Errors
    /// When the work cannot be planned, or a measurement fails.
    pub fn of(
        inputs: &PlanInputs,
        args: &CheckedArguments,
        cache: Option<&CostCache>,
        world: &World,
    ) -> Result<Self> {
        if args.cost_model == CostSource::Counted || args.compute.device != Device::Cpu {
            return Ok(Self::Counted);
        }
        Ok(Profile::of(inputs, args, cache, world)?.into())
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
    /// Whether the measurement is old or unsteady. A run that contradicts it then causes a new one,
    /// even after earlier repetitions.
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
    /// Whether the file may be written.
    pub keeps: bool,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{Host, MerakArguments};
    use merak_mpu::ChosenEngine;

    #[test]
    fn stages_on_several_hosts_compute_at_once() {
        let arguments = MerakArguments {
            pp: 2,
            ..MerakArguments::default()
        };
        let threads = arguments.check().unwrap();
        let on = |of_ranks: [u32; 2], core_sharers| {
            let host = Host::of_processes(&of_ranks, core_sharers);
            pipeline_cores(&threads.clone().on(host))
        };
        let is_near = |found: f64, expected: f64| (found - expected).abs() < 1e-12;
        assert!(is_near(on([0, 1], 1), 2.0));
        assert!(is_near(on([0, 0], 2), pipeline_cores(&threads)));
    }

    #[test]
    fn all_processes_plan_for_the_cores_that_the_first_rank_tells() {
        let args = MerakArguments::default().check().unwrap();
        let told = Profile {
            cores: 1.5,
            ..Profile::default()
        };
        let costs = CostModel::from(Some(told));
        assert!((costs.under(&args).cores() - 1.5).abs() < 1e-12);
    }

    #[test]
    fn sums_within_a_layer_pass_alone_where_its_ranks_are_on_several_hosts() {
        let arguments = MerakArguments {
            dp: 2,
            tp: 2,
            ..MerakArguments::default()
        };
        let threads = arguments.check().unwrap();
        let pass_alone =
            |args: &CheckedArguments| CostModel::Counted.under(args).collectives_pass_alone();
        assert!(!pass_alone(&threads));
        for (of_ranks, expected) in [
            ([0, 0, 0, 0], false),
            ([0, 0, 1, 1], false),
            ([0, 1, 0, 1], true),
        ] {
            for engine in [ChosenEngine::Tcp, ChosenEngine::Mpi] {
                let processes = threads.clone().on(Host {
                    engine,
                    ..Host::of_processes(&of_ranks, 1)
                });
                assert_eq!(pass_alone(&processes), expected, "{of_ranks:?}");
            }
        }
    }
}
