//! The order in which the processes of a failed world exit.
//!
//! A runtime of MPI ends the job when the first process exits without having ended MPI, and its
//! status is that of this process. So the rank that has failed leaves first, once the others have
//! had time to tell what they know, and the others wait for their end. This happens when a process
//! exits, after its own last words.
#![expect(
    unsafe_code,
    reason = "only the C library calls back at the exit of a process"
)]

use std::{
    ffi::c_int,
    sync::{
        Once,
        atomic::{AtomicU8, Ordering},
    },
    thread,
    time::Duration,
};

/// How long the rank that has failed stays for the others' words.
const LAST_WORDS: Duration = Duration::from_millis(500);

/// How long the others stay for the end of the job.
const LAST_STAND: Duration = Duration::from_secs(3);

const FAILED_HERE: u8 = 1;
const FAILED_ELSEWHERE: u8 = 2;

static FAILED: AtomicU8 = AtomicU8::new(0);
static ARMED: Once = Once::new();

unsafe extern "C" {
    safe fn atexit(f: extern "C" fn()) -> c_int;
}

/// Notes that the world of this process has failed, `here` or on another rank.
pub(super) fn keep_order(here: bool) {
    let failed = if here { FAILED_HERE } else { FAILED_ELSEWHERE };
    FAILED.store(failed, Ordering::Release);
    // Where there is no room for another function, processes leave in any order.
    ARMED.call_once(|| {
        let _ = atexit(at_exit);
    });
}

extern "C" fn at_exit() {
    match FAILED.load(Ordering::Acquire) {
        FAILED_HERE => thread::sleep(LAST_WORDS),
        FAILED_ELSEWHERE => thread::sleep(LAST_STAND),
        _ => {}
    }
}
