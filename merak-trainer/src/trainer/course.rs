//! What the data decide about a run, before anything runs.

use super::{TrainerParts, evaluation};
use crate::{
    config::CheckedArguments,
    data::{BatchShape, Dataset, IGNORED_LABEL, TrainingOrder, has_labels},
    error::{ConfigError, DataError, Error, NO_LENGTH, Result},
};
use merak_zero::LrSchedule;
use std::sync::Arc;

/// What the data decide about a run.
#[derive(Debug)]
pub(super) struct Course {
    /// The order of training; `None` without training data.
    pub(super) order: Option<TrainingOrder>,
    /// Steps that the whole run makes.
    pub(super) total_steps: usize,
    /// The learning rate over them.
    pub(super) schedule: LrSchedule,
}

impl Course {
    /// Derives it from the arguments and the data.
    ///
    /// # Errors
    /// When the data are too few.
    pub(super) fn new(args: &CheckedArguments, parts: &TrainerParts) -> Result<Self> {
        let shape = batch_shape(args);
        let order = parts
            .train_data
            .as_ref()
            .map(|data| TrainingOrder::of(&**data, shape, args.data_seed()))
            .transpose()?;
        let is_endless = |data: &Arc<dyn Dataset>| data.is_stream();
        if args.max_steps <= 0 && parts.train_data.as_ref().is_some_and(is_endless) {
            return Err(Error::Config(ConfigError::MissingKey {
                key: "max_steps",
                advice: NO_LENGTH.to_owned(),
            }));
        }
        let total_steps = order
            .as_ref()
            .map_or(1, |order| args.total_steps(order.steps_per_epoch()));
        match &parts.eval_data {
            Some(data) if is_endless(data) && args.eval_iters.is_none() => {
                return Err(Error::Config(ConfigError::MissingKey {
                    key: "eval_iters",
                    advice: NO_LENGTH.to_owned(),
                }));
            }
            Some(data) => {
                evaluation::order(args, data.len())?;
            }
            None if args.load_best_model_at_end && order.is_some() => {
                return Err(Error::Config(ConfigError::MissingKey {
                    key: "data.path",
                    advice: "\"load_best_model_at_end\" needs data to evaluate".to_owned(),
                }));
            }
            None => {}
        }
        Ok(Self {
            order,
            total_steps,
            schedule: args.lr_schedule(total_steps)?,
        })
    }
}

/// Samples of a stream that are looked through for a label.
const CHECKED_SAMPLES: usize = 1024;

/// Refuses data of which nothing can be learned: no sample has a label.
///
/// # Errors
/// [`DataError::NoLabels`], or when a sample cannot be read.
pub(super) fn check_labels(args: &CheckedArguments, parts: &TrainerParts) -> Result<()> {
    if let Some(data) = &parts.train_data {
        let samples = data.len().min(if data.is_stream() {
            CHECKED_SAMPLES
        } else {
            usize::MAX
        });
        check_part(args, "training", &**data, samples)?;
    }
    if let Some(data) = &parts.eval_data {
        let samples = evaluation::order(args, data.len())?.samples();
        check_part(args, "evaluation", &**data, samples)?;
    }
    Ok(())
}

fn check_part(
    args: &CheckedArguments,
    part: &'static str,
    data: &dyn Dataset,
    samples: usize,
) -> Result<()> {
    if has_labels(data, samples)? {
        return Ok(());
    }
    Err(Error::Data(DataError::NoLabels {
        part,
        samples,
        ignored: IGNORED_LABEL,
        path: args
            .data
            .path
            .as_ref()
            .filter(|paths| paths.count() == 1)
            .map(|paths| paths.first().to_path_buf()),
    }))
}

/// How the arguments cut a global batch.
pub(super) fn batch_shape(args: &CheckedArguments) -> BatchShape {
    BatchShape {
        batch: args.per_device_train_batch_size,
        microbatches: args.gradient_accumulation_steps,
        dp: args.dp,
    }
}
