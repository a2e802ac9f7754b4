//! `merak generate`: text from a checkpoint.

use super::{Outcome, environment, model::Loaded, output};
use clap::Args as ClapArgs;
use merak_ckpt::{Adapter, Checkpoint, Completion, GenerateOptions, NewToken};
use merak_trainer::{
    ADAPTER_CONFIG, CheckedArguments, Config, Error, MerakTrainer, Origin, Plan, Result,
    TrainerParts, Workload, data::Tokenizer, run_world,
};
use serde_json::json;
use std::{
    collections::BTreeMap, fs, ops::ControlFlow, path::PathBuf, process::ExitCode, sync::Arc,
};

/// Continues prompts with a trained model.
#[derive(Debug, ClapArgs)]
#[command(group = clap::ArgGroup::new("prompts").required(true))]
pub(crate) struct Args {
    /// A checkpoint, the output folder of a run, or a Hugging Face folder.
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
    /// A PEFT folder, whose adapter is merged into the weights first.
    #[arg(long, value_name = "DIR")]
    adapter: Option<PathBuf>,
    /// Most new tokens per prompt [default: 128, where the environment has no other].
    #[arg(long)]
    max_new_tokens: Option<usize>,
    /// Sampling temperature; 0 takes the likeliest token [default: 0.9].
    #[arg(long, allow_negative_numbers = true)]
    temperature: Option<f64>,
    /// Draws from the K likeliest tokens only; 0 is off [default: 0].
    #[arg(long, value_name = "K")]
    top_k: Option<usize>,
    /// Draws from the likeliest tokens up to this probability [default: 0.9].
    #[arg(long, value_name = "P")]
    top_p: Option<f64>,
    /// Draws from tokens with at least this share of the likeliest one's probability; 0 is off [default: 0].
    #[arg(long, value_name = "P")]
    min_p: Option<f64>,
    /// Divides the positive logits of tokens that are already there; 1 is off [default: 1].
    #[arg(long, value_name = "F")]
    repetition_penalty: Option<f64>,
    /// Ends a text after this string; may be repeated.
    #[arg(long, value_name = "TEXT")]
    stop: Vec<String>,
    /// Prints the text as it comes; for one prompt.
    #[arg(long, conflicts_with = "json")]
    stream: bool,
    /// Seed of the draws [default: 42].
    #[arg(long)]
    seed: Option<u64>,
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

/// New tokens per prompt where nobody says how many: the whole sequence passes the model for each.
const NEW_TOKENS: usize = 128;

/// The sampling options of a configuration; where texts end is for the model and the tokenizer to say.
pub(crate) fn options_of(args: &CheckedArguments) -> GenerateOptions {
    GenerateOptions {
        max_new_tokens: args.new_token_limit(),
        temperature: args.temperature,
        top_k: args.top_k,
        top_p: args.top_p,
        min_p: args.min_p,
        repetition_penalty: args.repetition_penalty,
        seed: args.seed,
        ..GenerateOptions::default()
    }
}

pub(crate) fn run(args: &Args) -> Outcome {
    let checkpoint = Checkpoint::open_weights(&args.checkpoint)?;
    let tokenizer_file = checkpoint.path().join("tokenizer.json");
    let tokenizer = if tokenizer_file.exists() {
        Some(Tokenizer::from_file(&tokenizer_file)?)
    } else {
        None
    };
    let prompts = prompts(args, tokenizer.as_ref())?;
    if args.stream && (prompts.len() != 1 || tokenizer.is_none()) {
        return Err("--stream prints the text of one prompt, and needs a tokenizer".into());
    }
    if !args.stop.is_empty() && tokenizer.is_none() {
        return Err("--stop looks for text: the checkpoint has no tokenizer.json".into());
    }
    if args.stop.iter().any(String::is_empty) {
        return Err("--stop is empty: every text ends so".into());
    }
    let checked = args.configuration(&checkpoint)?;
    let loaded = Loaded::of(&checked)?;
    let checked = loaded.complete(checked)?;
    let options = GenerateOptions {
        eos_token_ids: loaded.ends(&checked, tokenizer.as_ref()),
        ..options_of(&checked)
    };
    let adapter = args.adapter.as_ref();
    let adapter = adapter
        .map(|folder| {
            let tensors = &checkpoint.manifest().tensors;
            let mut adapter = Adapter::open(folder, &loaded.json, tensors)?;
            adapter.measure(&checkpoint).map(|()| adapter)
        })
        .transpose()?;
    let plan = Arc::new(Plan::new(loaded.model, &checked)?);
    plan.check_memory(&checked, &[Workload::Generation])?;
    plan.expect_causal("text generation")?;
    let results = run_world(&checked, |member| {
        let mpu = merak_mpu::Mpu::new(member, plan.degrees)?;
        let parts = TrainerParts::default();
        let mut trainer = MerakTrainer::new(Arc::clone(&plan), mpu, &checked, parts)?;
        if let Some(adapter) = &adapter {
            trainer.merge_adapter(adapter)?;
        }
        let mut watch = Watch {
            tokenizer: tokenizer.as_ref(),
            stops: &args.stop,
            streams: args.stream && trainer.mpu().is_rank_0(),
            texts: BTreeMap::new(),
        };
        watch.begin(&prompts);
        trainer.generate_with(&prompts, &options, &mut |token| watch.see(token))
    })?;
    let completions = results
        .into_iter()
        .next()
        .expect("a world has a first rank");
    if args.stream {
        output::print("")?;
    } else {
        output::print(&show(&completions, tokenizer.as_ref(), args.json)?)?;
    }
    Ok(ExitCode::SUCCESS)
}

/// Follows texts as they grow.
struct Watch<'a> {
    tokenizer: Option<&'a Tokenizer>,
    stops: &'a [String],
    /// Whether what is new is printed at once.
    streams: bool,
    /// The new tokens of each prompt, and how much of their text was printed.
    texts: BTreeMap<u64, (Vec<u32>, usize)>,
}

impl Watch<'_> {
    /// Prints the prompt itself.
    fn begin(&self, prompts: &[Vec<u32>]) {
        if self.streams
            && let Some(Ok(text)) = self
                .tokenizer
                .map(|tokenizer| tokenizer.decode(&prompts[0]))
        {
            output::stream(&text);
        }
    }

    /// Takes note of a token; breaks where its text has come to a stop.
    fn see(&mut self, token: NewToken) -> ControlFlow<()> {
        let Some(tokenizer) = self.tokenizer else {
            return ControlFlow::Continue(());
        };
        let (ids, printed) = self.texts.entry(token.prompt).or_default();
        ids.push(token.id);
        if self.streams
            && let Ok(text) = tokenizer.decode(ids)
        {
            // A character may be spread over several tokens: it waits for the last of them.
            let whole = text.trim_end_matches(char::REPLACEMENT_CHARACTER);
            if let Some(new) = whole.get(*printed..) {
                output::stream(new);
                *printed = whole.len();
            }
        }
        // A token has a byte at least, so a stop lies within as many of the last tokens.
        let longest = self.stops.iter().map(String::len).max().unwrap_or(0);
        let last = &ids[ids.len().saturating_sub(longest)..];
        let text = tokenizer.decode(last).unwrap_or_default();
        if self.stops.iter().any(|stop| text.contains(stop.as_str())) {
            return ControlFlow::Break(());
        }
        ControlFlow::Continue(())
    }
}

impl Args {
    /// The options as configuration keys, above those of the environment.
    fn configuration(&self, checkpoint: &Checkpoint) -> Result<CheckedArguments> {
        let folder = checkpoint.path();
        let given = [
            ("max-new-tokens", self.max_new_tokens.map(|n| n.to_string())),
            ("temperature", self.temperature.map(|t| t.to_string())),
            ("top-k", self.top_k.map(|k| k.to_string())),
            ("top-p", self.top_p.map(|p| p.to_string())),
            ("min-p", self.min_p.map(|p| p.to_string())),
            (
                "repetition-penalty",
                self.repetition_penalty.map(|factor| factor.to_string()),
            ),
            ("seed", self.seed.map(|seed| seed.to_string())),
        ];
        let mut keys = vec![
            (
                "model.config",
                folder.join("config.json").display().to_string(),
            ),
            ("resume_from_checkpoint", folder.display().to_string()),
            ("finetune", "true".to_owned()),
            ("output_dir", folder.display().to_string()),
            ("tp", self.tp.to_string()),
            ("pp", self.pp.to_string()),
            ("per_device_train_batch_size", "1".to_owned()),
            (
                "seq_length",
                checkpoint.manifest().header.model["seq_length"].to_string(),
            ),
        ];
        if folder.join(ADAPTER_CONFIG).is_file() {
            let name = checkpoint.manifest().header.model["adapter_name"].as_str();
            let file = folder.join(ADAPTER_CONFIG).display().to_string();
            keys.push(("lora_config", file));
            keys.push(("adapter_name", name.unwrap_or("default").to_owned()));
        }
        keys.extend(
            given
                .into_iter()
                .filter_map(|(key, value)| Some((key, value?))),
        );
        let load = |keys: &[(&str, String)]| {
            let words: Vec<_> = keys
                .iter()
                .map(|(key, value)| format!("--{key}={value}"))
                .collect();
            Config::load(None, environment::variables(), &words)
        };
        let config = load(&keys)?;
        let is_open = |key: &str| *config.origin(key) == Origin::Default;
        if is_open("max_new_tokens") && is_open("out_seq_length") {
            keys.push(("max-new-tokens", NEW_TOKENS.to_string()));
            return load(&keys)?.check();
        }
        config.check()
    }
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
        if texts.is_empty() {
            return Err(
                format!("no prompt in {}: write one prompt per line", path.display()).into(),
            );
        }
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
