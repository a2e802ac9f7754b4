//! `merak train`: the whole way from a configuration to a trained model.

use super::{Outcome, keys::Keys, output, prepared::Prepared};
use clap::Args as ClapArgs;
use merak_ckpt::{
    Completion, GenerateOptions, Store,
    words::{Bytes, file, plain},
};
use merak_mpu::Member;
use merak_pipe::Timeline;
use merak_trace::models::Objective;
use merak_trainer::{
    Callback, CheckedArguments, Config, Error, MerakTrainer, Origin, Result, StepRecord,
    TrainOutput, TrainerParts,
    data::bigram_loss,
    metrics::{EvaluationMetrics, Progress, Reporter, Screen},
    run_world,
};
use signal_hook::consts::{SIGINT, SIGTERM, SIGUSR1};
use std::{
    fmt::Write as _,
    fs, io,
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
    `merak config --help-keys` lists them all, with types and defaults.\n\
    --resume PATH|latest|auto continues from a checkpoint; --dry-run stops after the plan."
)]
pub(crate) struct Args {
    /// The configuration file (.toml, .yaml or .json).
    config: PathBuf,
    /// Stops after the plan and prints it.
    #[arg(long)]
    dry_run: bool,
    #[command(flatten)]
    keys: Keys,
}

pub(crate) fn run(mut args: Args, screen: &Screen) -> Outcome {
    let dry_run = args.keys.take_flag("--dry-run") || args.dry_run;
    let config = load(&mut args)?;
    if config.arguments().text_generation && !dry_run {
        return super::prompts::run(&config);
    }
    let prepared = Prepared::to_train(&config, dry_run)?;
    let output_dir = prepared.args.run_folder()?;
    let located = |error| config.locate(error);
    check_folder(&output_dir).map_err(located)?;
    let memory = prepared.check_memory();
    if dry_run {
        output::print(&prepared.describe()?)?;
        let resumed = MerakTrainer::check_checkpoint(&prepared.plan, &prepared.args);
        let resumed = resumed.map_err(located)?;
        return foresee(resumed.as_deref(), memory);
    }
    memory?;
    output::print(&prepared.describe()?)?;
    let run = Run(&prepared);
    write_folder(&output_dir, &config.to_toml()).map_err(located)?;
    warn_of_older_run(&prepared.args, &output_dir)?;
    let stop = Arc::new(AtomicI64::new(0));
    for signal in [SIGINT, SIGTERM, SIGUSR1] {
        watch(signal, &stop)?;
    }
    let results = run_world(&prepared.args, |member| {
        run.on_rank(member, &output_dir, screen, &stop)
    })
    .map_err(located)?;
    output::print(&run.summary(&results, &output_dir))?;
    let finished = &results[0];
    Ok(finished
        .output
        .stopped_by
        .map_or(ExitCode::SUCCESS, |signal| {
            ExitCode::from((128 + signal) as u8)
        }))
}

/// The configuration of a training.
fn load(args: &mut Args) -> Result<Config> {
    let given = args.keys.load(&args.config)?;
    let origin = given.origin("do_train");
    if *origin != Origin::Default
        && !given.arguments().do_train
        && !given.arguments().text_generation
    {
        tracing::warn!(
            %origin,
            "do_train is false, but this command trains whatever it says: `merak evaluate` evaluates alone"
        );
    }
    args.keys.push("do_train", "true");
    args.keys.load(&args.config)
}

/// What a dry run says below the plan. A plan for a larger machine is a good plan.
fn foresee(resumed: Option<&Path>, memory: Result<()>) -> Outcome {
    let mut text = String::new();
    if let Some(path) = resumed {
        let _ = writeln!(text, "resumes   {}", file(path));
    }
    match memory {
        Err(error @ Error::Memory(_)) => {
            let _ = writeln!(text, "warning: {error}");
        }
        other => other?,
    }
    if !text.is_empty() {
        output::print(&text)?;
    }
    Ok(ExitCode::SUCCESS)
}

/// Checks that the output folder can be made, without making it.
fn check_folder(output_dir: &Path) -> Result<()> {
    let refused = |path: &Path, source| Error::OutputDir {
        path: path.to_owned(),
        source,
    };
    // The nearest thing that is there already; a relative path starts from the current folder.
    let there = output_dir
        .ancestors()
        .filter(|path| !path.as_os_str().is_empty())
        .find_map(|path| Some((path, fs::metadata(path).ok()?)));
    match there {
        Some((path, found)) if !found.is_dir() => {
            Err(refused(path, io::ErrorKind::NotADirectory.into()))
        }
        Some((path, found)) if found.permissions().readonly() => {
            Err(refused(path, io::ErrorKind::PermissionDenied.into()))
        }
        _ => Ok(()),
    }
}

/// Makes the output folder and leaves the resolved configuration there.
fn write_folder(output_dir: &Path, resolved: &str) -> Result<()> {
    fs::create_dir_all(output_dir)
        .and_then(|()| fs::write(output_dir.join("config.resolved.toml"), resolved))
        .map_err(|source| Error::OutputDir {
            path: output_dir.to_owned(),
            source,
        })
}

/// Says so when a fresh run writes into the folder of an older one.
fn warn_of_older_run(args: &CheckedArguments, output_dir: &Path) -> Result<()> {
    if args.save && args.resume_from_checkpoint.is_none() {
        let steps = Store::in_output_dir(output_dir).steps()?;
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
    let wait = move || {
        for signal in signals.forever() {
            stop.store(signal.into(), Ordering::Relaxed);
        }
    };
    let thread = std::thread::Builder::new().name("merak-signals".to_owned());
    thread.spawn(wait).map(drop)
}

/// A prepared run that trains.
struct Run<'a>(&'a Prepared);

impl std::ops::Deref for Run<'_> {
    type Target = Prepared;

    fn deref(&self) -> &Prepared {
        self.0
    }
}

/// What a rank returns.
struct Finished {
    output: TrainOutput,
    evaluation: Option<EvaluationMetrics>,
    sample: Option<Completion>,
    peak_activation_bytes: usize,
    /// Of the first pipeline: its last steps.
    records: Vec<StepRecord>,
}

impl Run<'_> {
    /// The whole run of one rank.
    fn on_rank(
        &self,
        member: Member,
        output_dir: &Path,
        screen: &Screen,
        stop: &Arc<AtomicI64>,
    ) -> Result<Finished> {
        let is_first = member.rank().0 == 0;
        let mpu = merak_mpu::Mpu::new(member, self.plan.degrees)?;
        let reporter = is_first.then(Reporter::default);
        let reports = reporter
            .iter()
            .map(|reporter| Box::new(reporter.clone()) as Box<dyn Callback>);
        let mut callbacks: Vec<_> = reports.collect();
        if let Some(first_steps) = self.first_steps().filter(|_| is_first) {
            callbacks.push(Box::new(first_steps));
        }
        let parts = TrainerParts {
            stop: Arc::clone(stop),
            callbacks,
            ..self.parts()
        };
        let mut trainer = MerakTrainer::new(Arc::clone(&self.plan), mpu, &self.args, parts)?;
        if let Some(reporter) = &reporter {
            let (total, done) = (trainer.total_steps(), trainer.global_step());
            let progress = Progress::on(screen, total, done);
            reporter.start(&trainer, &self.args, output_dir, progress)?;
        }
        let output = trainer.train()?;
        // After a signal there may be no time left.
        let runs_on = output.stopped_by.is_none();
        // A run that had nothing left to do has evaluated nothing.
        let is_open = output.evaluation.is_none() && output.best.is_none();
        let evaluation = if self.validates() && runs_on && is_open {
            Some(trainer.evaluate()?)
        } else {
            output.evaluation.clone()
        };
        if let Some(reporter) = &reporter {
            reporter.finish();
        }
        // A model whose loss is not finite has no likeliest token; the best one has a finite loss.
        let last = evaluation.as_ref().map(|evaluation| evaluation.eval_loss);
        let is_finite = output.best.is_some() || last.unwrap_or(output.training_loss).is_finite();
        let sample = if runs_on && is_finite {
            self.sample(&mut trainer)?
        } else {
            None
        };
        let peak_activation_bytes = trainer.peak_activation_bytes();
        let mpu = trainer.mpu();
        let records = if mpu.data_parallel_rank() == 0 && mpu.tensor_parallel_rank() == 0 {
            trainer.records().cloned().collect()
        } else {
            Vec::new()
        };
        Ok(Finished {
            output,
            evaluation,
            sample,
            peak_activation_bytes,
            records,
        })
    }

    /// Continues the beginning of the validation text.
    fn sample(&self, trainer: &mut MerakTrainer) -> Result<Option<Completion>> {
        let Some(corpus) = &self.corpus else {
            return Ok(None);
        };
        let room = self.plan.info.max_seq;
        let prompt_len = (room / 4).min(32).min(corpus.validation.len());
        if prompt_len == 0 || room < 2 {
            return Ok(None);
        }
        let prompt = corpus.validation[..prompt_len].to_vec();
        let options = GenerateOptions {
            max_new_tokens: SAMPLE_TOKENS
                .min(room - prompt_len)
                .min(self.args.new_token_limit()),
            ..self
                .model
                .generate_options(&self.args, Some(&corpus.tokenizer))
        };
        Ok(trainer.generate(&[prompt], &options)?.into_iter().next())
    }

    /// What the run came to.
    fn summary(&self, ranks: &[Finished], output_dir: &Path) -> String {
        let finished = &ranks[0];
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
            let bigram = self.corpus.as_ref().and_then(|corpus| {
                let vocab = corpus.tokenizer.vocab_size();
                bigram_loss(&corpus.train, &corpus.validation, vocab)
            });
            if let Some(bigram) = bigram {
                let _ = writeln!(
                    text,
                    "bigram    loss {bigram:.4}: what counting pairs of tokens reaches on the same data"
                );
            }
        }
        if let Some(best) = output.best {
            let _ = writeln!(
                text,
                "best      loss {:.4} at step {}, whose weights the model has now",
                best.score, best.step
            );
        }
        let measured = finished.peak_activation_bytes;
        let _ = write!(
            text,
            "memory    {} of activations at most on rank 0",
            Bytes::from(measured)
        );
        let predicted = self.predicted_activation_bytes().unwrap_or_default();
        let _ = match predicted.first() {
            Some(&predicted) => writeln!(text, ", predicted {}", Bytes::from(predicted)),
            None => writeln!(text),
        };
        self.compare_times(ranks, &mut text);
        if let Some((sample, tokenizer)) = finished.sample.as_ref().zip(self.tokenizer.as_ref()) {
            let Completion {
                prompt_ids, ids, ..
            } = sample;
            let all = [&prompt_ids[..], ids].concat();
            let _ = writeln!(
                text,
                "\nsample    the model continues >>>\n{}>>>{}<<<\n",
                plain(&tokenizer.decode(prompt_ids).unwrap_or_default()),
                plain(
                    &tokenizer
                        .decode_after(prompt_ids.len(), &all)
                        .unwrap_or_default()
                )
            );
        }
        let _ = writeln!(
            text,
            "metrics   {}",
            file(&output_dir.join("metrics.jsonl"))
        );
        if self.args.save {
            let store = Store::in_output_dir(output_dir);
            let last = store.path_of(output.global_step as u64);
            // A run that had nothing left to do may have come from another folder.
            if last.is_dir() {
                let _ = writeln!(text, "saved     {}", file(&last));
            }
            let best = output.best.map(|best| store.path_of(best.step as u64));
            let ends_with = best.unwrap_or(last);
            if ends_with.is_dir() && self.plan.model.objective() == Objective::CausalLm {
                let _ = writeln!(
                    text,
                    "continue  merak generate {} --prompt TEXT",
                    file(&ends_with)
                );
            }
        }
        text
    }

    /// The steps as they ran, beside the prediction.
    fn compare_times(&self, ranks: &[Finished], text: &mut String) {
        let pipeline = ranks.iter().filter(|rank| !rank.records.is_empty());
        let Some((prediction, first)) = self.prediction.as_ref().zip(pipeline.clone().next())
        else {
            return;
        };
        let mut steps: Vec<_> = first.records.iter().map(|record| record.time).collect();
        steps.sort_unstable();
        let step = steps[steps.len() / 2].as_secs_f64();
        let _ = writeln!(
            text,
            "time      {:.1} ms a step (median of the last {}), predicted {:.1}: measured by predicted {:.2}",
            1e3 * step,
            steps.len(),
            1e3 * prediction.step(),
            step / prediction.step(),
        );
        let spans = pipeline.map(|rank| {
            let spans = rank.records.iter().flat_map(|record| &record.spans);
            spans.copied().collect()
        });
        let ran = Timeline {
            ranks: spans.collect(),
        };
        for stage in self
            .plan
            .compare_stages(prediction, &ran)
            .unwrap_or_default()
        {
            let _ = writeln!(text, "          {stage}");
        }
    }
}
