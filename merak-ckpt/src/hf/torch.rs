//! Where the tensors of a `pytorch_model.bin` are.
//!
//! ```text
//! since PyTorch 1.6: a zip archive          before: one after the other
//!   NAME/data.pkl    the table, a pickle      pickles: magic number, version, system, the table,
//!   NAME/data/0 …    storages, as they are      the keys of the storages
//!   NAME/byteorder   "little"                 per storage: number of elements (8 bytes), elements
//! ```

use super::pickle::{self, Heap, Storage, Value, View};
use super::{StoredTensor, checked_bytes, foreign, open_weights};
use crate::{DType, Result};
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{BufReader, Read};
use std::os::unix::fs::FileExt;
use std::path::Path;
use zip::{CompressionMethod, ZipArchive};

/// Largest table that is read.
const MAX_PICKLE_BYTES: u64 = 16 << 20;
/// The pickle of the magic number that files before 1.6 begin with.
const OLD_MAGIC: &[u8] = b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19.";

/// Where the elements of a storage are.
type Place = [u64; 2];

/// The tensors of the file, in the order of its table.
pub(super) fn tensors(path: &Path) -> Result<Vec<StoredTensor>> {
    let file = open_weights(path)?;
    let mut start = [0; OLD_MAGIC.len()];
    let is_old = file.read_exact_at(&mut start, 0).is_ok() && start == OLD_MAGIC;
    let found = if is_old { old(&file) } else { zipped(&file) };
    found.map_err(|reason| foreign(path, reason))
}

fn zipped(file: &File) -> Result<Vec<StoredTensor>, String> {
    let mut archive = ZipArchive::new(BufReader::new(file)).map_err(|error| error.to_string())?;
    let (prefix, table) = table_of(&mut archive)?;
    let (value, heap, _) = pickle::run(&table)?;
    let mut places = BTreeMap::new();
    for Storage { key, dtype, len } in &heap.storages {
        if places.contains_key(key) {
            continue;
        }
        let name = format!("{prefix}data/{key}");
        let (begin, size) = stored(&mut archive, &name)?;
        let expected = checked_bytes(*dtype, &[*len]).map(|bytes| bytes as u64);
        if expected.is_none_or(|expected| expected > size) {
            return Err(format!(
                "`{name}` has {size} bytes, too few for {len} of {dtype}"
            ));
        }
        places.insert(key.clone(), [begin, begin + size]);
    }
    let length = file.metadata().map_err(|error| error.to_string())?.len();
    views(value, &heap, &places, length)
}

/// What comes before the names of the archive's members, and the table.
fn table_of<R: Read + std::io::Seek>(
    archive: &mut ZipArchive<R>,
) -> Result<(String, Vec<u8>), String> {
    let names = archive
        .file_names()
        .filter_map(|name| Some(name.ok()?.into_owned()));
    let tables: Vec<_> = names.filter(|name| name.ends_with("data.pkl")).collect();
    let [table] = &tables[..] else {
        return Err(format!(
            "it has {} members named data.pkl, expected 1",
            tables.len()
        ));
    };
    let prefix = table.trim_end_matches("data.pkl").to_owned();
    if let Ok(order) = archive.by_name(&format!("{prefix}byteorder")) {
        let mut text = String::new();
        let read = order.take(16).read_to_string(&mut text);
        if read.is_err() || text.trim() != "little" {
            return Err(format!(
                "its byte order is `{}`, expected `little`",
                text.trim()
            ));
        }
    }
    let (_, size) = stored(archive, table)?;
    if size > MAX_PICKLE_BYTES {
        return Err(format!(
            "its table has {size} bytes, the limit is {MAX_PICKLE_BYTES}"
        ));
    }
    let member = archive.by_name(table).map_err(|error| error.to_string())?;
    let mut bytes = Vec::new();
    member
        .take(MAX_PICKLE_BYTES)
        .read_to_end(&mut bytes)
        .map_err(|error| format!("its table cannot be read: {error}"))?;
    Ok((prefix, bytes))
}

/// Where a member that is not compressed begins, and its length.
fn stored<R: Read + std::io::Seek>(
    archive: &mut ZipArchive<R>,
    name: &str,
) -> Result<(u64, u64), String> {
    let member = archive
        .by_name(name)
        .map_err(|error| format!("member `{name}`: {error}"))?;
    if member.compression() != CompressionMethod::Stored || member.encrypted() {
        return Err(format!("member `{name}` is compressed or encrypted"));
    }
    let begin = member.data_start();
    begin
        .map(|begin| (begin, member.size()))
        .ok_or_else(|| format!("member `{name}` has no place in the file"))
}

fn old(file: &File) -> Result<Vec<StoredTensor>, String> {
    let unreadable = |error: std::io::Error| error.to_string();
    let length = file.metadata().map_err(unreadable)?.len();
    let mut bytes = Vec::new();
    let mut reader = file;
    (&mut reader)
        .take(MAX_PICKLE_BYTES)
        .read_to_end(&mut bytes)
        .map_err(unreadable)?;
    let mut at = OLD_MAGIC.len();
    let (version, _, size) = pickle::run(&bytes[at..])?;
    if version != Value::Int(1001) {
        return Err(format!("its version is {version:?}, expected 1001"));
    }
    at += size;
    // Byte order and sizes of the system that wrote it.
    let (system, described, size) = pickle::run(&bytes[at..])?;
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
    let (table, heap, size) = pickle::run(&bytes[at..])?;
    at += size;
    let (keys, listed, size) = pickle::run(&bytes[at..])?;
    at += size;
    let keys = listed
        .items(keys)
        .ok_or("the keys of its storages are no list")?;
    let mut places = BTreeMap::new();
    let mut at = at as u64;
    for key in keys {
        let Value::Text(key) = *key else {
            return Err("the key of a storage is no text".to_owned());
        };
        let storage = heap.storages.iter().find(|storage| storage.key == key);
        let Storage { dtype, len, .. } =
            storage.ok_or_else(|| format!("its table has no storage `{key}`"))?;
        let mut found = [0; 8];
        file.read_exact_at(&mut found, at).map_err(unreadable)?;
        let bytes = checked_bytes(*dtype, &[*len]);
        let end = bytes.and_then(|bytes| (at + 8).checked_add(bytes as u64));
        match end.filter(|&end| end <= length && u64::from_le_bytes(found) == *len as u64) {
            Some(end) => {
                places.insert(key.to_owned(), [at + 8, end]);
                at = end;
            }
            None => return Err(format!("storage `{key}` is not as its table says")),
        }
    }
    views(table, &heap, &places, length)
}

/// The tensors of a table, as stretches of the file.
fn views<'a>(
    table: Value<'a>,
    heap: &Heap<'a>,
    places: &BTreeMap<String, Place>,
    length: u64,
) -> Result<Vec<StoredTensor>, String> {
    let entries = heap.dict(table).ok_or("its table is no dictionary")?;
    let mut found = Vec::with_capacity(entries.len());
    for &(key, value) in entries {
        let Value::Text(name) = key else {
            return Err("a key of its table is no text".to_owned());
        };
        let Value::Tensor(view) = value else {
            return Err(format!("`{name}` is no tensor"));
        };
        let view = &heap.views[view];
        let storage = &heap.storages[view.storage];
        if !is_row_major(view) {
            return Err(format!(
                "tensor `{name}` is a view that does not lie row by row: save it after `.contiguous()`"
            ));
        }
        let bytes = stretch(view, storage, places)
            .filter(|[_, end]| *end <= length)
            .ok_or_else(|| format!("tensor `{name}` lies beyond its storage"))?;
        found.push(StoredTensor {
            name: name.to_owned(),
            dtype: storage.dtype,
            shape: view.shape.clone(),
            bytes,
        });
    }
    Ok(found)
}

/// The bytes of the file that hold a view that lies row by row.
fn stretch(view: &View, storage: &Storage, places: &BTreeMap<String, Place>) -> Option<Place> {
    let place = places.get(&storage.key)?;
    let size = checked_bytes(storage.dtype, &view.shape)? as u64;
    let width = DType::size_bytes(storage.dtype) as u64;
    let begin = place[0].checked_add((view.offset as u64).checked_mul(width)?)?;
    let end = begin.checked_add(size)?;
    (end <= place[1]).then_some([begin, end])
}

fn is_row_major(view: &View) -> bool {
    if view.shape.len() != view.strides.len() {
        return false;
    }
    let mut expected = 1;
    for (&size, &stride) in view.shape.iter().zip(&view.strides).rev() {
        if size > 1 && stride != expected {
            return false;
        }
        expected = expected.saturating_mul(size);
    }
    true
}
