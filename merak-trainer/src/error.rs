//! Everything that can go wrong in this crate.

mod config;
mod data;
mod fault;
mod folder;
mod plan;
mod resume;
mod words;

pub(crate) use self::words::NO_LENGTH;
use self::words::{
    at_scale, last_of, of_a_split, or_scale, sides_of, stages_of, with_key_and_place,
};
pub use self::{
    config::ConfigError, data::DataError, folder::FolderError, plan::PlanError,
    resume::ResumeError, words::StepPart,
};
use merak_ckpt::{
    path_hint,
    words::{brief, file, sentence},
};
use merak_pipe::Action;
use std::{
    io,
    path::{Path, PathBuf},
};

/// The result of this crate's functions.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Why a run could not start or go on.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// What is wrong with a configuration, whatever the model and the data.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// Why a model cannot be planned as the arguments say.
    #[error(transparent)]
    Plan(#[from] PlanError),
    /// A schedule that does not fit the microbatches or stages.
    #[error(transparent)]
    Schedule(Box<merak_pipe::Error>),
    /// An optimizer or learning-rate setting that is not legal.
    #[error(transparent)]
    Optimizer(Box<merak_zero::Error>),
    /// More ranks than one process runs as threads.
    #[error(
        "{world} ranks are more than the {limit} that one process runs as threads: choose smaller degrees"
    )]
    TooManyRanks {
        /// Ranks that the degrees ask for.
        world: usize,
        /// The most.
        limit: usize,
    },
    /// An input file or folder that cannot be read.
    #[error("cannot read {}", file(path))]
    Read {
        /// The file or folder.
        path: PathBuf,
        /// The reason.
        source: io::Error,
    },
    /// An input that a key names and that cannot be read.
    #[error("cannot read {}, which \"{key}\" names", file(path))]
    ReadInput {
        /// The key.
        key: &'static str,
        /// The file or folder.
        path: PathBuf,
        /// The reason.
        source: io::Error,
    },
    /// What is wrong with the data, alone or beside the model.
    #[error(transparent)]
    Data(#[from] DataError),
    /// An output file or folder that cannot be written.
    #[error("cannot write {}", file(path))]
    Write {
        /// The file or folder.
        path: PathBuf,
        /// The reason.
        source: io::Error,
    },
    /// What is wrong with the folder of a run.
    #[error(transparent)]
    Folder(#[from] FolderError),
    /// Why a run cannot go on from a checkpoint.
    #[error(transparent)]
    Resume(#[from] ResumeError),
    /// Gradients that are never finite.
    #[error(
        "{steps} steps in a row changed nothing, {} because the gradient of \"{param}\" is not finite{}: look \
         for numbers in the data or the starting weights that are not finite or very large, or choose a smaller \
         \"learning_rate\"{} (\"max_skipped_steps\" is {limit})",
        last_of(*first, *step), at_scale(*loss_scale), or_scale(*loss_scale)
    )]
    SkippedSteps {
        /// Steps that were skipped.
        steps: u64,
        /// The first of them.
        first: usize,
        /// The last of them.
        step: usize,
        /// The first parameter concerned in the last of them.
        param: String,
        /// How many may be skipped.
        limit: usize,
        /// Under `fp16` the loss scale of the last of them, and the key that it comes from.
        loss_scale: Option<(f64, &'static str)>,
    },
    /// A learning rate of the caller's own that no optimizer takes.
    #[error(
        "the learning rate after {updates} updates is {lr}, but must be a finite number of at least 0"
    )]
    LearningRate {
        /// The learning rate.
        lr: f64,
        /// Updates done.
        updates: u64,
    },
    /// A run that diverged, and that `divergence_guard` could not save.
    #[error(
        "step {step} diverged with a loss of {loss}: {cause}, and {reason}: lower \"learning_rate\", save more often (\"save_steps\"), or look at the data of this step"
    )]
    Diverged {
        /// The step.
        step: usize,
        /// Its loss.
        loss: f64,
        /// What was wrong with it.
        cause: String,
        /// Why training did not go back.
        reason: String,
    },
    /// An evaluation whose result is not a number.
    #[error(
        "the evaluation loss is {loss}: the weights, or samples of the data, have numbers that are not finite or very large"
    )]
    EvaluationLoss {
        /// The loss.
        loss: f64,
    },
    /// An error that a key is to blame for.
    #[error("{source}{}", with_key_and_place(key, place.as_deref(), source))]
    Blamed {
        /// The key.
        key: &'static str,
        /// Where it was set, where that is known.
        place: Option<String>,
        /// What is wrong.
        source: Box<Self>,
    },
    /// A run that this machine's memory cannot hold.
    #[error(transparent)]
    Memory(Box<dyn std::error::Error + Send + Sync>),
    /// The model or its configuration cannot be used, or a node failed.
    #[error(transparent)]
    Model(Box<merak_trace::Error>),
    /// The tensor-parallel rewrite refused.
    #[error("{error}{advice}", error = .0, advice = of_a_split(.0))]
    TensorParallel(Box<merak_tp::Error>),
    /// The model cannot be cut as asked.
    #[error(transparent)]
    Partition(Box<merak_partition::Error>),
    /// A checkpoint could not be read or written, or generation failed.
    #[error(transparent)]
    Checkpoint(Box<merak_ckpt::Error>),
    /// A checkpoint, or the output folder of a run, where a model's folder was to be.
    #[error("{0}, and `merak train --resume DIR` goes on from it")]
    OwnFolder(Box<merak_ckpt::Error>),
    /// A model that cannot take the requested adapter.
    #[error(transparent)]
    Adapter(Box<merak_ckpt::AdaptError>),
    /// A collective or a group failed.
    #[error(transparent)]
    Group(Box<merak_mpu::Error>),
    /// Processes of the run that did not come before the deadline.
    #[error("{0}: start all ranks within \"distributed.timeout_s\", or raise it")]
    Absent(Box<merak_mpu::Error>),
    /// A rank failed, and the run with it.
    #[error("rank {rank} failed: {cause}")]
    Rank {
        /// The rank that failed first.
        rank: usize,
        /// What happened there, with its causes.
        cause: String,
        /// The process that tells it.
        teller: Teller,
    },
    /// Options of a command do not fit together, or lead nowhere.
    #[error("{0}")]
    CommandLine(String),
    /// An error that a lower rank has too, and tells.
    #[error(transparent)]
    Told(Box<Error>),
    /// This process of a run was started with other things than most.
    #[error("{what} differs from that of {most}: here \"{here}\", there \"{there}\"")]
    OtherRun {
        /// What differs.
        what: &'static str,
        /// Its first line that differs.
        here: String,
        /// The line of the others.
        there: String,
        /// The others, as `ranks 1 and 2`.
        most: String,
    },
    /// The processes of a run were started with different things, and nobody is the odd one.
    #[error("{what} differs: {}", sides_of(.sides))]
    TornRun {
        /// What differs.
        what: &'static str,
        /// The ranks of each side, as `ranks 1 and 2`, and its first line that differs.
        sides: Vec<(String, String)>,
    },
    /// A rank failed in a training step, or in what belongs to it.
    #[error("rank {rank} ({}) failed {part} step {step}", stages_of(stages))]
    Step {
        /// The rank.
        rank: usize,
        /// The stages of the pipeline that it runs.
        stages: Vec<usize>,
        /// The part of the step.
        part: StepPart,
        /// The step, counted from 1.
        step: usize,
        /// The reason.
        source: Box<Error>,
    },
    /// The code of a rank panicked.
    #[error("panicked: {}", sentence(message))]
    Panicked {
        /// What the panic said.
        message: String,
    },
    /// A stage failed at one of the actions of its schedule.
    #[error("{action} failed (stage {}, microbatch {})", action.stage, action.microbatch)]
    Stage {
        /// The action.
        action: Action,
        /// The reason.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// A prompt with a token that the model does not know.
    #[error("prompt {prompt} has the token {token}, but the model knows 0 to {} only", vocab - 1)]
    PromptToken {
        /// The prompt's number, from 0.
        prompt: usize,
        /// The token.
        token: u32,
        /// Size of the model's vocabulary.
        vocab: usize,
    },
    /// Text that is not a list of token ids.
    #[error("\"{}\" is no token id: write ids as 5,17,3", brief(found))]
    PromptIds {
        /// What stands where an id should.
        found: String,
    },
    /// The system gives no thread.
    #[error("cannot start a thread to {task}")]
    NoThread {
        /// The task of the thread.
        task: &'static str,
        /// The system's reason.
        source: io::Error,
    },
}

/// The process that tells the failure of a rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Teller {
    /// This process.
    Here,
    /// This process, in place of the one in which the rank failed.
    HereForOther,
    /// Another process: that of the rank, or the first one.
    Other,
}

impl Error {
    /// Why an input file or folder cannot be read.
    pub fn reading(path: &Path) -> impl Fn(io::Error) -> Self + Copy {
        move |source| Self::Read {
            path: path.to_owned(),
            source: with_hint(source, path),
        }
    }

    /// Why an input that a key names cannot be read.
    pub fn reading_input(key: &'static str, path: &Path) -> impl Fn(io::Error) -> Self + Copy {
        move |source| Self::ReadInput {
            key,
            path: path.to_owned(),
            source: with_hint(source, path),
        }
    }

    /// Why an output file or folder cannot be written.
    pub fn writing(path: &Path) -> impl Fn(io::Error) -> Self + Copy {
        move |source| Self::Write {
            path: path.to_owned(),
            source,
        }
    }
}

/// The system's reason, and where nothing lies at the path, what may be meant.
fn with_hint(source: io::Error, path: &Path) -> io::Error {
    let kind = source.kind();
    if kind != io::ErrorKind::NotFound {
        return source;
    }
    match path_hint(path) {
        hint if hint.is_empty() => source,
        hint => io::Error::new(kind, format!("{source}{hint}")),
    }
}

/// The error of a thread that does not start.
pub(crate) fn no_thread(task: &'static str) -> impl FnOnce(io::Error) -> Error {
    move |source| Error::NoThread { task, source }
}

impl From<merak_pipe::Error> for Error {
    fn from(error: merak_pipe::Error) -> Self {
        match error {
            // The caller that runs the world adds the rank; the pipeline's own numbers count
            // stages.
            merak_pipe::Error::Stage { action, source, .. } => Self::Stage { action, source },
            merak_pipe::Error::TooFewMicrobatches {
                name,
                needed,
                why,
                found,
            } => Self::Plan(PlanError::FewMicrobatches {
                name,
                needed,
                why,
                found,
            }),
            other => Self::Schedule(Box::new(other)),
        }
    }
}

impl From<merak_ckpt::Error> for Error {
    fn from(error: merak_ckpt::Error) -> Self {
        match error {
            merak_ckpt::Error::OwnFormat { .. } => Self::OwnFolder(Box::new(error)),
            other => Self::Checkpoint(Box::new(other)),
        }
    }
}

impl From<merak_partition::Error> for Error {
    /// Errors of planning that name no keys become those that do.
    fn from(error: merak_partition::Error) -> Self {
        use merak_partition::Error as E;
        match error {
            E::StageMemory { limit, least } => Self::Plan(PlanError::StageMemory { limit, least }),
            E::ScheduleMemory { limit, needed } => {
                Self::Plan(PlanError::ScheduleMemory { limit, needed })
            }
            E::ActivationBudget {
                rank,
                budget,
                least,
            } => Self::Plan(PlanError::ActivationBudget {
                rank,
                budget,
                least,
            }),
            E::Schedule(error) => error.into(),
            E::Program { source, .. } => Self::Model(source),
            E::UnknownFamily { .. } | E::NoSplitPoint { .. } => {
                Self::Plan(PlanError::NoSplitPoints(Box::new(error)))
            }
            other => Self::Partition(Box::new(other)),
        }
    }
}

/// An error and its causes, outermost first, separated by colons: one line of readable length,
/// without characters that act on a terminal.
pub fn chain(error: &dyn std::error::Error) -> String {
    let mut text = sentence(&error.to_string());
    let mut source = error.source();
    while let Some(cause) = source {
        let cause_text = sentence(&cause.to_string());
        // A transparent error repeats its source, and one with a place begins with it.
        if !text.ends_with(&cause_text) && !text.starts_with(&cause_text) {
            text.push_str(": ");
            text.push_str(&cause_text);
        }
        source = cause.source();
    }
    text
}

/// Errors of the crates below are boxed, so that the results of this one stay small.
macro_rules! from_crates {
    ($($variant:ident: $error:ty),* $(,)?) => {$(
        impl From<$error> for Error {
            fn from(error: $error) -> Self {
                Self::$variant(Box::new(error))
            }
        }
    )*};
}
from_crates!(
    Optimizer: merak_zero::Error,
    Model: merak_trace::Error,
    TensorParallel: merak_tp::Error,
    Group: merak_mpu::Error,
    Adapter: merak_ckpt::AdaptError,
);
