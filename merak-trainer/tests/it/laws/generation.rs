//! N20: the tokens that a model generates do not depend on the ranks that hold it.

use merak_ckpt::{Completion, GenerateOptions};
use serde_json::json;
use std::ops::ControlFlow;

use super::encoders;
use crate::support::Case;

pub(crate) fn generate(
    case: &Case,
    prompts: &[Vec<u32>],
    options: &GenerateOptions,
) -> Vec<Completion> {
    let ranks = case.on_ranks(|trainer| {
        for _ in 0..3 {
            trainer.train_step()?;
        }
        trainer.generate(prompts, options)
    });
    for rank in &ranks {
        assert_eq!(*rank, ranks[0], "every rank has the same completions");
    }
    ranks.into_iter().next().expect("a first rank")
}

/// Prompts of three lengths, and the most likely tokens.
pub(crate) fn greedy() -> (Vec<Vec<u32>>, GenerateOptions) {
    let prompts = vec![vec![5, 17, 3], vec![80], vec![1, 2, 3, 4, 5, 6, 7]];
    let greedy = GenerateOptions {
        max_new_tokens: 6,
        temperature: 0.0,
        ..GenerateOptions::default()
    };
    (prompts, greedy)
}

#[test]
fn tokens_are_the_same_on_every_topology_and_alone_or_together() {
    let (prompts, greedy) = greedy();
    let drawn = GenerateOptions {
        temperature: 0.9,
        top_k: 20,
        top_p: 0.9,
        ..greedy.clone()
    };
    for case in [Case::gpt2(), Case::llama()] {
        for options in [&greedy, &drawn] {
            let alone = generate(&case, &prompts, options);
            assert!(alone.iter().all(|completion| completion.ids.len() == 6));
            for degrees in [(1, 1, 4), (1, 2, 1), (1, 2, 2), (2, 1, 2), (2, 2, 2)] {
                let case = case.clone().on(degrees);
                assert_eq!(generate(&case, &prompts, options), alone, "{degrees:?}");
            }
            // The second replica has no prompt, so its ranks make no pass.
            let prompt = std::slice::from_ref(&prompts[0]);
            for stage in [2, 3] {
                let case = case.clone().on((2, 2, 1)).with("zero_stage", stage);
                assert_eq!(generate(&case, prompt, options), alone[..1], "zero {stage}");
            }
            for (schedule, stages, ranks) in [
                ("interleaved_1f1b", 2, 2),
                ("zb_v", 2, 2),
                ("interleaved_1f1b", 4, 1),
            ] {
                let several = case.clone().on((1, 1, ranks));
                let several = several
                    .with("train_schedule", schedule)
                    .with("virtual_stages", stages);
                let found = generate(&several, &prompts, options);
                assert_eq!(found, alone, "{schedule} on {ranks}");
            }
            for (index, prompt) in prompts.iter().enumerate() {
                let options = GenerateOptions {
                    first_prompt: index as u64,
                    ..options.clone()
                };
                let single = generate(&case, std::slice::from_ref(prompt), &options);
                assert_eq!(single[0], alone[index]);
            }
        }
    }
}

#[test]
fn an_encoder_decoder_draws_by_its_seed_alone_on_every_topology_with_and_without_a_cache() {
    let (prompts, greedy) = greedy();
    let case = encoders::translation();
    let drawn = |seed| GenerateOptions {
        temperature: 0.9,
        top_k: 20,
        top_p: 0.9,
        decoder_start_token_id: Some(0),
        seed,
        ..greedy.clone()
    };
    let by_seed = [1, 2].map(|seed| generate(&case, &prompts, &drawn(seed)));
    assert_ne!(by_seed[0], by_seed[1]);
    for (seed, alone) in [1, 2].into_iter().zip(&by_seed) {
        assert!(alone.iter().all(|completion| completion.ids.len() == 6));
        let options = drawn(seed);
        for (degrees, use_cache) in [
            ((1, 1, 1), false),
            ((1, 2, 1), true),
            ((1, 1, 2), true),
            ((1, 1, 4), false),
            ((2, 2, 2), true),
        ] {
            let case = case.clone().on(degrees).with("use_cache", use_cache);
            let found = generate(&case, &prompts, &options);
            assert_eq!(found, *alone, "{degrees:?}, cache {use_cache}, seed {seed}");
        }
        let second = GenerateOptions {
            first_prompt: 1,
            ..options
        };
        let single = generate(&case, &prompts[1..2], &second);
        assert_eq!(single[0], alone[1], "seed {seed}");
    }
}

#[test]
fn replicas_share_out_the_prompts_and_all_get_everything() {
    let prompts: Vec<_> = (0..5).map(|first| vec![first, 7, 11]).collect();
    let options = GenerateOptions {
        max_new_tokens: 4,
        first_prompt: 3,
        ..GenerateOptions::default()
    };
    let alone = generate(&Case::gpt2(), &prompts, &options);
    // Ranks that share a sequence in training are replicas here.
    let shared = Case::gpt2().on((2, 2, 1)).sharing(2).with("zero_stage", 3);
    for case in [Case::gpt2().on((4, 1, 2)), shared] {
        let ranks = case.on_ranks(|trainer| {
            for _ in 0..3 {
                trainer.train_step()?;
            }
            let mut seen = Vec::new();
            let completions = trainer.generate_with(&prompts, &options, &mut |token| {
                seen.push(token.prompt);
                ControlFlow::Continue(())
            })?;
            seen.sort_unstable();
            seen.dedup();
            let replica = trainer.mpu().data_sequence_parallel_rank();
            Ok((replica, seen, completions))
        });
        for (replica, seen, completions) in ranks {
            let shares: [&[u64]; 4] = [&[3, 4], &[5], &[6], &[7]];
            assert_eq!(seen, shares[replica]);
            assert_eq!(completions, alone);
        }
    }
}

#[test]
fn a_prompt_without_room_is_refused() {
    let case = Case::gpt2();
    let fail = |prompts: &[Vec<u32>]| {
        let options = GenerateOptions {
            max_new_tokens: 4,
            ..GenerateOptions::default()
        };
        let outcome = case.try_on_ranks(|trainer| trainer.generate(prompts, &options));
        merak_trainer::chain(&outcome.expect_err("no room"))
    };
    insta::assert_snapshot!(fail(&[vec![1; 16]]), @"prompt 0 has 16 tokens, expected 1 to 15 so that there is room for a new one");
    insta::assert_snapshot!(fail(&[vec![]]), @"prompt 0 is empty, expected at least one token");
    insta::assert_snapshot!(fail(&[vec![3, 101]]), @"prompt 0 has the token 101, but the model knows 0 to 100 only");
}

#[test]
fn the_cache_changes_no_token() {
    // Several of one length, some of which end before the others.
    let prompts = vec![
        vec![5, 17, 3],
        vec![80],
        vec![9, 9, 4],
        vec![1, 2, 3, 4, 5, 6, 7],
        vec![3, 1, 2],
        vec![10, 20, 30, 40, 50, 60, 70, 80],
    ];
    // Positions whose scaling changes on the way; wide weights make them matter.
    let scaled = |scaling: serde_json::Value, longest: usize| {
        let case = Case::llama().with_model("rope_scaling", scaling);
        case.with_model("max_position_embeddings", longest)
            .with("init_method_std", 0.4)
    };
    let dynamic = json!({ "rope_type": "dynamic", "factor": 2 });
    let long = json!({ "rope_type": "longrope", "original_max_position_embeddings": 8,
        "short_factor": [1, 1, 1, 1], "long_factor": [1, 2, 4, 16] });
    for (family, case, ends) in [
        ("gpt2", Case::gpt2(), 3),
        ("llama", Case::llama(), 3),
        ("t5", encoders::translation(), 3),
        // None ends before the scaling has changed.
        ("dynamic", scaled(dynamic, 8), 101),
        ("longrope", scaled(long, 16), 101),
    ] {
        for temperature in [0.0, 0.9] {
            let options = GenerateOptions {
                max_new_tokens: 8,
                temperature,
                eos_token_ids: (0..101).step_by(ends).collect(),
                decoder_start_token_id: Some(0),
                ..GenerateOptions::default()
            };
            let without = generate(&case.clone().with("use_cache", false), &prompts, &options);
            let lengths: Vec<_> = without
                .iter()
                .map(|completion| completion.ids.len())
                .collect();
            let differ = lengths.iter().any(|&length| length != lengths[0]);
            assert!(differ || ends > 3, "{lengths:?}");
            for degrees in [(1, 1, 1), (1, 2, 1), (1, 1, 2), (2, 2, 2)] {
                let with = generate(&case.clone().on(degrees), &prompts, &options);
                assert_eq!(with, without, "{family} at {temperature} on {degrees:?}");
            }
        }
    }
}
