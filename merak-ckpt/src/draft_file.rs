//! Files that have a temporary name beside their place until they are complete.

use crate::disk::{check_is_regular, open_to_write, sync_parent};
use crate::format::DRAFT;
use crate::lock_file::lies_at;
use std::ffi::OsString;
use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{self, ErrorKind, Write};
use std::path::{Path, PathBuf};

/// A file that one process is writing: `.merak-tmp-NAME` beside the place of `NAME`, or of what a
/// link of that name leads to. What lies there stays until the file is finished, and for ever where
/// the disk is full or the process is killed.
///
/// Dropping it unfinished removes it. The leftover of a killed process is taken over.
///
/// ```
/// use std::{fs, io::Write};
///
/// let folder = tempfile::tempdir()?;
/// let path = folder.path().join("notes.txt");
/// let mut draft = merak_ckpt::DraftFile::begin(&path)?;
/// draft.write_all(b"all of it")?;
/// assert!(!path.exists());
/// draft.finish()?;
/// assert_eq!(fs::read(&path)?, b"all of it");
/// # Ok::<(), std::io::Error>(())
/// ```
#[derive(Debug)]
pub struct DraftFile {
    file: File,
    /// Where it lies until it is finished.
    draft: PathBuf,
    target: PathBuf,
    is_named: bool,
}

/// Replaces the whole content of a file, so that a crash or a full disk leaves the old or the new
/// one.
///
/// # Errors
/// As for [`DraftFile`].
pub fn replace_file(path: &Path, content: &[u8]) -> io::Result<()> {
    let mut draft = DraftFile::begin(path)?;
    draft.write_all(content)?;
    draft.finish()
}

impl DraftFile {
    /// Begins an empty file that will take the place of the one at `path`, if there is one.
    ///
    /// # Errors
    /// When something else than a regular file is there, another process is writing it, or the
    /// system refuses.
    pub fn begin(path: &Path) -> io::Result<Self> {
        // A link stays one, also where nothing is at its end yet.
        let end = |_| {
            let there = fs::read_link(path).map(|to| path.with_file_name("").join(to));
            there.unwrap_or_else(|_| path.to_owned())
        };
        let target = fs::canonicalize(path).unwrap_or_else(end);
        match fs::metadata(&target) {
            Ok(metadata) => check_is_regular(&metadata)?,
            Err(error) if error.kind() == ErrorKind::NotFound => {}
            Err(error) => return Err(error),
        }
        let draft = Self::place(&target)?;
        Ok(Self {
            file: take(&draft)?,
            draft,
            target,
            is_named: false,
        })
    }

    /// The place of the draft of a file, where one may lie that a killed process has left.
    ///
    /// # Errors
    /// When the path ends in no name.
    pub fn place(path: &Path) -> io::Result<PathBuf> {
        let name = path.file_name().ok_or(ErrorKind::InvalidFilename)?;
        let mut draft = OsString::from(DRAFT);
        draft.push(name);
        Ok(path.with_file_name(draft))
    }

    /// Gives the file its name, in place of the one that has it.
    ///
    /// # Errors
    /// When the system refuses.
    pub fn finish(mut self) -> io::Result<()> {
        self.file.sync_all()?;
        fs::rename(&self.draft, &self.target)?;
        self.is_named = true;
        sync_parent(&self.target).map_err(io::Error::other)
    }
}

impl Write for DraftFile {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.file.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
    }
}

impl Drop for DraftFile {
    fn drop(&mut self) {
        if !self.is_named {
            // What stays is seen by its name.
            let _ = fs::remove_file(&self.draft);
        }
    }
}

/// Makes a file for this process alone, or takes over what a killed one has left. Without locks in
/// the file system, other processes are not kept out.
fn take(draft: &Path) -> io::Result<File> {
    let mut options = OpenOptions::new();
    options.write(true).create(true).truncate(false);
    loop {
        let file = open_to_write(draft, &options)?;
        if matches!(file.try_lock(), Err(TryLockError::WouldBlock)) {
            let reason = "another process is writing it";
            return Err(io::Error::new(ErrorKind::ResourceBusy, reason));
        }
        // The other process may have given it its name since, or removed it.
        if lies_at(&file, draft) {
            file.set_len(0)?;
            return Ok(file);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;

    #[test]
    fn a_file_is_replaced_at_once_and_a_link_to_it_stays_one() {
        let folder = tempfile::tempdir().unwrap();
        let (path, link) = (folder.path().join("kept"), folder.path().join("link"));
        replace_file(&path, b"old").unwrap();
        symlink(&path, &link).unwrap();
        let mut draft = DraftFile::begin(&link).unwrap();
        draft.write_all(b"half").unwrap();
        assert_eq!(
            DraftFile::begin(&path).unwrap_err().to_string(),
            "another process is writing it"
        );
        drop(draft);
        assert_eq!(fs::read(&path).unwrap(), b"old");
        // A killed process leaves its draft.
        fs::write(DraftFile::place(&path).unwrap(), "a longer leftover").unwrap();
        replace_file(&link, b"new").unwrap();
        assert!(link.is_symlink());
        assert_eq!(fs::read(&path).unwrap(), b"new");
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 2);
        fs::remove_file(&path).unwrap();
        replace_file(&link, b"anew").unwrap();
        assert!(link.is_symlink());
        assert_eq!(fs::read(&path).unwrap(), b"anew");
    }

    #[test]
    fn what_is_no_file_is_not_replaced() {
        let folder = tempfile::tempdir().unwrap();
        for path in [folder.path(), Path::new("/dev/null")] {
            let error = replace_file(path, b"").unwrap_err();
            assert_eq!(error.to_string(), "it is no regular file");
        }
        assert!(replace_file(Path::new(".."), b"").is_err());
    }
}
