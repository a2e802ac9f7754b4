//! Checks of a checkpoint's files against its manifest, except for the slices themselves.

use crate::error::{Damage, Problem};
use crate::format;
use crate::manifest::{FileEntry, Manifest};
use crate::{Checksum, Error, Result, SliceEntry};
use safetensors::tensor::Metadata;
use std::fs::{self, File};
use std::io::{self, ErrorKind, Read};
use std::os::unix::fs::FileExt;
use std::path::Path;
use xxhash_rust::xxh3::Xxh3;

/// Position of a slice in a manifest: tensor, slice.
pub(crate) type Place = (usize, usize);

/// The slices of each file, in the order of the manifest's files.
pub(crate) fn slices_by_file(manifest: &Manifest) -> Vec<Vec<Place>> {
    let mut places = vec![Vec::new(); manifest.files.len()];
    for (tensor, entry) in manifest.tensors.iter().enumerate() {
        for (slice, SliceEntry { file, .. }) in entry.slices.iter().enumerate() {
            let file = manifest
                .file_index(file)
                .expect("a sound manifest lists the files of its slices");
            places[file].push((tensor, slice));
        }
    }
    places
}

/// The manifest of the checkpoint in a folder, where it is complete: the manifest is sound, its
/// files have the right lengths, and those without tensors the right content.
pub(crate) fn complete(folder: &Path) -> Result<Manifest> {
    let manifest = Manifest::of_folder(folder)?;
    let damaged = |damage| Error::damaged(folder, damage);
    for file in &manifest.files {
        check_length(folder, file).map_err(damaged)?;
        if !format::is_tensor_file(&file.name) {
            check_content(folder, file, &mut |_| ())
                .map_err(|problem| damaged(Damage::of_file(&file.name, problem)))?;
        }
    }
    Ok(manifest)
}

/// Checks that the file exists in full length.
pub(crate) fn check_length(folder: &Path, entry: &FileEntry) -> Result<(), Damage> {
    let damage = |problem| Damage::of_file(&entry.name, problem);
    let found = match fs::metadata(folder.join(&entry.name)) {
        Ok(metadata) if metadata.is_file() => metadata.len(),
        Ok(_) => return Err(damage(Problem::Irregular)),
        Err(error) if error.kind() == ErrorKind::NotFound => return Err(damage(Problem::Missing)),
        Err(error) => {
            return Err(damage(Problem::Unreadable {
                reason: error.to_string(),
            }));
        }
    };
    if found != entry.length {
        return Err(damage(Problem::Length {
            expected: entry.length,
            found,
        }));
    }
    Ok(())
}

/// Checks the content of a file against the manifest; `watch` sees the bytes, block by block.
pub(crate) fn check_content(
    folder: &Path,
    entry: &FileEntry,
    watch: &mut dyn FnMut(&[u8]),
) -> Result<(), Problem> {
    let mut file = File::open(folder.join(&entry.name)).map_err(unreadable)?;
    let mut hasher = Xxh3::new();
    let mut block = vec![0; (1 << 20).min(entry.length as usize + 1)];
    let found = loop {
        match file.read(&mut block).map_err(unreadable)? {
            0 => break Checksum(hasher.digest()),
            n => {
                hasher.update(&block[..n]);
                watch(&block[..n]);
            }
        }
    };
    if found == entry.checksum {
        return Ok(());
    }
    let expected = entry.checksum;
    Err(Problem::Checksum { expected, found })
}

/// Checks that a safetensors file's header announces the slices of the manifest at their places,
/// and nothing else.
pub(crate) fn check_header(
    file: &File,
    entry: &FileEntry,
    manifest: &Manifest,
    slices: &[Place],
) -> Result<(), Problem> {
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
    let [key, value] = format::METADATA;
    let is_ours = metadata
        .metadata()
        .as_ref()
        .is_some_and(|found| found.len() == 1 && found.get(key).is_some_and(|v| v == value));
    if !is_ours {
        return Err(malformed("the header's metadata are not ours".to_owned()));
    }
    for &(tensor, slice) in slices {
        let tensor = &manifest.tensors[tensor];
        let slice = &tensor.slices[slice];
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
    }
    let found = metadata.offset_keys().len();
    if found != slices.len() {
        let count = slices.len();
        return Err(malformed(format!(
            "the header has {found} tensors, the manifest {count}"
        )));
    }
    if 8 + length + metadata.data_len() as u64 != entry.length {
        let reason = "the file has bytes that belong to no tensor";
        return Err(malformed(reason.to_owned()));
    }
    Ok(())
}

fn malformed(reason: String) -> Problem {
    Problem::Malformed { reason }
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
