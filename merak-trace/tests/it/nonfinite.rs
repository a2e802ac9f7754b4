//! NaN and infinity go through operations and their gradients as in PyTorch.
//!
//! `goldens/nonfinite` has the numbers and the script that made them.

use crate::support::{backend, floats, grad_store, interpreter, numbers, params, value, write};
use merak_trace::{
    Batch, DType, Graph, Init, Op, ParamRole, RunContext, TensorType,
    fx::{self, AttentionTerms},
    op::{Activation, Attention, WeightLayout},
};
use serde::Deserialize;

/// Numbers, or the names of those that JSON has not.
#[derive(Debug, Deserialize)]
#[serde(untagged)]
enum Number {
    Finite(f64),
    Other(String),
}

impl Number {
    fn value(&self) -> f64 {
        match self {
            Self::Finite(x) => *x,
            Self::Other(name) => name.parse().expect("nan, inf or -inf"),
        }
    }
}

#[derive(Debug, Deserialize)]
struct Operand {
    shape: Vec<usize>,
    data: Vec<Number>,
}

#[derive(Debug, Deserialize)]
struct Case {
    name: String,
    op: String,
    operands: Vec<Operand>,
    ids: Vec<i64>,
    dy: Vec<Number>,
    y: Vec<Number>,
    grads: Vec<Vec<Number>>,
}

#[derive(Debug, Deserialize)]
struct Golden {
    cases: Vec<Case>,
}

fn values(numbers: &[Number]) -> Vec<f64> {
    numbers.iter().map(Number::value).collect()
}

/// Attention of two heads of three without a mask of its own.
const ATTENTION: Attention = Attention {
    heads: 2,
    kv_heads: 2,
    head_dim: 3,
    scale: 0.7,
    causal: false,
    window: None,
    dropout: None,
};

impl Case {
    fn op(&self) -> Op {
        match self.op.as_str() {
            "softmax" => Op::Softmax,
            "gelu_erf" => Op::Activation(Activation::GeluErf),
            "gelu_tanh" => Op::Activation(Activation::GeluTanh),
            "silu" => Op::Activation(Activation::Silu),
            "relu" => Op::Activation(Activation::Relu),
            "tanh" => Op::Activation(Activation::Tanh),
            "silu_mul" => Op::SiluMul,
            "layer_norm" => Op::LayerNorm { eps: 1e-5 },
            "rms_norm" => Op::RmsNorm { eps: 1e-5 },
            "linear" => Op::Linear {
                layout: WeightLayout::OutIn,
                bias: false,
            },
            "cross_entropy" => Op::CrossEntropy {
                label_smoothing: 0.0,
            },
            "embedding" => Op::Embedding { padding: None },
            other => unreachable!("the script knows no {other}"),
        }
    }

    /// `sum(dy * op(operands))`, with the result beside it.
    fn graph(&self) -> Graph {
        let traced = fx::trace(DType::F32, |module| {
            let operands = self.operands.iter().enumerate().map(|(i, operand)| {
                let name = format!("operand{i}");
                module.param(&name, &operand.shape, Init::Normal(1.0), ParamRole::Weight)
            });
            let operands = operands.collect::<merak_trace::Result<Vec<_>>>()?;
            let ids = |len: usize| module.input("ids", TensorType::new([len], DType::I64));
            let y = match self.op.as_str() {
                "attention" | "attention_masked" => {
                    let is_masked = self.op == "attention_masked";
                    let seen = is_masked
                        .then(|| module.input("seen", TensorType::new([1, 4], DType::I64)));
                    let terms = AttentionTerms {
                        seen: seen.as_ref(),
                        bias: None,
                    };
                    let [q, k, v] = [0, 1, 2].map(|i| &operands[i]);
                    module.attention_with([q, k, v], terms, &ATTENTION, 0.0)?
                }
                "embedding" => {
                    let ids = ids(self.ids.len());
                    module
                        .apply(self.op(), &[&ids, &operands[0]])?
                        .swap_remove(0)
                }
                "cross_entropy" => {
                    let ids = ids(self.ids.len());
                    module
                        .apply(self.op(), &[&operands[0], &ids])?
                        .swap_remove(0)
                }
                _ => {
                    let operands: Vec<_> = operands.iter().collect();
                    module.apply(self.op(), &operands)?.swap_remove(0)
                }
            };
            let loss = if y.ty() == &TensorType::scalar(DType::F64) {
                y.clone()
            } else {
                let dy = module.input("dy", y.ty().clone());
                let weighted = module.mul(&y, &dy)?;
                module.apply(Op::SumAll, &[&weighted])?.swap_remove(0)
            };
            module.output("loss", &loss);
            module.output("y", &y);
            Ok(())
        });
        traced.expect(&self.name)
    }

    /// The result, and the gradients of the operands.
    fn run(&self) -> (Vec<f64>, Vec<Vec<f64>>) {
        let (backend, graph) = (backend(1), self.graph());
        let runner = interpreter(&backend, &graph);
        let mut store = params(&backend, &runner.program().graph);
        let data: Vec<f64> = self
            .operands
            .iter()
            .flat_map(|operand| values(&operand.data))
            .collect();
        write(&mut *store.flat, &data);
        let mut batch = Batch::new();
        for port in graph.inputs() {
            let data = match port.name.as_str() {
                "ids" => self.ids.iter().map(|&id| id as f64).collect(),
                // The script hides the last key.
                "seen" => vec![1.0, 1.0, 1.0, 0.0],
                _ => values(&self.dy),
            };
            let ty = graph.ty(port.value);
            batch.insert(port.name.clone(), value(&backend, ty, &data));
        }
        let context = RunContext::default();
        let out = runner.forward(&store.views, &batch, Vec::new(), context);
        let mut out = out.expect(&self.name);
        let y = numbers(&backend, &out.outputs[1]);
        let mut grads = grad_store(&backend, runner.program());
        runner
            .backward(&mut out.frame, &store.views, Vec::new(), 1.0, &mut grads)
            .expect(&self.name);
        let mut by_operand = vec![Vec::new(); self.operands.len()];
        for (port, buffer) in runner.program().grads.iter().zip(&grads.buffers) {
            by_operand[port.param.index()] = floats(DType::F32, &**buffer);
        }
        (y, by_operand)
    }
}

/// What differs between two lists of numbers: not finite in another way, or apart.
fn differences(what: &str, own: &[f64], expected: &[Number]) -> Vec<String> {
    assert_eq!(own.len(), expected.len(), "{what}");
    let largest = expected.iter().map(Number::value).filter(|x| x.is_finite());
    let largest = largest.fold(1e-3, |max: f64, x| max.max(x.abs()));
    let pairs = own.iter().zip(expected.iter().map(Number::value));
    let differs = |(own, expected): (&f64, f64)| {
        if expected.is_finite() {
            own.is_nan() || (own - expected).abs() > 1e-5 * largest
        } else {
            own.to_string() != expected.to_string()
        }
    };
    pairs
        .enumerate()
        .filter(|(_, pair)| differs(*pair))
        .map(|(i, (own, expected))| format!("{what}[{i}]: {own}, {expected} in PyTorch"))
        .collect()
}

#[test]
fn nan_and_infinity_propagate_as_in_pytorch() {
    let text = include_str!("../goldens/nonfinite/pytorch.json");
    let golden: Golden = serde_json::from_str(text).expect("the script wrote it");
    let mut found = Vec::new();
    for case in &golden.cases {
        let (y, grads) = case.run();
        found.extend(differences(&format!("{}: y", case.name), &y, &case.y));
        assert_eq!(grads.len(), case.grads.len(), "{}", case.name);
        for (i, (own, expected)) in grads.iter().zip(&case.grads).enumerate() {
            let what = format!("{}: gradient {i}", case.name);
            found.extend(differences(&what, own, expected));
        }
    }
    assert!(
        found.is_empty(),
        "{} differ:\n{}",
        found.len(),
        found.join("\n")
    );
}
