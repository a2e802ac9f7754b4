//! What a wrong setting or buffer says.

use crate::fixture::{alone, config, data_parallel, grads, len};
use merak_mpu::testing::world;
use merak_zero::{
    Error, GlobalParams, OptimizerConfig, OptimizerKind, ParamSpec, ZeroConfig, ZeroGroups,
    ZeroOptimizer, ZeroStage,
};

fn message<T>(result: Result<T, Error>) -> String {
    result.map(|_| ()).expect_err("an error").to_string()
}

#[test]
fn unknown_stages_and_rules_are_refused() {
    assert_eq!(
        message(ZeroStage::try_from(4)),
        "`stage` is 4, expected 0, 1, 2 or 3"
    );
    assert_eq!(
        message("adamw".parse::<OptimizerKind>()),
        "`optimizer` has no value \"adamw\": choose one of adamw_torch, adam, sgd, adafactor, lamb, lion, muon"
    );
    for stage in [0, 1, 2, 3] {
        assert_eq!(u8::from(ZeroStage::try_from(stage).unwrap()), stage);
    }
}

#[test]
fn numbers_out_of_range_are_named() {
    let ok = ZeroConfig::default;
    let optimizer = OptimizerConfig::default;
    let cases = [
        (
            ZeroConfig {
                gradient_predivide_factor: 2.0,
                ..ok()
            },
            "`gradient_predivide_factor` is 2, expected 1 without `prescale_gradients`",
        ),
        (
            ZeroConfig {
                gradient_predivide_factor: 0.0,
                prescale_gradients: true,
                ..ok()
            },
            "`gradient_predivide_factor` is 0, expected from 1e-9 to 1e9",
        ),
        (
            ZeroConfig {
                gather_bucket_size: 0,
                ..ok()
            },
            "`gather_bucket_size` is 0, expected at least 1",
        ),
        (
            ZeroConfig {
                optimizer: OptimizerConfig {
                    adam_beta2: 1.0,
                    ..optimizer()
                },
                ..ok()
            },
            "`adam_beta2` is 1, expected at least 0 and less than 1, also when rounded to f32",
        ),
        (
            ZeroConfig {
                optimizer: OptimizerConfig {
                    weight_decay: -0.1,
                    ..optimizer()
                },
                ..ok()
            },
            "`weight_decay` is -0.1, expected from 0 to 1e37",
        ),
    ];
    for (config, expected) in cases {
        assert_eq!(message(config.validate()), expected);
    }
    assert!(ok().validate().is_ok());
}

#[test]
fn hyperparameters_out_of_range_are_named() {
    let ok = OptimizerConfig::default;
    for (config, expected) in [
        (
            OptimizerConfig {
                adafactor_decay_rate: 0.8,
                ..ok()
            },
            "`adafactor_decay_rate` is 0.8, expected a finite number below 0",
        ),
        (
            OptimizerConfig {
                lion_beta2: f64::NAN,
                ..ok()
            },
            "`lion_beta2` is NaN, expected at least 0 and less than 1, also when rounded to f32",
        ),
        (
            OptimizerConfig {
                muon_epsilon: 0.0,
                ..ok()
            },
            "`muon_epsilon` is 0, expected from 1e-37 to 1e37",
        ),
        (
            OptimizerConfig {
                muon_ns_steps: 0,
                ..ok()
            },
            "`muon_ns_steps` is 0, expected from 1 to 100",
        ),
    ] {
        assert_eq!(message(config.validate()), expected);
    }
}

#[test]
fn an_epsilon_that_f32_rounds_to_0_is_refused() {
    let check = |adam_epsilon| {
        let config = OptimizerConfig {
            adam_epsilon,
            ..OptimizerConfig::default()
        };
        config.validate()
    };
    let told = message(check(1e-50));
    assert!(
        told.ends_with("expected 0, or from 1e-37 to 1e37"),
        "{told}"
    );
    assert!(check(0.0).is_ok() && check(OptimizerConfig::MIN_POSITIVE).is_ok());
}

#[test]
fn a_momentum_that_f32_rounds_to_0_is_refused() {
    let check = |sgd_momentum| {
        let config = OptimizerConfig {
            optim: OptimizerKind::Sgd,
            sgd_momentum,
            ..OptimizerConfig::default()
        };
        config.validate()
    };
    for momentum in [1e-46, 1.0] {
        let told = message(check(momentum));
        let expected = ", expected 0, or at least 1e-37 and less than 1, also when rounded to f32";
        assert!(told.ends_with(expected), "{told}");
    }
    for momentum in [0.0, OptimizerConfig::MIN_POSITIVE, 0.9] {
        assert!(check(momentum).is_ok(), "{momentum}");
    }
}

#[test]
fn parameters_that_do_not_fit_the_model_are_named() {
    world(1, |member| {
        let build = |specs: Vec<ParamSpec>| {
            let groups = ZeroGroups {
                data_sequence: alone(&member),
                model: alone(&member),
            };
            let model = GlobalParams::new([("a", 6), ("b", 2)]);
            message(ZeroOptimizer::new(
                specs,
                model,
                ZeroConfig::default(),
                groups,
            ))
        };
        let a = || ParamSpec::new("a", &[2, 3], 0);
        assert_eq!(
            build(vec![a(), a()]),
            "parameter `a` is listed twice on one rank"
        );
        assert_eq!(
            build(vec![ParamSpec::new("c", &[1], 2)]),
            "parameter `c` has global index 2, but the model has 2 parameters"
        );
        assert_eq!(
            build(vec![ParamSpec::new("a", &[4], 0)]),
            "parameter `a` with 4 elements does not match entry 0 of the model, `a` with 6 elements"
        );
        let hidden = |shape: &[usize]| ParamSpec::new("a", shape, 0).as_hidden_matrix();
        assert_eq!(
            build(vec![hidden(&[1, 2, 3])]),
            "parameter `a` has shape [1, 2, 3], expected two dimensions for a hidden matrix"
        );
        assert_eq!(
            build(vec![hidden(&[6])]),
            "parameter `a` has shape [6], expected two dimensions for a hidden matrix"
        );
    });
}

#[test]
fn buffers_that_do_not_fit_the_layout_are_refused() {
    world(1, |member| {
        let mut optimizer = data_parallel(&member, config(ZeroStage::Replicated));
        let mut weights = vec![0.0_f32; len()];
        assert_eq!(
            message(optimizer.step(&mut weights, &mut vec![0.0_f64; len()], 0.1)),
            "the gradient buffer has elements of type f64, expected f32"
        );
        assert_eq!(
            message(optimizer.step(&mut vec![0.0_f32; 3], &mut grads(0, 0), 0.1)),
            format!(
                "the parameter buffer has 3 elements, the layout has {}",
                len()
            )
        );
        assert_eq!(
            message(optimizer.step(&mut weights, &mut grads(0, 0), f64::NAN)),
            "`lr` is NaN, expected from 0 to 1e37"
        );
        assert_eq!(optimizer.progress().steps, 0);
    });
}

#[test]
fn a_second_reduction_of_the_same_gradients_is_refused() {
    world(1, |member| {
        let mut optimizer = data_parallel(&member, config(ZeroStage::Replicated));
        let mut grads = grads(0, 0);
        optimizer.reduce_gradients(&mut grads).unwrap();
        assert_eq!(
            message(optimizer.reduce_gradients(&mut grads)),
            "the gradients of this step are averages already: step before the next reduction"
        );
        let num_buckets = optimizer.layout().buckets().len();
        assert_eq!(
            message(optimizer.start_bucket(0, &mut grads)),
            format!(
                "bucket 0 of {num_buckets} cannot be started now: the gradients of this step are reduced already"
            )
        );
    });
}
