//! `text_generation = true`: prompts on standard input instead of training. A line that is no prompt is told and passed
//! over.

use super::{Outcome, model::Loaded, output, session::Session};
use merak_trainer::{Config, MerakTrainer, Origin, Result, data::Tokenizer};
use std::{
    io::{self, BufRead, IsTerminal},
    process::ExitCode,
};

/// The line that ends the loop.
const STOP: &str = "stop";

/// Continues one line of standard input after the other, until one says `stop` or there are no more.
pub(crate) fn run(config: &Config) -> Outcome {
    let mut arguments = config.check()?.into_arguments();
    // Of a checkpoint, the weights.
    arguments.finetune = arguments.resume_from_checkpoint.is_some();
    let checked = arguments.check()?;
    let loaded = Loaded::of(&checked)?;
    let args = loaded.complete(checked)?;
    if args.model.hf_dir.is_none() && args.resume_from_checkpoint.is_none() {
        tracing::warn!(
            "neither model.hf_dir nor resume_from_checkpoint is set: the model has random weights"
        );
    }
    let tokenizer = tokenizer(config)?;
    let session = Session::new(args, loaded, tokenizer)?;
    let refused = session.on_ranks(|trainer| {
        let mut refused = 0;
        while let Some(line) = next_line(trainer)? {
            let prompt = session.tokens(&line);
            let prompt = prompt.and_then(|prompt| {
                session.check(trainer, std::slice::from_ref(&prompt))?;
                Ok(prompt)
            });
            let prompt = match prompt {
                Ok(prompt) => prompt,
                // Every rank sees it; the model stays for the next line.
                Err(error) => {
                    refused += 1;
                    if trainer.mpu().is_rank_0() {
                        tracing::error!(line, "{}", merak_trainer::chain(&error));
                    }
                    continue;
                }
            };
            let completions = session.generate(trainer, &[prompt], session.tokenizer.is_some())?;
            if trainer.mpu().is_rank_0() {
                let end = match session.tokenizer {
                    Some(_) => String::new(),
                    None => session.text(&completions[0].ids)?,
                };
                output::stream(&format!("{end}\n"));
            }
        }
        Ok(refused)
    })?;
    // As whatever else is wrong with an input.
    Ok(ExitCode::from(if refused > 0 { 2 } else { 0 }))
}

/// The tokenizer that the configuration names, or that of `model.hf_dir`.
fn tokenizer(config: &Config) -> Result<Option<Tokenizer>> {
    let arguments = config.arguments();
    let file = arguments
        .model
        .hf_dir
        .as_ref()
        .map(|folder| folder.0.join("tokenizer.json"));
    match file {
        _ if *config.origin("data.tokenizer") != Origin::Default => {
            Tokenizer::load(&arguments.data.tokenizer).map(Some)
        }
        Some(file) if file.is_file() => Tokenizer::from_file(&file).map(Some),
        Some(_) => Ok(None),
        None => Tokenizer::load(&arguments.data.tokenizer).map(Some),
    }
}

/// The next prompt, which the first rank reads, on every rank.
fn next_line(trainer: &MerakTrainer) -> Result<Option<String>> {
    let world = trainer.mpu().world_group();
    let mut line = String::new();
    if trainer.mpu().is_rank_0() {
        if io::stdin().is_terminal() {
            output::stream("> ");
        }
        // What cannot be read ends the prompts, as the end of the input does.
        if io::stdin().lock().read_line(&mut line).is_err() {
            line.clear();
        }
    }
    let bytes = world.broadcast_bytes(line.into_bytes(), 0)?;
    let line = String::from_utf8_lossy(&bytes);
    let prompt = line.trim_end_matches(['\r', '\n']);
    Ok((!line.is_empty() && prompt != STOP).then(|| prompt.to_owned()))
}
