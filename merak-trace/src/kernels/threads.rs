//! The threads of one rank.

mod team;

use std::{
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
    vec,
};

use bytemuck::Pod;

use super::{KernelError, Units};
use team::Team;

/// A handle on the compute threads of one rank.
///
/// Work is handed over as items that own their piece of the output. No border of an item that
/// depends on [`num_threads`](Self::num_threads) cuts a sum, so a kernel's result has the same bits
/// for any number of threads. One thread runs items in order on the caller.
///
/// The caller takes part. Each thread has its own run of neighbouring items, the same one in every
/// call with the same number of items, so what it wrote lies in its cache. A thread that finishes
/// early helps the others. Idle threads stay awake for some 50 microseconds, which saves waking
/// them between the short products of a decode step. A call from within an item runs on its thread.
///
/// # Examples
///
/// ```
/// use merak_trace::Threads;
///
/// let mut squares = vec![0_usize; 1000];
/// let threads = Threads::new(2)?;
/// threads.for_each(squares.chunks_mut(64).enumerate(), |(chunk, out)| {
///     for (i, out) in out.iter_mut().enumerate() {
///         *out = (chunk * 64 + i).pow(2);
///     }
/// });
/// assert_eq!(squares[999], 998_001);
/// # Ok::<(), merak_trace::KernelError>(())
/// ```
#[derive(Debug, Clone)]
pub struct Threads {
    team: Option<Arc<Team>>,
    /// Several, so that each thread mostly has one for itself.
    scratch: Arc<[Scratch]>,
    units: Units,
}

/// Memory that kernels reuse.
type Scratch = Mutex<Vec<Vec<u64>>>;

/// Scratch for some threads. With a few times as many as threads, two of them rarely share one.
fn scratch_for(num_threads: usize) -> Arc<[Scratch]> {
    const EACH: usize = 4;
    (0..EACH * num_threads)
        .map(|_| Scratch::default())
        .collect()
}

/// Bytes of a cache line.
const CACHE_LINE: usize = 64;

impl Threads {
    /// `num_threads` threads: the caller and those that this starts.
    ///
    /// # Errors
    ///
    /// The operating system refused to start a thread.
    pub fn new(num_threads: usize) -> Result<Self, KernelError> {
        if num_threads <= 1 {
            return Ok(Self::one());
        }
        let team = Team::new(num_threads - 1).map_err(|source| KernelError::StartThreads {
            num_threads,
            source,
        })?;
        Ok(Self {
            team: Some(Arc::new(team)),
            scratch: scratch_for(num_threads),
            units: Units::default(),
        })
    }

    /// The calling thread alone.
    pub fn one() -> Self {
        Self {
            team: None,
            scratch: scratch_for(1),
            units: Units::default(),
        }
    }

    /// The same threads, which use no other units of the processor than these for products of bf16.
    /// Measurements and tests choose them; the default is all that there are.
    #[must_use]
    pub fn with_units(self, units: Units) -> Self {
        Self { units, ..self }
    }

    /// The calling thread alone, with the memory and units of these.
    #[must_use]
    pub fn alone(&self) -> Self {
        Self {
            team: None,
            scratch: Arc::clone(&self.scratch),
            units: self.units,
        }
    }

    /// The units that products may use, if the processor has them.
    pub(super) fn units(&self) -> Units {
        self.units
    }

    /// Number of threads that run items.
    pub fn num_threads(&self) -> usize {
        self.team.as_ref().map_or(1, |team| team.num_threads())
    }

    /// Gives `f` memory for `len` elements, aligned to a cache line, with unspecified contents.
    ///
    /// It is kept for later calls: a kernel that runs each microbatch allocates once.
    pub(super) fn with_scratch<T: Pod, R>(&self, len: usize, f: impl FnOnce(&mut [T]) -> R) -> R {
        let bytes = len * size_of::<T>();
        let mut memory = self.take_scratch(bytes + CACHE_LINE);
        let aligned: &mut [u8] = bytemuck::cast_slice_mut(&mut memory);
        let skipped = aligned.as_ptr().align_offset(CACHE_LINE);
        let result = f(bytemuck::cast_slice_mut(&mut aligned[skipped..][..bytes]));
        self.scratch().push(memory);
        result
    }

    /// That of the calling thread.
    fn scratch(&self) -> MutexGuard<'_, Vec<Vec<u64>>> {
        static NUM_THREADS: AtomicUsize = AtomicUsize::new(0);
        thread_local! {
            static THREAD: usize = NUM_THREADS.fetch_add(1, Ordering::Relaxed);
        }
        let own = &self.scratch[THREAD.with(|thread| thread % self.scratch.len())];
        own.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The smallest kept memory that suffices, or new memory.
    fn take_scratch(&self, bytes: usize) -> Vec<u64> {
        let mut scratch = self.scratch();
        let size = |memory: &Vec<u64>| size_of_val(&memory[..]);
        let fitting = (0..scratch.len()).filter(|&i| size(&scratch[i]) >= bytes);
        match fitting.min_by_key(|&i| size(&scratch[i])) {
            Some(i) => scratch.swap_remove(i),
            None => vec![0; bytes.div_ceil(size_of::<u64>())],
        }
    }

    /// Calls `f` once for each item, in any order and on any thread.
    pub fn for_each<I>(&self, items: I, f: impl Fn(I::Item) + Send + Sync)
    where
        I: IntoIterator<Item: Send>,
    {
        self.for_each_with(items, || (), |(), item| f(item));
    }

    /// Calls `f` once for each item with a scratch value that is made by `scratch` and reused for
    /// several items; `f` must not read what an earlier item left in it.
    pub fn for_each_with<I, S>(
        &self,
        items: I,
        scratch: impl Fn() -> S + Send + Sync,
        f: impl Fn(&mut S, I::Item) + Send + Sync,
    ) where
        I: IntoIterator<Item: Send>,
    {
        let Some(team) = &self.team else {
            let mut scratch = scratch();
            items.into_iter().for_each(|item| f(&mut scratch, item));
            return;
        };
        let mut items: Vec<I::Item> = items.into_iter().collect();
        if items.len() <= 1 {
            if let Some(item) = items.pop() {
                f(&mut scratch(), item);
            }
            return;
        }
        let runs = Runs::new(items, team.num_threads());
        team.run(&|thread| {
            let mut own = None;
            while let Some(item) = runs.take(thread) {
                f(own.get_or_insert_with(&scratch), item);
            }
        });
    }
}

/// Items in runs of neighbours, one for each thread.
struct Runs<I>(Vec<Mutex<vec::IntoIter<I>>>);

impl<I> Runs<I> {
    fn new(items: Vec<I>, num_threads: usize) -> Self {
        let (len, mut items) = (items.len(), items.into_iter());
        let run = |thread: usize| {
            let end = |thread: usize| thread * len / num_threads;
            let run: Vec<I> = items.by_ref().take(end(thread + 1) - end(thread)).collect();
            Mutex::new(run.into_iter())
        };
        Self((0..num_threads).map(run).collect())
    }

    /// The next item of the thread's run, or the last one of another thread's.
    fn take(&self, thread: usize) -> Option<I> {
        let (others_behind, own_on) = self.0.split_at(thread);
        let (own, others) = own_on.split_first()?;
        // A thread that looks into another's run holds no lock on its own.
        let item = Self::lock(own).next();
        let mut others = others.iter().chain(others_behind);
        item.or_else(|| others.find_map(|run| Self::lock(run).next_back()))
    }

    fn lock(run: &Mutex<vec::IntoIter<I>>) -> MutexGuard<'_, vec::IntoIter<I>> {
        run.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Default for Threads {
    fn default() -> Self {
        Self::one()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_item_is_seen_once_for_any_number_of_threads() {
        for num_threads in [0, 1, 2, 3] {
            let threads = Threads::new(num_threads).unwrap();
            assert_eq!(threads.num_threads(), num_threads.max(1));
            let mut seen = [0_u8; 101];
            threads.for_each(seen.chunks_mut(7), |chunk| {
                for x in chunk {
                    *x += 1;
                }
            });
            assert!(seen.iter().all(|&x| x == 1));
        }
    }

    #[test]
    fn threads_that_run_out_of_items_at_once_do_not_wait_for_each_other() {
        let threads = Threads::new(3).unwrap();
        for len in 0..3000 {
            let mut seen = vec![0_u8; len % 9];
            threads.for_each(seen.iter_mut(), |x| *x += 1);
            assert!(seen.iter().all(|&x| x == 1));
        }
    }

    #[test]
    fn no_items_and_nested_calls_are_fine() {
        let threads = Threads::new(2).unwrap();
        threads.for_each(0..0, |_: usize| unreachable!("there is no item"));
        let total = AtomicUsize::new(0);
        threads.for_each(0..3, |_: usize| {
            threads.for_each(0..10, |i| {
                total.fetch_add(i, Ordering::Relaxed);
            });
        });
        assert_eq!(total.into_inner(), 3 * 45);
    }
}
