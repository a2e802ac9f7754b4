//! What ranks need beside their tensors: threads, and what the allocator keeps around them.

use crate::{config::CheckedArguments, world::threads_per_rank};
use merak_mpu::threads::WorldOptions;

/// Bytes that a thread touches of its stack, and of the system's memory for it.
const TOUCHED_BYTES: u64 = 64 << 10;

/// Scratch memory that kernels keep for a compute thread: tiles of scores, packed operands.
const SCRATCH_BYTES: u64 = 256 << 10;

/// What a rank holds beside its tensors and threads: programs, layouts, groups and mailboxes.
const RANK_BYTES: u64 = 128 << 10;

/// What a rank holds for each other one: its name among those of whom a wait tells.
pub(super) const PAIR_BYTES: u64 = 16;

/// The stack of a thread that is no rank: the default of the standard library.
pub(super) const STACK_BYTES: u64 = 2 << 20;

/// Threads of a process beside those of its ranks: those that watch for signals, show progress and
/// delete checkpoints.
pub(super) const OTHER_THREADS: u64 = 3;

/// What the system reserves around a stack: a guard page, and the stack of a signal's handler with
/// its own, whose size follows from the registers of the processor.
pub(super) const GUARD_BYTES: u64 = 32 << 10;

/// Addresses that the heap of a rank takes beyond what is in use at once: gaps between small
/// blocks, and what planning and starting need for a while.
pub(super) const HEAP_BYTES: u64 = 384 << 10;

/// Addresses that the heap of a process takes so: its plan, the measurement of exchanges, the
/// allocator's margins.
pub(super) const PROCESS_BYTES: u64 = 16 << 20;

/// The part of all values, as a divisor, that gaps in their memory take: small values lie in the
/// heap, large ones in whole pages.
pub(super) const GAPS: u64 = 8;

/// Threads of a rank that compute, and those beside them that read data ahead.
fn threads_of_rank(args: &CheckedArguments) -> [u64; 2] {
    [threads_per_rank(args), args.dataloader_num_workers].map(|threads| threads as u64)
}

/// What all ranks hold beside their tensors and threads: their own, and what they share.
fn own_bytes(args: &CheckedArguments) -> u64 {
    let (ranks, [compute, _]) = (args.ranks_here() as u64, threads_of_rank(args));
    let own = compute
        .saturating_mul(SCRATCH_BYTES)
        .saturating_add(RANK_BYTES)
        .saturating_add(ranks.saturating_mul(PAIR_BYTES));
    let shared = args.shared_bytes_here() as u64;
    ranks.saturating_mul(own).saturating_add(shared)
}

/// Bytes that the threads of all ranks touch, and that the ranks hold beside their tensors.
pub(super) fn touched_bytes(args: &CheckedArguments) -> u64 {
    let (ranks, threads) = (args.ranks_here() as u64, threads_of_rank(args));
    let touched = threads.into_iter().fold(0, u64::saturating_add);
    let touched = touched.saturating_mul(TOUCHED_BYTES);
    own_bytes(args).saturating_add(ranks.saturating_mul(touched))
}

/// Addresses that the same takes in one process: whole stacks, whole scratch memory of products
/// (`products` bytes for a thread), and what the heap reserves beside the process's `values` bytes
/// of tensors. Memory that two processes share counts in both, as both map it.
pub(super) fn mapped_bytes(args: &CheckedArguments, values: u64, products: u64) -> u64 {
    let ranks = args.ranks_here() as u64;
    let [compute, loading] = threads_of_rank(args);
    // A rank saves on a thread of its own.
    let beside = (compute - 1)
        .saturating_add(loading)
        .saturating_add(u64::from(args.saves()));
    let other = STACK_BYTES + GUARD_BYTES;
    let own = WorldOptions::default().stack_bytes as u64 + GUARD_BYTES;
    let of_rank = beside
        .saturating_mul(other)
        .saturating_add(own)
        .saturating_add(compute.saturating_mul(products))
        .saturating_add(HEAP_BYTES);
    let of_ranks = own_bytes(args)
        .saturating_add(args.twice_mapped_bytes_here() as u64)
        .saturating_add(ranks.saturating_mul(of_rank));
    // The helper of ranks that are threads has a stack like theirs.
    let of_process = OTHER_THREADS * other + own + PROCESS_BYTES;
    (of_ranks / args.processes_here() as u64)
        .saturating_add(of_process)
        .saturating_add(values / GAPS)
}
