//! Where the layers of each model family begin.

/// Split points per model type: module or parameter paths, `{i}` and `{j}` standing for any number.
const FAMILIES: &[(&[&str], &[&str])] = &[
    (&["gpt"], &["h.{i}", "ln_f"]),
    (&["gpt2"], &["transformer.h.{i}", "transformer.ln_f"]),
    (&["gptj"], &["transformer.h.{i}", "lm_head"]),
    (&["llama", "mistral"], &["model.layers.{i}"]),
    (&["qwen2", "qwen3"], &["model.layers.{i}", "lm_head"]),
    (&["opt", "trocr"], &["model.decoder.layers.{i}"]),
    (&["bert"], &["bert.encoder.layer.{i}"]),
    (
        &["distilbert"],
        &["distilbert.transformer.layer.{i}", "vocab_transform"],
    ),
    (
        &["mobilebert"],
        &[
            "mobilebert.embeddings",
            "mobilebert.encoder.layer.{i}",
            "cls.predictions",
        ],
    ),
    (
        &["deberta"],
        &["deberta.encoder.layer.{i}", "cls.predictions"],
    ),
    (
        &["t5"],
        &["encoder.block.{i}", "decoder.block.{i}", "lm_head"],
    ),
    (
        &["mt5"],
        &[
            "encoder.block.{i}",
            "encoder.final_layer_norm",
            "decoder.block.{i}",
            "decoder.final_layer_norm",
            "lm_head",
        ],
    ),
    (&["gpt_neox"], &["gpt_neox.layers.{i}", "embed_out"]),
    (
        &["m2m100", "m2m_100", "pegasus"],
        &[
            "model.encoder.layers.{i}",
            "model.encoder.layer_norm",
            "model.decoder.layers.{i}",
            "model.decoder.layer_norm",
        ],
    ),
    (
        &["marian"],
        &[
            "model.encoder.layers.{i}.final_layer_norm",
            "model.decoder.layers.{i}.final_layer_norm",
        ],
    ),
    (&["vit"], &["vit.encoder.layer.{i}", "vit.layernorm"]),
    (
        &["dinov2"],
        &["dinov2.encoder.layer.{i}", "dinov2.layernorm", "classifier"],
    ),
    (&["swin"], &["swin.encoder.layers.{i}.blocks.{j}.attention"]),
    (
        &["resnet"],
        &["resnet.encoder.stages.{i}.layers.{j}", "resnet.pooler"],
    ),
    (
        &["clip"],
        &[
            "logit_scale",
            "text_model.encoder.layers.{i}",
            "text_model.final_layer_norm",
            "vision_model.pre_layrnorm",
            "vision_model.encoder.layers.{i}",
            "vision_model.post_layernorm",
            "visual_projection",
            "text_projection",
        ],
    ),
    (
        &["altclip"],
        &[
            "text_model.roberta.encoder.layer.{i}",
            "vision_model.encoder.layers.{i}",
        ],
    ),
    (
        &["lxmert"],
        &[
            "lxmert.encoder.visn_fc",
            "lxmert.encoder.layer.{i}",
            "lxmert.encoder.x_layers.{i}",
            "lxmert.encoder.r_layers.{i}",
        ],
    ),
    (
        &["wav2vec2"],
        &[
            "wav2vec2.feature_extractor.conv_layers.{i}",
            "wav2vec2.encoder.layers.{i}",
            "lm_head",
        ],
    ),
];

/// The split points of a family.
pub(super) fn split_points(family: &str) -> Option<&'static [&'static str]> {
    FAMILIES
        .iter()
        .find(|(names, _)| names.contains(&family))
        .map(|(_, points)| *points)
}

/// All families of the table.
pub(super) fn known() -> impl Iterator<Item = &'static str> {
    FAMILIES.iter().flat_map(|(names, _)| names.iter().copied())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn every_family_has_one_entry_and_every_traced_family_is_there() {
        let names: BTreeSet<_> = known().collect();
        assert_eq!(names.len(), known().count());
        for family in merak_trace::models::known_families() {
            assert!(names.contains(family), "{family} has no split points");
        }
    }
}
