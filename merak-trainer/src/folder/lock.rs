//! The lock of a folder, and the folders that are made for a run.

use super::{LOCK, moves::remove_if_empty};
use crate::{
    error::{Error, FolderError, Result},
    machine::this_process,
};
use merak_ckpt::{Error as CkptError, HeldFile};
use std::{
    fs, io,
    path::{Path, PathBuf},
    thread,
    time::{Duration, Instant},
};

/// Pause between two looks at a lock.
const PAUSE: Duration = Duration::from_millis(50);

/// Takes the lock of a folder.
pub(super) fn lock(folder: &Path) -> Result<HeldFile> {
    HeldFile::take(&folder.join(LOCK), &this_process()).map_err(|error| not_held(folder, error))
}

/// Whether the lock of a folder has the text `holder`, at the latest after `patience`.
pub(super) fn is_held_by(folder: &Path, holder: &str, patience: Duration) -> bool {
    let lock = folder.join(LOCK);
    let deadline = Instant::now() + patience;
    loop {
        // A network file system looks anew at a folder that is listed.
        let _ = fs::read_dir(folder).map(Iterator::count);
        if fs::read_to_string(&lock).is_ok_and(|text| text == holder) {
            return true;
        }
        if Instant::now() >= deadline {
            return false;
        }
        thread::sleep(PAUSE);
    }
}

/// The error of a lock that cannot be taken.
pub(super) fn not_held(folder: &Path, error: CkptError) -> Error {
    match error {
        CkptError::InUse { path, holder } => Error::Folder(FolderError::RunInUse {
            folder: path,
            holder,
        }),
        CkptError::Io { source, .. } => FolderError::output_dir(folder)(source),
        other => other.into(),
    }
}

/// Folders that a run has made, innermost first. Those that are still empty at its end are removed.
#[derive(Debug)]
pub(super) struct MadeFolders(Vec<PathBuf>);

impl MadeFolders {
    /// Makes a folder and those above it.
    pub(super) fn make(path: &Path) -> io::Result<Self> {
        let missing = path
            .ancestors()
            .take_while(|path| !path.as_os_str().is_empty() && !path.exists());
        let made = Self(missing.map(ToOwned::to_owned).collect());
        fs::create_dir_all(path)?;
        Ok(made)
    }
}

impl Drop for MadeFolders {
    fn drop(&mut self) {
        self.0.iter().for_each(|path| remove_if_empty(path));
    }
}
