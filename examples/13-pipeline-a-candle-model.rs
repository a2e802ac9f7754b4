//! Trains a model written for candle-nn over data x pipeline ranks, with its layers and its
//! autograd, and saves it (merak-mpu, merak-pipe, merak-zero, merak-ckpt). Example 15 is the same
//! for libtorch.
//!
//! `cargo run -p merak-examples --example 13-pipeline-a-candle-model [PP [DP]]`, 2 by default.
#![expect(clippy::print_stdout, reason = "an example prints")]

use anyhow::{Result, ensure};
use candle_core::{DType, Device, Error, Result as CandleResult, Tensor};
use candle_nn::{Linear, Module, VarBuilder, VarMap, linear, loss::mse};
use merak_ckpt::Layout;
use merak_examples::{ROWS, compare_with_one_rank, save, starting_weight, wave};
use merak_mpu::{Degrees, Mpu, ReduceOp, candle::vars_by_name};
use merak_pipe::{
    GroupLink, MicrobatchId, PipelineEngine, ScheduleKind, Size, StageId, TensorModel, TensorStages,
};
use merak_zero::{TensorOptimizer, ZeroConfig, ZeroGroups};
use std::{collections::BTreeMap, path::Path};

const LAYERS: usize = 8;
const WIDTH: usize = 32;
const MICROBATCHES: usize = 8;
const STEPS: u64 = 40;

/// The layers of this rank's stages, in plain candle-nn, and the first microbatch of its replica.
struct Net {
    layers: BTreeMap<StageId, Vec<Linear>>,
    first: usize,
    microbatches: usize,
}

impl TensorModel for Net {
    type Tensor = Tensor;
    type Error = Error;

    fn input(&self, microbatch: MicrobatchId) -> CandleResult<Tensor> {
        let (points, _) = wave(self.first + microbatch.0);
        Tensor::from_vec(points, (ROWS, 2), &Device::Cpu)
    }

    fn forward(&self, stage: StageId, x: &Tensor) -> CandleResult<Tensor> {
        let mut layers = self.layers[&stage].iter();
        layers.try_fold(x.clone(), |x, layer| layer.forward(&x)?.tanh())
    }

    fn loss(&self, output: &Tensor, microbatch: MicrobatchId) -> CandleResult<Tensor> {
        let (_, wave) = wave(self.first + microbatch.0);
        let wave = Tensor::from_vec(wave, (ROWS, 1), &Device::Cpu)?;
        mse(output, &wave)? / self.microbatches as f64
    }
}

/// The layers of one of some stages.
fn layers(stage: usize, stages: usize, vb: &VarBuilder) -> CandleResult<Vec<Linear>> {
    let widths = |i| if i == 0 { 2 } else { WIDTH };
    let own = stage * LAYERS / stages..(stage + 1) * LAYERS / stages;
    own.map(|i| linear(widths(i), if i + 1 < LAYERS { WIDTH } else { 1 }, vb.pp(i)))
        .collect()
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

    let weights = VarMap::new();
    let vb = VarBuilder::from_varmap(&weights, DType::F32, &Device::Cpu);
    let own = own.into_iter();
    let own = own.map(|stage| Ok((stage, layers(stage.0, stages, &vb)?)));
    let net = Net {
        layers: own.collect::<CandleResult<_>>()?,
        first: mpu.data_parallel_rank() * microbatches,
        microbatches,
    };
    let vars = vars_by_name(weights.data());
    for (name, var) in &vars {
        let values = (0..var.elem_count()).map(|i| starting_weight(name, i));
        var.set(&Tensor::from_iter(values, &Device::Cpu)?.reshape(var.shape())?)?;
    }

    let groups = ZeroGroups {
        data_sequence: mpu.data_parallel_group().clone(),
        model: mpu.pipeline_parallel_group().clone(),
    };
    let config = ZeroConfig::default();
    let mut optimizer = TensorOptimizer::new(vars.clone(), config, groups, |spec| spec)?;
    let mut module = TensorStages::new(net, stages, vars.clone());
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
    let mut own = vars;
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
