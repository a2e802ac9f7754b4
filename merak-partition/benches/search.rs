//! Speed of the searches for stages: `cargo bench -p merak-partition`.

use divan::{Bencher, black_box};
use merak_partition::{OneFOneB, SegmentCosts, autopipe};

fn main() {
    divan::main();
}

/// Blocks of uneven cost on 64 stages with 128 microbatches.
#[divan::bench(args = [130, 1000])]
fn autopipe_on_64_stages(bencher: Bencher<'_, '_>, blocks: usize) {
    let forward: Vec<_> = (0..blocks).map(|i| (i * 7919 % 100 + 50) as f64).collect();
    let backward = forward.iter().map(|f| 2.0 * f).collect();
    let costs = SegmentCosts::new(forward, backward).expect("the costs are positive");
    let step = OneFOneB {
        num_microbatches: 128,
        comm_cost: 1.0,
    };
    bencher.bench_local(|| autopipe(black_box(&costs), 64, &step));
}
