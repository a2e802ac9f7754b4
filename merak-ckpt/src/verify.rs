//! Checking all of a checkpoint.

use crate::error::{Damage, Problem};
use crate::format;
use crate::manifest::{FileEntry, TensorEntry};
use crate::{Checkpoint, Checksum};
use safetensors::tensor::Metadata;
use std::fs::File;
use std::io::{self, Read};
use std::os::unix::fs::FileExt;
use xxhash_rust::xxh3::Xxh3;

/// What a full check has looked at and found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VerifyReport {
    /// Files besides the manifest.
    pub files: usize,
    /// Tensors.
    pub tensors: usize,
    /// Slices.
    pub slices: usize,
    /// Bytes of all files.
    pub bytes: u64,
    /// What is wrong, in order of files, then tensors; empty for a good checkpoint.
    pub damage: Vec<Damage>,
}

impl Checkpoint {
    /// Checks every byte: the checksum of each file and each slice, and that the headers of the
    /// safetensors files say what the manifest says. (The manifest itself was checked on opening.)
    ///
    /// Damage is reported, not returned as an error: all of it, so that a user sees what can be
    /// saved. Memory stays below a few MiB plus the largest header.
    pub fn verify(&self) -> VerifyReport {
        let manifest = self.manifest();
        let mut damage = Vec::new();
        for file in &manifest.files {
            if let Err(problem) = self.verify_file(file) {
                damage.push(Damage {
                    file: file.name.clone(),
                    tensor: None,
                    problem,
                });
            }
        }
        for (index, tensor) in manifest.tensors.iter().enumerate() {
            for (number, slice) in tensor.slices.iter().enumerate() {
                if let Err(problem) = self.verify_slice(index, number) {
                    let tensor = Some(tensor.name.clone());
                    damage.push(Damage {
                        file: slice.file.clone(),
                        tensor,
                        problem,
                    });
                }
            }
        }
        VerifyReport {
            files: manifest.files.len(),
            tensors: manifest.tensors.len(),
            slices: manifest
                .tensors
                .iter()
                .map(|tensor| tensor.slices.len())
                .sum(),
            bytes: manifest.files.iter().map(|file| file.length).sum(),
            damage,
        }
    }

    fn verify_file(&self, entry: &FileEntry) -> Result<(), Problem> {
        let file = File::open(self.path().join(&entry.name)).map_err(unreadable)?;
        let found = checksum(&file).map_err(unreadable)?;
        if found != entry.checksum {
            return Err(Problem::Checksum {
                expected: entry.checksum,
                found,
            });
        }
        if format::is_tensor_file(&entry.name) {
            let tensors = &self.manifest().tensors;
            verify_header(&file, entry, tensors)?;
        }
        Ok(())
    }
}

fn checksum(mut file: &File) -> io::Result<Checksum> {
    let mut hasher = Xxh3::new();
    let mut block = vec![0; 1 << 20];
    loop {
        match file.read(&mut block)? {
            0 => return Ok(Checksum(hasher.digest())),
            n => hasher.update(&block[..n]),
        }
    }
}

/// Whether a safetensors file holds the slices that the manifest says, and nothing else.
fn verify_header(file: &File, entry: &FileEntry, tensors: &[TensorEntry]) -> Result<(), Problem> {
    let malformed = |reason: String| Problem::Malformed { reason };
    let mut length = [0; 8];
    file.read_exact_at(&mut length, 0).map_err(unreadable)?;
    let length = u64::from_le_bytes(length);
    if length > format::MAX_HEADER_BYTES.min(entry.length.saturating_sub(8)) {
        return Err(malformed(format!("the header's length is {length}")));
    }
    let mut header = vec![0; length as usize];
    file.read_exact_at(&mut header, 8).map_err(unreadable)?;
    let metadata: Metadata = serde_json::from_slice(&header)
        .map_err(|error| malformed(format!("the header is wrong: {error}")))?;
    let mut count = 0;
    for tensor in tensors {
        for slice in tensor
            .slices
            .iter()
            .filter(|slice| slice.file == entry.name)
        {
            let key = slice.key(&tensor.kind, &tensor.name, &tensor.shape);
            let bytes = slice.bytes.map(|at| at.checked_sub(8 + length));
            let agrees = metadata.info(&key).is_some_and(|info| {
                let (begin, end) = info.data_offsets;
                info.dtype == tensor.dtype.to_safetensors()
                    && info.shape == slice.stored_shape()
                    && bytes == [Some(begin as u64), Some(end as u64)]
            });
            if !agrees {
                return Err(malformed(format!(
                    "the header and the manifest differ about `{key}`"
                )));
            }
            count += 1;
        }
    }
    let found = metadata.offset_keys().len();
    if found != count {
        return Err(malformed(format!(
            "the header has {found} tensors, the manifest {count}"
        )));
    }
    if 8 + length + metadata.data_len() as u64 != entry.length {
        return Err(malformed(
            "the file has bytes that belong to no tensor".to_owned(),
        ));
    }
    Ok(())
}

#[expect(
    clippy::needless_pass_by_value,
    reason = "it is an argument of map_err"
)]
fn unreadable(error: io::Error) -> Problem {
    Problem::Unreadable {
        reason: error.to_string(),
    }
}
