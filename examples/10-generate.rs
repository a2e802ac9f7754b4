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

/// All that the decode loop wants of a model: logits of the next token, for several sequences at
/// once.
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
    sample(&mut model, &prompts)?;
    take_the_likeliest(&mut model, &prompts)?;
    stop_at_the_full_stop(&mut model, &prompts)
}

/// A draw depends on the seed, the prompt's index and the position: not on the batch around it.
fn sample(model: &mut Chain, prompts: &[Vec<u32>]) -> Result<()> {
    let mut options = GenerateOptions {
        max_new_tokens: 60,
        temperature: 1.0,
        top_p: 0.95,
        ..GenerateOptions::default()
    };
    let sampled = generate(model, prompts, &options)?;
    for completion in &sampled {
        show("sampled", completion);
    }
    options.first_prompt = 2;
    let alone = generate(model, &prompts[2..], &options)?;
    ensure!(alone == sampled[2..], "the same alone as in the batch");
    (options.first_prompt, options.seed) = (0, 43);
    let others = generate(model, prompts, &options)?;
    ensure!(others != sampled, "another seed, another text");
    Ok(())
}

/// Temperature 0 draws nothing.
fn take_the_likeliest(model: &mut Chain, prompts: &[Vec<u32>]) -> Result<()> {
    let mut options = GenerateOptions {
        max_new_tokens: 60,
        temperature: 0.0,
        ..GenerateOptions::default()
    };
    let likeliest = generate(model, prompts, &options)?;
    show("likeliest", &likeliest[0]);
    options.seed = 7;
    let again = generate(model, prompts, &options)?;
    ensure!(again == likeliest, "the seed does not matter");
    Ok(())
}

/// A callback sees each token as it is chosen, to print it at once or to end a sequence.
fn stop_at_the_full_stop(model: &mut Chain, prompts: &[Vec<u32>]) -> Result<()> {
    let full_stop = u32::from(b'.');
    let mut seen = Vec::new();
    let mut on_token = |token: NewToken| {
        if token.prompt == 0 {
            seen.push(token.id);
        }
        if token.id == full_stop {
            return ControlFlow::Break(());
        }
        ControlFlow::Continue(())
    };
    let options = GenerateOptions::default();
    let sentences = generate_with(model, prompts, &options, &mut on_token)?;
    for sentence in &sentences {
        show("sentence", sentence);
        ensure!(sentence.reason == Reason::Stop && sentence.ids.ends_with(&[full_stop]));
    }
    ensure!(seen == sentences[0].ids, "the callback saw every token");
    Ok(())
}

fn show(how: &str, completion: &Completion) {
    let (prompt, new) = (text(&completion.prompt_ids), text(&completion.ids));
    println!("{how:<9}  {prompt}|{new}");
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
