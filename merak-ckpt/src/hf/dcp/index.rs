//! The index of a folder: what a pickle says of tensors, values and their places.

use crate::disk::read_small;
use crate::error::foreign;
use crate::hf::pickle::{self, Class, Heap, Purpose, Value, size};
use crate::{DType, Result, StoredTensor, format};
use std::collections::BTreeMap;
use std::path::Path;

/// Bytes of memory that an entry of the index takes once it is read, besides its texts.
const ENTRY_BYTES: usize = 512;
/// Longest name of an item.
const MAX_KEY_BYTES: usize = 2 * format::MAX_NAME_BYTES;

/// What a folder holds.
#[derive(Debug)]
pub(super) struct Index {
    /// In the order of the index.
    pub(super) tensors: Vec<Indexed>,
    /// The place of each value that is no tensor.
    pub(super) values: BTreeMap<String, Place>,
}

/// A tensor of the folder.
#[derive(Debug)]
pub(super) struct Indexed {
    pub(super) key: String,
    /// None for a type that checkpoints cannot have.
    pub(super) dtype: Option<DType>,
    pub(super) shape: Vec<usize>,
    pub(super) chunks: Vec<Chunk>,
}

/// A box of a tensor.
#[derive(Debug)]
pub(super) struct Chunk {
    pub(super) offset: Vec<usize>,
    pub(super) size: Vec<usize>,
    pub(super) place: Place,
}

/// Where an item lies.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Place {
    pub(super) file: String,
    pub(super) offset: u64,
    pub(super) length: u64,
    /// Whether the writer changed the bytes, such as by compressing them.
    pub(super) is_changed: bool,
}

/// The places of items by their names, and by where in a tensor they begin.
type Places<'a> = BTreeMap<(&'a str, Option<Vec<usize>>), Place>;

impl Index {
    /// Reads the index, which takes `limit` bytes of memory at most.
    pub(super) fn read(path: &Path, limit: usize) -> Result<Self> {
        let bytes = read_small(path, limit as u64 / 2)?;
        let bytes = bytes.ok_or_else(|| foreign(path, "the file is missing"))?;
        Self::of(&bytes, limit - bytes.len()).map_err(|reason| foreign(path, reason))
    }

    fn of(bytes: &[u8], limit: usize) -> Result<Self, String> {
        let (root, mut heap, _) = pickle::run(bytes, Purpose::Index, limit)?;
        let count = table(root, &heap, "state_dict_metadata")?.len()
            + table(root, &heap, "storage_data")?.len();
        heap.spend(count.saturating_mul(ENTRY_BYTES))?;
        let mut places = places(root, &heap)?;
        check_apart(&places)?;
        let (mut tensors, mut values) = (BTreeMap::new(), BTreeMap::new());
        for (nth, &(key, value)) in table(root, &heap, "state_dict_metadata")?
            .iter()
            .enumerate()
        {
            let key = match key {
                Value::Text(key) if key.len() <= MAX_KEY_BYTES => key,
                _ => return Err("a key of its table is no name".to_owned()),
            };
            if values.contains_key(key) || tensors.contains_key(key) {
                return Err(format!("`{key}` is there twice"));
            }
            if heap.is_a(value, Class::Bytes) {
                let place = places.remove(&(key, None));
                let place = place.ok_or_else(|| format!("`{key}` lies nowhere"))?;
                values.insert(key.to_owned(), place);
                continue;
            }
            let tensor = tensor(key, value, &heap, &mut places);
            let tensor = tensor.map_err(|reason| format!("tensor `{key}` {reason}"))?;
            tensors.insert(key, (nth, tensor));
        }
        let mut tensors: Vec<_> = tensors.into_values().collect();
        tensors.sort_by_key(|(nth, _)| *nth);
        Ok(Self {
            tensors: tensors.into_iter().map(|(_, tensor)| tensor).collect(),
            values,
        })
    }

    /// Whether the names are those of torchtitan's models.
    pub(super) fn is_of_torchtitan(&self) -> bool {
        let ends = ["tok_embeddings.weight", ".attention.wq.weight"];
        let mut keys = self.tensors.iter().map(|tensor| &tensor.key);
        keys.any(|key| ends.iter().any(|end| key.ends_with(end)))
    }
}

impl Indexed {
    /// The tensor under this name, without a place.
    pub(super) fn as_tensor(&self, name: &str) -> StoredTensor {
        StoredTensor {
            name: name.to_owned(),
            dtype: self.dtype.unwrap_or(DType::U8),
            shape: self.shape.clone(),
            strides: None,
            bytes: [0, 0],
        }
    }
}

/// A dictionary of the index.
fn table<'a, 'b>(
    root: Value<'a>,
    heap: &'b Heap<'a>,
    name: &str,
) -> Result<&'b [(Value<'a>, Value<'a>)], String> {
    let found = heap.attribute(root, Class::Metadata, name);
    let entries = found.and_then(|found| heap.dict(found));
    entries.ok_or_else(|| format!("it has no table `{name}`"))
}

/// Where each item lies.
fn places<'a>(root: Value<'a>, heap: &Heap<'a>) -> Result<Places<'a>, String> {
    let mut places = BTreeMap::new();
    for &(key, place) in table(root, heap, "storage_data")? {
        let name = heap.attribute(key, Class::Key, "fqn");
        let name = match name {
            Some(Value::Text(name)) if name.len() <= MAX_KEY_BYTES => name,
            _ => return Err("an item has no name".to_owned()),
        };
        let offset = match heap.attribute(key, Class::Key, "offset") {
            None | Some(Value::None) => None,
            Some(offset) => Some(heap.sizes(offset)?),
        };
        let field = |name| heap.attribute(place, Class::Place, name);
        let number = |name| {
            let found = field(name).ok_or("an item has no place")?;
            size(found).map(|number| number as u64)
        };
        let file = match field("relative_path") {
            Some(Value::Text(file)) if file.len() <= format::MAX_FILE_NAME_BYTES => file,
            _ => return Err("an item has no file".to_owned()),
        };
        let is_something = |found| !matches!(found, Value::None) && heap.items(found) != Some(&[]);
        let place = Place {
            file: file.to_owned(),
            offset: number("offset")?,
            length: number("length")?,
            is_changed: field("transform_descriptors").is_some_and(is_something),
        };
        places.insert((name, offset), place);
    }
    Ok(places)
}

/// Checks that no two items overlap, so that all of them together are no longer than the files. One
/// stretch may have several names.
fn check_apart(places: &Places<'_>) -> Result<(), String> {
    let mut all: Vec<_> = places.values().collect();
    all.sort_unstable();
    all.dedup();
    let overlap = |pair: &&[&Place]| {
        let [first, second] = **pair else {
            return false;
        };
        let end = first.offset.saturating_add(first.length);
        first.file == second.file && second.offset < end
    };
    match all.windows(2).find(overlap) {
        Some([first, second]) => Err(format!(
            "the items at the bytes {} and {} of {} overlap",
            first.offset, second.offset, first.file
        )),
        _ => Ok(()),
    }
}

/// A tensor of the table; takes its items out of `places`.
fn tensor<'a>(
    key: &'a str,
    value: Value<'a>,
    heap: &Heap<'a>,
    places: &mut Places<'a>,
) -> Result<Indexed, String> {
    let field = |name| heap.attribute(value, Class::Tensor, name);
    let shape = heap.sizes(field("size").ok_or("has no size")?)?;
    let properties = field("properties").ok_or("has no properties")?;
    let Some(&[Value::DType(dtype), ..]) = heap.attributes(properties, Class::Properties) else {
        return Err("has no element type".to_owned());
    };
    let listed = field("chunks").and_then(|found| heap.items(found));
    let listed = listed.ok_or("has no chunks")?;
    let mut chunks = Vec::new();
    for &chunk in listed {
        let sizes = |name| {
            let found = heap.attribute(chunk, Class::Chunk, name);
            heap.sizes(found.ok_or("has a chunk without a box")?)
        };
        let (offset, size) = (sizes("offsets")?, sizes("sizes")?);
        // Each place is taken once, so that there are no more chunks than items.
        let mut place = places.remove(&(key, Some(offset.clone())));
        if place.is_none() && listed.len() == 1 {
            // A tensor that is not cut may have no offset.
            place = places.remove(&(key, None));
        }
        let Some(place) = place else {
            let is_again = chunks.iter().any(|chunk: &Chunk| chunk.offset == offset);
            let what = if is_again { "two chunks" } else { "no bytes" };
            return Err(format!("has {what} from {offset:?} on"));
        };
        chunks.push(Chunk {
            offset,
            size,
            place,
        });
        if chunks.len() > format::MAX_BOXES_PER_TENSOR {
            return Err(format!("has {} chunks", listed.len()));
        }
    }
    Ok(Indexed {
        key: key.to_owned(),
        dtype,
        shape,
        chunks,
    })
}
