//! Model definitions, read from Hugging Face `config.json`, with Hugging Face parameter names.

mod fields;
mod gpt;
mod gpt2;
mod llama;

use crate::{Error, Graph, Result};
use fields::Fields;
use merak_mpu::DType;
use serde_json::Value as Json;
use std::fmt;

pub use gpt::Gpt;
pub use gpt2::Gpt2;
pub use llama::Llama;

/// What the traced model ends in.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Head {
    /// Output `loss`: the sum of token losses against input `labels`, with this label smoothing.
    Loss {
        /// Share of probability spread over all classes.
        label_smoothing: f64,
    },
    /// Output `logits`.
    Logits,
}

/// Sizes and choices for which a model is traced.
#[derive(Debug, Clone, PartialEq)]
pub struct TraceOptions {
    /// Samples of one microbatch.
    pub batch: usize,
    /// Length of a sequence.
    pub seq: usize,
    /// Element type of parameters and activations.
    pub dtype: DType,
    /// What the model ends in.
    pub head: Head,
    /// Makes tied weights independent copies.
    pub untie: bool,
    /// Standard deviation of weight matrices where the configuration states none.
    pub init_std: f64,
}

impl TraceOptions {
    /// Training in f32 on `batch` sequences of length `seq`.
    pub fn training(batch: usize, seq: usize) -> Self {
        Self {
            batch,
            seq,
            dtype: DType::F32,
            head: Head::Loss {
                label_smoothing: 0.0,
            },
            untie: false,
            init_std: 0.02,
        }
    }

    /// The same model with `logits` as its output.
    #[must_use]
    pub fn with_head(mut self, head: Head) -> Self {
        self.head = head;
        self
    }
}

/// The sizes that reports, partitioners and the trainer ask a model for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ModelInfo {
    /// The family, as `model_type` in `config.json`.
    pub family: &'static str,
    /// Transformer layers.
    pub num_layers: usize,
    /// Width of the hidden states.
    pub hidden_size: usize,
    /// Attention heads.
    pub num_heads: usize,
    /// Key and value heads.
    pub num_kv_heads: usize,
    /// Longest sequence.
    pub max_seq: usize,
    /// Tokens that the model knows.
    pub vocab_size: usize,
    /// Token that ends a text, if the configuration names one.
    pub eos_token_id: Option<u32>,
}

/// A model that can be traced for any batch and sequence size.
pub trait Model: fmt::Debug + Send + Sync {
    /// Sizes of the model.
    fn info(&self) -> ModelInfo;

    /// Traces the model; inputs are `input_ids: [B, S] i64` and, for a loss, `labels: [B, S] i64`.
    ///
    /// # Errors
    /// When the sequence is longer than the model allows or operands do not fit.
    fn trace(&self, options: &TraceOptions) -> Result<Graph>;
}

type Builder = fn(&Fields<'_>) -> Result<Box<dyn Model>>;

/// Model types and their builders.
const FAMILIES: [(&str, Builder); 3] = [
    ("gpt", |f| Ok(Box::new(Gpt::from_fields(f)?))),
    ("gpt2", |f| Ok(Box::new(Gpt2::from_fields(f)?))),
    ("llama", |f| Ok(Box::new(Llama::from_fields(f)?))),
];

/// The model types that [`from_config`] knows.
pub fn known_families() -> impl Iterator<Item = &'static str> {
    FAMILIES.iter().map(|(name, _)| *name)
}

/// Builds a model from the contents of a Hugging Face `config.json`.
///
/// # Errors
/// [`Error::UnknownModel`] for another `model_type`; [`Error::ModelConfig`] naming a field that is
/// missing, ill-typed or asks for what is not supported.
///
/// ```
/// use merak_trace::models::{self, TraceOptions};
/// let config = serde_json::json!({ "model_type": "gpt2", "vocab_size": 101, "n_positions": 32,
///     "n_embd": 16, "n_layer": 2, "n_head": 4 });
/// let model = models::from_config(&config)?;
/// let graph = model.trace(&TraceOptions::training(2, 32))?;
/// assert_eq!(graph.output("loss").map(|loss| graph.ty(loss).to_string()).as_deref(), Some("f64[]"));
/// # Ok::<(), merak_trace::Error>(())
/// ```
pub fn from_config(config: &Json) -> Result<Box<dyn Model>> {
    let fields = Fields::new(config)?;
    let family = fields.string("model_type")?;
    let (_, build) = FAMILIES
        .iter()
        .find(|(name, _)| *name == family)
        .ok_or_else(|| Error::UnknownModel {
            found: family.clone(),
            known: known_families().collect::<Vec<_>>().join(", "),
        })?;
    build(&fields)
}

/// Checks a sequence length against the model's longest.
fn check_seq(seq: usize, max: usize, field: &str) -> Result<()> {
    if seq == 0 || seq > max {
        return Err(Error::ModelConfig {
            field: field.to_owned(),
            reason: format!("allows sequences of 1 to {max}, not {seq}"),
        });
    }
    Ok(())
}
