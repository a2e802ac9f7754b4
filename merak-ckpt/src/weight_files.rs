//! The files of a Hugging Face folder's weights.

use crate::Result;
use crate::disk::parsed;
use crate::error::foreign;
use crate::manifest::check_file_name;
use serde::Deserialize;
use serde::de::IgnoredAny;
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

/// Largest index of weights that is read.
const MAX_INDEX_BYTES: u64 = 64 << 20;

/// The name of a file, how it keeps tensors, and the tensors that an index wants of it.
pub(crate) type WeightFile = (String, FileKind, Option<BTreeSet<String>>);

/// The names of weights in one file, in order of preference.
const WEIGHTS: [(&str, FileKind); 2] = [
    ("model.safetensors", FileKind::Safetensors),
    ("pytorch_model.bin", FileKind::Torch),
];

/// How a file keeps tensors.
#[derive(Debug, Clone, Copy)]
pub(crate) enum FileKind {
    Safetensors,
    Torch,
}

/// The files of weights.
pub(crate) fn weight_files(folder: &Path) -> Result<Vec<WeightFile>> {
    for (single, kind) in WEIGHTS {
        if folder.join(single).exists() {
            return Ok(vec![(single.to_owned(), kind, None)]);
        }
        let index = index_of(folder, single);
        if index.exists() {
            let files = indexed_files(&index)?;
            let files = files.into_iter();
            return Ok(files
                .map(|(name, wanted)| (name, kind, Some(wanted)))
                .collect());
        }
    }
    Err(foreign(
        folder,
        "it has no model.safetensors, model.safetensors.index.json, pytorch_model.bin or \
         pytorch_model.bin.index.json",
    ))
}

/// The index of weights that are split into several files; `single` is the name of the one file.
fn index_of(folder: &Path, single: &str) -> PathBuf {
    folder.join(format!("{single}.index.json"))
}

/// Whether a folder has weights, by the names of its files.
pub(crate) fn has_weights(folder: &Path) -> bool {
    let mut singles = WEIGHTS.iter().map(|(single, _)| single);
    singles.any(|single| folder.join(single).exists() || index_of(folder, single).exists())
}

fn indexed_files(index: &Path) -> Result<BTreeMap<String, BTreeSet<String>>> {
    let map = read_index(index)?.weight_map;
    let map = map.ok_or_else(|| foreign(index, "it has no `weight_map`"))?;
    let mut files: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    for (tensor, file) in map {
        check_file_name(&file).map_err(|error| foreign(index, error.to_string()))?;
        files.entry(file).or_default().insert(tensor);
    }
    Ok(files)
}

/// The fields that are read of an index of weights.
#[derive(Deserialize)]
pub(crate) struct Index {
    /// The file of each tensor.
    weight_map: Option<BTreeMap<String, String>>,
    /// The original Merak's note of the layers that it has put together.
    #[expect(
        clippy::zero_sized_map_values,
        reason = "of a JSON object only the keys are of use"
    )]
    pub(crate) tp_meta_data: Option<BTreeMap<String, IgnoredAny>>,
}

pub(crate) fn read_index(path: &Path) -> Result<Index> {
    parsed(path, MAX_INDEX_BYTES)
}
