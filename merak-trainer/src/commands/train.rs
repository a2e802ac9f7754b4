//! `merak train`: the whole way from a configuration to a trained model.

use super::{Outcome, failure::HEAD_START, keys::Keys, output, prepared::Prepared, signals, world};
use clap::Args as ClapArgs;
use merak_ckpt::{
    Completion, GenerateOptions, Store,
    words::{Bytes, file, plain},
};
use merak_mpu::Member;
use merak_pipe::Timeline;
use merak_trace::models::Objective;
use merak_trainer::{
    Callback, CheckedArguments, Config, Error, FolderError, Given, LoadedCheckpoint, MerakTrainer,
    Origin, Result, RunFolder, Stop, TrainOutput, TrainerParts, World, chain,
    metrics::{EvaluationMetrics, Percent, Progress, Ran, Reporter, Screen},
};
use signal_hook::low_level::signal_name;
use std::{
    fmt::Write as _,
    path::{Path, PathBuf},
    process::ExitCode,
    sync::{
        Arc,
        atomic::{AtomicI64, Ordering},
    },
    thread,
    time::Duration,
};

/// Tokens of the sample text that a trained model writes at the end.
const SAMPLE_TOKENS: usize = 120;

/// File, within a run's folder, with predictions of the validation part.
const PREDICTIONS: &str = "predictions.jsonl";

/// Message of a run that leaves no model, at its start and its end.
const KEEPS_NOTHING: &str =
    "saved     nothing: \"save\" is false, so that the run leaves its metrics and no model\n";

/// Trains a model.
#[derive(Debug, ClapArgs)]
#[command(
    after_help = "Any configuration key may be given as --set KEY=VALUE or --KEY VALUE, for example --tp 2.\n\
    `merak config --help-keys` lists them all, with types and defaults.\n\
    --resume PATH|latest|auto continues from a checkpoint; --overwrite_output_dir begins anew where the output folder \
    has a run; --dry-run stops after the plan."
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
    let (config, world) = world::join_with(load(&mut args), screen, !dry_run)?;
    if config.arguments().text_generation && !dry_run {
        return super::prompts::run(&config, &world);
    }
    let mut prepared = Prepared::to_train(&config, dry_run, &world)?;
    let memory = world.agree(prepared.check_memory());
    if memory.is_ok() && !dry_run {
        prepared.measure_peak(&config, &world)?;
    }
    let run = Run(&prepared);
    if dry_run {
        if world.has_first() {
            output::print(&prepared.describe()?)?;
            return run.foresee(&config, memory);
        }
        return Ok(ExitCode::SUCCESS);
    }
    memory?;
    let folder = run.take_folder(&config, &world)?;
    world::keep_log(&config, screen, true);
    if world.has_first() {
        output::print(&prepared.describe()?)?;
        if !prepared.args.saves() {
            output::print(output::fitted(KEEPS_NOTHING))?;
        }
    }
    let stop = Arc::new(AtomicI64::new(0));
    signals::watch(&stop)?;
    let outcome = world.run(&prepared.args, |member| {
        run.on_rank(member, folder.as_ref(), screen, &stop)
    });
    let located = |error| config.locate(error);
    let Some(folder) = folder else {
        return Ok(exit_code(outcome.map_err(located)?.stopped_by(), &stop));
    };
    let output_dir = prepared.args.run_folder()?;
    let ended = settle(outcome, &folder, &output_dir).map_err(located)?;
    match &ended {
        Ended::Trained(finished) => {
            output::print(run.summary(finished, &output_dir))?;
            tell_of_replaced(&folder);
        }
        Ended::HadNothingLeft(checkpoint) => output::print(run.nothing_left(checkpoint))?,
    }
    Ok(exit_code(ended.stopped_by(), &stop))
}

/// The exit status of a run: that of the signal which ended it, if one did. Processes that have not
/// got it themselves leave after the one that has, which a launcher then names.
fn exit_code(stopped_by: Option<Stop>, seen: &AtomicI64) -> ExitCode {
    let Some(Stop::Signal { signal, rank }) = stopped_by else {
        return ExitCode::SUCCESS;
    };
    if seen.load(Ordering::Relaxed) == 0 {
        let name = signal_name(signal as i32).unwrap_or("a signal");
        tracing::info!("{name} at rank {rank} has ended the run");
        thread::sleep(HEAD_START);
    }
    ExitCode::from((128 + signal) as u8)
}

/// The arguments of a training.
pub(super) fn arguments(mut args: Args) -> Result<CheckedArguments> {
    args.keys.take_flag("--dry-run");
    args.keys.give(Given::always("do_train", "true"));
    args.keys.load(&args.config)?.check()
}

/// The configuration of a training.
fn load(args: &mut Args) -> Result<Config> {
    let given = args.keys.load(&args.config)?;
    let origin = given.origin("do_train");
    if origin != Origin::Default
        && !given.arguments().do_train
        && !given.arguments().text_generation
    {
        tracing::warn!(
            %origin,
            "do_train is false, but this command trains whatever it says: `merak evaluate` evaluates alone"
        );
    }
    args.keys.give(Given::always("do_train", "true"));
    args.keys.load(&args.config)
}

/// Tidies up after a failure, once all ranks have ended.
fn settle<T>(outcome: Result<T>, folder: &RunFolder, output_dir: &Path) -> Result<T> {
    if outcome.is_err() {
        if let Err(error) = Store::in_output_dir(output_dir).clean() {
            let error = chain(&error);
            tracing::warn!(error, "what a failed save has written could not be removed");
        }
        folder.withdraw();
        tell_of_replaced(folder);
    }
    outcome
}

/// Says where the run to be replaced lies, while there is no checkpoint in its place.
fn tell_of_replaced(folder: &RunFolder) {
    if let Some(path) = folder.replaced() {
        let path = file(&path);
        tracing::warn!(%path, "no checkpoint was saved: the run that was to be replaced lies there");
    }
}

/// How a rank ended.
enum Ended {
    Trained(Box<Finished>),
    /// The checkpoint to resume from is at the last step.
    HadNothingLeft(LoadedCheckpoint),
}

impl Ended {
    /// Why training ended early.
    fn stopped_by(&self) -> Option<Stop> {
        match self {
            Self::Trained(finished) => finished.output.stopped_by,
            Self::HadNothingLeft(_) => None,
        }
    }
}

/// A prepared run that trains.
struct Run<'a>(&'a Prepared);

impl std::ops::Deref for Run<'_> {
    type Target = Prepared;

    fn deref(&self) -> &Prepared {
        self.0
    }
}

/// Adds what was trained.
fn tell_steps(output: &TrainOutput, text: &mut String) {
    let seconds = output.train_runtime.as_secs_f64();
    let speed = output.train_tokens_per_second;
    let steps = match (output.steps, output.global_step) {
        (steps, all) if steps == all => format!("{all} steps"),
        (steps, all) => format!("{steps} steps up to step {all}"),
    };
    let _ = writeln!(
        text,
        "\ntrained   {steps} ({:.2} epochs) in {seconds:.1} s, {speed:.0} tokens/s, mean loss {:.4}",
        output.epoch, output.training_loss
    );
    if output.stopped_by == Some(Stop::Asked) {
        let _ = writeln!(
            text,
            "stopped   early, as \"early_stopping_patience\" or a callback asks"
        );
    }
    if output.skipped_steps > 0 {
        let _ = writeln!(
            text,
            "skipped   {} steps with gradients that were not finite",
            output.skipped_steps
        );
    }
    if output.rollbacks > 0 {
        let _ = writeln!(
            text,
            "returned  {} times to the last checkpoint, and on behind the data that diverged",
            output.rollbacks
        );
    }
}

/// What a rank returns.
struct Finished {
    output: TrainOutput,
    evaluation: Option<EvaluationMetrics>,
    sample: Option<Completion>,
    peak_activation_bytes: usize,
    /// The times of the last steps.
    times: Vec<Duration>,
    /// What the ranks of the first pipeline ran in them, on the first rank.
    ran: Timeline,
    /// The last share of the peak, on the first rank.
    mfu: Option<f64>,
}

impl Run<'_> {
    /// Takes the folder of the run, in the process of the first rank.
    fn take_folder(&self, config: &Config, world: &World) -> Result<Option<Arc<RunFolder>>> {
        let take = || RunFolder::take(&self.args, config.to_toml());
        let taken = world.has_first().then(take).transpose();
        world.agree(taken.map_err(|error| config.locate(error)))
    }

    /// The observers of the first rank.
    fn observers(&self, reporter: &Reporter, folder: &Arc<RunFolder>) -> Vec<Box<dyn Callback>> {
        // The folder comes first, since records are written into it.
        let mut observers: Vec<Box<dyn Callback>> =
            vec![Box::new(Arc::clone(folder)), Box::new(reporter.clone())];
        if let Some(first_steps) = self.first_steps() {
            observers.push(Box::new(first_steps));
        }
        observers
    }

    /// Gives the folder to the run that is about to train, and starts its report.
    fn begin(
        &self,
        trainer: &MerakTrainer,
        reporter: &Reporter,
        folder: &RunFolder,
        screen: &Screen,
    ) -> Result<()> {
        let from = trainer.resumed_from();
        folder.begin(from.map(|from| from.global_step as u64))?;
        if let Some(path) = folder.replaced() {
            let path = file(&path);
            tracing::warn!(%path, "the run that is replaced lies there until the first checkpoint");
        }
        let (total, done) = (trainer.total_steps(), trainer.global_step());
        let progress = Progress::on(screen, total, done);
        let output_dir = self.args.run_folder()?;
        reporter.start(trainer, &self.args, &output_dir, self.peak, progress)?;
        reporter.with_page(self.page(folder)?);
        Ok(())
    }

    /// The whole run of one rank.
    fn on_rank(
        &self,
        member: Member,
        folder: Option<&Arc<RunFolder>>,
        screen: &Screen,
        stop: &Arc<AtomicI64>,
    ) -> Result<Ended> {
        let first = folder.filter(|_| member.rank().0 == 0);
        let reporter = first.map(|folder| (Reporter::default(), folder));
        let mpu = merak_mpu::Mpu::new(member, self.plan.draft.degrees)?;
        let parts = TrainerParts {
            stop: Arc::clone(stop),
            callbacks: match &reporter {
                Some((reporter, folder)) => self.observers(reporter, folder),
                None => Vec::new(),
            },
            ..self.parts()
        };
        let mut trainer = MerakTrainer::new(Arc::clone(&self.plan), mpu, &self.args, parts)?;
        if let Some(checkpoint) = trainer.resumed_from()
            && trainer.global_step() >= trainer.total_steps()
        {
            return Ok(Ended::HadNothingLeft(checkpoint.clone()));
        }
        if let Some((reporter, folder)) = &reporter {
            self.begin(&trainer, reporter, folder, screen)?;
        }
        let output = trainer.train()?;
        // After a signal there may be no time left.
        let runs_on = !matches!(output.stopped_by, Some(Stop::Signal { .. }));
        let is_open = output.evaluation.is_none() && output.best.is_none();
        let evaluation = if self.validates() && runs_on && is_open {
            Some(trainer.evaluate()?)
        } else {
            output.evaluation.clone()
        };
        if let Some((reporter, _)) = &reporter {
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
        if runs_on {
            self.predict(&mut trainer)?;
        }
        let peak_activation_bytes = trainer.peak_activation_bytes();
        let ran = Ran {
            timeline: trainer.gather_timeline()?,
            memory: trainer.gather_memory()?,
        };
        let mfu = reporter.as_ref().and_then(|(reporter, _)| {
            reporter.write_page(Some(&ran));
            reporter.mfu()
        });
        Ok(Ended::Trained(Box::new(Finished {
            output,
            evaluation,
            sample,
            peak_activation_bytes,
            times: trainer.records().map(|record| record.time).collect(),
            ran: ran.timeline,
            mfu,
        })))
    }

    /// Writes predictions of the validation part, with `do_predict`.
    fn predict(&self, trainer: &mut MerakTrainer) -> Result<()> {
        let data = self.parts().eval_data.filter(|_| self.args.do_predict);
        let Some(data) = data else {
            return Ok(());
        };
        let kind = trainer.prediction_kind();
        let output = trainer.predict(&*data)?;
        if trainer.mpu().is_rank_0() {
            let path = self.args.run_folder()?.join(PREDICTIONS);
            super::predict::write(&path, &output, kind, Some(&*data))?;
        }
        Ok(())
    }

    /// The messages of a dry run below the plan. A plan for a larger machine, or for a folder with
    /// another run, only gets a warning.
    fn foresee(&self, config: &Config, memory: Result<()>) -> Outcome {
        let mut text = String::new();
        for told in self.args.without_effect() {
            text += &output::fitted(&format!("warning: {told}"));
        }
        let checkpoint = MerakTrainer::check_checkpoint(&self.plan, &self.args, &self.parts())
            .map_err(|error| config.locate(error))?;
        let from = checkpoint.as_ref().map(|from| from.global_step as u64);
        let mut begins = true;
        if let Some(checkpoint) = checkpoint {
            let _ = writeln!(text, "resumes   {}", file(&checkpoint.path));
            if !self.args.finetune && checkpoint.global_step >= self.total_steps {
                text += &self.nothing_left(&checkpoint);
                begins = false;
            }
        }
        match RunFolder::check(&self.args) {
            Err(
                error @ Error::Folder(FolderError::RunExists { .. } | FolderError::RunInUse { .. }),
            ) => {
                text += &output::fitted(&format!("warning: {error}"));
            }
            other => {
                other?;
                if begins {
                    text += &RunFolder::foresee(&self.args, from)?;
                }
            }
        }
        match memory {
            Err(error @ Error::Memory(_)) => {
                text += &output::fitted(&format!("warning: {error}"));
            }
            other => {
                other?;
                text += &self.describe_memory()?;
            }
        }
        if !text.is_empty() {
            output::print(&text)?;
        }
        Ok(ExitCode::SUCCESS)
    }

    /// The message about a checkpoint that is at the end of the run.
    fn nothing_left(&self, checkpoint: &LoadedCheckpoint) -> String {
        let (path, step, total) = (
            file(&checkpoint.path),
            checkpoint.global_step,
            self.total_steps,
        );
        let key = if self.args.max_steps > 0 {
            "max_steps"
        } else {
            "num_train_epochs"
        };
        let mut text = output::fitted(&format!(
            "nothing left to do: {path} is at step {step}, and \"{key}\" ends the run at step {total}\n\
             go on     with a larger \"{key}\", for example --max_steps {}\n",
            step + total
        ));
        self.advise_to_generate(&checkpoint.path, &mut text);
        text
    }

    /// Adds how to use a saved model.
    fn advise_to_generate(&self, checkpoint: &Path, text: &mut String) {
        if self.plan.draft.model.objective() == Objective::CausalLm {
            let _ = writeln!(
                text,
                "continue  merak generate {} --prompt TEXT",
                file(checkpoint)
            );
        }
    }

    /// Continues the beginning of the validation text.
    fn sample(&self, trainer: &mut MerakTrainer) -> Result<Option<Completion>> {
        let Some(corpus) = &self.corpus else {
            return Ok(None);
        };
        let room = self.plan.draft.info.max_seq;
        let prompt_len = (room / 4).min(32).min(corpus.validation.len());
        if prompt_len == 0 || room < 2 {
            return Ok(None);
        }
        let prompt = corpus.validation.read(0..prompt_len)?.into_owned();
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

    /// The summary of the run: figures in lines that fit the terminal; the sample, paths and
    /// commands as they are.
    fn summary(&self, finished: &Finished, output_dir: &Path) -> String {
        let mut text = String::new();
        tell_steps(&finished.output, &mut text);
        self.tell_evaluation(finished, &mut text);
        self.tell_memory(finished, &mut text);
        self.compare_times(finished, &mut text);
        if let Some((peak, mfu)) = self.peak.zip(finished.mfu) {
            let _ = writeln!(text, "MFU       {} of {peak}", Percent(mfu));
        }
        text = output::fitted(&text);
        self.tell_sample(finished, &mut text);
        let metrics = file(&output_dir.join("metrics.jsonl"));
        let _ = writeln!(text, "metrics   {metrics}");
        let report = file(&output_dir.join("report.html"));
        let _ = writeln!(text, "report    {report}");
        if self.args.saves() {
            let store = Store::in_output_dir(output_dir);
            let last = store.path_of(finished.output.global_step as u64);
            let _ = writeln!(text, "saved     {}", file(&last));
            let best = finished.output.best;
            let best = best.map(|best| store.path_of(best.step as u64));
            self.advise_to_generate(&best.unwrap_or(last), &mut text);
        } else {
            text += &output::fitted(KEEPS_NOTHING);
        }
        text
    }

    /// Adds the losses on held-out samples.
    fn tell_evaluation(&self, finished: &Finished, text: &mut String) {
        if let Some(evaluation) = &finished.evaluation {
            let (loss, samples) = (evaluation.eval_loss, evaluation.eval_samples);
            let _ = writeln!(text, "validated loss {loss:.4} over {samples} samples");
            // Training is done: tokens that can no longer be read leave out a line.
            let bigram = self
                .corpus
                .as_ref()
                .and_then(|corpus| corpus.bigram_loss().ok());
            if let Some(bigram) = bigram.flatten() {
                let _ = writeln!(
                    text,
                    "bigram    loss {bigram:.4}: what counting pairs of tokens reaches on the same data"
                );
            }
        }
        if let Some(best) = finished.output.best {
            let _ = writeln!(
                text,
                "best      loss {:.4} at step {}, whose weights the model has now",
                best.score, best.step
            );
        }
    }

    /// Adds the activations of the first rank beside their prediction.
    fn tell_memory(&self, finished: &Finished, text: &mut String) {
        let measured = Bytes::from(finished.peak_activation_bytes);
        let _ = write!(
            text,
            "memory    {measured} of activations at most on rank 0"
        );
        let predicted = self.predicted_activation_bytes().unwrap_or_default();
        let _ = match predicted.first() {
            Some(&predicted) => writeln!(text, ", predicted {}", Bytes::from(predicted)),
            None => writeln!(text),
        };
    }

    /// Adds the text that the model makes.
    fn tell_sample(&self, finished: &Finished, text: &mut String) {
        let Some((sample, tokenizer)) = finished.sample.as_ref().zip(self.tokenizer.as_ref())
        else {
            return;
        };
        let prompt = &sample.prompt_ids;
        let all = [&prompt[..], &sample.ids].concat();
        let _ = writeln!(
            text,
            "\nsample    the model continues >>>\n{}>>>{}<<<\n",
            plain(&tokenizer.decode(prompt).unwrap_or_default()),
            plain(
                &tokenizer
                    .decode_after(prompt.len(), &all)
                    .unwrap_or_default()
            )
        );
    }

    /// Adds the measured times of the steps beside the prediction.
    fn compare_times(&self, finished: &Finished, text: &mut String) {
        let mut steps = finished.times.clone();
        steps.sort_unstable();
        let Some((prediction, step)) = self.prediction.as_ref().zip(steps.get(steps.len() / 2))
        else {
            return;
        };
        let step = step.as_secs_f64();
        let _ = writeln!(
            text,
            "time      {:.1} ms a step (median of the last {}), predicted {:.1}: measured by predicted {:.2}",
            1e3 * step,
            steps.len(),
            1e3 * prediction.step(),
            step / prediction.step(),
        );
        for stage in self
            .plan
            .compare_stages(prediction, &finished.ran)
            .unwrap_or_default()
        {
            let _ = writeln!(text, "          {stage}");
        }
    }
}
