//! Hints that bring memory closer before it is read.
#![expect(
    clippy::inline_always,
    reason = "a hint that is called costs more than it brings"
)]
#![expect(unsafe_code, reason = "a hint to the processor's caches")]

use std::arch::x86_64::{_MM_HINT_T0, _MM_HINT_T1, _mm_prefetch};

/// Asks for the cache line where an element of a slice would lie, which may be past its end.
#[inline(always)]
pub(super) fn prefetch<T>(slice: &[T], element: usize) {
    // SAFETY: a prefetch reads nothing that the program sees, whatever the address is.
    unsafe { _mm_prefetch::<_MM_HINT_T0>(slice.as_ptr().wrapping_add(element).cast()) };
}

/// Asks for the cache lines of a slice that begins with one, as far as the second-level cache.
#[inline(always)]
pub(super) fn prefetch_to_second_level<T>(slice: &[T]) {
    const CACHE_LINE: usize = 64;
    for line in slice.chunks(CACHE_LINE / size_of::<T>()) {
        // SAFETY: a prefetch reads nothing that the program sees, whatever the address is.
        unsafe { _mm_prefetch::<_MM_HINT_T1>(line.as_ptr().cast()) };
    }
}
