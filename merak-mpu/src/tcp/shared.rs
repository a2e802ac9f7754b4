//! Bytes between two processes of one host, through memory that both map.
//!
//! ```text
//! page 0   counters of both rings: bytes written, bytes read, who sleeps
//! ring 0   from the lower rank to the higher one
//! ring 1   from the higher rank to the lower one
//! ```
//!
//! The memory is a file without a name (`memfd`), whose descriptor the higher rank hands to the
//! lower one over a Unix socket. It is reserved when it is made and sealed against shrinking, so no
//! access can fail later. Neither side trusts the other's counters further than to lie within the
//! ring.
#![expect(
    unsafe_code,
    reason = "memory that another process writes is reached by pointers alone"
)]

use rustix::{
    fd::OwnedFd,
    fs::{self, FallocateFlags, MemfdFlags, SealFlags},
    mm::{self, MapFlags, ProtFlags},
};
use std::{
    io, ptr,
    sync::{
        Arc,
        atomic::{AtomicU32, AtomicU64, Ordering, fence},
    },
};

/// Bytes of one ring: enough that both sides work at once, and few enough to stay in a cache.
const RING_BYTES: usize = 1 << 20;

/// Bytes in front of the rings.
const HEAD_BYTES: usize = 4096;

const MAP_BYTES: usize = HEAD_BYTES + 2 * RING_BYTES;

/// Bytes of the rings between all pairs of `ranks` ranks of a host.
pub(super) const fn bytes_among(ranks: usize) -> usize {
    ranks * ranks.saturating_sub(1) / 2 * MAP_BYTES
}

/// Bytes between counters that different processes write.
const STRIDE: usize = 128;

/// Mapped memory of [`MAP_BYTES`].
#[derive(Debug)]
struct Mapping(*mut u8);

// SAFETY: the memory is reached through atomics and copies by pointer alone, from any thread.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Mapping {
    fn new(file: &OwnedFd) -> io::Result<Self> {
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping at a place of the system's choice touches no memory of ours.
        let start = unsafe {
            mm::mmap(
                ptr::null_mut(),
                MAP_BYTES,
                access,
                MapFlags::SHARED,
                file,
                0,
            )
        }?;
        Ok(Self(start.cast()))
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: this is the mapping that `new` made, and nothing refers to it any more.
        let _ = unsafe { mm::munmap(self.0.cast(), MAP_BYTES) };
    }
}

/// The counters of a memory.
#[derive(Clone, Copy)]
enum Counter {
    Written = 0,
    Read = 1,
    ReaderSleeps = 2,
    WriterSleeps = 3,
}

/// One direction.
#[derive(Debug)]
struct Ring {
    map: Arc<Mapping>,
    number: usize,
    /// Bytes that this process has written to or read from it.
    position: u64,
}

impl Ring {
    #[expect(
        clippy::cast_ptr_alignment,
        reason = "a mapping begins at a page, and counters at multiples of their stride"
    )]
    fn counter(&self, counter: Counter) -> &AtomicU64 {
        let offset = (self.number * 8 + counter as usize) * STRIDE;
        // SAFETY: the offset lies within the first page and is a multiple of 8.
        let place = unsafe { self.map.0.add(offset) }.cast::<u64>();
        // SAFETY: the memory is mapped as long as `self` lives, and only atomics touch it.
        unsafe { AtomicU64::from_ptr(place) }
    }

    fn flag(&self, counter: Counter) -> &AtomicU32 {
        let place = self.counter(counter).as_ptr().cast::<u32>();
        // SAFETY: as in `counter`; no code uses this place as a number of eight bytes.
        unsafe { AtomicU32::from_ptr(place) }
    }

    /// Bytes that wait to be read, by this process's position and the other's counter.
    fn used(written: u64, read: u64) -> io::Result<usize> {
        let used = usize::try_from(written.wrapping_sub(read));
        let used = used.ok().filter(|used| *used <= RING_BYTES);
        used.ok_or_else(|| io::Error::other("the counters of its shared memory are wrong"))
    }

    /// The memory from a position on, up to the end of the ring.
    fn place(&self, position: u64, len: usize) -> (*mut u8, usize) {
        let offset = (position % RING_BYTES as u64) as usize;
        let start = HEAD_BYTES + self.number * RING_BYTES + offset;
        // SAFETY: the start lies within the mapping.
        let place = unsafe { self.map.0.add(start) };
        (place, len.min(RING_BYTES - offset))
    }

    fn free(&self) -> io::Result<usize> {
        let read = self.counter(Counter::Read).load(Ordering::Acquire);
        Ok(RING_BYTES - Self::used(self.position, read)?)
    }

    fn available(&self) -> io::Result<usize> {
        let written = self.counter(Counter::Written).load(Ordering::Acquire);
        Self::used(written, self.position)
    }

    /// Moves this process's position past some bytes, and says whether the other side sleeps.
    fn advance(&mut self, len: usize, counter: Counter, sleeper: Counter) -> bool {
        self.position = self.position.wrapping_add(len as u64);
        self.counter(counter)
            .store(self.position, Ordering::Release);
        // Either this side sees the sleeper, or the sleeper sees the bytes.
        fence(Ordering::SeqCst);
        self.flag(sleeper).swap(0, Ordering::SeqCst) == 1
    }
}

/// Both directions.
#[derive(Debug)]
pub(super) struct Shared {
    out: Ring,
    into: Ring,
}

impl Shared {
    /// Makes the memory, for the higher rank of two; the file is for the lower one.
    pub(super) fn create() -> io::Result<(Self, OwnedFd)> {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let file = fs::memfd_create("merak-mpu", flags)?;
        fs::fallocate(&file, FallocateFlags::empty(), 0, MAP_BYTES as u64)?;
        fs::fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
        Ok((Self::of(&file, true)?, file))
    }

    /// Opens memory that the higher rank made.
    pub(super) fn open(file: &OwnedFd) -> io::Result<Self> {
        let is_whole = usize::try_from(fs::fstat(file)?.st_size) == Ok(MAP_BYTES)
            && fs::fcntl_get_seals(file)?.contains(SealFlags::SHRINK);
        if !is_whole {
            return Err(io::Error::other("its shared memory has the wrong size"));
        }
        Self::of(file, false)
    }

    fn of(file: &OwnedFd, is_higher: bool) -> io::Result<Self> {
        let map = Arc::new(Mapping::new(file)?);
        let ring = |number| Ring {
            map: Arc::clone(&map),
            number,
            position: 0,
        };
        Ok(Self {
            out: ring(usize::from(is_higher)),
            into: ring(usize::from(!is_higher)),
        })
    }

    /// Writes what there is room for. Returns its bytes, and whether the reader sleeps.
    pub(super) fn write(&mut self, bytes: &[u8]) -> io::Result<(usize, bool)> {
        let len = bytes.len().min(self.out.free()?);
        let mut rest = &bytes[..len];
        let mut position = self.out.position;
        while !rest.is_empty() {
            let (place, part) = self.out.place(position, rest.len());
            // SAFETY: the part lies within the ring, and the reader has read what was there.
            unsafe { ptr::copy_nonoverlapping(rest.as_ptr(), place, part) };
            rest = &rest[part..];
            position = position.wrapping_add(part as u64);
        }
        let sleeps = len > 0
            && self
                .out
                .advance(len, Counter::Written, Counter::ReaderSleeps);
        Ok((len, sleeps))
    }

    /// Reads what is there. Returns its bytes, and whether the writer sleeps.
    pub(super) fn read(&mut self, bytes: &mut [u8]) -> io::Result<(usize, bool)> {
        let len = bytes.len().min(self.into.available()?);
        let mut rest = &mut bytes[..len];
        let mut position = self.into.position;
        while !rest.is_empty() {
            let (place, part) = self.into.place(position, rest.len());
            // SAFETY: the part lies within the ring, and the writer leaves it until it is read.
            unsafe { ptr::copy_nonoverlapping(place, rest.as_mut_ptr(), part) };
            rest = &mut rest[part..];
            position = position.wrapping_add(part as u64);
        }
        let sleeps = len > 0 && self.into.advance(len, Counter::Read, Counter::WriterSleeps);
        Ok((len, sleeps))
    }

    pub(super) fn has_bytes(&self) -> bool {
        // Wrong counters are an error of the read.
        self.into.available().is_ok_and(|len| len > 0) || self.into.available().is_err()
    }

    /// Whether there is something to read, or room to write where `writes`.
    pub(super) fn can_move(&self, writes: bool) -> bool {
        self.has_bytes() || (writes && self.out.free().is_ok_and(|len| len > 0))
    }

    /// Asks to be woken, and says whether there is something to do already.
    pub(super) fn begin_sleep(&self, writes: bool) -> bool {
        self.into
            .flag(Counter::ReaderSleeps)
            .store(1, Ordering::SeqCst);
        if writes {
            self.out
                .flag(Counter::WriterSleeps)
                .store(1, Ordering::SeqCst);
        }
        fence(Ordering::SeqCst);
        self.can_move(writes)
    }

    pub(super) fn end_sleep(&self) {
        self.into
            .flag(Counter::ReaderSleeps)
            .store(0, Ordering::SeqCst);
        self.out
            .flag(Counter::WriterSleeps)
            .store(0, Ordering::SeqCst);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_of_the_memory_is_reserved_before_anybody_touches_it() {
        let (_shared, file) = Shared::create().unwrap();
        let blocks = fs::fstat(&file).unwrap().st_blocks as usize;
        // The system counts blocks of 512 bytes that are there; a file that is only long has none.
        assert!(blocks * 512 >= MAP_BYTES, "{blocks} blocks");
    }
}
