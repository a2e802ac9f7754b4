//! The collectives of a layer, against closed forms and what ranks really exchange.

use crate::{
    run::{recorded, tensor, whole_bytes},
    support::{gpt2, llama, model, split_model},
};
use merak_tp::{LayerTraffic, Options, Rewritten, Sequence, Traffic, default_lists, rewrite_with};
use merak_trace::{
    Axis, DType, Graph, Op, RecomputePlan, StageCuts, StageProgram, models::TraceOptions,
};
use serde_json::Value as Json;
use std::{collections::BTreeMap, ops::Range};

/// Bytes of `[2, 8, 16]` in f32.
const HIDDEN: usize = 2 * 8 * 16 * 4;

fn traffic(graph: &Graph, plan: &RecomputePlan) -> Traffic {
    let program = StageProgram::training(graph, &StageCuts::whole(graph), 0, plan);
    Traffic::of([&program.expect("differentiable")], Axis::Tensor)
}

fn of_layers(traffic: &Traffic) -> impl Iterator<Item = &LayerTraffic> {
    traffic.layers.iter().filter(|row| is_layer(&row.layer))
}

fn is_layer(path: &str) -> bool {
    path.contains(|c: char| c.is_ascii_digit())
}

/// A chunk for each layer.
fn by_layers(graph: &Graph) -> RecomputePlan {
    let mut chunks: BTreeMap<_, Range<usize>> = BTreeMap::new();
    for (index, node) in graph.nodes().iter().enumerate() {
        if is_layer(node.layer()) {
            chunks.entry(node.layer()).or_insert(index..index).end = index + 1;
        }
    }
    RecomputePlan {
        chunks: chunks.into_values().collect(),
        ..RecomputePlan::default()
    }
}

/// A model split by the defaults of its family, its sequence cut between the regions.
fn cut_model(config: &Json, options: &TraceOptions, degree: usize) -> Rewritten {
    let model = model(config);
    let whole = model.trace(options).expect("the sizes fit");
    let lists = default_lists(model.info().family).expect("the family has defaults");
    let cut = Options::new(degree).with_sequence(Sequence::Cut { dim: 1 });
    rewrite_with(&whole, &cut.with_lists(lists)).expect("it can be split")
}

/// Two families, and ranks that share their layers.
fn cases() -> impl Iterator<Item = (Json, usize)> {
    let configs = [gpt2(2, 0.1, true), llama(2, 4, 0.0)].into_iter();
    configs.flat_map(|config| [2, 4].map(|degree| (config.clone(), degree)))
}

#[test]
fn a_layer_has_four_all_reduces_of_hidden_states() {
    for config in [gpt2(3, 0.1, true), llama(3, 4, 0.0)] {
        for degree in [2, 4] {
            let split = split_model(&config, &TraceOptions::training(2, 8), degree);
            let traffic = traffic(&split.graph, &RecomputePlan::default());
            for row in of_layers(&traffic) {
                let counts = [row.forward, row.recomputed, row.backward];
                assert_eq!((row.collective, counts), ("all_reduce", [2, 0, 2]));
                assert_eq!(row.bytes, 4 * HIDDEN);
            }
            assert_eq!(traffic.total()[0].bytes, split.report.bytes());
        }
    }
}

#[test]
fn recomputation_sums_again_what_the_backward_reads() {
    let split = split_model(&gpt2(3, 0.0, true), &TraceOptions::training(2, 8), 2);
    // One chunk for all layers.
    let nodes = split.graph.nodes().iter();
    let in_layers: Vec<_> = nodes.map(|node| node.scope.contains(".h.")).collect();
    let first = in_layers.iter().position(|is| *is).expect("it has layers");
    let end = in_layers.iter().rposition(|is| *is).expect("it has layers") + 1;
    let layers = first..end;
    let plan = RecomputePlan {
        chunks: [layers].into(),
        ..RecomputePlan::default()
    };
    let traffic = traffic(&split.graph, &plan);
    let again: Vec<_> = of_layers(&traffic).map(|row| row.recomputed).collect();
    // The result of the last layer leaves the chunk, so it is kept.
    assert_eq!(again, [2, 2, 1], "{traffic}");
    for row in of_layers(&traffic) {
        assert_eq!((row.forward, row.backward), (2, 2));
        assert_eq!(row.bytes, (4 + row.recomputed) * HIDDEN);
    }
}

#[test]
fn a_recomputed_layer_sums_once_more() {
    for (config, degree) in cases() {
        let split = split_model(&config, &TraceOptions::training(2, 8), degree);
        let traffic = traffic(&split.graph, &by_layers(&split.graph));
        let rows: Vec<_> = of_layers(&traffic).collect();
        assert_eq!(rows.len(), 2, "{traffic}");
        let sums = rows
            .iter()
            .map(|row| row.forward + row.recomputed + row.backward);
        assert_eq!(sums.sum::<usize>(), 10, "8 where all is kept: {traffic}");
        for row in rows {
            // Not 2, 2 and 2, as where a whole layer runs again: its second sum feeds the input of
            // the next layer alone, which is kept.
            let counts = [row.forward, row.recomputed, row.backward];
            assert_eq!((row.collective, counts), ("all_reduce", [2, 1, 2]));
            assert_eq!(row.bytes, 5 * HIDDEN);
        }
    }
}

#[test]
fn frozen_layers_need_nothing_for_their_gradients() {
    let model = model(&gpt2(2, 0.0, true));
    let mut whole = model
        .trace(&TraceOptions::training(2, 8))
        .expect("the sizes fit");
    let names: Vec<_> = whole
        .params()
        .iter()
        .map(|param| param.name.clone())
        .collect();
    for name in names
        .iter()
        .filter(|name| !name.contains("h.1.") && !name.contains("ln_f"))
    {
        let id = whole.find_param(name).expect("it has it");
        whole.param_mut(id).trainable = false;
    }
    let lists = default_lists("gpt2").expect("it is known");
    let split = rewrite_with(&whole, &Options::new(2).with_lists(lists)).expect("it can be split");
    let traffic = traffic(&split.graph, &RecomputePlan::default());
    let backward = |layer: &str| {
        let mut rows = traffic
            .layers
            .iter()
            .filter(|row| row.layer.ends_with(layer));
        rows.next().expect("the layer communicates").backward
    };
    assert_eq!((backward("h.0"), backward("h.1")), (0, 2));
}

#[test]
fn slices_of_the_sequence_move_as_many_bytes() {
    for (config, degree) in cases() {
        let split = cut_model(&config, &TraceOptions::training(2, 8), degree);
        let counted = traffic(&split.graph, &RecomputePlan::default());
        let rows: Vec<_> = of_layers(&counted).collect();
        assert_eq!(rows.len(), 4, "two kinds in two layers");
        for row in rows {
            let counts = [row.forward, row.recomputed, row.backward];
            assert_eq!((counts, row.bytes), ([2, 0, 2], 4 * HIDDEN), "{row:?}");
        }
        // Joined inputs that are not kept are joined again.
        let nodes = split.graph.nodes().iter().enumerate();
        let joins = nodes.filter(|(_, node)| matches!(node.op, Op::AllGather { .. }));
        let plan = RecomputePlan {
            nodes: joins.map(|(index, _)| index).collect(),
            ..RecomputePlan::default()
        };
        let again = traffic(&split.graph, &plan);
        let joins = of_layers(&again).filter(|row| row.collective == "all_gather");
        assert!(joins.map(|row| row.recomputed).eq([2, 2]));
        let table = counted.to_string();
        assert!(
            table.contains("in total") && table.lines().count() > 5,
            "{table}"
        );
    }
}

#[test]
fn a_recomputed_layer_of_slices_joins_twice_and_sums_once_more() {
    for (config, degree) in cases() {
        let split = cut_model(&config, &TraceOptions::training(2, 8), degree);
        let counted = traffic(&split.graph, &by_layers(&split.graph));
        let rows: Vec<_> = of_layers(&counted).collect();
        assert_eq!(rows.len(), 4, "two kinds in two layers");
        for row in rows {
            let again = if row.collective == "all_gather" { 2 } else { 1 };
            let counts = [row.forward, row.recomputed, row.backward];
            assert_eq!(counts, [2, again, 2], "{row:?}");
            assert_eq!(row.bytes, (4 + again) * HIDDEN, "{row:?}");
        }
    }
}

#[test]
fn ranks_exchange_what_is_counted() {
    let options = TraceOptions {
        dtype: DType::F64,
        ..TraceOptions::training(2, 8)
    };
    for (config, degree) in cases() {
        for split in [split_model, cut_model].map(|split| split(&config, &options, degree)) {
            for plan in [RecomputePlan::default(), by_layers(&split.graph)] {
                let total = traffic(&split.graph, &plan).total();
                let counted = total.iter().map(|row| (row.collective, row.bytes));
                let counted: BTreeMap<_, _> = counted.collect();
                for record in recorded(&split.graph, tensor(degree), &plan) {
                    let exchanged = whole_bytes(&record.take(), "tensor", degree);
                    assert_eq!(exchanged, counted, "{config} on {degree}, {plan:?}");
                }
            }
        }
    }
}
