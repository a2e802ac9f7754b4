//! Splits a GPT-2 over the ranks of the tensor axis and gets the loss of one rank (merak-tp).
//!
//! `cargo run -p merak-examples --example 06-tensor-parallel [RANKS]`, 2 by default; 1, 2 and 4
//! divide the heads.
#![expect(clippy::print_stdout, reason = "an example prints")]

use anyhow::{Context, Result, ensure};
use merak_examples::count;
use merak_mpu::{Degrees, Mpu, into_vec, threads};
use merak_tp::{LayerLists, default_lists, rewrite};
use merak_trace::{
    Axis, AxisGroups, Backend, Batch, Coord, DType, Graph, Interpreter, RunContext, SingleRank,
    StageCuts, StageProgram, TensorType, Threads, Value,
    backend::candle::Candle,
    initial_values,
    models::{self, TraceOptions},
};
use std::sync::Arc;

const BATCH: usize = 2;
const SEQ: usize = 16;

fn main() -> Result<()> {
    let tp = count(1, "RANKS", 2)?;
    let config = serde_json::json!({
        "model_type": "gpt2", "vocab_size": 101, "n_positions": SEQ, "n_embd": 32, "n_layer": 2, "n_head": 4,
    });
    let options = TraceOptions {
        dtype: DType::F64,
        ..TraceOptions::training(BATCH, SEQ)
    };
    let graph = models::from_config(&config)?.trace(&options)?;

    // The lists name the layers to split. Known families have their own; other models need these
    // two.
    let lists = LayerLists::col_row(["c_attn", "c_fc"], ["c_proj"]);
    let split = rewrite(&graph, &lists, tp)?;
    let known = default_lists("gpt2").context("the family is known")?;
    ensure!(rewrite(&graph, &known, tp)?.graph.params() == split.graph.params());
    println!("{}", split.report);

    let expected = loss(&graph, Arc::new(SingleRank), 0)?;
    let degrees = Degrees {
        tp,
        ..Degrees::default()
    };
    let losses = threads::run(tp, threads::WorldOptions::default(), |member| {
        let mpu = Mpu::new(member, degrees)?;
        let rank = mpu.tensor_parallel_rank();
        loss(&split.graph, Arc::new(mpu), rank)
    })?;
    println!("loss on one rank {expected}, on {tp} {losses:?}");
    for loss in losses {
        ensure!(
            (loss - expected).abs() < 1e-12 * expected,
            "only the order of sums differs"
        );
    }
    Ok(())
}

/// The loss that rank `rank` of the tensor axis computes, from its own slices of the parameters.
fn loss(graph: &Graph, groups: Arc<dyn AxisGroups>, rank: usize) -> Result<f64> {
    let backend = Arc::new(Candle::new(1)?);
    let program = StageProgram::inference(graph, &StageCuts::whole(graph), 0)?;
    let place = Coord::default().with(Axis::Tensor, rank);
    let params = slices(&program, &backend, place)?;
    let ids = |shift: i64| -> Result<Value> {
        let ids = (shift..).take(BATCH * SEQ).map(|i| i * 37 % 101);
        let ty = TensorType::new([BATCH, SEQ], DType::I64);
        Ok(backend.from_buffer(&ty, Box::new(ids.collect::<Vec<_>>()))?)
    };
    let batch = Batch::from([
        ("input_ids".to_owned(), ids(0)?),
        ("labels".to_owned(), ids(1)?),
    ]);
    let context = RunContext {
        place,
        ..RunContext::default()
    };
    let runner = Interpreter::new(Arc::new(program), Arc::clone(&backend) as _, groups);
    let mut done = runner.forward(&params, &batch, Vec::new(), context)?;
    let loss = done.outputs.pop().context("the loss is an output")?;
    Ok(into_vec::<f64>(backend.into_buffer(loss)?)?[0])
}

/// This rank's part of every parameter. No rank makes a whole one.
fn slices(program: &StageProgram, backend: &Candle, place: Coord) -> Result<Vec<Value>> {
    let slice = |param: &merak_trace::Param| -> Result<Value> {
        let mut values = vec![0.0_f64; param.local.numel()];
        initial_values(&Threads::one(), 42, param, place, &mut values);
        Ok(backend.from_buffer(&param.local, Box::new(values))?)
    };
    program.params().iter().map(slice).collect()
}
