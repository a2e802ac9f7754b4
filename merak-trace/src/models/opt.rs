//! OPT ([Zhang et al. 2022](https://arxiv.org/abs/2205.01068)): learned positions from the third
//! row on, layer norms before or after each part, an embedding that may be narrower than the model.

use super::{
    Deviations, Model, ModelInfo, TraceOptions,
    causal::{check_architecture, finish, input_ids, lm_head, padding},
    check_seq,
    family::{Family, SplitLayers, USUAL_SIZES},
    fields::{Fields, head_dim},
};
use crate::{
    Graph, Init, Result,
    fx::{self, Module, Symbol},
    op::{Activation, Attention, WeightLayout},
};
use serde_json::json;

/// Its classes.
const CLASSES: &[&str] = &["OPTForCausalLM", "OPTModel"];

/// The facts of the family.
pub(super) const FAMILY: Family = Family {
    split_layers: SplitLayers::new(
        &["q_proj", "k_proj", "v_proj", "fc1"],
        &["out_proj", "fc2"],
        &["num_heads"],
    ),
    split_points: &["model.decoder.layers.{i}"],
    adapter_targets: &["q_proj", "v_proj"],
    ..Family::traced(&["opt"], CLASSES, USUAL_SIZES, |f| {
        Ok(Box::new(Opt::from_fields(f)?))
    })
};

/// Rows of the position table before that of the first position.
const FIRST_POSITION: usize = 2;

/// Added to the variance by every layer norm; no field changes it.
const EPS: f64 = 1e-5;

/// The configuration of an OPT language model.
#[derive(Debug, Clone, PartialEq)]
pub struct Opt {
    vocab_size: usize,
    hidden_size: usize,
    /// Width of the embedding, which is projected if the model's width differs.
    embedding_size: usize,
    ffn_dim: usize,
    num_layers: usize,
    num_heads: usize,
    max_seq: usize,
    norms: Norms,
    bias: bool,
    activation: Activation,
    dropout: f64,
    attention_dropout: f64,
    tie_word_embeddings: bool,
    init_std: Option<f64>,
    padding: Option<usize>,
    eos_token_id: Option<u32>,
}

/// Where the layer norms stand.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Norms {
    /// Before each part, and after the last layer.
    Before,
    /// Before each part only.
    BeforeWithoutFinal,
    /// After each sum.
    After,
}

impl Opt {
    /// Reads the configuration; absent fields have the defaults of `transformers`.
    fn from_fields(f: &Fields<'_>) -> Result<Self> {
        check_architecture(f, CLASSES)?;
        f.refuse_unless_zero("layerdrop")?;
        f.refuse_unless_zero("activation_dropout")?;
        f.refuse("layer_norm_elementwise_affine", &[json!(true)])?;
        let hidden_size = f.size_or("hidden_size", 768)?;
        let num_heads = f.size_or("num_attention_heads", 12)?;
        head_dim(hidden_size, num_heads, "num_attention_heads")?;
        let vocab_size = f.size_or("vocab_size", 50_272)?;
        let removed = f.flag_or("_remove_final_layer_norm", false)?;
        let norms = match (f.flag_or("do_layer_norm_before", true)?, removed) {
            (true, false) => Norms::Before,
            (true, true) => Norms::BeforeWithoutFinal,
            (false, _) => Norms::After,
        };
        Ok(Self {
            vocab_size,
            hidden_size,
            embedding_size: f.size_or("word_embed_proj_dim", hidden_size)?,
            ffn_dim: f.size_or("ffn_dim", 3072)?,
            num_layers: f.layers_or("num_hidden_layers", 12)?,
            num_heads,
            max_seq: f.size_or("max_position_embeddings", 2048)?,
            norms,
            bias: f.flag_or("enable_bias", true)?,
            activation: f.activation("activation_function", "relu")?,
            dropout: f.probability("dropout", 0.1)?,
            attention_dropout: f.probability("attention_dropout", 0.0)?,
            tie_word_embeddings: f.flag_or("tie_word_embeddings", true)?,
            init_std: f.opt_not_negative("init_std")?,
            padding: padding(f, Some(1), vocab_size)?,
            eos_token_id: f.token_id("eos_token_id"),
        })
    }

    fn linear(&self, module: &Module, x: &Symbol, out: usize, std: f64) -> Result<Symbol> {
        module.linear(x, out, WeightLayout::OutIn, self.bias, Init::Normal(std))
    }

    /// Embedded tokens and positions: `[B, S, hidden]`, and the table of tokens.
    fn embed(&self, decoder: &Module, ids: &Symbol, std: f64) -> Result<(Symbol, Symbol)> {
        let (tokens, table) = decoder.sub("embed_tokens").padded_embedding(
            ids,
            self.vocab_size,
            self.embedding_size,
            self.padding,
            Init::Normal(std),
        )?;
        let tokens = self.project(&decoder.sub("project_in"), &tokens, self.hidden_size, std)?;
        // Padding before the tokens is not numbered; it has the row before the first.
        let positions = match decoder.seen() {
            Some(seen) => decoder.seen_positions(seen, FIRST_POSITION)?,
            None => decoder.positions_from(FIRST_POSITION, ids.shape()[1])?,
        };
        let (positions, _) = decoder.sub("embed_positions").embedding(
            &positions,
            FIRST_POSITION + self.max_seq,
            self.hidden_size,
            Init::Normal(std),
        )?;
        Ok((decoder.add(&tokens, &positions)?, table))
    }

    /// Brings the width of the embedding to that of the model or back, where they differ.
    fn project(&self, module: &Module, x: &Symbol, width: usize, std: f64) -> Result<Symbol> {
        if self.embedding_size == self.hidden_size {
            return Ok(x.clone());
        }
        module.linear(x, width, WeightLayout::OutIn, false, Init::Normal(std))
    }

    fn layer(&self, layer: &Module, x: &Symbol, std: Deviations) -> Result<Symbol> {
        let x = self.around(layer, "self_attn_layer_norm", x, |x| {
            self.attention(&layer.sub("self_attn"), x, std)
        })?;
        self.around(layer, "final_layer_norm", &x, |x| {
            let hidden = self.linear(&layer.sub("fc1"), x, self.ffn_dim, std.inner)?;
            let hidden = layer.activation(&hidden, self.activation)?;
            self.linear(&layer.sub("fc2"), &hidden, self.hidden_size, std.output)
        })
    }

    /// `x + part(x)` with a layer norm before the part or after the sum.
    fn around(
        &self,
        layer: &Module,
        norm: &str,
        x: &Symbol,
        part: impl FnOnce(&Symbol) -> Result<Symbol>,
    ) -> Result<Symbol> {
        let norm = layer.sub(norm);
        let add = |out: &Symbol| layer.add(&layer.dropout(out, self.dropout)?, x);
        if self.norms == Norms::After {
            return norm.layer_norm(&add(&part(x)?)?, EPS);
        }
        add(&part(&norm.layer_norm(x, EPS)?)?)
    }

    fn attention(&self, attn: &Module, x: &Symbol, std: Deviations) -> Result<Symbol> {
        let project = |name| self.linear(&attn.sub(name), x, self.hidden_size, std.inner);
        let (q, k, v) = (project("q_proj")?, project("k_proj")?, project("v_proj")?);
        let spec = Attention {
            causal: true,
            ..Attention::of_heads(self.num_heads, self.hidden_size / self.num_heads)
        };
        let mixed = attn.attention(&q, &k, &v, &spec, self.attention_dropout)?;
        self.linear(&attn.sub("out_proj"), &mixed, self.hidden_size, std.output)
    }
}

impl Model for Opt {
    fn info(&self) -> ModelInfo {
        ModelInfo {
            family: "opt",
            num_layers: self.num_layers,
            hidden_size: self.hidden_size,
            num_heads: self.num_heads,
            num_kv_heads: self.num_heads,
            max_seq: self.max_seq,
            vocab_size: self.vocab_size,
            eos_token_id: self.eos_token_id,
        }
    }

    fn trace(&self, options: &TraceOptions) -> Result<Graph> {
        check_seq(options.seq, self.max_seq, "max_position_embeddings")?;
        let std = options.deviations(self.init_std, self.num_layers);
        fx::trace(options.dtype, |root| {
            let decoder = root.sub("model.decoder");
            let ids = input_ids(root, options);
            let (mut x, table) = self.embed(&decoder, &ids, std.inner)?;
            for index in 0..self.num_layers {
                x = self.layer(&decoder.sub(&format!("layers.{index}")), &x, std)?;
            }
            if self.norms == Norms::Before {
                x = decoder.sub("final_layer_norm").layer_norm(&x, EPS)?;
            }
            let x = self.project(
                &decoder.sub("project_out"),
                &x,
                self.embedding_size,
                std.inner,
            )?;
            let tied = (self.tie_word_embeddings && !options.untie).then_some(&table);
            let logits = lm_head(root, "lm_head", &x, tied, self.vocab_size, std.inner)?;
            finish(root, &logits, options)
        })
    }
}
