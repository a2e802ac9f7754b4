//! Slices of the sequence between the split regions, against one rank: loss and gradients, dropout
//! on, f64.

use crate::{
    run::{assert_same, on_one_rank, on_ranks},
    support::{apply, gpt2, input, linear, lists, llama, model, shapes, trace},
};
use merak_tp::{Error, LayerLists, Options, Rewritten, Sequence, default_lists, rewrite_with};
use merak_trace::{
    DType, Graph, Init, Op, ParamRole, TensorType, fx,
    models::TraceOptions,
    op::{Attention, WeightLayout},
};
use serde_json::{Value as Json, json};

fn cut(degree: usize) -> Options {
    Options::new(degree).with_sequence(Sequence::Cut { dim: 1 })
}

fn options(seq: usize) -> TraceOptions {
    TraceOptions {
        dtype: DType::F64,
        ..TraceOptions::training(2, seq)
    }
}

fn split_model(config: &Json, seq: usize, options_of_split: &Options) -> (Graph, Rewritten) {
    let model = model(config);
    let whole = model.trace(&options(seq)).expect("the sizes fit");
    let lists = default_lists(model.info().family).expect("the family has defaults");
    let options = options_of_split.clone().with_lists(lists);
    let split = rewrite_with(&whole, &options).expect("the model can be split");
    (whole, split)
}

fn check_model(config: &Json, seq: usize, degrees: &[usize]) {
    for &degree in degrees {
        let (whole, split) = split_model(config, seq, &cut(degree));
        assert_same(&whole, &split.graph, degree);
        let (_, alike) = split_model(config, seq, &like(degree));
        assert_eq!(alike.graph.nodes().len(), split.graph.nodes().len());
        let loss = on_one_rank(&whole).loss;
        for step in on_ranks(&alike.graph, degree) {
            assert!((step.loss - loss).abs() < 1e-10 * loss.abs(), "whole");
        }
    }
}

fn like(degree: usize) -> Options {
    Options::new(degree).with_sequence(Sequence::WholeLikeCut { dim: 1 })
}

#[test]
fn decoders_with_dropout_tied_and_untied_heads() {
    check_model(&gpt2(2, 0.1, true), 8, &[2, 4]);
    check_model(&gpt2(1, 0.0, false), 8, &[2]);
    check_model(&llama(2, 4, 0.1), 8, &[2, 4]);
    // Fewer key heads than ranks.
    check_model(&llama(1, 2, 0.1), 8, &[4]);
    let mut qwen3 = llama(2, 4, 0.1);
    qwen3["model_type"] = "qwen3".into();
    check_model(&qwen3, 8, &[2, 4]);
    for family in ["opt", "gpt_neox"] {
        let config = json!({ "model_type": family, "vocab_size": 101, "max_position_embeddings": 16,
            "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "attention_dropout": 0.1,
            "dropout": 0.1, "hidden_dropout": 0.1 });
        let mut config = config;
        let other = if family == "opt" {
            "hidden_dropout"
        } else {
            "dropout"
        };
        config.as_object_mut().expect("fields").remove(other);
        check_model(&config, 8, &[2, 4]);
    }
}

#[test]
fn encoders_and_translators() {
    for architecture in ["BertForMaskedLM", "BertForSequenceClassification"] {
        let config = json!({ "model_type": "bert", "architectures": [architecture], "vocab_size": 101,
            "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 24,
            "max_position_embeddings": 16, "type_vocab_size": 101, "num_labels": 101 });
        check_model(&config, 8, &[2, 4]);
    }
    let t5 = json!({ "model_type": "t5", "vocab_size": 101, "d_model": 16, "d_kv": 6, "d_ff": 24,
        "num_layers": 2, "num_heads": 4, "relative_attention_num_buckets": 8,
        "relative_attention_max_distance": 6, "feed_forward_proj": "gated-gelu" });
    check_model(&t5, 8, &[2, 4]);
    // Seven patches and a class token.
    let vit = json!({ "model_type": "vit", "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4,
        "intermediate_size": 24, "image_size": [7, 2], "patch_size": [1, 2], "num_labels": 101,
        "hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1 });
    check_model(&vit, 8, &[2, 4]);
}

#[test]
fn a_layer_gathers_and_scatters_twice_and_its_norms_are_summed() {
    let (_, split) = split_model(&gpt2(1, 0.1, true), 8, &cut(2));
    let layer = shapes(&split.graph);
    let start = layer.iter().position(|line| line.starts_with("layer_norm"));
    assert_eq!(
        layer[start.expect("it has a norm")..][..19],
        [
            "layer_norm [2, 4, 16]",
            "all_gather [2, 8, 16]",
            "linear [2, 8, 24]",
            "split [2, 8, 8]",
            "attention [2, 8, 8]",
            "linear [2, 8, 16]",
            "reduce_scatter [2, 4, 16]",
            "add [2, 4, 16]",
            "dropout [2, 4, 16]",
            "add [2, 4, 16]",
            "layer_norm [2, 4, 16]",
            "all_gather [2, 8, 16]",
            "linear [2, 8, 32]",
            "gelu_tanh [2, 8, 32]",
            "linear [2, 8, 16]",
            "reduce_scatter [2, 4, 16]",
            "add [2, 4, 16]",
            "dropout [2, 4, 16]",
            "add [2, 4, 16]",
        ]
    );
    let summed = split.graph.params().iter().filter(|param| param.summed);
    let summed: Vec<_> = summed.map(|param| param.name.as_str()).collect();
    let of_layer = [
        "ln_1.weight",
        "ln_1.bias",
        "attn.c_proj.bias",
        "ln_2.weight",
        "ln_2.bias",
        "mlp.c_proj.bias",
    ];
    let expected = ["wte.weight", "wpe.weight"].map(|name| format!("transformer.{name}"));
    let expected = expected.into_iter();
    let expected = expected.chain(of_layer.map(|name| format!("transformer.h.0.{name}")));
    let expected =
        expected.chain(["ln_f.weight", "ln_f.bias"].map(|name| format!("transformer.{name}")));
    assert_eq!(summed, expected.collect::<Vec<_>>());
    insta::assert_snapshot!(split.report.to_string(), @r#"
    tensor parallel over 2 ranks: 4 layers split
      col transformer.h.0.attn.c_attn  16 -> 48 in 3 parts  (col_para_list "attn.c_attn")
      row transformer.h.0.attn.c_proj  16 -> 16  (row_para_list "c_proj")
      col transformer.h.0.mlp.c_fc     16 -> 64  (col_para_list "mlp.c_fc")
      row transformer.h.0.mlp.c_proj   64 -> 16  (row_para_list "c_proj")
      forward all_gather: 2 per microbatch, 4096 bytes
      forward all_reduce: 1 per microbatch, 8 bytes
      forward reduce_scatter: 2 per microbatch, 4096 bytes
      backward all_gather: 2 per microbatch, 4096 bytes
      backward reduce_scatter: 2 per microbatch, 4096 bytes
    "#);
}

#[test]
fn the_same_bytes_move_as_without_slices() {
    // An all-reduce is a reduce-scatter and an all-gather.
    let moved = |options: &Options| {
        let (_, split) = split_model(&gpt2(4, 0.0, false), 8, options);
        let of_layers = split
            .report
            .collectives
            .iter()
            .filter(|part| part.bytes > 64);
        let halves = of_layers.map(|part| {
            let rounds = if part.collective == "all_reduce" {
                2
            } else {
                1
            };
            rounds * part.bytes
        });
        halves.sum::<usize>()
    };
    assert_eq!(moved(&cut(2)), moved(&Options::new(2)));
}

#[test]
fn a_parameter_with_both_kinds_of_uses_sums_at_each_use() {
    let whole = fx::trace(DType::F64, |module| {
        let x = module.input("x", TensorType::new([2, 4, 8], DType::F64));
        let scale = module.param("scale", &[8], Init::Constant(0.5), ParamRole::Norm)?;
        let x = module.mul(&x, &scale)?;
        let x = linear(module, "row", &linear(module, "col", &x, 16)?, 8)?;
        let x = module.mul(&x, &scale)?;
        module.output("loss", &apply(module, Op::SumAll, &[&x])?);
        Ok(())
    });
    let whole = whole.expect("the operands fit");
    let split = rewrite_with(&whole, &cut(2).with_lists(lists())).expect("it can be split");
    let param = |name| {
        split
            .graph
            .param(split.graph.find_param(name).expect("a name"))
    };
    assert!(!param("scale").summed && param("row.bias").summed);
    assert_same(&whole, &split.graph, 2);
}

/// An attention whose hidden states have the sequence before the batch.
pub(crate) fn sequence_first() -> Graph {
    sequence_first_with_samples(1)
}

/// The same with dropout by samples along some dimension.
fn sequence_first_with_samples(batch_dim: usize) -> Graph {
    let model = fx::trace(DType::F64, |module| {
        let ids = module.input("ids", TensorType::new([4, 2], DType::I64));
        let (x, _) = module
            .sub("wte")
            .embedding(&ids, 101, 8, Init::Normal(1.0))?;
        let x = module.sub("drop").dropout_by(&x, batch_dim, 0.5)?;
        let linear = |name: &str, x: &fx::Symbol| {
            module
                .sub(name)
                .linear(x, 8, WeightLayout::OutIn, true, Init::Normal(1.0))
        };
        let by_sample = |x: &fx::Symbol| {
            apply(
                module,
                Op::Transpose {
                    perm: vec![1, 0, 2],
                },
                &[x],
            )
        };
        let [q, k, v] = ["col.q", "col.k", "col.v"].map(|name| by_sample(&linear(name, &x)?));
        let spec = Attention {
            heads: 4,
            kv_heads: 4,
            head_dim: 2,
            scale: 0.5,
            causal: true,
            ..Attention::default()
        };
        let mixed = by_sample(&module.attention(&q?, &k?, &v?, &spec, 0.1)?)?;
        let x = module.add(&linear("row", &mixed)?, &x)?;
        let logits = linear("head", &module.sub("ln").layer_norm(&x, 1e-5)?)?;
        module.output(
            "loss",
            &apply(module, Op::SumAll, &[&module.mul(&logits, &logits)?])?,
        );
        Ok(())
    });
    model.expect("the operands fit")
}

#[test]
fn the_sequence_may_come_first() {
    let whole = sequence_first();
    let first = Options::new(2).with_sequence(Sequence::Cut { dim: 0 });
    let split = rewrite_with(&whole, &first.with_lists(lists())).expect("it can be split");
    assert!(shapes(&split.graph).contains(&"reduce_scatter [2, 2, 8]".to_owned()));
    assert!(
        split.report.gathers.is_empty(),
        "{:?}",
        split.report.gathers
    );
    assert_same(&whole, &split.graph, 2);
}

#[test]
fn dropout_that_counts_positions_as_samples_is_refused() {
    let whole = sequence_first_with_samples(0);
    let first = Options::new(2).with_sequence(Sequence::Cut { dim: 0 });
    let error = rewrite_with(&whole, &first.with_lists(lists())).unwrap_err();
    insta::assert_snapshot!(error, @"drop.dropout: dropout counts samples along dimension 0, which holds the sequence: use `Module::dropout_by` with the dimension of the samples");
}

#[test]
fn rows_of_positions_drop_alike_where_the_sequence_is_cut() {
    let whole = fx::trace(DType::F64, |module| {
        let ids = module.input("ids", TensorType::new([2, 4], DType::I64));
        let table = |name: &str, ids: &fx::Symbol| {
            module
                .sub(name)
                .embedding(ids, 101, 8, Init::Normal(1.0))
                .map(|(x, _)| x)
        };
        let rows = table("wpe", &module.positions(4)?)?;
        let x = module.add(&table("wte", &ids)?, &module.dropout(&rows, 0.5)?)?;
        let linear = |name: &str, x: &fx::Symbol| {
            module
                .sub(name)
                .linear(x, 8, WeightLayout::OutIn, true, Init::Normal(1.0))
        };
        let x = module.add(&linear("row", &linear("col", &x)?)?, &x)?;
        module.output("loss", &module.sum(&module.mul(&x, &x)?)?);
        Ok(())
    });
    let whole = whole.expect("the operands fit");
    let lists = LayerLists::col_row(["col"], ["row"]);
    let split = rewrite_with(&whole, &cut(2).with_lists(lists)).expect("it can be split");
    assert_same(&whole, &split.graph, 2);
}

#[test]
fn sizes_of_one_position_have_the_nodes_of_a_training() {
    for config in [gpt2(2, 0.1, true), llama(2, 2, 0.1)] {
        let (_, split) = split_model(&config, 8, &cut(4));
        for seq in [1, 3, 7] {
            let (_, alike) = split_model(&config, seq, &like(4));
            let (one, other) = (&alike.graph, &split.graph);
            assert_eq!(one.nodes().len(), other.nodes().len());
            for (a, b) in one.nodes().iter().zip(other.nodes()) {
                assert_eq!((&a.scope, &a.inputs), (&b.scope, &b.inputs));
            }
        }
    }
}

#[test]
fn an_odd_sequence_is_refused_with_the_degrees_that_divide_it() {
    let model = model(&gpt2(1, 0.0, true));
    let whole = model.trace(&options(6)).expect("the sizes fit");
    let lists = default_lists("gpt2").expect("the family has defaults");
    let error = rewrite_with(&whole, &cut(4).with_lists(lists)).expect_err("4 does not divide 6");
    assert!(matches!(
        error,
        Error::Sequence {
            len: 6,
            degree: 4,
            ..
        }
    ));
    insta::assert_snapshot!(error.to_string(), @r#"transformer.wte: a sequence of 6 cannot be cut over tp = 4 (sequence parallelism): choose "tp" among 1, 2, or take another length, such as 8"#);
}

#[test]
fn an_input_of_whole_sequences_is_cut_where_a_region_ends() {
    let split = trace(|module| {
        let x = input(module, &[2, 4, 8]);
        let y = linear(module, "row", &linear(module, "col", &x, 16)?, 8)?;
        module.output("y", &module.add(&y, &x)?);
        Ok(())
    });
    let split = rewrite_with(&split, &cut(2).with_lists(lists())).expect("it can be split");
    assert_eq!(
        shapes(&split.graph),
        [
            "copy_to [2, 4, 8]",
            "linear [2, 4, 8]",
            "linear [2, 4, 8]",
            "reduce_scatter [2, 2, 8]",
            "add [2, 2, 8]",
            "scatter [2, 2, 8]",
            "add [2, 2, 8]",
            "all_gather [2, 4, 8]",
        ]
    );
}
