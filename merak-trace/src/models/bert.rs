//! BERT ([Devlin et al. 2018](https://arxiv.org/abs/1810.04805)): a post-norm encoder that fills in
//! masked tokens or classifies sequences.

use super::{
    Deviations, Model, ModelInfo, Objective, TraceOptions,
    causal::{finish_with, padding},
    check_seq,
    encoder::{Encoder, SPLIT_LAYERS, linear},
    family::{Family, USUAL_SIZES},
    fields::Fields,
};
use crate::{
    Graph, Init, Op, ParamRole, Result, TensorType,
    fx::{self, Module, Symbol},
    op::{Activation, WeightLayout},
};
use merak_mpu::DType;
use serde_json::json;

/// Its classes, by task.
const CLASSES: &[&str] = &["BertForMaskedLM", "BertForSequenceClassification"];

/// The facts of the family.
pub(super) const FAMILY: Family = Family {
    split_layers: SPLIT_LAYERS,
    split_points: &["bert.encoder.layer.{i}"],
    adapter_targets: &["query", "value"],
    classifier: &["bert.pooler", "classifier"],
    ..Family::traced(&["bert"], CLASSES, USUAL_SIZES, |f| {
        Ok(Box::new(Bert::from_fields(f)?))
    })
};

/// The head on the encoder.
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
    encoder: Encoder,
    vocab_size: usize,
    max_positions: usize,
    type_vocab_size: usize,
    padding: Option<usize>,
    tie_word_embeddings: bool,
    task: Task,
}

impl Bert {
    /// Reads the configuration; absent fields have the defaults of `transformers`. The first of
    /// `architectures` selects filling in tokens (also the default) or classifying sequences.
    fn from_fields(f: &Fields<'_>) -> Result<Self> {
        // Written by early checkpoints and never read.
        f.ignore(&[
            "directionality",
            "pooler_fc_size",
            "pooler_num_attention_heads",
            "pooler_num_fc_layers",
            "pooler_size_per_head",
            "pooler_type",
        ]);
        f.refuse("position_embedding_type", &[json!("absolute")])?;
        let encoder = Encoder::from_fields(f, 0.1)?;
        let task = match f.architecture(CLASSES)? {
            0 => {
                f.ignore(&["classifier_dropout"]);
                Task::MaskedLm
            }
            _ => Task::Classification {
                num_labels: f.num_labels()?,
                dropout: f.probability("classifier_dropout", encoder.hidden_dropout)?,
            },
        };
        let vocab_size = f.size_or("vocab_size", 30522)?;
        Ok(Self {
            encoder,
            vocab_size,
            max_positions: f.size_or("max_position_embeddings", 512)?,
            type_vocab_size: f.size_or("type_vocab_size", 2)?,
            padding: padding(f, Some(0), vocab_size)?,
            tie_word_embeddings: f.flag_or("tie_word_embeddings", true)?,
            task,
        })
    }

    /// The embedded words, segments and positions, and the table of the words.
    fn embeddings(&self, module: &Module, ids: Ids<'_>, init: Init) -> Result<(Symbol, Symbol)> {
        let width = self.encoder.hidden_size;
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
        let x = self.encoder.norm(&module.sub("LayerNorm"), &x)?;
        Ok((module.dropout(&x, self.encoder.hidden_dropout)?, table))
    }

    /// A layer, whose norms come after the sums.
    fn layer(&self, layer: &Module, x: &Symbol, seen: &Symbol, std: Deviations) -> Result<Symbol> {
        let encoder = &self.encoder;
        let attn = layer.sub("attention.self");
        let mixed = encoder.attention(&attn, x, Some(seen), (true, std))?;
        let output = layer.sub("attention.output");
        let x = output.add(&encoder.narrow(&output, &mixed, std)?, x)?;
        let x = encoder.norm(&output.sub("LayerNorm"), &x)?;
        let output = layer.sub("output");
        let x = output.add(&encoder.feed_forward(layer, &x, std)?, &x)?;
        encoder.norm(&output.sub("LayerNorm"), &x)
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
        let width = self.encoder.hidden_size;
        let x = linear(&transform.sub("dense"), x, width, init)?;
        let x = transform.activation(&x, self.encoder.activation)?;
        let x = self.encoder.norm(&transform.sub("LayerNorm"), &x)?;
        let decoder = head.sub("decoder");
        let weight = if let Some(table) = tied {
            root.alias(table, "cls.predictions.decoder.weight");
            table.clone()
        } else {
            let shape = [self.vocab_size, width];
            decoder.param("weight", &shape, init, ParamRole::Weight)?
        };
        // transformers ties the bias together with the weight. Without the tie it uses the
        // decoder's bias.
        let owner = if tied.is_some() { &head } else { &decoder };
        let shape = [self.vocab_size];
        let bias = owner.param("bias", &shape, Init::Constant(0.0), ParamRole::Bias)?;
        if tied.is_some() {
            root.alias(&bias, "cls.predictions.decoder.bias");
        }
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
        let pooled = linear(&pooler.sub("dense"), &first, self.encoder.hidden_size, init)?;
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
        self.encoder
            .info("bert", self.max_positions, self.vocab_size)
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
        let std = self.encoder.deviations(options);
        let init = Init::Normal(std.inner);
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
            for index in 0..self.encoder.num_layers {
                let layer = bert.sub(&format!("encoder.layer.{index}"));
                x = self.layer(&layer, &x, &seen, std)?;
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
