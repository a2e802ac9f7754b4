//! Ranks as threads of one process: the engine that needs nothing but std.
//!
//! Messages move by pointer: the box that one rank sends is the box that the other receives. A
//! collective has no messages at all. Each member deposits its buffer. Once all have come, one
//! thread opens every buffer and cuts the work into chunks of 32 KiB, which all members that wait
//! share:
//!
//! ```text
//! rank 0  start ─ deposit ┐            ┌ wait: opens all ─ chunk 0 ─ chunk 2 ─ closes ─ takes own
//! rank 1  start ─ deposit ┴─ all here ─┴ wait: ··········· chunk 1 ─ chunk 3 ·········· takes own
//! ```
//!
//! Where all buffers together have up to 64 KiB, the member that comes last does this at once. Else
//! the first member that waits leads, or, where nobody waits, a helper: a thread that the world
//! starts when it may need one, that sleeps between its jobs, and that ends with the last handle on
//! the world. It leaves members time to come first, 0.2 milliseconds where there are more cores
//! than ranks, and 10 where it would take a core from a rank. So pending operations make progress
//! without their callers, and may be waited for in any order, or by some members only. They count
//! as done once all members have come: a wait then computes what is left, and needs no other rank.
//!
//! The arithmetic of an element never depends on the thread that computes its chunk, so results are
//! the same bits in every run.
//!
//! A wait spins for some tens of microseconds, then sleeps; a rank that shares cores and has no
//! turn sleeps at once, so that it takes no core from the others. It ends with the result, with
//! [`Error::Aborted`](crate::Error::Aborted) as soon as any rank fails, or with
//! [`Error::Timeout`](crate::Error::Timeout), which names the missing ranks. Every build checks
//! that all members call the same operation, since here this costs one comparison.

mod collective;
mod communicator;
mod copy;
mod helper;
mod plan;
mod turns;
mod wait;
mod world;

use crate::{Member, RunError, run::run_members};
use std::{fmt::Display, sync::Arc, thread, time::Duration};

/// Settings of a world of threads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WorldOptions {
    /// Longest wait for a peer; ten minutes by default.
    pub timeout: Duration,
    /// Stack of each thread that [`run`] starts; 8 MiB by default.
    pub stack_bytes: usize,
    /// Ranks that can compute at once in [turns](crate::Communicator::turn); by default the number
    /// of cores of the machine.
    pub cores: usize,
}

impl Default for WorldOptions {
    fn default() -> Self {
        Self {
            timeout: Duration::from_mins(10),
            stack_bytes: 8 << 20,
            cores: thread::available_parallelism().map_or(1, usize::from),
        }
    }
}

/// Makes a world of `n` ranks whose members are then moved to a thread each.
///
/// ```
/// use merak_mpu::threads;
/// let members = threads::world(2, threads::WorldOptions::default());
/// std::thread::scope(|scope| {
///     for member in members {
///         scope.spawn(move || member.world_group()?.barrier());
///     }
/// });
/// ```
pub fn world(n: usize, options: WorldOptions) -> Vec<Member> {
    let world = Arc::new(world::World::new(n, options));
    let helper = helper::Helper::new(n, options, world.turns().processors());
    let helper = Arc::new(helper);
    let member = |rank| {
        let rank = world::Rank::new(Arc::clone(&world), Arc::clone(&helper), rank);
        Member::new(Arc::new(rank))
    };
    (0..n).map(member).collect()
}

/// Runs `body` once for each rank of a new world, each on its own thread, and returns the results
/// by rank.
///
/// The first rank that returns an error or panics poisons the world, so that the others leave their
/// waits with [`Error::Aborted`](crate::Error::Aborted). A rank that returns while others still
/// wait for it ends those waits too. All threads are joined before this returns; a rank that
/// computes without ever calling this crate is not interrupted.
///
/// # Errors
/// The cause on the rank that failed first.
///
/// ```
/// use merak_mpu::threads;
/// let failed = threads::run(2, threads::WorldOptions::default(), |member| {
///     if member.rank() == 1 {
///         return Err(format!("no data for rank {}", member.rank()));
///     }
///     let world = member.world_group().map_err(|e| e.to_string())?;
///     world.barrier().map_err(|e| e.to_string())
/// });
/// assert_eq!(failed.unwrap_err().to_string(), "rank 1 failed: no data for rank 1");
/// ```
pub fn run<T, E>(
    n: usize,
    options: WorldOptions,
    body: impl Fn(Member) -> Result<T, E> + Sync,
) -> Result<Vec<T>, RunError<E>>
where
    T: Send,
    E: Display + Send,
{
    run_members(world(n, options), options.stack_bytes, body)
}
