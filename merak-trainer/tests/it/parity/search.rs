//! Beam search, end tokens, least lengths and runs that may not repeat give the tokens of
//! `transformers`, of decoders and of encoder-decoders.

use std::{collections::BTreeMap, fs, path::Path};

use merak_ckpt::{Completion, EarlyStopping, GenerateOptions};
use serde::Deserialize;
use serde_json::Value;
use tempfile::tempdir;

use super::Golden;

/// What `transformers` gave.
#[derive(Debug, Deserialize)]
struct Searched {
    config: Value,
    parameters: BTreeMap<String, Vec<usize>>,
    decoder_start_token_id: Option<u32>,
    prompts: Vec<Vec<u32>>,
    results: Vec<Continued>,
}

/// The tokens under some options.
#[derive(Debug, Deserialize)]
struct Continued {
    options: Value,
    tokens: Vec<Vec<u32>>,
}

impl Searched {
    fn read(name: &str) -> Self {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/goldens/search");
        let text = fs::read(folder.join(format!("{name}.json"))).expect("the golden is there");
        serde_json::from_slice(&text).expect("it is as the script writes it")
    }

    fn options(&self, stated: &Value) -> GenerateOptions {
        let number = |name: &str, default: f64| stated[name].as_f64().unwrap_or(default);
        let count = |name: &str, default: u64| stated[name].as_u64().unwrap_or(default) as usize;
        let ends = stated["eos_token_id"].as_array().into_iter().flatten();
        GenerateOptions {
            max_new_tokens: 8,
            temperature: 0.0,
            repetition_penalty: number("repetition_penalty", 1.0),
            no_repeat_ngram_size: count("no_repeat_ngram_size", 0),
            min_new_tokens: count("min_new_tokens", 0),
            num_beams: count("num_beams", 1),
            length_penalty: number("length_penalty", 1.0),
            early_stopping: match &stated["early_stopping"] {
                Value::Bool(true) => EarlyStopping::Yes,
                Value::String(_) => EarlyStopping::Never,
                _ => EarlyStopping::No,
            },
            eos_token_ids: ends
                .map(|id| id.as_u64().expect("a token") as u32)
                .collect(),
            decoder_start_token_id: self.decoder_start_token_id,
            ..GenerateOptions::default()
        }
    }
}

fn check(name: &str, degrees: &[(usize, usize, usize)], use_cache: bool) {
    let golden = Searched::read(name);
    let base = Golden {
        config: golden.config.clone(),
        seq: 8,
        parameters: golden.parameters.clone(),
        logits: Vec::new(),
        losses: Vec::new(),
    };
    let folder = tempdir().expect("a temporary folder");
    base.write_hf(folder.path());
    let case = base
        .case()
        .with("resume_from_checkpoint", folder.path().display())
        .with("finetune", true)
        .with("use_cache", use_cache);
    for &degrees in degrees {
        let ranks = case.clone().on(degrees).on_ranks(|trainer| {
            let mut all = Vec::new();
            for result in &golden.results {
                let options = golden.options(&result.options);
                all.push(trainer.generate(&golden.prompts, &options)?);
            }
            Ok(all)
        });
        for found in &ranks {
            for (result, completions) in golden.results.iter().zip(found) {
                let ids = |completion: &Completion| completion.ids.clone();
                let ids: Vec<_> = completions.iter().map(ids).collect();
                let options = &result.options;
                assert_eq!(ids, result.tokens, "{name} on {degrees:?}: {options}");
                for (completion, prompt) in completions.iter().zip(&golden.prompts) {
                    assert_eq!(completion.prompt_ids, *prompt);
                }
            }
        }
    }
}

#[test]
fn decoders_search_as_transformers_does() {
    for name in ["gpt2", "llama"] {
        check(name, &[(1, 1, 1), (1, 2, 1), (2, 1, 2)], true);
        check(name, &[(1, 1, 2)], false);
    }
}

#[test]
fn encoder_decoders_generate_as_transformers_does() {
    for name in ["t5", "t5-gated"] {
        check(name, &[(1, 1, 1), (1, 2, 1), (2, 1, 2), (1, 2, 2)], true);
        check(name, &[(1, 1, 2)], false);
    }
}
