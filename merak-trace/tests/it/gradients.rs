//! Every operation's gradient against central finite differences in f64.

use crate::{
    agreement::{Case, agree},
    support::{
        backend, context, floats, grad_store, interpreter, numbers, params as param_store, write,
    },
};
use merak_trace::{
    DType, Init, Op, ParamRole, ParamStore, RecomputePlan, Result, StageCuts, StageProgram,
    TensorType,
    fx::{self, AttentionTerms, Module, Symbol},
    op::{Activation, Attention, DropoutSpec, RelativeBuckets, Rope, WeightLayout},
};

const STEP: f64 = 1e-5;

/// Checks an operation's gradients by differences, and its results and gradients on every backend.
pub(crate) fn check(
    name: &str,
    operands: &[TensorType],
    ids: &[(&str, TensorType, &[i64])],
    build: impl Fn(&Module, &[Symbol], &[Symbol]) -> Result<Vec<Symbol>>,
) {
    let case = Case {
        name,
        operands,
        ids,
        build: &build,
    };
    check_by_differences(&case);
    agree(&case);
}

/// Checks the gradients of `sum(weights * op(operands))` by the operands.
fn check_by_differences(case: &Case<'_>) {
    let backend = backend(1);
    let graph = case.graph(DType::F64);
    let runner = interpreter(&backend, &graph);
    let params = runner.program().graph.params();
    let mut store = param_store(&backend, &runner.program().graph);
    let batch = case.batch(&graph, &backend);
    let forward = |store: &ParamStore| {
        let out = runner.forward(&store.views, &batch, Vec::new(), context());
        out.expect(case.name)
    };
    let mut grads = grad_store(&backend, runner.program());
    let mut frame = forward(&store).frame;
    runner
        .backward(&mut frame, &store.views, Vec::new(), 1.0, &mut grads)
        .expect(case.name);

    let base = floats(DType::F64, &*store.flat);
    let mut offset = 0;
    for (index, param) in params.iter().enumerate() {
        let elements = param.local.numel();
        // Uses of one parameter accumulate apart.
        let mut analytic = vec![0.0; elements];
        for (grad, buffer) in runner.program().grads.iter().zip(&grads.buffers) {
            if grad.param.index() == index {
                let values = floats(DType::F64, &**buffer);
                let pairs = analytic.iter_mut().zip(values);
                pairs.for_each(|(sum, x)| *sum += x);
            }
        }
        let scale = analytic.iter().fold(1e-3_f64, |max, x| max.max(x.abs()));
        let is_operand = param.name.starts_with("operand");
        for (i, analytic) in analytic.iter().enumerate().filter(|_| is_operand) {
            let [above, below] = [STEP, -STEP].map(|step| {
                let mut shifted = base.clone();
                shifted[offset + i] += step;
                write(&mut *store.flat, &shifted);
                numbers(&backend, &forward(&store).outputs[0])[0]
            });
            let numeric = (above - below) / (2.0 * STEP);
            assert!(
                (numeric - analytic).abs() <= 2e-6 * scale.max(numeric.abs()),
                "{}: {} element {i}: {analytic} by the graph, {numeric} by differences",
                case.name,
                param.name
            );
        }
        offset += elements;
    }
}

pub(crate) fn t(shape: &[usize]) -> TensorType {
    TensorType::new(shape, DType::F64)
}

pub(crate) fn apply(op: Op) -> impl Fn(&Module, &[Symbol], &[Symbol]) -> Result<Vec<Symbol>> {
    move |module, params, ids| {
        let operands: Vec<_> = params.iter().chain(ids).collect();
        // Statistics that an operation returns beside its result take part in no loss.
        Ok(module
            .apply(op.clone(), &operands)?
            .into_iter()
            .take(results(&op))
            .collect())
    }
}

fn results(op: &Op) -> usize {
    if let Op::Split { sizes, .. } = op {
        sizes.len()
    } else {
        1
    }
}

pub(crate) fn ids<'a>(
    name: &'a str,
    shape: &[usize],
    data: &'a [i64],
) -> (&'a str, TensorType, &'a [i64]) {
    (name, TensorType::new(shape, DType::I64), data)
}

#[test]
fn products() {
    for layout in [WeightLayout::OutIn, WeightLayout::InOut] {
        let mut w = [0; 2];
        (w[layout.in_dim()], w[layout.out_dim()]) = (5, 3);
        check(
            "linear",
            &[t(&[2, 4, 5]), t(&w)],
            &[],
            apply(Op::Linear {
                layout,
                bias: false,
            }),
        );
        check(
            "linear with bias",
            &[t(&[4, 5]), t(&w), t(&[3])],
            &[],
            apply(Op::Linear { layout, bias: true }),
        );
    }
    for (transpose_a, transpose_b) in [(false, false), (false, true), (true, false), (true, true)] {
        let a = if transpose_a {
            t(&[2, 4, 3])
        } else {
            t(&[2, 3, 4])
        };
        let b = if transpose_b {
            t(&[2, 5, 4])
        } else {
            t(&[2, 4, 5])
        };
        check(
            "matmul",
            &[a, b],
            &[],
            apply(Op::MatMul {
                transpose_a,
                transpose_b,
            }),
        );
    }
}

#[test]
fn lookups() {
    check(
        "embedding",
        &[t(&[7, 3])],
        &[ids("ids", &[2, 3], &[1, 0, 6, 1, 1, 5])],
        |module, params, ids| {
            module.apply(
                Op::Embedding {
                    padding: None,
                    slice: None,
                },
                &[&ids[0], &params[0]],
            )
        },
    );
}

#[test]
fn norms() {
    for width in [1, 5, 16] {
        if width > 1 {
            check(
                "layer_norm",
                &[t(&[3, width]), t(&[width]), t(&[width])],
                &[],
                apply(Op::LayerNorm { eps: 1e-5 }),
            );
        }
        check(
            "rms_norm",
            &[t(&[2, 3, width]), t(&[width])],
            &[],
            apply(Op::RmsNorm { eps: 1e-5 }),
        );
    }
}

#[test]
fn elementwise_functions() {
    for kind in [
        Activation::GeluTanh,
        Activation::GeluErf,
        Activation::Silu,
        Activation::Relu,
        Activation::Tanh,
    ] {
        check(
            "activation",
            &[t(&[3, 7])],
            &[],
            apply(Op::Activation(kind)),
        );
    }
    check(
        "silu_mul",
        &[t(&[3, 7]), t(&[3, 7])],
        &[],
        apply(Op::SiluMul),
    );
    check(
        "dropout",
        &[t(&[3, 7])],
        &[],
        apply(Op::Dropout(DropoutSpec {
            p: 0.3,
            key: 99,
            slice: None,
            nested: None,
        })),
    );
    check("add", &[t(&[2, 3, 4]), t(&[3, 4])], &[], apply(Op::Add));
    check(
        "add of equal shapes",
        &[t(&[3, 4]), t(&[3, 4])],
        &[],
        apply(Op::Add),
    );
    check("mul", &[t(&[2, 3, 4]), t(&[3, 4])], &[], apply(Op::Mul));
    check(
        "mul of equal shapes",
        &[t(&[3, 4]), t(&[3, 4])],
        &[],
        apply(Op::Mul),
    );
    check("scale", &[t(&[5])], &[], apply(Op::Scale { factor: -1.5 }));
    check("identity", &[t(&[5])], &[], apply(Op::Identity));
    check(
        "cast",
        &[t(&[5])],
        &[],
        apply(Op::Cast { dtype: DType::F64 }),
    );
    check("x * x", &[t(&[4])], &[], |module, params, _| {
        module.apply(Op::Mul, &[&params[0], &params[0]])
    });
}

#[test]
fn reductions() {
    check(
        "sum_leading",
        &[t(&[2, 3, 4])],
        &[],
        apply(Op::SumLeading { shape: vec![4] }),
    );
    check("sum_all", &[t(&[2, 3])], &[], apply(Op::SumAll));
    check("softmax", &[t(&[3, 7])], &[], apply(Op::Softmax));
}

#[test]
fn shapes() {
    check(
        "reshape",
        &[t(&[2, 6])],
        &[],
        apply(Op::Reshape { shape: vec![3, 4] }),
    );
    check(
        "transpose",
        &[t(&[2, 3, 4])],
        &[],
        apply(Op::Transpose {
            perm: vec![2, 0, 1],
        }),
    );
    check(
        "transpose of a dimension of size 1",
        &[t(&[2, 3, 1, 2])],
        &[],
        apply(Op::Transpose {
            perm: vec![0, 2, 1, 3],
        }),
    );
    check(
        "split",
        &[t(&[2, 6])],
        &[],
        apply(Op::Split {
            dim: 1,
            sizes: vec![1, 3, 2],
        }),
    );
    check(
        "split with an unused piece",
        &[t(&[2, 6])],
        &[],
        |module, params, _| {
            Ok(module
                .apply(
                    Op::Split {
                        dim: 1,
                        sizes: vec![4, 2],
                    },
                    &[&params[0]],
                )?
                .into_iter()
                .take(1)
                .collect())
        },
    );
    check(
        "concat",
        &[t(&[2, 1, 2]), t(&[2, 3, 2])],
        &[],
        apply(Op::Concat { dim: 1 }),
    );
}

#[test]
fn attention() {
    for (heads, kv_heads, causal, window, dropout) in [
        (2, 2, true, None, 0.0),
        (4, 2, true, None, 0.2),
        (2, 1, false, None, 0.0),
        (2, 2, true, Some(3), 0.1),
    ] {
        let dropout = (dropout > 0.0).then_some(DropoutSpec {
            p: dropout,
            key: 5,
            slice: None,
            nested: None,
        });
        let spec = Attention {
            heads,
            kv_heads,
            head_dim: 3,
            scale: 0.7,
            causal,
            window,
            dropout,
            ..Attention::default()
        };
        let operands = [
            t(&[2, 5, heads * 3]),
            t(&[2, 5, kv_heads * 3]),
            t(&[2, 5, kv_heads * 3]),
        ];
        check("attention", &operands, &[], apply(Op::Attention(spec)));
    }
}

#[test]
fn attention_with_hidden_keys_and_a_table_of_relative_positions() {
    let (batch, q_len, kv_heads) = (2, 4, 1);
    for (k_len, heads, causal, dropout, seen, relative) in [
        (6, 2, false, 0.0, true, false),
        (3, 2, false, 0.0, true, true),
        (4, 4, true, 0.2, false, true),
    ] {
        let spec = Attention {
            heads,
            kv_heads,
            head_dim: 3,
            scale: 0.7,
            causal,
            ..Attention::default()
        };
        let buckets = RelativeBuckets {
            q_len,
            k_len,
            buckets: 6,
            max_distance: 5,
            bidirectional: !causal,
        };
        let mut operands = vec![
            t(&[batch, q_len, heads * 3]),
            t(&[batch, k_len, kv_heads * 3]),
            t(&[batch, k_len, kv_heads * 3]),
        ];
        operands.extend(relative.then(|| t(&[6, heads])));
        // The last keys of each sample are padding; in the second sample all are.
        let mask: Vec<_> = (0..batch * k_len)
            .map(|key| i64::from(key + 2 < k_len))
            .collect();
        let ids: &[_] = if seen {
            &[ids("seen", &[batch, k_len], &mask)]
        } else {
            &[]
        };
        check("attention with terms", &operands, ids, |module, x, ids| {
            let index = module.relative_buckets(buckets)?;
            let terms = AttentionTerms {
                seen: ids.first(),
                bias: x.get(3).map(|table| [table, &index]),
            };
            let mixed = module.attention_with([&x[0], &x[1], &x[2]], terms, &spec, dropout)?;
            Ok(vec![mixed])
        });
    }
}

#[test]
fn rotary_positions() {
    for pairs in [1, 2] {
        let rope = Rope {
            head_dim: 4,
            inv_freq: vec![1.0, 0.1][..pairs].to_vec(),
            scale: 1.5,
            inverse: false,
        };
        check(
            "rope",
            &[t(&[2, 3, 8])],
            &[ids("positions", &[3], &[0, 5, 2])],
            apply(Op::Rope(rope)),
        );
    }
}

#[test]
fn losses() {
    for label_smoothing in [0.0, 0.1] {
        check(
            "cross_entropy",
            &[t(&[4, 7])],
            &[ids("labels", &[4], &[0, 6, -100, 3])],
            apply(Op::CrossEntropy { label_smoothing }),
        );
    }
}

#[test]
fn a_parameter_used_twice_gets_both_gradients_apart() {
    check(
        "tied",
        &[t(&[4, 3])],
        &[ids("ids", &[2], &[3, 1])],
        |module, params, ids| {
            let x = module
                .apply(
                    Op::Embedding {
                        padding: None,
                        slice: None,
                    },
                    &[&ids[0], &params[0]],
                )?
                .swap_remove(0);
            Ok(vec![module.linear_with(
                &x,
                &params[0],
                WeightLayout::OutIn,
            )?])
        },
    );
}

/// What is said of a loss that adds up all results of an operation on a parameter `[2, 3, 4]`.
fn of_all_results(op: &Op, others: &[TensorType]) -> String {
    let graph = fx::trace(DType::F64, |module| {
        let init = Init::Constant(1.0);
        let x = module.param("x", &[2, 3, 4], init, ParamRole::Weight)?;
        let others = others.iter().enumerate();
        let others = others.map(|(i, ty)| module.input(&format!("input{i}"), ty.clone()));
        let others: Vec<_> = others.collect();
        let operands: Vec<_> = std::iter::once(&x).chain(&others).collect();
        let mut loss = None;
        for result in module.sub("layer").apply(op.clone(), &operands)? {
            let sum = module.sum(&result)?;
            loss = Some(match loss {
                None => sum,
                Some(loss) => module.add(&loss, &sum)?,
            });
        }
        module.output("loss", &loss.expect("it has results"));
        Ok(())
    });
    let graph = graph.expect("the operands fit");
    let (cuts, plan) = (StageCuts::whole(&graph), RecomputePlan::default());
    let program = StageProgram::training(&graph, &cuts, 0, &plan);
    match program {
        Ok(_) => "differentiable".to_owned(),
        Err(error) => error.to_string(),
    }
}

#[test]
fn a_loss_of_statistics_is_refused_where_their_gradient_would_be_lost() {
    let spec = Attention::of_heads(2, 2);
    let kv = || t(&[2, 3, 4]);
    let labels = TensorType::new([2, 3], DType::I64);
    let loss = Op::CrossEntropy {
        label_smoothing: 0.0,
    };
    let messages = [
        of_all_results(&Op::LayerNorm { eps: 1e-5 }, &[t(&[4]), t(&[4])]),
        of_all_results(&Op::RmsNorm { eps: 1e-5 }, &[t(&[4])]),
        of_all_results(&Op::Attention(spec), &[kv(), kv()]),
        of_all_results(&loss, &[labels]),
        of_all_results(
            &Op::Split {
                dim: 2,
                sizes: vec![1, 3],
            },
            &[],
        ),
    ];
    insta::assert_snapshot!(messages.join("\n"), @"
    layer: layer_norm has no gradient of its result 1, a statistic: compute it from the operands by other operations
    layer: rms_norm has no gradient of its result 1, a statistic: compute it from the operands by other operations
    layer: attention has no gradient of its result 1, a statistic: compute it from the operands by other operations
    layer: cross_entropy has no gradient of its result 1, a statistic: compute it from the operands by other operations
    differentiable
    ");
}
