//! L2 with sums over tensor-parallel ranks that pass while nodes run on halves of a microbatch.

use super::sp::check;
use crate::support::{Case, assert_same_tensors};
use merak_partition::{PhaseCosts, StepCosts};
use merak_trace::{
    Graph, Node, NodeId, Overlap, RecomputePlan, StageCuts, StageProgram, Step,
    models::{self, TraceOptions},
    op::{Collective, Cost},
};
use merak_trainer::{Plan, Workload};
use serde_json::json;
use std::ops::Range;

/// Two samples in each microbatch of two tensor-parallel ranks.
fn overlapping(case: &Case, level: usize) -> Case {
    let case = case.clone().on((1, 2, 1));
    case.with("tp_overlapping_level", level)
}

#[test]
fn every_family_trains_like_one_rank_on_every_level() {
    let decoders = [("gpt2", Case::gpt2()), ("llama", Case::llama())];
    for (_, case) in decoders.into_iter().chain(Case::relatives()) {
        let case = case.with_dropout(0.1);
        check(&case, &[1, 2, 3].map(|level| overlapping(&case, level)), 8);
    }
    for (_, case) in super::encoders::models() {
        check(&case, &[1, 2, 3].map(|level| overlapping(&case, level)), 4);
    }
}

/// The nodes of a stage that sum over ranks within a layer, and those of them that run on halves.
fn sums_of_layers(case: &Case) -> (Vec<String>, Vec<String>) {
    let graph = &case.plan().graph;
    let plan = RecomputePlan::default();
    let program = StageProgram::training(graph, &StageCuts::whole(graph), 0, &plan);
    let program = program.expect("operations have gradients");
    let is_sum = |id: &NodeId| {
        let node = program.graph.node(*id);
        let region = node.op.region().and_then(|region| region.kind.forward());
        let sums = region.is_some_and(Collective::reduces);
        // Gradients of vectors of a layer have no samples.
        let has_samples = program.graph.ty(node.outputs[0]).ndim() > 1;
        sums && has_samples && node.layer().contains(|c: char| c.is_ascii_digit())
    };
    let name = |id: NodeId| program.graph.node(id).name.to_string();
    let all = program.graph.node_ids().filter(is_sum).map(name).collect();
    let steps = [&program.forward, &program.backward].map(|nodes| program.steps(nodes));
    let halved = steps.concat().into_iter().filter_map(|step| match step {
        Step::Half(id, 0) if is_sum(&id) => Some(name(id)),
        _ => None,
    });
    (all, halved.collect())
}

#[test]
fn all_sums_of_layers_run_on_halves_in_every_family() {
    let decoders = [("gpt2", Case::gpt2()), ("llama", Case::llama())];
    let decoders = decoders.into_iter().chain(Case::relatives());
    let decoders = decoders.map(|(family, case)| (family, case.with_dropout(0.1)));
    for (family, case) in decoders.chain(super::encoders::models()) {
        for level in [1, 3] {
            let (mut all, mut halved) = sums_of_layers(&overlapping(&case, level));
            all.sort_unstable();
            halved.sort_unstable();
            assert_eq!(halved, all, "{family} on level {level}");
            assert!(!all.is_empty(), "{family}");
        }
    }
}

#[test]
fn all_other_degrees_and_recomputation_train_like_one_rank() {
    let case = Case::gpt2().with_dropout(0.1);
    let on = |level: usize, degrees| {
        let case = case.clone().on(degrees);
        case.with("tp_overlapping_level", level)
    };
    let cases = [
        overlapping(&case, 3).with("sequence_parallel", true),
        overlapping(&case, 2)
            .with("sequence_parallel", true)
            .with("parallel_vocab", true),
        overlapping(&case, 3).with("parallel_vocab", true),
        on(3, (2, 2, 1)).with("zero_stage", 3),
        on(1, (2, 2, 1)).with("zero_stage", 2),
        on(3, (1, 2, 2)).with("train_schedule", "zb_h1"),
        on(2, (1, 2, 2)),
        overlapping(&case, 3).with("activation_checkpointing", true),
        overlapping(&case, 2).with("recompute", "selective"),
        overlapping(&case, 3).sharing(2),
        overlapping(&case, 3).sharing(2).with("sp_method", "ring"),
        on(3, (1, 4, 1)),
    ];
    check(&case, &cases, 8);
}

#[test]
fn a_bucket_of_several_stages_of_a_rank_may_be_reduced_between_halves() {
    for case in [Case::gpt2(), Case::llama()] {
        let case = case.with_microbatches(8);
        let on = |level: usize, zero: usize, schedule| {
            let case = case.clone().on((2, 2, 2)).with("zero_stage", zero);
            let case = case.with("train_schedule", schedule);
            case.with("tp_overlapping_level", level)
        };
        let cases = [
            on(2, 2, "interleaved_1f1b").with("virtual_stages", 2),
            on(3, 3, "interleaved_1f1b").with("virtual_stages", 2),
            on(2, 3, "zb_v"),
            on(3, 2, "v_half"),
        ];
        check(&case, &cases, 4);
    }
}

#[test]
fn an_odd_number_of_samples_trains_and_evaluates_like_one_rank() {
    let bert = super::encoders::models().swap_remove(0).1;
    let evaluated = |case: &Case| case.on_ranks(|trainer| Ok(trainer.evaluate()?.eval_loss))[0];
    for case in [Case::gpt2().with_dropout(0.1), bert] {
        let case = case
            .with("per_device_train_batch_size", 3)
            .with("per_device_eval_batch_size", 3);
        let levels = [1, 2, 3].map(|level| overlapping(&case, level));
        check(&case, &levels, 4);
        let alone = evaluated(&case);
        for case in &levels {
            assert!(!sums_of_layers(case).1.is_empty(), "no halves in {case:?}");
            let gap = (evaluated(case) / alone - 1.0).abs();
            assert!(gap < 1e-6, "{gap:e} in {case:?}");
        }
    }
}

#[test]
fn a_run_has_the_same_bits_each_time() {
    let case = Case::llama().with_dropout(0.1);
    for level in [1, 2, 3] {
        let case = overlapping(&case, level);
        let (first, second) = (case.run(5), case.run(5));
        assert_same_tensors(&first.weights, &second.weights, "again");
    }
}

#[test]
fn activations_take_what_the_plan_foretells() {
    let case = Case::gpt2().with("activation_checkpointing", false);
    for level in [0, 1, 2, 3] {
        let case = overlapping(&case, level);
        let held = case.on_ranks(|trainer| {
            trainer.train_step()?;
            Ok(trainer.peak_activation_bytes())
        });
        let foretold = case.plan().memory(&case.arguments(), &[Workload::Training]);
        let foretold = foretold.expect("a legal plan")[0].activations;
        let ratio = held[0] as f64 / foretold as f64;
        assert!(
            (ratio - 1.0).abs() < 0.05,
            "level {level}: {ratio:.3} of it"
        );
    }
}

/// Flops for nodes, and a time for each byte of a collective, which needs no core.
#[derive(Debug)]
struct Wire {
    per_byte: f64,
}

impl StepCosts for Wire {
    fn node(&self, graph: &Graph, node: &Node) -> f64 {
        if node.op.communicates().is_some() {
            return self.per_byte * graph.ty(node.outputs[0]).size_bytes() as f64;
        }
        Cost::of(graph, node).flops as f64
    }

    fn message(&self, _: usize) -> f64 {
        0.0
    }

    fn collectives_pass_alone(&self) -> bool {
        true
    }

    fn update(&self, _: usize, _: usize) -> Option<f64> {
        Some(0.0)
    }

    fn unit(&self) -> &'static str {
        "flops"
    }
}

/// The nodes of each layer of a graph, as chunks to recompute.
fn layers(graph: &Graph) -> RecomputePlan {
    let mut chunks: Vec<Range<usize>> = Vec::new();
    let mut last = None;
    for (at, node) in graph.nodes().iter().enumerate() {
        let layer =
            Some(node.layer()).filter(|layer| layer.ends_with(|c: char| c.is_ascii_digit()));
        match chunks.last_mut() {
            Some(chunk) if layer.is_some() && layer == last => chunk.end = at + 1,
            _ => chunks.extend(layer.map(|_| at..at + 1)),
        }
        last = layer;
    }
    RecomputePlan {
        chunks,
        ..RecomputePlan::default()
    }
}

#[test]
fn costs_of_a_stage_count_what_no_node_hides_with_recomputation_and_without() {
    let model = json!({ "model_type": "gpt2", "vocab_size": 128, "n_positions": 64, "n_embd": 64, "n_layer": 4,
        "n_head": 4 });
    let model = models::from_config(&model).expect("a known family");
    let whole = model.trace(&TraceOptions::training(4, 64));
    let lists = merak_tp::default_lists("gpt2").expect("the family has defaults");
    let split = merak_tp::rewrite(&whole.expect("the sizes fit"), &lists, 2);
    let graph = split.expect("it can be split").graph;
    let recomputed = layers(&graph);
    assert_eq!(recomputed.chunks.len(), 4);
    for plan in [RecomputePlan::default(), recomputed] {
        let cost = |overlap, per_byte: f64| {
            let graph = graph.clone().with_overlap(overlap);
            let program = StageProgram::training(&graph, &StageCuts::whole(&graph), 0, &plan);
            let program = program.expect("operations have gradients");
            let costs = PhaseCosts::of(&program, &Wire { per_byte });
            assert_eq!(costs.recompute > 0.0, !plan.is_empty());
            costs.forward + costs.backward()
        };
        let compute = cost(Overlap::None, 0.0);
        // As much as half of the computing.
        let per_byte = compute / 2.0 / (cost(Overlap::None, 1.0) - compute);
        for (overlap, least) in [
            (Overlap::None, 0.0),
            (Overlap::Linear, 0.25),
            (Overlap::Block, 0.65),
            (Overlap::Blocks, 0.85),
        ] {
            let waited = cost(overlap, per_byte) - compute;
            let hidden = 1.0 - waited / (compute / 2.0);
            println!("{overlap:?}, {} chunks: {hidden:.3}", plan.chunks.len());
            assert!(hidden >= least - 1e-9, "{overlap:?} hides {hidden:.3}");
        }
    }
}

#[test]
fn predictions_count_what_nodes_hide_whatever_is_searched() {
    let case = Case::gpt2().with_dropout(0.1).on((1, 2, 2));
    for (key, value) in [
        ("partition_method", "uniform"),
        ("partition_method", "exact"),
        ("train_schedule", "auto"),
    ] {
        let step = |level: usize| {
            let case = case.clone().with(key, value);
            let case = case.with("tp_overlapping_level", level);
            // Sums take about half as long as the computing.
            let costs = Wire { per_byte: 40.0 };
            let plan = Plan::with_costs(&case.inputs(), &case.arguments(), &costs);
            let plan = plan.expect("the case can be planned");
            let prediction = plan.predict(&costs).expect("its stages have programs");
            prediction.expect("updates have a cost").step()
        };
        let (waiting, hiding) = (step(0), step(3));
        assert!(hiding < waiting, "{value}: {hiding} {waiting}");
    }
}
