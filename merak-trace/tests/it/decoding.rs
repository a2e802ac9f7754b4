//! Positions that pass one by one, with a cache, give what they give together.

use crate::support::{backends, context, numbers, params, value};
use merak_trace::{
    Batch, Interpreter, KvCache, RunContext, SharedBackend, SingleRank, StageCuts, StageProgram,
    models::{self, Head, TraceOptions},
};
use serde_json::{Value as Json, json};
use std::sync::Arc;

const BATCH: usize = 2;
const SEQ: usize = 7;
const VOCAB: usize = 23;

/// The logits `[B, len, V]` of positions `from .. from + len`.
fn pass(
    backend: &SharedBackend,
    config: &Json,
    (from, len): (usize, usize),
    cache: Option<&mut KvCache>,
) -> Vec<f64> {
    let model = models::from_config(config).expect("a valid configuration");
    let options = TraceOptions {
        context: Some(SEQ),
        ..TraceOptions::training(BATCH, len).with_head(Head::Logits)
    };
    let graph = model.trace(&options).expect("it traces");
    let program = StageProgram::inference(&graph, &StageCuts::whole(&graph), 0);
    let program = Arc::new(program.expect("one stage"));
    let runner = Interpreter::new(program, Arc::clone(backend), Arc::new(SingleRank));
    let params = params(backend, &runner.program().graph);
    let ids = (0..BATCH).flat_map(|b| (from..from + len).map(move |s| (b, s)));
    let ids: Vec<_> = ids
        .map(|(b, s)| ((s * s + 5 * b + 1) % VOCAB) as f64)
        .collect();
    let port = &graph.inputs()[0];
    let batch = Batch::from([(
        port.name.clone(),
        value(backend, graph.ty(port.value), &ids),
    )]);
    let context = RunContext {
        training: false,
        ..context()
    };
    let forwarded = match cache {
        None => runner.forward(&params.views, &batch, Vec::new(), context),
        Some(cache) => {
            runner.forward_cached(&params.views, &batch, Vec::new(), context, (cache, len))
        }
    };
    numbers(backend, &forwarded.expect("it runs").outputs[0])
}

#[test]
fn a_prompt_and_single_positions_give_the_logits_of_the_whole_sequence() {
    let llama = json!({ "model_type": "llama", "vocab_size": VOCAB, "max_position_embeddings": 8, "hidden_size": 12,
        "intermediate_size": 20, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1 });
    let gpt2 = json!({ "model_type": "gpt2", "vocab_size": VOCAB, "n_positions": 8, "n_embd": 12, "n_layer": 2,
        "n_head": 3 });
    let mut mistral = llama.clone();
    mistral["model_type"] = "mistral".into();
    // A window that is shorter than the sequence.
    mistral["sliding_window"] = 3.into();
    // Positions that are scaled by the length of the whole.
    let scaled = |scaling: Json| {
        let mut config = llama.clone();
        config["max_position_embeddings"] = 5.into();
        config["rope_scaling"] = scaling;
        config
    };
    let dynamic = scaled(json!({ "rope_type": "dynamic", "factor": 2.0 }));
    let mut long = scaled(
        json!({ "rope_type": "longrope", "original_max_position_embeddings": 5,
        "short_factor": [1, 1, 1], "long_factor": [1, 2, 4] }),
    );
    long["max_position_embeddings"] = 8.into();
    for backend in backends(1) {
        for config in [&llama, &gpt2, &mistral, &dynamic, &long] {
            check(&backend, config);
        }
    }
}

/// Passes a sequence in pieces and at once.
fn check(backend: &SharedBackend, config: &Json) {
    let whole = pass(backend, config, (0, SEQ), None);
    let mut cache = KvCache::default();
    let mut from = 0;
    for len in [3, 1, 1, 2] {
        let logits = pass(backend, config, (from, len), Some(&mut cache));
        for (b, sample) in logits.chunks_exact(len * VOCAB).enumerate() {
            let expected = &whole[(b * SEQ + from) * VOCAB..][..len * VOCAB];
            for (found, expected) in sample.iter().zip(expected) {
                assert!((found - expected).abs() < 1e-5, "{config} from {from}");
            }
        }
        from += len;
        assert_eq!(cache.positions(), from);
    }
    let heads = config["num_key_value_heads"].as_u64().unwrap_or(3) as usize;
    let width = 12 / config["n_head"].as_u64().unwrap_or(2) as usize * heads;
    assert_eq!(cache.size_bytes(), 2 * 2 * BATCH * SEQ * width * 4);
}
