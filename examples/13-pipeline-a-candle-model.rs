//! Pipelines a model written for candle-nn alone, with its layers, its autograd and its optimizer (merak-pipe).
//!
//! `cargo run -p merak-examples --example 13-pipeline-a-candle-model [RANKS]`, 2 unless told.
#![expect(clippy::print_stdout, reason = "an example prints")]

use anyhow::{Context, Result, ensure};
use candle_core::{DType, Device, Tensor, Var, backprop::GradStore};
use candle_nn::{
    AdamW, Linear, Module, Optimizer, ParamsAdamW, VarBuilder, VarMap, linear, loss::mse,
};
use merak_examples::count;
use merak_pipe::{Action, Schedule, ScheduleKind, Size, StageModule, run_threads};
use std::{collections::BTreeMap, time::Duration};

const BLOCKS: usize = 4;
const WIDTH: usize = 32;
const MICROBATCHES: usize = 8;
const ROWS: usize = 16;
const STEPS: usize = 40;

/// A residual block, as anybody would write it.
struct Block {
    up: Linear,
    down: Linear,
}

impl Module for Block {
    fn forward(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        x + self.down.forward(&self.up.forward(x)?.gelu()?)?
    }
}

/// Some blocks of the model, and what a step needs of them.
struct Stage {
    embed: Option<Linear>,
    blocks: Vec<Block>,
    head: Option<Linear>,
    vars: Vec<Var>,
    optimizer: AdamW,
    /// By microbatch: the input, and the output or the loss, with candle's graph between them.
    live: BTreeMap<usize, (Var, Tensor)>,
    /// By microbatch: gradients of the weights that are not yet added.
    found: BTreeMap<usize, GradStore>,
    grads: Option<GradStore>,
    loss: f32,
}

impl Stage {
    /// Stage `index` of `stages`.
    fn new(index: usize, stages: usize) -> Result<Self> {
        let weights = VarMap::new();
        let vb = VarBuilder::from_varmap(&weights, DType::F32, &Device::Cpu);
        let layer = |name: &str, from, to| linear(from, to, vb.pp(name));
        let block = |i: usize| {
            let up = layer(&format!("{i}.up"), WIDTH, 2 * WIDTH)?;
            let down = layer(&format!("{i}.down"), 2 * WIDTH, WIDTH)?;
            candle_core::Result::Ok(Block { up, down })
        };
        let own = index * BLOCKS / stages..(index + 1) * BLOCKS / stages;
        let blocks = own.map(block).collect::<candle_core::Result<_>>()?;
        let is_last = index + 1 == stages;
        let embed = (index == 0).then(|| layer("embed", 2, WIDTH)).transpose()?;
        let head = is_last.then(|| layer("head", WIDTH, 1)).transpose()?;
        set_by_name(&weights)?;
        let vars = weights.all_vars();
        let params = ParamsAdamW {
            lr: 3e-3,
            ..ParamsAdamW::default()
        };
        Ok(Self {
            embed,
            blocks,
            head,
            optimizer: AdamW::new(vars.clone(), params)?,
            vars,
            live: BTreeMap::new(),
            found: BTreeMap::new(),
            grads: None,
            loss: 0.0,
        })
    }

    fn run(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        let x = self
            .embed
            .as_ref()
            .map_or(Ok(x.clone()), |layer| layer.forward(x))?;
        let x = self
            .blocks
            .iter()
            .try_fold(x, |x, block| block.forward(&x))?;
        self.head
            .as_ref()
            .map_or(Ok(x.clone()), |layer| layer.forward(&x))
    }
}

impl StageModule for Stage {
    type Payload = Tensor;
    type Error = candle_core::Error;

    fn forward(
        &mut self,
        at: Action,
        input: Option<Tensor>,
    ) -> candle_core::Result<Option<Tensor>> {
        let microbatch = at.microbatch.0;
        let [data, target] = batch(microbatch)?;
        // A variable of its own, so that autograd ends here and gives its gradient.
        let input = Var::from_tensor(&input.unwrap_or(data))?;
        let output = self.run(&input)?;
        if self.head.is_none() {
            let sent = output.detach();
            self.live.insert(microbatch, (input, output));
            return Ok(Some(sent));
        }
        let loss = (mse(&output, &target)? / MICROBATCHES as f64)?;
        self.loss += loss.to_scalar::<f32>()?;
        self.live.insert(microbatch, (input, loss));
        Ok(None)
    }

    fn backward_input(
        &mut self,
        at: Action,
        grad: Option<Tensor>,
    ) -> candle_core::Result<Option<Tensor>> {
        let missing = || candle_core::Error::Msg("no forward came before".into());
        let (input, output) = self.live.remove(&at.microbatch.0).ok_or_else(missing)?;
        // d sum(y g)/dx is the product of g and dy/dx.
        let scalar = match grad {
            Some(grad) => (output * grad)?.sum_all()?,
            None => output,
        };
        let mut grads = scalar.backward()?;
        let back = grads.remove(&input).filter(|_| self.embed.is_none());
        self.found.insert(at.microbatch.0, grads);
        Ok(back)
    }

    fn backward_weight(&mut self, at: Action) -> candle_core::Result<()> {
        let found = self.found.remove(&at.microbatch.0);
        let (Some(sum), Some(found)) = (&mut self.grads, &found) else {
            self.grads = found;
            return Ok(());
        };
        for var in &self.vars {
            if let (Some(before), Some(more)) = (sum.get(var), found.get(var)) {
                let both = (before + more)?;
                sum.insert(var, both);
            }
        }
        Ok(())
    }
}

/// Starting weights that depend on their names alone, so that every cut starts from the same ones.
fn set_by_name(weights: &VarMap) -> Result<()> {
    let mut named: Vec<(String, Var)> = {
        let data = weights.data().lock().ok().context("nobody panicked")?;
        data.iter()
            .map(|(name, var)| (name.clone(), var.clone()))
            .collect()
    };
    named.sort_by(|a, b| a.0.cmp(&b.0));
    for (name, var) in named {
        let seed: f32 = name.bytes().map(f32::from).sum();
        let (shape, count) = (var.shape().clone(), var.elem_count());
        let values: Vec<f32> = (0..count)
            .map(|i| 0.2 * (seed + 1.7 * i as f32).sin())
            .collect();
        var.set(&Tensor::from_vec(values, shape, &Device::Cpu)?)?;
    }
    Ok(())
}

/// Points of the plane, and a wave over it.
fn batch(microbatch: usize) -> candle_core::Result<[Tensor; 2]> {
    let at = |i: usize| (0.37 * (microbatch * ROWS + i) as f32).sin() * 2.0;
    let points: Vec<f32> = (0..ROWS).flat_map(|i| [at(i), at(3 * i + 1)]).collect();
    let wave: Vec<f32> = (0..ROWS).map(|i| (at(i) * at(3 * i + 1)).cos()).collect();
    let data = Tensor::from_vec(points, (ROWS, 2), &Device::Cpu)?;
    Ok([data, Tensor::from_vec(wave, (ROWS, 1), &Device::Cpu)?])
}

/// The losses of some steps under a schedule.
fn train(schedule: &Schedule) -> Result<Vec<f32>> {
    let ranks = schedule.size.ranks;
    let mut stages = (0..ranks)
        .map(|rank| Stage::new(rank, ranks))
        .collect::<Result<Vec<_>>>()?;
    let mut losses = Vec::new();
    for _ in 0..STEPS {
        run_threads(schedule, &mut stages, Duration::from_mins(1))?;
        for stage in &mut stages {
            let grads = stage.grads.take().context("a step has gradients")?;
            stage.optimizer.step(&grads)?;
        }
        losses.push(
            stages
                .iter_mut()
                .map(|stage| std::mem::take(&mut stage.loss))
                .sum(),
        );
    }
    Ok(losses)
}

fn main() -> Result<()> {
    let ranks = count(1, "RANKS", 2)?;
    ensure!(
        ranks <= BLOCKS,
        "the model has {BLOCKS} blocks, found {ranks} ranks"
    );
    let alone = train(&ScheduleKind::Gpipe.generate(Size::new(1, MICROBATCHES))?)?;
    for kind in [ScheduleKind::OneFOneB, ScheduleKind::ZbH1] {
        let losses = train(&kind.generate(Size::new(ranks, MICROBATCHES))?)?;
        ensure!(
            losses == alone,
            "{kind} on {ranks} ranks gives the bits of one rank"
        );
    }
    println!(
        "{ranks} ranks, loss {:.4} -> {:.4}, as on one rank to the last bit",
        alone[0],
        alone[STEPS - 1]
    );
    ensure!(
        alone[STEPS - 1] < 0.5 * alone[0],
        "the model learns: {alone:?}"
    );
    Ok(())
}
