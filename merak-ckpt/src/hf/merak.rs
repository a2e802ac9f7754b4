//! Weights of the original Python Merak, after its own conversion to safetensors.
//!
//! Its files hold the names of a pipeline's modules, the slices of tensor-parallel ranks one after
//! the other, and linear layers that were split as `[out, in]`, also where the model has
//! `[in, out]`:
//!
//! | there | here |
//! |---|---|
//! | `0.transformer.wte.weight`, `tied_modules.lm_head.weight` | without the number or the group |
//! | layers of `tp_meta_data`, where the family stores `[in, out]` | transposed |
//! | fused outputs `q0 k0 v0 q1 k1 v1` of two ranks | `q0 q1 k0 k1 v0 v1` |

use super::import::import_folder;
use super::{HfFolder, ImportOptions, check_is_none_of_others};
use crate::error::foreign;
use crate::family::{Family, family_of};
use crate::layout::Part;
use crate::rewrite::{MIN_MEMORY, Values};
use crate::weight_files::read_index;
use crate::{Checkpoint, DType, Error, Layout, Piece, Result, TensorEntry};
use std::collections::{BTreeMap, BTreeSet, btree_map::Entry};
use std::path::{Path, PathBuf};
use std::sync::Mutex;

/// The file in which the converter lists the layers that it put together.
const INDEX: &str = "model.safetensors.index.json";

/// Makes a checkpoint of step 0 from a folder that the original Merak's `convert_safetensor.py`
/// wrote, to which the model's `config.json` was added. `tp` are the tensor-parallel ranks that
/// trained the model; they are not in the files, and matter where a layer makes queries, keys and
/// values at once. Otherwise as [`import_hf`](crate::import_hf).
///
/// # Errors
/// As [`import_hf`](crate::import_hf); [`Error::Foreign`] where the index is missing or a tensor
/// cannot come from `tp` ranks; [`Error::InvalidOption`] where the memory is too little to hold the
/// largest of them that has to be changed.
pub fn import_merak(
    folder: impl AsRef<Path>,
    destination: impl AsRef<Path>,
    tp: usize,
    options: &ImportOptions,
) -> Result<PathBuf> {
    let folder = folder.as_ref();
    if tp == 0 {
        return Err(Error::InvalidOption {
            key: "merak_tp",
            found: tp.to_string(),
            expected: "at least 1",
        });
    }
    check_is_none_of_others(&folder.join(INDEX), folder)?;
    let split = split_layers(&folder.join(INDEX))?;
    let source = HfFolder::open(folder)?;
    let family = family_of(source.config());
    let mut tensors: BTreeMap<String, TensorEntry> = BTreeMap::new();
    let mut changes = BTreeMap::new();
    for stored in source.tensors() {
        let name = plain(&stored.name);
        let ranks = split.contains(&name).then_some(tp);
        let (entry, change) =
            changed(stored, &name, ranks, family).map_err(|reason| foreign(folder, reason))?;
        // A tied weight is there again.
        if let Entry::Vacant(place) = tensors.entry(name) {
            changes.insert(place.key().clone(), change);
            place.insert(entry);
        }
    }
    let tie = family.and_then(|family| family.tie(source.config()));
    if let Some(tie) = tie.filter(|tie| tie.is_one(source.config())) {
        tensors.remove(tie.head);
    }
    let sizes = changes.values().filter(|change| change.is_needed());
    let sizes = sizes.map(|Change { stored, .. }| {
        let dtype = options.dtype.unwrap_or(stored.dtype);
        stored.num_elements() * dtype.size_bytes()
    });
    let options = with_room(options, sizes.max().unwrap_or(0))?;
    let values = Changed {
        source: source.weights(),
        changes,
        last: Mutex::new(None),
    };
    let tensors = tensors.into_values().collect();
    import_folder(&source, &values, tensors, destination.as_ref(), &options)
}

/// The model's tensor `name`, and how the stored one becomes it; `ranks` had slices of it, where it
/// was put together. The error says why they cannot be slices of it.
fn changed(
    stored: &TensorEntry,
    name: &str,
    ranks: Option<usize>,
    family: Option<&Family>,
) -> Result<(TensorEntry, Change), String> {
    let mut shape = stored.shape.clone();
    let is_turned = family.is_some_and(|family| family.is_transposed(name)) && shape.len() == 2;
    let transposed = ranks.is_some() && is_turned;
    if transposed {
        shape.reverse();
    }
    let cut = family.and_then(|family| family.cut(name, &shape));
    let fused = ranks.filter(|&ranks| ranks > 1).zip(cut.as_ref());
    let fused = fused.map(|(ranks, cut)| Fused {
        dim: cut.dim,
        parts: cut.parts.len(),
        ranks,
    });
    let fused = fused.filter(|fused| fused.parts > 1);
    if let Some(Fused { dim, parts, ranks }) = fused
        && !shape[dim].is_multiple_of(parts * ranks)
    {
        let size = shape[dim];
        return Err(format!(
            "`{name}` has {parts} parts in {size} outputs, which {ranks} ranks cannot have shared"
        ));
    }
    let change = Change {
        stored: stored.clone(),
        transposed,
        fused,
    };
    let entry = TensorEntry {
        name: name.to_owned(),
        shape,
        cut,
        ..stored.clone()
    };
    Ok((entry, change))
}

/// The options with the memory that remains beside a tensor of this size.
fn with_room(options: &ImportOptions, largest: usize) -> Result<ImportOptions> {
    let rest = options.max_memory.checked_sub(largest);
    match rest.filter(|&rest| rest >= MIN_MEMORY || largest == 0) {
        Some(max_memory) => Ok(ImportOptions {
            max_memory,
            ..options.clone()
        }),
        None => Err(Error::InvalidOption {
            key: "max_memory",
            found: format!(
                "{} bytes, where a tensor of {largest} is turned",
                options.max_memory
            ),
            expected: "4 MiB more than that tensor",
        }),
    }
}

/// The name without the place in the pipeline.
fn plain(name: &str) -> String {
    let (first, rest) = name.split_once('.').unwrap_or(("", name));
    let is_place = first.chars().all(|c| c.is_ascii_digit()) || first == "tied_modules";
    let name = if is_place && !first.is_empty() {
        rest
    } else {
        name
    };
    name.replace("col_linear.", "").replace("row_linear.", "")
}

/// Names of the layers that were put together from the slices of ranks.
fn split_layers(index: &Path) -> Result<BTreeSet<String>> {
    let table = read_index(index)?.tp_meta_data;
    let table = table.ok_or_else(|| foreign(index, "it has no `tp_meta_data`"))?;
    Ok(table.keys().map(|name| plain(name)).collect())
}

/// How a stored tensor becomes the model's.
#[derive(Debug)]
struct Change {
    stored: TensorEntry,
    transposed: bool,
    fused: Option<Fused>,
}

/// Parts of a dimension; every rank had a slice of each part.
#[derive(Debug, Clone, Copy)]
struct Fused {
    dim: usize,
    parts: usize,
    ranks: usize,
}

impl Fused {
    /// Where an index of the dimension, of this size, was stored.
    fn stored(&self, index: usize, size: usize) -> usize {
        let part = size / self.parts;
        let slice = part / self.ranks;
        let (which, within) = (index / part, index % part);
        (within / slice) * (size / self.ranks) + which * slice + within % slice
    }
}

impl Change {
    fn is_needed(&self) -> bool {
        self.transposed || self.fused.is_some()
    }

    /// Where an element of the model's tensor, a vector or matrix of this shape, was stored.
    fn stored(&self, row: usize, column: usize, shape: &[usize]) -> usize {
        let mut index = [row, column];
        if let Some(fused) = &self.fused {
            index[fused.dim] = fused.stored(index[fused.dim], shape[fused.dim]);
        }
        let [row, column] = index;
        match (self.transposed, shape.len()) {
            (true, _) => column * shape[0] + row,
            (false, 1) => row,
            (false, _) => row * shape[1] + column,
        }
    }
}

/// A folder's tensors as the model has them. One tensor that has to be changed is kept whole in
/// memory.
struct Changed<'a> {
    source: &'a Checkpoint,
    changes: BTreeMap<String, Change>,
    last: Mutex<Option<(String, DType, Vec<u8>)>>,
}

impl Values for Changed<'_> {
    fn read_as(&self, piece: &Piece<'_>, out: &mut [u8]) -> Result<()> {
        let change = &self.changes[piece.name];
        let name = &change.stored.name;
        if !change.is_needed() {
            let stored = Piece {
                name,
                ..piece.clone()
            };
            return self.source.read_as(&stored, out);
        }
        let mut last = self.last.lock().expect("no thread panics while it reads");
        let is_there =
            matches!(&*last, Some((found, dtype, _)) if found == name && *dtype == piece.dtype);
        if !is_there {
            let layout = Layout::whole(&change.stored.shape);
            let mut whole = vec![0; layout.num_local_elements() * piece.dtype.size_bytes()];
            let stored = Piece::parameter(name, piece.dtype, &layout);
            self.source.read_as(&stored, &mut whole)?;
            *last = Some((name.clone(), piece.dtype, whole));
        }
        let (_, _, whole) = last.as_ref().expect("it was just read");
        pick(change, whole, piece, out);
        Ok(())
    }

    fn check_rest(&self) -> Result<()> {
        self.source.check_rest()
    }
}

/// Fills a piece with the elements of a stored tensor.
fn pick(change: &Change, whole: &[u8], piece: &Piece<'_>, out: &mut [u8]) {
    let (shape, size) = (piece.layout.shape(), piece.dtype.size_bytes());
    for part in piece.layout.part_ranges(&piece.flat_range()) {
        let Part { region, .. } = part.part;
        let width = region.size.get(1).copied().unwrap_or(1);
        part.for_each_run(
            piece.layout.local_shape(),
            &piece.flat_range(),
            |local, run, len| {
                for at in 0..len {
                    let flat = part.range.start + run + at;
                    let row = region.offset[0] + flat / width;
                    let column = region.offset.get(1).map_or(0, |first| first + flat % width);
                    let stored = change.stored(row, column, shape) * size;
                    out[(local + at) * size..][..size]
                        .copy_from_slice(&whole[stored..stored + size]);
                }
            },
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_lose_their_place_in_the_pipeline() {
        let names = [
            "0.transformer.wte.weight",
            "transformer.h.0.attn.c_attn.col_linear.weight",
            "tied_modules.lm_head.weight",
            "h.0.mlp.c_proj.row_linear.bias",
        ]
        .map(plain);
        assert_eq!(
            names,
            [
                "transformer.wte.weight",
                "transformer.h.0.attn.c_attn.weight",
                "lm_head.weight",
                "h.0.mlp.c_proj.bias",
            ]
        );
    }

    #[test]
    fn fused_parts_are_found_where_two_ranks_left_them() {
        let fused = Fused {
            dim: 0,
            parts: 3,
            ranks: 2,
        };
        // q0 q1 k0 k1 v0 v1 of the model, one row each; the file has q0 k0 v0 q1 k1 v1.
        let stored: Vec<_> = (0..6).map(|index| fused.stored(index, 6)).collect();
        assert_eq!(stored, [0, 3, 1, 4, 2, 5]);
    }
}
