//! All work cut along the sequence over the sequence axis, against one rank: loss and gradients,
//! dropout on, f64.

use crate::{
    run::{assert_same_on, on_mesh, on_one_rank, recorded, whole_bytes},
    sequence::sequence_first,
    support::{gpt2, lists, llama, model, shapes},
};
use merak_mpu::Degrees;
use merak_tp::{
    Error, LayerLists, LayerTraffic, Options, Report, Rewritten, Sequence, SequenceMethod, Traffic,
    default_lists, rewrite_with,
};
use merak_trace::{
    Axis, Coord, DType, Graph, Op, RecomputePlan, StageCuts, StageProgram,
    models::{TraceOptions, Visible},
    op::{Attention, Keys},
};
use serde_json::{Value as Json, json};
use std::collections::BTreeMap;

const CUT: Sequence = Sequence::Cut { dim: 1 };
const METHODS: [SequenceMethod; 3] = [
    SequenceMethod::Ulysses,
    SequenceMethod::AllGather,
    SequenceMethod::Ring,
];
const LIKE: Sequence = Sequence::WholeLikeCut { dim: 1 };

fn options(seq: usize) -> TraceOptions {
    TraceOptions {
        dtype: DType::F64,
        ..TraceOptions::training(2, seq)
    }
}

/// A model of a family, split over both axes, by the lists of its family unless there are others.
fn split(
    config: &Json,
    options: &TraceOptions,
    tensor: &Options,
    sequence: &Options,
) -> (Graph, merak_tp::Result<Rewritten>) {
    let model = model(config);
    let whole = model.trace(options).expect("the sizes fit");
    let mut tensor = tensor.clone();
    if tensor.lists == LayerLists::default() {
        tensor.lists = default_lists(model.info().family).expect("the family has defaults");
    }
    let by_layers = rewrite_with(&whole, &tensor);
    let by_layers = by_layers.expect("the layers can be split").graph;
    (whole, rewrite_with(&by_layers, sequence))
}

fn degrees(tp: usize, sp: usize) -> Degrees {
    Degrees {
        tp,
        sp,
        ..Degrees::default()
    }
}

/// Checks training on `sp` ranks for each of the tensor axis, and forwards of whole sequences, by
/// all methods.
#[track_caller]
fn check(config: &Json, options: &TraceOptions, tensor: &Options, sp: usize) {
    for method in METHODS {
        check_by(method, config, options, tensor, sp);
    }
}

#[track_caller]
fn check_by(
    method: SequenceMethod,
    config: &Json,
    options: &TraceOptions,
    tensor: &Options,
    sp: usize,
) {
    let report = check_gathering(method, config, options, tensor, sp);
    assert!(report.gathers.is_empty(), "{report}");
}

/// The same where some values may be gathered, which the report lists.
#[track_caller]
fn check_gathering(
    method: SequenceMethod,
    config: &Json,
    options: &TraceOptions,
    tensor: &Options,
    sp: usize,
) -> Report {
    let along = |sequence| Options::along_sequence(sp, sequence, method);
    let (whole, cut) = split(config, options, tensor, &along(CUT));
    let cut = cut.expect("the sequence can be cut");
    let degrees = degrees(tensor.degree, sp);
    assert_same_on(&whole, &cut.graph, degrees);
    let whole_sequences = match tensor.sequence {
        Sequence::Cut { dim } => Sequence::WholeLikeCut { dim },
        whole => whole,
    };
    let is_in_order = tensor.lists.weight_change_list.is_empty();
    let tensor = tensor.clone().with_sequence(whole_sequences);
    let (_, alike) = split(config, options, &tensor, &along(LIKE));
    let alike = alike.expect("nothing is cut").graph;
    assert_eq!(alike.nodes().len(), cut.graph.nodes().len());
    for (a, b) in alike.nodes().iter().zip(cut.graph.nodes()) {
        // Heads are repeated for ranks that lack one.
        let mut inputs = b.inputs.clone();
        if matches!(b.op, Op::Concat { .. }) {
            inputs.dedup();
        }
        // Slices of a shared weight and of ids may come in another order within a module.
        let inputs = is_in_order.then_some((&a.inputs, &inputs));
        assert_eq!(a.scope, b.scope);
        assert!(inputs.is_none_or(|(a, b)| a == b), "{a:?} {b:?}");
    }
    let loss = on_one_rank(&whole).loss;
    for step in on_mesh(&alike, degrees) {
        assert!((step.loss - loss).abs() < 1e-10 * loss.abs(), "whole");
    }
    cut.report
}

#[test]
fn decoders_with_dropout_tied_and_untied_heads() {
    for sp in [2, 4] {
        check(&gpt2(2, 0.1, true), &options(8), &Options::new(1), sp);
        check(&llama(2, 4, 0.1), &options(8), &Options::new(1), sp);
        // Four query heads share two key heads, which four ranks repeat.
        check(&llama(1, 2, 0.1), &options(8), &Options::new(1), sp);
        check(&llama(1, 1, 0.1), &options(8), &Options::new(1), sp);
    }
    check(&gpt2(1, 0.0, false), &options(6), &Options::new(1), 2);
}

#[test]
fn more_ranks_than_heads_gather_keys_and_values_or_pass_them_round() {
    let mut one = gpt2(1, 0.1, true);
    one["n_head"] = 1.into();
    let windowed = |window: usize| {
        let mut config = llama(1, 1, 0.1);
        config["model_type"] = "mistral".into();
        config["sliding_window"] = window.into();
        config
    };
    for config in [one, llama(1, 2, 0.1), windowed(3), windowed(1)] {
        for method in [SequenceMethod::AllGather, SequenceMethod::Ring] {
            // Slices of neighbours, then mirrored ones.
            for seq in [8, 16] {
                check_by(method, &config, &options(seq), &Options::new(1), 8);
            }
            for visible in [Visible::Unpadded, Visible::Document] {
                for seq in [9, 12] {
                    let options = TraceOptions {
                        visible,
                        ..options(seq)
                    };
                    check_by(method, &config, &options, &Options::new(1), 3);
                }
            }
        }
    }
}

#[test]
fn gathered_attention_has_four_collectives_of_each_layer() {
    let one = Options::new(1);
    let gather = Options::along_sequence(4, CUT, SequenceMethod::AllGather);
    let (_, cut) = split(&gpt2(1, 0.0, true), &options(8), &one, &gather);
    let cut = cut.expect("the sequence can be cut").graph;
    let cuts = StageCuts::whole(&cut);
    let program = StageProgram::training(&cut, &cuts, 0, &RecomputePlan::default());
    let program = program.expect("operations have gradients");
    let nodes = program.graph.nodes().iter();
    let count = |name: &str| nodes.clone().filter(|node| node.op.name() == name).count();
    // Keys and values are gathered once, their gradients summed once.
    assert_eq!((count("all_gather"), count("reduce_scatter")), (2, 2));
    assert_eq!(count("all_to_all"), 0);
}

#[test]
fn keys_and_values_go_round_once_forward_and_with_their_gradients_backward() {
    // Bytes of [2, 8, 16], and of two key heads of four, in f64.
    for (config, keys) in [(gpt2(2, 0.1, true), 16), (llama(2, 2, 0.0), 8)] {
        let bytes = 2 * 8 * keys * 8;
        for (ranks, recomputes, again) in [(4, false, 0), (4, true, 2), (2, true, 2)] {
            let ring = Options::along_sequence(ranks, CUT, SequenceMethod::Ring);
            let (_, cut) = split(&config, &options(8), &Options::new(1), &ring);
            let cut = cut.expect("the sequence can be cut");
            let chunks = recomputes.then(|| 0..cut.graph.nodes().len());
            let plan = RecomputePlan {
                chunks: chunks.into_iter().collect(),
                ..RecomputePlan::default()
            };
            let program =
                StageProgram::training(&cut.graph, &StageCuts::whole(&cut.graph), 0, &plan);
            let traffic = Traffic::of([&program.expect("differentiable")], Axis::Sequence);
            let of_layers = traffic
                .layers
                .iter()
                .filter(|row| row.layer.ends_with(['0', '1']));
            let rows: Vec<_> = of_layers.collect();
            assert_eq!(rows.len(), 2, "{traffic}");
            for row in rows {
                let counts = [row.forward, row.recomputed, row.backward];
                assert_eq!((row.collective, counts), ("ring", [2, again, 4]));
                assert_eq!(row.bytes, (6 + again) * bytes);
            }
            if !recomputes {
                let counted: usize = traffic.total().iter().map(|row| row.bytes).sum();
                assert_eq!(counted, cut.report.bytes());
            }
            // A rank sends slices of both for each of the others, and gradients for itself too.
            let slices = (2 + again / 2) * (ranks - 1) + ranks;
            for record in recorded(&cut.graph, degrees(1, ranks), &plan) {
                let sent = record.take_sent().into_iter();
                let sent = sent.filter(|sent| sent.group == "sequence");
                let sent: usize = sent.map(|sent| sent.bytes).sum();
                assert_eq!(sent, 2 * slices * (2 * bytes / ranks), "{ranks} {again}");
            }
        }
    }
}

#[test]
fn ranks_of_a_sequence_exchange_what_is_counted() {
    for (config, ranks) in [gpt2(2, 0.1, true), llama(2, 2, 0.0)]
        .iter()
        .flat_map(|config| [(config, 2), (config, 4)])
    {
        for method in METHODS {
            let along = Options::along_sequence(ranks, CUT, method);
            let (_, cut) = split(config, &options(8), &Options::new(1), &along);
            let cut = cut.expect("the sequence can be cut").graph;
            let whole = RecomputePlan {
                chunks: std::iter::once(0..cut.nodes().len()).collect(),
                ..RecomputePlan::default()
            };
            for plan in [RecomputePlan::default(), whole] {
                let program = StageProgram::training(&cut, &StageCuts::whole(&cut), 0, &plan);
                let traffic = Traffic::of([&program.expect("differentiable")], Axis::Sequence);
                let total = traffic.total().into_iter();
                // What goes round is in messages.
                let total = total.filter(|row| row.collective != "ring");
                let counted = total.map(|row| (row.collective, row.bytes));
                let counted: BTreeMap<_, _> = counted.collect();
                for record in recorded(&cut, degrees(1, ranks), &plan) {
                    let exchanged = whole_bytes(&record.take(), "sequence", ranks);
                    assert_eq!(exchanged, counted, "{config} by {method:?}, {plan:?}");
                }
            }
        }
    }
}

/// The pairs of a query of each rank and a key of each that it sees, where every query sees the
/// keys before it.
fn pairs_by_owner(cut: &Graph, ranks: usize) -> Vec<Vec<usize>> {
    let attention = cut.nodes().iter().find_map(|node| match &node.op {
        Op::Attention(spec) => Some((spec, cut.ty(node.inputs[0]).shape[1])),
        _ => None,
    });
    let (spec, local) = attention.expect("it has one");
    let pairs = |rank: usize, owner: usize| -> usize {
        let spec = Attention {
            keys: Keys::OfRank(owner),
            ..spec.clone()
        };
        let place = Coord::default().with(Axis::Sequence, rank);
        let places = spec.places(place, local).expect("a rank has some queries");
        let sees = |query: usize| {
            let is_seen = |key: &usize| places.keys.at(*key) <= places.queries.at(query);
            (0..local).filter(is_seen).count()
        };
        (0..local).map(sees).sum()
    };
    let of_rank = |rank| (0..ranks).map(|owner| pairs(rank, owner)).collect();
    (0..ranks).map(of_rank).collect()
}

#[test]
fn mirrored_slices_are_equal_work_in_every_round_and_slices_of_neighbours_are_not() {
    let pairs = |ranks, seq, method| {
        let along = Options::along_sequence(ranks, CUT, method);
        let (_, cut) = split(&gpt2(1, 0.0, true), &options(seq), &Options::new(1), &along);
        pairs_by_owner(&cut.expect("the sequence can be cut").graph, ranks)
    };
    for method in [SequenceMethod::AllGather, SequenceMethod::Ring] {
        for (ranks, seq) in [(2, 8), (3, 12), (4, 16), (8, 16)] {
            let half = seq / ranks / 2;
            for (rank, of_rank) in pairs(ranks, seq, method).iter().enumerate() {
                // Of four pairs of halves two are seen whole; of the own ones one is, and two up to
                // the diagonal.
                let mut expected = vec![2 * half * half; ranks];
                expected[rank] = half * half + half * (half + 1);
                assert_eq!(*of_rank, expected, "rank {rank} of {ranks}, {method:?}");
            }
        }
        // Twice four ranks do not divide 12 positions: rank r sees 9 pairs with each before it.
        let of_neighbours = pairs(4, 12, method);
        let work: Vec<usize> = of_neighbours.iter().map(|row| row.iter().sum()).collect();
        assert_eq!(work, [6, 15, 24, 33]);
        // At most 2 - 1/4 times the mean.
        assert!(16 * work[3] <= 7 * work.iter().sum::<usize>());
    }
}

#[test]
fn decoders_of_other_families_with_windows_and_norms_of_heads() {
    for family in ["mistral", "qwen2", "qwen3"] {
        let mut config = llama(2, 2, 0.1);
        config["model_type"] = family.into();
        if family != "qwen3" {
            config["sliding_window"] = 3.into();
        }
        if family == "qwen2" {
            config["use_sliding_window"] = true.into();
            config["max_window_layers"] = 1.into();
        }
        check(&config, &options(8), &Options::new(1), 4);
        check(&config, &options(8), &Options::new(2), 2);
    }
    for (family, dropout) in [("opt", "dropout"), ("gpt_neox", "hidden_dropout")] {
        let mut config = json!({ "model_type": family, "vocab_size": 101, "max_position_embeddings": 16,
            "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "attention_dropout": 0.1 });
        config[dropout] = 0.1.into();
        check(&config, &options(8), &Options::new(1), 4);
        check(&config, &options(8), &Options::new(2), 2);
    }
    let config = json!({ "model_type": "gpt", "vocab_size": 101, "max_position_embeddings": 16, "hidden_size": 16,
        "num_hidden_layers": 2, "num_attention_heads": 4, "dropout": 0.1 });
    check(&config, &options(8), &Options::new(1), 4);
    check(&config, &options(8), &Options::new(2), 2);
}

#[test]
fn hidden_padding_is_seen_by_all_ranks() {
    let options = TraceOptions {
        visible: Visible::Unpadded,
        ..options(8)
    };
    let opt = json!({ "model_type": "opt", "vocab_size": 101, "max_position_embeddings": 16, "hidden_size": 16,
        "num_hidden_layers": 1, "num_attention_heads": 4 });
    for config in [llama(1, 2, 0.1), opt] {
        check(&config, &options, &Options::new(1), 2);
        check(&config, &options, &Options::new(2), 2);
    }
}

#[test]
fn documents_are_parted_alike_on_all_ranks() {
    let options = TraceOptions {
        visible: Visible::Document,
        ..options(8)
    };
    let opt = json!({ "model_type": "opt", "vocab_size": 101, "max_position_embeddings": 16, "hidden_size": 16,
        "num_hidden_layers": 1, "num_attention_heads": 4 });
    for config in [gpt2(1, 0.1, true), llama(1, 2, 0.1), opt] {
        check(&config, &options, &Options::new(1), 2);
        check(&config, &options, &Options::new(2), 2);
        check(&config, &options, &Options::new(2).with_sequence(CUT), 2);
    }
}

#[test]
fn layers_vocabulary_and_slices_of_the_tensor_axis() {
    for config in [gpt2(2, 0.1, true), llama(1, 2, 0.1)] {
        let tensor = Options::new(2);
        check(&config, &options(8), &tensor, 2);
        check(&config, &options(8), &tensor.clone().with_vocab(101), 2);
        let slices = tensor.with_sequence(CUT);
        check(&config, &options(8), &slices, 2);
        check(&config, &options(8), &slices.clone().with_vocab(101), 2);
        check(&config, &options(16), &slices, 2);
    }
}

#[test]
fn the_sequence_may_come_first() {
    let (whole, first) = (sequence_first(), Sequence::Cut { dim: 0 });
    let layers = Options::new(2).with_lists(lists());
    for tensor in [Options::new(1), layers.clone(), layers.with_sequence(first)] {
        let graph = rewrite_with(&whole, &tensor)
            .expect("it can be split")
            .graph;
        for method in METHODS {
            let along = Options::along_sequence(2, first, method);
            let cut = rewrite_with(&graph, &along).expect("the sequence can be cut");
            assert!(cut.report.gathers.is_empty(), "{}", cut.report);
            assert_same_on(&whole, &cut.graph, degrees(tensor.degree, 2));
        }
    }
}

#[test]
fn a_layer_turns_four_times_forward_and_four_times_backward() {
    // Bytes of [2, 8, 16] in f64.
    let hidden = 2 * 8 * 16 * 8;
    for config in [gpt2(2, 0.1, true), llama(2, 4, 0.0)] {
        let (_, cut) = split(
            &config,
            &options(8),
            &Options::new(1),
            &Options::ulysses(2, CUT),
        );
        let cut = cut.expect("the sequence can be cut");
        let (cuts, plan) = (StageCuts::whole(&cut.graph), RecomputePlan::default());
        let program = StageProgram::training(&cut.graph, &cuts, 0, &plan);
        let traffic = Traffic::of([&program.expect("differentiable")], Axis::Sequence);
        let is_layer = |row: &&LayerTraffic| row.layer.contains(|c: char| c.is_ascii_digit());
        let rows: Vec<_> = traffic.layers.iter().filter(is_layer).collect();
        assert_eq!(rows.len(), 2, "{traffic}");
        for row in rows {
            let counts = [row.forward, row.recomputed, row.backward];
            assert_eq!((row.collective, counts), ("all_to_all", [4, 0, 4]));
            assert_eq!(row.bytes, 8 * hidden);
        }
        let rest = traffic
            .total()
            .into_iter()
            .filter(|row| row.collective != "all_to_all");
        let rest: Vec<_> = rest
            .map(|row| (row.collective, row.forward, row.bytes))
            .collect();
        assert_eq!(rest, [("all_reduce", 1, 8)], "the loss alone");
        let counted: usize = traffic.total().iter().map(|row| row.bytes).sum();
        assert_eq!(counted, cut.report.bytes());
    }
}

#[test]
fn a_rank_has_its_positions_and_within_attention_its_heads() {
    let (_, cut) = split(
        &llama(1, 2, 0.0),
        &options(8),
        &Options::new(1),
        &Options::ulysses(4, CUT),
    );
    let cut = cut.expect("the sequence can be cut");
    let lines = shapes(&cut.graph);
    let turns: Vec<_> = lines
        .iter()
        .filter(|line| line.starts_with("all_to_all") || line.starts_with("attention"))
        .collect();
    assert_eq!(
        turns,
        [
            "all_to_all [2, 8, 4]",
            "all_to_all [2, 8, 4]",
            "all_to_all [2, 8, 4]",
            "attention [2, 8, 4]",
            "all_to_all [2, 2, 16]",
        ]
    );
    let is_whole = |param: &merak_trace::Param| param.local == param.full && !param.summed;
    assert!(cut.graph.params().iter().all(is_whole));
    let logits = lines.iter().find(|line| line.ends_with("101]"));
    assert_eq!(logits.map(String::as_str), Some("linear [2, 2, 101]"));
}

#[test]
fn sizes_that_do_not_divide_are_refused_with_those_that_do() {
    let refused = |config: &Json, seq, tensor: &Options, sp| {
        let (_, cut) = split(config, &options(seq), tensor, &Options::ulysses(sp, CUT));
        cut.expect_err("it cannot be cut").to_string()
    };
    let one = Options::new(1);
    insta::assert_snapshot!(refused(&gpt2(1, 0.0, true), 6, &one, 3), @r#"transformer.h.0.attn: 4 attention heads of a rank cannot be split over sp = 3: choose "sp" among 1, 2"#);
    insta::assert_snapshot!(refused(&gpt2(1, 0.0, true), 16, &Options::new(2), 4), @r#"transformer.h.0.attn: 2 attention heads of a rank cannot be split over sp = 4: choose "sp" among 1, 2"#);
    insta::assert_snapshot!(refused(&gpt2(1, 0.0, true), 6, &one, 4), @r#"transformer.wte: a sequence of 6 cannot be cut over sp = 4: choose "sp" among 1, 2, or take another length, such as 8"#);
    let slices = Options::new(2).with_sequence(CUT);
    insta::assert_snapshot!(refused(&gpt2(1, 0.0, true), 6, &slices, 2), @r#"transformer.wte.scatter: the sequence has 3 positions for each of tp = 2 ranks (sequence parallelism), which cannot be cut over sp = 2: choose a length that is a multiple of "tp" x "sp", which is 4"#);
    let mut six = llama(1, 3, 0.0);
    six["hidden_size"] = 24.into();
    six["num_attention_heads"] = 6.into();
    insta::assert_snapshot!(refused(&six, 8, &one, 2), @r#"model.layers.0.self_attn: 3 key/value heads of a rank can neither be split over sp = 2 nor repeated on it: set "sp" to 1"#);
}

/// A BERT of one layer, for 101 classes or tokens.
fn bert(architecture: &str) -> Json {
    json!({ "model_type": "bert", "architectures": [architecture], "vocab_size": 101, "hidden_size": 16,
        "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 24,
        "max_position_embeddings": 16, "type_vocab_size": 101, "num_labels": 101, "hidden_dropout_prob": 0.1,
        "attention_probs_dropout_prob": 0.1 })
}

#[test]
fn encoders_and_translations_share_tables_of_biases_and_classifiers() {
    let t5 = json!({ "model_type": "t5", "vocab_size": 101, "d_model": 16, "d_kv": 4, "d_ff": 24, "num_layers": 1,
        "num_decoder_layers": 2, "num_heads": 4, "relative_attention_num_buckets": 8,
        "relative_attention_max_distance": 6, "tie_word_embeddings": false });
    // Target sequences of the same length, and of another.
    for (config, targets) in [
        (t5, vec![8, 4]),
        (bert("BertForMaskedLM"), vec![8]),
        (bert("BertForSequenceClassification"), vec![8]),
    ] {
        for target in targets {
            let options = TraceOptions {
                target_seq: Some(target),
                ..options(8)
            };
            for method in METHODS {
                for (tp, sp) in [(1, 2), (1, 4), (2, 2)] {
                    check_gathering(method, &config, &options, &Options::new(tp), sp);
                }
                let sliced = Options::new(2).with_sequence(CUT);
                check_gathering(method, &config, &options, &sliced, 2);
            }
        }
    }
}

#[test]
fn a_table_that_is_looked_up_whole_and_multiplied_in_parts_is_no_sequence() {
    let t5 = json!({ "model_type": "t5", "d_model": 16, "d_kv": 4, "d_ff": 24, "num_layers": 1, "num_heads": 4,
        "relative_attention_num_buckets": 8, "relative_attention_max_distance": 6 });
    let mut tied_llama = llama(1, 4, 0.1);
    tied_llama["tie_word_embeddings"] = true.into();
    // As many rows as the head has outputs; an odd number where its inputs are cut.
    for (mut config, vocab, head, dim) in [
        (gpt2(1, 0.1, true), 102, "lm_head", 0),
        (tied_llama, 101, "lm_head", 1),
        (bert("BertForMaskedLM"), 102, "decoder", 0),
        (t5, 102, "lm_head", 0),
    ] {
        config["vocab_size"] = vocab.into();
        let lists = LayerLists {
            weight_change_list: vec![(head.to_owned(), dim)],
            ..LayerLists::default()
        };
        for sequence in [Sequence::Whole, CUT] {
            let tensor = Options::new(2).with_lists(lists.clone());
            let tensor = tensor.with_sequence(sequence);
            for method in [SequenceMethod::Ulysses, SequenceMethod::Ring] {
                check_gathering(method, &config, &options(8), &tensor, 2);
            }
        }
    }
}

#[test]
fn layers_of_whole_sequences_are_refused() {
    let vit = json!({ "model_type": "vit", "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 4,
        "intermediate_size": 24, "image_size": 8, "patch_size": 4, "num_labels": 3 });
    let along = Options::ulysses(2, CUT);
    let (_, cut) = split(&vit, &options(5), &Options::new(1), &along);
    let error = cut.expect_err("nothing is cut");
    assert!(matches!(error, Error::WholeSequence { degree: 2, .. }));
    insta::assert_snapshot!(error.to_string(), @r#"sp = 2: vit.embeddings.patch_embeddings.projection.reshape_3 is used on whole sequences, by vit.embeddings.patch_embeddings.projection.linear, which has no form for slices of a sequence: set "sp" to 1; models of texts have none of these"#);
}

#[test]
fn a_model_is_cut_once_and_in_parts() {
    let (_, cut) = split(
        &gpt2(1, 0.0, true),
        &options(8),
        &Options::new(1),
        &Options::ulysses(2, CUT),
    );
    let cut = cut.expect("the sequence can be cut").graph;
    let again = rewrite_with(&cut, &Options::ulysses(2, CUT)).expect_err("it is cut");
    insta::assert_snapshot!(again.to_string(), @"transformer.wte.scatter is split over the sequence axis already");
    let none = rewrite_with(&cut, &Options::ulysses(0, CUT)).expect_err("no ranks");
    insta::assert_snapshot!(none.to_string(), @"sp = 0 is no number of ranks, expected 1 or more");
    assert!(
        !cut.nodes()
            .iter()
            .any(|node| matches!(node.op, Op::AllGather { .. }))
    );
}

/// A decoding passes whole sequences of any length, in the nodes of a training.
#[test]
fn a_decoding_of_any_length_has_the_nodes_of_a_training() {
    let mut configs = vec![gpt2(2, 0.1, true), llama(2, 2, 0.1)];
    let mut qwen3 = llama(2, 2, 0.1);
    qwen3["model_type"] = "qwen3".into();
    configs.push(qwen3);
    configs.push(json!({ "model_type": "gpt_neox", "vocab_size": 101, "max_position_embeddings": 16,
        "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 24 }));
    for (config, tp) in configs.iter().flat_map(|config| [(config, 1), (config, 2)]) {
        let tensor = Options::new(tp);
        let (_, cut) = split(config, &options(8), &tensor, &Options::ulysses(2, CUT));
        let cut = cut.expect("the sequence can be cut").graph;
        for seq in [1, 2, 3, 7] {
            let decoding = TraceOptions { seq, ..options(8) };
            let (_, alike) = split(config, &decoding, &tensor, &Options::ulysses(2, LIKE));
            let alike = alike.expect("nothing is cut").graph;
            let scopes = |graph: &Graph| {
                let nodes = graph.nodes().iter();
                nodes.map(|node| node.scope.to_string()).collect::<Vec<_>>()
            };
            assert_eq!(scopes(&alike), scopes(&cut), "{config} {tp} {seq}");
        }
    }
}
