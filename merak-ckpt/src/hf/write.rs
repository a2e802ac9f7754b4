//! Writing a Hugging Face folder.

use super::{check_float, completeness};
use crate::disk::{sync_folder, write_synced};
use crate::draft_folder::DraftBeside;
use crate::error::foreign;
use crate::family::{family_of, set_tie};
use crate::format::CONFIG;
use crate::plan::{PlannedFile, PlannedPiece, natural_order};
use crate::rewrite::{Budget, DEFAULT_MAX_MEMORY, Values, write_planned};
use crate::{Checkpoint, DType, Error, Kind, Layout, Piece, Result, Shard, ShardKind, TensorEntry};
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

/// How a checkpoint becomes a Hugging Face folder.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ExportOptions {
    /// Floating-point type to convert weights to; `None` keeps theirs.
    pub dtype: Option<DType>,
    /// Most bytes of tensors in one file; a larger tensor has a file of its own.
    pub max_shard_size: u64,
    /// Bytes of tensors in memory at a time, at least 4 MiB.
    pub max_memory: usize,
}

impl Default for ExportOptions {
    /// Types as they are, files of 5 GB, [`DEFAULT_MAX_MEMORY`].
    fn default() -> Self {
        Self {
            dtype: None,
            max_shard_size: 5_000_000_000,
            max_memory: DEFAULT_MAX_MEMORY,
        }
    }
}

/// What a Hugging Face folder is made of.
pub(crate) struct Content<'a> {
    /// The parameters, in the order and the types in which they are written.
    pub(crate) tensors: Vec<TensorEntry>,
    pub(crate) values: &'a dyn Values,
    /// `config.json` of the model.
    pub(crate) config: Value,
    /// Copies the other files.
    pub(crate) others: &'a dyn Fn(&Path) -> Result<()>,
}

/// Makes a folder, under a temporary name until it is complete.
pub(crate) fn make(folder: &Path, content: &Content<'_>, options: &ExportOptions) -> Result<()> {
    let budget = Budget::new(options.max_memory)?.without_checksums();
    check_float(options.dtype)?;
    let is_taken = match fs::read_dir(folder) {
        Ok(mut entries) => entries.next().is_some(),
        Err(_) => folder.exists(),
    };
    if is_taken {
        return Err(Error::AlreadyExists {
            path: folder.to_owned(),
        });
    }
    let draft = DraftBeside::begin(folder)?;
    write(draft.path(), content, options, budget)?;
    draft.finish()
}

/// The parameters to write, in natural order of their names, with the types to write; `changes`
/// says which of them will have other values than `source` has.
pub(crate) fn exported(
    source: &Checkpoint,
    config: &Value,
    options: &ExportOptions,
    changes: &dyn Fn(&str) -> bool,
) -> Result<Vec<TensorEntry>> {
    let mut tensors: Vec<_> = source
        .manifest()
        .tensors_of(&Kind::Parameter)
        .filter(|tensor| !tensor.is_of_adapter())
        .cloned()
        .collect();
    if let Some(tie) = family_of(config).and_then(|family| family.tie(config))
        && tie.is_one(config)
        && !changes(tie.head)
        && !changes(tie.embedding)
        && is_same(source, tie.head, tie.embedding)?
    {
        tensors.retain(|tensor| tensor.name != tie.head);
    }
    if tensors.is_empty() {
        return Err(foreign(source.path(), "it has no parameters"));
    }
    // A configuration without the field is taken to agree with the weights.
    if config.get("tie_word_embeddings").is_some()
        && let Some(head) = family_of(config).and_then(|family| family.own_head(config))
        && tensors.iter().all(|tensor| tensor.name != head)
    {
        return Err(completeness::without_head(source.path(), head));
    }
    for tensor in tensors.iter_mut().filter(|tensor| tensor.dtype.is_float()) {
        tensor.dtype = options.dtype.unwrap_or(tensor.dtype);
    }
    tensors.sort_by(|a, b| natural_order(&a.name, &b.name));
    Ok(tensors)
}

/// Whether the checkpoint has both parameters and their values are equal, also in different types.
pub(super) fn is_same(source: &Checkpoint, first: &str, second: &str) -> Result<bool> {
    const BLOCK_ELEMENTS: usize = 1 << 18;
    let entry = |name| source.manifest().tensor(&Kind::Parameter, name);
    let (Some(a), Some(b)) = (entry(first), entry(second)) else {
        return Ok(false);
    };
    if a.shape != b.shape {
        return Ok(false);
    }
    let dtype = if a.dtype == b.dtype {
        a.dtype
    } else {
        DType::F64
    };
    let layout = Layout::whole(&a.shape);
    for begin in (0..a.num_elements()).step_by(BLOCK_ELEMENTS) {
        let end = a.num_elements().min(begin + BLOCK_ELEMENTS);
        let read = |name| {
            let mut out = vec![0; (end - begin) * dtype.size_bytes()];
            let piece = Piece {
                range: Some(begin..end),
                ..Piece::parameter(name, dtype, &layout)
            };
            source.read_as(&piece, &mut out).map(|()| out)
        };
        if read(first)? != read(second)? {
            return Ok(false);
        }
    }
    Ok(true)
}

fn write(
    folder: &Path,
    content: &Content<'_>,
    options: &ExportOptions,
    budget: Budget,
) -> Result<()> {
    let twin = twin_of(content);
    let values = Twinned {
        values: content.values,
        twin,
    };
    let tensors = &with_twin(&content.tensors, twin);
    let planned = shards(tensors, options.max_shard_size);
    let count = planned.len();
    let name = |number: usize| match count {
        1 => "model.safetensors".to_owned(),
        _ => format!("model-{:05}-of-{count:05}.safetensors", number + 1),
    };
    let files: Vec<_> = planned.iter().map(|file| (name(file.rank), file)).collect();
    let written = write_planned(&values, tensors, &files, folder, budget)?;
    if count > 1 {
        let path = folder.join("model.safetensors.index.json");
        write_synced(&path, index(tensors, &written).as_bytes())?;
    }
    (content.others)(folder)?;
    if let Some(config) = adapted(content.config.clone(), tensors) {
        let path = folder.join(CONFIG);
        write_synced(&path, format!("{config:#}\n").as_bytes())?;
    }
    sync_folder(folder)
}

/// A name that `transformers` asks for and that is not stored, and the stored tensor with its
/// values.
type Twin = [&'static str; 2];

/// The missing twin of a parameter of an untied head; the model that it comes from may have had
/// either of the two.
fn twin_of(content: &Content<'_>) -> Option<Twin> {
    let tie = family_of(&content.config)?.tie(&content.config)?;
    let is_there = |name: &str| content.tensors.iter().any(|tensor| tensor.name == name);
    let [unread, read] = tie.twin.filter(|_| is_there(tie.head))?;
    match (is_there(unread), is_there(read)) {
        (false, true) => Some([unread, read]),
        (true, false) => Some([read, unread]),
        _ => None,
    }
}

fn with_twin(tensors: &[TensorEntry], twin: Option<Twin>) -> Vec<TensorEntry> {
    let mut all = tensors.to_vec();
    if let Some([missing, stored]) = twin
        && let Some(like) = tensors.iter().find(|tensor| tensor.name == stored)
    {
        all.push(TensorEntry {
            name: missing.to_owned(),
            ..like.clone()
        });
        all.sort_by(|a, b| natural_order(&a.name, &b.name));
    }
    all
}

/// Values in which one tensor has two names.
struct Twinned<'a> {
    values: &'a dyn Values,
    twin: Option<Twin>,
}

impl Values for Twinned<'_> {
    fn read_as(&self, piece: &Piece<'_>, out: &mut [u8]) -> Result<()> {
        match self.twin {
            Some([missing, stored]) if piece.name == missing => {
                let piece = Piece {
                    name: stored,
                    ..piece.clone()
                };
                self.values.read_as(&piece, out)
            }
            _ => self.values.read_as(piece, out),
        }
    }

    fn check_rest(&self) -> Result<()> {
        self.values.check_rest()
    }
}

/// Deals the tensors out to files, in order.
fn shards(tensors: &[TensorEntry], max_bytes: u64) -> Vec<PlannedFile> {
    let mut files: Vec<PlannedFile> = Vec::new();
    let mut filled = 0_u64;
    for (index, tensor) in tensors.iter().enumerate() {
        let size = tensor.num_bytes() as u64;
        if files.is_empty() || filled > 0 && filled.saturating_add(size) > max_bytes {
            files.push(PlannedFile {
                kind: ShardKind::Model,
                rank: files.len(),
                pieces: Vec::new(),
            });
            filled = 0;
        }
        filled += size;
        let piece = PlannedPiece {
            tensor: index,
            layout: Layout::whole(&tensor.shape),
            range: None,
        };
        files.last_mut().expect("one was pushed").pieces.push(piece);
    }
    files
}

/// Which file has which tensor.
fn index(tensors: &[TensorEntry], written: &[Shard]) -> String {
    let total: u64 = tensors.iter().map(|tensor| tensor.num_bytes() as u64).sum();
    let mut map = BTreeMap::new();
    for shard in written {
        let names = shard.tensors.iter().map(|tensor| &tensor.name);
        map.extend(names.map(|name| (name, &shard.files[0].name)));
    }
    let index = json!({"metadata": {"total_size": total}, "weight_map": map});
    format!("{index:#}\n")
}

/// The configuration with the type and the tie of the weights; `None` where it has them already.
fn adapted(mut config: Value, tensors: &[TensorEntry]) -> Option<Value> {
    let original = config.clone();
    let tie = family_of(&config).and_then(|family| family.tie(&original));
    let mut floats = tensors
        .iter()
        .map(|tensor| tensor.dtype)
        .filter(|dtype| dtype.is_float());
    if let Some(first) = floats.next()
        && floats.all(|dtype| dtype == first)
    {
        set_dtype(config.as_object_mut()?, first);
    }
    if let Some(tie) = tie {
        let has_head = tensors.iter().any(|tensor| tensor.name == tie.head);
        let is_said = original.get("tie_word_embeddings").is_some();
        if tie.is_one(&original) == has_head && (has_head || !is_said) {
            set_tie(&mut config, !has_head);
        }
    }
    (config != original).then_some(config)
}

fn set_dtype(fields: &mut Map<String, Value>, dtype: DType) {
    let name = match dtype {
        DType::F64 => "float64",
        DType::BF16 => "bfloat16",
        DType::F16 => "float16",
        _ => "float32",
    };
    let keys = ["dtype", "torch_dtype"];
    let present = keys.into_iter().filter(|&key| fields.contains_key(key));
    let mut present: Vec<_> = present.collect();
    if present.is_empty() {
        // Read by every version of transformers.
        present.push("torch_dtype");
    }
    for key in present {
        fields.insert(key.to_owned(), json!(name));
    }
}
