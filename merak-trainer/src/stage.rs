//! One rank's stages: their programs, their parameters, their gradients, their optimizer.

mod average;
mod gathered;
mod gradients;
mod magnitudes;
mod module;
mod params;
mod products;
#[cfg(feature = "tch")]
mod tch;
mod tied;

pub(crate) use self::{
    gathered::StageValues,
    gradients::grad_store,
    params::{ParamMemory, StageParams, StateRoom, floats},
};
pub(crate) use module::{Decoded, StepInputs, StepModule, StepResult, count};

use crate::{
    config::{BackendChoice, CheckedArguments, Offload},
    error::Result,
    machine::num_cores,
    memory::MemoryNeed,
    plan::{ParamGroups, Plan},
};
use merak_mpu::{Buffer, DType, Locality, Memory, Mpu, ReduceOp};
use merak_partition::RankPrograms;
use merak_pipe::PipelineEngine;
use merak_trace::{
    Axis, GradStore, Interpreter, Param, RunContext, SharedBackend, StageProgram, Threads,
    backend::candle::Candle, each_initial_values,
};
use merak_zero::{
    GlobalParams, OptimizerKind, ParamSpec, StepDevice, TensorCut, UpdateRule, ZeroGroups,
    ZeroOptimizer,
};
use std::sync::Arc;

/// This rank's slices of parameters, or their gradients, by the parameters' names.
pub type NamedTensors = Vec<(String, Vec<f32>)>;

/// What a rank holds and runs.
#[derive(Debug)]
pub(crate) struct RankStages {
    pub(crate) plan: Arc<Plan>,
    pub(crate) mpu: Arc<Mpu>,
    pub(crate) backend: SharedBackend,
    /// In model order.
    pub(crate) stages: Vec<Stage>,
    /// The parameters of all stages, each once.
    pub(crate) table: Vec<Param>,
    pub(crate) params: StageParams,
    /// The trained parameters where replicas divide them.
    buckets: Option<Arc<gathered::Buckets>>,
    /// Which of these parameters this rank owns, among the ranks that hold the same slice.
    pub(crate) owned: Vec<bool>,
    pub(crate) optimizer: ZeroOptimizer,
    grads: GradStore,
    tied: tied::TiedGrads,
    /// What completes each bucket of gradients.
    completion: gradients::Completion,
    /// Whether complete buckets are reduced during the backward.
    reduces_early: bool,
    /// Whether the forward pass receives what other replicas have stepped. Where ranks share cores
    /// they take turns, within which they wait for no replica.
    arrives_late: bool,
    pub(crate) seed: u64,
    /// Whether no parameter has values yet.
    pub(crate) is_blank: bool,
}

/// One stage of a rank.
#[derive(Debug)]
pub(crate) struct Stage {
    /// Its number in the model.
    pub(crate) number: usize,
    pub(crate) interpreter: Interpreter,
    /// Its parameters, in the order of its program.
    pub(crate) values: StageValues,
}

impl RankStages {
    /// Builds the rank's part of the plan, with the rule of another program if there is one; its
    /// parameters are without values until [`RankStages::draw`].
    pub(crate) fn new(
        plan: Arc<Plan>,
        mpu: Arc<Mpu>,
        args: &CheckedArguments,
        num_threads: usize,
        rule: Option<&Arc<dyn UpdateRule>>,
    ) -> Result<Self> {
        let Executor {
            backend,
            optimizer_device,
        } = Executor::new(args, mpu.locality(), num_threads)?;
        let programs = plan.rank_programs(mpu.pipeline_parallel_rank())?;
        let groups = ZeroGroups {
            data_sequence: mpu.data_sequence_parallel_group().clone(),
            model: mpu.model_parallel_group().clone(),
        };
        let tied = tied::TiedGrads::new(&plan, &programs, &mpu)?;
        let owned = owned(&programs.params, &mpu, &tied);
        let specs = param_specs(args, &plan, &programs.params, &owned);
        let trained = plan.trained_params();
        let model =
            GlobalParams::new(trained.map(|param| (param.name.clone(), param.local.numel())));
        let optimizer = ZeroOptimizer::new(specs, model, args.zero_config(num_threads), groups)?;
        let optimizer = match rule {
            Some(rule) => optimizer.with_rule(Arc::clone(rule))?,
            None => optimizer,
        };
        let room = state_room(args)?;
        let optimizer = equipped(room.of_state(optimizer)?, optimizer_device, num_threads)?
            .in_tensor_group(mpu.tensor_parallel_group().clone());

        let params = StageParams::new(&*backend, &programs.params, &optimizer, &room)?;
        let memory = params.memory();
        let buckets = gathered::Buckets::new(&programs.params, &optimizer, memory, &backend);
        let mut grads = grad_store(&programs, &optimizer, &*backend)?;
        let stages = stages(&programs, (&params, buckets.as_ref()), &backend, &mpu);
        let on_host = matches!(grads.buffers[0].memory(), Memory::Host(_));
        // What goes from a device through the host would stop a pass.
        let moves_beside = on_host || mpu.moves_device_memory();
        let replicas = mpu.data_sequence_parallel_group().world_size();
        let reduces_early = replicas > 1 && (moves_beside || optimizer.divides_gradients());
        let has_cores = args.core_sharers() * num_threads <= num_cores();
        Ok(Self {
            completion: gradients::Completion::new(&optimizer, &grads.slots, &tied.slots()),
            reduces_early,
            arrives_late: moves_beside && (has_cores || !on_host),
            plan,
            mpu,
            backend,
            stages,
            table: programs.params,
            params,
            buckets,
            owned,
            optimizer,
            grads,
            tied,
            seed: args.seed,
            is_blank: true,
        })
    }

    /// Whether the last stage is among them, which has losses and logits.
    pub(crate) fn has_last(&self) -> bool {
        self.plan.last_rank() == self.mpu.pipeline_parallel_rank()
    }

    /// Whether one of them reads data.
    pub(crate) fn reads_data(&self) -> bool {
        self.inputs().next().is_some()
    }

    /// The names of the data that they read.
    pub(crate) fn inputs(&self) -> impl Iterator<Item = &str> {
        let programs = self.stages.iter().map(|stage| stage.interpreter.program());
        programs.flat_map(|program| program.inputs.iter().map(|port| &*port.name))
    }

    /// The engine of this rank for forwards of some microbatches.
    ///
    /// # Communication
    /// That of [`RankStages::settle`].
    pub(crate) fn forward_engine(&self, microbatches: usize) -> Result<PipelineEngine> {
        self.settle()?;
        let schedule = self.plan.schedule.forwards(microbatches)?;
        Ok(PipelineEngine::new(
            &schedule,
            self.mpu.pipeline_parallel_rank(),
        )?)
    }

    /// Draws the starting values of the parameters that `draws` selects, and no others: drawing a
    /// large model takes seconds.
    pub(crate) fn draw(&mut self, num_threads: usize, draws: impl Fn(usize) -> bool) -> Result<()> {
        self.is_blank = false;
        if !(0..self.table.len()).any(&draws) {
            return Ok(());
        }
        let threads = Threads::new(num_threads).map_err(|source| merak_trace::Error::Kernel {
            node: "initialisation".into(),
            source,
        })?;
        let place = self.mpu.coord();
        let params = &self.table;
        self.params.fill(&mut |index, put| {
            if draws(index) {
                each_initial_values(&threads, self.seed, &params[index], place, put);
            }
        });
        Ok(())
    }

    /// Adds up the uses of tied weights, and ends the reduction of all gradients. It comes before
    /// anything else in the group of replicas, since buckets may still wait for their start.
    pub(crate) fn reduce_gradients(&mut self) -> Result<()> {
        self.tied.sum(&*self.backend, &mut self.grads)?;
        let (grads, optimizer) = (&mut self.grads, &mut self.optimizer);
        Ok(self.completion.end_step(grads, optimizer)?)
    }

    /// Clips and applies the reduced gradients, and clears them.
    pub(crate) fn update(&mut self, lr: f64) -> Result<merak_zero::UpdateReport> {
        self.settle()?;
        let (optimizer, grads) = (&mut self.optimizer, &mut self.grads.buffers[0]);
        let step = |params: &mut dyn Buffer| optimizer.start_step(params, &mut **grads, lr);
        let (report, arrivals) = self.params.update(step)?;
        self.params.expect(arrivals);
        if !self.arrives_late {
            self.settle()?;
        }
        self.clear_gradients();
        Ok(report)
    }

    /// Waits for the parameters that other replicas have stepped. All replicas call it together,
    /// before anything but a training step reads or changes the parameters.
    ///
    /// # Communication
    /// After a step in ZeRO stages 1 and 2, an all-gather of each bucket that has not arrived.
    pub(crate) fn settle(&self) -> Result<()> {
        Ok(self.params.memory().settle()?)
    }

    /// What the nodes of a microbatch may ask about the run; `first_position` is the place of its
    /// first sample in the epoch's order.
    pub(crate) fn context(&self, step: usize, first_position: usize, training: bool) -> RunContext {
        RunContext {
            seed: self.seed,
            step: step as u64,
            sample_base: first_position as u64,
            training,
            place: self.mpu.coord(),
        }
    }

    /// The most bytes of activations that were alive at once.
    pub(crate) fn peak_activation_bytes(&self) -> usize {
        self.backend.memory().peak_bytes()
    }

    /// The element type in which a parameter is kept, as checkpoints call it.
    pub(crate) fn stored(&self, index: usize) -> merak_ckpt::DType {
        match self.params.dtype(index) {
            DType::BF16 => merak_ckpt::DType::BF16,
            DType::F16 => merak_ckpt::DType::F16,
            _ => merak_ckpt::DType::F32,
        }
    }

    /// The bytes of parameters, gradients and optimizer state, and the peak of activations.
    pub(crate) fn memory(&self) -> MemoryNeed {
        let buffers = self.grads.buffers.iter();
        let state = self.optimizer.state();
        let elements: usize = state.slices().map(|slice| slice.values.len()).sum();
        let in_files = state.num_in_files();
        let resident = self.buckets.as_ref().map_or(0, |b| b.num_resident_bytes());
        MemoryNeed {
            weights: self.params.num_bytes() + resident,
            gradients: buffers.map(|b| b.size_bytes()).sum(),
            optimizer: (elements - in_files) * size_of::<f32>(),
            exchange: self.optimizer.most_summed_bytes(),
            // They come and go.
            gathered: 0,
            files: in_files * size_of::<f32>() + self.params.num_file_bytes(),
            // The backend counts gathered weights as activations.
            activations: self.peak_activation_bytes().saturating_sub(resident),
            pool: 0,
            largest: None,
        }
    }

    /// A copy of the gradients of this rank's trained parameters, by name, before they are reduced
    /// over replicas and without the loss scale.
    ///
    /// # Communication
    /// The sums over the uses of tied weights, and an all-reduce over the tensor group for each
    /// parameter of which its ranks have summands.
    pub(crate) fn gradients(&mut self) -> Result<NamedTensors> {
        self.tied.sum(&*self.backend, &mut self.grads)?;
        let params = self.optimizer.layout().params().iter().enumerate();
        let unscale = (1.0 / self.optimizer.loss_scale()) as f32;
        let gradient = |(index, param): (usize, &ParamSpec)| {
            let mut values = gradients::read_gradient(&self.grads, &self.optimizer, index);
            for value in &mut values {
                *value *= unscale;
            }
            if param.summed {
                let group = self.mpu.tensor_parallel_group();
                values = group.all_reduce_vec(values, ReduceOp::Sum)?;
            }
            Ok((param.name.clone(), values))
        };
        params.map(gradient).collect()
    }

    /// A copy of this rank's parameters, by name.
    ///
    /// # Communication
    /// That of [`RankStages::read_floats`].
    pub(crate) fn parameters(&self) -> Result<NamedTensors> {
        let params = &self.table;
        let mut out = Vec::new();
        self.read_floats(&mut |all| {
            let named = params.iter().zip(all);
            out = named
                .map(|(param, values)| (param.name.clone(), values.values().into_owned()))
                .collect();
        })?;
        Ok(out)
    }

    /// Shows the values of every parameter in `f32`, in the order of the table.
    ///
    /// # Communication
    /// That of [`RankStages::settle`]. Where replicas divide the parameters, an all-gather of each
    /// bucket, together with all replicas.
    fn read_floats(&self, look: &mut dyn FnMut(&[params::Floats<'_>])) -> Result<()> {
        self.settle()?;
        let divided = match &self.buckets {
            Some(buckets) => buckets.values()?,
            None => Vec::new(),
        };
        self.params.read_floats(&divided, look);
        Ok(())
    }

    /// Keeps all parameters in memory, for passes of which each replica makes a number of its own.
    ///
    /// # Communication
    /// As [`RankStages::read_floats`].
    pub(crate) fn hold_params(&self) -> Result<HeldParams> {
        self.settle()?;
        if let Some(buckets) = &self.buckets {
            buckets.pin()?;
        }
        Ok(HeldParams(self.buckets.clone()))
    }

    /// The positions in the table of the parameters that are trained, in the order of the
    /// optimizer's layout.
    pub(crate) fn trained(&self) -> Vec<usize> {
        let params = self.table.iter().enumerate();
        params
            .filter(|(_, param)| param.trainable)
            .map(|(index, _)| index)
            .collect()
    }

    /// The stages, and what takes their gradients; `missing` are the additions that each bucket
    /// waits for before its reduction starts.
    fn with_sink<'a>(
        &'a mut self,
        missing: &'a mut [Option<usize>],
    ) -> (&'a [Stage], gradients::Reduction<'a>) {
        let reduction = gradients::Reduction {
            grads: &mut self.grads,
            optimizer: &mut self.optimizer,
            backend: &*self.backend,
            completion: &self.completion,
            missing,
        };
        (&self.stages, reduction)
    }

    /// Makes the next step start from zero.
    pub(crate) fn clear_gradients(&mut self) {
        gradients::clear(&mut self.grads, &self.optimizer);
    }
}

/// Keeps divided parameters in memory until it is dropped.
#[must_use = "the parameters are freed when it is dropped"]
pub(crate) struct HeldParams(Option<Arc<gathered::Buckets>>);

impl Drop for HeldParams {
    fn drop(&mut self) {
        if let Some(buckets) = &self.0 {
            buckets.unpin();
        }
    }
}

/// Where the optimizer's state and the masters lie.
fn state_room(args: &CheckedArguments) -> Result<StateRoom> {
    Ok(match args.offload() {
        None => StateRoom::Beside,
        Some(Offload::Host) => StateRoom::Host,
        Some(Offload::Disk) => StateRoom::Files(args.run_folder()?),
    })
}

/// The backend of a rank's nodes, and the device that steps its parameters in place.
pub(crate) struct Executor {
    pub(crate) backend: SharedBackend,
    /// What copies and steps flat buffers where they lie, unless these are plain host memory.
    pub(crate) optimizer_device: Option<OptimizerDevice>,
}

/// The device of flat buffers, and whether the optimizer's state lies there too.
pub(crate) struct OptimizerDevice {
    device: Arc<dyn StepDevice>,
    has_state: bool,
}

impl Executor {
    pub(crate) fn new(
        args: &CheckedArguments,
        place: Locality,
        num_threads: usize,
    ) -> Result<Self, merak_trace::Error> {
        match args.compute.backend {
            BackendChoice::Candle => {
                let backend = Candle::new(num_threads)?.with_units(args.compute.units);
                Ok(Self {
                    backend: Arc::new(backend.with_products(args.products())),
                    optimizer_device: None,
                })
            }
            BackendChoice::Tch => Self::on_tch(args, place, num_threads),
        }
    }

    #[cfg(feature = "tch")]
    fn on_tch(
        args: &CheckedArguments,
        place: Locality,
        num_threads: usize,
    ) -> Result<Self, merak_trace::Error> {
        let backend = tch::backend(args, place, num_threads)?;
        Ok(Self {
            optimizer_device: Some(OptimizerDevice {
                device: Arc::new(tch::Steps::new(Arc::clone(&backend), num_threads)),
                has_state: args.offload().is_none(),
            }),
            backend,
        })
    }

    #[cfg(not(feature = "tch"))]
    fn on_tch(args: &CheckedArguments, _: Locality, _: usize) -> Result<Self, merak_trace::Error> {
        Err(merak_trace::Error::NoDevice {
            device: args.compute.device.to_string(),
            reason: "this build is without the feature tch".to_owned(),
        })
    }
}

/// The optimizer with what a rank has for its arithmetic.
pub(crate) fn equipped(
    mut optimizer: ZeroOptimizer,
    device: Option<OptimizerDevice>,
    num_threads: usize,
) -> Result<ZeroOptimizer> {
    if optimizer.config().optimizer.optim == OptimizerKind::Muon {
        let threads = Threads::new(num_threads).map_err(|source| merak_trace::Error::Kernel {
            node: "optimizer".into(),
            source,
        })?;
        optimizer = optimizer.with_products(Arc::new(products::KernelProducts(threads)));
    }
    Ok(match device {
        Some(OptimizerDevice { device, has_state }) if has_state => optimizer.on_device(device)?,
        Some(OptimizerDevice { device, .. }) => optimizer.reduced_on(device),
        None => optimizer,
    })
}

/// The stages over the rank's parameters and gradients.
pub(crate) fn stages(
    programs: &RankPrograms,
    (params, buckets): (&StageParams, Option<&Arc<gathered::Buckets>>),
    backend: &SharedBackend,
    mpu: &Arc<Mpu>,
) -> Vec<Stage> {
    let mut first_slot = 0;
    let stage = |(number, program): &(usize, Arc<StageProgram>)| {
        let groups = Arc::clone(mpu) as _;
        let interpreter = Interpreter::new(Arc::clone(program), Arc::clone(backend), groups)
            .with_first_slot(first_slot);
        first_slot += program.grads.len();
        let places = programs.places(program);
        Stage {
            number: *number,
            interpreter,
            values: StageValues::new(program, &places, params, buckets),
        }
    };
    programs.stages.iter().map(stage).collect()
}

/// Which parameters this rank owns. Of the ranks of one replica that hold the same slice, one
/// counts it and writes it.
fn owned(table: &[Param], mpu: &Mpu, tied: &tied::TiedGrads) -> Vec<bool> {
    let is_owned = |param: &Param| {
        let is_sharded = param.placements.on(Axis::Tensor).as_shard().is_some();
        (is_sharded || mpu.tensor_parallel_rank() == 0) && tied.owns(&param.name)
    };
    table.iter().map(is_owned).collect()
}

/// The optimizer's view of the stage's parameters: those that are trained.
fn param_specs(
    args: &CheckedArguments,
    plan: &Plan,
    table: &[Param],
    owned: &[bool],
) -> Vec<ParamSpec> {
    let groups = ParamGroups::new(args, &plan.graph);
    let trained = table.iter().zip(owned);
    let trained = trained.filter(|(param, _)| param.trainable);
    let specs = trained.map(|(param, &counts)| {
        let global = plan
            .trained_params()
            .position(|other| other.name == param.name)
            .expect("a stage's parameters are the model's");
        let mut spec = groups.spec(param, global).with_norm(counts);
        let shard = param.placements.on(Axis::Tensor).as_shard();
        spec.cut = shard.map(|shard| TensorCut {
            dim: shard.dim,
            parts: shard.parts.clone(),
        });
        spec.summed = param.summed;
        spec
    });
    specs.collect()
}
