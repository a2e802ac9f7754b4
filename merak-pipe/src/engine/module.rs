//! What a user's stage must be able to do.

use crate::{Action, BoxError};

/// The stages of one rank, as the [`PipelineEngine`](crate::PipelineEngine) drives them.
///
/// Each call gets the [`Action`], whose `stage` tells the stages of an interleaved schedule apart
/// and whose `microbatch` tells which kept activations belong to it. Calls come in the order of the
/// schedule.
///
/// The results of a module must not depend on that order, nor on the other stages of its rank:
///
/// - **A payload is numbers alone.** Activations and gradients must leave without the graph of an
///   autograd engine that made them: detach both. A gradient that candle computed still hangs on
///   the weights it came from. Where one rank runs several stages, as in the V schedules, the next
///   backward would follow it into another stage of the same module and add to that stage's
///   gradients once more, without an error.
/// - **What is kept belongs to a stage and a microbatch**, and never to a microbatch alone: several
///   stages of one module are in flight at once.
/// - **`backward_input` computes the gradient of the input and nothing else**, for a schedule that
///   splits backwards to gain anything. A module whose autograd computes both gradients in one walk
///   stays right, but it does the work of `W` within `I`, and `W` only adds.
///
/// [`compare_with_unpipelined`](crate::compare_with_unpipelined) tests a module against these
/// rules.
pub trait StageModule {
    /// The message between stages; the gradient of a payload is a payload too.
    type Payload: Send + 'static;
    /// The failure of a stage; the engine adds rank, stage and microbatch.
    type Error: Into<BoxError>;

    /// Runs a stage forward and keeps what its backward needs.
    ///
    /// `input` is what the stage before returned, `None` on the first stage, which loads its own
    /// inputs. Returns what the next stage gets, `None` on the last stage, which keeps its loss or
    /// its outputs.
    ///
    /// # Errors
    /// The module's own; the engine stops and makes all ranks fail.
    fn forward(
        &mut self,
        action: Action,
        input: Option<Self::Payload>,
    ) -> Result<Option<Self::Payload>, Self::Error>;

    /// Runs a stage as [`StageModule::forward`] does, in a schedule [without
    /// backwards](crate::Schedule::is_forward_only), as for evaluation and generation.
    ///
    /// No later call frees what is kept for a backward, so a module that keeps something overrides
    /// this, and keeps nothing.
    ///
    /// # Errors
    /// As [`StageModule::forward`].
    fn forward_only(
        &mut self,
        action: Action,
        input: Option<Self::Payload>,
    ) -> Result<Option<Self::Payload>, Self::Error> {
        self.forward(action, input)
    }

    /// Computes the gradient of the stage's input.
    ///
    /// `grad` is the gradient of what `forward` returned, `None` on the last stage, whose own loss
    /// begins the backward. Returns the gradient of what `forward` was given, `None` on the first
    /// stage.
    ///
    /// # Errors
    /// As [`StageModule::forward`].
    fn backward_input(
        &mut self,
        action: Action,
        grad: Option<Self::Payload>,
    ) -> Result<Option<Self::Payload>, Self::Error>;

    /// Adds the microbatch's part to the gradients of the stage's weights, and frees what is left
    /// of it.
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

    /// Brings back the activations that `forward` did not keep, ahead of the backward, which then
    /// does not recompute them. A module that keeps all its activations has nothing to do.
    ///
    /// # Errors
    /// As [`StageModule::forward`].
    fn recompute(&mut self, action: Action) -> Result<(), Self::Error> {
        let _ = action;
        Ok(())
    }

    /// Whether [`StageModule::forward_and_backward`] gains something over one pass after the other.
    /// The engine then waits for the messages of both before it begins, and sends both results when
    /// both are done.
    fn overlaps(&self) -> bool {
        false
    }

    /// Runs `forward` as [`StageModule::forward`] does and `backward` as [`StageModule::backward`]
    /// does, at once: each uses the time in which the other waits, above all for communication.
    /// They are of different stages or microbatches.
    ///
    /// Called for the pairs of a schedule where [`StageModule::overlaps`]. Returns what both
    /// return.
    ///
    /// # Errors
    /// As [`StageModule::forward`].
    fn forward_and_backward(
        &mut self,
        forward: Action,
        input: Option<Self::Payload>,
        backward: Action,
        grad: Option<Self::Payload>,
    ) -> Result<Both<Self::Payload>, Self::Error> {
        Ok((
            self.forward(forward, input)?,
            self.backward(backward, grad)?,
        ))
    }

    /// Drops the state that a failed step has left: kept activations, gradients that wait for the
    /// weights' half of their backward, and the sums of weight gradients of this step. The engine
    /// calls it when a run ends with an error. A module that keeps nothing has nothing to do; one
    /// that keeps something and does not override this must not be run again after a failure.
    fn reset(&mut self) {}
}

/// What a forward and a backward that ran at once return.
pub(crate) type Both<P> = (Option<P>, Option<P>);
