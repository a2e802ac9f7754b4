//! The stages of a rank as the pipeline engine drives them.

use super::RankStages;
use crate::{
    data::{Batch, IGNORED_LABEL, LABELS, SampleTensor},
    error::Result,
    plan::LossCount,
};
use merak_mpu::{DType, Message, Packet};
use merak_pipe::{Action, StageModule};
use merak_trace::{
    Continuation, Error as TraceError, Forwarded, Frame, Hop, Interpreter, KvCache, NextPositions,
    Phase, Port, RunContext, StageProgram, Tail, TensorType, Value,
};
use std::{collections::BTreeMap, sync::Arc};

/// What a rank is given for one step.
#[derive(Debug)]
pub(crate) struct StepInputs {
    /// One context per microbatch.
    pub(crate) contexts: Vec<RunContext>,
    /// One batch per microbatch; empty where no stage of the rank reads data.
    pub(crate) batches: Vec<Batch>,
    /// Gradient of each microbatch's loss.
    pub(crate) loss_grad: f64,
}

/// The values of the model's outputs, one entry per microbatch; empty on ranks without the last
/// stage.
#[derive(Debug, Default)]
pub(crate) struct StepResult {
    pub(crate) outputs: BTreeMap<usize, Vec<Value>>,
}

/// The next positions of some sequences, which pass as one microbatch.
#[derive(Debug)]
pub(crate) struct Decoded<'a> {
    /// The programs of the rank's stages for all these positions.
    pub(crate) programs: Arc<[Interpreter]>,
    /// Their programs for the positions that go on after the last attention, where these are fewer.
    pub(crate) tails: Option<Arc<[Interpreter]>>,
    /// The stage with the model's last attention.
    pub(crate) last_attention: usize,
    /// For each stage of the rank, the keys and values of earlier positions.
    pub(crate) caches: &'a mut [KvCache],
    /// What passes of each sequence.
    pub(crate) pieces: &'a [NextPositions],
    /// The last position of each.
    pub(crate) newest: &'a [usize],
}

impl Decoded<'_> {
    /// The program of a stage.
    fn interpreter(&self, (index, number): (usize, usize)) -> &Interpreter {
        match &self.tails {
            Some(tails) if number > self.last_attention => &tails[index],
            _ => &self.programs[index],
        }
    }

    fn continuation(&mut self, (index, number): (usize, usize)) -> Continuation<'_> {
        let tails = self.tails.as_ref();
        let tail = tails.filter(|_| number == self.last_attention);
        Continuation {
            cache: &mut self.caches[index],
            pieces: self.pieces,
            tail: tail.map(|tails| Tail {
                interpreter: &tails[index],
                positions: self.newest,
            }),
        }
    }
}

/// What a run of a schedule computes with a rank's stages.
#[derive(Debug)]
enum Pass<'a> {
    /// Forwards and backwards of the stages' own programs.
    Training,
    /// Forwards of another program for each stage.
    Inference(&'a [Interpreter]),
    /// The forward of positions that follow those in caches, as the only microbatch.
    Decoding(Decoded<'a>),
}

/// One run of a schedule: the frames of the microbatches that are under way.
#[derive(Debug)]
pub(crate) struct StepModule<'a> {
    stages: &'a mut RankStages,
    pass: Pass<'a>,
    inputs: StepInputs,
    /// By index of the stage and microbatch.
    frames: BTreeMap<(usize, usize), Frame>,
    /// The additions that each bucket of gradients waits for; empty where none is reduced during
    /// the backward.
    missing: Vec<Option<usize>>,
    result: StepResult,
}

impl<'a> StepModule<'a> {
    /// A training step.
    pub(crate) fn training(stages: &'a mut RankStages, inputs: StepInputs) -> Self {
        Self {
            stages,
            pass: Pass::Training,
            inputs,
            frames: BTreeMap::new(),
            missing: Vec::new(),
            result: StepResult::default(),
        }
    }

    /// Starts the reduction of each bucket of gradients when it is complete.
    ///
    /// # Communication
    /// That of [`merak_zero::ZeroOptimizer::start_bucket`], in the order in which the backward
    /// completes them.
    pub(crate) fn reducing_early(mut self) -> Self {
        if self.stages.reduces_early {
            let microbatches = self.inputs.contexts.len();
            self.missing = self.stages.completion.additions(microbatches);
        }
        self
    }

    /// Forwards of other programs over the same parameters.
    pub(crate) fn inference(
        stages: &'a mut RankStages,
        programs: &'a [Interpreter],
        inputs: StepInputs,
    ) -> Self {
        Self {
            pass: Pass::Inference(programs),
            ..Self::training(stages, inputs)
        }
    }

    /// The forward of positions that follow those in caches.
    pub(crate) fn decoding(
        stages: &'a mut RankStages,
        decoded: Decoded<'a>,
        inputs: StepInputs,
    ) -> Self {
        Self {
            pass: Pass::Decoding(decoded),
            ..Self::training(stages, inputs)
        }
    }

    /// What the step computed.
    pub(crate) fn finish(self) -> StepResult {
        self.result
    }

    /// Where the action's stage stands among the rank's, and its microbatch.
    fn key(&self, action: Action) -> (usize, usize) {
        let mut stages = self.stages.stages.iter();
        let index = stages
            .position(|stage| stage.number == action.stage.0)
            .expect("the schedule gives a rank its own stages");
        (index, action.microbatch.0)
    }

    /// The inputs of a microbatch as tensors: those of the data, and the model's defaults for
    /// missing ones.
    fn batch(
        &self,
        program: &StageProgram,
        microbatch: usize,
    ) -> Result<merak_trace::Batch, TraceError> {
        let Some(batch) = self.inputs.batches.get(microbatch) else {
            return Ok(BTreeMap::new());
        };
        let backend = &self.stages.backend;
        let optional = self.stages.plan.draft.model.optional_inputs();
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
        let backend = &self.stages.backend;
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
        let backend = &self.stages.backend;
        let packets = values.into_iter().map(|value| {
            let shape = value.ty().shape.clone();
            Ok(Packet {
                shape,
                data: backend.into_buffer(value)?,
            })
        });
        packets.collect::<Result<_, _>>().map(Some)
    }

    fn frame(&mut self, key: (usize, usize)) -> Result<Frame, TraceError> {
        self.frames.remove(&key).ok_or_else(|| TraceError::Order {
            value: format!("the forward of microbatch {}", key.1),
        })
    }

    /// The message to the stage before; `None` on the first stage.
    fn pack_back(&self, stage: usize, back: Vec<Value>) -> Result<Option<Message>, TraceError> {
        let program = self.stages.stages[stage].interpreter.program();
        if program.recv.is_empty() {
            Ok(None)
        } else {
            self.pack(back)
        }
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
        let (index, microbatch) = self.key(action);
        let stage = &self.stages.stages[index];
        let place = (index, stage.number);
        let interpreter = match &self.pass {
            Pass::Training => stage.interpreter.clone(),
            Pass::Inference(programs) => programs[index].clone(),
            Pass::Decoding(decoded) => decoded.interpreter(place).clone(),
        };
        let program = interpreter.program();
        let received = self.unpack(input, program.recv.iter())?;
        let is_last = program.send.is_empty();
        let batch = self.batch(program, microbatch)?;
        let context = self.inputs.contexts[microbatch];
        stage.values.begin(&[Phase::Forward])?;
        let Forwarded {
            frame,
            send,
            outputs,
        } = if let Pass::Decoding(decoded) = &mut self.pass {
            let next = decoded.continuation(place);
            interpreter.forward_cached(&stage.values, &batch, received, context, next)
        } else {
            interpreter.forward(&stage.values, &batch, received, context)
        }?;
        if matches!(self.pass, Pass::Training) {
            self.frames.insert((index, microbatch), frame);
        }
        if !outputs.is_empty() {
            self.result.outputs.insert(microbatch, outputs);
        }
        if is_last { Ok(None) } else { self.pack(send) }
    }

    fn recompute(&mut self, action: Action) -> Result<(), TraceError> {
        let key = self.key(action);
        let mut frame = self.frame(key)?;
        let stage = &self.stages.stages[key.0];
        stage.values.begin(&[Phase::Recompute])?;
        stage.interpreter.recompute(&mut frame, &stage.values)?;
        self.frames.insert(key, frame);
        Ok(())
    }

    fn backward_input(
        &mut self,
        action: Action,
        grad: Option<Message>,
    ) -> Result<Option<Message>, TraceError> {
        let key = self.key(action);
        let mut frame = self.frame(key)?;
        let stage = &self.stages.stages[key.0];
        let sent = &stage.interpreter.program().send;
        let grads = self.unpack(grad, with_grads(sent))?;
        stage.values.begin(frame.input_phases())?;
        let back = stage.interpreter.backward_input(
            &mut frame,
            &stage.values,
            grads,
            self.inputs.loss_grad,
        )?;
        self.frames.insert(key, frame);
        self.pack_back(key.0, back)
    }

    fn backward_weight(&mut self, action: Action) -> Result<(), TraceError> {
        let key = self.key(action);
        let mut frame = self.frame(key)?;
        let (stages, mut reduction) = self.stages.with_sink(&mut self.missing);
        let stage = &stages[key.0];
        stage.values.begin(&[Phase::BackwardWeight])?;
        stage
            .interpreter
            .backward_weight(&mut frame, &stage.values, &mut reduction)
    }

    fn backward(
        &mut self,
        action: Action,
        grad: Option<Message>,
    ) -> Result<Option<Message>, TraceError> {
        let key = self.key(action);
        let mut frame = self.frame(key)?;
        let sent = &self.stages.stages[key.0].interpreter.program().send;
        let received = self.unpack(grad, with_grads(sent))?;
        let loss_grad = self.inputs.loss_grad;
        let (stages, mut reduction) = self.stages.with_sink(&mut self.missing);
        let stage = &stages[key.0];
        stage.values.begin(frame.backward_phases())?;
        let back = stage.interpreter.backward(
            &mut frame,
            &stage.values,
            received,
            loss_grad,
            &mut reduction,
        )?;
        self.pack_back(key.0, back)
    }
}

/// The hops through which a gradient flows.
fn with_grads(hops: &[Hop]) -> impl Iterator<Item = &Hop> {
    hops.iter().filter(|hop| hop.grad.is_some())
}

/// Labels of a batch that count in a loss.
fn count_labels(batch: &Batch) -> i64 {
    let labels = batch
        .tensors
        .get(LABELS)
        .map_or(&[][..], SampleTensor::ints);
    labels
        .iter()
        .map(|&label| i64::from(label != IGNORED_LABEL))
        .sum()
}

/// What the losses of microbatches are divided by, in all.
pub(crate) fn count(batches: &[Batch], by: LossCount) -> i64 {
    match by {
        LossCount::Labels => batches.iter().map(count_labels).sum(),
        LossCount::Microbatches => {
            let filled = batches.iter().map(|batch| &batch.microbatch.indices);
            filled.map(|indices| i64::from(!indices.is_empty())).sum()
        }
    }
}
