//! Configurations as transformers 4 and 5 write them, and the fields that tell models apart: used,
//! or refused by name.
//!
//! `goldens/configs` has the configurations and the script that made them.

use merak_trace::{
    models::{self, Head, Objective, TraceOptions},
    render::{self, Format},
};
use serde_json::{Map, Value as Json, json};

const GOLDENS: [&str; 2] = [
    include_str!("../goldens/configs/transformers-4.json"),
    include_str!("../goldens/configs/transformers-5.json"),
];

/// The configurations of one version, by name: as saved, and with every field.
fn golden(text: &str) -> Map<String, Json> {
    let mut cases: Map<String, Json> = serde_json::from_str(text).expect("the script wrote JSON");
    cases.shift_remove("version").expect("the script notes it");
    cases
}

/// The graph of a model, or why there is none.
fn graph(config: &Json) -> Result<String, String> {
    let model = models::from_config(config).map_err(|error| error.to_string())?;
    let seq = match model.objective() {
        Objective::ImageClassification => model.info().max_seq,
        _ => 8,
    };
    let options = TraceOptions::training(2, seq).with_head(Head::Logits);
    let graph = model.trace(&options).map_err(|error| error.to_string())?;
    Ok(render::graph(&graph, Format::Json))
}

#[test]
fn both_versions_of_transformers_write_the_same_models() {
    let [four, five] = GOLDENS.map(golden);
    assert!(four.keys().eq(five.keys()));
    let families: Vec<_> = four
        .values()
        .filter_map(|case| case["saved"]["model_type"].as_str())
        .collect();
    // `gpt` is no model of transformers.
    for family in models::known_families().filter(|family| *family != "gpt") {
        assert!(families.contains(&family), "{family}");
    }
    for (name, case) in &four {
        let expected =
            graph(&case["saved"]).unwrap_or_else(|error| unreachable!("{name}: {error}"));
        let others = [&case["all"], &five[name]["saved"], &five[name]["all"]];
        for (number, other) in others.into_iter().enumerate() {
            assert_eq!(graph(other).as_ref(), Ok(&expected), "{name}, {number}");
        }
        // Before 4.56 the element type had another name.
        let mut older = case["saved"].clone();
        let fields = older.as_object_mut().expect("an object");
        let dtype = fields.remove("dtype").expect("the script sets it");
        fields.insert("torch_dtype".to_owned(), dtype);
        assert_eq!(graph(&older), Ok(expected), "{name}");
    }
}

/// The effect of a field on a model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Effect {
    Used,
    None,
    Refused,
}

/// Sets a field and looks at the graph; a refusal must name the field.
fn effect(config: &Json, field: &str, value: &Json) -> Effect {
    let plain = graph(config).expect("the script's configurations are supported");
    let mut changed = config.clone();
    changed[field] = value.clone();
    match graph(&changed) {
        Ok(graph) if graph == plain => Effect::None,
        Ok(_) => Effect::Used,
        Err(error) => {
            let named = format!("model configuration: {field}");
            assert!(error.starts_with(&named), "{field}: {error}");
            Effect::Refused
        }
    }
}

/// The value that a field gets, by the configuration it is set in.
type ValueOf = Box<dyn Fn(&Json) -> Json>;

/// The opposite of the configuration's value.
fn flag(field: &'static str) -> ValueOf {
    let default = field == "tie_word_embeddings";
    Box::new(move |config| json!(!config[field].as_bool().unwrap_or(default)))
}

fn fixed(value: Json) -> ValueOf {
    Box::new(move |_| value.clone())
}

#[test]
fn fields_that_tell_models_apart_are_used_or_refused() {
    let mut cases = golden(GOLDENS[0]);
    cases.retain(|name, case| case["saved"]["model_type"] == *name);
    for case in cases.values_mut() {
        // This field says of each layer what other fields say of all layers.
        let fields = case["saved"].as_object_mut().expect("an object");
        fields.remove("layer_types");
    }
    let fields: [(&str, ValueOf); 13] = [
        ("attention_bias", flag("attention_bias")),
        ("mlp_bias", flag("mlp_bias")),
        ("qkv_bias", fixed(json!(false))),
        ("head_dim", fixed(json!(12))),
        ("num_key_value_heads", fixed(json!(2))),
        ("partial_rotary_factor", fixed(json!(0.25))),
        ("sliding_window", fixed(json!(5))),
        ("use_sliding_window", flag("use_sliding_window")),
        ("max_window_layers", fixed(json!(0))),
        (
            "layer_types",
            fixed(json!(["sliding_attention", "full_attention"])),
        ),
        ("rope_scaling", fixed(json!({ "rope_type": "longrope" }))),
        ("num_experts", fixed(json!(8))),
        ("tie_word_embeddings", flag("tie_word_embeddings")),
    ];
    let table = fields.iter().map(|(field, value)| {
        let of = |wanted: Effect| {
            let mut names: Vec<_> = cases
                .iter()
                .filter(|(_, case)| {
                    let config = &case["saved"];
                    effect(config, field, &value(config)) == wanted
                })
                .map(|(name, _)| name.as_str())
                .collect();
            names.sort_unstable();
            names.join(" ")
        };
        let (used, none) = (of(Effect::Used), of(Effect::None));
        format!("{field}: used by [{used}], without effect on [{none}]")
    });
    let table = table.collect::<Vec<_>>().join("\n");
    // The other families refuse the field. It has no effect where the family's defaults switch it
    // off, or where there is no head.
    insta::assert_snapshot!(table, @r"
    attention_bias: used by [gpt_neox llama qwen3], without effect on []
    mlp_bias: used by [llama], without effect on []
    qkv_bias: used by [vit], without effect on []
    head_dim: used by [llama mistral qwen2 qwen3], without effect on []
    num_key_value_heads: used by [llama mistral qwen2 qwen3], without effect on []
    partial_rotary_factor: used by [], without effect on []
    sliding_window: used by [mistral qwen2], without effect on [qwen3]
    use_sliding_window: used by [qwen2], without effect on [qwen3]
    max_window_layers: used by [qwen2], without effect on [qwen3]
    layer_types: used by [qwen2], without effect on []
    rope_scaling: used by [], without effect on []
    num_experts: used by [], without effect on []
    tie_word_embeddings: used by [bert gpt2 gpt_neox llama mistral opt qwen2 qwen3 t5], without effect on [vit]
    ");
}

#[test]
fn no_list_is_made_of_a_size_before_the_size_is_checked() {
    for (name, case) in golden(GOLDENS[1]) {
        let fields = case["saved"].as_object().expect("an object");
        let sizes = fields.iter().filter(|(_, value)| value.is_u64());
        for (field, _) in sizes.filter(|(field, _)| !field.ends_with("_token_id")) {
            for size in [2_147_483_648_u64, 4_294_967_295, 18_446_744_073_709_551_615] {
                let mut changed = case["saved"].clone();
                changed[field] = size.into();
                changed
                    .as_object_mut()
                    .expect("an object")
                    .remove("layer_types");
                // An abort would end the test.
                let outcome = models::from_config(&changed);
                let counts = ["num_hidden_layers", "num_layers", "num_decoder_layers"];
                if counts.contains(&field.as_str()) {
                    let error = outcome.expect_err("too many layers").to_string();
                    let named = format!("model configuration: {field}: is {size}, expected ");
                    assert!(error.starts_with(&named), "{name}: {error}");
                } else if let Ok(model) = outcome {
                    // Rotary positions have a frequency for each pair of a head's elements.
                    let _ = model.trace(&TraceOptions::training(1, 8));
                }
            }
        }
    }
}
