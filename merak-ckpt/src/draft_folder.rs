//! Folders that have a temporary name beside their place until they are complete.

use crate::disk::{Lock, check_link, create_folders, remove, rename, sync_parent};
use crate::error::{WithCauses, io_error};
use crate::format::DRAFT;
use crate::{Error, Result};
use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};

/// Prefix of the name of a folder that another one replaces.
const OLD: &str = ".merak-old-";

/// A folder that one process is writing: `.merak-tmp-NAME` beside the place of `NAME`.
///
/// Dropping it unfinished removes it. The leftover of a killed process is taken over. Without locks
/// in the file system, other processes are not kept out.
#[derive(Debug)]
pub struct DraftBeside {
    folder: PathBuf,
    path: PathBuf,
    is_named: bool,
    /// Shows other processes that the folder is being written.
    #[expect(
        dead_code,
        reason = "it ends when it is dropped, after the folder is removed"
    )]
    lock: Lock,
}

impl DraftBeside {
    /// Makes an empty folder that will take the place of `folder`.
    ///
    /// # Errors
    /// [`Error::InUse`] where a live process is writing it, [`Error::AlreadyExists`] for a path
    /// without a name, [`Error::Io`] where the disk refuses.
    pub fn begin(folder: &Path) -> Result<Self> {
        let path = beside(folder, DRAFT)?;
        let parent = match path.parent() {
            Some(parent) if !parent.as_os_str().is_empty() => parent,
            _ => Path::new("."),
        };
        check_link(folder)?;
        create_folders(parent)?;
        // When two processes find a leftover, only one takes it over.
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

    /// The same for a folder that may be there already, whose place [`DraftBeside::replace`] takes.
    /// A folder that a replacement put aside before it was killed gets its name back.
    ///
    /// # Errors
    /// As [`DraftBeside::begin`].
    pub fn begin_replacing(folder: &Path) -> Result<Self> {
        let draft = Self::begin(folder)?;
        let old = beside(folder, OLD)?;
        if old.exists() && !folder.exists() {
            rename(&old, folder)?;
        }
        if old.exists() {
            remove(&old)?;
        }
        Ok(draft)
    }

    /// Where the files go.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Gives the folder its name, which is free or that of an empty folder.
    ///
    /// # Errors
    /// [`Error::Io`] where the disk refuses.
    pub fn finish(mut self) -> Result<()> {
        rename(&self.path, &self.folder)?;
        self.is_named = true;
        sync_parent(&self.folder)
    }

    /// Gives the folder its name in place of the folder that has it. A crash in between leaves that
    /// one aside, whole.
    ///
    /// # Errors
    /// As [`DraftBeside::finish`].
    pub fn replace(self) -> Result<()> {
        let old = beside(&self.folder, OLD)?;
        if self.folder.exists() {
            rename(&self.folder, &old)?;
        }
        self.finish()?;
        if old.exists() {
            remove(&old)?;
        }
        Ok(())
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

/// The path beside a folder, with `start` before its name.
///
/// # Errors
/// [`Error::AlreadyExists`] for a path without a name.
fn beside(folder: &Path, start: &str) -> Result<PathBuf> {
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
        // The finished folder is no draft any more.
        drop(DraftBeside::begin(&folder).unwrap());
        let names: Vec<_> = fs::read_dir(parent.path()).unwrap().collect();
        assert_eq!(names.len(), 1, "{names:?}");
    }
}
