//! The default lists of each model family.

use crate::{LayerLists, Mapping, SplitKind, SplitKind::Col, SplitKind::Row};

/// One row of the table.
struct Defaults {
    families: &'static [&'static str],
    col: &'static [&'static str],
    row: &'static [&'static str],
    mapping: &'static [(usize, usize, SplitKind)],
    attr: &'static [&'static str],
}

const TABLE: &[Defaults] = &[
    Defaults {
        families: &["gpt2"],
        col: &[],
        row: &[],
        mapping: &[(1, 3, Col), (1, 1, Row), (1, 4, Col), (4, 1, Row)],
        attr: &["num_heads", "split_size"],
    },
    Defaults {
        families: &["gpt"],
        col: &["attn.q", "attn.k", "attn.v", "mlp.fc"],
        row: &["attn.proj", "mlp.proj"],
        mapping: &[],
        attr: &["num_heads"],
    },
    Defaults {
        families: &["bert", "vit", "electra", "layoutlm", "nezha", "mobilebert"],
        col: &["query", "key", "value", "intermediate.dense"],
        row: &["output.dense"],
        mapping: &[],
        attr: &["num_attention_heads", "all_head_size"],
    },
    Defaults {
        families: &["llama", "mistral", "qwen2", "qwen3"],
        col: &[
            "self_attn.q_proj",
            "self_attn.k_proj",
            "self_attn.v_proj",
            "gate_proj",
            "up_proj",
        ],
        row: &["self_attn.o_proj", "down_proj"],
        mapping: &[],
        attr: &["num_heads", "num_key_value_heads"],
    },
    Defaults {
        families: &["t5", "mt5"],
        col: &[
            "Attention.q",
            "Attention.k",
            "Attention.v",
            "DenseReluDense.wi",
        ],
        row: &["Attention.o", "DenseReluDense.wo"],
        mapping: &[],
        attr: &["n_heads", "inner_dim"],
    },
    Defaults {
        families: &["gptj"],
        col: &["q_proj", "k_proj", "v_proj", "fc_in"],
        row: &["out_proj", "fc_out"],
        mapping: &[],
        attr: &["num_attention_heads"],
    },
    Defaults {
        families: &["gpt_neox"],
        col: &["query_key_value", "dense_h_to_4h"],
        row: &["attention.dense", "dense_4h_to_h"],
        mapping: &[],
        attr: &["num_attention_heads"],
    },
    Defaults {
        families: &[
            "opt",
            "m2m100",
            "marian",
            "mbart",
            "pegasus",
            "plbart",
            "blenderbot",
            "speech2text",
            "speech2text2",
            "trocr",
            "xglm",
            "clip",
            "bart",
        ],
        col: &["q_proj", "k_proj", "v_proj", "fc1"],
        row: &["out_proj", "fc2"],
        mapping: &[],
        attr: &["num_heads"],
    },
    Defaults {
        families: &["altclip"],
        col: &[
            "query",
            "key",
            "value",
            "q_proj",
            "k_proj",
            "v_proj",
            "intermediate.dense",
            "fc1",
        ],
        row: &["output.dense", "out_proj", "fc2"],
        mapping: &[],
        attr: &["num_heads", "num_attention_heads", "all_head_size"],
    },
    Defaults {
        // Attention only.
        families: &["albert"],
        col: &["query", "key", "value"],
        row: &["attention.dense"],
        mapping: &[],
        attr: &["num_attention_heads", "all_head_size"],
    },
    Defaults {
        families: &["lxmert"],
        col: &[
            "query",
            "key",
            "value",
            "intermediate.dense",
            "lang_inter.dense",
            "visn_inter.dense",
        ],
        row: &["output.dense", "lang_output.dense", "visn_output.dense"],
        mapping: &[],
        attr: &["num_attention_heads", "all_head_size"],
    },
    Defaults {
        families: &["distilbert"],
        col: &["q_lin", "k_lin", "v_lin", "lin1"],
        row: &["out_lin", "lin2"],
        mapping: &[],
        attr: &["n_heads"],
    },
    Defaults {
        families: &["dinov2"],
        col: &["query", "key", "value", "fc1"],
        row: &["output.dense", "fc2"],
        mapping: &[],
        attr: &["num_attention_heads", "all_head_size"],
    },
    Defaults {
        families: &["wav2vec2"],
        col: &["q_proj", "k_proj", "v_proj", "intermediate_dense"],
        row: &["out_proj", "output_dense"],
        mapping: &[],
        attr: &["num_heads"],
    },
];

/// The default lists of a model family, named as `model_type` in a Hugging Face `config.json`.
///
/// ```
/// let lists = merak_tp::default_lists("llama").expect("the table has it");
/// assert_eq!(lists.row_para_list, ["self_attn.o_proj", "down_proj"]);
/// assert_eq!(merak_tp::default_lists("resnet"), None);
/// ```
pub fn default_lists(family: &str) -> Option<LayerLists> {
    let row = TABLE.iter().find(|row| row.families.contains(&family))?;
    let strings = |names: &[&str]| names.iter().map(|&name| name.to_owned()).collect();
    Some(LayerLists {
        col_para_list: strings(row.col),
        row_para_list: strings(row.row),
        input_output_mapping: row.mapping.iter().copied().map(Mapping::from).collect(),
        tp_attr_list: strings(row.attr),
        ..LayerLists::default()
    })
}

/// All families of the table.
pub(crate) fn families() -> impl Iterator<Item = &'static str> {
    TABLE.iter().flat_map(|row| row.families.iter().copied())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_family_stands_once_in_the_table_with_usable_lists() {
        let mut all: Vec<_> = families().collect();
        assert!(
            all.iter()
                .all(|family| default_lists(family).unwrap().check(2).is_ok())
        );
        all.sort_unstable();
        assert!(all.windows(2).all(|pair| pair[0] != pair[1]));
    }
}
