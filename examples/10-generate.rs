//! The decode loop with a model of one's own: sampling, greedy choice, stopping early (merak-ckpt).
//!
//! `cargo run -p merak-examples --example 10-generate`
#![expect(clippy::print_stdout, reason = "an example prints")]

use anyhow::{Result, ensure};
use merak_ckpt::{
    BoxError, Completion, GenerateOptions, LogitsSource, NewToken, Reason, Row, generate,
    generate_with,
};
use std::{collections::BTreeMap, ops::ControlFlow};

const TEXT: &str = "\
the rank that waits is the rank that works; the rank that works sends what the next rank needs. \
a stage that sends its gradient waits for the next one, and the stage that waits is the bubble. \
the bubble shrinks when the batch grows; the batch grows when the memory allows it. ";
/// Characters that the next one is guessed from.
const ORDER: usize = 4;

/// A Markov chain over characters: how often each one followed the `ORDER` before it.
struct Chain {
    counts: BTreeMap<Vec<u32>, BTreeMap<u32, f32>>,
}

impl Chain {
    fn learn(text: &str) -> Self {
        let mut counts: BTreeMap<_, BTreeMap<_, _>> = BTreeMap::new();
        for window in tokens(&text.repeat(2)).windows(ORDER + 1) {
            let followers = counts.entry(window[..ORDER].to_vec()).or_default();
            *followers.entry(window[ORDER]).or_insert(0.0) += 1.0;
        }
        Self { counts }
    }
}

/// All that the decode loop wants of a model: logits of the next token, for several sequences at once.
impl LogitsSource for Chain {
    fn next_logits(&mut self, rows: &[Row<'_>]) -> Result<Vec<Vec<f32>>, BoxError> {
        let of_row = |row: &Row<'_>| {
            let context = row
                .tokens
                .last_chunk::<ORDER>()
                .ok_or("a prompt is too short")?;
            let followers = self
                .counts
                .get(context.as_slice())
                .ok_or("a prompt is unknown")?;
            let mut logits = vec![f32::NEG_INFINITY; 128];
            for (&token, count) in followers {
                logits[token as usize] = count.ln();
            }
            Ok(logits)
        };
        rows.iter().map(of_row).collect()
    }
}

fn main() -> Result<()> {
    let mut model = Chain::learn(TEXT);
    let prompts: Vec<_> = ["the rank ", "a stage ", "the batch "].map(tokens).into();
    let options = GenerateOptions {
        max_new_tokens: 60,
        temperature: 1.0,
        top_p: 0.95,
        ..GenerateOptions::default()
    };

    let sampled = generate(&mut model, &prompts, &options)?;
    for completion in &sampled {
        println!(
            "sampled  {}|{}",
            text(&completion.prompt_ids),
            text(&completion.ids)
        );
    }
    // A draw depends on the seed, the prompt's index and the position: not on the batch around it.
    let options_of_last = GenerateOptions {
        first_prompt: 2,
        ..options.clone()
    };
    let alone = generate(&mut model, &prompts[2..], &options_of_last)?;
    ensure!(
        alone[0] == sampled[2],
        "the same text alone as in the batch"
    );
    let reseeded = GenerateOptions {
        seed: 43,
        ..options.clone()
    };
    ensure!(
        generate(&mut model, &prompts, &reseeded)? != sampled,
        "another seed, another text"
    );

    // Temperature 0 takes the likeliest token.
    let greedy = GenerateOptions {
        temperature: 0.0,
        ..options.clone()
    };
    let likeliest = generate(&mut model, &prompts, &greedy)?;
    println!(
        "greedy   {}|{}",
        text(&likeliest[0].prompt_ids),
        text(&likeliest[0].ids)
    );
    ensure!(likeliest == generate(&mut model, &prompts, &GenerateOptions { seed: 7, ..greedy })?);

    // A callback sees each token as it is chosen, to show it or to end a sequence: here at a full stop.
    let mut shown = String::new();
    let mut on_token = |token: NewToken| {
        if token.prompt == 0 {
            shown.push_str(&text(&[token.id]));
        }
        if token.id == u32::from(b'.') {
            ControlFlow::Break(())
        } else {
            ControlFlow::Continue(())
        }
    };
    let long = GenerateOptions {
        max_new_tokens: 1000,
        ..options
    };
    let sentences = generate_with(&mut model, &prompts, &long, &mut on_token)?;
    for Completion {
        prompt_ids,
        ids,
        reason,
    } in &sentences
    {
        println!("sentence {}|{} ({reason:?})", text(prompt_ids), text(ids));
        ensure!(*reason == Reason::Stop && ids.last() == Some(&u32::from(b'.')));
    }
    ensure!(
        shown == text(&sentences[0].ids),
        "the callback saw every token"
    );
    Ok(())
}

fn tokens(text: &str) -> Vec<u32> {
    text.bytes().map(u32::from).collect()
}

fn text(tokens: &[u32]) -> String {
    tokens
        .iter()
        .filter_map(|&token| char::from_u32(token))
        .collect()
}
