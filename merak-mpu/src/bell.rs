//! Lets threads sleep until something happens, and finds the rank to blame for too long a wait.

use crate::{Rank, Wait};
use std::{
    sync::{Condvar, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

/// The longest wait of all, about thirty years: a clock holds its end.
pub(crate) const FOREVER: Duration = Duration::from_secs(1_000_000_000);

/// Wakes the sleeping members of a group.
///
/// A thread that changes what others wait for does so before it rings; a sleeper looks again
/// between taking the lock and sleeping. So either the sleeper sees the change or the ringer sees
/// the sleeper.
#[derive(Debug, Default)]
pub(crate) struct Bell {
    sleepers: Mutex<usize>,
    condvar: Condvar,
}

impl Bell {
    /// Wakes all sleepers.
    pub(crate) fn ring(&self) {
        let sleepers = *lock(&self.sleepers);
        if sleepers > 0 {
            self.condvar.notify_all();
        }
    }

    /// Sleeps until `awake`, or the deadline.
    pub(crate) fn sleep(&self, deadline: Instant, awake: &dyn Fn() -> bool) {
        let mut sleepers = lock(&self.sleepers);
        *sleepers += 1;
        while !awake() {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break;
            }
            sleepers = self
                .condvar
                .wait_timeout(sleepers, left)
                .unwrap_or_else(PoisonError::into_inner)
                .0;
        }
        *sleepers -= 1;
    }
}

/// Follows the waits to a rank that waits for no other; in a circle, returns the rank that reports
/// it.
pub(crate) fn culprit(wait: &Wait, others: &[Wait]) -> Rank {
    let mut seen = vec![wait.rank];
    let mut missing = &wait.missing;
    while let Some(rank) = missing.iter().find(|rank| !seen.contains(rank)) {
        match others.iter().find(|other| other.rank == *rank) {
            None => return *rank,
            Some(other) => {
                seen.push(*rank);
                missing = &other.missing;
            }
        }
    }
    wait.rank
}

/// Locks state that stays consistent when a holder panics: each critical section is one update.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn waits(rank: usize, missing: &[usize]) -> Wait {
        Wait {
            rank: Rank(rank),
            op: "barrier".into(),
            group: "world".into(),
            sequence: 0,
            missing: missing.iter().copied().map(Rank).collect(),
        }
    }

    #[test]
    fn the_culprit_is_the_rank_at_the_end_of_the_chain() {
        let others = [waits(0, &[1]), waits(1, &[2])];
        assert_eq!(culprit(&others[0], &others), Rank(2));
    }

    #[test]
    fn in_a_circle_the_reporter_is_named() {
        let others = [waits(0, &[1]), waits(1, &[0])];
        assert_eq!(culprit(&others[0], &others), Rank(0));
    }
}
