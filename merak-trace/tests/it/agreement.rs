//! Runs a case, an operation with operands, on every backend and in every element type, and
//! compares its results and gradients with a reference.
//!
//! The reference is the candle backend in f64, whose gradients the finite differences of
//! `gradients` check. Each case also runs with operands that are frozen and kept in bf16, where
//! results may not change by a bit.

use crate::support::{
    autocasting, backend, backends, context, dtypes, floats, grad_store, interpreter_in, noise,
    value, views,
};
use merak_trace::{
    AxisGroups, Batch, Coord, DType, Graph, Init, Op, ParamRole, Result, RunContext, SharedBackend,
    SingleRank, TensorType,
    fx::{self, Module, Symbol},
};
use std::{collections::BTreeMap, ops::Range, sync::Arc};

/// Makes the nodes of a case from its operands and integers.
pub(crate) type Build<'a> = dyn Fn(&Module, &[Symbol], &[Symbol]) -> Result<Vec<Symbol>> + 'a;

/// An operation on float operands (parameters) and integers (inputs).
pub(crate) struct Case<'a> {
    pub(crate) name: &'a str,
    pub(crate) operands: &'a [TensorType],
    pub(crate) ids: &'a [(&'a str, TensorType, &'a [i64])],
    pub(crate) build: &'a Build<'a>,
}

impl Case<'_> {
    /// `sum(weights * op(operands))` in an element type.
    pub(crate) fn graph(&self, dtype: DType) -> Graph {
        fx::trace(dtype, |module| trace(module, self)).expect(self.name)
    }

    /// The integers, as the inputs of its graph.
    pub(crate) fn batch(&self, graph: &Graph, backend: &SharedBackend) -> Batch {
        let mut batch = Batch::new();
        for port in graph.inputs() {
            let ids = self.ids.iter().find(|(name, _, _)| *name == port.name);
            let (_, ty, ids) = ids.expect("integers are the only inputs");
            let ids: Vec<_> = ids.iter().map(|&x| x as f64).collect();
            batch.insert(port.name.clone(), value(backend, ty, &ids));
        }
        batch
    }
}

/// Checks that every backend gives the reference's results and gradients, in each of its element
/// types.
pub(crate) fn agree(case: &Case<'_>) {
    compare(case, None, &backends(2));
    keeps_narrow(case);
    autocasts(case);
}

/// Checks that a backend which computes in 16 bits over operands of f32, by the table of autocast,
/// gives the reference's results and gradients within the rounding of these.
fn autocasts(case: &Case<'_>) {
    let reference = backend(1);
    for dtype in [DType::BF16, DType::F16] {
        for backend in autocasting(dtype, 2) {
            let run = Run {
                rounded: dtype,
                ..Run::new(&backend, DType::F32)
            };
            let exact = Run {
                backend: &reference,
                dtype: DType::F64,
                ..run.clone()
            };
            let (expected, found) = (measure(case, &exact), measure(case, &run));
            for (what, expected) in &expected {
                let place = format!("{} under autocast to {dtype}: {what}", case.name);
                near(&place, &found[what], expected, tolerance(dtype), true);
            }
        }
    }
}

/// Checks that operands of f32 which are kept in bf16 give the bits of the same numbers kept in
/// f32: each alone, so that gradients pass beside it, and all of them.
pub(crate) fn keeps_narrow(case: &Case<'_>) {
    let backend = backend(2);
    let count = case.operands.len();
    let each = (0..count).map(|operand| operand..operand + 1);
    for frozen in each.chain(std::iter::once(0..count)) {
        let wide = Run {
            rounded: DType::BF16,
            frozen: frozen.clone(),
            ..Run::new(&backend, DType::F32)
        };
        let narrow = Run {
            kept: Some(DType::BF16),
            ..wide.clone()
        };
        let (expected, found) = (measure(case, &wide), measure(case, &narrow));
        let bits = |numbers: &[f64]| numbers.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
        for (what, expected) in &expected {
            let place = format!("{}, {what}: operands {frozen:?} in bf16", case.name);
            assert_eq!(bits(&found[what]), bits(expected), "{place}");
        }
    }
}

/// As [`agree`], on some backends, with one element of the first operand replaced.
pub(crate) fn compare(case: &Case<'_>, poison: Option<f64>, backends: &[SharedBackend]) {
    let reference = backend(1);
    for backend in backends {
        for &dtype in dtypes(backend) {
            let run = Run {
                poison,
                ..Run::new(backend, dtype)
            };
            let expected = measure(
                case,
                &Run {
                    backend: &reference,
                    dtype: DType::F64,
                    ..run.clone()
                },
            );
            let found = measure(case, &run);
            let place = format!("{} on {} in {dtype}", case.name, backend.name());
            for (what, expected) in &expected {
                near(
                    &format!("{place}: {what}"),
                    &found[what],
                    expected,
                    tolerance(dtype),
                    backend.name() == "tch",
                );
            }
        }
    }
}

/// How a case is run.
#[derive(Debug, Clone)]
pub(crate) struct Run<'a> {
    pub(crate) backend: &'a SharedBackend,
    pub(crate) dtype: DType,
    /// The type to which operands are rounded, so that the reference sees the numbers of a narrower
    /// type.
    pub(crate) rounded: DType,
    /// The replacement of the middle element of the first operand.
    pub(crate) poison: Option<f64>,
    /// Operands that have no gradient.
    pub(crate) frozen: Range<usize>,
    /// The type in which these are kept, if not their own.
    pub(crate) kept: Option<DType>,
    pub(crate) groups: Arc<dyn AxisGroups>,
    /// The rank's place on the mesh.
    pub(crate) place: Coord,
}

impl<'a> Run<'a> {
    /// On one rank.
    pub(crate) fn new(backend: &'a SharedBackend, dtype: DType) -> Self {
        Self {
            backend,
            dtype,
            rounded: dtype,
            poison: None,
            frozen: 0..0,
            kept: None,
            groups: Arc::new(SingleRank),
            place: Coord::default(),
        }
    }
}

/// Rounding of the type, times its growth over a chain of a few operations.
pub(crate) fn tolerance(dtype: DType) -> f64 {
    match dtype {
        DType::F64 => 1e-9,
        DType::F32 => 2e-5,
        DType::F16 => 8e-3,
        _ => 6e-2,
    }
}

/// Numbers agree within rounding of the largest one, NaN with NaN and an infinity with itself. If
/// `is_loose`, NaN and an infinity agree too, as libtorch's own `f32` and `f64` kernels of one
/// function disagree there.
pub(crate) fn near(what: &str, found: &[f64], expected: &[f64], tolerance: f64, is_loose: bool) {
    assert_eq!(found.len(), expected.len(), "{what}");
    let finite = expected.iter().filter(|x| x.is_finite());
    let scale = finite.fold(0.1_f64, |max, x| max.max(x.abs()));
    for (i, (&found, &expected)) in found.iter().zip(expected).enumerate() {
        let same = if expected.is_finite() {
            (found - expected).abs() <= tolerance * scale
        } else if expected.is_nan() {
            found.is_nan() || is_loose && found.is_infinite()
        } else {
            is_loose && found.is_nan() || found.to_bits() == expected.to_bits()
        };
        assert!(same, "{what}: element {i} is {found}, expected {expected}");
    }
}

/// Results, as gradients of the weights in `sum(weights * op(operands))`, and gradients of the
/// operands.
pub(crate) fn measure(case: &Case<'_>, run: &Run<'_>) -> BTreeMap<String, Vec<f64>> {
    let (backend, poison) = (run.backend, run.poison);
    let mut graph = case.graph(run.dtype);
    for operand in run.frozen.clone() {
        // An operand that no node reads is not in the graph.
        if let Some(id) = graph.find_param(&format!("operand{operand}")) {
            let param = graph.param_mut(id);
            (param.trainable, param.kept) = (false, run.kept);
        }
    }
    let runner = interpreter_in(backend, &graph, Arc::clone(&run.groups));
    let params = runner.program().graph.params();
    let mut data = Vec::new();
    for (index, param) in params.iter().enumerate() {
        let numbers = noise(31 + index as u64, param.local.numel());
        let mut numbers: Vec<_> = numbers.iter().map(|&x| round(run.rounded, x)).collect();
        if let Some(poison) = poison.filter(|_| param.name == "operand0") {
            let middle = numbers.len() / 2;
            numbers[middle] = poison;
        }
        data.push(numbers);
    }
    let views = views(backend, params, &data);
    let batch = case.batch(&graph, backend);
    let mut grads = grad_store(backend, runner.program());
    let context = RunContext {
        place: run.place,
        ..context()
    };
    let out = runner.forward(&views, &batch, Vec::new(), context);
    let mut out = out.expect(case.name);
    let loss = crate::support::numbers(backend, &out.outputs[0]);
    runner
        .backward(&mut out.frame, &views, Vec::new(), 1.0, &mut grads)
        .expect(case.name);

    let mut measured = BTreeMap::new();
    // Otherwise the loss is a long sum that cancels, and the results themselves are compared.
    if poison.is_none() && !params.iter().any(|param| param.name.starts_with("weights")) {
        measured.insert("loss".to_owned(), loss);
    }
    for (grad, buffer) in runner.program().grads.iter().zip(&grads.buffers) {
        let values = floats(buffer.dtype(), &**buffer);
        let sum: &mut Vec<f64> = measured
            .entry(params[grad.param.index()].name.clone())
            .or_insert_with(|| vec![0.0; values.len()]);
        sum.iter_mut().zip(values).for_each(|(sum, x)| *sum += x);
    }
    measured
}

fn trace(module: &Module, case: &Case<'_>) -> Result<()> {
    let param = |name: String, shape: &[usize]| {
        module.param(&name, shape, Init::Normal(1.0), ParamRole::Weight)
    };
    let operands = case.operands.iter().enumerate();
    let operands: Vec<_> = operands
        .map(|(i, ty)| param(format!("operand{i}"), &ty.shape))
        .collect::<Result<_>>()?;
    let ids: Vec<_> = case
        .ids
        .iter()
        .map(|(name, ty, _)| module.input(name, ty.clone()))
        .collect();
    let mut total: Option<Symbol> = None;
    for (i, y) in (case.build)(module, &operands, &ids)?
        .into_iter()
        .enumerate()
    {
        let loss = if y.ty() == &TensorType::scalar(DType::F64) {
            y
        } else {
            let dtype = y.ty().dtype;
            let weights = param(format!("weights{i}"), &y.ty().shape)?;
            let weights = module
                .apply(Op::Cast { dtype }, &[&weights])?
                .swap_remove(0);
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
}

pub(crate) fn round(dtype: DType, x: f64) -> f64 {
    match dtype {
        DType::F32 => f64::from(x as f32),
        DType::BF16 => half::bf16::from_f64(x).to_f64(),
        DType::F16 => half::f16::from_f64(x).to_f64(),
        _ => x,
    }
}
