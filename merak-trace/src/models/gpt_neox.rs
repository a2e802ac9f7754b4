//! GPT-NeoX ([Black et al. 2022](https://arxiv.org/abs/2204.06745)): attention and MLP side by
//! side, rotary positions on a part of each head, query, key and value of a head next to each other
//! in one projection.

use super::{
    Deviations, Model, ModelInfo, TraceOptions,
    causal::{check_architecture, finish, input_ids, lm_head},
    check_seq,
    family::{Family, SplitLayers, USUAL_SIZES},
    fields::{Fields, head_dim},
    rope::{Rotary, RotaryFields},
};
use crate::{
    Graph, Init, Result,
    fx::{self, Module, Symbol},
    op::{Activation, Attention, Rope, WeightLayout},
};

/// Its classes.
const CLASSES: &[&str] = &["GPTNeoXForCausalLM", "GPTNeoXModel"];

/// The facts of the family.
pub(super) const FAMILY: Family = Family {
    split_layers: SplitLayers::new(
        &["query_key_value", "dense_h_to_4h"],
        &["attention.dense", "dense_4h_to_h"],
        &["num_attention_heads"],
    ),
    split_points: &["gpt_neox.layers.{i}", "embed_out"],
    adapter_targets: &["query_key_value"],
    // The head has another name in memory than in files.
    without_adapter: &["embed_out", "lm_head"],
    ..Family::traced(&["gpt_neox"], CLASSES, USUAL_SIZES, |f| {
        Ok(Box::new(GptNeoX::from_fields(f)?))
    })
};

/// The configuration of a GPT-NeoX language model.
#[derive(Debug, Clone, PartialEq)]
pub struct GptNeoX {
    vocab_size: usize,
    hidden_size: usize,
    intermediate_size: usize,
    num_layers: usize,
    num_heads: usize,
    head_dim: usize,
    max_seq: usize,
    layer_norm_eps: f64,
    rotary: Rotary,
    activation: Activation,
    attention_bias: bool,
    parallel_residual: bool,
    hidden_dropout: f64,
    attention_dropout: f64,
    tie_word_embeddings: bool,
    initializer_range: Option<f64>,
    eos_token_id: Option<u32>,
}

impl GptNeoX {
    /// Reads the configuration; absent fields have the defaults of `transformers`.
    fn from_fields(f: &Fields<'_>) -> Result<Self> {
        check_architecture(f, CLASSES)?;
        // A field of another head.
        f.ignore(&["classifier_dropout"]);
        f.refuse_unless_zero("attention_probs_dropout_prob")?;
        f.refuse_unless_zero("hidden_dropout_prob")?;
        let hidden_size = f.size_or("hidden_size", 6144)?;
        let num_heads = f.size_or("num_attention_heads", 64)?;
        let head_dim = head_dim(hidden_size, num_heads, "num_attention_heads")?;
        let max_seq = f.size_or("max_position_embeddings", 2048)?;
        let share = f.renamed("rotary_pct", "partial_rotary_factor")?;
        let names = RotaryFields {
            theta: f.renamed("rotary_emb_base", "rope_theta")?,
            share: Some((share, 0.25)),
        };
        let rotary = Rotary::from_fields(f, names, head_dim, max_seq)?;
        Ok(Self {
            vocab_size: f.size_or("vocab_size", 50_432)?,
            hidden_size,
            intermediate_size: f.size_or("intermediate_size", 24_576)?,
            num_layers: f.layers_or("num_hidden_layers", 44)?,
            num_heads,
            head_dim,
            max_seq: rotary.longest(),
            layer_norm_eps: f.not_negative_or("layer_norm_eps", 1e-5)?,
            rotary,
            activation: f.activation("hidden_act", "gelu")?,
            attention_bias: f.flag_or("attention_bias", true)?,
            parallel_residual: f.flag_or("use_parallel_residual", true)?,
            hidden_dropout: f.probability("hidden_dropout", 0.0)?,
            attention_dropout: f.probability("attention_dropout", 0.0)?,
            tie_word_embeddings: f.flag_or("tie_word_embeddings", false)?,
            initializer_range: f.opt_not_negative("initializer_range")?,
            eos_token_id: f.token_id("eos_token_id"),
        })
    }

    fn layer(
        &self,
        layer: &Module,
        x: &Symbol,
        (std, rope): (Deviations, &Rope),
    ) -> Result<Symbol> {
        let normed = layer
            .sub("input_layernorm")
            .layer_norm(x, self.layer_norm_eps)?;
        let mixed = self.attention(&layer.sub("attention"), &normed, (std, rope))?;
        let mixed = layer.dropout(&mixed, self.hidden_dropout)?;
        let second = layer.sub("post_attention_layernorm");
        if self.parallel_residual {
            let hidden = self.mlp(layer, &second.layer_norm(x, self.layer_norm_eps)?, std)?;
            return layer.add(&layer.add(&hidden, &mixed)?, x);
        }
        let x = layer.add(&mixed, x)?;
        let hidden = self.mlp(layer, &second.layer_norm(&x, self.layer_norm_eps)?, std)?;
        layer.add(&hidden, &x)
    }

    /// The MLP with its dropout.
    fn mlp(&self, layer: &Module, x: &Symbol, std: Deviations) -> Result<Symbol> {
        let mlp = layer.sub("mlp");
        let linear = |name, x: &Symbol, out, std| {
            mlp.sub(name)
                .linear(x, out, WeightLayout::OutIn, true, Init::Normal(std))
        };
        let hidden = linear("dense_h_to_4h", x, self.intermediate_size, std.inner)?;
        let hidden = mlp.activation(&hidden, self.activation)?;
        let hidden = linear("dense_4h_to_h", &hidden, self.hidden_size, std.output)?;
        layer.dropout(&hidden, self.hidden_dropout)
    }

    fn attention(
        &self,
        attn: &Module,
        x: &Symbol,
        (std, rope): (Deviations, &Rope),
    ) -> Result<Symbol> {
        let linear = |name, x: &Symbol, out, std| {
            attn.sub(name).linear(
                x,
                out,
                WeightLayout::OutIn,
                self.attention_bias,
                Init::Normal(std),
            )
        };
        let fused = linear("query_key_value", x, 3 * self.hidden_size, std.inner)?;
        let [q, k, v] = self.heads(attn, &fused)?;
        let positions = attn.positions(x.shape()[1])?;
        let turn = |heads| attn.rope(heads, &positions, rope.clone());
        let spec = Attention {
            causal: true,
            ..Attention::of_heads(self.num_heads, self.head_dim)
        };
        let mixed = attn.attention(&turn(&q)?, &turn(&k)?, &v, &spec, self.attention_dropout)?;
        linear("dense", &mixed, self.hidden_size, std.output)
    }

    /// Query, key and value, `[B, S, H]` each, of a projection in which they alternate head by
    /// head.
    fn heads(&self, attn: &Module, fused: &Symbol) -> Result<[Symbol; 3]> {
        let [batch, seq] = [fused.shape()[0], fused.shape()[1]];
        let by_head = attn.reshape(fused, &[batch, seq, self.num_heads, 3 * self.head_dim])?;
        let parts = attn.split(&by_head, 3, &[self.head_dim; 3])?;
        let packed = |part: &Symbol| attn.reshape(part, &[batch, seq, self.hidden_size]);
        Ok([packed(&parts[0])?, packed(&parts[1])?, packed(&parts[2])?])
    }
}

impl Model for GptNeoX {
    fn info(&self) -> ModelInfo {
        ModelInfo {
            family: "gpt_neox",
            num_layers: self.num_layers,
            hidden_size: self.hidden_size,
            num_heads: self.num_heads,
            num_kv_heads: self.num_heads,
            max_seq: self.max_seq,
            vocab_size: self.vocab_size,
            eos_token_id: self.eos_token_id,
        }
    }

    fn scaling_length(&self, seq: usize) -> usize {
        self.rotary.scaling_length(seq)
    }

    fn trace(&self, options: &TraceOptions) -> Result<Graph> {
        check_seq(options.seq, self.max_seq, "max_position_embeddings")?;
        let std = options.deviations(self.initializer_range, self.num_layers);
        let rope = self.rotary.op(options.context());
        fx::trace(options.dtype, |root| {
            let model = root.sub("gpt_neox");
            let ids = input_ids(root, options);
            let (x, table) = model.sub("embed_in").embedding(
                &ids,
                self.vocab_size,
                self.hidden_size,
                Init::Normal(std.inner),
            )?;
            let mut x = model.dropout(&x, self.hidden_dropout)?;
            for index in 0..self.num_layers {
                x = self.layer(&model.sub(&format!("layers.{index}")), &x, (std, &rope))?;
            }
            let x = model
                .sub("final_layer_norm")
                .layer_norm(&x, self.layer_norm_eps)?;
            let tied = (self.tie_word_embeddings && !options.untie).then_some(&table);
            let logits = lm_head(root, "embed_out", &x, tied, self.vocab_size, std.inner)?;
            finish(root, &logits, options)
        })
    }
}
