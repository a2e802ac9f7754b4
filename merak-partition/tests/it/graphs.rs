//! Laws over random graphs.

use merak_partition::{
    Error, Partition, SegmentOptions, Segments, SplitMethod, StageMethod, segment,
};
use merak_trace::{
    DType, Graph, Init, NodeId, Op, RecomputePlan, StageProgram, TensorType, ValueId, fx,
    op::{Activation, WeightLayout},
};
use proptest::prelude::*;
use std::collections::BTreeSet;

const WIDTH: usize = 4;

/// What a node does with earlier values, given by how far back they lie.
#[derive(Debug, Clone)]
enum Step {
    Linear(usize),
    /// A linear layer with the weight that all such layers share.
    Tied(usize),
    Add(usize, usize),
    Gelu(usize),
    Embed,
    Positions,
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        4 => (0_usize..6).prop_map(Step::Linear),
        1 => (0_usize..6).prop_map(Step::Tied),
        3 => (0_usize..6, 0_usize..6).prop_map(|(a, b)| Step::Add(a, b)),
        2 => (0_usize..6).prop_map(Step::Gelu),
        1 => Just(Step::Embed),
        1 => Just(Step::Positions),
    ]
}

/// A graph of `[1, 4, 4]` values.
fn build(steps: &[Step]) -> Graph {
    fx::trace(DType::F32, |root| {
        let ids = root.input("ids", TensorType::new([1, WIDTH], DType::I64));
        let mut values = vec![root.input("x", TensorType::new([1, WIDTH, WIDTH], DType::F32))];
        for (index, step) in steps.iter().enumerate() {
            let module = root.sub(&format!("m.{index}"));
            let back = |distance: &usize| {
                values[values.len() - 1 - distance.min(&(values.len() - 1))].clone()
            };
            let linear = |name: &str, x| {
                root.sub(name)
                    .linear(&x, WIDTH, WeightLayout::OutIn, false, Init::Normal(1.0))
            };
            values.push(match step {
                Step::Linear(x) => linear(&format!("m.{index}"), back(x))?,
                Step::Tied(x) => linear("tied", back(x))?,
                Step::Add(a, b) => module.add(&back(a), &back(b))?,
                Step::Gelu(x) => module.activation(&back(x), Activation::GeluTanh)?,
                Step::Embed => module.embedding(&ids, 7, WIDTH, Init::Normal(1.0))?.0,
                Step::Positions => {
                    let positions = module.positions(WIDTH)?;
                    let (table, _) =
                        module.embedding(&positions, WIDTH, WIDTH, Init::Normal(1.0))?;
                    module.add(&back(&0), &table)?
                }
            });
        }
        let last = values.len() - 1;
        root.output("y", &values[last]);
        Ok(())
    })
    .expect("all values have one shape")
}

fn method() -> impl Strategy<Value = SplitMethod> {
    prop::sample::select(SplitMethod::ALL.to_vec())
}

fn options(method: SplitMethod, num_stages: usize, target: usize) -> SegmentOptions {
    SegmentOptions {
        method,
        num_stages,
        target_segments: Some(target.max(num_stages)),
        split_points: vec!["m.{i}".to_owned()],
        ..SegmentOptions::default()
    }
}

/// Segments of a graph, or none where it has too few.
fn cut(graph: &Graph, options: &SegmentOptions) -> Option<Segments> {
    let result = segment(graph, options);
    let too_few = matches!(
        result,
        Err(Error::TooFewSegments { .. }
            | Error::NoLegalCut { .. }
            | Error::UnknownSplitPoint { .. }
            | Error::UnknownLeaf { .. })
    );
    if too_few {
        None
    } else {
        Some(result.expect("nothing else is wrong with the options"))
    }
}

/// The values that a cut counts, found the slow way.
fn counted(graph: &Graph, border: usize) -> usize {
    let users = |value: ValueId| {
        graph
            .node_ids()
            .filter(|&id| graph.node(id).inputs.contains(&value))
            .collect::<BTreeSet<NodeId>>()
    };
    let results = graph.nodes()[..border]
        .iter()
        .flat_map(|node| node.outputs.clone());
    let crossing = results.filter(|&value| users(value).iter().any(|user| user.index() >= border));
    crossing
        .filter(|&value| users(value).len() <= 5 && depends_on_params(graph, value))
        .count()
}

fn depends_on_params(graph: &Graph, value: ValueId) -> bool {
    graph.param_of(value).is_some()
        || graph.producer(value).is_some_and(|node| {
            graph
                .node(node)
                .inputs
                .iter()
                .any(|&input| depends_on_params(graph, input))
        })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]

    #[test]
    fn no_cut_enters_a_module_that_stays_whole(
        steps in prop::collection::vec(step(), 1..24), method in method(), num_stages in 1_usize..7, shards in 1_usize..9,
        whole in 0_usize..32,
    ) {
        let graph = build(&steps);
        // `tied` is called in several places, with other modules between them.
        let name = match whole {
            whole if whole < steps.len() => format!("m.{whole}"),
            24.. => "tied".to_owned(),
            _ => "m".to_owned(),
        };
        let options = SegmentOptions {
            leaf_modules: vec![name.clone()],
            ..options(method, num_stages, shards)
        };
        let Some(segments) = cut(&graph, &options) else { return Ok(()) };
        let is_within = |scope: &str| scope == name || scope.starts_with(&format!("{name}."));
        let nodes = (0..graph.nodes().len()).filter(|&index| is_within(&graph.nodes()[index].scope));
        let holders: BTreeSet<_> = nodes
            .map(|index| segments.bounds.partition_point(|&bound| bound <= index))
            .collect();
        prop_assert!(holders.len() <= 1, "{holders:?}: {segments:?}");
    }

    #[test]
    fn segments_cover_each_node_once_and_hold_all_parameters(
        steps in prop::collection::vec(step(), 1..24), method in method(), num_stages in 1_usize..7, shards in 1_usize..9,
    ) {
        let graph = build(&steps);
        let Some(segments) = cut(&graph, &options(method, num_stages, shards)) else { return Ok(()) };
        prop_assert!(segments.bounds.is_sorted_by(|a, b| a < b));
        prop_assert_eq!((segments.bounds[0], segments.bounds[segments.len()]), (0, graph.nodes().len()));
        prop_assert!(segments.len() >= num_stages);
        let used: BTreeSet<_> = graph.nodes().iter().flat_map(|node| &node.inputs).filter_map(|&input| graph.param_of(input)).collect();
        prop_assert_eq!(segments.params.iter().sum::<usize>(), used.iter().map(|&id| graph.param(id).full.numel()).sum::<usize>());
    }

    #[test]
    fn dependency_methods_never_cut_right_after_a_lookup(
        steps in prop::collection::vec(step(), 1..24), nearest in any::<bool>(), num_stages in 1_usize..7,
    ) {
        let graph = build(&steps);
        let method = if nearest { SplitMethod::NearestMinDeps } else { SplitMethod::FarthestMinDeps };
        let Some(segments) = cut(&graph, &options(method, num_stages, 4)) else { return Ok(()) };
        for &border in &segments.bounds[1..segments.len()] {
            let after_lookup = matches!(graph.nodes()[border - 1].op, Op::Embedding { .. });
            prop_assert!(!after_lookup);
        }
    }

    #[test]
    fn farthest_min_deps_cuts_where_one_counted_value_crosses(steps in prop::collection::vec(step(), 1..24), shards in 1_usize..9) {
        let graph = build(&steps);
        let segments = cut(&graph, &options(SplitMethod::FarthestMinDeps, 1, shards)).expect("one stage always fits");
        prop_assert_eq!(segments.refined, 0);
        for (index, &border) in segments.bounds[1..segments.len()].iter().enumerate() {
            prop_assert_eq!(counted(&graph, border), 1);
            // Parameter-free nodes stay with their producer wherever the next border would do as
            // well.
            let free = graph.nodes()[border].inputs.iter().all(|&input| graph.param_of(input).is_none());
            let next_is_cut_too = segments.bounds[index + 2] == border + 1;
            let after_lookup = matches!(graph.nodes()[border].op, Op::Embedding { .. });
            let better = free && !after_lookup && border + 1 < graph.nodes().len() && counted(&graph, border + 1) == 1;
            prop_assert!(!better || next_is_cut_too, "a later cut than {} is equivalent", border);
        }
    }

    #[test]
    fn every_method_gives_stages_that_can_be_differentiated(
        steps in prop::collection::vec(step(), 4..20), method in method(), num_stages in 1_usize..5, by_params in any::<bool>(),
    ) {
        let graph = build(&steps);
        let stage_method = if by_params { StageMethod::Parameters } else { StageMethod::UniformFloor };
        let options = options(method, num_stages, 6);
        let Ok(partition) = Partition::new(&graph, &options, &stage_method) else { return Ok(()) };
        let cuts = partition.cuts(&graph).expect("the cuts are the graph's own");
        let mut sent = Vec::new();
        for stage in 0..num_stages {
            let program = StageProgram::training(&graph, &cuts, stage, &RecomputePlan::default()).expect("each operation has a gradient");
            prop_assert!(!program.forward.is_empty());
            let received: Vec<_> = program.recv.iter().map(|hop| hop.name.clone()).collect();
            prop_assert_eq!(received, sent);
            sent = program.send.iter().map(|hop| hop.name.clone()).collect();
        }
        prop_assert!(sent.is_empty());
    }
}
