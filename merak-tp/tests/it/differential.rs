//! Split graphs against one rank: loss and gradients, dropout on, f64.

use crate::{
    run::{assert_same, on_ranks},
    support::{gpt2, llama, model},
};
use merak_tp::{LayerLists, default_lists, rewrite};
use merak_trace::{Axis, DType, Placement, models::TraceOptions};
use serde_json::{Value as Json, json};

fn options() -> TraceOptions {
    TraceOptions {
        dtype: DType::F64,
        ..TraceOptions::training(2, 8)
    }
}

fn check_model(config: &Json, degrees: &[usize]) {
    let model = model(config);
    let whole = model.trace(&options()).expect("the sizes fit");
    let lists = default_lists(model.info().family).expect("the family has defaults");
    for &degree in degrees {
        let split = rewrite(&whole, &lists, degree).expect("the model can be split");
        assert!(
            split.report.gathers.is_empty(),
            "{:?}",
            split.report.gathers
        );
        assert_same(&whole, &split.graph, degree);
    }
}

#[test]
fn gpt2_with_dropout_and_a_tied_head() {
    check_model(&gpt2(2, 0.1, true), &[2, 4]);
}

#[test]
fn gpt2_with_any_width_between_its_layers() {
    for n_inner in [16, 24, 32, 48] {
        let mut config = gpt2(1, 0.1, true);
        config["n_inner"] = n_inner.into();
        check_model(&config, &[2]);
        let whole = model(&config).trace(&options()).unwrap();
        let split = rewrite(&whole, &default_lists("gpt2").unwrap(), 2).unwrap();
        assert_eq!(split.report.modules.len(), 4, "{n_inner}: {}", split.report);
    }
    let mut config = gpt2(1, 0.1, true);
    config["n_inner"] = 30.into();
    let whole = model(&config).trace(&options()).unwrap();
    let error = rewrite(&whole, &default_lists("gpt2").unwrap(), 4).unwrap_err();
    assert_eq!(
        error.to_string(),
        "transformer.h.0.mlp.c_fc: 30 output features cannot be split over tp = 4 (col_para_list \"mlp.c_fc\"): \
         choose \"tp\" among 1, 2"
    );
}

#[test]
fn gpt2_with_an_untied_head() {
    check_model(&gpt2(1, 0.0, false), &[2]);
}

#[test]
fn gpt_with_separate_projections() {
    let config = json!({ "model_type": "gpt", "vocab_size": 101, "max_position_embeddings": 16, "hidden_size": 16,
        "num_hidden_layers": 2, "num_attention_heads": 4, "dropout": 0.1 });
    check_model(&config, &[2, 4]);
}

#[test]
fn llama_with_as_many_key_heads_as_query_heads() {
    check_model(&llama(2, 4, 0.1), &[2, 4]);
}

#[test]
fn llama_with_grouped_key_heads_fewer_than_ranks() {
    check_model(&llama(2, 2, 0.1), &[2, 4]);
    check_model(&llama(1, 1, 0.1), &[4]);
}

#[test]
fn relatives_of_llama_with_biases_windows_and_norms_of_heads() {
    let relative = |family: &str, kv_heads| {
        let mut config = llama(2, kv_heads, 0.1);
        config["model_type"] = family.into();
        config
    };
    let mut windowed = relative("qwen2", 4);
    windowed["use_sliding_window"] = true.into();
    windowed["sliding_window"] = 3.into();
    windowed["max_window_layers"] = 1.into();
    for config in [
        relative("mistral", 2),
        windowed,
        relative("qwen3", 4),
        relative("qwen3", 2),
    ] {
        check_model(&config, &[2, 4]);
    }
}

/// OPT or GPT-NeoX with dropout everywhere.
fn usual(family: &str) -> Json {
    json!({ "model_type": family, "vocab_size": 101, "max_position_embeddings": 16, "hidden_size": 16,
        "num_hidden_layers": 2, "num_attention_heads": 4, "attention_dropout": 0.1 })
}

#[test]
fn opt_with_norms_before_and_after_and_a_narrow_embedding() {
    let mut config = usual("opt");
    config["ffn_dim"] = 24.into();
    check_model(&config, &[2, 4]);
    config["do_layer_norm_before"] = false.into();
    config["word_embed_proj_dim"] = 6.into();
    check_model(&config, &[2]);
}

#[test]
fn gpt_neox_whose_projection_alternates_by_heads() {
    let mut config = usual("gpt_neox");
    config["intermediate_size"] = 24.into();
    config["hidden_dropout"] = 0.1.into();
    check_model(&config, &[2, 4]);
    config["use_parallel_residual"] = false.into();
    check_model(&config, &[2]);
}

#[test]
fn bert_that_fills_in_tokens_or_classifies() {
    for architecture in ["BertForMaskedLM", "BertForSequenceClassification"] {
        let config = json!({ "model_type": "bert", "architectures": [architecture], "vocab_size": 101,
            "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 24,
            "max_position_embeddings": 16, "type_vocab_size": 101, "num_labels": 101 });
        check_model(&config, &[2, 4]);
    }
}

#[test]
fn t5_whose_table_of_relative_positions_is_cut_by_heads() {
    let config = json!({ "model_type": "t5", "vocab_size": 101, "d_model": 16, "d_kv": 6, "d_ff": 24,
        "num_layers": 2, "num_heads": 4, "relative_attention_num_buckets": 8,
        "relative_attention_max_distance": 6, "feed_forward_proj": "gated-gelu" });
    check_model(&config, &[2, 4]);
    let whole = model(&config).trace(&options()).unwrap();
    let split = rewrite(&whole, &default_lists("t5").unwrap(), 2).unwrap();
    let table = "decoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight";
    let table = split.graph.find_param(table).unwrap();
    assert_eq!(
        *split.graph.param(table).placements.on(Axis::Tensor),
        Placement::shard(1, 4)
    );
}

#[test]
fn vit_of_seven_patches_and_a_class_token() {
    let config = json!({ "model_type": "vit", "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4,
        "intermediate_size": 24, "image_size": [7, 2], "patch_size": [1, 2], "num_labels": 101,
        "hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1 });
    check_model(&config, &[2, 4]);
}

#[test]
fn lists_that_suit_the_model_badly() {
    let mut config = gpt2(1, 0.1, true);
    config["vocab_size"] = json!(102);
    let whole = model(&config).trace(&options()).unwrap();
    let lists = LayerLists::col_row(["attn.c_proj", "lm_head"], ["mlp.c_fc"]);
    let split = rewrite(&whole, &lists, 2).unwrap();
    let needed_by: Vec<_> = split
        .report
        .gathers
        .iter()
        .map(|gather| gather.needed_by.as_str())
        .collect();
    assert_eq!(
        needed_by,
        [
            "transformer.h.0.ln_2.layer_norm",
            "transformer.ln_f.layer_norm",
        ]
    );
    assert_same(&whole, &split.graph, 2);
}

#[test]
fn replicated_parameters_get_the_same_gradient_bits_on_all_ranks() {
    let config = gpt2(2, 0.1, true);
    let whole = model(&config).trace(&options()).unwrap();
    let split = rewrite(&whole, &default_lists("gpt2").unwrap(), 2)
        .unwrap()
        .graph;
    let steps = on_ranks(&split, 2);
    for param in split
        .params()
        .iter()
        .filter(|param| param.local == param.full)
    {
        let bits = |rank: usize| -> Vec<_> {
            steps[rank].grads[&param.name]
                .iter()
                .map(|x| x.to_bits())
                .collect()
        };
        assert_eq!(bits(0), bits(1), "{}", param.name);
    }
    assert_eq!(steps[0].loss.to_bits(), steps[1].loss.to_bits());
}
