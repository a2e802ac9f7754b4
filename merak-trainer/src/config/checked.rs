//! Arguments that passed the checks, and what follows from them.

use std::{num::NonZeroUsize, ops::Deref};

use super::arguments::MerakArguments;
use crate::error::{Error, Result};

/// Arguments whose values agree with each other.
///
/// Read like [`MerakArguments`]; they cannot be changed any more. What only the model, the data or the world
/// decides is checked where those are known.
#[derive(Debug, Clone, PartialEq)]
pub struct CheckedArguments(MerakArguments);

impl Deref for CheckedArguments {
    type Target = MerakArguments;

    fn deref(&self) -> &MerakArguments {
        &self.0
    }
}

impl CheckedArguments {
    /// Wraps arguments that passed the checks.
    pub(crate) fn of(arguments: MerakArguments) -> Self {
        Self(arguments)
    }

    /// The arguments as they were given.
    pub fn into_arguments(self) -> MerakArguments {
        self.0
    }

    /// Ranks that the degrees ask for: dp · tp · pp.
    pub fn world_size(&self) -> usize {
        self.dp * self.tp * self.pp
    }

    /// Checks that the degrees fill a world of `world` ranks.
    ///
    /// # Errors
    ///
    /// [`Error::WorldSize`] where they do not.
    pub fn check_world(&self, world: usize) -> Result<()> {
        let product = self.world_size();
        if product == world {
            return Ok(());
        }
        Err(Error::WorldSize {
            dp: self.dp,
            tp: self.tp,
            pp: self.pp,
            product,
            world,
        })
    }

    /// Samples of a step: microbatch · microbatches · dp.
    pub fn global_batch(&self) -> usize {
        self.per_device_train_batch_size * self.gradient_accumulation_steps * self.dp
    }

    /// Seed of the order of samples.
    pub fn data_seed(&self) -> u64 {
        self.data_seed.unwrap_or(self.seed)
    }

    /// Shards per recomputed chunk; `None` where nothing is recomputed.
    pub fn recompute_chunk(&self) -> Option<NonZeroUsize> {
        NonZeroUsize::new(self.checkpoint_num_layers).filter(|_| self.activation_checkpointing)
    }

    /// Steps of the whole run, when an epoch has `steps_per_epoch`: `max_steps` if it is more than 0,
    /// else ceil(`num_train_epochs` · `steps_per_epoch`).
    pub fn total_steps(&self, steps_per_epoch: usize) -> usize {
        match usize::try_from(self.max_steps) {
            Ok(steps) if steps > 0 => steps,
            _ => (self.num_train_epochs * steps_per_epoch as f64).ceil() as usize,
        }
    }

    /// Steps of warmup, when the run has `total` steps.
    pub fn warmup(&self, total: usize) -> usize {
        match self.warmup_steps {
            0 => (self.warmup_ratio * total as f64).ceil() as usize,
            steps => steps,
        }
    }

    /// Checkpoints to keep; `None` keeps all.
    pub fn checkpoints_kept(&self) -> Option<NonZeroUsize> {
        usize::try_from(self.save_total_limit)
            .ok()
            .and_then(NonZeroUsize::new)
    }

    /// Largest global gradient norm; `None` switches clipping off.
    pub fn clip_norm(&self) -> Option<f64> {
        (self.max_grad_norm > 0.0).then_some(self.max_grad_norm)
    }

    /// Most new tokens per prompt.
    pub fn new_token_limit(&self) -> usize {
        self.max_new_tokens.unwrap_or(self.out_seq_length)
    }
}
