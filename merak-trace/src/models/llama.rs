//! Llama ([Touvron et al. 2023](https://arxiv.org/abs/2302.13971)) and its relatives: RMS norms,
//! rotary positions, gated MLP, grouped-query heads.
//!
//! | family | differs by |
//! |---|---|
//! | `llama` | biases as the configuration asks |
//! | `mistral` ([Jiang et al. 2023]) | every layer sees a window of keys |
//! | `qwen2` ([Yang et al. 2024]) | biases of q, k, v; windows in the later layers |
//! | `qwen3` ([Yang et al. 2025]) | RMS norm of each query and key head |
//!
//! [Jiang et al. 2023]: https://arxiv.org/abs/2310.06825
//! [Yang et al. 2024]: https://arxiv.org/abs/2407.10671
//! [Yang et al. 2025]: https://arxiv.org/abs/2505.09388

mod config;

use super::{
    Deviations, Model, ModelInfo, TraceOptions,
    causal::{finish, input_ids, lm_head},
    check_seq,
    family::{Family, SplitLayers, USUAL_SIZES},
    fields::Fields,
    rope::Rotary,
};
use crate::{
    Graph, Init, Result,
    fx::{self, Module, Symbol},
    op::{Attention, Rope, WeightLayout},
};

/// The facts of Llama.
pub(super) const LLAMA: Family = family(&["llama"], config::LLAMA.classes, |f| {
    Llama::boxed(f, &config::LLAMA)
});

/// The facts of Mistral.
pub(super) const MISTRAL: Family = family(&["mistral"], config::MISTRAL.classes, |f| {
    Llama::boxed(f, &config::MISTRAL)
});

/// The facts of Qwen 2.
pub(super) const QWEN2: Family = Family {
    split_points: WITH_HEAD,
    ..family(&["qwen2"], config::QWEN2.classes, |f| {
        Llama::boxed(f, &config::QWEN2)
    })
};

/// The facts of Qwen 3.
pub(super) const QWEN3: Family = Family {
    split_points: WITH_HEAD,
    ..family(&["qwen3"], config::QWEN3.classes, |f| {
        Llama::boxed(f, &config::QWEN3)
    })
};

const WITH_HEAD: &[&str] = &["model.layers.{i}", "lm_head"];

/// The facts that all have in common.
const fn family(
    model_types: &'static [&'static str],
    classes: &'static [&'static str],
    build: fn(&Fields<'_>) -> Result<Box<dyn Model>>,
) -> Family {
    Family {
        split_layers: SplitLayers::new(
            &[
                "self_attn.q_proj",
                "self_attn.k_proj",
                "self_attn.v_proj",
                "gate_proj",
                "up_proj",
            ],
            &["self_attn.o_proj", "down_proj"],
            &["num_heads", "num_key_value_heads"],
        ),
        split_points: &["model.layers.{i}"],
        adapter_targets: &["q_proj", "v_proj"],
        ..Family::traced(model_types, classes, USUAL_SIZES, build)
    }
}

/// The configuration of a language model of the Llama kind.
#[derive(Debug, Clone, PartialEq)]
pub struct Llama {
    family: &'static str,
    vocab_size: usize,
    hidden_size: usize,
    intermediate_size: usize,
    num_heads: usize,
    num_kv_heads: usize,
    head_dim: usize,
    max_seq: usize,
    rms_norm_eps: f64,
    rotary: Rotary,
    /// Per layer, the number of keys that a query sees, if not all.
    windows: Vec<Option<usize>>,
    biases: Biases,
    qk_norm: bool,
    attention_dropout: f64,
    tie_word_embeddings: bool,
    initializer_range: Option<f64>,
    /// The token whose embedding lookups do not train.
    padding: Option<usize>,
    eos_token_id: Option<u32>,
}

/// Which linear layers have a bias.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Biases {
    /// Query, key and value projections.
    qkv: bool,
    /// The projection after the attention.
    output: bool,
    mlp: bool,
}

impl Llama {
    fn boxed(f: &Fields<'_>, variant: &config::Variant) -> Result<Box<dyn Model>> {
        Ok(Box::new(Self::from_fields(f, variant)?))
    }

    fn linear(module: &Module, x: &Symbol, out: usize, bias: bool, std: f64) -> Result<Symbol> {
        module.linear(x, out, WeightLayout::OutIn, bias, Init::Normal(std))
    }

    fn layer(
        &self,
        layer: &Module,
        x: &Symbol,
        index: usize,
        (std, rope): (Deviations, &Rope),
    ) -> Result<Symbol> {
        let normed = layer
            .sub("input_layernorm")
            .rms_norm(x, self.rms_norm_eps)?;
        let mixed = self.attention(&layer.sub("self_attn"), &normed, index, (std, rope))?;
        let x = layer.add(&mixed, x)?;
        let normed = layer
            .sub("post_attention_layernorm")
            .rms_norm(&x, self.rms_norm_eps)?;
        layer.add(&self.mlp(&layer.sub("mlp"), &normed, std)?, &x)
    }

    fn attention(
        &self,
        attn: &Module,
        x: &Symbol,
        index: usize,
        (std, rope): (Deviations, &Rope),
    ) -> Result<Symbol> {
        let project = |name, heads: usize| {
            Self::linear(
                &attn.sub(name),
                x,
                heads * self.head_dim,
                self.biases.qkv,
                std.inner,
            )
        };
        let q = project("q_proj", self.num_heads)?;
        let k = project("k_proj", self.num_kv_heads)?;
        let v = project("v_proj", self.num_kv_heads)?;
        let positions = attn.positions(x.shape()[1])?;
        let turn = |name, heads: &Symbol| {
            let heads = self.norm_heads(attn, name, heads)?;
            attn.rope(&heads, &positions, rope.clone())
        };
        let (q, k) = (turn("q_norm", &q)?, turn("k_norm", &k)?);
        let spec = Attention {
            kv_heads: self.num_kv_heads,
            causal: true,
            window: self.windows[index],
            ..Attention::of_heads(self.num_heads, self.head_dim)
        };
        let mixed = attn.attention(&q, &k, &v, &spec, self.attention_dropout)?;
        Self::linear(
            &attn.sub("o_proj"),
            &mixed,
            self.hidden_size,
            self.biases.output,
            std.output,
        )
    }

    /// Normalises each head on its own, in families that do so.
    fn norm_heads(&self, attn: &Module, name: &str, x: &Symbol) -> Result<Symbol> {
        if !self.qk_norm {
            return Ok(x.clone());
        }
        let [batch, seq, width] = [x.shape()[0], x.shape()[1], x.shape()[2]];
        let norm = attn.sub(name);
        let heads = norm.reshape(x, &[batch, seq, width / self.head_dim, self.head_dim])?;
        norm.reshape(
            &norm.rms_norm(&heads, self.rms_norm_eps)?,
            &[batch, seq, width],
        )
    }

    fn mlp(&self, mlp: &Module, x: &Symbol, std: Deviations) -> Result<Symbol> {
        let linear =
            |name, x: &Symbol, out, std| Self::linear(&mlp.sub(name), x, out, self.biases.mlp, std);
        let gate = linear("gate_proj", x, self.intermediate_size, std.inner)?;
        let up = linear("up_proj", x, self.intermediate_size, std.inner)?;
        linear(
            "down_proj",
            &mlp.silu_mul(&gate, &up)?,
            self.hidden_size,
            std.output,
        )
    }
}

impl Model for Llama {
    fn info(&self) -> ModelInfo {
        ModelInfo {
            family: self.family,
            num_layers: self.windows.len(),
            hidden_size: self.hidden_size,
            num_heads: self.num_heads,
            num_kv_heads: self.num_kv_heads,
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
        let std = options.deviations(self.initializer_range, self.windows.len());
        let rope = self.rotary.op(options.context());
        fx::trace(options.dtype, |root| {
            let model = root.sub("model");
            let ids = input_ids(root, options);
            let (mut x, table) = model.sub("embed_tokens").padded_embedding(
                &ids,
                self.vocab_size,
                self.hidden_size,
                self.padding,
                Init::Normal(std.inner),
            )?;
            for index in 0..self.windows.len() {
                let layer = model.sub(&format!("layers.{index}"));
                x = self.layer(&layer, &x, index, (std, &rope))?;
            }
            let x = model.sub("norm").rms_norm(&x, self.rms_norm_eps)?;
            let tied = (self.tie_word_embeddings && !options.untie).then_some(&table);
            let logits = lm_head(root, "lm_head", &x, tied, self.vocab_size, std.inner)?;
            finish(root, &logits, options)
        })
    }
}
