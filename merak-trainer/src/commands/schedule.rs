//! `merak schedule`: a pipeline schedule and its figures.

use super::{Failure, Outcome, output};
use clap::{Args as ClapArgs, ValueEnum};
use merak_ckpt::{
    cli::at_least_one,
    words::{Bytes, brief, file, folded},
};
use merak_pipe::{
    ActivationBytes, AutoLimits, ByteLimits, Costs, Figure, GridStyle, PageOptions, PeakBytes,
    Schedule, ScheduleKind, Simulation, Size, StageId, UnitCosts, auto, grid, html, json,
    json_with_bytes, simulate_on, svg, trace,
};
use merak_trainer::chain;
use std::{
    fs,
    io::{self, IsTerminal},
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
        Some(path) => fs::write(path, text).map_err(|source| not_written(path, source))?,
    }
    Ok(ExitCode::SUCCESS)
}

impl Args {
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

/// The schedule in the format that was asked for.
fn shown(
    args: &Args,
    schedule: &Schedule,
    costs: &Costs,
    memory: &PageOptions,
) -> Result<String, Failure> {
    let simulate = || simulate_on(schedule, costs, args.cores.unwrap_or(f64::INFINITY));
    Ok(match args.format {
        Format::Csv => {
            if let Some(lost) = lost_in_csv(schedule, costs) {
                tracing::warn!(
                    "CSV holds no cost of recomputation: the times of {} need --check FILE --costs {lost}",
                    schedule.name
                );
            }
            schedule.to_csv()
        }
        Format::Json => match &memory.bytes {
            None => format!("{:#}", json(schedule, costs)?),
            Some(bytes) => format!("{:#}", json_with_bytes(schedule, costs, bytes)?),
        },
        Format::Html => html(schedule, costs, memory)?,
        Format::Svg => {
            let simulation = simulate()?;
            let named = Schedule {
                name: format!("{} under {costs}", schedule.name),
                ..schedule.clone()
            };
            svg(&named, &simulation)
        }
        Format::Trace => trace(&simulate()?.timeline),
        Format::Grid => {
            let simulation = simulate()?;
            let is_file = args.output.is_some();
            let columns = output::columns().filter(|_| !is_file);
            let drawn = drawn(schedule, &simulation, columns, is_file);
            let mut told = format!("{}\ncosts {costs}\n", figures(schedule, &simulation));
            if let Some(bytes) = &memory.bytes {
                told.push_str(&byte_figures(schedule, bytes)?);
            }
            format!("{drawn}\n{}", folded(&told, columns))
        }
    })
}

/// The picture of a step in characters.
fn drawn(
    schedule: &Schedule,
    simulation: &Simulation,
    columns: Option<usize>,
    is_file: bool,
) -> String {
    let colour = !is_file && io::stdout().is_terminal() && std::env::var_os("NO_COLOR").is_none();
    let style = GridStyle {
        colour,
        columns,
        ..GridStyle::default()
    };
    match num_actions(schedule) {
        0..=MOST_DRAWN => grid(&simulation.timeline, style),
        more => format!("(a grid shows at most {MOST_DRAWN} actions, this schedule has {more})\n"),
    }
}

/// The failure of a file that cannot be written. Where the path is at fault, it names the option.
fn not_written(path: &Path, source: io::Error) -> Failure {
    use io::ErrorKind as K;
    let path = path.to_path_buf();
    match source.kind() {
        K::NotFound | K::PermissionDenied | K::IsADirectory | K::NotADirectory => format!(
            "cannot write {}, which --output names: {source}",
            file(&path)
        )
        .into(),
        _ => merak_trainer::Error::Write { path, source }.into(),
    }
}

/// Entries such as `F=1,I=2`, and the file that they come from, if any.
#[derive(Default)]
struct Entries {
    text: String,
    file: Option<PathBuf>,
}

impl Entries {
    /// An option's value, or the content of the file that it names with an `@`.
    fn read(option: &str, value: &str) -> Result<Self, Failure> {
        let entries = match value.strip_prefix('@') {
            None => Self {
                text: value.to_owned(),
                file: None,
            },
            Some(path) => {
                let path = PathBuf::from(path);
                let read = merak_ckpt::read_text(&path, MAX_SCHEDULE_BYTES);
                let read = read.map_err(merak_trainer::Error::reading(&path))?;
                Self {
                    // Some editors put a byte-order mark before a text.
                    text: read.trim_start_matches('\u{feff}').to_owned(),
                    file: Some(path),
                }
            }
        };
        if entries.text.trim().is_empty() {
            let place = entries.file.as_deref().map(file);
            let place = place.map_or_else(String::new, |file| format!("{file}, the file of "));
            return Err(format!(
                "{place}{option} is empty, expected entries such as F=1,I=1 or I=1MiB,W=512KiB"
            )
            .into());
        }
        Ok(entries)
    }

    /// What is wrong with the entries, with the file that has them.
    fn failure(&self, error: merak_pipe::Error) -> Failure {
        match &self.file {
            Some(path) => of_file(path, &error),
            None => error.into(),
        }
    }
}

/// The costs of recomputation, as `--costs` takes them, that a schedule has and its CSV does not
/// hold: PyTorch's format, whose readers refuse cells that are no action.
fn lost_in_csv(schedule: &Schedule, costs: &Costs) -> Option<String> {
    let stages = (0..).zip(&costs.recompute);
    let of_stage = |(stage, cost): (usize, &f64)| {
        let keeps = schedule.no_recompute.contains(&StageId(stage));
        if keeps { 0.0 } else { *cost }
    };
    let lost: Vec<_> = stages.map(of_stage).collect();
    let text = |cost: &f64| Figure(*cost).to_string();
    let (first, rest) = lost.split_first()?;
    if rest.iter().any(|cost| cost.total_cmp(first).is_ne()) {
        let each: Vec<_> = lost.iter().map(text).collect();
        return Some(format!("R={}", each.join(":")));
    }
    (*first > 0.0).then(|| format!("R={}", text(first)))
}

/// Whether costs such as `F=1,R=0.5` say what a recompute costs.
fn names_recompute(costs: &str) -> bool {
    let mut entries = costs.split([',', '\n']);
    entries.any(|entry| entry.split('=').next().is_some_and(|key| key.trim() == "R"))
}

/// Entries such as `I=1MiB:64k` with their sizes as numbers of bytes; text that is not a size
/// stays, for the parser of the entries to refuse.
fn in_bytes(text: &str) -> String {
    let size = |text: &str| {
        let size = merak_ckpt::parse_byte_size(text);
        size.map_or_else(|_| text.to_owned(), |bytes| bytes.to_string())
    };
    let entry = |entry: &str| match entry.split_once('=') {
        Some((key, sizes)) => {
            let sizes: Vec<_> = sizes.split(':').map(size).collect();
            format!("{key}={}", sizes.join(":"))
        }
        None => entry.to_owned(),
    };
    let line = |line: &str| {
        let entries: Vec<_> = line.split(',').map(entry).collect();
        entries.join(",")
    };
    let lines: Vec<_> = text.lines().map(line).collect();
    lines.join("\n")
}

/// What `--memory` counts.
enum MemoryLimits {
    Activations(Vec<f64>),
    Bytes(Vec<u64>),
}

impl MemoryLimits {
    /// Reads limits for `ranks` ranks: microbatches, or sizes with units where the bytes of a
    /// microbatch are known.
    fn parse(text: &str, ranks: usize, knows_bytes: bool) -> Result<Self, Failure> {
        let texts: Vec<_> = text.split(':').map(str::trim).collect();
        let microbatches: Result<Vec<f64>, _> = texts.iter().map(|text| text.parse()).collect();
        if let Ok(limits) = microbatches {
            if let Some(rank) = limits
                .iter()
                .position(|limit| limit.is_nan() || *limit < 1.0)
            {
                let found = limits[rank];
                return Err(merak_pipe::Error::MemoryLimit { rank, found }.into());
            }
            return Ok(Self::Activations(for_each_rank(limits, ranks)?));
        }
        let sizes = texts.iter().map(|text| {
            let size = merak_ckpt::parse_byte_size(text).ok();
            size.filter(|_| text.parse::<f64>().is_err())
        });
        let Some(sizes) = sizes.collect::<Option<Vec<u64>>>() else {
            return Err(format!(
                "--memory expects numbers of microbatches such as 4 or 4:3:2:1, or sizes of whole units such as 96MiB:64MiB, found \"{}\"", brief(text)
            )
            .into());
        };
        if !knows_bytes {
            return Err(format!(
                "--memory {text} limits bytes: say with --bytes what a microbatch keeps on a stage, as in --bytes I=1MiB,W=512KiB"
            )
            .into());
        }
        Ok(Self::Bytes(for_each_rank(sizes, ranks)?))
    }
}

/// One limit for all ranks, or one for each.
fn for_each_rank<T: Clone>(limits: Vec<T>, ranks: usize) -> Result<Vec<T>, Failure> {
    match &limits[..] {
        [all] => Ok(vec![all.clone(); ranks]),
        list if list.len() == ranks => Ok(limits),
        list => Err(format!(
            "--memory has {} limits, expected one for all ranks or one for each of {ranks}",
            list.len()
        )
        .into()),
    }
}

fn page_memory(bytes: Option<ActivationBytes>, limits: Option<MemoryLimits>) -> PageOptions {
    let memory = PageOptions {
        bytes,
        ..PageOptions::default()
    };
    match limits {
        None => memory,
        Some(MemoryLimits::Activations(peak_activations)) => PageOptions {
            peak_activations,
            ..memory
        },
        Some(MemoryLimits::Bytes(peak_bytes)) => PageOptions {
            peak_bytes,
            ..memory
        },
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

/// One line of figures; a rank's own bubble lies between its first and its last action.
fn figures(schedule: &Schedule, simulation: &Simulation) -> String {
    let bubbles = simulation.timeline.bubble_by_rank().into_iter();
    let bubbles: Vec<_> = bubbles
        .map(|share| format!("{:.1}", 100.0 * share))
        .collect();
    let peaks = simulation.peak_activations.iter();
    let peaks: Vec<_> = peaks.map(|peak| Figure(*peak).to_string()).collect();
    let forwards = if schedule.is_forward_only() {
        "forwards only, "
    } else {
        ""
    };
    format!(
        "{}: {forwards}makespan {}, bubble {:.1} %, of each rank's own time {} %, peak activations per rank {}",
        schedule.name,
        Figure(simulation.makespan),
        100.0 * simulation.bubble(),
        bubbles.join(" "),
        peaks.join(" "),
    )
}

/// The peaks of all ranks in bytes, and the parts that wait for input and for weight gradients.
fn byte_figures(schedule: &Schedule, bytes: &ActivationBytes) -> Result<String, Failure> {
    let peaks = schedule.peak_bytes_by_grad(bytes)?;
    let list = |part: fn(&PeakBytes) -> u64| {
        let texts = peaks.iter().map(|peak| Bytes(part(peak)).to_string());
        texts.collect::<Vec<_>>().join(", ")
    };
    Ok(format!(
        "peak bytes of activations per rank: {}\n  of them for I: {}\n  of them for W: {}\n",
        list(|peak| peak.total()),
        list(|peak| peak.until_input_grad),
        list(|peak| peak.until_weight_grad),
    ))
}

/// What decides the order of the actions.
enum Order {
    /// A file to check.
    File {
        text: String,
        /// The file's schedule, with the size that the file has.
        sized: Schedule,
    },
    /// The schedule with this name.
    Named(ScheduleKind),
    /// A search for the costs.
    Auto,
}

impl Order {
    fn of(args: &Args) -> Result<Self, Failure> {
        let order = match (&args.check, args.name.as_deref()) {
            (Some(path), _) => Self::read(path)?,
            (None, Some("auto")) => Self::Auto,
            (None, name) => Self::Named(named(name.unwrap_or_default())?),
        };
        if args.memory.is_some() && !matches!(order, Self::Auto) && args.format != Format::Html {
            return Err(
                "--memory limits the search of schedule auto, and --format html shows it: leave it out elsewhere".into(),
            );
        }
        Ok(order)
    }

    fn read(path: &Path) -> Result<Self, Failure> {
        let text = merak_ckpt::read_text(path, MAX_SCHEDULE_BYTES)
            .map_err(merak_trainer::Error::reading(path))?;
        let sized =
            Schedule::from_sized_csv(file(path), &text).map_err(|error| of_file(path, &error))?;
        Ok(Self::File { text, sized })
    }

    /// The requested size; missing parts come from the file or are the schedule's defaults.
    fn size(&self, args: &Args) -> Size {
        let told = match self {
            Self::File { sized, .. } => sized.size,
            Self::Named(kind) => Size::new(0, 0).with_chunks(kind.default_chunks()),
            Self::Auto => Size::new(0, 0),
        };
        Size {
            ranks: args.ranks.unwrap_or(told.ranks),
            microbatches: args.microbatches.unwrap_or(told.microbatches),
            chunks: args.chunks.unwrap_or(told.chunks),
        }
    }

    /// The costs in use: those that are named, and the schedule's own defaults.
    fn costs(&self, text: &str, size: Size) -> merak_pipe::Result<Costs> {
        let defaults = match self {
            Self::Named(kind) => kind.default_costs(),
            Self::File { .. } | Self::Auto => UnitCosts {
                recompute: 0.0,
                ..UnitCosts::default()
            },
        };
        Costs::parse(text, defaults, size.stages())
    }

    fn schedule(
        &self,
        size: Size,
        costs: &Costs,
        memory: &PageOptions,
    ) -> Result<Schedule, Failure> {
        match self {
            Self::File { text, sized } => {
                let checked = || {
                    let schedule = if size == sized.size {
                        sized.clone()
                    } else {
                        Schedule::from_csv(sized.name.clone(), text, size)?
                    };
                    schedule.validate()?;
                    Ok(schedule)
                };
                checked().map_err(|error: merak_pipe::Error| of_file(sized.name.as_ref(), &error))
            }
            Self::Named(kind) => Ok(kind.generate(size)?),
            Self::Auto => searched(size, costs, memory),
        }
    }
}

/// What is wrong with a file of a schedule.
fn of_file(path: &Path, error: &merak_pipe::Error) -> Failure {
    format!("{}: {}", file(path), chain(error)).into()
}

/// The schedule with this name. The error also lists `auto`, which is not a schedule of merak-pipe.
fn named(name: &str) -> Result<ScheduleKind, Failure> {
    use merak_pipe::Error::UnknownSchedule;
    name.parse().map_err(|error| match error {
        UnknownSchedule {
            name,
            nearest,
            known,
        } => UnknownSchedule {
            name,
            nearest,
            known: format!("{known}, auto"),
        }
        .into(),
        error => error.into(),
    })
}

fn searched(size: Size, costs: &Costs, memory: &PageOptions) -> Result<Schedule, Failure> {
    let kept = memory
        .bytes
        .clone()
        .filter(|_| !memory.peak_bytes.is_empty());
    let limits = AutoLimits {
        peak_activations: memory.peak_activations.clone(),
        bytes: kept.map(|kept| ByteLimits::new(&kept, memory.peak_bytes.clone())),
        ..AutoLimits::default()
    };
    let found = auto(size, costs, &limits)?;
    let start = found
        .start
        .map(|(kind, makespan)| (kind.as_str(), makespan));
    tracing::info!(
        start = start.map(|(name, _)| name),
        start_makespan = start.map(|(_, makespan)| makespan),
        makespan = found.simulation.makespan,
        bound = found.bound,
        moves = found.moves,
        stopped = %found.stopped,
        "searched a schedule",
    );
    Ok(found.schedule)
}
