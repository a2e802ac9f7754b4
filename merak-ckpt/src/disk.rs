//! Small operations on files and folders, with the path in their errors.

use crate::error::{foreign, io_error};
use crate::words::{self, beyond};
use crate::{Error, Result, path_hint};
use serde::de::DeserializeOwned;
use serde_json::Value;
use std::fs::{self, File, Metadata, OpenOptions, TryLockError};
use std::io::{self, ErrorKind, Read, Write};
use std::path::{Path, PathBuf};

pub(crate) fn write_synced(path: &Path, content: &[u8]) -> Result<()> {
    let mut file = create_regular(path).map_err(io_error("create", path))?;
    file.write_all(content).map_err(io_error("write", path))?;
    file.sync_all().map_err(io_error("sync", path))
}

pub(crate) fn sync_folder(path: &Path) -> Result<()> {
    File::open(path)
        .and_then(|folder| folder.sync_all())
        .map_err(io_error("sync", path))
}

/// Makes a folder and those around it, so that a crash cannot lose their names; returns the ones
/// that were not there, innermost first.
pub(crate) fn create_folders(path: &Path) -> Result<Vec<PathBuf>> {
    let around = path.ancestors();
    let around = around.filter(|folder| !folder.as_os_str().is_empty());
    let missing = around.take_while(|folder| !folder.exists());
    let missing: Vec<_> = missing.map(Path::to_owned).collect();
    missing.iter().try_for_each(|folder| check_link(folder))?;
    fs::create_dir_all(path).map_err(io_error("create", path))?;
    missing.iter().try_for_each(|folder| sync_parent(folder))?;
    Ok(missing)
}

/// Refuses to make a folder where a link points to a path at which nothing lies.
pub(crate) fn check_link(path: &Path) -> Result<()> {
    let target = fs::read_link(path).ok().filter(|_| !path.exists());
    let Some(target) = target else {
        return Ok(());
    };
    let reason = format!(
        "it is a link to {}, where nothing lies",
        words::file(&target)
    );
    let reason = io::Error::new(ErrorKind::AlreadyExists, reason);
    Err(io_error("create", path)(reason))
}

/// Syncs the folder around a file or folder, so that a crash cannot lose its name.
pub(crate) fn sync_parent(path: &Path) -> Result<()> {
    match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => sync_folder(parent),
        _ => sync_folder(Path::new(".")),
    }
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

/// Maximum bytes of a configuration: a `config.json`, an `adapter_config.json`, a file of settings.
/// Parsed, they may take a hundred times the memory.
pub const MAX_CONFIG_BYTES: u64 = 4 << 20;

/// Opens a file that a user named, and returns its length in bytes. Opening a pipe would block, and
/// a device may have no end, so both are refused.
///
/// # Errors
/// When there is no regular file, or the system refuses to open it.
///
/// ```
/// let error = merak_ckpt::open_regular("/dev/zero".as_ref()).unwrap_err();
/// assert_eq!(error.to_string(), "it is no regular file");
/// ```
pub fn open_regular(path: &Path) -> io::Result<(File, u64)> {
    let metadata = fs::metadata(path)?;
    check_is_regular(&metadata)?;
    Ok((File::open(path)?, metadata.len()))
}

/// Opens a file to write it, as `options` say. Opening a pipe would block, so an existing file must
/// be a regular one, or a link to one.
///
/// # Errors
/// When something else is there, or the system refuses to open it.
///
/// ```
/// use std::fs::OpenOptions;
///
/// let options = OpenOptions::new().write(true).create(true).to_owned();
/// let error = merak_ckpt::open_to_write("/dev/null".as_ref(), &options).unwrap_err();
/// assert_eq!(error.to_string(), "it is no regular file");
/// ```
pub fn open_to_write(path: &Path, options: &OpenOptions) -> io::Result<File> {
    match fs::metadata(path) {
        Ok(metadata) => check_is_regular(&metadata)?,
        Err(error) if error.kind() == ErrorKind::NotFound => {}
        Err(error) => return Err(error),
    }
    let file = options.open(path)?;
    // Another process may have replaced the file meanwhile.
    check_is_regular(&file.metadata()?)?;
    Ok(file)
}

fn create_regular(path: &Path) -> io::Result<File> {
    let mut options = OpenOptions::new();
    open_to_write(path, options.write(true).create(true).truncate(true))
}

pub(crate) fn check_is_regular(metadata: &Metadata) -> io::Result<()> {
    if metadata.is_file() {
        return Ok(());
    }
    let reason = "it is no regular file";
    Err(io::Error::new(ErrorKind::InvalidInput, reason))
}

/// The content of a file that a user named, at most `limit` bytes.
///
/// # Errors
/// As for [`open_regular`], and for a file that is longer.
pub fn read_regular(path: &Path, limit: u64) -> io::Result<Vec<u8>> {
    let (file, length) = open_regular(path)?;
    if length > limit {
        return Err(too_long(length, limit));
    }
    // The file may grow, or have another length than its metadata says.
    read_at_most(file, limit)
}

/// All that a reader gives, at most `limit` bytes.
///
/// # Errors
/// When it gives more, or cannot be read.
pub fn read_at_most(reader: impl Read, limit: u64) -> io::Result<Vec<u8>> {
    let mut content = Vec::new();
    let mut reader = reader.take(limit.saturating_add(1));
    reader.read_to_end(&mut content)?;
    match content.len() as u64 {
        found if found > limit => Err(too_long(found, limit)),
        _ => Ok(content),
    }
}

fn too_long(found: u64, limit: u64) -> io::Error {
    let reason = format!("it has {}", beyond(found, limit));
    io::Error::new(ErrorKind::FileTooLarge, reason)
}

/// The text of a file that a user named, at most `limit` bytes.
///
/// # Errors
/// As for [`read_regular`], and for bytes that are not UTF-8.
pub fn read_text(path: &Path, limit: u64) -> io::Result<String> {
    let content = read_regular(path, limit)?;
    String::from_utf8(content).map_err(|error| {
        let offset = error.utf8_error().valid_up_to();
        let reason = format!("it is no text: byte {offset} is not UTF-8");
        io::Error::new(ErrorKind::InvalidData, reason)
    })
}

/// The content of a file of at most `limit` bytes, or `None` where there is no file.
pub(crate) fn read_small(path: &Path, limit: u64) -> Result<Option<Vec<u8>>> {
    match read_regular(path, limit) {
        Ok(content) => Ok(Some(content)),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        Err(error) => Err(not_read(path, error)),
    }
}

/// The content of a JSON file of at most [`MAX_CONFIG_BYTES`].
pub(crate) fn read_json(path: &Path) -> Result<Value> {
    parsed(path, MAX_CONFIG_BYTES)
}

/// The content of a JSON file of at most `limit` bytes.
pub(crate) fn parsed<T: DeserializeOwned>(path: &Path, limit: u64) -> Result<T> {
    let missing = || foreign(path, format!("the file is missing{}", path_hint(path)));
    let text = read_small(path, limit)?.ok_or_else(missing)?;
    serde_json::from_slice(&text).map_err(|error| foreign(path, error.to_string()))
}

/// The error of a file that has the wrong form, or that the system refuses to read.
pub(crate) fn not_read(path: &Path, error: io::Error) -> Error {
    match error.kind() {
        ErrorKind::InvalidInput | ErrorKind::FileTooLarge if error.raw_os_error().is_none() => {
            foreign(path, error.to_string())
        }
        _ => io_error("open", path)(error),
    }
}

/// A lock on a folder, held as long as this lives. Without locks in the file system, other
/// processes are not kept out.
#[derive(Debug)]
pub(crate) struct Lock(#[expect(dead_code, reason = "it unlocks when it is closed")] File);

impl Lock {
    /// Locks the folder, after waiting for other processes to unlock it.
    pub(crate) fn of(folder: &Path) -> Result<Self> {
        let file = File::open(folder).map_err(io_error("open", folder))?;
        while file
            .lock()
            .is_err_and(|error| error.kind() == ErrorKind::Interrupted)
        {}
        Ok(Self(file))
    }

    /// Whether the folder is locked.
    pub(crate) fn is_held(folder: &Path) -> bool {
        let is_held = |file: File| matches!(file.try_lock(), Err(TryLockError::WouldBlock));
        folder.is_dir() && File::open(folder).is_ok_and(is_held)
    }
}
