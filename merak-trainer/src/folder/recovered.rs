//! What a folder holds after the run that a crash left in the middle of a move is put back.

use super::{
    MOVING,
    entries::{lies_within, run_in},
};
use crate::error::{FolderError, Result};
use merak_ckpt::{
    Store,
    format::{CHECKPOINTS, parse_step_name},
};
use std::{
    fs, io,
    path::{Path, PathBuf},
};

/// The entries of a folder's run, read as they will be once a run on its way out is put back.
/// Looking changes nothing.
#[derive(Debug)]
pub(crate) struct Contents {
    folder: PathBuf,
    /// A run on its way out.
    pub(super) back: Option<Back>,
}

/// A run on its way out, which goes back.
#[derive(Debug)]
pub(super) struct Back {
    /// The entries that go back. The folder of checkpoints is one of them, or each of the
    /// checkpoints is.
    pub(super) entries: Vec<PathBuf>,
    /// The run's folder among the checkpoints of the output folder, where it has one.
    pub(super) within: Option<PathBuf>,
}

impl Contents {
    /// Looks at a folder, which need not exist.
    ///
    /// # Errors
    /// [`FolderError::OutputDir`] where the folder cannot be read.
    pub(crate) fn of(folder: &Path) -> Result<Self> {
        Self::look(folder).map_err(FolderError::output_dir(folder))
    }

    pub(super) fn look(folder: &Path) -> io::Result<Self> {
        let moving = folder.join(MOVING);
        let back = if moving.is_dir() {
            let link = moving.join(CHECKPOINTS);
            let within = fs::read_link(&link).ok();
            let within = within.filter(|to| lies_within(to, folder));
            let has_others =
                folder.join(CHECKPOINTS).is_dir() && (within.is_some() || !link.is_symlink());
            let entries = run_in(&moving, has_others)?;
            Some(Back { entries, within })
        } else {
            None
        };
        let folder = folder.to_owned();
        Ok(Self { folder, back })
    }

    /// Where an entry of the run lies now.
    pub(crate) fn place(&self, entry: impl AsRef<Path>) -> PathBuf {
        let entry = entry.as_ref();
        let goes_back = |back: &Back| {
            let mut parts = entry.ancestors();
            parts.any(|part| back.entries.iter().any(|own| own == part))
        };
        if self.back.as_ref().is_some_and(goes_back) {
            self.folder.join(MOVING).join(entry)
        } else {
            self.folder.join(entry)
        }
    }

    /// The folders of the run's checkpoints. What the first has takes the place of what the second
    /// has under the same name.
    fn stores(&self) -> Vec<Store> {
        let own = Store::new(self.place(CHECKPOINTS));
        let is_checkpoint = |entry: &PathBuf| entry.parent() == Some(Path::new(CHECKPOINTS));
        let has_some = |back: &Back| back.entries.iter().any(is_checkpoint);
        if self.back.as_ref().is_some_and(has_some) {
            vec![Store::in_output_dir(self.folder.join(MOVING)), own]
        } else {
            vec![own]
        }
    }

    /// The steps of the run's checkpoints, ascending.
    ///
    /// # Errors
    /// Where a folder exists but cannot be listed.
    pub(crate) fn steps(&self) -> Result<Vec<u64>> {
        let mut steps = Vec::new();
        for store in self.stores() {
            steps.extend(store.steps()?);
        }
        steps.sort_unstable();
        steps.dedup();
        Ok(steps)
    }

    /// Where the checkpoint of a step lies now.
    pub(crate) fn path_of(&self, step: u64) -> PathBuf {
        let stores = self.stores();
        let mut paths = stores.iter().map(|store| store.path_of(step));
        let there = paths.clone().find(|path| path.exists());
        there.or_else(|| paths.next_back()).unwrap_or_default()
    }

    /// Where the checkpoint lies now that the file `latest` names.
    ///
    /// # Errors
    /// Where the file cannot be read, or names no checkpoint.
    pub(crate) fn latest(&self) -> merak_ckpt::Result<Option<PathBuf>> {
        for store in self.stores() {
            if let Some(latest) = store.latest()? {
                let name = latest.file_name().and_then(|name| name.to_str());
                let step = name.and_then(parse_step_name);
                return Ok(Some(step.map_or(latest, |step| self.path_of(step))));
            }
        }
        Ok(None)
    }

    /// Where the entry of the run lies now that will have this path; `None` where nothing moves.
    /// The folder and its folder of checkpoints stand for themselves.
    pub(crate) fn locate(&self, path: &Path) -> Option<PathBuf> {
        self.back.as_ref()?;
        let whole = |path: &Path| std::path::absolute(path).ok();
        let (path, folder) = (whole(path)?, whole(&self.folder)?);
        let entry = path.strip_prefix(folder).ok()?;
        let is_checkpoint = entry.parent() == Some(Path::new(CHECKPOINTS));
        let name = entry.file_name().and_then(|name| name.to_str());
        let step = name.filter(|_| is_checkpoint).and_then(parse_step_name);
        Some(step.map_or_else(|| self.place(entry), |step| self.path_of(step)))
    }

    /// The path that an entry of the run will have, by the one that it has now.
    pub(crate) fn named(&self, path: &Path) -> PathBuf {
        let entry = path.strip_prefix(self.folder.join(MOVING));
        entry.map_or_else(|_| path.to_owned(), |entry| self.folder.join(entry))
    }
}
