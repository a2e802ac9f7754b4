//! Walks a stage's program: runs each node, frees a value after its last use.

mod cache;
mod halves;
mod regions;
mod ring;

pub use cache::{Continuation, KvCache, NextPositions, Tail};

use crate::{
    Error, NodeId, Op, Overlap, ParamId, Result, SharedBackend, Source, StageProgram, Step,
    TensorType, Value, ValueId,
    autodiff::Phase,
    backend::{Call, GradSink, RunContext},
    op::{RegionKind, ResultMemory},
    program::Halves,
};
use halves::InHalves;
use merak_mpu::{Axis, Group, Mpu};
use regions::{Crossing, Started};
use std::{collections::BTreeMap, fmt, sync::Arc};

/// Gives the process group along a mesh axis.
pub trait AxisGroups: fmt::Debug + Send + Sync {
    /// The group, or `None` where the axis has one rank.
    fn along(&self, axis: Axis) -> Option<Group>;
}

/// A rank on its own.
#[derive(Debug, Clone, Copy, Default)]
pub struct SingleRank;

impl AxisGroups for SingleRank {
    fn along(&self, _: Axis) -> Option<Group> {
        None
    }
}

/// The parameters of a program, by their position in it. Nodes read them in the order of
/// [`StageProgram::param_reads`].
pub trait Params: fmt::Debug {
    /// The value of a parameter.
    ///
    /// # Errors
    /// When it cannot be had; the pass ends with this error.
    fn value(&self, param: usize) -> Result<Value>;
}

/// Parameters that lie in memory.
impl Params for Vec<Value> {
    fn value(&self, param: usize) -> Result<Value> {
        let value = self.get(param).cloned();
        value.ok_or(Error::NoParam {
            index: param,
            found: self.len(),
        })
    }
}

/// Named tensors of one microbatch.
pub type Batch = BTreeMap<String, Value>;

/// Runs one stage's program, microbatch by microbatch.
#[derive(Debug, Clone)]
pub struct Interpreter {
    program: Arc<StageProgram>,
    backend: SharedBackend,
    groups: Arc<dyn AxisGroups>,
    use_counts: Arc<[u32]>,
    /// For each node, the types of its results.
    result_types: Arc<[Vec<TensorType>]>,
    /// For each value, the gradient slots that it feeds.
    grad_slots: Arc<BTreeMap<ValueId, usize>>,
    /// What runs on halves of the microbatch.
    halves: Option<Arc<Halves>>,
}

/// Live values of one microbatch between its forward and its last backward.
#[derive(Debug)]
pub struct Frame {
    slots: Vec<Option<Value>>,
    remaining: Vec<u32>,
    /// Collectives that have not ended, by their results, whole or a half.
    started: BTreeMap<(ValueId, Option<usize>), Started>,
    /// Values in halves.
    halves: InHalves,
    context: RunContext,
    recomputed: bool,
}

/// The result of a forward.
#[derive(Debug)]
pub struct Forwarded {
    /// The values that later phases need.
    pub frame: Frame,
    /// Values for the next stage, as [`StageProgram::send`].
    pub send: Vec<Value>,
    /// Values of the model's outputs, as [`StageProgram::outputs`].
    pub outputs: Vec<Value>,
}

impl Interpreter {
    /// Prepares a program to run on a backend.
    pub fn new(
        program: Arc<StageProgram>,
        backend: SharedBackend,
        groups: Arc<dyn AxisGroups>,
    ) -> Self {
        let use_counts = program.use_counts().into();
        let (graph, nodes) = (&program.graph, program.graph.nodes().iter());
        let types = nodes.map(|node| {
            let outputs = node.outputs.iter();
            outputs.map(|&output| graph.ty(output).clone()).collect()
        });
        let result_types = types.collect();
        let halves = program.halves().map(Arc::new);
        let interpreter = Self {
            program,
            backend,
            groups,
            use_counts,
            result_types,
            grad_slots: Arc::default(),
            halves,
        };
        interpreter.with_first_slot(0)
    }

    /// Accumulates gradients from slot `first` of a store on, where several programs share one.
    #[must_use]
    pub fn with_first_slot(mut self, first: usize) -> Self {
        let grads = self.program.grads.iter().enumerate();
        let slots = grads.map(|(slot, grad)| (grad.value, first + slot));
        self.grad_slots = Arc::new(slots.collect());
        self
    }

    /// The program.
    pub fn program(&self) -> &StageProgram {
        &self.program
    }

    /// The backend.
    pub fn backend(&self) -> &SharedBackend {
        &self.backend
    }

    /// Runs the forward of one microbatch.
    ///
    /// `params` are the stage's parameters, `batch` holds the stage's inputs by name
    /// (others are ignored), `received` the values of [`StageProgram::recv`].
    ///
    /// # Errors
    /// When an input is missing, a value is of another type, there are more or fewer values than
    /// the program has, or a node fails.
    pub fn forward(
        &self,
        params: &dyn Params,
        batch: &Batch,
        received: Vec<Value>,
        context: RunContext,
    ) -> Result<Forwarded> {
        let mut frame = self.begin(batch, received, context)?;
        self.run(&mut frame, params, &self.program.forward, None)?;
        self.end(frame, params)
    }

    /// A new frame that holds the inputs of a forward.
    fn begin(&self, batch: &Batch, received: Vec<Value>, context: RunContext) -> Result<Frame> {
        let mut frame = Frame {
            slots: vec![None; self.program.graph.num_values()],
            remaining: self.use_counts.to_vec(),
            started: BTreeMap::new(),
            halves: InHalves::default(),
            context,
            recomputed: false,
        };
        for port in &self.program.inputs {
            let ty = self.program.graph.ty(port.value);
            let value = batch
                .get(&port.name)
                .ok_or_else(|| missing(&port.name, ty, batch))?;
            self.bind(&mut frame, port.value, &port.name, value.clone())?;
        }
        check_count(
            "values of the stage before",
            self.program.recv.len(),
            &received,
        )?;
        for (hop, value) in self.program.recv.iter().zip(received) {
            self.bind(&mut frame, hop.value, &hop.name, value)?;
        }
        Ok(frame)
    }

    /// The result of a forward that has run.
    fn end(&self, mut frame: Frame, params: &dyn Params) -> Result<Forwarded> {
        let send = self
            .program
            .send
            .iter()
            .map(|hop| self.take(&mut frame, params, hop.value))
            .collect::<Result<_>>()?;
        let outputs = self
            .program
            .outputs
            .iter()
            .map(|port| self.take(&mut frame, params, port.value))
            .collect::<Result<_>>()?;
        self.settle_all(&mut frame)?;
        Ok(Forwarded {
            frame,
            send,
            outputs,
        })
    }

    /// Recomputes the values that the forward did not keep, before the gradient arrives.
    ///
    /// # Errors
    /// When a node fails.
    pub fn recompute(&self, frame: &mut Frame, params: &dyn Params) -> Result<()> {
        if !frame.recomputed {
            self.run_phases(frame, params, &[Phase::Recompute], None)?;
            frame.recomputed = true;
        }
        Ok(())
    }

    /// Runs the whole backward: returns the gradients of [`StageProgram::recv`] and adds those of
    /// parameters to `store`.
    ///
    /// `grads` are the gradients of [`StageProgram::send`] that have one, `loss_grad` that of the
    /// loss.
    ///
    /// # Errors
    /// When a gradient is of another type, there are more or fewer of them than the program has,
    /// the store has no room for one, or a node fails.
    pub fn backward(
        &self,
        frame: &mut Frame,
        params: &dyn Params,
        grads: Vec<Value>,
        loss_grad: f64,
        store: &mut dyn GradSink,
    ) -> Result<Vec<Value>> {
        self.bind_grads(frame, grads, loss_grad)?;
        let phases = frame.backward_phases();
        self.run_phases(frame, params, phases, Some(store))?;
        self.take_input_grads(frame, params)
    }

    /// Runs the input half of the backward.
    ///
    /// # Errors
    /// As [`Interpreter::backward`].
    pub fn backward_input(
        &self,
        frame: &mut Frame,
        params: &dyn Params,
        grads: Vec<Value>,
        loss_grad: f64,
    ) -> Result<Vec<Value>> {
        self.bind_grads(frame, grads, loss_grad)?;
        let phases = frame.input_phases();
        self.run_phases(frame, params, phases, None)?;
        self.take_input_grads(frame, params)
    }

    /// Runs the weight half of the backward, after the input half.
    ///
    /// # Errors
    /// When a node fails.
    pub fn backward_weight(
        &self,
        frame: &mut Frame,
        params: &dyn Params,
        store: &mut dyn GradSink,
    ) -> Result<()> {
        self.run_phases(frame, params, &[Phase::BackwardWeight], Some(store))
    }

    fn run_phases(
        &self,
        frame: &mut Frame,
        params: &dyn Params,
        phases: &[Phase],
        store: Option<&mut dyn GradSink>,
    ) -> Result<()> {
        let nodes = self.program.backward.iter().copied();
        let nodes = nodes.filter(|node| phases.contains(&self.program.phases[node.index()]));
        self.run(frame, params, &nodes.collect::<Vec<_>>(), store)
    }

    /// Runs nodes, on halves where their program says so; gradients of parameters go to `store`.
    fn run(
        &self,
        frame: &mut Frame,
        params: &dyn Params,
        nodes: &[NodeId],
        mut store: Option<&mut dyn GradSink>,
    ) -> Result<()> {
        let is_weight = |node: NodeId| self.program.phases[node.index()] == Phase::BackwardWeight;
        let mut last = 0;
        for step in self.program.steps_of(nodes, self.halves.as_deref()) {
            match step {
                Step::Whole(node) => {
                    Self::end_stretch(frame);
                    match store.as_deref_mut() {
                        Some(store) if is_weight(node) => {
                            self.accumulate(frame, params, node, store)?;
                        }
                        _ => self.step(frame, params, node)?,
                    }
                }
                Step::Half(node, half) => {
                    if half < last {
                        Self::end_stretch(frame);
                    }
                    last = half;
                    match store.as_deref_mut() {
                        Some(store) if is_weight(node) => {
                            self.half_step(frame, params, (node, half), Some(store))?;
                        }
                        _ => self.half_step(frame, params, (node, half), None)?,
                    }
                }
                Step::Wait => self.settle_all(frame)?,
            }
        }
        Self::end_stretch(frame);
        self.settle_all(frame)
    }

    fn bind_grads(&self, frame: &mut Frame, grads: Vec<Value>, loss_grad: f64) -> Result<()> {
        if let Some(seed) = self.program.loss_grad {
            let ty = self.program.graph.ty(seed).clone();
            frame.slots[seed.index()] =
                Some(self.backend.from_bytes(&ty, &loss_grad.to_ne_bytes())?);
        }
        let hops = self
            .program
            .send
            .iter()
            .filter_map(|hop| hop.grad.map(|grad| (hop, grad)));
        let expected = hops.clone().count();
        check_count("gradients of sent values", expected, &grads)?;
        for ((hop, slot), value) in hops.zip(grads) {
            self.bind(frame, slot, &hop.name, value)?;
        }
        Ok(())
    }

    fn take_input_grads(&self, frame: &mut Frame, params: &dyn Params) -> Result<Vec<Value>> {
        self.program
            .recv
            .iter()
            .filter_map(|hop| hop.grad)
            .map(|grad| self.take(frame, params, grad))
            .collect()
    }

    fn bind(&self, frame: &mut Frame, slot: ValueId, name: &str, value: Value) -> Result<()> {
        self.check_type(slot, name, &value)?;
        if frame.remaining[slot.index()] > 0 {
            frame.slots[slot.index()] = Some(value);
        }
        Ok(())
    }

    /// Refuses a value of another type than the program has it.
    fn check_type(&self, id: ValueId, name: &str, value: &Value) -> Result<()> {
        let expected = self.program.graph.ty(id);
        if value.ty() == expected {
            return Ok(());
        }
        Err(Error::InputType {
            name: name.to_owned(),
            expected: expected.to_string(),
            found: value.ty().to_string(),
        })
    }

    /// Reads a parameter, whose value in the graph is `id`.
    fn param(&self, params: &dyn Params, id: ValueId, param: ParamId) -> Result<Value> {
        let value = params.value(param.index())?;
        self.check_type(id, &self.program.graph.param(param).name, &value)?;
        Ok(value)
    }

    /// Reads a value; the last read takes it out of the frame.
    fn take(&self, frame: &mut Frame, params: &dyn Params, id: ValueId) -> Result<Value> {
        if let Source::Param(param) = self.program.graph.value(id).source {
            return self.param(params, id, param);
        }
        if self.program.overlap > Overlap::None {
            self.settle(frame, id)?;
            self.join_halves(frame, id)?;
        }
        let remaining = &mut frame.remaining[id.index()];
        *remaining = remaining.saturating_sub(1);
        let slot = &mut frame.slots[id.index()];
        let value = if *remaining == 0 {
            slot.take()
        } else {
            slot.clone()
        };
        value.ok_or_else(|| Error::Order {
            value: self.describe(id),
        })
    }

    fn describe(&self, id: ValueId) -> String {
        self.program.graph.producer(id).map_or_else(
            || id.to_string(),
            |node| self.program.graph.node(node).name.to_string(),
        )
    }

    fn step(&self, frame: &mut Frame, params: &dyn Params, id: NodeId) -> Result<()> {
        let inputs = self.operands(frame, params, id)?;
        let context = frame.context;
        let call = self.call(id, &context);
        if let Some((kind, group)) = self
            .border(call)
            .filter(|_| self.program.overlap > Overlap::None)
        {
            let operand = first(call, inputs)?;
            match self.start_crossing(call, operand, &group, kind)? {
                Crossing::Done(value) => self.keep(frame, id, vec![value]),
                Crossing::Started(started) => {
                    let result = self.program.graph.node(id).outputs[0];
                    frame.started.insert((result, None), started);
                }
            }
            return Ok(());
        }
        let values = self.execute(call, inputs)?;
        self.keep(frame, id, values);
        Ok(())
    }

    /// Waits for the collective whose result a value is, if it has not ended.
    fn settle(&self, frame: &mut Frame, value: ValueId) -> Result<()> {
        let started = frame.started.remove(&(value, None));
        let producer = self.program.graph.producer(value);
        let (Some(started), Some(node)) = (started, producer) else {
            return Ok(());
        };
        let context = frame.context;
        let call = self.call(node, &context);
        if let Some((kind, _)) = self.border(call) {
            let value = self.finish_crossing(call, started, kind)?;
            self.keep(frame, node, vec![value]);
        }
        Ok(())
    }

    /// Waits for all collectives: other ranks are not kept waiting between passes.
    fn settle_all(&self, frame: &mut Frame) -> Result<()> {
        while let Some(&(value, half)) = frame.started.keys().next() {
            match half {
                None => self.settle(frame, value)?,
                Some(half) => self.settle_half(frame, (value, half))?,
            }
        }
        Ok(())
    }

    fn accumulate(
        &self,
        frame: &mut Frame,
        params: &dyn Params,
        id: NodeId,
        store: &mut dyn GradSink,
    ) -> Result<()> {
        let node = self.program.graph.node(id);
        let inputs = self.operands(frame, params, id)?;
        let slots = self.slots_of(id);
        slots.iter().try_for_each(|&slot| store.open(slot))?;
        let call = self.call(id, &frame.context);
        if node.op.region().is_some() {
            // Sharded work used the whole parameter: its gradient crosses the region's border
            // first.
            let summed = self.execute(call, inputs)?;
            let add = Call {
                op: &Op::Identity,
                ..call
            };
            self.backend
                .accumulate(add, summed, store.store(), &slots)?;
        } else {
            self.backend
                .accumulate(call, inputs, store.store(), &slots)?;
        }
        slots.into_iter().try_for_each(|slot| store.written(slot))
    }

    /// The gradient slots that the results of a node feed.
    fn slots_of(&self, id: NodeId) -> Vec<usize> {
        let outputs = self.program.graph.node(id).outputs.iter();
        let slots = outputs.filter_map(|output| self.grad_slots.get(output));
        slots.copied().collect()
    }

    /// Reads the operands of a node.
    fn operands(&self, frame: &mut Frame, params: &dyn Params, id: NodeId) -> Result<Vec<Value>> {
        let inputs = self.program.graph.node(id).inputs.iter();
        inputs
            .map(|&input| self.take(frame, params, input))
            .collect()
    }

    /// A node as the backend sees it.
    fn call<'a>(&'a self, id: NodeId, context: &'a RunContext) -> Call<'a> {
        let node = self.program.graph.node(id);
        Call {
            name: &node.name,
            op: &node.op,
            results: &self.result_types[id.index()],
            context,
        }
    }

    /// Keeps the results of a node that are read later.
    fn keep(&self, frame: &mut Frame, id: NodeId, values: Vec<Value>) {
        let outputs = &self.program.graph.node(id).outputs;
        for (&output, value) in outputs.iter().zip(values) {
            if frame.remaining[output.index()] > 0 {
                frame.slots[output.index()] = Some(value);
            }
        }
    }

    fn execute(&self, call: Call<'_>, inputs: Vec<Value>) -> Result<Vec<Value>> {
        if call.op.has_kernel() {
            // A shared operand is not overwritten.
            let may_overwrite = call.op.result_memory() == ResultMemory::Operand;
            let _shared = (!may_overwrite).then(|| inputs.clone());
            return self.backend.run(call, inputs);
        }
        if let Some(ring) = call.op.ring() {
            return self.around(call, &ring, inputs);
        }
        let Some((kind, group)) = self.border(call) else {
            return Ok(inputs);
        };
        let value = match self.start_crossing(call, first(call, inputs)?, &group, kind)? {
            Crossing::Done(value) => value,
            Crossing::Started(started) => self.finish_crossing(call, started, kind)?,
        };
        Ok(vec![value])
    }

    /// The border that a node is, and the ranks that it is one between, unless there is one.
    fn border<'a>(&self, call: Call<'a>) -> Option<(RegionKind<'a>, Group)> {
        let region = call.op.region()?;
        Some((region.kind, self.groups.along(region.axis)?))
    }
}

impl Frame {
    /// The phases that the input half of the backward runs: the recomputation unless it has run.
    pub fn input_phases(&self) -> &'static [Phase] {
        let phases = self.backward_phases();
        &phases[..phases.len() - 1]
    }

    /// The phases that the whole backward runs.
    pub fn backward_phases(&self) -> &'static [Phase] {
        let phases = &[
            Phase::Recompute,
            Phase::BackwardInput,
            Phase::BackwardWeight,
        ];
        if self.recomputed {
            &phases[1..]
        } else {
            phases
        }
    }

    /// Bytes of the values that are alive, each storage counted for every value that shares it.
    pub fn live_bytes(&self) -> usize {
        self.slots
            .iter()
            .flatten()
            .map(|value| value.ty().size_bytes())
            .sum::<usize>()
            + self.halves.bytes()
    }
}

/// The operand of a border.
fn first(call: Call<'_>, inputs: Vec<Value>) -> Result<Value> {
    inputs.into_iter().next().ok_or_else(|| Error::Order {
        value: call.name.to_owned(),
    })
}

fn check_count(what: &'static str, expected: usize, given: &[Value]) -> Result<()> {
    let found = given.len();
    let error = Error::Count {
        what,
        expected,
        found,
    };
    (found == expected).then_some(()).ok_or(error)
}

fn missing(name: &str, ty: &TensorType, batch: &Batch) -> Error {
    let given = batch.keys().cloned().collect::<Vec<_>>().join(", ");
    Error::MissingInput {
        name: name.to_owned(),
        expected: ty.to_string(),
        given,
    }
}

impl AxisGroups for Mpu {
    fn along(&self, axis: Axis) -> Option<Group> {
        let group = match axis {
            Axis::Tensor => self.tensor_parallel_group(),
            Axis::Sequence => self.sequence_parallel_group(),
            Axis::Data => self.data_parallel_group(),
            Axis::Pipeline => self.pipeline_parallel_group(),
        };
        (!group.is_single()).then(|| group.clone())
    }
}
