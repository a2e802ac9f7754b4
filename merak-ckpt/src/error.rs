//! What can go wrong with checkpoints and generation.

use crate::{
    Checksum, DType, Kind,
    words::{beyond, brief, file, sentence},
};
use merak_mpu::names::did_you_mean;
use std::fmt;
use std::io;
use std::path::{Path, PathBuf};

/// The result of an operation of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// An error of any type, as a [`TokenSource`](crate::TokenSource) returns it.
pub type BoxError = Box<dyn std::error::Error + Send + Sync>;

/// A failed save, load or generation.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The operating system refused something.
    #[error("cannot {action} {}", file(path))]
    Io {
        /// What was tried, as in `create`.
        action: &'static str,
        /// The file or folder.
        path: PathBuf,
        /// The operating system's reason.
        source: io::Error,
    },
    /// A tensor of another library can be neither read into nor written.
    #[error("tensor `{}` cannot be used", brief(name))]
    Tensor {
        /// The tensor's name.
        name: String,
        /// Why not.
        source: BoxError,
    },
    /// Nothing lies at the path.
    #[error("no checkpoint at {}: the path {}{hint}", file(path), if path.as_os_str().is_empty() { "is empty" } else { "does not exist" })]
    NotFound {
        /// The path.
        path: PathBuf,
        /// What [`path_hint`](fn@crate::path_hint) says about it.
        hint: String,
    },
    /// Something lies where a result was to go.
    #[error(
        "{} exists already: name another destination, or remove it",
        file(path)
    )]
    AlreadyExists {
        /// The path.
        path: PathBuf,
    },
    /// The destination of a new checkpoint has others, which it would take the place of.
    #[error(
        "{} has checkpoints already, the last of them {last}, and `latest` would name the new one instead: expected a destination without any{}; name another, or move these away",
        file(path), or_earlier(*takes_earlier)
    )]
    OtherCheckpoints {
        /// The folder of checkpoints.
        path: PathBuf,
        /// The name of the last one there.
        last: String,
        /// Whether earlier ones of the same run would do.
        takes_earlier: bool,
    },
    /// Another process is writing there.
    #[error(
        "{} is being written by {}: wait until that has ended",
        file(path),
        brief(holder)
    )]
    InUse {
        /// The folder.
        path: PathBuf,
        /// The process that writes it, as in `process 4711`.
        holder: String,
    },
    /// The path is neither a checkpoint nor a folder that holds some.
    #[error("no checkpoint at {}: expected a folder with a manifest.json, or one whose checkpoints folder has a `latest`{}", file(path), hint(found.as_deref()))]
    NotACheckpoint {
        /// The path.
        path: PathBuf,
        /// The newest complete checkpoint in it, where there is one that `latest` does not name.
        found: Option<PathBuf>,
    },
    /// A newer version of the crate wrote the checkpoint.
    #[error(
        "{} has format version {found}, this program reads versions up to {supported}",
        file(path)
    )]
    NewerVersion {
        /// The manifest.
        path: PathBuf,
        /// Its version.
        found: u64,
        /// The newest version that can be read.
        supported: u64,
    },
    /// A checkpoint is damaged.
    #[error("checkpoint {} is damaged: {damage}; {}", file(path), older_hint(older.as_deref()))]
    Damaged {
        /// The checkpoint's folder.
        path: PathBuf,
        /// What is wrong.
        damage: Box<Damage>,
        /// The newest complete older checkpoint.
        older: Option<PathBuf>,
    },
    /// A file of another program cannot be used.
    #[error("cannot read {}: {}", file(path), sentence(reason))]
    Foreign {
        /// The file or folder.
        path: PathBuf,
        /// Why not.
        reason: String,
    },
    /// A checkpoint without its adapter would not be the model that this was trained for.
    #[error(
        "cannot take the adapter out of {}: beside its factors the run trained {} (`modules_to_save` or `bias` in its adapter_config.json), whose values from before the checkpoint does not have: use the model that the run started from{}",
        file(path), listed(params), started_from(base.as_deref())
    )]
    TrainedWhole {
        /// The checkpoint's folder.
        path: PathBuf,
        /// The parameters that would keep their trained values.
        params: Vec<String>,
        /// The model that the run started from, by the adapter's description.
        base: Option<String>,
    },
    /// A checkpoint of this crate, or a folder of checkpoints, lies where a model's folder was to
    /// be read.
    #[error("cannot read {}: {what}", file(path))]
    OwnFormat {
        /// The folder.
        path: PathBuf,
        /// What it is, and how a model's folder is made of it.
        what: &'static str,
    },
    /// The shards that were to be committed do not make a checkpoint.
    #[error("the shards of step {step} make no complete checkpoint: {damage}")]
    IncompleteShards {
        /// The step to be saved.
        step: u64,
        /// What is wrong.
        damage: Box<Damage>,
    },
    /// The checkpoint has no such tensor.
    #[error("checkpoint {} has no {kind} `{}`{}", file(path), brief(name), did_you_mean(nearest.as_deref().map(brief).as_deref()))]
    MissingTensor {
        /// The checkpoint's folder.
        path: PathBuf,
        /// What was asked for.
        kind: Kind,
        /// The tensor's name.
        name: String,
        /// The most similar name among tensors of this kind.
        nearest: Option<String>,
    },
    /// A tensor has another shape than the model.
    #[error(
        "{kind} `{}` in {} has shape {found:?}, expected {expected:?}",
        brief(name),
        file(path)
    )]
    ShapeMismatch {
        /// The checkpoint's folder.
        path: PathBuf,
        /// What the tensor is.
        kind: Kind,
        /// Its name.
        name: String,
        /// The shape that was asked for.
        expected: Box<[usize]>,
        /// The shape in the checkpoint.
        found: Box<[usize]>,
    },
    /// A tensor has another element type than the model.
    #[error(
        "{kind} `{}` in {} has elements of type {found}, expected {expected}",
        brief(name),
        file(path)
    )]
    DTypeMismatch {
        /// The checkpoint's folder.
        path: PathBuf,
        /// What the tensor is.
        kind: Kind,
        /// Its name.
        name: String,
        /// The type that was asked for.
        expected: DType,
        /// The type in the checkpoint.
        found: DType,
    },
    /// A caller's buffer does not fit what it should hold.
    #[error(
        "the buffer of {kind} `{}` has {found} bytes, expected {expected}",
        brief(name)
    )]
    BufferLength {
        /// What the tensor is.
        kind: Kind,
        /// Its name.
        name: String,
        /// Bytes that the layout and range need.
        expected: usize,
        /// Bytes of the buffer.
        found: usize,
    },
    /// A layout contradicts itself.
    #[error("invalid layout of a tensor of shape {shape:?}: {reason}")]
    InvalidLayout {
        /// The global shape.
        shape: Box<[usize]>,
        /// What does not fit.
        reason: String,
    },
    /// A name cannot be stored.
    #[error("invalid {what} `{}`: {rule}", brief(name))]
    InvalidName {
        /// What was to be named.
        what: &'static str,
        /// The name.
        name: String,
        /// What names look like.
        rule: &'static str,
    },
    /// An option is out of range.
    #[error("`{key}` is {found}, expected {expected}")]
    InvalidOption {
        /// The option.
        key: &'static str,
        /// Its value.
        found: String,
        /// The legal values.
        expected: &'static str,
    },
    /// A prompt is empty.
    #[error("prompt {prompt} is empty, expected at least one token")]
    EmptyPrompt {
        /// Index of the prompt.
        prompt: u64,
    },
    /// A prompt leaves no room for a new token.
    #[error("prompt {prompt} has {length} tokens, expected 1 to {} so that there is room for a new one", seq_length.saturating_sub(1))]
    PromptTooLong {
        /// Index of the prompt.
        prompt: u64,
        /// Its tokens.
        length: usize,
        /// The longest sequence that the model takes, prompt and new tokens together.
        seq_length: usize,
    },
    /// The logits name no next token.
    #[error("the logits of prompt {prompt} at position {position} {reason}")]
    BadLogits {
        /// Index of the prompt.
        prompt: u64,
        /// Position of the token that was to be chosen.
        position: usize,
        /// What is wrong with them.
        reason: &'static str,
    },
    /// A token source answered for another number of sequences than it was asked about.
    #[error("the token source answered for {found} sequences, expected {expected}")]
    SourceLength {
        /// Sequences asked about.
        expected: usize,
        /// Answers.
        found: usize,
    },
    /// The model behind the generation failed.
    #[error("the model failed to give the next tokens")]
    Source(#[source] BoxError),
}

impl Error {
    /// A damaged checkpoint for which no older one was looked for.
    pub(crate) fn damaged(folder: &Path, damage: Damage) -> Self {
        Self::Damaged {
            path: folder.to_owned(),
            damage: Box::new(damage),
            older: None,
        }
    }

    /// Whether the command line or an input file is to blame (exit status 2), rather than the run.
    pub fn is_user_error(&self) -> bool {
        match self {
            Self::Io { source, .. } => {
                matches!(
                    source.kind(),
                    io::ErrorKind::NotFound
                        | io::ErrorKind::AlreadyExists
                        | io::ErrorKind::PermissionDenied
                        | io::ErrorKind::NotADirectory
                        | io::ErrorKind::IsADirectory
                        | io::ErrorKind::InvalidFilename
                        | io::ErrorKind::InvalidInput
                        | io::ErrorKind::ReadOnlyFilesystem
                )
            }
            Self::NotFound { .. }
            | Self::AlreadyExists { .. }
            | Self::OtherCheckpoints { .. }
            | Self::InUse { .. }
            | Self::NotACheckpoint { .. }
            | Self::NewerVersion { .. }
            | Self::Damaged { .. }
            | Self::Foreign { .. }
            | Self::TrainedWhole { .. }
            | Self::OwnFormat { .. }
            | Self::MissingTensor { .. }
            | Self::ShapeMismatch { .. }
            | Self::DTypeMismatch { .. }
            | Self::InvalidName { .. }
            | Self::InvalidOption { .. }
            | Self::EmptyPrompt { .. }
            | Self::PromptTooLong { .. } => true,
            Self::IncompleteShards { .. }
            | Self::BufferLength { .. }
            | Self::InvalidLayout { .. }
            | Self::Tensor { .. }
            | Self::BadLogits { .. }
            | Self::SourceLength { .. }
            | Self::Source(_) => false,
        }
    }
}

/// An error with its causes, down to the operating system's reason, as one line.
pub(crate) struct WithCauses<'a>(pub(crate) &'a dyn std::error::Error);

impl fmt::Display for WithCauses<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)?;
        let mut source = self.0.source();
        while let Some(cause) = source {
            write!(f, ": {cause}")?;
            source = cause.source();
        }
        Ok(())
    }
}

/// What is wrong with a checkpoint, and where.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Damage {
    /// Name of the file in the checkpoint's folder.
    pub file: String,
    /// The tensor, where it is one tensor's damage.
    pub tensor: Option<String>,
    /// What is wrong.
    pub problem: Problem,
}

impl Damage {
    /// Damage that belongs to no single tensor.
    pub(crate) fn of_file(file: &str, problem: Problem) -> Self {
        Self {
            file: file.to_owned(),
            tensor: None,
            problem,
        }
    }
}

impl fmt::Display for Damage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            file,
            tensor,
            problem,
        } = self;
        match tensor {
            Some(tensor) => write!(f, "{file}, tensor `{}`: {problem}", brief(tensor)),
            None => write!(f, "{file}: {problem}"),
        }
    }
}

/// A kind of damage.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Problem {
    /// A file is not there.
    #[error("the file is missing")]
    Missing,
    /// The base is not beside the checkpoint.
    #[error(
        "the parameters that the checkpoint does not train lay there, and the folder is gone: put it back beside the checkpoint, or take what `merak-ckpt reshard` writes where both are"
    )]
    NoBase,
    /// Another base lies where that of the checkpoint was.
    #[error(
        "the parameters that the checkpoint does not train lay there, and now others do: put the checkpoint's own base back (checksum {found}, expected {expected})"
    )]
    OtherBase {
        /// Checksum of the manifest of the checkpoint's base.
        expected: Checksum,
        /// Checksum of the manifest that is there.
        found: Checksum,
    },
    /// A folder, pipe or device lies where a file should.
    #[error("it is no regular file")]
    Irregular,
    /// A file cannot be read.
    #[error("the file cannot be read ({reason})")]
    Unreadable {
        /// The operating system's reason.
        reason: String,
    },
    /// A file has another length than the manifest says.
    #[error("the file has {found} bytes, expected {expected}")]
    Length {
        /// Bytes by the manifest.
        expected: u64,
        /// Bytes on disk.
        found: u64,
    },
    /// Bytes are not those that were written.
    #[error("checksum {found}, expected {expected}")]
    Checksum {
        /// By the manifest.
        expected: Checksum,
        /// Of the bytes on disk.
        found: Checksum,
    },
    /// The manifest or a header is not what the format asks for.
    #[error("{}", sentence(reason))]
    Malformed {
        /// What is wrong.
        reason: String,
    },
    /// A limit of the format is exceeded.
    #[error("{}", too_much(what, *found, *limit))]
    TooLarge {
        /// What there is too much of.
        what: &'static str,
        /// How much.
        found: u64,
        /// The most that the format allows.
        limit: u64,
    },
    /// Slices do not cover their tensor.
    #[error("the slices hold {found} of {expected} elements")]
    Incomplete {
        /// Elements of the tensor.
        expected: usize,
        /// Elements in slices.
        found: usize,
    },
    /// Two slices hold the same elements.
    #[error("slices {first} and {second} overlap")]
    Overlap {
        /// One slice.
        first: String,
        /// The other.
        second: String,
    },
}

/// The error of a file or folder of a form that is not read.
pub(crate) fn foreign(path: &Path, reason: impl Into<String>) -> Error {
    Error::Foreign {
        path: path.to_owned(),
        reason: reason.into(),
    }
}

/// Adds what was tried on which path to an I/O error.
pub(crate) fn io_error(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Error {
    move |source| Error::Io {
        action,
        path: path.to_owned(),
        source,
    }
}

/// The message of an exceeded limit: the amount found, and the limit.
fn too_much(what: &str, found: u64, limit: u64) -> String {
    match what {
        "bytes" => beyond(found, limit),
        what => format!("{found} {what}, the limit is {limit}"),
    }
}

/// The most names that a message lists.
const MAX_LISTED: usize = 3;

/// The first of some names, and how many more there are.
fn listed(names: &[String]) -> String {
    let shown = names.iter().take(MAX_LISTED);
    let shown: Vec<_> = shown.map(|name| format!("`{}`", brief(name))).collect();
    let shown = shown.join(", ");
    match names.len().saturating_sub(MAX_LISTED) {
        0 => shown,
        more => format!("{shown} and {more} more"),
    }
}

fn or_earlier(takes_earlier: bool) -> &'static str {
    if takes_earlier {
        ", or with earlier ones of the same run that `merak-ckpt reshard` wrote"
    } else {
        ""
    }
}

fn started_from(base: Option<&str>) -> String {
    base.map_or_else(String::new, |base| format!(", {}", brief(base)))
}

fn hint(found: Option<&Path>) -> String {
    found.map_or_else(String::new, |path| {
        format!("; the newest complete one is {}", file(path))
    })
}

fn older_hint(older: Option<&Path>) -> String {
    older.map_or_else(
        || "there is no complete older one".to_owned(),
        |path| format!("the newest complete older one is {}", file(path)),
    )
}
