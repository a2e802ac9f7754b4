//! `text_generation = true`: prompts on standard input instead of training. An empty line has an
//! empty answer, and so has a line that is no prompt, which is reported.

use super::{
    Outcome,
    model::Loaded,
    output,
    session::{Session, own_adapter, resumed, trained_tokenizer},
};
use merak_trainer::{
    Config, Error, InputPath, MerakArguments, MerakTrainer, Origin, Result, World, data::Tokenizer,
};
use std::{
    io::{self, BufRead, IsTerminal, Read as _},
    path::PathBuf,
    process::ExitCode,
};

/// The line that ends the loop.
const STOP: &str = "stop";

/// Continues one line of standard input after the other, until one says `stop` or there are no
/// more.
pub(crate) fn run(config: &Config, world: &World) -> Outcome {
    let located = |error| config.locate(error);
    let session = world.agree(session(config, world).map_err(located))?;
    session.check_same(world, &[])?;
    let refused = continue_lines(&session, world).map_err(located)?;
    // The same status as for other faulty inputs.
    Ok(ExitCode::from(if refused > 0 { 2 } else { 0 }))
}

/// The model of the configuration, ready to continue prompts.
fn session(config: &Config, world: &World) -> Result<Session> {
    let mut arguments = config.check()?.into_arguments();
    // Only the weights of a checkpoint are loaded.
    arguments.finetune = arguments.resume_from_checkpoint.is_some();
    if let (None, Some((file, name))) = (&arguments.lora_config, resumed_adapter(&arguments)) {
        arguments.lora_config = Some(InputPath(file));
        arguments.adapter_name.0 = name;
    }
    let checked = arguments.check()?;
    let loaded = Loaded::of(&checked)?;
    let args = loaded.complete_to_generate(checked, config)?;
    if args.model.hf_dir.is_none() && args.resume_from_checkpoint.is_none() {
        tracing::warn!(
            "neither model.hf_dir nor resume_from_checkpoint is set: the model has random weights"
        );
    }
    let tokenizer = tokenizer(config)?;
    Session::new(world.place(args), loaded, tokenizer, 1)
}

/// Continues the lines; returns how many were refused.
fn continue_lines(session: &Session, world: &World) -> Result<usize> {
    session.on_ranks(world, |trainer| {
        let mut refused = 0;
        while let Some(line) = next_line(trainer)? {
            if line.is_empty() {
                answer_nothing(trainer);
                continue;
            }
            let prompt = session.tokens(&line);
            let prompt = prompt.and_then(|prompt| {
                session.check(trainer, std::slice::from_ref(&prompt))?;
                Ok(prompt)
            });
            let prompt = match prompt {
                Ok(prompt) => prompt,
                // Every rank gets the same error; the model stays for the next line.
                Err(error) => {
                    refused += 1;
                    if trainer.mpu().is_rank_0() {
                        let line = String::from_utf8_lossy(&line);
                        tracing::error!(%line, "{}", merak_trainer::chain(&error));
                    }
                    answer_nothing(trainer);
                    continue;
                }
            };
            let completions = session.generate(trainer, &[prompt], session.tokenizer.is_some())?;
            if trainer.mpu().is_rank_0() {
                let mut end = match session.tokenizer {
                    Some(_) => Vec::new(),
                    None => session.text(&completions[0].ids)?,
                };
                end.push(b'\n');
                output::stream(end);
            }
        }
        Ok(refused)
    })
}

/// The answer to a line that is not continued: an empty one, so that the answers to the lines of a
/// file keep their order. A person at a terminal sees the next prompt.
fn answer_nothing(trainer: &MerakTrainer) {
    if trainer.mpu().is_rank_0() && !io::stdin().is_terminal() {
        output::stream("\n");
    }
}

/// The checkpoint's own adapter.
fn resumed_adapter(arguments: &MerakArguments) -> Option<(PathBuf, String)> {
    own_adapter(&resumed(arguments)?)
}

/// The tokenizer that the configuration names, or that of `model.hf_dir`.
fn tokenizer(config: &Config) -> Result<Option<Tokenizer>> {
    let arguments = config.arguments();
    let file = arguments
        .model
        .hf_dir
        .as_ref()
        .map(|folder| folder.0.join("tokenizer.json"));
    if let Some(file) = trained_tokenizer(arguments) {
        return Tokenizer::from_file(&file).map(Some);
    }
    match file {
        _ if config.origin("data.tokenizer") != Origin::Default => {
            Tokenizer::load(&arguments.data.tokenizer).map(Some)
        }
        Some(file) if file.is_file() => Tokenizer::from_file(&file).map(Some),
        Some(_) => Ok(None),
        None => Tokenizer::load(&arguments.data.tokenizer).map(Some),
    }
}

/// The most bytes of a line of standard input.
const MAX_LINE_BYTES: u64 = 16 << 20;

/// The next prompt, on every rank; the first rank reads it.
fn next_line(trainer: &MerakTrainer) -> Result<Option<Vec<u8>>> {
    let world = trainer.mpu().world_group();
    let mut line = Vec::new();
    if trainer.mpu().is_rank_0() {
        if io::stdin().is_terminal() {
            output::stream("> ");
        }
        // The rest of a longer line becomes the next line.
        let mut input = io::stdin().lock().take(MAX_LINE_BYTES);
        let read = input.read_until(b'\n', &mut line);
        read.map_err(|source| Error::Read {
            path: "standard input".into(),
            source,
        })?;
    }
    let line = world.broadcast_bytes(line, 0)?;
    let is_end = |byte: &u8| matches!(byte, b'\r' | b'\n');
    let len = line.iter().rposition(|byte| !is_end(byte));
    let prompt = &line[..len.map_or(0, |last| last + 1)];
    Ok((!line.is_empty() && prompt != STOP.as_bytes()).then(|| prompt.to_vec()))
}
