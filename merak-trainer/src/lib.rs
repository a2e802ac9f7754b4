//! The full stack: configuration, data, the training loop, metrics and the merak command

mod config;
pub mod data;
mod error;
pub mod metrics;
mod plan;
mod stage;
mod trainer;
mod world;

pub use config::{
    Backend, Boundaries, CheckedArguments, ComputeArguments, Config, DataArguments, DataFormat,
    Device, DistributedArguments, Engine, InputPath, Key, MerakArguments, ModelArguments, Origin,
    PartitionMethod, Recompute, ReportTo, SplitMethod, ThreadsPerRank, TokenizerSource,
    TpLayerListArguments, TraceMethod, keys,
};
pub use error::{Error, Result};
pub use plan::Plan;
pub use world::{chain, run_world, threads_per_rank};
pub use trainer::{Callback, LoadedCheckpoint, MerakTrainer, StepReport, TrainOutput, TrainerParts};
