//! Plans the 175-billion-parameter GPT-3 for 16 stages and prints how long each step took: no
//! weight is ever allocated. Run with `cargo run --release -p merak-partition --example gpt3`.
#![expect(clippy::print_stdout, reason = "an example prints")]

use merak_partition::{
    Partition, ReportOptions, SegmentOptions, StageMethod, recompute_plan, report,
};
use merak_trace::{
    StageProgram,
    models::{self, TraceOptions},
};
use std::time::Instant;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    const STAGES: usize = 16;
    let config = serde_json::json!({ "model_type": "gpt2", "vocab_size": 50257, "n_positions": 2048,
        "n_embd": 12288, "n_layer": 96, "n_head": 96 });

    let start = Instant::now();
    let model = models::from_config(&config)?;
    let graph = model.trace(&TraceOptions::training(1, 2048))?;
    println!(
        "traced {} nodes, {:.1e} parameters: {:?}",
        graph.nodes().len(),
        graph.num_elements() as f64,
        start.elapsed()
    );

    let cut = Instant::now();
    let partition = Partition::new(
        &graph,
        &SegmentOptions::for_model(&model.info(), STAGES),
        &StageMethod::UniformFloor,
    )?;
    let cuts = partition.cuts(&graph)?;
    println!(
        "cut into {} segments: {:?}",
        partition.segments.len(),
        cut.elapsed()
    );

    let differentiate = Instant::now();
    let plans: Vec<_> = (0..STAGES)
        .map(|stage| recompute_plan(&graph, &partition, stage, 1, usize::MAX))
        .collect();
    let mut nodes = 0;
    for (stage, plan) in plans.iter().enumerate() {
        nodes += StageProgram::training(&graph, &cuts, stage, plan)?
            .graph
            .nodes()
            .len();
    }
    println!(
        "differentiated {STAGES} stages, {nodes} nodes: {:?}",
        differentiate.elapsed()
    );
    println!("together {:?}\n", start.elapsed());

    let options = ReportOptions {
        recompute: plans,
        ..ReportOptions::one_f_one_b(STAGES, 64)
    };
    print!("{}", report(&graph, &partition, &options)?);
    Ok(())
}
