//! Which checkpoint a run goes on from, and whether it fits: decided from files and the plan alone,
//! so that every rank comes to the same answer.

mod check;
mod fresh;
mod warn;

pub(super) use check::check;
use check::check_sizes;
pub(super) use fresh::{Fresh, stored_name};
pub(super) use warn::{warn_of_checkpoint, warn_of_seeds};

use super::{LoadedCheckpoint, TrainerParts, run_length::RunLength};
use crate::{
    config::CheckedArguments,
    error::{Error, Result, ResumeError, chain},
    folder::{AUTO, Contents, OWN_CHECKPOINTS},
    plan::{BASE_NAME, Plan},
};
use merak_ckpt::{
    ADAPTER_CONFIG, Checkpoint, Error as CkptError, LoraConfig, Store,
    format::{CHECKPOINTS, parse_step_name},
};
use merak_mpu::names::{did_you_mean, nearest};
use merak_trace::models::ModelInfo;
use serde_json::Value;
use std::{
    collections::VecDeque,
    mem,
    path::{Path, PathBuf},
};

/// The checkpoints that `resume_from_checkpoint` names, best first, each opened when it is asked
/// for.
#[derive(Debug)]
pub(super) enum Candidates {
    /// A checkpoint that the user named; no other is tried.
    Named(Option<PathBuf>),
    /// `auto`: the one that `latest` names, then the others from the highest step down; damaged
    /// ones are passed over.
    Auto(VecDeque<PathBuf>),
}

impl Candidates {
    /// Warns of a file `latest` that cannot be followed and, as they come, of damaged checkpoints.
    pub(super) fn new(from: &str, output_dir: impl FnOnce() -> Result<PathBuf>) -> Result<Self> {
        Ok(match from {
            AUTO => Self::Auto(by_preference(&output_dir()?, true)?),
            "latest" => {
                let folder = output_dir()?;
                Self::named(&folder, Ok(folder.clone()))?
            }
            path => Self::named(Path::new(path), output_dir())?,
        })
    }

    /// The checkpoint at a path, or that of the run whose folder the path names; `output_dir` is
    /// the folder of the run that goes on.
    fn named(path: &Path, output_dir: Result<PathBuf>) -> Result<Self> {
        let mut now = path.to_owned();
        if let Ok(folder) = output_dir {
            let contents = Contents::of(&folder)?;
            if let Some(place) = contents.locate(path) {
                let is_run = place == folder || place.file_name() == Some(CHECKPOINTS.as_ref());
                let newest = by_preference(&folder, false)?.pop_front();
                now = newest.filter(|_| is_run).unwrap_or(place);
            }
        }
        Ok(Self::Named(Some(now)))
    }

    /// Whether damaged checkpoints are passed over.
    pub(super) fn is_auto(&self) -> bool {
        matches!(self, Self::Auto(_))
    }
}

impl Iterator for Candidates {
    type Item = Result<Checkpoint>;

    fn next(&mut self) -> Option<Self::Item> {
        match self {
            Self::Named(path) => {
                let path = path.take()?;
                Some(Checkpoint::open_weights(path).map_err(Into::into))
            }
            Self::Auto(paths) => loop {
                match Checkpoint::open(paths.pop_front()?) {
                    Ok(checkpoint) => return Some(Ok(checkpoint)),
                    Err(error) => pass_over(&error),
                }
            },
        }
    }
}

/// Warns that `auto` passes over a damaged checkpoint.
pub(super) fn pass_over(error: &dyn std::error::Error) {
    tracing::warn!(error = chain(error), "checkpoint passed over");
}

/// The checkpoints of a run's folder, best first. `tells` says whether to warn of a file `latest`
/// that cannot be followed.
fn by_preference(folder: &Path, tells: bool) -> Result<VecDeque<PathBuf>> {
    let run = Contents::of(folder)?;
    let steps = run.steps()?.into_iter().rev();
    let mut paths: VecDeque<_> = steps.map(|step| run.path_of(step)).collect();
    let reason = match run.latest() {
        Ok(Some(latest)) => {
            paths.retain(|path| *path != latest);
            paths.push_front(latest);
            return Ok(paths);
        }
        Ok(None) => "it is missing".to_owned(),
        Err(error) => error.to_string(),
    };
    if tells && !paths.is_empty() {
        let folder = run.place(CHECKPOINTS);
        let folder = folder.display();
        tracing::warn!(%folder, reason, "the file `latest` cannot be followed: the highest step counts");
    }
    Ok(paths)
}

/// The checkpoint that a run with these arguments goes on from, after every check that needs no
/// rank, each checksum included; `None` for a fresh start. Changes nothing.
///
/// # Errors
/// When a required checkpoint is missing; when it is damaged, of another model, or lacks a part
/// that no flag excuses.
pub(super) fn find(
    plan: &Plan,
    args: &CheckedArguments,
    parts: &TrainerParts,
) -> Result<Option<LoadedCheckpoint>> {
    if let Some(from) = &args.resume_from_checkpoint
        && let Some(found) =
            find_from(from, plan, args, parts).map_err(|error| with_words(error, from, args))?
    {
        return Ok(Some(found));
    }
    if let Some(folder) = &args.model.hf_dir {
        let release = as_loaded(Checkpoint::open_weights(&folder.0)?, args, parts)?;
        let state = check(&release, plan, args, parts)?;
        warn_of_checkpoint(plan, args, parts, state.as_ref(), &release);
    }
    Ok(None)
}

/// Checks what can be told of the checkpoint that a run must go on from before there are data and a
/// plan: that it is there, and that its header is of a model of these sizes. `auto` needs none.
///
/// # Errors
/// When it is missing, damaged as far as opening it tells, or of another model.
pub(super) fn expect(args: &CheckedArguments, model: &ModelInfo) -> Result<()> {
    let from = args.resume_from_checkpoint.as_deref();
    let Some(from) = from.filter(|from| *from != AUTO) else {
        return Ok(());
    };
    let opened = Candidates::new(from, || args.run_folder())?.next();
    match opened.transpose() {
        Ok(Some(checkpoint)) => check_sizes(&checkpoint, model),
        Ok(None) => Ok(()),
        Err(error) => Err(with_words(error, from, args)),
    }
}

/// Adds the nearest of these words, or of the checkpoints, to an error that a path does not exist;
/// where neither is near, the error's own hint stays.
pub(super) fn with_words(error: Error, from: &str, args: &CheckedArguments) -> Error {
    match error {
        Error::Checkpoint(mut reason) if !OWN_CHECKPOINTS.contains(&from) => {
            let CkptError::NotFound { hint, .. } = &mut *reason else {
                return Error::Checkpoint(reason);
            };
            let of_path = mem::take(hint);
            let word = nearest(from, OWN_CHECKPOINTS).map(Into::into);
            let known: Option<String> = word.or_else(|| nearest_step(Path::new(from), args));
            let hint = known.map_or(of_path, |name| did_you_mean(Some(&name)));
            Error::Resume(ResumeError::NoCheckpoint { reason, hint })
        }
        other => other,
    }
}

/// The checkpoint whose step is nearest to the one that a path, or a number, names: beside that
/// path, else in the folder of the run.
fn nearest_step(from: &Path, args: &CheckedArguments) -> Option<String> {
    let name = from.file_name()?.to_str()?;
    let step = parse_step_name(name).or_else(|| name.parse().ok())?;
    let closest = |steps: Vec<u64>| steps.into_iter().min_by_key(|other| other.abs_diff(step));
    let folder = from.parent().filter(|folder| *folder != Path::new(""));
    if let Some(store) = folder.map(Store::new)
        && let Some(step) = store.steps().ok().and_then(closest)
    {
        return Some(store.path_of(step).display().to_string());
    }
    let run = Contents::of(&args.run_folder().ok()?).ok()?;
    let path = run.path_of(closest(run.steps().ok()?)?);
    Some(run.named(&path).display().to_string())
}

fn find_from(
    from: &str,
    plan: &Plan,
    args: &CheckedArguments,
    parts: &TrainerParts,
) -> Result<Option<LoadedCheckpoint>> {
    let mut candidates = Candidates::new(from, || args.run_folder())?;
    while let Some(checkpoint) = candidates.next().transpose()? {
        let checkpoint = as_loaded(checkpoint, args, parts)?;
        let state = check(&checkpoint, plan, args, parts)?;
        let Some(damage) = checkpoint.verify().damage.into_iter().next() else {
            warn_of_checkpoint(plan, args, parts, state.as_ref(), &checkpoint);
            if state.is_some() && !args.finetune {
                adapter_base(plan, &checkpoint);
            }
            let mut length = RunLength::new(args, parts)?;
            if let Some(state) = state.as_ref().filter(|_| !args.finetune) {
                length.resume(args, state)?;
            }
            let mut found = LoadedCheckpoint::of(&checkpoint, state.as_ref(), plan, args, &length);
            if let Ok(folder) = args.run_folder() {
                found.path = Contents::of(&folder)?.named(&found.path);
            }
            return Ok(Some(found));
        };
        let error = CkptError::Damaged {
            path: checkpoint.path().to_owned(),
            damage: Box::new(damage),
            older: checkpoint.older()?.map(|older| older.path().to_owned()),
        };
        if !candidates.is_auto() {
            return Err(error.into());
        }
        pass_over(&error);
    }
    Ok(None)
}

/// A checkpoint as it is loaded. One of which only weights are taken has their averages in their
/// place where the parts say so, and a head of its own with `no_tie_modules`.
pub(super) fn as_loaded(
    mut checkpoint: Checkpoint,
    args: &CheckedArguments,
    parts: &TrainerParts,
) -> Result<Checkpoint> {
    let is_base = args.finetune || checkpoint.manifest().header.state.is_null();
    if is_base && parts.takes_averages {
        checkpoint = checkpoint.averaged()?;
    }
    if is_base && args.no_tie_modules {
        checkpoint = checkpoint.untied()?;
    }
    Ok(checkpoint)
}

/// The name of the rule of a run.
pub(super) fn rule_name<'a>(args: &CheckedArguments, parts: &'a TrainerParts) -> &'a str {
    let other = parts.rule.as_ref().map(|rule| rule.name());
    other.unwrap_or(args.optim.as_str())
}

/// The name of the base in a checkpoint's adapter, which a resumed run keeps: its weights are those
/// of the checkpoint. Warns where the run names another base.
pub(super) fn adapter_base(plan: &Plan, checkpoint: &Checkpoint) -> Option<Value> {
    let lora = plan.draft.lora.as_ref()?;
    let saved = LoraConfig::read(&checkpoint.path().join(ADAPTER_CONFIG)).ok()?;
    let saved = saved.to_json()[BASE_NAME].clone();
    let named = &lora.config.to_json()[BASE_NAME];
    if !named.is_null() && *named != saved {
        tracing::warn!(
            %named,
            %saved,
            "the adapter's base is that of the checkpoint; the one named here is not used"
        );
    }
    Some(saved)
}
