//! What a rank holds from step to step, under each ZeRO stage.

use crate::support::Case;
use merak_trainer::MemoryNeed;

/// Untied, so that no weight has a second gradient, and large enough for parts of some blocks.
fn case() -> Case {
    Case::gpt2()
        .with_model("n_embd", 128)
        .with_tied(false)
        .with("per_device_train_batch_size", 1)
}

fn state(need: &MemoryNeed) -> usize {
    need.weights + need.gradients + need.optimizer
}

#[test]
fn model_state_takes_what_its_stage_says_and_the_plan_foretells_it() {
    let elements = case().plan().graph.num_elements();
    for replicas in [1, 2, 4] {
        for (stage, [whole, divided]) in [[16, 0], [8, 8], [4, 12], [0, 16]].into_iter().enumerate()
        {
            let case = case().on((replicas, 1, 1)).with_microbatches(4);
            let case = case.with("zero_stage", stage);
            let held = case.on_ranks(|trainer| {
                trainer.train_step()?;
                Ok(state(&trainer.memory()))
            });
            let what = format!("stage {stage} of {replicas} replicas: {held:?}");
            let all: usize = held.iter().sum();
            assert_eq!(all, (whole * replicas + divided) * elements, "{what}");
            let expected = whole * elements + divided * elements / replicas;
            // A part has whole norm blocks.
            let blocks = 2 * divided * merak_zero::NORM_BLOCK;
            assert!(
                held.iter().all(|held| held.abs_diff(expected) <= blocks),
                "{what}"
            );
            let plan = case.plan();
            let needs = plan.memory(&case.arguments(), &[]).expect("a legal plan");
            assert_eq!(state(&needs[0]), expected, "{what}");
        }
    }
}

#[test]
fn the_plan_foretells_what_a_rank_holds_beside_frozen_weights() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let lora = serde_json::json!({ "target_modules": ["c_attn"], "r": 64 });
    let case = case().with_lora(folder.path(), &lora).on((2, 1, 1));
    for bf16 in [false, true] {
        for stage in 0..=3 {
            let case = case.clone().with("bf16", bf16).with("zero_stage", stage);
            let held = case.on_ranks(|trainer| {
                trainer.train_step()?;
                Ok(state(&trainer.memory()))
            });
            let needs = case.plan().memory(&case.arguments(), &[]);
            let expected = state(&needs.expect("a legal plan")[0]);
            assert_eq!(held.iter().sum::<usize>(), 2 * expected, "stage {stage}");
        }
    }
}

#[test]
fn a_divided_run_holds_few_buckets_of_parameters_and_of_gradients_at_once() {
    // One bucket for each parameter.
    let case = case().on((2, 1, 1)).with("zero_reduce_bucket_size", 1);
    let peak = |stage: u8| {
        let case = case.clone().with("zero_stage", stage);
        let peaks = case.on_ranks(|trainer| {
            trainer.train_step()?;
            Ok(trainer.peak_activation_bytes())
        });
        peaks[0]
    };
    let graph = &case.plan().graph;
    let sizes = graph.params().iter().map(|param| 4 * param.local.numel());
    let (largest, all) = (sizes.clone().max().unwrap_or(0), sizes.sum::<usize>());
    let gathered = peak(3) - peak(1);
    assert!(
        gathered >= largest,
        "{gathered} bytes, the largest has {largest}"
    );
    assert!(
        gathered <= 3 * largest && gathered < all / 4,
        "{gathered} bytes of {all}"
    );
}
