//! A stage as the pipeline engine drives it.

use super::Stage;
use crate::{
    Result,
    data::{Batch, IGNORED_LABEL, LABELS, SampleTensor},
};
use merak_mpu::{DType, Message, Packet};
use merak_pipe::{Action, StageModule};
use merak_trace::{
    Error as TraceError, Forwarded, Frame, Hop, Interpreter, KvCache, Port, RunContext, TensorType,
    Value,
};
use std::collections::BTreeMap;

/// What a rank is given for one step.
#[derive(Debug)]
pub(crate) struct StepInputs {
    /// One context per microbatch.
    pub(crate) contexts: Vec<RunContext>,
    /// One batch per microbatch; empty where the stage reads no data.
    pub(crate) batches: Vec<Batch>,
    /// Gradient of each microbatch's loss.
    pub(crate) loss_grad: f64,
}

/// What came out of the model's outputs, one entry per microbatch; empty but on the last stage.
#[derive(Debug, Default)]
pub(crate) struct StepResult {
    pub(crate) outputs: BTreeMap<usize, Vec<Value>>,
}

/// A group of sequences whose next positions pass as one microbatch.
#[derive(Debug)]
pub(crate) struct Decoded<'a> {
    pub(crate) program: Interpreter,
    /// What its attentions have seen before.
    pub(crate) cache: &'a mut KvCache,
    /// How many positions it adds.
    pub(crate) positions: usize,
}

/// One run of a schedule: the frames of the microbatches that are under way.
#[derive(Debug)]
pub(crate) struct StepModule<'a> {
    stage: &'a mut Stage,
    /// Runs another program than training (evaluation, generation).
    forward_only: Option<&'a Interpreter>,
    /// Runs a program of its own for each microbatch.
    decoded: Vec<Decoded<'a>>,
    inputs: StepInputs,
    frames: BTreeMap<usize, Frame>,
    result: StepResult,
}

impl<'a> StepModule<'a> {
    /// A training step.
    pub(crate) fn training(stage: &'a mut Stage, inputs: StepInputs) -> Self {
        Self {
            stage,
            forward_only: None,
            decoded: Vec::new(),
            inputs,
            frames: BTreeMap::new(),
            result: StepResult::default(),
        }
    }

    /// Forwards of another program over the same parameters.
    pub(crate) fn inference(
        stage: &'a mut Stage,
        program: &'a Interpreter,
        inputs: StepInputs,
    ) -> Self {
        Self {
            forward_only: Some(program),
            ..Self::training(stage, inputs)
        }
    }

    /// For each microbatch, the positions of a group that follow those in its cache.
    pub(crate) fn decoding(
        stage: &'a mut Stage,
        groups: Vec<Decoded<'a>>,
        inputs: StepInputs,
    ) -> Self {
        Self {
            decoded: groups,
            ..Self::training(stage, inputs)
        }
    }

    /// What the step computed.
    pub(crate) fn finish(self) -> StepResult {
        self.result
    }

    fn interpreter(&self, microbatch: usize) -> &Interpreter {
        if let Some(group) = self.decoded.get(microbatch) {
            return &group.program;
        }
        self.forward_only.unwrap_or(&self.stage.interpreter)
    }

    /// The inputs of a microbatch as tensors: what the data give, and what the model puts where they do not.
    fn batch(&self, microbatch: usize) -> Result<merak_trace::Batch, TraceError> {
        let program = self.interpreter(microbatch).program();
        let Some(batch) = self.inputs.batches.get(microbatch) else {
            return Ok(BTreeMap::new());
        };
        let backend = self.stage.interpreter.backend();
        let optional = self.stage.plan.model.optional_inputs();
        let input = |port: &Port| {
            let wanted = program.graph.ty(port.value);
            let value = if let Some(tensor) = batch.tensors.get(&port.name) {
                let is_float = tensor.dtype() != DType::I64 && wanted.dtype != DType::I64;
                let dtype = if is_float {
                    wanted.dtype
                } else {
                    tensor.dtype()
                };
                let ty = TensorType::new(tensor.shape(), dtype);
                backend.from_bytes(&ty, &tensor.bytes_as(dtype))
            } else if let Some((_, fill)) = optional.iter().find(|(name, _)| *name == port.name) {
                backend.from_bytes(wanted, &fill.to_ne_bytes().repeat(wanted.numel()))
            } else {
                let given: Vec<_> = batch.tensors.keys().map(String::as_str).collect();
                Err(TraceError::MissingInput {
                    name: port.name.clone(),
                    expected: wanted.to_string(),
                    given: given.join(", "),
                })
            };
            Ok((port.name.clone(), value?))
        };
        program.inputs.iter().map(input).collect()
    }

    /// The values that a message carries, checked against the hops.
    fn unpack<'h>(
        &self,
        message: Option<Message>,
        hops: impl Iterator<Item = &'h Hop>,
    ) -> Result<Vec<Value>, TraceError> {
        let backend = self.stage.interpreter.backend();
        let packets = message.unwrap_or_default();
        let values = packets.into_iter().zip(hops).map(|(packet, hop)| {
            let found = TensorType::new(packet.shape.clone(), packet.dtype());
            if found != hop.ty {
                let (expected, found) = (hop.ty.to_string(), found.to_string());
                return Err(TraceError::InputType {
                    name: hop.name.clone(),
                    expected,
                    found,
                });
            }
            backend.from_buffer(&hop.ty, packet.data)
        });
        values.collect()
    }

    fn pack(&self, values: Vec<Value>) -> Result<Option<Message>, TraceError> {
        let backend = self.stage.interpreter.backend();
        let packets = values.into_iter().map(|value| {
            let shape = value.ty().shape.clone();
            Ok(Packet {
                shape,
                data: backend.into_buffer(value)?,
            })
        });
        packets.collect::<Result<_, _>>().map(Some)
    }

    fn frame(&mut self, microbatch: usize) -> Result<Frame, TraceError> {
        self.frames
            .remove(&microbatch)
            .ok_or_else(|| TraceError::Order {
                value: format!("the forward of microbatch {microbatch}"),
            })
    }
}

impl StageModule for StepModule<'_> {
    type Payload = Message;
    type Error = TraceError;

    fn forward(
        &mut self,
        action: Action,
        input: Option<Message>,
    ) -> Result<Option<Message>, TraceError> {
        let microbatch = action.microbatch.0;
        let program = self.interpreter(microbatch).program();
        let received = self.unpack(input, program.recv.iter())?;
        let is_last = program.send.is_empty();
        let batch = self.batch(microbatch)?;
        let context = self.inputs.contexts[microbatch];
        let params = &self.stage.params.views;
        let Forwarded {
            frame,
            send,
            outputs,
        } = if let Some(group) = self.decoded.get_mut(microbatch) {
            let cache = (&mut *group.cache, group.positions);
            let program = &group.program;
            program.forward_cached(params, &batch, received, context, cache)
        } else {
            let program = self.forward_only.unwrap_or(&self.stage.interpreter);
            program.forward(params, &batch, received, context)
        }?;
        if self.forward_only.is_none() && self.decoded.is_empty() {
            self.frames.insert(microbatch, frame);
        }
        if !outputs.is_empty() {
            self.result.outputs.insert(microbatch, outputs);
        }
        if is_last { Ok(None) } else { self.pack(send) }
    }

    fn recompute(&mut self, action: Action) -> Result<(), TraceError> {
        let mut frame = self.frame(action.microbatch.0)?;
        self.stage
            .interpreter
            .recompute(&mut frame, &self.stage.params.views)?;
        self.frames.insert(action.microbatch.0, frame);
        Ok(())
    }

    fn backward_input(
        &mut self,
        action: Action,
        grad: Option<Message>,
    ) -> Result<Option<Message>, TraceError> {
        let mut frame = self.frame(action.microbatch.0)?;
        let interpreter = self.stage.interpreter.clone();
        let grads = self.unpack(grad, with_grads(&interpreter.program().send))?;
        let back = interpreter.backward_input(
            &mut frame,
            &self.stage.params.views,
            grads,
            self.inputs.loss_grad,
        )?;
        self.frames.insert(action.microbatch.0, frame);
        if interpreter.program().recv.is_empty() {
            Ok(None)
        } else {
            self.pack(back)
        }
    }

    fn backward_weight(&mut self, action: Action) -> Result<(), TraceError> {
        let mut frame = self.frame(action.microbatch.0)?;
        let Stage {
            interpreter,
            params,
            grads,
            ..
        } = &mut *self.stage;
        interpreter.backward_weight(&mut frame, &params.views, grads)
    }

    fn backward(
        &mut self,
        action: Action,
        grad: Option<Message>,
    ) -> Result<Option<Message>, TraceError> {
        let mut frame = self.frame(action.microbatch.0)?;
        let received = self.unpack(grad, with_grads(&self.stage.interpreter.program().send))?;
        let loss_grad = self.inputs.loss_grad;
        let Stage {
            interpreter,
            params,
            grads,
            ..
        } = &mut *self.stage;
        let back = interpreter.backward(&mut frame, &params.views, received, loss_grad, grads)?;
        if self.stage.interpreter.program().recv.is_empty() {
            Ok(None)
        } else {
            self.pack(back)
        }
    }
}

/// The hops through which a gradient flows.
fn with_grads(hops: &[Hop]) -> impl Iterator<Item = &Hop> {
    hops.iter().filter(|hop| hop.grad.is_some())
}

/// Labels of a batch that count in a loss.
pub(crate) fn count_labels(batch: &Batch) -> i64 {
    let labels = batch
        .tensors
        .get(LABELS)
        .map_or(&[][..], SampleTensor::ints);
    labels
        .iter()
        .map(|&label| i64::from(label != IGNORED_LABEL))
        .sum()
}
