//! The items of a folder's files, each what `torch.save` writes.

use super::index::{Chunk, Indexed, Place};
use crate::crc32::{Stretch, Sums};
use crate::error::{foreign, io_error};
use crate::hf::pickle::{Heap, Value};
use crate::hf::torch::{Saved, places, view};
use crate::hf::{file_entry, open_weights};
use crate::manifest::{FileEntry, check_coverage, check_file_name, check_tensor_name};
use crate::recognize::DCP_INDEX;
use crate::region::num_elements;
use crate::stored_tensor::{StoredTensor, checked_bytes};
use crate::{Checksum, Cut, DType, Error, Kind, Result, SliceEntry, TensorEntry};
use serde_json::json;
use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

/// Most members of a list of numbers.
const MAX_MEMBERS: usize = 16;

/// The message about an item that was written as safetensors.
const SAFETENSORS: &str = "it is safetensors and not what torch.save writes: save again without \
     serialization_format=SerializationFormat.SAFETENSORS, or with HuggingFaceStorageWriter";

/// An item that is no tensor of the model.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Found {
    /// A number, a yes or no, or a list of such.
    Number(serde_json::Value),
    /// None, or names.
    NoNumber,
    /// Something else, in words that follow `it`.
    Other(String),
}

/// Reads items, each place once; keeps the file of the last one open.
pub(super) struct Reader<'a> {
    folder: &'a Path,
    max_memory: usize,
    file: Option<(String, File)>,
    numbers: BTreeMap<Place, Found>,
    tensors: BTreeMap<Place, StoredTensor>,
    /// The files in which slices were found.
    used: BTreeSet<String>,
    /// The members of the items that hold tensors, by file.
    members: BTreeMap<String, Vec<Stretch>>,
}

impl<'a> Reader<'a> {
    pub(super) fn new(folder: &'a Path, max_memory: usize) -> Self {
        Self {
            folder,
            max_memory,
            file: None,
            numbers: BTreeMap::new(),
            tensors: BTreeMap::new(),
            used: BTreeSet::new(),
            members: BTreeMap::new(),
        }
    }

    /// The files of the tensors that were found.
    pub(super) fn files(&self) -> Result<Vec<FileEntry>> {
        let files = self.used.iter();
        files
            .map(|name| file_entry(self.folder, &self.folder.join(name)))
            .collect()
    }

    /// The members in which the tensors lie, by file.
    pub(super) fn into_members(self) -> BTreeMap<String, Vec<Stretch>> {
        self.members
    }

    /// The entry of a tensor, whose boxes lie in the files as its slices.
    pub(super) fn entry(
        &mut self,
        stored: &Indexed,
        kind: &Kind,
        name: &str,
        cut: Option<Cut>,
    ) -> Result<TensorEntry> {
        let folder = self.folder;
        let wrong = |reason: String| foreign(folder, format!("tensor `{}` {reason}", stored.key));
        check_tensor_name(name).map_err(|error| wrong(format!("has an {error}")))?;
        let dtype = stored.dtype;
        let dtype =
            dtype.ok_or_else(|| wrong("has elements of a type that cannot be read".to_owned()))?;
        if checked_bytes(dtype, &stored.shape).is_none() {
            return Err(wrong(format!("of shape {:?} is too large", stored.shape)));
        }
        let mut entry = TensorEntry {
            kind: kind.clone(),
            name: name.to_owned(),
            dtype,
            shape: stored.shape.clone(),
            cut,
            slices: Vec::with_capacity(stored.chunks.len()),
        };
        let chunks = stored.chunks.iter();
        for chunk in chunks.filter(|chunk| !chunk.size.contains(&0)) {
            let slice = self.slice(stored, chunk)?;
            self.used.insert(slice.file.clone());
            entry.slices.push(slice);
        }
        let order = |slice: &SliceEntry| (slice.offset.clone(), slice.size.clone());
        entry.slices.sort_by_cached_key(order);
        check_coverage(&entry).map_err(|problem| wrong(format!("is not whole: {problem}")))?;
        Ok(entry)
    }

    /// The number of updates that an item states.
    pub(super) fn count(&mut self, place: &Place) -> Result<u64> {
        let found = match self.number(place)? {
            Found::Number(found) => Some(found),
            _ => None,
        };
        let number = found.as_ref().and_then(serde_json::Value::as_f64);
        // Beyond this, an f64 is no count.
        let count = number.filter(|n| n.fract() == 0.0 && (0.0..=9e15).contains(n));
        count.map(|count| count as u64).ok_or_else(|| {
            let found = found.map_or_else(|| "no number".to_owned(), |found| found.to_string());
            let reason = format!("the optimizer's step is {found}, expected a count");
            in_item(&self.path(place), place, &reason)
        })
    }

    /// The number that the item holds, or what it is instead.
    pub(super) fn number(&mut self, place: &Place) -> Result<Found> {
        if let Some(found) = self.numbers.get(place) {
            return Ok(found.clone());
        }
        let path = self.path(place);
        let wrong = |reason: String| in_item(&path, place, &reason);
        let (saved, file) = self.open(place)?;
        let found = match saved.run() {
            Ok((value, heap)) => {
                let (heap, saved) = (&heap, &saved);
                Item { heap, saved, file }.numbers(value).map_err(wrong)?
            }
            // A pickle that mentions other names is no number.
            Err(reason) => Found::Other(reason.trim_start_matches("it ").to_owned()),
        };
        self.numbers.insert(place.clone(), found.clone());
        Ok(found)
    }

    /// The slice that holds a box.
    fn slice(&mut self, stored: &Indexed, chunk: &Chunk) -> Result<SliceEntry> {
        let place = &chunk.place;
        let tensor = self.tensor(stored, place)?;
        if Some(tensor.dtype) != stored.dtype || tensor.shape != chunk.size {
            let expected = stored.dtype.map_or("?", DType::as_str);
            let reason = format!(
                "it is {} of shape {:?}, expected {expected} of shape {:?}",
                tensor.dtype, tensor.shape, chunk.size
            );
            return Err(in_item(&self.path(place), place, &reason));
        }
        Ok(SliceEntry {
            offset: chunk.offset.clone(),
            size: chunk.size.clone(),
            range: None,
            file: place.file.clone(),
            bytes: tensor.bytes,
            checksum: Checksum(0),
            strides: tensor.strides,
        })
    }

    /// Where the tensor of an item lies in its file.
    fn tensor(&mut self, stored: &Indexed, place: &Place) -> Result<StoredTensor> {
        if let Some(found) = self.tensors.get(place) {
            return Ok(found.clone());
        }
        let path = self.path(place);
        let wrong = |reason: String| in_item(&path, place, &reason);
        let (saved, _) = self.open(place)?;
        let (value, heap) = saved.run().map_err(wrong)?;
        let members = saved.members(&heap).map_err(wrong)?;
        let tensor = view(&stored.key, value, &heap, &places(&members));
        let tensor = tensor.map_err(|reason| wrong(format!("it {reason}")))?;
        let members: Vec<_> = members.into_values().collect();
        let of_file = self.members.entry(place.file.clone()).or_default();
        of_file.extend(members);
        self.tensors.insert(place.clone(), tensor.clone());
        Ok(tensor)
    }

    fn path(&self, place: &Place) -> PathBuf {
        self.folder.join(&place.file)
    }

    /// What an item's bytes hold, and its file.
    fn open(&mut self, place: &Place) -> Result<(Saved<'_>, &File)> {
        let (path, limit) = (self.path(place), self.max_memory);
        let file = self.file(place)?;
        let saved = Saved::open(file, stretch(place), limit).map_err(|reason| {
            let mut start = [0; 9];
            let read = file.read_exact_at(&mut start, place.offset);
            // The length of a header, and the header.
            let is_safetensors = read.is_ok() && start[8] == b'{';
            let reason = if is_safetensors { SAFETENSORS } else { &reason };
            in_item(&path, place, reason)
        })?;
        Ok((saved, file))
    }

    /// The file of an item, after checking that it holds the whole item.
    fn file(&mut self, place: &Place) -> Result<&File> {
        check_file_name(&place.file)
            .map_err(|error| foreign(&self.folder.join(DCP_INDEX), error.to_string()))?;
        let path = self.path(place);
        let is_open = matches!(&self.file, Some((name, _)) if *name == place.file);
        if !is_open {
            self.file = Some((place.file.clone(), open_weights(&path)?));
        }
        let (_, file) = self.file.as_ref().expect("it was just opened");
        let metadata = file.metadata().map_err(io_error("look at", &path))?;
        let length = metadata.len();
        let end = place.offset.checked_add(place.length);
        if end.is_none_or(|end| end > length) {
            let reason = format!("the file has {length} bytes");
            return Err(in_item(&path, place, &reason));
        }
        if place.is_changed {
            let reason = "it is compressed or otherwise transformed, which cannot be read";
            return Err(in_item(&path, place, reason));
        }
        Ok(file)
    }
}

/// The bytes of an item that [`Reader::file`] has found to be there.
fn stretch(place: &Place) -> std::ops::Range<u64> {
    place.offset..place.offset.saturating_add(place.length)
}

fn in_item(path: &Path, place: &Place, reason: &str) -> Error {
    let Place { offset, length, .. } = place;
    let reason = format!("the item of {length} bytes at byte {offset}: {reason}");
    foreign(path, reason)
}

/// What the table of an item has made, and where its tensors lie.
struct Item<'a, 'b> {
    heap: &'b Heap<'a>,
    saved: &'b Saved<'b>,
    file: &'b File,
}

impl<'a> Item<'a, '_> {
    /// The number, or list of numbers, that the item's value is.
    fn numbers(&self, value: Value<'a>) -> Result<Found, String> {
        let Some(items) = self.heap.items(value) else {
            return self.number(value);
        };
        if items.len() > MAX_MEMBERS {
            // The names or numbers of a group's parameters.
            return Ok(Found::NoNumber);
        }
        let mut members = Vec::with_capacity(items.len());
        for &item in items {
            match self.number(item)? {
                Found::Number(member) => members.push(member),
                other => return Ok(other),
            }
        }
        Ok(match &members[..] {
            [] => Found::NoNumber,
            _ => Found::Number(json!(members)),
        })
    }

    /// The number that a single value is: a tensor of one element is that number.
    fn number(&self, value: Value<'a>) -> Result<Found, String> {
        let number = match value {
            Value::Bool(value) => json!(value),
            Value::Int(value) => json!(value),
            Value::Float(value) => json!(value),
            Value::None | Value::Text(_) => return Ok(Found::NoNumber),
            Value::Tensor(_) => {
                let members = self.saved.members(self.heap)?;
                let tensor = view("", value, self.heap, &places(&members));
                let tensor = tensor.map_err(|reason| format!("it {reason}"))?;
                if num_elements(&tensor.shape) != Some(1) {
                    let shape = tensor.shape;
                    return Ok(Found::Other(format!("is a tensor of shape {shape:?}")));
                }
                let mut bytes = [0; 8];
                let bytes = &mut bytes[..tensor.dtype.size_bytes()];
                let read = self.file.read_exact_at(bytes, tensor.bytes[0]);
                read.map_err(|error| format!("it cannot be read: {error}"))?;
                let sums = Sums::new(members.into_values().collect());
                sums.pass(self.file, tensor.bytes[0], bytes)?;
                sums.finish(self.file)?;
                element(tensor.dtype, bytes)
            }
            _ => return Ok(Found::Other("is no number".to_owned())),
        };
        // JSON has finite numbers only.
        Ok(if number.is_null() {
            Found::Other("is no finite number".to_owned())
        } else {
            Found::Number(number)
        })
    }
}

/// The number in the bytes of one element.
fn element(dtype: DType, bytes: &[u8]) -> serde_json::Value {
    let mut wide = [0; 8];
    wide[..bytes.len()].copy_from_slice(bytes);
    let unsigned = u64::from_le_bytes(wide);
    let unused = 64 - 8 * bytes.len() as u32;
    let signed = (unsigned << unused).cast_signed() >> unused;
    match dtype {
        DType::F64 | DType::F32 | DType::BF16 | DType::F16 => json!(dtype.to_f64(bytes)),
        DType::I64 | DType::I32 | DType::I16 | DType::I8 => json!(signed),
        DType::U64 | DType::U32 | DType::U16 | DType::U8 => json!(unsigned),
        DType::Bool => json!(unsigned != 0),
    }
}
