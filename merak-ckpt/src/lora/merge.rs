//! Writing a model with an adapter folded into it.

use super::{Adapter, check_replaceable, has_adapter};
use crate::disk::read_json;
use crate::format::CONFIG;
use crate::hf::{Content, exported, make};
use crate::recognize::ADAPTER_CONFIG;
use crate::rewrite::{Values, copy_file, copy_other_files};
use crate::words::file;
use crate::{Checkpoint, ExportOptions, HfFolder, Piece, Result};
use serde_json::Value;
use std::path::Path;

/// A base model's values with an adapter merged in.
struct Merged<'a> {
    base: &'a Checkpoint,
    adapter: &'a Adapter,
}

impl Values for Merged<'_> {
    fn read_as(&self, piece: &Piece<'_>, out: &mut [u8]) -> Result<()> {
        self.base.read_as(piece, out)?;
        self.adapter.merge(piece, out)
    }

    fn check_rest(&self) -> Result<()> {
        self.base.check_rest()?;
        self.adapter.check_rest()
    }
}

/// Writes a Hugging Face folder of a base model with the PEFT adapter in `adapter` folded into its
/// weights: `W + scale * B * A`, and what the adapter replaces. `base` is a Hugging Face folder, a
/// checkpoint, or an output folder; see [`export_hf`](crate::export_hf) for what is written, and
/// [`Adapter::open`] for what is read. An adapter that the base has of its own is left out, with a
/// warning in the log. Where head and embedding of the base are one and the adapter changes one of
/// them, the folder has two tensors.
///
/// # Errors
/// As for [`export_hf`](crate::export_hf), [`Adapter::open`], [`Adapter::merge`] and
/// [`check_replaceable`](crate::check_replaceable). Nothing is left at `folder` then.
pub fn merge_lora(
    base: impl AsRef<Path>,
    adapter: impl AsRef<Path>,
    folder: impl AsRef<Path>,
    options: &ExportOptions,
) -> Result<()> {
    let (base, adapter, folder) = (base.as_ref(), adapter.as_ref(), folder.as_ref());
    let open = |weights: &Checkpoint, config: Value| -> Result<(Value, Adapter)> {
        let adapter = Adapter::open(adapter, &config, &weights.manifest().tensors)?;
        Ok((config, adapter))
    };
    if HfFolder::is_one(base) {
        let hf = HfFolder::open(base)?;
        let others = |folder: &Path| {
            let mut names = hf.companions().into_iter();
            names.try_for_each(|name| copy_file(base, folder, name).map(drop))
        };
        let mut config = hf.config().clone();
        hf.correct(&mut config);
        let opened = open(hf.weights(), config)?;
        return merge(hf.weights(), opened, folder, options, &others);
    }
    let checkpoint = Checkpoint::open(base)?;
    let others = |folder: &Path| copy_companions(&checkpoint, folder);
    let config = read_json(&checkpoint.path().join(CONFIG))?;
    let opened = open(&checkpoint, config)?;
    check_replaceable(&checkpoint, Some(&opened.1))?;
    if has_adapter(&checkpoint) {
        tracing::warn!(
            path = %file(checkpoint.path()),
            "the checkpoint's own adapter is left out: the named one takes its place"
        );
    }
    merge(&checkpoint, opened, folder, options, &others)
}

/// Writes a checkpoint with the adapter that it trained folded into its weights.
pub(crate) fn merge_own(
    source: &Checkpoint,
    config: Value,
    folder: &Path,
    options: &ExportOptions,
) -> Result<()> {
    let adapter = Adapter::of_checkpoint(source, &config)?;
    let others = |folder: &Path| copy_companions(source, folder);
    merge(source, (config, adapter), folder, options, &others)
}

/// Copies the files of a checkpoint that belong to its model: a folder with the description of an
/// adapter would be one of PEFT.
pub(crate) fn copy_companions(source: &Checkpoint, folder: &Path) -> Result<()> {
    copy_other_files(source, folder, |name| name != ADAPTER_CONFIG).map(drop)
}

fn merge(
    base: &Checkpoint,
    (config, mut adapter): (Value, Adapter),
    folder: &Path,
    options: &ExportOptions,
    others: &dyn Fn(&Path) -> Result<()>,
) -> Result<()> {
    adapter.measure(base)?;
    let untied = adapter.untied.map(|[head, embedding]| {
        let mut names = base.parameter_names();
        names.insert(head.to_owned(), embedding.to_owned());
        base.renamed(&names)
    });
    let untied = untied.transpose()?;
    let base = untied.as_ref().unwrap_or(base);
    let changes = |name: &str| adapter.targets().any(|target| target == name);
    let content = Content {
        tensors: exported(base, &config, options, &changes)?,
        values: &Merged {
            base,
            adapter: &adapter,
        },
        config,
        others,
    };
    make(folder, &content, options)
}
