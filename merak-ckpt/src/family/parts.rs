//! What models of the known families consist of: their modules, and the sizes of these by the
//! configuration.

use serde_json::Value;

/// Whether the model of a configuration has something.
type When = fn(&Value) -> bool;

/// The modules that every model of a family has, by full names.
#[derive(Debug)]
pub(crate) struct Parts {
    pub(crate) outside: &'static [Module],
    pub(crate) stacks: &'static [Stack],
}

impl Parts {
    /// Whether some model of the family has a parameter of this name.
    pub(super) fn has(&self, name: &str) -> bool {
        let is_in = |modules: &[Module], name: &str| {
            let mut modules = modules.iter();
            modules.any(|module| {
                let rest = name.strip_prefix(module.name);
                rest.is_some_and(|rest| rest == module.weight || rest == ".bias")
            })
        };
        let in_stack = |stack: &Stack| {
            let within = name
                .strip_prefix(stack.before)
                .and_then(|rest| rest.split_once('.'));
            let (_, within) = within.filter(|(number, _)| number.parse::<usize>().is_ok())?;
            let mut groups = stack.layer.iter();
            groups.find(|(before, modules)| {
                let name = within.strip_prefix(before);
                name.is_some_and(|name| is_in(modules, name))
            })
        };
        is_in(self.outside, name) || self.stacks.iter().any(|stack| in_stack(stack).is_some())
    }
}

/// Layers, one like the other.
#[derive(Debug)]
pub(crate) struct Stack {
    /// The prefix before a layer's number.
    pub(crate) before: &'static str,
    /// Fields of the configuration that say how many there are; the first one that is stated
    /// counts.
    pub(crate) count: &'static [&'static str],
    pub(crate) has: When,
    /// The modules of a layer, in groups: the prefix of their names within the layer, and the
    /// modules.
    pub(crate) layer: &'static [(&'static str, &'static [Module])],
}

/// A module with parameters.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Module {
    name: &'static str,
    /// Suffix of its weight's name.
    weight: &'static str,
    /// The weight's sizes; of a linear layer outputs, then inputs.
    sizes: &'static [Size],
    has: When,
    has_bias: When,
}

/// A size, by the configuration.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Size {
    /// A size that it does not state.
    Any,
    /// A field.
    Field(&'static str),
    Width,
    /// Width of the embedding.
    Embedding,
    /// Queries, keys and values of this width.
    Fused,
    /// Inner width of the feed-forward layers.
    Inner,
    /// One head.
    Head,
    /// The queries of all heads.
    Queries,
    /// The keys, or the values, of all heads that have their own.
    Keys,
}

use Size::{Any, Embedding, Field, Fused, Head, Inner, Keys, Queries, Width};

const VOCAB: Size = Field("vocab_size");
/// The sizes of an input embedding, and of a head.
pub(crate) const EMBEDDING: &[Size] = &[VOCAB, Embedding];

const WIDTH: [&str; 3] = ["n_embd", "hidden_size", "d_model"];
const INNER: [&str; 4] = ["n_inner", "intermediate_size", "ffn_dim", "d_ff"];
const HEADS: [&str; 3] = ["num_attention_heads", "num_heads", "n_head"];
const HEAD: [&str; 2] = ["head_dim", "d_kv"];
const KEY_HEADS: [&str; 1] = ["num_key_value_heads"];

/// Architectures with the head for pairs of sentences.
pub(super) const PAIRS: &[&str] = &["BertForPreTraining", "BertForNextSentencePrediction"];

/// The modules of an unknown family.
pub(super) const UNKNOWN: Parts = Parts {
    outside: &[],
    stacks: &[],
};

pub(super) const GPT2: Parts = Parts {
    outside: &[
        table("transformer.wte", EMBEDDING),
        table("transformer.wpe", &[Field("n_positions"), Width]),
        norm("transformer.ln_f"),
    ],
    stacks: &[Stack {
        before: "transformer.h.",
        count: &["n_layer", "num_hidden_layers"],
        has: always,
        layer: &[(
            "",
            &[
                norm("ln_1"),
                linear("attn.c_attn", &[Fused, Width]),
                linear("attn.c_proj", &[Width, Width]),
                norm("ln_2"),
                linear("mlp.c_fc", &[Inner, Width]),
                linear("mlp.c_proj", &[Width, Inner]),
            ],
        )],
    }],
};

pub(super) const LLAMA: Parts = Parts {
    outside: &[table("model.embed_tokens", EMBEDDING), scale("model.norm")],
    stacks: &[Stack {
        before: "model.layers.",
        count: &["num_hidden_layers"],
        has: always,
        layer: &[(
            "",
            &[
                scale("input_layernorm"),
                linear("self_attn.q_proj", &[Queries, Width]).with_bias(has_input_biases),
                linear("self_attn.k_proj", &[Keys, Width]).with_bias(has_input_biases),
                linear("self_attn.v_proj", &[Keys, Width]).with_bias(has_input_biases),
                linear("self_attn.o_proj", &[Width, Queries]).with_bias(has_output_bias),
                table("self_attn.q_norm", &[Head]).only(is_qwen3),
                table("self_attn.k_norm", &[Head]).only(is_qwen3),
                scale("post_attention_layernorm"),
                linear("mlp.gate_proj", &[Inner, Width]).with_bias(has_mlp_biases),
                linear("mlp.up_proj", &[Inner, Width]).with_bias(has_mlp_biases),
                linear("mlp.down_proj", &[Width, Inner]).with_bias(has_mlp_biases),
            ],
        )],
    }],
};

pub(super) const OPT: Parts = Parts {
    outside: &[
        table("model.decoder.embed_tokens", EMBEDDING),
        table("model.decoder.embed_positions", &[Any, Width]),
        table("model.decoder.project_in", &[Width, Embedding]).only(has_projections),
        table("model.decoder.project_out", &[Embedding, Width]).only(has_projections),
        norm("model.decoder.final_layer_norm").only(has_final_norm),
    ],
    stacks: &[Stack {
        before: "model.decoder.layers.",
        count: &["num_hidden_layers"],
        has: always,
        layer: &[(
            "",
            &[
                norm("self_attn_layer_norm").only(has_scaled_norms),
                linear("self_attn.q_proj", &[Width, Width]).with_bias(has_opt_biases),
                linear("self_attn.k_proj", &[Width, Width]).with_bias(has_opt_biases),
                linear("self_attn.v_proj", &[Width, Width]).with_bias(has_opt_biases),
                linear("self_attn.out_proj", &[Width, Width]).with_bias(has_opt_biases),
                norm("final_layer_norm").only(has_scaled_norms),
                linear("fc1", &[Inner, Width]).with_bias(has_opt_biases),
                linear("fc2", &[Width, Inner]).with_bias(has_opt_biases),
            ],
        )],
    }],
};

pub(super) const GPT_NEOX: Parts = Parts {
    outside: &[
        table("gpt_neox.embed_in", EMBEDDING),
        norm("gpt_neox.final_layer_norm"),
    ],
    stacks: &[Stack {
        before: "gpt_neox.layers.",
        count: &["num_hidden_layers"],
        has: always,
        layer: &[(
            "",
            &[
                norm("input_layernorm"),
                norm("post_attention_layernorm"),
                linear("attention.query_key_value", &[Fused, Width]).with_bias(has_neox_biases),
                linear("attention.dense", &[Width, Width]).with_bias(has_neox_biases),
                linear("mlp.dense_h_to_4h", &[Inner, Width]),
                linear("mlp.dense_4h_to_h", &[Width, Inner]),
            ],
        )],
    }],
};

pub(super) const BERT: Parts = Parts {
    outside: &[
        table("bert.embeddings.word_embeddings", EMBEDDING),
        table(
            "bert.embeddings.position_embeddings",
            &[Field("max_position_embeddings"), Width],
        ),
        table(
            "bert.embeddings.token_type_embeddings",
            &[Field("type_vocab_size"), Width],
        ),
        norm("bert.embeddings.LayerNorm"),
        linear("bert.pooler.dense", &[Width, Width]).only(reads_first_token),
        linear("cls.predictions.transform.dense", &[Width, Width]).only(predicts_words),
        norm("cls.predictions.transform.LayerNorm").only(predicts_words),
        linear("cls.seq_relationship", &[Any, Width]).only(predicts_pairs),
    ],
    stacks: &[Stack {
        before: "bert.encoder.layer.",
        count: &["num_hidden_layers"],
        has: always,
        layer: &[(
            "",
            &[
                linear("attention.self.query", &[Width, Width]),
                linear("attention.self.key", &[Width, Width]),
                linear("attention.self.value", &[Width, Width]),
                linear("attention.output.dense", &[Width, Width]),
                norm("attention.output.LayerNorm"),
                linear("intermediate.dense", &[Inner, Width]),
                linear("output.dense", &[Width, Inner]),
                norm("output.LayerNorm"),
            ],
        )],
    }],
};

pub(super) const VIT: Parts = Parts {
    outside: &[
        tensor("vit.embeddings.cls_token", &[Any, Any, Width]),
        tensor("vit.embeddings.position_embeddings", &[Any, Any, Width]),
        linear(
            "vit.embeddings.patch_embeddings.projection",
            &[Width, Field("num_channels"), Any, Any],
        ),
        norm("vit.layernorm"),
    ],
    stacks: &[Stack {
        before: "vit.encoder.layer.",
        count: &["num_hidden_layers"],
        has: always,
        layer: &[(
            "",
            &[
                norm("layernorm_before"),
                linear("attention.attention.query", &[Width, Width]).with_bias(has_vit_biases),
                linear("attention.attention.key", &[Width, Width]).with_bias(has_vit_biases),
                linear("attention.attention.value", &[Width, Width]).with_bias(has_vit_biases),
                linear("attention.output.dense", &[Width, Width]),
                norm("layernorm_after"),
                linear("intermediate.dense", &[Inner, Width]),
                linear("output.dense", &[Width, Inner]),
            ],
        )],
    }],
};

/// Sizes of T5's table of distances, which the first layer of a stack has for all.
const DISTANCES: &[Size] = &[Field("relative_attention_num_buckets"), Field("num_heads")];

const T5_ATTENTION: &[Module] = &[
    table("q", &[Queries, Width]),
    table("k", &[Queries, Width]),
    table("v", &[Queries, Width]),
    table("o", &[Width, Queries]),
];

const T5_FEED_FORWARD: &[Module] = &[
    table("wi", &[Inner, Width]).only(is_plain),
    table("wi_0", &[Inner, Width]).only(is_gated),
    table("wi_1", &[Inner, Width]).only(is_gated),
    table("wo", &[Width, Inner]),
];

/// The norm before each part of a layer.
const T5_NORM: &[Module] = &[scale("layer_norm")];

pub(super) const T5: Parts = Parts {
    outside: &[
        table("shared", EMBEDDING),
        table(
            "encoder.block.0.layer.0.SelfAttention.relative_attention_bias",
            DISTANCES,
        ),
        table(
            "decoder.block.0.layer.0.SelfAttention.relative_attention_bias",
            DISTANCES,
        )
        .only(has_decoder),
        scale("encoder.final_layer_norm"),
        scale("decoder.final_layer_norm").only(has_decoder),
    ],
    stacks: &[
        Stack {
            before: "encoder.block.",
            count: &["num_layers", "num_hidden_layers"],
            has: always,
            layer: &[
                ("layer.0.SelfAttention.", T5_ATTENTION),
                ("layer.0.", T5_NORM),
                ("layer.1.DenseReluDense.", T5_FEED_FORWARD),
                ("layer.1.", T5_NORM),
            ],
        },
        Stack {
            before: "decoder.block.",
            count: &["num_decoder_layers", "num_layers", "num_hidden_layers"],
            has: has_decoder,
            layer: &[
                ("layer.0.SelfAttention.", T5_ATTENTION),
                ("layer.0.", T5_NORM),
                ("layer.1.EncDecAttention.", T5_ATTENTION),
                ("layer.1.", T5_NORM),
                ("layer.2.DenseReluDense.", T5_FEED_FORWARD),
                ("layer.2.", T5_NORM),
            ],
        },
    ],
};

/// A weight and a bias.
const fn linear(name: &'static str, sizes: &'static [Size]) -> Module {
    Module {
        name,
        weight: ".weight",
        sizes,
        has: always,
        has_bias: always,
    }
}

/// A weight.
const fn table(name: &'static str, sizes: &'static [Size]) -> Module {
    linear(name, sizes).with_bias(never)
}

/// A norm with a weight and a bias.
const fn norm(name: &'static str) -> Module {
    linear(name, &[Width])
}

/// A norm with a weight.
const fn scale(name: &'static str) -> Module {
    table(name, &[Width])
}

/// A tensor of the model itself.
const fn tensor(name: &'static str, sizes: &'static [Size]) -> Module {
    Module {
        weight: "",
        ..table(name, sizes)
    }
}

impl Module {
    const fn only(self, has: When) -> Self {
        Self { has, ..self }
    }

    const fn with_bias(self, has_bias: When) -> Self {
        Self { has_bias, ..self }
    }

    /// The name of the weight.
    pub(crate) fn weight(&self) -> String {
        [self.name, self.weight].concat()
    }

    /// Names and sizes of this module's parameters in the configuration's model.
    pub(crate) fn parameters(&self, config: &Value) -> Vec<(String, &'static [Size])> {
        if !(self.has)(config) {
            return Vec::new();
        }
        let mut all = vec![(self.weight(), self.sizes)];
        if (self.has_bias)(config) {
            all.push((format!("{}.bias", self.name), &self.sizes[..1]));
        }
        all
    }
}

impl Size {
    /// The size, where the configuration states the fields that it depends on.
    ///
    /// # Errors
    /// What is wrong with a number in the configuration.
    pub(crate) fn of(self, config: &Value) -> Result<Option<usize>, String> {
        let width = number(config, &WIDTH)?;
        let times = |a: Option<usize>, b: Option<usize>| Some(a?.saturating_mul(b?));
        let heads = number(config, &HEADS)?;
        let head = match number(config, &HEAD)? {
            // Other families have a default of their own.
            None if ["llama", "mistral", "qwen2"].contains(&kind(config)) => {
                width.zip(heads).map(|(width, heads)| width / heads)
            }
            head => head,
        };
        Ok(match self {
            Any => None,
            Field(name) => number(config, &[name])?,
            Width => width,
            Embedding => number(config, &["word_embed_proj_dim"])?.or(width),
            Fused => times(width, Some(3)),
            Inner => match number(config, &INNER)? {
                None if kind(config) == "gpt2" => times(width, Some(4)),
                inner => inner,
            },
            Head => head,
            Queries => times(heads, head),
            Keys => match number(config, &KEY_HEADS)? {
                // Other families have a default of their own.
                None if kind(config) == "llama" => times(heads, head),
                own => times(own, head),
            },
        })
    }

    /// The fields of the configuration that it depends on.
    pub(crate) fn fields(self) -> Vec<&'static str> {
        match self {
            Any => Vec::new(),
            Field(name) => vec![name],
            Width | Fused => WIDTH.to_vec(),
            Embedding => [&["word_embed_proj_dim"][..], &WIDTH].concat(),
            Inner => [&INNER[..], &WIDTH[..1]].concat(),
            Head | Queries => [&WIDTH[..], &HEADS, &HEAD].concat(),
            Keys => [&WIDTH[..], &HEADS, &KEY_HEADS, &HEAD].concat(),
        }
    }
}

/// The attention of a configuration's model.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Heads {
    pub(crate) queries: usize,
    /// Heads of keys and values.
    pub(crate) keys: usize,
    /// Outputs of a layer that makes the keys, or the values, where the configuration tells.
    pub(crate) key_size: Option<usize>,
}

impl Heads {
    /// The heads that a configuration states.
    pub(crate) fn of(config: &Value) -> Option<Self> {
        let stated = |names| number(config, names).ok().flatten();
        let queries = stated(&HEADS)?;
        Some(Self {
            queries,
            keys: stated(&KEY_HEADS).unwrap_or(queries),
            key_size: Keys.of(config).ok().flatten(),
        })
    }
}

/// The first of these numbers that is stated.
///
/// # Errors
/// A sentence about a value that is no number.
pub(crate) fn number(config: &Value, names: &[&str]) -> Result<Option<usize>, String> {
    let stated = names.iter().find_map(|&name| {
        let value = config.get(name).filter(|value| !value.is_null())?;
        Some((name, value))
    });
    let Some((name, value)) = stated else {
        return Ok(None);
    };
    let number = value
        .as_u64()
        .and_then(|number| usize::try_from(number).ok());
    match number.filter(|&number| number > 0) {
        Some(number) => Ok(Some(number)),
        None => Err(format!(
            "`{name}` is {value}, expected a whole number from 1 on"
        )),
    }
}

/// The class of the configuration's model.
pub(super) fn architecture(config: &Value) -> Option<&str> {
    config.pointer("/architectures/0").and_then(Value::as_str)
}

fn always(_: &Value) -> bool {
    true
}

fn never(_: &Value) -> bool {
    false
}

fn kind(config: &Value) -> &str {
    let kind = config.get("model_type").and_then(Value::as_str);
    kind.unwrap_or_default()
}

fn says(config: &Value, field: &str, default: bool) -> bool {
    let said = config.get(field).and_then(Value::as_bool);
    said.unwrap_or(default)
}

fn has_input_biases(config: &Value) -> bool {
    kind(config) == "qwen2" || has_output_bias(config)
}

fn has_output_bias(config: &Value) -> bool {
    ["llama", "qwen3"].contains(&kind(config)) && says(config, "attention_bias", false)
}

fn has_mlp_biases(config: &Value) -> bool {
    kind(config) == "llama" && says(config, "mlp_bias", false)
}

fn is_qwen3(config: &Value) -> bool {
    kind(config) == "qwen3"
}

fn has_projections(config: &Value) -> bool {
    let size = |name| config.get(name).and_then(Value::as_u64);
    size("word_embed_proj_dim").is_some_and(|embedding| Some(embedding) != size("hidden_size"))
}

fn has_final_norm(config: &Value) -> bool {
    says(config, "do_layer_norm_before", true)
        && !says(config, "_remove_final_layer_norm", false)
        && has_scaled_norms(config)
}

fn has_scaled_norms(config: &Value) -> bool {
    says(config, "layer_norm_elementwise_affine", true)
}

fn has_opt_biases(config: &Value) -> bool {
    says(config, "enable_bias", true)
}

fn has_neox_biases(config: &Value) -> bool {
    says(config, "attention_bias", true)
}

fn has_vit_biases(config: &Value) -> bool {
    says(config, "qkv_bias", true)
}

fn predicts_words(config: &Value) -> bool {
    let is_one =
        |name| ["BertForMaskedLM", "BertLMHeadModel", "BertForPreTraining"].contains(&name);
    architecture(config).is_some_and(is_one)
}

fn predicts_pairs(config: &Value) -> bool {
    architecture(config).is_some_and(|name| PAIRS.contains(&name))
}

/// Whether the model needs its pooler: a model may have one that no head reads.
fn reads_first_token(config: &Value) -> bool {
    let others = ["BertForSequenceClassification", "BertForMultipleChoice"];
    predicts_pairs(config) || architecture(config).is_some_and(|name| others.contains(&name))
}

fn is_gated(config: &Value) -> bool {
    let kind = config.get("feed_forward_proj").and_then(Value::as_str);
    kind.is_some_and(|kind| kind.starts_with("gated-"))
}

fn is_plain(config: &Value) -> bool {
    !is_gated(config)
}

fn has_decoder(config: &Value) -> bool {
    let encoders = ["T5EncoderModel", "T5ForTokenClassification"];
    says(config, "is_encoder_decoder", true)
        && architecture(config).is_none_or(|name| !encoders.contains(&name))
}
