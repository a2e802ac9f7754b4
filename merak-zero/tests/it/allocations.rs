//! What a rank allocates in a step, by the number of ranks.

use crate::fixture::{config, data_parallel, grads, len, lr, noises};
use merak_mpu::testing::{
    allocations::{Counting, asked_bytes},
    world,
};
use merak_zero::ZeroStage;

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// The most bytes that one of `n` ranks asks for while it makes its optimizer and steps once.
fn most_in_a_step(n: usize, stage: ZeroStage) -> usize {
    let asked = world(n, |member| {
        let (mut weights, mut grads) = (noises(1, len()), grads(0, member.rank().0));
        let before = asked_bytes();
        let mut optimizer = data_parallel(&member, config(stage));
        let report = optimizer.step(&mut weights, &mut grads, lr(0));
        assert!(report.is_ok_and(|report| report.skipped.is_none()));
        asked_bytes() - before
    });
    asked.into_iter().max().expect("there are ranks")
}

/// Most of these ranks own nothing: the largest tensor has two norm blocks.
#[test]
fn more_ranks_than_norm_blocks_take_no_more_memory_each() {
    for stage in [ZeroStage::Replicated, ZeroStage::OptimizerState] {
        let (few, many) = (most_in_a_step(8, stage), most_in_a_step(64, stage));
        assert!(many < 2 * few, "{few} bytes at 8 ranks, {many} at 64");
    }
}
