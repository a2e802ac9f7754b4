//! Refused models and their messages.

use crate::support::{gpt2, input, linear, lists, llama, model, trace};
use merak_tp::{LayerLists, Mapping, SplitKind, default_lists, rewrite};
use merak_trace::{Graph, models::TraceOptions};
use serde_json::json;

fn refusal(graph: &Graph, lists: &LayerLists, degree: usize) -> String {
    rewrite(graph, lists, degree)
        .expect_err("it cannot be split")
        .to_string()
}

fn mlp(hidden: usize) -> Graph {
    trace(|module| {
        let x = input(module, &[2, 8]);
        let hidden = linear(module, "col", &x, hidden)?;
        let y = linear(module, "row", &hidden, 8)?;
        module.output("y", &y);
        Ok(())
    })
}

fn gpt2_of(width: usize, heads: usize) -> Graph {
    let config = json!({ "model_type": "gpt2", "vocab_size": 11, "n_positions": 8, "n_embd": width, "n_layer": 1, "n_head": heads });
    model(&config)
        .trace(&TraceOptions::training(1, 4))
        .expect("the sizes fit")
}

#[test]
fn features_that_do_not_divide() {
    let lists = LayerLists::col_row(["c_attn", "c_fc"], ["c_proj"]);
    insta::assert_snapshot!(refusal(&gpt2_of(10, 2), &lists, 4),
        @r#"transformer.h.0.attn.c_attn: 10 output features cannot be split over tp = 4 (col_para_list "c_attn"): choose "tp" among 1, 2"#);
    let lists = LayerLists {
        row_para_list: vec!["row".into()],
        ..LayerLists::col_row(["up"], ["-"])
    };
    let graph = trace(|module| {
        let hidden = linear(module, "up", &input(module, &[2, 8]), 8)?;
        let other = linear(module, "other", &hidden, 10)?;
        module.output("y", &linear(module, "row", &other, 8)?);
        Ok(())
    });
    insta::assert_snapshot!(refusal(&graph, &lists, 4), @r#"row: 10 input features cannot be split over tp = 4 (row_para_list "row"): choose "tp" among 1, 2"#);
}

#[test]
fn a_layer_of_a_ratio_is_refused_with_its_entry_in_words() {
    let ratio = |output, kind| Mapping {
        input: 1,
        output,
        kind,
    };
    let lists = LayerLists {
        input_output_mapping: vec![ratio(3, SplitKind::Col), ratio(1, SplitKind::Row)],
        ..LayerLists::default()
    };
    insta::assert_snapshot!(refusal(&gpt2_of(10, 2), &lists, 4),
        @r#"transformer.h.0.attn.c_attn: 10 output features cannot be split over tp = 4 (input_output_mapping, entry 1: inputs to outputs 1:3, column-parallel): choose "tp" among 1, 2"#);
    insta::assert_snapshot!(refusal(&gpt2_of(10, 2), &default_lists("gpt2").unwrap(), 4),
        @r#"transformer.h.0.attn.c_attn: 10 output features cannot be split over tp = 4 (col_para_list "attn.c_attn"): choose "tp" among 1, 2"#);
}

#[test]
fn degrees_are_proposed_that_all_layers_allow() {
    // The first layer would allow 3 as well.
    let graph = trace(|module| {
        let hidden = linear(module, "up", &input(module, &[2, 8]), 12)?;
        let narrow = linear(module, "row", &hidden, 8)?;
        let other = linear(module, "sub.up", &narrow, 8)?;
        module.output("y", &linear(module, "sub.row", &other, 8)?);
        Ok(())
    });
    insta::assert_snapshot!(refusal(&graph, &LayerLists::col_row(["up"], ["row"]), 5),
        @r#"up: 12 output features cannot be split over tp = 5 (col_para_list "up"): choose "tp" among 1, 2, 4"#);
}

#[test]
fn heads_that_do_not_divide() {
    insta::assert_snapshot!(refusal(&gpt2_of(12, 3), &default_lists("gpt2").unwrap(), 2),
        @r#"transformer.h.0.attn: 3 attention heads cannot be split over tp = 2: choose "tp" among 1, 3"#);
    let mut config = llama(1, 3, 0.0);
    config["num_attention_heads"] = json!(12);
    config["hidden_size"] = json!(48);
    let graph = model(&config).trace(&TraceOptions::training(1, 4)).unwrap();
    insta::assert_snapshot!(refusal(&graph, &default_lists("llama").unwrap(), 2),
        @r#"model.layers.0.self_attn: 3 key/value heads can neither be split over tp = 2 nor repeated on it: choose "tp" among 1, 3, 6, 12"#);
    // Rotary positions stand between the layer and the attention.
    config["num_key_value_heads"] = json!(4);
    let graph = model(&config).trace(&TraceOptions::training(1, 4)).unwrap();
    let lists = default_lists("llama").unwrap();
    insta::assert_snapshot!(refusal(&graph, &lists, 8),
        @r#"model.layers.0.self_attn: 12 attention heads cannot be split over tp = 8: choose "tp" among 1, 2, 4, 12"#);
    insta::assert_snapshot!(refusal(&graph, &lists, 3),
        @r#"model.layers.0.self_attn.k_proj: 16 output features cannot be split over tp = 3 (col_para_list "self_attn.k_proj"): choose "tp" among 1, 2, 4, 12"#);
}

#[test]
fn heads_of_a_table_of_biases_that_do_not_divide_by_default() {
    let config = json!({ "model_type": "t5", "vocab_size": 11, "d_model": 8, "d_kv": 3, "d_ff": 12,
        "num_layers": 1, "num_heads": 4, "relative_attention_num_buckets": 8,
        "relative_attention_max_distance": 6 });
    let graph = model(&config).trace(&TraceOptions::training(1, 4)).unwrap();
    let refused = rewrite(&graph, &default_lists("t5").unwrap(), 3).expect_err("heads are left");
    insta::assert_snapshot!(refused.of_defaults(),
        @r#"encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight: 4 attention heads cannot be split over tp = 3 (default weight_change_list ["relative_attention_bias", 1]): choose "tp" among 1, 2, 4"#);
}

#[test]
fn a_module_in_both_lists() {
    let lists = LayerLists::col_row(["col", "ro"], ["row"]);
    insta::assert_snapshot!(refusal(&mlp(8), &lists, 2), @r#"row is to be column-parallel (col_para_list "ro") and row-parallel (row_para_list "row"): take it out of one list"#);
    let mapped = LayerLists {
        input_output_mapping: vec![Mapping {
            input: 1,
            output: 2,
            kind: SplitKind::Row,
        }],
        ..lists
    };
    insta::assert_snapshot!(refusal(&mlp(16), &mapped, 2),
        @r#"col is to be column-parallel (col_para_list "col") and row-parallel (input_output_mapping, entry 1: inputs to outputs 1:2, row-parallel): take it out of one list"#);
}

#[test]
fn lists_that_match_nothing() {
    insta::assert_snapshot!(refusal(&mlp(8), &LayerLists::col_row(["q_proj"], ["o_proj"]), 2),
        @r#"tp = 2 splits nothing: no linear layer of the model is matched by col_para_list "q_proj", row_para_list "o_proj""#);
    let others = LayerLists {
        weight_change_list: vec![("bias_table".into(), 0)],
        ..LayerLists::default()
    };
    insta::assert_snapshot!(refusal(&mlp(8), &others, 2),
        @r#"tp = 2 splits nothing: no linear layer or parameter of the model is matched by weight_change_list ["bias_table", 0]"#);
    let others = LayerLists {
        conv_para_list: vec!["conv".into()],
        ..LayerLists::default()
    };
    insta::assert_snapshot!(refusal(&mlp(8), &others, 2),
        @r#"tp = 2 splits nothing: no convolution of the model is matched by conv_para_list "conv""#);
}

#[test]
fn lists_that_are_incomplete() {
    let none: [&str; 0] = [];
    insta::assert_snapshot!(refusal(&mlp(8), &LayerLists::default(), 2),
        @"tp = 2 needs col_para_list and row_para_list, input_output_mapping, weight_change_list or conv_para_list; found none of them: set them with `set_tp_layer_lists`");
    insta::assert_snapshot!(refusal(&mlp(8), &LayerLists::col_row(vec!["col"], none.to_vec()), 2),
        @"tp = 2 needs col_para_list and row_para_list, input_output_mapping, weight_change_list or conv_para_list; found col_para_list alone: set them with `set_tp_layer_lists`");
}

#[test]
fn slices_that_do_not_fit() {
    let change = |name: &str, dim| LayerLists {
        weight_change_list: vec![(name.into(), dim)],
        ..LayerLists::default()
    };
    insta::assert_snapshot!(refusal(&mlp(8), &change("col", 2), 2),
        @r#"col has dimensions 0 to 1, so dimension 2 cannot be split (weight_change_list ["col", 2])"#);
    insta::assert_snapshot!(refusal(&mlp(8), &change("col.bias", 1), 2),
        @r#"col.bias has dimension 0 alone, so dimension 1 cannot be split (weight_change_list ["col.bias", 1])"#);
    insta::assert_snapshot!(refusal(&mlp(10), &change("col.bias", 0), 4),
        @r#"col.bias: 10 slices cannot be split over tp = 4 (weight_change_list ["col.bias", 0]): choose "tp" among 1, 2, 5, 10"#);
    let both = LayerLists {
        weight_change_list: vec![("col".into(), 1)],
        ..lists()
    };
    insta::assert_snapshot!(refusal(&mlp(8), &both, 2),
        @r#"col is to be column-parallel (col_para_list "col") and row-parallel (weight_change_list ["col", 1]): take it out of one list"#);
    let attributes = LayerLists {
        tp_attr_list: vec!["num_heads".into()],
        ..LayerLists::default()
    };
    insta::assert_snapshot!(refusal(&mlp(8), &attributes, 2),
        @"tp = 2 needs col_para_list and row_para_list, input_output_mapping, weight_change_list or conv_para_list; found tp_attr_list alone: set them with `set_tp_layer_lists`");
}

#[test]
fn channels_of_a_convolution_that_the_degree_does_not_divide() {
    let vit = json!({ "model_type": "vit", "hidden_size": 16, "num_hidden_layers": 1,
        "num_attention_heads": 4, "intermediate_size": 24, "image_size": [7, 2],
        "patch_size": [1, 2], "num_labels": 7 });
    let graph = model(&vit).trace(&TraceOptions::training(1, 8)).unwrap();
    let lists = LayerLists {
        conv_para_list: vec!["projection".into()],
        ..LayerLists::default()
    };
    insta::assert_snapshot!(refusal(&graph, &lists, 2),
        @r#"vit.embeddings.patch_embeddings.projection.weight: 3 input channels cannot be split over tp = 2 (conv_para_list "projection"): choose "tp" among 1, 3"#);
}

#[test]
fn a_model_that_is_split_already() {
    let split = rewrite(&mlp(8), &lists(), 2).unwrap();
    insta::assert_snapshot!(refusal(&split.graph, &lists(), 2), @"col.weight is split over the tensor axis already");
}

#[test]
fn no_ranks() {
    insta::assert_snapshot!(refusal(&mlp(8), &lists(), 0), @"tp = 0 is no number of ranks, expected 1 or more");
}

#[test]
fn the_output_head_and_embeddings_are_never_mapped() {
    // With a vocabulary of 3 times the width the head has the ratio of a fused projection.
    for tie in [true, false] {
        let mut config = gpt2(1, 0.0, tie);
        config["vocab_size"] = json!(48);
        let graph = model(&config).trace(&TraceOptions::training(1, 4)).unwrap();
        let report = rewrite(&graph, &default_lists("gpt2").unwrap(), 2)
            .unwrap()
            .report;
        assert_eq!(report.modules.len(), 4);
        assert!(report.modules.iter().all(|split| split.module != "lm_head"));
    }
}

#[test]
fn a_pattern_that_matches_nothing_is_reported() {
    let lists = LayerLists::col_row(["col", "c_atn"], ["row"]);
    let report = rewrite(&mlp(8), &lists, 2).unwrap().report;
    assert_eq!(report.unmatched, [r#"col_para_list "c_atn""#]);
    assert!(
        report
            .to_string()
            .contains(r#"warning: col_para_list "c_atn" matches nothing"#)
    );
}
