//! The facts of a family of models beside its graph.

use super::{Model, fields::Fields};
use crate::Result;
use serde::{Deserialize, Serialize};

/// The facts of a family of models. Names, shapes and ties of its parameters are those of its
/// graph.
///
/// Each family with a graph here states its facts beside it. Facts of other families serve graphs
/// that a caller traces.
///
/// ```
/// let family = merak_trace::models::family("llama").expect("the family is known");
/// assert_eq!(family.split_layers.rows, ["self_attn.o_proj", "down_proj"]);
/// assert_eq!(family.split_points, ["model.layers.{i}"]);
/// assert_eq!(family.adapter_targets, ["q_proj", "v_proj"]);
/// ```
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub struct Family {
    /// Its names: `model_type` in `config.json`.
    pub model_types: &'static [&'static str],
    /// Its classes in `transformers` that have a graph here: names in `architectures` of
    /// `config.json`.
    pub classes: &'static [&'static str],
    /// Linear layers that tensor parallelism splits.
    pub split_layers: SplitLayers,
    /// Modules or parameters before which a segment begins; `{i}` and `{j}` stand for any number.
    pub split_points: &'static [&'static str],
    /// Last components of the layers that have a LoRA adapter by default.
    pub adapter_targets: &'static [&'static str],
    /// Modules that can have no adapter in PEFT.
    pub without_adapter: &'static [&'static str],
    /// Modules of a classifier, which weights that learned another task lack.
    pub classifier: &'static [&'static str],
    /// How its models are made, where they can be traced here.
    pub(super) source: Option<Source>,
}

/// How models of a family are made of a configuration.
#[derive(Debug, Clone, Copy)]
pub(super) struct Source {
    /// The configuration's names of the sizes that a run may override.
    pub(super) sizes: SizeFields,
    pub(super) build: fn(&Fields<'_>) -> Result<Box<dyn Model>>,
}

/// Names that configurations of a family have for the same size, the family's own first.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SizeFields {
    /// Transformer layers.
    pub layers: &'static [&'static str],
    /// Width of the hidden states.
    pub hidden: &'static [&'static str],
    /// Attention heads.
    pub heads: &'static [&'static str],
}

/// The linear layers of a family that tensor parallelism splits. A name is any part of a layer's
/// path.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SplitLayers {
    /// Layers whose output features are split.
    pub columns: &'static [&'static str],
    /// Layers whose input features are split.
    pub rows: &'static [&'static str],
    /// Parameters that each rank keeps a slice of, with the dimension that is sliced. A name is the
    /// end of a parameter's path, `.weight` left out.
    pub slices: &'static [(&'static str, usize)],
    /// Attributes that the degree divides in modules that a tracer keeps whole, such as a number of
    /// heads. Merak records every operation, so they change nothing in its graphs.
    pub attributes: &'static [&'static str],
}

merak_mpu::named_enum! {
    /// The two ways to split a linear layer.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
    #[serde(rename_all = "lowercase")]
    pub enum SplitKind {
        /// By output features.
        Col = "col",
        /// By input features.
        Row = "row",
    }
}

impl SplitKind {
    /// The kind before `-parallel`.
    pub const fn in_words(self) -> &'static str {
        match self {
            Self::Col => "column",
            Self::Row => "row",
        }
    }
}

/// The names of sizes in most families.
pub(super) const USUAL_SIZES: SizeFields = SizeFields {
    layers: &["num_hidden_layers"],
    hidden: &["hidden_size"],
    heads: &["num_attention_heads"],
};

impl Family {
    /// A family of which nothing else is known.
    pub(super) const fn named(model_types: &'static [&'static str]) -> Self {
        Self {
            model_types,
            classes: &[],
            split_layers: SplitLayers::new(&[], &[], &[]),
            split_points: &[],
            adapter_targets: &[],
            without_adapter: &[],
            classifier: &[],
            source: None,
        }
    }

    /// A family whose models can be traced.
    pub(super) const fn traced(
        model_types: &'static [&'static str],
        classes: &'static [&'static str],
        sizes: SizeFields,
        build: fn(&Fields<'_>) -> Result<Box<dyn Model>>,
    ) -> Self {
        Self {
            classes,
            source: Some(Source { sizes, build }),
            ..Self::named(model_types)
        }
    }
}

impl SplitLayers {
    /// Lists by names.
    pub(super) const fn new(
        columns: &'static [&'static str],
        rows: &'static [&'static str],
        attributes: &'static [&'static str],
    ) -> Self {
        Self {
            columns,
            rows,
            slices: &[],
            attributes,
        }
    }

    /// The same lists, and parameters that are sliced.
    pub(super) const fn with_slices(mut self, slices: &'static [(&'static str, usize)]) -> Self {
        self.slices = slices;
        self
    }
}
