//! One rank's trainer: the loop, evaluation, checkpoints and generation.

mod base;
mod best;
mod checkpoint;
mod course;
pub(crate) mod evaluation;
mod generation;
mod resume;
mod saving;
mod shards;
mod step;

use self::course::{Course, batch_shape};
pub use best::BestModel;
pub(crate) use checkpoint::ADAPTER;
pub use checkpoint::{ADAPTER_CONFIG, LoadedCheckpoint};
pub use step::{NamedTensors, StepReport};

use crate::{
    CheckedArguments, Device, Error, MemoryNeed, Plan, Result, StepPart,
    data::{DataFingerprint, DataPosition, Dataset, Loader, TrainingOrder},
    metrics::EvaluationMetrics,
    stage::RankStages,
    threads_per_rank,
};
use merak_mpu::{Mpu, ReduceOp};
use merak_pipe::{GroupLink, PipelineEngine, Span, Timeline};
use merak_zero::LrSchedule;
use std::{
    collections::{BTreeMap, VecDeque},
    fmt,
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicI64, Ordering},
    },
    thread::JoinHandle,
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

/// What a rank ran in one step, and how long the step took, update included.
#[derive(Debug, Clone, PartialEq)]
pub struct StepRecord {
    /// What ran when, in seconds since the start of the step, or since [`TrainerParts::epoch`].
    pub spans: Vec<Span>,
    /// The whole step.
    pub time: Duration,
}

/// Steps whose records are kept.
const RECORDS: usize = 32;

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
    schedule: LrSchedule,
    order: Option<TrainingOrder>,
    loader: Option<Loader>,
    parts: TrainerParts,
    global_step: usize,
    tokens: u64,
    total_steps: usize,
    programs: generation::Programs,
    timeline: Vec<Span>,
    records: VecDeque<StepRecord>,
    has_dropped_first: bool,
    last_saved: Option<usize>,
    resumed_from: Option<LoadedCheckpoint>,
    best: Option<BestModel>,
    pending_save: Option<saving::PendingSave>,
    save_stall: Duration,
    staging: shards::StagingMemory,
    /// Deletes older checkpoints.
    rotation: Option<JoinHandle<merak_ckpt::Result<Vec<u64>>>>,
    /// The base's values of parameters into which an adapter is merged, by parameter.
    base_values: BTreeMap<usize, Vec<u8>>,
    /// The saved base with the parameters that are not trained, once there is one.
    shared_base: Option<merak_ckpt::Base>,
    /// The name of the base in a resumed run's adapter, on rank 0.
    adapter_base: Option<serde_json::Value>,
}

impl fmt::Debug for MerakTrainer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let rank = self.stages.mpu.rank();
        f.debug_struct("MerakTrainer")
            .field("rank", &rank)
            .field("global_step", &self.global_step)
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
        let mpu = Arc::new(tie(mpu, &plan)?);
        let mut engine = PipelineEngine::new(&plan.schedule, mpu.pipeline_parallel_rank())?;
        if let Some(epoch) = parts.epoch {
            engine = engine.with_epoch(epoch);
        }
        let mut link = GroupLink::new(mpu.pipeline_parallel_group().clone());
        if args.compute.device == Device::Cpu {
            link = link.with_turns(mpu.tensor_parallel_group().clone());
        }
        let Course {
            order,
            total_steps,
            schedule,
        } = Course::new(args, &parts)?;
        let stages = RankStages::new(plan, mpu, args, parts.num_threads)?;
        let mut trainer = Self {
            args: args.clone(),
            stages,
            engine,
            link,
            schedule,
            order,
            loader: None,
            parts,
            global_step: 0,
            tokens: 0,
            total_steps,
            programs: generation::Programs::default(),
            timeline: Vec::new(),
            records: VecDeque::new(),
            has_dropped_first: false,
            last_saved: None,
            resumed_from: None,
            best: None,
            pending_save: None,
            save_stall: Duration::ZERO,
            staging: shards::StagingMemory::default(),
            rotation: None,
            base_values: BTreeMap::new(),
            shared_base: None,
            adapter_base: None,
        };
        let resumed = match &args.resume_from_checkpoint {
            Some(from) => trainer.resume(from)?,
            None => false,
        };
        if let Some(folder) = &args.model.hf_dir
            && !resumed
        {
            trainer.load_checkpoint(&folder.0)?;
        }
        if trainer.stages.is_blank {
            trainer.stages.draw(trainer.parts.num_threads, |_| true)?;
            trainer.stages.start_magnitudes()?;
        }
        Ok(trainer)
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
        self.global_step
    }

    /// Tokens of the global batches of these steps, each at its own size.
    pub fn tokens(&self) -> u64 {
        self.tokens
    }

    /// Steps that the whole run makes.
    pub fn total_steps(&self) -> usize {
        self.total_steps
    }

    /// What this rank ran in its last step or generation, and when, in seconds since its start.
    pub fn timeline(&self) -> &[Span] {
        &self.timeline
    }

    /// What this rank ran in the last steps that it trained, 32 at most. The first step of a run,
    /// in which memory is touched and threads wake up, is left out once there is another.
    pub fn records(&self) -> impl ExactSizeIterator<Item = &StepRecord> {
        self.records.iter()
    }

    /// What every rank of this rank's pipeline ran in these steps, on the pipeline's first rank; an
    /// empty timeline elsewhere.
    ///
    /// # Communication
    /// A gathering of the spans over the pipeline.
    ///
    /// # Errors
    /// When a rank fails meanwhile.
    pub fn gather_timeline(&self) -> Result<Timeline> {
        let spans: Vec<Span> = self
            .records
            .iter()
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
    /// gradients are not finite in `max_skipped_steps` steps in a row, or in every step of this
    /// call.
    pub fn train(&mut self) -> Result<TrainOutput> {
        if self.stages.plan.trained_params().next().is_none() {
            return Err(Error::NothingTrained);
        }
        if self.args.saves() {
            self.args.run_folder()?;
        }
        let start = Instant::now();
        let first_step = self.global_step;
        let skipped_before = self.stages.optimizer.progress().skipped;
        let (mut loss_sum, mut updates, mut tokens, mut stopped_by) = (0.0, 0, 0, None);
        let mut evaluation = None;
        while self.global_step < self.total_steps {
            let report = self.train_step()?;
            if report.skipped.is_none() {
                loss_sum += report.loss;
                updates += 1;
            }
            tokens += report.tokens;
            let done = self.global_step;
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
            evaluation = self.after_step()?;
            let agreed = self.agreed_stop();
            stopped_by = self.placed(StepPart::Train, self.global_step, agreed)?;
            if stopped_by.is_some() {
                break;
            }
        }
        self.finish_save()?;
        // A run without steps left does not replace the checkpoint that it came from.
        let made_steps = self.global_step > first_step;
        if self.args.saves() && made_steps && self.last_saved != Some(self.global_step) {
            self.save_checkpoint()?;
        }
        self.finish_rotation()?;
        let best = if self.args.load_best_model_at_end && stopped_by.is_none() {
            self.load_best()?
        } else {
            None
        };
        Ok(TrainOutput {
            global_step: self.global_step,
            steps: self.global_step - first_step,
            training_loss: if updates == 0 {
                0.0
            } else {
                loss_sum / f64::from(updates)
            },
            skipped_steps: self.stages.optimizer.progress().skipped - skipped_before,
            epoch: self
                .order
                .as_ref()
                .map_or(0.0, |order| order.epochs_after(self.global_step)),
            train_runtime: start.elapsed(),
            tokens,
            stopped_by,
            evaluation: evaluation.filter(|_| self.global_step == self.total_steps),
            best,
        })
    }

    /// Ends a run that skips too many steps: as many in a row as the arguments allow, or all of
    /// them. `updates` counts the steps that were not skipped.
    fn check_skipped(&mut self, report: StepReport, updates: u32) -> Result<()> {
        let (steps, limit) = (
            self.stages.optimizer.progress().skipped_in_a_row,
            self.args.max_skipped_steps,
        );
        let is_over = self.global_step == self.total_steps && updates == 0;
        match report.skipped {
            Some(param) if is_over || steps >= limit as u64 => {
                // The checkpoint that is being written is of an earlier step.
                self.finish_save()?;
                Err(Error::SkippedSteps {
                    steps,
                    step: report.step,
                    param,
                    limit,
                })
            }
            _ => Ok(()),
        }
    }

    /// Evaluates and saves where a step is due for it. `best` names the saved step with the best
    /// evaluation. Where the best model is loaded in the end, a step with a new best evaluation is
    /// saved too.
    fn after_step(&mut self) -> Result<Option<EvaluationMetrics>> {
        let done = self.global_step;
        let ends_epoch = self
            .order
            .as_ref()
            .is_some_and(|order| order.ends_epoch(done - 1));
        let is_last = done == self.total_steps;
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
            self.save_on_the_way()?;
        }
        Ok(evaluation)
    }

    /// The signal that asks to stop, if any rank has seen one.
    ///
    /// # Communication
    /// An all-reduce of 8 bytes over the world.
    fn agreed_stop(&self) -> Result<Option<i64>> {
        let seen = self.parts.stop.load(Ordering::Relaxed);
        let agreed = self
            .stages
            .mpu
            .world_group()
            .all_reduce_scalar(seen, ReduceOp::Max)?;
        Ok((agreed != 0).then_some(agreed))
    }

    /// How far the run has come in its data.
    fn position(&self) -> DataPosition {
        self.order
            .as_ref()
            .map(|order| order.position_after(self.global_step))
            .unwrap_or_default()
    }

    /// The order of training; an error without training data.
    fn order(&self) -> Result<&TrainingOrder> {
        self.order.as_ref().ok_or(Error::MissingKey {
            key: "data.path",
            advice: "training needs data".to_owned(),
        })
    }
}

/// Joins the group of every weight that several ranks of the pipeline use.
fn tie(mpu: Mpu, plan: &Plan) -> Result<Mpu> {
    let tied = plan.tied_across_ranks();
    Ok(tied.iter().try_fold(mpu, |mpu, (weight, ranks)| {
        mpu.with_tied(&weight.name, ranks)
    })?)
}
