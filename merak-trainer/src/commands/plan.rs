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
use merak_trainer::{
    Candidate, CheckedArguments, Cluster, Config, DegreeSearch, Error, FoundDegrees, Given,
    Machines, MemoryNeed, Origin, PlanInputs, Result, Workload, World, metrics::Screen,
    read_cluster,
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
    /// Plans for the machines that this TOML file describes, in place of this one.
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
    let config = args.keys.load(&args.config)?;
    let located = |error: Error| config.locate(error);
    let cluster = args.cluster.as_deref().map(read_cluster).transpose()?;
    let mut checked = match &cluster {
        Some(_) => config.check_to_plan()?,
        None => config.check()?,
    };
    let model = Loaded::of(&checked).map_err(located)?;
    let mut found = None;
    if let Some(world) = args.world {
        let searched = search(world, cluster.as_ref(), &config, &checked, &model, screen);
        let searched = searched.map_err(located)?;
        let Some(best) = searched.fitting.first() else {
            return Err(without_room(world, cluster.as_ref(), &searched));
        };
        checked = best.args.clone();
        found = Some(searched);
    }
    let mut planned = Planned::new(model, checked).map_err(located)?;
    let memory = match &cluster {
        Some(cluster) => {
            planned.place_on(cluster).map_err(located)?;
            None
        }
        None => {
            let room = planned
                .plan
                .check_memory(&planned.args, &[Workload::Training]);
            if room.is_ok() {
                let measured = planned.measure(true, &World::of_threads());
                measured.map_err(located)?;
            }
            room.err()
        }
    };
    if let Some(path) = &args.html {
        let page = planned.page(&[Workload::Training], config.to_toml())?;
        let html = page.to_html(&[], None)?;
        fs::write(path, html).map_err(Error::writing(path))?;
    }
    let needs = planned.plan.memory(&planned.args, &[Workload::Training])?;
    if args.json {
        let mut document = planned.document(&needs)?;
        if let Some(found) = &found {
            document["search"] = found_document(found);
        }
        output::print(format!("{document:#}"))?;
        return Ok(ExitCode::SUCCESS);
    }
    let mut text = String::new();
    if let Some(found) = &found {
        text += &output::fitted(&found_text(found, planned.unit));
    }
    text += &planned.describe(None, "")?;
    text += &output::fitted(&memory_text(&needs, planned.cluster.as_ref()));
    if let Some(shortage) = memory {
        text += &output::fitted(&format!("warning: {shortage}"));
    }
    output::print(&text)?;
    Ok(ExitCode::SUCCESS)
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

/// The keys that a search decides where nobody has set them.
const OF_RECOMPUTATION: [&str; 3] = [
    "activation_checkpointing",
    "activation_checkpoint_ratio",
    "recompute",
];

fn search(
    world: usize,
    cluster: Option<&Cluster>,
    config: &Config,
    args: &CheckedArguments,
    model: &Loaded,
    screen: &Screen,
) -> Result<FoundDegrees> {
    let inputs = PlanInputs::read(Arc::clone(&model.model), args)?;
    let cache = planned::cost_cache(args, true);
    let is_open = |key: &&str| config.origin(key) == Origin::Default;
    let search = DegreeSearch {
        world,
        machines: match cluster {
            Some(cluster) => Machines::Described(cluster),
            None => Machines::Here(cache.as_ref()),
        },
        chooses_recompute: OF_RECOMPUTATION.iter().all(is_open),
    };
    let bar = screen.bar(0, "{bar:24} {pos}/{len} degrees planned, {eta} left");
    let found = search.run(&inputs, args, &|done, total| {
        bar.set_length(total as u64);
        bar.set_position(done as u64);
    });
    bar.finish_and_clear();
    found
}

/// Why a search found nothing.
fn without_room(world: usize, cluster: Option<&Cluster>, found: &FoundDegrees) -> Failure {
    let Some(least) = found.too_large.first() else {
        let first = found.refused.first().map_or_else(
            || "no degrees divide the samples of a step".to_owned(),
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
    let room = match cluster {
        Some(cluster) => format!("the {} of a rank", Bytes(cluster.memory_bytes)),
        None => "this machine's memory".to_owned(),
    };
    format!(
        "no way to share out {world} ranks fits into {room}: {} needs least, {} on its fullest rank; choose a higher \
         \"zero_stage\", more ranks, or a smaller \"seq_length\"",
        planned::in_words(least.args.degrees()),
        Bytes(least.rank_bytes as u64)
    )
    .into()
}

/// The options of a command line that take a candidate's choices.
fn options(args: &CheckedArguments) -> String {
    let mut text = format!("--dp {} --tp {} --pp {}", args.dp, args.tp, args.pp);
    if args.sp > 1 {
        let _ = write!(text, " --sp {}", args.sp);
    }
    let _ = write!(
        text,
        " --per_device_train_batch_size {} --gradient_accumulation_steps {} --train_schedule {} --activation_checkpointing {}",
        args.per_device_train_batch_size,
        args.gradient_accumulation_steps,
        args.train_schedule,
        args.activation_checkpointing
    );
    text
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
        let _ = writeln!(text, "take      {}\n", options(&best.args));
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

/// What the ranks of the pipeline hold, for people.
fn memory_text(needs: &[MemoryNeed], cluster: Option<&Cluster>) -> String {
    let fullest = needs
        .iter()
        .enumerate()
        .max_by_key(|(_, need)| need.total());
    let Some((rank, need)) = fullest else {
        return String::new();
    };
    let bytes = |bytes: usize| Bytes(bytes as u64);
    let of = cluster.map_or_else(String::new, |cluster| {
        format!(" of {}", Bytes(cluster.memory_bytes))
    });
    format!(
        "memory    rank {rank} of the pipeline needs most, at least {}{of}: weights {}, gradients {}, optimizer state {}, \
         activations {}, and up to {} of buckets on their way between replicas\n",
        bytes(need.total()),
        bytes(need.weights),
        bytes(need.gradients),
        bytes(need.optimizer),
        bytes(need.activations.saturating_add(need.pool)),
        bytes(need.exchange)
    )
}

impl Planned {
    /// The plan as one document.
    fn document(&self, needs: &[MemoryNeed]) -> Result<Json> {
        let (args, plan) = (&self.args, &self.plan);
        let memory = needs.iter().map(|need| {
            json!({
                "weights": need.weights,
                "gradients": need.gradients,
                "optimizer": need.optimizer,
                "activations": need.activations,
                "pool": need.pool,
                "exchange": need.exchange,
                "total": need.total(),
            })
        });
        let step = self.prediction.as_ref().map(|prediction| {
            json!({
                "step_s": prediction.step(),
                "pipeline_s": prediction.simulation.makespan,
                "update_s": prediction.update,
                "bubble": prediction.simulation.bubble(),
                "by": self.unit,
            })
        });
        Ok(json!({
            "family": plan.draft.info.family,
            "parameters": plan.graph.num_elements(),
            "degrees": args.degrees(),
            "per_device_train_batch_size": args.per_device_train_batch_size,
            "gradient_accumulation_steps": args.gradient_accumulation_steps,
            "seq_length": plan.draft.seq_length,
            "train_schedule": plan.schedule.name,
            "virtual_stages": args.pipeline_size().chunks,
            "activation_checkpointing": args.activation_checkpointing,
            "partition": plan.partition_report()?,
            "memory": memory.collect::<Vec<_>>(),
            "step": step,
        }))
    }
}
