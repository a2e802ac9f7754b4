//! State out and in again, on another number of ranks too.

use crate::fixture::{config, data_parallel, grads, len, lr, noises, params};
use merak_mpu::testing::world;
use merak_zero::{StepCounts, ZeroOptimizer, ZeroStage};
use std::collections::BTreeMap;

/// Optimizer state by parameter, kind and element, as a checkpoint would hold it.
type Saved = BTreeMap<(String, &'static str), Vec<f32>>;

fn save(parts: &[(usize, &'static str, std::ops::Range<usize>, Vec<f32>)]) -> Saved {
    let mut saved = Saved::new();
    for (param, name, local, values) in parts {
        let spec = &params()[*param];
        let whole = saved
            .entry((spec.name.clone(), name))
            .or_insert_with(|| vec![f32::NAN; spec.numel()]);
        whole[local.clone()].copy_from_slice(values);
    }
    assert!(
        saved.values().flatten().all(|x| !x.is_nan()),
        "every element is owned"
    );
    saved
}

fn load(optimizer: &mut ZeroOptimizer, saved: &Saved) {
    optimizer
        .edit_state(|state| {
            for slice in state.slices_mut() {
                let whole = &saved[&(params()[slice.param].name.clone(), slice.name)];
                slice.values.copy_from_slice(&whole[slice.local]);
            }
        })
        .expect("state in memory");
}

fn run(optimizer: &mut ZeroOptimizer, weights: &mut Vec<f32>, steps: std::ops::Range<u64>) {
    for t in steps {
        // Every data rank has the same gradients, so that the number of ranks changes no bit.
        let report = optimizer.step(weights, &mut grads(t, 0), lr(t));
        assert!(report.is_ok_and(|report| report.skipped.is_none()));
    }
}

#[test]
fn a_run_resumed_on_any_number_of_ranks_and_stage_equals_the_unbroken_one() {
    let unbroken = world(1, |member| {
        let mut optimizer = data_parallel(&member, config(ZeroStage::Replicated));
        let mut weights = noises(1, len());
        run(&mut optimizer, &mut weights, 0..5);
        weights
    });
    let at_three = world(4, |member| {
        let mut optimizer = data_parallel(&member, config(ZeroStage::OptimizerState));
        let mut weights = noises(1, len());
        run(&mut optimizer, &mut weights, 0..3);
        let state = optimizer.state();
        let parts: Vec<_> = state
            .slices()
            .map(|s| (s.param, s.name, s.local, s.values.to_vec()))
            .collect();
        (weights, parts, optimizer.progress())
    });
    let parts: Vec<_> = at_three
        .iter()
        .flat_map(|(_, parts, _)| parts.clone())
        .collect();
    let saved = save(&parts);
    assert_eq!(saved.len(), 2 * params().len());
    for (num_ranks, stage) in [
        (1, ZeroStage::Replicated),
        (2, ZeroStage::OptimizerState),
        (4, ZeroStage::OptimizerState),
        (2, ZeroStage::Replicated),
    ] {
        let resumed = world(num_ranks, |member| {
            let mut optimizer = data_parallel(&member, config(stage));
            let (mut weights, progress) = (at_three[0].0.clone(), at_three[0].2);
            load(&mut optimizer, &saved);
            optimizer.set_progress(progress);
            run(&mut optimizer, &mut weights, 3..5);
            weights
        });
        for weights in resumed {
            assert!(weights == unbroken[0], "{num_ranks} ranks, {stage:?}");
        }
    }
}

#[test]
fn a_resume_without_its_progress_is_another_run() {
    let differs = world(1, |member| {
        let mut optimizer = data_parallel(&member, config(ZeroStage::Replicated));
        let mut weights = noises(1, len());
        run(&mut optimizer, &mut weights, 0..2);
        let mut forgetful = weights.clone();
        let state = optimizer.state().into_owned();
        run(&mut optimizer, &mut weights, 2..3);
        optimizer.edit_state(|own| *own = state).unwrap();
        optimizer.set_progress(StepCounts::default());
        run(&mut optimizer, &mut forgetful, 2..3);
        weights != forgetful
    });
    assert_eq!(differs, [true]);
}
