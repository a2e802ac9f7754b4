//! The full stack: configuration, data, the training loop, metrics and the `merak` command.
//!
//! The trainer composes the other crates: it traces a model (merak-trace), splits it over tensor
//! ranks (merak-tp), cuts it into stages (merak-partition), drives the pipeline (merak-pipe) over
//! process groups (merak-mpu), steps a sharded optimizer (merak-zero) and writes checkpoints that
//! any other topology reads (merak-ckpt). The user names a model and three degrees.
//!
//! # Example
//!
//! Four ranks, as threads: two pipeline stages of two tensor-parallel ranks each.
//!
//! ```
//! use merak_trainer::{
//!     Config, MerakTrainer, Plan, PlanInputs, TrainerParts,
//!     data::{TokenDataset, Tokens}, run_world,
//! };
//! use std::sync::Arc;
//!
//! let line = [
//!     "--tp=2",
//!     "--pp=2",
//!     "--gradient_accumulation_steps=2",
//!     "--per_device_train_batch_size=1",
//!     "--max_steps=2",
//!     "--learning_rate=1e-3",
//! ]
//! .map(String::from);
//! let args = Config::load(None, [], &line)?.check()?;
//! let model = merak_trace::models::from_config(&serde_json::json!({
//!     "model_type": "gpt2", "vocab_size": 32,
//!     "n_positions": 8, "n_embd": 16, "n_layer": 2, "n_head": 2,
//! }))?;
//! let inputs = PlanInputs::read(model.into(), &args)?;
//! let plan = Arc::new(Plan::new(&inputs, &args)?);
//! let tokens: Tokens = (0..200).map(|i| i % 32).collect();
//! let data = Arc::new(TokenDataset::new(tokens, plan.draft.seq_length, "training")?);
//!
//! let losses = run_world(&args, |member| {
//!     let mpu = merak_mpu::Mpu::new(member, args.degrees())?;
//!     let parts = TrainerParts {
//!         train_data: Some(data.clone()),
//!         num_threads: 1,
//!         ..TrainerParts::default()
//!     };
//!     Ok(MerakTrainer::new(Arc::clone(&plan), mpu, &args, parts)?.train()?.training_loss)
//! })?;
//! assert!(losses.iter().all(|loss| loss.to_bits() == losses[0].to_bits()));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # Main types
//!
//! - [`Config`], [`MerakArguments`], [`CheckedArguments`]: layers of configuration, the values, and
//!   values that agree with each other.
//! - [`Plan`]: the decisions that every rank makes alone and alike before anything runs, made from
//!   [`PlanInputs`]. [`DegreeSearch`] finds the degrees with the shortest step, on this machine or
//!   on a described [`Cluster`].
//! - [`MerakTrainer`]: one rank's trainer; [`run_world`] starts the ranks. [`Callback`]s are told
//!   of its events.
//! - [`data`]: data sets, their order, tokenizers. [`metrics`]: records and progress.
//!
//! # One step of a rank
//!
//! ```text
//! batches ─► schedule (F, B of each microbatch, hops between stages) ─► gradients of all uses
//!        ─► uses of tied weights added ─► mean over replicas ─► norm, clip ─► optimizer ─► weights
//! ```
//!
//! # Guarantees
//!
//! - The pipeline's schedule, cut and recomputation change no bit of a loss, gradient or weight;
//!   data and tensor parallelism and ZeRO change them by the order of summation only.
//! - The loss is the mean over all labels of the global batch, on every rank.
//! - A rank that fails ends the run on all ranks within the deadline, with its cause.

mod config;
mod costs;
pub mod data;
mod error;
mod folder;
mod machine;
mod memory;
pub mod metrics;
pub mod network;
mod plan;
mod planner;
mod stage;
mod trainer;
mod world;

pub use config::{
    AdapterName, AutopipeArguments, BackendChoice, Boundaries, CheckedArguments, ComputeArguments,
    Config, CostSource, DataArguments, DataFormat, Device, DistributedArguments, EarlyStop, Given,
    HalfPrecision, InputPath, InputPaths, Key, LrScales, MerakArguments, MetricName, Mixture,
    MixturePart, ModelArguments, ModelClasses, Offload, Origin, Range, Ratios, RecomputeMode,
    ReportTo, SeqLength, SplitRatio, Temperature, TemplateSource, ThreadsPerRank, TokenIds,
    TokenizerSource, TpLayerListArguments, TraceMethod, VARIABLES, WeightSlice, key_help, key_page,
    keys,
};
pub use costs::{CostCache, CostModel, FirstSteps, Measurement, Profile};
pub use error::{
    ConfigError, DataError, Error, FolderError, PlanError, Result, ResumeError, StepPart, Teller,
    chain,
};
pub use folder::RunFolder;
pub use machine::{available_bytes, keep_to_one_heap};
pub use memory::{MemoryNeed, MemoryShortage, Room, RunMemory, Workload};
pub use plan::{
    CustomLoss, Draft, FasterSchedule, Forward, ForwardOutput, Lora, LossCount, LossFn, Plan,
    PlanInputs, Prediction, StageTimes,
};
pub use planner::{
    Candidate, DegreeSearch, FoundDegrees, Machines, RefusedDegrees, TooLarge, cluster_costs,
    read_cluster,
};
pub use stage::NamedTensors;
pub use trainer::{
    BestModel, Breakdown, Callback, ComputeMetrics, Divergence, EarlyStopping, EvaluationMetrics,
    Instruction, Lap, LoadedCheckpoint, LrScheduler, MerakTrainer, PredictionKind,
    PredictionOutput, RankTimes, Rollback, SamplePrediction, StepProfile, StepRecord, StepReport,
    Stop, StopStrings, TrainOutput, TrainerControl, TrainerParts,
};
pub use world::{World, get_grid, get_topo, run_on, run_world, threads_per_rank};
// The names of the other crates that a program with a trainer needs, and the crates for the rest.
pub use merak_ckpt::{self, Completion, GenerateOptions};
pub use merak_mpu::{self, Axis, Degrees, Group, Member, Mpu, Topology, init};
pub use merak_partition::{self, Cluster, PartitionReport};
pub use merak_pipe;
pub use merak_tp::{self, LayerLists, set_tp_layer_lists};
pub use merak_trace;
pub use merak_zero;

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
