//! Documents side by side in one sequence: losses and gradients are those of each on its own.

use crate::support::{backend, loss_and_grads, noise, value};
use merak_trace::{
    Batch, DType, Graph,
    models::{self, TraceOptions, Visible},
};
use serde_json::{Value as Json, json};

const LENGTHS: [usize; 4] = [5, 1, 3, 4];

/// Ids of the documents: a run is one, and 0 is an id like others.
const IDS: [f64; 4] = [7.0, 0.0, 3.0, 7.0];

const VOCAB: f64 = 101.0;

fn families() -> Vec<Json> {
    let llama = |family: &str| {
        json!({ "model_type": family, "vocab_size": 101, "max_position_embeddings": 16, "hidden_size": 16,
            "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2 })
    };
    let mut windowed = llama("mistral");
    windowed["sliding_window"] = 3.into();
    let mut all = vec![llama("llama"), windowed, llama("qwen2"), llama("qwen3")];
    all.push(json!({ "model_type": "gpt2", "vocab_size": 101, "n_positions": 16, "n_embd": 16, "n_layer": 2,
        "n_head": 4, "attn_pdrop": 0, "embd_pdrop": 0, "resid_pdrop": 0 }));
    for family in ["gpt", "opt", "gpt_neox"] {
        let mut config = json!({ "model_type": family, "vocab_size": 101, "max_position_embeddings": 16,
            "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4 });
        match family {
            "gpt" => {}
            "opt" => config["dropout"] = 0.into(),
            _ => config["hidden_dropout"] = 0.into(),
        }
        all.push(config);
    }
    all
}

/// The graph of one sequence.
fn graph(config: &Json, seq: usize, visible: Visible) -> Graph {
    let model = models::from_config(config).expect("the configuration is known");
    let options = TraceOptions {
        dtype: DType::F64,
        visible,
        ..TraceOptions::training(1, seq)
    };
    model.trace(&options).expect("the model can be traced")
}

/// Loss and gradients of a sequence with these tokens and labels.
fn run(graph: &Graph, inputs: &[(&str, &[f64])]) -> (f64, Vec<Vec<f64>>) {
    let backend = backend(1);
    let ports = graph.inputs().iter();
    let batch: Batch = ports
        .map(|port| {
            let given = inputs.iter().find(|(name, _)| *name == port.name);
            let (_, data) = given.expect("all inputs are given");
            (
                port.name.clone(),
                value(&backend, graph.ty(port.value), data),
            )
        })
        .collect();
    loss_and_grads(graph, &batch, 2)
}

#[test]
fn documents_side_by_side_learn_as_each_on_its_own() {
    let total = LENGTHS.iter().sum();
    let token = |x: &f64| ((x + 1.0) * VOCAB / 2.0).floor();
    let tokens: Vec<_> = noise(5, total).iter().map(token).collect();
    let labels: Vec<_> = noise(6, total).iter().map(token).collect();
    let ids: Vec<_> = LENGTHS
        .iter()
        .zip(IDS)
        .flat_map(|(&len, id)| vec![id; len])
        .collect();
    for config in families() {
        let together = graph(&config, total, Visible::Document);
        let together = run(
            &together,
            &[
                ("input_ids", &tokens),
                ("labels", &labels),
                ("document_ids", &ids),
            ],
        );
        let (mut loss, mut grads) = (0.0, vec![Vec::new(); together.1.len()]);
        let mut first = 0;
        for len in LENGTHS {
            let own = first..first + len;
            first += len;
            let inputs = [
                ("input_ids", &tokens[own.clone()]),
                ("labels", &labels[own]),
            ];
            let alone = run(&graph(&config, len, Visible::All), &inputs);
            loss += alone.0;
            for (sum, grad) in grads.iter_mut().zip(alone.1) {
                sum.resize(grad.len(), 0.0);
                sum.iter_mut().zip(grad).for_each(|(sum, x)| *sum += x);
            }
        }
        let family = &config["model_type"];
        assert!(
            (together.0 / loss - 1.0).abs() < 1e-12,
            "{family}: {} together, {loss} alone",
            together.0
        );
        let norm = |x: &[f64]| x.iter().map(|x| x * x).sum::<f64>().sqrt();
        let floor = 1e-6 * norm(&grads.concat());
        for (index, (own, alone)) in together.1.iter().zip(&grads).enumerate() {
            let difference: Vec<_> = own.iter().zip(alone).map(|(a, b)| a - b).collect();
            let off = norm(&difference) / norm(alone).max(floor);
            assert!(off < 1e-9, "{family}: gradient {index} is off by {off:e}");
        }
    }
}
