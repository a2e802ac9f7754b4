//! The order of a schedule's actions: from a file, by a name, or searched.

use super::{Args, Failure, Format, MAX_SCHEDULE_BYTES, of_file};
use merak_ckpt::words::file;
use merak_mpu::names::{did_you_mean, nearest};
use merak_pipe::{
    AutoLimits, ByteLimits, Costs, PageOptions, Schedule, ScheduleKind, Size, UnitCosts, auto,
};
use std::path::Path;

/// What decides the order of the actions.
pub(super) enum Order {
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
    pub(super) fn of(args: &Args) -> Result<Self, Failure> {
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
    pub(super) fn size(&self, args: &Args) -> Size {
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
    pub(super) fn costs(&self, text: &str, size: Size) -> merak_pipe::Result<Costs> {
        let defaults = match self {
            Self::Named(kind) => kind.default_costs(),
            Self::File { .. } | Self::Auto => UnitCosts {
                recompute: 0.0,
                ..UnitCosts::default()
            },
        };
        Costs::parse(text, defaults, size.stages())
    }

    pub(super) fn schedule(
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

/// The schedule with this name. The error also lists `auto`, which is not a schedule of merak-pipe.
fn named(name: &str) -> Result<ScheduleKind, Failure> {
    use merak_pipe::Error::UnknownSchedule;
    let names = ScheduleKind::ALL.map(ScheduleKind::as_str);
    let hint = did_you_mean(nearest(name, names.into_iter().chain(["auto"])));
    name.parse().map_err(|error| match error {
        UnknownSchedule { name, known } => {
            let known = format!("{known}, auto");
            format!("{}{hint}", UnknownSchedule { name, known }).into()
        }
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
