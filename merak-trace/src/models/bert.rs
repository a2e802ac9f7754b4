//! BERT ([Devlin et al. 2018](https://arxiv.org/abs/1810.04805)): a post-norm encoder that fills in masked tokens
//! or classifies sequences.

use super::{
    Model, ModelInfo, Objective, TraceOptions,
    causal::{finish_with, padding},
    check_seq,
    fields::{Fields, head_dim},
};
use crate::{
    Graph, Init, Op, ParamRole, Result, TensorType,
    fx::{self, AttentionTerms, Module, Symbol},
    op::{Activation, Attention, WeightLayout},
};
use merak_mpu::DType;
use serde_json::json;

/// What stands on the encoder.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Task {
    /// `BertForMaskedLM`.
    MaskedLm,
    /// `BertForSequenceClassification`, with dropout before the classifier.
    Classification { num_labels: usize, dropout: f64 },
}

/// The configuration of a BERT model.
#[derive(Debug, Clone, PartialEq)]
pub struct Bert {
    vocab_size: usize,
    hidden_size: usize,
    num_layers: usize,
    num_heads: usize,
    intermediate_size: usize,
    activation: Activation,
    hidden_dropout: f64,
    attention_dropout: f64,
    max_positions: usize,
    type_vocab_size: usize,
    layer_norm_eps: f64,
    padding: Option<usize>,
    tie_word_embeddings: bool,
    initializer_range: Option<f64>,
    task: Task,
}

impl Bert {
    /// Reads the configuration; absent fields have the defaults of `transformers`. The first of `architectures`
    /// says whether tokens are filled in (also without it) or sequences classified.
    pub(super) fn from_fields(f: &Fields<'_>) -> Result<Self> {
        // Written by early checkpoints and never read.
        f.ignore(&[
            "directionality",
            "pooler_fc_size",
            "pooler_num_attention_heads",
            "pooler_num_fc_layers",
            "pooler_size_per_head",
            "pooler_type",
        ]);
        f.refuse("is_decoder", &[json!(false)])?;
        f.refuse("add_cross_attention", &[json!(false)])?;
        f.refuse("position_embedding_type", &[json!("absolute")])?;
        f.refuse("pruned_heads", &[json!({})])?;
        let hidden_size = f.size_or("hidden_size", 768)?;
        let num_heads = f.size_or("num_attention_heads", 12)?;
        head_dim(hidden_size, num_heads, "num_attention_heads")?;
        let hidden_dropout = f.probability("hidden_dropout_prob", 0.1)?;
        let task = match f.architecture(&["BertForMaskedLM", "BertForSequenceClassification"])? {
            0 => Task::MaskedLm,
            _ => Task::Classification {
                num_labels: f.num_labels()?,
                dropout: f.probability("classifier_dropout", hidden_dropout)?,
            },
        };
        let vocab_size = f.size_or("vocab_size", 30522)?;
        Ok(Self {
            vocab_size,
            hidden_size,
            num_layers: f.size_or("num_hidden_layers", 12)?,
            num_heads,
            intermediate_size: f.size_or("intermediate_size", 3072)?,
            activation: f.activation("hidden_act", "gelu")?,
            hidden_dropout,
            attention_dropout: f.probability("attention_probs_dropout_prob", 0.1)?,
            max_positions: f.size_or("max_position_embeddings", 512)?,
            type_vocab_size: f.size_or("type_vocab_size", 2)?,
            layer_norm_eps: f.number_or("layer_norm_eps", 1e-12)?,
            padding: padding(f, Some(0), vocab_size)?,
            tie_word_embeddings: f.flag_or("tie_word_embeddings", true)?,
            initializer_range: f.opt_number("initializer_range")?,
            task,
        })
    }

    /// Words, segments and positions; the table of the words beside them.
    fn embeddings(&self, module: &Module, ids: Ids<'_>, init: Init) -> Result<(Symbol, Symbol)> {
        let width = self.hidden_size;
        let (x, table) = module.sub("word_embeddings").padded_embedding(
            ids.tokens,
            self.vocab_size,
            width,
            self.padding,
            init,
        )?;
        let (types, _) = module.sub("token_type_embeddings").embedding(
            ids.types,
            self.type_vocab_size,
            width,
            init,
        )?;
        let positions = module.positions(ids.tokens.shape()[1])?;
        let (positions, _) = module.sub("position_embeddings").embedding(
            &positions,
            self.max_positions,
            width,
            init,
        )?;
        let x = module.add(&module.add(&x, &types)?, &positions)?;
        let x = module
            .sub("LayerNorm")
            .layer_norm(&x, self.layer_norm_eps)?;
        Ok((module.dropout(&x, self.hidden_dropout)?, table))
    }

    fn layer(&self, layer: &Module, x: &Symbol, seen: &Symbol, init: Init) -> Result<Symbol> {
        let (attn, width) = (layer.sub("attention.self"), self.hidden_size);
        let [q, k, v] =
            ["query", "key", "value"].map(|name| linear(&attn.sub(name), x, width, init));
        let head_dim = width / self.num_heads;
        let spec = Attention {
            heads: self.num_heads,
            kv_heads: self.num_heads,
            head_dim,
            scale: 1.0 / (head_dim as f64).sqrt(),
            causal: false,
            window: None,
            dropout: None,
        };
        let terms = AttentionTerms {
            seen: Some(seen),
            bias: None,
        };
        let mixed = attn.attention_with([&q?, &k?, &v?], terms, &spec, self.attention_dropout)?;
        let x = self.output(&layer.sub("attention.output"), &mixed, x, init)?;
        let intermediate = layer.sub("intermediate");
        let hidden = linear(&intermediate.sub("dense"), &x, self.intermediate_size, init)?;
        let hidden = intermediate.activation(&hidden, self.activation)?;
        self.output(&layer.sub("output"), &hidden, &x, init)
    }

    /// Projects back to the width of the model, adds what came in and normalises.
    fn output(&self, module: &Module, x: &Symbol, residual: &Symbol, init: Init) -> Result<Symbol> {
        let x = linear(&module.sub("dense"), x, self.hidden_size, init)?;
        let x = module.add(&module.dropout(&x, self.hidden_dropout)?, residual)?;
        module.sub("LayerNorm").layer_norm(&x, self.layer_norm_eps)
    }

    /// Logits of all tokens at all positions: `[B, S, V]`.
    fn masked_lm(
        &self,
        root: &Module,
        x: &Symbol,
        tied: Option<&Symbol>,
        init: Init,
    ) -> Result<Symbol> {
        let head = root.sub("cls.predictions");
        let transform = head.sub("transform");
        let x = linear(&transform.sub("dense"), x, self.hidden_size, init)?;
        let x = transform.activation(&x, self.activation)?;
        let x = transform
            .sub("LayerNorm")
            .layer_norm(&x, self.layer_norm_eps)?;
        let decoder = head.sub("decoder");
        let weight = if let Some(table) = tied {
            root.alias(table, "cls.predictions.decoder.weight");
            table.clone()
        } else {
            let shape = [self.vocab_size, self.hidden_size];
            decoder.param("weight", &shape, init, ParamRole::Weight)?
        };
        let bias = head.param(
            "bias",
            &[self.vocab_size],
            Init::Constant(0.0),
            ParamRole::Bias,
        )?;
        root.alias(&bias, "cls.predictions.decoder.bias");
        let op = Op::Linear {
            layout: WeightLayout::OutIn,
            bias: true,
        };
        Ok(decoder.apply(op, &[&x, &weight, &bias])?.swap_remove(0))
    }

    /// Logits of the classes: `[B, num_labels]`, from the first token.
    fn classify(
        &self,
        root: &Module,
        x: &Symbol,
        (num_labels, dropout): (usize, f64),
        init: Init,
    ) -> Result<Symbol> {
        let pooler = root.sub("bert.pooler");
        let first = pooler.first(x)?;
        let pooled = linear(&pooler.sub("dense"), &first, self.hidden_size, init)?;
        let pooled = pooler.activation(&pooled, Activation::Tanh)?;
        let classifier = root.sub("classifier");
        linear(
            &classifier,
            &root.dropout(&pooled, dropout)?,
            num_labels,
            init,
        )
    }
}

/// The inputs that embeddings are looked up for.
#[derive(Clone, Copy)]
struct Ids<'a> {
    tokens: &'a Symbol,
    types: &'a Symbol,
}

impl Model for Bert {
    fn info(&self) -> ModelInfo {
        ModelInfo {
            family: "bert",
            num_layers: self.num_layers,
            hidden_size: self.hidden_size,
            num_heads: self.num_heads,
            num_kv_heads: self.num_heads,
            max_seq: self.max_positions,
            vocab_size: self.vocab_size,
            eos_token_id: None,
        }
    }

    fn objective(&self) -> Objective {
        match self.task {
            Task::MaskedLm => Objective::MaskedLm,
            Task::Classification { .. } => Objective::SequenceClassification,
        }
    }

    fn optional_inputs(&self) -> &'static [(&'static str, i64)] {
        &[("attention_mask", 1), ("token_type_ids", 0)]
    }

    fn trace(&self, options: &TraceOptions) -> Result<Graph> {
        check_seq(options.seq, self.max_positions, "max_position_embeddings")?;
        let init = Init::Normal(self.initializer_range.unwrap_or(options.init_std));
        fx::trace(options.dtype, |root| {
            let ids = |name| {
                let ty = TensorType::new([options.batch, options.seq], DType::I64);
                root.input(name, ty)
            };
            let (tokens, types) = (ids("input_ids"), ids("token_type_ids"));
            let seen = ids("attention_mask");
            let bert = root.sub("bert");
            let inputs = Ids {
                tokens: &tokens,
                types: &types,
            };
            let (mut x, table) = self.embeddings(&bert.sub("embeddings"), inputs, init)?;
            for index in 0..self.num_layers {
                let layer = bert.sub(&format!("encoder.layer.{index}"));
                x = self.layer(&layer, &x, &seen, init)?;
            }
            match self.task {
                Task::MaskedLm => {
                    let tied = self.tie_word_embeddings && !options.untie;
                    let logits = self.masked_lm(root, &x, tied.then_some(&table), init)?;
                    finish_with(root, &logits, &[options.batch, options.seq], options)
                }
                Task::Classification {
                    num_labels,
                    dropout,
                } => {
                    let logits = self.classify(root, &x, (num_labels, dropout), init)?;
                    finish_with(root, &logits, &[options.batch], options)
                }
            }
        })
    }
}

fn linear(module: &Module, x: &Symbol, out: usize, init: Init) -> Result<Symbol> {
    module.linear(x, out, WeightLayout::OutIn, true, init)
}
