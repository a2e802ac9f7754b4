//! `merak train`: the whole way from a configuration to a trained model.

use super::{Outcome, config::take_flag, environment, model, output};
use clap::Args as ClapArgs;
use merak_ckpt::{Completion, GenerateOptions};
use merak_mpu::Member;
use merak_trainer::{
    Callback, CheckedArguments, Config, Error, MerakTrainer, Plan, Result, TrainOutput,
    TrainerParts,
    data::{Corpus, Dataset, TokenDataset, bigram_loss},
    metrics::{EvaluationMetrics, Progress, Reporter},
    run_world, threads_per_rank,
};
use signal_hook::consts::{SIGINT, SIGTERM, SIGUSR1};
use std::{
    fmt::Write as _,
    fs,
    io::{self, IsTerminal},
    path::{Path, PathBuf},
    process::ExitCode,
    sync::{
        Arc,
        atomic::{AtomicI64, Ordering},
    },
};

/// Tokens of the text that a trained model shows at the end.
const SAMPLE_TOKENS: usize = 120;

/// Trains a model.
#[derive(Debug, ClapArgs)]
#[command(
    after_help = "Any configuration key may be given as --set KEY=VALUE or --KEY VALUE, for example --tp 2.\n\
    --resume PATH|latest|auto continues from a checkpoint; --dry-run stops after the plan."
)]
pub(crate) struct Args {
    /// The configuration file (.toml, .yaml or .json).
    config: PathBuf,
    /// Stops after the plan and prints it.
    #[arg(long)]
    dry_run: bool,
    /// Configuration keys.
    #[arg(
        trailing_var_arg = true,
        allow_hyphen_values = true,
        value_name = "KEYS"
    )]
    keys: Vec<String>,
}

pub(crate) fn run(args: &Args) -> Outcome {
    let mut keys = args.keys.clone();
    let dry_run = args.dry_run | take_flag(&mut keys, "--dry-run");
    for key in &mut keys {
        // The short name of the contract for `resume_from_checkpoint`.
        if let Some(value) = key.strip_prefix("--resume")
            && (value.is_empty() || value.starts_with('='))
        {
            *key = format!("--resume_from_checkpoint{value}");
        }
    }
    let config = Config::load(Some(&args.config), environment::variables(), &keys)?;
    let checked = config.check()?;
    let (built, model_json) = model::load(&checked)?;
    let corpus = Corpus::load(&checked.data, &environment::crate_sources(config.file()))?;
    let plan = Arc::new(Plan::new(built, &checked)?);
    let run = Run::new(&checked, plan, corpus, &model_json)?;
    output::print(&run.describe()?)?;
    if dry_run {
        return Ok(ExitCode::SUCCESS);
    }
    let output_dir = checked.output_dir.clone().ok_or_else(missing_output_dir)?;
    fs::create_dir_all(&output_dir).map_err(|source| Error::Write {
        path: output_dir.clone(),
        source,
    })?;
    let resolved = output_dir.join("config.resolved.toml");
    fs::write(&resolved, config.to_toml()).map_err(|source| Error::Write {
        path: resolved,
        source,
    })?;
    warn_of_older_run(&checked, &output_dir)?;
    let stop = Arc::new(AtomicI64::new(0));
    for signal in [SIGINT, SIGTERM, SIGUSR1] {
        watch(signal, &stop)?;
    }
    let results = run_world(&checked, |member| run.on_rank(member, &output_dir, &stop))?;
    let finished = results
        .into_iter()
        .next()
        .expect("a world has a first rank");
    output::print(&run.summary(&finished, &output_dir))?;
    Ok(finished
        .output
        .stopped_by
        .map_or(ExitCode::SUCCESS, |signal| {
            ExitCode::from((128 + signal) as u8)
        }))
}

/// Says so when a fresh run writes into the folder of an older one.
fn warn_of_older_run(args: &CheckedArguments, output_dir: &Path) -> Result<()> {
    if args.save && args.resume_from_checkpoint.is_none() {
        let steps = merak_ckpt::Store::in_output_dir(output_dir).steps()?;
        if let Some(newest) = steps.last() {
            let output_dir = output_dir.display();
            tracing::warn!(%output_dir, newest, "the folder has checkpoints of an older run, which this one does not resume");
        }
    }
    Ok(())
}

/// Notes a signal's number; the trainer looks at it after each step. A second one ends the process.
fn watch(signal: i32, stop: &Arc<AtomicI64>) -> io::Result<()> {
    let seen = Arc::new(std::sync::atomic::AtomicBool::new(false));
    signal_hook::flag::register_conditional_shutdown(signal, 128 + signal, Arc::clone(&seen))?;
    signal_hook::flag::register(signal, Arc::clone(&seen))?;
    let stop = Arc::clone(stop);
    let mut signals = signal_hook::iterator::Signals::new([signal])?;
    std::thread::spawn(move || {
        for signal in signals.forever() {
            stop.store(signal.into(), Ordering::Relaxed);
        }
    });
    Ok(())
}

fn missing_output_dir() -> Error {
    Error::MissingKey {
        key: "output_dir",
        advice: "name the folder that the run writes".to_owned(),
    }
}

/// What all ranks of a run share.
struct Run<'a> {
    args: &'a CheckedArguments,
    plan: Arc<Plan>,
    corpus: Corpus,
    train: Arc<dyn Dataset>,
    validation: Option<Arc<dyn Dataset>>,
    model_files: Vec<(String, Vec<u8>)>,
}

/// What a rank returns.
struct Finished {
    output: TrainOutput,
    evaluation: Option<EvaluationMetrics>,
    checkpoint: Option<PathBuf>,
    sample: Option<Completion>,
    peak_activation_bytes: usize,
}

impl<'a> Run<'a> {
    fn new(
        args: &'a CheckedArguments,
        plan: Arc<Plan>,
        corpus: Corpus,
        model_json: &serde_json::Value,
    ) -> Result<Self> {
        plan.expect_causal("training on text")?;
        let (tokens, vocab) = (corpus.tokenizer.vocab_size(), plan.info.vocab_size);
        if tokens > vocab {
            return Err(Error::Vocabulary { tokens, vocab });
        }
        let seq = plan.seq_length;
        let train = Arc::new(TokenDataset::new(
            Arc::clone(&corpus.train),
            seq,
            "training",
        )?);
        let validation = if corpus.validation.is_empty() {
            None
        } else {
            let data = TokenDataset::new(Arc::clone(&corpus.validation), seq, "validation")?;
            Some(Arc::new(data) as Arc<dyn Dataset>)
        };
        // The configuration in use, overrides included, so that a checkpoint alone makes the model again.
        let mut files = vec![(
            "config.json".to_owned(),
            format!("{model_json:#}\n").into_bytes(),
        )];
        files.push((
            "tokenizer.json".to_owned(),
            corpus.tokenizer.to_json()?.into_bytes(),
        ));
        Ok(Self {
            args,
            plan,
            corpus,
            train,
            validation,
            model_files: files,
        })
    }

    /// The plan, for people.
    fn describe(&self) -> Result<String> {
        let (args, plan) = (self.args, &self.plan);
        let mut text = String::new();
        let _ = writeln!(
            text,
            "model     {}: {} parameters, {} layers",
            plan.info.family,
            plan.graph.num_elements(),
            plan.info.num_layers
        );
        let (train, validation) = (self.corpus.train.len(), self.corpus.validation.len());
        let _ = writeln!(
            text,
            "data      {} ({train} training tokens, {validation} validation tokens)",
            self.corpus.description
        );
        let _ = writeln!(
            text,
            "ranks     {} = dp {} x tp {} x pp {}, {} compute threads each",
            args.world_size(),
            args.dp,
            args.tp,
            args.pp,
            threads_per_rank(args)
        );
        let _ = writeln!(
            text,
            "batch     {} samples of {} tokens = {} per microbatch x {} microbatches x dp {}",
            args.global_batch(),
            plan.seq_length,
            args.per_device_train_batch_size,
            args.gradient_accumulation_steps,
            args.dp
        );
        let _ = writeln!(text, "schedule  {}\n", plan.schedule.name);
        for unmatched in &plan.tensor.unmatched {
            let _ = writeln!(
                text,
                "warning: the tensor-parallel pattern \"{unmatched}\" matches nothing"
            );
        }
        let _ = write!(text, "{}", plan.partition_report(args)?);
        Ok(text)
    }

    /// The whole run of one rank.
    fn on_rank(
        &self,
        member: Member,
        output_dir: &Path,
        stop: &Arc<AtomicI64>,
    ) -> Result<Finished> {
        let is_first = member.rank().0 == 0;
        let mpu = merak_mpu::Mpu::new(member, self.plan.degrees)?;
        let reporter = is_first.then(Reporter::default);
        let parts = TrainerParts {
            train_data: Some(Arc::clone(&self.train)),
            eval_data: self.validation.clone(),
            model_files: self.model_files.clone(),
            stop: Arc::clone(stop),
            num_threads: threads_per_rank(self.args),
            callbacks: reporter
                .iter()
                .map(|reporter| Box::new(reporter.clone()) as Box<dyn Callback>)
                .collect(),
        };
        let mut trainer = MerakTrainer::new(Arc::clone(&self.plan), mpu, self.args, parts)?;
        if let Some(reporter) = &reporter {
            let (total, done) = (trainer.total_steps(), trainer.global_step());
            let progress = if io::stderr().is_terminal() {
                Progress::bar(total, done)
            } else {
                Progress::lines(total, Box::new(io::stderr()))
            };
            reporter.start(&trainer, self.args, output_dir, progress)?;
        }
        let output = trainer.train()?;
        if let Some(reporter) = &reporter {
            reporter.finish();
        }
        // After a signal there may be no time left.
        let runs_on = output.stopped_by.is_none();
        let evaluation = if self.validation.is_some() && runs_on {
            Some(trainer.evaluate()?)
        } else {
            None
        };
        let checkpoint = self.args.save.then(|| {
            output_dir
                .join("checkpoints")
                .join(format!("step-{:08}", output.global_step))
        });
        // A model whose loss is not finite has no likeliest token.
        let loss = evaluation
            .as_ref()
            .map_or(output.training_loss, |evaluation| evaluation.eval_loss);
        let sample = if runs_on && loss.is_finite() {
            self.sample(&mut trainer)?
        } else {
            None
        };
        let peak_activation_bytes = trainer.peak_activation_bytes();
        Ok(Finished {
            output,
            evaluation,
            checkpoint,
            sample,
            peak_activation_bytes,
        })
    }

    /// Continues the beginning of the validation text.
    fn sample(&self, trainer: &mut MerakTrainer) -> Result<Option<Completion>> {
        let room = self.plan.info.max_seq;
        let prompt_len = (room / 4).min(32).min(self.corpus.validation.len());
        if prompt_len == 0 || room < 2 {
            return Ok(None);
        }
        let prompt = self.corpus.validation[..prompt_len].to_vec();
        let options = GenerateOptions {
            max_new_tokens: SAMPLE_TOKENS
                .min(room - prompt_len)
                .min(self.args.new_token_limit()),
            ..super::generate::options_of(self.args)
        };
        Ok(trainer.generate(&[prompt], &options)?.into_iter().next())
    }

    /// What the run came to.
    fn summary(&self, finished: &Finished, output_dir: &Path) -> String {
        let mut text = String::new();
        let output = &finished.output;
        let seconds = output.train_runtime.as_secs_f64();
        let speed = output.tokens as f64 / seconds.max(f64::MIN_POSITIVE);
        let _ = writeln!(
            text,
            "\ntrained   {} steps ({:.2} epochs) in {seconds:.1} s, {speed:.0} tokens/s, mean loss {:.4}",
            output.global_step, output.epoch, output.training_loss
        );
        if output.skipped_steps > 0 {
            let _ = writeln!(
                text,
                "skipped   {} steps with gradients that were not finite",
                output.skipped_steps
            );
        }
        if let Some(evaluation) = &finished.evaluation {
            let _ = writeln!(
                text,
                "validated loss {:.4} over {} samples",
                evaluation.eval_loss, evaluation.eval_samples
            );
            let vocab = self.corpus.tokenizer.vocab_size();
            if let Some(bigram) = bigram_loss(&self.corpus.train, &self.corpus.validation, vocab) {
                let _ = writeln!(
                    text,
                    "bigram    loss {bigram:.4}: what counting pairs of tokens reaches on the same data"
                );
            }
        }
        let _ = writeln!(
            text,
            "memory    {} bytes of activations at most on rank 0",
            finished.peak_activation_bytes
        );
        if let Some(sample) = &finished.sample {
            let decode = |ids: &[u32]| self.corpus.tokenizer.decode(ids).unwrap_or_default();
            let _ = writeln!(
                text,
                "\nsample    the model continues >>>\n{}>>>{}<<<\n",
                decode(&sample.prompt_ids),
                decode(&sample.ids)
            );
        }
        let _ = writeln!(
            text,
            "metrics   {}",
            output_dir.join("metrics.jsonl").display()
        );
        if let Some(checkpoint) = &finished.checkpoint {
            let _ = writeln!(text, "saved     {}", checkpoint.display());
            let _ = writeln!(
                text,
                "continue  merak generate {} --prompt TEXT",
                checkpoint.display()
            );
        }
        text
    }
}
