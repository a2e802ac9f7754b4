//! Update rules against PyTorch's numbers, an f64 reference and themselves in pieces.

use crate::fixture::noises;
use merak_zero::{
    AdamStep, OptimizerConfig, OptimizerKind, SgdStep, adam_update, sgd_update, sum_of_squares,
};
use proptest::prelude::*;

const GOLDEN: &str = include_str!("../goldens/torch_optim.txt");

/// The configuration that a golden case was made with.
fn golden_config(case: &str) -> OptimizerConfig {
    OptimizerConfig {
        optim: match case {
            "adamw_torch" => OptimizerKind::AdamW,
            "adam" => OptimizerKind::Adam,
            _ => OptimizerKind::Sgd,
        },
        weight_decay: 0.1,
        adam_beta1: 0.9,
        adam_beta2: 0.95,
        adam_epsilon: 1e-6,
        sgd_momentum: if case == "sgd" { 0.0 } else { 0.9 },
        nesterov: case == "sgd_nesterov",
        ..OptimizerConfig::default()
    }
}

#[test]
fn six_steps_of_every_rule_give_the_numbers_of_pytorch() {
    let cases = ["adamw_torch", "adam", "sgd", "sgd_momentum", "sgd_nesterov"];
    for case in cases {
        let config = golden_config(case);
        config.validate().unwrap();
        let mut param = vec![1.0_f32, -2.0, 0.5, 0.125];
        let (mut first, mut second) = (vec![0.0_f32; 4], vec![0.0_f32; 4]);
        let lines: Vec<&str> = GOLDEN
            .lines()
            .filter(|line| line.split(' ').next() == Some(case))
            .collect();
        assert_eq!(lines.len(), 6, "{case}");
        for (t, line) in lines.into_iter().enumerate() {
            let sign = if t % 2 == 0 { 1.0 } else { -0.75 };
            let grad: Vec<f32> = [0.5, -1.25, 0.03125, 3.0]
                .map(|g: f32| g * (t + 1) as f32 / 4.0 * sign)
                .to_vec();
            if config.optim == OptimizerKind::Sgd {
                let momentum = if case == "sgd" {
                    &mut [][..]
                } else {
                    &mut first
                };
                let step = SgdStep::new(&config, 0.01, 1.0);
                sgd_update(&mut param, &grad, momentum, &step);
            } else {
                let step = AdamStep::new(&config, 0.01, t as u64 + 1, 1.0);
                adam_update(&mut param, &grad, &mut first, &mut second, &step);
            }
            let expected = line.split(' ').skip(2).map(|x| x.parse::<f32>().unwrap());
            for (p, e) in param.iter().zip(expected) {
                // A few roundings per step may differ.
                assert!(
                    (p - e).abs() <= 5e-7 * e.abs(),
                    "{case} step {t}: {p} for {e}"
                );
            }
        }
    }
}

/// AdamW as its paper writes it, in f64.
fn reference(param: &mut f64, grad: f64, m: &mut f64, v: &mut f64, t: f64, decay: f64) {
    let (lr, beta1, beta2, epsilon) = (0.003, 0.9, 0.999, 1e-8);
    *m = beta1 * *m + (1.0 - beta1) * grad;
    *v = beta2 * *v + (1.0 - beta2) * grad * grad;
    let (m_hat, v_hat) = (
        *m / (1.0 - f64::powf(beta1, t)),
        *v / (1.0 - f64::powf(beta2, t)),
    );
    *param -= lr * (m_hat / (v_hat.sqrt() + epsilon) + decay * *param);
}

proptest! {
    #[test]
    fn adamw_follows_the_paper(start in -3.0..3.0_f32, seed in 0..u64::MAX / 2, decays: bool) {
        let config = OptimizerConfig { weight_decay: 0.1, ..OptimizerConfig::default() };
        let (mut p, mut m, mut v) = ([start], [0.0], [0.0]);
        let (mut p64, mut m64, mut v64) = (f64::from(start), 0.0, 0.0);
        let decay = if decays { 0.1 } else { 0.0 };
        for (t, &g) in noises(seed >> 32, 20).iter().enumerate() {
            let step = AdamStep::new(&config, 0.003, t as u64 + 1, 1.0);
            let step = if decays { step } else { step.without_decay() };
            adam_update(&mut p, &[g], &mut m, &mut v, &step);
            reference(&mut p64, f64::from(g), &mut m64, &mut v64, (t + 1) as f64, decay);
        }
        // Twenty steps of at most 0.003 each, rounded in f32.
        prop_assert!((f64::from(p[0]) - p64).abs() < 3e-6, "{} for {}", p[0], p64);
    }

    #[test]
    fn an_update_in_pieces_gives_the_bits_of_the_whole(cut in 0..1000_usize, steps in 1..4_u64) {
        let config = OptimizerConfig { weight_decay: 0.1, ..OptimizerConfig::default() };
        let mut whole = [noises(1, 1000), vec![0.0; 1000], vec![0.0; 1000]];
        let mut pieces = whole.clone();
        for t in 0..steps {
            let grad = noises(2 + t, 1000);
            let step = AdamStep::new(&config, 0.01, t + 1, 0.7);
            let [p, m, v] = &mut whole;
            adam_update(p, &grad, m, v, &step);
            let [p, m, v] = &mut pieces;
            for range in [0..cut, cut..1000] {
                adam_update(
                    &mut p[range.clone()],
                    &grad[range.clone()],
                    &mut m[range.clone()],
                    &mut v[range],
                    &step,
                );
            }
        }
        prop_assert_eq!(whole, pieces);
    }

    #[test]
    fn a_sum_of_squares_is_that_of_a_plain_loop(len in 0..3000_usize, seed in 0..1000_u64) {
        let values = noises(seed, len);
        let plain: f64 = values.iter().map(|&x| f64::from(x).powi(2)).sum();
        prop_assert!((sum_of_squares(&values) - plain).abs() <= 1e-12 * plain);
    }
}

#[test]
fn a_gradient_scale_acts_as_a_scaled_gradient() {
    let config = OptimizerConfig::default();
    let grad = noises(3, 50);
    let scaled: Vec<f32> = grad.iter().map(|g| g * 0.25).collect();
    let update = |grad: &[f32], scale: f64| {
        let (mut p, mut m, mut v) = (noises(4, 50), vec![0.0; 50], vec![0.0; 50]);
        adam_update(
            &mut p,
            grad,
            &mut m,
            &mut v,
            &AdamStep::new(&config, 0.1, 1, scale),
        );
        (p, m, v)
    };
    assert_eq!(update(&grad, 0.25), update(&scaled, 1.0));
}
