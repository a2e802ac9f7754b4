//! The default lists of each model family.

use crate::LayerLists;
use merak_trace::models::{self, Family};

/// The default lists of a model family, named as `model_type` in a Hugging Face `config.json`.
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
