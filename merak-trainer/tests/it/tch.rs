//! The libtorch backend trains and generates like the default one.

use merak_ckpt::{Checkpoint, DType, GenerateOptions, Kind};
use merak_trainer::Workload;
use serde_json::json;

use crate::{
    laws::{encoders, generation::generate, lora},
    support::{Case, assert_close_losses, assert_close_tensors, assert_same_bits, numbers},
};

/// Each axis alone, and all together.
const TOPOLOGIES: [(usize, usize, usize); 4] = [(2, 1, 1), (1, 2, 1), (1, 1, 2), (2, 2, 2)];

fn on_tch(case: &Case) -> Case {
    case.clone().with("compute.backend", "tch")
}

/// Every family, with dropout.
fn families() -> Vec<(&'static str, Case)> {
    let decoders = [
        ("gpt2", Case::gpt2().with_tied(true)),
        ("llama", Case::llama()),
    ];
    let relatives = decoders.into_iter().chain(Case::relatives());
    relatives
        .map(|(family, case)| (family, case.with_dropout(0.1)))
        .chain(encoders::models())
        .collect()
}

#[test]
fn every_family_trains_like_on_the_default_backend() {
    for (family, case) in families() {
        let (first, all) = (case.run(0), case.run(5));
        let case = on_tch(&case);
        for degrees in [(1, 1, 1)].into_iter().chain(TOPOLOGIES) {
            let case = case.clone().on(degrees);
            let what = format!("{family} {degrees:?}");
            assert_close_tensors(&case.run(0).gradients, &first.gradients, 1e-5, &what);
            let run = case.run(5);
            assert_close_losses(&run.reports[..1], &all.reports[..1], 1e-6, &what);
            assert_close_losses(&run.reports, &all.reports, 1e-4, &what);
        }
    }
}

#[test]
fn bf16_trains_close_to_f32_on_any_topology() {
    for (family, wide) in families() {
        let wide = on_tch(&wide);
        let narrow = wide.clone().with("bf16", true);
        let (wide, alone) = (wide.run(10), narrow.run(10));
        assert_close_losses(&alone.reports, &wide.reports, 2e-2, family);
        let run = narrow.clone().on((2, 2, 2)).run(10);
        assert_close_losses(&run.reports, &alone.reports, 2e-2, family);
        // The optimizer steps on f32 masters: they are no 16-bit numbers.
        let masters = alone.weights.values().flatten();
        let kept = masters.filter(|&&x| half::bf16::from_f32(x).to_f32().to_bits() != x.to_bits());
        assert!(kept.count() > 0, "{family}");
    }
}

#[test]
fn a_resumed_run_equals_the_unbroken_one_and_goes_on_on_the_other_backend() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    for (optimizer, bf16) in [("adamw_torch", true), ("sgd", false)] {
        let case = Case::gpt2().with("optim", optimizer).writing(folder.path());
        let (default, case) = (case.clone(), on_tch(&case).with("bf16", bf16));
        let unbroken = case.run(4);
        let saved = case.on_ranks(|trainer| {
            trainer.train_step()?;
            trainer.train_step()?;
            trainer.save_checkpoint()
        });
        let resumed = |case: &Case| {
            let case = case
                .clone()
                .with("resume_from_checkpoint", saved[0].display());
            case.run(2)
        };
        let run = resumed(&case);
        assert_eq!(numbers(&run.reports), numbers(&unbroken.reports[2..]));
        assert_eq!(run.weights, unbroken.weights);
        let run = resumed(&default);
        assert_close_losses(&run.reports, &unbroken.reports[2..], 2e-2, optimizer);
    }
}

#[test]
fn cached_generation_gives_the_tokens_of_the_default_backend() {
    let prompts = vec![vec![5, 17, 3], vec![80], vec![1, 2, 3, 4, 5, 6, 7]];
    let greedy = GenerateOptions {
        max_new_tokens: 6,
        temperature: 0.0,
        ..GenerateOptions::default()
    };
    for case in [Case::gpt2(), Case::llama()] {
        let expected = generate(&case, &prompts, &greedy);
        for degrees in [(1, 1, 1), (1, 2, 1), (1, 1, 2)] {
            let found = generate(&on_tch(&case).on(degrees), &prompts, &greedy);
            assert_eq!(found, expected, "{degrees:?}");
        }
    }
}

/// A GPT-2 in bf16 with everything that an adapter may train.
fn narrow_with_adapter(folder: &std::path::Path) -> Case {
    let case = Case::gpt2().with_lora(folder, &lora::everything());
    on_tch(&case).with("bf16", true)
}

#[test]
fn an_f32_adapter_trains_alike_beside_a_bf16_base_on_every_topology() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let case = narrow_with_adapter(folder.path());
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
    // What is frozen has the values of bf16, what is trained does not stay at them.
    for (name, values) in &alone.weights {
        let is_narrow = |x: &f32| half::bf16::from_f32(*x).to_f32().to_bits() == x.to_bits();
        let is_trained = alone.gradients.contains_key(name);
        assert_eq!(!values.iter().all(is_narrow), is_trained, "{name}");
    }
}

#[test]
fn a_frozen_bf16_base_takes_two_bytes_an_element_in_memory_and_on_disk() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let lora = json!({ "target_modules": ["c_attn"], "r": 2 });
    let case = on_tch(&Case::gpt2().with_lora(folder.path(), &lora)).with("bf16", true);
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

#[test]
fn a_resumed_adapter_beside_a_bf16_base_goes_on_bit_by_bit() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let case = narrow_with_adapter(folder.path()).writing(&folder.path().join("run"));
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
