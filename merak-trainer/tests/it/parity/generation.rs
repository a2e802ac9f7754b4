//! Prompts of several lengths in one batch are continued as `transformers` continues them.

use std::{fs, path::Path};

use merak_ckpt::GenerateOptions;
use merak_trainer::{StopStrings, data::Tokenizer};
use serde::Deserialize;
use tempfile::tempdir;

use super::Golden;

/// What `transformers` gave.
#[derive(Debug, Deserialize)]
struct Continued {
    base: String,
    prompts: Vec<Vec<u32>>,
    repetition_penalty: f64,
    tokens: Vec<Vec<u32>>,
    tokens_penalised: Vec<Vec<u32>>,
}

fn check(name: &str) {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/goldens/generation");
    let text = fs::read(folder.join(format!("{name}.json"))).expect("the golden is there");
    let golden: Continued = serde_json::from_slice(&text).expect("it is as the script writes it");
    let base = Golden::read(&golden.base);
    let folder = tempdir().expect("a temporary folder");
    base.write_hf(folder.path());
    let case = base
        .case()
        .with("resume_from_checkpoint", folder.path().display())
        .with("finetune", true);
    let greedy = GenerateOptions {
        max_new_tokens: golden.tokens[0].len(),
        temperature: 0.0,
        ..GenerateOptions::default()
    };
    let penalised = GenerateOptions {
        repetition_penalty: golden.repetition_penalty,
        ..greedy.clone()
    };
    // All together, and on two stages as two groups that follow each other.
    for degrees in [(1, 1, 1), (1, 2, 1), (1, 1, 2), (1, 2, 2)] {
        let mut ranks = case.clone().on(degrees).on_ranks(|trainer| {
            let tokens = |completions: Vec<merak_ckpt::Completion>| {
                let ids = completions.into_iter().map(|completion| completion.ids);
                ids.collect::<Vec<_>>()
            };
            let plain = tokens(trainer.generate(&golden.prompts, &greedy)?);
            Ok((
                plain,
                tokens(trainer.generate(&golden.prompts, &penalised)?),
            ))
        });
        let (plain, penalised) = ranks.swap_remove(0);
        assert_eq!(plain, golden.tokens, "{name} on {degrees:?}");
        assert_eq!(penalised, golden.tokens_penalised, "{name} on {degrees:?}");
    }
}

#[test]
fn prompts_of_several_lengths_have_the_tokens_of_transformers() {
    for name in ["gpt2", "llama", "mistral", "opt", "qwen3"] {
        check(name);
    }
}

/// Where `transformers` ends texts.
#[derive(Debug, Deserialize)]
struct Stops {
    sequences: Vec<Vec<u32>>,
    strings: Vec<String>,
    /// For each string and sequence, the lengths at which the text has come to its end.
    ends: Vec<Vec<Vec<usize>>>,
}

#[test]
fn stop_strings_end_texts_where_they_do_in_transformers() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/goldens/stop_strings");
    let text = fs::read(folder.join("stops.json")).expect("the golden is there");
    let golden: Stops = serde_json::from_slice(&text).expect("it is as the script writes it");
    let tokenizer = Tokenizer::from_file(&folder.join("tokenizer.json")).expect("a tokenizer");
    for (string, expected) in golden.strings.iter().zip(&golden.ends) {
        let stops = StopStrings::new(&tokenizer, std::slice::from_ref(string));
        for (sequence, expected) in golden.sequences.iter().zip(expected) {
            let lengths = 1..=sequence.len();
            let found: Vec<_> = lengths.filter(|&len| stops.end(&sequence[..len])).collect();
            let text = tokenizer.decode(sequence).expect("tokens of a text");
            assert_eq!(&found, expected, "{string:?} in {text:?}");
        }
    }
}
