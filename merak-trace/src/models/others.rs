//! Families without a graph here, for graphs that a caller traces.

use super::{
    encoder,
    family::{Family, SplitLayers},
    opt, t5,
};

/// A line per family: model types, lists of layers that are split, split points, targets of
/// adapters.
macro_rules! families {
    ($([$($name:literal)*] $layers:expr, [$($point:literal)*] [$($target:literal)*];)*) => {
        &[$(Family {
            split_layers: $layers,
            split_points: &[$($point),*],
            adapter_targets: &[$($target),*],
            ..Family::named(&[$($name),*])
        }),*]
    };
}

/// Lists of layers: columns, rows, attributes.
macro_rules! split {
    ($([$($item:literal)*])*) => {
        SplitLayers::new($(&[$($item),*]),*)
    };
}

const NONE: SplitLayers = SplitLayers::new(&[], &[], &[]);
const LIKE_BERT: SplitLayers = encoder::SPLIT_LAYERS;
const LIKE_OPT: SplitLayers = opt::FAMILY.split_layers;
const LIKE_T5: SplitLayers = t5::FAMILY.split_layers;

/// The families.
pub(super) const FAMILIES: &[Family] = families! {
    // Attention only.
    ["albert"] split!(
        ["query" "key" "value"] ["attention.dense"] ["num_attention_heads" "all_head_size"]
    ), [] [];
    ["altclip"] split!(
        ["query" "key" "value" "q_proj" "k_proj" "v_proj" "intermediate.dense" "fc1"]
        ["output.dense" "out_proj" "fc2"] ["num_heads" "num_attention_heads" "all_head_size"]
    ), ["text_model.roberta.encoder.layer.{i}" "vision_model.encoder.layers.{i}"] [];
    ["bart"] LIKE_OPT, [] ["q_proj" "v_proj"];
    ["blenderbot" "mbart" "plbart" "speech2text" "speech2text2" "xglm"] LIKE_OPT, [] [];
    ["blip-2"] NONE, [] ["q" "v" "q_proj" "v_proj"];
    ["bloom" "chatglm" "falcon" "RefinedWeb" "RefinedWebModel"] NONE, [] ["query_key_value"];
    ["btlm"] NONE, [] ["c_proj" "c_attn"];
    ["clip"] LIKE_OPT, [
        "logit_scale" "text_model.encoder.layers.{i}" "text_model.final_layer_norm"
        "vision_model.pre_layrnorm" "vision_model.encoder.layers.{i}"
        "vision_model.post_layernorm" "visual_projection" "text_projection"
    ] [];
    ["codegen"] NONE, [] ["qkv_proj"];
    ["deberta"] NONE, ["deberta.encoder.layer.{i}" "cls.predictions"] ["in_proj"];
    ["deberta-v2"] NONE, [] ["query_proj" "value_proj"];
    ["dinov2"] split!(
        ["query" "key" "value" "fc1"] ["output.dense" "fc2"] ["num_attention_heads" "all_head_size"]
    ), ["dinov2.encoder.layer.{i}" "dinov2.layernorm" "classifier"] [];
    ["distilbert"] split!(["q_lin" "k_lin" "v_lin" "lin1"] ["out_lin" "lin2"] ["n_heads"]),
        ["distilbert.transformer.layer.{i}" "vocab_transform"] [];
    ["electra" "layoutlm"] LIKE_BERT, [] ["query" "value"];
    ["gemma" "gpt_neo" "mixtral" "stablelm"] NONE, [] ["q_proj" "v_proj"];
    ["gpt_bigcode"] NONE, [] ["c_attn"];
    ["gptj"] split!(
        ["q_proj" "k_proj" "v_proj" "fc_in"] ["out_proj" "fc_out"] ["num_attention_heads"]
    ), ["transformer.h.{i}" "lm_head"] ["q_proj" "v_proj"];
    ["lxmert"] split!(
        ["query" "key" "value" "intermediate.dense" "lang_inter.dense" "visn_inter.dense"]
        ["output.dense" "lang_output.dense" "visn_output.dense"]
        ["num_attention_heads" "all_head_size"]
    ), [
        "lxmert.encoder.visn_fc" "lxmert.encoder.layer.{i}" "lxmert.encoder.x_layers.{i}"
        "lxmert.encoder.r_layers.{i}"
    ] [];
    ["m2m100" "m2m_100" "pegasus"] LIKE_OPT, [
        "model.encoder.layers.{i}" "model.encoder.layer_norm"
        "model.decoder.layers.{i}" "model.decoder.layer_norm"
    ] [];
    ["marian"] LIKE_OPT, [
        "model.encoder.layers.{i}.final_layer_norm" "model.decoder.layers.{i}.final_layer_norm"
    ] [];
    ["mobilebert"] LIKE_BERT,
        ["mobilebert.embeddings" "mobilebert.encoder.layer.{i}" "cls.predictions"] [];
    ["mpt"] NONE, [] ["Wqkv"];
    ["mt5"] LIKE_T5, [
        "encoder.block.{i}" "encoder.final_layer_norm"
        "decoder.block.{i}" "decoder.final_layer_norm" "lm_head"
    ] ["q" "v"];
    ["nezha"] LIKE_BERT, [] [];
    ["phi"] NONE, [] ["q_proj" "v_proj" "fc1" "fc2"];
    ["resnet"] NONE, ["resnet.encoder.stages.{i}.layers.{j}" "resnet.pooler"] [];
    ["roberta" "xlm-roberta"] LIKE_BERT, [] ["query" "value"];
    ["swin"] LIKE_BERT.with_slices(&[("relative_position_bias_table", 1)]), ["swin.encoder.layers.{i}.blocks.{j}.attention"] [];
    // Swin as its authors name the layers.
    ["swin_torch"] split!(["qkv" "fc1"] ["proj" "fc2"] ["num_heads"])
        .with_slices(&[("relative_position_bias_table", 1)]), [] [];
    ["trocr"] LIKE_OPT, ["model.decoder.layers.{i}"] [];
    ["wav2vec2"] split!(
        ["q_proj" "k_proj" "v_proj" "intermediate_dense"] ["out_proj" "output_dense"] ["num_heads"]
    ), [
        "wav2vec2.feature_extractor.conv_layers.{i}" "wav2vec2.encoder.layers.{i}" "lm_head"
    ] [];
};
