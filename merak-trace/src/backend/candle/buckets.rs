//! Memory of buckets of gradients and of gathered parameters, kept for later buckets.

use super::storage::Scalar;
use candle_core::CpuStorage;
use half::bf16;
use merak_mpu::{Buffer, DType, Element, Memory, into_vec, zeroed};
use std::{
    any::Any,
    fmt, mem,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

/// Element types of buckets.
pub(super) trait InBuckets: Scalar {}

impl InBuckets for f32 {}
impl InBuckets for bf16 {}

/// A piece has at most this many times the bytes of a bucket that it serves.
const MOST_ROOM: usize = 2;

/// Memory of freed buckets.
///
/// Buckets differ in length, so that a [`Pool`](super::pool::Pool) would keep memory for each
/// length. Here a piece serves shorter buckets too, and makes way for others: pieces and the
/// buckets that are alive take no more together than buckets took at once, of all types.
#[derive(Clone, Default)]
pub(super) struct Buckets(Arc<Mutex<Pieces>>);

#[derive(Default)]
struct Pieces {
    kept: Vec<CpuStorage>,
    kept_bytes: usize,
    /// Of buckets that are alive.
    alive_bytes: usize,
    /// The most that were alive at once.
    most_bytes: usize,
}

impl Buckets {
    /// A bucket of `len` elements with unspecified contents.
    pub(super) fn take<T: InBuckets>(&self, len: usize) -> Bucket<T> {
        self.bucket(len, |_| ())
    }

    /// A bucket of zeros.
    pub(super) fn take_zeros<T: InBuckets>(&self, len: usize) -> Bucket<T> {
        self.bucket(len, Vec::clear)
    }

    /// A bucket in memory that is kept, which `prepare` sees first, or in new memory of zeros.
    fn bucket<T: InBuckets>(&self, len: usize, prepare: impl FnOnce(&mut Vec<T>)) -> Bucket<T> {
        let kept = self.take_kept::<T>(len).map(|mut kept| {
            prepare(&mut kept);
            kept.resize(len, T::zero());
            kept
        });
        Bucket {
            elements: kept.unwrap_or_else(|| zeroed(len)),
            home: self.clone(),
        }
    }

    /// A piece for a bucket of this length. Without one, others make way for a new one.
    fn take_kept<T: InBuckets>(&self, len: usize) -> Option<Vec<T>> {
        let mut pieces = self.lock();
        let Some(piece) = pieces.take::<T>(len) else {
            let freed = pieces.make_way(len * size_of::<T>());
            // The system may take its time, so memory is freed without the lock.
            drop(pieces);
            drop(freed);
            return None;
        };
        T::cpu_storage_data(piece).ok()
    }

    /// Keeps the memory of a bucket that was taken here.
    pub(super) fn put(&self, piece: CpuStorage) {
        self.lock().put(piece);
    }

    /// The memory of a bucket that was taken here does not come back.
    pub(super) fn give_away(&self, piece: &CpuStorage) {
        let mut pieces = self.lock();
        pieces.alive_bytes = pieces.alive_bytes.saturating_sub(bytes_of(piece));
    }

    /// Frees all that is kept.
    pub(super) fn free(&self) {
        let mut pieces = self.lock();
        let alive_bytes = pieces.alive_bytes;
        let freed = mem::take(&mut *pieces);
        pieces.alive_bytes = alive_bytes;
        pieces.most_bytes = alive_bytes;
        drop(pieces);
        drop(freed);
    }

    fn lock(&self) -> MutexGuard<'_, Pieces> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Pieces {
    /// The smallest piece that a bucket fits and fills well.
    fn take<T: InBuckets>(&mut self, len: usize) -> Option<CpuStorage> {
        let bytes = len * size_of::<T>();
        let of_type = self.kept.iter().enumerate();
        let of_type = of_type.filter(|(_, piece)| is_of::<T>(piece));
        let fitting = of_type
            .map(|(at, piece)| (bytes_of(piece), at))
            .filter(|(room, _)| (bytes..=MOST_ROOM * bytes).contains(room));
        let (room, at) = fitting.min()?;
        self.kept_bytes -= room;
        self.add_alive(room);
        Some(self.kept.swap_remove(at))
    }

    /// Counts a new bucket, and takes out the largest pieces for which there is no room beside it.
    fn make_way(&mut self, bytes: usize) -> Vec<CpuStorage> {
        self.add_alive(bytes);
        let mut freed = Vec::new();
        while self.kept_bytes + self.alive_bytes > self.most_bytes {
            let pieces = self.kept.iter().enumerate();
            let Some((at, _)) = pieces.max_by_key(|(_, piece)| bytes_of(piece)) else {
                break;
            };
            let piece = self.kept.swap_remove(at);
            self.kept_bytes -= bytes_of(&piece);
            freed.push(piece);
        }
        freed
    }

    fn add_alive(&mut self, bytes: usize) {
        self.alive_bytes += bytes;
        self.most_bytes = self.most_bytes.max(self.alive_bytes);
    }

    fn put(&mut self, piece: CpuStorage) {
        let bytes = bytes_of(&piece);
        self.alive_bytes = self.alive_bytes.saturating_sub(bytes);
        if bytes > 0 {
            self.kept_bytes += bytes;
            self.kept.push(piece);
        }
    }
}

impl fmt::Debug for Buckets {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Buckets").finish_non_exhaustive()
    }
}

/// Whether memory is of this type.
fn is_of<T: InBuckets>(piece: &CpuStorage) -> bool {
    T::cpu_storage_as_slice(piece).is_ok()
}

/// The bytes that memory of a bucket takes.
fn bytes_of(piece: &CpuStorage) -> usize {
    match piece {
        CpuStorage::F32(memory) => memory.capacity() * size_of::<f32>(),
        CpuStorage::BF16(memory) => memory.capacity() * size_of::<bf16>(),
        _ => 0,
    }
}

/// The elements of a buffer, and what gets their memory back if it is that of a bucket.
///
/// # Errors
/// When the buffer does not give out elements of this type.
pub(super) fn into_elements<T: InBuckets>(
    buffer: Box<dyn Buffer>,
) -> merak_mpu::Result<(Vec<T>, Option<Buckets>)> {
    let any: &dyn Any = &*buffer;
    if !any.is::<Bucket<T>>() {
        return Ok((into_vec(buffer)?, None));
    }
    let bucket = buffer.into_any().downcast::<Bucket<T>>();
    let mut bucket = bucket.expect("its type was just asked for");
    let elements = mem::take(&mut bucket.elements);
    Ok((elements, Some(bucket.home.clone())))
}

/// The memory of a bucket, which serves another one when it is dropped.
#[derive(Debug)]
pub(super) struct Bucket<T: InBuckets> {
    elements: Vec<T>,
    home: Buckets,
}

impl<T: InBuckets> Buffer for Bucket<T> {
    fn dtype(&self) -> DType {
        <T as Element>::DTYPE
    }

    fn len(&self) -> usize {
        self.elements.len()
    }

    fn read(&self, f: &mut dyn FnMut(&[u8])) {
        self.elements.read(f);
    }

    fn write(&mut self, f: &mut dyn FnMut(&mut [u8])) {
        self.elements.write(f);
    }

    fn memory(&mut self) -> Memory {
        self.elements.memory()
    }

    fn into_any(self: Box<Self>) -> Box<dyn Any + Send + Sync> {
        self
    }
}

impl<T: InBuckets> Drop for Bucket<T> {
    fn drop(&mut self) {
        let elements = mem::take(&mut self.elements);
        self.home.put(T::to_cpu_storage_owned(elements));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kept(buckets: &Buckets) -> (usize, usize) {
        let pieces = buckets.lock();
        assert_eq!(pieces.alive_bytes, 0);
        (pieces.kept.len(), pieces.kept_bytes)
    }

    #[test]
    fn no_more_is_kept_than_buckets_took_at_once_whatever_their_lengths() {
        let buckets = Buckets::default();
        for round in 0..50 {
            for len in [700, 300, 1000, 500, 900, 100, 5000].map(|len| len + round) {
                let whole = buckets.take::<f32>(len);
                let next = buckets.take_zeros::<f32>(len / 2);
                let narrow = buckets.take::<bf16>(len);
                assert_eq!((whole.len(), next.len(), narrow.len()), (len, len / 2, len));
            }
            let most = (5000 + round) * 8;
            assert!(kept(&buckets).1 <= most, "{:?}", kept(&buckets));
        }
        buckets.free();
        assert_eq!(kept(&buckets), (0, 0));
    }

    #[test]
    fn lengths_that_come_again_and_again_find_their_memory() {
        let buckets = Buckets::default();
        let place = |bucket: &Bucket<f32>| bucket.elements.as_ptr().addr();
        // A large bucket beside small ones, as an embedding beside layers; a backward has more of
        // them at once than a forward.
        let backward = || {
            let all = [3000, 1000, 1000, 1000].map(|len| buckets.take_zeros::<f32>(len));
            all.each_ref().map(place)
        };
        let forward = || {
            let (large, small) = (buckets.take::<f32>(3000), buckets.take::<f32>(1000));
            let places = [place(&large), place(&small)];
            drop(large);
            let others = [(); 2].map(|()| buckets.take::<f32>(1000));
            [places, others.each_ref().map(place)].concat()
        };
        let known = backward();
        for _ in 0..3 {
            assert!(forward().iter().all(|place| known.contains(place)));
            assert!(backward().iter().all(|place| known.contains(place)));
        }
    }

    #[test]
    fn memory_serves_somewhat_shorter_buckets_and_then_its_own_length_again() {
        let buckets = Buckets::default();
        let place = || {
            [1000, 500, 999, 1000].map(|len| {
                let mut bucket = buckets.take_zeros::<f32>(len);
                bucket.write(&mut |bytes| {
                    assert!(bytes.len() == 4 * len && bytes.iter().all(|byte| *byte == 0));
                    bytes.fill(7);
                });
                bucket.elements.as_ptr().addr()
            })
        };
        let places = place();
        assert_eq!((places, place()), ([places[0]; 4], places));
        drop(buckets.take::<f32>(499));
        assert_eq!(kept(&buckets), (1, 4 * 499), "half of it would stay empty");
    }

    #[test]
    fn what_does_not_come_back_is_not_counted_any_more() {
        let buckets = Buckets::default();
        drop(buckets.take::<f32>(0));
        assert_eq!(kept(&buckets), (0, 0));
        let (elements, home) = into_elements::<f32>(Box::new(buckets.take::<f32>(5))).unwrap();
        let (home, piece) = (home.unwrap(), CpuStorage::F32(elements));
        home.give_away(&piece);
        assert_eq!(kept(&buckets), (0, 0));
        // Memory that came from elsewhere is freed, or it would pile up.
        let elsewhere = into_elements::<f32>(Box::new(vec![1.0_f32]));
        assert!(elsewhere.unwrap().1.is_none());
    }
}
