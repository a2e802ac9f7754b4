//! Model definitions, read from Hugging Face `config.json`, with Hugging Face parameter names.
//!
//! A family is a file with the graph of its models and its other facts ([`Family`]), and a row of
//! the table here.

mod bert;
mod causal;
mod encoder;
mod family;
mod fields;
mod gpt;
mod gpt2;
mod gpt_neox;
mod inert;
mod llama;
mod opt;
mod others;
mod rope;
mod t5;
mod vit;

use crate::{Error, Graph, Result};
use fields::{Fields, MAX_LAYERS};
use merak_mpu::DType;
use serde_json::Value as Json;
use std::{fmt, sync::Arc};

pub use bert::Bert;
pub use causal::{finish, input_ids, labels, lm_head};
pub use family::{Family, SizeFields, SplitKind, SplitLayers};
pub use gpt::Gpt;
pub use gpt_neox::GptNeoX;
pub use gpt2::Gpt2;
pub use llama::Llama;
pub use opt::Opt;
pub use t5::T5;
pub use vit::Vit;

/// The output of the traced model.
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
    /// Length of the sequence that a decoder produces, `seq` unless given; ignored by models
    /// without an encoder.
    pub target_seq: Option<usize>,
    /// Length of the whole text when `seq` of its positions pass at a time, `seq` unless given.
    /// Scalings of rotary positions that depend on the length use it ([`Model::scaling_length`]).
    pub context: Option<usize>,
    /// Element type of parameters and activations.
    pub dtype: DType,
    /// The output of the model.
    pub head: Head,
    /// The earlier tokens that those of a model of the next token see.
    pub visible: Visible,
    /// Whether no sequence has padding: an encoder then reads no mask. Of positions that pass in
    /// pieces ([`Interpreter::forward_cached`](crate::Interpreter::forward_cached)), `seq` may be 0
    /// in a model that has a decoder too.
    pub unpadded: bool,
    /// Makes tied weights independent copies.
    pub untie: bool,
    /// Standard deviation of weight matrices where the configuration states none. Matrices that end
    /// a residual branch, which tensor parallelism splits by rows, have `1 / sqrt(2 layers)` of it.
    pub init_std: f64,
}

/// The earlier tokens that a token of a model of the next token sees.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Visible {
    /// All of them.
    #[default]
    All,
    /// Those where an input `attention_mask: [B, S] i64` has no 0, which hides padding; only
    /// padding before the tokens needs that.
    Unpadded,
    /// Those of its own document, a run of equal numbers in an input `document_ids: [B, S] i64`.
    /// Positions count from the start of each document.
    Document,
}

impl TraceOptions {
    /// Training in f32 on `batch` sequences of length `seq`.
    pub fn training(batch: usize, seq: usize) -> Self {
        Self {
            batch,
            seq,
            target_seq: None,
            context: None,
            dtype: DType::F32,
            head: Head::Loss {
                label_smoothing: 0.0,
            },
            visible: Visible::All,
            unpadded: false,
            untie: false,
            init_std: 0.02,
        }
    }

    /// The length by which positions are scaled.
    fn context(&self) -> usize {
        self.context.unwrap_or(self.seq)
    }

    /// The deviations of a model whose configuration states `own`, or none.
    fn deviations(&self, own: Option<f64>, layers: usize) -> Deviations {
        let by_branches = || Deviations::by_branches(self.init_std, layers);
        own.map_or_else(by_branches, |inner| Deviations {
            inner,
            output: inner,
        })
    }

    /// The same options with another output.
    #[must_use]
    pub fn with_head(mut self, head: Head) -> Self {
        self.head = head;
        self
    }
}

/// Standard deviations of the weight matrices that a model starts with.
#[derive(Debug, Clone, Copy)]
struct Deviations {
    inner: f64,
    /// Of the matrices that end a residual branch.
    output: f64,
}

impl Deviations {
    /// Two branches in each layer then add up to as much, however many layers there are, as in
    /// GPT-2.
    fn by_branches(inner: f64, layers: usize) -> Self {
        let output = inner / ((2 * layers) as f64).sqrt();
        Self { inner, output }
    }
}

/// The sizes of a model that reports, partitioners and callers read.
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
    /// Size of the vocabulary.
    pub vocab_size: usize,
    /// Token that ends a text, if the configuration names one.
    pub eos_token_id: Option<u32>,
}

/// The training objective of a model, which determines its inputs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Objective {
    /// The next token at each position: `input_ids`, `labels`.
    CausalLm,
    /// The tokens that were hidden: `input_ids`, `labels`.
    MaskedLm,
    /// A class for each sequence: `input_ids`, `labels: [B]`.
    SequenceClassification,
    /// A target sequence for each sequence: `input_ids`, `decoder_input_ids`, `labels`.
    SequenceToSequence,
    /// A class for each image: `pixel_values`, `labels: [B]`.
    ImageClassification,
}

impl fmt::Display for Objective {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::CausalLm => "causal language modelling",
            Self::MaskedLm => "masked language modelling",
            Self::SequenceClassification => "sequence classification",
            Self::SequenceToSequence => "sequence-to-sequence learning",
            Self::ImageClassification => "image classification",
        })
    }
}

/// A model that can be traced for any batch and sequence size.
pub trait Model: fmt::Debug + Send + Sync {
    /// Sizes of the model.
    fn info(&self) -> ModelInfo;

    /// Its training objective.
    fn objective(&self) -> Objective {
        Objective::CausalLm
    }

    /// Integer inputs that data may lack, each with the number that then fills it.
    fn optional_inputs(&self) -> &'static [(&'static str, i64)] {
        &[]
    }

    /// The shortest length at which positions are scaled as in sequences of length `seq`; 1 where
    /// the length does not matter. Keys computed at another scaling length do not fit: cached
    /// positions must pass again.
    fn scaling_length(&self, seq: usize) -> usize {
        let _ = seq;
        1
    }

    /// Traces the model. Its inputs are the graph's, with the names of Hugging Face: for language
    /// models `input_ids: [B, S] i64` and, for a loss, `labels: [B, S] i64`.
    ///
    /// # Errors
    /// When the sequence is longer than the model allows or operands do not fit.
    fn trace(&self, options: &TraceOptions) -> Result<Graph>;
}

/// The same model of the next token, whose tokens see these earlier ones where it gives a loss.
pub fn with_visible(model: Arc<dyn Model>, visible: Visible) -> Arc<dyn Model> {
    Arc::new(Masked { model, visible })
}

#[derive(Debug)]
struct Masked {
    model: Arc<dyn Model>,
    visible: Visible,
}

impl Model for Masked {
    fn info(&self) -> ModelInfo {
        self.model.info()
    }

    fn objective(&self) -> Objective {
        self.model.objective()
    }

    fn optional_inputs(&self) -> &'static [(&'static str, i64)] {
        match self.visible {
            Visible::Unpadded => &[("attention_mask", 1)],
            Visible::All | Visible::Document => &[],
        }
    }

    fn scaling_length(&self, seq: usize) -> usize {
        self.model.scaling_length(seq)
    }

    fn trace(&self, options: &TraceOptions) -> Result<Graph> {
        let is_loss = matches!(options.head, Head::Loss { .. });
        self.model.trace(&TraceOptions {
            visible: if is_loss { self.visible } else { Visible::All },
            ..options.clone()
        })
    }
}

/// Every family that can be traced: one row, and nothing else to register.
const FAMILIES: &[Family] = &[
    bert::FAMILY,
    gpt::FAMILY,
    gpt2::FAMILY,
    gpt_neox::FAMILY,
    llama::LLAMA,
    llama::MISTRAL,
    opt::FAMILY,
    llama::QWEN2,
    llama::QWEN3,
    t5::FAMILY,
    vit::FAMILY,
];

/// The families with a graph here, then the others.
fn families() -> impl Iterator<Item = &'static Family> {
    FAMILIES.iter().chain(others::FAMILIES)
}

/// The family of this `model_type`, if anything is known of it.
pub fn family(model_type: &str) -> Option<&'static Family> {
    families().find(|family| family.model_types.contains(&model_type))
}

/// The model types of the families of which a fact is known, sorted and separated by commas.
pub fn model_types_with(has_fact: impl Fn(&Family) -> bool) -> String {
    let found = families().filter(|family| has_fact(family));
    let mut names: Vec<_> = found
        .flat_map(|family| family.model_types)
        .copied()
        .collect();
    names.sort_unstable();
    names.join(", ")
}

/// The model types that [`from_config`] knows.
pub fn known_families() -> impl Iterator<Item = &'static str> {
    FAMILIES
        .iter()
        .flat_map(|family| family.model_types)
        .copied()
}

/// The classes of `transformers` whose models [`from_config`] builds.
pub fn known_classes() -> impl Iterator<Item = &'static str> {
    FAMILIES.iter().flat_map(|family| family.classes).copied()
}

/// The names of sizes in configurations of this `model_type`; `None` where its models cannot be
/// traced here.
pub fn size_fields(model_type: &str) -> Option<SizeFields> {
    family(model_type)?.source.map(|source| source.sizes)
}

/// Builds a model from the contents of a Hugging Face `config.json`, as `transformers` 4 and 5
/// write it.
///
/// Every field is used, known to change no number, or refused.
///
/// # Errors
/// [`Error::UnknownModel`] for another `model_type`; [`Error::ModelConfig`] naming a field that is
/// missing, ill-typed, unknown or asks for what is not supported.
///
/// ```
/// use merak_trace::models::{self, TraceOptions};
/// let config = serde_json::json!({ "model_type": "gpt2", "vocab_size": 101, "n_positions": 32,
///     "n_embd": 16, "n_layer": 2, "n_head": 4 });
/// let model = models::from_config(&config)?;
/// let graph = model.trace(&TraceOptions::training(2, 32))?;
/// let loss = graph.output("loss").map(|loss| graph.ty(loss).to_string());
/// assert_eq!(loss.as_deref(), Some("f64[]"));
/// # Ok::<(), merak_trace::Error>(())
/// ```
pub fn from_config(config: &Json) -> Result<Box<dyn Model>> {
    let fields = Fields::new(config)?;
    let model_type = fields.string("model_type")?;
    let source = family(&model_type).and_then(|family| family.source);
    let source = source.ok_or_else(|| Error::UnknownModel {
        known: model_types_with(|family| family.source.is_some()),
        found: model_type,
    })?;
    fields.check_common()?;
    let model = (source.build)(&fields)?;
    fields.finish()?;
    let layers = model.info().num_layers;
    fields.bounded(source.sizes.layers[0], layers, (MAX_LAYERS, "layers"))?;
    Ok(model)
}

/// Checks a sequence length against the model's longest.
fn check_seq(found: usize, max: usize, field: &'static str) -> Result<()> {
    if (1..=max).contains(&found) {
        Ok(())
    } else {
        Err(Error::SeqLength { field, max, found })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_model_type_is_of_one_family_and_every_traced_family_states_its_facts() {
        let mut names: Vec<_> = families().flat_map(|family| family.model_types).collect();
        let count = names.len();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), count);
        for family in FAMILIES {
            assert!(family.source.is_some(), "{family:?}");
            assert_ne!(family.split_layers.attributes, [""; 0], "{family:?}");
            assert!(!family.split_points.is_empty(), "{family:?}");
        }
    }
}
