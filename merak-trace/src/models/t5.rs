//! T5 ([Raffel et al. 2019](https://arxiv.org/abs/1910.10683)): encoder and decoder with a bias of
//! the scores by relative position in place of embedded positions, and its version 1.1 with a gated
//! MLP ([Shazeer 2020](https://arxiv.org/abs/2002.05202)).
//!
//! All layers of a stack share one table of biases, a weight that ties the stages of the stack. The
//! hidden states cross a cut and, in the decoder, the output of the encoder too.

use super::{
    Model, ModelInfo, Objective, TraceOptions,
    causal::{finish_with, lm_head, token},
    check_seq,
    family::{Family, SizeFields, SplitLayers},
    fields::{Fields, error},
};
use crate::{
    Graph, Init, Op, ParamRole, Result, TensorType,
    fx::{self, AttentionTerms, Module, Symbol},
    op::{Activation, Attention, RelativeBuckets, WeightLayout},
};
use merak_mpu::DType;
use serde_json::json;

/// Its names of the sizes.
const SIZES: SizeFields = SizeFields {
    layers: &["num_layers"],
    hidden: &["d_model"],
    heads: &["num_heads"],
};

/// Its classes.
const CLASSES: &[&str] = &["T5ForConditionalGeneration"];

/// The facts of the family.
pub(super) const FAMILY: Family = Family {
    split_layers: SplitLayers::new(
        &[
            "Attention.q",
            "Attention.k",
            "Attention.v",
            "DenseReluDense.wi",
        ],
        &["Attention.o", "DenseReluDense.wo"],
        &["n_heads", "inner_dim"],
    )
    .with_slices(&[("relative_attention_bias", 1)]),
    split_points: &["encoder.block.{i}", "decoder.block.{i}", "lm_head"],
    adapter_targets: &["q", "v"],
    // In PEFT encoder and decoder have tables of their own beside the one that files hold.
    without_adapter: &["shared", "encoder.embed_tokens", "decoder.embed_tokens"],
    ..Family::traced(&["t5"], CLASSES, SIZES, |f| {
        Ok(Box::new(T5::from_fields(f)?))
    })
};

/// The configuration of a T5 model.
#[derive(Debug, Clone, PartialEq)]
pub struct T5 {
    vocab_size: usize,
    d_model: usize,
    d_kv: usize,
    d_ff: usize,
    encoder_layers: usize,
    decoder_layers: usize,
    num_heads: usize,
    buckets: usize,
    max_distance: usize,
    dropout: f64,
    layer_norm_epsilon: f64,
    initializer_factor: f64,
    activation: Activation,
    is_gated: bool,
    tie_word_embeddings: bool,
    scale_outputs: bool,
    usual_seq: usize,
    eos_token_id: Option<u32>,
}

/// The encoder or the decoder.
struct Stack<'a> {
    model: &'a T5,
    name: &'static str,
    layers: usize,
    /// Mask of the tokens that the encoder sees, if some may be hidden.
    seen: Option<&'a Symbol>,
    /// The encoder's output, in the decoder.
    encoded: Option<&'a Symbol>,
}

impl T5 {
    /// Reads the configuration of a `T5ForConditionalGeneration`; absent fields have the defaults
    /// of `transformers`.
    ///
    /// `tie_word_embeddings: false`, which version 1.1 has, makes the head a weight of its own and
    /// leaves its input unscaled.
    fn from_fields(f: &Fields<'_>) -> Result<Self> {
        f.architecture(CLASSES)?;
        f.refuse("is_encoder_decoder", &[json!(true)])?;
        f.refuse("is_decoder", &[json!(false)])?;
        // transformers derives the first two from feed_forward_proj; the last belongs to another
        // head.
        f.ignore(&["dense_act_fn", "is_gated_act", "classifier_dropout"]);
        let encoder_layers = f.layers_or("num_layers", 6)?;
        let (activation, is_gated) = feed_forward(f)?;
        let tie_word_embeddings = f.flag_or("tie_word_embeddings", true)?;
        let vocab_size = f.size_or("vocab_size", 32128)?;
        // Both occur among the decoder's inputs, and both rows are trained.
        token(f, "pad_token_id", Some(0), vocab_size)?;
        token(f, "decoder_start_token_id", None, vocab_size)?;
        let model = Self {
            vocab_size,
            d_model: f.size_or("d_model", 512)?,
            d_kv: f.size_or("d_kv", 64)?,
            d_ff: f.size_or("d_ff", 2048)?,
            encoder_layers,
            decoder_layers: f.layers_or("num_decoder_layers", encoder_layers)?,
            num_heads: f.size_or("num_heads", 8)?,
            buckets: f.size_or("relative_attention_num_buckets", 32)?,
            max_distance: f.size_or("relative_attention_max_distance", 128)?,
            dropout: f.probability("dropout_rate", 0.1)?,
            layer_norm_epsilon: f.not_negative_or("layer_norm_epsilon", 1e-6)?,
            initializer_factor: f.not_negative_or("initializer_factor", 1.0)?,
            activation,
            is_gated,
            tie_word_embeddings,
            scale_outputs: f.flag_or("scale_decoder_outputs", tie_word_embeddings)?,
            usual_seq: f.size_or("n_positions", 512)?,
            eos_token_id: f.token_id("eos_token_id"),
        };
        let is_valid = |bidirectional| model.buckets(1, 1, bidirectional).is_valid();
        if !is_valid(true) || !is_valid(false) {
            let reason = format!(
                "is {}, too few to tell distances up to {} (relative_attention_max_distance) apart",
                model.buckets, model.max_distance
            );
            return Err(error("relative_attention_num_buckets", &reason));
        }
        Ok(model)
    }

    fn buckets(&self, q_len: usize, k_len: usize, bidirectional: bool) -> RelativeBuckets {
        RelativeBuckets {
            q_len,
            k_len,
            buckets: self.buckets,
            max_distance: self.max_distance,
            bidirectional,
        }
    }

    /// A linear layer without bias, its weights drawn with deviation `1 / sqrt(fan)`.
    fn linear(&self, module: &Module, x: &Symbol, out: usize, fan: usize) -> Result<Symbol> {
        module.linear(x, out, WeightLayout::OutIn, false, self.init(fan))
    }

    fn init(&self, fan: usize) -> Init {
        Init::Normal(self.initializer_factor / (fan as f64).sqrt())
    }

    fn norm(&self, module: &Module, x: &Symbol) -> Result<Symbol> {
        let weight = module.param(
            "weight",
            &[self.d_model],
            Init::Constant(self.initializer_factor),
            ParamRole::Norm,
        )?;
        let eps = self.layer_norm_epsilon;
        Ok(module
            .apply(Op::RmsNorm { eps }, &[x, &weight])?
            .swap_remove(0))
    }

    /// Attention of `x` to `memory`, to the keys of `kind` that are `seen`; `bias` is a table of
    /// biases and what its rows stand for.
    fn attention(
        &self,
        attn: &Module,
        [x, memory]: [&Symbol; 2],
        (seen, bias): (Option<&Symbol>, Option<(&Symbol, RelativeBuckets)>),
        kind: &Attention,
    ) -> Result<Symbol> {
        let inner = self.num_heads * self.d_kv;
        let q = self.linear(&attn.sub("q"), x, inner, self.d_model * self.d_kv)?;
        let k = self.linear(&attn.sub("k"), memory, inner, self.d_model)?;
        let v = self.linear(&attn.sub("v"), memory, inner, self.d_model)?;
        // Beside its use, so that no cut comes between them.
        let index = bias.map(|(_, buckets)| attn.relative_buckets(buckets));
        let index = index.transpose()?;
        let terms = AttentionTerms {
            seen,
            bias: bias
                .zip(index.as_ref())
                .map(|((table, _), index)| [table, index]),
        };
        let spec = Attention {
            heads: self.num_heads,
            kv_heads: self.num_heads,
            head_dim: self.d_kv,
            scale: 1.0,
            ..kind.clone()
        };
        let mixed = attn.attention_with([&q, &k, &v], terms, &spec, self.dropout)?;
        self.linear(&attn.sub("o"), &mixed, self.d_model, inner)
    }

    fn feed_forward(&self, mlp: &Module, x: &Symbol) -> Result<Symbol> {
        let up = |name| self.linear(&mlp.sub(name), x, self.d_ff, self.d_model);
        let hidden = if self.is_gated {
            let (gate, up) = (up("wi_0")?, up("wi_1")?);
            if self.activation == Activation::Silu {
                mlp.silu_mul(&gate, &up)?
            } else {
                mlp.mul(&mlp.activation(&gate, self.activation)?, &up)?
            }
        } else {
            mlp.activation(&up("wi")?, self.activation)?
        };
        let hidden = mlp.dropout(&hidden, self.dropout)?;
        self.linear(&mlp.sub("wo"), &hidden, self.d_model, self.d_ff)
    }

    /// Rows of the table of tokens, which both stacks share.
    fn embed(&self, root: &Module, ids: &Symbol) -> Result<(Symbol, Symbol)> {
        let init = Init::Normal(self.initializer_factor);
        root.sub("shared")
            .embedding(ids, self.vocab_size, self.d_model, init)
    }
}

impl Stack<'_> {
    /// Runs the stack on embedded tokens `x: [B, S, d_model]`.
    fn run(&self, root: &Module, x: &Symbol) -> Result<Symbol> {
        let (model, stack) = (self.model, root.sub(self.name));
        let mut x = stack.dropout(x, model.dropout)?;
        for index in 0..self.layers {
            x = self.block(root, &stack.sub(&format!("block.{index}")), &x)?;
        }
        let x = model.norm(&stack.sub("final_layer_norm"), &x)?;
        stack.dropout(&x, model.dropout)
    }

    fn block(&self, root: &Module, block: &Module, x: &Symbol) -> Result<Symbol> {
        let layer = block.sub("layer.0");
        let mut x = self.residual(&layer, x, |normed| {
            self.self_attention(root, &layer.sub("SelfAttention"), normed)
        })?;
        let mut next = 1;
        if let Some(encoded) = self.encoded {
            let layer = block.sub("layer.1");
            let kind = Attention {
                cross: true,
                ..Attention::default()
            };
            x = self.residual(&layer, &x, |normed| {
                let attn = layer.sub("EncDecAttention");
                self.model
                    .attention(&attn, [normed, encoded], (self.seen, None), &kind)
            })?;
            next = 2;
        }
        let layer = block.sub(&format!("layer.{next}"));
        self.residual(&layer, &x, |normed| {
            self.model
                .feed_forward(&layer.sub("DenseReluDense"), normed)
        })
    }

    /// `x + dropout(f(norm(x)))`.
    fn residual(
        &self,
        layer: &Module,
        x: &Symbol,
        f: impl FnOnce(&Symbol) -> Result<Symbol>,
    ) -> Result<Symbol> {
        let normed = self.model.norm(&layer.sub("layer_norm"), x)?;
        let made = layer.dropout(&f(&normed)?, self.model.dropout)?;
        layer.add(&made, x)
    }

    fn self_attention(&self, root: &Module, attn: &Module, x: &Symbol) -> Result<Symbol> {
        let (model, len) = (self.model, x.shape()[1]);
        let is_decoder = self.encoded.is_some();
        let path = format!(
            "{}.block.0.layer.0.SelfAttention.relative_attention_bias",
            self.name
        );
        let table = root.sub(&path).param(
            "weight",
            &[model.buckets, model.num_heads],
            model.init(model.d_model),
            ParamRole::Embedding,
        )?;
        let seen = self.seen.filter(|_| !is_decoder);
        let bias = Some((&table, model.buckets(len, len, !is_decoder)));
        let kind = Attention {
            causal: is_decoder,
            ..Attention::default()
        };
        model.attention(attn, [x, x], (seen, bias), &kind)
    }
}

impl Model for T5 {
    fn info(&self) -> ModelInfo {
        ModelInfo {
            family: "t5",
            num_layers: self.encoder_layers + self.decoder_layers,
            hidden_size: self.d_model,
            num_heads: self.num_heads,
            num_kv_heads: self.num_heads,
            max_seq: self.usual_seq,
            vocab_size: self.vocab_size,
            eos_token_id: self.eos_token_id,
        }
    }

    fn objective(&self) -> Objective {
        Objective::SequenceToSequence
    }

    fn optional_inputs(&self) -> &'static [(&'static str, i64)] {
        &[("attention_mask", 1)]
    }

    /// Inputs are `input_ids` and, where there may be padding, `attention_mask: [B, S] i64`,
    /// `decoder_input_ids: [B, T] i64` (the labels moved one to the right) and, for a loss,
    /// `labels: [B, T] i64`.
    fn trace(&self, options: &TraceOptions) -> Result<Graph> {
        let target = options.target_seq.unwrap_or(options.seq);
        // Relative positions have no end. The encoder may have passed before.
        let shortest = if options.unpadded {
            target
        } else {
            options.seq.min(target)
        };
        check_seq(shortest, usize::MAX, "n_positions")?;
        fx::trace(options.dtype, |root| {
            let ids =
                |name, len| root.input(name, TensorType::new([options.batch, len], DType::I64));
            let tokens = ids("input_ids", options.seq);
            let seen = (!options.unpadded).then(|| ids("attention_mask", options.seq));
            let decoder_tokens = ids("decoder_input_ids", target);
            let encoder = Stack {
                model: self,
                name: "encoder",
                layers: self.encoder_layers,
                seen: seen.as_ref(),
                encoded: None,
            };
            let (x, table) = self.embed(root, &tokens)?;
            root.alias(&table, "encoder.embed_tokens.weight");
            root.alias(&table, "decoder.embed_tokens.weight");
            let encoded = encoder.run(root, &x)?;
            let decoder = Stack {
                name: "decoder",
                layers: self.decoder_layers,
                encoded: Some(&encoded),
                ..encoder
            };
            let x = decoder.run(root, &self.embed(root, &decoder_tokens)?.0)?;
            let x = if self.scale_outputs {
                root.scale(&x, 1.0 / (self.d_model as f64).sqrt())?
            } else {
                x
            };
            let std = self.initializer_factor;
            let tied = (self.tie_word_embeddings && !options.untie).then_some(&table);
            let logits = lm_head(root, "lm_head", &x, tied, self.vocab_size, std)?;
            finish_with(root, &logits, &[options.batch, target], options)
        })
    }
}

/// The activation of the MLP and whether it gates, from `feed_forward_proj`: `relu`, `gated-gelu`,
/// ..
fn feed_forward(f: &Fields<'_>) -> Result<(Activation, bool)> {
    let field = "feed_forward_proj";
    let found = f.string_or(field, "relu")?;
    let (name, is_gated) = match found.strip_prefix("gated-") {
        // In checkpoints of version 1.1 it means the tanh form.
        Some("gelu") => ("gelu_new", true),
        Some(name) => (name, true),
        None => (&*found, false),
    };
    match Fields::activation_named(name) {
        Some(activation) => Ok((activation, is_gated)),
        None => Err(error(
            field,
            &format!("is \"{found}\", expected relu, gelu, gated-gelu, gated-silu or the like"),
        )),
    }
}
