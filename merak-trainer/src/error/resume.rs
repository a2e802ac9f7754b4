//! Errors of resuming.

use super::words::{other_length, saved_with};
use merak_ckpt::words::file;
use std::path::PathBuf;

/// Why a run cannot go on from a checkpoint.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ResumeError {
    /// A position in a checkpoint's data that the run's data do not have.
    #[error(
        "the checkpoint {} stands at sample {position} of its pass over the data, but there are only {samples} now{}: \
         give the data that it was saved with{}, or set \"ignore_data_skip\" to begin a pass anew",
        file(path), other_length(*length), saved_with(saved.as_deref())
    )]
    PositionBehindEnd {
        /// The checkpoint.
        path: PathBuf,
        /// Samples used in the current pass.
        position: usize,
        /// Samples of the data.
        samples: usize,
        /// The lengths of its sequences and of those now, where they differ.
        length: Option<[u64; 2]>,
        /// The data that it was saved with, where it says so.
        saved: Option<String>,
    },
    /// There is no checkpoint where a run was to resume.
    #[error("{reason}, expected a checkpoint, an output folder, latest or auto{hint}")]
    NoCheckpoint {
        /// What is wrong.
        reason: Box<merak_ckpt::Error>,
        /// The end of the message, which names the nearest word, checkpoint or path.
        hint: String,
    },
    /// A checkpoint holds other tensors than the model.
    #[error("the checkpoint {} is of another model: {difference}", file(path))]
    OtherModel {
        /// The checkpoint.
        path: PathBuf,
        /// The first difference.
        difference: String,
    },
    /// A run that goes on would give the weights other tokens than those that they have learned.
    #[error(
        "the checkpoint {} was trained with the {saved}, but the run has the {now}: set \"data.tokenizer\" to {}, or \
         \"finetune\" to start anew with the weights alone",
        file(path), file(&path.join("tokenizer.json"))
    )]
    OtherTokenizer {
        /// The checkpoint.
        path: PathBuf,
        /// Its tokenizer.
        saved: String,
        /// The run's.
        now: String,
    },
    /// The best model cannot be loaded at the end.
    #[error(
        "training is done, and step {last} is saved, but the best model, that of step {step}, cannot be loaded"
    )]
    BestModel {
        /// The best step.
        step: usize,
        /// The last step.
        last: usize,
        /// Why not.
        source: Box<super::Error>,
    },
    /// A checkpoint lacks a part that was not excused.
    #[error(
        "the checkpoint {} has no {part}: set \"{flag}\" to go on without it",
        file(path)
    )]
    MissingPart {
        /// The checkpoint.
        path: PathBuf,
        /// What is missing.
        part: String,
        /// The key that skips it.
        flag: &'static str,
    },
    /// A checkpoint was saved with another optimizer.
    #[error(
        "the checkpoint {} has the optimizer state of {found}, but {chosen_by} is {expected}: choose the same \
         one, or set \"no_load_optim\" to start with fresh state",
        file(path)
    )]
    OtherOptimizer {
        /// The checkpoint.
        path: PathBuf,
        /// What it was saved with.
        found: String,
        /// What chooses the run's: the key `optim`, or a rule of the program.
        chosen_by: &'static str,
        /// What the run uses.
        expected: String,
    },
}
