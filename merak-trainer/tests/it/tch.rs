//! The libtorch backend trains and generates like the default one.

mod amp; // weights of f32, and operations in 16 bits
mod f16; // the loss scale
mod state; // what a rank keeps, and where

use merak_ckpt::GenerateOptions;

use crate::{
    laws::{agreement, encoders, families, generation, narrow},
    support::{Case, assert_close_losses, assert_close_tensors, numbers},
};

/// Each axis alone, and all together.
const TOPOLOGIES: [(usize, usize, usize); 4] = [(2, 1, 1), (1, 2, 1), (1, 1, 2), (2, 2, 2)];

fn on_tch(case: &Case) -> Case {
    case.clone().with("compute.backend", "tch")
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
fn shared_sequences_train_like_on_the_default_backend() {
    let decoders = [("gpt2", Case::gpt2()), ("llama", Case::llama())];
    for (family, case) in decoders.into_iter().chain(Case::relatives()) {
        let case = case.with_dropout(0.1);
        let all = case.run(3);
        for method in ["ulysses", "all_gather", "ring"] {
            let case = on_tch(&case).sharing(4).with("sp_method", method);
            let what = format!("{family} by {method}");
            assert_close_losses(&case.run(3).reports, &all.reports, 1e-4, &what);
        }
    }
}

#[test]
fn halves_of_microbatches_train_like_on_the_default_backend() {
    for case in [Case::gpt2(), Case::llama()] {
        let case = case.with_dropout(0.1);
        let all = case.run(3);
        for level in [1, 3] {
            let case = on_tch(&case).on((1, 2, 1));
            let case = case.with("tp_overlapping_level", level);
            let what = format!("level {level}");
            assert_close_losses(&case.run(3).reports, &all.reports, 1e-4, &what);
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
fn all_stages_and_topologies_train_like_one_rank_for_thirty_steps_in_16_bits() {
    const F16: agreement::Precision = agreement::Precision {
        keys: &[("fp16", "true"), ("initial_scale_power", "14")],
        tolerance: 2.0 / 2048.0,
    };
    agreement::holds("tch", &[agreement::BF16, F16]);
}

#[test]
fn divided_gradients_and_parameters_train_like_whole_ones() {
    for (narrow, tolerance) in [("", 1e-5), ("bf16", 4e-3), ("fp16", 1e-3)] {
        for case in [Case::gpt2().with_tied(true), Case::llama()] {
            let case = match narrow {
                "" => on_tch(&case),
                "fp16" => on_tch(&case)
                    .with(narrow, true)
                    .with("initial_scale_power", 14),
                _ => on_tch(&case).with(narrow, true),
            };
            for degrees in [(2, 1, 1), (2, 2, 2)] {
                let case = case.clone().on(degrees);
                let whole = case.clone().with("zero_stage", 1).run(5);
                for stage in [2, 3] {
                    let run = case.clone().with("zero_stage", stage).run(5);
                    let what = format!("{narrow} {degrees:?} stage {stage}");
                    assert_close_losses(&run.reports, &whole.reports, tolerance, &what);
                }
            }
        }
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
    let (prompts, greedy) = generation::greedy();
    let greedy = GenerateOptions {
        decoder_start_token_id: Some(0),
        ..greedy
    };
    for case in [Case::gpt2(), Case::llama(), encoders::translation()] {
        let narrow = on_tch(&case).with("fp16", true);
        assert_eq!(
            generation::generate(&narrow, &prompts, &greedy).len(),
            prompts.len()
        );
        let expected = generation::generate(&case, &prompts, &greedy);
        for degrees in [(1, 1, 1), (1, 2, 1), (1, 1, 2)] {
            let found = generation::generate(&on_tch(&case).on(degrees), &prompts, &greedy);
            assert_eq!(found, expected, "{degrees:?}");
        }
    }
}

#[test]
fn an_f32_adapter_trains_alike_beside_a_bf16_base_on_every_topology() {
    narrow::trains_alike_on_every_topology("tch");
}

#[test]
fn a_frozen_bf16_base_takes_two_bytes_an_element_in_memory_and_on_disk() {
    narrow::takes_two_bytes_an_element("tch");
}

#[test]
fn a_resumed_adapter_beside_a_bf16_base_goes_on_bit_by_bit() {
    narrow::goes_on_bit_by_bit("tch");
}
