//! Where the tensors of a safetensors file are.

use super::open_weights;
use crate::error::{foreign, io_error};
use crate::stored_tensor::{StoredTensor, checked_bytes};
use crate::{DType, Result, format};
use safetensors::tensor::TensorInfo;
use serde::de::{Error as _, IgnoredAny, MapAccess, Visitor};
use serde::{Deserialize, Deserializer};
use std::fmt;
use std::os::unix::fs::FileExt;
use std::path::Path;

/// The tensors of a safetensors file, in the order of their bytes. Reads no elements.
///
/// # Errors
/// [`Error::Foreign`](crate::Error::Foreign) where the file is not what its header says,
/// [`Error::Io`](crate::Error::Io) where it cannot be read.
pub fn stored_tensors(path: &Path) -> Result<Vec<StoredTensor>> {
    let file = open_weights(path)?;
    let length = file.metadata().map_err(io_error("look at", path))?.len();
    let mut prefix = [0; 8];
    if length < prefix.len() as u64 {
        let reason = format!("it has {length} bytes, expected a header");
        return Err(foreign(path, reason));
    }
    file.read_exact_at(&mut prefix, 0)
        .map_err(io_error("read", path))?;
    let header_length = u64::from_le_bytes(prefix);
    let limit = format::MAX_HEADER_BYTES.min(length.saturating_sub(8));
    if header_length > limit {
        // Such a file begins with the length of its header. Text reads as a length beyond all.
        let reason = if prefix.iter().all(|byte| byte.is_ascii() && *byte >= b'\t') {
            "it begins with text, and is no safetensors file".to_owned()
        } else {
            format!("its header has {header_length} bytes, expected at most {limit}")
        };
        return Err(foreign(path, reason));
    }
    let mut header = vec![0; header_length as usize];
    file.read_exact_at(&mut header, 8)
        .map_err(io_error("read", path))?;
    let Header(tensors) = serde_json::from_slice(&header)
        .map_err(|error| foreign(path, format!("its header is wrong: {error}")))?;
    place(tensors, 8 + header_length, length).map_err(|reason| foreign(path, reason))
}

/// The tensors of a header, as it lists them.
struct Header(Vec<(String, TensorInfo)>);

impl<'de> Deserialize<'de> for Header {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        from.deserialize_map(Entries)
    }
}

struct Entries;

impl<'de> Visitor<'de> for Entries {
    type Value = Header;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object with an entry for each tensor")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Header, A::Error> {
        let mut tensors = Vec::new();
        while let Some(name) = map.next_key::<String>()? {
            if name == "__metadata__" {
                map.next_value::<IgnoredAny>()?;
                continue;
            }
            let info = map.next_value();
            let info =
                info.map_err(|error| A::Error::custom(format!("tensor `{name}`: {error}")))?;
            tensors.push((name, info));
        }
        Ok(Header(tensors))
    }
}

/// Where the tensors lie in the file, after checking that they fill it without gaps.
fn place(
    mut tensors: Vec<(String, TensorInfo)>,
    start: u64,
    length: u64,
) -> Result<Vec<StoredTensor>, String> {
    tensors
        .sort_by(|(a, first), (b, second)| (first.data_offsets, a).cmp(&(second.data_offsets, b)));
    let mut at = 0;
    let mut stored = Vec::with_capacity(tensors.len());
    for (name, info) in tensors {
        let (begin, end) = info.data_offsets;
        if begin != at || end < begin {
            return Err(format!(
                "tensor `{name}` has bytes {begin}..{end} of the data, expected some from {at} on"
            ));
        }
        at = end;
        let dtype = dtype_of(&name, &info)?;
        let (size, shape) = (end - begin, &info.shape);
        match checked_bytes(dtype, shape) {
            Some(expected) if expected == size => {}
            Some(expected) => {
                return Err(format!(
                    "tensor `{name}` of type {dtype} and shape {shape:?} has {size} bytes, expected {expected}"
                ));
            }
            None => return Err(format!("tensor `{name}` of shape {shape:?} is too large")),
        }
        stored.push(StoredTensor {
            name,
            dtype,
            shape: info.shape,
            strides: None,
            bytes: [begin, end].map(|at| start.saturating_add(at as u64)),
        });
    }
    let expected = start.saturating_add(at as u64);
    if expected != length {
        return Err(format!(
            "it has {length} bytes, by its header it should have {expected}"
        ));
    }
    Ok(stored)
}

/// The element type of a tensor whose shape can be listed.
fn dtype_of(name: &str, info: &TensorInfo) -> Result<DType, String> {
    let (ndim, limit) = (info.shape.len(), format::MAX_NDIM);
    if ndim > limit {
        return Err(format!(
            "tensor `{name}` has {ndim} dims, the limit is {limit}"
        ));
    }
    let mut all = DType::ALL.into_iter();
    let found = all.find(|dtype| dtype.to_safetensors() == info.dtype);
    found.ok_or_else(|| {
        format!(
            "tensor `{name}` has elements of type {:?}, which cannot be read",
            info.dtype
        )
    })
}
