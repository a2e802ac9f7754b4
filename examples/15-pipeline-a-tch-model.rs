//! Trains a model written for the crate tch over data x pipeline ranks, with its layers and
//! libtorch's autograd, and saves it (merak-mpu, merak-pipe, merak-zero, merak-ckpt). Example 13 is
//! the same for candle.
//!
//! `cargo run -p merak-examples --features tch --example 15-pipeline-a-tch-model [PP [DP]]`, 2 by
//! default. It needs libtorch 2.11 (docs/LIBTORCH.md).
#![expect(clippy::print_stdout, reason = "an example prints")]

use anyhow::{Result, ensure};
use merak_ckpt::Layout;
use merak_examples::{compare_with_one_rank, save, starting_weight, wave};
use merak_mpu::{Degrees, Mpu, ReduceOp, tch::vars_by_name};
use merak_pipe::{
    GroupLink, MicrobatchId, PipelineEngine, ScheduleKind, Size, StageId, TensorModel, TensorStages,
};
use merak_zero::{TensorOptimizer, ZeroConfig, ZeroGroups};
use std::{collections::BTreeMap, path::Path};
use tch::nn::{Linear, LinearConfig, Module, VarStore, linear};
use tch::{Device, Reduction, TchError, Tensor};

const LAYERS: usize = 8;
const WIDTHS: [i64; LAYERS + 1] = [2, 32, 32, 32, 32, 32, 32, 32, 1];
const MICROBATCHES: usize = 8;
const STEPS: u64 = 40;

/// The layers of this rank's stages, in plain tch, and the first microbatch of its replica.
struct Net {
    layers: BTreeMap<StageId, Vec<Linear>>,
    first: usize,
    microbatches: usize,
}

impl TensorModel for Net {
    type Tensor = Tensor;
    type Error = TchError;

    fn input(&self, microbatch: MicrobatchId) -> Result<Tensor, TchError> {
        let (points, _) = wave(self.first + microbatch.0);
        Tensor::f_from_slice(&points)?.f_view([-1, 2])
    }

    fn forward(&self, stage: StageId, x: &Tensor) -> Result<Tensor, TchError> {
        let layers = self.layers[&stage].iter();
        Ok(layers.fold(x.shallow_clone(), |x, layer| layer.forward(&x).tanh()))
    }

    fn loss(&self, output: &Tensor, microbatch: MicrobatchId) -> Result<Tensor, TchError> {
        let (_, wave) = wave(self.first + microbatch.0);
        let wave = Tensor::f_from_slice(&wave)?.f_view([-1, 1])?;
        let loss = output.f_mse_loss(&wave, Reduction::Mean)?;
        loss.f_div_scalar(self.microbatches as f64)
    }
}

/// The layers of one of some stages.
fn layers(stage: usize, stages: usize, store: &VarStore) -> Vec<Linear> {
    let own = stage * LAYERS / stages..(stage + 1) * LAYERS / stages;
    let config = LinearConfig::default();
    let make = |i| linear(store.root() / i, WIDTHS[i], WIDTHS[i + 1], config);
    own.map(make).collect()
}

/// Trains on one rank of a world and saves the weights; returns the losses of the steps.
pub(crate) fn train(mpu: &Mpu, folder: &Path) -> Result<Vec<f64>> {
    let Degrees { pp, dp, .. } = mpu.degrees();
    let (rank, microbatches) = (mpu.pipeline_parallel_rank(), MICROBATCHES / dp);
    let schedule = ScheduleKind::ZbV.generate(Size::new(pp, microbatches).with_chunks(2))?;
    let (own, stages) = (schedule.stages_of(rank)?, schedule.size.stages());
    ensure!(
        stages <= LAYERS && microbatches * dp == MICROBATCHES,
        "{LAYERS} layers and {MICROBATCHES} microbatches are too few for pp {pp} x dp {dp}"
    );

    let store = VarStore::new(Device::Cpu);
    let own = own.into_iter();
    let own = own.map(|stage| (stage, layers(stage.0, stages, &store)));
    let net = Net {
        layers: own.collect(),
        first: mpu.data_parallel_rank() * microbatches,
        microbatches,
    };
    for (name, mut var) in vars_by_name(&store) {
        let values = (0..var.numel()).map(|i| starting_weight(&name, i));
        let values = Tensor::f_from_slice(&values.collect::<Vec<_>>())?.f_view_as(&var)?;
        tch::no_grad(|| var.f_copy_(&values))?;
    }

    let groups = ZeroGroups {
        data_sequence: mpu.data_parallel_group().clone(),
        model: mpu.pipeline_parallel_group().clone(),
    };
    let config = ZeroConfig::default();
    let mut optimizer = TensorOptimizer::new(vars_by_name(&store), config, groups, |spec| spec)?;
    let mut module = TensorStages::new(net, stages, vars_by_name(&store));
    let mut link = GroupLink::new(mpu.pipeline_parallel_group().clone());
    let engine = PipelineEngine::new(&schedule, rank)?;
    let mut losses = Vec::new();
    for _ in 0..STEPS {
        engine.run(&mut module, &mut link)?;
        let mut grads = module.take_grads();
        optimizer.step_with(3e-3, |name, _| grads.remove(name))?;
        let loss = module.take_loss() / dp as f64;
        losses.push(mpu.world_group().all_reduce_scalar(loss, ReduceOp::Sum)?);
    }
    let mut own = vars_by_name(&store);
    own.retain(|_, _| mpu.data_parallel_rank() == 0); // replicas hold the same
    save(mpu, folder, STEPS, |draft| {
        draft.write_tensors(mpu.rank().0, &own, |_, sizes| Ok(Layout::whole(sizes)))
    })?;
    Ok(losses)
}

fn main() -> Result<()> {
    println!("{}", compare_with_one_rank(train)?);
    Ok(())
}
