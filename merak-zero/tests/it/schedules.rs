//! Learning-rate factors against Hugging Face's numbers.
#![expect(clippy::float_cmp, reason = "these values are exact")]

use merak_zero::{DecayType, LrSchedule, LrSchedulerKwargs, LrSchedulerType};

const GOLDEN: &str = include_str!("../goldens/hf_schedules.txt");

/// The schedule that a golden case was made with.
fn golden_schedule(case: &str) -> LrSchedule {
    use LrSchedulerType as T;
    let none = LrSchedulerKwargs::default();
    let cycles = |n: f64| LrSchedulerKwargs {
        num_cycles: Some(n),
        ..none
    };
    let wsd = |steps: u64, decay: DecayType| LrSchedulerKwargs {
        num_decay_steps: Some(steps),
        decay_type: Some(decay),
        ..none
    };
    let least = |ratio: f64, decay: DecayType| LrSchedulerKwargs {
        min_lr_ratio: Some(ratio),
        ..wsd(8, decay)
    };
    let (kind, kwargs) = match case {
        "linear" => (T::Linear, none),
        "cosine" => (T::Cosine, none),
        "cosine_1.5" => (T::Cosine, cycles(1.5)),
        "cosine_with_restarts_3" => (T::CosineWithRestarts, cycles(3.0)),
        "constant" => (T::Constant, none),
        "constant_with_warmup" => (T::ConstantWithWarmup, none),
        "polynomial" => (T::Polynomial, none),
        "polynomial_2_1e-5" => {
            let (power, lr_end) = (Some(2.0), Some(1e-5));
            (
                T::Polynomial,
                LrSchedulerKwargs {
                    power,
                    lr_end,
                    ..none
                },
            )
        }
        "inverse_sqrt" => (T::InverseSqrt, none),
        "inverse_sqrt_16" => (
            T::InverseSqrt,
            LrSchedulerKwargs {
                timescale: Some(16),
                ..none
            },
        ),
        "wsd" => (T::Wsd, none),
        "wsd_linear_8" => (T::Wsd, wsd(8, DecayType::Linear)),
        "wsd_sqrt_8" => (T::Wsd, wsd(8, DecayType::OneMinusSqrt)),
        "wsd_least_0.1" => (T::Wsd, least(0.1, DecayType::Cosine)),
        "wsd_linear_least_0.25" => (T::Wsd, least(0.25, DecayType::Linear)),
        other => unreachable!("{other}"),
    };
    LrSchedule::new(kind, &kwargs, 0.001, 4, 20).expect("legal arguments")
}

#[test]
fn every_schedule_gives_the_factors_of_hugging_face() {
    let mut lines = 0;
    for line in GOLDEN.lines() {
        let [case, t, factor] = line.split(' ').collect::<Vec<_>>().try_into().unwrap();
        let found = golden_schedule(case).factor(t.parse().unwrap());
        let expected: f64 = factor.parse().unwrap();
        assert!(
            (found - expected).abs() < 1e-12,
            "{case} at {t}: {found} for {expected}"
        );
        lines += 1;
    }
    assert_eq!(lines, 15 * 23);
}

#[test]
fn wsd_warms_up_from_the_least_ratio_and_decays_to_it_over_the_last_tenth() {
    let kwargs = LrSchedulerKwargs {
        min_lr_ratio: Some(0.1),
        decay_type: Some(DecayType::Linear),
        ..LrSchedulerKwargs::default()
    };
    let schedule = LrSchedule::new(LrSchedulerType::Wsd, &kwargs, 1.0, 10, 200).unwrap();
    let at = [0, 5, 10, 180, 190, 200, 300].map(|t| schedule.factor(t));
    assert_eq!(at, [0.1, 0.55, 1.0, 1.0, 0.55, 0.1, 0.1]);
}

#[test]
fn an_inverse_square_root_without_warmup_has_a_scale_of_ten_thousand() {
    let kwargs = LrSchedulerKwargs::default();
    let schedule = LrSchedule::new(LrSchedulerType::InverseSqrt, &kwargs, 1.0, 0, 100).unwrap();
    assert_eq!((schedule.factor(0), schedule.factor(30_000)), (1.0, 0.5));
}

#[test]
fn degenerate_lengths_give_finite_factors() {
    for kind in LrSchedulerType::ALL {
        for (warmup, total) in [(0, 0), (0, 1), (5, 5), (9, 5)] {
            let kwargs = LrSchedulerKwargs::default();
            let schedule = LrSchedule::new(kind, &kwargs, 1.0, warmup, total).unwrap();
            for t in 0..12 {
                let factor = schedule.factor(t);
                assert!(
                    (0.0..=1.0).contains(&factor),
                    "{kind:?} {warmup}/{total} at {t}: {factor}"
                );
            }
        }
    }
}

#[test]
fn a_keyword_argument_of_another_schedule_is_refused() {
    let kwargs = LrSchedulerKwargs {
        power: Some(2.0),
        ..LrSchedulerKwargs::default()
    };
    let message = |kind| {
        LrSchedule::new(kind, &kwargs, 1.0, 0, 10)
            .unwrap_err()
            .to_string()
    };
    assert_eq!(
        message(LrSchedulerType::Cosine),
        "the cosine schedule takes `num_cycles`, found `power`"
    );
    assert_eq!(
        message(LrSchedulerType::Linear),
        "the linear schedule takes none, found `power`"
    );
}

#[test]
fn numbers_out_of_range_are_refused() {
    let none = LrSchedulerKwargs::default();
    let kwargs = LrSchedulerKwargs {
        num_cycles: Some(1.5),
        ..none
    };
    let error = LrSchedule::new(LrSchedulerType::CosineWithRestarts, &kwargs, 1.0, 0, 10);
    assert_eq!(
        error.unwrap_err().to_string(),
        "`num_cycles` is 1.5, expected a number of more than 0, under cosine_with_restarts a whole one"
    );
    let error = LrSchedule::new(LrSchedulerType::Polynomial, &none, 1e-8, 0, 10);
    assert_eq!(
        error.unwrap_err().to_string(),
        "`lr_end` is 1e-7, expected a number of at least 0 and below the learning rate"
    );
    let error = LrSchedule::new(LrSchedulerType::Linear, &none, f64::NAN, 0, 10);
    assert!(error.is_err());
}
