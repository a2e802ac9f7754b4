//! Pipelines a model written for candle-nn alone, with its layers, its autograd and its optimizer
//! (merak-pipe).
//!
//! A rank may run several stages, as in a V. Two rules make that right, and
//! `compare_with_unpipelined` tests them: what is kept belongs to a stage and a microbatch, and
//! what stages send each other is detached from candle's graph.
//!
//! `cargo run -p merak-examples --example 13-pipeline-a-candle-model [RANKS]`, 2 by default.
#![expect(clippy::print_stdout, reason = "an example prints")]

use anyhow::{Context, Result, ensure};
use candle_core::{DType, Device, Tensor, Var, backprop::GradStore};
use candle_nn::{
    AdamW, Linear, Module, Optimizer, ParamsAdamW, VarBuilder, VarMap, linear, loss::mse,
};
use merak_examples::count;
use merak_pipe::{
    Action, Schedule, ScheduleKind, Size, StageId, StageModule, compare_with_unpipelined,
    run_threads,
};
use std::{collections::BTreeMap, time::Duration};

const BLOCKS: usize = 4;
const WIDTH: usize = 32;
const MICROBATCHES: usize = 8;
const ROWS: usize = 16;
const STEPS: usize = 40;
const DEADLINE: Duration = Duration::from_mins(1);

/// A residual block, in plain candle-nn.
struct Block {
    up: Linear,
    down: Linear,
}

impl Module for Block {
    fn forward(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        x + self.down.forward(&self.up.forward(x)?.gelu()?)?
    }
}

/// Some blocks of the model; the first stage has the embedding besides, the last one the head.
struct Stage {
    embed: Option<Linear>,
    blocks: Vec<Block>,
    head: Option<Linear>,
}

impl Stage {
    /// Stage `index` of `stages`.
    fn new(index: usize, stages: usize, vb: &VarBuilder) -> candle_core::Result<Self> {
        let layer = |name: &str, from, to| linear(from, to, vb.pp(name));
        let block = |i: usize| {
            let up = layer(&format!("{i}.up"), WIDTH, 2 * WIDTH)?;
            let down = layer(&format!("{i}.down"), 2 * WIDTH, WIDTH)?;
            candle_core::Result::Ok(Block { up, down })
        };
        let own = index * BLOCKS / stages..(index + 1) * BLOCKS / stages;
        let is_last = index + 1 == stages;
        Ok(Self {
            embed: (index == 0).then(|| layer("embed", 2, WIDTH)).transpose()?,
            blocks: own.map(block).collect::<candle_core::Result<_>>()?,
            head: is_last.then(|| layer("head", WIDTH, 1)).transpose()?,
        })
    }

    fn run(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        let layer = |layer: Option<&Linear>, x: &Tensor| {
            layer.map_or(Ok(x.clone()), |layer| layer.forward(x))
        };
        let x = layer(self.embed.as_ref(), x)?;
        let mut blocks = self.blocks.iter();
        let x = blocks.try_fold(x, |x, block| block.forward(&x))?;
        layer(self.head.as_ref(), &x)
    }
}

/// The stages of one rank, and what a step needs of them.
struct Rank {
    stages: BTreeMap<StageId, Stage>,
    vars: BTreeMap<String, Var>,
    optimizer: AdamW,
    /// By stage and microbatch: the input, and the output or the loss, with candle's graph between
    /// them.
    live: BTreeMap<(StageId, usize), (Var, Tensor)>,
    /// By stage and microbatch: gradients of the weights that are not yet added.
    found: BTreeMap<(StageId, usize), GradStore>,
    grads: Option<GradStore>,
    loss: f32,
}

impl Rank {
    /// The rank that runs the stages `own` of `stages`.
    fn new(own: &[StageId], stages: usize) -> Result<Self> {
        let weights = VarMap::new();
        let vb = VarBuilder::from_varmap(&weights, DType::F32, &Device::Cpu);
        let stage =
            |stage: &StageId| candle_core::Result::Ok((*stage, Stage::new(stage.0, stages, &vb)?));
        let own = own.iter().map(stage).collect::<candle_core::Result<_>>()?;
        let vars = set_by_name(&weights)?;
        let params = ParamsAdamW {
            lr: 3e-3,
            ..ParamsAdamW::default()
        };
        Ok(Self {
            stages: own,
            optimizer: AdamW::new(vars.values().cloned().collect(), params)?,
            vars,
            live: BTreeMap::new(),
            found: BTreeMap::new(),
            grads: None,
            loss: 0.0,
        })
    }

    /// The loss of the step and the gradients of all weights, by name.
    fn results(&self) -> Result<Vec<(String, Vec<f64>)>> {
        let mut all = vec![("loss".to_owned(), vec![f64::from(self.loss)])];
        for (name, var) in &self.vars {
            let grads = self.grads.as_ref().and_then(|grads| grads.get(var));
            let grads = grads.with_context(|| format!("{name} has no gradient"))?;
            let values = grads.to_dtype(DType::F64)?.flatten_all()?.to_vec1()?;
            all.push((name.clone(), values));
        }
        Ok(all)
    }
}

impl StageModule for Rank {
    type Payload = Tensor;
    type Error = candle_core::Error;

    fn forward(
        &mut self,
        at: Action,
        input: Option<Tensor>,
    ) -> candle_core::Result<Option<Tensor>> {
        let key = (at.stage, at.microbatch.0);
        let [data, target] = batch(at.microbatch.0)?;
        // A variable of its own, so that autograd ends here and gives its gradient.
        let input = Var::from_tensor(&input.unwrap_or(data))?;
        let stage = &self.stages[&at.stage];
        let output = stage.run(&input)?;
        if stage.head.is_none() {
            let sent = output.detach();
            self.live.insert(key, (input, output));
            return Ok(Some(sent));
        }
        let loss = (mse(&output, &target)? / MICROBATCHES as f64)?;
        self.loss += loss.to_scalar::<f32>()?;
        self.live.insert(key, (input, loss));
        Ok(None)
    }

    /// Candle has no backward for some gradients alone: its `backward` walks the graph once and
    /// computes those of the weights with that of the input. The work of `W` is therefore done
    /// here, and `backward_weight` only adds: a schedule that splits backwards gives the same bits,
    /// and gains nothing.
    fn backward_input(
        &mut self,
        at: Action,
        grad: Option<Tensor>,
    ) -> candle_core::Result<Option<Tensor>> {
        let key = (at.stage, at.microbatch.0);
        let missing = || candle_core::Error::Msg("no forward came before".into());
        let (input, output) = self.live.remove(&key).ok_or_else(missing)?;
        // d sum(y g)/dx is the product of g and dy/dx.
        let scalar = match grad {
            Some(grad) => (output * grad)?.sum_all()?,
            None => output,
        };
        let mut grads = scalar.backward()?;
        let back = grads
            .remove(&input)
            .filter(|_| self.stages[&at.stage].embed.is_none());
        self.found.insert(key, grads);
        // Candle's gradients carry the graph that made them. The backward that takes this one would
        // follow it into the stages behind, and add to the gradients of those that lie on its rank
        // once more.
        Ok(back.map(|grad| grad.detach()))
    }

    fn backward_weight(&mut self, at: Action) -> candle_core::Result<()> {
        let found = self.found.remove(&(at.stage, at.microbatch.0));
        let (Some(sum), Some(found)) = (&mut self.grads, &found) else {
            self.grads = found;
            return Ok(());
        };
        for var in self.vars.values() {
            let Some(more) = found.get(var) else { continue };
            let both = match sum.get(var) {
                Some(before) => (before + more)?,
                None => more.clone(),
            };
            sum.insert(var, both.detach());
        }
        Ok(())
    }
}

/// Starting weights that depend on their names alone, so that every cut starts from the same ones.
fn set_by_name(weights: &VarMap) -> Result<BTreeMap<String, Var>> {
    let named: BTreeMap<String, Var> = {
        let data = weights.data().lock().ok().context("nobody panicked")?;
        data.iter()
            .map(|(name, var)| (name.clone(), var.clone()))
            .collect()
    };
    for (name, var) in &named {
        let seed: f32 = name.bytes().map(f32::from).sum();
        let (shape, count) = (var.shape().clone(), var.elem_count());
        let values: Vec<f32> = (0..count)
            .map(|i| 0.2 * (seed + 1.7 * i as f32).sin())
            .collect();
        var.set(&Tensor::from_vec(values, shape, &Device::Cpu)?)?;
    }
    Ok(named)
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
    let placement = schedule.placement()?;
    let own = |rank| {
        let stages = placement.iter().enumerate();
        let own = stages.filter(move |(_, owner)| **owner == rank);
        own.map(|(stage, _)| StageId(stage)).collect::<Vec<_>>()
    };
    let mut ranks = (0..schedule.size.ranks)
        .map(|rank| Rank::new(&own(rank), placement.len()))
        .collect::<Result<Vec<_>>>()?;
    let mut losses = Vec::new();
    for _ in 0..STEPS {
        run_threads(schedule, &mut ranks, DEADLINE)?;
        for rank in &mut ranks {
            let grads = rank.grads.take().context("a step has gradients")?;
            rank.optimizer.step(&grads)?;
        }
        let of_rank = |rank: &mut Rank| std::mem::take(&mut rank.loss);
        losses.push(ranks.iter_mut().map(of_rank).sum());
    }
    Ok(losses)
}

/// The schedule on `ranks` ranks.
fn schedule(kind: ScheduleKind, ranks: usize) -> Result<Schedule> {
    let size = Size::new(ranks, MICROBATCHES).with_chunks(kind.default_chunks());
    Ok(kind.generate(size)?)
}

/// Tests a module against one step without a pipeline; a module of one's own needs no more.
fn check(schedule: &Schedule) -> Result<()> {
    let stages = schedule.size.stages();
    let make = |own: &[StageId]| Rank::new(own, stages);
    compare_with_unpipelined(schedule, make, Rank::results, 0.0, DEADLINE)?;
    Ok(())
}

fn main() -> Result<()> {
    let ranks = count(1, "RANKS", 2)?;
    ensure!(
        ranks <= BLOCKS,
        "the model has {BLOCKS} blocks, found {ranks} ranks"
    );
    let alone = train(&schedule(ScheduleKind::Gpipe, 1)?)?;
    for kind in [
        ScheduleKind::OneFOneB,
        ScheduleKind::ZbH1,
        ScheduleKind::ZbV,
    ] {
        let schedule = schedule(kind, ranks)?;
        check(&schedule)?;
        ensure!(
            train(&schedule)? == alone,
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_v_schedule_gives_the_losses_of_one_rank() {
        let alone = train(&schedule(ScheduleKind::Gpipe, 1).unwrap()).unwrap();
        for ranks in [2, 4] {
            let schedule = schedule(ScheduleKind::ZbV, ranks).unwrap();
            assert_eq!(train(&schedule).unwrap(), alone);
            check(&schedule).unwrap();
        }
    }
}
