//! `merak generate`: text from a checkpoint.

use super::{
    Outcome,
    degrees::DegreeOptions,
    model::Loaded,
    output,
    session::{Session, own_adapter, parse_ids},
    world,
};
use clap::{Args as ClapArgs, builder::NonEmptyStringValueParser};
use merak_ckpt::{Adapter, Checkpoint, Completion, check_replaceable, words::file};
use merak_trainer::{
    Config, Error, Given, MerakTrainer, Result, World, chain,
    data::{ChatPrompts, Tokenizer},
    metrics::Screen,
};
use serde_json::json;
use std::{
    io,
    path::{Path, PathBuf},
    process::ExitCode,
};

/// Continues prompts with a trained model.
#[derive(Debug, ClapArgs)]
#[command(group = clap::ArgGroup::new("prompts").required(true))]
#[expect(
    clippy::struct_excessive_bools,
    reason = "each is a flag of the command"
)]
pub(crate) struct Args {
    /// A checkpoint, the output folder of a run, or a Hugging Face folder.
    checkpoint: PathBuf,
    /// A text to continue; may be repeated.
    #[arg(
        long,
        group = "prompts",
        value_name = "TEXT",
        allow_hyphen_values = true
    )]
    prompt: Vec<String>,
    /// Token ids to continue, which need no tokenizer; may be repeated.
    #[arg(long, group = "prompts", value_name = "5,17,3")]
    prompt_ids: Vec<String>,
    /// A file with one prompt per line; `-` is standard input.
    #[arg(long, group = "prompts", value_name = "FILE")]
    prompt_file: Option<PathBuf>,
    /// Takes each text as a question of the user: the model's chat template makes the prompt, and
    /// the answer alone is printed.
    #[arg(long, conflicts_with = "prompt_ids")]
    chat: bool,
    /// What the system says before the question of a chat.
    // With --prompt-ids, --chat cannot be given, and so clap would not ask for it.
    #[arg(
        long,
        requires = "chat",
        conflicts_with = "prompt_ids",
        value_name = "TEXT"
    )]
    system: Option<String>,
    /// A PEFT folder, whose adapter is merged into the weights first, in place of the checkpoint's
    /// own. May be repeated: prompts are then continued with one after the other; `none` is the
    /// model without one.
    #[arg(long, value_name = "DIR")]
    adapter: Vec<PathBuf>,
    /// Takes the averages of the weights, which a run with `ema_decay` keeps, in their place.
    #[arg(long)]
    ema: bool,
    /// Most new tokens per prompt, as the model's sequence has room [default: 1024, where the
    /// environment has no other].
    #[arg(long, allow_negative_numbers = true)]
    max_new_tokens: Option<usize>,
    /// Sampling temperature; 0 or `greedy` takes the likeliest token [default: 0.9].
    #[arg(long, allow_negative_numbers = true)]
    temperature: Option<String>,
    /// Draws from the K likeliest tokens only; 0 is off [default: 0].
    #[arg(long, allow_negative_numbers = true, value_name = "K")]
    top_k: Option<usize>,
    /// Draws from the likeliest tokens up to this probability [default: 0.9].
    #[arg(long, allow_negative_numbers = true, value_name = "P")]
    top_p: Option<f64>,
    /// Draws from tokens with at least this share of the likeliest one's probability; 0 is off
    /// [default: 0].
    #[arg(long, allow_negative_numbers = true, value_name = "P")]
    min_p: Option<f64>,
    /// Divides the positive logits of tokens that are already there; 1 is off [default: 1].
    #[arg(long, allow_negative_numbers = true, value_name = "F")]
    repetition_penalty: Option<f64>,
    /// No run of this many tokens occurs twice in a text; 0 is off [default: 0].
    #[arg(long, allow_negative_numbers = true, value_name = "N")]
    no_repeat_ngram_size: Option<usize>,
    /// Fewest new tokens before one that ends a text [default: the model's].
    #[arg(long, allow_negative_numbers = true, value_name = "N")]
    min_new_tokens: Option<usize>,
    /// Keeps the N likeliest continuations beside each other and prints the best; 1 is off
    /// [default: 1].
    #[arg(long, allow_negative_numbers = true, value_name = "N")]
    num_beams: Option<usize>,
    /// Power of the length by which a beam search divides scores [default: 1].
    #[arg(long, allow_negative_numbers = true, value_name = "P")]
    length_penalty: Option<f64>,
    /// When a beam search ends: `true` once N texts have ended, `false` once no running one would
    /// be better if it ended now, `never` once none can become better [default: false].
    #[arg(long, value_name = "WHEN")]
    early_stopping: Option<String>,
    /// Tokens that end a text, in place of the model's and the tokenizer's.
    #[arg(long, allow_negative_numbers = true, value_name = "ID,ID..")]
    eos_token_id: Option<String>,
    /// Ends a text after the token in which this string ends; may be repeated.
    #[arg(long, value_name = "TEXT", value_parser = NonEmptyStringValueParser::new())]
    stop: Vec<String>,
    /// Prints the text as it comes; for one prompt.
    #[arg(long, conflicts_with = "json")]
    stream: bool,
    /// Seed of the draws [default: 42].
    #[arg(long, allow_negative_numbers = true)]
    seed: Option<u64>,
    #[command(flatten)]
    degrees: DegreeOptions,
    /// Prints one JSON document, a prompt to a line.
    #[arg(long)]
    json: bool,
}

/// Name that `--prompt-file` has for standard input.
const STDIN: &str = "-";

/// Name that `--adapter` has for the base model.
const BASE: &str = "none";

pub(crate) fn run(args: &Args, screen: &Screen) -> Outcome {
    // What is wrong with the environment is told by all together.
    let config = world::of_environment(args.degrees()).ok();
    let world = world::join(config.as_ref(), screen)?;
    let prompts = args.prompt_file.as_deref();
    let prompts = prompts.map(|path| prompts_of(path, &world)).transpose()?;
    let ready = world.agree(Ready::new(args, prompts, &world))?;
    let session = &ready.session;
    session.check_same(&world, &ready.prompts)?;
    let results = session.on_ranks(&world, |trainer| ready.continue_prompts(trainer, args));
    let results = results.map_err(|error| ready.config.locate(error))?;
    if !world.has_first() {
        return Ok(ExitCode::SUCCESS);
    }
    if args.stream {
        output::print("")?;
    } else {
        output::print(args.show(&results, session)?)?;
    }
    Ok(ExitCode::SUCCESS)
}
/// Everything that the options name, read and checked.
struct Ready {
    config: Config,
    session: Session,
    prompts: Vec<Vec<u32>>,
    /// The adapters, each of which continues the prompts.
    adapters: Vec<Option<Adapter>>,
}

impl Ready {
    fn new(args: &Args, from_file: Option<Vec<Vec<u8>>>, world: &World) -> Result<Self> {
        let checkpoint = Checkpoint::open_weights(&args.checkpoint)?;
        let tokenizer_file = checkpoint.path().join("tokenizer.json");
        let tokenizer = if tokenizer_file.exists() {
            Some(Tokenizer::from_file(&tokenizer_file)?)
        } else {
            None
        };
        let prompts = prompts(args, from_file, checkpoint.path(), tokenizer.as_ref())?;
        let can_stream = prompts.len() == 1 && args.adapter.len() <= 1 && tokenizer.is_some();
        if args.stream && args.num_beams.is_some_and(|beams| beams > 1) {
            return Err(Error::CommandLine(
                "--stream prints tokens as they come, but a beam search chooses them at its end"
                    .to_owned(),
            ));
        }
        if args.stream && !can_stream {
            return Err(Error::CommandLine(
                "--stream prints the text of one prompt, and needs a tokenizer".to_owned(),
            ));
        }
        let config = args.configuration(&checkpoint)?;
        let ready = || {
            let checked = config.check()?;
            let loaded = Loaded::of(&checked)?;
            let checked = loaded.complete_to_generate(checked, &config)?;
            let adapters = adapters(args, &checkpoint, &loaded)?;
            let positions = prompts.iter().map(Vec::len).sum();
            let mut session = Session::new(world.place(checked), loaded, tokenizer, positions)?;
            session.takes_averages = args.ema;
            Ok((session, adapters))
        };
        let (session, adapters) = ready().map_err(|error| config.locate(error))?;
        Ok(Self {
            config,
            session,
            prompts,
            adapters,
        })
    }

    /// Continues the prompts on a rank, with each adapter.
    fn continue_prompts(
        &self,
        trainer: &mut MerakTrainer,
        args: &Args,
    ) -> Result<Vec<Vec<Completion>>> {
        let Self {
            session, prompts, ..
        } = self;
        let streams = args.stream;
        let continues = !args.chat && !session.translates();
        if streams && continues && trainer.mpu().is_rank_0() {
            output::stream(session.text(&prompts[0])?);
        }
        if self.adapters.is_empty() {
            return Ok(vec![session.generate(trainer, prompts, streams)?]);
        }
        let continued = |adapter: &Option<Adapter>| {
            trainer.set_adapter(adapter.as_ref())?;
            session.generate(trainer, prompts, streams)
        };
        self.adapters.iter().map(continued).collect()
    }
}

/// The requested adapters, in the order in which they continue the prompts; `None` is the base.
fn adapters(args: &Args, checkpoint: &Checkpoint, loaded: &Loaded) -> Result<Vec<Option<Adapter>>> {
    let open = |folder: &PathBuf| {
        if folder.as_os_str() == BASE {
            check_replaceable(checkpoint, None)?;
            return Ok(None);
        }
        let tensors = &checkpoint.manifest().tensors;
        let mut adapter = Adapter::open(folder, &loaded.json, tensors)?;
        check_replaceable(checkpoint, Some(&adapter))?;
        adapter.measure(checkpoint)?;
        Ok(Some(adapter))
    };
    args.adapter.iter().map(open).collect()
}

impl Args {
    /// The degrees as configuration keys.
    fn degrees(&self) -> [Given; 3] {
        let options = self.degrees.options();
        options.map(|(option, key, degree)| Given::by(option, key, degree))
    }

    /// The options that say how tokens are chosen, as configuration keys.
    fn sampling(&self) -> Vec<Given> {
        let text = |value: &dyn ToString| value.to_string();
        let stops = (!self.stop.is_empty()).then(|| json!(self.stop).to_string());
        let options = [
            (
                "--max-new-tokens",
                "max_new_tokens",
                self.max_new_tokens.map(|n| text(&n)),
            ),
            ("--temperature", "temperature", self.temperature.clone()),
            ("--top-k", "top_k", self.top_k.map(|k| text(&k))),
            ("--top-p", "top_p", self.top_p.map(|p| text(&p))),
            ("--min-p", "min_p", self.min_p.map(|p| text(&p))),
            (
                "--repetition-penalty",
                "repetition_penalty",
                self.repetition_penalty.map(|f| text(&f)),
            ),
            (
                "--no-repeat-ngram-size",
                "no_repeat_ngram_size",
                self.no_repeat_ngram_size.map(|n| text(&n)),
            ),
            (
                "--min-new-tokens",
                "min_new_tokens",
                self.min_new_tokens.map(|n| text(&n)),
            ),
            ("--num-beams", "num_beams", self.num_beams.map(|n| text(&n))),
            (
                "--length-penalty",
                "length_penalty",
                self.length_penalty.map(|p| text(&p)),
            ),
            (
                "--early-stopping",
                "early_stopping",
                self.early_stopping.clone(),
            ),
            ("--eos-token-id", "eos_token_id", self.eos_token_id.clone()),
            ("--seed", "seed", self.seed.map(|seed| text(&seed))),
            ("--stop", "stop_strings", stops),
        ];
        let by_option = |(option, key, value): (&str, _, Option<String>)| {
            value.map(|value| Given::by(option, key, value))
        };
        options.into_iter().filter_map(by_option).collect()
    }

    /// The options as configuration keys, above those of the environment.
    fn configuration(&self, checkpoint: &Checkpoint) -> Result<Config> {
        let folder = checkpoint.path();
        let mut given = self.sampling();
        given.extend(self.degrees());
        let seq_length = checkpoint.manifest().header.model["seq_length"].to_string();
        let of_checkpoint = |key, value: String| Given::by("CHECKPOINT", key, value);
        given.extend([
            of_checkpoint(
                "model.config",
                folder.join("config.json").display().to_string(),
            ),
            of_checkpoint("resume_from_checkpoint", folder.display().to_string()),
            of_checkpoint("output_dir", folder.display().to_string()),
            of_checkpoint("seq_length", seq_length),
            Given::always("finetune", "true"),
            Given::always("per_device_train_batch_size", "1"),
        ]);
        if let Some((file, name)) = own_adapter(checkpoint) {
            given.push(of_checkpoint("lora_config", file.display().to_string()));
            given.push(of_checkpoint("adapter_name", name));
        }
        world::of_environment(given)
    }

    /// The results of each adapter, as output.
    fn show(&self, results: &[Vec<Completion>], session: &Session) -> Result<Vec<u8>> {
        let names = self.adapter.iter().map(|path| path.display().to_string());
        let names: Vec<_> = names.map(Some).chain([None]).collect();
        let named = names.iter().zip(results);
        if self.json {
            let entry = |adapter: &Option<String>, completion: &Completion| {
                let text = session.tokenizer.as_ref();
                let tokens = [&completion.prompt_ids[..], &completion.ids].concat();
                let known = completion.prompt_ids.len();
                let text = text.map(|tokenizer| tokenizer.decode_after(known, &tokens));
                let mut entry = json!({ "prompt_ids": completion.prompt_ids, "ids": completion.ids,
                    "text": text.transpose()?, "reason": completion.reason });
                if let (Some(adapter), true) = (adapter, results.len() > 1) {
                    entry["adapter"] = adapter.as_str().into();
                }
                Ok(entry)
            };
            let entries = named.flat_map(|(adapter, completions)| {
                completions
                    .iter()
                    .map(move |completion| entry(adapter, completion))
            });
            let entries = entries.collect::<Result<Vec<_>>>()?;
            let lines: Vec<_> = entries.iter().map(ToString::to_string).collect();
            return Ok(format!("[\n{}\n]", lines.join(",\n")).into_bytes());
        }
        let mut shown = Vec::new();
        for (adapter, completions) in named {
            for completion in completions {
                let prompt = match session.tokenizer {
                    Some(_) => &completion.prompt_ids[..],
                    None => &[],
                };
                let is_answer = self.chat || session.translates();
                let hidden = if is_answer { prompt.len() } else { 0 };
                let ids = [prompt, &completion.ids].concat();
                let mut text = session.text_after(hidden, &ids)?;
                if let (Some(adapter), true) = (adapter, results.len() > 1) {
                    text = [format!("[{adapter}] ").as_bytes(), &text].concat();
                }
                shown.push(text);
            }
        }
        Ok(shown.join(&b"\n---\n"[..]))
    }
}

/// The most bytes of a file of prompts.
const MAX_PROMPT_BYTES: u64 = 64 << 20;

/// The prompts as token ids.
fn prompts(
    args: &Args,
    from_file: Option<Vec<Vec<u8>>>,
    folder: &Path,
    tokenizer: Option<&Tokenizer>,
) -> Result<Vec<Vec<u32>>> {
    if !args.prompt_ids.is_empty() {
        return args.prompt_ids.iter().map(|ids| parse_ids(ids)).collect();
    }
    let given = args.prompt.iter().map(|text| text.clone().into_bytes());
    let texts = from_file.unwrap_or_else(|| given.collect());
    let tokenizer = tokenizer.ok_or_else(|| {
        let text = "the checkpoint has no tokenizer.json: give --prompt-ids instead";
        Error::CommandLine(text.to_owned())
    })?;
    if args.chat {
        return chats(args, folder, tokenizer, &texts);
    }
    let encode = |(index, text): (usize, &Vec<u8>)| {
        let encoded = tokenizer.encode_prompt(text);
        encoded.map_err(|error| match &args.prompt_file {
            Some(path) => {
                let (number, path) = (index + 1, file(shown(path)));
                Error::CommandLine(format!("prompt {number} of {path}: {}", chain(&error)))
            }
            None => error,
        })
    };
    texts.iter().enumerate().map(encode).collect()
}

/// The prompts of a file on every process. Standard input is that of the first rank.
fn prompts_of(path: &Path, world: &World) -> Result<Vec<Vec<u8>>> {
    if path.as_os_str() == STDIN {
        return world.share(|| prompt_lines(path));
    }
    world.agree(prompt_lines(path))
}

fn prompt_lines(path: &Path) -> Result<Vec<Vec<u8>>> {
    let text = prompt_text(path)?;
    let text = text.strip_prefix("\u{feff}".as_bytes()).unwrap_or(&text);
    let lines = text.split(|byte| *byte == b'\n');
    let lines = lines.map(|line| line.strip_suffix(b"\r").unwrap_or(line));
    let prompts: Vec<_> = lines.filter(|line| !line.is_empty()).collect();
    if prompts.is_empty() {
        let text = format!(
            "no prompt in {}: write one prompt per line",
            file(shown(path))
        );
        return Err(Error::CommandLine(text));
    }
    Ok(prompts.into_iter().map(<[u8]>::to_vec).collect())
}

/// The content of a file with prompts, or of standard input.
fn prompt_text(path: &Path) -> Result<Vec<u8>> {
    let text = if path.as_os_str() == STDIN {
        merak_ckpt::read_at_most(io::stdin().lock(), MAX_PROMPT_BYTES)
    } else {
        merak_ckpt::read_regular(path, MAX_PROMPT_BYTES)
    };
    text.map_err(Error::reading(shown(path)))
}

/// The path of a file with prompts as messages have it.
fn shown(path: &Path) -> &Path {
    if path.as_os_str() == STDIN {
        Path::new("standard input")
    } else {
        path
    }
}

/// The prompts of chats with these questions.
fn chats(
    args: &Args,
    folder: &Path,
    tokenizer: &Tokenizer,
    questions: &[Vec<u8>],
) -> Result<Vec<Vec<u32>>> {
    let template = ChatPrompts::of(folder)?.ok_or_else(|| {
        let text = format!(
            "--chat needs a chat template, but {} has no chat_template.jinja, and no tokenizer_config.json with one",
            file(folder)
        );
        Error::CommandLine(text)
    })?;
    for told in template.lacking_tokens(tokenizer) {
        tracing::warn!("{told}");
    }
    let prompt = |question: &Vec<u8>| {
        let question = String::from_utf8_lossy(question);
        let text = template.prompt(args.system.as_deref(), &question)?;
        tokenizer.encode(text.as_bytes())
    };
    questions.iter().map(prompt).collect()
}
