//! Cuts a model into segments and stages, with a report of what lies where and why
//! (merak-partition).
//!
//! `cargo run -p merak-examples --example 07-partition [STAGES]`, 4 by default.
#![expect(clippy::print_stdout, reason = "an example prints")]

use anyhow::{Result, ensure};
use merak_examples::count;
use merak_partition::{
    Partition, ReportOptions, SegmentOptions, SplitMethod, StageMethod, recompute_plan, report,
};
use merak_trace::{
    Graph,
    models::{self, ModelInfo, TraceOptions},
};

const MICROBATCHES: usize = 8;

fn main() -> Result<()> {
    let stages = count(1, "STAGES", 4)?;
    let config = serde_json::json!({
        "model_type": "llama", "vocab_size": 32000, "hidden_size": 2048, "intermediate_size": 5632,
        "num_hidden_layers": 22, "num_attention_heads": 32, "num_key_value_heads": 4,
        "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "tie_word_embeddings": false,
    });
    let model = models::from_config(&config)?;
    let graph = model.trace(&TraceOptions::training(1, 2048))?;

    // The defaults: cuts where one value crosses, equal numbers of segments.
    let options = SegmentOptions::for_model(&model.info(), stages);
    let partition = Partition::new(&graph, &options, &StageMethod::Uniform)?;
    let report_options = ReportOptions::one_f_one_b(stages, MICROBATCHES);
    let kept = report(&graph, &partition, &report_options)?;
    println!("{kept}");
    let covered: usize = (0..stages)
        .map(|stage| partition.nodes_of(stage).len())
        .sum();
    ensure!(
        covered == graph.nodes().len(),
        "every node lies in one stage"
    );

    // The same stages, keeping only what enters each segment.
    let recompute = |stage| recompute_plan(&graph, &partition, stage, 1, usize::MAX);
    let report_options = ReportOptions {
        recompute: (0..stages).map(recompute).collect(),
        ..report_options
    };
    let recomputed = report(&graph, &partition, &report_options)?;
    println!("with recomputation:");
    for (before, after) in kept.stages.iter().zip(&recomputed.stages) {
        let mib = |bytes: usize| bytes as f64 / f64::from(1 << 20);
        let (stage, forward) = (after.stage, after.forward.flops as f64);
        let again = 100.0 * after.recompute.flops as f64 / forward;
        println!(
            "stage {stage}: {:.0} MiB instead of {:.0}, {again:.0}% of the forward again",
            mib(after.memory_bytes),
            mib(before.memory_bytes)
        );
        ensure!(after.memory_bytes <= before.memory_bytes);
    }

    compare_methods(&graph, &model.info(), stages)
}

/// The largest stage by parameters under each combination of methods.
fn compare_methods(graph: &Graph, info: &ModelInfo, stages: usize) -> Result<()> {
    println!("\nparameters of the largest stage, in millions:");
    for split in SplitMethod::ALL {
        let options = SegmentOptions::for_model(info, stages).with_method(split);
        let largest = |method: StageMethod| -> Result<usize> {
            let partition = Partition::new(graph, &options, &method)?;
            let params = (0..stages).map(|stage| partition.params_of(stage)).max();
            let params = params.unwrap_or(0);
            let (split, method) = (split.as_str(), method.as_str());
            println!("  {split:<17}  {method:<13} {:>6.1}", params as f64 / 1e6);
            Ok(params)
        };
        let (ceil, floor) = (
            largest(StageMethod::Uniform)?,
            largest(StageMethod::UniformFloor)?,
        );
        let best = largest(StageMethod::Parameters)?;
        ensure!(best <= ceil && best <= floor, "the best by its own measure");
    }
    Ok(())
}
