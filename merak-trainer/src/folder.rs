//! The folder of a run: its lock, and the treatment of a run that it has already.
//!
//! ```text
//! OUTPUT_DIR/
//!   .lock                    the process that writes; gone when it ends
//!   checkpoints/ ..          the run
//!   replaced-run/            the run that it replaces, until its first save
//!   earlier-run-1/ ..        runs without a checkpoint to go on from, and the later steps of a run
//!                            that went on from an earlier one; kept for good
//!   .tmp-replaced-run/       a run on its way there; put back after a crash
//!   .tmp-removed-run/        a run on its way out; removed after a crash
//! ```
//!
//! Where `checkpoints` is a link or a mount, it stays. The checkpoints of a run that is set aside
//! then lie behind it, in a folder with that run's name, and `checkpoints` of that run is a link.

mod check;
mod entries;
mod lock;
mod moves;
mod recovered;
mod room;
mod start;

use crate::{
    config::{CheckedArguments, RESOLVED},
    error::{Error, FolderError, Result, chain},
    machine::host_name,
};
use check::{check_link, check_names, check_outside_data, check_place};
use entries::run_in;
use lock::{MadeFolders, is_held_by, lock, not_held};
use merak_ckpt::{HeldFile, format::CHECKPOINTS, replace_file, words::file};
use moves::{recover, remove_aside};
pub(crate) use recovered::Contents;
use start::{Found, Start, adapter_of};
use std::{
    fs, io,
    path::{Path, PathBuf},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

/// The value of `resume_from_checkpoint` for the newest sound checkpoint of the run, or a fresh
/// start.
pub(crate) const AUTO: &str = "auto";

/// The values of `resume_from_checkpoint` that name a checkpoint of the run itself.
pub(crate) const OWN_CHECKPOINTS: [&str; 2] = ["latest", AUTO];

/// Where a run's records are in its folder.
pub const METRICS_FILE: &str = "metrics.jsonl";

/// The page about a run, in its folder.
pub(crate) const REPORT_FILE: &str = "report.html";

/// The actions of the profiled steps, in its folder.
pub(crate) const TRACE_FILE: &str = "trace.json";

/// The folder of a run's event files, where `logging_dir` names no other.
pub(crate) const EVENTS: &str = "tensorboard";

/// The files that a run writes beside its checkpoints.
const FILES: [&str; 4] = [RESOLVED, METRICS_FILE, REPORT_FILE, TRACE_FILE];

/// The lock file, which names the writing process.
const LOCK: &str = ".lock";

/// Longest wait for what another host has written: network file systems keep for as long what they
/// have seen of a folder.
const MOST_PATIENCE: Duration = Duration::from_secs(30);

/// Folder of a replaced run, until the run that replaces it saves.
const ASIDE: &str = "replaced-run";

/// Folder of a run without a checkpoint to resume from, or of a run's later steps; a number
/// follows.
const EARLIER: &str = "earlier-run-";

/// Folder of a run on its way to one of these.
const MOVING: &str = ".tmp-replaced-run";

/// Folder of a run that is being removed.
const REMOVED: &str = ".tmp-removed-run";

/// The folder of a run, which one process at a time writes, and which holds one run at a time.
///
/// A run may write a folder without a run, or go on from a checkpoint of the folder's run. With
/// `overwrite_output_dir` it may begin where another run is: that run is set aside, and removed
/// after the first save. With `resume_from_checkpoint` set to `auto` it may begin where another run
/// has no checkpoint to go on from: that run is set aside for good. A run that goes on from an
/// earlier checkpoint of the folder sets the later ones aside for good. Files in the folder under
/// other names than a run's belong to others and stay in place.
#[derive(Debug)]
pub struct RunFolder {
    path: PathBuf,
    /// The content of `config.resolved.toml`.
    resolved: String,
    start: Start,
    /// The name of the adapter that the run trains, if it trains one.
    adapter: Option<String>,
    lock: Mutex<HeldFile>,
    /// Comes after the lock, whose file goes first.
    _made: MadeFolders,
    /// Whether this run has set another aside that is still there.
    has_aside: AtomicBool,
    has_lost: AtomicBool,
}

impl RunFolder {
    /// The files and folders of a run, below its folder.
    ///
    /// # Errors
    /// When the folder cannot be read.
    pub fn entries(folder: &Path) -> io::Result<Vec<PathBuf>> {
        let entries = run_in(folder, false)?.into_iter();
        Ok(entries.map(|entry| folder.join(entry)).collect())
    }

    /// Refuses a folder, which `named_by` names, within the data that these arguments name.
    ///
    /// # Errors
    /// [`FolderError::InData`].
    pub fn check_outside_data(
        args: &CheckedArguments,
        named_by: &'static str,
        folder: &Path,
    ) -> Result<()> {
        check_outside_data(args, named_by, folder)
    }

    /// Checks what [`RunFolder::take`] would refuse. Changes nothing.
    ///
    /// # Errors
    /// As [`RunFolder::take`]; [`ConfigError::MissingKey`](crate::ConfigError::MissingKey) without
    /// `output_dir`.
    pub fn check(args: &CheckedArguments) -> Result<()> {
        let path = args.run_folder()?;
        check_link(&path)?;
        check_outside_data(args, "\"output_dir\"", &path)?;
        check_place(&path)?;
        HeldFile::check(&path.join(LOCK)).map_err(|error| not_held(&path, error))?;
        check_names(&path)?;
        Start::of(args, &path).check(&path, adapter_of(args))
    }

    /// Takes the folder, making it where there is none, for a run whose configuration reads
    /// `resolved`. A run that is there stays as it is until [`RunFolder::begin`].
    ///
    /// # Errors
    /// [`FolderError::InData`] where the data lie around it,
    /// [`FolderError::RunInUse`] where another process writes it, [`FolderError::RunExists`] where
    /// it has a run that this one neither goes on with nor replaces, [`FolderError::AdapterExists`]
    /// where it has an adapter of no run; when something else lies where the run writes, or the
    /// folder cannot be changed.
    pub fn take(args: &CheckedArguments, resolved: String) -> Result<Arc<Self>> {
        let path = args.run_folder()?;
        let failed = FolderError::output_dir(&path);
        check_link(&path)?;
        check_outside_data(args, "\"output_dir\"", &path)?;
        let made = MadeFolders::make(&path).map_err(failed)?;
        let lock = lock(&path)?;
        let start = Start::of(args, &path);
        check_names(&path)?;
        recover(&path).map_err(failed)?;
        start.check(&path, adapter_of(args))?;
        let from = args.resume_from_checkpoint.as_deref();
        // With `auto` the key counts where there is no checkpoint.
        if start == (Start::GoesOn { overwrites: true }) && from != Some(AUTO) {
            tracing::warn!(
                "\"overwrite_output_dir\" is not used: the run goes on from its checkpoint"
            );
        }
        Ok(Arc::new(Self {
            resolved,
            start,
            adapter: adapter_of(args).map(ToOwned::to_owned),
            lock: Mutex::new(lock),
            _made: made,
            has_aside: AtomicBool::new(false),
            has_lost: AtomicBool::new(false),
            path,
        }))
    }

    /// The process that has taken the folder, as its lock names it.
    ///
    /// # Errors
    /// When the lock cannot be read.
    pub fn holder(args: &CheckedArguments) -> Result<String> {
        let path = args.run_folder()?;
        fs::read_to_string(path.join(LOCK)).map_err(FolderError::output_dir(&path))
    }

    /// Checks that this process sees the folder that `holder` has taken, which may be on another
    /// host, and may write there, as each rank writes its own shards. What was just written there
    /// may take a while to be seen here.
    ///
    /// # Errors
    /// [`FolderError::NotShared`] and [`FolderError::OutputDir`] where it does not, or may not.
    pub fn expect_shared(args: &CheckedArguments, holder: &str) -> Result<()> {
        let folder = args.run_folder()?;
        let half = Duration::from_secs_f64(args.distributed.timeout_s / 2.0);
        if is_held_by(&folder, holder, half.min(MOST_PATIENCE)) {
            return check_place(&folder.join(CHECKPOINTS));
        }
        Err(Error::Folder(FolderError::NotShared {
            folder,
            holder: holder.trim().to_owned(),
            host: host_name(),
        }))
    }

    /// Begins to write: sets aside the run that makes way, and writes the configuration. `from` is
    /// the step of the checkpoint to go on from, if there was one; later checkpoints of the run,
    /// and a copy of its records, are set aside. Call it once everything needed of the earlier run
    /// has been read.
    ///
    /// # Errors
    /// When the folder cannot be changed.
    pub fn begin(&self, from: Option<u64>) -> Result<()> {
        self.make_room(from)
            .and_then(|()| replace_file(&self.path.join(RESOLVED), self.resolved.as_bytes()))
            .map_err(FolderError::output_dir(&self.path))
    }

    /// The content of `config.resolved.toml`.
    pub fn resolved(&self) -> &str {
        &self.resolved
    }

    /// Where the run that this one replaces lies, as long as it is there.
    pub fn replaced(&self) -> Option<PathBuf> {
        let aside = self.path.join(ASIDE);
        (self.has_aside.load(Ordering::Relaxed) && aside.is_dir()).then_some(aside)
    }

    /// Puts back the run that was to be replaced if this one has recorded nothing.
    pub fn withdraw(&self) {
        let has_recorded = || Found::look(&self.path).map_or(true, |found| found.is_run());
        if self.replaced().is_none() || has_recorded() {
            return;
        }
        let put_back = fs::rename(self.path.join(ASIDE), self.path.join(MOVING))
            .and_then(|()| recover(&self.path));
        if let Err(error) = put_back {
            let path = self.path.display();
            tracing::warn!(%path, %error, "the run that was to be replaced could not be put back");
        }
    }

    /// Removes the run that this one replaces.
    pub(crate) fn drop_replaced(&self) {
        if !self.has_aside.swap(false, Ordering::Relaxed) {
            return;
        }
        if let Err(error) = remove_aside(&self.path) {
            let path = self.path.display();
            tracing::warn!(%path, %error, "the run that was replaced could not be removed");
        }
    }

    /// Makes the folder anew if it was removed, and the configuration alone if that was removed.
    pub(crate) fn renew(&self) {
        let mut lock = self.lock();
        let resolved = self.path.join(RESOLVED);
        let is_whole = lock.is_in_place() && resolved.exists();
        if is_whole || self.has_lost.load(Ordering::Relaxed) {
            return;
        }
        if lock.is_in_place() {
            let path = file(&resolved);
            match replace_file(&resolved, self.resolved.as_bytes()) {
                Ok(()) => tracing::warn!(%path, "the file was removed: it is made anew"),
                Err(error) => {
                    self.has_lost.store(true, Ordering::Relaxed);
                    tracing::error!(%path, %error, "the file is gone and cannot be made anew");
                }
            }
            return;
        }
        let renewed = fs::create_dir_all(&self.path)
            .and_then(|()| replace_file(&self.path.join(RESOLVED), self.resolved.as_bytes()))
            .map_err(FolderError::output_dir(&self.path))
            .and_then(|()| self::lock(&self.path));
        let path = self.path.display();
        match renewed {
            Ok(renewed) => {
                *lock = renewed;
                tracing::warn!(%path, "the output folder was removed: it is made anew");
            }
            Err(error) => {
                self.has_lost.store(true, Ordering::Relaxed);
                let error = chain(&error);
                tracing::error!(%path, error, "the output folder is gone and cannot be made anew");
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, HeldFile> {
        self.lock.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests;
