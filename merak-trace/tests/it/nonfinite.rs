//! NaN and infinity go through operations and their gradients as in PyTorch.
//!
//! `goldens/nonfinite` has the numbers and the script that made them.

use crate::support::{
    backend, context, floats, grad_store, host_backends, interpreter, numbers, params, value, write,
};
use merak_trace::{
    Batch, DType, Graph, Init, Op, ParamRole, SharedBackend, TensorType,
    fx::{self, AttentionTerms, Module, Symbol},
    op::{Activation, Attention, DropoutSpec, Keys, RelativeBuckets, Rope, WeightLayout},
};
use serde::Deserialize;

/// Numbers, or the names of those that JSON lacks.
#[derive(Debug, Clone, Deserialize)]
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

#[derive(Debug, Clone, Deserialize)]
struct Operand {
    shape: Vec<usize>,
    data: Vec<Number>,
}

#[derive(Debug, Clone, Deserialize)]
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

fn repeated(numbers: &[Number]) -> Vec<Number> {
    let numbers = numbers.iter().cycle().take(numbers.len() * COPIES);
    numbers.cloned().collect()
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
    cross: false,
    documents: false,
    queries: None,
    keys: Keys::All,
    dropout: None,
};

/// The distances of four queries to four keys, each in a bucket of its own.
const BUCKETS: RelativeBuckets = RelativeBuckets {
    q_len: 4,
    k_len: 4,
    buckets: 8,
    max_distance: 4,
    bidirectional: true,
};

/// Copies of a small case's rows, more than one thread takes at a time.
const COPIES: usize = 1000;

impl Case {
    /// The operation, and whether its integers stand before the other operands.
    fn op(&self) -> (Op, bool) {
        let op = match self.op.as_str() {
            "add" => Op::Add,
            "dropout" | "dropout half" => Op::Dropout(DropoutSpec {
                p: if self.op == "dropout" { 1.0 } else { 0.5 },
                key: 3,
                slice: None,
                nested: None,
            }),
            "rope" => Op::Rope(Rope {
                head_dim: 4,
                inv_freq: vec![1.0, 0.1],
                scale: 1.0,
                inverse: false,
            }),
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
            "embedding" => {
                return (
                    Op::Embedding {
                        padding: None,
                        slice: None,
                    },
                    true,
                );
            }
            other => unreachable!("the script knows no {other}"),
        };
        (op, false)
    }

    /// The integers beside the operands.
    fn ids(&self) -> Vec<i64> {
        match self.op.as_str() {
            // The positions of the script's rows.
            "rope" => vec![0, 5, 2],
            _ => self.ids.clone(),
        }
    }

    /// The same rows many times, if all operands and the result have them.
    fn repeated(&self) -> Option<Self> {
        let shape = &self.operands[0].shape;
        let alike = self.operands.iter().all(|operand| operand.shape == *shape);
        let is_by_rows = alike && shape.len() == 2 && self.ids().is_empty();
        if !is_by_rows || self.y.len() != shape.iter().product::<usize>() {
            return None;
        }
        let mut case = self.clone();
        for operand in &mut case.operands {
            operand.shape[0] *= COPIES;
            operand.data = repeated(&operand.data);
        }
        case.grads = case.grads.iter().map(|grad| repeated(grad)).collect();
        (case.y, case.dy) = (repeated(&case.y), repeated(&case.dy));
        case.name += ", many times";
        Some(case)
    }

    fn result(&self, module: &Module, operands: &[Symbol]) -> merak_trace::Result<Symbol> {
        if self.op.starts_with("attention") {
            let is_masked = self.op == "attention_masked";
            let seen = is_masked.then(|| module.input("seen", TensorType::new([1, 4], DType::I64)));
            let index = module.relative_buckets(BUCKETS)?;
            let terms = AttentionTerms {
                seen: seen.as_ref(),
                bias: operands.get(3).map(|table| [table, &index]),
            };
            let [q, k, v] = [0, 1, 2].map(|i| &operands[i]);
            return module.attention_with([q, k, v], terms, &ATTENTION, 0.0);
        }
        let len = self.ids().len();
        let ids = (len > 0).then(|| module.input("ids", TensorType::new([len], DType::I64)));
        let (op, is_first) = self.op();
        let inputs: Vec<_> = match (&ids, is_first) {
            (Some(ids), true) => [ids].into_iter().chain(operands).collect(),
            _ => operands.iter().chain(&ids).collect(),
        };
        Ok(module.apply(op, &inputs)?.swap_remove(0))
    }

    /// `sum(dy * op(operands))`, with the result beside it.
    fn graph(&self) -> Graph {
        let traced = fx::trace(DType::F32, |module| {
            let operands = self.operands.iter().enumerate().map(|(i, operand)| {
                let name = format!("operand{i}");
                module.param(&name, &operand.shape, Init::Normal(1.0), ParamRole::Weight)
            });
            let operands = operands.collect::<merak_trace::Result<Vec<_>>>()?;
            let y = self.result(module, &operands)?;
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
    fn run(&self, backend: &SharedBackend) -> (Vec<f64>, Vec<Vec<f64>>) {
        let graph = self.graph();
        let runner = interpreter(backend, &graph);
        let mut store = params(backend, &runner.program().graph);
        let data: Vec<f64> = self
            .operands
            .iter()
            .flat_map(|operand| values(&operand.data))
            .collect();
        write(&mut *store.flat, &data);
        let mut batch = Batch::new();
        for port in graph.inputs() {
            let data = match port.name.as_str() {
                "ids" => self.ids().iter().map(|&id| id as f64).collect(),
                // The script hides the last key.
                "seen" => vec![1.0, 1.0, 1.0, 0.0],
                _ => values(&self.dy),
            };
            let ty = graph.ty(port.value);
            batch.insert(port.name.clone(), value(backend, ty, &data));
        }
        let out = runner.forward(&store.views, &batch, Vec::new(), context());
        let mut out = out.expect(&self.name);
        let y = numbers(backend, &out.outputs[1]);
        let mut grads = grad_store(backend, runner.program());
        runner
            .backward(&mut out.frame, &store.views, Vec::new(), 1.0, &mut grads)
            .expect(&self.name);
        let mut by_operand = vec![Vec::new(); self.operands.len()];
        for (port, buffer) in runner.program().grads.iter().zip(&grads.buffers) {
            by_operand[port.param.index()] = floats(DType::F32, &**buffer);
        }
        (y, by_operand)
    }

    /// The differences of a backend from PyTorch.
    fn differences(&self, backend: &SharedBackend) -> Vec<String> {
        let (y, grads) = self.run(backend);
        let name = format!("{} on {}", self.name, backend.name());
        let mut found = differences(&format!("{name}: y"), &y, &self.y);
        assert_eq!(grads.len(), self.grads.len(), "{name}");
        for (i, (own, expected)) in grads.iter().zip(&self.grads).enumerate() {
            let what = format!("{name}: gradient {i}");
            found.extend(differences(&what, own, expected));
        }
        found
    }

    /// Whether libtorch's kernels for the processor differ from the operations that the script is
    /// written in: attention treats a query of NaN as one that sees no key, and the vectors of gelu
    /// make NaN of infinity.
    fn differs_in_libtorch(&self) -> bool {
        self.op.starts_with("attention") || self.op == "gelu_erf"
    }
}

/// The differences of two lists of numbers: not finite in another way, or too far apart.
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
    let repeated: Vec<_> = golden.cases.iter().filter_map(Case::repeated).collect();
    assert!(repeated.len() > 5);
    let mut backends = host_backends(3);
    backends.push(backend(1));
    let mut found = Vec::new();
    for backend in &backends {
        let cases = golden.cases.iter().chain(&repeated);
        let cases = cases.filter(|case| backend.name() != "tch" || !case.differs_in_libtorch());
        found.extend(cases.flat_map(|case| case.differences(backend)));
    }
    assert!(
        found.is_empty(),
        "{} differ:\n{}",
        found.len(),
        found[..found.len().min(60)].join("\n")
    );
}

#[test]
fn what_is_dropped_is_multiplied_by_zero() {
    let case = |x: f64| Case {
        name: format!("dropout of {x}"),
        op: "dropout half".to_owned(),
        operands: vec![Operand {
            shape: vec![3, 33],
            data: vec![Number::Finite(x); 99],
        }],
        ids: Vec::new(),
        dy: vec![Number::Finite(1.0); 99],
        y: Vec::new(),
        grads: Vec::new(),
    };
    for backend in host_backends(2) {
        let (mask, _) = case(1.0).run(&backend);
        let dropped = mask.iter().filter(|&&kept| kept == 0.0).count();
        assert!((20..80).contains(&dropped), "{dropped} of 99");
        for x in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY, -0.0] {
            let (y, grads) = case(x).run(&backend);
            for ((y, grad), kept) in y.iter().zip(&grads[0]).zip(&mask) {
                assert_eq!(y.to_string(), (x * kept).to_string(), "{x} * {kept}");
                assert_eq!(grad.to_bits(), kept.to_bits());
            }
        }
    }
}
