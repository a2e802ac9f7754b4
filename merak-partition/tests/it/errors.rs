//! Messages that users read.

use insta::assert_snapshot;
use merak_partition::{Partition, SegmentOptions, SplitMethod, StageMethod, segment};
use merak_trace::{
    DType, Graph, Init, TensorType, fx,
    models::{self, TraceOptions},
    op::WeightLayout,
};
use serde_json::json;

fn gpt2() -> (Graph, SegmentOptions) {
    let config = json!({ "model_type": "gpt2", "n_layer": 2, "n_embd": 8, "n_head": 2, "vocab_size": 11, "n_positions": 4 });
    let model = models::from_config(&config).expect("the configuration is complete");
    let graph = model
        .trace(&TraceOptions::training(1, 4))
        .expect("the model traces");
    (graph, SegmentOptions::for_model(&model.info(), 2))
}

fn message(options: &SegmentOptions, method: &StageMethod) -> String {
    Partition::new(&gpt2().0, options, method)
        .expect_err("the options are wrong")
        .to_string()
}

#[test]
fn too_few_segments_say_how_many_there_are() {
    let (_, options) = gpt2();
    let options = SegmentOptions {
        num_stages: 40,
        ..options
    };
    assert_snapshot!(message(&options, &StageMethod::Uniform), @"the model has legal cuts for 31 segments only, which is fewer than the 40 stages of all ranks; use at most 31");
    let options = SegmentOptions {
        target_segments: Some(4),
        ..options
    };
    assert_snapshot!(message(&options, &StageMethod::Uniform), @"the target of 4 segments is below the 40 stages, each of which takes at least one");
    let options = SegmentOptions {
        num_stages: 5,
        ..gpt2().1
    }
    .with_method(SplitMethod::LayerSplit);
    assert_snapshot!(message(&options, &StageMethod::Uniform), @"layer_split cuts the model into 4 segments, which is fewer than the 5 stages of all ranks; use at most 4");
    let options = SegmentOptions {
        num_stages: 0,
        ..options
    };
    assert_snapshot!(message(&options, &StageMethod::Uniform), @"a pipeline has at least 1 stage, found 0");
}

#[test]
fn an_unknown_split_point_names_the_nearest_path() {
    let options = gpt2().1.with_method(SplitMethod::LayerSplit);
    let with = |point: &str| SegmentOptions {
        split_points: vec![point.to_owned()],
        ..options.clone()
    };
    assert_snapshot!(message(&with("transformers.h.1"), &StageMethod::Uniform), @r#"split point "transformers.h.1" matches no module or parameter; the nearest is "transformer.h.1""#);
    assert_snapshot!(message(&with("h.1"), &StageMethod::Uniform), @r#"split point "h.1" matches no module or parameter; the nearest is "transformer.h.1""#);
    assert_snapshot!(message(&with("transformer.h.1.mlp.c_fc.wieght"), &StageMethod::Uniform), @r#"split point "transformer.h.1.mlp.c_fc.wieght" matches no module or parameter; the nearest is "transformer.h.1.mlp.c_fc.weight""#);
    assert_snapshot!(message(&with(""), &StageMethod::Uniform), @r#"split point "" matches no module or parameter; the nearest is "lm_head""#);
}

#[test]
fn a_leaf_that_is_no_module_names_the_nearest_and_one_that_is_all_leaves_nothing_to_cut() {
    let with = |name: &str| SegmentOptions {
        leaf_modules: vec![name.to_owned()],
        num_stages: 9,
        ..gpt2().1
    };
    assert_snapshot!(message(&with("h.{i}.attn"), &StageMethod::Uniform), @r#"leaf module "h.{i}.attn" matches no module; the nearest name is "transformer.h.0.attn""#);
    assert_snapshot!(message(&with("transformer.h.1.mlp.c_fc.weight"), &StageMethod::Uniform), @r#"leaf module "transformer.h.1.mlp.c_fc.weight" matches no module; the nearest name is "transformer.h.1.mlp.c_fc""#);
    assert_snapshot!(message(&with("transformer"), &StageMethod::Uniform), @"the model has legal cuts for 3 segments only, which is fewer than the 9 stages of all ranks; use at most 3");
}

#[test]
fn a_family_without_split_points_is_refused() {
    let options = gpt2().1.with_method(SplitMethod::LayerSplit);
    let with = |family: &str| SegmentOptions {
        family: Some(family.to_owned()),
        ..options.clone()
    };
    assert_snapshot!(message(&with("rwkv"), &StageMethod::Uniform), @r#"layer_split has no split points for model type "rwkv", only for altclip, bert, clip, deberta, dinov2, distilbert, gpt, gpt2, gpt_neox, gptj, llama, lxmert, m2m100, m2m_100, marian, mistral, mobilebert, mt5, opt, pegasus, qwen2, qwen3, resnet, swin, t5, trocr, vit, wav2vec2"#);
    assert_snapshot!(message(&with("llama"), &StageMethod::Uniform), @r#"none of the split points of model type "llama" (model.layers.{i}) is in this model"#);
}

#[test]
fn given_boundaries_that_are_no_partition_say_what_it_should_be() {
    let custom = |bounds: &[usize]| message(&gpt2().1, &StageMethod::Custom(bounds.to_vec()));
    assert_snapshot!(custom(&[0, 3]), @"the boundaries [0, 3] should be 3 numbers that rise strictly from 0 to 6");
    assert_snapshot!(custom(&[0, 3, 7]), @"the boundaries [0, 3, 7] should be 3 numbers that rise strictly from 0 to 6");
    assert_snapshot!(custom(&[0, 0, 6]), @"the boundaries [0, 0, 6] should be 3 numbers that rise strictly from 0 to 6");
    assert_snapshot!(custom(&[]), @"the boundaries [] should be 3 numbers that rise strictly from 0 to 6");
}

#[test]
fn an_empty_model_and_a_foreign_graph_are_refused() {
    let (graph, options) = gpt2();
    assert_snapshot!(segment(&Graph::new(), &options).unwrap_err(), @"the model has no nodes, so there is nothing to cut");
    let partition = Partition::new(&graph, &options, &StageMethod::Uniform).unwrap();
    let other = fx::trace(DType::F32, |module| {
        let x = module.input("x", TensorType::new([2, 3], DType::F32));
        let y = module.linear(&x, 3, WeightLayout::OutIn, true, Init::Normal(1.0))?;
        module.output("y", &y);
        Ok(())
    });
    assert_snapshot!(partition.cuts(&other.unwrap()).unwrap_err(), @"the partition ends at node 34, but the graph has 1 nodes; cut the graph that is run");
}
