//! The folder of a run: who writes it, and what becomes of a run that is there already.
//!
//! ```text
//! OUTPUT_DIR/
//!   .lock                    the process that writes; gone when it ends
//!   checkpoints/ ..          the run
//!   replaced-run/            the run that it replaces, until its first save
//!   .tmp-replaced-run/       on the way there: what a crash leaves of it goes back
//!   .tmp-removed-run/        on the way out: what a crash leaves of it is removed
//! ```

use crate::{
    Callback, CheckedArguments, Error, Result, StepReport, metrics::METRICS_FILE, trainer::ADAPTER,
};
use merak_ckpt::{Error as CkptError, HeldFile, Store, format::CHECKPOINTS};
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

/// What a run writes; what else lies in its folder is somebody else's.
const ENTRIES: [&str; 4] = [RESOLVED, METRICS_FILE, CHECKPOINTS, ADAPTER];

/// Says which process writes.
const LOCK: &str = ".lock";

/// Where a run lies that another one replaces, until that one saves.
const ASIDE: &str = "replaced-run";

/// A run on its way there.
const MOVING: &str = ".tmp-replaced-run";

/// A run that is being removed.
const REMOVED: &str = ".tmp-removed-run";

/// The folder of a run, which one process at a time writes, and which holds one run at a time.
///
/// A run may write a folder without a run, or go on from a checkpoint of the folder's run. With
/// `overwrite_output_dir` it may begin where another run is, which is set aside and removed after
/// the first save.
#[derive(Debug)]
pub struct RunFolder {
    path: PathBuf,
    /// The content of `config.resolved.toml`.
    resolved: String,
    start: Start,
    trains_adapter: bool,
    lock: Mutex<HeldFile>,
    /// Whether this run has set another aside that is still there.
    has_aside: AtomicBool,
    has_lost: AtomicBool,
}

/// How a run takes its folder.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Start {
    /// There must be no run.
    Fresh,
    /// On a checkpoint of the run that is there, or afresh where it has none.
    GoesOn,
    /// In the place of the run that is there.
    Replaces,
}

/// What lies in a folder.
#[derive(Debug, Default)]
struct Found {
    newest_step: Option<u64>,
    has_metrics: bool,
    aside: Option<PathBuf>,
}

impl RunFolder {
    /// Checks what [`RunFolder::take`] would refuse, but for other processes. Changes nothing.
    ///
    /// # Errors
    /// [`Error::RunExists`], [`Error::MissingKey`] without `output_dir`; when the folder cannot be
    /// made or looked at.
    pub fn check(args: &CheckedArguments) -> Result<()> {
        let path = args.run_folder()?;
        check_place(&path)?;
        Start::of(args, &path).check(&path)
    }

    /// Takes the folder, making it where there is none, for a run whose configuration reads
    /// `resolved`. A run that is there stays as it is until [`RunFolder::begin`].
    ///
    /// # Errors
    /// [`Error::RunInUse`] where another process writes it, and as [`RunFolder::check`]; when the
    /// folder cannot be changed.
    pub fn take(args: &CheckedArguments, resolved: String) -> Result<Arc<Self>> {
        let path = args.run_folder()?;
        let failed = |source| Error::OutputDir {
            path: path.clone(),
            source,
        };
        fs::create_dir_all(&path).map_err(failed)?;
        let lock = lock(&path)?;
        recover(&path).map_err(failed)?;
        let start = Start::of(args, &path);
        start.check(&path)?;
        Ok(Arc::new(Self {
            resolved,
            start,
            trains_adapter: args.lora_config.is_some(),
            lock: Mutex::new(lock),
            has_aside: AtomicBool::new(false),
            has_lost: AtomicBool::new(false),
            path,
        }))
    }

    /// Begins to write: sets aside the run that is to be replaced, and writes the configuration.
    /// Whatever is read from that run has been read by then.
    ///
    /// # Errors
    /// When the folder cannot be changed.
    pub fn begin(&self) -> Result<()> {
        self.make_room()
            .and_then(|()| fs::write(self.path.join(RESOLVED), &self.resolved))
            .map_err(|source| Error::OutputDir {
                path: self.path.clone(),
                source,
            })
    }

    fn make_room(&self) -> io::Result<()> {
        let found = Found::look(&self.path).map_err(io::Error::other)?;
        // A crash between a first save and the removal.
        if found.aside.is_some() && found.newest_step.is_some() {
            remove_aside(&self.path)?;
        }
        let keeps_aside = found.aside.is_some() && found.newest_step.is_none();
        if self.start == Start::Replaces && found.is_run() {
            if keeps_aside {
                // A run that has saved nothing makes way for good; the one that it was to replace
                // stays.
                remove_entries(&self.path, self.trains_adapter)?;
            } else {
                set_aside(&self.path, self.trains_adapter)?;
            }
        }
        self.has_aside
            .store(self.path.join(ASIDE).is_dir(), Ordering::Relaxed);
        Ok(())
    }

    /// Where the run lies that this one replaces, as long as it does.
    pub fn replaced(&self) -> Option<PathBuf> {
        let aside = self.path.join(ASIDE);
        (self.has_aside.load(Ordering::Relaxed) && aside.is_dir()).then_some(aside)
    }

    /// Puts back the run that was to be replaced where this one has failed before it recorded
    /// anything.
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

    /// Makes the folder anew where somebody has removed it.
    fn renew(&self) {
        let mut lock = self.lock();
        if lock.is_in_place() || self.has_lost.load(Ordering::Relaxed) {
            return;
        }
        let renewed = fs::create_dir_all(&self.path)
            .and_then(|()| fs::write(self.path.join(RESOLVED), &self.resolved))
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
        match from.filter(|from| !args.finetune && is_of(from, folder)) {
            Some(_) => Self::GoesOn,
            None if args.overwrite_output_dir => Self::Replaces,
            None => Self::Fresh,
        }
    }

    /// Refuses a folder that has a run which this one neither goes on with nor replaces.
    fn check(self, folder: &Path) -> Result<()> {
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
            aside: found.aside.filter(|_| found.newest_step.is_none()),
        })
    }
}

impl Found {
    fn look(folder: &Path) -> Result<Self> {
        let metrics = fs::metadata(folder.join(METRICS_FILE));
        let aside = folder.join(ASIDE);
        Ok(Self {
            newest_step: Store::in_output_dir(folder).steps()?.last().copied(),
            has_metrics: metrics.is_ok_and(|metrics| metrics.len() > 0),
            aside: aside.is_dir().then_some(aside),
        })
    }

    /// Whether there is a run that has left something.
    fn is_run(&self) -> bool {
        self.newest_step.is_some() || self.has_metrics
    }
}

/// Whether `resume_from_checkpoint` names a checkpoint of the run in a folder.
fn is_of(from: &str, folder: &Path) -> bool {
    if matches!(from, "auto" | "latest") {
        return true;
    }
    // A path that leads nowhere is an error of its own, which says more.
    let Ok(from) = Path::new(from).canonicalize() else {
        return true;
    };
    let is_inside = |folder: PathBuf| from == folder || from.starts_with(folder.join(CHECKPOINTS));
    folder.canonicalize().is_ok_and(is_inside)
}

/// Checks that the output folder can be made, without making it.
fn check_place(output_dir: &Path) -> Result<()> {
    let refused = |path: &Path, source| Error::OutputDir {
        path: path.to_owned(),
        source,
    };
    // A name that no file system takes, or a folder above that nobody may look into.
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

/// Takes the lock of a folder.
fn lock(folder: &Path) -> Result<HeldFile> {
    let process = std::process::id();
    let holder = match sysinfo::System::host_name() {
        Ok(host) => format!("process {process} on {host}"),
        Err(_) => format!("process {process}"),
    };
    HeldFile::take(&folder.join(LOCK), &holder).map_err(|error| match error {
        CkptError::InUse { path, holder } => Error::RunInUse {
            folder: path,
            holder,
        },
        CkptError::Io { source, .. } => Error::OutputDir {
            path: folder.to_owned(),
            source,
        },
        other => other.into(),
    })
}

/// Finishes what a crash has interrupted.
fn recover(folder: &Path) -> io::Result<()> {
    let (moving, removed) = (folder.join(MOVING), folder.join(REMOVED));
    if moving.is_dir() {
        for entry in present(&moving) {
            remove_entry(&folder.join(entry))?;
            fs::rename(moving.join(entry), folder.join(entry))?;
        }
        fs::remove_dir(&moving)?;
        let path = folder.display();
        tracing::warn!(%path, "a run that was set aside is back in its place");
    }
    if removed.is_dir() {
        fs::remove_dir_all(&removed)?;
    }
    Ok(())
}

/// Moves the run of a folder aside.
fn set_aside(folder: &Path, trains_adapter: bool) -> io::Result<()> {
    let moving = folder.join(MOVING);
    fs::create_dir(&moving)?;
    for entry in making_way(folder, trains_adapter) {
        fs::rename(folder.join(entry), moving.join(entry))?;
    }
    fs::rename(moving, folder.join(ASIDE))
}

/// Removes the run that was set aside.
fn remove_aside(folder: &Path) -> io::Result<()> {
    let removed = folder.join(REMOVED);
    fs::rename(folder.join(ASIDE), &removed)?;
    fs::remove_dir_all(removed)
}

/// Removes what a run has left.
fn remove_entries(folder: &Path, trains_adapter: bool) -> io::Result<()> {
    making_way(folder, trains_adapter).try_for_each(|entry| remove_entry(&folder.join(entry)))
}

/// What there is of a run that makes way for another. An adapter stays where the other trains one:
/// the first save replaces that of the same name, and leaves others alone.
fn making_way(folder: &Path, trains_adapter: bool) -> impl Iterator<Item = &'static str> {
    present(folder).filter(move |entry| !trains_adapter || *entry != ADAPTER)
}

fn remove_entry(path: &Path) -> io::Result<()> {
    match path.symlink_metadata() {
        Ok(found) if found.is_dir() => fs::remove_dir_all(path),
        Ok(_) => fs::remove_file(path),
        Err(_) => Ok(()),
    }
}

/// What there is of a run in a folder.
fn present(folder: &Path) -> impl Iterator<Item = &'static str> {
    let is_there = |entry: &&str| folder.join(entry).symlink_metadata().is_ok();
    ENTRIES.into_iter().filter(is_there)
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

    /// Leaves a run of so many steps.
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
        take(&fresh).unwrap().begin().unwrap();
        run(&path, 7);
        let refused = take(&fresh).unwrap_err();
        assert!(refused.is_user_error());
        let text = |error: &Error| {
            let folder = format!("{}/", folder.path().display());
            error.to_string().replace(&folder, "")
        };
        insta::assert_snapshot!(text(&refused), @r#"run, which "output_dir" names, has a run already (checkpoints up to step 7): go on with it by --resume auto, replace it by --overwrite_output_dir, or name another folder"#);
        fs::remove_dir_all(path.join(CHECKPOINTS)).unwrap();
        insta::assert_snapshot!(text(&take(&fresh).unwrap_err()), @r#"run, which "output_dir" names, has a run already (metrics.jsonl, and no checkpoint): go on with it by --resume auto, replace it by --overwrite_output_dir, or name another folder"#);
        // Its own checkpoints are a way on, those of others are none.
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
        new.begin().unwrap();
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
        new.begin().unwrap();
        drop(new);
        fs::write(path.join(METRICS_FILE), "{\"step\":1}\n").unwrap();
        let refused = take(&args(path, |_| ())).unwrap_err().to_string();
        assert!(
            refused.contains("replaced-run until there is a checkpoint"),
            "{refused}"
        );
        // Once more: the run that saved nothing goes, the one before it stays.
        let again = take(&replacing(path)).unwrap();
        again.begin().unwrap();
        assert_eq!(steps(&again.replaced().unwrap()), [7]);
        assert!(!path.join(METRICS_FILE).exists());
        drop(again);
        // Going on does not take up the replaced run by mistake.
        let auto = take(&resuming(path, "auto")).unwrap();
        auto.begin().unwrap();
        assert_eq!(
            (steps(path), steps(&auto.replaced().unwrap())),
            (vec![], vec![7])
        );
        drop(auto);
        // A crash between the first save and the removal.
        run(path, 2);
        let next = take(&resuming(path, "auto")).unwrap();
        next.begin().unwrap();
        assert_eq!((next.replaced(), steps(path)), (None, vec![2]));
    }

    #[test]
    fn a_crash_while_a_run_is_set_aside_puts_it_back() {
        for moved in 0..=2 {
            let folder = tempfile::tempdir().unwrap();
            let path = folder.path();
            run(path, 7);
            fs::create_dir(path.join(MOVING)).unwrap();
            for entry in present(path).take(moved) {
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
        new.begin().unwrap();
        fs::create_dir_all(path.join(CHECKPOINTS).join(".tmp-step-00000001")).unwrap();
        new.withdraw();
        assert_eq!(new.replaced(), None);
        drop(new);
        assert_eq!(steps(path), [7]);
        let new = take(&replacing(path)).unwrap();
        new.begin().unwrap();
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
        new.begin().unwrap();
        let aside = new.replaced().expect("it is set aside");
        drop(new);
        assert_eq!(steps(&aside), [7]);
    }

    #[test]
    fn a_second_process_is_told_who_writes_the_folder() {
        let folder = tempfile::tempdir().unwrap();
        let first = take(&args(folder.path(), |_| ())).unwrap();
        let refused = take(&resuming(folder.path(), "auto")).unwrap_err();
        let holder = format!("is in use by process {}", std::process::id());
        assert!(
            refused.is_user_error() && refused.to_string().contains(&holder),
            "{refused}"
        );
        drop(first);
        take(&resuming(folder.path(), "auto")).unwrap();
    }

    #[test]
    fn a_removed_folder_is_made_anew_and_held() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("run");
        let first = take(&args(&path, |_| ())).unwrap();
        first.begin().unwrap();
        fs::remove_dir_all(&path).unwrap();
        first.renew();
        assert_eq!(names(&path), [".lock", RESOLVED]);
        assert!(matches!(
            take(&resuming(&path, "auto")),
            Err(Error::RunInUse { .. })
        ));
    }
}
