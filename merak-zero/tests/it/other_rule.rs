//! A rule of another program: the same weights in every stage, its state under its names.

use crate::device::Mirror;
use crate::fixture::{config, data_parallel, grads, held, len, lr, noises, step, whole};
use merak_mpu::testing::world;
use merak_zero::{
    AdamStep, OptimizerConfig, RuleStep, UpdateRule, ZeroOptimizer, ZeroStage, adam_update,
};
use std::sync::Arc;

/// AdamW, and how often each element was stepped.
#[derive(Debug)]
struct Counted(OptimizerConfig);

impl UpdateRule for Counted {
    fn name(&self) -> &'static str {
        "counted"
    }

    fn state_names(&self) -> &'static [&'static str] {
        &["count", "first", "second"]
    }

    fn step(
        &self,
        step: &RuleStep<'_>,
        params: &mut [f32],
        grads: &[f32],
        state: &mut [&mut [f32]],
    ) {
        let [count, first, second] = state else {
            unreachable!("{} kinds of state", state.len());
        };
        let scalars = AdamStep::new(&self.0, step.lr, step.time, 1.0);
        let scalars = if step.spec.decay {
            scalars
        } else {
            scalars.without_decay()
        };
        assert!(step.first + params.len() <= step.spec.numel());
        adam_update(params, grads, first, second, &scalars);
        count.iter_mut().for_each(|count| *count += 1.0);
    }
}

fn with_rule(optimizer: ZeroOptimizer) -> ZeroOptimizer {
    let rule = Counted(optimizer.config().optimizer.clone());
    optimizer
        .with_rule(Arc::new(rule))
        .expect("its names of state are legal")
}

#[test]
fn a_rule_of_another_program_steps_in_every_stage_as_the_same_rule_of_this_crate() {
    for stage in 0..=3 {
        let stage = ZeroStage::try_from(stage).unwrap();
        let mut config = config(stage);
        // Without clipping the gradients have the same bits, scaled on the way or before.
        config.max_grad_norm = 0.0;
        for threads in [1, 3] {
            config.threads = threads;
            world(2, |member| {
                let mut own = data_parallel(&member, config.clone());
                let mut other = with_rule(data_parallel(&member, config.clone()));
                let mut expected = held(&own, &noises(1, len()));
                let mut found = expected.clone();
                for t in 0..3 {
                    let grads = || grads(t, member.rank().0);
                    step(&mut own, &mut expected, grads(), lr(t)).unwrap();
                    step(&mut other, &mut found, grads(), lr(t)).unwrap();
                }
                assert!(whole(&other, found) == whole(&own, expected), "{stage:?}");
                let state = other.state();
                assert_eq!(state.names(), ["count", "first", "second"]);
                let mut counts = state.slices().filter(|slice| slice.name == "count");
                assert!(counts.all(|slice| slice.values == vec![3.0; slice.values.len()]));
            });
        }
    }
}

#[test]
fn a_rule_that_comes_after_the_state_has_its_place_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    world(1, |member| {
        let made = || data_parallel(&member, config(ZeroStage::Replicated));
        let rule = || Arc::new(Counted(OptimizerConfig::default()));
        for placed in [
            made().on_device(Arc::new(Mirror)).unwrap(),
            made().on_disk(folder.path()).unwrap(),
        ] {
            let error = placed.with_rule(rule()).unwrap_err();
            assert_eq!(
                error.to_string(),
                "the rule `counted` comes when the state lies on a device or in files already: call `with_rule` before `on_device` and `on_disk`"
            );
        }
        // Copies of collectives alone have no state.
        let copies = made().reduced_on(Arc::new(Mirror));
        assert!(copies.with_rule(rule()).is_ok());
    });
}

#[test]
fn a_rule_with_names_that_no_checkpoint_takes_is_refused() {
    #[derive(Debug)]
    struct Named(&'static [&'static str]);
    impl UpdateRule for Named {
        fn name(&self) -> &'static str {
            "mine"
        }
        fn state_names(&self) -> &'static [&'static str] {
            self.0
        }
        fn step(&self, _: &RuleStep<'_>, _: &mut [f32], _: &[f32], _: &mut [&mut [f32]]) {}
    }
    const CASES: [&[&str]; 5] = [
        &["b", "a"],
        &["a", "a"],
        &["a/b"],
        &["ema"],
        &["a", "b", "c", "d", "e"],
    ];
    world(1, |member| {
        for names in CASES {
            let optimizer = data_parallel(&member, config(ZeroStage::Replicated));
            let error = optimizer.with_rule(Arc::new(Named(names))).unwrap_err();
            let text = error.to_string();
            assert!(text.starts_with("`state_names` is ["), "{text}");
            assert!(text.contains(" of `mine`, expected at most four"), "{text}");
        }
        let optimizer = data_parallel(&member, config(ZeroStage::Replicated));
        assert!(optimizer.with_rule(Arc::new(Named(&[]))).is_ok());
    });
}
