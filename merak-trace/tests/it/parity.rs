//! L4: logits and losses equal those of `transformers` on the same weights and data.
//!
//! `goldens/families` has the numbers and the script that made them.

mod formula;

use self::formula::{BATCH, SEQ, Samples, TARGET, weight};
use crate::support::{backends, dtypes, floats, grad_store, interpreter, numbers, value, write};
use merak_trace::{
    Batch, DType, Graph, ParamStore, RunContext, SharedBackend,
    models::{self, Head, Model, Objective, TraceOptions, Visible},
};
use serde_json::Value as Json;
use std::{fs, path::Path};

/// Relative tolerance of law L4.
const TOLERANCE: f64 = 1e-4;

/// What the rounding of bf16 may add to a loss, relative.
const TOLERANCE_BF16: f64 = 3e-2;

const LEARNING_RATE: f64 = 3e-3;
const WEIGHT_DECAY: f64 = 0.1;

fn folder() -> &'static Path {
    Path::new(concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/tests/goldens/families"
    ))
}

fn golden(name: &str) -> Json {
    let text = fs::read(folder().join(format!("{name}.json"))).expect("the golden is there");
    let mut golden: Json =
        serde_json::from_slice(&text).expect("the golden is as the script writes it");
    if golden["parameters"].get("lm_head.weight").is_some() {
        // merak-ckpt makes this correction if a configuration ties weights that differ.
        golden["config"]["tie_word_embeddings"] = false.into();
    }
    golden
}

fn list(golden: &Json, name: &str) -> Vec<f64> {
    let numbers = golden[name].as_array().expect("a list").iter();
    numbers.map(|x| x.as_f64().expect("a number")).collect()
}

fn options(model: &dyn Model) -> TraceOptions {
    let seq = match model.objective() {
        Objective::ImageClassification => model.info().max_seq,
        _ => SEQ,
    };
    TraceOptions {
        target_seq: Some(TARGET),
        visible: match model.objective() {
            Objective::CausalLm => Visible::Unpadded,
            _ => Visible::All,
        },
        ..TraceOptions::training(BATCH, seq)
    }
}

/// Parameters with the values of the formula, under the names of the golden.
fn params(backend: &SharedBackend, graph: &Graph, golden: &Json) -> ParamStore {
    let shapes: serde_json::Map<String, Json> = graph
        .params()
        .iter()
        .map(|param| (param.name.clone(), param.full.shape.clone().into()))
        .collect();
    assert_eq!(Json::Object(shapes), golden["parameters"]);
    let (mut offsets, mut values) = (Vec::new(), Vec::new());
    for param in graph.params() {
        offsets.push(values.len());
        values.extend(weight(&param.name, param.full.numel()));
    }
    let store = backend.param_store(graph.params(), &offsets, values.len());
    let mut store = store.expect("the layout fits");
    write(&mut *store.flat, &values);
    store
}

fn batch(backend: &SharedBackend, graph: &Graph, config: &Json, step: usize) -> (Batch, usize) {
    let (mut batch, mut labels) = (Batch::new(), 0);
    for port in graph.inputs() {
        let ty = graph.ty(port.value);
        let data = Samples(config).batch(&port.name, step, ty.numel());
        if port.name == "labels" {
            labels = data.iter().filter(|&&label| label >= 0.0).count();
        }
        batch.insert(port.name.clone(), value(backend, ty, &data));
    }
    (batch, labels)
}

/// The moments of Adam and its update.
struct AdamW {
    moments: Vec<[f64; 2]>,
    steps: i32,
}

impl AdamW {
    fn step(&mut self, values: &mut [f64], grads: &[f64]) {
        self.steps += 1;
        let unbias = [0.9_f64, 0.999].map(|beta| 1.0 - beta.powi(self.steps));
        for ((value, moments), grad) in values.iter_mut().zip(&mut self.moments).zip(grads) {
            moments[0] = 0.9 * moments[0] + 0.1 * grad;
            moments[1] = 0.999 * moments[1] + 0.001 * grad * grad;
            *value *= 1.0 - LEARNING_RATE * WEIGHT_DECAY;
            let root = (moments[1] / unbias[1]).sqrt() + 1e-8;
            *value -= LEARNING_RATE * moments[0] / unbias[0] / root;
        }
    }
}

/// Logits of the first batch, with dropout in the graph and switched off.
fn own_logits(backend: &SharedBackend, golden: &Json) -> Vec<f64> {
    let model = models::from_config(&golden["config"]).expect("the configuration is known");
    let options = options(&*model).with_head(Head::Logits);
    let graph = model.trace(&options).expect("the model can be traced");
    let runner = interpreter(backend, &graph);
    let params = params(backend, &runner.program().graph, golden);
    let (batch, _) = batch(backend, &graph, &golden["config"], 0);
    let context = RunContext::default();
    let out = runner.forward(&params.views, &batch, Vec::new(), context);
    let mut logits = numbers(backend, &out.expect("the model runs").outputs[0]);
    if model.objective() == Objective::CausalLm {
        // Logits at padding do not count.
        let mask = Samples(&golden["config"]).batch("attention_mask", 0, BATCH * SEQ);
        let rows = logits.chunks_mut(model.info().vocab_size).zip(mask);
        rows.for_each(|(row, seen)| row.iter_mut().for_each(|x| *x *= seen));
    }
    logits
}

/// The losses of a training in an element type.
fn own_losses(backend: &SharedBackend, dtype: DType, golden: &Json, steps: usize) -> Vec<f64> {
    let config = &golden["config"];
    let model = models::from_config(config).expect("the configuration is known");
    let options = TraceOptions {
        dtype,
        ..options(&*model)
    };
    let graph = model.trace(&options).expect("the model can be traced");
    let runner = interpreter(backend, &graph);
    let program = runner.program();
    let mut params = params(backend, &program.graph, golden);
    let mut adam = AdamW {
        moments: vec![[0.0; 2]; graph.num_elements()],
        steps: 0,
    };
    let mut losses = Vec::new();
    for step in 0..steps {
        let (batch, labels) = batch(backend, &graph, config, step);
        let context = RunContext::default();
        let out = runner.forward(&params.views, &batch, Vec::new(), context);
        let mut out = out.expect("the model runs");
        losses.push(numbers(backend, &out.outputs[0])[0] / labels as f64);
        let mut store = grad_store(backend, program);
        let scale = 1.0 / labels as f64;
        let (frame, views) = (&mut out.frame, &params.views);
        runner
            .backward(frame, views, Vec::new(), scale, &mut store)
            .expect("the model runs backward");

        let mut grads = vec![Vec::new(); graph.params().len()];
        for (port, buffer) in program.grads.iter().zip(&store.buffers) {
            let sum: &mut Vec<f64> = &mut grads[port.param.index()];
            let grad = floats(buffer.dtype(), &**buffer);
            sum.resize(grad.len(), 0.0);
            sum.iter_mut().zip(grad).for_each(|(sum, x)| *sum += x);
        }
        let mut values = floats(params.flat.dtype(), &*params.flat);
        adam.step(&mut values, &grads.concat());
        write(&mut *params.flat, &values);
    }
    losses
}

fn check(names: &[&str]) {
    for backend in backends(2) {
        for name in names {
            check_on(&backend, name, &golden(name));
        }
    }
}

fn check_on(backend: &SharedBackend, name: &str, golden: &Json) {
    let name = format!("{name} on {}", backend.name());
    let (own, expected) = (own_logits(backend, golden), list(golden, "logits"));
    assert_eq!(own.len(), expected.len(), "{name}");
    let largest = expected.iter().fold(0.0, |max: f64, x| max.max(x.abs()));
    for (index, (own, expected)) in own.iter().zip(&expected).enumerate() {
        assert!(
            (own - expected).abs() <= TOLERANCE * largest,
            "logit {index} of {name}: {own} against {expected}"
        );
    }
    let expected = list(golden, "losses");
    assert_eq!(expected.len(), 10, "{name}");
    for (dtype, tolerance) in [(DType::F32, TOLERANCE), (DType::BF16, TOLERANCE_BF16)] {
        if !dtypes(backend).contains(&dtype) {
            continue;
        }
        let own = own_losses(backend, dtype, golden, expected.len());
        for (step, (own, expected)) in own.iter().zip(&expected).enumerate() {
            assert!(
                (own / expected - 1.0).abs() <= tolerance,
                "step {step} of {name} in {dtype}: {own} against {expected}"
            );
        }
    }
}

#[test]
fn bert_has_the_numbers_of_transformers() {
    check(&["bert-masked", "bert-masked-variant", "bert-classes"]);
}

#[test]
fn t5_has_the_numbers_of_transformers() {
    check(&["t5", "t5-gated", "t5-silu"]);
}

#[test]
fn decoders_with_padding_before_the_tokens_have_the_numbers_of_transformers() {
    check(&["gpt2-left", "gpt_neox-left", "llama-left", "opt-left"]);
}

#[test]
fn vit_has_the_numbers_of_transformers() {
    check(&["vit", "vit-variant"]);
}
