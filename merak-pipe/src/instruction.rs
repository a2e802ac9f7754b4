//! The full instruction stream of a rank, communication included.

use crate::{Action, Kind, MicrobatchId, StageId, Tag};
use serde::{Serialize, Serializer, ser::SerializeMap, ser::SerializeSeq};

/// A microbatch on a stage, and the buffer that holds it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Slot {
    /// The stage.
    pub stage: StageId,
    /// The microbatch.
    pub microbatch: MicrobatchId,
    /// Index of its buffer among the stage's.
    pub buffer: usize,
    /// Index of the stage among its rank's, where a rank runs several.
    pub chunk: Option<usize>,
}

/// One instruction of a rank, in the vocabulary of DeepSpeed's pipeline engine and of Merak.
///
/// As JSON it is `[name, {"buffer_id": b}]`, with two buffers for an exchange or for two passes at
/// once and none for the closing steps, and with a `chunk` for each where ranks run several stages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Instruction {
    /// Loads the inputs and labels that the stage needs.
    LoadMicroBatch(Slot),
    /// Runs the stage forward.
    ForwardPass(Slot),
    /// Runs the stage forward, to recompute it before its gradient comes.
    PreCheckpointForwardPass(Slot),
    /// Runs the stage backward, after recomputing it where that is still to do.
    BackwardPass(Slot),
    /// Computes the gradient of the stage's input.
    BackwardInput(Slot),
    /// Computes the gradients of the stage's weights.
    BackwardWeight(Slot),
    /// Runs one stage forward and one backward at once.
    ForwardBackwardPass {
        /// What runs forward.
        forward: Slot,
        /// What runs backward.
        backward: Slot,
    },
    /// Recomputes the stage, then receives its gradient where another rank sends it.
    RecomputeRecvGrad(Slot),
    /// Recomputes the stage before its gradient is wanted, and receives nothing.
    RecomputeForwardPass(Slot),
    /// Sends the output to the next stage.
    SendActivation(Slot),
    /// Receives the input from the stage before.
    RecvActivation(Slot),
    /// Sends the input's gradient to the stage before.
    SendGrad(Slot),
    /// Receives the output's gradient from the next stage.
    RecvGrad(Slot),
    /// Sends an output and receives a gradient in one exchange with the next stage.
    SendActivationRecvGrad {
        /// What is sent.
        sent: Slot,
        /// What is received.
        received: Slot,
    },
    /// Sends a gradient and receives an input in one exchange with the stage before.
    SendGradRecvActivation {
        /// What is sent.
        sent: Slot,
        /// What is received.
        received: Slot,
    },
    /// Goes back to recomputing within the backward.
    RestoreRecomputeStatus,
    /// Sums the gradients of weights that several stages use.
    ReduceTiedGrads,
    /// Reduces the gradients over the replicas of the stage.
    ReduceGrads,
    /// Updates the weights.
    OptimizerStep,
}

impl Instruction {
    /// The name in the stream.
    pub const fn name(&self) -> &'static str {
        match self {
            Self::LoadMicroBatch(_) => "LoadMicroBatch",
            Self::ForwardPass(_) => "ForwardPass",
            Self::PreCheckpointForwardPass(_) => "PreCheckpointForwardPass",
            Self::BackwardPass(_) => "BackwardPass",
            Self::BackwardInput(_) => "BackwardInput",
            Self::BackwardWeight(_) => "BackwardWeight",
            Self::ForwardBackwardPass { .. } => "ForwardBackwardPass",
            Self::RecomputeRecvGrad(_) => "RecomputeRecvGrad",
            Self::RecomputeForwardPass(_) => "RecomputeForwardPass",
            Self::SendActivation(_) => "SendActivation",
            Self::RecvActivation(_) => "RecvActivation",
            Self::SendGrad(_) => "SendGrad",
            Self::RecvGrad(_) => "RecvGrad",
            Self::SendActivationRecvGrad { .. } => "SendActivationRecvGrad",
            Self::SendGradRecvActivation { .. } => "SendGradRecvActivation",
            Self::RestoreRecomputeStatus => "RestoreRecomputeStatus",
            Self::ReduceTiedGrads => "ReduceTiedGrads",
            Self::ReduceGrads => "ReduceGrads",
            Self::OptimizerStep => "OptimizerStep",
        }
    }

    /// What the instruction works on: nothing, one slot, the sent and the received one, or the one
    /// that runs forward and the one that runs backward.
    pub fn slots(&self) -> (Option<Slot>, Option<Slot>) {
        match *self {
            Self::LoadMicroBatch(slot)
            | Self::ForwardPass(slot)
            | Self::PreCheckpointForwardPass(slot)
            | Self::BackwardPass(slot)
            | Self::BackwardInput(slot)
            | Self::BackwardWeight(slot)
            | Self::RecomputeRecvGrad(slot)
            | Self::RecomputeForwardPass(slot)
            | Self::SendActivation(slot)
            | Self::RecvActivation(slot)
            | Self::SendGrad(slot)
            | Self::RecvGrad(slot) => (Some(slot), None),
            Self::SendActivationRecvGrad { sent, received }
            | Self::SendGradRecvActivation { sent, received } => (Some(sent), Some(received)),
            Self::ForwardBackwardPass { forward, backward } => (Some(forward), Some(backward)),
            Self::RestoreRecomputeStatus
            | Self::ReduceTiedGrads
            | Self::ReduceGrads
            | Self::OptimizerStep => (None, None),
        }
    }

    /// The messages that the instruction sends and receives, those within a rank included.
    pub(crate) fn messages(&self, stages: usize) -> (Option<Tag>, Option<Tag>) {
        let action = |slot: Slot, kind| Action::new(slot.stage, kind, slot.microbatch);
        let output = |slot, kind| action(slot, kind).output(stages);
        let input = |slot, kind| action(slot, kind).input(stages);
        match *self {
            Self::SendActivation(slot) => (output(slot, Kind::Forward), None),
            Self::RecvActivation(slot) => (None, input(slot, Kind::Forward)),
            Self::SendGrad(slot) => (output(slot, Kind::Backward), None),
            Self::RecvGrad(slot) | Self::RecomputeRecvGrad(slot) => {
                (None, input(slot, Kind::Backward))
            }
            Self::SendActivationRecvGrad { sent, received } => {
                (output(sent, Kind::Forward), input(received, Kind::Backward))
            }
            Self::SendGradRecvActivation { sent, received } => {
                (output(sent, Kind::Backward), input(received, Kind::Forward))
            }
            _ => (None, None),
        }
    }
}

impl Serialize for Instruction {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut pair = serializer.serialize_seq(Some(2))?;
        pair.serialize_element(self.name())?;
        pair.serialize_element(&Arguments(self.slots()))?;
        pair.end()
    }
}

/// The named arguments of an instruction.
struct Arguments((Option<Slot>, Option<Slot>));

impl Serialize for Arguments {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(None)?;
        match self.0 {
            (Some(sent), Some(received)) => {
                map.serialize_entry("buffer_id", &[sent.buffer, received.buffer])?;
            }
            (Some(slot), None) => map.serialize_entry("buffer_id", &slot.buffer)?,
            (None, _) => {}
        }
        let chunk = |slot: Option<Slot>| slot.and_then(|slot| slot.chunk);
        match (chunk(self.0.0), chunk(self.0.1)) {
            (Some(first), Some(second)) => map.serialize_entry("chunk", &[first, second])?,
            (Some(chunk), None) => map.serialize_entry("chunk", &chunk)?,
            (None, _) => {}
        }
        map.end()
    }
}
