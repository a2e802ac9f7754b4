//! Small operations on files and folders, with the path in their errors.

use crate::Result;
use crate::error::{Damage, Problem, io_error};
use crate::hf::foreign;
use crate::manifest::FileEntry;
use std::fs::{self, File, TryLockError};
use std::io::{ErrorKind, Read, Write};
use std::path::Path;

/// Whether the file is there in full length.
pub(crate) fn check_length(folder: &Path, entry: &FileEntry) -> Result<(), Damage> {
    let damage = |problem| Damage {
        file: entry.name.clone(),
        tensor: None,
        problem,
    };
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

pub(crate) fn write_synced(path: &Path, content: &[u8]) -> Result<()> {
    let mut file = File::create(path).map_err(io_error("create", path))?;
    file.write_all(content).map_err(io_error("write", path))?;
    file.sync_all().map_err(io_error("sync", path))
}

pub(crate) fn sync_folder(path: &Path) -> Result<()> {
    File::open(path)
        .and_then(|folder| folder.sync_all())
        .map_err(io_error("sync", path))
}

pub(crate) fn rename(from: &Path, to: &Path) -> Result<()> {
    fs::rename(from, to).map_err(io_error("rename", from))
}

pub(crate) fn remove(path: &Path) -> Result<()> {
    let removed = if path.is_dir() {
        fs::remove_dir_all(path)
    } else {
        fs::remove_file(path)
    };
    removed.map_err(io_error("remove", path))
}

/// The content of a file of so many bytes at most, or `None` where there is none.
pub(crate) fn read_small(path: &Path, limit: u64) -> Result<Option<Vec<u8>>> {
    // A pipe would keep who opens it waiting.
    let metadata = match fs::metadata(path) {
        Ok(metadata) => metadata,
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(io_error("look at", path)(error)),
    };
    if !metadata.is_file() {
        return Err(foreign(path, "it is no regular file"));
    }
    let mut content = Vec::new();
    let file = File::open(path).map_err(io_error("open", path))?;
    let read = file.take(limit + 1).read_to_end(&mut content);
    read.map_err(io_error("read", path))?;
    if content.len() as u64 > limit {
        let found = metadata.len();
        return Err(foreign(
            path,
            format!("it has {found} bytes, the limit is {limit}"),
        ));
    }
    Ok(Some(content))
}

/// A folder that nobody else locks as long as this lives. On file systems without locks, it keeps nobody off.
#[derive(Debug)]
pub(crate) struct Lock(#[expect(dead_code, reason = "it unlocks when it is closed")] File);

impl Lock {
    /// Waits until nobody else has locked the folder.
    pub(crate) fn of(folder: &Path) -> Result<Self> {
        let file = File::open(folder).map_err(io_error("open", folder))?;
        while file
            .lock()
            .is_err_and(|error| error.kind() == ErrorKind::Interrupted)
        {}
        Ok(Self(file))
    }

    /// Whether somebody has locked the folder.
    pub(crate) fn is_held(folder: &Path) -> bool {
        let is_held = |file: File| matches!(file.try_lock(), Err(TryLockError::WouldBlock));
        folder.is_dir() && File::open(folder).is_ok_and(is_held)
    }
}
