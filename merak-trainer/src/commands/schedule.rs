//! `merak schedule`: a pipeline schedule and its figures.

use super::{Failure, Outcome, output};
use clap::{Args as ClapArgs, ValueEnum};
use merak_pipe::{
    AutoLimits, Costs, GridStyle, Schedule, ScheduleKind, Size, UnitCosts, auto, grid, html, json,
    simulate, svg, trace,
};
use std::{
    fs,
    io::IsTerminal,
    path::{Path, PathBuf},
    process::ExitCode,
};

/// Prints a schedule and its figures, or checks one that is given as CSV.
#[derive(Debug, ClapArgs)]
pub(crate) struct Args {
    /// Name of the schedule, as in `train_schedule`, or `auto` to search one for the costs.
    #[arg(required_unless_present = "check", conflicts_with = "check")]
    name: Option<String>,
    /// Ranks of the pipeline.
    #[arg(short = 'p', long, value_name = "RANKS")]
    ranks: usize,
    /// Microbatches of a step.
    #[arg(short = 'm', long, value_name = "MICROBATCHES")]
    microbatches: usize,
    /// Stages per rank; unset: as many as the schedule needs.
    #[arg(short = 'v', long, value_name = "CHUNKS")]
    chunks: Option<usize>,
    /// Time of each kind of action of one stage, and of a hop (C).
    #[arg(long, default_value = "F=1,I=1,W=1,R=1,C=0")]
    costs: String,
    /// Most microbatches whose activations a rank may keep, for `auto`.
    #[arg(long, value_name = "MICROBATCHES")]
    memory: Option<f64>,
    /// What to print.
    #[arg(long, value_enum, default_value_t = Format::Grid)]
    format: Format,
    /// Writes to a file instead of standard output.
    #[arg(short = 'o', long, value_name = "FILE")]
    output: Option<PathBuf>,
    /// Checks the schedule in this CSV file instead: one line per rank, cells such as 0F3.
    #[arg(long, value_name = "FILE")]
    check: Option<PathBuf>,
}

/// What to print of a schedule.
#[derive(Debug, Clone, Copy, ValueEnum)]
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

pub(crate) fn run(args: &Args) -> Outcome {
    let order = Order::of(args)?;
    let size = Size::new(args.ranks, args.microbatches).with_chunks(order.chunks(args));
    let unit: UnitCosts = args.costs.parse()?;
    size.check()?;
    let costs = Costs::uniform(unit, size.stages());
    let schedule = order.schedule(args, size, &costs)?;
    let text = match args.format {
        Format::Csv => schedule.to_csv(),
        Format::Json => format!("{:#}", json(&schedule, &costs)?),
        Format::Html => html(&schedule, unit)?,
        Format::Svg => svg(&schedule, &simulate(&schedule, &costs)?),
        Format::Trace => trace(&simulate(&schedule, &costs)?.timeline),
        Format::Grid => {
            let simulation = simulate(&schedule, &costs)?;
            let colour = args.output.is_none()
                && std::io::stdout().is_terminal()
                && std::env::var_os("NO_COLOR").is_none();
            let drawn = grid(
                &simulation.timeline,
                GridStyle {
                    colour,
                    ..GridStyle::default()
                },
            );
            let peaks: Vec<_> = simulation
                .peak_activations
                .iter()
                .map(ToString::to_string)
                .collect();
            format!(
                "{drawn}\n{}: makespan {}, bubble {:.1} %, peak activations per rank {}\n",
                schedule.name,
                simulation.makespan,
                100.0 * simulation.bubble(),
                peaks.join(" "),
            )
        }
    };
    match &args.output {
        None => output::print(&text)?,
        Some(path) => fs::write(path, text).map_err(|source| merak_trainer::Error::Write {
            path: path.clone(),
            source,
        })?,
    }
    Ok(ExitCode::SUCCESS)
}

/// What decides the order of the actions.
enum Order<'a> {
    /// A file to check.
    File(&'a Path),
    /// The schedule with this name.
    Named(ScheduleKind),
    /// A search for the costs.
    Auto,
}

impl<'a> Order<'a> {
    fn of(args: &'a Args) -> Result<Self, Failure> {
        let order = match (&args.check, args.name.as_deref()) {
            (Some(path), _) => Self::File(path),
            (None, Some("auto")) => Self::Auto,
            (None, name) => Self::Named(name.unwrap_or_default().parse()?),
        };
        if args.memory.is_some() && !matches!(order, Self::Auto) {
            return Err(
                "--memory limits the search of schedule auto: leave it out elsewhere".into(),
            );
        }
        Ok(order)
    }

    fn chunks(&self, args: &Args) -> usize {
        let fixed = match self {
            Self::Named(kind) => kind.fixed_chunks(),
            Self::File(_) | Self::Auto => None,
        };
        args.chunks.or(fixed).unwrap_or(1)
    }

    fn schedule(&self, args: &Args, size: Size, costs: &Costs) -> Result<Schedule, Failure> {
        match self {
            Self::File(path) => {
                let text =
                    fs::read_to_string(path).map_err(|source| merak_trainer::Error::Read {
                        path: path.to_path_buf(),
                        source,
                    })?;
                let schedule = Schedule::from_csv(path.display().to_string(), &text, size)?;
                schedule.validate()?;
                Ok(schedule)
            }
            Self::Named(kind) => Ok(kind.generate(size)?),
            Self::Auto => searched(args, size, costs),
        }
    }
}

fn searched(args: &Args, size: Size, costs: &Costs) -> Result<Schedule, Failure> {
    let limits = AutoLimits {
        peak_activations: args
            .memory
            .map_or_else(Vec::new, |limit| vec![limit; size.ranks]),
        ..AutoLimits::default()
    };
    let found = auto(size, costs, &limits)?;
    tracing::info!(
        start = %found.start.0,
        start_makespan = found.start.1,
        makespan = found.simulation.makespan,
        bound = found.bound,
        moves = found.moves,
        stopped = %found.stopped,
        "searched a schedule",
    );
    Ok(found.schedule)
}
