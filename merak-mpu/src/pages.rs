//! Large memory on large pages, where the system has them for the asking.
#![expect(unsafe_code, reason = "advice about memory is a system call")]

use crate::Element;

/// Memory of fewer bytes is not worth a system call.
const LEAST_BYTES: usize = 4 << 20;

/// Makes `len` zeroed elements in host memory, on large pages where the system has them.
///
/// The first touch of each page costs a fault, and of large pages there are few: a buffer that is
/// new in every operation then costs a third.
pub fn zeroed<T: Element>(len: usize) -> Vec<T> {
    let mut elements = bytemuck::zeroed_vec::<T>(len);
    let bytes: &mut [u8] = bytemuck::cast_slice_mut(&mut elements);
    if bytes.len() >= LEAST_BYTES {
        ask_for_large(bytes);
    }
    elements
}

/// Asks for large pages under memory that was not touched yet. Nothing depends on the answer.
#[cfg(target_os = "linux")]
fn ask_for_large(bytes: &mut [u8]) {
    use rustix::{mm, param::page_size};
    let page = page_size();
    let start = bytes.as_mut_ptr();
    let skipped = start.align_offset(page);
    let len = bytes.len().saturating_sub(skipped) / page * page;
    let start = start.wrapping_add(skipped).cast();
    // SAFETY: these whole pages lie within memory that is borrowed here, and this advice changes
    // none of its bytes.
    let advised = unsafe { mm::madvise(start, len, mm::Advice::LinuxHugepage) };
    if let Err(error) = advised {
        tracing::trace!(%error, "pages stay small");
    }
}

#[cfg(not(target_os = "linux"))]
fn ask_for_large(_bytes: &mut [u8]) {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn large_memory_is_zeroed_and_can_be_written() {
        for len in [0, 7, 3 << 20] {
            let mut elements = zeroed::<u32>(len);
            assert!(elements.len() == len && elements.iter().all(|x| *x == 0));
            elements.fill(7);
            assert!(elements.iter().all(|x| *x == 7));
        }
    }
}
