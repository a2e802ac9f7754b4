//! `merak train`: the whole way from a configuration to a trained model.

mod summary;

use super::{
    Outcome,
    failure::HEAD_START,
    keys::Keys,
    output,
    predict::{self, Lines},
    prepared::Prepared,
    signals, world,
};
use clap::Args as ClapArgs;
use merak_ckpt::{Completion, GenerateOptions, Store, words::file};
use merak_mpu::Member;
use merak_pipe::Timeline;
use merak_trainer::{
    Callback, CheckedArguments, Config, Error, FolderError, Given, LoadedCheckpoint, MerakTrainer,
    Origin, Result, RunFolder, Stop, TrainOutput, TrainerParts, World, chain,
    metrics::{EvaluationMetrics, Progress, Ran, Reporter, Screen},
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
    let told = world.has_first().then(|| run.tell()).transpose();
    world.agree(told)?;
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
            output::print(run.summary(finished, &output_dir, &args))?;
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

/// What a rank returns.
struct Finished {
    output: TrainOutput,
    /// Steps of the whole run.
    total_steps: usize,
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
    /// Takes the folder of the run, in the process of the first rank. The others look whether it
    /// is theirs too, since a save would find out only after steps of training.
    fn take_folder(&self, config: &Config, world: &World) -> Result<Option<Arc<RunFolder>>> {
        let located = |error| config.locate(error);
        let take = || RunFolder::take(&self.args, config.to_toml());
        let taken = world.has_first().then(take).transpose();
        let folder = world.agree(taken.map_err(located))?;
        let holder = world.share(|| RunFolder::holder(&self.args).map_err(located))?;
        let shared = RunFolder::expect_shared(&self.args, &holder);
        world.agree(shared.map_err(located))?;
        Ok(folder)
    }

    /// Prints what is to run.
    fn tell(&self) -> Result<()> {
        output::print(self.describe()?)?;
        if !self.args.saves() {
            output::print(output::fitted(KEEPS_NOTHING))?;
        }
        Ok(())
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
        reporter.with_page(self.page(folder, total)?);
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
        let peak_activation_bytes = trainer.memory().activations;
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
            total_steps: trainer.total_steps(),
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
        let data = trainer.eval_data().filter(|_| self.args.do_predict);
        let Some(data) = data.cloned() else {
            return Ok(());
        };
        let kind = trainer.prediction_kind();
        let mut lines = None;
        if trainer.mpu().is_rank_0() {
            let path = self.args.run_folder()?.join(PREDICTIONS);
            lines = Some(Lines::begin(&path).map_err(Error::writing(&path))?);
        }
        predict::write(trainer, &*data, kind, lines.as_mut())?;
        lines.map(Lines::finish).transpose()?;
        Ok(())
    }

    /// The messages of a dry run below the plan. A plan for a larger machine, or for a folder with
    /// another run, only gets a warning.
    fn foresee(&self, config: &Config, memory: Result<()>) -> Outcome {
        let mut text = String::new();
        let unmatched = &self.plan.draft.unmatched_targets;
        let unmatched = unmatched.iter().map(ToString::to_string);
        for told in self.args.without_effect().into_iter().chain(unmatched) {
            text += &output::fitted(&format!("warning: {told}"));
        }
        let checkpoint = MerakTrainer::check_checkpoint(&self.plan, &self.args, &self.parts())
            .map_err(|error| config.locate(error))?;
        let from = checkpoint.as_ref().map(|from| from.global_step as u64);
        let mut begins = true;
        if let Some(checkpoint) = checkpoint {
            let _ = writeln!(text, "resumes   {}", file(&checkpoint.path));
            if !self.args.finetune && checkpoint.global_step >= checkpoint.total_steps {
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
}
