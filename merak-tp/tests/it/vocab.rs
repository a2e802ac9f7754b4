//! A split vocabulary: loss and gradients are those of whole logits, which nobody gathers.

use crate::{
    run::{assert_same, on_one_rank, on_ranks},
    support::{apply, gpt2, llama, model, shapes},
};
use merak_tp::{LayerLists, Options, Rewritten, Sequence, cuts_with, default_lists, rewrite_with};
use merak_trace::{
    Axis, DType, Graph, Init, Op, ParamRole, Placement, TensorType,
    fx::{self, Symbol},
    models::{Head, TraceOptions},
    op::WeightLayout,
};
use serde_json::{Value as Json, json};

fn traced(config: &Json, label_smoothing: f64) -> Graph {
    let options = TraceOptions {
        dtype: DType::F64,
        ..TraceOptions::training(2, 8).with_head(Head::Loss { label_smoothing })
    };
    model(config).trace(&options).expect("the sizes fit")
}

fn options(config: &Json, degree: usize) -> Options {
    let info = model(config).info();
    Options::new(degree)
        .with_lists(default_lists(info.family).expect("the family has defaults"))
        .with_vocab(info.vocab_size)
}

/// Splits a model with its vocabulary and compares it with one rank.
fn check(config: &Json, degree: usize, label_smoothing: f64) -> Rewritten {
    let whole = traced(config, label_smoothing);
    let split = rewrite_with(&whole, &options(config, degree)).expect("the model can be split");
    let is_gather = |op: &Op| matches!(op, Op::AllGather { .. });
    let gathers = split
        .graph
        .nodes()
        .iter()
        .filter(|node| is_gather(&node.op));
    assert_eq!(gathers.count(), 0, "{}", split.report);
    assert_same(&whole, &split.graph, degree);
    split
}

#[test]
fn a_vocabulary_of_101_is_padded_on_two_three_and_four_ranks() {
    for tied in [true, false] {
        for (degree, smoothing) in [(2, 0.0), (2, 0.1), (3, 0.1), (4, 0.0)] {
            let mut config = gpt2(1, 0.1, tied);
            if degree == 3 {
                config["n_embd"] = 12.into();
                config["n_head"] = 3.into();
            }
            let split = check(&config, degree, smoothing);
            let room = 101_usize.div_ceil(degree);
            let params = split.graph.params().iter();
            let cut: Vec<_> = params
                .filter(|param| param.full.shape[0] == 101)
                .map(|param| {
                    (
                        param.local.shape[0],
                        param.placements.on(Axis::Tensor).clone(),
                    )
                })
                .collect();
            let expected = vec![(room, Placement::shard(0, 101)); if tied { 1 } else { 2 }];
            assert_eq!(cut, expected);
        }
    }
}

#[test]
fn every_family_with_a_vocabulary_divides_it() {
    let small = json!({ "vocab_size": 101, "hidden_size": 16, "num_hidden_layers": 1,
        "num_attention_heads": 4, "max_position_embeddings": 16 });
    let of = |family: &str, more: Json| {
        let mut config = small.clone();
        config["model_type"] = family.into();
        for (key, value) in more.as_object().expect("fields") {
            config[key] = value.clone();
        }
        config
    };
    for config in [
        llama(1, 2, 0.1),
        of("gpt_neox", json!({})),
        of("opt", json!({ "ffn_dim": 24, "word_embed_proj_dim": 6 })),
        of(
            "bert",
            json!({ "architectures": ["BertForMaskedLM"], "intermediate_size": 24, "type_vocab_size": 101 }),
        ),
        of(
            "bert",
            json!({ "architectures": ["BertForSequenceClassification"], "intermediate_size": 24, "type_vocab_size": 101,
            "num_labels": 101 }),
        ),
        json!({ "model_type": "t5", "vocab_size": 101, "d_model": 16, "d_kv": 6, "d_ff": 24,
            "num_layers": 1, "num_heads": 4 }),
    ] {
        check(&config, 2, 0.1);
    }
}

#[test]
fn ranks_after_the_end_of_a_vocabulary_hold_padding_only() {
    let mut config = gpt2(1, 0.0, true);
    config["vocab_size"] = json!(5);
    let whole = traced(&config, 0.1);
    let split = rewrite_with(&whole, &options(&config, 4)).unwrap();
    let table = split.graph.find_param("transformer.wte.weight").unwrap();
    let param = split.graph.param(table);
    assert_eq!(param.local.shape, [2, 16]);
    let held: Vec<_> = (0..4)
        .map(|rank| {
            let place = merak_trace::Coord::default().with(Axis::Tensor, rank);
            let boxes = param.placements.local_boxes(&param.full, place);
            boxes.iter().map(|piece| piece.size[0]).sum::<usize>()
        })
        .collect();
    assert_eq!(held, [2, 2, 1, 0]);
}

#[test]
fn the_loss_needs_two_small_all_reduces_and_the_lookup_one() {
    let config = gpt2(1, 0.0, true);
    let split = check(&config, 2, 0.1);
    let shapes = shapes(&split.graph);
    assert_eq!(
        shapes[..2],
        ["embedding [2, 8, 16]", "all_reduce [2, 8, 16]"]
    );
    assert_eq!(
        shapes[shapes.len() - 7..],
        [
            "copy_to [2, 8, 16]",
            "linear [2, 8, 51]",
            "vocab_max [16]",
            "all_reduce_max [16]",
            "vocab_sums [16, 3]",
            "all_reduce [16, 3]",
            "vocab_loss []",
        ]
    );
    let report = split.report.to_string();
    let words = |line: &str| line.split_whitespace().collect::<Vec<_>>().join(" ");
    let lines: Vec<_> = report.lines().map(words).collect();
    assert_eq!(
        [&lines[1], &lines[lines.len() - 3]],
        [
            "row transformer.wte 101 -> 16 and 1 of padding (split vocabulary)",
            "col lm_head 16 -> 101 and 1 of padding (split vocabulary)",
        ]
    );
}

#[test]
fn without_a_vocabulary_or_ranks_nothing_changes() {
    let config = gpt2(1, 0.0, true);
    let whole = traced(&config, 0.0);
    let split = rewrite_with(&whole, &options(&config, 1)).unwrap();
    assert_eq!(split.graph.nodes(), whole.nodes());
    let cuts = cuts_with(&whole, &options(&config, 2)).unwrap();
    assert_eq!(cuts["transformer.wte.weight"].parts, [101]);
    let classes = json!({ "model_type": "vit", "hidden_size": 16, "num_hidden_layers": 1,
        "num_attention_heads": 4, "intermediate_size": 24, "image_size": [7, 2],
        "patch_size": [1, 2], "num_labels": 101 });
    check(&classes, 2, 0.0);
}

#[test]
fn a_loss_without_a_split_form_gathers_the_logits() {
    let init = Init::Normal(0.02);
    let whole = fx::trace(DType::F64, |module| {
        let ids = module.input("ids", TensorType::new([6], DType::I64));
        let (x, table) = module.sub("table").embedding(&ids, 101, 4, init)?;
        let linear = |name: &str, x: &Symbol, out| {
            module
                .sub(name)
                .linear(x, out, WeightLayout::OutIn, true, init)
        };
        let x = linear("down", &linear("up", &x, 8)?, 4)?;
        let x = module.linear_with(&x, &table, WeightLayout::OutIn)?;
        let shares = apply(module, Op::Softmax, &[&x])?;
        let weights = module.param("w", &[101], Init::Normal(1.0), ParamRole::Bias)?;
        let loss = apply(module, Op::SumAll, &[&module.mul(&shares, &weights)?])?;
        module.output("loss", &loss);
        Ok(())
    })
    .unwrap();
    let options = Options::new(2)
        .with_lists(LayerLists::col_row(["up"], ["down"]))
        .with_vocab(101);
    let split = rewrite_with(&whole, &options).unwrap();
    let gathers = split.report.gathers.iter();
    let of_logits: Vec<_> = gathers.map(|gather| gather.is_logits).collect();
    assert_eq!(of_logits, [true], "{}", split.report);
    assert_same(&whole, &split.graph, 2);
}

#[test]
fn all_ranks_have_the_same_bits_of_loss_and_whole_parameters() {
    let config = gpt2(1, 0.1, true);
    let split = rewrite_with(&traced(&config, 0.1), &options(&config, 2)).unwrap();
    let steps = on_ranks(&split.graph, 2);
    assert_eq!(steps[0].loss.to_bits(), steps[1].loss.to_bits());
    let params = split.graph.params().iter();
    for param in params.filter(|param| param.local == param.full) {
        let bits = |rank: usize| -> Vec<_> {
            let grads = steps[rank].grads[&param.name].iter();
            grads.map(|x| x.to_bits()).collect()
        };
        assert_eq!(bits(0), bits(1), "{}", param.name);
    }
}

#[test]
fn lists_that_split_the_head_by_rows_win() {
    let config = gpt2(1, 0.0, false);
    let whole = traced(&config, 0.0);
    let options = Options::new(2)
        .with_lists(LayerLists::col_row(
            ["c_attn", "c_fc"],
            ["c_proj", "lm_head"],
        ))
        .with_vocab(101);
    let split = rewrite_with(&whole, &options).unwrap();
    let head = split.graph.find_param("lm_head.weight").unwrap();
    let placement = split.graph.param(head).placements.on(Axis::Tensor).clone();
    assert_eq!(placement, Placement::shard(1, 16));
    assert_same(&whole, &split.graph, 2);
}

fn cut(config: &Json, degree: usize) -> Options {
    options(config, degree).with_sequence(Sequence::Cut { dim: 1 })
}

#[test]
fn a_cut_sequence_lies_between_a_split_lookup_and_a_split_head() {
    let config = gpt2(1, 0.1, true);
    let whole = traced(&config, 0.1);
    let split = rewrite_with(&whole, &cut(&config, 2)).unwrap();
    let shapes = shapes(&split.graph);
    assert_eq!(
        shapes[..2],
        ["embedding [2, 8, 16]", "reduce_scatter [2, 4, 16]"]
    );
    assert_eq!(
        shapes[shapes.len() - 8..],
        [
            "layer_norm [2, 4, 16]",
            "all_gather [2, 8, 16]",
            "linear [2, 8, 51]",
            "vocab_max [16]",
            "all_reduce_max [16]",
            "vocab_sums [16, 3]",
            "all_reduce [16, 3]",
            "vocab_loss []",
        ]
    );
    assert_eq!(split.report.gathers, []);
    // Each rank has the whole gradient of its rows of the table.
    let summed = split.graph.params().iter().filter(|param| param.summed);
    assert!(summed.clone().count() > 0);
    assert!(summed.into_iter().all(|param| param.full.shape[0] != 101));
}

#[test]
fn a_cut_sequence_and_a_split_vocabulary_compute_the_same_as_one_rank() {
    let bert = json!({ "model_type": "bert", "architectures": ["BertForMaskedLM"], "vocab_size": 101,
        "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 24,
        "max_position_embeddings": 16, "type_vocab_size": 101 });
    let t5 = json!({ "model_type": "t5", "vocab_size": 101, "d_model": 16, "d_kv": 6, "d_ff": 24,
        "num_layers": 1, "num_heads": 4 });
    let opt = json!({ "model_type": "opt", "vocab_size": 101, "max_position_embeddings": 16,
        "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 4, "ffn_dim": 24,
        "word_embed_proj_dim": 6 });
    let decoders = [
        gpt2(2, 0.1, true),
        gpt2(1, 0.1, false),
        llama(1, 4, 0.1),
        llama(1, 2, 0.1),
    ];
    for config in decoders.into_iter().chain([bert, t5, opt]) {
        let whole = traced(&config, 0.1);
        let loss = on_one_rank(&whole).loss;
        for degree in [2, 4] {
            let split = rewrite_with(&whole, &cut(&config, degree)).expect("it can be split");
            assert_same(&whole, &split.graph, degree);
            let sequence = Sequence::WholeLikeCut { dim: 1 };
            let alike = options(&config, degree).with_sequence(sequence);
            let alike = rewrite_with(&whole, &alike).expect("it can be split");
            let (one, other) = (alike.graph.nodes(), split.graph.nodes());
            assert_eq!(one.len(), other.len());
            for (one, other) in one.iter().zip(other) {
                assert_eq!((&one.scope, &one.inputs), (&other.scope, &other.inputs));
            }
            for step in on_ranks(&alike.graph, degree) {
                assert!((step.loss - loss).abs() < 1e-10 * loss.abs(), "{config}");
            }
        }
    }
}
