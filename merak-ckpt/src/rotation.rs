//! Deleting and moving the checkpoints of a store.

use crate::disk::{rename, sync_folder};
use crate::error::io_error;
use crate::manifest::{parse_manifest, read_manifest};
use crate::store::{DELETE, DRAFT, without_aside};
use crate::{Result, Store, format};
use std::fs;
use std::path::Path;

impl Store {
    /// Deletes checkpoints beyond the newest `limit` by number, and returns their steps;
    /// a limit of zero or less keeps all. Steps in `keep` (the best one, the one being loaded) and
    /// the one that `latest` names are never deleted. Where the one that `best` names is deleted,
    /// so is that file. Bases that no checkpoint of the folder names are deleted too. One rank
    /// calls it.
    ///
    /// # Errors
    /// [`Error::Io`](crate::Error::Io) where the folder cannot be listed or changed.
    pub fn rotate(&self, limit: i64, keep: &[u64]) -> Result<Vec<u64>> {
        let limit = usize::try_from(limit).ok();
        let limit = limit.filter(|&limit| limit > 0).unwrap_or(usize::MAX);
        let steps = self.steps()?;
        if steps.len() <= limit && self.bases()?.is_empty() {
            return Ok(Vec::new());
        }
        let _lock = self.lock()?;
        let latest = self.read_pointer(format::LATEST)?;
        let best = self.read_pointer(format::BEST).ok().flatten();
        let (old, _) = steps.split_at(steps.len().saturating_sub(limit));
        let mut deleted = Vec::new();
        for &step in old {
            if keep.contains(&step) || latest == Some(step) {
                continue;
            }
            if best == Some(step) {
                self.set_best(None)?;
            }
            self.delete(&self.path_of(step))?;
            deleted.push(step);
        }
        self.remove_unnamed_bases()?;
        Ok(deleted)
    }

    /// Deletes the checkpoints after `step`, and returns their steps. Where there are some,
    /// `latest` then names `step`; where the one that `best` names is deleted, so is that file. One
    /// rank calls it.
    ///
    /// # Errors
    /// [`Error::Io`](crate::Error::Io) where the folder cannot be listed or changed.
    pub fn remove_later(&self, step: u64) -> Result<Vec<u64>> {
        let mut later = self.steps()?;
        later.retain(|&other| other > step);
        if later.is_empty() {
            return Ok(later);
        }
        let _lock = self.lock()?;
        let best = self.read_pointer(format::BEST).ok().flatten();
        if best.is_some_and(|best| later.contains(&best)) {
            self.set_best(None)?;
        }
        self.write_pointer(format::LATEST, step)?;
        for &deleted in &later {
            self.delete(&self.path_of(deleted))?;
        }
        Ok(later)
    }

    /// Moves the checkpoints after `step` to another store of the same file system, whose `latest`
    /// and `best` name them as before. The bases are linked there, so that both stores have them.
    /// Here `latest` then names `step`. Returns the steps that moved.
    ///
    /// # Errors
    /// [`Error::Io`](crate::Error::Io) where one of the folders cannot be listed or changed.
    pub fn move_later(&self, step: u64, to: &Self) -> Result<Vec<u64>> {
        let mut later = self.steps()?;
        later.retain(|&other| other > step);
        let Some(&last) = later.last() else {
            return Ok(later);
        };
        fs::create_dir_all(to.folder()).map_err(io_error("create", to.folder()))?;
        let _lock = self.lock()?;
        for number in self.bases()? {
            let name = format::base_name(number);
            link_folder(&self.folder().join(&name), to, &name)?;
        }
        let is_later = |named: &u64| later.contains(named);
        let latest = self.read_pointer(format::LATEST).ok().flatten();
        let best = self.read_pointer(format::BEST).ok().flatten();
        to.write_pointer(format::LATEST, latest.filter(is_later).unwrap_or(last))?;
        if let Some(best) = best.filter(is_later) {
            to.write_pointer(format::BEST, best)?;
            self.set_best(None)?;
        }
        self.write_pointer(format::LATEST, step)?;
        for &moved in &later {
            let there = to.folder().join(format::step_name(moved));
            rename(&self.path_of(moved), &there)?;
        }
        sync_folder(to.folder())?;
        sync_folder(self.folder())?;
        Ok(later)
    }

    /// Deletes a folder in this one, under a temporary name first, so that a crash leaves no half
    /// of it.
    fn delete(&self, path: &Path) -> Result<()> {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        let doomed = format!("{DRAFT}{DELETE}{}", without_aside(&name));
        let doomed = self.folder().join(doomed);
        rename(path, &doomed)?;
        fs::remove_dir_all(&doomed).map_err(io_error("remove", &doomed))
    }

    /// Removes the bases that no checkpoint names. The caller holds the folder's lock.
    fn remove_unnamed_bases(&self) -> Result<()> {
        let mut unnamed: Vec<_> = self.bases()?.into_iter().map(format::base_name).collect();
        for step in self.steps()?.into_iter().rev() {
            if unnamed.is_empty() {
                break;
            }
            let path = self.path_of(step);
            let manifest = read_manifest(&path).and_then(|text| parse_manifest(&path, &text));
            // A checkpoint that cannot be read may use any of them.
            let Ok(manifest) = manifest else {
                return Ok(());
            };
            let named = manifest.base.map(|base| base.folder);
            unnamed.retain(|folder| named.as_ref() != Some(folder));
        }
        // So may a checkpoint that is being written.
        if unnamed.is_empty() || self.is_being_written()? {
            return Ok(());
        }
        let mut paths = unnamed.iter().map(|name| self.folder().join(name));
        paths.try_for_each(|path| self.delete(&path))
    }
}

/// Links a folder's files into a folder of a store, which gets its name at the end. Files of
/// checkpoints are replaced and never changed, so that two folders can share them.
fn link_folder(from: &Path, to: &Store, name: &str) -> Result<()> {
    let draft = to.folder().join(format!("{DRAFT}{name}"));
    fs::create_dir(&draft).map_err(io_error("create", &draft))?;
    for entry in fs::read_dir(from).map_err(io_error("list", from))? {
        let entry = entry.map_err(io_error("list", from))?;
        let link = draft.join(entry.file_name());
        // Not every file system has links.
        fs::hard_link(entry.path(), &link)
            .or_else(|_| fs::copy(entry.path(), &link).map(drop))
            .map_err(io_error("create", &link))?;
    }
    sync_folder(&draft)?;
    rename(&draft, &to.folder().join(name))
}
