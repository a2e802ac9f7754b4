//! Threads that share the work of one call after another, and stay awake for a while between calls.
//!
//! ```text
//! caller   publish job ── run it ── close ── wait until no worker is inside ── next call
//! worker   spin .. enter ── run it ── leave ── spin .. yield .. sleep
//! ```
//!
//! One atomic word holds the number of the call, whether it is open, and how many workers are
//! inside. A worker enters by a compare-and-swap of that word, so no worker enters a closed call.
//! The caller closes the call and waits until no worker is inside; then it may take the job away.
#![expect(
    unsafe_code,
    reason = "threads that outlive a call run a closure that borrows from its caller"
)]

use std::{
    any::Any,
    fmt, hint, io,
    panic::{AssertUnwindSafe, catch_unwind, resume_unwind},
    sync::{
        Arc, Condvar, Mutex, MutexGuard, PoisonError, TryLockError,
        atomic::{AtomicPtr, AtomicU64, AtomicUsize, Ordering},
    },
    thread::{self, JoinHandle},
};

/// The job of a call: every thread runs it with its own number, the caller with 0.
type Job<'a> = dyn Fn(usize) + Sync + 'a;

/// Mask of the number of workers inside the call.
const INSIDE: u64 = 0xffff;
/// Bit: workers may enter.
const OPEN: u64 = 1 << 16;
/// Bit: workers end.
const STOP: u64 = 1 << 17;
/// First bit of the number of the call.
const CALL: u32 = 32;

/// How often a worker looks for a call before it yields its core: some 30 microseconds.
const SPINS: usize = 600;
/// How often it then looks before it sleeps.
const YIELDS: usize = 100;

/// The workers, and the way to call them.
pub(super) struct Team {
    shared: Arc<Shared>,
    workers: Vec<JoinHandle<()>>,
    /// Held while a call is under way.
    call: Mutex<()>,
}

struct Shared {
    state: AtomicU64,
    /// A `&Job` on the caller's stack.
    job: AtomicPtr<()>,
    /// Number of sleeping workers.
    sleeping: AtomicUsize,
    lock: Mutex<()>,
    wake: Condvar,
    panic: Mutex<Option<Box<dyn Any + Send>>>,
}

impl Team {
    /// Starts `num_workers` threads.
    pub(super) fn new(num_workers: usize) -> io::Result<Self> {
        let shared = Arc::new(Shared {
            state: AtomicU64::new(0),
            job: AtomicPtr::default(),
            sleeping: AtomicUsize::new(0),
            lock: Mutex::default(),
            wake: Condvar::new(),
            panic: Mutex::default(),
        });
        let mut team = Self {
            shared,
            workers: Vec::new(),
            call: Mutex::default(),
        };
        for number in 1..=num_workers.min(INSIDE as usize) {
            let shared = Arc::clone(&team.shared);
            let worker = thread::Builder::new().name(format!("merak-compute-{number}"));
            team.workers
                .push(worker.spawn(move || shared.work(number))?);
        }
        Ok(team)
    }

    /// Threads that run a job, the caller among them.
    pub(super) fn num_threads(&self) -> usize {
        self.workers.len() + 1
    }

    /// Runs the job on the caller, and on every worker that enters before the caller is done. The
    /// job must also complete on one thread: a call from within a job, or during another thread's
    /// call, runs on its caller alone.
    pub(super) fn run(&self, job: &Job<'_>) {
        let _call = match self.call.try_lock() {
            Ok(call) => call,
            Err(TryLockError::Poisoned(call)) => call.into_inner(),
            Err(TryLockError::WouldBlock) => return job(0),
        };
        // A caller that panicked itself left those of its workers.
        drop(locked(&self.shared.panic).take());
        {
            let _open = self.shared.open(&job);
            job(0);
        }
        if let Some(panic) = locked(&self.shared.panic).take() {
            resume_unwind(panic);
        }
    }
}

impl Drop for Team {
    fn drop(&mut self) {
        self.shared.state.fetch_or(STOP, Ordering::SeqCst);
        self.shared.wake_up();
        for worker in self.workers.drain(..) {
            // A worker catches the panics of its jobs.
            let _ = worker.join();
        }
    }
}

impl fmt::Debug for Team {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Team")
            .field("num_threads", &self.num_threads())
            .finish_non_exhaustive()
    }
}

/// An open call. Dropping it closes the call and waits for the workers inside.
struct Open<'a>(&'a Shared);

impl Drop for Open<'_> {
    fn drop(&mut self) {
        self.0.state.fetch_and(!OPEN, Ordering::SeqCst);
        let mut looks = 0;
        while self.0.state.load(Ordering::Acquire) & INSIDE != 0 {
            pause(&mut looks);
        }
    }
}

impl Shared {
    /// Publishes a job until the returned guard is dropped.
    fn open<'a>(&'a self, job: &'a &Job<'_>) -> Open<'a> {
        self.job
            .store((&raw const *job).cast_mut().cast(), Ordering::Relaxed);
        let last = self.state.load(Ordering::Relaxed) >> CALL;
        let next = (last + 1) & u64::from(u32::MAX);
        self.state.store(next << CALL | OPEN, Ordering::SeqCst);
        if self.sleeping.load(Ordering::SeqCst) > 0 {
            self.wake_up();
        }
        Open(self)
    }

    fn wake_up(&self) {
        drop(locked(&self.lock));
        self.wake.notify_all();
    }

    /// Runs a worker until the team ends.
    fn work(&self, number: usize) {
        let mut last = 0;
        while let Some(call) = self.enter(last) {
            last = call;
            let job = self.job.load(Ordering::Relaxed).cast::<&Job<'_>>();
            // SAFETY: it points to the caller's job, which was stored before the word that this
            // worker read; the caller waits until this worker has left.
            let job = unsafe { &*job };
            if let Err(panic) = catch_unwind(AssertUnwindSafe(|| job(number))) {
                locked(&self.panic).get_or_insert(panic);
            }
            self.state.fetch_sub(1, Ordering::Release);
        }
    }

    /// Waits for a call after `last` and enters it. Returns its number, or nothing when the team
    /// ends.
    fn enter(&self, last: u64) -> Option<u64> {
        let mut looks = 0;
        loop {
            let state = self.state.load(Ordering::Acquire);
            if state & STOP != 0 {
                return None;
            }
            if is_new(state, last) {
                let entered = self.state.compare_exchange(
                    state,
                    state + 1,
                    Ordering::AcqRel,
                    Ordering::Relaxed,
                );
                if entered.is_ok() {
                    return Some(state >> CALL);
                }
            } else if looks < SPINS + YIELDS {
                pause(&mut looks);
            } else {
                self.sleep(last);
                looks = 0;
            }
        }
    }

    /// Sleeps until there is a call after `last`, or the team ends.
    fn sleep(&self, last: u64) {
        let mut lock = locked(&self.lock);
        self.sleeping.fetch_add(1, Ordering::SeqCst);
        // The caller looks at `sleeping` after it writes the word, so either it sees this worker or
        // this worker sees the call.
        loop {
            let state = self.state.load(Ordering::SeqCst);
            if state & STOP != 0 || is_new(state, last) {
                break;
            }
            lock = self.wake.wait(lock).unwrap_or_else(PoisonError::into_inner);
        }
        self.sleeping.fetch_sub(1, Ordering::SeqCst);
    }
}

fn is_new(state: u64, last: u64) -> bool {
    state & OPEN != 0 && state >> CALL != last
}

/// Waits for a moment; from the [`SPINS`]-th time on, yields the core.
fn pause(looks: &mut usize) {
    if *looks < SPINS {
        hint::spin_loop();
    } else {
        thread::yield_now();
    }
    *looks += 1;
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{sync::atomic::AtomicBool, time::Duration};

    /// Takes numbers below `len` until there are none.
    fn count(team: &Team, len: usize, seen: &(dyn Fn(usize) + Sync)) {
        let next = AtomicUsize::new(0);
        team.run(&|_| {
            loop {
                let item = next.fetch_add(1, Ordering::Relaxed);
                if item >= len {
                    break;
                }
                seen(item);
            }
        });
    }

    #[test]
    fn every_call_is_done_when_it_returns_however_long_the_pause_before_it() {
        let team = Team::new(3).unwrap();
        for round in 0..3000_usize {
            let sum = AtomicUsize::new(0);
            count(&team, round % 50, &|item| {
                sum.fetch_add(item + 1, Ordering::Relaxed);
            });
            let len = round % 50;
            assert_eq!(sum.into_inner(), len * (len + 1) / 2);
            if round.is_multiple_of(500) {
                // Long enough for the workers to fall asleep.
                thread::sleep(Duration::from_millis(3));
            }
        }
    }

    #[test]
    fn workers_take_part() {
        let team = Team::new(1).unwrap();
        let came = AtomicBool::new(false);
        team.run(&|number| {
            if number == 1 {
                came.store(true, Ordering::Release);
            }
            while !came.load(Ordering::Acquire) {
                thread::yield_now();
            }
        });
        assert!(came.into_inner());
    }

    #[test]
    fn calls_within_calls_and_beside_them_run_on_their_caller() {
        let team = Team::new(2).unwrap();
        let sum = AtomicUsize::new(0);
        let add = |item: usize| {
            count(&team, 3, &|inner| {
                sum.fetch_add(10 * item + inner, Ordering::Relaxed);
            });
        };
        thread::scope(|scope| {
            for _ in 0..2 {
                scope.spawn(|| count(&team, 4, &add));
            }
        });
        assert_eq!(sum.into_inner(), 2 * (10 * 6 * 3 + 4 * 3));
    }

    #[test]
    fn a_panic_in_a_job_reaches_the_caller_and_leaves_the_team_whole() {
        let team = Team::new(2).unwrap();
        let panic = catch_unwind(AssertUnwindSafe(|| {
            count(&team, 20, &|item| assert_ne!(item, 7, "seven"));
        }));
        assert!(panic.is_err());
        // All threads panic, of which the caller tells.
        let panic = catch_unwind(AssertUnwindSafe(|| team.run(&|_| panic!("all"))));
        assert!(panic.is_err());
        let done = AtomicUsize::new(0);
        count(&team, 20, &|_| {
            done.fetch_add(1, Ordering::Relaxed);
        });
        assert_eq!(done.into_inner(), 20);
    }
}
