//! What a rank holds from step to step, under each ZeRO stage.

use crate::support::Case;
use merak_trace::Param;
use merak_trainer::{MemoryNeed, MerakTrainer, Workload};

/// For each stage, the bytes of an element that every rank has, and those that replicas divide.
pub(crate) const BYTES: [[usize; 2]; 4] = [[16, 0], [8, 8], [4, 12], [0, 16]];
/// The same with weights of 16 bits beside their masters. A rank that has a part of them has
/// masters alone.
pub(crate) const SHORT_BYTES: [[usize; 2]; 4] = [[18, 0], [6, 12], [2, 16], [0, 16]];

/// Untied, so that no weight has a second gradient, and large enough for parts of some blocks.
pub(crate) fn case() -> Case {
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
    takes_what_its_stage_says(&case(), &[("", BYTES), ("bf16", SHORT_BYTES)]);
}

#[test]
fn averages_of_weights_are_divided_as_the_state_and_foretold() {
    let bytes = BYTES.map(|[whole, divided]| {
        // Stage 0 divides nothing.
        if divided == 0 {
            [whole + 4, 0]
        } else {
            [whole, divided + 4]
        }
    });
    takes_what_its_stage_says(&case().with("ema_decay", 0.9), &[("", bytes)]);
}

/// Compares what ranks hold in all stages, in these types, with the table of the type and with the
/// plan.
pub(crate) fn takes_what_its_stage_says(case: &Case, types: &[(&str, [[usize; 2]; 4])]) {
    let elements = case.plan().graph.num_elements();
    let stages = (0..4).flat_map(|stage| types.iter().map(move |ty| (stage, ty)));
    for (stage, &(key, bytes)) in stages {
        for replicas in [1, 2, 4, 8] {
            // One replica has all, as in stage 0.
            let [whole, divided] = bytes[if replicas == 1 { 0 } else { stage }];
            let case = case.clone().on((replicas, 1, 1));
            let case = case.with_microbatches(8).with("zero_stage", stage);
            let case = match key {
                "" => case,
                key => case.with(key, true),
            };
            let held = case.on_ranks(|trainer| {
                trainer.train_step()?;
                Ok(state(&trainer.memory()))
            });
            let what = format!("stage {stage} of {replicas} replicas, {key}: {held:?}");
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
fn the_plan_foretells_the_rank_that_owns_most_where_a_rule_needs_whole_parameters() {
    for optim in ["adafactor", "muon"] {
        for (replicas, stage, bf16) in [
            (1, 0, false),
            (2, 0, true),
            (4, 1, true),
            (4, 2, false),
            (4, 3, false),
            (4, 3, true),
        ] {
            let case = case().on((replicas, 1, 1)).with_microbatches(4);
            let case = case.with("zero_stage", stage).with("optim", optim);
            let case = case.with("bf16", bf16);
            let held = case.on_ranks(|trainer| {
                trainer.train_step()?;
                Ok(trainer.memory())
            });
            let needs = case.plan().memory(&case.arguments(), &[]);
            let need = needs.expect("a legal plan")[0];
            let most = |of: fn(&MemoryNeed) -> usize| held.iter().map(of).max();
            let what = format!("{optim}, stage {stage} of {replicas}, bf16 {bf16}");
            assert_eq!(most(|held| held.optimizer), Some(need.optimizer), "{what}");
            assert_eq!(most(|held| held.gradients), Some(need.gradients), "{what}");
            assert_eq!(most(|held| held.weights), Some(need.weights), "{what}");
        }
    }
}

#[test]
fn a_trainer_that_continues_prompts_holds_neither_gradients_nor_optimizer_state() {
    let case = case().with("text_generation", true).on((2, 1, 1));
    for held in case.on_ranks(|trainer| Ok(trainer.memory())) {
        assert!(held.weights > 0);
        assert_eq!((held.gradients, held.optimizer), (0, 0));
    }
    let refused = case.try_on_ranks(MerakTrainer::train);
    let refused = merak_trainer::chain(&refused.expect_err("it has no optimizer"));
    assert!(refused.contains("\"text_generation\" is true"), "{refused}");
}

#[test]
fn the_plan_bounds_the_buckets_on_their_way_between_replicas() {
    for stage in 0..=3 {
        for bf16 in [false, true] {
            let case = case().on((2, 1, 1)).with_microbatches(4);
            let case = case.with("zero_stage", stage).with("bf16", bf16);
            let held = case.on_ranks(|trainer| {
                trainer.train_step()?;
                Ok(trainer.memory().exchange)
            });
            let needs = case.plan().memory(&case.arguments(), &[]);
            let most = needs.expect("a legal plan")[0].exchange;
            let what = format!("stage {stage}, bf16 {bf16}: {held:?} of {most}");
            assert!(held.iter().all(|&held| 0 < held && held <= most), "{what}");
        }
    }
    let alone = case().plan().memory(&case().arguments(), &[]);
    assert_eq!(alone.expect("a legal plan")[0].exchange, 0);
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
    for bf16 in [false, true] {
        let case = case.clone().with("bf16", bf16);
        let peak = |stage: u8| {
            let case = case.clone().with("zero_stage", stage);
            let peaks = case.on_ranks(|trainer| {
                trainer.train_step()?;
                Ok(trainer.peak_activation_bytes())
            });
            peaks[0]
        };
        let graph = &case.plan().graph;
        let all: usize = graph.params().iter().map(Param::kept_bytes).sum();
        let most = graph.params().iter().max_by_key(|p| p.local.numel());
        let most = most.expect("a model has parameters");
        let largest = most.kept_bytes();
        // In stages 1 and 2 gathered weights of 16 bits stay, and count as activations.
        let gathered = peak(3) - peak(0);
        assert!(
            gathered >= largest,
            "bf16 {bf16}: {gathered} bytes, the largest has {largest}"
        );
        assert!(
            gathered <= 3 * largest && gathered < all / 4,
            "bf16 {bf16}: {gathered} bytes of {all}"
        );
        // Beside two buckets of gradients the plan has room for them.
        let divided = case.clone().with("zero_stage", 3);
        let needs = divided.plan().memory(&divided.arguments(), &[]);
        let foretold = needs.expect("a legal plan")[0].exchange;
        let sums = 2 * 4 * most.local.numel();
        assert!(
            gathered <= foretold - sums && foretold - sums <= 4 * largest,
            "bf16 {bf16}: {gathered} bytes, {foretold} foretold"
        );
    }
}

#[test]
fn peaks_fall_as_the_plan_foretells_where_sequence_and_vocabulary_are_cut() {
    let case = case()
        .with_model("vocab_size", 2048)
        .on((1, 2, 1))
        .with_microbatches(2);
    let peak = |keys: &[&str]| {
        let case = keys
            .iter()
            .fold(case.clone(), |case, key| case.with(key, true));
        let peaks = case.on_ranks(|trainer| {
            MerakTrainer::train_step(trainer)?;
            Ok(trainer.peak_activation_bytes() as f64)
        });
        let needs = case.plan().memory(&case.arguments(), &[Workload::Training]);
        let foretold = needs.expect("a legal plan")[0].activations as f64;
        for peak in &peaks {
            let off = peak / foretold - 1.0;
            assert!(off.abs() < 0.05, "{keys:?}: {peak} against {foretold}");
        }
        peaks[0]
    };
    let whole = peak(&[]);
    let vocab = peak(&["parallel_vocab"]);
    let both = peak(&["parallel_vocab", "sequence_parallel"]);
    assert!(both < vocab && vocab < whole, "{whole}, {vocab}, {both}");
}
