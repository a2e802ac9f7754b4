//! What threads ask of the allocator, in a test binary that counts it.
//!
//! ```
//! use merak_mpu::testing::allocations::{Counting, asked_bytes};
//!
//! #[global_allocator]
//! static ALLOCATOR: Counting = Counting;
//!
//! # fn main() {
//! let before = asked_bytes();
//! drop(vec![0_u8; 1000]);
//! assert_eq!(asked_bytes() - before, 1000);
//! # }
//! ```

use std::{
    alloc::{GlobalAlloc, Layout, System},
    cell::Cell,
};

thread_local! {
    static ASKED: Cell<usize> = const { Cell::new(0) };
}

/// The system's allocator, which counts the bytes that each thread asks for.
#[derive(Debug, Clone, Copy)]
pub struct Counting;

/// Bytes that this thread has asked for since it began, if [`Counting`] is the allocator of the
/// binary; bytes that it gave back are counted too.
pub fn asked_bytes() -> usize {
    ASKED.get()
}

#[expect(unsafe_code, reason = "allocators cannot be written without")]
// SAFETY: all calls go to the system's allocator; counting touches no memory that it returns.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // A thread that ends has no counter any more.
        let _ = ASKED.try_with(|asked| asked.set(asked.get() + layout.size()));
        // SAFETY: the caller keeps the promises that the system's allocator asks for.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        // SAFETY: as above.
        unsafe { System.dealloc(ptr, layout) }
    }
}
