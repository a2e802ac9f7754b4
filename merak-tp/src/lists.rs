//! The lists of layers that a user wants split.

use crate::{Error, Result};
pub use merak_trace::models::SplitKind;
use merak_trace::models::{self, Family};
use serde::{Deserialize, Serialize};
use std::sync::{Mutex, PoisonError};

/// Which layers are split over the tensor axis, and how.
///
/// Names match when they occur anywhere in the qualified name of a layer, case-sensitively. An
/// empty list counts as not set.
///
/// ```
/// use merak_tp::LayerLists;
/// let lists: LayerLists = serde_json::from_str(
///     r#"{ "col_para_list": ["c_attn", "c_fc"], "row_para_list": ["c_proj"] }"#,
/// )?;
/// assert_eq!(lists, LayerLists::col_row(["c_attn", "c_fc"], ["c_proj"]));
/// # Ok::<(), serde_json::Error>(())
/// ```
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct LayerLists {
    /// Layers whose output features are split; the output stays split.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub col_para_list: Vec<String>,
    /// Layers whose input features are split; partial outputs are summed, then the bias is added
    /// once.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub row_para_list: Vec<String>,
    /// Layers by the ratio of their features; the first match wins.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub input_output_mapping: Vec<Mapping>,
    /// Slices by name and dimension: of a linear layer's features, 0 its output and 1 its input
    /// ones, or of the parameter `name` or `name.weight`, whatever uses it.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub weight_change_list: Vec<(String, usize)>,
    /// Attributes with a size, such as a number of heads, of modules that a tracer keeps whole
    /// instead of recording their operations. Merak records every operation, and the sizes in its
    /// graph follow from the placements, so the list changes nothing.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub tp_attr_list: Vec<String>,
    /// Convolutions of patches that do not overlap, whose input channels are split; partial
    /// outputs are summed. The degree must divide the channels.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub conv_para_list: Vec<String>,
}

/// Splits every linear layer with `in * output = out * input` features, except the output head.
///
/// In files it is a triple, as `[1, 3, "col"]`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(from = "(usize, usize, SplitKind)", into = "(usize, usize, SplitKind)")]
pub struct Mapping {
    /// Proportion of the input features.
    pub input: usize,
    /// Proportion of the output features.
    pub output: usize,
    /// The split of such layers.
    pub kind: SplitKind,
}

impl LayerLists {
    /// Lists of column and row layers.
    pub fn col_row<S: Into<String>>(
        col: impl IntoIterator<Item = S>,
        row: impl IntoIterator<Item = S>,
    ) -> Self {
        Self {
            col_para_list: col.into_iter().map(Into::into).collect(),
            row_para_list: row.into_iter().map(Into::into).collect(),
            ..Self::default()
        }
    }

    /// The lists for a model: those that were set, else the defaults of its family.
    ///
    /// # Errors
    /// [`Error::NoLists`] when `degree` is above 1 and there are neither.
    pub fn resolve(set: Option<&Self>, family: &str, degree: usize) -> Result<Self> {
        if let Some(lists) = set {
            return Ok(lists.clone());
        }
        match default_lists(family) {
            Some(lists) => Ok(lists),
            None if degree <= 1 => Ok(Self::default()),
            None => Err(Error::NoLists {
                degree,
                family: family.to_owned(),
                known: known(),
            }),
        }
    }

    /// Checks that the lists say how to split a model.
    pub(crate) fn check(&self, degree: usize) -> Result<()> {
        let (col, row) = (
            !self.col_para_list.is_empty(),
            !self.row_para_list.is_empty(),
        );
        let others = !self.input_output_mapping.is_empty()
            || !self.weight_change_list.is_empty()
            || !self.conv_para_list.is_empty();
        if (col && row) || others {
            return Ok(());
        }
        let found = match (col, row) {
            (true, _) => "col_para_list alone",
            (_, true) => "row_para_list alone",
            _ if !self.tp_attr_list.is_empty() => "tp_attr_list alone",
            _ => "none of them",
        };
        Err(Error::IncompleteLists {
            degree,
            found: found.to_owned(),
        })
    }
}

impl From<(usize, usize, SplitKind)> for Mapping {
    fn from((input, output, kind): (usize, usize, SplitKind)) -> Self {
        Self {
            input,
            output,
            kind,
        }
    }
}

impl From<Mapping> for (usize, usize, SplitKind) {
    fn from(mapping: Mapping) -> Self {
        (mapping.input, mapping.output, mapping.kind)
    }
}

/// The lists of the last [`set_tp_layer_lists`].
static LISTS: Mutex<Option<LayerLists>> = Mutex::new(None);

/// Sets the lists for later callers of [`tp_layer_lists`] in this process.
///
/// A caller gets a copy, so a later call of this function does not change what it has.
/// Nothing else reads the setting: [`rewrite`](crate::rewrite) takes its lists as an argument.
pub fn set_tp_layer_lists(lists: LayerLists) {
    *LISTS.lock().unwrap_or_else(PoisonError::into_inner) = Some(lists);
}

/// A copy of the lists that were set last, if any.
pub fn tp_layer_lists() -> Option<LayerLists> {
    LISTS.lock().unwrap_or_else(PoisonError::into_inner).clone()
}

/// The default lists of a model family, named as `model_type` in a Hugging Face `config.json`: the
/// names that its file in `merak-trace/src/models/` gives.
///
/// ```
/// let lists = merak_tp::default_lists("llama").expect("the family is known");
/// assert_eq!(lists.row_para_list, ["self_attn.o_proj", "down_proj"]);
/// assert_eq!(merak_tp::default_lists("resnet"), None);
/// ```
pub fn default_lists(family: &str) -> Option<LayerLists> {
    let family = models::family(family).filter(|family| has_lists(family))?;
    let layers = family.split_layers;
    let strings = |names: &[&str]| names.iter().map(|&name| name.to_owned()).collect();
    Some(LayerLists {
        col_para_list: strings(layers.columns),
        row_para_list: strings(layers.rows),
        weight_change_list: layers
            .slices
            .iter()
            .map(|&(name, dim)| (name.to_owned(), dim))
            .collect(),
        tp_attr_list: strings(layers.attributes),
        ..LayerLists::default()
    })
}

/// The model types that have default lists, for messages.
pub(crate) fn known() -> String {
    models::model_types_with(has_lists)
}

fn has_lists(family: &Family) -> bool {
    !family.split_layers.columns.is_empty()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mapping_is_a_triple_in_files() {
        let json = r#"{"input_output_mapping":[[1,3,"col"],[4,1,"row"]]}"#;
        let lists: LayerLists = serde_json::from_str(json).unwrap();
        assert_eq!(
            lists.input_output_mapping[1],
            Mapping {
                input: 4,
                output: 1,
                kind: SplitKind::Row
            }
        );
        assert_eq!(serde_json::to_string(&lists).unwrap(), json);
    }

    #[test]
    fn an_unknown_list_is_refused() {
        let error = serde_json::from_str::<LayerLists>(r#"{"col_list":[]}"#).unwrap_err();
        assert!(
            error.to_string().starts_with("unknown field `col_list`"),
            "{error}"
        );
    }

    #[test]
    fn set_lists_go_to_copies_that_later_calls_leave_alone() {
        let first = LayerLists::col_row(["up"], ["down"]);
        set_tp_layer_lists(first.clone());
        let copy = tp_layer_lists();
        set_tp_layer_lists(LayerLists::col_row(["in"], ["out"]));
        assert_eq!(copy, Some(first));
        assert_ne!(tp_layer_lists(), copy);
    }

    #[test]
    fn set_lists_go_before_defaults() {
        let own = LayerLists::col_row(["up"], ["down"]);
        assert_eq!(LayerLists::resolve(Some(&own), "llama", 2).unwrap(), own);
        assert_eq!(
            Some(LayerLists::resolve(None, "llama", 2).unwrap()),
            default_lists("llama")
        );
        assert_eq!(
            LayerLists::resolve(None, "resnet", 1).unwrap(),
            LayerLists::default()
        );
        let error = LayerLists::resolve(None, "resnet", 2)
            .unwrap_err()
            .to_string();
        assert!(
            error.starts_with(
                "tp = 2: model type \"resnet\" has no default layer lists and none were set"
            ),
            "{error}"
        );
    }

    #[test]
    fn swin_has_lists_for_the_names_of_both_programs() {
        let [of_hf, of_torch] = ["swin", "swin_torch"].map(|name| default_lists(name).unwrap());
        assert_eq!(of_torch.col_para_list, ["qkv", "fc1"]);
        assert_eq!(of_torch.row_para_list, ["proj", "fc2"]);
        assert_eq!(of_torch.weight_change_list, of_hf.weight_change_list);
        assert_ne!(of_torch.col_para_list, of_hf.col_para_list);
    }

    /// Model types, and as the specification names them: columns, rows, slices, attributes.
    const TABLE: [[&str; 5]; 12] = [
        [
            "bert vit electra layoutlm nezha mobilebert",
            "query key value intermediate.dense",
            "output.dense",
            "",
            "num_attention_heads all_head_size",
        ],
        [
            "opt m2m100 marian mbart pegasus plbart blenderbot speech2text speech2text2 trocr xglm \
             clip bart",
            "q_proj k_proj v_proj fc1",
            "out_proj fc2",
            "",
            "num_heads",
        ],
        [
            "gptj",
            "q_proj k_proj v_proj fc_in",
            "out_proj fc_out",
            "",
            "num_attention_heads",
        ],
        [
            "altclip",
            "query key value q_proj k_proj v_proj intermediate.dense fc1",
            "output.dense out_proj fc2",
            "",
            "num_heads num_attention_heads all_head_size",
        ],
        [
            "albert",
            "query key value",
            "attention.dense",
            "",
            "num_attention_heads all_head_size",
        ],
        [
            "lxmert",
            "query key value intermediate.dense lang_inter.dense visn_inter.dense",
            "output.dense lang_output.dense visn_output.dense",
            "",
            "num_attention_heads all_head_size",
        ],
        [
            "distilbert",
            "q_lin k_lin v_lin lin1",
            "out_lin lin2",
            "",
            "n_heads",
        ],
        [
            "dinov2",
            "query key value fc1",
            "output.dense fc2",
            "",
            "num_attention_heads all_head_size",
        ],
        [
            "swin",
            "query key value intermediate.dense",
            "output.dense",
            "relative_position_bias_table",
            "num_attention_heads all_head_size",
        ],
        [
            "swin_torch",
            "qkv fc1",
            "proj fc2",
            "relative_position_bias_table",
            "num_heads",
        ],
        [
            "wav2vec2",
            "q_proj k_proj v_proj intermediate_dense",
            "out_proj output_dense",
            "",
            "num_heads",
        ],
        [
            "mt5",
            "SelfAttention.q SelfAttention.k SelfAttention.v EncDecAttention.q EncDecAttention.k \
             EncDecAttention.v DenseReluDense.wi_0 DenseReluDense.wi_1",
            "SelfAttention.o EncDecAttention.o DenseReluDense.wo",
            "relative_attention_bias",
            "n_heads inner_dim",
        ],
    ];

    #[test]
    fn the_lists_of_families_without_a_graph_are_those_of_the_specification() {
        // A pattern may be the end that several names share.
        let match_each_other = |patterns: &[String], names: &str| {
            let names: Vec<_> = names.split(' ').collect();
            let has = |name: &&str| {
                patterns
                    .iter()
                    .any(|pattern| name.contains(pattern.as_str()))
            };
            let is_one =
                |pattern: &String| names.iter().any(|name| name.contains(pattern.as_str()));
            names.iter().all(has) && patterns.iter().all(is_one)
        };
        for [families, columns, rows, slice, attributes] in TABLE {
            for family in families.split(' ') {
                let lists = default_lists(family).expect("the family is known");
                assert!(match_each_other(&lists.col_para_list, columns), "{family}");
                assert!(match_each_other(&lists.row_para_list, rows), "{family}");
                let slices: Vec<_> = slice
                    .split_whitespace()
                    .map(|name| (name.to_owned(), 1))
                    .collect();
                assert_eq!(lists.weight_change_list, slices, "{family}");
                let found = lists.tp_attr_list.join(" ");
                assert_eq!(found, attributes, "{family}");
            }
        }
        for family in ["convnext", "hubert", "resnet", "segformer", "unet"] {
            assert_eq!(default_lists(family), None, "{family}");
        }
    }

    #[test]
    fn the_lists_of_every_family_are_usable() {
        let known = known();
        assert!(
            known.starts_with("albert, altclip, bart, bert, "),
            "{known}"
        );
        for family in known.split(", ") {
            let lists = default_lists(family).unwrap();
            assert!(lists.check(2).is_ok(), "{family}");
        }
    }
}
