//! Runs one function on every rank of a world that lives in this process.

use crate::{Member, Rank};
use std::{any::Any, fmt::Display, panic, sync::Arc, thread};

/// Why a run failed: what happened on the rank that failed first.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RunError<E> {
    /// The function returned an error.
    #[error("rank {rank} failed: {cause}")]
    Failed {
        /// The rank that failed first.
        rank: Rank,
        /// Its error.
        cause: E,
    },
    /// The function panicked.
    #[error("rank {rank} panicked: {message}")]
    Panicked {
        /// The rank that panicked first.
        rank: Rank,
        /// What the panic said.
        message: String,
    },
    /// The system gave no thread.
    #[error("no thread for rank {rank}: {cause}")]
    NoThread {
        /// The rank without a thread.
        rank: Rank,
        /// What the system said.
        cause: String,
    },
}

impl<E> RunError<E> {
    /// The rank that failed first.
    pub fn rank(&self) -> Rank {
        match self {
            Self::Failed { rank, .. }
            | Self::Panicked { rank, .. }
            | Self::NoThread { rank, .. } => *rank,
        }
    }
}

/// Runs `body` for each member on a thread of its own and returns the results by rank, as
/// [`threads::run`](crate::threads::run) does for a new world.
///
/// # Errors
/// The cause on the rank that failed first.
pub fn run_members<T, E>(
    members: Vec<Member>,
    stack_bytes: usize,
    body: impl Fn(Member) -> Result<T, E> + Sync,
) -> Result<Vec<T>, RunError<E>>
where
    T: Send,
    E: Display + Send,
{
    let engines: Vec<_> = members
        .iter()
        .map(|member| Arc::clone(member.engine()))
        .collect();
    let body = &body;
    let mut results: Vec<Result<T, RunError<E>>> = thread::scope(|scope| {
        let threads: Vec<_> = members
            .into_iter()
            .map(|member| {
                let (rank, engine) = (member.rank(), Arc::clone(member.engine()));
                let spawned = thread::Builder::new()
                    .name(format!("rank-{rank}"))
                    .stack_size(stack_bytes)
                    .spawn_scoped(scope, move || run_one(member, body));
                if let Err(cause) = &spawned {
                    engine.abort(&format!("no thread: {cause}"));
                }
                (rank, spawned)
            })
            .collect();
        threads
            .into_iter()
            .map(|(rank, spawned)| match spawned {
                Ok(handle) => handle.join().unwrap_or_else(|payload| {
                    let message = panic_message(&*payload);
                    Err(RunError::Panicked { rank, message })
                }),
                Err(cause) => Err(RunError::NoThread {
                    rank,
                    cause: cause.to_string(),
                }),
            })
            .collect()
    });
    let first = engines.iter().find_map(|engine| engine.failure());
    let place = first.and_then(|first| {
        let mut ranks = engines.iter().map(|engine| engine.rank());
        ranks.position(|rank| rank == first.reporter)
    });
    if let Some(place) = place.filter(|&place| results[place].is_err()) {
        results.swap(0, place);
    }
    results.into_iter().collect()
}

fn run_one<T, E: Display>(
    member: Member,
    body: &(impl Fn(Member) -> Result<T, E> + Sync),
) -> Result<T, RunError<E>> {
    let (rank, engine) = (member.rank(), Arc::clone(member.engine()));
    // The members of a failed world are not used again, so no broken invariant is seen.
    match panic::catch_unwind(panic::AssertUnwindSafe(|| body(member))) {
        Ok(Ok(value)) => {
            engine.end();
            Ok(value)
        }
        Ok(Err(cause)) => {
            engine.abort(&cause.to_string());
            Err(RunError::Failed { rank, cause })
        }
        Err(payload) => {
            let message = panic_message(&*payload);
            engine.abort(&format!("panicked: {message}"));
            Err(RunError::Panicked { rank, message })
        }
    }
}

fn panic_message(payload: &(dyn Any + Send)) -> String {
    payload
        .downcast_ref::<&str>()
        .map(ToString::to_string)
        .or_else(|| payload.downcast_ref::<String>().cloned())
        .unwrap_or_else(|| "no message".to_owned())
}
