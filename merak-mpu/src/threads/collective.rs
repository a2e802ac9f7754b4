//! One collective in flight: members deposit buffers, and those that wait share the work.
#![expect(
    unsafe_code,
    reason = "threads work on disjoint chunks of buffers that one of them holds open"
)]

use super::plan::{ChunkPlan, Footprint};
use crate::{Buffer, DType, bell::lock, call::Fingerprint};
use std::{
    collections::BTreeMap,
    hint, mem,
    sync::{
        Mutex, OnceLock,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    thread,
    time::Duration,
};

/// What a member brings: its buffer, and room for the result where the call does not work in place.
struct Deposit {
    input: Box<dyn Buffer>,
    output: Option<Box<dyn Buffer>>,
}

impl Deposit {
    fn num_bytes(&self) -> usize {
        let buffers = [&self.input].into_iter().chain(&self.output);
        buffers.map(|buffer| buffer.size_bytes()).sum()
    }
}

/// A collective from its first call to its last result.
///
/// ```text
/// gathering ──(n-th deposit)──> full ──(one thread leads)──> working ──(last chunk)──> done
/// ```
pub(super) struct Collective {
    fingerprint: Fingerprint,
    /// The member that came first, with this fingerprint, and that deposits a moment later.
    first: usize,
    /// Members that have called something else.
    others: Mutex<Vec<(usize, Fingerprint)>>,
    deposits: Mutex<Vec<Option<Deposit>>>,
    full: AtomicBool,
    led: AtomicBool,
    /// The number of the buffer that the leader is opening or closing; else [`NO_BUFFER`].
    at_buffer: AtomicUsize,
    work: OnceLock<Work>,
    results: Mutex<Vec<Option<Box<dyn Buffer>>>>,
    done: AtomicBool,
}

/// The number of no buffer.
const NO_BUFFER: usize = usize::MAX;

/// A buffer that did not open as it should: its member, length and dtype.
pub(super) struct Unopened {
    pub(super) rank: usize,
    pub(super) len: usize,
    pub(super) dtype: DType,
}

impl Collective {
    /// Starts gathering for `n` members, of which `first` came first, with this fingerprint.
    pub(super) fn new(fingerprint: Fingerprint, first: usize, n: usize) -> Self {
        Self {
            fingerprint,
            first,
            others: Mutex::default(),
            deposits: Mutex::new((0..n).map(|_| None).collect()),
            full: AtomicBool::new(false),
            led: AtomicBool::new(false),
            at_buffer: AtomicUsize::new(NO_BUFFER),
            work: OnceLock::new(),
            results: Mutex::default(),
            done: AtomicBool::new(false),
        }
    }

    /// Its name, as in `all_reduce`.
    pub(super) fn name(&self) -> &'static str {
        self.fingerprint.call.name()
    }

    /// Whether a call is that of the member that came first.
    pub(super) fn is_called(&self, call: &Fingerprint) -> bool {
        self.fingerprint == *call
    }

    /// Notes that a member has called something else.
    pub(super) fn note_other_call(&self, rank: usize, call: Fingerprint) {
        lock(&self.others).push((rank, call));
    }

    /// Whether the calls of all members are known.
    pub(super) fn have_all_called(&self) -> bool {
        self.calls().len() == lock(&self.deposits).len()
    }

    /// The calls that are known, by group rank.
    pub(super) fn calls(&self) -> BTreeMap<usize, Fingerprint> {
        let mut calls: BTreeMap<_, _> = lock(&self.others).iter().cloned().collect();
        calls.insert(self.first, self.fingerprint.clone());
        for (rank, deposit) in lock(&self.deposits).iter().enumerate() {
            if deposit.is_some() {
                calls.insert(rank, self.fingerprint.clone());
            }
        }
        calls
    }

    /// Leaves the buffer of member `rank`, whose fingerprint is that of the first. To the member
    /// that comes last it returns the bytes of all buffers.
    pub(super) fn deposit(&self, rank: usize, input: Box<dyn Buffer>) -> Option<usize> {
        let n = lock(&self.deposits).len();
        // Members touch the memory of their results at the same time, so without the lock.
        let output = ChunkPlan::output_len(&self.fingerprint, rank, n);
        let output = output.map(|len| input.zeros_like(len));
        let mut deposits = lock(&self.deposits);
        deposits[rank] = Some(Deposit { input, output });
        if !deposits.iter().all(Option::is_some) {
            return None;
        }
        let num_bytes = deposits.iter().flatten().map(Deposit::num_bytes).sum();
        self.full.store(true, Ordering::Release);
        Some(num_bytes)
    }

    /// Whether all members have come.
    pub(super) fn is_full(&self) -> bool {
        self.full.load(Ordering::Acquire)
    }

    /// The members that have not come.
    pub(super) fn missing(&self) -> Vec<usize> {
        if self.is_full() {
            return Vec::new();
        }
        let deposits = lock(&self.deposits);
        (0..deposits.len())
            .filter(|&rank| deposits[rank].is_none())
            .collect()
    }

    /// Whether the results are there.
    pub(super) fn is_done(&self) -> bool {
        self.done.load(Ordering::Acquire)
    }

    /// Whether there is a leader.
    pub(super) fn is_led(&self) -> bool {
        self.led.load(Ordering::Acquire)
    }

    /// Whether a member that does not lead has something to do.
    pub(super) fn can_help(&self) -> bool {
        self.is_done() || self.work.get().is_some()
    }

    /// Makes the caller the leader, unless there is one.
    pub(super) fn claim_lead(&self) -> bool {
        !self.led.swap(true, Ordering::AcqRel)
    }

    /// Opens all buffers in ascending rank, works until all is computed, and puts the results out.
    pub(super) fn lead(&self) -> Result<(), Unopened> {
        let deposits: Vec<Deposit> = mem::take(&mut *lock(&self.deposits))
            .into_iter()
            .flatten()
            .collect();
        let plan = ChunkPlan::new(self.fingerprint.clone(), deposits.len());
        let mut buffers = Vec::with_capacity(2 * deposits.len());
        let mut outputs = Vec::new();
        for deposit in deposits {
            buffers.push(deposit.input);
            outputs.extend(deposit.output);
        }
        let n = buffers.len();
        let in_place = outputs.is_empty();
        buffers.append(&mut outputs);
        if plan.num_chunks() > 0 {
            self.work_on(plan, &mut buffers)
                .map_err(|number| Unopened {
                    rank: number % n,
                    len: buffers[number].len(),
                    dtype: buffers[number].dtype(),
                })?;
        }
        let results = buffers.split_off(if in_place { 0 } else { n });
        *lock(&self.results) = results.into_iter().map(Some).collect();
        self.done.store(true, Ordering::Release);
        Ok(())
    }

    /// To a thread whose [`Collective::lead`] has panicked, tells which of the `n` members has the
    /// buffer that did, if one did.
    pub(super) fn panicked_at(&self, n: usize) -> Option<usize> {
        let number = self.at_buffer.load(Ordering::Relaxed);
        (number != NO_BUFFER).then_some(number % n)
    }

    /// Works on chunks while there are any left.
    pub(super) fn help(&self) {
        if let Some(work) = self.work.get() {
            work.help();
        }
    }

    /// Takes the result of member `rank` once it is done.
    pub(super) fn take(&self, rank: usize) -> Option<Box<dyn Buffer>> {
        lock(&self.results).get_mut(rank)?.take()
    }

    /// Returns the number of the first buffer that did not open.
    fn work_on(&self, plan: ChunkPlan, buffers: &mut [Box<dyn Buffer>]) -> Result<(), usize> {
        let mut regions = Vec::with_capacity(buffers.len());
        let expected: Vec<(usize, DType)> = buffers
            .iter()
            .map(|buffer| (buffer.len(), buffer.dtype()))
            .collect();
        let mut plan = Some(plan);
        let mut outcome = Err(0);
        open(buffers, &mut regions, &self.at_buffer, &mut |regions| {
            let Some(plan) = plan.take() else { return };
            let unopened = regions
                .iter()
                .zip(&expected)
                .position(|(region, &(len, dtype))| !region.holds(len, dtype));
            if let Some(number) = unopened {
                outcome = Err(number);
                return;
            }
            let work = self.work.get_or_init(|| Work::new(plan, regions.to_vec()));
            let _closing = Closing(work);
            work.help();
            outcome = Ok(());
        });
        // Buffers open in order, so the number of regions is that of the first one that did not
        // open.
        outcome.map_err(|number| {
            if plan.is_some() {
                regions.len()
            } else {
                number
            }
        })
    }
}

/// Holds all buffers open at once, in order, and calls `f` with their memory. `at` has the number
/// of the buffer whose own code runs.
fn open(
    buffers: &mut [Box<dyn Buffer>],
    regions: &mut Vec<Region>,
    at: &AtomicUsize,
    f: &mut dyn FnMut(&[Region]),
) {
    match buffers.split_first_mut() {
        None => {
            at.store(NO_BUFFER, Ordering::Relaxed);
            f(regions);
        }
        Some((first, rest)) => {
            let depth = regions.len();
            at.store(depth, Ordering::Relaxed);
            first.write(&mut |bytes| {
                regions.truncate(depth);
                regions.push(Region {
                    start: bytes.as_mut_ptr(),
                    len: bytes.len(),
                });
                open(rest, regions, at, f);
                at.store(depth, Ordering::Relaxed);
            });
        }
    }
}

/// The memory of an open buffer.
#[derive(Clone, Copy)]
struct Region {
    start: *mut u8,
    len: usize,
}

// SAFETY: a region is only dereferenced through `Work::memory`, whose callers hold different
// chunks.
unsafe impl Send for Region {}
// SAFETY: as above.
unsafe impl Sync for Region {}

impl Region {
    fn holds(&self, len: usize, dtype: DType) -> bool {
        self.len == len * dtype.size_bytes() && self.start.addr().is_multiple_of(dtype.align())
    }
}

/// The chunks of an opened collective, and the work on them.
///
/// Invariant: the regions are valid, and no other code touches them, until `next` is past the last
/// chunk and as many chunks are `finished` as were claimed. [`Closing`] keeps the buffers open
/// until then.
struct Work {
    plan: ChunkPlan,
    regions: Vec<Region>,
    next: AtomicUsize,
    finished: AtomicUsize,
}

impl Work {
    fn new(plan: ChunkPlan, regions: Vec<Region>) -> Self {
        Self {
            plan,
            regions,
            next: AtomicUsize::new(0),
            finished: AtomicUsize::new(0),
        }
    }

    fn help(&self) {
        while let Some(claim) = self.claim() {
            let footprint = self.plan.footprint(claim.chunk);
            // SAFETY: the claim is ours alone, and the buffers stay open until it is dropped.
            let mut memory = unsafe { self.memory(footprint) };
            self.plan.compute(claim.chunk, &mut memory);
        }
    }

    fn claim(&self) -> Option<Claim<'_>> {
        let chunk = self.next.fetch_add(1, Ordering::Relaxed);
        // Made only for a chunk that exists, as dropping it counts one as finished.
        if chunk >= self.plan.num_chunks() {
            return None;
        }
        Some(Claim { work: self, chunk })
    }

    /// # Safety
    /// The caller holds the claim on the chunk of this footprint.
    #[expect(
        clippy::mut_from_ref,
        reason = "a claim is exclusive, and chunks are disjoint"
    )]
    unsafe fn memory(&self, footprint: Footprint) -> Vec<&mut [u8]> {
        footprint
            .into_iter()
            .map(|(buffer, range)| {
                let region = self.regions[buffer];
                assert!(range.start <= range.end && range.end <= region.len);
                // SAFETY: the range was just checked to lie within the region.
                let start = unsafe { region.start.add(range.start) };
                // SAFETY: the region is valid and ours for the time of the claim; footprints of
                // different chunks, and the parts of one, do not overlap (tested in `plan.rs`).
                unsafe { std::slice::from_raw_parts_mut(start, range.len()) }
            })
            .collect()
    }
}

/// One chunk, for the thread that works on it; dropping it counts the chunk as finished.
struct Claim<'a> {
    work: &'a Work,
    chunk: usize,
}

impl Drop for Claim<'_> {
    fn drop(&mut self) {
        self.work.finished.fetch_add(1, Ordering::Release);
    }
}

/// Rounds after which a leader naps: a member that has not finished its chunk by then has no core.
const MOST_ROUNDS: u32 = 2048;

/// Keeps the leader from closing the buffers, even in a panic, while a member works on a chunk.
struct Closing<'a>(&'a Work);

impl Drop for Closing<'_> {
    fn drop(&mut self) {
        let total = self.0.plan.num_chunks();
        let claimed = self.0.next.swap(total, Ordering::Relaxed).min(total);
        let mut rounds = 0_u32;
        while self.0.finished.load(Ordering::Acquire) < claimed {
            rounds += 1;
            if rounds > MOST_ROUNDS {
                thread::sleep(Duration::from_micros(20));
            } else if rounds.is_multiple_of(64) {
                thread::yield_now();
            }
            hint::spin_loop();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        ReduceOp,
        call::{Call, compare},
    };

    #[test]
    fn the_call_that_came_first_counts_before_its_buffer_is_there() {
        let call = |op| Fingerprint::new(Call::AllReduce(op), &vec![0.0_f32; 2], None);
        let collective = Collective::new(call(ReduceOp::Sum), 0, 2);
        collective.note_other_call(1, call(ReduceOp::Max));
        assert!(collective.have_all_called());
        let calls = collective.calls().into_iter();
        let calls: Vec<_> = calls.map(|(rank, call)| (rank.into(), call)).collect();
        compare(("world", &[]), 0, &calls, Fingerprint::to_string).unwrap_err();
    }
}
