//! Every operation's gradient against central finite differences in f64.

use crate::{
    conformance::{Case, agree},
    support::{
        backend, context, floats, grad_store, interpreter, noise, numbers, params, value, write,
    },
};
use merak_trace::{
    Batch, DType, Init, Op, ParamRole, Result, TensorType,
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
    check_by_differences(name, operands, ids, &build);
    agree(&Case {
        name,
        operands,
        ids,
        build: &build,
    });
}

/// Checks the gradients of `sum(weights * op(operands))`, every float operand being a parameter.
fn check_by_differences(
    name: &str,
    operands: &[TensorType],
    ids: &[(&str, TensorType, &[i64])],
    build: impl Fn(&Module, &[Symbol], &[Symbol]) -> Result<Vec<Symbol>>,
) {
    let graph = fx::trace(DType::F64, |module| {
        let params: Vec<_> = operands
            .iter()
            .enumerate()
            .map(|(i, ty)| {
                module.param(
                    &format!("operand{i}"),
                    &ty.shape,
                    Init::Normal(1.0),
                    ParamRole::Weight,
                )
            })
            .collect::<Result<_>>()?;
        let ids: Vec<_> = ids
            .iter()
            .map(|(name, ty, _)| module.input(name, ty.clone()))
            .collect();
        let mut total = None;
        for (i, y) in build(module, &params, &ids)?.into_iter().enumerate() {
            // A weight for each element, so that no gradient is hidden by symmetry.
            let loss = if y.ty() == &TensorType::scalar(DType::F64) {
                y
            } else {
                let weights = module.input(&format!("weights{i}"), y.ty().clone());
                let weighted = module.mul(&y, &weights)?;
                module.apply(Op::SumAll, &[&weighted])?.swap_remove(0)
            };
            total = Some(match total {
                None => loss,
                Some(sum) => module.add(&sum, &loss)?,
            });
        }
        module.output("loss", &total.expect("an operation has a result"));
        Ok(())
    })
    .expect(name);

    let backend = backend(1);
    let runner = interpreter(&backend, &graph);
    let mut store = params(&backend, &runner.program().graph);
    let mut batch = Batch::new();
    for port in graph.inputs() {
        let ty = graph.ty(port.value);
        let data = ids
            .iter()
            .find(|(name, _, _)| *name == port.name)
            .map_or_else(
                || noise(17 + u64::from(port.value.0), ty.numel()),
                |(_, _, data)| data.iter().map(|&x| x as f64).collect(),
            );
        batch.insert(port.name.clone(), value(&backend, ty, &data));
    }
    let loss = |store: &merak_trace::ParamStore| {
        let out = runner
            .forward(&store.views, &batch, Vec::new(), context())
            .expect(name);
        numbers(&backend, &out.outputs[0])[0]
    };
    let mut grads = grad_store(&backend, runner.program());
    let mut out = runner
        .forward(&store.views, &batch, Vec::new(), context())
        .expect("runs as above");
    runner
        .backward(&mut out.frame, &store.views, Vec::new(), 1.0, &mut grads)
        .expect(name);

    let base = floats(DType::F64, &*store.flat);
    let mut offset = 0;
    for (index, param) in runner.program().graph.params().iter().enumerate() {
        // Uses of one parameter accumulate apart.
        let mut analytic = vec![0.0; param.local.numel()];
        for (grad, buffer) in runner.program().grads.iter().zip(&grads.buffers) {
            if grad.param.index() == index {
                analytic
                    .iter_mut()
                    .zip(floats(DType::F64, &**buffer))
                    .for_each(|(sum, x)| *sum += x);
            }
        }
        let scale = analytic.iter().fold(1e-3_f64, |max, x| max.max(x.abs()));
        for i in 0..param.local.numel() {
            let mut shifted = base.clone();
            shifted[offset + i] = base[offset + i] + STEP;
            write(&mut *store.flat, &shifted);
            let above = loss(&store);
            shifted[offset + i] = base[offset + i] - STEP;
            write(&mut *store.flat, &shifted);
            let below = loss(&store);
            let numeric = (above - below) / (2.0 * STEP);
            assert!(
                (numeric - analytic[i]).abs() <= 2e-6 * scale.max(numeric.abs()),
                "{name}: {} element {i}: {} by the graph, {numeric} by differences",
                param.name,
                analytic[i]
            );
        }
        write(&mut *store.flat, &base);
        offset += param.local.numel();
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
        |module, params, ids| module.apply(Op::Embedding { padding: None }, &[&ids[0], &params[0]]),
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
        });
        let spec = Attention {
            heads,
            kv_heads,
            head_dim: 3,
            scale: 0.7,
            causal,
            window,
            dropout,
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
            window: None,
            dropout: None,
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
                .apply(Op::Embedding { padding: None }, &[&ids[0], &params[0]])?
                .swap_remove(0);
            Ok(vec![module.linear_with(
                &x,
                &params[0],
                WeightLayout::OutIn,
            )?])
        },
    );
}
