//! Checkpoints that outlive their topology, and text generation.

mod checkpoint;
mod checksum;
mod copy;
mod diff;
mod disk;
mod draft;
mod dtype;
mod error;
pub mod format;
mod generate;
mod kind;
mod layout;
mod manifest;
mod philox;
mod read;
mod region;
mod sampler;
mod shard;
mod store;
mod verify;

pub use checkpoint::Checkpoint;
pub use checksum::Checksum;
pub use diff::{DiffReport, Difference, TensorDiff, Tolerance, ValueDiff, diff};
pub use draft::Draft;
pub use dtype::{DType, UnknownDType};
pub use error::{BoxError, Damage, Error, Problem, Result};
pub use generate::{
    Completion, Decoding, GenerateOptions, LogitsSource, NewToken, Reason, Row, TokenSource,
    generate, generate_with, pad_completions,
};
pub use kind::Kind;
pub use layout::{Layout, Part};
pub use manifest::{FileEntry, Header, Manifest, SliceEntry, TensorEntry, Topology};
pub use region::Region;
pub use sampler::Sampler;
pub use shard::{Piece, Shard, ShardKind};
pub use store::Store;
pub use verify::VerifyReport;
