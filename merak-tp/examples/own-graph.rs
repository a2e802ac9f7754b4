//! A model of one's own, of no known family, split over two ranks with merak-tp alone. Two threads
//! run it forward and backward; outputs and gradients are those of one rank.
//!
//! `cargo run -p merak-tp --example own-graph`
#![expect(clippy::print_stdout, reason = "an example reports on standard output")]

use merak_mpu::{Degrees, Mpu, into_vec, threads};
use merak_tp::{LayerLists, rewrite};
use merak_trace::{
    AxisGroups, Batch, Coord, DType, GradSlot, GradStore, Graph, Init, Interpreter, Param,
    RecomputePlan, RunContext, SharedBackend, SingleRank, StageCuts, StageProgram, TensorType,
    Threads, Value,
    backend::candle::Candle,
    fx, initial_values,
    op::{Activation, WeightLayout},
};
use std::{collections::BTreeMap, error::Error, iter, sync::Arc};

type Result<T> = std::result::Result<T, Box<dyn Error + Send + Sync>>;
type Tensors = BTreeMap<String, Vec<f64>>;

const SHAPE: [usize; 2] = [4, 8]; // samples and their width

fn main() -> Result<()> {
    let graph = model()?;
    // Each rank has half of the columns of `up`, and the rows of `down` that they meet.
    let split = rewrite(&graph, &LayerLists::col_row(["up"], ["down"]), 2)?;
    println!("{}", split.report);
    let whole = run(&graph, Coord::default(), Arc::new(SingleRank))?;
    let degrees = Degrees {
        tp: 2,
        ..Degrees::default()
    };
    let ranks = threads::run(2, threads::WorldOptions::default(), |member| {
        let mpu = Mpu::new(member, degrees)?;
        let place = mpu.coord();
        run(&split.graph, place, Arc::new(mpu)).map(|done| (place, done))
    })?;
    for (place, done) in &ranks {
        let pairs = iter::zip(&done["y"], &whole["y"]);
        let mut off: f64 = pairs.map(|(a, b)| (a - b).abs()).sum();
        for param in split.graph.params() {
            off += gap(param, &done[&param.name], &whole[&param.name], *place);
        }
        println!("rank {}: all differences add up to {off:.1e}", place.tp);
        assert!(off < 1e-9, "only the order of sums differs");
    }
    Ok(())
}

/// Two blocks of a norm, an MLP and a residual sum, in f64.
fn model() -> merak_trace::Result<Graph> {
    fx::trace(DType::F64, |module| {
        let mut x = module.input("x", TensorType::new(SHAPE, DType::F64));
        let (layout, init) = (WeightLayout::OutIn, Init::Normal(0.3));
        for index in 0..2 {
            let block = module.sub(&format!("block.{index}"));
            let normed = block.sub("norm").layer_norm(&x, 1e-5)?;
            let up = block.sub("up").linear(&normed, 32, layout, true, init)?;
            let up = block.activation(&up, Activation::GeluTanh)?;
            let down = block.sub("down").linear(&up, 8, layout, true, init)?;
            x = block.add(&x, &down)?;
        }
        module.output("y", &x);
        module.output("loss", &module.sum(&module.mul(&x, &x)?)?);
        Ok(())
    })
}

/// The output `y` and the gradients of a rank's slices of the parameters, by name.
fn run(graph: &Graph, place: Coord, groups: Arc<dyn AxisGroups>) -> Result<Tensors> {
    let backend: SharedBackend = Arc::new(Candle::new(1)?);
    let (cuts, plan) = (StageCuts::whole(graph), RecomputePlan::default());
    let program = Arc::new(StageProgram::training(graph, &cuts, 0, &plan)?);
    // A rank makes its slices alone: a seed and the names decide all numbers.
    let start = |param: &Param| -> Result<Value> {
        let mut values = vec![0.0_f64; param.local.numel()];
        initial_values(&Threads::one(), 42, param, place, &mut values);
        Ok(backend.from_buffer(&param.local, Box::new(values))?)
    };
    let params: Vec<Value> = program.params().iter().map(start).collect::<Result<_>>()?;
    let mut store = GradStore::default();
    for (buffer, grad) in program.grads.iter().enumerate() {
        let (offset, len) = (0, program.graph.param(grad.param).local.numel());
        store.buffers.push(backend.grad_buffer(DType::F64, len)?);
        store.slots.push(GradSlot {
            buffer,
            offset,
            len,
        });
    }
    let ty = TensorType::new(SHAPE, DType::F64);
    let x: Vec<f64> = (0..ty.numel()).map(|i| (i as f64).sin()).collect();
    let batch = Batch::from([("x".to_owned(), backend.from_buffer(&ty, Box::new(x))?)]);
    let context = RunContext {
        place,
        ..RunContext::default()
    };
    let runner = Interpreter::new(Arc::clone(&program), Arc::clone(&backend), groups);
    let mut done = runner.forward(&params, &batch, Vec::new(), context)?;
    let y = into_vec(backend.into_buffer(done.outputs.swap_remove(0))?)?;
    runner.backward(&mut done.frame, &params, Vec::new(), 1.0, &mut store)?;
    let mut tensors = Tensors::from([("y".to_owned(), y)]);
    for (grad, buffer) in program.grads.iter().zip(store.buffers) {
        let name = program.graph.param(grad.param).name.clone();
        tensors.insert(name, into_vec(buffer)?);
    }
    Ok(tensors)
}

/// How far the gradient of a rank's slice is off that of the whole parameter.
fn gap(param: &Param, found: &[f64], whole: &[f64], place: Coord) -> f64 {
    let boxes = param.placements.local_boxes(&param.full, place);
    let pairs = boxes.iter().flat_map(|part| {
        let from = part.full_ranges(&param.full.shape).flatten();
        part.local_ranges(&param.local.shape).flatten().zip(from)
    });
    let off = |(to, from): (usize, usize)| (found[to] - whole[from]).abs();
    pairs.map(off).sum()
}
