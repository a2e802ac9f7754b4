//! The manifest: what a checkpoint holds and where.

mod check;
mod folder;
mod text;

pub(crate) use check::check_coverage;
pub(crate) use folder::{parse_manifest, read_manifest};

use crate::format;
use crate::region::num_elements;
use crate::{Checksum, Cut, DType, Error, FactorName, Kind, Region};
use serde::{Deserialize, Deserializer, Serialize};
use std::ops::Range;

/// The contents of a checkpoint and their places: the content of `manifest.json`.
///
/// A manifest that was read, or written by [`Draft::commit`](crate::Draft::commit), is sound: names
/// are in order and unique, every slice lies in its file and its tensor, no two slices share bytes
/// or elements, and the slices of a tensor hold all of it.
#[derive(Debug, Clone, PartialEq)]
pub struct Manifest {
    /// Step, topology and the caller's own data.
    pub header: Header,
    /// The base with the tensors that it shares with others, if there are any. In an open
    /// checkpoint these are among `tensors`, and their files among `files`, as in
    /// `../base-00001/model-00000.safetensors`.
    pub base: Option<Base>,
    /// Every file but the manifest itself, sorted by name.
    pub files: Vec<FileEntry>,
    /// Every tensor, sorted by kind, then name.
    pub tensors: Vec<TensorEntry>,
}

/// The part of a manifest that the caller provides.
///
/// `model` and `state` are the caller's: this crate keeps them and sorts their keys. `model`
/// says which model this is; `state` holds what a resumed run needs besides tensors (data
/// position, seeds, scheduler, scaler, arguments). Neither may hold a time of day, so that equal
/// states make equal files.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Header {
    /// Optimizer steps done.
    pub step: u64,
    /// The topology that wrote the checkpoint; for people, since no reader depends on it.
    pub topology: Topology,
    /// Description of the model.
    pub model: serde_json::Value,
    /// State of the run.
    pub state: serde_json::Value,
}

/// Degrees of parallelism.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Topology {
    /// Data parallel degree.
    pub dp: usize,
    /// Tensor parallel degree.
    pub tp: usize,
    /// Pipeline parallel degree.
    pub pp: usize,
    /// Sequence parallel degree.
    pub sp: usize,
    /// ZeRO stage.
    pub zero_stage: usize,
}

impl Default for Topology {
    /// One rank.
    fn default() -> Self {
        Self {
            dp: 1,
            tp: 1,
            pp: 1,
            sp: 1,
            zero_stage: 0,
        }
    }
}

/// The folder of a checkpoint's shared tensors. It lies beside the checkpoint's own folder, and
/// later checkpoints share it.
///
/// The folder is an ordinary checkpoint except for its name: `latest` never names it, and rotation
/// removes it once no checkpoint beside it names it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Base {
    /// Name of the folder, as in `base-00001`.
    pub folder: String,
    /// Checksum of the whole manifest there, which detects another base in its place.
    pub checksum: Checksum,
}

/// A file of a checkpoint.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FileEntry {
    /// Name in the checkpoint's folder.
    pub name: String,
    /// Length in bytes.
    pub length: u64,
    /// Checksum of the whole file.
    pub checksum: Checksum,
}

/// A global tensor.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TensorEntry {
    /// Its kind.
    pub kind: Kind,
    /// Its name, unique within the kind.
    pub name: String,
    /// Element type.
    pub dtype: DType,
    /// Global shape.
    pub shape: Vec<usize>,
    /// Its cut by tensor parallelism, where the writer said so.
    #[serde(
        default,
        deserialize_with = "present",
        skip_serializing_if = "Option::is_none"
    )]
    pub cut: Option<Cut>,
    /// The pieces, sorted by box, then range.
    pub slices: Vec<SliceEntry>,
}

/// A piece of a tensor: a box, or a flat range of a box, row-major in one stretch of a file.
///
/// Boxes of a tensor never overlap; slices of one box have ranges that follow one another.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SliceEntry {
    /// First index of the box in each dim.
    pub offset: Vec<usize>,
    /// Number of indices of the box in each dim.
    pub size: Vec<usize>,
    /// Flat range `[begin, end)` within the box, where it is not all of it.
    #[serde(
        default,
        deserialize_with = "present",
        skip_serializing_if = "Option::is_none"
    )]
    pub range: Option<[usize; 2]>,
    /// The file.
    pub file: String,
    /// Bytes `[begin, end)` of the file.
    pub bytes: [u64; 2],
    /// Checksum of these bytes.
    pub checksum: Checksum,
    /// Elements from one index to the next of each dim, where the order is not row-major: in files
    /// of other programs, and never in a manifest. `bytes` then reaches from the slice's first
    /// element to its last.
    #[serde(skip)]
    pub strides: Option<Vec<usize>>,
}

impl Manifest {
    /// The tensor of this kind and name.
    pub fn tensor(&self, kind: &Kind, name: &str) -> Option<&TensorEntry> {
        let index = self.tensor_index(kind, name)?;
        Some(&self.tensors[index])
    }

    /// The kinds of tensors that there are, in order: which optimizer state was saved.
    pub fn kinds(&self) -> Vec<&Kind> {
        let mut kinds: Vec<_> = self.tensors.iter().map(|tensor| &tensor.kind).collect();
        kinds.dedup();
        kinds
    }

    /// The tensors of a kind, by name.
    pub fn tensors_of<'a>(&'a self, kind: &'a Kind) -> impl Iterator<Item = &'a TensorEntry> {
        self.tensors
            .iter()
            .filter(move |tensor| tensor.kind == *kind)
    }

    /// Position in `tensors`.
    pub(crate) fn tensor_index(&self, kind: &Kind, name: &str) -> Option<usize> {
        let key = (kind, name);
        self.tensors
            .binary_search_by(|tensor| (&tensor.kind, tensor.name.as_str()).cmp(&key))
            .ok()
    }

    /// Position in `files`.
    pub(crate) fn file_index(&self, name: &str) -> Option<usize> {
        self.files
            .binary_search_by(|file| file.name.as_str().cmp(name))
            .ok()
    }
}

/// A member that may be absent but is not `null`.
fn present<'de, D: Deserializer<'de>, T: Deserialize<'de>>(from: D) -> Result<Option<T>, D::Error> {
    T::deserialize(from).map(Some)
}

impl TensorEntry {
    /// Number of elements; a sound manifest has none that overflow.
    pub fn num_elements(&self) -> usize {
        num_elements(&self.shape).unwrap_or(usize::MAX)
    }

    /// Whether it is a parameter of a LoRA adapter, and not of the model beside it.
    pub fn is_of_adapter(&self) -> bool {
        self.kind == Kind::Parameter && FactorName::parse(&self.name).is_some()
    }

    /// Bytes of all elements.
    pub fn num_bytes(&self) -> usize {
        self.num_elements().saturating_mul(self.dtype.size_bytes())
    }
}

impl SliceEntry {
    /// The box of the global tensor.
    pub fn region(&self) -> Region {
        Region::new(self.offset.clone(), self.size.clone())
    }

    /// Flat range within the box.
    pub fn flat_range(&self) -> Range<usize> {
        self.range.map_or_else(
            || 0..num_elements(&self.size).unwrap_or(usize::MAX),
            |[begin, end]| begin..end,
        )
    }

    /// The slice's key in its safetensors file: see the crate's format page.
    pub(crate) fn key(&self, kind: &Kind, name: &str, shape: &[usize]) -> String {
        let prefix = match kind {
            Kind::Parameter => String::new(),
            Kind::Optimizer(state) => format!("{state}/"),
        };
        let region = self.region();
        let place = if region.is_whole(shape) {
            String::new()
        } else {
            region.to_string()
        };
        let range = self
            .range
            .map_or_else(String::new, |[begin, end]| format!("#{begin}:{end}"));
        [&prefix, name, &place, &range].concat()
    }

    /// The slice's shape in its safetensors file.
    pub(crate) fn stored_shape(&self) -> Vec<usize> {
        match self.range {
            Some([begin, end]) => vec![end - begin],
            None => self.size.clone(),
        }
    }
}

/// Whether a tensor may have this name.
pub(crate) fn check_tensor_name(name: &str) -> Result<(), Error> {
    let legal = !name.is_empty()
        && name.len() <= format::MAX_NAME_BYTES
        && name != "__metadata__"
        && !name.contains(['[', '#', '/'])
        && !name.chars().any(char::is_control);
    if legal {
        return Ok(());
    }
    Err(Error::InvalidName {
        what: "tensor name",
        name: name.chars().take(80).collect(),
        rule: "expected 1 to 1024 bytes without control characters, `[`, `#` and `/`",
    })
}

/// Whether a checkpoint may hold a file of this name beside the manifest.
pub(crate) fn check_file_name(name: &str) -> Result<(), Error> {
    let legal = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-');
    if !name.is_empty()
        && name.len() <= format::MAX_FILE_NAME_BYTES
        && !name.starts_with('.')
        && name != format::MANIFEST
        && name.chars().all(legal)
    {
        return Ok(());
    }
    Err(Error::InvalidName {
        what: "file name",
        name: name.chars().take(80).collect(),
        rule: "expected 1 to 128 of the characters a-z, A-Z, 0-9, `.`, `_` and `-`, not starting with a dot, other than manifest.json",
    })
}
