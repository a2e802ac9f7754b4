//! What ranks allocate while they wait for each other.

use merak_mpu::threads::{self, WorldOptions};
use std::{
    alloc::{GlobalAlloc, Layout, System},
    cell::Cell,
    thread,
    time::Duration,
};

thread_local! {
    /// Bytes that this thread has asked for.
    static ASKED: Cell<usize> = const { Cell::new(0) };
}

/// The system's allocator, which counts the bytes that each thread asks for.
struct Counting;

fn count(bytes: usize) {
    // A thread that ends has no counter any more.
    let _ = ASKED.try_with(|asked| asked.set(asked.get() + bytes));
}

#[expect(unsafe_code, reason = "allocators cannot be written without")]
// SAFETY: all calls go to the system's allocator; counting touches no memory that it returns.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(layout.size());
        // SAFETY: the caller keeps the promises that the system's allocator asks for.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        // SAFETY: as above.
        unsafe { System.dealloc(ptr, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// The most bytes that a rank of `n` asks for in a barrier for which all but one have to sleep.
fn most_in_a_barrier(n: usize) -> usize {
    let options = WorldOptions {
        timeout: Duration::from_mins(1),
        stack_bytes: 256 << 10,
        ..WorldOptions::default()
    };
    let asked = threads::run(n, options, |member| {
        let world = member.world_group()?;
        if member.rank().0 + 1 == n {
            thread::sleep(Duration::from_millis(200));
        }
        let before = ASKED.get();
        world.barrier()?;
        Ok::<_, merak_mpu::Error>(ASKED.get() - before)
    });
    let asked = asked.expect("no rank fails");
    asked.into_iter().max().expect("there are ranks")
}

#[test]
fn the_memory_of_a_wait_grows_with_the_ranks_and_not_with_their_square() {
    let (few, many) = (most_in_a_barrier(32), most_in_a_barrier(128));
    assert!(many < 8 * few, "{few} bytes at 32 ranks, {many} at 128");
}
