//! The entries of a run in its folder.

use super::{EVENTS, FILES};
use merak_ckpt::{ADAPTER_FOLDER, Store, format::CHECKPOINTS};
use std::{
    io,
    path::{Path, PathBuf},
};

/// The paths of a run's entries in a folder. The folder of checkpoints is one of them, or with
/// `one_by_one` each of the run's checkpoints.
pub(super) fn run_in(folder: &Path, one_by_one: bool) -> io::Result<Vec<PathBuf>> {
    let mut paths: Vec<_> = FILES
        .into_iter()
        .chain([EVENTS, ADAPTER_FOLDER])
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

/// Whether a path is that of a folder among the checkpoints of an output folder.
pub(super) fn lies_within(path: &Path, folder: &Path) -> bool {
    let checkpoints = folder.join(CHECKPOINTS).canonicalize();
    checkpoints.is_ok_and(|checkpoints| path.parent() == Some(&checkpoints))
}
