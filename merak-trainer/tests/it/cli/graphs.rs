//! Graphs of models, in every format.

use insta::assert_snapshot;
use serde_json::json;

use super::Workplace;

#[test]
fn a_graph_is_printed_in_every_format() {
    let place = Workplace::new();
    let text = place.succeed("trace merak.toml");
    assert!(
        text.contains("transformer.wte.weight") && text.contains("loss"),
        "{text}"
    );
    assert!(!text.contains("all_reduce"));
    let dot = place.succeed("trace model.json --format dot");
    assert!(dot.starts_with("digraph"), "{dot}");
    let whole = place.document("trace model.json --format json");
    assert_eq!(whole["traffic"], json!({}));
    // The last of two stages, with the collectives of two tensor-parallel ranks, backward included.
    let stage = place.succeed("trace merak.toml --tp 2 --pp 2 --stage 1");
    assert!(
        stage.contains("all_reduce") && stage.contains("transformer.h.3"),
        "{stage}"
    );
    assert!(!stage.contains("transformer.h.0"), "{stage}");
    let of_layer = stage
        .lines()
        .find(|line| line.starts_with("# transformer.h.3 "));
    let of_layer = of_layer.map(|line| line.split_whitespace().collect::<Vec<_>>());
    let of_layer = of_layer.expect("a table of what the layers communicate");
    assert_eq!(of_layer[2..4], ["all_reduce", "2"], "{stage}");
    let stage = place.document("trace merak.toml --tp 2 --pp 2 --stage 1 --format json");
    let traffic = &stage["traffic"]["tensor"];
    let rows = |part: &str| traffic[part].as_array().expect("rows").clone();
    let of_layer = rows("layers");
    let of_layer = of_layer
        .iter()
        .find(|row| row["layer"] == "transformer.h.3");
    let of_layer = of_layer.expect("the layer communicates");
    assert_eq!(of_layer["collective"], "all_reduce");
    assert_eq!(of_layer["forward"], 2);
    let bytes = |part: &str| -> u64 {
        let rows = rows(part).into_iter();
        rows.filter_map(|row| row["bytes"].as_u64()).sum()
    };
    assert!(
        bytes("layers") > 0 && bytes("layers") == bytes("total"),
        "{traffic}"
    );
    // Ranks that share sequences, at the default of recomputing each layer.
    let shared = place.succeed("trace merak.toml --sp 2");
    let of_layer = shared
        .lines()
        .find(|line| line.starts_with("# transformer.h.3 "));
    let of_layer = of_layer.map(|line| line.split_whitespace().collect::<Vec<_>>());
    let of_layer = of_layer.expect("a table of what the layers communicate");
    assert_eq!(of_layer[2..6], ["all_to_all", "4", "4", "4"], "{shared}");
    // Any key may follow.
    let shallow = place.succeed("trace merak.toml --num_layers 2 --per_device_train_batch_size 3");
    assert!(
        !shallow.contains("transformer.h.2") && shallow.contains("[3, 16]"),
        "{shallow}"
    );
    let dot = place.succeed("trace merak.toml --virtual_stages 2 --train_schedule interleaved_1f1b --pp 2 --stage 3 --format dot");
    assert!(dot.starts_with("digraph"), "{dot}");
    place.write("hf/config.json", &super::model().to_string());
    assert_eq!(place.succeed("trace hf"), place.succeed("trace model.json"));
}

#[test]
fn a_graph_comes_with_the_reasons_for_layers_that_were_chosen() {
    let place = Workplace::new();
    place.write(
        "encoder.json",
        r#"{ "model_type": "bert", "architectures": ["BertForMaskedLM"], "vocab_size": 31, "hidden_size": 16,
            "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24 }"#,
    );
    let line = "trace encoder.json --tp 2";
    let text = place.succeed(&format!("{line} --tp_layer_lists auto"));
    let reasons = text.lines().filter_map(|line| line.strip_prefix("# auto "));
    assert_snapshot!(reasons.collect::<Vec<_>>().join("\n"), @"
    col bert.encoder.layer.{i}.attention.self.query: each rank goes on with its part
    col bert.encoder.layer.{i}.attention.self.key: each rank goes on with its part
    col bert.encoder.layer.{i}.attention.self.value: each rank goes on with its part
    row bert.encoder.layer.{i}.attention.output.dense: its input comes split
    col bert.encoder.layer.{i}.intermediate.dense: each rank goes on with its part
    row bert.encoder.layer.{i}.output.dense: its input comes split
    whole cls.predictions.transform.dense: its parts would be gathered as cls.predictions.transform.gelu for cls.predictions.transform.LayerNorm.layer_norm
    ");
    let document = place.document(&format!("{line} --tp_layer_lists auto --format json"));
    assert_eq!(document["choices"][3]["reason"], "its input comes split");
    let sliced = format!("{line} --weight_change_list [[\"attention.output.LayerNorm\",0]]");
    let text = place.succeed(&sliced);
    let gathers: Vec<_> = text
        .lines()
        .filter(|line| line.starts_with("# gather "))
        .collect();
    assert_eq!(gathers.len(), 2, "{text}");
    let document = place.document(&format!("{sliced} --format json"));
    let name = &document["gathers"][0]["value"];
    assert_eq!(
        name,
        "bert.encoder.layer.0.attention.output.LayerNorm.weight"
    );
    // Lists of the family need no reasons.
    assert!(!place.succeed(line).contains("# auto "));
    let listed = place.document(&format!("{line} --format json"));
    assert_eq!(listed["choices"], json!([]));
}

#[test]
fn encoders_are_traced_split_and_cut_by_their_config_alone() {
    let place = Workplace::new();
    let sizes = r#""hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24"#;
    let bert = format!(r#"{{ "model_type": "bert", "vocab_size": 31, {sizes} }}"#);
    let vit = format!(r#"{{ "model_type": "vit", "image_size": 8, "patch_size": 4, {sizes} }}"#);
    let t5 = r#"{ "model_type": "t5", "vocab_size": 31, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2,
        "num_heads": 2 }"#;
    for (config, input) in [
        (&*bert, "attention_mask"),
        (&*vit, "pixel_values"),
        (t5, "decoder_input_ids"),
    ] {
        place.write("encoder.json", config);
        let whole = place.succeed("trace encoder.json --tp 2");
        assert!(whole.contains(&format!("= \"{input}\"")), "{whole}");
        assert!(whole.contains("all_reduce("), "{whole}");
        let stage = place.succeed("trace encoder.json --tp 2 --pp 2 --stage 1");
        assert!(
            stage.contains("cross_entropy(") && stage.contains("recv("),
            "{stage}"
        );
    }
}
