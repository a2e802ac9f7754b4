//! Folders that are written under another name beside their place, until they are whole.

use crate::disk::{Lock, remove, rename, sync_parent};
use crate::error::{WithCauses, io_error};
use crate::{Error, Result};
use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};

/// How the name begins under which a folder is written: one that nobody else gives.
const DRAFT: &str = ".merak-tmp-";

/// A folder that is being written: `.merak-tmp-NAME` beside the place of `NAME`, which nobody else
/// writes meanwhile.
///
/// Dropped before it is finished, it is removed. What a process left that was killed is taken over.
/// On file systems without locks, it keeps nobody off.
#[derive(Debug)]
pub(crate) struct DraftBeside {
    folder: PathBuf,
    path: PathBuf,
    is_named: bool,
    /// Shows others that it is being written.
    #[expect(
        dead_code,
        reason = "it ends when it is dropped, after the folder is removed"
    )]
    lock: Lock,
}

impl DraftBeside {
    /// Makes an empty folder that is to take the place of `folder`.
    ///
    /// # Errors
    /// [`Error::InUse`] where a process that lives is writing it, [`Error::AlreadyExists`] for a
    /// path without a name, [`Error::Io`] where the disk refuses.
    pub(crate) fn begin(folder: &Path) -> Result<Self> {
        let path = beside(folder, DRAFT)?;
        let parent = match path.parent() {
            Some(parent) if !parent.as_os_str().is_empty() => parent,
            _ => Path::new("."),
        };
        fs::create_dir_all(parent).map_err(io_error("create", parent))?;
        // Of two that find a leftover, one takes it over.
        let _names = Lock::of(parent)?;
        if Lock::is_held(&path) {
            return Err(Error::InUse {
                path: folder.to_owned(),
                holder: "another process".to_owned(),
            });
        }
        if path.symlink_metadata().is_ok() {
            remove(&path)?;
        }
        fs::create_dir(&path).map_err(io_error("create", &path))?;
        Ok(Self {
            lock: Lock::of(&path)?,
            folder: folder.to_owned(),
            path,
            is_named: false,
        })
    }

    /// Where the files go.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Gives the folder its name, which is free or that of an empty folder.
    ///
    /// # Errors
    /// [`Error::Io`] where the disk refuses.
    pub(crate) fn finish(mut self) -> Result<()> {
        rename(&self.path, &self.folder)?;
        self.is_named = true;
        sync_parent(&self.folder)
    }
}

impl Drop for DraftBeside {
    fn drop(&mut self) {
        if self.is_named || !self.path.exists() {
            return;
        }
        if let Err(error) = remove(&self.path) {
            tracing::warn!(error = %WithCauses(&error), "an unfinished folder could not be removed");
        }
    }
}

/// The path beside a folder whose name begins so.
///
/// # Errors
/// [`Error::AlreadyExists`] for a path without a name.
pub(crate) fn beside(folder: &Path, start: &str) -> Result<PathBuf> {
    let name = folder.file_name().ok_or_else(|| Error::AlreadyExists {
        path: folder.to_owned(),
    })?;
    let mut beside = OsString::from(start);
    beside.push(name);
    Ok(folder.with_file_name(beside))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_dead_process_left_is_taken_over_and_a_live_one_is_left_alone() {
        let parent = tempfile::tempdir().unwrap();
        let folder = parent.path().join("out");
        let left = parent.path().join(".merak-tmp-out");
        fs::create_dir(&left).unwrap();
        fs::write(left.join("model.safetensors"), "half of it").unwrap();
        let draft = DraftBeside::begin(&folder).unwrap();
        assert_eq!(draft.path(), left);
        assert_eq!(fs::read_dir(&left).unwrap().count(), 0);
        fs::write(left.join("mine"), "").unwrap();
        let error = DraftBeside::begin(&folder).unwrap_err();
        let message = error.to_string();
        assert!(
            matches!(&error, Error::InUse { path, .. } if *path == folder),
            "{message}"
        );
        assert!(left.join("mine").exists());
        // Another name is another folder.
        drop(DraftBeside::begin(&parent.path().join("other")).unwrap());
        draft.finish().unwrap();
        assert!(folder.join("mine").exists());
        // What came of it is nobody's draft any more.
        drop(DraftBeside::begin(&folder).unwrap());
        let names: Vec<_> = fs::read_dir(parent.path()).unwrap().collect();
        assert_eq!(names.len(), 1, "{names:?}");
    }
}
