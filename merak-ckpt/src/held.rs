//! What one process at a time may do in a folder.

use crate::error::io_error;
use crate::{Error, Result};
use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{Read, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// A file that one process at a time holds, by a lock (`flock`) on it. Its text names the holder.
/// It is removed when this is dropped; what a killed process leaves is taken over. On file systems
/// without locks, it keeps nobody off.
///
/// # Examples
/// ```
/// use merak_ckpt::HeldFile;
///
/// let folder = tempfile::tempdir()?;
/// let path = folder.path().join(".lock");
/// let held = HeldFile::take(&path, "process 1")?;
/// let refused = HeldFile::take(&path, "process 2").unwrap_err().to_string();
/// assert!(refused.contains("is being written by process 1"), "{refused}");
/// drop(held);
/// HeldFile::take(&path, "process 2")?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct HeldFile {
    file: File,
    path: PathBuf,
}

/// More of a holder's name is not read.
const MAX_HOLDER_BYTES: u64 = 256;

impl HeldFile {
    /// Takes the file, making it where there is none, and notes who has it.
    ///
    /// # Errors
    /// [`Error::InUse`] with the folder and the holder where somebody has it, [`Error::Io`] where
    /// the file cannot be made or written.
    pub fn take(path: &Path, holder: &str) -> Result<Self> {
        loop {
            let opened = OpenOptions::new()
                .read(true)
                .write(true)
                .create(true)
                .truncate(false)
                .open(path);
            let file = opened.map_err(io_error("create", path))?;
            if matches!(file.try_lock(), Err(TryLockError::WouldBlock)) {
                return Err(in_use(path, &file));
            }
            let mut held = Self {
                file,
                path: path.to_owned(),
            };
            // Whoever had it may have removed it since it was opened.
            if !held.is_in_place() {
                continue;
            }
            let named = held
                .file
                .set_len(0)
                .and_then(|()| writeln!(held.file, "{holder}"));
            named.map_err(io_error("write", path))?;
            return Ok(held);
        }
    }

    /// Whether the file still lies where it was taken: somebody may have removed its folder.
    pub fn is_in_place(&self) -> bool {
        lies_at(&self.file, &self.path)
    }
}

/// Whether an open file still lies at a path: somebody may have removed or replaced it.
pub fn lies_at(file: &File, path: &Path) -> bool {
    let place = |metadata: fs::Metadata| (metadata.dev(), metadata.ino());
    let there = fs::metadata(path).map(place);
    let own = file.metadata().map(place);
    matches!((there, own), (Ok(there), Ok(own)) if there == own)
}

impl Drop for HeldFile {
    fn drop(&mut self) {
        if self.is_in_place() {
            // Whoever comes next takes over what cannot be removed.
            let _ = fs::remove_file(&self.path);
        }
    }
}

fn in_use(path: &Path, file: &File) -> Error {
    let mut holder = String::new();
    let read = file.take(MAX_HOLDER_BYTES).read_to_string(&mut holder);
    let holder = match holder.trim() {
        name if read.is_ok() && !name.is_empty() => name.to_owned(),
        _ => "another process".to_owned(),
    };
    Error::InUse {
        path: path.parent().unwrap_or(path).to_owned(),
        holder,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_killed_process_leaves_is_taken_over_and_a_removed_file_made_anew() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join(".lock");
        fs::write(&path, "process 1, which was killed\n").unwrap();
        let held = HeldFile::take(&path, "process 2").unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), "process 2\n");
        assert!(held.is_in_place());
        fs::remove_file(&path).unwrap();
        assert!(!held.is_in_place());
        let next = HeldFile::take(&path, "process 3").unwrap();
        drop(held);
        assert!(next.is_in_place(), "the file of another holder stays");
        drop(next);
        assert!(!path.exists());
    }
}
