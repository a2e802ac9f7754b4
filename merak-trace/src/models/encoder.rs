//! What the encoders of BERT and ViT have in common: their configuration and their attention.

use super::{
    Deviations, ModelInfo, TraceOptions,
    family::SplitLayers,
    fields::{Fields, head_dim},
};
use crate::{
    Init, Result,
    fx::{AttentionTerms, Module, Symbol},
    op::{Activation, Attention, WeightLayout},
};
use serde_json::json;

/// Its layers that tensor parallelism splits.
pub(super) const SPLIT_LAYERS: SplitLayers = SplitLayers::new(
    &["query", "key", "value", "intermediate.dense"],
    &["output.dense"],
    &["num_attention_heads", "all_head_size"],
);

/// Sizes and choices of an encoder's layers.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Encoder {
    pub(super) hidden_size: usize,
    pub(super) num_layers: usize,
    pub(super) num_heads: usize,
    pub(super) intermediate_size: usize,
    pub(super) activation: Activation,
    pub(super) hidden_dropout: f64,
    pub(super) attention_dropout: f64,
    pub(super) layer_norm_eps: f64,
    initializer_range: Option<f64>,
}

impl Encoder {
    /// Reads the configuration; absent fields have the defaults of `transformers`. `dropout` is the
    /// default of both dropout probabilities.
    pub(super) fn from_fields(f: &Fields<'_>, dropout: f64) -> Result<Self> {
        f.refuse("is_decoder", &[json!(false)])?;
        f.refuse("is_encoder_decoder", &[json!(false)])?;
        let hidden_size = f.size_or("hidden_size", 768)?;
        let num_heads = f.size_or("num_attention_heads", 12)?;
        head_dim(hidden_size, num_heads, "num_attention_heads")?;
        Ok(Self {
            hidden_size,
            num_layers: f.layers_or("num_hidden_layers", 12)?,
            num_heads,
            intermediate_size: f.size_or("intermediate_size", 3072)?,
            activation: f.activation("hidden_act", "gelu")?,
            hidden_dropout: f.probability("hidden_dropout_prob", dropout)?,
            attention_dropout: f.probability("attention_probs_dropout_prob", dropout)?,
            layer_norm_eps: f.not_negative_or("layer_norm_eps", 1e-12)?,
            initializer_range: f.opt_not_negative("initializer_range")?,
        })
    }

    /// The deviations of weight matrices.
    pub(super) fn deviations(&self, options: &TraceOptions) -> Deviations {
        options.deviations(self.initializer_range, self.num_layers)
    }

    /// The layer norm of a module.
    pub(super) fn norm(&self, module: &Module, x: &Symbol) -> Result<Symbol> {
        module.layer_norm(x, self.layer_norm_eps)
    }

    /// Attention of all positions to all, or to those of `seen`; the layers `query`, `key` and
    /// `value` of `attn` have a bias if `bias` is set.
    pub(super) fn attention(
        &self,
        attn: &Module,
        x: &Symbol,
        seen: Option<&Symbol>,
        (bias, std): (bool, Deviations),
    ) -> Result<Symbol> {
        let (width, init) = (self.hidden_size, Init::Normal(std.inner));
        let [q, k, v] = ["query", "key", "value"].map(|name| {
            let module = attn.sub(name);
            module.linear(x, width, WeightLayout::OutIn, bias, init)
        });
        let spec = Attention::of_heads(self.num_heads, width / self.num_heads);
        let terms = AttentionTerms { seen, bias: None };
        attn.attention_with([&q?, &k?, &v?], terms, &spec, self.attention_dropout)
    }

    /// The MLP of a layer: `intermediate.dense`, the activation, then `output.dense` with dropout.
    pub(super) fn feed_forward(
        &self,
        layer: &Module,
        x: &Symbol,
        std: Deviations,
    ) -> Result<Symbol> {
        let init = Init::Normal(std.inner);
        let intermediate = layer.sub("intermediate");
        let hidden = linear(&intermediate.sub("dense"), x, self.intermediate_size, init)?;
        let hidden = intermediate.activation(&hidden, self.activation)?;
        self.narrow(&layer.sub("output"), &hidden, std)
    }

    /// The layer `dense` of a module back to the width of the model, and dropout.
    pub(super) fn narrow(&self, module: &Module, x: &Symbol, std: Deviations) -> Result<Symbol> {
        let init = Init::Normal(std.output);
        let x = linear(&module.sub("dense"), x, self.hidden_size, init)?;
        module.dropout(&x, self.hidden_dropout)
    }

    /// The sizes for reports.
    pub(super) fn info(
        &self,
        family: &'static str,
        max_seq: usize,
        vocab_size: usize,
    ) -> ModelInfo {
        ModelInfo {
            family,
            num_layers: self.num_layers,
            hidden_size: self.hidden_size,
            num_heads: self.num_heads,
            num_kv_heads: self.num_heads,
            max_seq,
            vocab_size,
            eos_token_id: None,
        }
    }
}

/// A linear layer with a bias.
pub(super) fn linear(module: &Module, x: &Symbol, out: usize, init: Init) -> Result<Symbol> {
    module.linear(x, out, WeightLayout::OutIn, true, init)
}
