//! GPT-2 and Llama as each rank runs them.

use crate::support::{gpt2, llama, model, shapes, split_model};
use merak_tp::{LayerLists, cuts, default_lists, rewrite};
use merak_trace::{
    Axis, Graph, Op, Placement,
    models::TraceOptions,
    op::AxisSlice,
    render::{self, Format},
};

/// The lines of one block, without its name.
fn block(graph: &Graph, name: &str) -> String {
    let text = render::graph(graph, Format::Text);
    let lines = text.lines().filter_map(|line| line.split_once(" # "));
    let own = lines.filter(|(_, scope)| scope.trim().starts_with(name));
    let short = own.map(|(line, _)| line.trim_end().replace(&format!("{name}."), ""));
    short.collect::<Vec<_>>().join("\n")
}

#[test]
fn a_gpt2_block_has_one_all_reduce_per_half() {
    let split = split_model(&gpt2(1, 0.1, true), &TraceOptions::training(2, 8), 2);
    insta::assert_snapshot!(block(&split.graph, "transformer.h.0"), @"
    %23: f32[2, 8, 16], %24: f32[16], %25: f32[16] = layer_norm(%22, ln_1.weight[16], ln_1.bias[16])
    %26: f32[2, 8, 16] = copy_to(%23)
    %27: f32[2, 8, 24] = linear(%26, attn.c_attn.weight[16, 24], attn.c_attn.bias[24])
    %28: f32[2, 8, 8], %29: f32[2, 8, 8], %30: f32[2, 8, 8] = split(%27)
    %31: f32[2, 8, 8], %32: f32[2, 2, 8] = attention(%28, %29, %30)
    %33: f32[2, 8, 16] = linear(%31, attn.c_proj.weight[8, 16])
    %34: f32[2, 8, 16] = all_reduce(%33)
    %35: f32[2, 8, 16] = add(%34, attn.c_proj.bias[16])
    %36: f32[2, 8, 16] = dropout(%35)
    %37: f32[2, 8, 16] = add(%36, %22)
    %38: f32[2, 8, 16], %39: f32[16], %40: f32[16] = layer_norm(%37, ln_2.weight[16], ln_2.bias[16])
    %41: f32[2, 8, 16] = copy_to(%38)
    %42: f32[2, 8, 32] = linear(%41, mlp.c_fc.weight[16, 32], mlp.c_fc.bias[32])
    %43: f32[2, 8, 32] = gelu_tanh(%42)
    %44: f32[2, 8, 16] = linear(%43, mlp.c_proj.weight[32, 16])
    %45: f32[2, 8, 16] = all_reduce(%44)
    %46: f32[2, 8, 16] = add(%45, mlp.c_proj.bias[16])
    %47: f32[2, 8, 16] = dropout(%46)
    %48: f32[2, 8, 16] = add(%47, %37)
    ");
    insta::assert_snapshot!(split.report.to_string(), @r#"
    tensor parallel over 2 ranks: 4 layers split
      col transformer.h.0.attn.c_attn  16 -> 48 in 3 parts  (col_para_list "attn.c_attn")
      row transformer.h.0.attn.c_proj  16 -> 16  (row_para_list "c_proj")
      col transformer.h.0.mlp.c_fc     16 -> 64  (col_para_list "mlp.c_fc")
      row transformer.h.0.mlp.c_proj   64 -> 16  (row_para_list "c_proj")
      forward all_reduce: 2 per microbatch, 2048 bytes
      backward all_reduce: 2 per microbatch, 2048 bytes
    "#);
}

#[test]
fn a_llama_layer_repeats_key_and_value_heads_that_are_fewer_than_ranks() {
    let split = split_model(&llama(1, 2, 0.0), &TraceOptions::training(2, 8), 4);
    insta::assert_snapshot!(block(&split.graph, "model.layers.0"), @"
    %15: f32[2, 8, 16], %16: f32[16] = rms_norm(%14, input_layernorm.weight[16])
    %17: f32[2, 8, 16] = copy_to(%15)
    %18: f32[2, 8, 4] = linear(%17, self_attn.q_proj.weight[4, 16])
    %19: f32[2, 8, 8] = linear(%15, self_attn.k_proj.weight[8, 16])
    %20: f32[2, 8, 8] = linear(%15, self_attn.v_proj.weight[8, 16])
    %21: i64[8] = positions()
    %22: f32[2, 8, 4] = rope(%18, %21)
    %23: f32[2, 8, 8] = rope(%19, %21)
    %24: f32[2, 8, 4], %25: f32[2, 8, 4] = split(%23)
    %26: f32[2, 8, 16] = concat(%24, %24, %25, %25)
    %27: f32[2, 8, 4] = scatter(%26)
    %28: f32[2, 8, 4], %29: f32[2, 8, 4] = split(%20)
    %30: f32[2, 8, 16] = concat(%28, %28, %29, %29)
    %31: f32[2, 8, 4] = scatter(%30)
    %32: f32[2, 8, 4], %33: f32[2, 1, 8] = attention(%22, %27, %31)
    %34: f32[2, 8, 16] = linear(%32, self_attn.o_proj.weight[16, 4])
    %35: f32[2, 8, 16] = all_reduce(%34)
    %36: f32[2, 8, 16] = add(%35, %14)
    %37: f32[2, 8, 16], %38: f32[16] = rms_norm(%36, post_attention_layernorm.weight[16])
    %39: f32[2, 8, 16] = copy_to(%37)
    %40: f32[2, 8, 6] = linear(%39, mlp.gate_proj.weight[6, 16])
    %41: f32[2, 8, 6] = linear(%39, mlp.up_proj.weight[6, 16])
    %42: f32[2, 8, 6] = silu_mul(%40, %41)
    %43: f32[2, 8, 16] = linear(%42, mlp.down_proj.weight[16, 6])
    %44: f32[2, 8, 16] = all_reduce(%43)
    %45: f32[2, 8, 16] = add(%44, %36)
    ");
    insta::assert_snapshot!(split.report.to_string(), @r#"
    tensor parallel over 4 ranks: 5 layers split
      col model.layers.0.self_attn.q_proj  16 -> 16  (col_para_list "self_attn.q_proj")
      row model.layers.0.self_attn.o_proj  16 -> 16  (row_para_list "self_attn.o_proj")
      col model.layers.0.mlp.gate_proj     16 -> 24  (col_para_list "gate_proj")
      col model.layers.0.mlp.up_proj       16 -> 24  (col_para_list "up_proj")
      row model.layers.0.mlp.down_proj     24 -> 16  (row_para_list "down_proj")
      whole model.layers.0.self_attn.k_proj: 2 key/value heads are repeated over 4 ranks
      whole model.layers.0.self_attn.v_proj: 2 key/value heads are repeated over 4 ranks
      forward all_reduce: 2 per microbatch, 2048 bytes
      backward all_gather: 2 per microbatch, 2048 bytes
      backward all_reduce: 2 per microbatch, 2048 bytes
    "#);
}

#[test]
fn a_fused_projection_is_placed_in_three_parts() {
    let split = split_model(&gpt2(1, 0.0, true), &TraceOptions::training(2, 8), 2);
    let placement = |name: &str| {
        let id = split.graph.find_param(name).unwrap();
        split.graph.param(id).placements.on(Axis::Tensor).clone()
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
            Op::Attention(spec) => Some((node.name.to_string(), spec.dropout?)),
            Op::Dropout(dropout) => Some((node.name.to_string(), *dropout)),
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
    let heads = Some(AxisSlice::new(Axis::Tensor, 1, 4));
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
        let names: std::collections::BTreeSet<_> = split
            .nodes()
            .iter()
            .map(|node| node.name.to_string())
            .collect();
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
    let shapes = shapes(&split.graph);
    assert!(shapes.contains(&"linear [1, 2048, 4608]".to_owned()));
}

#[test]
fn the_cuts_of_one_rank_are_those_of_several() {
    for (family, config) in [("gpt2", gpt2(2, 0.1, true)), ("llama", llama(2, 2, 0.0))] {
        let graph = model(&config).trace(&TraceOptions::training(2, 8)).unwrap();
        let lists = default_lists(family).unwrap();
        let cuts = cuts(&graph, &lists).unwrap();
        assert!(!cuts.is_empty());
        for param in rewrite(&graph, &lists, 2).unwrap().graph.params() {
            let expected = param.placements.on(Axis::Tensor).as_shard();
            assert_eq!(cuts.get(&param.name), expected, "{}", param.name);
        }
    }
    let graph = model(&gpt2(1, 0.0, true))
        .trace(&TraceOptions::training(1, 4))
        .unwrap();
    for nothing in [
        LayerLists::default(),
        LayerLists::col_row(["other"], ["another"]),
    ] {
        assert!(cuts(&graph, &nothing).unwrap().is_empty());
    }
}
