//! `merak generate`: text from a checkpoint.

use super::{Outcome, environment, model, output};
use clap::Args as ClapArgs;
use merak_ckpt::{Checkpoint, Completion, GenerateOptions};
use merak_trainer::{
    CheckedArguments, Config, Error, MerakTrainer, Plan, Result, TrainerParts, data::Tokenizer,
    run_world, threads_per_rank,
};
use serde_json::json;
use std::{fs, path::PathBuf, process::ExitCode, sync::Arc};

/// Continues prompts with a trained model.
#[derive(Debug, ClapArgs)]
#[command(group = clap::ArgGroup::new("prompts").required(true))]
pub(crate) struct Args {
    /// A checkpoint, or the output folder of a run.
    checkpoint: PathBuf,
    /// A text to continue; may be repeated.
    #[arg(long, group = "prompts", value_name = "TEXT")]
    prompt: Vec<String>,
    /// Token ids to continue, which need no tokenizer; may be repeated.
    #[arg(long, group = "prompts", value_name = "5,17,3")]
    prompt_ids: Vec<String>,
    /// A file with one prompt per line.
    #[arg(long, group = "prompts", value_name = "FILE")]
    prompt_file: Option<PathBuf>,
    /// Most new tokens per prompt.
    #[arg(long, default_value_t = 128)]
    max_new_tokens: usize,
    /// Sampling temperature; 0 takes the likeliest token.
    #[arg(long, default_value_t = 0.9, allow_negative_numbers = true)]
    temperature: f64,
    /// Draws from the K likeliest tokens only; 0 is off.
    #[arg(long, default_value_t = 0, value_name = "K")]
    top_k: usize,
    /// Draws from the likeliest tokens up to this probability.
    #[arg(long, default_value_t = 0.9, value_name = "P")]
    top_p: f64,
    /// Seed of the draws.
    #[arg(long, default_value_t = 42)]
    seed: u64,
    /// Tensor-parallel ranks.
    #[arg(long, default_value_t = 1)]
    tp: usize,
    /// Pipeline stages.
    #[arg(long, default_value_t = 1)]
    pp: usize,
    /// Prints one JSON document.
    #[arg(long)]
    json: bool,
}

/// The sampling options of a configuration.
pub(crate) fn options_of(args: &CheckedArguments) -> GenerateOptions {
    GenerateOptions {
        max_new_tokens: args.new_token_limit(),
        temperature: args.temperature,
        top_k: args.top_k,
        top_p: args.top_p,
        min_p: args.min_p,
        repetition_penalty: args.repetition_penalty,
        eos_token_ids: args.eos_token_id.into_iter().map(|id| id as u32).collect(),
        seed: args.seed,
        ..GenerateOptions::default()
    }
}

pub(crate) fn run(args: &Args) -> Outcome {
    let checkpoint = Checkpoint::open(&args.checkpoint)?;
    let folder = checkpoint.path().to_owned();
    let tokenizer_file = folder.join("tokenizer.json");
    let tokenizer = if tokenizer_file.exists() {
        Some(Tokenizer::from_file(&tokenizer_file)?)
    } else {
        None
    };
    let prompts = prompts(args, tokenizer.as_ref())?;
    let keys = [
        (
            "--model.config",
            folder.join("config.json").display().to_string(),
        ),
        ("--resume_from_checkpoint", folder.display().to_string()),
        ("--finetune", "true".to_owned()),
        ("--output_dir", folder.display().to_string()),
        ("--tp", args.tp.to_string()),
        ("--pp", args.pp.to_string()),
        ("--per_device_train_batch_size", "1".to_owned()),
        (
            "--seq_length",
            checkpoint.manifest().header.model["seq_length"].to_string(),
        ),
    ];
    let keys: Vec<_> = keys
        .into_iter()
        .flat_map(|(key, value)| [key.to_owned(), value])
        .collect();
    let checked = Config::load(None, environment::variables(), &keys)?.check()?;
    let (built, _) = model::load(&checked)?;
    let eos_token_ids = built
        .info()
        .eos_token_id
        .into_iter()
        .chain(tokenizer.as_ref().and_then(Tokenizer::end_of_document))
        .collect();
    let options = GenerateOptions {
        max_new_tokens: args.max_new_tokens,
        temperature: args.temperature,
        top_k: args.top_k,
        top_p: args.top_p,
        seed: args.seed,
        eos_token_ids,
        ..GenerateOptions::default()
    };
    let plan = Arc::new(Plan::new(built, &checked)?);
    plan.expect_causal("text generation")?;
    let results = run_world(&checked, |member| {
        let mpu = merak_mpu::Mpu::new(member, plan.degrees)?;
        let parts = TrainerParts {
            num_threads: threads_per_rank(&checked),
            ..TrainerParts::default()
        };
        MerakTrainer::new(Arc::clone(&plan), mpu, &checked, parts)?.generate(&prompts, &options)
    })?;
    let completions = results
        .into_iter()
        .next()
        .expect("a world has a first rank");
    output::print(&show(&completions, tokenizer.as_ref(), args.json)?)?;
    Ok(ExitCode::SUCCESS)
}

/// The prompts as token ids.
fn prompts(
    args: &Args,
    tokenizer: Option<&Tokenizer>,
) -> Result<Vec<Vec<u32>>, Box<dyn std::error::Error + Send + Sync>> {
    if !args.prompt_ids.is_empty() {
        return args.prompt_ids.iter().map(|ids| parse_ids(ids)).collect();
    }
    let mut texts = args.prompt.clone();
    if let Some(path) = &args.prompt_file {
        let text = fs::read_to_string(path).map_err(|source| Error::Read {
            path: path.clone(),
            source,
        })?;
        texts.extend(
            text.lines()
                .filter(|line| !line.is_empty())
                .map(str::to_owned),
        );
    }
    let tokenizer =
        tokenizer.ok_or("the checkpoint has no tokenizer.json: give --prompt-ids instead")?;
    Ok(texts
        .iter()
        .map(|text| tokenizer.encode(text.as_bytes()))
        .collect::<Result<_>>()?)
}

fn parse_ids(list: &str) -> Result<Vec<u32>, Box<dyn std::error::Error + Send + Sync>> {
    let id = |id: &str| {
        id.trim().parse().map_err(|_| {
            format!("\"{id}\" in --prompt-ids is no token id: write ids as 5,17,3").into()
        })
    };
    list.split(',').map(id).collect()
}

fn show(
    completions: &[Completion],
    tokenizer: Option<&Tokenizer>,
    as_json: bool,
) -> Result<String> {
    let text = |ids: &[u32]| tokenizer.map(|tokenizer| tokenizer.decode(ids)).transpose();
    if as_json {
        let entry = |completion: &Completion| {
            Ok(
                json!({ "prompt_ids": completion.prompt_ids, "ids": completion.ids, "text": text(&completion.ids)?, "reason": completion.reason }),
            )
        };
        let entries = completions.iter().map(entry).collect::<Result<Vec<_>>>()?;
        return Ok(format!("{:#}", serde_json::Value::Array(entries)));
    }
    let mut shown = Vec::new();
    for completion in completions {
        shown.push(
            match (text(&completion.prompt_ids)?, text(&completion.ids)?) {
                (Some(prompt), Some(new)) => format!("{prompt}{new}"),
                _ => format!("{:?}", completion.ids),
            },
        );
    }
    Ok(shown.join("\n---\n"))
}
