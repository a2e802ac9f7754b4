//! Checkpoints that outlive their topology, and text generation.
//!
//! In 3D parallelism no rank holds the model: tensor parallelism cuts a tensor into boxes, pipeline
//! parallelism deals tensors out to stages, ZeRO cuts optimizer state into flat ranges over the
//! data-parallel replicas. A checkpoint of this crate describes **global** tensors by name and the
//! slices of them that each file holds, so nothing in it depends on the topology that wrote it, and
//! a rank of any other topology reads the byte ranges that it needs.
//!
//! Without the feature `graph` the crate depends on merak-mpu alone of Merak; it never needs a
//! tensor library: its seams are names, shapes and bytes.
//!
//! # Example
//!
//! ```
//! use merak_ckpt::{Checkpoint, DType, Header, Layout, Piece, ShardKind, Store};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let folder = tempfile::tempdir()?;
//! let store = Store::in_output_dir(folder.path());
//! let whole = Layout::whole(&[2, 3]);
//! let piece = |layout| Piece::parameter("wte.weight", DType::U8, layout);
//!
//! // Save on one rank ...
//! let draft = store.begin(10)?;
//! let shard = draft.write_shard(ShardKind::Model, 0, &[(piece(&whole), &[0, 1, 2, 3, 4, 5])])?;
//! draft.commit(vec![shard], Header::default(), &[])?;
//!
//! // ... and load as a rank that holds the last column.
//! let checkpoint = Checkpoint::open(folder.path())?;
//! let layout = Layout::shard(&[2, 3], 1, 2..3)?;
//! let mut local = [0; 2];
//! checkpoint.read(&piece(&layout), &mut local)?;
//! assert_eq!(local, [2, 5]);
//! # Ok(())
//! # }
//! ```
//!
//! # Saving with many ranks
//!
//! The ranks communicate through the caller only, which sends two messages:
//!
//! ```text
//! rank 0                         every rank                             rank 0
//! store.begin(step) ─ barrier ─► store.draft(step).write_shard(..) ─┐
//!                                Shard (serde) ── gather ───────────┴─► draft.commit(shards, ..)
//!                                                                       store.rotate(limit, ..)
//!                                                                       ─ barrier, or the path ─►
//! ```
//!
//! With [`Draft::write_shard_later`] a rank trains on while a thread copies its tensors and writes
//! them: nothing changes them until the next update, so the copy is made during the next forward
//! and backward passes. The gathering and the rest wait until [`PendingShard::wait`] has every
//! rank's shard.
//!
//! Each rank writes what it owns under a file index of its own (its rank, say); where several ranks
//! hold a tensor, one of them writes it. [`Draft::commit`] refuses shards that overlap or leave an
//! element out, so a mistake in ownership is found when saving. Readers see the folder only once it
//! is complete, synced and renamed.
//!
//! # Main types
//!
//! - [`Store`]: the folder of checkpoints; `latest`, `best`, rotation. [`Draft`]: one being
//!   written.
//! - [`Base`]: parameters that do not change, kept once beside the checkpoints that share them.
//! - [`HeldFile`]: a file that one process at a time holds, as a lock.
//! - [`Layout`]: how a rank's local tensor lies in the global one, as boxes; [`Piece`] names a
//!   local tensor or a flat range of it, for writing and reading alike.
//! - [`Checkpoint`]: an open one: [`read`](Checkpoint::read), [`verify`](Checkpoint::verify), and
//!   [`diff`] of two. [`Manifest`] is what it holds; [`mod@format`] specifies every byte.
//! - [`reshard`]: a checkpoint's files rewritten for another topology, as [`ReshardOptions`] say;
//!   [`Cut`] is how tensor parallelism cuts a tensor at any degree.
//! - [`HfFolder`]: a Hugging Face folder, read by slices like a checkpoint; [`import_hf`],
//!   [`export_hf`], and [`import_merak`] for weights of the original Python Merak; [`import_dcp`]
//!   for folders of `torch.distributed.checkpoint`.
//! - [`Adapter`]: a PEFT folder, merged into any slice of a weight; [`merge_lora`] writes the whole
//!   model. [`LoraConfig`] describes an adapter that is to be trained, [`extract_lora`] writes one
//!   that was.
//! - [`generate`], [`TokenSource`], [`LogitsSource`], [`Sampler`], [`Decoding`]: the decode loop,
//!   which knows no model and no ranks; [`BeamSearch`] keeps several continuations of a prompt.
//!
//! # How a piece is read
//!
//! ```text
//! wanted: local tensor            stored: slices in files
//!   parts (boxes)        ┌─ box ∩ box ─► runs that are contiguous in both, in file order
//!   flat range of it  ───┤                 │ clipped to both flat ranges
//!                        └─ none: skip     ▼
//!                                 file, a block of 1 MiB at a time ─► checksum ─► out[run]
//! ```
//!
//! The first touch of a slice reads all of it, once, since its checksum covers all of it; later
//! reads touch only the blocks that they need.
//!
//! # What holds
//!
//! - Resharding streams: it holds [`DEFAULT_MAX_MEMORY`] bytes of tensors, or as few as 4 MiB.
//! - Weights from pickles (`pytorch_model.bin`) are read without running any code in them.
//! - Any topology reads what any other wrote, bit for bit; reading needs a block of 1 MiB besides
//!   the caller's buffer.
//! - Equal states make equal bytes: sorted tables, no clock, no hash order.
//! - A crash at any byte leaves the older checkpoints valid, and `latest` naming one of them.
//! - Damage of any byte of a file is found by [`Checkpoint::verify`]. Opening finds it in the
//!   manifest and in the caller's files, [`Checkpoint::read`] in the slices that it touches and in
//!   the headers of their files: what was loaded is what was saved. The error names file, tensor
//!   and the newest complete older checkpoint. Hostile manifests and headers give errors as well.
//! - The token drawn for a prompt depends on (logits, seed, prompt index, position) only.
//!
//! # Features
//!
//! - `cli` (default): the `merak-ckpt` command, and how it reads its line.
//! - `candle`: `Checkpoint::read_tensors` and `Draft::write_tensors`, over candle's tensors.
//! - `graph`: `adapt`, which puts an adapter into a graph of `merak-trace`, so that it is trained.
//! - `tch`: as `candle`, over libtorch's tensors; needs libtorch 2.11.
//!
//! # Papers
//!
//! Slices of global tensors instead of one file per rank follow the idea of
//! [Universal Checkpointing](https://arxiv.org/abs/2406.18820); flat ranges are those of
//! [ZeRO](https://arxiv.org/abs/1910.02054), section 5. Adapters are those of
//! [LoRA](https://arxiv.org/abs/2106.09685), section 4.1, scaled by the rank or by
//! [its square root](https://arxiv.org/abs/2312.03732). Top-p is
//! [nucleus sampling](https://arxiv.org/abs/1904.09751), section 3.1.

mod averaged;
mod beam;
mod checkpoint;
mod checksum;
#[cfg(feature = "cli")]
pub mod cli;
mod common_runs;
mod convert;
mod crc32;
mod cut;
mod degrees;
mod diff;
mod disk;
mod draft;
mod draft_file;
mod draft_folder;
mod dtype;
mod error;
mod export;
mod factor_name;
mod family;
mod file_check;
pub mod format;
mod frozen_base;
mod generate;
mod generate_options;
mod hf;
mod kind;
mod layout;
mod locate;
mod lock_file;
mod lora;
mod manifest;
mod output;
mod parse_bytes;
mod path_hint;
mod pending;
mod piece;
mod plan;
mod read;
mod recognize;
mod region;
mod reshard;
mod rewrite;
mod rotation;
mod sampler;
mod shard;
mod store;
mod stored_tensor;
#[cfg(any(feature = "candle", feature = "tch"))]
mod tensors;
mod uniform;
mod verify;
mod weight_files;
pub mod words;

pub use beam::{BeamSearch, Continued, generate_beams};
pub use checkpoint::Checkpoint;
pub use checksum::Checksum;
pub use cut::Cut;
pub use diff::{
    DiffReport, DiffSummary, Difference, Largest, TensorDiff, Tolerance, ValueDiff, diff,
};
pub use disk::{
    MAX_CONFIG_BYTES, open_regular, open_to_write, read_at_most, read_regular, read_text,
};
pub use draft::Draft;
pub use draft_file::{DraftFile, replace_file};
pub use draft_folder::DraftBeside;
pub use dtype::{DType, UnknownDType};
pub use error::{BoxError, Damage, Error, Problem, Result};
pub use export::export_hf;
pub use factor_name::{FactorName, FactorRole};
pub use family::set_tie;
pub use generate::{
    Completion, Decoding, LogitsSource, NewToken, Reason, Row, TokenSource, generate, generate_with,
};
pub use generate_options::{EarlyStopping, GenerateOptions};
pub use hf::{
    ExportOptions, HfFolder, ImportOptions, import_dcp, import_hf, import_merak, stored_tensors,
};
pub use kind::Kind;
pub use layout::{Layout, Part};
pub use lock_file::{HeldFile, lies_at};
pub use lora::{
    ADAPTER_FOLDER, Adapter, LoraConfig, check_replaceable, extract_lora, has_lora, merge_lora,
    replace_lora, squares_of_outputs,
};
#[cfg(feature = "graph")]
pub use lora::{ADAPTER_NAMES, AdaptError, Adapted, UnmatchedTarget, adapt, is_adapter_name};
pub use manifest::{Base, FileEntry, Header, Manifest, SliceEntry, TensorEntry, Topology};
pub use parse_bytes::{BadByteSize, parse_byte_size};
pub use path_hint::path_hint;
pub use pending::{Look, PendingShard, Staging};
pub use piece::{OwnedPiece, Piece};
pub use plan::Stages;
pub use recognize::{ADAPTER_CONFIG, what_it_is};
pub use region::Region;
pub use reshard::{ReshardOptions, reshard};
pub use rewrite::DEFAULT_MAX_MEMORY;
pub use sampler::Sampler;
pub use shard::{Shard, ShardKind};
pub use store::Store;
pub use stored_tensor::StoredTensor;
pub use verify::VerifyReport;

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
