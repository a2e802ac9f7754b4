//! The folder of checkpoints of a run: names, `latest` and `best`, leftovers.

use crate::disk::{Lock, read_small, remove, rename, sync_folder, write_synced};
use crate::error::{foreign, io_error};
use crate::{Error, Result, format, path_hint};
use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

/// The folder of checkpoints of a run, as in `OUTPUT_DIR/checkpoints`.
///
/// A handle is a path: making one touches nothing, and every rank makes its own.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Store {
    folder: PathBuf,
}

/// Name prefix of anything unfinished.
pub(crate) const DRAFT: &str = ".tmp-";
/// Name prefix of a checkpoint that a new one of the same step is replacing.
pub(crate) const ASIDE: &str = ".replaced-";
/// What follows [`DRAFT`] in the name of a folder that is being deleted.
pub(crate) const DELETE: &str = "delete-";

/// Largest `latest` or `best` that is read.
const MAX_POINTER_BYTES: u64 = 1 << 10;

impl Store {
    /// The store in this folder, which need not exist yet.
    pub fn new(folder: impl Into<PathBuf>) -> Self {
        Self {
            folder: folder.into(),
        }
    }

    /// The store of an output folder.
    pub fn in_output_dir(output_dir: impl AsRef<Path>) -> Self {
        Self::new(output_dir.as_ref().join(format::CHECKPOINTS))
    }

    /// The store in an output folder, or in its `checkpoints` folder.
    pub(crate) fn within(path: &Path) -> Self {
        let inner = path.join(format::CHECKPOINTS);
        Self::new(if inner.is_dir() {
            inner
        } else {
            path.to_owned()
        })
    }

    /// The folder.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Whether a path leads to an entry of this folder, behind whatever links.
    pub fn holds(&self, path: &Path) -> bool {
        let (path, folder) = (path.canonicalize(), self.folder.canonicalize());
        matches!((path, folder), (Ok(path), Ok(folder)) if path.parent() == Some(&folder))
    }

    /// The steps that have a checkpoint, complete or not, ascending.
    ///
    /// # Errors
    /// [`Error::Io`] where the folder exists but cannot be listed.
    pub fn steps(&self) -> Result<Vec<u64>> {
        let mut steps: Vec<u64> = self
            .names()?
            .iter()
            .filter(|name| self.folder.join(name).is_dir())
            .filter_map(|name| step_of(name))
            .collect();
        steps.sort_unstable();
        steps.dedup();
        Ok(steps)
    }

    /// The numbers of the bases, ascending.
    ///
    /// # Errors
    /// [`Error::Io`] where the folder exists but cannot be listed.
    pub fn bases(&self) -> Result<Vec<u64>> {
        let names = self.names()?;
        let folders = names
            .iter()
            .filter(|name| self.folder().join(name).is_dir());
        let numbers = folders.filter_map(|name| format::parse_base_name(name));
        let mut numbers: Vec<_> = numbers.collect();
        numbers.sort_unstable();
        Ok(numbers)
    }

    /// The names in the folder that belong to a store, and the other names; each sorted.
    ///
    /// # Errors
    /// [`Error::Io`] where the folder exists but cannot be listed.
    pub fn entries(&self) -> Result<(Vec<String>, Vec<String>)> {
        let names = self.names()?.into_iter();
        Ok(names.partition(|name| is_own(name)))
    }

    /// Checks that each entry under a name of the store's is of the type that a store writes: a
    /// later save would fail, or replace it. Changes nothing.
    ///
    /// # Errors
    /// [`Error::Foreign`] with the first that is something else, [`Error::Io`] where the folder
    /// exists but cannot be listed.
    pub fn check(&self) -> Result<()> {
        for name in self.entries()?.0 {
            let path = self.folder.join(&name);
            if is_folder(without_aside(&name)) && !path.is_dir() {
                return Err(foreign(
                    &path,
                    "it is no folder, and so no checkpoint: move it away",
                ));
            }
            if [format::LATEST, format::BEST].contains(&&*name) && !path.is_file() {
                return Err(foreign(&path, "it is no regular file: move it away"));
            }
        }
        Ok(())
    }

    /// The folder of a step's checkpoint.
    pub fn path_of(&self, step: u64) -> PathBuf {
        let name = format::step_name(step);
        let aside = self.folder.join(format!("{ASIDE}{name}"));
        let path = self.folder.join(name);
        if !path.exists() && aside.exists() {
            aside
        } else {
            path
        }
    }

    /// The folder that `latest` names.
    ///
    /// # Errors
    /// [`Error::Io`] where the file exists but cannot be read, [`Error::Foreign`] where it
    /// names no checkpoint.
    pub fn latest(&self) -> Result<Option<PathBuf>> {
        Ok(self
            .read_pointer(format::LATEST)?
            .map(|step| self.path_of(step)))
    }

    /// The folder that `best` names.
    ///
    /// # Errors
    /// As for [`Store::latest`].
    pub fn best(&self) -> Result<Option<PathBuf>> {
        Ok(self
            .read_pointer(format::BEST)?
            .map(|step| self.path_of(step)))
    }

    /// Makes `best` name a step's checkpoint, or none, atomically.
    ///
    /// # Errors
    /// [`Error::Io`] where the file cannot be changed, [`Error::NotFound`] where there is no such
    /// checkpoint.
    pub fn set_best(&self, step: Option<u64>) -> Result<()> {
        let Some(step) = step else {
            let path = self.folder.join(format::BEST);
            return if path.exists() { remove(&path) } else { Ok(()) };
        };
        let path = self.path_of(step);
        if !path.exists() {
            let hint = path_hint(&path);
            return Err(Error::NotFound { path, hint });
        }
        self.write_pointer(format::BEST, step)
    }

    /// Keeps other processes from changing the names in the folder, for a moment.
    pub(crate) fn lock(&self) -> Result<Lock> {
        Lock::of(&self.folder)
    }

    /// Whether a checkpoint is being written here.
    pub(crate) fn is_being_written(&self) -> Result<bool> {
        let names = self.names()?.into_iter();
        let mut drafts = names.filter(|name| is_draft(name));
        Ok(drafts.any(|name| Lock::is_held(&self.folder.join(name))))
    }

    /// Removes the leftovers of failed and crashed saves, as the next save would. One rank calls
    /// it.
    ///
    /// # Errors
    /// [`Error::Io`] where the folder cannot be listed or changed.
    pub fn clean(&self) -> Result<()> {
        if !self.folder.is_dir() {
            return Ok(());
        }
        let _lock = self.lock()?;
        self.recover()
    }

    /// Removes leftovers of crashed saves; gives a checkpoint that was set aside its name back. The
    /// caller holds the folder's lock.
    pub(crate) fn recover(&self) -> Result<()> {
        for name in self.names()? {
            let path = self.folder.join(&name);
            if is_draft(&name) {
                if !Lock::is_held(&path) {
                    remove(&path)?;
                }
            } else if let Some(own) = name.strip_prefix(ASIDE)
                && is_folder(own)
            {
                let named = self.folder.join(own);
                if named.exists() {
                    remove(&path)?;
                } else {
                    rename(&path, &named)?;
                }
            }
        }
        Ok(())
    }

    /// Names of the folder's entries, sorted; none where it does not exist.
    pub(crate) fn names(&self) -> Result<Vec<String>> {
        let entries = match fs::read_dir(&self.folder) {
            Ok(entries) => entries,
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
            Err(error) => return Err(io_error("list", &self.folder)(error)),
        };
        let mut names = Vec::new();
        for entry in entries {
            let entry = entry.map_err(io_error("list", &self.folder))?;
            names.extend(entry.file_name().into_string());
        }
        names.sort_unstable();
        Ok(names)
    }

    pub(crate) fn read_pointer(&self, file: &'static str) -> Result<Option<u64>> {
        let path = self.folder.join(file);
        let Some(text) = read_small(&path, MAX_POINTER_BYTES)? else {
            return Ok(None);
        };
        let text = String::from_utf8_lossy(&text);
        let name = text.trim();
        let step = format::parse_step_name(name).ok_or_else(|| {
            let name: String = name.chars().take(80).collect();
            let reason = format!("it names `{name}`, expected a checkpoint like step-00001000");
            foreign(&path, reason)
        })?;
        Ok(Some(step))
    }

    pub(crate) fn write_pointer(&self, file: &'static str, step: u64) -> Result<()> {
        let temporary = self.folder.join(format!("{DRAFT}{file}"));
        let text = format!("{}\n", format::step_name(step));
        let written = write_synced(&temporary, text.as_bytes())
            .and_then(|()| rename(&temporary, &self.folder.join(file)));
        if written.is_err() {
            // A full disk may leave half of it.
            let _ = fs::remove_file(&temporary);
        }
        written?;
        sync_folder(&self.folder)
    }
}

/// The name that a folder had before it was set aside.
pub(crate) fn without_aside(name: &str) -> &str {
    name.strip_prefix(ASIDE).unwrap_or(name)
}

/// The step of a checkpoint, by its name or the name that it has while it is set aside.
fn step_of(name: &str) -> Option<u64> {
    format::parse_step_name(without_aside(name))
}

/// Whether this is the name of a checkpoint or of a base.
fn is_folder(name: &str) -> bool {
    format::parse_step_name(name).is_some() || format::parse_base_name(name).is_some()
}

/// Whether this is the name of something unfinished.
fn is_draft(name: &str) -> bool {
    let Some(of) = name.strip_prefix(DRAFT) else {
        return false;
    };
    // Earlier versions deleted steps under their numbers.
    let is_deleted = |of: &str| is_folder(of) || of.parse::<u64>().is_ok();
    is_folder(of)
        || [format::LATEST, format::BEST].contains(&of)
        || of.strip_prefix(DELETE).is_some_and(is_deleted)
}

/// Whether a store gives this name.
fn is_own(name: &str) -> bool {
    is_folder(without_aside(name))
        || is_draft(name)
        || [format::LATEST, format::BEST].contains(&name)
}
