//! One small graph per rule.

use crate::support::{apply, input, linear, lists, shapes, split, trace};
use merak_tp::{Rewritten, rewrite};
use merak_trace::{
    Axis, Graph, Init, Op, ParamId, ParamRole, Placement,
    fx::{Module, Symbol},
    op::{Activation, Attention, AxisSlice, Rope, WeightLayout},
};

fn placement(split: &Rewritten, param: ParamId) -> Placement {
    split.graph.param(param).placements.on(Axis::Tensor).clone()
}

/// The operations after a column layer of 16 features over `[2, 3, 8]`, split in two, and before a
/// row layer.
fn between(middle: impl FnOnce(&Module, &Symbol) -> merak_trace::Result<Symbol>) -> Vec<String> {
    between_split(middle).1
}

fn between_split(
    middle: impl FnOnce(&Module, &Symbol) -> merak_trace::Result<Symbol>,
) -> (Rewritten, Vec<String>) {
    let split = split(2, |module| {
        let hidden = linear(module, "col", &input(module, &[2, 3, 8]), 16)?;
        let hidden = middle(module, &hidden)?;
        module.output("y", &linear(module, "row", &hidden, 8)?);
        Ok(())
    });
    let all = shapes(&split.graph);
    let end = all
        .iter()
        .rposition(|line| line.starts_with("linear"))
        .expect("the row layer");
    let lines = all[2..end].to_vec();
    (split, lines)
}

#[test]
fn one_copy_serves_all_column_layers_of_a_value() {
    let split = split(2, |module| {
        let x = input(module, &[2, 8]);
        let (a, b) = (
            linear(module, "col.a", &x, 16)?,
            linear(module, "col.b", &x, 16)?,
        );
        module.output("y", &linear(module, "row", &module.silu_mul(&a, &b)?, 8)?);
        Ok(())
    });
    let expected = [
        "copy_to [2, 8]",
        "linear [2, 8]",
        "linear [2, 8]",
        "silu_mul [2, 8]",
        "linear [2, 8]",
        "all_reduce [2, 8]",
        "add [2, 8]",
    ];
    assert_eq!(shapes(&split.graph), expected);
    // The input itself needs no gradient, so nothing is reduced backward.
    assert!(
        split
            .report
            .collectives
            .iter()
            .all(|traffic| !traffic.backward)
    );
}

#[test]
fn only_gradients_of_what_is_trained_are_reduced() {
    let mut model = trace(|module| {
        let x = linear(module, "before", &input(module, &[2, 8]), 8)?;
        let x = linear(module, "row", &linear(module, "col", &x, 16)?, 8)?;
        module.output("y", &x);
        Ok(())
    });
    let reduced = |model: &Graph| {
        let split = rewrite(model, &lists(), 2).unwrap();
        let backward = split.report.collectives.iter().filter(|part| part.backward);
        backward.map(|part| part.bytes).sum::<usize>()
    };
    assert_eq!(reduced(&model), 2 * 8 * 4, "the input of the column layer");
    for name in ["before.weight", "before.bias"] {
        let id = model.find_param(name).unwrap();
        model.param_mut(id).trainable = false;
    }
    assert_eq!(reduced(&model), 0, "nothing before it is trained");
}

#[test]
fn a_row_layer_adds_its_bias_once_after_the_sum() {
    let split = split(2, |module| {
        let x = linear(module, "col", &input(module, &[2, 8]), 16)?;
        let y = module
            .sub("row")
            .linear(&x, 8, WeightLayout::InOut, false, Init::Normal(0.02))?;
        module.output("y", &y);
        Ok(())
    });
    assert_eq!(
        shapes(&split.graph)[2..],
        ["linear [2, 8]", "all_reduce [2, 8]"]
    );
    let weight = split.graph.find_param("row.weight").unwrap();
    assert_eq!(placement(&split, weight), Placement::shard(0, 16));
}

#[test]
fn a_row_layer_slices_a_whole_operand() {
    let split = split(2, |module| {
        module.output("y", &linear(module, "row", &input(module, &[2, 8]), 4)?);
        Ok(())
    });
    assert_eq!(
        shapes(&split.graph),
        [
            "scatter [2, 4]",
            "linear [2, 4]",
            "all_reduce [2, 4]",
            "add [2, 4]"
        ]
    );
}

#[test]
fn a_split_output_of_the_model_is_gathered_and_reported() {
    let split = split(2, |module| {
        module.output("y", &linear(module, "col", &input(module, &[2, 8]), 4)?);
        Ok(())
    });
    assert_eq!(
        shapes(&split.graph),
        ["copy_to [2, 8]", "linear [2, 2]", "all_gather [2, 4]"]
    );
    let gather = &split.report.gathers[0];
    assert_eq!(
        (
            gather.value.as_str(),
            gather.needed_by.as_str(),
            gather.bytes
        ),
        ("col.linear", "output y", 32)
    );
}

#[test]
fn elementwise_operations_keep_the_split() {
    let lines = between(|module, x| {
        let x = module.activation(x, Activation::Relu)?;
        let x = apply(module, Op::Scale { factor: 2.0 }, &[&x])?;
        module.add(&x, &x)
    });
    assert_eq!(
        lines,
        ["relu [2, 3, 8]", "scale [2, 3, 8]", "add [2, 3, 8]"]
    );
}

#[test]
fn a_vector_added_to_split_features_is_split_with_them() {
    let (split, lines) = between_split(|module, x| {
        let shift = module.param("shift", &[16], Init::Constant(0.5), ParamRole::Bias)?;
        module.add(x, &shift)
    });
    assert_eq!(lines, ["add [2, 3, 8]"]);
    let shift = split.graph.find_param("shift").unwrap();
    assert_eq!(placement(&split, shift), Placement::shard(0, 16));
}

#[test]
fn a_whole_value_is_sliced_to_meet_a_split_one() {
    let lines = between(|module, x| {
        let table = module.sub("plain").linear(
            &module.input("w", x.ty().with_dim(2, 4)),
            16,
            WeightLayout::OutIn,
            false,
            Init::Normal(1.0),
        )?;
        module.mul(&table, x)
    });
    assert_eq!(
        lines,
        ["linear [2, 3, 16]", "scatter [2, 3, 8]", "mul [2, 3, 8]"]
    );
}

#[test]
fn dropout_draws_a_slice_of_the_whole_mask() {
    let (split, lines) = between_split(|module, x| module.dropout(x, 0.1));
    assert_eq!(lines, ["dropout [2, 3, 8]"]);
    let slice = split.graph.nodes().iter().find_map(|node| {
        if let Op::Dropout(d) = &node.op {
            d.slice
        } else {
            None
        }
    });
    assert_eq!(slice, Some(AxisSlice::new(Axis::Tensor, 2, 16)));
}

#[test]
fn a_norm_over_split_features_gathers_them() {
    let (split, lines) = between_split(|module, x| module.sub("ln").layer_norm(x, 1e-5));
    assert_eq!(
        lines,
        [
            "all_gather [2, 3, 16]",
            "layer_norm [2, 3, 16]",
            "scatter [2, 3, 8]"
        ]
    );
    assert_eq!(split.report.gathers[0].needed_by, "ln.layer_norm");
}

#[test]
fn a_norm_within_split_heads_stays_local_and_sums_the_gradient_of_its_weight() {
    let lines = between(|module, x| {
        let heads = module.reshape(x, &[2, 3, 4, 4])?;
        let heads = module.sub("norm").rms_norm(&heads, 1e-5)?;
        module.reshape(&heads, &[2, 3, 16])
    });
    assert_eq!(
        lines,
        [
            "reshape [2, 3, 2, 4]",
            "identity [4]",
            "copy_to [4]",
            "rms_norm [2, 3, 2, 4]",
            "reshape [2, 3, 8]"
        ]
    );
}

#[test]
fn a_reshape_that_breaks_slices_up_gathers_first() {
    let lines = between(|module, x| {
        let x = module.reshape(x, &[2, 3, 1, 16])?;
        let x = module.reshape(&x, &[2, 48])?;
        module.reshape(&x, &[2, 3, 16])
    });
    assert_eq!(
        lines[..3],
        [
            "reshape [2, 3, 1, 8]",
            "all_gather [2, 3, 1, 16]",
            "reshape [2, 48]"
        ]
    );
}

#[test]
fn transposed_dimensions_carry_their_split() {
    let lines = between(|module, x| {
        let x = apply(
            module,
            Op::Transpose {
                perm: vec![0, 2, 1],
            },
            &[x],
        )?;
        let x = apply(module, Op::Softmax, &[&x])?;
        apply(
            module,
            Op::Transpose {
                perm: vec![0, 2, 1],
            },
            &[&x],
        )
    });
    assert_eq!(
        lines,
        [
            "transpose [2, 8, 3]",
            "softmax [2, 8, 3]",
            "transpose [2, 3, 8]"
        ]
    );
}

#[test]
fn pieces_of_a_fused_layer_are_split_one_by_one() {
    let (split, lines) = between_split(|module, x| {
        let pieces = module.split(x, 2, &[4, 12])?;
        apply(module, Op::Concat { dim: 2 }, &[&pieces[1], &pieces[0]])
    });
    assert_eq!(lines, ["split [2, 3, 2]", "concat [2, 3, 8]"]);
    assert_eq!(split.report.modules[0].parts, 2);
    // The row layer's matrix is cut in the order in which the pieces arrive.
    let weight = split.graph.find_param("row.weight").unwrap();
    let shard = placement(&split, weight);
    assert_eq!(shard.as_shard().unwrap().parts, [12, 4]);
}

#[test]
fn a_cut_across_a_slice_gathers_first() {
    let lines = between(|module, x| {
        let x = module.activation(x, Activation::Tanh)?;
        let pieces = module.split(&x, 2, &[6, 10])?;
        apply(module, Op::Concat { dim: 2 }, &[&pieces[1], &pieces[0]])
    });
    assert_eq!(
        lines[..3],
        ["tanh [2, 3, 8]", "all_gather [2, 3, 16]", "split [2, 3, 6]"]
    );
}

#[test]
fn a_product_over_split_features_is_summed() {
    let (split, lines) = between_split(|module, x| {
        let scores = apply(
            module,
            Op::MatMul {
                transpose_a: false,
                transpose_b: true,
            },
            &[x, x],
        )?;
        let mixed = apply(
            module,
            Op::MatMul {
                transpose_a: false,
                transpose_b: false,
            },
            &[&scores, x],
        )?;
        module.add(&mixed, x)
    });
    assert_eq!(
        lines,
        [
            "matmul [2, 3, 3]",
            "all_reduce [2, 3, 3]",
            "copy_to [2, 3, 3]",
            "matmul [2, 3, 8]",
            "add [2, 3, 8]"
        ]
    );
    assert!(split.report.gathers.is_empty());
}

#[test]
fn sums_of_split_values_are_summed_over_ranks() {
    let split = split(2, |module| {
        let x = linear(module, "col", &input(module, &[2, 8]), 4)?;
        module.output(
            "per feature",
            &apply(module, Op::SumLeading { shape: vec![4] }, &[&x])?,
        );
        module.output("all", &apply(module, Op::SumAll, &[&x])?);
        let turned = apply(module, Op::Transpose { perm: vec![1, 0] }, &[&x])?;
        module.output(
            "per sample",
            &apply(module, Op::SumLeading { shape: vec![2] }, &[&turned])?,
        );
        Ok(())
    });
    let expected = [
        "sum_leading [2]",
        "sum_all []",
        "all_reduce []",
        "transpose [2, 2]",
        "sum_leading [2]",
        "all_reduce [2]",
        "all_gather [4]",
    ];
    assert_eq!(shapes(&split.graph)[2..], expected);
}

#[test]
fn a_layer_that_no_list_names_gets_whole_rows() {
    let lines = between(|module, x| linear(module, "plain", x, 16));
    assert_eq!(
        lines,
        [
            "all_gather [2, 3, 16]",
            "linear [2, 3, 16]",
            "scatter [2, 3, 8]"
        ]
    );
}

#[test]
fn a_layer_that_no_list_names_works_on_the_rows_that_a_rank_has() {
    let lines = between(|module, x| {
        let heads = module.reshape(x, &[2, 3, 4, 4])?;
        let heads = linear(module, "plain", &heads, 4)?;
        module.reshape(&heads, &[2, 3, 16])
    });
    let expected = [
        "reshape [2, 3, 2, 4]",
        "identity [4, 4]",
        "copy_to [4, 4]",
        "identity [4]",
        "copy_to [4]",
        "linear [2, 3, 2, 4]",
        "reshape [2, 3, 8]",
    ];
    assert_eq!(lines, expected);
}

fn spec(heads: usize, kv_heads: usize) -> Attention {
    Attention {
        heads,
        kv_heads,
        head_dim: 4,
        scale: 0.5,
        causal: true,
        ..Attention::default()
    }
}

#[test]
fn attention_splits_heads_and_slices_whole_keys() {
    let (split, lines) = between_split(|module, x| {
        module.attention(
            x,
            &module.input("k", x.ty().clone()),
            &module.input("v", x.ty().clone()),
            &spec(4, 4),
            0.1,
        )
    });
    assert_eq!(
        lines,
        [
            "scatter [2, 3, 8]",
            "scatter [2, 3, 8]",
            "attention [2, 3, 8]"
        ]
    );
    let Op::Attention(local) = &split.graph.nodes()[4].op else {
        panic!("the attention")
    };
    assert_eq!((local.heads, local.kv_heads), (2, 2));
    assert_eq!(
        local
            .dropout
            .and_then(|dropout| dropout.slice)
            .map(|slice| (slice.dim, slice.full)),
        Some((1, 4))
    );
}

#[test]
fn attention_shares_a_key_head_among_ranks() {
    let lines = between(|module, x| {
        let kv = module.input("kv", x.ty().with_dim(2, 4));
        module.attention(x, &kv, &kv, &spec(4, 1), 0.0)
    });
    assert_eq!(
        lines,
        [
            "split [2, 3, 4]",
            "concat [2, 3, 8]",
            "scatter [2, 3, 4]",
            "attention [2, 3, 8]"
        ]
    );
}

#[test]
fn key_layers_with_fewer_heads_than_ranks_stay_whole() {
    let split = split(2, |module| {
        let x = input(module, &[2, 3, 8]);
        let positions = module.positions(3)?;
        let rope = Rope {
            head_dim: 4,
            inv_freq: vec![1.0, 0.1],
            scale: 1.0,
            inverse: false,
        };
        let q = module.rope(&linear(module, "col.q", &x, 16)?, &positions, rope.clone())?;
        let k = module.rope(&linear(module, "col.k", &x, 4)?, &positions, rope)?;
        let v = linear(module, "col.v", &x, 4)?;
        let mixed = module.attention(&q, &k, &v, &spec(4, 1), 0.0)?;
        module.output("y", &linear(module, "row", &mixed, 8)?);
        Ok(())
    });
    let kept: Vec<_> = split
        .report
        .kept_whole
        .iter()
        .map(|kept| kept.module.as_str())
        .collect();
    assert_eq!(kept, ["col.k", "col.v"]);
    assert!(split.report.gathers.is_empty());
    let all = shapes(&split.graph);
    assert!(
        all.contains(&"rope [2, 3, 8]".to_owned()) && all.contains(&"rope [2, 3, 4]".to_owned()),
        "{all:?}"
    );
}

#[test]
fn a_fused_projection_with_one_key_head_gathers_what_it_cannot_split() {
    let (split, _) = between_split(|module, x| {
        let pieces = module.split(x, 2, &[8, 4, 4])?;
        let mixed = module.attention(&pieces[0], &pieces[1], &pieces[2], &spec(2, 1), 0.0)?;
        linear(module, "col.up", &mixed, 16)
    });
    let gathers: Vec<_> = split
        .report
        .gathers
        .iter()
        .map(|gather| gather.needed_by.as_str())
        .collect();
    assert_eq!(gathers, ["attention", "attention", "col.up.linear"]);
}

#[test]
fn rotary_positions_need_whole_heads() {
    let rope = |head_dim: usize| Rope {
        head_dim,
        inv_freq: vec![1.0; head_dim / 2],
        scale: 1.0,
        inverse: false,
    };
    let turned =
        |head_dim| between(|module, x| module.rope(x, &module.positions(3)?, rope(head_dim)));
    assert_eq!(turned(8), ["positions [3]", "rope [2, 3, 8]"]);
    assert_eq!(
        turned(16),
        [
            "positions [3]",
            "all_gather [2, 3, 16]",
            "rope [2, 3, 16]",
            "scatter [2, 3, 8]"
        ]
    );
}

#[test]
fn a_tied_matrix_that_is_whole_elsewhere_is_sliced_where_it_is_split() {
    let graph = trace(|module| {
        let ids = module.input(
            "ids",
            merak_trace::TensorType::new([2, 3], merak_trace::DType::I64),
        );
        let (x, table) = module
            .sub("wte")
            .embedding(&ids, 12, 8, Init::Normal(1.0))?;
        let logits = module
            .sub("col_head")
            .linear_with(&x, &table, WeightLayout::OutIn)?;
        module.output("logits", &logits);
        Ok(())
    });
    let mut lists = lists();
    lists.row_para_list = vec!["row".into()];
    let split = rewrite(&graph, &lists, 2).unwrap();
    let expected = [
        "embedding [2, 3, 8]",
        "copy_to [2, 3, 8]",
        "identity [12, 8]",
        "scatter [6, 8]",
        "linear [2, 3, 6]",
        "all_gather [2, 3, 12]",
    ];
    assert_eq!(shapes(&split.graph), expected);
    let placements = &split.graph.params()[0].placements;
    assert_eq!(*placements.on(Axis::Tensor), Placement::Replicate);
}
