//! The entries of a run as they are moved, put back and removed.

use super::{
    ASIDE, Contents, EARLIER, FILES, MOVING, REMOVED,
    entries::{lies_within, run_in},
};
use merak_ckpt::{ADAPTER_FOLDER, DraftFile, Store, format::CHECKPOINTS, words::file};
use std::{
    fs, io,
    os::unix::fs::{MetadataExt, symlink},
    path::{Path, PathBuf},
};

/// Finishes what a crash has interrupted.
pub(super) fn recover(folder: &Path) -> io::Result<()> {
    if let Some(back) = Contents::look(folder)?.back {
        let moving = folder.join(MOVING);
        move_run(&moving, folder, back.entries, true)?;
        if let Some(within) = back.within {
            remove_if_empty(&within);
            fs::remove_file(moving.join(CHECKPOINTS))?;
        }
        fs::remove_dir(&moving)?;
        let path = folder.display();
        tracing::warn!(%path, "a run that was set aside is back in its place");
    }
    remove_removed(folder)?;
    for name in FILES {
        let draft = DraftFile::place(&folder.join(name))?;
        if draft.is_file() {
            fs::remove_file(draft)?;
        }
    }
    Ok(())
}

/// Where the checkpoints of a folder lie if a rename cannot take them out of it to where a run is
/// set aside, or would take the place along that was chosen for them: behind a link, or on another
/// mount.
pub(super) fn elsewhere(folder: &Path) -> io::Result<Option<PathBuf>> {
    let checkpoints = Contents::look(folder)?.place(CHECKPOINTS);
    if !checkpoints.is_dir()
        || (!checkpoints.is_symlink() && mount(&checkpoints)? == mount(folder)?)
    {
        return Ok(None);
    }
    checkpoints.canonicalize().map(Some)
}

/// The device of a folder and the mount that it is seen through. A rename works within both.
fn mount(folder: &Path) -> io::Result<(u64, u64)> {
    let device = fs::metadata(folder)?.dev();
    #[cfg(target_os = "linux")]
    let mount = {
        use rustix::fs::{AtFlags, CWD, StatxFlags, statx};
        statx(CWD, folder, AtFlags::empty(), StatxFlags::MNT_ID)?.stx_mnt_id
    };
    #[cfg(not(target_os = "linux"))]
    let mount = 0;
    Ok((device, mount))
}

/// The first free path for a run's checkpoints among those of another.
pub(super) fn free_within(there: &Path, name: &str, contents: &Contents) -> PathBuf {
    let leaving = contents.back.as_ref().and_then(|back| back.within.as_ref());
    let others = (2_u64..).map(|number| there.join(format!("{name}-{number}")));
    let mut paths = std::iter::once(there.join(name)).chain(others);
    let free = paths.find(|path| leaving == Some(path) || path.symlink_metadata().is_err());
    free.expect("no folder has so many entries")
}

/// Gives the run on its way out a folder for checkpoints among those of the output folder, where
/// these lie elsewhere: they cannot leave it then without a copy.
pub(super) fn place_checkpoints(folder: &Path, name: &str) -> io::Result<()> {
    let Some(there) = elsewhere(folder)? else {
        return Ok(());
    };
    let within = free_within(&there, name, &Contents::look(folder)?);
    symlink(&within, folder.join(MOVING).join(CHECKPOINTS))?;
    fs::create_dir(&within)?;
    let path = file(&within);
    tracing::warn!(%path, "the checkpoints set aside lie there, on the file system that has them");
    Ok(())
}

/// The free names for runs that are kept.
pub(super) fn free_names<'a>(
    folder: &'a Path,
    contents: &Contents,
) -> impl Iterator<Item = String> + use<'a> {
    let names = (1_u64..).map(|number| format!("{EARLIER}{number}"));
    let leaving = contents.back.as_ref().and_then(|back| back.within.clone());
    names.filter(move |name| {
        let is_free = |place: PathBuf| place.symlink_metadata().is_err();
        let is_leaving = || {
            leaving
                .as_ref()
                .is_some_and(|within| within.ends_with(name))
        };
        is_free(folder.join(name)) && (is_leaving() || is_free(folder.join(CHECKPOINTS).join(name)))
    })
}

/// Moves the run of a folder aside, with its adapter or without.
pub(super) fn set_aside(folder: &Path, aside: &Path, has_adapter: bool) -> io::Result<()> {
    let moving = folder.join(MOVING);
    fs::create_dir(&moving)?;
    let stay = elsewhere(folder)?.is_some();
    if stay && has_checkpoints(folder)? {
        let name = aside.file_name().unwrap_or_default().to_string_lossy();
        place_checkpoints(folder, &name)?;
    }
    let run = run_in(folder, stay || has_other_checkpoints(folder)?)?;
    move_run(folder, &moving, run, has_adapter)?;
    fs::rename(moving, aside)
}

/// Moves the entries of a run, and removes what lies in their new places.
fn move_run(from: &Path, to: &Path, run: Vec<PathBuf>, has_adapter: bool) -> io::Result<()> {
    for entry in run {
        if entry == Path::new(ADAPTER_FOLDER) && !has_adapter {
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
    fs::rename(folder.join(ASIDE), folder.join(REMOVED))?;
    remove_removed(folder)
}

/// Removes the run on its way out for good, with its folder among the checkpoints of the output
/// folder.
fn remove_removed(folder: &Path) -> io::Result<()> {
    let removed = folder.join(REMOVED);
    if let Ok(there) = fs::read_link(removed.join(CHECKPOINTS)) {
        if lies_within(&there, folder) {
            remove_entry(&there)?;
        } else if let Ok(path) = there.canonicalize() {
            let path = file(&path);
            tracing::warn!(%path, "the checkpoints of the run that was replaced lie behind a link, and stay there");
        }
    }
    remove_entry(&removed)
}

/// Removes what a run has left, with its adapter or without.
pub(super) fn remove_run(folder: &Path, has_adapter: bool) -> io::Result<()> {
    for entry in run_in(folder, true)? {
        if entry != Path::new(ADAPTER_FOLDER) || has_adapter {
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

/// Whether a run has entries among the checkpoints of a folder.
fn has_checkpoints(folder: &Path) -> io::Result<bool> {
    let entries = Store::in_output_dir(folder).entries();
    Ok(!entries.map_err(io::Error::other)?.0.is_empty())
}

/// Whether files of others lie among the checkpoints.
fn has_other_checkpoints(folder: &Path) -> io::Result<bool> {
    let entries = Store::in_output_dir(folder).entries();
    Ok(!entries.map_err(io::Error::other)?.1.is_empty())
}
