//! Averages of weights: in every stage and kind of memory, beside every rule.

use crate::{
    device::Mirror,
    fixture::{STAGES, config, data_parallel, grads, held, len, lr, noises, step, whole},
};
use merak_mpu::testing::world;
use merak_zero::{EMA, RuleStep, UpdateRule, ZeroConfig, ZeroOptimizer, ZeroStage};
use std::sync::Arc;

fn averaging(stage: ZeroStage) -> ZeroConfig {
    ZeroConfig {
        ema_decay: Some(0.9),
        ..config(stage)
    }
}

/// The averages that follow all but the first of these weights, which are those before any step.
fn averaged(weights: &[Vec<f32>]) -> Vec<f32> {
    let mut averages = weights[0].clone();
    for weights in &weights[1..] {
        for (average, weight) in averages.iter_mut().zip(weights) {
            *average = 0.9_f32 * *average + (1.0 - 0.9_f32) * weight;
        }
    }
    averages
}

/// Whether the averages of what this rank owns are among these of all elements.
fn has_averages(optimizer: &ZeroOptimizer, all: &[f32]) -> bool {
    let (state, layout) = (optimizer.state(), optimizer.layout());
    let mut own = state.slices().filter(|slice| slice.name == EMA);
    own.all(|slice| {
        let start = layout.range(slice.param).start;
        let place = start + slice.local.start..start + slice.local.end;
        slice.values == &all[place]
    })
}

#[test]
fn averages_follow_every_step_that_is_made_in_every_stage_and_memory() {
    let folder = tempfile::tempdir().unwrap();
    for (stage, has_masters) in STAGES
        .into_iter()
        .flat_map(|stage| [(stage, false), (stage, true)])
    {
        let config = ZeroConfig {
            has_masters,
            ..averaging(stage)
        };
        world(2, |member| {
            let made = || data_parallel(&member, config.clone());
            let rooms = [
                made(),
                made().on_disk(folder.path()).unwrap(),
                made().on_device(Arc::new(Mirror)).unwrap(),
            ];
            for mut optimizer in rooms {
                let mut seen = vec![noises(1, len())];
                let mut weights = held(&optimizer, &seen[0]);
                for t in 0..4 {
                    let mut own = grads(t, member.rank().0);
                    own[5] = if t == 2 { f32::NAN } else { own[5] };
                    let report = step(&mut optimizer, &mut weights, own, lr(t)).unwrap();
                    if report.skipped.is_none() {
                        seen.push(whole(&optimizer, weights.clone()));
                    }
                }
                assert_eq!(seen.len(), 4, "one step is skipped");
                let averages = averaged(&seen);
                assert!(has_averages(&optimizer, &averages), "{stage:?}");
                optimizer.swap_average(&mut weights).unwrap();
                assert!(whole(&optimizer, weights.clone()) == averages, "{stage:?}");
                optimizer.swap_average(&mut weights).unwrap();
                assert!(whole(&optimizer, weights) == seen[3], "{stage:?}");
                assert!(has_averages(&optimizer, &averages), "{stage:?}");
            }
        });
    }
}

#[test]
fn averages_start_as_the_weights_and_go_on_from_a_checkpoint() {
    world(2, |member| {
        let mut optimizer = data_parallel(&member, averaging(ZeroStage::OptimizerState));
        let (first, other) = (noises(1, len()), noises(2, len()));
        let mut weights = first.clone();
        optimizer.swap_average(&mut weights).unwrap();
        assert!(weights == first && has_averages(&optimizer, &first));
        optimizer.start_average(&other).unwrap();
        assert!(has_averages(&optimizer, &other));
        let mut resumed = data_parallel(&member, averaging(ZeroStage::OptimizerState));
        let state = optimizer.state().into_owned();
        resumed.edit_state(|own| *own = state).unwrap();
        let own = grads(0, member.rank().0);
        step(&mut resumed, &mut weights, own, lr(0)).unwrap();
        assert!(has_averages(&resumed, &averaged(&[other, weights])));
    });
}

#[test]
fn a_first_step_that_is_skipped_starts_the_averages_too() {
    for stage in STAGES {
        world(2, |member| {
            let mut optimizer = data_parallel(&member, averaging(stage));
            let first = noises(1, len());
            let mut weights = held(&optimizer, &first);
            let report = step(&mut optimizer, &mut weights, vec![f32::NAN; len()], lr(0));
            assert!(report.unwrap().skipped.is_some());
            assert!(has_averages(&optimizer, &first), "{stage:?}");
        });
    }
}

/// Descent that keeps four values of each element.
#[derive(Debug)]
struct Four;

impl UpdateRule for Four {
    fn name(&self) -> &'static str {
        "four"
    }

    fn state_names(&self) -> &'static [&'static str] {
        &["a", "b", "x", "y"]
    }

    fn step(
        &self,
        step: &RuleStep<'_>,
        params: &mut [f32],
        grads: &[f32],
        state: &mut [&mut [f32]],
    ) {
        assert_eq!(state.len(), 4);
        for kept in state {
            kept.copy_from_slice(grads);
        }
        for (param, grad) in params.iter_mut().zip(grads) {
            *param -= step.lr as f32 * grad;
        }
    }
}

#[test]
fn averages_stand_behind_all_that_a_rule_keeps() {
    world(1, |member| {
        let optimizer = data_parallel(&member, averaging(ZeroStage::Replicated));
        let mut optimizer = optimizer.with_rule(Arc::new(Four)).unwrap();
        let mut weights = noises(1, len());
        let before = weights.clone();
        step(&mut optimizer, &mut weights, grads(0, 0), lr(0)).unwrap();
        assert!(weights != before);
        assert!(has_averages(&optimizer, &averaged(&[before, weights])));
        let state = optimizer.state();
        assert_eq!(state.names(), ["a", "b", "x", "y", EMA]);
        let of = |name: &str| -> Vec<f32> {
            let slices = state.slices().filter(|slice| slice.name == name);
            slices.flat_map(|slice| slice.values.to_vec()).collect()
        };
        assert!(of("a") == of("y") && of("y") != of(EMA));
    });
}

#[test]
fn an_average_takes_one_more_value_of_each_element() {
    for stage in STAGES {
        let kept = |config: ZeroConfig| config.element_bytes(2).state;
        let (without, with) = (kept(config(stage)), kept(averaging(stage)));
        assert_eq!(with.bytes, without.bytes + size_of::<f32>());
        assert_eq!(with.ranks, without.ranks);
        world(2, |member| {
            let values = |config| {
                let optimizer = data_parallel(&member, config);
                let state = optimizer.state();
                let owned = state.num_owned();
                (state.slices().map(|s| s.values.len()).sum::<usize>(), owned)
            };
            let (values, owned) = (values(averaging(stage)), values(config(stage)));
            assert_eq!(values, (owned.0 + owned.1, owned.1));
        });
    }
}
