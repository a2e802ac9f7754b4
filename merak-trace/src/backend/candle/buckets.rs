//! Memory of buckets of gradients and of gathered parameters, kept for later buckets.

use super::storage::Scalar;
use candle_core::CpuStorage;
use half::bf16;
use merak_mpu::{Buffer, DType, Element, Memory, into_vec, zeroed};
use std::{
    any::Any,
    fmt, mem,
    sync::{Arc, Mutex, PoisonError},
};

/// Element types of buckets.
pub(super) trait InBuckets: Scalar {}

impl InBuckets for f32 {}
impl InBuckets for bf16 {}

/// Memory of freed buckets.
///
/// Buckets differ in length, so that a [`Pool`](super::pool::Pool) would keep memory for each. Here
/// a larger piece serves too, and makes way where it is too small: there are never more pieces than
/// buckets were alive at once, nor larger ones than the largest bucket.
#[derive(Clone, Default)]
pub(super) struct Buckets(Arc<Mutex<Vec<CpuStorage>>>);

impl Buckets {
    /// A bucket of `len` elements with unspecified contents.
    pub(super) fn take<T: InBuckets>(&self, len: usize) -> Bucket<T> {
        let kept = self.take_kept::<T>(len).map(|mut kept| {
            kept.resize(len, T::zero());
            kept
        });
        self.bucket(kept, len)
    }

    /// A bucket of zeros.
    pub(super) fn take_zeros<T: InBuckets>(&self, len: usize) -> Bucket<T> {
        let kept = self.take_kept::<T>(len).map(|mut kept| {
            kept.clear();
            kept.resize(len, T::zero());
            kept
        });
        self.bucket(kept, len)
    }

    fn bucket<T: InBuckets>(&self, kept: Option<Vec<T>>, len: usize) -> Bucket<T> {
        Bucket {
            elements: kept.unwrap_or_else(|| zeroed(len)),
            home: self.clone(),
        }
    }

    /// The smallest piece that is large enough; without one, frees the largest.
    fn take_kept<T: InBuckets>(&self, len: usize) -> Option<Vec<T>> {
        let mut pieces = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let of_type = pieces.iter().enumerate();
        let of_type = of_type.filter_map(|(i, piece)| Some((capacity_of::<T>(piece)?, i)));
        let best = of_type.min_by_key(|&(capacity, _)| match capacity.checked_sub(len) {
            Some(more) => (false, more),
            None => (true, len - capacity),
        });
        let (capacity, at) = best?;
        let piece = pieces.remove(at);
        // Memory is freed without the lock.
        drop(pieces);
        let piece = T::cpu_storage_data(piece).ok();
        piece.filter(|_| capacity >= len)
    }

    /// Keeps the memory of a bucket that was taken here.
    pub(super) fn put(&self, piece: CpuStorage) {
        let mut pieces = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        pieces.push(piece);
    }

    /// The elements that each piece has room for.
    #[cfg(test)]
    fn kept(&self) -> Vec<usize> {
        let pieces = self.0.lock().unwrap();
        let capacity = |piece| capacity_of::<f32>(piece).or(capacity_of::<bf16>(piece));
        pieces.iter().filter_map(capacity).collect()
    }
}

impl fmt::Debug for Buckets {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Buckets").finish_non_exhaustive()
    }
}

/// The elements of this type that memory has room for; `None` for memory of another type.
fn capacity_of<T: InBuckets>(piece: &CpuStorage) -> Option<usize> {
    match (piece, <T as Element>::DTYPE) {
        (CpuStorage::F32(memory), DType::F32) => Some(memory.capacity()),
        (CpuStorage::BF16(memory), DType::BF16) => Some(memory.capacity()),
        _ => None,
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
        if elements.capacity() > 0 {
            self.home.put(T::to_cpu_storage_owned(elements));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn there_are_as_many_pieces_as_buckets_were_alive_at_once_and_none_is_too_large() {
        let buckets = Buckets::default();
        for round in 0..50 {
            for len in [700, 300, 1000, 500, 900, 100].map(|len| len + round) {
                let whole = buckets.take::<f32>(len);
                let next = buckets.take_zeros::<f32>(len / 2);
                let narrow = buckets.take::<bf16>(len);
                assert_eq!((whole.len(), next.len(), narrow.len()), (len, len / 2, len));
            }
            let kept = buckets.kept();
            assert_eq!(kept.len(), 3);
            assert!(kept.iter().all(|&room| room <= 1000 + round), "{kept:?}");
        }
    }

    #[test]
    fn memory_serves_smaller_buckets_and_then_its_own_length_again() {
        let buckets = Buckets::default();
        let place = || {
            [1000, 10, 999, 1000].map(|len| {
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
    }

    #[test]
    fn a_bucket_without_elements_leaves_nothing_behind() {
        let buckets = Buckets::default();
        drop(buckets.take::<f32>(0));
        let (elements, home) = into_elements::<f32>(Box::new(buckets.take::<f32>(5))).unwrap();
        assert_eq!((elements.len(), buckets.kept()), (5, vec![]));
        home.unwrap().put(CpuStorage::F32(elements));
        assert_eq!(buckets.kept(), [5]);
        // Memory that came from elsewhere is freed, or it would pile up.
        assert!(
            into_elements::<f32>(Box::new(vec![1.0_f32]))
                .unwrap()
                .1
                .is_none()
        );
    }
}
