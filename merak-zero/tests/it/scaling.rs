//! The loss scale: unscaling, overflows, and the same scale on every rank.
#![expect(clippy::float_cmp, reason = "these values are exact")]

use crate::fixture::{STAGES, config, data_parallel, grads, group, held, len, lr, noises, step};
use merak_mpu::{Member, testing::world};
use merak_zero::{
    DynamicScaling, GlobalParams, LossScaling, OptimizerKind, ParamSpec, ZeroConfig, ZeroGroups,
    ZeroOptimizer, ZeroStage,
};

/// A dynamic scale from 2^power on, which doubles after two clean steps.
fn dynamic(initial_power: u32, hysteresis: u64, min_scale: u64) -> LossScaling {
    LossScaling::Dynamic(DynamicScaling {
        initial_power,
        window: 2,
        hysteresis,
        min_scale,
    })
}

/// Weights, norm and clip factor after each of three steps.
fn trained(member: &Member, config: &ZeroConfig) -> Vec<(Vec<f32>, f64, f64)> {
    let mut optimizer = data_parallel(member, config.clone());
    let mut weights = noises(1, len());
    let step = |t| {
        let scale = optimizer.loss_scale() as f32;
        let mut grads: Vec<f32> = grads(t, member.rank().0)
            .iter()
            .map(|g| g * scale)
            .collect();
        let report = optimizer
            .step(&mut weights, &mut grads, lr(t))
            .expect("no rank fails");
        assert_eq!(report.skipped, None);
        (weights.clone(), report.grad_norm, report.clip_factor)
    };
    (0..3).map(step).collect()
}

#[test]
fn a_scale_that_is_a_power_of_two_changes_no_bit_under_any_rule() {
    use OptimizerKind::{Adafactor, Adam, AdamW, Lamb, Lion, Muon, Sgd};
    for optim in [AdamW, Adam, Sgd, Adafactor, Lamb, Lion, Muon] {
        for stage in [ZeroStage::Replicated, ZeroStage::OptimizerState] {
            let mut plain = config(stage);
            plain.optimizer.optim = optim;
            for scaling in [LossScaling::Fixed(2_f64.powi(20)), dynamic(16, 2, 1)] {
                let scaled = ZeroConfig {
                    loss_scaling: Some(scaling),
                    ..plain.clone()
                };
                world(2, |member| {
                    let (plain, scaled) = (trained(&member, &plain), trained(&member, &scaled));
                    assert!(plain[0].2 < 1.0, "gradients are clipped");
                    assert!(plain == scaled, "{optim} {stage:?} {scaling:?}");
                });
            }
        }
    }
}

/// An optimizer of one of two pipeline stages, each on two replicas; both hold the last parameter,
/// which counts on the first.
fn of_stage(member: &Member, stage: ZeroStage, scaling: LossScaling) -> ZeroOptimizer {
    let rank = member.rank().0;
    let (replica, place) = (rank % 2, rank / 2);
    let groups = ZeroGroups {
        data_sequence: group(member, "data", &[2 * place, 2 * place + 1]),
        model: group(member, "model", &[replica, 2 + replica]),
    };
    let specs = vec![
        ParamSpec::new(["first", "second"][place], &[8], place),
        ParamSpec::new("both", &[8], 2).with_norm(place == 0),
    ];
    let model = GlobalParams::new([("first", 8), ("second", 8), ("both", 8)]);
    let config = ZeroConfig {
        stage,
        loss_scaling: Some(scaling),
        ..ZeroConfig::default()
    };
    ZeroOptimizer::new(specs, model, config, groups).expect("a legal configuration")
}

#[test]
fn an_overflow_on_one_rank_skips_the_step_on_all_and_all_scales_stay_the_same() {
    // In which steps which rank has a gradient that is not finite, and in which parameter.
    let bad = |step: usize, rank: usize| match (step, rank) {
        (1, 3) => Some((0, f32::INFINITY)),
        (2, 0) => Some((7, f32::NAN)),
        (6, 2) => Some((15, f32::NEG_INFINITY)),
        _ => None,
    };
    let expected = [
        (16.0, None),
        (16.0, Some("second")),
        (16.0, Some("first")),
        (8.0, None),
        (8.0, None),
        (16.0, None),
        // It does not count in the norm there, and is found nevertheless.
        (16.0, Some("both")),
        (16.0, None),
    ];
    for stage in STAGES {
        let ranks = world(4, |member| {
            let mut optimizer = of_stage(&member, stage, dynamic(4, 2, 1));
            let mut weights = held(&optimizer, &[1.0; 16]);
            let take = |number| {
                let before = weights.clone();
                let mut grads = vec![optimizer.loss_scale() as f32; 16];
                if let Some((place, value)) = bad(number, member.rank().0) {
                    grads[place] = value;
                }
                let report = step(&mut optimizer, &mut weights, grads, 0.1).unwrap();
                assert_eq!(report.skipped.is_some(), weights == before);
                (report.loss_scale.unwrap(), report.skipped)
            };
            let steps: Vec<_> = (0..expected.len()).map(take).collect();
            assert_eq!(optimizer.progress().steps, 5);
            (steps, optimizer.scaler_state())
        });
        for (found, state) in &ranks {
            let found: Vec<_> = found.iter().map(|(s, p)| (*s, p.as_deref())).collect();
            assert_eq!(found, expected);
            assert_eq!(*state, ranks[0].1);
        }
    }
}

#[test]
fn the_norm_and_the_clip_factor_are_those_of_unscaled_gradients() {
    world(1, |member| {
        let config = ZeroConfig {
            loss_scaling: Some(LossScaling::Fixed(1000.0)),
            ..config(ZeroStage::Replicated)
        };
        let plain = data_parallel(&member, crate::fixture::config(ZeroStage::Replicated));
        let scaled = data_parallel(&member, config);
        let small = grads(0, 0);
        let large: Vec<f32> = small.iter().map(|g| g * 1000.0).collect();
        let (plain, scaled) = (plain.grad_norm(&small), scaled.grad_norm(&large));
        let (plain, scaled) = (plain.unwrap().norm, scaled.unwrap().norm);
        // Each product was rounded to f32.
        assert!(
            (plain - scaled).abs() < 1e-7 * plain,
            "{scaled} for {plain}"
        );
    });
}

#[test]
fn skipped_steps_count_against_a_run_only_where_the_scale_cannot_fall() {
    let counts = |loss_scaling| {
        let ranks = world(1, |member| {
            let config = ZeroConfig {
                loss_scaling,
                ..config(ZeroStage::Replicated)
            };
            let mut optimizer = data_parallel(&member, config);
            let mut weights = noises(1, len());
            let mut skip = || {
                let mut grads = vec![f32::NAN; len()];
                optimizer.step(&mut weights, &mut grads, 0.1).unwrap();
                optimizer.progress().skipped_at_floor
            };
            let counts = [(); 5].map(|()| skip());
            assert_eq!(optimizer.progress().skipped_in_a_row, 5);
            let mut good = vec![1.0_f32; len()];
            optimizer.step(&mut weights, &mut good, 0.1).unwrap();
            assert_eq!(optimizer.progress().skipped_at_floor, 0);
            counts
        });
        ranks[0]
    };
    assert_eq!(counts(None), [1, 2, 3, 4, 5]);
    assert_eq!(counts(Some(LossScaling::Fixed(2.0))), [1, 2, 3, 4, 5]);
    // From 16 to 4 in three overflows, the first of which takes the hysteresis.
    assert_eq!(counts(Some(dynamic(4, 2, 4))), [0, 0, 0, 1, 2]);
}

#[test]
fn a_scale_of_a_checkpoint_is_gone_on_with() {
    world(1, |member| {
        let config = ZeroConfig {
            loss_scaling: Some(dynamic(4, 1, 1)),
            ..config(ZeroStage::Replicated)
        };
        let mut weights = noises(1, len());
        let mut first = data_parallel(&member, config.clone());
        first
            .step(&mut weights, &mut vec![f32::NAN; len()], 0.1)
            .unwrap();
        first
            .step(&mut weights, &mut vec![1.0_f32; len()], 0.1)
            .unwrap();
        let mut second = data_parallel(&member, config.clone());
        second.restore_scaler(first.scaler_state().unwrap());
        let report = second
            .step(&mut weights, &mut vec![1.0_f32; len()], 0.1)
            .unwrap();
        assert_eq!(report.loss_scale, Some(8.0));
        assert_eq!(second.loss_scale(), 16.0, "the second clean step in a row");
        let mut plain = data_parallel(&member, crate::fixture::config(ZeroStage::Replicated));
        plain.restore_scaler(first.scaler_state().unwrap());
        assert_eq!((plain.loss_scale(), plain.scaler_state()), (1.0, None));
    });
}
