//! What a user's stage must be able to do.

use crate::{Action, BoxError};

/// The stages of one rank, as the [`Engine`](crate::Engine) drives them.
///
/// Each call gets the [`Action`], whose `stage` tells the stages of an interleaved schedule apart and whose
/// `microbatch` tells which kept activations belong to it. Calls come in the order of the schedule.
pub trait StageModule {
    /// What stages send each other; the gradient of a payload is a payload as well.
    type Payload: Send;
    /// What can go wrong; the engine adds rank, stage and microbatch.
    type Error: Into<BoxError>;

    /// Runs a stage forward and keeps what its backward needs.
    ///
    /// `input` is what the stage before returned, `None` on the first stage, which loads its own inputs.
    /// Returns what the next stage gets, `None` on the last stage, which keeps its loss or its outputs.
    ///
    /// # Errors
    /// The module's own; the engine stops and makes all ranks fail.
    fn forward(
        &mut self,
        action: Action,
        input: Option<Self::Payload>,
    ) -> Result<Option<Self::Payload>, Self::Error>;

    /// Computes the gradient of the stage's input.
    ///
    /// `grad` is the gradient of what `forward` returned, `None` on the last stage, whose own loss begins
    /// the backward. Returns the gradient of what `forward` was given, `None` on the first stage.
    ///
    /// # Errors
    /// As [`StageModule::forward`].
    fn backward_input(
        &mut self,
        action: Action,
        grad: Option<Self::Payload>,
    ) -> Result<Option<Self::Payload>, Self::Error>;

    /// Adds the microbatch's part to the gradients of the stage's weights, and frees what is left of it.
    ///
    /// # Errors
    /// As [`StageModule::forward`].
    fn backward_weight(&mut self, action: Action) -> Result<(), Self::Error>;

    /// Computes both gradients. A module that can do them at once, faster, overrides this.
    ///
    /// # Errors
    /// As [`StageModule::forward`].
    fn backward(
        &mut self,
        action: Action,
        grad: Option<Self::Payload>,
    ) -> Result<Option<Self::Payload>, Self::Error> {
        let input_grad = self.backward_input(action, grad)?;
        self.backward_weight(action)?;
        Ok(input_grad)
    }

    /// Brings back the activations that `forward` did not keep, ahead of the backward, which then does not
    /// recompute them. A module that keeps all its activations has nothing to do.
    ///
    /// # Errors
    /// As [`StageModule::forward`].
    fn recompute(&mut self, action: Action) -> Result<(), Self::Error> {
        let _ = action;
        Ok(())
    }
}
