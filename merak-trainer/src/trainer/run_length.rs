//! The length of a run, which follows from its arguments and data before anything runs.

use super::{TrainerParts, evaluation, run_state::RunState};
use crate::{
    config::CheckedArguments,
    data::{BatchShape, DataPosition, Dataset, TrainingOrder},
    error::{ConfigError, Error, NO_LENGTH, Result},
};
use merak_zero::LrSchedule;
use std::sync::Arc;

/// The steps of a whole run, with the data and the learning rate of each.
#[derive(Debug)]
pub(super) struct RunLength {
    /// The order of training; `None` without training data.
    pub(super) order: Option<TrainingOrder>,
    /// Steps that the whole run makes.
    pub(super) total_steps: usize,
    /// Steps that it makes beyond those of its epochs, or fewer below 0: steps before the last
    /// resume had another number of samples.
    pub(super) extra_steps: isize,
    /// The learning rate over them.
    pub(super) schedule: LrSchedule,
}

impl RunLength {
    /// The length that the arguments and the data give.
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
        // Without training data no step is made, and every learning rate fits.
        let scheduled = order.as_ref().map_or(usize::MAX, |_| total_steps);
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
            extra_steps: 0,
            schedule: args.lr_schedule(scheduled)?,
        })
    }

    /// The seed of the data in use: that of the arguments, or of the checkpoint that the run goes
    /// on from.
    pub(super) fn data_seed(&self, args: &CheckedArguments) -> u64 {
        let order = self.order.as_ref();
        order.map_or_else(|| args.data_seed(), TrainingOrder::seed)
    }

    /// Goes on where the run of a checkpoint stood in the data; a run without `max_steps` still
    /// ends after its epochs. Returns how many samples are left out, as [`TrainingOrder::resume`].
    ///
    /// # Errors
    /// When the learning rate does not fit a run of the new length.
    pub(super) fn resume(&mut self, args: &CheckedArguments, saved: &RunState) -> Result<usize> {
        let Some(order) = &mut self.order else {
            return Ok(0);
        };
        let (step, position) = (saved.global_step, saved.position);
        let mut unused = order.resume(step, position);
        self.extra_steps = if saved.global_batch == args.global_batch() {
            saved.extra_steps
        } else {
            let used = order.batches_after(step).cast_signed();
            step.cast_signed().saturating_sub(used)
        };
        // An epoch that begins again makes the run no longer.
        if args.ignore_data_skip {
            let begin = DataPosition {
                samples: 0,
                ..position
            };
            unused = order.resume(step, begin);
        }
        self.total_steps = args.total_steps(order.steps_per_epoch());
        if args.max_steps <= 0 {
            self.total_steps = self.total_steps.saturating_add_signed(self.extra_steps);
        }
        self.schedule = args.lr_schedule(self.total_steps)?;
        Ok(unused)
    }
}

/// How the arguments cut a global batch.
pub(super) fn batch_shape(args: &CheckedArguments) -> BatchShape {
    BatchShape {
        batch: args.per_device_train_batch_size,
        microbatches: args.gradient_accumulation_steps,
        dp: args.dp,
    }
}
