//! Reads configurations of the Llama kind.

use super::{Biases, Llama};
use crate::{
    Result,
    models::{
        causal::{check_architecture, padding},
        fields::{Fields, error, head_dim},
        rope::{Rotary, RotaryFields},
    },
};
use serde_json::json;

/// The defaults of a family's configuration, as in `transformers`.
#[derive(Debug)]
pub(super) struct Variant {
    family: &'static str,
    pub(super) classes: &'static [&'static str],
    vocab_size: usize,
    intermediate_size: usize,
    /// `None`: as many as query heads.
    num_kv_heads: Option<usize>,
    /// `None`: the width divided by the heads.
    head_dim: Option<usize>,
    max_seq: usize,
    biases: BiasRule,
    windows: Windows,
    qk_norm: bool,
}

/// Which linear layers have biases.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum BiasRule {
    /// `attention_bias` and `mlp_bias` say it.
    Asked,
    /// `attention_bias` says it of the attention.
    AskedOfAttention,
    /// Query, key and value projections.
    Qkv,
    Nowhere,
}

/// Which layers see a window of keys only.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Windows {
    Nowhere,
    /// All, unless `sliding_window` is null; of this size if it is absent.
    Everywhere(usize),
    /// Those that `use_sliding_window`, `max_window_layers` and `layer_types` name.
    Later {
        size: usize,
        from: usize,
    },
}

pub(super) const LLAMA: Variant = Variant {
    family: "llama",
    classes: &["LlamaForCausalLM", "LlamaModel"],
    vocab_size: 32_000,
    intermediate_size: 11_008,
    num_kv_heads: None,
    head_dim: None,
    max_seq: 2048,
    biases: BiasRule::Asked,
    windows: Windows::Nowhere,
    qk_norm: false,
};

pub(super) const MISTRAL: Variant = Variant {
    family: "mistral",
    classes: &["MistralForCausalLM", "MistralModel"],
    intermediate_size: 14_336,
    num_kv_heads: Some(8),
    max_seq: 131_072,
    biases: BiasRule::Nowhere,
    windows: Windows::Everywhere(4096),
    ..LLAMA
};

pub(super) const QWEN2: Variant = Variant {
    family: "qwen2",
    classes: &["Qwen2ForCausalLM", "Qwen2Model"],
    vocab_size: 151_936,
    intermediate_size: 22_016,
    num_kv_heads: Some(32),
    max_seq: 32_768,
    biases: BiasRule::Qkv,
    windows: Windows::Later {
        size: 4096,
        from: 28,
    },
    ..LLAMA
};

pub(super) const QWEN3: Variant = Variant {
    family: "qwen3",
    classes: &["Qwen3ForCausalLM", "Qwen3Model"],
    head_dim: Some(128),
    biases: BiasRule::AskedOfAttention,
    qk_norm: true,
    ..QWEN2
};

impl Llama {
    /// Reads the configuration; absent fields have the defaults of `transformers`.
    pub(super) fn from_fields(f: &Fields<'_>, variant: &Variant) -> Result<Self> {
        check_architecture(f, variant.classes)?;
        // Fields of slices that a layer was trained in, and of other programs.
        f.ignore(&["is_llama_config", "max_sequence_length", "pretraining_tp"]);
        f.refuse("rope_interleaved", &[json!(false)])?;
        f.refuse("use_mrope", &[json!(false)])?;
        f.refuse("hidden_act", &[json!("silu"), json!("swish")])?;
        let hidden_size = f.size_or("hidden_size", 4096)?;
        let num_heads = f.size_or("num_attention_heads", 32)?;
        let num_kv_heads = f.size_unless_null("num_key_value_heads", variant.num_kv_heads)?;
        let num_kv_heads = num_kv_heads.unwrap_or(num_heads);
        if !num_heads.is_multiple_of(num_kv_heads) {
            let reason = format!("is {num_kv_heads}, which does not divide {num_heads} heads");
            return Err(error("num_key_value_heads", &reason));
        }
        let head_dim = match f.size_unless_null("head_dim", variant.head_dim)? {
            Some(dim) => dim,
            None => head_dim(hidden_size, num_heads, "num_attention_heads")?,
        };
        let max_seq = f.size_or("max_position_embeddings", variant.max_seq)?;
        let names = RotaryFields {
            theta: "rope_theta",
            share: None,
        };
        let rotary = Rotary::from_fields(f, names, head_dim, max_seq)?;
        let vocab_size = f.size_or("vocab_size", variant.vocab_size)?;
        Ok(Self {
            family: variant.family,
            vocab_size,
            hidden_size,
            intermediate_size: f.size_or("intermediate_size", variant.intermediate_size)?,
            num_heads,
            num_kv_heads,
            head_dim,
            max_seq: rotary.longest(),
            rms_norm_eps: f.not_negative_or("rms_norm_eps", 1e-6)?,
            rotary,
            windows: variant.windows(f)?,
            biases: variant.biases(f)?,
            qk_norm: variant.qk_norm,
            attention_dropout: f.probability("attention_dropout", 0.0)?,
            tie_word_embeddings: f.flag_or("tie_word_embeddings", false)?,
            initializer_range: f.opt_not_negative("initializer_range")?,
            padding: padding(f, None, vocab_size)?,
            eos_token_id: f.token_id("eos_token_id"),
        })
    }
}

impl Variant {
    fn biases(&self, f: &Fields<'_>) -> Result<Biases> {
        let attention = match self.biases {
            BiasRule::Asked | BiasRule::AskedOfAttention => f.flag_or("attention_bias", false)?,
            BiasRule::Qkv | BiasRule::Nowhere => {
                f.refuse("attention_bias", &[json!(false)])?;
                false
            }
        };
        let mlp = if self.biases == BiasRule::Asked {
            f.flag_or("mlp_bias", false)?
        } else {
            f.refuse("mlp_bias", &[json!(false)])?;
            false
        };
        Ok(Biases {
            qkv: attention || self.biases == BiasRule::Qkv,
            output: attention,
            mlp,
        })
    }

    fn windows(&self, f: &Fields<'_>) -> Result<Vec<Option<usize>>> {
        let layers = f.layers_or("num_hidden_layers", 32)?;
        match self.windows {
            Windows::Nowhere => Ok(vec![None; layers]),
            Windows::Everywhere(size) => Ok(vec![
                f.size_unless_null("sliding_window", Some(size))?;
                layers
            ]),
            Windows::Later { size, from } => {
                let size = f.size_unless_null("sliding_window", Some(size))?;
                let window = size.filter(|_| f.is_set("use_sliding_window"));
                f.flag_or("use_sliding_window", false)?;
                let from = f.count_or("max_window_layers", from)?;
                let types = f.strings("layer_types")?;
                if types.is_empty() {
                    let window_of = |layer| window.filter(|_| layer >= from);
                    return Ok((0..layers).map(window_of).collect());
                }
                windows_by_type(&types, window, layers)
            }
        }
    }
}

/// The windows of layers by their types.
fn windows_by_type(
    types: &[&str],
    window: Option<usize>,
    layers: usize,
) -> Result<Vec<Option<usize>>> {
    if types.len() != layers {
        let reason = format!("has {} entries, but there are {layers} layers", types.len());
        return Err(error("layer_types", &reason));
    }
    let window_of = |kind: &&str| match (*kind, window) {
        ("full_attention", _) => Ok(None),
        ("sliding_attention", Some(size)) => Ok(Some(size)),
        ("sliding_attention", None) => {
            let reason = "names sliding_attention, but use_sliding_window and sliding_window do not set a size";
            Err(error("layer_types", reason))
        }
        (other, _) => {
            let reason = format!("names {other}, expected full_attention or sliding_attention");
            Err(error("layer_types", &reason))
        }
    };
    types.iter().map(window_of).collect()
}
