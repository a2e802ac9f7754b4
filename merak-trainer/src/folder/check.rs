//! Whether an output folder, and what lies in it, can be a run's. Nothing here changes a folder.

use super::{ASIDE, EVENTS, FILES, MOVING, REMOVED, start::Found};
use crate::{
    config::{CheckedArguments, DataFormat},
    error::{Error, FolderError, Result},
};
use merak_ckpt::{Store, format::CHECKPOINTS, words::file};
use rustix::fs::Access;
use std::{
    fs, io,
    path::{Path, PathBuf, absolute},
};

/// Refuses a path with a link that leads nowhere.
pub(super) fn check_link(path: &Path) -> Result<()> {
    let entry = path
        .ancestors()
        .find(|path| path.symlink_metadata().is_ok());
    match entry {
        Some(entry) if entry.is_symlink() && !entry.exists() => {
            let to = fs::read_link(entry).unwrap_or_default();
            let reason = format!("it is a link to {}, and nothing is there", file(&to));
            Err(Error::Folder(FolderError::OutputDir {
                path: entry.to_owned(),
                source: io::Error::new(io::ErrorKind::NotFound, reason),
            }))
        }
        _ => Ok(()),
    }
}

/// Refuses a folder within the data, where what is written would be read.
pub(super) fn check_outside_data(
    args: &CheckedArguments,
    named_by: &'static str,
    folder: &Path,
) -> Result<()> {
    // Other formats read files by their ending, which a run gives none of its own.
    let reads_all = args.data.format.is_plain() || args.data.format == DataFormat::Tensors;
    let place = resolved(folder);
    let mut data = args.inputs([]).into_iter();
    let around = data.find(|(key, input)| {
        let within = place.strip_prefix(resolved(input)).ok();
        // What begins with a dot is passed over.
        let is_read = within.is_some_and(|within| {
            let mut names = within.iter();
            !names.any(|name| name.as_encoded_bytes().starts_with(b"."))
        });
        reads_all && key.starts_with("data.") && input.is_dir() && is_read
    });
    match around {
        Some((key, data)) => Err(Error::Folder(FolderError::InData {
            folder: folder.to_owned(),
            named_by,
            data: data.to_owned(),
            key,
        })),
        None => Ok(()),
    }
}

/// A path without links, of which the end need not be there.
fn resolved(path: &Path) -> PathBuf {
    let path = absolute(path).unwrap_or_else(|_| path.to_owned());
    let there = path.ancestors().find_map(|there| {
        let rest = path.strip_prefix(there).ok()?;
        Some(fs::canonicalize(there).ok()?.join(rest))
    });
    there.unwrap_or(path)
}

/// Checks that the output folder can be made, without making it.
pub(super) fn check_place(output_dir: &Path) -> Result<()> {
    let refused = |path: &Path, source| FolderError::output_dir(path)(source);
    // Such as an illegal name, or a parent folder that may not be read.
    if let Err(error) = fs::metadata(output_dir)
        && !matches!(
            error.kind(),
            io::ErrorKind::NotFound | io::ErrorKind::NotADirectory
        )
    {
        return Err(refused(output_dir, error));
    }
    // The nearest thing that is there already; a relative path starts from the current folder.
    let there = output_dir
        .ancestors()
        .filter(|path| !path.as_os_str().is_empty())
        .find_map(|path| Some((path, fs::metadata(path).ok()?)));
    match there {
        Some((path, found)) if !found.is_dir() => {
            Err(refused(path, io::ErrorKind::NotADirectory.into()))
        }
        Some((path, found)) => check_writable(path, &found).map_err(|error| refused(path, error)),
        None => Ok(()),
    }
}

/// Asks the system whether entries can be made in a folder, which may lie on a file system that
/// cannot be written.
fn check_writable(folder: &Path, found: &fs::Metadata) -> io::Result<()> {
    rustix::fs::access(folder, Access::WRITE_OK | Access::EXEC_OK)?;
    // The system lets root write where no one has the permission.
    if found.permissions().readonly() {
        return Err(io::ErrorKind::PermissionDenied.into());
    }
    Ok(())
}

/// Checks that entries under the names of a run's files and folders can be a run's.
pub(super) fn check_names(folder: &Path) -> Result<()> {
    let refused = |path: PathBuf, source| Error::Folder(FolderError::OutputDir { path, source });
    for name in FILES {
        let path = folder.join(name);
        match merak_ckpt::open_regular(&path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                return Err(refused(path, error));
            }
            _ => {}
        }
    }
    for name in [CHECKPOINTS, EVENTS, ASIDE, MOVING, REMOVED] {
        let path = folder.join(name);
        // Checkpoints may lie elsewhere, behind a link.
        let found = if name == CHECKPOINTS {
            fs::metadata(&path)
        } else {
            path.symlink_metadata()
        };
        if found.is_ok_and(|found| !found.is_dir()) {
            return Err(refused(path, io::ErrorKind::NotADirectory.into()));
        }
    }
    let aside = folder.join(ASIDE);
    let is_empty = |mut entries: fs::ReadDir| entries.next().is_none();
    if Found::look(folder)?.aside.is_none() && !fs::read_dir(&aside).map_or(true, is_empty) {
        return Err(refused(aside, io::ErrorKind::DirectoryNotEmpty.into()));
    }
    Ok(Store::in_output_dir(folder).check()?)
}
