//! Hints that bring memory closer before it is read or written.
#![expect(
    clippy::inline_always,
    reason = "a hint that is called costs more than it brings"
)]
#![expect(unsafe_code, reason = "a hint to the processor's caches")]

use std::arch::x86_64::{_MM_HINT_T0, _MM_HINT_T1, _mm_prefetch};

use super::super::{Float, MatMut, MatRef};

/// Bytes along a line between what is packed and what is asked for meanwhile.
const AHEAD: usize = 512;

/// Lines between those that are packed one after the other and what is asked for meanwhile.
const LINES_AHEAD: usize = 8;

/// Asks for the cache line where an element of a slice would lie, which may be past its end.
#[inline(always)]
pub(super) fn prefetch<T>(slice: &[T], element: usize) {
    // SAFETY: a prefetch reads nothing that the program sees, whatever the address is.
    unsafe { _mm_prefetch::<_MM_HINT_T0>(slice.as_ptr().wrapping_add(element).cast()) };
}

/// Asks for the cache line that is read some time after an element of a line, where `together`
/// lines are read side by side and then as many below them.
#[inline(always)]
pub(super) fn prefetch_along<T: Copy>(
    lines: &MatRef<'_, T>,
    line: &[T],
    element: usize,
    together: usize,
) {
    let ahead = element + AHEAD / size_of::<T>();
    let below = match ahead.checked_sub(line.len()) {
        Some(rest) => rest + together * lines.row_stride(),
        None => ahead,
    };
    prefetch(line, below);
}

/// Asks for an element of a line some lines below, where lines are read one after the other.
#[inline(always)]
pub(super) fn prefetch_below<T: Copy>(lines: &MatRef<'_, T>, line: &[T], element: usize) {
    prefetch(line, element + LINES_AHEAD * lines.row_stride());
}

/// Asks for a tile of an output, as far as the second-level cache, while its sums are computed.
#[inline(always)]
pub(super) fn prefetch_tile<T: Float>(out: &mut MatMut<'_, T>) {
    const CACHE_LINE: usize = 64;
    for row in 0..out.rows() {
        for line in out.row_mut(row).chunks(CACHE_LINE / size_of::<T>()) {
            // SAFETY: a prefetch reads nothing that the program sees, whatever the address is.
            unsafe { _mm_prefetch::<_MM_HINT_T1>(line.as_ptr().cast()) };
        }
    }
}
