//! Which nodes of a split model run on halves of the microbatch, and in which order.

use crate::{
    run::{recorded, tensor},
    support::{gpt2, model},
};
use merak_mpu::testing::Moment;
use merak_tp::{default_lists, rewrite};
use merak_trace::{
    DType, Graph, Node, NodeId, Op, Overlap, RecomputePlan, StageCuts, StageProgram, Step,
    models::TraceOptions,
};
use std::collections::BTreeMap;

/// A GPT-2 of two layers on one of two tensor-parallel ranks.
fn graph(overlap: Overlap, samples: usize) -> Graph {
    let options = TraceOptions {
        dtype: DType::F64,
        ..TraceOptions::training(samples, 8)
    };
    let whole = model(&gpt2(2, 0.1, true)).trace(&options);
    let whole = whole.expect("the sizes fit").with_overlap(overlap);
    let lists = default_lists("gpt2").expect("the family has defaults");
    let split = rewrite(&whole, &lists, 2).expect("it can be split");
    assert_eq!(split.graph.overlap(), overlap);
    split.graph
}

/// Its program.
fn program(overlap: Overlap, samples: usize) -> StageProgram {
    let (graph, plan) = (graph(overlap, samples), RecomputePlan::default());
    let program = StageProgram::training(&graph, &StageCuts::whole(&graph), 0, &plan);
    program.expect("operations have gradients")
}

/// How often each node runs on the whole, on the first and on the second half.
fn runs(steps: &[Step]) -> BTreeMap<NodeId, [usize; 3]> {
    let mut runs: BTreeMap<_, [usize; 3]> = BTreeMap::new();
    for step in steps {
        match *step {
            Step::Whole(node) => runs.entry(node).or_default()[0] += 1,
            Step::Half(node, half) => runs.entry(node).or_default()[1 + half] += 1,
            Step::Wait => {}
        }
    }
    runs
}

#[test]
fn every_node_runs_once_on_all_samples() {
    for overlap in [
        Overlap::None,
        Overlap::Linear,
        Overlap::Block,
        Overlap::Blocks,
    ] {
        let program = program(overlap, 3);
        for nodes in [&program.forward, &program.backward] {
            let runs = runs(&program.steps(nodes));
            assert_eq!(runs.len(), nodes.len(), "{overlap:?}");
            let once = |runs: &[usize; 3]| [[1, 0, 0], [0, 1, 1]].contains(runs);
            assert!(runs.values().all(once), "{overlap:?}");
        }
    }
}

#[test]
fn one_half_computes_while_the_sum_of_the_other_passes() {
    let program = program(Overlap::Blocks, 2);
    for (nodes, sums) in [(&program.forward, 4), (&program.backward, 4)] {
        let steps = program.steps(nodes);
        assert!(!steps.contains(&Step::Wait));
        let is_sum = |id: &NodeId| matches!(program.graph.node(*id).op, Op::AllReduce { .. });
        let halves = steps
            .iter()
            .enumerate()
            .filter_map(|(at, step)| match step {
                Step::Half(node, half) if is_sum(node) => Some((at, *half, *node)),
                _ => None,
            });
        let halves: Vec<_> = halves.collect();
        assert_eq!(halves.len(), 2 * sums);
        for pair in halves.chunks(2) {
            let [(first, 0, node), (second, 1, other)] = *pair else {
                panic!("{pair:?}");
            };
            assert_eq!(node, other);
            // All between them run on the second half.
            let between = &steps[first + 1..second];
            assert!(
                between.iter().all(|step| matches!(step, Step::Half(_, 1))) && !between.is_empty()
            );
        }
    }
    // Sums over samples of the weights of split layers run on halves too.
    let runs = runs(&program.steps(&program.backward));
    let is_weight = |id: &NodeId| matches!(program.graph.node(*id).op, Op::LinearGradWeight { .. });
    let weights = runs.iter().filter(|(id, _)| is_weight(id));
    let (halved, whole): (Vec<_>, Vec<_>) = weights.partition(|(_, runs)| runs[0] == 0);
    assert_eq!(
        (halved.len(), whole.len()),
        (8, 1),
        "the head is no split layer"
    );
}

#[test]
fn levels_wait_at_the_borders_of_layers_or_halve_products_alone() {
    let of_layers = program(Overlap::Block, 2);
    let waits = |nodes: &[NodeId]| {
        let steps = of_layers.steps(nodes);
        steps.iter().filter(|step| **step == Step::Wait).count()
    };
    assert_eq!(
        (waits(&of_layers.forward), waits(&of_layers.backward)),
        (2, 2)
    );
    let of_products = program(Overlap::Linear, 2);
    for nodes in [&of_products.forward, &of_products.backward] {
        let steps = of_products.steps(nodes);
        let halves = steps.iter().filter_map(|step| match step {
            Step::Half(node, 0) => Some(of_products.graph.node(*node).op.name()),
            _ => None,
        });
        let mut names: Vec<_> = halves.collect();
        names.dedup();
        assert_eq!(names.len(), 8, "four products and sums: {names:?}");
        assert!(
            names
                .chunks(2)
                .all(|pair| pair[0].starts_with("linear") && pair[1] == "all_reduce")
        );
    }
}

#[test]
fn gradients_of_weights_come_after_the_sum_of_their_layer() {
    let program = program(Overlap::Linear, 2);
    let place = |id: NodeId| program.backward.iter().position(|&other| other == id);
    let mut behind = 0;
    for (at, &id) in program.backward.iter().enumerate() {
        let node = program.graph.node(id);
        if !matches!(node.op, Op::AllReduce { .. }) {
            continue;
        }
        let product = program.graph.producer(node.inputs[0]).expect("a node");
        let grad = program.graph.node(product).inputs[0];
        let readers = program.graph.node_ids().filter(|&id| {
            let node = program.graph.node(id);
            matches!(node.op, Op::LinearGradWeight { .. }) && node.inputs.contains(&grad)
        });
        for reader in readers {
            assert!(
                place(reader) > Some(at),
                "{}",
                program.graph.node(reader).name
            );
            behind += 1;
        }
    }
    assert_eq!(behind, 4);
}

/// The most collectives that were under way at once, and how often the last one under way ended.
fn pending(events: &[Moment]) -> (usize, usize) {
    let (mut under_way, mut most, mut idle) = (0, 0, 0);
    for event in events {
        match event {
            Moment::Started => under_way += 1,
            Moment::Ended => under_way -= 1,
        }
        most = most.max(under_way);
        idle += usize::from(under_way == 0);
    }
    (most, idle)
}

#[test]
fn an_interpreter_waits_for_sums_where_their_level_does_and_no_earlier() {
    let layers = |graph: &Graph| {
        let is_of = |node: &Node, layer: usize| node.layer() == format!("transformer.h.{layer}");
        let nodes = || graph.nodes().iter();
        let chunks = [0, 1].map(|layer| {
            let first = nodes().position(|node| is_of(node, layer));
            let last = nodes().rposition(|node| is_of(node, layer));
            first.expect("it has nodes")..last.expect("it has nodes") + 1
        });
        RecomputePlan {
            chunks: chunks.into(),
            ..RecomputePlan::default()
        }
    };
    // A layer has two sums forward and two backward. Recomputed, it has the first one again: no
    // gradient needs what the second one gives. That of the first layer begins when the gradients
    // of the layer after it are there.
    for (recomputes, sums, borders, ends) in [(false, 8, 4, 2), (true, 10, 4, 3)] {
        for (overlap, expected) in [
            (Overlap::None, (1, sums)),
            (Overlap::Linear, (2, sums)),
            (Overlap::Block, (2, borders)),
            // The loss needs all samples.
            (Overlap::Blocks, (2, ends)),
        ] {
            let graph = graph(overlap, 2);
            let plan = if recomputes {
                layers(&graph)
            } else {
                RecomputePlan::default()
            };
            for record in recorded(&graph, tensor(2), &plan) {
                let events = record.take().into_iter();
                let events = events.filter(|event| event.group == "tensor");
                let events: Vec<_> = events.map(|event| event.moment).collect();
                let found = pending(&events);
                assert_eq!(found, expected, "{overlap:?} {recomputes} {events:?}");
                let halves = 1 + usize::from(overlap > Overlap::None);
                assert_eq!(events.len(), 2 * halves * sums, "{overlap:?} {recomputes}");
            }
        }
    }
}

#[test]
fn one_sample_has_no_halves() {
    let program = program(Overlap::Blocks, 1);
    let steps = program.steps(&program.forward);
    assert!(steps.iter().all(|step| matches!(step, Step::Whole(_))));
}
