//! Which checkpoint a path stands for, and which complete one is the newest.

use crate::error::{Damage, WithCauses, foreign, io_error};
use crate::file_check::complete;
use crate::manifest::Manifest;
use crate::recognize::what_of_others;
use crate::{Error, Result, Store, format, path_hint};
use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

/// What the names of files in a base begin with.
const OUTSIDE: &str = "../";

/// The folder of the checkpoint that `path` stands for.
pub(crate) fn resolve(path: &Path) -> Result<PathBuf> {
    let metadata = fs::metadata(path).map_err(|error| match error.kind() {
        ErrorKind::NotFound => Error::NotFound {
            path: path.to_owned(),
            hint: path_hint(path),
        },
        _ => io_error("look at", path)(error),
    })?;
    if metadata.is_file() {
        match (pointed_to(path), what_of_others(path)) {
            (Ok(Some(named)), _) => return Ok(named),
            // Folders of other programs may have a file `latest` too.
            (_, Some(reason)) => return Err(foreign(path, reason)),
            (Err(error), None) => return Err(error),
            (Ok(None), None) => {}
        }
        // The path may be that of the manifest.
        let beside = path.parent().map(resolve).and_then(Result::ok);
        return Err(Error::NotACheckpoint {
            path: path.to_owned(),
            found: beside,
        });
    }
    if !metadata.is_dir() {
        return Err(foreign(path, "it is neither a folder nor a regular file"));
    }
    let is_step = |name: &str| format::parse_step_name(name).is_some();
    if path.join(format::MANIFEST).exists()
        || path
            .file_name()
            .and_then(|name| name.to_str())
            .is_some_and(is_step)
    {
        return Ok(path.to_owned());
    }
    let store = Store::within(path);
    match (store.latest(), what_of_others(path)) {
        (Ok(Some(latest)), _) => Ok(latest),
        // Folders of other programs may have a file `latest` too.
        (_, Some(reason)) => Err(foreign(path, reason)),
        (Err(error), None) => Err(error),
        (Ok(None), None) => Err(Error::NotACheckpoint {
            path: path.to_owned(),
            found: newest_complete(&store, None)?.map(|newest| newest.folder),
        }),
    }
}

/// The folder that the file `latest` or `best` names.
fn pointed_to(path: &Path) -> Result<Option<PathBuf>> {
    let store = Store::new(path.parent().unwrap_or(Path::new(".")));
    match path.file_name().and_then(|name| name.to_str()) {
        Some(format::LATEST) => store.latest(),
        Some(format::BEST) => store.best(),
        _ => Ok(None),
    }
}

/// A complete checkpoint, as [`complete`] has found it.
#[derive(Debug)]
pub(crate) struct Complete {
    pub(crate) folder: PathBuf,
    pub(crate) manifest: Manifest,
}

/// As [`Store::newest_complete`].
pub(crate) fn newest_complete(store: &Store, before: Option<u64>) -> Result<Option<Complete>> {
    for step in store.steps()?.into_iter().rev() {
        if before.is_some_and(|before| step >= before) {
            continue;
        }
        let folder = store.path_of(step);
        match complete(&folder) {
            Ok(manifest) => return Ok(Some(Complete { folder, manifest })),
            Err(reason) => {
                tracing::warn!(step, reason = %WithCauses(&reason), "passing over an incomplete checkpoint");
            }
        }
    }
    Ok(None)
}

/// The newest complete checkpoint of a lower step beside this one that has none of these damaged
/// files of it: checkpoints may depend on the same base.
pub(crate) fn older_than(folder: &Path, damage: &[Damage]) -> Result<Option<Complete>> {
    // A path like `.` has no name of its own.
    let folder = match folder.file_name() {
        Some(_) => folder.to_owned(),
        None => folder.canonicalize().map_err(io_error("find", folder))?,
    };
    let name = folder.file_name().and_then(|name| name.to_str());
    let step = name.and_then(format::parse_step_name);
    let (Some(parent), Some(step)) = (folder.parent(), step) else {
        return Ok(None);
    };
    let is_shared = |file: &str| {
        let mut damaged = damage.iter().map(|damage| &*damage.file);
        damaged.any(|damaged| damaged == file && damaged.starts_with(OUTSIDE))
    };
    let (store, mut before) = (Store::new(parent), step);
    while let Some(older) = newest_complete(&store, Some(before))? {
        let mut files = older.manifest.files.iter();
        if !files.any(|file| is_shared(&file.name)) {
            return Ok(Some(older));
        }
        let name = older.folder.file_name().and_then(|name| name.to_str());
        let Some(step) = name.and_then(format::parse_step_name) else {
            break;
        };
        before = step;
    }
    Ok(None)
}

impl Error {
    /// Adds the newest complete older checkpoint to an error about a damaged one.
    pub(crate) fn with_older(mut self) -> Self {
        if let Self::Damaged {
            path,
            damage,
            older,
        } = &mut self
        {
            let found = older_than(path, std::slice::from_ref(damage))
                .ok()
                .flatten();
            *older = found.map(|older| older.folder);
        }
        self
    }
}
