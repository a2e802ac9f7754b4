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

use crate::{
    ADAPTER_CONFIG, Callback, CheckedArguments, Error, Result, StepReport, metrics::METRICS_FILE,
    trainer::ADAPTER,
};
use merak_ckpt::{
    Error as CkptError, HeldFile, Store, format::CHECKPOINTS, has_lora, words::file, write_regular,
};
use std::{
    fs, io,
    path::{Path, PathBuf},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
};

/// The configuration in use.
const RESOLVED: &str = "config.resolved.toml";

/// The files that a run writes beside its checkpoints.
const FILES: [&str; 2] = [RESOLVED, METRICS_FILE];

/// The lock file, which names the writing process.
const LOCK: &str = ".lock";

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
    /// Comes behind the lock, whose file goes first.
    _made: MadeFolders,
    /// Whether this run has set another aside that is still there.
    has_aside: AtomicBool,
    has_lost: AtomicBool,
}

/// How a run takes its folder.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Start {
    /// The folder must have no run.
    Fresh,
    /// Resumes from a checkpoint of the folder's run; where there is none, takes its place.
    GoesOn {
        /// Whether the run that has no checkpoint is removed after the first save.
        overwrites: bool,
    },
    /// Takes the place of the folder's run.
    Replaces,
}

/// The state of a folder.
#[derive(Debug, Default)]
struct Found {
    newest_step: Option<u64>,
    has_metrics: bool,
    aside: Option<PathBuf>,
}

impl RunFolder {
    /// Checks what [`RunFolder::take`] would refuse. Changes nothing.
    ///
    /// # Errors
    /// As [`RunFolder::take`]; [`Error::MissingKey`] without `output_dir`.
    pub fn check(args: &CheckedArguments) -> Result<()> {
        let path = args.run_folder()?;
        check_link(&path)?;
        check_place(&path)?;
        HeldFile::check(&path.join(LOCK)).map_err(|error| not_held(&path, error))?;
        check_names(&path)?;
        Start::of(args, &path).check(&path, adapter_of(args))
    }

    /// Takes the folder, making it where there is none, for a run whose configuration reads
    /// `resolved`. A run that is there stays as it is until [`RunFolder::begin`].
    ///
    /// # Errors
    /// [`Error::RunInUse`] where another process writes it, [`Error::RunExists`] where it has a run
    /// that this one neither goes on with nor replaces, [`Error::AdapterExists`] where it has an
    /// adapter of no run; when something else lies where the run writes, or the folder cannot be
    /// changed.
    pub fn take(args: &CheckedArguments, resolved: String) -> Result<Arc<Self>> {
        let path = args.run_folder()?;
        let failed = |source| Error::OutputDir {
            path: path.clone(),
            source,
        };
        check_link(&path)?;
        let made = MadeFolders::make(&path).map_err(failed)?;
        let lock = lock(&path)?;
        let start = Start::of(args, &path);
        check_names(&path)?;
        recover(&path).map_err(failed)?;
        start.check(&path, adapter_of(args))?;
        let from = args.resume_from_checkpoint.as_deref();
        // With `auto` it counts where there is no checkpoint.
        if start == (Start::GoesOn { overwrites: true }) && from != Some("auto") {
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

    /// Begins to write: sets aside the run that makes way, and writes the configuration. `from` is
    /// the step of the checkpoint to go on from, if there was one; later checkpoints of the run,
    /// and a copy of its records, are set aside. Call it once everything needed of the earlier run
    /// has been read.
    ///
    /// # Errors
    /// When the folder cannot be changed.
    pub fn begin(&self, from: Option<u64>) -> Result<()> {
        self.make_room(from)
            .and_then(|()| write_regular(&self.path.join(RESOLVED), self.resolved.as_bytes()))
            .map_err(|source| Error::OutputDir {
                path: self.path.clone(),
                source,
            })
    }

    fn make_room(&self, from: Option<u64>) -> io::Result<()> {
        match (self.start, from) {
            (Start::GoesOn { overwrites: false }, None) => self.keep_all()?,
            (Start::GoesOn { overwrites: true }, None) | (Start::Replaces, _) => self.replace()?,
            (Start::GoesOn { .. }, Some(step)) => {
                // Left by a crash between a first save and the removal.
                if self.found()?.aside.is_some() {
                    remove_aside(&self.path)?;
                }
                self.keep_later(step)?;
            }
            (Start::Fresh, _) => {}
        }
        let has_aside = self.found()?.aside.is_some();
        self.has_aside.store(has_aside, Ordering::Relaxed);
        Ok(())
    }

    fn found(&self) -> io::Result<Found> {
        Found::look(&self.path).map_err(io::Error::other)
    }

    /// Makes room as `overwrite_output_dir` allows.
    fn replace(&self) -> io::Result<()> {
        let mut found = self.found()?;
        // Left by a crash between a first save and the removal.
        if found.newest_step.is_some() && found.aside.take().is_some() {
            remove_aside(&self.path)?;
        }
        let trains_adapter = self.adapter.is_some();
        // An adapter stays where this run trains one: the first save replaces that of the same
        // name, and leaves others alone.
        let has_adapter = !trains_adapter && has_trained_adapter(&self.path);
        if !found.is_run() {
            Ok(())
        } else if found.aside.is_some() {
            // A run that has saved nothing makes way for good; the run that it was to replace
            // stays.
            remove_run(&self.path, has_adapter)
        } else {
            set_aside(&self.path, &self.path.join(ASIDE), has_adapter)
        }
    }

    /// Makes room without removing anything.
    fn keep_all(&self) -> io::Result<()> {
        let found = self.found()?;
        if let Some(aside) = found.aside {
            let kept = self.next_earlier();
            fs::rename(aside, &kept)?;
            let path = file(&kept);
            tracing::warn!(%path, "the run that was to be replaced is kept there");
        }
        let has_adapter = self.adapter.is_some() || has_trained_adapter(&self.path);
        let has_adapter = has_adapter && self.path.join(ADAPTER).exists();
        if found.newest_step.is_some() || found.has_metrics || has_adapter {
            let kept = self.next_earlier();
            set_aside(&self.path, &kept, has_adapter)?;
            let path = file(&kept);
            tracing::warn!(
                %path,
                "no checkpoint to go on from: the run begins anew, and what was there is kept there"
            );
        }
        Ok(())
    }

    /// Sets aside the checkpoints after `step`, the adapter of the last of them, the configuration
    /// and a copy of the records.
    fn keep_later(&self, step: u64) -> io::Result<()> {
        if self
            .found()?
            .newest_step
            .is_none_or(|newest| newest <= step)
        {
            return Ok(());
        }
        let (moving, kept) = (self.path.join(MOVING), self.next_earlier());
        fs::create_dir(&moving)?;
        let adapter = self.adapter.is_some().then_some(ADAPTER);
        for name in adapter.into_iter().chain([RESOLVED]) {
            if self.path.join(name).exists() {
                fs::rename(self.path.join(name), moving.join(name))?;
            }
        }
        let metrics = self.path.join(METRICS_FILE);
        if metrics.exists() {
            // After a crash the copy is put back, so that it must be whole.
            let copy = self.path.join(format!("{METRICS_FILE}.new"));
            write_regular(&copy, &merak_ckpt::read_regular(&metrics, u64::MAX)?)?;
            fs::rename(copy, moving.join(METRICS_FILE))?;
        }
        Store::in_output_dir(&self.path)
            .move_later(step, &Store::in_output_dir(&moving))
            .map_err(io::Error::other)?;
        fs::rename(moving, &kept)?;
        let path = file(&kept);
        tracing::warn!(
            %path,
            step,
            "the run goes on from an earlier step: its later checkpoints and a copy of its metrics are kept there"
        );
        Ok(())
    }

    /// The first free name for a run that is kept.
    fn next_earlier(&self) -> PathBuf {
        let mut names = (1_u64..).map(|number| self.path.join(format!("{EARLIER}{number}")));
        let free = names.find(|path| path.symlink_metadata().is_err());
        free.expect("no folder has so many entries")
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
    fn drop_replaced(&self) {
        if !self.has_aside.swap(false, Ordering::Relaxed) {
            return;
        }
        if let Err(error) = remove_aside(&self.path) {
            let path = self.path.display();
            tracing::warn!(%path, %error, "the run that was replaced could not be removed");
        }
    }

    /// Makes the folder anew if it was removed, and the configuration alone if that was removed.
    fn renew(&self) {
        let mut lock = self.lock();
        let resolved = self.path.join(RESOLVED);
        let is_whole = lock.is_in_place() && resolved.exists();
        if is_whole || self.has_lost.load(Ordering::Relaxed) {
            return;
        }
        if lock.is_in_place() {
            let path = file(&resolved);
            match write_regular(&resolved, self.resolved.as_bytes()) {
                Ok(()) => tracing::warn!(%path, "the file was removed: it is made anew"),
                Err(error) => {
                    self.has_lost.store(true, Ordering::Relaxed);
                    tracing::error!(%path, %error, "the file is gone and cannot be made anew");
                }
            }
            return;
        }
        let renewed = fs::create_dir_all(&self.path)
            .and_then(|()| write_regular(&self.path.join(RESOLVED), self.resolved.as_bytes()))
            .map_err(|source| Error::OutputDir {
                path: self.path.clone(),
                source,
            })
            .and_then(|()| self::lock(&self.path));
        let path = self.path.display();
        match renewed {
            Ok(renewed) => {
                *lock = renewed;
                tracing::warn!(%path, "the output folder was removed: it is made anew");
            }
            Err(error) => {
                self.has_lost.store(true, Ordering::Relaxed);
                let error = crate::chain(&error);
                tracing::error!(%path, error, "the output folder is gone and cannot be made anew");
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, HeldFile> {
        self.lock.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Callback for Arc<RunFolder> {
    fn on_step(&mut self, _: &StepReport) {
        self.renew();
    }

    fn on_save(&mut self, _: &Path) {
        self.drop_replaced();
    }
}

impl Start {
    fn of(args: &CheckedArguments, folder: &Path) -> Self {
        let from = args.resume_from_checkpoint.as_deref();
        let overwrites = args.overwrite_output_dir;
        match from.filter(|from| !args.finetune && is_of(from, folder)) {
            Some(_) => Self::GoesOn { overwrites },
            None if overwrites => Self::Replaces,
            None => Self::Fresh,
        }
    }

    /// Refuses a folder with a run, or with an adapter of no run, that this run neither goes on
    /// with nor may replace.
    fn check(self, folder: &Path, adapter: Option<&str>) -> Result<()> {
        if let Some(name) = adapter {
            let path = folder.join(ADAPTER);
            let is_of_run = || {
                let runs = [folder.to_owned(), folder.join(ASIDE)];
                runs.iter().any(|run| has_trained_adapter(run))
            };
            if has_lora(&path, name)? && !matches!(self, Self::GoesOn { .. }) && !is_of_run() {
                return Err(Error::AdapterExists { path });
            }
        }
        let found = Found::look(folder)?;
        if self != Self::Fresh || !(found.is_run() || found.aside.is_some()) {
            return Ok(());
        }
        let what = match found.newest_step {
            Some(step) => format!("checkpoints up to step {step}"),
            None if found.has_metrics => format!("{METRICS_FILE}, and no checkpoint"),
            None => "it has recorded nothing".to_owned(),
        };
        Err(Error::RunExists {
            folder: folder.to_owned(),
            found: what,
            has_checkpoint: found.newest_step.is_some(),
            aside: found.aside.filter(|_| found.newest_step.is_none()),
        })
    }
}

impl Found {
    fn look(folder: &Path) -> Result<Self> {
        let metrics = fs::metadata(folder.join(METRICS_FILE));
        let aside = folder.join(ASIDE);
        let has_run = |aside: &PathBuf| run_in(aside, false).is_ok_and(|run| !run.is_empty());
        Ok(Self {
            newest_step: Store::in_output_dir(folder).steps()?.last().copied(),
            has_metrics: metrics.is_ok_and(|metrics| metrics.len() > 0),
            aside: Some(aside).filter(has_run),
        })
    }

    /// Whether there is a run that has left something.
    fn is_run(&self) -> bool {
        self.newest_step.is_some() || self.has_metrics
    }
}

/// The name of the adapter that a run trains.
fn adapter_of(args: &CheckedArguments) -> Option<&str> {
    args.lora_config
        .as_ref()
        .map(|_| args.adapter_name.as_str())
}

/// Whether the run of a folder has trained an adapter, as its checkpoints tell.
fn has_trained_adapter(folder: &Path) -> bool {
    let store = Store::in_output_dir(folder);
    let steps = store.steps().unwrap_or_default();
    let mut steps = steps.into_iter().map(|step| store.path_of(step));
    steps.any(|step| step.join(ADAPTER_CONFIG).is_file())
}

/// Whether `resume_from_checkpoint` names a checkpoint of the run in a folder.
fn is_of(from: &str, folder: &Path) -> bool {
    if matches!(from, "auto" | "latest") {
        return true;
    }
    // A path that leads nowhere gets its own error later, which says more.
    let Ok(from) = Path::new(from).canonicalize() else {
        return true;
    };
    let is_inside = |folder: PathBuf| from == folder || from.starts_with(folder.join(CHECKPOINTS));
    folder.canonicalize().is_ok_and(is_inside)
}

/// Folders that a run has made, innermost first. Those that are still empty at its end are removed.
#[derive(Debug)]
struct MadeFolders(Vec<PathBuf>);

impl MadeFolders {
    /// Makes a folder and those above it.
    fn make(path: &Path) -> io::Result<Self> {
        let missing = path
            .ancestors()
            .take_while(|path| !path.as_os_str().is_empty() && !path.exists());
        let made = Self(missing.map(ToOwned::to_owned).collect());
        fs::create_dir_all(path)?;
        Ok(made)
    }
}

impl Drop for MadeFolders {
    fn drop(&mut self) {
        self.0.iter().for_each(|path| remove_if_empty(path));
    }
}

/// Refuses a path with a link that leads nowhere.
fn check_link(path: &Path) -> Result<()> {
    let entry = path
        .ancestors()
        .find(|path| path.symlink_metadata().is_ok());
    match entry {
        Some(entry) if entry.is_symlink() && !entry.exists() => {
            let to = fs::read_link(entry).unwrap_or_default();
            let reason = format!("it is a link to {}, and nothing is there", file(&to));
            Err(Error::OutputDir {
                path: entry.to_owned(),
                source: io::Error::new(io::ErrorKind::NotFound, reason),
            })
        }
        _ => Ok(()),
    }
}

/// Checks that the output folder can be made, without making it.
fn check_place(output_dir: &Path) -> Result<()> {
    let refused = |path: &Path, source| Error::OutputDir {
        path: path.to_owned(),
        source,
    };
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
        Some((path, found)) if found.permissions().readonly() => {
            Err(refused(path, io::ErrorKind::PermissionDenied.into()))
        }
        _ => Ok(()),
    }
}

/// Checks that entries under the names of a run's files and folders can be a run's.
fn check_names(folder: &Path) -> Result<()> {
    let refused = |path: PathBuf, source| Error::OutputDir { path, source };
    for name in FILES {
        let path = folder.join(name);
        match merak_ckpt::open_regular(&path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                return Err(refused(path, error));
            }
            _ => {}
        }
    }
    for name in [CHECKPOINTS, ASIDE, MOVING, REMOVED] {
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

/// Takes the lock of a folder.
fn lock(folder: &Path) -> Result<HeldFile> {
    let process = std::process::id();
    let process = match sysinfo::System::host_name() {
        Ok(host) => format!("{process} on {host}"),
        Err(_) => process.to_string(),
    };
    HeldFile::take(&folder.join(LOCK), &process).map_err(|error| not_held(folder, error))
}

/// The error of a lock that cannot be taken.
fn not_held(folder: &Path, error: CkptError) -> Error {
    match error {
        CkptError::InUse { path, holder } => Error::RunInUse {
            folder: path,
            holder,
        },
        CkptError::Io { source, .. } => Error::OutputDir {
            path: folder.to_owned(),
            source,
        },
        other => other.into(),
    }
}

/// Finishes what a crash has interrupted.
fn recover(folder: &Path) -> io::Result<()> {
    let (moving, removed) = (folder.join(MOVING), folder.join(REMOVED));
    if moving.is_dir() {
        let has_others =
            folder.join(CHECKPOINTS).is_dir() && !moving.join(CHECKPOINTS).is_symlink();
        move_run(&moving, folder, run_in(&moving, has_others)?, true)?;
        fs::remove_dir(&moving)?;
        let path = folder.display();
        tracing::warn!(%path, "a run that was set aside is back in its place");
    }
    if removed.is_dir() {
        fs::remove_dir_all(&removed)?;
    }
    Ok(())
}

/// Moves the run of a folder aside, with its adapter or without.
fn set_aside(folder: &Path, aside: &Path, has_adapter: bool) -> io::Result<()> {
    let moving = folder.join(MOVING);
    fs::create_dir(&moving)?;
    let run = run_in(folder, has_other_checkpoints(folder)?)?;
    move_run(folder, &moving, run, has_adapter)?;
    fs::rename(moving, aside)
}

/// Moves the entries of a run, and removes what lies in their new places.
fn move_run(from: &Path, to: &Path, run: Vec<PathBuf>, has_adapter: bool) -> io::Result<()> {
    for entry in run {
        if entry == Path::new(ADAPTER) && !has_adapter {
            continue;
        }
        let there = to.join(&entry);
        remove_entry(&there)?;
        if let Some(parent) = there.parent() {
            fs::create_dir_all(parent)?;
        }
        fs::rename(from.join(entry), there)?;
    }
    remove_if_empty(&from.join(CHECKPOINTS));
    Ok(())
}

/// Removes the run that was set aside.
fn remove_aside(folder: &Path) -> io::Result<()> {
    let removed = folder.join(REMOVED);
    let checkpoints = folder.join(ASIDE).join(CHECKPOINTS);
    if checkpoints.is_symlink()
        && let Ok(path) = checkpoints.canonicalize()
    {
        let path = file(&path);
        tracing::warn!(%path, "the checkpoints of the run that was replaced lie behind a link, and stay there");
    }
    fs::rename(folder.join(ASIDE), &removed)?;
    fs::remove_dir_all(removed)
}

/// Removes what a run has left, with its adapter or without.
fn remove_run(folder: &Path, has_adapter: bool) -> io::Result<()> {
    for entry in run_in(folder, true)? {
        if entry != Path::new(ADAPTER) || has_adapter {
            remove_entry(&folder.join(entry))?;
        }
    }
    remove_if_empty(&folder.join(CHECKPOINTS));
    Ok(())
}

fn remove_entry(path: &Path) -> io::Result<()> {
    match path.symlink_metadata() {
        Ok(found) if found.is_dir() => fs::remove_dir_all(path),
        Ok(_) => fs::remove_file(path),
        Err(_) => Ok(()),
    }
}

/// Removes a folder if it is empty.
fn remove_if_empty(folder: &Path) {
    // Fails where it is not empty.
    let _ = fs::remove_dir(folder);
}

/// Whether files of others lie among the checkpoints. Behind a link they do not matter, since the
/// link alone is moved.
fn has_other_checkpoints(folder: &Path) -> io::Result<bool> {
    let store = Store::in_output_dir(folder);
    let (_, others) = store.entries().map_err(io::Error::other)?;
    Ok(!others.is_empty() && !store.folder().is_symlink())
}

/// The paths of a run's entries in a folder. The folder of checkpoints is one of them, or with
/// `one_by_one` each of the run's checkpoints.
fn run_in(folder: &Path, one_by_one: bool) -> io::Result<Vec<PathBuf>> {
    let mut paths: Vec<_> = FILES
        .into_iter()
        .chain([ADAPTER])
        .map(PathBuf::from)
        .collect();
    if one_by_one {
        let (own, _) = Store::in_output_dir(folder)
            .entries()
            .map_err(io::Error::other)?;
        let own = own.into_iter();
        paths.extend(own.map(|name| Path::new(CHECKPOINTS).join(name)));
    } else {
        paths.push(CHECKPOINTS.into());
    }
    paths.retain(|path| folder.join(path).symlink_metadata().is_ok());
    Ok(paths)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::MerakArguments;
    use merak_ckpt::Header;

    fn args(folder: &Path, change: impl FnOnce(&mut MerakArguments)) -> CheckedArguments {
        let mut args = MerakArguments {
            output_dir: Some(folder.to_owned()),
            ..MerakArguments::default()
        };
        change(&mut args);
        args.check().expect("legal arguments")
    }

    fn replacing(folder: &Path) -> CheckedArguments {
        args(folder, |args| args.overwrite_output_dir = true)
    }

    fn resuming(folder: &Path, from: &str) -> CheckedArguments {
        args(folder, |args| {
            args.resume_from_checkpoint = Some(from.to_owned());
        })
    }

    fn take(args: &CheckedArguments) -> Result<Arc<RunFolder>> {
        RunFolder::take(args, "tp = 1\n".to_owned())
    }

    /// Leaves a run of `step` steps.
    fn run(folder: &Path, step: u64) {
        fs::create_dir_all(folder).unwrap();
        fs::write(folder.join(METRICS_FILE), format!("{{\"step\":{step}}}\n")).unwrap();
        let draft = Store::in_output_dir(folder).begin(step).unwrap();
        draft.commit(Vec::new(), Header::default(), &[]).unwrap();
    }

    fn steps(folder: &Path) -> Vec<u64> {
        Store::in_output_dir(folder).steps().unwrap()
    }

    fn names(folder: &Path) -> Vec<String> {
        let entries = fs::read_dir(folder).unwrap();
        let name =
            |entry: io::Result<fs::DirEntry>| entry.unwrap().file_name().into_string().unwrap();
        let mut names: Vec<_> = entries.map(name).collect();
        names.sort();
        names
    }

    #[test]
    fn a_folder_with_other_files_is_no_run_and_one_with_a_run_is_refused_with_the_ways_on() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("run");
        let fresh = args(&path, |_| ());
        RunFolder::check(&fresh).unwrap();
        assert!(!path.exists(), "looking makes no folder");
        fs::create_dir(&path).unwrap();
        fs::write(path.join("notes.txt"), "mine").unwrap();
        fs::write(path.join(RESOLVED), "tp = 1\n").unwrap();
        fs::write(path.join(METRICS_FILE), "").unwrap();
        take(&fresh).unwrap().begin(None).unwrap();
        run(&path, 7);
        let refused = take(&fresh).unwrap_err();
        assert!(refused.is_user_error());
        let text = |error: &Error| {
            let folder = format!("{}/", folder.path().display());
            error.to_string().replace(&folder, "")
        };
        insta::assert_snapshot!(text(&refused), @r#"run, which "output_dir" names, has a run already (checkpoints up to step 7): go on with it by --resume auto, replace it by --overwrite_output_dir, or name another folder"#);
        fs::remove_dir_all(path.join(CHECKPOINTS)).unwrap();
        insta::assert_snapshot!(text(&take(&fresh).unwrap_err()), @r#"run, which "output_dir" names, has a run already (metrics.jsonl, and no checkpoint): keep it aside and begin anew by --resume auto, replace it by --overwrite_output_dir, or name another folder"#);
        // It can resume from its own checkpoints, not from those of others.
        run(&path, 7);
        let other = folder.path().join("other");
        run(&other, 9);
        for (from, goes_on) in [
            ("auto".to_owned(), true),
            ("latest".to_owned(), true),
            (path.display().to_string(), true),
            (
                format!("{}/checkpoints/step-00000007", path.display()),
                true,
            ),
            (other.display().to_string(), false),
        ] {
            let outcome = take(&resuming(&path, &from));
            assert_eq!(outcome.is_ok(), goes_on, "{from}");
        }
        let tuned = args(&path, |args| {
            args.resume_from_checkpoint = Some("latest".to_owned());
            args.finetune = true;
        });
        assert!(
            take(&tuned).is_err(),
            "a run that starts at step 0 is another run"
        );
    }

    #[test]
    fn the_replaced_run_lies_aside_until_the_first_save() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path();
        run(path, 7);
        fs::write(path.join("notes.txt"), "mine").unwrap();
        let mut new = take(&replacing(path)).unwrap();
        assert_eq!(steps(path), [7], "nothing moves before the run begins");
        new.begin(None).unwrap();
        let aside = new.replaced().expect("it lies aside");
        assert_eq!((steps(path), steps(&aside)), (vec![], vec![7]));
        assert_eq!(names(&aside), ["checkpoints", METRICS_FILE]);
        assert_eq!(names(path), [".lock", RESOLVED, "notes.txt", ASIDE]);
        run(path, 1);
        new.on_save(Path::new("step"));
        assert_eq!(new.replaced(), None);
        drop(new);
        assert_eq!(
            names(path),
            ["checkpoints", RESOLVED, METRICS_FILE, "notes.txt"]
        );
        assert_eq!(steps(path), [1]);
    }

    #[test]
    fn a_crash_before_the_first_save_loses_nothing_and_the_next_start_knows() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path();
        run(path, 7);
        let new = take(&replacing(path)).unwrap();
        new.begin(None).unwrap();
        drop(new);
        fs::write(path.join(METRICS_FILE), "{\"step\":1}\n").unwrap();
        let refused = take(&args(path, |_| ())).unwrap_err().to_string();
        assert!(
            refused.contains("replaced-run until there is a checkpoint"),
            "{refused}"
        );
        // Once more: the run that saved nothing goes, the one before it stays.
        let again = take(&replacing(path)).unwrap();
        again.begin(None).unwrap();
        assert_eq!(steps(&again.replaced().unwrap()), [7]);
        assert!(!path.join(METRICS_FILE).exists());
        drop(again);
        // A crash between the first save and the removal.
        run(path, 2);
        let next = take(&resuming(path, "auto")).unwrap();
        next.begin(Some(2)).unwrap();
        assert_eq!((next.replaced(), steps(path)), (None, vec![2]));
        assert!(!path.join(ASIDE).exists());
    }

    #[test]
    fn a_crash_while_a_run_is_set_aside_puts_it_back() {
        for moved in 0..=2 {
            let folder = tempfile::tempdir().unwrap();
            let path = folder.path();
            run(path, 7);
            fs::create_dir(path.join(MOVING)).unwrap();
            for entry in run_in(path, false).unwrap().iter().take(moved) {
                fs::rename(path.join(entry), path.join(MOVING).join(entry)).unwrap();
            }
            take(&resuming(path, "latest")).unwrap();
            assert_eq!(names(path), ["checkpoints", METRICS_FILE], "{moved}");
            assert_eq!(steps(path), [7]);
        }
        let folder = tempfile::tempdir().unwrap();
        run(&folder.path().join(REMOVED), 7);
        take(&args(folder.path(), |_| ())).unwrap();
        assert!(names(folder.path()).is_empty());
    }

    #[test]
    fn a_run_that_fails_before_its_first_record_puts_the_other_back() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path();
        run(path, 7);
        let new = take(&replacing(path)).unwrap();
        new.begin(None).unwrap();
        fs::create_dir_all(path.join(CHECKPOINTS).join(".tmp-step-00000001")).unwrap();
        new.withdraw();
        assert_eq!(new.replaced(), None);
        drop(new);
        assert_eq!(steps(path), [7]);
        let new = take(&replacing(path)).unwrap();
        new.begin(None).unwrap();
        fs::write(path.join(METRICS_FILE), "{\"step\":1}\n").unwrap();
        new.withdraw();
        assert_eq!(steps(&new.replaced().unwrap()), [7], "its records are kept");
    }

    #[test]
    fn a_run_that_saves_nothing_leaves_the_other_aside() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path();
        run(path, 7);
        let new = take(&args(path, |args| {
            args.overwrite_output_dir = true;
            args.save = Some(false);
        }));
        let new = new.unwrap();
        new.begin(None).unwrap();
        let aside = new.replaced().expect("it is set aside");
        drop(new);
        assert_eq!(steps(&aside), [7]);
    }

    #[test]
    fn auto_without_a_checkpoint_begins_anew_and_keeps_what_was_there() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path();
        let metrics = |step: u64| format!("{{\"step\":{step}}}\n");
        let auto = |from: Option<u64>| {
            let mut auto = take(&resuming(path, "auto")).unwrap();
            auto.begin(from).unwrap();
            auto.on_save(Path::new("step"));
        };
        // A run that has recorded nothing is not kept.
        fs::write(path.join(RESOLVED), "tp = 1\n").unwrap();
        auto(None);
        assert_eq!(names(path), [RESOLVED]);
        for (step, kept) in [(1, "earlier-run-1"), (2, "earlier-run-2")] {
            fs::write(path.join(METRICS_FILE), metrics(step)).unwrap();
            auto(None);
            let kept = fs::read_to_string(path.join(kept).join(METRICS_FILE));
            assert_eq!(kept.unwrap(), metrics(step));
            assert!(!path.join(METRICS_FILE).exists());
        }
        // Checkpoints that cannot be resumed from are kept as well.
        run(path, 7);
        auto(Some(7));
        assert_eq!(steps(path), [7]);
        auto(None);
        assert_eq!(
            (steps(path), steps(&path.join("earlier-run-3"))),
            (vec![], vec![7])
        );
        // And so is a run that another one was to replace.
        run(path, 8);
        take(&replacing(path)).unwrap().begin(None).unwrap();
        fs::write(path.join(METRICS_FILE), metrics(9)).unwrap();
        auto(None);
        assert_eq!(steps(&path.join("earlier-run-4")), [8]);
        assert!(path.join("earlier-run-5").join(METRICS_FILE).exists());
        assert!(!path.join(ASIDE).exists());
    }

    #[test]
    fn going_on_from_an_earlier_step_sets_the_later_ones_aside_with_the_records() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path();
        run(path, 5);
        run(path, 10);
        let on_from = |step: u64| {
            fs::write(path.join(RESOLVED), "tp = 9\n").unwrap();
            let from = Store::in_output_dir(path).path_of(step);
            let new = take(&resuming(path, from.to_str().unwrap())).unwrap();
            new.begin(Some(step)).unwrap();
        };
        on_from(10);
        assert!(!path.join("earlier-run-1").exists(), "nothing is later");
        on_from(5);
        let (store, kept) = (Store::in_output_dir(path), path.join("earlier-run-1"));
        assert_eq!((steps(path), steps(&kept)), (vec![5], vec![10]));
        assert_eq!(store.latest().unwrap(), Some(store.path_of(5)));
        let other = Store::in_output_dir(&kept);
        assert_eq!(other.latest().unwrap(), Some(other.path_of(10)));
        for folder in [path, &kept] {
            let records = fs::read_to_string(folder.join(METRICS_FILE)).unwrap();
            assert_eq!(records, "{\"step\":10}\n");
        }
        let config = |folder: &Path| fs::read_to_string(folder.join(RESOLVED)).unwrap();
        assert_eq!([config(path), config(&kept)], ["tp = 1\n", "tp = 9\n"]);
        // A crash on the way puts everything back.
        run(path, 20);
        fs::rename(&kept, path.join(MOVING)).unwrap();
        take(&resuming(path, "auto")).unwrap();
        assert_eq!(steps(path), [5, 10, 20]);
    }

    #[test]
    fn a_refused_run_leaves_no_empty_folder_and_a_link_to_nowhere_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a/run");
        drop(take(&args(&path, |_| ())).unwrap());
        assert!(names(folder.path()).is_empty());
        let new = take(&args(&path, |_| ())).unwrap();
        new.begin(None).unwrap();
        drop(new);
        assert_eq!(names(&path), [RESOLVED]);
        let link = folder.path().join("link");
        std::os::unix::fs::symlink("nowhere", &link).unwrap();
        for path in [link.clone(), link.join("run")] {
            let args = args(&path, |_| ());
            for refused in [
                take(&args).unwrap_err(),
                RunFolder::check(&args).unwrap_err(),
            ] {
                assert!(refused.is_user_error(), "{refused}");
                let text = crate::chain(&refused);
                assert!(
                    text.contains("a link to nowhere, and nothing is there"),
                    "{text}"
                );
            }
        }
    }

    #[test]
    fn auto_with_leave_to_overwrite_replaces_a_run_without_a_checkpoint() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path();
        fs::write(path.join(METRICS_FILE), "{\"step\":1}\n").unwrap();
        let both = args(path, |args| {
            args.resume_from_checkpoint = Some("auto".to_owned());
            args.overwrite_output_dir = true;
        });
        let mut auto = take(&both).unwrap();
        auto.begin(None).unwrap();
        assert!(auto.replaced().unwrap().join(METRICS_FILE).exists());
        auto.on_save(Path::new("step"));
        drop(auto);
        assert_eq!(names(path), [RESOLVED]);
    }

    #[test]
    fn what_others_have_among_the_checkpoints_stays_there() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path();
        run(path, 7);
        let (notes, draft) = (
            path.join("checkpoints/notes.txt"),
            path.join("checkpoints/.tmp-notes"),
        );
        fs::write(&notes, "mine").unwrap();
        fs::write(&draft, "mine").unwrap();
        let mut new = take(&replacing(path)).unwrap();
        new.begin(None).unwrap();
        assert_eq!(steps(&new.replaced().unwrap()), [7]);
        assert_eq!(names(&path.join(CHECKPOINTS)), [".tmp-notes", "notes.txt"]);
        // Puts the checkpoint back among the files of others.
        new.withdraw();
        assert_eq!(steps(path), [7]);
        new.begin(None).unwrap();
        run(path, 1);
        new.on_save(Path::new("step"));
        assert!(notes.exists() && draft.exists());
        assert_eq!(steps(path), [1]);
        assert!(!path.join(ASIDE).exists());
    }

    #[test]
    fn something_else_under_a_name_of_the_run_is_refused_and_stays() {
        let names = [
            "checkpoints",
            "checkpoints/step-00000003",
            "replaced-run/notes.txt",
            ".tmp-replaced-run",
            ".lock",
        ];
        for name in names {
            let folder = tempfile::tempdir().unwrap();
            let path = folder.path().join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(&path, "mine").unwrap();
            for args in [
                args(folder.path(), |_| ()),
                replacing(folder.path()),
                resuming(folder.path(), "auto"),
            ] {
                let refused = take(&args).unwrap_err();
                assert!(refused.is_user_error(), "{name}: {refused}");
                let refused = RunFolder::check(&args).unwrap_err();
                assert!(refused.to_string().contains(&name[..5]), "{refused}");
            }
            assert_eq!(fs::read_to_string(&path).unwrap(), "mine", "{name}");
        }
        for name in [RESOLVED, METRICS_FILE, "checkpoints/latest"] {
            let folder = tempfile::tempdir().unwrap();
            fs::create_dir_all(folder.path().join(name)).unwrap();
            let refused = take(&args(folder.path(), |_| ())).unwrap_err();
            assert!(refused.is_user_error(), "{name}: {refused}");
        }
    }

    #[test]
    fn an_adapter_of_no_run_is_neither_replaced_nor_set_aside() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path();
        let lora = folder.path().join("lora.json");
        let training = |name: &str, resume: Option<&str>| {
            args(path, |args| {
                args.lora_config = Some(crate::InputPath(lora.clone()));
                args.adapter_name = name.to_owned();
                args.resume_from_checkpoint = resume.map(ToOwned::to_owned);
                args.overwrite_output_dir = resume.is_none();
            })
        };
        let own = path.join(ADAPTER).join(ADAPTER_CONFIG);
        fs::create_dir(path.join(ADAPTER)).unwrap();
        fs::write(&own, "{}").unwrap();
        let refused = take(&training("default", None)).unwrap_err();
        let text = refused
            .to_string()
            .replace(&path.display().to_string(), "run");
        insta::assert_snapshot!(text, @r#"run/adapter has an adapter already, which no run of this folder has trained: move it away, or name another "output_dir" or "adapter_name""#);
        assert!(refused.is_user_error());
        take(&training("other", None)).unwrap();
        // A run without an adapter leaves it in place.
        run(path, 7);
        take(&replacing(path)).unwrap().begin(None).unwrap();
        assert!(own.exists());
        // `auto` keeps it aside instead of asking.
        take(&training("default", Some("auto")))
            .unwrap()
            .begin(None)
            .unwrap();
        assert!(
            path.join("earlier-run-2/adapter")
                .join(ADAPTER_CONFIG)
                .exists()
        );
        // An adapter that a run of the folder has trained moves with the run.
        run(path, 8);
        let step = Store::in_output_dir(path).path_of(8);
        fs::write(step.join(ADAPTER_CONFIG), "{}").unwrap();
        fs::create_dir(path.join(ADAPTER)).unwrap();
        fs::write(&own, "{}").unwrap();
        take(&training("default", None)).unwrap();
        let new = take(&replacing(path)).unwrap();
        new.begin(None).unwrap();
        assert!(new.replaced().unwrap().join(ADAPTER).exists() && !own.exists());
    }

    #[test]
    fn a_second_process_is_told_who_writes_the_folder() {
        let folder = tempfile::tempdir().unwrap();
        let first = take(&args(folder.path(), |_| ())).unwrap();
        // The writing process is reported before the run that is there.
        run(folder.path(), 1);
        let holder = format!("is in use by process {}", std::process::id());
        for second in [args(folder.path(), |_| ()), resuming(folder.path(), "auto")] {
            for refused in [
                take(&second).unwrap_err(),
                RunFolder::check(&second).unwrap_err(),
            ] {
                assert!(
                    refused.is_user_error() && refused.to_string().contains(&holder),
                    "{refused}"
                );
            }
        }
        drop(first);
        take(&resuming(folder.path(), "auto")).unwrap();
    }

    #[test]
    fn a_removed_folder_is_made_anew_and_held() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("run");
        let first = take(&args(&path, |_| ())).unwrap();
        first.begin(None).unwrap();
        fs::remove_dir_all(&path).unwrap();
        first.renew();
        assert_eq!(names(&path), [".lock", RESOLVED]);
        fs::remove_file(path.join(RESOLVED)).unwrap();
        first.renew();
        assert_eq!(names(&path), [".lock", RESOLVED]);
        assert!(matches!(
            take(&resuming(&path, "auto")),
            Err(Error::RunInUse { .. })
        ));
    }
}
