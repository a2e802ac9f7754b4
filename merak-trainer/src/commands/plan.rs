//! `merak plan`: the plan of a run, or the degrees with which it would be fastest.

use super::{
    Failure, Outcome,
    keys::Keys,
    model::Loaded,
    output,
    planned::{self, Planned},
};
use clap::Args as ClapArgs;
use merak_ckpt::{
    cli::at_least_one,
    words::{Bytes, brief},
};
use merak_mpu::Axis;
use merak_trainer::{
    Candidate, CheckedArguments, Cluster, Config, DegreeSearch, Error, FoundDegrees, Given,
    Machines, MemoryNeed, Origin, PlanInputs, Result, Workload, World, data::lengths_without_data,
    metrics::Screen, read_cluster,
};
use serde_json::{Value as Json, json};
use std::{fmt::Write as _, fs, path::PathBuf, process::ExitCode, sync::Arc};

/// Ways to share out the ranks that a table shows.
const SHOWN: usize = 10;

/// Plans a run without its data, or searches the degrees with the shortest step.
///
/// The plan says which layer is where and why, what a rank holds, and how long a step will take: on
/// this machine, or on a cluster that a file describes.
#[derive(Debug, ClapArgs)]
#[command(
    after_help = "Any configuration key may be given as --set KEY=VALUE or --KEY VALUE, for example --tp 2.\n\
    A cluster's file has ranks_per_host, memory_bytes, flops_per_s, memory_bytes_per_s, and in [inside] and [between] \
    latency_s and bytes_per_s; docs/PLAN.md describes them."
)]
pub(crate) struct Args {
    /// The configuration file (.toml, .yaml or .json).
    config: PathBuf,
    /// Searches the degrees, sizes of microbatches, schedule and recomputation with the shortest
    /// step of as many samples on this number of ranks.
    #[arg(long, value_name = "N", value_parser = at_least_one)]
    world: Option<usize>,
    /// Plans for the machines that this file describes, in place of this one.
    #[arg(long, value_name = "FILE")]
    cluster: Option<PathBuf>,
    /// Prints one JSON document.
    #[arg(long)]
    json: bool,
    /// Writes the plan to this file, as one page.
    #[arg(long, value_name = "FILE")]
    html: Option<PathBuf>,
    #[command(flatten)]
    keys: Keys,
}

pub(crate) fn run(mut args: Args, screen: &Screen) -> Outcome {
    args.take_own_options()?;
    args.keys.give(Given::always("do_train", "true"));
    let cluster = args.cluster.as_deref().map(read_cluster).transpose()?;
    let mut task = Task::of(&args, cluster)?;
    let mut found = None;
    if let Some(world) = args.world {
        let searched = task.search(world, screen);
        let searched = searched.map_err(|error| task.config.locate(error))?;
        let Some(best) = searched.fitting.first() else {
            return Err(without_room(world, &task, &searched));
        };
        for (key, value) in choices(&best.args) {
            args.keys.give(Given::by("--world", key, value));
        }
        task = Task::of(&args, cluster)?;
        found = Some(searched);
    }
    let config = task.config.to_toml();
    if let Some(path) = &args.html {
        let cluster = args.cluster.as_deref().map(|path| ("--cluster", path));
        let named = [("CONFIG", &*args.config)].into_iter().chain(cluster);
        output::refuse_input("--html", path, task.args.inputs(named))?;
    }
    let plan = task.plan()?;
    if let Some(path) = &args.html {
        let page = plan.planned.page(&[Workload::Training], config)?;
        fs::write(path, page.to_html(&[], None)?)
            .map_err(|error| output::not_written("--html", path, error))?;
    }
    output::print(&if args.json {
        let mut document = plan.document()?;
        if let Some(found) = &found {
            document["search"] = found_document(found);
        }
        format!("{document:#}")
    } else {
        let found = found.map(|found| found_text(&found, plan.planned.unit));
        let found = found.as_deref().map_or_else(String::new, output::fitted);
        found + &plan.text()?
    })?;
    Ok(ExitCode::SUCCESS)
}

/// What is to be planned.
struct Task {
    config: Config,
    args: CheckedArguments,
    model: Loaded,
    cluster: Option<Cluster>,
}

impl Task {
    /// Reads the configuration and the model that it names.
    fn of(args: &Args, cluster: Option<Cluster>) -> Result<Self> {
        let config = args.keys.load(&args.config)?;
        let checked = match cluster {
            Some(_) => config.check_to_plan()?,
            None => config.check()?,
        };
        let read = || {
            let model = Loaded::of(&checked)?;
            let lengths = lengths_without_data(&checked, &*model.model)?;
            Ok((model, checked.clone().with_lengths(lengths)?))
        };
        let (model, args) = read().map_err(|error| config.locate(error))?;
        Ok(Self {
            config,
            args,
            model,
            cluster,
        })
    }

    /// The degrees that the command line gives, which a search keeps.
    fn held(&self) -> Vec<Axis> {
        let origin = |axis: Axis| self.config.origin(axis.degree_name());
        let is_held = |axis: &Axis| matches!(origin(*axis), Origin::CommandLine(_));
        Axis::ALL.into_iter().filter(is_held).collect()
    }

    fn search(&self, world: usize, screen: &Screen) -> Result<FoundDegrees> {
        let inputs = PlanInputs::read(Arc::clone(&self.model.model), &self.args)?;
        let cache = planned::cost_cache(&self.args, true);
        let is_open = |key: &&str| self.config.origin(key) == Origin::Default;
        let held = self.held();
        let search = DegreeSearch {
            world,
            held: &held,
            machines: match &self.cluster {
                Some(cluster) => Machines::Described(cluster),
                None => Machines::Here(cache.as_ref()),
            },
            chooses_recompute: OF_RECOMPUTATION.iter().all(is_open),
            chooses_schedule: is_open(&"train_schedule"),
        };
        let bar = screen.bar(0, "{bar:24} {pos}/{len} degrees planned, {eta} left");
        let found = search.run(&inputs, &self.args, &|done, total| {
            bar.set_length(total as u64);
            bar.set_position(done as u64);
        });
        bar.finish_and_clear();
        found
    }

    /// The plan, with times where they are known.
    fn plan(self) -> Result<Placed> {
        let config = self.config;
        let located = |error: Error| config.locate(error);
        let mut planned = Planned::new(self.model, self.args).map_err(located)?;
        let workloads = [Workload::Training];
        let mut shortage = None;
        if let Some(cluster) = &self.cluster {
            planned.place_on(cluster).map_err(located)?;
        } else if let Err(error) = planned.plan.check_memory(&planned.args, &workloads) {
            shortage = Some(error);
        } else {
            let measured = planned.measure(true, &World::of_threads());
            measured.map_err(located)?;
        }
        let needs = planned.plan.memory(&planned.args, &workloads)?;
        Ok(Placed {
            planned,
            needs,
            shortage,
        })
    }
}

/// A plan, and what its ranks hold.
struct Placed {
    planned: Planned,
    /// Of each rank of the pipeline.
    needs: Vec<MemoryNeed>,
    /// Why this machine's memory is too small.
    shortage: Option<Error>,
}

impl Args {
    /// Takes the command's own options from the keys, which hold all words after the first key.
    fn take_own_options(&mut self) -> Result<(), Failure> {
        self.json |= self.keys.take_flag("--json");
        for (name, file) in [("--cluster", &mut self.cluster), ("--html", &mut self.html)] {
            if let Some(path) = self.keys.take_option(name) {
                *file = Some(path.into());
            }
        }
        if let Some(world) = self.keys.take_option("--world") {
            let refused = |reason| format!("--world: \"{}\": {reason}", brief(&world));
            self.world = Some(at_least_one(&world).map_err(refused)?);
        }
        Ok(())
    }
}

/// The keys about recomputation, which a search chooses where nobody has set one of them.
const OF_RECOMPUTATION: [&str; 3] = [
    "activation_checkpointing",
    "activation_checkpoint_ratio",
    "recompute",
];

/// Why a search found nothing.
fn without_room(world: usize, task: &Task, found: &FoundDegrees) -> Failure {
    let Some(least) = found.too_large.first() else {
        let first = found.refused.first().map_or_else(
            || no_degrees(task),
            |first| {
                format!(
                    "with {}, {}",
                    planned::in_words(first.degrees),
                    first.reason
                )
            },
        );
        return format!("the model cannot be planned for {world} ranks: {first}").into();
    };
    let room = match &task.cluster {
        Some(cluster) => format!("the {} of a rank", Bytes(cluster.memory_bytes)),
        None => "this machine's memory".to_owned(),
    };
    format!(
        "no way to share out {world} ranks fits into {room}: {} needs least, {} on its fullest rank; choose a higher \
         \"zero_stage\" or more ranks",
        planned::in_words(least.args.degrees()),
        Bytes(least.rank_bytes as u64)
    )
    .into()
}

/// Why a search has nothing to try.
fn no_degrees(task: &Task) -> String {
    let (given, held) = (task.args.degrees(), task.held());
    let held = held
        .iter()
        .map(|&axis| (axis.degree_name(), given.get(axis)));
    let held: Vec<_> = held
        .map(|(name, degree)| format!("{name} {degree}"))
        .collect();
    if held.is_empty() {
        return "no degrees divide the samples of a step".to_owned();
    }
    let held = held.join(" and ");
    format!(
        "no degrees with {held}, as the command line says, give that number, divide the samples of a step and keep the \
         ranks of tp and sp on a host"
    )
}

/// The keys that a search sets, with a candidate's values.
fn choices(args: &CheckedArguments) -> [(&'static str, String); 8] {
    [
        ("dp", args.dp.to_string()),
        ("tp", args.tp.to_string()),
        ("pp", args.pp.to_string()),
        ("sp", args.sp.to_string()),
        (
            "per_device_train_batch_size",
            args.per_device_train_batch_size.to_string(),
        ),
        (
            "gradient_accumulation_steps",
            args.gradient_accumulation_steps.to_string(),
        ),
        ("train_schedule", args.train_schedule.to_string()),
        (
            "activation_checkpointing",
            args.activation_checkpointing.to_string(),
        ),
    ]
}

/// The fastest ways to share out the ranks, for people.
fn found_text(found: &FoundDegrees, unit: &str) -> String {
    let FoundDegrees {
        fitting,
        too_large,
        refused,
    } = found;
    let mut text = format!(
        "search    {} of {} that fit into memory, by {unit}\n\n\
         dp    tp   pp   sp   microbatches  recompute  schedule          ms a step  waiting  memory of a rank\n",
        fitting.len().min(SHOWN),
        fitting.len()
    );
    for candidate in fitting.iter().take(SHOWN) {
        let args = &candidate.args;
        let (count, size) = (
            args.gradient_accumulation_steps,
            args.per_device_train_batch_size,
        );
        let _ = writeln!(
            text,
            "{:<5} {:<4} {:<4} {:<4} {:<13} {:<10} {:<16} {:>10.1} {:>7.1}%  {}",
            args.dp,
            args.tp,
            args.pp,
            args.sp,
            format!("{count} of {size}"),
            if args.activation_checkpointing {
                "yes"
            } else {
                "no"
            },
            args.train_schedule,
            1e3 * candidate.step,
            100.0 * candidate.bubble,
            Bytes(candidate.rank_bytes as u64)
        );
    }
    text.push('\n');
    if let Some(least) = too_large.first() {
        let _ = writeln!(
            text,
            "too large {} degrees, of which {} needs least: {} on its fullest rank",
            too_large.len(),
            planned::in_words(least.args.degrees()),
            Bytes(least.rank_bytes as u64)
        );
    }
    if let Some(first) = refused.first() {
        let _ = writeln!(
            text,
            "refused   {} degrees; {}: {}",
            refused.len(),
            planned::in_words(first.degrees),
            first.reason
        );
    }
    if let Some(best) = fitting.first() {
        let options = choices(&best.args).map(|(key, value)| format!("--{key} {value}"));
        let _ = writeln!(text, "take      {}\n", options.join(" "));
    }
    text
}

fn found_document(found: &FoundDegrees) -> Json {
    let candidate = |candidate: &Candidate| {
        let args = &candidate.args;
        json!({
            "degrees": args.degrees(),
            "per_device_train_batch_size": args.per_device_train_batch_size,
            "gradient_accumulation_steps": args.gradient_accumulation_steps,
            "train_schedule": args.train_schedule.as_str(),
            "activation_checkpointing": args.activation_checkpointing,
            "step_s": candidate.step,
            "bubble": candidate.bubble,
            "rank_bytes": candidate.rank_bytes,
        })
    };
    let too_large = found
        .too_large
        .iter()
        .map(|large| json!({ "degrees": large.args.degrees(), "rank_bytes": large.rank_bytes }));
    let refused = found
        .refused
        .iter()
        .map(|refused| json!({ "degrees": refused.degrees, "reason": refused.reason }));
    json!({
        "fitting": found.fitting.iter().map(candidate).collect::<Vec<_>>(),
        "too_large": too_large.collect::<Vec<_>>(),
        "refused": refused.collect::<Vec<_>>(),
    })
}

impl Placed {
    /// The rank of the pipeline that holds most, with its bytes.
    fn fullest(&self) -> Option<(usize, usize)> {
        let needs = self.needs.iter().map(MemoryNeed::with_exchange);
        let needs = needs.enumerate();
        needs.max_by_key(|&(rank, bytes)| (bytes, std::cmp::Reverse(rank)))
    }

    /// Bytes of a device of the cluster.
    fn room(&self) -> Option<u64> {
        self.planned.cluster.map(|cluster| cluster.memory_bytes)
    }

    /// Whether the fullest rank, or this machine, has room for it.
    fn fits(&self) -> bool {
        let needed = self.fullest().map_or(0, |(_, bytes)| bytes as u64);
        self.shortage.is_none() && self.room().is_none_or(|room| needed <= room)
    }

    /// The plan, for people.
    fn text(&self) -> Result<String> {
        Ok(self.planned.describe(None, "")? + &output::fitted(&self.memory_text()))
    }

    /// What the fullest rank holds, for people.
    fn memory_text(&self) -> String {
        let Some((rank, total)) = self.fullest() else {
            return String::new();
        };
        let need = &self.needs[rank];
        let bytes = |bytes: usize| Bytes(bytes as u64);
        let of = self.room().map(|room| format!(" of {}", Bytes(room)));
        let mut text = format!(
            "memory    rank {rank} of the pipeline needs most, up to {}{}: weights {}, gradients {}, optimizer state {}, \
             activations {}, and at most {} of buckets on their way between replicas\n",
            bytes(total),
            of.unwrap_or_default(),
            bytes(need.weights),
            bytes(need.gradients),
            bytes(need.optimizer),
            bytes(need.activations.saturating_add(need.pool)),
            bytes(need.exchange)
        );
        if let Some(shortage) = &self.shortage {
            let _ = writeln!(text, "warning: {shortage}");
        } else if !self.fits() {
            text += "warning: that is more than a device of the cluster has\n";
        }
        text
    }

    /// The plan as one document.
    fn document(&self) -> Result<Json> {
        let (args, plan) = (&self.planned.args, &self.planned.plan);
        let memory = self.needs.iter().map(|need| {
            json!({
                "weights": need.weights,
                "gradients": need.gradients,
                "optimizer": need.optimizer,
                "activations": need.activations,
                "pool": need.pool,
                "exchange": need.exchange,
                "total": need.with_exchange(),
            })
        });
        let step = self.planned.prediction.as_ref().map(|prediction| {
            json!({
                "step_s": prediction.step(),
                "pipeline_s": prediction.simulation.makespan,
                "update_s": prediction.update,
                "bubble": prediction.simulation.bubble(),
                "by": self.planned.unit,
            })
        });
        Ok(json!({
            "family": plan.draft.info.family,
            "parameters": plan.graph.num_elements(),
            "degrees": args.degrees(),
            "per_device_train_batch_size": args.per_device_train_batch_size,
            "gradient_accumulation_steps": args.gradient_accumulation_steps,
            "seq_length": plan.draft.seq_length,
            "target_length": plan.draft.target_length,
            "train_schedule": plan.schedule.name,
            "virtual_stages": args.pipeline_size().chunks,
            "activation_checkpointing": args.activation_checkpointing,
            "partition": plan.partition_report()?,
            "memory": memory.collect::<Vec<_>>(),
            "fits": self.fits(),
            "step": step,
        }))
    }
}
