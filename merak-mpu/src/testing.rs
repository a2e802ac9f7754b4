//! Worlds with deadlines, tolerances and transport suites, for tests (feature `testing`).
#![expect(
    clippy::panic,
    reason = "a test helper reports a failed test by panicking"
)]

pub mod allocations;
#[cfg(target_os = "linux")]
pub mod hosts;
mod record;
pub mod suite;

pub use record::{Event, Moment, Record, Sent};

use crate::{Member, threads};
use std::{convert::Infallible, time::Duration};

/// The longest that a rank of a test [`world`] waits for another.
pub const DEADLINE: Duration = Duration::from_secs(20);

/// Runs `body` on `n` ranks, each a thread, and returns the results by rank.
///
/// # Panics
/// When a rank panics, with its message; a wait of more than [`DEADLINE`] is an error on that rank
/// which names the waiting and the missing ranks.
///
/// ```
/// use merak_mpu::{ReduceOp, testing};
/// let sums = testing::world(4, |member| {
///     let group = member.world_group().expect("the world is new");
///     group.all_reduce_scalar(1.0_f32, ReduceOp::Sum).expect("all ranks come")
/// });
/// assert_eq!(sums, [4.0; 4]);
/// ```
pub fn world<T: Send>(n: usize, body: impl Fn(Member) -> T + Sync) -> Vec<T> {
    world_within(n, DEADLINE, body)
}

/// [`world`] with a deadline of its own.
///
/// # Panics
/// As [`world`].
pub fn world_within<T: Send>(
    n: usize,
    timeout: Duration,
    body: impl Fn(Member) -> T + Sync,
) -> Vec<T> {
    let options = threads::WorldOptions {
        timeout,
        ..threads::WorldOptions::default()
    };
    match threads::run(n, options, |member| Ok::<_, Infallible>(body(member))) {
        Ok(results) => results,
        Err(failure) => panic!("{failure}"),
    }
}

/// [`world`] of the same process whose ranks are connected as processes of one host are: by
/// sockets, and by shared memory where the system has it.
///
/// # Panics
/// As [`world`], and when the system gives no socket.
#[cfg(unix)]
pub fn tcp_world<T: Send>(n: usize, body: impl Fn(Member) -> T + Sync) -> Vec<T> {
    connected(n, true, body)
}

/// [`tcp_world`] whose ranks share no memory, as those of several hosts.
///
/// # Panics
/// As [`tcp_world`].
#[cfg(unix)]
pub fn sockets_world<T: Send>(n: usize, body: impl Fn(Member) -> T + Sync) -> Vec<T> {
    connected(n, false, body)
}

#[cfg(unix)]
fn connected<T: Send>(n: usize, shared_memory: bool, body: impl Fn(Member) -> T + Sync) -> Vec<T> {
    use crate::tcp::JoinOptions;
    let options = JoinOptions {
        shared_memory,
        ..JoinOptions::new(0, n, "127.0.0.1", 0).with_timeout(DEADLINE)
    };
    let members = match crate::tcp::world_of(&options) {
        Ok(members) => members,
        Err(error) => panic!("{error}"),
    };
    let stack_bytes = threads::WorldOptions::default().stack_bytes;
    match crate::run_members(members, stack_bytes, |member| {
        Ok::<_, Infallible>(body(member))
    }) {
        Ok(results) => results,
        Err(failure) => panic!("{failure}"),
    }
}

/// Asserts that each `|actual - expected| <= atol + rtol * |expected|`; NaN equals NaN.
///
/// # Panics
/// When the lengths differ, or with the worst element where one is too far off.
///
/// ```
/// merak_mpu::testing::assert_close(&[1.0_f32, 2.0], &[1.0, 2.000_001], 1e-6, 0.0);
/// ```
#[track_caller]
pub fn assert_close<T: Into<f64> + Copy>(actual: &[T], expected: &[T], rtol: f64, atol: f64) {
    assert_eq!(actual.len(), expected.len(), "lengths differ");
    let mut worst: Option<(f64, usize)> = None;
    for (index, (&a, &e)) in actual.iter().zip(expected).enumerate() {
        let (a, e): (f64, f64) = (a.into(), e.into());
        if a.to_bits() == e.to_bits() || (a.is_nan() && e.is_nan()) {
            continue;
        }
        let excess = (a - e).abs() - (atol + rtol * e.abs());
        let excess = if excess.is_nan() {
            f64::INFINITY
        } else {
            excess
        };
        if excess > 0.0 && worst.is_none_or(|(most, _)| excess > most) {
            worst = Some((excess, index));
        }
    }
    if let Some((_, index)) = worst {
        let (a, e): (f64, f64) = (actual[index].into(), expected[index].into());
        panic!(
            "element {index} of {} is {a:e}, expected {e:e}: off by {:e}, allowed {:e}",
            actual.len(),
            (a - e).abs(),
            atol + rtol * e.abs()
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn close_numbers_pass() {
        assert_close(
            &[1.0_f64, f64::NAN, f64::INFINITY],
            &[1.0 + 1e-9, f64::NAN, f64::INFINITY],
            1e-8,
            0.0,
        );
    }

    #[test]
    #[should_panic(expected = "element 1 of 2 is 3e0, expected 2e0")]
    fn the_worst_element_is_named() {
        assert_close(&[1.0_f32, 3.0], &[1.5, 2.0], 0.1, 0.0);
    }

    #[test]
    #[should_panic(expected = "element 0 of 1 is NaN")]
    fn nan_is_not_close_to_a_number() {
        assert_close(&[f32::NAN], &[1.0], 1.0, 1e9);
    }

    #[test]
    #[should_panic(expected = "rank 1 panicked: index 7")]
    fn a_panic_on_a_rank_fails_the_test_with_its_message() {
        world(2, |member| {
            assert!(member.rank() == 0, "index 7");
            member.world_group().unwrap().barrier()
        });
    }
}
