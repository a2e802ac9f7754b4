//! How a run makes room for itself in a folder that has one.

use super::{
    ASIDE, Contents, METRICS_FILE, MOVING, RESOLVED, RunFolder,
    lock::lock,
    moves::{
        elsewhere, free_names, free_within, place_checkpoints, remove_aside, remove_run, set_aside,
    },
    start::{Found, Start, adapter_of, has_trained_adapter},
};
use crate::{
    config::CheckedArguments,
    error::{FolderError, Result},
};
use merak_ckpt::{ADAPTER_FOLDER, DraftFile, Store, words::file};
use std::{fmt::Write as _, fs, io, path::Path, sync::atomic::Ordering};

/// What becomes of the runs in a folder when the next one begins to write.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Room {
    /// Of the run that was replaced by the folder's own, and lies aside.
    replaced: Fate,
    /// Of the folder's own.
    own: Fate,
}

/// What becomes of a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fate {
    /// The run stays, or there is none.
    Stays,
    /// The run lies aside until the next one saves.
    Aside,
    /// The run is kept for good.
    Kept,
    /// Its checkpoints after this step are kept for good, with a copy of its records.
    LaterKept(u64),
    Removed,
}

impl Room {
    /// `from` is the step of the checkpoint to go on from; `has_adapter` says whether the folder's
    /// run has left an adapter.
    fn of(start: Start, from: Option<u64>, found: &Found, has_adapter: bool) -> Self {
        use Fate::{Aside, Kept, LaterKept, Removed, Stays};
        let has_saved = found.newest_step.is_some();
        let has_replaced = found.aside.is_some();
        let [mut replaced, mut own] = [Stays; 2];
        match (start, from) {
            (Start::Fresh, _) => {}
            (Start::GoesOn { overwrites: false }, None) => {
                if has_replaced {
                    replaced = Kept;
                }
                if found.is_run() || has_adapter {
                    own = Kept;
                }
            }
            (Start::GoesOn { overwrites: true }, None) | (Start::Replaces, _) => {
                // Left by a crash between a first save and the removal.
                if has_replaced && has_saved {
                    replaced = Removed;
                }
                if found.is_run() {
                    // A run that has saved nothing makes way for good; the run that it was to
                    // replace stays.
                    own = if has_replaced && !has_saved {
                        Removed
                    } else {
                        Aside
                    };
                }
            }
            (Start::GoesOn { .. }, Some(step)) => {
                // Left by a crash between a first save and the removal.
                if has_replaced {
                    replaced = Removed;
                }
                if found.newest_step.is_some_and(|newest| newest > step) {
                    own = LaterKept(step);
                }
            }
        }
        Self { replaced, own }
    }
}

/// The line about a run that is moved to a place.
fn told_move(fate: Fate, run: &str, place: &str) -> String {
    match fate {
        Fate::Aside => {
            format!("replaces  the run in {run}, which lies in {place} until the first checkpoint")
        }
        Fate::LaterKept(step) => {
            format!(
                "keeps     the checkpoints after step {step} and a copy of the metrics in {place}"
            )
        }
        Fate::Kept | Fate::Stays | Fate::Removed => {
            format!("keeps     the run in {run}, which has no checkpoint to go on from, as {place}")
        }
    }
}

impl RunFolder {
    /// What [`RunFolder::begin`] would do to the run that is in the folder, as lines to print.
    /// Changes nothing.
    ///
    /// # Errors
    /// When the folder cannot be read.
    pub fn foresee(args: &CheckedArguments, from: Option<u64>) -> Result<String> {
        let path = args.run_folder()?;
        let contents = Contents::of(&path)?;
        let found = Found::look(&path)?;
        let has_adapter = has_adapter_to_keep(&path, adapter_of(args).is_some());
        let room = Room::of(Start::of(args, &path), from, &found, has_adapter);
        let mut names = free_names(&path, &contents);
        let mut next = || names.next().unwrap_or_default();
        let (run, aside) = (file(&path), file(&path.join(ASIDE)));
        let mut text = String::new();
        if contents.back.is_some() {
            let _ = writeln!(
                text,
                "puts back the run in {run}, which a process that was killed had begun to move"
            );
        }
        if room.replaced == Fate::Kept {
            let kept = file(&path.join(next()));
            let _ = writeln!(text, "keeps     the run in {aside} as {kept}");
        }
        let name = match room.own {
            Fate::Stays => return Ok(text),
            Fate::Removed => {
                let _ = writeln!(
                    text,
                    "removes   the run in {run}, which has saved nothing; the one before it stays in {aside}"
                );
                return Ok(text);
            }
            Fate::Aside => ASIDE.to_owned(),
            Fate::Kept | Fate::LaterKept(_) => next(),
        };
        let moved = told_move(room.own, &run, &file(&path.join(&name)));
        let _ = writeln!(text, "{moved}");
        let there = elsewhere(&path).map_err(FolderError::output_dir(&path))?;
        if let Some(there) = there.filter(|_| found.newest_step.is_some()) {
            let within = file(&free_within(&there, &name, &contents));
            let _ = writeln!(
                text,
                "          its checkpoints lie in {within} then, and the new ones in {}",
                file(&there)
            );
        }
        Ok(text)
    }

    /// Whether there is a run in the folder, or one that was to be replaced; true where the folder
    /// cannot be read.
    pub fn has_run(args: &CheckedArguments) -> bool {
        let found = args.run_folder().and_then(|path| Found::look(&path));
        found.map_or(true, |found| found.is_run() || found.aside.is_some())
    }

    /// Keeps for good the records of a failed start that has saved nothing, in a folder that had no
    /// run before: the run may begin there again as it did. All else stays where it is.
    ///
    /// # Errors
    /// When another process writes the folder, or it cannot be changed.
    pub fn keep_records(args: &CheckedArguments) -> Result<()> {
        let path = args.run_folder()?;
        let found = Found::look(&path)?;
        if !found.has_metrics || found.newest_step.is_some() {
            return Ok(());
        }
        let _lock = lock(&path)?;
        keep_records(&path).map_err(FolderError::output_dir(&path))
    }

    pub(super) fn make_room(&self, from: Option<u64>) -> io::Result<()> {
        let trains_adapter = self.adapter.is_some();
        let has_adapter = has_adapter_to_keep(&self.path, trains_adapter);
        // An adapter stays where this run trains one: the first save replaces that of the same
        // name, and leaves others alone.
        let takes_adapter = !trains_adapter && has_trained_adapter(&self.path);
        let room = Room::of(self.start, from, &self.found()?, has_adapter);
        match room.replaced {
            Fate::Removed => remove_aside(&self.path)?,
            Fate::Kept => {
                let kept = self.path.join(next_earlier(&self.path)?);
                fs::rename(self.path.join(ASIDE), &kept)?;
                let path = file(&kept);
                tracing::warn!(%path, "the run that was to be replaced is kept there");
            }
            _ => {}
        }
        match room.own {
            Fate::Stays => {}
            Fate::Aside => set_aside(&self.path, &self.path.join(ASIDE), takes_adapter)?,
            Fate::Kept => {
                let kept = self.path.join(next_earlier(&self.path)?);
                set_aside(&self.path, &kept, has_adapter)?;
                tell_kept(&kept);
            }
            Fate::LaterKept(step) => self.keep_later(step)?,
            Fate::Removed => remove_run(&self.path, takes_adapter)?,
        }
        let has_aside = self.found()?.aside.is_some();
        self.has_aside.store(has_aside, Ordering::Relaxed);
        Ok(())
    }

    fn found(&self) -> io::Result<Found> {
        Found::look(&self.path).map_err(io::Error::other)
    }

    /// Sets aside the checkpoints after `step`, the adapter of the last of them, the configuration
    /// and a copy of the records.
    fn keep_later(&self, step: u64) -> io::Result<()> {
        let (moving, name) = (self.path.join(MOVING), next_earlier(&self.path)?);
        fs::create_dir(&moving)?;
        let adapter = self.adapter.is_some().then_some(ADAPTER_FOLDER);
        for name in adapter.into_iter().chain([RESOLVED]) {
            if self.path.join(name).exists() {
                fs::rename(self.path.join(name), moving.join(name))?;
            }
        }
        let metrics = self.path.join(METRICS_FILE);
        if metrics.exists() {
            // After a crash the copy is put back, so that it must be whole.
            let copy = DraftFile::place(&metrics)?;
            fs::write(&copy, merak_ckpt::read_regular(&metrics, u64::MAX)?)?;
            fs::File::open(&copy)?.sync_all()?;
            fs::rename(copy, moving.join(METRICS_FILE))?;
        }
        place_checkpoints(&self.path, &name)?;
        Store::in_output_dir(&self.path)
            .move_later(step, &Store::in_output_dir(&moving))
            .map_err(io::Error::other)?;
        let kept = self.path.join(name);
        fs::rename(moving, &kept)?;
        let path = file(&kept);
        tracing::warn!(
            %path,
            step,
            "the run goes on from an earlier step: its later checkpoints and a copy of its metrics are kept there"
        );
        Ok(())
    }
}

fn keep_records(folder: &Path) -> io::Result<()> {
    let kept = folder.join(next_earlier(folder)?);
    fs::create_dir(&kept)?;
    // A crash between the two leaves a configuration without records, which is no run.
    for name in [METRICS_FILE, RESOLVED] {
        match fs::rename(folder.join(name), kept.join(name)) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
    }
    tell_kept(&kept);
    Ok(())
}

fn tell_kept(kept: &Path) {
    let path = file(kept);
    tracing::warn!(
        %path,
        "no checkpoint to go on from: the run begins anew, and what was there is kept there"
    );
}

/// The first free name for a run that is kept.
fn next_earlier(folder: &Path) -> io::Result<String> {
    let contents = Contents::look(folder)?;
    let mut names = free_names(folder, &contents);
    Ok(names.next().expect("no folder has so many entries"))
}

/// Whether a folder has an adapter that goes with its run when that is kept.
fn has_adapter_to_keep(folder: &Path, trains_adapter: bool) -> bool {
    let lies_there = |contents: Contents| contents.place(ADAPTER_FOLDER).exists();
    (trains_adapter || has_trained_adapter(folder)) && Contents::of(folder).is_ok_and(lies_there)
}
