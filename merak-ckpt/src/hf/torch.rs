//! Where the tensors of a `pytorch_model.bin` are.
//!
//! ```text
//! since PyTorch 1.6: a zip archive          before: one after the other
//!   NAME/data.pkl    the table, a pickle      pickles: magic number, version, system, the table,
//!   NAME/data/0 …    storages, as they are      the keys of the storages
//!   NAME/byteorder   "little"                 per storage: number of elements (8 bytes), elements
//! ```

use super::archive::Archive;
use super::open_weights;
use super::pickle::{self, Heap, Purpose, Storage, Value, View};
use crate::crc32::Stretch;
use crate::error::foreign;
use crate::manifest::check_tensor_name;
use crate::region::num_elements;
use crate::stored_tensor::{StoredTensor, checked_bytes};
use crate::{DType, Result};
use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::Path;

/// Largest table that is read.
const MAX_PICKLE_BYTES: u64 = 16 << 20;
/// Bytes that a tensor of a file takes once it is found, with its name and shape, in tables of
/// tensors.
const TENSOR_BYTES: usize = 512;
/// Bytes that a member takes with its name and sum.
const MEMBER_BYTES: usize = 256;
/// The pickle of the magic number that files before 1.6 begin with.
const OLD_MAGIC: &[u8] = b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19.";

/// Where the elements of storages are, by their keys.
pub(super) type Places<'a> = BTreeMap<&'a str, [u64; 2]>;

/// The tensors of a file, and the members of its archive that they lie in.
pub(super) type Found = (Vec<StoredTensor>, Vec<Stretch>);

/// The tensors of the file, in the order of its table, which takes `limit` bytes of memory at most.
/// A file of before 1.6 is no archive, and has no checksums.
pub(super) fn tensors(path: &Path, limit: usize) -> Result<Found> {
    let file = open_weights(path)?;
    let mut start = [0; OLD_MAGIC.len()];
    let is_old = file.read_exact_at(&mut start, 0).is_ok() && start == OLD_MAGIC;
    let found = if is_old {
        old(&file, limit).map(|tensors| (tensors, Vec::new()))
    } else {
        zipped(&file, limit)
    };
    found.map_err(|reason| foreign(path, reason))
}

fn zipped(file: &File, limit: usize) -> Result<Found, String> {
    let length = length_of(file)?;
    let saved = Saved::open(file, 0..length, limit)?;
    let (value, mut heap) = saved.run()?;
    heap.spend(heap.storages.len().saturating_mul(MEMBER_BYTES))?;
    let members = saved.members(&heap)?;
    let tensors = views(value, &mut heap, &places(&members))?;
    Ok((tensors, members.into_values().collect()))
}

/// The places of members.
pub(super) fn places<'a>(members: &BTreeMap<&'a str, Stretch>) -> Places<'a> {
    let place = |(key, member): (&&'a str, &Stretch)| (*key, member.bytes);
    members.iter().map(place).collect()
}

/// What `torch.save` has written into a stretch of a file, as a zip archive.
#[derive(Debug)]
pub(super) struct Saved<'a> {
    archive: Archive<'a>,
    /// The prefix of the names of the archive's members.
    prefix: String,
    table: Vec<u8>,
    limit: usize,
}

impl<'a> Saved<'a> {
    /// Reads its table; what is made of it takes `limit` bytes of memory at most.
    pub(super) fn open(file: &'a File, stretch: Range<u64>, limit: usize) -> Result<Self, String> {
        let archive = Archive::open(file, stretch, limit)?;
        let tables = archive.names().filter(|name| name.ends_with("data.pkl"));
        let tables: Vec<_> = tables.take(2).collect();
        let [table] = &tables[..] else {
            return Err(format!(
                "it has {} members named data.pkl, expected 1",
                if tables.is_empty() { "no" } else { "several" }
            ));
        };
        let prefix = table.trim_end_matches("data.pkl").to_owned();
        let order = format!("{prefix}byteorder");
        if archive.names().any(|name| name == order) {
            let text = archive.content(&order, 16)?;
            if text.trim_ascii() != b"little" {
                return Err(format!(
                    "its byte order is `{}`, expected `little`",
                    String::from_utf8_lossy(&text).trim()
                ));
            }
        }
        let table = archive.content(table, MAX_PICKLE_BYTES.min(limit as u64))?;
        Ok(Self {
            archive,
            prefix,
            table,
            limit,
        })
    }

    /// Runs the table; returns its value and its objects.
    pub(super) fn run(&self) -> Result<(Value<'_>, Heap<'_>), String> {
        let limit = self.limit.saturating_sub(self.table.len());
        let (value, heap, _) = pickle::run(&self.table, Purpose::Tensors, limit)?;
        Ok((value, heap))
    }

    /// The members of the storages that the table mentions, by the storages' keys.
    pub(super) fn members<'b>(
        &self,
        heap: &Heap<'b>,
    ) -> Result<BTreeMap<&'b str, Stretch>, String> {
        let mut members = BTreeMap::new();
        for Storage { key, dtype, len } in &heap.storages {
            if members.contains_key(key) {
                continue;
            }
            let name = format!("{}data/{key}", self.prefix);
            let member = self.archive.stretch(&name)?;
            let [begin, end] = member.bytes;
            let expected = checked_bytes(*dtype, &[*len]).map(|bytes| bytes as u64);
            if expected.is_none_or(|expected| expected > end - begin) {
                let size = end - begin;
                return Err(format!(
                    "`{name}` has {size} bytes, too few for {len} of {dtype}"
                ));
            }
            members.insert(*key, member);
        }
        Ok(members)
    }
}

fn length_of(file: &File) -> Result<u64, String> {
    let metadata = file.metadata().map_err(|error| error.to_string())?;
    Ok(metadata.len())
}

fn old(file: &File, limit: usize) -> Result<Vec<StoredTensor>, String> {
    let unreadable = |error: std::io::Error| error.to_string();
    let length = length_of(file)?;
    let size = length.min(MAX_PICKLE_BYTES).min(limit as u64 / 2);
    let mut bytes = vec![0; size as usize];
    file.read_exact_at(&mut bytes, 0).map_err(unreadable)?;
    let limit = limit - bytes.len();
    let run = |at| pickle::run(bytes.get(at..).unwrap_or(&[]), Purpose::Tensors, limit);
    let mut at = OLD_MAGIC.len();
    let (version, _, size) = run(at)?;
    if version != Value::Int(1001) {
        return Err(format!("its version is {version:?}, expected 1001"));
    }
    at += size;
    // Byte order and sizes of the system that wrote it.
    let (system, described, size) = run(at)?;
    let order = described.dict(system).and_then(|entries| {
        let is_order = |key: &Value<'_>| *key == Value::Text("little_endian");
        entries
            .iter()
            .find(|(key, _)| is_order(key))
            .map(|(_, value)| *value)
    });
    if order != Some(Value::Bool(true)) {
        return Err("it was not written by a little-endian system".to_owned());
    }
    at += size;
    let (table, mut heap, size) = run(at)?;
    at += size;
    let (keys, listed, size) = run(at)?;
    at += size;
    let keys = listed
        .items(keys)
        .ok_or("the keys of its storages are no list")?;
    let storages: BTreeMap<_, _> = heap.storages.iter().map(|s| (s.key, *s)).collect();
    let mut places = Places::new();
    let mut at = at as u64;
    for key in keys {
        let Value::Text(key) = *key else {
            return Err("the key of a storage is no text".to_owned());
        };
        let storage = storages.get(key);
        let Storage { dtype, len, .. } =
            storage.ok_or_else(|| format!("its table has no storage `{key:.80}`"))?;
        let mut found = [0; 8];
        file.read_exact_at(&mut found, at).map_err(unreadable)?;
        let bytes = checked_bytes(*dtype, &[*len]);
        let end = bytes.and_then(|bytes| (at + 8).checked_add(bytes as u64));
        match end.filter(|&end| end <= length && u64::from_le_bytes(found) == *len as u64) {
            Some(end) => {
                places.insert(key, [at + 8, end]);
                at = end;
            }
            None => return Err(format!("storage `{key:.80}` is not as its table says")),
        }
    }
    views(table, &mut heap, &places)
}

/// The tensors of a table, as stretches of the file.
fn views<'a>(
    table: Value<'a>,
    heap: &mut Heap<'a>,
    places: &Places<'a>,
) -> Result<Vec<StoredTensor>, String> {
    let count = heap.dict(table).ok_or("its table is no dictionary")?.len();
    heap.spend(count.saturating_mul(TENSOR_BYTES))?;
    let entries = heap.dict(table).unwrap_or_default();
    let (mut found, mut names) = (Vec::with_capacity(count), BTreeSet::new());
    for &(key, value) in entries {
        let Value::Text(name) = key else {
            return Err("a key of its table is no text".to_owned());
        };
        check_tensor_name(name).map_err(|error| error.to_string())?;
        if !names.insert(name) {
            return Err(format!("tensor `{name}` is there twice"));
        }
        let tensor = view(name, value, heap, places);
        found.push(tensor.map_err(|reason| format!("tensor `{name}` {reason}"))?);
    }
    Ok(found)
}

/// Where a tensor is.
pub(super) fn view<'a>(
    name: &str,
    value: Value<'a>,
    heap: &Heap<'a>,
    places: &Places<'a>,
) -> Result<StoredTensor, String> {
    let Value::Tensor(view) = value else {
        return Err("is no tensor".to_owned());
    };
    let view = &heap.views[view];
    let storage = &heap.storages[view.storage];
    let place = places.get(storage.key).ok_or("has no storage")?;
    if let Some(dim) = repeated(view) {
        let (shape, strides) = (&view.shape, &view.strides);
        return Err(format!(
            "is expanded: dim {dim} of shape {shape:?} repeats the same elements (strides {strides:?}); \
             save it anew as `tensor.contiguous()`"
        ));
    }
    let bytes = stretch(view, storage.dtype, *place).ok_or(
        "lies beyond its storage, or repeats elements of it: save it anew as `tensor.contiguous()`",
    )?;
    Ok(StoredTensor {
        name: name.to_owned(),
        dtype: storage.dtype,
        shape: view.shape.clone(),
        strides: (!is_row_major(view)).then(|| view.strides.clone()),
        bytes,
    })
}

/// The first dim whose indices all stand for the same elements, as `tensor.expand` makes it.
fn repeated(view: &View) -> Option<usize> {
    let mut dims = view.shape.iter().zip(&view.strides);
    dims.position(|(size, stride)| *size > 1 && *stride == 0)
}

/// The bytes of the file from the first element of a view to its last, within those of the storage.
fn stretch(view: &View, dtype: DType, place: [u64; 2]) -> Option<[u64; 2]> {
    checked_bytes(dtype, &view.shape)?;
    let mut dims = view.shape.iter().zip(&view.strides);
    let last = dims
        .by_ref()
        .filter(|(size, _)| **size > 0)
        .try_fold(0_usize, |at, (size, stride)| {
            at.checked_add((size - 1).checked_mul(*stride)?)
        })?;
    let count = if view.shape.contains(&0) {
        0
    } else {
        last.checked_add(1)?
    };
    // A view that repeats elements may have more of them than any file.
    num_elements(&view.shape).filter(|&elements| elements <= count)?;
    let width = dtype.size_bytes() as u64;
    let begin = place[0].checked_add((view.offset as u64).checked_mul(width)?)?;
    let end = begin.checked_add((count as u64).checked_mul(width)?)?;
    (end <= place[1] && view.shape.len() == view.strides.len()).then_some([begin, end])
}

/// Whether the elements of a view follow one another in the order of their indices.
fn is_row_major(view: &View) -> bool {
    let mut expected = 1;
    for (&size, &stride) in view.shape.iter().zip(&view.strides).rev() {
        if size > 1 && stride != expected {
            return false;
        }
        expected = expected.saturating_mul(size);
    }
    true
}
