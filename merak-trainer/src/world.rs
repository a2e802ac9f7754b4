//! Starting the ranks of a run.

use crate::{CheckedArguments, Error, Result, ThreadsPerRank};
use merak_ckpt::words::sentence;
use merak_mpu::{Member, RunError, threads};
use std::{error::Error as StdError, fmt, time::Duration};

/// Upper bound on ranks as threads of one process: beyond it a system runs out of threads, and no
/// machine has the cores.
const MAX_RANKS: usize = 1024;

/// Runs `body` on every rank of the arguments' world, as threads of this process, and returns the
/// results by rank.
///
/// # Errors
/// [`Error::Rank`] with the rank that failed first and its cause, or the cause itself where it
/// names its rank ([`Error::Step`]), or the configuration or an input is at fault; all other ranks
/// were ended.
pub fn run_world<T: Send>(
    args: &CheckedArguments,
    body: impl Fn(Member) -> Result<T> + Sync,
) -> Result<Vec<T>> {
    run_ranks(args.world_size(), args, body)
}

/// The same on any number of ranks.
pub(crate) fn run_ranks<T: Send>(
    world: usize,
    args: &CheckedArguments,
    body: impl Fn(Member) -> Result<T> + Sync,
) -> Result<Vec<T>> {
    if world > MAX_RANKS {
        let limit = MAX_RANKS;
        return Err(Error::TooManyRanks { world, limit });
    }
    let options = threads::WorldOptions {
        timeout: Duration::from_secs_f64(args.distributed.timeout_s),
        cores: ranks_at_once(args),
        ..Default::default()
    };
    let outcome = threads::run(world, options, |member| body(member).map_err(Cause));
    outcome.map_err(|error| match error {
        // The rank is left out where it is the only one, where the error concerns all ranks, and
        // where the error names its rank.
        RunError::Failed {
            cause: Cause(cause),
            ..
        } if world == 1 || cause.says_whose() => cause,
        RunError::Failed { rank, cause } => Error::Rank {
            rank: rank.0,
            cause: cause.to_string(),
        },
        RunError::Panicked { rank, message } => Error::Rank {
            rank: rank.0,
            cause: format!("panicked: {message}"),
        },
        other => Error::Rank {
            rank: other.rank().0,
            cause: other.to_string(),
        },
    })
}

/// Compute threads of each rank: as configured, or the machine's cores shared out.
pub fn threads_per_rank(args: &CheckedArguments) -> usize {
    match args.compute.threads_per_rank {
        ThreadsPerRank::Count(count) => count.get(),
        ThreadsPerRank::Auto => (num_cores() / args.world_size()).max(1),
    }
}

/// How many ranks the machine has cores for.
pub(crate) fn ranks_at_once(args: &CheckedArguments) -> usize {
    (num_cores() / threads_per_rank(args)).max(1)
}

/// Cores that this process may use.
pub(crate) fn num_cores() -> usize {
    std::thread::available_parallelism().map_or(1, std::num::NonZero::get)
}

/// An error with its causes in one line, as other ranks will read it.
#[derive(Debug)]
struct Cause(Error);

impl fmt::Display for Cause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&chain(&self.0))
    }
}

/// An error and its causes, outermost first, separated by colons: one line of readable length,
/// without characters that act on a terminal.
pub fn chain(error: &dyn StdError) -> String {
    let mut text = sentence(&error.to_string());
    let mut source = error.source();
    while let Some(cause) = source {
        let cause_text = sentence(&cause.to_string());
        // A transparent error repeats its source, and one with a place begins with it.
        if !text.ends_with(&cause_text) && !text.starts_with(&cause_text) {
            text.push_str(": ");
            text.push_str(&cause_text);
        }
        source = cause.source();
    }
    text
}
