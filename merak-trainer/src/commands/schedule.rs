//! `merak schedule`: a pipeline schedule and its figures.

mod document;
mod entries;
mod limits;
mod order;

use self::{
    document::shown,
    entries::{Entries, in_bytes, names_recompute},
    limits::{MemoryLimits, page_memory},
    order::Order,
};
use super::{Failure, Outcome, output};
use clap::{Args as ClapArgs, ValueEnum};
use merak_ckpt::{
    cli::at_least_one,
    words::{Bytes, file},
};
use merak_pipe::{ActivationBytes, PageOptions, Schedule, Size};
use merak_trainer::chain;
use std::{
    fs,
    path::{Path, PathBuf},
    process::ExitCode,
};

/// The most bytes of a file of a schedule.
const MAX_SCHEDULE_BYTES: u64 = 64 << 20;

/// Prints a schedule and its figures, or checks one that is given as CSV.
#[derive(Debug, ClapArgs)]
pub(crate) struct Args {
    /// Name of the schedule, as in `train_schedule`, or `auto` to search one for the costs.
    #[arg(required_unless_present = "check", conflicts_with = "check")]
    name: Option<String>,
    /// Ranks of the pipeline; of a file to check as many as it has lines.
    #[arg(
        short = 'p',
        long,
        visible_alias = "pp",
        value_name = "RANKS",
        value_parser = at_least_one,
        required_unless_present = "check"
    )]
    ranks: Option<usize>,
    /// Microbatches of a step; of a file to check as many as it names.
    #[arg(
        short = 'm',
        long,
        value_name = "MICROBATCHES",
        value_parser = at_least_one,
        required_unless_present = "check"
    )]
    microbatches: Option<usize>,
    /// Stages per rank; unset: as many as the schedule needs or the file names, 2 for
    /// `interleaved_1f1b`.
    #[arg(short = 'v', long, value_name = "CHUNKS", value_parser = at_least_one)]
    chunks: Option<usize>,
    /// Time of each kind of action of one stage, of a hop (C), and of a forward and a backward at
    /// once as a share of their sum (O): one number for all stages, or one for each with colons in
    /// between, as in F=1:1:1:2; @FILE reads them from a file. Unset: F=1,I=1,W=1,C=0,O=1, and R=1
    /// for gpipe, 1f1b, `ds_default` and the recompute schedules, R=0 elsewhere.
    #[arg(long)]
    costs: Option<String>,
    /// Bytes of activations that a microbatch keeps on one stage for its input gradient alone (I)
    /// and for its weight gradients (W), as in I=1MiB,W=512KiB, with colons where stages differ;
    /// the peak of each rank is then shown, and --memory may limit it; @FILE reads them from a
    /// file.
    #[arg(long, value_name = "BYTES")]
    bytes: Option<String>,
    /// Cores that the ranks share, for the formats that show times; unset: each has one.
    #[arg(long)]
    cores: Option<f64>,
    /// Most that a rank may keep, for `auto` and --format html: microbatches, as in 4, or with
    /// --bytes bytes, as in 96MiB; one limit for all ranks, or one for each with colons in between,
    /// as in 4:3:2:1 or 96MiB:64MiB. Bytes count what waits for I and what waits for W, each until
    /// then.
    #[arg(long, value_name = "LIMITS")]
    memory: Option<String>,
    /// What to print.
    #[arg(long, value_enum, default_value_t = Format::Grid)]
    format: Format,
    /// Writes to a file instead of standard output.
    #[arg(short = 'o', long, value_name = "FILE")]
    output: Option<PathBuf>,
    /// Checks the schedule in this CSV file instead: one line per rank, cells such as 0F3. The file
    /// holds no costs: R, what a stage recomputes, is 0 where --costs does not name it. Writing a
    /// schedule as CSV says which --costs give its times again.
    #[arg(long, value_name = "FILE")]
    check: Option<PathBuf>,
}

/// What to print of a schedule.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Format {
    /// A text grid of the simulated times.
    Grid,
    /// One line of actions per rank.
    Csv,
    /// One document with actions, instructions and figures.
    Json,
    /// A picture of the simulated times.
    Svg,
    /// A page on which schedules and costs can be tried out.
    Html,
    /// The simulated times, for Perfetto and the tracing page of Chrome.
    Trace,
}

/// Most actions that a picture shows: some tens of megabytes.
const MOST_DRAWN: usize = 50_000;

impl Format {
    /// Most actions of a schedule whose document is small enough to open.
    const fn most_actions(self) -> usize {
        match self {
            Self::Svg | Self::Html => MOST_DRAWN,
            Self::Json | Self::Trace => 2_000_000,
            // A grid with too many actions is left out, and the figures are printed.
            Self::Csv | Self::Grid => usize::MAX,
        }
    }

    /// Refuses a schedule with too many actions for this format.
    fn check(self, schedule: &Schedule) -> Result<(), Failure> {
        let (found, most) = (num_actions(schedule), self.most_actions());
        if found <= most {
            return Ok(());
        }
        let name = self.to_possible_value();
        let name = name.as_ref().map_or("", |name| name.get_name());
        Err(format!(
            "--format {name} shows at most {most} actions, and this schedule has {found}: choose fewer microbatches or ranks, or --format csv"
        )
        .into())
    }

    /// Whether it shows when actions start and end.
    const fn shows_times(self) -> bool {
        matches!(self, Self::Grid | Self::Svg | Self::Trace)
    }
}

pub(crate) fn run(args: &Args) -> Outcome {
    let order = Order::of(args)?;
    if args.cores.is_some() && !args.format.shows_times() {
        return Err("--cores changes times, which --format grid, svg and trace show".into());
    }
    let size = order.size(args);
    size.check()?;
    let named_costs = args.costs.as_deref();
    let named_costs = named_costs.map(|text| Entries::read("--costs", text));
    let named_costs = named_costs.transpose()?.unwrap_or_default();
    let costs = order.costs(&named_costs.text, size);
    let costs = costs.map_err(|error| named_costs.failure(error))?;
    let memory = PageOptions {
        is_recompute_named: names_recompute(&named_costs.text),
        ..args.memory_of(size)?
    };
    // A forward and a backward of each microbatch on each stage, at least.
    let least = size
        .stages()
        .saturating_mul(2 * size.microbatches.min(usize::MAX / 2));
    check_room(least, ACTION_BYTES)?;
    let schedule = order.schedule(size, &costs, &memory)?;
    args.format.check(&schedule)?;
    if args.format.shows_times() {
        check_room(num_actions(&schedule), SIMULATED_BYTES)?;
    }
    let text = shown(args, &schedule, &costs, &memory)?;
    match &args.output {
        None => output::print_as_is(&text)?,
        Some(path) => {
            output::refuse_input("--output", path, args.inputs())?;
            fs::write(path, &text).map_err(|error| output::not_written("--output", path, error))?;
        }
    }
    Ok(ExitCode::SUCCESS)
}

impl Args {
    /// The files that the options name.
    fn inputs(&self) -> impl Iterator<Item = (&'static str, &Path)> {
        let of_text = [("--costs", &self.costs), ("--bytes", &self.bytes)].into_iter();
        let of_text =
            of_text.filter_map(|(option, text)| Some((option, text.as_ref()?.strip_prefix('@')?)));
        let check = self.check.as_deref().map(|path| ("--check", path));
        check
            .into_iter()
            .chain(of_text.map(|(option, path)| (option, Path::new(path))))
    }

    /// The bytes of microbatches and the limits of memory that the options give.
    fn memory_of(&self, size: Size) -> Result<PageOptions, Failure> {
        let bytes = self.bytes.as_deref().map(|text| {
            let entries = Entries::read("--bytes", text)?;
            let bytes = ActivationBytes::parse(&in_bytes(&entries.text), size.stages());
            bytes.map_err(|error| entries.failure(error))
        });
        let bytes = bytes.transpose()?;
        let limits = self.memory.as_deref();
        let limits = limits.map(|text| MemoryLimits::parse(text, size.ranks, bytes.is_some()));
        let memory = page_memory(bytes, limits.transpose()?);
        let shows_bytes = matches!(self.format, Format::Grid | Format::Json | Format::Html);
        if memory.bytes.is_some() && memory.peak_bytes.is_empty() && !shows_bytes {
            return Err(
                "--bytes adds peaks of memory, which --format grid, json and html show".into(),
            );
        }
        Ok(memory)
    }
}

/// Bytes that an action takes in a schedule and its text.
const ACTION_BYTES: u64 = 48;

/// Bytes that an action takes while it is simulated, beside those.
const SIMULATED_BYTES: u64 = 72;

/// Refuses a number of actions that the memory of this process does not hold.
fn check_room(actions: usize, bytes_each: u64) -> Result<(), Failure> {
    let needed = (actions as u64).saturating_mul(bytes_each);
    let available = merak_trainer::available_bytes();
    if needed <= available {
        return Ok(());
    }
    let [needed, available] = [needed, available].map(Bytes);
    Err(format!(
        "a schedule of {actions} actions takes {needed}, but this process may use {available}: choose fewer microbatches or ranks"
    )
    .into())
}

fn num_actions(schedule: &Schedule) -> usize {
    schedule.actions.iter().map(Vec::len).sum()
}

/// What is wrong with a file of a schedule.
fn of_file(path: &Path, error: &merak_pipe::Error) -> Failure {
    format!("{}: {}", file(path), chain(error)).into()
}
