//! Making a Hugging Face folder of a checkpoint.

use crate::disk::read_json;
use crate::format::CONFIG;
use crate::hf::{Content, exported, make};
use crate::lora::{copy_companions, has_adapter, merge_own};
use crate::reshard::check_outside;
use crate::{Checkpoint, ExportOptions, Result};
use std::path::Path;

/// Writes the parameters of a checkpoint as a Hugging Face folder, whole and under their names:
/// `model.safetensors`, or several files and `model.safetensors.index.json`; beside them the
/// checkpoint's other files (`config.json`, tokenizer).
///
/// In `config.json`, `dtype` (or `torch_dtype`) is set to the type of the weights, and for a known
/// `model_type`, `tie_word_embeddings` to whether the folder has a head of its own, so that
/// `transformers` finds every weight it asks for and none besides. A head that equals the
/// embedding, under a configuration that ties the two, is not written. An adapter that the
/// checkpoint's run trained is folded into the weights, as [`merge_lora`](crate::merge_lora) does;
/// [`extract_lora`](crate::extract_lora) writes it by itself.
///
/// `folder` must not exist, or be empty; it gets its name when it is complete. Until then it is
/// `.merak-tmp-NAME` beside its place; what a killed process left there is taken over.
///
/// # Errors
/// [`Error::AlreadyExists`](crate::Error::AlreadyExists) for a folder with content,
/// [`Error::InUse`](crate::Error::InUse) for one that another process is writing,
/// [`Error::Foreign`](crate::Error::Foreign) where the checkpoint has no `config.json`,
/// [`Error::InvalidOption`](crate::Error::InvalidOption) for a type that is no floating-point type,
/// [`Error::Damaged`](crate::Error::Damaged) for a damaged checkpoint.
pub fn export_hf(
    source: &Checkpoint,
    folder: impl AsRef<Path>,
    options: &ExportOptions,
) -> Result<()> {
    let folder = folder.as_ref();
    check_outside(source, folder)?;
    let config = read_json(&source.path().join(CONFIG))?;
    if has_adapter(source) {
        return merge_own(source, config, folder, options);
    }
    let content = Content {
        tensors: exported(source, &config, options, &|_| false)?,
        values: source,
        config,
        others: &|folder| copy_companions(source, folder),
    };
    make(folder, &content, options)
}
