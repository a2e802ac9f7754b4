//! Worlds that break: every rank hears of it in time, and of the culprit.

use crate::{Communicator, Error, Member, ReduceOp, Result, RunError, run_members};
use std::{
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::{Duration, Instant},
};

/// Longest wait in the worlds that a rank deserts. Processes must have met by then too.
const SHORT: Duration = Duration::from_secs(2);

/// Longest wait in the worlds where no rank should need it.
const LONG: Duration = Duration::from_mins(1);

const STACK_BYTES: usize = 2 << 20;

/// Breaks worlds of `n` ranks in every way; `make` makes one with a longest wait.
///
/// # Panics
/// When a rank hangs, or hears too late, or does not hear which rank failed.
pub fn faults(n: usize, make: impl Fn(usize, Duration) -> Vec<Member>) {
    let culprit = n - 1;
    an_error_reaches_ranks_that_wait(make(n, LONG), culprit);
    a_panic_reaches_ranks_that_wait(make(n, LONG), culprit);
    a_rank_that_ends_is_missed_at_once(make(n, LONG), culprit);
    a_rank_that_never_comes_is_named_at_the_deadline(make(n, SHORT), culprit);
    different_calls_are_an_error_on_every_rank(make(n, LONG), culprit);
    if n > 2 {
        different_calls_are_an_error_on_every_rank(make(n, LONG), 0);
    }
}

/// Runs a `body` that fails, and returns what the run said.
fn broken(members: Vec<Member>, body: impl Fn(Member) -> Result<()> + Sync) -> RunError<Error> {
    let start = Instant::now();
    let failure = run_members(members, STACK_BYTES, body).expect_err("the run fails");
    let took = start.elapsed();
    assert!(took < LONG / 2, "the ranks heard of it after {took:?}");
    failure
}

/// Asserts that an operation failed and blamed the culprit, and returns the error.
fn blamed<T>(result: Result<T>, culprit: usize) -> Error {
    let error = result.err().expect("the operation fails");
    let by_culprit = matches!(error, Error::Aborted { by, .. } if by == culprit);
    assert!(by_culprit, "rank {culprit} is to blame, found: {error}");
    error
}

fn an_error_reaches_ranks_that_wait(members: Vec<Member>, culprit: usize) {
    let failure = broken(members, |member| {
        let world = member.world_group()?;
        let pending = world.start_all_reduce(Box::new(vec![1.0_f32; 10]), ReduceOp::Sum);
        if member.rank() == culprit {
            return world.broadcast_vec(vec![0_u8], 99).map(drop);
        }
        let error = blamed(world.barrier(), culprit);
        drop(pending);
        // Once a world is poisoned, so is every later call, on groups old and new.
        blamed(world.all_gather_vec(vec![1_u8]), culprit);
        blamed(world.recv(culprit, 0), culprit);
        blamed(member.world_group(), culprit);
        Err(error)
    });
    assert_eq!(failure.rank(), culprit);
    let message = failure.to_string();
    assert!(message.contains("rank 99 does not exist"), "{message}");
}

fn a_panic_reaches_ranks_that_wait(members: Vec<Member>, culprit: usize) {
    let failure = broken(members, |member| {
        let world = member.world_group()?;
        assert!(member.rank() != culprit, "this panic is part of a test");
        Err(blamed(world.barrier(), culprit))
    });
    assert!(matches!(failure, RunError::Panicked { .. }), "{failure}");
    assert_eq!(failure.rank(), culprit);
    let message = failure.to_string();
    assert!(message.contains("part of a test"), "{message}");
}

fn a_rank_that_ends_is_missed_at_once(members: Vec<Member>, culprit: usize) {
    let failure = broken(members, |member| {
        let world = member.world_group()?;
        if member.rank() == culprit {
            return Ok(());
        }
        Err(blamed(world.recv(culprit, 3), culprit))
    });
    let message = failure.to_string();
    assert!(message.contains("ended"), "{message}");
}

fn a_rank_that_never_comes_is_named_at_the_deadline(members: Vec<Member>, culprit: usize) {
    let heard = AtomicBool::new(false);
    let failure = broken(members, |member| {
        let world = member.world_group()?;
        if member.rank() == culprit {
            while !heard.load(Ordering::Relaxed) {
                thread::sleep(Duration::from_millis(1));
            }
            return Ok(());
        }
        let result = world.all_reduce_scalar(1.0_f64, ReduceOp::Max);
        heard.store(true, Ordering::Relaxed);
        result.map(drop)
    });
    let RunError::Failed { rank, cause } = failure else {
        panic!("expected a timeout, found: {failure}");
    };
    let Error::Timeout { after, wait, .. } = &cause else {
        panic!("expected a timeout, found: {cause}");
    };
    assert_eq!((*after, wait.rank, wait.sequence), (SHORT, rank, 0));
    assert_eq!(wait.op, "all_reduce");
    assert!(wait.missing.iter().any(|rank| *rank == culprit), "{wait}");
}

fn different_calls_are_an_error_on_every_rank(members: Vec<Member>, culprit: usize) {
    let failure = broken(members, |member| {
        let world = member.world_group()?;
        // All then call within the time in which calls are compared.
        world.barrier()?;
        let len = if member.rank() == culprit { 3 } else { 4 };
        let result = world.all_reduce_vec(vec![0.0_f32; len], ReduceOp::Sum);
        let error = result.expect_err("lengths differ");
        let message = error.to_string();
        assert!(message.contains("all_reduce(sum) of 3 f32"), "{message}");
        assert!(message.contains("all_reduce(sum) of 4 f32"), "{message}");
        let failure = member.failure().expect("the world has failed");
        assert_eq!(failure.culprit, culprit, "the rank to blame: {message}");
        Err(error)
    });
    let RunError::Failed { cause, .. } = failure else {
        panic!("expected a mismatch, found: {failure}");
    };
    assert!(matches!(cause, Error::Mismatch { .. }), "{cause}");
}
