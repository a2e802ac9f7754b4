//! The entries of a run as they are moved, put back and removed.

use super::{ASIDE, EARLIER, FILES, MOVING, REMOVED};
use crate::trainer::ADAPTER;
use merak_ckpt::{Store, format::CHECKPOINTS, words::file};
use std::{
    fs, io,
    os::unix::fs::{MetadataExt, symlink},
    path::{Path, PathBuf},
};

/// Finishes what a crash has interrupted.
pub(super) fn recover(folder: &Path) -> io::Result<()> {
    let (moving, removed) = (folder.join(MOVING), folder.join(REMOVED));
    if moving.is_dir() {
        let link = moving.join(CHECKPOINTS);
        let within = fs::read_link(&link)
            .ok()
            .filter(|to| lies_within(to, folder));
        let has_others =
            folder.join(CHECKPOINTS).is_dir() && (within.is_some() || !link.is_symlink());
        move_run(&moving, folder, run_in(&moving, has_others)?, true)?;
        if let Some(within) = within {
            fs::remove_file(link)?;
            remove_if_empty(&within);
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

/// Gives the run on its way out a folder for checkpoints among those of the output folder, where
/// these lie behind a link or on another file system: they cannot leave it then without a copy.
pub(super) fn place_checkpoints(folder: &Path, name: &str) -> io::Result<()> {
    let checkpoints = folder.join(CHECKPOINTS);
    let device = |path: &Path| fs::metadata(path).map(|found| found.dev());
    if !checkpoints.is_symlink() && device(&checkpoints)? == device(folder)? {
        return Ok(());
    }
    let within = checkpoints.canonicalize()?.join(name);
    fs::create_dir(&within)?;
    symlink(within, folder.join(MOVING).join(CHECKPOINTS))
}

/// Whether a path is that of a folder among the checkpoints of an output folder.
fn lies_within(path: &Path, folder: &Path) -> bool {
    let checkpoints = folder.join(CHECKPOINTS).canonicalize();
    checkpoints.is_ok_and(|checkpoints| path.parent() == Some(&checkpoints))
}

/// The free names for runs that are kept.
pub(super) fn free_names(folder: &Path) -> impl Iterator<Item = String> {
    let names = (1_u64..).map(|number| format!("{EARLIER}{number}"));
    names.filter(move |name| {
        let mut places = [folder.join(name), folder.join(CHECKPOINTS).join(name)].into_iter();
        places.all(|place| place.symlink_metadata().is_err())
    })
}

/// Moves the run of a folder aside, with its adapter or without.
pub(super) fn set_aside(folder: &Path, aside: &Path, has_adapter: bool) -> io::Result<()> {
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
pub(super) fn remove_aside(folder: &Path) -> io::Result<()> {
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
pub(super) fn remove_run(folder: &Path, has_adapter: bool) -> io::Result<()> {
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
pub(super) fn remove_if_empty(folder: &Path) {
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
pub(super) fn run_in(folder: &Path, one_by_one: bool) -> io::Result<Vec<PathBuf>> {
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
