//! No cut through a sum over ranks.

use merak_partition::{SegmentOptions, SplitMethod, segment};
use merak_trace::{
    Axis, DType, Graph, Init, Op, Param, ParamRole, Placement, Shard, TensorType, fx,
    op::{Activation, JoinedGrad, Reduction, WeightLayout},
};

const WIDTH: usize = 8;

/// A chain of blocks as a tensor-parallel rewrite leaves them: column, row, two linear operations
/// on the summand, all-reduce, bias; with `sliced` a gather in front of them and a reduce-scatter
/// after them. Without the open sums, every value but the copies could be cut.
fn chain(blocks: usize, sliced: bool) -> Graph {
    let axis = Axis::Tensor;
    let rows = Shard::new(0, vec![2]);
    let half = |name: String, shape: [usize; 2], dim: usize| {
        let full = TensorType::new(shape, DType::F32);
        let mut param = Param::new(name, full, Init::Normal(1.0), ParamRole::Weight);
        let placed = param.place(Axis::Tensor, Placement::shard(dim, shape[dim]), 2);
        placed.expect("the parameter has this dimension");
        param
    };
    let mut graph = Graph::new();
    let mut value = graph.add_input(
        "x",
        TensorType::new([if sliced { 1 } else { 2 }, WIDTH], DType::F32),
    );
    for block in 0..blocks {
        let scope = format!("block.{block}").into();
        let column = graph
            .add_param(half(format!("block.{block}.column"), [2 * WIDTH, WIDTH], 0))
            .expect("new name");
        let row = graph
            .add_param(half(format!("block.{block}.row"), [WIDTH, 2 * WIDTH], 1))
            .expect("new name");
        let bias = Param::new(
            format!("block.{block}.bias"),
            TensorType::new([WIDTH], DType::F32),
            Init::Constant(0.0),
            ParamRole::Bias,
        );
        let bias = graph.add_param(bias).expect("new name");
        let mut apply = |op, inputs| graph.add_node(&scope, op, inputs).expect("the types fit")[0];
        let linear = || Op::Linear {
            layout: WeightLayout::OutIn,
            bias: false,
        };
        let (begin, sum) = if sliced {
            let (shard, grad) = (rows.clone(), JoinedGrad::Summand);
            let begin = Op::AllGather { axis, shard, grad };
            let (shard, local) = (rows.clone(), 1);
            (begin, Op::ReduceScatter { axis, shard, local })
        } else {
            let op = Reduction::Sum;
            (Op::CopyTo { axis }, Op::AllReduce { axis, op })
        };
        value = apply(begin, vec![value]);
        value = apply(linear(), vec![value, column]);
        value = apply(Op::Activation(Activation::Relu), vec![value]);
        value = apply(linear(), vec![value, row]);
        value = apply(Op::Scale { factor: 0.5 }, vec![value]);
        value = apply(Op::Identity, vec![value]);
        value = apply(sum, vec![value]);
        value = apply(Op::Add, vec![value, bias]);
    }
    graph.add_output("y", value);
    graph
}

#[test]
fn a_partial_sum_stays_with_its_all_reduce_and_a_copy_with_its_users() {
    for sliced in [false, true] {
        stays_together(&chain(3, sliced));
    }
}

fn stays_together(graph: &Graph) {
    for method in [SplitMethod::FarthestMinDeps, SplitMethod::NearestMinDeps] {
        for num_stages in 1..=11 {
            let options = SegmentOptions {
                method,
                num_stages,
                target_segments: Some(100),
                ..SegmentOptions::default()
            };
            let segments = segment(graph, &options)
                .expect("a block has three legal cuts inside and one after");
            for &border in &segments.bounds[1..segments.len()] {
                let behind = graph.nodes()[border - 1].op.name();
                let is_row = behind == "linear" && graph.nodes()[border].op.name() == "scale";
                assert!(
                    !is_row && !["copy_to", "all_gather", "scale", "identity"].contains(&behind),
                    "{method} cuts behind {behind}"
                );
            }
        }
    }
}

#[test]
fn parameters_count_in_full_whatever_a_rank_holds() {
    let options = SegmentOptions {
        num_stages: 1,
        target_segments: Some(1),
        ..SegmentOptions::default()
    };
    let segments = segment(&chain(1, false), &options).unwrap();
    assert_eq!(
        segments.params.iter().sum::<usize>(),
        2 * 2 * WIDTH * WIDTH + WIDTH
    );
}

#[test]
fn a_layer_that_begins_inside_an_open_sum_begins_after_it() {
    let ty = TensorType::new([2, WIDTH], DType::F32);
    let graph = fx::trace(DType::F32, |root| {
        let x = root.input("x", ty.clone());
        let first =
            root.sub("h.0")
                .linear(&x, WIDTH, WeightLayout::OutIn, false, Init::Normal(1.0))?;
        let second =
            root.sub("h.1")
                .linear(&x, WIDTH, WeightLayout::OutIn, false, Init::Normal(1.0))?;
        let sum = root.add(&first, &second)?;
        let sum = root
            .apply(
                Op::AllReduce {
                    axis: Axis::Tensor,
                    op: Reduction::Sum,
                },
                &[&sum],
            )?
            .swap_remove(0);
        let y =
            root.sub("h.2")
                .linear(&sum, WIDTH, WeightLayout::OutIn, false, Init::Normal(1.0))?;
        root.output("y", &y);
        Ok(())
    });
    let mut graph = graph.expect("the types fit");
    for name in ["h.0.weight", "h.1.weight"] {
        let id = graph.find_param(name).expect("it was traced");
        let cut = Placement::shard(1, WIDTH);
        let placed = graph.param_mut(id).place(Axis::Tensor, cut, 1);
        placed.expect("the parameter has this dimension");
    }
    let points = ["h.1", "h.2"].map(str::to_owned).to_vec();
    let options = SegmentOptions {
        method: SplitMethod::LayerSplit,
        split_points: points,
        num_stages: 2,
        ..SegmentOptions::default()
    };
    assert_eq!(segment(&graph, &options).unwrap().bounds, [0, 4, 5]);
}
