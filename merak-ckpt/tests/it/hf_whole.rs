//! Hugging Face folders that lack something or do not fit their `config.json` are refused, those
//! that transformers saves are not.
//!
//! `tests/goldens/hf/shapes.json` has configurations and shapes that transformers saves, and the
//! script beside it made them.

use crate::hf::{golden, import_refusal, json, written};
use merak_ckpt::{Checkpoint, HfFolder, ImportOptions, Topology, import_hf};
use serde_json::{Value, json};
use std::collections::BTreeMap;

/// The configuration of a model, and the shapes of its tensors.
#[derive(Clone)]
pub(crate) struct Whole {
    pub(crate) config: Value,
    pub(crate) tensors: BTreeMap<String, Vec<usize>>,
}

/// What transformers saves in each case.
fn all() -> Vec<(String, Whole)> {
    let Value::Object(cases) = json(&golden("shapes.json")) else {
        unreachable!("it is an object")
    };
    let of = |model: Value| Whole {
        config: model["config"].clone(),
        tensors: serde_json::from_value(model["tensors"].clone()).expect("names and shapes"),
    };
    let cases = cases.into_iter();
    cases.map(|(case, model)| (case, of(model))).collect()
}

/// What it saves in this case.
pub(crate) fn whole(case: &str) -> Whole {
    let mut all = all().into_iter();
    let found = all.find(|(name, _)| name == case);
    found.expect("there is such a case").1
}

impl Whole {
    fn tensors(&self) -> Vec<(&str, &[usize])> {
        let tensors = self.tensors.iter();
        tensors
            .map(|(name, shape)| (name.as_str(), shape.as_slice()))
            .collect()
    }

    /// Names of the tensors of a checkpoint that is made of this.
    fn imported(&self) -> Vec<String> {
        let folder = written(&self.config, &self.tensors());
        let source = HfFolder::open(folder.path()).expect("it opens");
        let options = ImportOptions {
            topology: Topology {
                tp: 2,
                ..Topology::default()
            },
            ..ImportOptions::default()
        };
        let into = folder.path().join("imported");
        let path = import_hf(&source, into, &options).expect("it is whole");
        let manifest = Checkpoint::open(path).expect("it opens").manifest().clone();
        let tensors = manifest.tensors.into_iter();
        tensors.map(|tensor| tensor.name).collect()
    }

    /// The same without the unused one of the two names of BERT's head bias.
    fn without_twin(&self) -> Self {
        let mut used = self.clone();
        if used.tensors.contains_key("cls.predictions.decoder.bias") {
            used.tensors.remove("cls.predictions.bias");
        }
        used
    }

    fn refusal(&self) -> String {
        import_refusal(&self.config, &self.tensors())
    }

    /// The same without a tensor.
    fn without(&self, name: &str) -> Self {
        let mut rest = self.clone();
        rest.tensors.remove(name).expect("it is there");
        rest
    }

    /// The same with another shape of a tensor.
    fn with_shape(&self, name: &str, shape: &[usize]) -> Self {
        let mut other = self.clone();
        other.tensors.insert(name.to_owned(), shape.to_vec());
        other
    }

    /// The same with another value in the configuration.
    fn with_field(&self, field: &str, value: Value) -> Self {
        let mut other = self.clone();
        other.config[field] = value;
        other
    }
}

/// Whether a tensor belongs to a head that not every model of a family has.
fn is_of_head(name: &str) -> bool {
    ["score.", "classifier.", "classification_head."]
        .iter()
        .any(|head| name.starts_with(head))
}

#[test]
fn what_transformers_saves_is_whole_and_each_tensor_is_needed() {
    for (case, model) in all() {
        let imported = model.imported();
        let model = model.without_twin();
        let names: Vec<_> = model.tensors.keys().collect();
        assert_eq!(imported.iter().collect::<Vec<_>>(), names, "{case}");
        for name in names.into_iter().filter(|name| !is_of_head(name)) {
            let message = model.without(name).refusal();
            let expected = format!("it lacks tensor `{name}`");
            assert!(message.contains(&expected), "{case}: {message}");
        }
    }
}

#[test]
fn every_size_that_a_configuration_states_counts() {
    // Dims that depend on a value that is not stated, or on more than one field.
    let unstated: [(&str, &[usize]); 6] = [
        ("embed_positions.weight", &[0]),
        ("seq_relationship.weight", &[0]),
        ("seq_relationship.bias", &[0]),
        ("embeddings.cls_token", &[0, 1]),
        ("vit.embeddings.position_embeddings", &[0, 1]),
        ("projection.weight", &[2, 3]),
    ];
    for (case, model) in all() {
        let model = model.without_twin();
        for (name, shape) in model.tensors().into_iter().filter(|(n, _)| !is_of_head(n)) {
            let expected = format!("tensor `{name}` has shape ");
            let skipped = unstated.iter().find(|(end, _)| name.ends_with(end));
            for dim in 0..shape.len() {
                if skipped.is_some_and(|(_, dims)| dims.contains(&dim)) {
                    continue;
                }
                let mut shape = shape.to_vec();
                shape[dim] += 1;
                let message = model.with_shape(name, &shape).refusal();
                assert!(message.contains(&expected), "{case}: {message}");
            }
        }
    }
}

/// GPT-2 without any of its layers.
fn without_layers() -> Whole {
    Whole {
        config: json!({ "model_type": "gpt2" }),
        tensors: BTreeMap::from([
            ("wte.weight".to_owned(), vec![31, 16]),
            ("wpe.weight".to_owned(), vec![12, 16]),
            ("ln_f.weight".to_owned(), vec![16]),
            ("ln_f.bias".to_owned(), vec![16]),
        ]),
    }
}

/// Llama with a second layer like the first.
fn of_two_layers() -> Whole {
    let llama = whole("llama");
    let mut longer = llama.with_field("num_hidden_layers", json!(2));
    for (name, shape) in llama.tensors {
        let second = name.replace(".0.", ".1.");
        longer.tensors.insert(second, shape);
    }
    longer
}

#[test]
fn a_refusal_says_what_is_there_and_what_the_configuration_says() {
    let (gpt2, llama) = (whole("gpt2"), whole("llama"));
    let (k_proj, norm) = (
        "model.layers.0.self_attn.k_proj.weight",
        "model.layers.0.input_layernorm.weight",
    );
    let (without_layers, uneven) = (without_layers(), of_two_layers());
    let bias = |layer: usize| format!("model.layers.{layer}.self_attn.bonus");
    let messages = [
        gpt2.without("transformer.wpe.weight").refusal(),
        llama.without("lm_head.weight").refusal(),
        llama.without(k_proj).refusal(),
        without_layers.refusal(),
        gpt2.with_shape("transformer.wte.weight", &[30, 16])
            .refusal(),
        gpt2.with_shape("transformer.h.0.attn.c_attn.weight", &[48, 16])
            .refusal(),
        gpt2.with_shape("transformer.h.0.mlp.c_fc.weight", &[16, 48])
            .refusal(),
        llama.with_shape(k_proj, &[16, 16]).refusal(),
        llama.with_shape(norm, &[1, 16]).refusal(),
        llama.with_field("num_key_value_heads", json!(4)).refusal(),
        llama.with_field("hidden_size", json!("wide")).refusal(),
        llama.with_field("num_hidden_layers", json!(0)).refusal(),
        llama.with_field("num_hidden_layers", json!(1.5)).refusal(),
        llama.with_field("num_hidden_layers", json!(2)).refusal(),
        llama
            .with_field("num_hidden_layers", json!(u64::MAX))
            .refusal(),
        uneven.with_shape(&bias(1), &[16]).refusal(),
        uneven
            .with_shape(&bias(0), &[16])
            .with_shape(&bias(1), &[8])
            .refusal(),
    ];
    insta::assert_snapshot!(messages.join("\n"), @r#"
    cannot read HF: it lacks tensor `transformer.wpe.weight`
    cannot read HF: it lacks tensor `lm_head.weight`, which its config.json does not tie to the embedding
    cannot read HF: it lacks tensor `model.layers.0.self_attn.k_proj.weight`
    cannot read HF: it lacks tensor `transformer.h.0.ln_1.weight`
    cannot read HF: tensor `transformer.wte.weight` has shape [30, 16], expected [31, 16]: config.json has vocab_size 31, n_embd 16
    cannot read HF: tensor `transformer.h.0.attn.c_attn.weight` has shape [48, 16], expected [16, 48]: config.json has n_embd 16
    cannot read HF: tensor `transformer.h.0.mlp.c_fc.weight` has shape [16, 48], expected [16, 64]: config.json has n_embd 16
    cannot read HF: tensor `model.layers.0.self_attn.k_proj.weight` has shape [16, 16], expected [8, 16]: config.json has hidden_size 16, num_attention_heads 4, num_key_value_heads 2, head_dim 4
    cannot read HF: tensor `model.layers.0.input_layernorm.weight` has shape [1, 16], expected [16]: config.json has hidden_size 16
    cannot read HF: tensor `model.layers.0.self_attn.k_proj.weight` has shape [8, 16], expected [16, 16]: config.json has hidden_size 16, num_attention_heads 4, num_key_value_heads 4, head_dim 4
    cannot read HF/config.json: `hidden_size` is "wide", expected a whole number from 1 on
    cannot read HF/config.json: `num_hidden_layers` is 0, expected a whole number from 1 on
    cannot read HF/config.json: `num_hidden_layers` is 1.5, expected a whole number from 1 on
    cannot read HF: it lacks tensor `model.layers.1.input_layernorm.weight`
    cannot read HF: it lacks tensor `model.layers.1.input_layernorm.weight`
    cannot read HF: it lacks tensor `model.layers.0.self_attn.bonus`
    cannot read HF: tensor `model.layers.1.self_attn.bonus` has shape [8], that of another layer [16]
    "#);
}

#[test]
fn layers_that_the_configuration_does_not_count_are_left_out() {
    for (case, within) in [("llama", "model.layers."), ("t5", "decoder.block.")] {
        let model = whole(case);
        let mut longer = model.clone();
        for (name, shape) in &model.tensors {
            if let Some(rest) = name.strip_prefix(&format!("{within}0.")) {
                longer
                    .tensors
                    .insert(format!("{within}7.{rest}"), shape.clone());
            }
        }
        assert!(longer.tensors.len() > model.tensors.len());
        assert_eq!(longer.imported(), model.imported());
    }
}

#[test]
fn bare_models_need_no_head() {
    for (case, prefix) in [
        ("gpt2", "transformer."),
        ("llama", "model."),
        ("mistral", "model."),
        ("qwen2", "model."),
        ("qwen3", "model."),
        ("opt-350m", "model."),
        ("gpt_neox", "gpt_neox."),
        ("bert", "bert."),
        ("vit", "vit."),
    ] {
        let model = whole(case);
        let mut bare = model.with_field("architectures", json!(["BareModel"]));
        bare.tensors.clear();
        let mut expected = Vec::new();
        for (name, shape) in model.tensors {
            if let Some(rest) = name.strip_prefix(prefix) {
                bare.tensors.insert(rest.to_owned(), shape);
                expected.push(name);
            }
        }
        assert_eq!(bare.imported(), expected, "{case}");
        let first = expected.last().expect("there are some");
        let message = bare.without(&first[prefix.len()..]).refusal();
        assert!(message.contains(first), "{case}: {message}");
    }
}

#[test]
fn the_head_of_gpt_neox_may_have_the_name_that_it_has_in_memory() {
    let saved = whole("gpt_neox");
    let mut held = saved.without("embed_out.weight");
    let shape = saved.tensors["embed_out.weight"].clone();
    held.tensors.insert("lm_head.weight".to_owned(), shape);
    assert_eq!(held.imported(), saved.imported());
}

#[test]
fn quantized_weights_are_refused_by_name() {
    let model = whole("llama");
    let field = "quantization_config";
    let inactive = [
        json!(null),
        json!({}),
        json!({ "quant_method": "bitsandbytes", "load_in_4bit": false, "load_in_8bit": false }),
    ];
    for config in inactive {
        assert!(!model.with_field(field, config).imported().is_empty());
    }
    let active = [
        json!({ "quant_method": "gptq", "bits": 4 }),
        json!({ "quant_method": "bitsandbytes", "load_in_4bit": true, "load_in_8bit": false }),
        json!({ "bits": 4 }),
    ];
    let messages = active.map(|config| model.with_field(field, config).refusal());
    insta::assert_snapshot!(messages.join("\n"), @"
    cannot read HF/config.json: its `quantization_config` says that the weights are quantized by gptq, which cannot be read
    cannot read HF/config.json: its `quantization_config` says that the weights are quantized by bitsandbytes, which cannot be read
    cannot read HF/config.json: its `quantization_config` says that the weights are quantized, which cannot be read
    ");
}
