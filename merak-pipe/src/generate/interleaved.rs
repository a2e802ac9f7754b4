//! One forward, one backward, over several chunks of the model per rank.

use super::{Stage, only_microbatches};
use crate::{Action, Schedule, Size};

/// `interleaved_1f1b`, from [Megatron-LM](https://arxiv.org/abs/2104.04473), section 2.3: rank `r`
/// runs the stages `r`, `r + P`, `r + 2P`, .., which divides the bubble of `1f1b` by the number of
/// chunks and multiplies the messages by it.
///
/// Microbatches go round by round, `P` in each: a rank runs a round through its first chunk, then
/// through its second, and so on. Where `P` does not divide `M`, the last round is smaller: the
/// order is that of full rounds without the missing microbatches.
pub(crate) fn interleaved(size: Size) -> Schedule {
    let rounds = size.microbatches.div_ceil(size.ranks);
    let actions = (0..size.ranks).map(|rank| rank_order(size, rank, rounds));
    let actions = only_microbatches(actions.collect(), size.microbatches);
    Schedule::new("interleaved_1f1b", size, actions)
}

/// The order of a rank when all rounds are full.
fn rank_order(size: Size, rank: usize, rounds: usize) -> Vec<Action> {
    let Size { ranks, chunks, .. } = size;
    let total = rounds * ranks * chunks;
    let turns = |chunk_of: fn(usize, usize) -> usize| {
        (0..total).map(move |k| {
            let (round, within) = (k / (ranks * chunks), k % (ranks * chunks));
            let chunk = chunk_of(within / ranks, chunks);
            (Stage(chunk * ranks + rank), round * ranks + within % ranks)
        })
    };
    let mut forwards = turns(|chunk, _| chunk).map(|(stage, m)| stage.forward(m));
    let mut backwards =
        turns(|chunk, chunks| chunks - 1 - chunk).map(|(stage, m)| stage.backward(m));
    // A forward more for each hop there and back, besides the rounds of the earlier chunks.
    let warmup = ((chunks - 1) * ranks + 2 * (ranks - 1 - rank)).min(total);
    let mut actions = Vec::with_capacity(2 * total);
    actions.extend(forwards.by_ref().take(warmup));
    for forward in forwards {
        actions.push(forward);
        actions.extend(backwards.next());
    }
    actions.extend(backwards);
    actions
}
