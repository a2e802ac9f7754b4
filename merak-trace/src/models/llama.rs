//! Llama ([Touvron et al. 2023](https://arxiv.org/abs/2302.13971)): RMS norms, rotary positions, gated MLP,
//! grouped-query heads.

use super::{
    Model, ModelInfo, TraceOptions, check_seq,
    fields::{Fields, error, head_dim},
    gpt2::{finish, lm_head},
};
use crate::{
    Graph, Init, Result, TensorType,
    fx::{self, Module, Symbol},
    op::{Activation, Attention, Rope, WeightLayout},
};
use merak_mpu::DType;
use serde_json::json;

/// The configuration of a Llama language model.
#[derive(Debug, Clone, PartialEq)]
pub struct Llama {
    vocab_size: usize,
    hidden_size: usize,
    intermediate_size: usize,
    num_layers: usize,
    num_heads: usize,
    num_kv_heads: usize,
    head_dim: usize,
    max_seq: usize,
    rms_norm_eps: f64,
    rope_theta: f64,
    attention_bias: bool,
    mlp_bias: bool,
    attention_dropout: f64,
    tie_word_embeddings: bool,
    initializer_range: Option<f64>,
    eos_token_id: Option<u32>,
}

impl Llama {
    /// Reads the configuration; absent fields have the defaults of `transformers`.
    pub(super) fn from_fields(f: &Fields<'_>) -> Result<Self> {
        if f.activation("hidden_act", "silu")? != Activation::Silu {
            return Err(error("hidden_act", "is not supported, expected silu"));
        }
        f.refuse("rope_scaling", &[])?;
        // transformers 5 nests the base of the rotary angles, transformers 4 does not.
        let rope = f.object("rope_parameters")?;
        if let Some(rope) = &rope {
            rope.refuse("rope_type", &[json!("default")])?;
        }
        let rope_theta = match &rope {
            Some(rope) => rope.number_or("rope_theta", 10_000.0)?,
            None => f.number_or("rope_theta", 10_000.0)?,
        };
        let hidden_size = f.size_or("hidden_size", 4096)?;
        let num_heads = f.size_or("num_attention_heads", 32)?;
        let num_kv_heads = f.size_or("num_key_value_heads", num_heads)?;
        if !num_heads.is_multiple_of(num_kv_heads) {
            return Err(error(
                "num_key_value_heads",
                &format!("is {num_kv_heads}, which does not divide {num_heads} heads"),
            ));
        }
        let head_dim = match f.opt_size("head_dim")? {
            Some(dim) => dim,
            None => head_dim(hidden_size, num_heads, "num_attention_heads")?,
        };
        if !head_dim.is_multiple_of(2) {
            return Err(error(
                "head_dim",
                &format!("is {head_dim}, expected an even number"),
            ));
        }
        Ok(Self {
            vocab_size: f.size_or("vocab_size", 32000)?,
            hidden_size,
            intermediate_size: f.size_or("intermediate_size", 11008)?,
            num_layers: f.size_or("num_hidden_layers", 32)?,
            num_heads,
            num_kv_heads,
            head_dim,
            max_seq: f.size_or("max_position_embeddings", 2048)?,
            rms_norm_eps: f.number_or("rms_norm_eps", 1e-6)?,
            rope_theta,
            attention_bias: f.flag_or("attention_bias", false)?,
            mlp_bias: f.flag_or("mlp_bias", false)?,
            attention_dropout: f.probability("attention_dropout", 0.0)?,
            tie_word_embeddings: f.flag_or("tie_word_embeddings", false)?,
            initializer_range: f.opt_number("initializer_range")?,
            eos_token_id: f.token_id("eos_token_id"),
        })
    }

    fn rope(&self) -> Rope {
        let pairs = self.head_dim / 2;
        let inv_freq = (0..pairs)
            .map(|i| self.rope_theta.powf(-(i as f64) / pairs as f64) as f32)
            .collect();
        Rope {
            head_dim: self.head_dim,
            inv_freq,
            inverse: false,
        }
    }

    fn layer(&self, layer: &Module, x: &Symbol, std: f64) -> Result<Symbol> {
        let linear = |module: Module, x: &Symbol, out, bias| {
            module.linear(x, out, WeightLayout::OutIn, bias, Init::Normal(std))
        };
        let (q_width, kv_width) = (
            self.num_heads * self.head_dim,
            self.num_kv_heads * self.head_dim,
        );

        let attn = layer.sub("self_attn");
        let normed = layer
            .sub("input_layernorm")
            .rms_norm(x, self.rms_norm_eps)?;
        let q = linear(attn.sub("q_proj"), &normed, q_width, self.attention_bias)?;
        let k = linear(attn.sub("k_proj"), &normed, kv_width, self.attention_bias)?;
        let v = linear(attn.sub("v_proj"), &normed, kv_width, self.attention_bias)?;
        let positions = attn.positions(x.shape()[1])?;
        let (q, k) = (
            attn.rope(&q, &positions, self.rope())?,
            attn.rope(&k, &positions, self.rope())?,
        );
        let spec = Attention {
            heads: self.num_heads,
            kv_heads: self.num_kv_heads,
            head_dim: self.head_dim,
            scale: 1.0 / (self.head_dim as f64).sqrt(),
            causal: true,
            window: None,
            dropout: None,
        };
        let mixed = attn.attention(&q, &k, &v, &spec, self.attention_dropout)?;
        let mixed = linear(
            attn.sub("o_proj"),
            &mixed,
            self.hidden_size,
            self.attention_bias,
        )?;
        let x = layer.add(&mixed, x)?;

        let mlp = layer.sub("mlp");
        let normed = layer
            .sub("post_attention_layernorm")
            .rms_norm(&x, self.rms_norm_eps)?;
        let gate = linear(
            mlp.sub("gate_proj"),
            &normed,
            self.intermediate_size,
            self.mlp_bias,
        )?;
        let up = linear(
            mlp.sub("up_proj"),
            &normed,
            self.intermediate_size,
            self.mlp_bias,
        )?;
        let hidden = mlp.silu_mul(&gate, &up)?;
        let hidden = linear(
            mlp.sub("down_proj"),
            &hidden,
            self.hidden_size,
            self.mlp_bias,
        )?;
        layer.add(&hidden, &x)
    }
}

impl Model for Llama {
    fn info(&self) -> ModelInfo {
        ModelInfo {
            family: "llama",
            num_layers: self.num_layers,
            hidden_size: self.hidden_size,
            num_heads: self.num_heads,
            num_kv_heads: self.num_kv_heads,
            max_seq: self.max_seq,
            vocab_size: self.vocab_size,
            eos_token_id: self.eos_token_id,
        }
    }

    fn trace(&self, options: &TraceOptions) -> Result<Graph> {
        check_seq(options.seq, self.max_seq, "max_position_embeddings")?;
        let std = self.initializer_range.unwrap_or(options.init_std);
        fx::trace(options.dtype, |root| {
            let model = root.sub("model");
            let ids = root.input(
                "input_ids",
                TensorType::new([options.batch, options.seq], DType::I64),
            );
            let (mut x, table) = model.sub("embed_tokens").embedding(
                &ids,
                self.vocab_size,
                self.hidden_size,
                Init::Normal(std),
            )?;
            for index in 0..self.num_layers {
                x = self.layer(&model.sub(&format!("layers.{index}")), &x, std)?;
            }
            let x = model.sub("norm").rms_norm(&x, self.rms_norm_eps)?;
            let tied = self.tie_word_embeddings && !options.untie;
            let logits = lm_head(root, &x, tied.then_some(&table), self.vocab_size, std)?;
            finish(root, &logits, options)
        })
    }
}
