//! One suite for every backend: each operation, forward and gradient, in every element type.
//!
//! `gradients` hands each of its cases on to [`agree`]. This file adds larger and odder sizes, and
//! numbers that are not finite.

use crate::{
    agreement::{Case, Run, agree, compare, keeps_narrow, measure},
    support::{backend, backends, context, dtypes, host_backends, interpreter, value},
};
use merak_trace::{
    Axis, Batch, DType, Init, Op, ParamRole, SharedBackend, TensorType,
    fx::{self, AttentionTerms, Module, Symbol},
    op::{
        Activation, Attention, AxisSlice, DropoutSpec, Keys, RelativeBuckets, Rope, WeightLayout,
    },
};

fn t(shape: &[usize]) -> TensorType {
    TensorType::new(shape, DType::F64)
}

/// The first result of one operation.
fn check(name: &str, operands: &[TensorType], ids: &[(&str, TensorType, &[i64])], op: &Op) {
    with(name, operands, ids, op, (None, &backends(2)));
}

fn with(
    name: &str,
    operands: &[TensorType],
    ids: &[(&str, TensorType, &[i64])],
    op: &Op,
    (poison, backends): (Option<f64>, &[SharedBackend]),
) {
    let build = |module: &Module, operands: &[Symbol], ids: &[Symbol]| {
        let inputs: Vec<_> = match op {
            Op::Embedding { .. } => ids.iter().chain(operands).collect(),
            _ => operands.iter().chain(ids).collect(),
        };
        let mut results = module.apply(op.clone(), &inputs)?;
        if !matches!(op, Op::Split { .. }) {
            results.truncate(1);
        }
        Ok(results)
    };
    let case = Case {
        name,
        operands,
        ids,
        build: &build,
    };
    compare(&case, poison, backends);
    if poison.is_none() {
        keeps_narrow(&case);
    }
}

fn labels(rows: usize, classes: usize) -> Vec<i64> {
    let label = |row: usize| ((row * 7 + 3) % classes).cast_signed() as i64;
    let mut labels: Vec<_> = (0..rows).map(label).collect();
    labels[rows / 2] = -100;
    labels
}

const ACTIVATIONS: [Activation; 5] = [
    Activation::GeluTanh,
    Activation::GeluErf,
    Activation::Silu,
    Activation::Relu,
    Activation::Tanh,
];

#[test]
fn odd_sizes_agree_for_products() {
    for (rows, n_in, n_out) in [(1, 1, 1), (7, 17, 33), (65, 31, 129)] {
        for layout in [WeightLayout::OutIn, WeightLayout::InOut] {
            let mut w = [0; 2];
            (w[layout.in_dim()], w[layout.out_dim()]) = (n_in, n_out);
            let operands = [t(&[1, rows, n_in]), t(&w), t(&[n_out])];
            check("linear", &operands, &[], &Op::Linear { layout, bias: true });
        }
        let op = Op::MatMul {
            transpose_a: true,
            transpose_b: false,
        };
        check(
            "matmul",
            &[t(&[2, n_in, rows]), t(&[2, n_in, n_out])],
            &[],
            &op,
        );
    }
}

#[test]
fn odd_sizes_agree_for_rows() {
    for width in [1, 7, 33, 64, 257] {
        let (x, vector) = (t(&[5, width]), t(&[width]));
        if width > 1 {
            let operands = [x.clone(), vector.clone(), vector.clone()];
            check("layer_norm", &operands, &[], &Op::LayerNorm { eps: 1e-5 });
        }
        check(
            "rms_norm",
            &[x.clone(), vector.clone()],
            &[],
            &Op::RmsNorm { eps: 1e-5 },
        );
        check("softmax", std::slice::from_ref(&x), &[], &Op::Softmax);
        check(
            "sum_leading",
            std::slice::from_ref(&x),
            &[],
            &Op::SumLeading { shape: vec![width] },
        );
        check("add", &[x.clone(), vector.clone()], &[], &Op::Add);
        check("mul", &[x.clone(), vector], &[], &Op::Mul);
        for kind in ACTIVATIONS {
            check(
                &format!("{kind:?}"),
                std::slice::from_ref(&x),
                &[],
                &Op::Activation(kind),
            );
        }
        check("silu_mul", &[x.clone(), x.clone()], &[], &Op::SiluMul);
        let dropout = DropoutSpec {
            p: 0.3,
            key: 7,
            slice: None,
            nested: None,
        };
        check(
            "dropout",
            std::slice::from_ref(&x),
            &[],
            &Op::Dropout(dropout),
        );
        let labels = labels(5, width);
        let ids = [("labels", TensorType::new([5], DType::I64), &labels[..])];
        for label_smoothing in [0.0, 0.2] {
            check(
                "cross_entropy",
                std::slice::from_ref(&x),
                &ids,
                &Op::CrossEntropy { label_smoothing },
            );
        }
    }
}

#[test]
fn odd_sizes_agree_for_attention_and_lookups() {
    for (len, head_dim, kv_heads, causal, window, p) in [
        (1, 4, 2, true, None, 0.0),
        (33, 8, 1, true, None, 0.0),
        (70, 5, 2, true, Some(9), 0.0),
        (19, 6, 2, false, Some(4), 0.0),
        (35, 8, 2, false, None, 0.0),
        (21, 6, 1, true, None, 0.25),
    ] {
        let dropout = (p > 0.0).then_some(DropoutSpec {
            p,
            key: 3,
            slice: None,
            nested: None,
        });
        let spec = Attention {
            heads: 2,
            kv_heads,
            head_dim,
            scale: 0.4,
            causal,
            window,
            dropout,
            ..Attention::default()
        };
        let kv = t(&[2, len, kv_heads * head_dim]);
        let operands = [t(&[2, len, 2 * head_dim]), kv.clone(), kv];
        check("attention", &operands, &[], &Op::Attention(spec));

        let positions: Vec<i64> = (5..).take(len).collect();
        let numbered = TensorType::new([len], DType::I64);
        let positions = [("positions", numbered, &positions[..])];
        let rope = Rope {
            head_dim,
            inv_freq: vec![1.0, 0.05][..head_dim / 4].to_vec(),
            scale: 1.25,
            inverse: false,
        };
        check(
            "rope",
            &[t(&[2, len, 2 * head_dim])],
            &positions,
            &Op::Rope(rope),
        );

        let ids: Vec<i64> = (0_i64..).map(|i| i * i % 11).take(len).collect();
        let ids = [("ids", TensorType::new([len], DType::I64), &ids[..])];
        for padding in [None, Some(4)] {
            let table = t(&[11, head_dim]);
            check(
                "embedding",
                &[table],
                &ids,
                &Op::Embedding {
                    padding,
                    slice: None,
                },
            );
        }
    }
}

/// libtorch's own kernel for this gradient has a race on devices, at these numbers of ids.
#[test]
fn thousands_of_ids_of_a_few_rows_add_up_alike() {
    for len in [1_025, 2_048, 3_073] {
        let ids: Vec<i64> = (0_i64..).map(|i| i * i % 7 % 3).take(len).collect();
        let ids = [("ids", TensorType::new([len], DType::I64), &ids[..])];
        let op = Op::Embedding {
            padding: None,
            slice: None,
        };
        check("embedding of many", &[t(&[3, 5])], &ids, &op);
    }
}

/// On devices, several blocks of keys add to the gradient of a query at once.
#[test]
fn gradients_of_attention_have_the_same_bits_each_time() {
    let spec = Attention {
        heads: 2,
        kv_heads: 2,
        head_dim: 64,
        scale: 0.125,
        causal: true,
        ..Attention::default()
    };
    let x = t(&[2, 512, 128]);
    let case = Case {
        name: "attention",
        operands: &[x.clone(), x.clone(), x],
        ids: &[],
        build: &|module, x, _| {
            let mut results = module.apply(Op::Attention(spec.clone()), &[&x[0], &x[1], &x[2]])?;
            results.truncate(1);
            Ok(results)
        },
    };
    for backend in backends(2) {
        let narrowest = *dtypes(&backend).last().expect("some types");
        let bits = || -> Vec<Vec<u64>> {
            let measured = measure(&case, &Run::new(&backend, narrowest));
            let bits_of = |values: Vec<f64>| values.into_iter().map(f64::to_bits).collect();
            measured.into_values().map(bits_of).collect()
        };
        let first = bits();
        for _ in 0..2 {
            assert!(bits() == first, "{}", backend.name());
        }
    }
}

#[test]
fn odd_sizes_agree_for_slices_of_queries_and_keys() {
    // The first of three ranks, whose keys are all, its own, or those of the last one.
    for (half, mirrored, causal, window, p) in [
        (5, false, true, None, 0.0),
        (17, true, true, None, 0.0),
        (17, true, true, Some(9), 0.25),
        (33, true, false, None, 0.25),
        (4, false, false, Some(20), 0.0),
    ] {
        for keys in [Keys::All, Keys::OfRank(0), Keys::OfRank(2)] {
            let dropout = (p > 0.0).then_some(DropoutSpec {
                p,
                key: 3,
                slice: None,
                nested: None,
            });
            let slice = AxisSlice {
                mirrored,
                ..AxisSlice::new(Axis::Sequence, 1, 6 * half)
            };
            let spec = Attention {
                heads: 2,
                kv_heads: 1,
                head_dim: 4,
                scale: 0.4,
                causal,
                window,
                queries: Some(slice),
                keys,
                dropout,
                ..Attention::default()
            };
            let len = if keys == Keys::All {
                6 * half
            } else {
                2 * half
            };
            let kv = t(&[2, len, 4]);
            let operands = [t(&[2, 2 * half, 8]), kv.clone(), kv];
            check("attention", &operands, &[], &Op::Attention(spec));
        }
    }
}

#[test]
fn odd_sizes_agree_for_attention_with_hidden_keys_and_biases() {
    for (q_len, k_len, causal, p, hides, biased) in [
        (33, 70, false, 0.0, true, false),
        (33, 70, false, 0.0, true, true),
        (65, 65, true, 0.0, false, true),
        (65, 65, true, 0.0, true, false),
        (19, 23, false, 0.25, true, true),
    ] {
        let spec = Attention {
            heads: 4,
            kv_heads: 2,
            head_dim: 5,
            scale: 0.4,
            causal,
            ..Attention::default()
        };
        let buckets = RelativeBuckets {
            q_len,
            k_len,
            buckets: 9,
            max_distance: 20,
            bidirectional: !causal,
        };
        let kv = t(&[2, k_len, 10]);
        let mut operands = vec![t(&[2, q_len, 20]), kv.clone(), kv];
        operands.extend(biased.then(|| t(&[9, 4])));
        // The second sample has padding on both sides: when causal, its first queries see nothing.
        let seen: Vec<_> = (0..2 * k_len)
            .map(|key| i64::from(key < k_len || (key > k_len + 2 && key + 4 < 2 * k_len)))
            .collect();
        let ids = [("seen", TensorType::new([2, k_len], DType::I64), &seen[..])];
        agree(&Case {
            name: "attention with terms",
            operands: &operands,
            ids: if hides { &ids } else { &[] },
            build: &|module, x, ids| {
                let index = module.relative_buckets(buckets)?;
                let terms = AttentionTerms {
                    seen: ids.first(),
                    bias: x.get(3).map(|table| [table, &index]),
                };
                let mixed = module.attention_with([&x[0], &x[1], &x[2]], terms, &spec, p)?;
                Ok(vec![mixed])
            },
        });
    }
}

#[test]
fn documents_agree_with_windows_biases_and_dropout() {
    let len = 70_u32;
    // Runs of equal ids are documents, though an id comes again.
    let ids: Vec<_> = (0..2 * i64::from(len)).map(|i| (i * i / 500) % 3).collect();
    let len = len as usize;
    for (causal, window, p, biased) in [
        (true, None, 0.0, false),
        (true, Some(6), 0.0, false),
        (false, None, 0.0, true),
        (true, None, 0.25, false),
    ] {
        let spec = Attention {
            heads: 4,
            kv_heads: 2,
            head_dim: 5,
            scale: 0.4,
            causal,
            window,
            documents: true,
            ..Attention::default()
        };
        let buckets = RelativeBuckets {
            q_len: len,
            k_len: len,
            buckets: 9,
            max_distance: 20,
            bidirectional: !causal,
        };
        let kv = t(&[2, len, 10]);
        let mut operands = vec![t(&[2, len, 20]), kv.clone(), kv];
        operands.extend(biased.then(|| t(&[9, 4])));
        agree(&Case {
            name: "attention within documents",
            operands: &operands,
            ids: &[("ids", TensorType::new([2, len], DType::I64), &ids)],
            build: &|module, x, ids| {
                let index = module.relative_buckets(buckets)?;
                let terms = AttentionTerms {
                    seen: ids.first(),
                    bias: x.get(3).map(|table| [table, &index]),
                };
                let rope = Rope {
                    head_dim: 5,
                    inv_freq: vec![1.0, 0.2],
                    scale: 1.0,
                    inverse: false,
                };
                let positions = module.apply(Op::DocumentPositions { first: 0 }, &[&ids[0]])?;
                let q = module.rope(&x[0], &positions[0], rope)?;
                let mixed = module.attention_with([&q, &x[1], &x[2]], terms, &spec, p)?;
                Ok(vec![mixed])
            },
        });
    }
}

#[test]
fn positions_are_counted_where_a_mask_shows_them() {
    let seen = [0, 0, 1, 1, 0, 1, 1, 1, 0, 1, 1, 0];
    agree(&Case {
        name: "seen_positions",
        operands: &[t(&[8, 3])],
        ids: &[("seen", TensorType::new([2, 6], DType::I64), &seen)],
        build: &|module, x, ids| {
            let positions = module.seen_positions(&ids[0], 2)?;
            let rows = module.apply(
                Op::Embedding {
                    padding: None,
                    slice: None,
                },
                &[&positions, &x[0]],
            )?;
            Ok(rows)
        },
    });
}

#[test]
fn what_is_no_number_spreads_alike() {
    for poison in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY] {
        let x = t(&[3, 9]);
        let (one, two) = ([x.clone()], [x.clone(), x.clone()]);
        let norm = |weights: usize| [vec![x.clone()], vec![t(&[9]); weights]].concat();
        let poisoned = |name: &str, operands: &[TensorType], op: &Op| {
            let name = format!("{name} of {poison}");
            with(&name, operands, &[], op, (Some(poison), &backends(2)));
        };
        for kind in ACTIVATIONS {
            poisoned(&format!("{kind:?}"), &one, &Op::Activation(kind));
        }
        poisoned("softmax", &one, &Op::Softmax);
        poisoned("scale", &one, &Op::Scale { factor: -2.0 });
        poisoned("sum_leading", &one, &Op::SumLeading { shape: vec![9] });
        poisoned("layer_norm", &norm(2), &Op::LayerNorm { eps: 1e-5 });
        poisoned("rms_norm", &norm(1), &Op::RmsNorm { eps: 1e-5 });
        poisoned("add", &two, &Op::Add);
        poisoned("mul", &two, &Op::Mul);
        poisoned("silu_mul", &two, &Op::SiluMul);
        let linear = Op::Linear {
            layout: WeightLayout::OutIn,
            bias: false,
        };
        poisoned("linear", &[x.clone(), t(&[4, 9])], &linear);
    }
}

#[test]
fn what_is_no_number_spreads_alike_in_attention_and_losses() {
    for poison in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY] {
        let attention = Attention {
            heads: 1,
            kv_heads: 1,
            head_dim: 9,
            scale: 0.4,
            causal: false,
            ..Attention::default()
        };
        let qkv = [t(&[2, 3, 9]), t(&[2, 3, 9]), t(&[2, 3, 9])];
        // PyTorch's kernel for the processor treats a query of NaN as one that sees no key, and
        // gives zeros.
        with(
            "attention",
            &qkv,
            &[],
            &Op::Attention(attention),
            (Some(poison), &[backend(2)]),
        );
        let ids = TensorType::new([3], DType::I64);
        let labels = [("labels", ids, &[0, 5, -100][..])];
        let op = Op::CrossEntropy {
            label_smoothing: 0.0,
        };
        with(
            "cross_entropy",
            &[t(&[3, 9])],
            &labels,
            &op,
            (Some(poison), &backends(2)),
        );
    }
}

#[test]
fn ids_out_of_range_are_refused() {
    // A CUDA device stops for good at such an id.
    for backend in host_backends(2) {
        for id in [11, -1] {
            let graph = fx::trace(DType::F32, |module| {
                let table =
                    module.param("table", &[11, 2], Init::Normal(1.0), ParamRole::Weight)?;
                let ids = module.input("ids", TensorType::new([1], DType::I64));
                let y = module
                    .apply(
                        Op::Embedding {
                            padding: None,
                            slice: None,
                        },
                        &[&ids, &table],
                    )?
                    .swap_remove(0);
                let sum = module.apply(Op::SumAll, &[&y])?.swap_remove(0);
                module.output("loss", &sum);
                Ok(())
            })
            .expect("a valid graph");
            let runner = interpreter(&backend, &graph);
            let params = crate::support::params(&backend, &runner.program().graph);
            let ids = value(
                &backend,
                &TensorType::new([1], DType::I64),
                &[f64::from(id)],
            );
            let batch = Batch::from([("ids".to_owned(), ids)]);
            let outcome = runner.forward(&params.views, &batch, Vec::new(), context());
            let error = outcome.expect_err("no such row").to_string();
            assert!(error.contains("embedding"), "{error}");
        }
    }
}
