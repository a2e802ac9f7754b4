//! Pipelines stages of one's own: plain vectors between threads, no tensor library (merak-pipe).
//!
//! `cargo run -p merak-examples --example 03-pipeline-your-own-stages [RANKS]`, 3 by default.
#![expect(clippy::print_stdout, reason = "an example prints")]

use anyhow::{Result, ensure};
use merak_examples::count;
use merak_pipe::{Action, GridStyle, ScheduleKind, Size, StageModule, Timeline, grid, run_threads};
use std::{collections::BTreeMap, time::Duration};

const MICROBATCHES: usize = 6;
const SAMPLES: usize = 4;

/// One number per sample; what the stages send each other.
type Values = Vec<f64>;

/// One stage: `y = tanh(a x + b)`. The last one also has the loss, `sum (y - target)^2`.
#[derive(Debug, Clone)]
struct Neuron {
    weights: [f64; 2],
    grads: [f64; 2],
    is_first: bool,
    is_last: bool,
    loss: f64,
    /// What the backward of a microbatch needs: input, output, and later the gradient before tanh.
    live: BTreeMap<usize, [Values; 3]>,
}

impl StageModule for Neuron {
    type Payload = Values;
    type Error = &'static str;

    fn forward(
        &mut self,
        at: Action,
        input: Option<Values>,
    ) -> Result<Option<Values>, &'static str> {
        let microbatch = at.microbatch.0;
        let input = input.unwrap_or_else(|| samples(microbatch));
        let [a, b] = self.weights;
        let output: Values = input.iter().map(|x| (a * x + b).tanh()).collect();
        if self.is_last {
            let errors = zip(&output, &targets(microbatch), |y, t| (y - t).powi(2));
            self.loss += errors.iter().sum::<f64>();
        }
        let sent = (!self.is_last).then(|| output.clone());
        self.live.insert(microbatch, [input, output, Vec::new()]);
        Ok(sent)
    }

    fn backward_input(
        &mut self,
        at: Action,
        grad: Option<Values>,
    ) -> Result<Option<Values>, &'static str> {
        let live = self.live.get_mut(&at.microbatch.0);
        let [_, output, before_tanh] = live.ok_or("no forward came before")?;
        let of_loss = || zip(output, &targets(at.microbatch.0), |y, t| 2.0 * (y - t));
        let grad = grad.unwrap_or_else(of_loss);
        *before_tanh = zip(&grad, output, |g, y| g * (1.0 - y * y));
        let of_input = before_tanh.iter().map(|g| g * self.weights[0]).collect();
        Ok((!self.is_first).then_some(of_input))
    }

    fn backward_weight(&mut self, at: Action) -> Result<(), &'static str> {
        let live = self.live.remove(&at.microbatch.0);
        let [input, _, before_tanh] = live.ok_or("no forward came before")?;
        self.grads[0] += zip(&input, &before_tanh, |x, g| x * g).iter().sum::<f64>();
        self.grads[1] += before_tanh.iter().sum::<f64>();
        Ok(())
    }
}

/// Combines two vectors sample by sample.
fn zip(a: &[f64], b: &[f64], f: impl Fn(f64, f64) -> f64) -> Values {
    a.iter().zip(b).map(|(&a, &b)| f(a, b)).collect()
}

/// The samples of a microbatch, between -1 and 1.
fn samples(microbatch: usize) -> Values {
    let last = (SAMPLES * MICROBATCHES - 1) as f64;
    let numbers = (0..SAMPLES).map(|i| (i * MICROBATCHES + microbatch) as f64);
    numbers.map(|number| 2.0 * number / last - 1.0).collect()
}

/// The targets of a microbatch, which the pipeline shall come close to.
fn targets(microbatch: usize) -> Values {
    let samples = samples(microbatch).into_iter();
    samples.map(|x| (0.4 * x + 0.3).tanh()).collect()
}

/// One step under a schedule: losses and gradients lie in the stages afterwards.
fn run(kind: ScheduleKind, stages: &mut [Neuron]) -> Result<Timeline> {
    let schedule = kind.generate(Size::new(stages.len(), MICROBATCHES))?;
    for stage in stages.iter_mut() {
        (stage.loss, stage.grads) = (0.0, [0.0; 2]);
    }
    Ok(run_threads(&schedule, stages, Duration::from_secs(10))?)
}

fn main() -> Result<()> {
    let ranks = count(1, "RANKS", 3)?;
    let stage = |rank| Neuron {
        weights: [1.0, 0.1],
        grads: [0.0; 2],
        is_first: rank == 0,
        is_last: rank + 1 == ranks,
        loss: 0.0,
        live: BTreeMap::new(),
    };
    let mut stages: Vec<_> = (0..ranks).map(stage).collect();

    // Another schedule changes no bit.
    let mut others = stages.clone();
    run(ScheduleKind::Gpipe, &mut others)?;
    run(ScheduleKind::OneFOneB, &mut stages)?;
    let grads = |stages: &[Neuron]| -> Vec<_> { stages.iter().map(|s| s.grads).collect() };
    ensure!(grads(&stages) == grads(&others), "the same gradients");

    // The gradient is the slope of the loss.
    let (slope, h) = (stages[0].grads[0], 1e-5);
    let mut loss_at = |weight: f64| -> Result<f64> {
        others[0].weights[0] = weight;
        run(ScheduleKind::OneFOneB, &mut others)?;
        Ok(others[ranks - 1].loss)
    };
    let measured = (loss_at(1.0 + h)? - loss_at(1.0 - h)?) / (2.0 * h);
    println!("d loss / d a on rank 0: {slope:.9}, by differences {measured:.9}");
    ensure!((slope - measured).abs() < 1e-7 * slope.abs().max(1.0));

    let first = stages[ranks - 1].loss;
    let mut timeline = Timeline::default();
    for _ in 0..200 {
        for stage in &mut stages {
            let step = |(weight, grad): (&mut f64, &f64)| *weight -= 0.02 * grad;
            stage.weights.iter_mut().zip(&stage.grads).for_each(step);
        }
        timeline = run(ScheduleKind::OneFOneB, &mut stages)?;
    }
    let last = stages[ranks - 1].loss;
    let style = GridStyle {
        max_cells: 60,
        ..GridStyle::default()
    };
    let picture = grid(&timeline, style);
    println!("the last step as it ran:\n{picture}");
    println!("loss {first:.4} before, {last:.4} after 200 steps");
    ensure!(last < 0.5 * first, "the pipeline learns");
    Ok(())
}
