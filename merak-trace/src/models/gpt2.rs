//! GPT-2 ([Radford et al. 2019](https://openai.com/index/better-language-models)).

use super::{
    Deviations, Model, ModelInfo, TraceOptions,
    causal::{check_architecture, finish, input_ids, lm_head},
    check_seq,
    family::{Family, SizeFields, SplitLayers},
    fields::{Fields, head_dim},
};
use crate::{
    Graph, Init, Result,
    fx::{self, Module, Symbol},
    op::{Activation, Attention, WeightLayout},
};

/// Its names of the sizes; the usual ones are accepted too.
const SIZES: SizeFields = SizeFields {
    layers: &["n_layer", "num_hidden_layers"],
    hidden: &["n_embd", "hidden_size"],
    heads: &["n_head", "num_attention_heads"],
};

/// Its classes.
const CLASSES: &[&str] = &["GPT2LMHeadModel", "GPT2Model"];

/// The facts of the family.
pub(super) const FAMILY: Family = Family {
    // By name, since the ratio of the features depends on `n_inner`.
    split_layers: SplitLayers::new(
        &["attn.c_attn", "mlp.c_fc"],
        &["c_proj"],
        &["num_heads", "split_size"],
    ),
    split_points: &["transformer.h.{i}", "transformer.ln_f"],
    adapter_targets: &["c_attn"],
    ..Family::traced(&["gpt2"], CLASSES, SIZES, |f| {
        Ok(Box::new(Gpt2::from_fields(f)?))
    })
};

/// The configuration of a GPT-2 language model.
#[derive(Debug, Clone, PartialEq)]
pub struct Gpt2 {
    vocab_size: usize,
    n_positions: usize,
    n_embd: usize,
    n_layer: usize,
    n_head: usize,
    n_inner: usize,
    activation: Activation,
    resid_pdrop: f64,
    embd_pdrop: f64,
    attn_pdrop: f64,
    layer_norm_epsilon: f64,
    initializer_range: Option<f64>,
    tie_word_embeddings: bool,
    scale_attn_weights: bool,
    scale_attn_by_inverse_layer_idx: bool,
    eos_token_id: Option<u32>,
}

impl Gpt2 {
    /// Reads the configuration; absent fields have the defaults of `transformers`.
    fn from_fields(f: &Fields<'_>) -> Result<Self> {
        check_architecture(f, CLASSES)?;
        // Fields that repeat the length, belong to other heads or to GPT, or order products (exact
        // in any order).
        f.ignore(&[
            "n_ctx",
            "n_special",
            "predict_special_tokens",
            "reorder_and_upcast_attn",
            "summary_activation",
            "summary_first_dropout",
            "summary_proj_to_labels",
            "summary_type",
            "summary_use_proj",
        ]);
        let n_embd = f.size_or(f.renamed("n_embd", "hidden_size")?, 768)?;
        let n_head = f.size_or(f.renamed("n_head", "num_attention_heads")?, 12)?;
        head_dim(n_embd, n_head, "n_head")?;
        let n_positions = f.renamed("n_positions", "max_position_embeddings")?;
        Ok(Self {
            vocab_size: f.size_or("vocab_size", 50257)?,
            n_positions: f.size_or(n_positions, 1024)?,
            n_embd,
            n_layer: f.layers_or(f.renamed("n_layer", "num_hidden_layers")?, 12)?,
            n_head,
            n_inner: f.size_or("n_inner", 4 * n_embd)?,
            activation: f.activation("activation_function", "gelu_new")?,
            resid_pdrop: f.probability("resid_pdrop", 0.1)?,
            embd_pdrop: f.probability("embd_pdrop", 0.1)?,
            attn_pdrop: f.probability("attn_pdrop", 0.1)?,
            layer_norm_epsilon: f.not_negative_or("layer_norm_epsilon", 1e-5)?,
            initializer_range: f.opt_not_negative("initializer_range")?,
            tie_word_embeddings: f.flag_or("tie_word_embeddings", true)?,
            scale_attn_weights: f.flag_or("scale_attn_weights", true)?,
            scale_attn_by_inverse_layer_idx: f.flag_or("scale_attn_by_inverse_layer_idx", false)?,
            eos_token_id: f.token_id("eos_token_id"),
        })
    }

    /// The inverse of the score divisor of layer `index`.
    fn attention_scale(&self, index: usize) -> f64 {
        let dim = if self.scale_attn_weights {
            ((self.n_embd / self.n_head) as f64).sqrt()
        } else {
            1.0
        };
        let layer = if self.scale_attn_by_inverse_layer_idx {
            (index + 1) as f64
        } else {
            1.0
        };
        1.0 / (dim * layer)
    }

    fn block(&self, block: &Module, x: &Symbol, index: usize, std: f64) -> Result<Symbol> {
        let Deviations { inner, output } = Deviations::by_branches(std, self.n_layer);
        let (normal, output) = (Init::Normal(inner), Init::Normal(output));
        let linear = |module: &Module, x: &Symbol, out, init| {
            module.linear(x, out, WeightLayout::InOut, true, init)
        };

        let attn = block.sub("attn");
        let normed = block.sub("ln_1").layer_norm(x, self.layer_norm_epsilon)?;
        let qkv = linear(&attn.sub("c_attn"), &normed, 3 * self.n_embd, normal)?;
        let parts = attn.split(&qkv, 2, &[self.n_embd; 3])?;
        let spec = Attention {
            scale: self.attention_scale(index),
            causal: true,
            ..Attention::of_heads(self.n_head, self.n_embd / self.n_head)
        };
        let mixed = attn.attention(&parts[0], &parts[1], &parts[2], &spec, self.attn_pdrop)?;
        let mixed = linear(&attn.sub("c_proj"), &mixed, self.n_embd, output)?;
        let x = block.add(&attn.dropout(&mixed, self.resid_pdrop)?, x)?;

        let mlp = block.sub("mlp");
        let normed = block.sub("ln_2").layer_norm(&x, self.layer_norm_epsilon)?;
        let hidden = linear(&mlp.sub("c_fc"), &normed, self.n_inner, normal)?;
        let hidden = mlp.activation(&hidden, self.activation)?;
        let hidden = linear(&mlp.sub("c_proj"), &hidden, self.n_embd, output)?;
        block.add(&mlp.dropout(&hidden, self.resid_pdrop)?, &x)
    }
}

impl Model for Gpt2 {
    fn info(&self) -> ModelInfo {
        ModelInfo {
            family: "gpt2",
            num_layers: self.n_layer,
            hidden_size: self.n_embd,
            num_heads: self.n_head,
            num_kv_heads: self.n_head,
            max_seq: self.n_positions,
            vocab_size: self.vocab_size,
            eos_token_id: self.eos_token_id,
        }
    }

    fn trace(&self, options: &TraceOptions) -> Result<Graph> {
        check_seq(options.seq, self.n_positions, "n_positions")?;
        let std = self.initializer_range.unwrap_or(options.init_std);
        fx::trace(options.dtype, |root| {
            let transformer = root.sub("transformer");
            let ids = input_ids(root, options);
            let (x, wte) = transformer.sub("wte").embedding(
                &ids,
                self.vocab_size,
                self.n_embd,
                Init::Normal(std),
            )?;
            let positions = transformer.positions(options.seq)?;
            let (wpe, _) = transformer.sub("wpe").embedding(
                &positions,
                self.n_positions,
                self.n_embd,
                Init::Normal(std),
            )?;
            let x = transformer.add(&x, &wpe)?;
            let mut x = transformer.dropout(&x, self.embd_pdrop)?;
            for index in 0..self.n_layer {
                x = self.block(&transformer.sub(&format!("h.{index}")), &x, index, std)?;
            }
            let x = transformer
                .sub("ln_f")
                .layer_norm(&x, self.layer_norm_epsilon)?;
            let tied = (self.tie_word_embeddings && !options.untie).then_some(&wte);
            let logits = lm_head(root, "lm_head", &x, tied, self.vocab_size, std)?;
            finish(root, &logits, options)
        })
    }
}
