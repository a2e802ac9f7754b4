//! Writing a model with an adapter folded into it.

use super::Adapter;
use crate::hf::{Content, exported, make, read_json};
use crate::rewrite::{Values, copy_file, copy_other_files};
use crate::{Checkpoint, ExportOptions, HfFolder, Piece, Result};
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
}

/// Writes a Hugging Face folder of a base model with the PEFT adapter in `adapter` folded into its
/// weights: `W + scale * B * A`, and what the adapter replaces. `base` is a Hugging Face folder, a
/// checkpoint, or an output folder; see [`export_hf`](crate::export_hf) for what is written, and
/// [`Adapter::open`] for what is read.
///
/// # Errors
/// As for [`export_hf`](crate::export_hf), [`Adapter::open`] and [`Adapter::merge`]. Nothing is left at
/// `folder` then.
pub fn merge_lora(
    base: impl AsRef<Path>,
    adapter: impl AsRef<Path>,
    folder: impl AsRef<Path>,
    options: &ExportOptions,
) -> Result<()> {
    let (base, adapter, folder) = (base.as_ref(), adapter.as_ref(), folder.as_ref());
    if HfFolder::is_one(base) {
        let hf = HfFolder::open(base)?;
        let others = |folder: &Path| {
            let mut names = hf.companions().into_iter();
            names.try_for_each(|name| copy_file(base, folder, name).map(drop))
        };
        return merge(hf.weights(), adapter, folder, options, &others);
    }
    let checkpoint = Checkpoint::open(base)?;
    let others = |folder: &Path| copy_other_files(&checkpoint, folder).map(drop);
    merge(&checkpoint, adapter, folder, options, &others)
}

fn merge(
    base: &Checkpoint,
    adapter: &Path,
    folder: &Path,
    options: &ExportOptions,
    others: &dyn Fn(&Path) -> Result<()>,
) -> Result<()> {
    let config = read_json(&base.path().join("config.json"))?;
    let mut adapter = Adapter::open(adapter, &config, &base.manifest().tensors)?;
    adapter.measure(base)?;
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
