//! Copies of memory that does not stay in the caches.
#![cfg_attr(
    target_arch = "x86_64",
    expect(
        unsafe_code,
        reason = "stores that pass the caches by are instructions of the processor"
    )
)]

/// Copies past the caches. A usual store first reads what it overwrites, so that a copy of more
/// than the caches hold moves half as many bytes again.
#[cfg(target_arch = "x86_64")]
pub(super) fn copy_uncached(target: &mut [u8], source: &[u8]) {
    use std::arch::x86_64::{__m128i, _mm_loadu_si128, _mm_sfence, _mm_stream_si128};
    assert_eq!(target.len(), source.len());
    let head = target.as_ptr().align_offset(size_of::<__m128i>());
    let head = head.min(target.len());
    let (target_head, target) = target.split_at_mut(head);
    let (source_head, source) = source.split_at(head);
    target_head.copy_from_slice(source_head);
    let mut targets = target.chunks_exact_mut(size_of::<__m128i>());
    let mut sources = source.chunks_exact(size_of::<__m128i>());
    for (target, source) in targets.by_ref().zip(sources.by_ref()) {
        // SAFETY: the source has 16 bytes. These instructions are part of every x86-64 processor.
        let bytes = unsafe { _mm_loadu_si128(source.as_ptr().cast()) };
        // SAFETY: the target has 16 bytes, and its address is a multiple of 16.
        unsafe { _mm_stream_si128(target.as_mut_ptr().cast(), bytes) };
    }
    targets
        .into_remainder()
        .copy_from_slice(sources.remainder());
    // SAFETY: as the first. Other threads see these stores before any that follows.
    unsafe { _mm_sfence() };
}

/// Copies as usual.
#[cfg(not(target_arch = "x86_64"))]
pub(super) fn copy_uncached(target: &mut [u8], source: &[u8]) {
    target.copy_from_slice(source);
}

#[cfg(test)]
mod tests {
    use super::copy_uncached;

    #[test]
    fn all_bytes_come_whatever_the_alignment() {
        let source: Vec<u8> = (0..=255).cycle().take(300).collect();
        for start in 0..20 {
            for len in [0, 1, 15, 16, 17, 33, 280] {
                let mut target = vec![7; 300];
                copy_uncached(&mut target[start..start + len], &source[3..3 + len]);
                assert_eq!(target[start..start + len], source[3..3 + len]);
                let rest = [&target[..start], &target[start + len..]].concat();
                assert!(rest.iter().all(|byte| *byte == 7));
            }
        }
    }
}
