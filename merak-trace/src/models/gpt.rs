//! The plain pre-norm GPT that the benchmarks train: separate projections, learned positions, an
//! untied head.

use super::{
    Deviations, Model, ModelInfo, TraceOptions,
    causal::{finish, input_ids, lm_head},
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

/// The facts of the family.
pub(super) const FAMILY: Family = Family {
    split_layers: SplitLayers::new(
        &["attn.q", "attn.k", "attn.v", "mlp.fc"],
        &["attn.proj", "mlp.proj"],
        &["num_heads"],
    ),
    split_points: &["h.{i}", "ln_f"],
    ..Family::traced(&["gpt"], &[], USUAL_SIZES, |f| {
        Ok(Box::new(Gpt::from_fields(f)?))
    })
};

/// The configuration of a plain GPT.
#[derive(Debug, Clone, PartialEq)]
pub struct Gpt {
    vocab_size: usize,
    seq: usize,
    hidden: usize,
    layers: usize,
    heads: usize,
    dropout: f64,
    tie: bool,
    std: Option<f64>,
}

impl Gpt {
    /// Reads `vocab_size`, `max_position_embeddings`, `hidden_size`, `num_hidden_layers`,
    /// `num_attention_heads`, `dropout`, `tie_word_embeddings` and `initializer_range`.
    fn from_fields(f: &Fields<'_>) -> Result<Self> {
        f.refuse("is_encoder_decoder", &[json!(false)])?;
        let hidden = f.size("hidden_size")?;
        let heads = f.size("num_attention_heads")?;
        head_dim(hidden, heads, "num_attention_heads")?;
        Ok(Self {
            vocab_size: f.size("vocab_size")?,
            seq: f.size("max_position_embeddings")?,
            hidden,
            layers: f.layers("num_hidden_layers")?,
            heads,
            dropout: f.probability("dropout", 0.0)?,
            tie: f.flag_or("tie_word_embeddings", false)?,
            std: f.opt_not_negative("initializer_range")?,
        })
    }

    fn block(&self, block: &Module, x: &Symbol, std: Deviations) -> Result<Symbol> {
        let linear = |module: Module, x: &Symbol, out, std| {
            module.linear(x, out, WeightLayout::OutIn, true, Init::Normal(std))
        };
        let attn = block.sub("attn");
        let normed = block.sub("ln1").layer_norm(x, 1e-5)?;
        let [q, k, v] = [attn.sub("q"), attn.sub("k"), attn.sub("v")]
            .map(|module| linear(module, &normed, self.hidden, std.inner));
        let spec = Attention {
            causal: true,
            ..Attention::of_heads(self.heads, self.hidden / self.heads)
        };
        let mixed = attn.attention(&q?, &k?, &v?, &spec, self.dropout)?;
        let mixed = attn.dropout(
            &linear(attn.sub("proj"), &mixed, self.hidden, std.output)?,
            self.dropout,
        )?;
        let x = block.add(&mixed, x)?;
        let mlp = block.sub("mlp");
        let normed = block.sub("ln2").layer_norm(&x, 1e-5)?;
        let hidden = mlp.activation(
            &linear(mlp.sub("fc"), &normed, 4 * self.hidden, std.inner)?,
            Activation::GeluTanh,
        )?;
        let hidden = mlp.dropout(
            &linear(mlp.sub("proj"), &hidden, self.hidden, std.output)?,
            self.dropout,
        )?;
        block.add(&hidden, &x)
    }
}

impl Model for Gpt {
    fn info(&self) -> ModelInfo {
        ModelInfo {
            family: "gpt",
            num_layers: self.layers,
            hidden_size: self.hidden,
            num_heads: self.heads,
            num_kv_heads: self.heads,
            max_seq: self.seq,
            vocab_size: self.vocab_size,
            eos_token_id: None,
        }
    }

    fn trace(&self, options: &TraceOptions) -> Result<Graph> {
        check_seq(options.seq, self.seq, "max_position_embeddings")?;
        let std = options.deviations(self.std, self.layers);
        let init = Init::Normal(std.inner);
        fx::trace(options.dtype, |root| {
            let ids = input_ids(root, options);
            let (x, wte) = root
                .sub("wte")
                .embedding(&ids, self.vocab_size, self.hidden, init)?;
            let positions = root.positions(options.seq)?;
            let (wpe, _) = root
                .sub("wpe")
                .embedding(&positions, self.seq, self.hidden, init)?;
            let mut x = root.dropout(&root.add(&x, &wpe)?, self.dropout)?;
            for index in 0..self.layers {
                x = self.block(&root.sub(&format!("h.{index}")), &x, std)?;
            }
            let x = root.sub("ln_f").layer_norm(&x, 1e-5)?;
            let tied = (self.tie && !options.untie).then_some(&wte);
            let logits = lm_head(root, "lm_head", &x, tied, self.vocab_size, std.inner)?;
            finish(root, &logits, options)
        })
    }
}
