//! L1 to L3 of adapters beside weights in bf16, on each backend; the default one has the numbers of
//! f32.

use std::path::Path;

use merak_ckpt::{Checkpoint, DType, Kind};
use merak_trainer::Workload;
use serde_json::{Value, json};

use super::{generation, lora};
use crate::support::{Case, assert_close_losses, assert_same_bits, numbers};

/// A GPT-2 in bf16 with everything that an adapter may train.
fn narrow(backend: &str, folder: &Path) -> Case {
    let case = Case::gpt2().with_lora(folder, &lora::everything());
    case.with("compute.backend", backend).with("bf16", true)
}

fn is_narrow(values: &[f32]) -> bool {
    let is_narrow = |x: &f32| half::bf16::from_f32(*x).to_f32().to_bits() == x.to_bits();
    values.iter().all(is_narrow)
}

pub(crate) fn trains_alike_on_every_topology(backend: &str) {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let case = narrow(backend, folder.path());
    let alone = case.run(6);
    for stages in [2, 4] {
        let run = case.clone().on((1, 1, stages)).run(6);
        assert_same_bits(&run, &alone, &format!("{stages} stages"));
    }
    let wide = case.clone().with("bf16", false).run(6);
    assert_close_losses(&alone.reports, &wide.reports, 2e-2, "f32");
    for degrees in [(2, 1, 1), (1, 2, 1), (2, 2, 2)] {
        let run = case.clone().on(degrees).run(6);
        let what = format!("{degrees:?}");
        assert_close_losses(&run.reports, &alone.reports, 5e-3, &what);
    }
    // Frozen weights have values of bf16; trained weights leave them.
    for (name, values) in &alone.weights {
        let is_trained = alone.gradients.contains_key(name);
        assert_eq!(!is_narrow(values), is_trained, "{name}");
    }
}

pub(crate) fn takes_two_bytes_an_element(backend: &str) {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let lora = json!({ "target_modules": ["c_attn"], "r": 2 });
    let case = Case::gpt2().with_lora(folder.path(), &lora);
    let case = case.with("compute.backend", backend).with("bf16", true);
    let case = case.writing(&folder.path().join("run"));
    let plan = case.plan();
    let expected = plan.memory(&case.arguments(), &[Workload::Training]);
    let expected = expected.expect("a training has programs")[0];
    let held = case.on_ranks(|trainer| {
        trainer.train_step()?;
        trainer.save_checkpoint()?;
        Ok(trainer.memory())
    });
    let held = held[0];
    let factors = 4 * (2 * 32 + 96 * 2);
    let base = plan.graph.num_elements() - factors;
    assert_eq!(held.weights, 2 * base + 4 * factors);
    assert_eq!((held.gradients, held.optimizer), (4 * factors, 8 * factors));
    assert_eq!(held.weights, expected.weights);
    assert_eq!(
        (held.gradients, held.optimizer),
        (expected.gradients, expected.optimizer)
    );
    let saved = Checkpoint::open(folder.path().join("run")).expect("it was saved");
    for tensor in saved.manifest().tensors_of(&Kind::Parameter) {
        let is_factor = tensor.name.contains(".lora_");
        let expected = if is_factor { DType::F32 } else { DType::BF16 };
        assert_eq!(tensor.dtype, expected, "{}", tensor.name);
    }
}

pub(crate) fn goes_on_bit_by_bit(backend: &str) {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let case = narrow(backend, folder.path()).writing(&folder.path().join("run"));
    let unbroken = case.run(4);
    case.on_ranks(|trainer| {
        trainer.train_step()?;
        trainer.train_step()?;
        trainer.save_checkpoint()
    });
    let resumed = case.with("resume_from_checkpoint", "latest");
    let run = resumed.run(2);
    assert_eq!(numbers(&run.reports), numbers(&unbroken.reports[2..]));
    assert!(run.weights == unbroken.weights);
    let elsewhere = resumed.with("bf16", false).on((1, 2, 2)).run(2);
    assert_close_losses(&elsewhere.reports, &unbroken.reports[2..], 2e-2, "in f32");
}

#[test]
fn an_f32_adapter_trains_alike_beside_a_bf16_base_on_every_topology() {
    trains_alike_on_every_topology("candle");
}

#[test]
fn a_frozen_bf16_base_takes_two_bytes_an_element_in_memory_and_on_disk() {
    takes_two_bytes_an_element("candle");
}

#[test]
fn a_resumed_adapter_beside_a_bf16_base_goes_on_bit_by_bit() {
    goes_on_bit_by_bit("candle");
}

/// Kinds of models and adapters whose frozen weights are read in different ways.
fn bases(folder: &Path) -> Vec<(&'static str, Case)> {
    let dora = json!({ "use_dora": true, "target_modules": ["c_attn", "c_proj"], "r": 3, "lora_dropout": 0.1,
        "init_lora_weights": false });
    let linear = json!({ "target_modules": "all-linear", "init_lora_weights": false, "r": 2 });
    let table = json!({ "target_modules": ["wte", "c_fc"], "init_lora_weights": false, "r": 2 });
    let with = |name, case: Case, lora: &Value| {
        let folder = folder.join(name);
        std::fs::create_dir_all(&folder).expect("the folder can be made");
        (name, case.with_lora(&folder, lora).with_dropout(0.1))
    };
    vec![
        with("everything", Case::gpt2(), &lora::everything()),
        with("tied", Case::gpt2().with_tied(true), &linear),
        with("table", Case::gpt2().with_tied(true), &table),
        with("dora", Case::gpt2(), &dora),
        with("llama", Case::llama(), &linear),
    ]
}

/// The same, and models that generate nothing.
fn all_bases(folder: &Path) -> Vec<(&'static str, Case)> {
    let images = folder.join("images");
    std::fs::create_dir_all(&images).expect("the folder can be made");
    let mut bases = bases(folder);
    bases.push(("images", lora::vit(&images)));
    bases
}

/// The same case in f32 from the weights with which it begins in bf16.
fn from_rounded(case: &Case, folder: &Path) -> Case {
    let start = case.clone().writing(folder);
    let saved = start.on_ranks(merak_trainer::MerakTrainer::save_checkpoint);
    let case = case.clone().with("bf16", false);
    case.with("resume_from_checkpoint", saved[0].display())
}

#[test]
fn a_bf16_base_has_the_bits_of_an_f32_base_with_the_same_numbers() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    for (name, case) in all_bases(folder.path()) {
        let case = case.with("bf16", true);
        let wide = from_rounded(&case, &folder.path().join(name).join("start"));
        let alone = wide.run(4);
        assert!(alone.weights.values().any(|values| is_narrow(values)));
        assert_same_bits(&case.run(4), &alone, name);
        for degrees in [(2, 1, 1), (1, 2, 1), (1, 2, 2)] {
            let expected = wide.clone().on(degrees).run(4);
            let found = case.clone().on(degrees).run(4);
            assert_same_bits(&found, &expected, &format!("{name} {degrees:?}"));
            assert_close_losses(&found.reports, &alone.reports, 1e-4, name);
        }
    }
}

#[test]
fn stages_recomputation_and_zero_change_no_bit_beside_a_bf16_base() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    for (name, case) in all_bases(folder.path()) {
        let case = case.with("bf16", true);
        let alone = case.run(3);
        for (stages, chunk) in [(1, 1), (2, 0), (2, 1), (4, 2)] {
            let case = case.clone().on((1, 1, stages));
            let run = case.with("checkpoint_num_layers", chunk).run(3);
            assert_same_bits(&run, &alone, &format!("{name}: {stages} stages, {chunk}"));
        }
        let in_turn = case.clone().on((1, 1, 2)).with("train_schedule", "zb_v");
        assert_same_bits(&in_turn.run(3), &alone, &format!("{name}: zb_v"));
        let replicas = case.clone().on((2, 1, 2));
        let whole = replicas.clone().with("zero_stage", 0).run(3);
        let divided = replicas.clone().with("zero_stage", 1);
        assert_same_bits(&divided.run(3), &whole, &format!("{name}: zero 1"));
        for stage in [2, 3] {
            let divided = replicas.clone().with("zero_stage", stage).run(3);
            let what = format!("{name}: zero {stage}");
            assert_close_losses(&divided.reports, &whole.reports, 1e-5, &what);
        }
    }
}

#[test]
fn a_bf16_base_generates_the_tokens_of_an_f32_base_with_the_same_numbers() {
    let (prompts, greedy) = generation::greedy();
    let folder = tempfile::tempdir().expect("a temporary folder");
    for (name, case) in bases(folder.path()) {
        let case = case.with("bf16", true);
        let wide = from_rounded(&case, &folder.path().join(name).join("start"));
        let expected = generation::generate(&wide, &prompts, &greedy);
        for degrees in [(1, 1, 1), (1, 2, 1), (1, 1, 2)] {
            let found = generation::generate(&case.clone().on(degrees), &prompts, &greedy);
            assert_eq!(found, expected, "{name} {degrees:?}");
        }
    }
}
