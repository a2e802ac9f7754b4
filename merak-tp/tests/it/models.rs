//! GPT-2 and Llama as each rank runs them.

use crate::support::{gpt2, llama, model, shapes, split_model};
use merak_tp::{default_lists, rewrite};
use merak_trace::{
    Graph, Op, Placement,
    models::TraceOptions,
    op::AxisSlice,
    render::{self, Format},
};

/// The lines of the first block.
fn first_block(graph: &Graph, block: &str) -> String {
    let text = render::graph(graph, Format::Text);
    let in_block = |line: &&str| {
        line.split_once('#')
            .is_some_and(|(_, scope)| scope.trim().starts_with(block))
    };
    text.lines()
        .filter(in_block)
        .map(str::to_owned)
        .collect::<Vec<_>>()
        .join("\n")
}

#[test]
fn a_gpt2_block_has_one_all_reduce_per_half() {
    let split = split_model(&gpt2(1, 0.1, true), &TraceOptions::training(2, 8), 2);
    insta::assert_snapshot!(first_block(&split.graph, "transformer.h.0"), @"");
    insta::assert_snapshot!(split.report.to_string(), @"");
}

#[test]
fn a_llama_layer_repeats_key_and_value_heads_that_are_fewer_than_ranks() {
    let split = split_model(&llama(1, 2, 0.0), &TraceOptions::training(2, 8), 4);
    insta::assert_snapshot!(first_block(&split.graph, "model.layers.0"), @"");
    insta::assert_snapshot!(split.report.to_string(), @"");
}

#[test]
fn a_fused_projection_is_placed_in_three_parts() {
    let split = split_model(&gpt2(1, 0.0, true), &TraceOptions::training(2, 8), 2);
    let placement = |name: &str| {
        let id = split.graph.find_param(name).unwrap();
        split.graph.param(id).placement.clone()
    };
    let Placement::Shard(weight) = placement("transformer.h.0.attn.c_attn.weight") else {
        panic!("it is split")
    };
    assert_eq!((weight.dim, weight.parts), (1, vec![16, 16, 16]));
    let Placement::Shard(bias) = placement("transformer.h.0.attn.c_attn.bias") else {
        panic!("it is split")
    };
    assert_eq!((bias.dim, bias.parts), (0, vec![16, 16, 16]));
    assert_eq!(
        placement("transformer.h.0.mlp.c_proj.weight"),
        Placement::shard(0, 64)
    );
    assert_eq!(
        placement("transformer.h.0.mlp.c_proj.bias"),
        Placement::Replicate
    );
    assert_eq!(placement("transformer.wte.weight"), Placement::Replicate);
}

#[test]
fn split_heads_draw_their_part_of_the_mask_under_the_same_key() {
    let model = model(&gpt2(1, 0.1, true));
    let whole = model.trace(&TraceOptions::training(2, 8)).unwrap();
    let split = rewrite(&whole, &default_lists("gpt2").unwrap(), 2)
        .unwrap()
        .graph;
    let random = |graph: &Graph| -> Vec<_> {
        let masks = graph.nodes().iter().filter_map(|node| match &node.op {
            Op::Attention(spec) => Some((node.name.clone(), spec.dropout?)),
            Op::Dropout(dropout) => Some((node.name.clone(), *dropout)),
            _ => None,
        });
        masks.collect()
    };
    let (before, after) = (random(&whole), random(&split));
    assert_eq!(before.len(), 4);
    assert!(
        before
            .iter()
            .zip(&after)
            .all(|(a, b)| a.0 == b.0 && a.1.key == b.1.key)
    );
    let slices: Vec<_> = after.iter().map(|(_, dropout)| dropout.slice).collect();
    let heads = Some(AxisSlice {
        axis: merak_trace::Axis::Tensor,
        dim: 1,
        full: 4,
    });
    assert_eq!(slices, [None, heads, None, None]);
}

#[test]
fn inputs_outputs_and_parameters_keep_names_order_and_full_types() {
    for config in [gpt2(2, 0.1, false), llama(2, 4, 0.1)] {
        let model = model(&config);
        let whole = model.trace(&TraceOptions::training(2, 8)).unwrap();
        let split = rewrite(&whole, &default_lists(model.info().family).unwrap(), 2)
            .unwrap()
            .graph;
        let ports = |graph: &Graph| -> Vec<_> {
            let ports = graph.inputs().iter().chain(graph.outputs());
            ports
                .map(|port| (port.name.clone(), graph.ty(port.value).clone()))
                .collect()
        };
        assert_eq!(ports(&whole), ports(&split));
        let params = |graph: &Graph| -> Vec<_> {
            graph
                .params()
                .iter()
                .map(|p| (p.name.clone(), p.full.clone(), p.init))
                .collect()
        };
        assert_eq!(params(&whole), params(&split));
        let names: std::collections::BTreeSet<_> =
            split.nodes().iter().map(|node| node.name.clone()).collect();
        assert_eq!(names.len(), split.nodes().len());
    }
}

#[test]
fn one_rank_runs_the_graph_as_it_was_traced() {
    let whole = model(&gpt2(1, 0.0, true))
        .trace(&TraceOptions::training(2, 8))
        .unwrap();
    let same = rewrite(&whole, &default_lists("gpt2").unwrap(), 1).unwrap();
    assert_eq!(
        render::graph(&same.graph, Format::Json),
        render::graph(&whole, Format::Json)
    );
    assert!(same.report.modules.is_empty());
}

#[test]
fn every_rank_computes_the_same_graph() {
    let text = || {
        render::graph(
            &split_model(&llama(2, 2, 0.1), &TraceOptions::training(2, 8), 4).graph,
            Format::Json,
        )
    };
    assert_eq!(text(), text());
}

#[test]
fn a_gpt3_of_175_billion_parameters_is_rewritten_without_storage() {
    let config = serde_json::json!({ "model_type": "gpt2", "vocab_size": 50257, "n_positions": 2048,
        "n_embd": 12288, "n_layer": 96, "n_head": 96 });
    let split = split_model(&config, &TraceOptions::training(1, 2048), 8);
    assert_eq!(split.report.modules.len(), 4 * 96);
    assert!(split.report.gathers.is_empty());
    let elements = |local: bool| -> usize {
        split
            .graph
            .params()
            .iter()
            .map(|param| {
                if local {
                    param.local.numel()
                } else {
                    param.full.numel()
                }
            })
            .sum()
    };
    assert!(elements(false) > 174_000_000_000);
    assert!(elements(true) < 23_000_000_000);
    assert_eq!(shapes(&split.graph)[5], "copy_to [1, 2048, 12288]");
}
