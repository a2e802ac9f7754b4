//! How a run takes its folder, and what it finds there.

use super::{ASIDE, Contents, EARLIER, METRICS_FILE, OWN_CHECKPOINTS, entries::run_in};
use crate::{
    config::CheckedArguments,
    error::{Error, FolderError, Result},
};
use merak_ckpt::{ADAPTER_CONFIG, ADAPTER_FOLDER, format::CHECKPOINTS, has_lora};
use std::{
    fs,
    path::{Path, PathBuf},
};

/// How a run takes its folder.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Start {
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

impl Start {
    pub(super) fn of(args: &CheckedArguments, folder: &Path) -> Self {
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
    pub(super) fn check(self, folder: &Path, adapter: Option<&str>) -> Result<()> {
        if let Some(name) = adapter {
            let path = folder.join(ADAPTER_FOLDER);
            let is_of_run = || {
                let runs = [folder.to_owned(), folder.join(ASIDE)];
                runs.iter().any(|run| has_trained_adapter(run))
            };
            if has_lora(&path, name)? && !matches!(self, Self::GoesOn { .. }) && !is_of_run() {
                return Err(Error::Folder(FolderError::AdapterExists { path }));
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
        Err(Error::Folder(FolderError::RunExists {
            folder: folder.to_owned(),
            found: what,
            has_checkpoint: found.newest_step.is_some(),
            aside: found.aside.filter(|_| found.newest_step.is_none()),
        }))
    }
}

/// The state of a folder, once what a crash has interrupted is put back.
#[derive(Debug, Default)]
pub(super) struct Found {
    pub(super) newest_step: Option<u64>,
    pub(super) has_metrics: bool,
    pub(super) aside: Option<PathBuf>,
}

impl Found {
    pub(super) fn look(folder: &Path) -> Result<Self> {
        let contents = Contents::of(folder)?;
        let metrics = fs::metadata(contents.place(METRICS_FILE));
        let aside = folder.join(ASIDE);
        let has_run = |aside: &PathBuf| run_in(aside, false).is_ok_and(|run| !run.is_empty());
        Ok(Self {
            newest_step: contents.steps()?.last().copied(),
            has_metrics: metrics.is_ok_and(|metrics| metrics.len() > 0),
            aside: Some(aside).filter(has_run),
        })
    }

    /// Whether there is a run that has left something.
    pub(super) fn is_run(&self) -> bool {
        self.newest_step.is_some() || self.has_metrics
    }
}

/// The name of the adapter that a run trains.
pub(super) fn adapter_of(args: &CheckedArguments) -> Option<&str> {
    args.lora_config
        .as_ref()
        .map(|_| args.adapter_name.0.as_str())
}

/// Whether the run of a folder has trained an adapter, as its checkpoints tell.
pub(super) fn has_trained_adapter(folder: &Path) -> bool {
    let Ok(contents) = Contents::of(folder) else {
        return false;
    };
    let steps = contents.steps().unwrap_or_default();
    let mut steps = steps.into_iter().map(|step| contents.path_of(step));
    steps.any(|step| step.join(ADAPTER_CONFIG).is_file())
}

/// Whether `resume_from_checkpoint` names a checkpoint of the run in a folder.
fn is_of(from: &str, folder: &Path) -> bool {
    if OWN_CHECKPOINTS.contains(&from) {
        return true;
    }
    // A path that leads nowhere gets its own error later, which says more.
    let Ok(from) = Path::new(from).canonicalize() else {
        return true;
    };
    // Checkpoints may lie elsewhere, behind a link, and among them those of other runs.
    let is_own = |entry: &Path| {
        let entry = entry.to_string_lossy();
        !(entry.starts_with(EARLIER) || entry.starts_with(ASIDE))
    };
    let is_inside = |folder: PathBuf| from.strip_prefix(folder).is_ok_and(is_own);
    let contents = Contents::of(folder);
    let checkpoints = contents.map_or_else(
        |_| folder.join(CHECKPOINTS),
        |found| found.place(CHECKPOINTS),
    );
    let checkpoints = checkpoints.canonicalize();
    folder.canonicalize().is_ok_and(|folder| from == folder) || checkpoints.is_ok_and(is_inside)
}
