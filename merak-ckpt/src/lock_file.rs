//! Files that one process at a time holds.

use crate::error::{foreign, io_error};
use crate::{Error, Result};
use std::fs::{self, File, Metadata, OpenOptions, TryLockError};
use std::io::{self, ErrorKind, Read, Seek, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

/// A file that one process at a time holds, by a lock (`flock`) on it. Its text names the process.
/// Dropping this removes it. The file of a killed process is taken over, and the file of another
/// program is left alone. Without locks in the file system, other processes are not kept out.
///
/// # Examples
/// ```
/// use merak_ckpt::HeldFile;
///
/// let folder = tempfile::tempdir()?;
/// let path = folder.path().join(".lock");
/// let held = HeldFile::take(&path, "1 on this host")?;
/// let refused = HeldFile::take(&path, "2 on this host").unwrap_err().to_string();
/// assert!(refused.contains("is being written by process 1 on this host"), "{refused}");
/// drop(held);
/// HeldFile::take(&path, "2 on this host")?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct HeldFile {
    file: File,
    path: PathBuf,
}

/// The start of such a file's text.
const PROCESS: &str = "process ";

/// Maximum bytes that are read of a holder's name.
const MAX_HOLDER_BYTES: u64 = 256;

/// Number of attempts to take a file that is held, and the pause between two: [`HeldFile::check`]
/// locks the file for a moment too, a longer one where its process gets no processor meanwhile.
const LOOKS: (u32, Duration) = (50, Duration::from_millis(10));

impl HeldFile {
    /// Takes the file, making it where there is none, and notes which process has it, as in
    /// `4711 on host`.
    ///
    /// # Errors
    /// [`Error::InUse`] with the folder and the holder where another process holds it,
    /// [`Error::Foreign`] where something else lies there, [`Error::Io`] where the file cannot be
    /// made or written.
    pub fn take(path: &Path, process: &str) -> Result<Self> {
        loop {
            check_is_file(path)?;
            let opened = OpenOptions::new()
                .read(true)
                .write(true)
                .create(true)
                .truncate(false)
                .open(path);
            let mut file = opened.map_err(io_error("create", path))?;
            let is_held = || matches!(file.try_lock(), Err(TryLockError::WouldBlock));
            let (looks, pause) = LOOKS;
            if is_held() && (1..looks).all(|_| is_held_after(pause, is_held)) {
                return Err(in_use(path, &mut file));
            }
            holder(path, &mut file)?;
            let mut held = Self {
                file,
                path: path.to_owned(),
            };
            // The previous holder may have removed the file since it was opened.
            if !held.is_in_place() {
                continue;
            }
            let named = held
                .file
                .set_len(0)
                .and_then(|()| held.file.rewind())
                .and_then(|()| writeln!(held.file, "{PROCESS}{process}"));
            named.map_err(io_error("write", path))?;
            return Ok(held);
        }
    }

    /// Fails where [`HeldFile::take`] would: where a process holds the file, or something else lies
    /// there. Changes nothing.
    ///
    /// # Errors
    /// As [`HeldFile::take`]; [`Error::Io`] where the file cannot be looked at.
    pub fn check(path: &Path) -> Result<()> {
        check_is_file(path)?;
        let mut file = match File::open(path) {
            Ok(file) => file,
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(()),
            Err(error) => return Err(io_error("open", path)(error)),
        };
        if matches!(file.try_lock_shared(), Err(TryLockError::WouldBlock)) {
            return Err(in_use(path, &mut file));
        }
        holder(path, &mut file).map(drop)
    }

    /// Whether the file still lies where it was taken: another process may have removed its folder.
    pub fn is_in_place(&self) -> bool {
        is_same(&self.file, fs::symlink_metadata(&self.path))
    }
}

/// Whether an open file still lies at a path: another process may have removed or replaced it.
pub fn lies_at(file: &File, path: &Path) -> bool {
    is_same(file, fs::metadata(path))
}

fn is_same(file: &File, there: io::Result<Metadata>) -> bool {
    let place = |metadata: Metadata| (metadata.dev(), metadata.ino());
    let there = there.map(place);
    let own = file.metadata().map(place);
    matches!((there, own), (Ok(there), Ok(own)) if there == own)
}

impl Drop for HeldFile {
    fn drop(&mut self) {
        if self.is_in_place() {
            // The next holder takes over a file that cannot be removed.
            let _ = fs::remove_file(&self.path);
        }
    }
}

fn is_held_after(pause: Duration, is_held: impl Fn() -> bool) -> bool {
    thread::sleep(pause);
    is_held()
}

/// Refuses a pipe, which cannot be held, and a link, which leads to another file.
fn check_is_file(path: &Path) -> Result<()> {
    match fs::symlink_metadata(path) {
        Ok(found) if found.is_symlink() => Err(foreign(
            path,
            "it is a link to somewhere else, and no lock: move it away",
        )),
        Ok(found) if !found.is_file() => Err(foreign(
            path,
            "it is no regular file, and so no lock: move it away",
        )),
        Ok(_) => Ok(()),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
        Err(error) => Err(io_error("look at", path)(error)),
    }
}

/// The process that the file names, if it names one yet.
fn holder(path: &Path, file: &mut File) -> Result<Option<String>> {
    let mut text = Vec::new();
    file.rewind()
        .and_then(|()| file.take(MAX_HOLDER_BYTES).read_to_end(&mut text))
        .map_err(io_error("read", path))?;
    let text = String::from_utf8_lossy(&text);
    // A killed process may have written only the first bytes.
    if !text.starts_with(PROCESS) && !PROCESS.starts_with(&*text) {
        let reason = "it is no lock, but a file of another program: move it away";
        return Err(foreign(path, reason));
    }
    let name = text.trim();
    Ok((name.len() > PROCESS.len()).then(|| name.to_owned()))
}

fn in_use(path: &Path, file: &mut File) -> Error {
    let holder = holder(path, file).ok().flatten();
    Error::InUse {
        path: path.parent().unwrap_or(path).to_owned(),
        holder: holder.unwrap_or_else(|| "another process".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_killed_process_leaves_is_taken_over_and_a_removed_file_made_anew() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join(".lock");
        for left in ["process 1, which was killed\n", "", "proc"] {
            fs::write(&path, left).unwrap();
            let held = HeldFile::take(&path, "2").unwrap();
            assert_eq!(fs::read_to_string(&path).unwrap(), "process 2\n");
            assert!(held.is_in_place());
        }
        let held = HeldFile::take(&path, "2").unwrap();
        fs::remove_file(&path).unwrap();
        assert!(!held.is_in_place());
        let next = HeldFile::take(&path, "3").unwrap();
        drop(held);
        assert!(next.is_in_place(), "the file of another holder stays");
        drop(next);
        assert!(!path.exists());
    }

    #[test]
    fn a_question_for_the_holder_is_answered_and_keeps_nobody_off() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join(".lock");
        HeldFile::check(&path).unwrap();
        assert!(!path.exists(), "asking makes no file");
        let held = HeldFile::take(&path, "2 on host").unwrap();
        let asked = HeldFile::check(&path).unwrap_err().to_string();
        assert!(asked.contains("process 2 on host"), "{asked}");
        drop(held);
        let asking = File::create(&path).unwrap();
        asking.lock_shared().unwrap();
        let looking = thread::spawn({
            let path = path.clone();
            move || HeldFile::take(&path, "3").map(drop)
        });
        thread::sleep(Duration::from_millis(20));
        drop(asking);
        looking.join().unwrap().unwrap();
    }

    #[test]
    fn files_of_others_are_no_locks_and_stay_as_they_are() {
        let folder = tempfile::tempdir().unwrap();
        let (path, other) = (folder.path().join(".lock"), folder.path().join("other"));
        fs::write(&path, "dependencies\n").unwrap();
        let refused = |path: &Path| {
            let taken = HeldFile::take(path, "2").unwrap_err();
            assert_eq!(
                taken.to_string(),
                HeldFile::check(path).unwrap_err().to_string()
            );
            assert!(taken.is_user_error());
            taken.to_string()
        };
        assert!(refused(&path).contains("a file of another program"));
        assert_eq!(fs::read_to_string(&path).unwrap(), "dependencies\n");
        fs::rename(&path, &other).unwrap();
        std::os::unix::fs::symlink(&other, &path).unwrap();
        assert!(refused(&path).contains("a link"));
        assert_eq!(fs::read_to_string(&other).unwrap(), "dependencies\n");
        fs::remove_file(&path).unwrap();
        fs::create_dir(&path).unwrap();
        assert!(refused(&path).contains("no regular file"));
    }
}
