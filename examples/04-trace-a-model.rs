//! Traces models without storage: an MLP in ordinary Rust, and GPT-3 with 175 billion parameters
//! (merak-trace).
//!
//! `cargo run -p merak-examples --example 04-trace-a-model`
#![expect(clippy::print_stdout, reason = "an example prints")]

use anyhow::{Context, Result, ensure};
use merak_trace::{
    DType, Graph, Init, TensorType, fx,
    models::{self, TraceOptions},
    op::{Activation, WeightLayout},
    render::{self, Format},
};
use std::time::Instant;

fn main() -> Result<()> {
    let graph = mlp(&[8, 32, 32, 4])?;
    print!("{}", render::graph(&graph, Format::Text));
    ensure!(graph.num_elements() == 8 * 32 + 32 + 32 * 32 + 32 + 32 * 4 + 4);
    let weight = graph
        .find_param("layers.1.weight")
        .context("a traced name")?;
    ensure!(graph.param(weight).full.shape == [32, 32]);

    refuse_what_does_not_fit()?;
    gpt3()
}

/// A classifier: linear layers with gelu between them, and the loss against labels.
fn mlp(widths: &[usize]) -> Result<Graph> {
    let (&inputs, widths) = widths.split_first().context("an MLP has an input")?;
    let graph = fx::trace(DType::F32, |module| {
        // This code runs once, on values that have a type and no elements. Loops, functions and
        // conditions on shapes are ordinary Rust.
        let mut x = module.input("x", TensorType::new([16, inputs], DType::F32));
        for (layer, &width) in widths.iter().enumerate() {
            if layer > 0 {
                x = module.activation(&x, Activation::GeluTanh)?;
            }
            let linear = module.sub(&format!("layers.{layer}"));
            x = linear.linear(&x, width, WeightLayout::OutIn, true, Init::Normal(0.02))?;
        }
        let labels = module.input("labels", TensorType::new([16], DType::I64));
        let loss = module.cross_entropy(&x, &labels, 0.0)?;
        module.output("loss", &loss);
        Ok(())
    })?;
    Ok(graph)
}

/// Shapes are checked while tracing; the error names the module, the operation and the shapes.
fn refuse_what_does_not_fit() -> Result<()> {
    let refused = fx::trace(DType::F32, |module| {
        let a = module.input("a", TensorType::new([4, 8], DType::F32));
        let b = module.input("b", TensorType::new([4, 7], DType::F32));
        module.sub("encoder.residual").add(&a, &b)?;
        Ok(())
    });
    let error = refused.err().context("8 and 7 do not add up")?;
    println!("\nrefused: {error}\n");
    ensure!(error.to_string().contains("encoder.residual"));
    Ok(())
}

/// A model definition reads Hugging Face's `config.json`. A parameter is a name, a type and an
/// initialiser, so no weight is ever allocated.
fn gpt3() -> Result<()> {
    let config = serde_json::json!({
        "model_type": "gpt2", "vocab_size": 50257, "n_positions": 2048,
        "n_embd": 12288, "n_layer": 96, "n_head": 96,
    });
    let start = Instant::now();
    let model = models::from_config(&config)?;
    let graph = model.trace(&TraceOptions::training(1, 2048))?;
    println!(
        "GPT-3: {:.1} billion parameters, {} nodes, traced in {:?}",
        graph.num_elements() as f64 / 1e9,
        graph.nodes().len(),
        start.elapsed()
    );
    ensure!((174e9..176e9).contains(&(graph.num_elements() as f64)));
    ensure!(
        graph
            .find_param("transformer.h.95.attn.c_attn.weight")
            .is_some()
    );
    Ok(())
}
