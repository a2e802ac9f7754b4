//! Checkpoints that outlive their topology, and text generation.

mod checkpoint;
mod checksum;
mod copy;
mod disk;
mod draft;
mod dtype;
mod error;
pub mod format;
mod kind;
mod layout;
mod manifest;
mod read;
mod region;
mod shard;
mod store;

pub use checkpoint::Checkpoint;
pub use checksum::Checksum;
pub use draft::Draft;
pub use dtype::{DType, UnknownDType};
pub use error::{BoxError, Damage, Error, Problem, Result};
pub use kind::Kind;
pub use layout::{Layout, Part};
pub use manifest::{FileEntry, Header, Manifest, SliceEntry, TensorEntry, Topology};
pub use region::Region;
pub use shard::{Piece, Shard, ShardKind};
pub use store::Store;
