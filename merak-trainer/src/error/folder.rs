//! Errors of a run's folder.

use super::{
    Error,
    words::{replaced_run, resume_auto_advice},
};
use merak_ckpt::words::file;
use std::{
    io,
    path::{Path, PathBuf},
};

/// What is wrong with the folder of a run.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FolderError {
    /// A folder that has a run already.
    #[error(
        "{}, which \"output_dir\" names, has a run already ({found}): {}, replace it by --overwrite_output_dir, or name \
         another folder{}",
        file(folder), resume_auto_advice(*has_checkpoint), replaced_run(aside.as_deref())
    )]
    RunExists {
        /// The folder.
        folder: PathBuf,
        /// The signs of the run.
        found: String,
        /// Whether there is a checkpoint to go on from.
        has_checkpoint: bool,
        /// Where the run to be replaced lies, while this one has saved nothing.
        aside: Option<PathBuf>,
    },
    /// A folder whose files would be read as data.
    #[error(
        "{}, which {named_by} names, lies in {}, which \"{key}\" names, and its files would be read as data: name a \
         folder elsewhere",
        file(folder),
        file(data)
    )]
    InData {
        /// The folder that is written.
        folder: PathBuf,
        /// What names it.
        named_by: &'static str,
        /// The folder of the data.
        data: PathBuf,
        /// The key that names the data.
        key: &'static str,
    },
    /// An adapter where a run is to write its own.
    #[error(
        "{} has an adapter already, which no run of this folder has trained: move it away, or name another \
         \"output_dir\" or \"adapter_name\"",
        file(path)
    )]
    AdapterExists {
        /// The folder of the adapter.
        path: PathBuf,
    },
    /// A folder that another process writes.
    #[error(
        "{}, which \"output_dir\" names, is in use by {holder}: wait until that has ended, or name another folder",
        file(folder)
    )]
    RunInUse {
        /// The folder.
        folder: PathBuf,
        /// The process.
        holder: String,
    },
    /// A folder that is another one here than for the first rank.
    #[error(
        "{}, which \"output_dir\" names, is not shared: on host {host} it is not the folder that {holder} has taken for \
         rank 0: name it by its full path, on a file system that all hosts share",
        file(folder)
    )]
    NotShared {
        /// The folder.
        folder: PathBuf,
        /// The process of the first rank, as `process 4711 on n1`.
        holder: String,
        /// The name of this host.
        host: String,
    },
    /// A folder of event files that cannot be written.
    #[error("cannot write into {}, which \"logging_dir\" names", file(path))]
    LoggingDir {
        /// The folder, or what stands in its way.
        path: PathBuf,
        /// The reason.
        source: io::Error,
    },
    /// An output folder that cannot be written.
    #[error("cannot write into {}, which \"output_dir\" names", file(path))]
    OutputDir {
        /// The folder, or what stands in its way.
        path: PathBuf,
        /// The reason.
        source: io::Error,
    },
}

impl FolderError {
    /// Why an output folder cannot be written.
    pub(crate) fn output_dir(path: &Path) -> impl Fn(io::Error) -> Error + Copy {
        move |source| {
            Error::Folder(Self::OutputDir {
                path: path.to_owned(),
                source,
            })
        }
    }
}
