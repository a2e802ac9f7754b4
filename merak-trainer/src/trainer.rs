//! One rank's trainer: the loop, evaluation, checkpoints and generation.

mod base;
mod best;
mod checkpoint;
mod course;
mod evaluation;
mod generation;
mod notes;
mod progress;
mod resume;
mod saving;
mod shards;
mod step;

use self::{
    course::{Course, batch_shape},
    progress::{Records, RunProgress},
    saving::Saving,
};
pub use best::BestModel;
pub use checkpoint::LoadedCheckpoint;
pub use evaluation::EvaluationMetrics;
pub use progress::StepRecord;
pub use step::StepReport;

use crate::{
    config::{CheckedArguments, Device},
    data::{DataFingerprint, Dataset, Loader},
    error::{ConfigError, Error, PlanError, Result, StepPart},
    folder::RunFolder,
    memory::MemoryNeed,
    plan::Plan,
    stage::RankStages,
    world::threads_per_rank,
};
use merak_mpu::{Group, Mpu, ReduceOp};
use merak_pipe::{GroupLink, PipelineEngine, Span, Timeline};
use merak_zero::UpdateRule;
use std::{
    collections::BTreeMap,
    fmt,
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicI64, Ordering},
    },
    time::{Duration, Instant},
};

/// Observes a run on the rank that holds it. Every method is optional.
pub trait Callback: Send {
    /// An optimizer step ended.
    fn on_step(&mut self, report: &StepReport) {
        let _ = report;
    }

    /// `done` of the `total` iterations of an evaluation are done: 0 at its start, `total` at its
    /// end.
    fn on_evaluation_step(&mut self, done: usize, total: usize) {
        let _ = (done, total);
    }

    /// An evaluation ended.
    fn on_evaluate(&mut self, metrics: &EvaluationMetrics) {
        let _ = metrics;
    }

    /// A checkpoint of this step begins to be written.
    fn on_save_start(&mut self, step: usize) {
        let _ = step;
    }

    /// A checkpoint was written.
    fn on_save(&mut self, path: &Path) {
        let _ = path;
    }
}

impl Callback for Arc<RunFolder> {
    fn on_step(&mut self, _: &StepReport) {
        self.renew();
    }

    fn on_save(&mut self, _: &Path) {
        self.drop_replaced();
    }
}

/// What a trainer is made of besides the plan and the arguments.
#[derive(Default)]
pub struct TrainerParts {
    /// Samples to train on.
    pub train_data: Option<Arc<dyn Dataset>>,
    /// Samples to evaluate on.
    pub eval_data: Option<Arc<dyn Dataset>>,
    /// The model's `config.json`, tokenizer and the like, which travel with checkpoints.
    pub model_files: Vec<(String, Vec<u8>)>,
    /// Fingerprint of the samples' source; a resumed run compares it with that of its checkpoint.
    pub fingerprint: Option<DataFingerprint>,
    /// Set to a signal's number, it ends training after the step in hand.
    pub stop: Arc<AtomicI64>,
    /// Compute threads of this rank; 0 takes those that the arguments give to each rank.
    pub num_threads: usize,
    /// An update rule of the program, in place of that of `optim`. The plan counts the state of
    /// `optim`. From ZeRO stage 1 on with several replicas it needs
    /// `zero_allow_untested_optimizer`.
    pub rule: Option<Arc<dyn UpdateRule>>,
    /// Observers of the run.
    pub callbacks: Vec<Box<dyn Callback>>,
    /// Start of timelines, so that those of several ranks have one axis; if unset, the start of
    /// each step.
    pub epoch: Option<Instant>,
}

impl fmt::Debug for TrainerParts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TrainerParts")
            .field("num_threads", &self.num_threads)
            .finish_non_exhaustive()
    }
}

/// What [`MerakTrainer::train`] returns, the same on every rank.
#[derive(Debug, Clone, PartialEq)]
pub struct TrainOutput {
    /// Optimizer steps done since the beginning of the run, resumed parts included.
    pub global_step: usize,
    /// Steps that this call made.
    pub steps: usize,
    /// Mean of the losses of the steps that this call made, skipped ones aside.
    pub training_loss: f64,
    /// Steps of this call that were skipped because a gradient was not finite.
    pub skipped_steps: u64,
    /// Passes over the data, the last one as a fraction.
    pub epoch: f64,
    /// How long training took.
    pub train_runtime: Duration,
    /// Tokens that were trained on.
    pub tokens: u64,
    /// The signal that ended training early.
    pub stopped_by: Option<i64>,
    /// The lowest rank that got this signal.
    pub stopped_on: Option<usize>,
    /// The evaluation of the last step, with `do_eval` and if that step was reached.
    pub evaluation: Option<EvaluationMetrics>,
    /// The checkpoint whose weights the trainer now has, with `load_best_model_at_end`; the
    /// optimizer's state stays that of the last step.
    pub best: Option<BestModel>,
}

/// One rank's part of a training run; every rank makes one and calls the same methods.
pub struct MerakTrainer {
    args: CheckedArguments,
    stages: RankStages,
    engine: PipelineEngine,
    link: GroupLink,
    loader: Option<Loader>,
    parts: TrainerParts,
    progress: RunProgress,
    records: Records,
    saving: Saving,
    programs: generation::Programs,
    resumed_from: Option<LoadedCheckpoint>,
    best: Option<BestModel>,
    /// The base's values of parameters into which an adapter is merged, by parameter.
    base_values: BTreeMap<usize, Vec<u8>>,
}

impl fmt::Debug for MerakTrainer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let rank = self.stages.mpu.rank();
        f.debug_struct("MerakTrainer")
            .field("rank", &rank)
            .field("global_step", &self.progress.global_step)
            .finish_non_exhaustive()
    }
}

impl MerakTrainer {
    /// Makes this rank's trainer, with fresh weights or those of `model.hf_dir`; resumes when the
    /// arguments say so.
    ///
    /// # Communication
    /// None for a fresh start; when loading, an all-reduce of 8 bytes over the world.
    ///
    /// # Errors
    /// When the data are too few, an argument does not fit the model, or the checkpoint cannot be
    /// loaded.
    pub fn new(
        plan: Arc<Plan>,
        mpu: Mpu,
        args: &CheckedArguments,
        mut parts: TrainerParts,
    ) -> Result<Self> {
        if parts.num_threads == 0 {
            parts.num_threads = threads_per_rank(args);
        }
        check_rule(args, &parts)?;
        let mpu = Arc::new(tie(mpu, &plan)?);
        let (engine, link) = pipeline(&plan, &mpu, args, parts.epoch)?;
        let progress = RunProgress::new(Course::new(args, &parts)?);
        let mut trainer = Self {
            args: args.clone(),
            stages: RankStages::new(plan, mpu, args, parts.num_threads, parts.rule.as_ref())?,
            engine,
            link,
            loader: None,
            parts,
            progress,
            records: Records::default(),
            saving: Saving::default(),
            programs: generation::Programs::default(),
            resumed_from: None,
            best: None,
            base_values: BTreeMap::new(),
        };
        trainer.start()?;
        Ok(trainer)
    }

    /// Takes the weights that the run starts with: those of a checkpoint, of `model.hf_dir`, or
    /// fresh ones.
    fn start(&mut self) -> Result<()> {
        if self.stages.mpu.is_rank_0() {
            notes::warn(&self.args);
        }
        let resumed = match self.args.resume_from_checkpoint.clone() {
            Some(from) => self.resume(&from)?,
            None => false,
        };
        if let Some(folder) = self.args.model.hf_dir.clone()
            && !resumed
        {
            self.load_checkpoint(&folder.0)?;
        }
        if self.stages.is_blank {
            self.stages.draw(self.parts.num_threads, |_| true)?;
            self.stages.start_magnitudes()?;
        }
        Ok(())
    }

    /// Checks the data as [`MerakTrainer::new`] does: their number, and the course of the learning
    /// rate over them. Checks also that there are labels: samples are read until one has some.
    /// Needs neither model nor ranks. Returns the steps of the whole run.
    ///
    /// # Errors
    /// When the data are too few or all without labels.
    pub fn check_data(args: &CheckedArguments, parts: &TrainerParts) -> Result<usize> {
        let course = Course::new(args, parts)?;
        course::check_labels(args, parts)?;
        Ok(course.total_steps)
    }

    /// The checkpoint that a run with these arguments and parts would go on from, checked to the
    /// last byte; `None` for a fresh start.
    ///
    /// # Errors
    /// When a required checkpoint is missing; when it is damaged, of another model, or lacks a part
    /// that no flag excuses; when the data end before its position.
    pub fn check_checkpoint(
        plan: &Plan,
        args: &CheckedArguments,
        parts: &TrainerParts,
    ) -> Result<Option<LoadedCheckpoint>> {
        resume::find(plan, args, parts)
    }

    /// This rank's place in the run.
    pub fn mpu(&self) -> &Mpu {
        &self.stages.mpu
    }

    /// The plan.
    pub fn plan(&self) -> &Plan {
        &self.stages.plan
    }

    /// The checkpoint that the run goes on from, as `resume_from_checkpoint` says.
    pub fn resumed_from(&self) -> Option<&LoadedCheckpoint> {
        self.resumed_from.as_ref()
    }

    /// Optimizer steps done, skipped ones included.
    pub fn global_step(&self) -> usize {
        self.progress.global_step
    }

    /// Tokens of the global batches of these steps, each at its own size.
    pub fn tokens(&self) -> u64 {
        self.progress.tokens
    }

    /// Steps that the whole run makes.
    pub fn total_steps(&self) -> usize {
        self.progress.course.total_steps
    }

    /// What this rank ran in its last step or generation, and when, in seconds since its start.
    pub fn timeline(&self) -> &[Span] {
        &self.records.timeline
    }

    /// What this rank ran in the last steps that it trained, 32 at most. The first step of a run,
    /// in which memory is touched and threads wake up, is left out once there is another.
    pub fn records(&self) -> impl ExactSizeIterator<Item = &StepRecord> {
        self.records.steps()
    }

    /// What every rank of this rank's pipeline ran in these steps, on the pipeline's first rank; an
    /// empty timeline elsewhere.
    ///
    /// # Communication
    /// A gathering of the spans over the pipeline.
    ///
    /// # Errors
    /// When a rank fails meanwhile.
    ///
    /// # Panics
    /// Never: spans are plain data.
    pub fn gather_timeline(&self) -> Result<Timeline> {
        let spans: Vec<Span> = self
            .records
            .steps()
            .flat_map(|record| record.spans.iter().copied())
            .collect();
        let spans = serde_json::to_vec(&spans).expect("spans are plain data");
        let ranks = self
            .stages
            .mpu
            .pipeline_parallel_group()
            .gather_bytes(spans, 0)?;
        let ranks = ranks.iter().map(|spans| serde_json::from_slice(spans));
        Ok(Timeline {
            ranks: ranks
                .collect::<serde_json::Result<_>>()
                .expect("a rank's own spans"),
        })
    }

    /// The most bytes of activations that were alive at once on this rank.
    pub fn peak_activation_bytes(&self) -> usize {
        self.stages.peak_activation_bytes()
    }

    /// The bytes that this rank holds, which [`Plan::memory`] predicts. Activations are the most
    /// that were alive at once.
    pub fn memory(&self) -> MemoryNeed {
        self.stages.memory()
    }

    /// Trains until the last step, evaluating and saving on the way as the arguments say; then
    /// takes the weights of the best model, if that is asked for and no signal ended training.
    ///
    /// # Errors
    /// When everything is frozen; when a rank fails, which ends the run on all of them; when
    /// gradients are not finite in `max_skipped_steps` steps in a row that no lower loss scale
    /// could save, or in every step of this call.
    pub fn train(&mut self) -> Result<TrainOutput> {
        if self.stages.plan.trained_params().next().is_none() {
            return Err(Error::Plan(PlanError::NothingTrained));
        }
        if self.args.saves() {
            self.args.run_folder()?;
        }
        let start = Instant::now();
        let first_step = self.progress.global_step;
        let skipped_before = self.stages.optimizer.progress().skipped;
        let mut tally = Tally::default();
        let (mut evaluation, mut stop) = (None, None);
        while stop.is_none() && !self.progress.is_done() {
            let report = self.train_step()?;
            tally.add(&report);
            evaluation = self.end_step(report, tally.updates)?;
            let agreed = self.agreed_stop();
            stop = self.placed(StepPart::Train, self.progress.global_step, agreed)?;
        }
        // A run without steps left does not replace the checkpoint that it came from.
        self.end_saving(self.progress.global_step > first_step)?;
        let best = if self.args.load_best_model_at_end && stop.is_none() {
            self.load_best()?
        } else {
            None
        };
        Ok(TrainOutput {
            global_step: self.progress.global_step,
            steps: self.progress.global_step - first_step,
            training_loss: tally.mean_loss(),
            skipped_steps: self.stages.optimizer.progress().skipped - skipped_before,
            epoch: self.progress.epochs(),
            train_runtime: start.elapsed(),
            tokens: tally.tokens,
            stopped_by: stop.map(|(signal, _)| signal),
            stopped_on: stop.map(|(_, rank)| rank),
            evaluation: evaluation.filter(|_| self.progress.is_done()),
            best,
        })
    }

    /// What follows a step: its report, the end of a save under way, its evaluation and checkpoint.
    /// `updates` counts the steps that were not skipped.
    fn end_step(&mut self, report: StepReport, updates: u32) -> Result<Option<EvaluationMetrics>> {
        let done = self.progress.global_step;
        self.within(StepPart::Train, done, |trainer| {
            for callback in &mut trainer.parts.callbacks {
                callback.on_step(&report);
            }
            Ok(())
        })?;
        self.check_skipped(report, updates)?;
        self.within(StepPart::Save, done, |trainer| {
            trainer.finish_save_if_written().map(drop)
        })?;
        self.after_step()
    }

    /// Ends a run that skips too many steps: as many in a row as the arguments allow where the loss
    /// scale cannot fall, or all of them. `updates` counts the steps that were not skipped.
    fn check_skipped(&mut self, report: StepReport, updates: u32) -> Result<()> {
        let (progress, limit) = (
            self.stages.optimizer.progress(),
            self.args.max_skipped_steps,
        );
        let is_over = self.progress.is_done() && updates == 0;
        match report.skipped {
            Some(param) if is_over || progress.skipped_at_floor >= limit as u64 => {
                // The checkpoint that is being written is of an earlier step.
                self.finish_save()?;
                let key = self.args.loss_scale_key();
                Err(Error::SkippedSteps {
                    steps: progress.skipped_in_a_row,
                    step: report.step,
                    param,
                    limit,
                    loss_scale: report.loss_scale.map(|scale| (scale, key)),
                })
            }
            _ => Ok(()),
        }
    }

    /// Evaluates and saves where a step is due for it. `best` names the saved step with the best
    /// evaluation. Where the best model is loaded in the end, a step with a new best evaluation is
    /// saved too.
    fn after_step(&mut self) -> Result<Option<EvaluationMetrics>> {
        let done = self.progress.global_step;
        let ends_epoch = self.progress.ends_epoch();
        let is_last = self.progress.is_done();
        let evaluates = match self.args.eval_steps {
            Some(steps) => done.is_multiple_of(steps),
            None => ends_epoch,
        };
        let evaluates =
            self.args.do_eval && self.parts.eval_data.is_some() && (evaluates || is_last);
        let evaluation = evaluates.then(|| self.evaluate()).transpose()?;
        let best = evaluation.as_ref().and_then(|metrics| self.judge(metrics));
        let saves_best = best.is_some() && self.args.load_best_model_at_end;
        let must_save = self.args.saves() && (is_last || saves_best);
        if must_save || self.args.saves_after(done, ends_epoch) {
            // A save under way records the best of its own step, so it ends first.
            self.finish_save()?;
            self.best = best.or(self.best);
            self.save_during_training()?;
        }
        Ok(evaluation)
    }

    /// The signal that asks to stop, if any rank has seen one, and the lowest rank that has.
    ///
    /// # Communication
    /// An all-reduce of 8 bytes over the world.
    fn agreed_stop(&self) -> Result<Option<(i64, usize)>> {
        let world = self.stages.mpu.world_group();
        let seen = self.parts.stop.load(Ordering::Relaxed);
        // One number for both: the larger signal first, then the lower rank.
        let number = |ranks| i64::try_from(ranks).expect("a world has fewer ranks");
        let size = number(world.world_size());
        let place = size - 1 - number(world.rank());
        let own = if seen == 0 { 0 } else { seen * size + place };
        let agreed = world.all_reduce_scalar(own, ReduceOp::Max)?;
        let rank = (size - 1 - agreed.rem_euclid(size)) as usize;
        Ok((agreed != 0).then_some((agreed.div_euclid(size), rank)))
    }
}

/// Sums over the steps of a call of [`MerakTrainer::train`].
#[derive(Debug, Default)]
struct Tally {
    loss: f64,
    /// Steps that were not skipped.
    updates: u32,
    tokens: u64,
}

impl Tally {
    fn add(&mut self, report: &StepReport) {
        if report.skipped.is_none() {
            self.loss += report.loss;
            self.updates += 1;
        }
        self.tokens += report.tokens;
    }

    fn mean_loss(&self) -> f64 {
        if self.updates == 0 {
            0.0
        } else {
            self.loss / f64::from(self.updates)
        }
    }
}

/// The rank's part of the pipeline, and its link to the others.
fn pipeline(
    plan: &Plan,
    mpu: &Mpu,
    args: &CheckedArguments,
    epoch: Option<Instant>,
) -> Result<(PipelineEngine, GroupLink)> {
    let mut engine = PipelineEngine::new(&plan.schedule, mpu.pipeline_parallel_rank())?;
    if let Some(epoch) = epoch {
        engine = engine.with_epoch(epoch);
    }
    Ok((engine, link(mpu, args, turns(mpu, args))))
}

/// The rank's link to the others of its pipeline; `turns` are the ranks that compute together.
fn link(mpu: &Mpu, args: &CheckedArguments, turns: &Group) -> GroupLink {
    let link = GroupLink::new(mpu.pipeline_parallel_group().clone());
    if args.compute.device == Device::Cpu {
        link.with_turns(turns.clone())
    } else {
        link
    }
}

/// The ranks that compute an action of training or evaluation together: those that may wait for
/// each other within it.
fn turns<'a>(mpu: &'a Mpu, args: &CheckedArguments) -> &'a Group {
    if args.waits_for_replicas() {
        mpu.stage_group()
    } else {
        mpu.tensor_parallel_group()
    }
}

/// Refuses an untested rule whose state replicas divide.
fn check_rule(args: &CheckedArguments, parts: &TrainerParts) -> Result<()> {
    let divides = args.zero_config(1).element_bytes(args.dp).state.ranks > 1;
    match &parts.rule {
        Some(rule) if divides && !args.zero_allow_untested_optimizer => {
            Err(Error::Config(ConfigError::UntestedOptimizer {
                name: rule.name().to_owned(),
                stage: u8::from(args.zero_stage),
                replicas: args.dp,
            }))
        }
        _ => Ok(()),
    }
}

/// Joins the group of every weight that several ranks of the pipeline use.
fn tie(mpu: Mpu, plan: &Plan) -> Result<Mpu> {
    let tied = plan.tied_across_ranks();
    Ok(tied.iter().try_fold(mpu, |mpu, (weight, ranks)| {
        mpu.with_tied(&weight.name, ranks)
    })?)
}
