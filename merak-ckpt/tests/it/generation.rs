//! The decode loop over toy models.

use merak_ckpt::{
    BeamSearch, BoxError, Completion, Error, GenerateOptions, LogitsSource, Reason, Row, Sampler,
    TokenSource, generate, generate_with,
};
use std::ops::ControlFlow;

const VOCAB: u32 = 11;

/// Logits that depend on the whole sequence.
#[derive(Default)]
struct Toy {
    /// Rows of each call.
    calls: Vec<usize>,
}

fn logits(tokens: &[u32]) -> Vec<f32> {
    let hash = tokens
        .iter()
        .fold(17_u32, |h, &t| h.wrapping_mul(0x0100_0193) ^ (t + 1));
    (0..VOCAB)
        .map(|id| (hash.wrapping_mul(2 * id + 1) >> 16) as f32 / 16384.0)
        .collect()
}

impl LogitsSource for Toy {
    fn next_logits(&mut self, rows: &[Row<'_>]) -> Result<Vec<Vec<f32>>, BoxError> {
        self.calls.push(rows.len());
        Ok(rows.iter().map(|row| logits(row.tokens)).collect())
    }
}

fn options() -> GenerateOptions {
    GenerateOptions {
        max_new_tokens: 8,
        top_p: 1.0,
        temperature: 1.0,
        ..Default::default()
    }
}

fn run(prompts: &[Vec<u32>], options: &GenerateOptions) -> Vec<Completion> {
    generate(&mut Toy::default(), prompts, options).expect("the toy answers")
}

#[test]
fn greedy_decoding_follows_the_greatest_logit() {
    let greedy = GenerateOptions {
        temperature: 0.0,
        ..options()
    };
    let completion = run(&[vec![1, 2]], &greedy).remove(0);
    let mut tokens = vec![1, 2];
    for &id in &completion.ids {
        let logits = logits(&tokens);
        assert!(logits.iter().all(|&logit| logit <= logits[id as usize]));
        tokens.push(id);
    }
    assert_eq!(
        (completion.ids.len(), completion.reason),
        (8, Reason::Length)
    );
}

#[test]
fn beams_and_prompts_beyond_all_are_refused_or_not_there() {
    let prompts = [vec![1], vec![2, 3]];
    let beams = |num_beams, first_prompt| {
        let options = GenerateOptions {
            num_beams,
            first_prompt,
            ..options()
        };
        BeamSearch::new(&prompts, &options)
    };
    for (num_beams, first) in [(usize::MAX, 0), (2, u64::MAX), (0, 0)] {
        assert!(matches!(
            beams(num_beams, first),
            Err(Error::InvalidOption { .. })
        ));
    }
    let search = beams(2, 5).expect("two prompts");
    assert_eq!(search.rows(5).len(), 1);
    for prompt in [0, 7, u64::MAX] {
        assert!(search.rows(prompt).is_empty());
    }
    assert!(search.row(0).is_none());
}

#[test]
fn a_prompt_gets_the_same_tokens_alone_and_in_company() {
    let prompts = [vec![1], vec![2, 3, 4], vec![5, 6]];
    let together = run(&prompts, &options());
    for (index, prompt) in prompts.iter().enumerate() {
        let alone = GenerateOptions {
            first_prompt: index as u64,
            ..options()
        };
        assert_eq!(
            run(std::slice::from_ref(prompt), &alone),
            together[index..=index]
        );
    }
    let other_seed = run(
        &prompts,
        &GenerateOptions {
            seed: 43,
            ..options()
        },
    );
    assert_ne!(other_seed, together);
    let same_prompt_twice = run(&[vec![1], vec![1]], &options());
    assert_ne!(same_prompt_twice[0].ids, same_prompt_twice[1].ids);
}

#[test]
fn rows_end_one_by_one_and_the_others_go_on() {
    let options = GenerateOptions {
        max_new_tokens: 30,
        seq_length: Some(12),
        eos_token_ids: vec![0, 3],
        ..options()
    };
    let mut toy = Toy::default();
    let completions = generate(&mut toy, &[vec![1], vec![1; 9], vec![2; 11]], &options).unwrap();
    for completion in &completions {
        let length = completion.prompt_ids.len() + completion.ids.len();
        let (last, before) = completion.ids.split_last().unwrap();
        assert!(before.iter().all(|id| ![0, 3].contains(id)));
        match completion.reason {
            Reason::Eos => assert!([0, 3].contains(last)),
            Reason::Length => assert_eq!(length, 12),
            Reason::Stop => panic!("nobody stopped it"),
        }
    }
    assert_eq!(completions[2].ids.len(), 1);
    assert_eq!(toy.calls[0], 3);
    assert_eq!(
        toy.calls.iter().sum::<usize>(),
        completions.iter().map(|c| c.ids.len()).sum::<usize>()
    );
}

#[test]
fn the_callback_sees_each_token_and_may_stop_a_row() {
    let mut seen = Vec::new();
    let completions = generate_with(
        &mut Toy::default(),
        &[vec![1], vec![2, 2]],
        &options(),
        &mut |token| {
            seen.push((token.prompt, token.position, token.id));
            if token.prompt == 1 && token.position == 4 {
                ControlFlow::Break(())
            } else {
                ControlFlow::Continue(())
            }
        },
    )
    .unwrap();
    assert_eq!(
        (completions[1].ids.len(), completions[1].reason),
        (3, Reason::Stop)
    );
    assert_eq!(
        (completions[0].ids.len(), completions[0].reason),
        (8, Reason::Length)
    );
    assert_eq!(seen.len(), 11);
    assert_eq!(seen[1], (1, 2, completions[1].ids[0]));
}

#[test]
fn ranks_that_share_picked_tokens_complete_alike() {
    // Only one rank has logits; the others get its tokens, as over a broadcast.
    struct LastStage {
        sent: Vec<Vec<u32>>,
    }
    impl TokenSource for LastStage {
        fn next_tokens(
            &mut self,
            rows: &[Row<'_>],
            sampler: &Sampler,
        ) -> Result<Vec<u32>, BoxError> {
            let pick = |row: &Row<'_>| row.pick(sampler, &logits(row.tokens));
            self.sent
                .push(rows.iter().map(pick).collect::<Result<_, _>>()?);
            Ok(self.sent[self.sent.len() - 1].clone())
        }
    }
    struct OtherStage(std::vec::IntoIter<Vec<u32>>);
    impl TokenSource for OtherStage {
        fn next_tokens(&mut self, _: &[Row<'_>], _: &Sampler) -> Result<Vec<u32>, BoxError> {
            self.0
                .next()
                .ok_or_else(|| "the last stage sent no more".into())
        }
    }
    let prompts = [vec![1, 2], vec![3]];
    let options = GenerateOptions {
        eos_token_ids: vec![4],
        ..options()
    };
    let mut last = LastStage { sent: Vec::new() };
    let expected = generate(&mut last, &prompts, &options).unwrap();
    let found = generate(&mut OtherStage(last.sent.into_iter()), &prompts, &options).unwrap();
    assert_eq!(found, expected);
    assert_eq!(run(&prompts, &options), expected);
}

#[test]
fn wrong_options_and_prompts_are_refused_with_the_legal_values() {
    let message = |prompts: &[Vec<u32>], change: fn(&mut GenerateOptions)| {
        let mut options = options();
        change(&mut options);
        generate(&mut Toy::default(), prompts, &options)
            .unwrap_err()
            .to_string()
    };
    let prompt = [vec![1, 2]];
    let messages = [
        message(&[vec![1], vec![]], |_| ()),
        message(&prompt, |o| o.seq_length = Some(2)),
        message(&prompt, |o| o.max_new_tokens = 0),
        message(&prompt, |o| o.temperature = -1.0),
        message(&prompt, |o| o.top_p = 1.5),
        message(&prompt, |o| o.min_p = f64::NAN),
        message(&prompt, |o| o.repetition_penalty = 0.0),
    ];
    insta::assert_snapshot!(messages.join("\n"), @"
    prompt 1 is empty, expected at least one token
    prompt 0 has 2 tokens, expected 1 to 1 so that there is room for a new one
    `max_new_tokens` is 0, expected at least 1
    `temperature` is -1, expected 0 or more
    `top_p` is 1.5, expected more than 0, at most 1
    `min_p` is NaN, expected 0 to 1
    `repetition_penalty` is 0, expected more than 0
    ");
}

#[test]
fn a_failing_model_is_named_as_the_source() {
    struct Broken(usize);
    impl LogitsSource for Broken {
        fn next_logits(&mut self, _: &[Row<'_>]) -> Result<Vec<Vec<f32>>, BoxError> {
            if self.0 == 0 {
                Err("out of memory".into())
            } else {
                Ok(vec![vec![0.0]; self.0])
            }
        }
    }
    let failed = generate(&mut Broken(0), &[vec![1]], &options());
    assert!(matches!(failed, Err(Error::Source(source)) if source.to_string() == "out of memory"));
    let short = generate(&mut Broken(1), &[vec![1], vec![2]], &options());
    assert!(matches!(
        short,
        Err(Error::SourceLength {
            expected: 2,
            found: 1
        })
    ));
}

/// A case of `goldens/sampling/distributions.json`.
#[derive(Debug, serde::Deserialize)]
struct Distribution {
    options: serde_json::Value,
    tokens: Vec<u32>,
    logits: Vec<f32>,
    ids: Vec<u32>,
    probabilities: Vec<f64>,
}

#[test]
fn tokens_are_drawn_from_the_distributions_of_transformers() {
    let path = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/tests/goldens/sampling/distributions.json"
    );
    let golden: serde_json::Value = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
    let cases: Vec<Distribution> = serde_json::from_value(golden["cases"].clone()).unwrap();
    assert!(cases.len() > 8);
    for case in cases {
        let mut options = serde_json::json!({ "temperature": 1.0, "top_p": 1.0, "top_k": 0 });
        for (name, value) in case.options.as_object().unwrap() {
            options[name] = value.clone();
        }
        let sampler = Sampler::new(&serde_json::from_value(options).unwrap()).unwrap();
        let found = sampler
            .probabilities(&case.logits, 0, &case.tokens)
            .unwrap();
        let ids: Vec<_> = found.iter().map(|(id, _)| *id).collect();
        assert_eq!(ids, case.ids, "{}", case.options);
        for ((_, found), expected) in found.iter().zip(&case.probabilities) {
            assert!(
                (found - expected).abs() < 1e-6,
                "{found}, expected {expected} with {}",
                case.options
            );
        }
    }
}
