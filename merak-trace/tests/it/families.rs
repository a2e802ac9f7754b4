//! Configurations of model families: both spellings, every field used or refused.

use merak_trace::{
    Graph, Init, Op, Param,
    models::{self, TraceOptions},
    op::Rope,
    render::{self, Format},
};
use serde_json::{Value as Json, json};

const SEQ: usize = 8;

fn trace(config: &Json) -> Graph {
    let model = models::from_config(config).expect("the configuration is complete");
    model
        .trace(&TraceOptions::training(2, SEQ))
        .expect("the sizes fit")
}

fn refusal(config: &Json) -> String {
    match models::from_config(config) {
        Err(error) => error.to_string(),
        Ok(model) => format!("accepted as {:?}", model.info()),
    }
}

/// A configuration with a few fields set.
fn with(base: &Json, fields: Json) -> Json {
    let mut config = base.clone();
    if let (Some(config), Json::Object(fields)) = (config.as_object_mut(), fields) {
        config.extend(fields);
    }
    config
}

fn small(family: &str) -> Json {
    json!({ "model_type": family, "vocab_size": 31, "hidden_size": 16, "num_hidden_layers": 2,
        "num_attention_heads": 2, "max_position_embeddings": 16 })
}

fn llama(family: &str) -> Json {
    with(
        &small(family),
        json!({ "intermediate_size": 24, "num_key_value_heads": 1, "head_dim": 8 }),
    )
}

fn text(config: &Json) -> String {
    render::graph(&trace(config), Format::Json)
}

#[test]
fn transformers_4_and_5_spell_the_same_models() {
    let pairs = [
        (
            llama("llama"),
            json!({ "rope_theta": 500.0, "rope_scaling": null, "torch_dtype": "bfloat16", "pretraining_tp": 1 }),
            json!({ "rope_parameters": { "rope_theta": 500.0, "rope_type": "default" }, "dtype": "bfloat16" }),
        ),
        (
            llama("llama"),
            json!({ "rope_theta": 500.0, "rope_scaling": { "type": "linear", "factor": 2.0 } }),
            json!({ "rope_parameters": { "rope_theta": 500.0, "rope_type": "linear", "factor": 2.0 } }),
        ),
        (
            llama("qwen2"),
            json!({ "rope_scaling": { "type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4 },
                "use_sliding_window": true, "sliding_window": 3, "max_window_layers": 1 }),
            json!({ "rope_parameters": { "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4 },
                "use_sliding_window": true, "sliding_window": 3,
                "layer_types": ["full_attention", "sliding_attention"] }),
        ),
        (
            small("gpt_neox"),
            json!({ "rotary_pct": 0.5, "rotary_emb_base": 500 }),
            json!({ "rope_parameters": { "partial_rotary_factor": 0.5, "rope_theta": 500.0, "rope_type": "default" } }),
        ),
        (
            json!({ "model_type": "gpt2" }),
            json!({ "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 16, "vocab_size": 31, "n_ctx": 16 }),
            json!({ "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
                "max_position_embeddings": 16, "vocab_size": 31 }),
        ),
    ];
    for (base, four, five) in pairs {
        assert_eq!(
            text(&with(&base, four.clone())),
            text(&with(&base, five)),
            "{four}"
        );
    }
}

#[test]
fn the_first_length_is_noted_where_a_scaling_does_not_go_by_it() {
    let scaled = |fields| {
        let rope = with(&json!({ "rope_theta": 100.0, "factor": 2.0 }), fields);
        text(&with(&llama("llama"), json!({ "rope_parameters": rope })))
    };
    for kind in ["dynamic", "linear"] {
        assert_eq!(
            scaled(json!({ "rope_type": kind, "original_max_position_embeddings": 4 })),
            scaled(json!({ "rope_type": kind }))
        );
    }
}

#[test]
fn windows_lie_where_each_family_has_them() {
    let windows = |config: Json| -> Vec<_> {
        let graph = trace(&config);
        let nodes = graph.nodes().iter();
        let windows = nodes.filter_map(|node| match &node.op {
            Op::Attention(spec) => Some(spec.window),
            _ => None,
        });
        windows.collect()
    };
    let sized = |family, fields| windows(with(&llama(family), fields));
    assert_eq!(sized("llama", json!({})), [None; 2]);
    assert_eq!(sized("mistral", json!({})), [Some(4096); 2]);
    assert_eq!(
        sized("mistral", json!({ "sliding_window": null })),
        [None; 2]
    );
    assert_eq!(
        sized("mistral", json!({ "sliding_window": 3 })),
        [Some(3); 2]
    );
    assert_eq!(sized("qwen3", json!({ "sliding_window": 3 })), [None; 2]);
    let used = json!({ "use_sliding_window": true, "sliding_window": 3, "max_window_layers": 1 });
    assert_eq!(sized("qwen3", used), [None, Some(3)]);
}

#[test]
fn a_base_that_grows_lets_sequences_grow() {
    let config = with(
        &llama("llama"),
        json!({ "rope_scaling": { "rope_type": "dynamic", "factor": 2.0 } }),
    );
    let model = models::from_config(&config).unwrap();
    let turn = |options: &TraceOptions| turn(&model.trace(options).unwrap()).inv_freq;
    let frequency = |seq| turn(&TraceOptions::training(1, seq))[1];
    assert_eq!(frequency(4).to_bits(), frequency(16).to_bits());
    assert!(frequency(17) < frequency(16));
    // Positions that pass one at a time turn as in the whole text.
    let part = TraceOptions {
        context: Some(17),
        ..TraceOptions::training(1, 1)
    };
    assert_eq!(turn(&part)[1].to_bits(), frequency(17).to_bits());
    let lengths = [1, 16, 17, 18].map(|seq| model.scaling_length(seq));
    assert_eq!((model.info().max_seq, lengths), (32, [1, 1, 17, 18]));
    let error = model.trace(&TraceOptions::training(1, 33)).unwrap_err();
    insta::assert_snapshot!(error, @r#""max_position_embeddings" of the model's configuration allows sequences of 1 to 32 tokens, not 33"#);
}

/// The first rotary operation of a model.
fn turn(graph: &Graph) -> Rope {
    let turn = graph.nodes().iter().find_map(|node| match &node.op {
        Op::Rope(rope) => Some(rope.clone()),
        _ => None,
    });
    turn.expect("the model has rotary positions")
}

#[test]
fn divisors_go_by_whether_a_sequence_is_longer_than_those_of_the_first_training() {
    let divisors = json!({ "rope_type": "longrope", "short_factor": [1, 1, 2, 2], "long_factor": [4, 4, 4, 4] });
    // As Phi-3 writes it: the original length on the top level, the factor by both lengths.
    let outer = json!({ "original_max_position_embeddings": 8, "rope_theta": 16, "rope_scaling": divisors });
    let model = models::from_config(&with(&llama("llama"), outer)).unwrap();
    let turn = |seq| turn(&model.trace(&TraceOptions::training(1, seq)).unwrap());
    assert_eq!(turn(8).inv_freq, [1.0, 0.5, 0.125, 0.0625]);
    assert_eq!(turn(9).inv_freq, [0.25, 0.125, 0.0625, 0.031_25]);
    // sqrt(1 + ln(16 / 8) / ln 8)
    let scale = (4.0_f64 / 3.0).sqrt();
    assert!(
        [turn(8), turn(9)]
            .iter()
            .all(|turn| (turn.scale - scale).abs() < 1e-15)
    );
    let lengths = [1, 8, 9, 16].map(|seq| model.scaling_length(seq));
    assert_eq!((model.info().max_seq, lengths), (16, [1, 1, 9, 9]));
}

#[test]
fn padding_tokens_are_looked_up_and_not_trained() {
    let padding = |config: Json| {
        let graph = trace(&config);
        let nodes = graph.nodes().iter();
        let lookups = nodes.filter_map(|node| match node.op {
            Op::Embedding { padding, .. } => Some(padding),
            _ => None,
        });
        lookups.collect::<Vec<_>>()
    };
    let opt = |fields| with(&with(&small("opt"), json!({ "ffn_dim": 24 })), fields);
    assert_eq!(padding(opt(json!({}))), [Some(1), None]);
    assert_eq!(padding(opt(json!({ "pad_token_id": null }))), [None, None]);
    assert_eq!(
        padding(with(&llama("qwen3"), json!({ "pad_token_id": 0 }))),
        [Some(0)]
    );
    assert_eq!(
        padding(with(&small("gpt_neox"), json!({ "pad_token_id": 0 }))),
        [None]
    );
}

/// The messages for each family with some fields set, a line each.
fn refusals(cases: &[(&str, Json)]) -> String {
    let refusal = |(family, fields): &(&str, Json)| {
        let base = match *family {
            "opt" | "gpt_neox" | "bert" => small(family),
            "vit" => json!({ "model_type": "vit" }),
            "t5" => json!({ "model_type": "t5", "vocab_size": 31 }),
            _ => with(&llama(family), json!({ "num_key_value_heads": 2 })),
        };
        refusal(&with(&base, fields.clone()))
    };
    cases.iter().map(refusal).collect::<Vec<_>>().join("\n")
}

#[test]
fn scalings_of_positions_that_are_not_supported_are_named() {
    let cases = [
        (
            "llama",
            json!({ "rope_scaling": { "rope_type": "longrope", "factor": 2.0 } }),
        ),
        (
            "llama",
            json!({ "rope_scaling": { "rope_type": "longrope", "short_factor": [1, 1, 1, 0], "long_factor": [1] } }),
        ),
        (
            "llama",
            json!({ "rope_scaling": { "rope_type": "longrope", "short_factor": [1, 1, 1, 1], "long_factor": [1] } }),
        ),
        (
            "llama",
            json!({ "original_max_position_embeddings": 1, "rope_scaling": { "rope_type": "longrope",
                "short_factor": [1, 1, 1, 1], "long_factor": [1, 1, 1, 1] } }),
        ),
        (
            "llama",
            json!({ "rope_scaling": { "rope_type": "proportional" } }),
        ),
        ("llama", json!({ "rope_scaling": { "type": "linear" } })),
        (
            "llama",
            json!({ "rope_scaling": { "type": "linear", "factor": 2.0, "facter": 3.0 } }),
        ),
        (
            "llama",
            json!({ "rope_theta": 10.0, "rope_parameters": { "rope_theta": 20.0 } }),
        ),
        ("llama", json!({ "partial_rotary_factor": 0.5 })),
    ];
    insta::assert_snapshot!(refusals(&cases), @r#"
    model configuration: rope_scaling.short_factor: is missing
    model configuration: rope_scaling.short_factor: is no list of positive numbers
    model configuration: rope_scaling.long_factor: has 1 entries, but a head has 4 rotated pairs
    model configuration: original_max_position_embeddings: is 1, expected more than 1
    model configuration: rope_scaling.rope_type: is "proportional", expected default, linear, dynamic, llama3, yarn or longrope
    model configuration: rope_scaling.factor: is missing
    model configuration: rope_scaling.facter: is 3.0, but this model has no such field; the nearest known field is "factor"
    model configuration: rope_theta: is 10, but 20 in the rope parameters
    model configuration: partial_rotary_factor: is 0.5, expected 1
    "#);
}

#[test]
fn what_is_not_supported_is_named() {
    let cases = [
        ("llama", json!({ "hidden_act": "gelu" })),
        ("llama", json!({ "head_dim": 7 })),
        ("llama", json!({ "quantization_config": { "bits": 4 } })),
        ("llama", json!({ "torch_dtype": "float8_e4m3fn" })),
        ("llama", json!({ "tie_word_embedings": true })),
        ("llama", json!({ "pad_token_id": -1 })),
        (
            "llama",
            json!({ "architectures": ["LlamaForSequenceClassification"] }),
        ),
        ("mistral", json!({ "attention_bias": true })),
        ("qwen2", json!({ "layer_types": ["full_attention"] })),
        (
            "qwen2",
            json!({ "layer_types": ["sliding_attention", "full_attention"] }),
        ),
        (
            "qwen2",
            json!({ "layer_types": ["linear_attention", "full_attention"] }),
        ),
        ("opt", json!({ "layerdrop": 0.1 })),
        ("opt", json!({ "layer_norm_elementwise_affine": false })),
        ("gpt_neox", json!({ "rotary_pct": 1.5 })),
        ("gpt_neox", json!({ "hidden_act": "quick_gelu" })),
    ];
    let messages = refusals(&cases);
    insta::assert_snapshot!(messages, @r#"
    model configuration: hidden_act: is "gelu", which is not supported
    model configuration: head_dim: is 7, expected an even number
    model configuration: quantization_config: is {"bits":4}, but this model has no such field
    model configuration: torch_dtype: is "float8_e4m3fn", expected one of float32, float16, bfloat16, float64, auto
    model configuration: tie_word_embedings: is true, but this model has no such field; the nearest known field is "tie_word_embeddings"
    model configuration: pad_token_id: is -1, expected an integer of at least 0
    model configuration: architectures: names LlamaForSequenceClassification, expected LlamaForCausalLM or LlamaModel
    model configuration: attention_bias: is true, which is not supported
    model configuration: layer_types: has 1 entries, but there are 2 layers
    model configuration: layer_types: names sliding_attention, but use_sliding_window and sliding_window do not set a size
    model configuration: layer_types: names linear_attention, expected full_attention or sliding_attention
    model configuration: layerdrop: is 0.1, which is not supported
    model configuration: layer_norm_elementwise_affine: is false, which is not supported
    model configuration: rotary_pct: is 1.5, expected 0 to 1
    model configuration: hidden_act: is "quick_gelu", expected gelu, gelu_new, gelu_pytorch_tanh, relu, silu or tanh
    "#);
}

#[test]
fn what_belongs_to_another_family_is_named() {
    let messages = refusals(&[
        ("llama", json!({ "architectures": ["PhiForCausalLM"] })),
        (
            "llama",
            json!({ "dtype": "float32", "torch_dtype": "bfloat16" }),
        ),
        ("llama", json!({ "reorder_and_upcast_attn": true })),
        ("gpt_neox", json!({ "summary_type": "mean" })),
        ("bert", json!({ "is_encoder_decoder": true })),
        ("bert", json!({ "max_sequence_length": 512 })),
        ("vit", json!({ "is_decoder": true })),
        ("vit", json!({ "id2label": {} })),
        ("vit", json!({ "id2label": { "0": "cat" } })),
        ("vit", json!({ "num_labels": 1 })),
        ("t5", json!({ "pad_token_id": 31 })),
        ("t5", json!({ "pad_token_id": -1 })),
        ("t5", json!({ "decoder_start_token_id": 400 })),
    ]);
    insta::assert_snapshot!(messages, @r#"
    model configuration: architectures: names PhiForCausalLM, expected LlamaForCausalLM or LlamaModel
    model configuration: torch_dtype: is bfloat16, but dtype, which is the same, is float32
    model configuration: reorder_and_upcast_attn: is true, but this model has no such field
    model configuration: summary_type: is "mean", but this model has no such field
    model configuration: is_encoder_decoder: is true, which is not supported
    model configuration: max_sequence_length: is 512, but this model has no such field
    model configuration: is_decoder: is true, which is not supported
    model configuration: id2label: names no class, expected at least 2 classes
    model configuration: id2label: names 1 class, which asks for a regression, expected at least 2 classes
    model configuration: num_labels: is 1, which asks for a regression, expected at least 2 classes
    model configuration: pad_token_id: is 31, which is no token of 31
    model configuration: pad_token_id: is -1, expected an integer of at least 0
    model configuration: decoder_start_token_id: is 400, which is no token of 31
    "#);
}

#[test]
fn what_published_configurations_carry_besides_is_accepted() {
    let cases = [
        (
            llama("llama"),
            json!({ "is_llama_config": true, "rope_interleaved": false, "pretraining_tp": 1, "eos_token_id": [2, 5],
                "transformers.js_config": { "dtype": "q4" }, "use_cache": true }),
        ),
        (
            llama("qwen2"),
            json!({ "use_mrope": false, "use_sliding_window": false, "max_window_layers": 24,
                "sliding_window": 32768, "num_key_value_heads": 2 }),
        ),
        (
            small("opt"),
            json!({ "ffn_dim": 24, "activation_dropout": 0.0, "layerdrop": 0.0, "prefix": "</s>",
                "torch_dtype": "float16" }),
        ),
        (
            small("gpt_neox"),
            json!({ "attention_probs_dropout_prob": 0, "hidden_dropout_prob": 0, "rotary_emb_base": 10000,
                "rotary_pct": 0.25 }),
        ),
        (
            json!({ "model_type": "gpt2" }),
            json!({ "n_ctx": 1024, "summary_type": "cls_index", "summary_use_proj": true,
                "summary_proj_to_labels": true, "summary_first_dropout": 0.1, "summary_activation": null,
                "task_specific_params": { "text-generation": { "do_sample": true, "max_length": 50 } } }),
        ),
        // Fields of the first versions: GPT-2 of three sizes, BERT, the first Llama.
        (
            json!({ "model_type": "gpt2" }),
            json!({ "n_special": 0, "predict_special_tokens": true, "output_past": true,
                "reorder_and_upcast_attn": false }),
        ),
        (
            small("bert"),
            json!({ "architectures": ["BertForMaskedLM"], "output_past": true, "directionality": "bidi",
                "pooler_fc_size": 768, "classifier_dropout": null, "is_encoder_decoder": false }),
        ),
        (
            llama("llama"),
            json!({ "architectures": ["LLaMAForCausalLM"], "max_sequence_length": 2048, "pad_token_id": 0,
                "dtype": "float16", "torch_dtype": "torch.float16" }),
        ),
        (
            json!({ "model_type": "t5" }),
            json!({ "output_past": true, "decoder_start_token_id": 0, "classifier_dropout": 0.0 }),
        ),
    ];
    for (base, fields) in cases {
        let plain = models::from_config(&base).map(|model| model.info());
        let model = models::from_config(&with(&base, fields.clone()));
        assert!(plain.is_ok() && model.is_ok(), "{fields}: {model:?}");
    }
}

#[test]
fn every_family_names_its_sizes() {
    for family in models::known_families() {
        let names = models::size_fields(family).expect("a known family");
        let mut config = json!({ "model_type": family, "num_key_value_heads": null });
        if family == "gpt" {
            config = with(
                &config,
                json!({ "vocab_size": 31, "max_position_embeddings": 16 }),
            );
        }
        for (names, size) in [(names.layers, 3), (names.hidden, 24), (names.heads, 4)] {
            config[names[0]] = size.into();
        }
        let info = match models::from_config(&config) {
            Ok(model) => model.info(),
            Err(error) => unreachable!("{family}: {error}"),
        };
        // T5 has as many layers in its decoder.
        let stacks = if family == "t5" { 2 } else { 1 };
        assert_eq!(
            (
                info.family,
                info.num_layers,
                info.hidden_size,
                info.num_heads
            ),
            (family, 3 * stacks, 24, 4)
        );
    }
}

#[test]
fn what_a_model_was_not_made_for_is_refused_by_the_name_of_its_field() {
    let refused = [
        json!({ "model_type": "bert", "architectures": ["BertForQuestionAnswering"] }),
        json!({ "model_type": "bert", "position_embedding_type": "relative_key" }),
        json!({ "model_type": "bert", "architectures": ["BertForSequenceClassification"], "num_labels": 1 }),
        json!({ "model_type": "bert", "architectures": ["BertForSequenceClassification"],
            "problem_type": "multi_label_classification" }),
        json!({ "model_type": "bert", "architectures": ["BertForSequenceClassification"], "id2label": ["a", "b"] }),
        json!({ "model_type": "bert", "layer_norm_eps": -1 }),
        json!({ "model_type": "gpt2", "initializer_range": -0.02 }),
        json!({ "model_type": "gpt2", "eos_token_id": "</s>" }),
        json!({ "model_type": "llama", "eos_token_id": [1, 2.5] }),
        json!({ "model_type": "t5", "feed_forward_proj": "gated-mish" }),
        json!({ "model_type": "t5", "relative_attention_num_buckets": 3 }),
        json!({ "model_type": "vit", "patch_size": [16] }),
        json!({ "model_type": "vit", "image_size": 8 }),
        json!({ "model_type": "vit", "architectures": ["ViTForMaskedImageModeling"] }),
    ];
    let messages: Vec<_> = refused.iter().map(refusal).collect();
    insta::assert_snapshot!(messages.join("\n"), @r#"
    model configuration: architectures: names BertForQuestionAnswering, expected BertForMaskedLM or BertForSequenceClassification
    model configuration: position_embedding_type: is "relative_key", which is not supported
    model configuration: num_labels: is 1, which asks for a regression, expected at least 2 classes
    model configuration: problem_type: is "multi_label_classification", which is not supported
    model configuration: id2label: is ["a","b"], expected an object
    model configuration: layer_norm_eps: is -1, expected at least 0
    model configuration: initializer_range: is -0.02, expected at least 0
    model configuration: eos_token_id: is "</s>", expected an integer or a list of integers
    model configuration: eos_token_id: is [1,2.5], expected an integer or a list of integers
    model configuration: feed_forward_proj: is "gated-mish", expected relu, gelu, gated-gelu, gated-silu or the like
    model configuration: relative_attention_num_buckets: is 3, too few to tell distances up to 128 (relative_attention_max_distance) apart
    model configuration: patch_size: is [16], expected a positive integer or a pair of them
    model configuration: patch_size: is [16, 16], larger than the image [8, 8]
    model configuration: architectures: names ViTForMaskedImageModeling, expected ViTForImageClassification
    "#);
    let model = models::from_config(&json!({ "model_type": "vit" })).unwrap();
    let error = model.trace(&TraceOptions::training(2, SEQ)).unwrap_err();
    insta::assert_snapshot!(error, @"model configuration: image_size: makes sequences of 197, the class token and 196 patches, not of 8");
}

#[test]
fn a_table_with_bias_in_its_name_does_not_decay() {
    let graph = trace(
        &json!({ "model_type": "t5", "vocab_size": 31, "d_model": 16, "d_kv": 8, "d_ff": 24,
        "num_layers": 1, "num_decoder_layers": 1, "num_heads": 2 }),
    );
    let kept: Vec<_> = graph
        .params()
        .iter()
        .filter(|param| !param.decays() && !param.name.contains("layer_norm"))
        .map(|param| param.name.as_str())
        .collect();
    assert_eq!(
        kept,
        [
            "encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight",
            "decoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight",
        ]
    );
    assert!(graph.params().iter().any(Param::decays));
}

#[test]
fn matrices_that_end_a_branch_start_smaller_where_no_deviation_is_stated() {
    let configs = [
        small("gpt"),
        json!({ "model_type": "gpt2", "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 16 }),
        llama("llama"),
        with(&small("opt"), json!({ "ffn_dim": 24 })),
        small("gpt_neox"),
        with(
            &small("bert"),
            json!({ "architectures": ["BertForMaskedLM"] }),
        ),
        json!({ "model_type": "vit", "hidden_size": 16, "num_hidden_layers": 2,
            "num_attention_heads": 2, "image_size": 14, "patch_size": 7 }),
    ];
    for config in configs {
        let family = config["model_type"].as_str().expect("a name");
        let own = if family == "opt" {
            "init_std"
        } else {
            "initializer_range"
        };
        let rows = models::family(family)
            .expect("it is known")
            .split_layers
            .rows;
        for stated in [None, Some(0.3)] {
            let config = stated.map_or(config.clone(), |std| with(&config, json!({ own: std })));
            let seq = if family == "vit" { 5 } else { SEQ };
            let model = models::from_config(&config).expect("the configuration is complete");
            let options = TraceOptions::training(2, seq);
            let graph = model.trace(&options).expect("the sizes fit");
            let mut outputs = 0;
            for param in graph.params() {
                let Init::Normal(std) = param.init else {
                    continue;
                };
                let is_output = rows.iter().any(|row| param.name.contains(row));
                outputs += usize::from(is_output);
                // Two branches in each of two layers; GPT-2 states this of its own deviation too.
                let is_smaller = is_output && (stated.is_none() || family == "gpt2");
                let part = if is_smaller { 0.5 } else { 1.0 };
                let expected = part * stated.unwrap_or(options.init_std);
                assert!((std - expected).abs() < 1e-12, "{family}: {}", param.name);
            }
            assert_eq!(outputs, 4, "{family}");
        }
    }
}
