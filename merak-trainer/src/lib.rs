//! The full stack: configuration, data, the training loop, metrics and the merak command

mod config;
pub mod data;
mod error;
pub mod metrics;

pub use config::{
    Backend, Boundaries, CheckedArguments, ComputeArguments, Config, DataArguments, DataFormat,
    Device, DistributedArguments, Engine, InputPath, Key, MerakArguments, ModelArguments, Origin,
    PartitionMethod, Recompute, ReportTo, SplitMethod, ThreadsPerRank, TokenizerSource,
    TpLayerListArguments, TraceMethod, keys,
};
pub use error::{Error, Result};
