//! The manifest in the folder of a checkpoint.

use super::text::Refused;
use super::{Base, Manifest};
use crate::error::{Damage, Problem, io_error};
use crate::{Checksum, Error, Result, format};
use std::fs::{self, File};
use std::io::{ErrorKind, Read};
use std::path::Path;

impl Manifest {
    /// The manifest of the checkpoint in a folder, with the tensors and files of its base.
    pub(crate) fn of_folder(folder: &Path) -> Result<Self> {
        joined(folder, parse_manifest(folder, &read_manifest(folder)?)?)
    }
}

/// The manifest of a folder, from its text.
pub(crate) fn parse_manifest(folder: &Path, text: &[u8]) -> Result<Manifest> {
    Manifest::from_text(text).map_err(|refused| match refused {
        Refused::Newer { found } => Error::NewerVersion {
            path: folder.join(format::MANIFEST),
            found,
            supported: format::VERSION,
        },
        Refused::Damaged(damage) => Error::damaged(folder, damage),
    })
}

/// The text of a folder's manifest.
pub(crate) fn read_manifest(folder: &Path) -> Result<Vec<u8>> {
    let path = folder.join(format::MANIFEST);
    let damaged = |problem| Error::damaged(folder, Damage::of_file(format::MANIFEST, problem));
    let length = match fs::metadata(&path) {
        Ok(metadata) if metadata.is_file() => metadata.len(),
        Ok(_) => return Err(damaged(Problem::Irregular)),
        Err(error) if error.kind() == ErrorKind::NotFound => {
            return Err(damaged(Problem::Missing));
        }
        Err(error) => {
            return Err(damaged(Problem::Unreadable {
                reason: error.to_string(),
            }));
        }
    };
    let limit = format::MAX_MANIFEST_BYTES;
    if length > limit {
        return Err(damaged(Problem::TooLarge {
            what: "bytes",
            found: length,
            limit,
        }));
    }
    let mut text = Vec::new();
    let file = File::open(&path).map_err(io_error("open", &path))?;
    file.take(limit)
        .read_to_end(&mut text)
        .map_err(io_error("read", &path))?;
    Ok(text)
}

/// The same manifest with the tensors and files of its base.
///
/// # Errors
/// [`Error::Damaged`] where the base is missing, was replaced by another one, or has a tensor that
/// the checkpoint has too.
fn joined(folder: &Path, mut manifest: Manifest) -> Result<Manifest> {
    let Some(base) = manifest.base.clone() else {
        return Ok(manifest);
    };
    let place = format!("../{}", base.folder);
    let in_base = |problem| {
        let file = format!("{place}/{}", format::MANIFEST);
        Error::damaged(folder, Damage::of_file(&file, problem))
    };
    let path = folder.join(&place);
    let shared = read_base(&path, &base).map_err(|error| match error {
        Error::Damaged { damage, .. } => in_base(match damage.problem {
            Problem::Missing if !path.exists() => Problem::NoBase,
            problem => problem,
        }),
        error => error,
    })?;
    if shared.base.is_some() {
        let reason = "a base depends on no other base".to_owned();
        return Err(in_base(Problem::Malformed { reason }));
    }
    let outside = |name: &str| format!("{place}/{name}");
    for mut file in shared.files {
        if format::is_tensor_file(&file.name) {
            file.name = outside(&file.name);
            manifest.files.push(file);
        }
    }
    for mut tensor in shared.tensors {
        for slice in &mut tensor.slices {
            slice.file = outside(&slice.file);
        }
        manifest.tensors.push(tensor);
    }
    manifest.files.sort_by(|a, b| a.name.cmp(&b.name));
    manifest
        .tensors
        .sort_by(|a, b| (&a.kind, &a.name).cmp(&(&b.kind, &b.name)));
    let checked = manifest.check_order().and_then(|()| manifest.check_total());
    checked.map_err(|damage| Error::damaged(folder, damage))?;
    Ok(manifest)
}

fn read_base(folder: &Path, base: &Base) -> Result<Manifest> {
    let text = read_manifest(folder)?;
    let (expected, found) = (base.checksum, Checksum::of(&text));
    if found != expected {
        let problem = Problem::OtherBase { expected, found };
        let damage = Damage::of_file(format::MANIFEST, problem);
        return Err(Error::damaged(folder, damage));
    }
    parse_manifest(folder, &text)
}
