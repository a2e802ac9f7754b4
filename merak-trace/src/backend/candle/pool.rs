//! Memory of freed values, kept for later values.
//!
//! A run takes memory of the same lengths over and over, so returned memory is used again. Not all
//! of it may be kept: messages of other ranks and values made of bytes come from elsewhere, so
//! their memory is returned without having been taken. Each shelf is therefore bounded by its
//! [`Demand`].

use super::Scalar;
use candle_core::CpuStorage;
use merak_mpu::{DType, Element};
use std::{
    collections::BTreeMap,
    fmt,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

/// A round ends when the bytes taken are this many times the peak demand: after a few steps at
/// most, and hardly ever within one.
const TURNS: usize = 64;

/// The fewest bytes of a round.
const SHORTEST_ROUND: usize = 1 << 20;

/// The pool keeps up to this many times the peak demand in bytes, as the lengths peak at different
/// times.
const SLACK: usize = 2;

/// Element types whose memory is pooled.
pub(super) trait Pooled: Scalar {}

impl Pooled for f32 {}
impl Pooled for f64 {}
impl Pooled for i64 {}

/// Memory of freed values, kept for the next value of the same length.
///
/// Each length keeps at most the larger peak demand of this round and the one before. So do all
/// lengths together, up to the factor [`SLACK`].
#[derive(Clone, Default)]
pub(super) struct Pool(Arc<Mutex<Shelves>>);

#[derive(Default)]
struct Shelves {
    of_length: BTreeMap<(DType, usize), Shelf>,
    /// Demand of all shelves, in bytes.
    demand: Demand,
    kept_bytes: usize,
    /// Bytes taken in this round.
    taken_bytes: usize,
    /// How often memory was taken.
    takes: u64,
}

/// The memory of one length.
#[derive(Default)]
struct Shelf {
    memory: Vec<CpuStorage>,
    demand: Demand,
    /// Number of the last take of this length.
    last_take: u64,
}

/// Peak demand: the largest rise of the amount taken less the amount returned.
#[derive(Debug, Default)]
struct Demand {
    /// Taken less returned, since the round began.
    out: i64,
    /// Lowest value of `out`.
    low: i64,
    /// The largest rise in this round.
    rise: i64,
    /// The largest rise in the round before.
    before: i64,
}

impl Demand {
    fn take(&mut self, amount: usize) {
        self.out = self.out.saturating_add(signed(amount));
        self.rise = self.rise.max(self.out.saturating_sub(self.low));
    }

    fn put(&mut self, amount: usize) {
        self.out = self.out.saturating_sub(signed(amount));
        self.low = self.low.min(self.out);
    }

    /// The larger peak demand of this round and the one before.
    fn most(&self) -> usize {
        usize::try_from(self.rise.max(self.before)).unwrap_or(0)
    }

    fn end_round(&mut self) {
        *self = Self {
            before: self.rise,
            ..Self::default()
        };
    }
}

/// An amount as a change.
fn signed(amount: usize) -> i64 {
    i64::try_from(amount).unwrap_or(i64::MAX)
}

/// Size of `len` elements.
fn bytes_of((dtype, len): (DType, usize)) -> usize {
    len.saturating_mul(dtype.size_bytes())
}

impl Pool {
    fn lock(&self) -> MutexGuard<'_, Shelves> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Memory for `len` elements with unspecified contents; the caller writes all of it.
    pub(super) fn take<T: Pooled>(&self, len: usize) -> Vec<T> {
        let (kept, freed) = self.lock().take((<T as Element>::DTYPE, len));
        drop(freed);
        kept.and_then(|storage| T::cpu_storage_data(storage).ok())
            .unwrap_or_else(|| vec![T::zero(); len])
    }

    /// Keeps memory that is no longer read, or frees it.
    pub(super) fn put(&self, storage: CpuStorage) {
        let key = match &storage {
            CpuStorage::F32(memory) => (DType::F32, memory.len()),
            CpuStorage::F64(memory) => (DType::F64, memory.len()),
            CpuStorage::I64(memory) => (DType::I64, memory.len()),
            _ => return,
        };
        if key.1 > 0 {
            // Freed without the lock, as the system may take its time.
            let freed = self.lock().put(key, storage);
            drop(freed);
        }
    }

    /// Number of kept pieces of memory, and their bytes.
    #[cfg(test)]
    pub(super) fn kept(&self) -> (usize, usize) {
        let shelves = self.lock();
        let pieces = shelves.of_length.values().map(|shelf| shelf.memory.len());
        (pieces.sum(), shelves.kept_bytes)
    }
}

impl Shelves {
    /// Kept memory of that length, if any, and the memory to free.
    fn take(&mut self, key: (DType, usize)) -> (Option<CpuStorage>, Vec<CpuStorage>) {
        let bytes = bytes_of(key);
        let mut freed = Vec::new();
        self.taken_bytes = self.taken_bytes.saturating_add(bytes);
        if self.taken_bytes >= SHORTEST_ROUND.max(self.demand.most().saturating_mul(TURNS)) {
            self.end_round(&mut freed);
        }
        self.takes += 1;
        self.demand.take(bytes);
        let shelf = self.of_length.entry(key).or_default();
        shelf.last_take = self.takes;
        shelf.demand.take(1);
        let kept = shelf.memory.pop();
        if kept.is_some() {
            self.kept_bytes -= bytes;
        }
        (kept, freed)
    }

    /// Keeps memory of that length; returns the memory to free.
    fn put(&mut self, key: (DType, usize), storage: CpuStorage) -> Vec<CpuStorage> {
        let bytes = bytes_of(key);
        self.demand.put(bytes);
        let shelf = self.of_length.entry(key).or_default();
        shelf.demand.put(1);
        if shelf.memory.len() >= shelf.demand.most() {
            return vec![storage];
        }
        shelf.memory.push(storage);
        self.kept_bytes += bytes;
        let mut freed = Vec::new();
        while self.kept_bytes > self.demand.most().saturating_mul(SLACK) {
            self.free_longest_unused(&mut freed);
        }
        freed
    }

    fn free_longest_unused(&mut self, freed: &mut Vec<CpuStorage>) {
        let filled = self.of_length.iter_mut();
        let filled = filled.filter(|(_, shelf)| !shelf.memory.is_empty());
        match filled.min_by_key(|(_, shelf)| shelf.last_take) {
            Some((key, shelf)) => {
                self.kept_bytes -= bytes_of(*key) * shelf.memory.len();
                freed.append(&mut shelf.memory);
            }
            None => self.kept_bytes = 0,
        }
    }

    /// Frees the memory that two rounds did not use.
    fn end_round(&mut self, freed: &mut Vec<CpuStorage>) {
        self.taken_bytes = 0;
        self.demand.end_round();
        let kept_bytes = &mut self.kept_bytes;
        self.of_length.retain(|key, shelf| {
            shelf.demand.end_round();
            let most = shelf.demand.most().min(shelf.memory.len());
            let unused = shelf.memory.drain(most..);
            *kept_bytes -= bytes_of(*key) * unused.len();
            freed.extend(unused);
            shelf.demand.most() > 0
        });
    }
}

impl fmt::Debug for Pool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pool").finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn give(pool: &Pool, memory: Vec<f32>) {
        pool.put(CpuStorage::F32(memory));
    }

    #[test]
    fn memory_that_comes_back_serves_again() {
        let pool = Pool::default();
        for _ in 0..1000 {
            let pieces = [1000, 1000, 2000].map(|len| pool.take::<f32>(len));
            let places = pieces.each_ref().map(Vec::as_ptr);
            for piece in pieces {
                give(&pool, piece);
            }
            assert_eq!(pool.kept(), (3, 16_000));
            let again = [2000, 1000, 1000].map(|len| pool.take::<f32>(len));
            assert!(again.iter().all(|piece| places.contains(&piece.as_ptr())));
            for piece in again {
                give(&pool, piece);
            }
        }
    }

    #[test]
    fn memory_that_came_from_elsewhere_is_kept_as_far_as_it_is_asked_for() {
        let pool = Pool::default();
        for _ in 0..1000 {
            give(&pool, vec![0.0; 10]);
        }
        assert_eq!(pool.kept(), (0, 0), "nobody asked for any");
        // A rank that receives messages of the length that it computes with.
        for _ in 0..1000 {
            let own = [(); 3].map(|()| pool.take::<f32>(10));
            give(&pool, vec![0.0; 10]);
            for piece in own {
                give(&pool, piece);
            }
        }
        assert_eq!(pool.kept(), (3, 120));
    }

    #[test]
    fn what_is_sent_away_for_a_while_is_kept_when_as_much_comes_back() {
        let pool = Pool::default();
        let mut fresh = 0;
        for step in 0..100 {
            // Eight microbatches go out, then eight gradients come in.
            for _ in 0..8 {
                fresh += usize::from(pool.kept().0 == 0 && step > 0);
                drop(pool.take::<f32>(500));
            }
            (0..8).for_each(|_| give(&pool, vec![0.0; 500]));
        }
        assert_eq!(fresh, 0);
        assert_eq!(pool.kept(), (8, 16_000));
    }

    #[test]
    fn lengths_that_grow_and_grow_leave_nothing_behind() {
        let pool = Pool::default();
        for len in 1..3000 {
            let pieces = [len, 2 * len].map(|len| pool.take::<f32>(len));
            for piece in pieces {
                give(&pool, piece);
            }
            assert!(pool.kept().1 <= SLACK * 3 * 4 * len, "{:?}", pool.kept());
        }
        assert!(
            pool.lock().of_length.len() < 1000,
            "{}",
            pool.lock().of_length.len()
        );
    }

    #[test]
    fn what_only_the_start_of_a_run_asked_for_is_freed() {
        let pool = Pool::default();
        let many: Vec<_> = (0..100).map(|_| pool.take::<f32>(10_000)).collect();
        for piece in many {
            give(&pool, piece);
        }
        assert_eq!(pool.kept(), (100, 4_000_000));
        for _ in 0..20_000 {
            let piece = pool.take::<f32>(10_000);
            give(&pool, piece);
        }
        assert_eq!(pool.kept(), (1, 40_000));
    }
}
