//! Stage 1, stage 0 and one serial rank give the same bits.

use crate::fixture::{config, data_parallel, grads, len, lr, noises, serial};
use merak_mpu::testing::world;
use merak_zero::{ZeroConfig, ZeroOptimizer, ZeroStage};

const STAGES: [ZeroStage; 2] = [ZeroStage::Replicated, ZeroStage::OptimizerState];
const STEPS: u64 = 3;

/// Steps a data-parallel world; the weights of every rank.
fn train(num_ranks: usize, config: &ZeroConfig) -> Vec<Vec<f32>> {
    world(num_ranks, |member| {
        let mut optimizer = data_parallel(&member, config.clone());
        let mut weights = noises(1, len());
        for t in 0..STEPS {
            let mut grads = grads(t, member.rank().0);
            let report = optimizer.step(&mut weights, &mut grads, lr(t));
            assert!(report.is_ok_and(|r| r.skipped.is_none() && r.clip_factor < 1.0));
        }
        assert_eq!(optimizer.progress().steps, STEPS);
        weights
    })
}

#[test]
fn every_rank_of_both_stages_has_the_bits_of_a_serial_run() {
    for num_ranks in [1, 2, 4] {
        let expected = serial(num_ranks, STEPS, &config(ZeroStage::Replicated));
        for stage in STAGES {
            for weights in train(num_ranks, &config(stage)) {
                assert!(weights == expected, "{num_ranks} ranks, {stage:?}");
            }
        }
    }
}

#[test]
fn bucket_sizes_and_threads_change_no_bit() {
    let expected = serial(4, STEPS, &config(ZeroStage::Replicated));
    for (reduce, gather, threads) in [(1, 1 << 20, 1), (1 << 20, 9_999, 1), (40_000, 40_000, 3)] {
        for stage in STAGES {
            let config = ZeroConfig {
                reduce_bucket_size: reduce,
                gather_bucket_size: gather,
                threads,
                ..config(stage)
            };
            assert!(train(4, &config)[3] == expected, "{config:?}");
        }
    }
}

#[test]
fn prescaling_by_powers_of_two_changes_no_bit_of_the_average_and_by_three_only_rounding() {
    let average = |prescale_gradients: bool, gradient_predivide_factor: f64| {
        let config = ZeroConfig {
            prescale_gradients,
            gradient_predivide_factor,
            ..config(ZeroStage::Replicated)
        };
        let mut by_rank = world(4, |member| {
            let mut grads = grads(0, member.rank().0);
            let mut optimizer = data_parallel(&member, config.clone());
            optimizer.reduce_gradients(&mut grads).unwrap();
            grads
        });
        by_rank.swap_remove(0)
    };
    let plain = average(false, 1.0);
    // A factor of 1 stands for the number of ranks, 4.
    assert!(average(true, 1.0) == plain);
    assert!(average(true, 2.0) == plain);
    let by_three = average(true, 3.0);
    assert!(by_three != plain, "the factor has an effect on rounding");
    for (x, e) in by_three.iter().zip(&plain) {
        assert!((x - e).abs() < 4.0 * f32::EPSILON);
    }
}

#[test]
fn a_rank_keeps_state_for_its_parts_alone() {
    let held = world(4, |member| {
        STAGES.map(|stage| data_parallel(&member, config(stage)).state().num_owned())
    });
    assert!(held.iter().all(|[all, _]| *all == len()));
    assert_eq!(held.iter().map(|[_, part]| part).sum::<usize>(), len());
}

#[test]
fn buckets_started_during_the_backward_give_the_same_averages() {
    for stage in STAGES {
        let equal = world(2, |member| {
            let mut early = data_parallel(&member, config(stage));
            let mut late = data_parallel(&member, config(stage));
            let mut expected = grads(0, member.rank().0);
            let mut found = expected.clone();
            late.reduce_gradients(&mut expected).unwrap();
            let num_buckets = early.layout().buckets().len();
            assert!(num_buckets > 2, "the test needs several buckets");
            early.start_bucket(num_buckets - 1, &mut found).unwrap();
            let own = owned_ranges(&early);
            early.start_bucket(0, &mut found).unwrap();
            early.reduce_gradients(&mut found).unwrap();
            own.into_iter()
                .all(|range| found[range.clone()] == expected[range])
        });
        assert_eq!(equal, [true, true]);
    }
}

fn owned_ranges(optimizer: &ZeroOptimizer) -> Vec<std::ops::Range<usize>> {
    let state = optimizer.state();
    state
        .blocks()
        .iter()
        .map(|block| block.flat.clone())
        .collect()
}
