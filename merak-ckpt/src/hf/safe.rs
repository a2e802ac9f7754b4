//! Where the tensors of a safetensors file are.

use super::{StoredTensor, checked_bytes, foreign};
use crate::error::io_error;
use crate::{DType, Result, format};
use safetensors::tensor::Metadata;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;

/// The tensors of a safetensors file, in the order of their bytes; none of their elements is read.
///
/// # Errors
/// [`Error::Foreign`](crate::Error::Foreign) where the file is not what its header says,
/// [`Error::Io`](crate::Error::Io) where it cannot be read.
#[expect(clippy::missing_panics_doc, reason = "a header's keys are its own")]
pub fn stored_tensors(path: &Path) -> Result<Vec<StoredTensor>> {
    let file = File::open(path).map_err(io_error("open", path))?;
    let length = file.metadata().map_err(io_error("look at", path))?.len();
    let mut prefix = [0; 8];
    file.read_exact_at(&mut prefix, 0)
        .map_err(|_| foreign(path, format!("it has {length} bytes, expected a header")))?;
    let header_length = u64::from_le_bytes(prefix);
    let limit = format::MAX_HEADER_BYTES.min(length.saturating_sub(8));
    if header_length > limit {
        let reason = format!("its header has {header_length} bytes, expected at most {limit}");
        return Err(foreign(path, reason));
    }
    let mut header = vec![0; header_length as usize];
    file.read_exact_at(&mut header, 8)
        .map_err(io_error("read", path))?;
    let metadata: Metadata = serde_json::from_slice(&header)
        .map_err(|error| foreign(path, format!("its header is wrong: {error}")))?;
    let data_start = 8 + header_length;
    let expected = data_start.checked_add(metadata.data_len() as u64);
    if expected != Some(length) {
        let reason = format!(
            "it has {length} bytes, by its header it should have {}",
            expected.unwrap_or(u64::MAX)
        );
        return Err(foreign(path, reason));
    }
    metadata
        .offset_keys()
        .into_iter()
        .map(|name| {
            let info = metadata.info(&name).expect("it is one of the keys");
            let dtype = DType::ALL
                .into_iter()
                .find(|dtype| dtype.to_safetensors() == info.dtype);
            let (begin, end) = info.data_offsets;
            let fits = |dtype| checked_bytes(dtype, &info.shape) == Some(end - begin);
            match dtype.filter(|&dtype| end >= begin && fits(dtype)) {
                Some(dtype) => Ok(StoredTensor {
                    name,
                    dtype,
                    shape: info.shape.clone(),
                    bytes: [data_start + begin as u64, data_start + end as u64],
                }),
                None => Err(foreign(
                    path,
                    format!(
                        "tensor `{name}` of type {:?} and shape {:?} cannot be read",
                        info.dtype, info.shape
                    ),
                )),
            }
        })
        .collect()
}
