//! The items of a folder's files, each what `torch.save` writes.

use super::index::{Chunk, Indexed, Place};
use crate::error::io_error;
use crate::hf::pickle::{Heap, Value};
use crate::hf::torch::{Saved, view};
use crate::hf::{checked_bytes, file_entry, foreign, open_weights};
use crate::manifest::{FileEntry, check_coverage, check_file_name, check_tensor_name};
use crate::{Checksum, Cut, Error, Kind, Result, SliceEntry, TensorEntry};
use serde_json::json;
use std::collections::BTreeSet;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

/// Largest number that is read as a tensor: one element.
const MAX_NUMBER_BYTES: u64 = 8;

/// Looks at items; keeps the file of the last one open.
pub(super) struct Reader<'a> {
    folder: &'a Path,
    max_memory: usize,
    open: Option<(String, File)>,
    /// The files in which slices were found.
    used: BTreeSet<String>,
}

impl<'a> Reader<'a> {
    pub(super) fn new(folder: &'a Path, max_memory: usize) -> Self {
        Self {
            folder,
            max_memory,
            open: None,
            used: BTreeSet::new(),
        }
    }

    /// The files of the tensors that were found.
    pub(super) fn files(&self) -> Result<Vec<FileEntry>> {
        let files = self.used.iter();
        files
            .map(|name| file_entry(self.folder, &self.folder.join(name)))
            .collect()
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

    /// How many updates an item says that there were.
    pub(super) fn count(&mut self, place: &Place) -> Result<u64> {
        let found = self.number(place)?;
        let number = found.as_ref().and_then(serde_json::Value::as_f64);
        // Beyond this, an f64 is no count.
        let count = number.filter(|n| n.fract() == 0.0 && (0.0..=9e15).contains(n));
        count.map(|count| count as u64).ok_or_else(|| {
            let found = found.map_or_else(|| "no number".to_owned(), |found| found.to_string());
            let reason = format!("the optimizer's step is {found}, expected a count");
            in_item(&self.path(place), place, &reason)
        })
    }

    /// The value of an item that is a number, a yes or no, a tensor of one number, or a list of such; none of others.
    pub(super) fn number(&mut self, place: &Place) -> Result<Option<serde_json::Value>> {
        let path = self.path(place);
        let wrong = |reason: String| in_item(&path, place, &reason);
        let limit = self.max_memory;
        let file = self.file(place)?;
        let saved = Saved::open(file, stretch(place), limit).map_err(wrong)?;
        // What asks for names of other things is none.
        let Ok((value, heap)) = saved.run() else {
            return Ok(None);
        };
        if let Value::Tensor(_) = value {
            let places = saved.places(&heap).map_err(wrong)?;
            let tensor = view("", value, &heap, &places);
            let [begin, end] = tensor
                .as_ref()
                .map_err(|reason| wrong(reason.clone()))?
                .bytes;
            let mut bytes = vec![0; (end - begin).min(MAX_NUMBER_BYTES) as usize];
            file.read_exact_at(&mut bytes, begin)
                .map_err(io_error("read", &path))?;
            let dtype = tensor.map_err(wrong)?.dtype;
            let integer = <[u8; 8]>::try_from(&bytes[..]).ok().map(i64::from_le_bytes);
            return Ok(match dtype {
                crate::DType::I64 => integer.map(|number| json!(number)),
                dtype => dtype.to_f64(&bytes).map(|number| json!(number)),
            });
        }
        Ok(plain(value, &heap))
    }

    /// The slice that holds a box.
    fn slice(&mut self, stored: &Indexed, chunk: &Chunk) -> Result<SliceEntry> {
        let place = &chunk.place;
        let path = self.path(place);
        let wrong = |reason: String| in_item(&path, place, &reason);
        let limit = self.max_memory;
        let file = self.file(place)?;
        let saved = Saved::open(file, stretch(place), limit).map_err(wrong)?;
        let (value, heap) = saved.run().map_err(wrong)?;
        let places = saved.places(&heap).map_err(wrong)?;
        let tensor = view(&stored.key, value, &heap, &places);
        let tensor = tensor.map_err(|reason| wrong(format!("it {reason}")))?;
        if Some(tensor.dtype) != stored.dtype || tensor.shape != chunk.size {
            let expected = stored.dtype.map_or("?", crate::DType::as_str);
            return Err(wrong(format!(
                "it is {} of shape {:?}, expected {expected} of shape {:?}",
                tensor.dtype, tensor.shape, chunk.size
            )));
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

    fn path(&self, place: &Place) -> PathBuf {
        self.folder.join(&place.file)
    }

    /// The file of an item, all of which is there.
    fn file(&mut self, place: &Place) -> Result<&File> {
        check_file_name(&place.file)
            .map_err(|error| foreign(&self.folder.join(super::INDEX), error.to_string()))?;
        let path = self.path(place);
        let is_open = matches!(&self.open, Some((name, _)) if *name == place.file);
        if !is_open {
            self.open = Some((place.file.clone(), open_weights(&path)?));
        }
        let (_, file) = self.open.as_ref().expect("it was just opened");
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

/// A number, a yes or no, or a list of such.
fn plain(value: Value<'_>, heap: &Heap<'_>) -> Option<serde_json::Value> {
    const MAX_ITEMS: usize = 16;
    let scalar = |value| match value {
        Value::Bool(value) => Some(json!(value)),
        Value::Int(value) => Some(json!(value)),
        Value::Float(value) => Some(json!(value)),
        _ => None,
    };
    let Some(items) = heap.items(value) else {
        return scalar(value);
    };
    let items = Some(items).filter(|items| !items.is_empty() && items.len() <= MAX_ITEMS)?;
    items.iter().map(|&item| scalar(item)).collect()
}
