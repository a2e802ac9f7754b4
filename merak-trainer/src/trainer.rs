//! One rank's trainer: its parts, how it starts, what it tells.

mod adapter;
mod average;
mod base;
mod best;
mod callback;
mod checkpoint;
mod divergence;
mod early_stopping;
mod evaluation;
mod generation;
mod labels;
mod loading;
mod prediction;
mod resume;
mod run_length;
mod run_progress;
mod run_state;
mod saving;
mod shards;
mod step;
mod stop;
mod times;
mod training;
mod warnings;

use self::{
    divergence::DivergenceGuard,
    run_length::RunLength,
    run_progress::{Records, RunProgress},
    saving::Saving,
};
pub use best::BestModel;
pub use callback::{Callback, TrainerControl};
pub use divergence::{Divergence, Rollback};
pub use early_stopping::EarlyStopping;
pub use evaluation::EvaluationMetrics;
pub use generation::StopStrings;
pub use loading::LoadedCheckpoint;
pub use prediction::{ComputeMetrics, PredictionKind, PredictionOutput, SamplePrediction};
pub use run_progress::{Instruction, Lap, StepRecord};
pub use step::StepReport;
pub use stop::Stop;
pub use times::{Breakdown, RankTimes, StepProfile};
pub use training::TrainOutput;

use crate::{
    config::{CheckedArguments, Device, SeqLength},
    data::{Collator, DataFingerprint, Dataset, Loader, ModelInputs},
    error::{ConfigError, Error, Result},
    memory::MemoryNeed,
    plan::Plan,
    stage::RankStages,
    world::threads_per_rank,
};
use merak_mpu::{Group, Mpu};
use merak_partition::PartitionReport;
use merak_pipe::{GroupLink, PipelineEngine, Span, Timeline};
use merak_trace::models::ModelInfo;
use merak_zero::UpdateRule;
use std::{
    collections::BTreeMap,
    fmt,
    sync::{Arc, atomic::AtomicI64},
};

/// A learning rate of the caller's own: after a number of updates, skipped steps aside, in a run
/// of a number of steps. It must be the same function on every rank, and of nothing else, so that
/// a resumed run goes on alike.
pub type LrScheduler = Arc<dyn Fn(u64, usize) -> f64 + Send + Sync>;

/// The parts of a trainer besides the plan and the arguments.
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
    /// Makes microbatches of samples; unset: stacks them by name.
    pub data_collator: Option<Collator>,
    /// The learning rate, in place of `lr_scheduler_type`.
    pub lr_scheduler: Option<LrScheduler>,
    /// Metrics of evaluations besides the built-in ones, computed on rank 0 from the predictions of
    /// all samples: class probabilities or token losses, with `return_logits` logits.
    pub compute_metrics: Option<ComputeMetrics>,
    /// An update rule of the program, in place of that of `optim`. The plan counts the state of
    /// `optim`. From ZeRO stage 1 on with several replicas it needs
    /// `zero_allow_untested_optimizer`.
    pub rule: Option<Arc<dyn UpdateRule>>,
    /// Whether a checkpoint of which only weights are taken (`finetune`) gives their averages
    /// (`ema_decay`) in their place.
    pub takes_averages: bool,
    /// Observers of the run.
    pub callbacks: Vec<Box<dyn Callback>>,
}

impl fmt::Debug for TrainerParts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TrainerParts")
            .field("num_threads", &self.num_threads)
            .finish_non_exhaustive()
    }
}

/// One rank's part of a training run; every rank makes one and calls the same methods.
pub struct MerakTrainer {
    args: CheckedArguments,
    stages: RankStages,
    engine: PipelineEngine,
    link: GroupLink,
    /// What the model reads of the data.
    inputs: ModelInputs,
    loader: Option<Loader>,
    parts: TrainerParts,
    progress: RunProgress,
    records: Records,
    times: times::Times,
    saving: Saving,
    programs: generation::Programs,
    resumed_from: Option<LoadedCheckpoint>,
    best: Option<BestModel>,
    /// With `early_stopping_patience`, the same on every rank.
    early_stopping: Option<EarlyStopping>,
    /// With `divergence_guard`.
    divergence: Option<DivergenceGuard>,
    /// Returns to earlier checkpoints.
    rollbacks: usize,
    /// What callbacks of this rank have asked for since the ranks last agreed.
    control: TrainerControl,
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
    /// arguments say so. With `text_generation` it keeps neither gradients nor optimizer state, and
    /// takes the weights of a checkpoint alone.
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
        if args.text_generation && !plan.is_frozen() {
            let plan = Arc::new(Plan::clone(&plan).frozen());
            return Self::new(plan, mpu, &args.generating(), parts);
        }
        if parts.num_threads == 0 {
            parts.num_threads = threads_per_rank(args);
        }
        check_rule(args, &parts)?;
        if parts.compute_metrics.is_none() {
            Self::check_metric(&plan, args)?;
        }
        let mpu = Arc::new(tie(mpu, &plan)?);
        let (engine, link) = pipeline(&plan, &mpu, args)?;
        let progress = RunProgress::new(RunLength::new(args, &parts)?);
        let lengths = SeqLength {
            input: plan.draft.seq_length,
            target: plan.draft.target_length,
        };
        let inputs = ModelInputs::of(&*plan.draft.model, lengths)?;
        let mut trainer = Self {
            args: args.clone(),
            stages: RankStages::new(plan, mpu, args, parts.num_threads, parts.rule.as_ref())?,
            engine,
            link,
            inputs,
            loader: None,
            parts,
            progress,
            records: Records::default(),
            times: times::Times::default(),
            saving: Saving::default(),
            programs: generation::Programs::default(),
            resumed_from: None,
            best: None,
            early_stopping: EarlyStopping::of(args),
            divergence: DivergenceGuard::of(args),
            rollbacks: 0,
            control: TrainerControl::default(),
            base_values: BTreeMap::new(),
        };
        trainer.start()?;
        Ok(trainer)
    }

    /// Takes the weights that the run starts with: those of a checkpoint, of `model.hf_dir`, or
    /// fresh ones.
    fn start(&mut self) -> Result<()> {
        if self.stages.mpu.is_rank_0() {
            warnings::warn(&self.args, &self.stages.plan.draft);
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
            self.stages.start_average()?;
        }
        Ok(())
    }

    /// Checks the data as [`MerakTrainer::new`] does: their number, and the learning rates of the
    /// steps that they give. Checks also that there are labels: samples are read until one has
    /// some. Needs neither model nor ranks. Returns the steps of the whole run.
    ///
    /// # Errors
    /// When the data are too few or all without labels.
    pub fn check_data(args: &CheckedArguments, parts: &TrainerParts) -> Result<usize> {
        let length = RunLength::new(args, parts)?;
        labels::check_labels(args, parts)?;
        Ok(length.total_steps)
    }

    /// Checks that evaluations give the metric that the arguments judge models by, without metrics
    /// of the caller's own. Needs no ranks.
    ///
    /// # Errors
    /// [`ConfigError::UnknownMetric`](crate::ConfigError::UnknownMetric).
    pub fn check_metric(plan: &Plan, args: &CheckedArguments) -> Result<()> {
        let known = evaluation::built_in(plan, args);
        let name = &args.metric_for_best_model;
        if known.contains(&name.0) {
            return Ok(());
        }
        let known: Vec<_> = known.iter().map(String::as_str).collect();
        Err(name.unknown(&known))
    }

    /// Checks, before any data are read, that the checkpoint is there from which the arguments go
    /// on, and that its header is of a model of these sizes; `auto` needs none. The rest takes a
    /// plan and data: [`MerakTrainer::check_checkpoint`].
    ///
    /// # Errors
    /// When the checkpoint is missing, cannot be opened, or is of another model.
    pub fn expect_checkpoint(args: &CheckedArguments, model: &ModelInfo) -> Result<()> {
        resume::expect(args, model)
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

    /// The samples to evaluate on. A resumed run draws in them by the seed of its checkpoint.
    pub fn eval_data(&self) -> Option<&Arc<dyn Dataset>> {
        self.parts.eval_data.as_ref()
    }

    /// This rank's place in the run.
    pub fn mpu(&self) -> &Mpu {
        &self.stages.mpu
    }

    /// The work, memory and messages of each stage.
    ///
    /// # Errors
    /// As [`Plan::partition_report`].
    pub fn partition_report(&self) -> Result<PartitionReport> {
        self.stages.plan.partition_report()
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
        self.progress.length.total_steps
    }

    /// What this rank ran in its last step or generation, and when, in seconds since the moment of
    /// [`Member::epoch`](merak_mpu::Member::epoch), which all ranks share.
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

    /// The bytes that every rank of this rank's pipeline holds, on the pipeline's first rank;
    /// nothing elsewhere.
    ///
    /// # Communication
    /// A gathering of some numbers over the pipeline.
    ///
    /// # Errors
    /// When a rank fails meanwhile.
    ///
    /// # Panics
    /// Never: the bytes are plain data.
    pub fn gather_memory(&self) -> Result<Vec<MemoryNeed>> {
        let own = self.memory();
        let own = [own.weights, own.gradients, own.optimizer, own.activations];
        let own = serde_json::to_vec(&own).expect("plain numbers");
        let group = self.stages.mpu.pipeline_parallel_group();
        let ranks = group.gather_bytes(own, 0)?;
        let need = |bytes: &Vec<u8>| {
            let [weights, gradients, optimizer, activations] =
                serde_json::from_slice(bytes).expect("a rank's own numbers");
            MemoryNeed {
                weights,
                gradients,
                optimizer,
                activations,
                ..MemoryNeed::default()
            }
        };
        Ok(ranks.iter().map(need).collect())
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
}

/// The rank's part of the pipeline, and its link to the others.
fn pipeline(
    plan: &Plan,
    mpu: &Mpu,
    args: &CheckedArguments,
) -> Result<(PipelineEngine, GroupLink)> {
    let engine = PipelineEngine::new(&plan.schedule, mpu.pipeline_parallel_rank())?;
    let engine = engine.with_epoch(mpu.member().epoch());
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
        mpu.sequence_tensor_parallel_group()
    }
}

/// Refuses an untested rule whose state replicas divide.
fn check_rule(args: &CheckedArguments, parts: &TrainerParts) -> Result<()> {
    let divides = args
        .zero_config(1)
        .element_bytes(args.replicas())
        .state
        .ranks
        > 1;
    match &parts.rule {
        Some(rule) if divides && !args.zero_allow_untested_optimizer => {
            Err(Error::Config(ConfigError::UntestedOptimizer {
                name: rule.name().to_owned(),
                stage: u8::from(args.zero_stage),
                replicas: args.replicas(),
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
