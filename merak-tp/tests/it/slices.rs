//! Slices by name, convolutions, and layers that are chosen without lists.

use crate::{
    run::assert_same,
    support::{apply, gpt2, input, linear, llama, model, trace},
};
use merak_tp::{LayerLists, SplitKind, auto_lists, cuts, default_lists, rewrite};
use merak_trace::{
    Axis, DType, Graph, Op, Placement,
    models::{Model, TraceOptions},
    op::Activation,
};
use serde_json::{Value as Json, json};

fn options() -> TraceOptions {
    TraceOptions {
        dtype: DType::F64,
        ..TraceOptions::training(2, 8)
    }
}

fn traced(config: &Json) -> (Box<dyn Model>, Graph) {
    let model = model(config);
    let graph = model.trace(&options()).expect("the sizes fit");
    (model, graph)
}

fn vit(channels: usize) -> Json {
    json!({ "model_type": "vit", "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 4,
        "intermediate_size": 24, "image_size": [7, 2], "patch_size": [1, 2], "num_labels": 101,
        "num_channels": channels })
}

fn t5() -> Json {
    json!({ "model_type": "t5", "vocab_size": 101, "d_model": 16, "d_kv": 6, "d_ff": 24,
        "num_layers": 2, "num_heads": 4, "relative_attention_num_buckets": 8,
        "relative_attention_max_distance": 6, "feed_forward_proj": "gated-gelu" })
}

/// How a parameter of a split graph lies.
fn placement(graph: &Graph, name: &str) -> Placement {
    let param = graph.find_param(name).expect("a parameter of the model");
    graph.param(param).placements.on(Axis::Tensor).clone()
}

#[test]
fn a_convolution_is_split_by_input_channels() {
    let (_, whole) = traced(&vit(4));
    let lists = LayerLists {
        conv_para_list: vec!["projection".into()],
        ..default_lists("vit").unwrap()
    };
    for degree in [2, 4] {
        let split = rewrite(&whole, &lists, degree).unwrap();
        assert!(split.report.gathers.is_empty(), "{}", split.report);
        let kernel = "vit.embeddings.patch_embeddings.projection.weight";
        assert_eq!(placement(&split.graph, kernel), Placement::shard(1, 4));
        assert_same(&whole, &split.graph, degree);
    }
}

#[test]
fn layers_and_tables_are_sliced_by_name_and_dimension() {
    let (_, whole) = traced(&t5());
    let mut lists = default_lists("t5").unwrap();
    lists.weight_change_list = vec![("relative_attention_bias".into(), 1)];
    let split = rewrite(&whole, &lists, 2).unwrap();
    assert!(split.report.unmatched.is_empty(), "{}", split.report);
    let table = "decoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight";
    assert_eq!(placement(&split.graph, table), Placement::shard(1, 4));
    assert_same(&whole, &split.graph, 2);

    let (_, whole) = traced(&gpt2(1, 0.1, true));
    let lists = LayerLists {
        weight_change_list: vec![
            ("c_attn".into(), 0),
            ("c_proj".into(), 1),
            ("c_fc".into(), 0),
            // A table that every rank needs whole is gathered.
            ("wpe".into(), 1),
            ("ln_f.bias".into(), 0),
        ],
        ..LayerLists::default()
    };
    let split = rewrite(&whole, &lists, 2).unwrap();
    assert_eq!(split.report.modules.len(), 4);
    assert_eq!(split.report.gathers.len(), 2, "{}", split.report);
    assert_same(&whole, &split.graph, 2);
    let found = cuts(&whole, &lists).unwrap();
    assert_eq!(found["transformer.wpe.weight"].parts, [16]);
}

#[test]
fn chosen_layers_need_no_more_than_the_lists_of_any_family() {
    let small = |family: &str, more: Json| {
        let mut config = json!({ "model_type": family, "vocab_size": 101, "hidden_size": 16,
            "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 16 });
        for (key, value) in more.as_object().expect("fields") {
            config[key] = value.clone();
        }
        config
    };
    let architecture = |name: &str| json!({ "architectures": [name], "intermediate_size": 24 });
    let families = [
        gpt2(2, 0.0, true),
        small("gpt", json!({})),
        llama(2, 4, 0.0),
        llama(2, 2, 0.0),
        small(
            "mistral",
            json!({ "num_key_value_heads": 2, "intermediate_size": 24 }),
        ),
        small(
            "qwen2",
            json!({ "num_key_value_heads": 4, "intermediate_size": 24 }),
        ),
        small(
            "qwen3",
            json!({ "num_key_value_heads": 2, "intermediate_size": 24 }),
        ),
        small("gpt_neox", json!({})),
        small("opt", json!({ "ffn_dim": 24, "word_embed_proj_dim": 6 })),
        small(
            "opt",
            json!({ "ffn_dim": 24, "word_embed_proj_dim": 6, "do_layer_norm_before": false }),
        ),
        small("bert", architecture("BertForMaskedLM")),
        small("bert", architecture("BertForSequenceClassification")),
        t5(),
        vit(3),
    ];
    for config in families {
        let (model, whole) = traced(&config);
        let family = model.info().family;
        let by_hand = default_lists(family).expect("the family has lists");
        for degree in [2, 4] {
            let by_hand = rewrite(&whole, &by_hand, degree).unwrap().report;
            let auto = auto_lists(&whole, degree).unwrap();
            let split = rewrite(&whole, &auto.lists, degree).unwrap();
            let what = format!("{family} on {degree}: {:?}\n{}", auto.choices, split.report);
            assert!(split.report.bytes() <= by_hand.bytes(), "{what}");
            assert!(split.report.unmatched.is_empty(), "{what}");
            let elements = |report: &merak_tp::Report| -> usize {
                let modules = report.modules.iter();
                modules
                    .map(|split| split.in_features * split.out_features)
                    .sum()
            };
            assert!(elements(&split.report) >= elements(&by_hand), "{what}");
        }
    }
}

#[test]
fn every_choice_has_a_reason() {
    let (_, whole) = traced(
        &json!({ "model_type": "bert", "vocab_size": 101, "hidden_size": 16,
        "architectures": ["BertForMaskedLM"], "num_hidden_layers": 1, "num_attention_heads": 4,
        "intermediate_size": 24, "max_position_embeddings": 16, "type_vocab_size": 101 }),
    );
    let auto = auto_lists(&whole, 2).unwrap();
    let lines: Vec<_> = auto.choices.iter().map(ToString::to_string).collect();
    insta::assert_snapshot!(lines.join("\n"), @"
    auto col bert.encoder.layer.{i}.attention.self.query: each rank goes on with its part
    auto col bert.encoder.layer.{i}.attention.self.key: each rank goes on with its part
    auto col bert.encoder.layer.{i}.attention.self.value: each rank goes on with its part
    auto row bert.encoder.layer.{i}.attention.output.dense: its input comes split
    auto col bert.encoder.layer.{i}.intermediate.dense: each rank goes on with its part
    auto row bert.encoder.layer.{i}.output.dense: its input comes split
    auto whole cls.predictions.transform.dense: its parts would be gathered as cls.predictions.transform.gelu for cls.predictions.transform.LayerNorm.layer_norm
    ");
    let split = rewrite(&whole, &auto.lists, 2).unwrap();
    assert_same(&whole, &split.graph, 2);
}

#[test]
fn of_choices_that_split_as_much_the_one_that_communicates_least_is_taken() {
    let chain = trace(|module| {
        let narrow = linear(module, "first", &input(module, &[2, 64]), 8)?;
        let bent = apply(module, Op::Activation(Activation::Silu), &[&narrow])?;
        let wide = linear(module, "second", &bent, 64)?;
        let bent = apply(module, Op::Activation(Activation::Silu), &[&wide])?;
        let narrow = linear(module, "third", &bent, 8)?;
        module.output("y", &linear(module, "head", &narrow, 3)?);
        Ok(())
    });
    let auto = auto_lists(&chain, 2).unwrap();
    let lines: Vec<_> = auto.choices.iter().map(ToString::to_string).collect();
    insta::assert_snapshot!(lines.join("\n"), @"
    auto whole first: layers after it are split in its place
    auto col second: each rank goes on with its part
    auto row third: its input comes split
    ");
    let chosen = rewrite(&chain, &auto.lists, 2).unwrap();
    let first = LayerLists::col_row(["first"], ["second"]);
    assert!(chosen.report.bytes() < rewrite(&chain, &first, 2).unwrap().report.bytes());
}

#[test]
fn what_does_not_divide_stays_whole_or_is_refused() {
    // Three heads stop the attention; the rest of the block is split.
    let mut config = gpt2(1, 0.0, true);
    (config["n_embd"], config["n_head"]) = (12.into(), 3.into());
    let (_, whole) = traced(&config);
    let auto = auto_lists(&whole, 2).unwrap();
    let kinds: Vec<_> = auto.choices.iter().map(|choice| choice.kind).collect();
    let (col, row) = (Some(SplitKind::Col), Some(SplitKind::Row));
    assert_eq!(kinds, [None, None, col, row]);
    assert_same(&whole, &rewrite(&whole, &auto.lists, 2).unwrap().graph, 2);

    let odd = trace(|module| {
        let up = linear(module, "up", &input(module, &[2, 8]), 10)?;
        let bent = apply(module, Op::Activation(Activation::Silu), &[&up])?;
        module.output("y", &linear(module, "down", &bent, 8)?);
        Ok(())
    });
    let message = |degree| auto_lists(&odd, degree).unwrap_err().to_string();
    insta::assert_snapshot!(message(4), @r#"up: 10 output features cannot be split over tp = 4 (auto_lists): choose "tp" among 1, 2, 5, 10"#);
    let lone = trace(|module| {
        module.output("y", &linear(module, "up", &input(module, &[2, 8]), 8)?);
        Ok(())
    });
    let message = auto_lists(&lone, 2).unwrap_err().to_string();
    insta::assert_snapshot!(message, @"tp = 2 splits nothing: no two linear layers of the model follow each other so that the parts of one are all that the next needs; name layers with `set_tp_layer_lists`");
}
