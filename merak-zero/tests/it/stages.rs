//! All stages and one serial rank give the same bits.

use crate::fixture::{
    STAGES, config, data_parallel, grads, held, len, lr, noises, params, reduced, serial, step,
    whole,
};
use merak_mpu::{
    Call, ReduceOp,
    testing::{Moment, Record, world},
};
use merak_zero::{ExchangeBytes, NORM_BLOCK, ZeroConfig, ZeroOptimizer, ZeroStage};

const STEPS: u64 = 3;

/// Steps a data-parallel world; the weights of every rank.
fn train(num_ranks: usize, config: &ZeroConfig) -> Vec<Vec<f32>> {
    world(num_ranks, |member| {
        let mut optimizer = data_parallel(&member, config.clone());
        let mut weights = held(&optimizer, &noises(1, len()));
        for t in 0..STEPS {
            let grads = grads(t, member.rank().0);
            let report = step(&mut optimizer, &mut weights, grads, lr(t));
            assert!(report.is_ok_and(|r| r.skipped.is_none() && r.clip_factor < 1.0));
        }
        assert_eq!(optimizer.progress().steps, STEPS);
        whole(&optimizer, weights)
    })
}

#[test]
fn every_rank_of_all_stages_has_the_bits_of_a_serial_run() {
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

/// The elements that each of two ranks brings to every collective of a kind, in a step of stage 1
/// with these most elements of a reduction and of a gathering.
fn brought(reduce: usize, gather: usize, call: Call) -> Vec<Vec<usize>> {
    let config = ZeroConfig {
        reduce_bucket_size: reduce,
        gather_bucket_size: gather,
        ..config(ZeroStage::OptimizerState)
    };
    world(2, |member| {
        let record = Record::default();
        let mut optimizer = data_parallel(&record.of(&member), config.clone());
        let mut weights = noises(1, len());
        let grads = grads(0, member.rank().0);
        step(&mut optimizer, &mut weights, grads, lr(0)).expect("no rank fails");
        let events = record.take().into_iter();
        let started = events.filter(|event| event.moment == Moment::Started);
        let of_kind = started.filter(|event| event.call == call);
        of_kind
            .map(|event| event.bytes / size_of::<f32>())
            .collect()
    })
}

#[test]
fn every_collective_keeps_to_the_size_of_its_buckets() {
    let reduction = Call::ReduceScatterInPlace(ReduceOp::Sum);
    let reductions = [1, 40_000, 1 << 20].map(|size| {
        let brought = brought(size, 1 << 20, reduction);
        for elements in &brought {
            // A norm block is not cut.
            assert!(elements.iter().all(|&n| n <= size.max(NORM_BLOCK)));
            assert_eq!(elements.iter().sum::<usize>(), len());
        }
        brought[0].len()
    });
    assert!(reductions.is_sorted_by(|a, b| a > b), "{reductions:?}");
    let gatherings = [3_001, 9_999, 1 << 20].map(|size| {
        let brought = brought(1 << 20, size, Call::AllGather);
        let elements = brought.concat();
        assert!(elements.iter().all(|&own| own <= size / 2));
        assert_eq!(elements.iter().sum::<usize>(), len());
        brought[0].len()
    });
    assert!(gatherings.is_sorted_by(|a, b| a > b), "{gatherings:?}");
}

#[test]
fn prescaling_by_powers_of_two_changes_no_bit_in_any_stage_and_by_three_only_rounding() {
    for stage in STAGES {
        let average = |prescale_gradients: bool, gradient_predivide_factor: f64| {
            let config = ZeroConfig {
                prescale_gradients,
                gradient_predivide_factor,
                ..config(stage)
            };
            // A rank that owns nothing may keep nothing.
            let by_rank = world(4, |member| {
                let mut optimizer = data_parallel(&member, config.clone());
                reduced(&mut optimizer, grads(0, member.rank().0)).unwrap()
            });
            by_rank.concat()
        };
        let plain = average(false, 1.0);
        // A factor of 1 stands for the number of ranks, 4. Below 1 gradients grow before the sum.
        for factor in [1.0, 2.0, 0.5, 0.125, 16.0] {
            assert!(average(true, factor) == plain, "{stage:?} by {factor}");
        }
        for factor in [3.0, 0.3] {
            let other = average(true, factor);
            assert!(other != plain, "{factor} has an effect on rounding");
            for (x, e) in other.iter().zip(&plain) {
                assert!((x - e).abs() < 4.0 * f32::EPSILON, "{stage:?} by {factor}");
            }
        }
    }
}

#[test]
fn a_run_that_divides_gradients_before_their_sum_has_the_weights_of_one_that_does_not() {
    let expected = train(2, &config(ZeroStage::Replicated));
    for (stage, factor) in STAGES.into_iter().zip([0.5, 4.0, 0.25, 1.0]) {
        let config = ZeroConfig {
            prescale_gradients: true,
            gradient_predivide_factor: factor,
            ..config(stage)
        };
        assert!(train(2, &config) == expected, "{stage:?} by {factor}");
    }
}

#[test]
fn a_rank_keeps_state_for_its_parts_alone() {
    let held = world(4, |member| {
        STAGES.map(|stage| data_parallel(&member, config(stage)).state().num_owned())
    });
    assert!(held.iter().all(|[all, ..]| *all == len()));
    for stage in [1, 2, 3] {
        let parts = held.iter().map(|held| held[stage]);
        assert_eq!(parts.sum::<usize>(), len());
    }
}

#[test]
fn copies_of_gradients_on_their_way_take_no_more_than_foretold() {
    for stage in STAGES {
        for bucket in [1, 25_000, 1 << 30] {
            let config = ZeroConfig {
                reduce_bucket_size: bucket,
                ..config(stage)
            };
            let foretold = config.exchange_bytes(params(), 2).unwrap();
            let held = world(2, |member| {
                let mut optimizer = data_parallel(&member, config.clone());
                let mut weights = held(&optimizer, &noises(1, len()));
                let grads = grads(0, member.rank().0);
                step(&mut optimizer, &mut weights, grads, lr(0)).unwrap();
                optimizer.most_summed_bytes()
            });
            let most = held[0];
            assert!(
                0 < most && most <= foretold.sums,
                "{stage:?}: {most} of {foretold:?}"
            );
            let gathers = [ZeroStage::OptimizerState, ZeroStage::Gradients].contains(&stage);
            assert_eq!(foretold.gathers > 0, gathers, "{stage:?}");
            if bucket > len() {
                let weights = if stage == ZeroStage::Parameters {
                    4 * len()
                } else {
                    0
                };
                assert_eq!(foretold.weight_bucket, weights, "{stage:?}");
                let masters = ZeroConfig {
                    has_masters: true,
                    ..config.clone()
                };
                let foretold = masters.exchange_bytes(params(), 2).unwrap();
                assert_eq!(2 * foretold.weight_bucket, weights, "{stage:?}");
            }
            assert_eq!(
                config.exchange_bytes(params(), 1).unwrap(),
                ExchangeBytes::default()
            );
        }
    }
}

#[test]
fn buckets_started_during_the_backward_give_the_same_averages() {
    for stage in [ZeroStage::Replicated, ZeroStage::OptimizerState] {
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

#[test]
fn gradients_of_several_microbatches_add_up_to_what_a_rank_owns() {
    let mean = world(2, |member| {
        let mut apart = data_parallel(&member, config(ZeroStage::Gradients));
        let mut whole = data_parallel(&member, config(ZeroStage::Replicated));
        let microbatches = [0, 1, 2].map(|m| grads(m, member.rank().0));
        let mut kept = vec![0.0_f32; apart.num_gradients()];
        let buckets = apart.layout().buckets().to_vec();
        assert!(kept.len() < len() && buckets.len() > 2);
        for all in &microbatches {
            for (number, bucket) in buckets.iter().enumerate().rev() {
                let own = Box::new(all[bucket.flat.clone()].to_vec());
                apart.add_bucket(number, own, &mut kept).unwrap();
            }
        }
        apart.reduce_gradients(&mut kept).unwrap();
        let sum = |i: usize| microbatches.iter().map(|all| all[i]).sum();
        let sum = reduced(&mut whole, (0..len()).map(sum).collect()).unwrap();
        let norms = [apart.grad_norm(&kept), whole.grad_norm(&sum)].map(|norm| norm.unwrap().norm);
        assert!((norms[0] - norms[1]).abs() < 1e-6 * norms[1]);
        let owned: Vec<_> = owned_ranges(&apart).into_iter().flatten().collect();
        assert_eq!(owned.len(), kept.len());
        owned.into_iter().zip(kept).for_each(|(i, kept)| {
            assert!((sum[i] - kept).abs() < 1e-6, "{i}");
        });
    });
    assert_eq!(mean.len(), 2);
}

#[test]
fn a_bucket_has_all_of_each_parameter_where_gradients_are_divided() {
    world(2, |member| {
        let optimizer = data_parallel(&member, config(ZeroStage::Gradients));
        let layout = optimizer.layout();
        let starts: Vec<_> = (0..layout.params().len())
            .map(|param| layout.range(param).start)
            .collect();
        let mut buckets = layout.buckets().iter();
        assert!(buckets.all(|bucket| starts.contains(&bucket.flat.start)));
    });
}

fn owned_ranges(optimizer: &ZeroOptimizer) -> Vec<std::ops::Range<usize>> {
    let state = optimizer.state();
    state
        .blocks()
        .iter()
        .map(|block| block.flat.clone())
        .collect()
}

#[test]
fn parameters_of_other_ranks_arrive_bucket_by_bucket() {
    for stage in [ZeroStage::OptimizerState, ZeroStage::Gradients] {
        let config = ZeroConfig {
            gather_bucket_size: 9_999,
            ..config(stage)
        };
        world(2, |member| {
            let mut at_once = data_parallel(&member, config.clone());
            let mut later = data_parallel(&member, config.clone());
            let before = noises(1, len());
            let (mut expected, mut found) = (before.clone(), before.clone());
            let grads = grads(0, member.rank().0);
            let mut reduced_grads = reduced(&mut at_once, grads.clone()).unwrap();
            at_once
                .step(&mut expected, &mut reduced_grads, lr(0))
                .unwrap();
            let mut reduced_grads = reduced(&mut later, grads).unwrap();
            let started = later.start_step(&mut found, &mut reduced_grads, lr(0));
            let (_, mut arrivals) = started.unwrap();
            for (number, bucket) in later.layout().buckets().iter().enumerate() {
                assert_eq!(arrivals.first_missing(), Some(number));
                let of_other = later.layout().part(bucket, 1 - member.rank().0).flat;
                assert!(found[of_other.clone()] == before[of_other], "{number}");
                arrivals.wait_through(number, &mut found).unwrap();
                assert!(found[bucket.flat.clone()] == expected[bucket.flat.clone()]);
            }
            assert_eq!(arrivals.first_missing(), None);
        });
    }
}
