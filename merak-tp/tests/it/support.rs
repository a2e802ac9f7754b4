//! Rewriting in one line, graphs as short text.

use merak_tp::{LayerLists, Rewritten, default_lists, rewrite};
use merak_trace::{
    DType, Graph, Init, Op, Result, TensorType,
    fx::{self, Module, Symbol},
    models::{self, Model, TraceOptions},
    op::WeightLayout,
};
use serde_json::{Value as Json, json};

/// Linear layers that the propagation tests split.
pub(crate) fn lists() -> LayerLists {
    LayerLists::col_row(["col"], ["row"])
}

pub(crate) fn trace(model: impl FnOnce(&Module) -> Result<()>) -> Graph {
    fx::trace(DType::F32, model).expect("the operands fit")
}

/// Traces a model and splits it by [`lists`].
pub(crate) fn split(degree: usize, model: impl FnOnce(&Module) -> Result<()>) -> Rewritten {
    rewrite(&trace(model), &lists(), degree).expect("the model can be split")
}

pub(crate) fn input(module: &Module, shape: &[usize]) -> Symbol {
    module.input("x", TensorType::new(shape, DType::F32))
}

/// A linear layer with a bias; its name says whether it is split.
pub(crate) fn linear(module: &Module, name: &str, x: &Symbol, out: usize) -> Result<Symbol> {
    module
        .sub(name)
        .linear(x, out, WeightLayout::OutIn, true, Init::Normal(0.02))
}

/// An operation with one result.
pub(crate) fn apply(module: &Module, op: Op, inputs: &[&Symbol]) -> Result<Symbol> {
    Ok(module.apply(op, inputs)?.swap_remove(0))
}

/// Operations and the shapes of their first results.
pub(crate) fn shapes(graph: &Graph) -> Vec<String> {
    graph
        .nodes()
        .iter()
        .map(|node| format!("{} {:?}", node.op.name(), graph.ty(node.outputs[0]).shape))
        .collect()
}

pub(crate) fn model(config: &Json) -> Box<dyn Model> {
    models::from_config(config).expect("the configuration is complete")
}

/// A model split by the defaults of its family.
pub(crate) fn split_model(config: &Json, options: &TraceOptions, degree: usize) -> Rewritten {
    let model = model(config);
    let lists = default_lists(model.info().family).expect("the family has defaults");
    rewrite(
        &model.trace(options).expect("the sizes fit"),
        &lists,
        degree,
    )
    .expect("the model can be split")
}

pub(crate) fn gpt2(layers: usize, dropout: f64, tie: bool) -> Json {
    json!({
        "model_type": "gpt2", "vocab_size": 101, "n_positions": 16, "n_embd": 16, "n_layer": layers, "n_head": 4,
        "embd_pdrop": dropout, "attn_pdrop": dropout, "resid_pdrop": dropout, "tie_word_embeddings": tie,
    })
}

pub(crate) fn llama(layers: usize, kv_heads: usize, dropout: f64) -> Json {
    json!({
        "model_type": "llama", "vocab_size": 101, "max_position_embeddings": 16, "hidden_size": 16,
        "intermediate_size": 24, "num_hidden_layers": layers, "num_attention_heads": 4,
        "num_key_value_heads": kv_heads, "attention_dropout": dropout,
    })
}
