//! Signals that end a training after the step in hand.

use super::launched;
use merak_mpu::Launch;
use signal_hook::{
    consts::{SIGHUP, SIGINT, SIGTERM, SIGUSR1},
    flag,
    iterator::Signals,
    low_level::signal_name,
};
use std::{
    fs, io,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicI64, Ordering},
    },
    thread,
    time::Duration,
};

/// A request to end often arrives twice: at the process, and at its process group. Signals within
/// this time are the same request.
const SAME_REQUEST: Duration = Duration::from_secs(2);

/// Notes the number of a signal; the trainer looks at it after each step. Another signal after
/// [`SAME_REQUEST`] ends the process at once. A hangup that was ignored at the start, as under
/// `nohup`, stays ignored.
pub(crate) fn watch(stop: &Arc<AtomicI64>) -> io::Result<()> {
    listen(stop).map_err(|error| {
        io::Error::new(error.kind(), format!("cannot listen for signals: {error}"))
    })
}

fn listen(stop: &Arc<AtomicI64>) -> io::Result<()> {
    let mut watched = vec![SIGINT, SIGTERM, SIGUSR1];
    if !is_ignored(SIGHUP) {
        watched.push(SIGHUP);
    }
    let is_late = Arc::new(AtomicBool::new(false));
    for &signal in &watched {
        flag::register_conditional_shutdown(signal, 128 + signal, Arc::clone(&is_late))?;
    }
    let mut signals = Signals::new(&watched)?;
    let stop = Arc::clone(stop);
    let is_launched = Launch::from_env().is_ok_and(|launch| launched::has_started(&launch));
    let wait = move || {
        if let Some(signal) = signals.forever().next() {
            stop.store(signal.into(), Ordering::Relaxed);
            let name = signal_name(signal).unwrap_or("a signal");
            let sender = if is_launched && signal == SIGTERM {
                " (`merak launch` sends it where a rank has failed, or where it is to end itself)"
            } else {
                ""
            };
            tracing::warn!(
                "{name}{sender}: the run ends after the step in hand; another signal after {} seconds ends it at once",
                SAME_REQUEST.as_secs()
            );
            thread::sleep(SAME_REQUEST);
            is_late.store(true, Ordering::Relaxed);
        }
    };
    thread::Builder::new()
        .name("merak-signals".to_owned())
        .spawn(wait)
        .map(drop)
}

/// Whether this process was started with a signal ignored; false where the system does not tell.
pub(super) fn is_ignored(signal: i32) -> bool {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    is_in_mask(&status, signal)
}

/// Whether a process's status, as Linux writes it, lists a signal as ignored.
fn is_in_mask(status: &str, signal: i32) -> bool {
    let mut lines = status.lines();
    let mask = lines.find_map(|line| line.strip_prefix("SigIgn:"));
    let mask = mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok());
    mask.is_some_and(|mask| (mask >> (signal - 1)) & 1 == 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_ignored_signal_is_a_bit_of_the_status() {
        let status = "Name:\tmerak\nSigBlk:\t0000000000000003\nSigIgn:\t0000000000001001\n";
        assert!(is_in_mask(status, SIGHUP));
        assert!(!is_in_mask(status, SIGINT));
        assert!(!is_in_mask("", SIGHUP));
    }
}
