//! Waiting: spin, where the rank has a core of its own, then sleep, until ready, poisoned, deserted
//! or late.

use super::world::World;
use crate::{
    Error, Rank, Result, Wait,
    bell::{Bell, culprit},
};
use std::{
    hint,
    time::{Duration, Instant},
};

/// A sleep costs some microseconds to start and to end, so waits that end sooner never sleep. Where
/// ranks share cores, all waits sleep: a rank that spins takes a core from those it waits for, and
/// a rank that yields its core again and again is the last to get one when its wait is over.
const SPIN: Duration = Duration::from_micros(40);

/// Waits until `ready`, at most as long as the world allows, on a thread of `rank`.
///
/// `describe` names the waiting and the missing ranks; it is called only when the wait is a long
/// one.
///
/// # Errors
/// [`Error::Aborted`] when the world is poisoned or a missing rank has ended, [`Error::Timeout`].
pub(super) fn wait(
    world: &World,
    rank: Rank,
    bell: &Bell,
    ready: &dyn Fn() -> bool,
    describe: &dyn Fn() -> Wait,
) -> Result<()> {
    world.check()?;
    if ready() || (world.turns().has_core(rank) && spin(world, ready)) {
        return world.check();
    }
    let deadline = Instant::now() + world.timeout();
    let note = world.note_wait(describe());
    // An ended rank made all its deposits before it ended, so `ended` is read before `ready`.
    let deserter = || {
        let ended = world.ended();
        if ended.is_empty() || ready() {
            return None;
        }
        describe()
            .missing
            .into_iter()
            .find(|rank| ended.contains(rank))
    };
    bell.sleep(deadline, &|| {
        ready() || world.check().is_err() || deserter().is_some()
    });
    // A copy of all notes has a list of ranks for each rank, so only a wait that has failed makes
    // one, while its own note is still there.
    let others = if ready() || world.check().is_err() {
        Vec::new()
    } else {
        world.waits()
    };
    world.forget_wait(note);
    world.check()?;
    if ready() {
        return Ok(());
    }
    let wait = describe();
    let reporter = wait.rank.0;
    if let Some(deserter) = deserter() {
        let reason = format!("it ended before it came ({wait})");
        world.fail(deserter.0, reporter, &reason);
        return world.check();
    }
    let culprit = culprit(&wait, &others);
    let error = Error::Timeout {
        after: world.timeout(),
        others: others.into_iter().filter(|other| *other != wait).collect(),
        wait: Box::new(wait),
    };
    world.fail(culprit.0, reporter, &error.to_string());
    Err(error)
}

fn spin(world: &World, ready: &dyn Fn() -> bool) -> bool {
    let start = Instant::now();
    while start.elapsed() < SPIN {
        for _ in 0..16 {
            hint::spin_loop();
        }
        if ready() {
            return true;
        }
        if world.check().is_err() {
            return true;
        }
    }
    false
}
