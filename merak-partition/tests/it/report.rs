//! The table and its figures.

use insta::assert_snapshot;
use merak_partition::{
    Error, ParamBytes, Partition, PartitionReport, ReportOptions, SegmentOptions, Share,
    SplitMethod, StageMethod, ValueWidth, recompute_plan, report,
};
use merak_trace::{
    Graph,
    models::{self, TraceOptions},
};
use serde_json::json;

fn tiny() -> (Graph, SegmentOptions) {
    let config = json!({ "model_type": "gpt2", "n_layer": 4, "n_embd": 16, "n_head": 2, "vocab_size": 101, "n_positions": 32 });
    let model = models::from_config(&config).expect("the configuration is complete");
    let graph = model
        .trace(&TraceOptions::training(2, 32))
        .expect("the model traces");
    (graph, SegmentOptions::for_model(&model.info(), 2))
}

fn partition(method: SplitMethod, num_stages: usize) -> (Graph, Partition) {
    let (graph, options) = tiny();
    let options = SegmentOptions {
        num_stages,
        ..options.with_method(method)
    };
    let partition =
        Partition::new(&graph, &options, &StageMethod::Uniform).expect("the model is cut");
    (graph, partition)
}

fn of(graph: &Graph, partition: &Partition) -> PartitionReport {
    report(
        graph,
        partition,
        &ReportOptions::one_f_one_b(partition.num_stages(), 8),
    )
    .expect("the stages differentiate")
}

#[test]
fn the_report_of_a_tiny_gpt2_on_two_stages() {
    let (graph, partition) = partition(SplitMethod::FarthestMinDeps, 2);
    assert_snapshot!(of(&graph, &partition), @r"
    stage  segments  parameters     forward    backward  sent (act + grad)  received (act + grad)     kept  live   memory  inputs     modules
        0         5      8.69 k  1.09 MFLOP  2.21 MFLOP     4.00 KiB + 0 B         0 B + 4.00 KiB  132 KiB     2  399 KiB  input_ids  transformer.wte, transformer.wpe, transformer.h.0-1
        1         5      6.59 k  1.33 MFLOP  2.66 MFLOP     0 B + 4.00 KiB         4.00 KiB + 0 B  166 KiB     1  294 KiB  labels     transformer.h.2-3, transformer.ln_f, lm_head, loss
    memory: weights, gradients, optimizer state and kept values; batches and values within a phase come on top
    segments by farthest_min_deps: 1644 parameters a segment for 8 segments, 11 candidate cuts
    stages by uniform: 10 segments as 5 + 5; the longest forward is 1.10 times the mean
    tied transformer.wte.weight: stage 0 owns it, copies on 1
    ");
}

#[test]
fn the_report_fits_a_terminal_of_eighty_columns() {
    let (graph, partition) = partition(SplitMethod::FarthestMinDeps, 4);
    let report = of(&graph, &partition);
    let narrow = report.to_text(Some(80));
    let tables = narrow.split("memory:").next().unwrap();
    for line in tables.lines() {
        assert!(line.chars().count() <= 80, "{line}");
    }
    assert_eq!(report.to_text(None), report.to_string());
    for word in report.to_string().split_whitespace() {
        assert!(narrow.contains(word), "{word} is missing");
    }
    assert_snapshot!(tables, @r"
    stage  segments  parameters    forward    backward    sent (act + grad)
        0         3      5.41 k  547 kFLOP  1.11 MFLOP       4.00 KiB + 0 B
        1         3      4.40 k  769 kFLOP  1.57 MFLOP  4.00 KiB + 4.00 KiB
        2         2      3.28 k  544 kFLOP  1.10 MFLOP  4.00 KiB + 4.00 KiB
        3         2      2.19 k  560 kFLOP  1.09 MFLOP       0 B + 4.00 KiB
    stage  received (act + grad)      kept  live   memory  inputs
        0         0 B + 4.00 KiB  66.2 KiB     4  350 KiB  input_ids
        1    4.00 KiB + 4.00 KiB  90.5 KiB     3  340 KiB  -
        2    4.00 KiB + 4.00 KiB  65.5 KiB     2  182 KiB  -
        3         4.00 KiB + 0 B  75.0 KiB     1  134 KiB  labels
    stage  modules
        0  transformer.wte, transformer.wpe, transformer.h.0
        1  transformer.h.1, transformer.h.2.{ln_1, attn}
        2  transformer.h.2.{ln_2, mlp}, transformer.h.3.{ln_1, attn}
        3  transformer.h.3.{ln_2, mlp}, transformer.ln_f, lm_head, loss
    ");
}

#[test]
fn a_layer_that_is_cut_in_two_is_named_by_its_parts() {
    let (graph, partition) = partition(SplitMethod::FarthestMinDeps, 4);
    let modules: Vec<_> = of(&graph, &partition)
        .stages
        .iter()
        .map(|stage| stage.modules.join(", "))
        .collect();
    assert_snapshot!(modules.join("\n"), @r"
    transformer.wte, transformer.wpe, transformer.h.0
    transformer.h.1, transformer.h.2.{ln_1, attn}
    transformer.h.2.{ln_2, mlp}, transformer.h.3.{ln_1, attn}
    transformer.h.3.{ln_2, mlp}, transformer.ln_f, lm_head, loss
    ");
}

#[test]
fn neighbours_agree_on_what_passes_between_them_and_nothing_is_lost() {
    let (graph, partition) = partition(SplitMethod::FarthestMinDeps, 4);
    let report = of(&graph, &partition);
    for pair in report.stages.windows(2) {
        assert_eq!(
            pair[0].sent.activation_bytes,
            pair[1].received.activation_bytes
        );
        assert_eq!(pair[0].received.gradient_bytes, pair[1].sent.gradient_bytes);
        assert_eq!(
            pair[0].sent.activation_bytes,
            2 * 32 * 16 * 4,
            "one value of [2, 32, 16] f32"
        );
    }
    assert_eq!(
        report
            .stages
            .iter()
            .map(|stage| stage.parameters)
            .sum::<usize>(),
        graph.num_elements()
    );
    let copies = report
        .stages
        .iter()
        .map(|stage| stage.local_parameters)
        .sum::<usize>()
        - graph.num_elements();
    assert_eq!(
        copies,
        101 * 16,
        "the last stage holds a copy of the tied embeddings"
    );
    assert_eq!(
        (report.tied[0].owner, &*report.tied[0].copies),
        (0, &[3][..])
    );
    // Products take one forward and two backward; the rest of the backward is small.
    for stage in &report.stages {
        let ratio = stage.backward.flops as f64 / stage.forward.flops as f64;
        assert!(
            (1.8..2.3).contains(&ratio),
            "stage {} has {ratio}",
            stage.stage
        );
    }
}

#[test]
fn recomputation_trades_kept_values_for_work() {
    let (graph, partition) = partition(SplitMethod::FarthestMinDeps, 2);
    let plain = of(&graph, &partition);
    let plans = (0..2)
        .map(|stage| recompute_plan(&graph, &partition, stage, 1, usize::MAX))
        .collect();
    let options = ReportOptions {
        recompute: plans,
        ..ReportOptions::one_f_one_b(2, 8)
    };
    let recomputed = report(&graph, &partition, &options).unwrap();
    for (plain, recomputed) in plain.stages.iter().zip(&recomputed.stages) {
        assert!(
            recomputed.kept_bytes < plain.kept_bytes
                && recomputed.memory_bytes < plain.memory_bytes
        );
        assert_eq!(
            (plain.recompute.flops, recomputed.backward),
            (0, plain.backward)
        );
        assert!(
            recomputed.recompute.flops > 0 && recomputed.recompute.flops < recomputed.forward.flops
        );
    }
}

#[test]
fn memory_follows_the_bytes_per_parameter_and_the_live_microbatches() {
    let (graph, partition) = partition(SplitMethod::LayerSplit, 2);
    let base = ReportOptions {
        live_microbatches: vec![0; 2],
        param_bytes: ParamBytes {
            gradient: Share::whole(0),
            state: Share::whole(0),
            ..ParamBytes::default()
        },
        ..ReportOptions::one_f_one_b(2, 0)
    };
    let memory = |options: &ReportOptions| {
        report(&graph, &partition, options).unwrap().stages[1].memory_bytes
    };
    let stage = report(&graph, &partition, &base).unwrap().stages[1].clone();
    let weights = 4 * stage.local_parameters;
    assert_eq!(memory(&base), weights);
    let options = ReportOptions {
        param_bytes: ParamBytes {
            gradient: Share::whole(2),
            state: Share { bytes: 3, ranks: 2 },
            ..ParamBytes::default()
        },
        ..base.clone()
    };
    assert_eq!(memory(&options), weights + stage.local_parameters * 7 / 2);
    let options = ReportOptions {
        live_microbatches: vec![0, 3],
        ..base
    };
    assert_eq!(memory(&options), weights + 3 * stage.kept_bytes);
    let halved = ReportOptions {
        value_width: ValueWidth::Autocast,
        ..options
    };
    assert_eq!(memory(&halved), weights + 3 * (stage.kept_bytes / 2));
}

#[test]
fn a_list_of_another_length_than_the_stages_is_refused() {
    let (graph, partition) = partition(SplitMethod::FarthestMinDeps, 2);
    let error = report(&graph, &partition, &ReportOptions::one_f_one_b(3, 8)).unwrap_err();
    assert!(matches!(error, Error::PerStage { .. }));
    assert_snapshot!(error, @"expected one entry of live_microbatches for each of 2 stages, found 3");
}

#[test]
fn counts_that_end_at_the_largest_number_print_as_such() {
    let (graph, partition) = partition(SplitMethod::FarthestMinDeps, 2);
    let mut report = of(&graph, &partition);
    report.stages[0].backward.flops = u64::MAX;
    report.stages[0].recompute.flops = 1;
    assert!(report.to_string().contains("18.4 EFLOP"), "{report}");
}
