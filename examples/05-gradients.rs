//! Differentiates a traced model and runs it: forward (F), input gradients (I), weight gradients
//! (W) (merak-trace, on the candle backend).
//!
//! `cargo run -p merak-examples --example 05-gradients`
#![expect(clippy::print_stdout, reason = "an example prints")]

use anyhow::{Context, Result, ensure};
use merak_mpu::into_vec;
use merak_trace::{
    Backend, Batch, Coord, DType, GradSlot, GradStore, Graph, Init, Interpreter, RecomputePlan,
    RunContext, SingleRank, StageCuts, StageProgram, TensorType, Threads, Value,
    backend::candle::Candle,
    fx, initial_values,
    op::{Activation, WeightLayout},
};
use std::{iter, sync::Arc};

const SAMPLES: usize = 6;

fn main() -> Result<()> {
    let graph = model()?;
    let cuts = StageCuts::whole(&graph);
    let program = StageProgram::training(&graph, &cuts, 0, &RecomputePlan::default())?;
    for (node, phase) in program.graph.nodes().iter().zip(&program.phases) {
        println!(
            "{:<16} {:<24} {}",
            format!("{phase:?}"),
            node.op.name(),
            node.name
        );
    }
    let backend = Arc::new(Candle::new(1)?);
    let runner = Interpreter::new(
        Arc::new(program),
        Arc::clone(&backend) as _,
        Arc::new(SingleRank),
    );
    let mut weights = start(&graph);

    let (_, whole) = step(&runner, &weights, false)?;
    let (_, halves) = step(&runner, &weights, true)?;
    ensure!(
        whole == halves,
        "I, then W, gives what a whole backward gives"
    );
    println!("{} bytes alive at most", backend.memory().peak_bytes());
    ensure!(
        backend.memory().live_bytes() == 0,
        "every value was freed after its last use"
    );

    // Each gradient is the slope of the loss.
    let mut worst = 0.0_f64;
    for (param, grad) in whole.iter().enumerate() {
        for (i, slope) in grad.iter().enumerate() {
            let (h, at) = (1e-5, weights[param][i]);
            let mut loss_at = |weight| -> Result<f64> {
                weights[param][i] = weight;
                Ok(step(&runner, &weights, false)?.0)
            };
            let measured = (loss_at(at + h)? - loss_at(at - h)?) / (2.0 * h);
            weights[param][i] = at;
            worst = worst.max((slope - measured).abs());
        }
    }
    println!("gradients are off by at most {worst:.1e} from differences");
    ensure!(worst < 1e-8);
    Ok(())
}

/// A classifier in f64, so that differences are sharp.
fn model() -> merak_trace::Result<Graph> {
    fx::trace(DType::F64, |module| {
        let x = module.input("x", TensorType::new([SAMPLES, 4], DType::F64));
        let labels = module.input("labels", TensorType::new([SAMPLES], DType::I64));
        let (layout, init) = (WeightLayout::OutIn, Init::Normal(0.5));
        let hidden = module.sub("up").linear(&x, 5, layout, true, init)?;
        let hidden = module.activation(&hidden, Activation::GeluTanh)?;
        let normed = module.sub("norm").layer_norm(&hidden, 1e-5)?;
        let logits = module.sub("head").linear(&normed, 3, layout, false, init)?;
        let loss = module.cross_entropy(&logits, &labels, 0.0)?;
        module.output("loss", &loss);
        Ok(())
    })
}

/// The parameters' first values, which depend on the seed and the names alone.
fn start(graph: &Graph) -> Vec<Vec<f64>> {
    let values = |param: &merak_trace::Param| {
        let mut values = vec![0.0; param.local.numel()];
        initial_values(&Threads::one(), 42, param, Coord::default(), &mut values);
        values
    };
    graph.params().iter().map(values).collect()
}

/// The loss of one microbatch and the gradient of each use of a parameter.
fn step(
    runner: &Interpreter,
    weights: &[Vec<f64>],
    in_halves: bool,
) -> Result<(f64, Vec<Vec<f64>>)> {
    let (program, backend) = (runner.program(), runner.backend());
    let value = |ty: &TensorType, data: &[f64]| backend.from_buffer(ty, Box::new(data.to_vec()));
    let params: Vec<Value> = iter::zip(program.params(), weights)
        .map(|(param, data)| value(&param.local, data))
        .collect::<Result<_, _>>()?;
    let x: Vec<f64> = (0..SAMPLES * 4).map(|i| (i as f64).sin()).collect();
    let labels: Vec<i64> = vec![0, 2, 1, 1, 0, 2];
    let labels = backend.from_buffer(&TensorType::new([SAMPLES], DType::I64), Box::new(labels))?;
    let batch = Batch::from([
        (
            "x".to_owned(),
            value(&TensorType::new([SAMPLES, 4], DType::F64), &x)?,
        ),
        ("labels".to_owned(), labels),
    ]);

    // Gradients are added to flat buffers; here each has one of its own.
    let mut store = GradStore::default();
    for (buffer, grad) in program.grads.iter().enumerate() {
        let len = program.graph.param(grad.param).local.numel();
        store.buffers.push(backend.grad_buffer(DType::F64, len)?);
        store.slots.push(GradSlot {
            buffer,
            offset: 0,
            len,
        });
    }

    let mut done = runner.forward(&params, &batch, Vec::new(), RunContext::default())?;
    let loss = done.outputs.pop().context("the loss is an output")?;
    let loss = into_vec::<f64>(backend.into_buffer(loss)?)?[0];
    if in_halves {
        runner.backward_input(&mut done.frame, &params, Vec::new(), 1.0)?;
        runner.backward_weight(&mut done.frame, &params, &mut store)?;
    } else {
        runner.backward(&mut done.frame, &params, Vec::new(), 1.0, &mut store)?;
    }
    let grads = store
        .buffers
        .into_iter()
        .map(into_vec)
        .collect::<Result<_, _>>()?;
    Ok((loss, grads))
}
