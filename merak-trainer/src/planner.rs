//! A search for the degrees with which a model trains fastest on a number of ranks.
//!
//! Every way to share the ranks out is planned as a run would be, with the same samples in a step,
//! and timed by the simulator of merak-pipe.

use crate::{
    config::{CheckedArguments, CostSource, Device, MerakArguments, json, read_table},
    costs::{CostCache, CostModel},
    error::{ConfigError, Error, PlanError, Result, chain},
    machine::num_cores,
    memory::{MemoryNeed, Workload},
    plan::{Plan, PlanInputs, kept_bytes},
    world::World,
};
use ::config::{Map, Value, ValueKind};
use merak_mpu::{Axis, DType, Degrees, GroupKind, Topology, divisors};
use merak_partition::{Cluster, ClusterCosts, ScheduleChoice, StepCosts};
use merak_pipe::ScheduleKind;
use std::{
    collections::BTreeMap,
    path::Path,
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
};

/// Where the values of a candidate are from, in messages.
const PLACE: &str = "in this search";

/// Candidates whose schedule is compared with others, once all are timed.
const IMPROVED: usize = 10;

/// The machines that a run is planned for.
#[derive(Debug, Clone, Copy)]
pub enum Machines<'a> {
    /// Those of a description.
    Described(&'a Cluster),
    /// This one, whose times are measured, or read from a file that keeps them.
    Here(Option<&'a CostCache>),
}

/// Reads the description of a cluster, a file of numbers in any format of a configuration.
///
/// # Errors
/// When the file cannot be read or does not describe a cluster.
pub fn read_cluster(path: &Path) -> Result<Cluster> {
    let refused = |reason| {
        Error::Plan(PlanError::Cluster {
            path: path.to_owned(),
            reason,
        })
    };
    let mut numbers = BTreeMap::new();
    for (key, value) in flat(read_table(path)?) {
        let found = json(&value);
        let Some(number) = found.as_f64() else {
            return Err(refused(format!("{key} is {found}, expected a number")));
        };
        numbers.insert(key, number);
    }
    Cluster::of(&numbers).map_err(|error| refused(error.to_string()))
}

/// The entries of a table, those of its sections by `section.key`.
fn flat(table: Map<String, Value>) -> Vec<(String, Value)> {
    let entries = table.into_iter().flat_map(|(key, value)| match value.kind {
        ValueKind::Table(section) => {
            let entries = section.into_iter();
            let entries = entries.map(|(inner, value)| (format!("{key}.{inner}"), value));
            entries.collect()
        }
        _ => vec![(key, value)],
    });
    entries.collect()
}

/// What a step with these arguments takes on the machines of a description.
///
/// # Errors
/// As [`Cluster::costs`].
pub fn cluster_costs(cluster: &Cluster, args: &CheckedArguments) -> Result<ClusterCosts> {
    let weight_bytes = args.narrow().map_or(size_of::<f32>(), DType::size_bytes);
    Ok(cluster.costs(
        args.degrees(),
        args.gradient_accumulation_steps,
        kept_bytes(args, args.replicas()),
        weight_bytes,
    )?)
}

/// A search over degrees, sizes of microbatches and schedules.
#[derive(Debug, Clone, Copy)]
pub struct DegreeSearch<'a> {
    /// Ranks to share out.
    pub world: usize,
    /// The axes along which every candidate has the degree of the arguments.
    pub held: &'a [Axis],
    /// The machines.
    pub machines: Machines<'a>,
    /// Whether it recomputes only where nothing else fits into memory. Unset, the arguments decide.
    pub chooses_recompute: bool,
    /// Whether it compares the schedules of the fastest. Unset, all have that of the arguments.
    pub chooses_schedule: bool,
}

/// A way to share out the ranks.
#[derive(Debug, Clone)]
pub struct Candidate {
    /// The arguments of the search with its degrees, microbatches, schedule and recomputation.
    pub args: CheckedArguments,
    /// Seconds of a step.
    pub step: f64,
    /// The share of the pipeline's time in which its ranks wait.
    pub bubble: f64,
    /// Bytes of the fullest rank.
    pub rank_bytes: usize,
}

/// A way to share out the ranks that memory has no room for.
#[derive(Debug, Clone)]
pub struct TooLarge {
    /// Its arguments.
    pub args: CheckedArguments,
    /// Bytes of the fullest rank.
    pub rank_bytes: usize,
}

/// Degrees with which the model cannot be planned.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RefusedDegrees {
    /// The degrees.
    pub degrees: Degrees,
    /// The reason.
    pub reason: String,
}

/// What a search has found.
#[derive(Debug, Clone, Default)]
pub struct FoundDegrees {
    /// What fits into memory, the shortest step first.
    pub fitting: Vec<Candidate>,
    /// One of the degrees with which nothing does, the least memory first.
    pub too_large: Vec<TooLarge>,
    /// Degrees that the model cannot be planned for.
    pub refused: Vec<RefusedDegrees>,
}

/// What became of the arguments of a candidate.
enum Outcome {
    Fits(Candidate),
    TooLarge(TooLarge),
}

/// What became of the degrees that are tried together.
#[derive(Default)]
struct Tried {
    fitting: Vec<Candidate>,
    too_large: Option<TooLarge>,
    refused: Option<String>,
}

impl DegreeSearch<'_> {
    /// Plans every way to share out the ranks with as many samples in a step as the arguments have,
    /// where `dp` divides these. The ranks that share a layer or a sequence stay on one of the
    /// described hosts. `told` hears of how many of how many degrees are done.
    ///
    /// # Errors
    /// When times are not known or a measurement fails. What cannot be planned is part of the
    /// result.
    pub fn run(
        &self,
        inputs: &PlanInputs,
        args: &CheckedArguments,
        told: &(dyn Fn(usize, usize) + Sync),
    ) -> Result<FoundDegrees> {
        if let Machines::Here(_) = self.machines {
            check_measured(args)?;
        }
        let all = self.degrees(args);
        let done = AtomicUsize::new(0);
        let tried = self.each(&all, |degrees| {
            let tried = self.tried(inputs, args, degrees)?;
            told(done.fetch_add(1, Ordering::Relaxed) + 1, all.len());
            Ok(tried)
        })?;
        let mut found = FoundDegrees::default();
        for (degrees, tried) in all.into_iter().zip(tried) {
            found.fitting.extend(tried.fitting);
            found.too_large.extend(tried.too_large);
            let refused = tried.refused;
            let refused = refused.map(|reason| RefusedDegrees { degrees, reason });
            found.refused.extend(refused);
        }
        by_time(&mut found.fitting);
        if self.chooses_schedule {
            let first = found.fitting.len().min(IMPROVED);
            let best: Vec<_> = found.fitting.drain(..first).collect();
            let improved = self.each(&best, |candidate| self.improved(inputs, candidate))?;
            found.fitting.splice(..0, improved);
            by_time(&mut found.fitting);
        }
        found.too_large.sort_by_key(|large| large.rank_bytes);
        Ok(found)
    }

    /// All degrees that fill the world and divide the samples of a step.
    fn degrees(&self, args: &CheckedArguments) -> Vec<Degrees> {
        let given = args.degrees();
        let holds = |degrees: &Degrees| {
            let mut held = self.held.iter();
            held.all(|&axis| degrees.get(axis) == given.get(axis))
        };
        let stays = |degrees: &Degrees| {
            let Machines::Described(cluster) = self.machines else {
                return true;
            };
            let topology = Topology::new(*degrees);
            let crosses = topology.map(|topology| {
                topology.crosses_hosts(GroupKind::SequenceTensor, cluster.ranks_per_host)
            });
            crosses.is_ok_and(|crosses| !crosses)
        };
        let all = Degrees::filling(self.world).into_iter();
        let divides = |degrees: &Degrees| args.global_batch().is_multiple_of(degrees.dp);
        all.filter(|degrees| divides(degrees) && holds(degrees) && stays(degrees))
            .collect()
    }

    /// `work` on each item: side by side where it only computes, one after the other where it
    /// measures times.
    fn each<T: Sync, R: Send>(
        &self,
        items: &[T],
        work: impl Fn(&T) -> Result<R> + Sync,
    ) -> Result<Vec<R>> {
        if let Machines::Here(_) = self.machines {
            return items.iter().map(work).collect();
        }
        let (next, done) = (AtomicUsize::new(0), Mutex::new(Vec::new()));
        let work_off = || {
            loop {
                let at = next.fetch_add(1, Ordering::Relaxed);
                let Some(item) = items.get(at) else { return };
                let result = work(item);
                let mut done = done.lock().unwrap_or_else(PoisonError::into_inner);
                done.push((at, result));
            }
        };
        thread::scope(|scope| {
            for _ in 1..num_cores().min(items.len()) {
                let thread = thread::Builder::new().name("merak-plan".to_owned());
                // Those that there are do the work of one that the system does not give.
                let _ = thread.spawn_scoped(scope, work_off);
            }
            work_off();
        });
        let mut done = done.into_inner().unwrap_or_else(PoisonError::into_inner);
        done.sort_by_key(|(at, _)| *at);
        done.into_iter().map(|(_, result)| result).collect()
    }

    /// The candidates of some degrees, from the smallest microbatch to the first that does not fit.
    fn tried(
        &self,
        inputs: &PlanInputs,
        args: &CheckedArguments,
        degrees: &Degrees,
    ) -> Result<Tried> {
        let mut tried = Tried::default();
        let of_replica = args.global_batch() / degrees.dp;
        for batch in microbatches(of_replica, args.per_device_train_batch_size) {
            let sized = MerakArguments {
                dp: degrees.dp,
                tp: degrees.tp,
                pp: degrees.pp,
                sp: degrees.sp,
                per_device_train_batch_size: batch,
                gradient_accumulation_steps: of_replica / batch,
                ..args.clone().into_arguments()
            };
            match self.with_least_recomputation(inputs, &sized) {
                Ok(Outcome::Fits(candidate)) => tried.fitting.push(candidate),
                Ok(Outcome::TooLarge(candidate)) => {
                    tried.too_large = Some(candidate);
                    break;
                }
                Err(error) if error.is_user_error() => {
                    tried.refused.get_or_insert_with(|| chain(&error));
                }
                Err(error) => return Err(error),
            }
        }
        // Microbatches beyond those that fit are of no interest.
        if !tried.fitting.is_empty() {
            tried.too_large = None;
        }
        if !tried.fitting.is_empty() || tried.too_large.is_some() {
            tried.refused = None;
        }
        Ok(tried)
    }

    /// What becomes of the arguments, without recomputation where that fits.
    fn with_least_recomputation(
        &self,
        inputs: &PlanInputs,
        args: &MerakArguments,
    ) -> Result<Outcome> {
        if !self.chooses_recompute {
            return self.outcome(inputs, args.check_to_plan(PLACE)?);
        }
        let with = |activation_checkpointing| {
            let args = MerakArguments {
                activation_checkpointing,
                ..args.clone()
            };
            self.outcome(inputs, args.check_to_plan(PLACE)?)
        };
        match with(false)? {
            Outcome::TooLarge(_) => with(true),
            fitting @ Outcome::Fits(_) => Ok(fitting),
        }
    }

    /// Plans these arguments, and times the plan if it fits into memory.
    fn outcome(&self, inputs: &PlanInputs, args: CheckedArguments) -> Result<Outcome> {
        let rank_bytes = |plan: &Plan| {
            let ranks = plan.memory(&args, &[Workload::Training])?;
            let ranks = ranks.iter().map(MemoryNeed::with_exchange);
            Ok::<_, Error>(ranks.max().unwrap_or(0))
        };
        if let Machines::Here(_) = self.machines {
            let plan = Plan::new(inputs, &args)?;
            match plan.check_memory(&args, &[Workload::Training]) {
                Err(Error::Memory(_)) => {
                    let rank_bytes = rank_bytes(&plan)?;
                    return Ok(Outcome::TooLarge(TooLarge { args, rank_bytes }));
                }
                checked => checked?,
            }
        }
        let (prediction, rank_bytes) = self.timed(inputs, &args, |plan, costs| {
            Ok((plan.predict(costs)?, rank_bytes(&plan)?))
        })?;
        match (self.machines, prediction) {
            (Machines::Described(cluster), _) if rank_bytes as u64 > cluster.memory_bytes => {
                Ok(Outcome::TooLarge(TooLarge { args, rank_bytes }))
            }
            (_, Some(prediction)) => Ok(Outcome::Fits(Candidate {
                step: prediction.step(),
                bubble: prediction.simulation.bubble(),
                args,
                rank_bytes,
            })),
            (_, None) => Err(without_times(
                "cost_model",
                "without room to measure",
                MEASURED,
            )),
        }
    }

    /// The candidate under the schedule with the shortest step of those that fit, with as many
    /// stages per rank as the arguments or the schedule prescribe.
    fn improved(&self, inputs: &PlanInputs, candidate: &Candidate) -> Result<Candidate> {
        let mut best = candidate.clone();
        if candidate.args.pp == 1 {
            return Ok(best);
        }
        let kinds = ScheduleKind::ALL.into_iter();
        for kind in kinds.filter(|kind| kind.is_training()) {
            let args = MerakArguments {
                train_schedule: ScheduleChoice::Named(kind),
                ..candidate.args.clone().into_arguments()
            };
            let checked = args.check_to_plan(PLACE);
            match checked.and_then(|args| self.outcome(inputs, args)) {
                Ok(Outcome::Fits(other)) if other.step < best.step => best = other,
                Ok(_) => {}
                Err(error) if error.is_user_error() => {}
                Err(error) => return Err(error),
            }
        }
        Ok(best)
    }

    /// `work` with the plan of these arguments and the costs that it was made by.
    fn timed<T>(
        &self,
        inputs: &PlanInputs,
        args: &CheckedArguments,
        work: impl FnOnce(Plan, &dyn StepCosts) -> Result<T>,
    ) -> Result<T> {
        let run = |costs: &dyn StepCosts| work(Plan::with_costs(inputs, args, costs)?, costs);
        match self.machines {
            Machines::Described(cluster) => run(&cluster_costs(cluster, args)?),
            Machines::Here(cache) => {
                let costs = CostModel::of(inputs, args, cache, &World::of_threads())?;
                run(&costs.under(args))
            }
        }
    }
}

/// Refuses arguments under which this machine's times are not measured.
fn check_measured(args: &CheckedArguments) -> Result<()> {
    if args.compute.device != Device::Cpu {
        return Err(without_times(
            "compute.device",
            args.compute.device.as_str(),
            "cpu",
        ));
    }
    match args.cost_model {
        CostSource::Measured => Ok(()),
        other => Err(without_times("cost_model", other.as_str(), MEASURED)),
    }
}

/// The source of the costs that a search on this machine needs.
const MEASURED: &str = CostSource::Measured.as_str();

/// The error of a search that has no times to compare.
fn without_times(key: &'static str, found: &str, expected: &str) -> Error {
    Error::Config(ConfigError::IllegalValue {
        key,
        found: found.to_owned(),
        place: "in a search on this machine".to_owned(),
        expected: format!("{expected}, or a description of a cluster gives the times"),
    })
}

/// Sorts by the time of a step; equal times by memory.
fn by_time(candidates: &mut [Candidate]) {
    candidates.sort_by(|one, other| {
        let by_step = one.step.total_cmp(&other.step);
        by_step.then(one.rank_bytes.cmp(&other.rank_bytes))
    });
}

/// Sizes of a microbatch that divide the samples of a replica: powers of two, and the given size.
fn microbatches(of_replica: usize, given: usize) -> impl Iterator<Item = usize> {
    let sizes = divisors(of_replica).into_iter();
    sizes.filter(move |size| size.is_power_of_two() || *size == given)
}
