//! Adapters have the numbers of `peft`: logits, losses, greedy tokens, and the tensors of their
//! files.

use std::{collections::BTreeMap, fs, path::Path};

use merak_ckpt::{
    ADAPTER_CONFIG, Adapter, Checkpoint, GenerateOptions, HfFolder, LoraConfig, adapt, extract_lora,
};
#[cfg(feature = "tch")]
use merak_ckpt::{DType, Kind};
use merak_trace::{
    SharedBackend,
    models::{self, Head, TraceOptions},
};
use serde::Deserialize;
use serde_json::Value;
use tempfile::tempdir;

use super::{Golden, formula::weight, logit_gaps, logits_of, loss_gaps, write_checkpoint};
use crate::support::Case;

/// What `peft` computed.
#[derive(Debug, Deserialize)]
struct LoraGolden {
    base: String,
    lora: Value,
    /// Names of what it trained.
    trained: Vec<String>,
    /// Names and shapes of what it saved.
    saved: BTreeMap<String, Vec<usize>>,
    logits: Vec<Vec<f64>>,
    losses: Vec<f64>,
    prompts: Vec<Vec<u32>>,
    tokens: Vec<Vec<u32>>,
    tokens_without: Vec<Vec<u32>>,
}

impl LoraGolden {
    fn read(name: &str) -> Self {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/goldens/lora");
        let text = fs::read(folder.join(format!("{name}.json"))).expect("the golden is there");
        serde_json::from_slice(&text).expect("the golden is as the script writes it")
    }

    fn own_logits(&self, base: &Golden, backend: &SharedBackend) -> Vec<Vec<f64>> {
        let model = models::from_config(&base.config).expect("the configuration is known");
        let rows = self.logits.len();
        let options = TraceOptions::training(rows, base.seq).with_head(Head::Logits);
        let graph = model.trace(&options).expect("the model can be traced");
        let config = LoraConfig::from_json(&self.lora).expect("the configuration is peft's");
        let adapted = adapt(&graph, &config, "default", model.info().family);
        let graph = adapted.expect("the model has the targets").graph;
        let trained = graph.params().iter().filter(|param| param.trainable);
        let mut trained: Vec<_> = trained.map(|param| param.name.clone()).collect();
        trained.sort();
        assert_eq!(trained, self.trained);
        logits_of(backend, &graph, &base.samples(), base.seq, rows)
    }
}

/// A checkpoint with the weights of the formula, the adapter's too.
fn start(case: &Case, base: &Golden, folder: &Path) -> std::path::PathBuf {
    let fresh = case.clone().writing(&folder.join("fresh"));
    let saved = fresh.on_ranks(merak_trainer::MerakTrainer::save_checkpoint);
    let fresh = Checkpoint::open(&saved[0]).expect("it was just saved");
    let plan = case.plan();
    let values = plan.graph.params().iter().map(|param| {
        let values = weight(&param.name, param.full.numel());
        let bytes = bytemuck::cast_slice::<f32, u8>(&values).to_vec();
        (param.name.clone(), param.full.shape.clone(), bytes)
    });
    let config = base.config.to_string();
    let adapter = fs::read(fresh.path().join(ADAPTER_CONFIG)).expect("it travels along");
    let files = [
        ("config.json", config.as_bytes()),
        (ADAPTER_CONFIG, &adapter),
    ];
    let header = fresh.manifest().header.clone();
    write_checkpoint(
        &folder.join("start"),
        header,
        &values.collect::<Vec<_>>(),
        &files,
    )
}

fn greedy() -> GenerateOptions {
    GenerateOptions {
        max_new_tokens: 6,
        temperature: 0.0,
        ..GenerateOptions::default()
    }
}

/// The greedy tokens of a case, with an adapter merged into its weights.
fn tokens(case: &Case, prompts: &[Vec<u32>], adapter: Option<&Adapter>) -> Vec<Vec<u32>> {
    let mut ranks = case.on_ranks(|trainer| {
        if let Some(adapter) = adapter {
            trainer.set_adapter(Some(adapter))?;
        }
        trainer.generate(prompts, &greedy())
    });
    let completions = ranks.swap_remove(0).into_iter();
    completions.map(|completion| completion.ids).collect()
}

fn check(name: &str) {
    let golden = LoraGolden::read(name);
    let base = Golden::read(&golden.base);
    let logits = |backend: &SharedBackend| golden.own_logits(&base, backend);
    let mut gaps = logit_gaps(name, &logits, &golden.logits);
    let folder = tempdir().expect("a temporary folder");
    let case = base.case().with_lora(folder.path(), &golden.lora);
    let start = start(&case, &base, folder.path());
    let case = case
        .with("resume_from_checkpoint", start.display())
        .with("finetune", true);
    gaps.extend(loss_gaps(name, &case, &golden.losses));
    assert!(gaps.is_empty(), "{}", gaps.join("\n"));

    let adapter = folder.path().join("adapter");
    let checkpoint = Checkpoint::open(&start).expect("it was just written");
    extract_lora(&checkpoint, &adapter).expect("it has an adapter");
    assert_saved_as_by_peft(&adapter, &golden);

    // Beside the layers, merged into them, and without.
    let hf = folder.path().join("hf");
    base.write_hf(&hf);
    let weights = HfFolder::open(&hf).expect("a Hugging Face folder");
    let adapter = Adapter::open(&adapter, weights.config(), weights.tensors());
    let mut adapter = adapter.expect("the adapter fits");
    let measured = adapter.measure(&Checkpoint::open_weights(&hf).expect("it opens"));
    measured.expect("the base is readable");
    let plain = base
        .case()
        .with("resume_from_checkpoint", hf.display())
        .with("finetune", true);
    for degrees in [(1, 1, 1), (1, 2, 2)] {
        let (case, plain) = (case.clone().on(degrees), plain.clone().on(degrees));
        assert_eq!(tokens(&case, &golden.prompts, None), golden.tokens);
        let merged = tokens(&plain, &golden.prompts, Some(&adapter));
        assert_eq!(merged, golden.tokens, "merged");
        assert_switches(&plain, &golden, &adapter);
    }
}

/// The file that peft would have saved.
fn assert_saved_as_by_peft(adapter: &Path, golden: &LoraGolden) {
    let bytes = fs::read(adapter.join("adapter_model.safetensors")).expect("it was written");
    let file = safetensors::SafeTensors::deserialize(&bytes).expect("it is sound");
    let saved = file.tensors().into_iter();
    let saved: BTreeMap<_, _> = saved
        .map(|(name, view)| (name, view.shape().to_vec()))
        .collect();
    // peft saves the biases of a module that it trains whole twice more.
    let is_copy =
        |name: &str| name.contains(".modules_to_save.") || name.contains(".original_module.");
    let mut expected = golden.saved.clone();
    expected.retain(|name, _| !is_copy(name));
    assert_eq!(saved, expected);
}

/// Adapters are merged and removed one after the other, in one process.
fn assert_switches(plain: &Case, golden: &LoraGolden, adapter: &Adapter) {
    let mut switched = plain.on_ranks(|trainer| {
        let adapters = [None, Some(adapter), None, Some(adapter)].into_iter();
        let tokens = adapters.map(|adapter| {
            trainer.set_adapter(adapter)?;
            let completions = trainer.generate(&golden.prompts, &greedy())?.into_iter();
            let ids: Vec<_> = completions.map(|completion| completion.ids).collect();
            Ok((ids, trainer.parameters()?))
        });
        tokens.collect::<merak_trainer::Result<Vec<_>>>()
    });
    let switched = switched.swap_remove(0);
    for (turn, (tokens, parameters)) in switched.iter().enumerate() {
        let (is_adapted, first) = (turn % 2 == 1, turn % 2);
        let expected = if is_adapted {
            &golden.tokens
        } else {
            &golden.tokens_without
        };
        assert_eq!(tokens, expected, "turn {turn}");
        assert_eq!(*parameters, switched[first].1, "the same bits again");
    }
}

#[test]
fn adapters_of_fused_layers_with_patterns_and_biases_have_the_numbers_of_peft() {
    check("gpt2");
}

#[test]
fn adapters_of_a_table_have_the_numbers_of_peft() {
    check("gpt2-embedding");
}

#[test]
fn adapters_of_every_linear_layer_have_the_numbers_of_peft() {
    check("llama");
}

#[test]
fn adapters_with_magnitudes_have_the_numbers_of_peft() {
    check("llama-dora");
    check("gpt2-dora");
}

/// What `peft` computed with an adapter beside a base in bf16.
#[cfg(feature = "tch")]
#[derive(Debug, Deserialize)]
struct NarrowGolden {
    base: String,
    lora: Value,
    losses: Vec<f64>,
    /// Types of the elements of every parameter.
    dtypes: BTreeMap<String, String>,
    /// Norms of what it trained, after the last step.
    norms: BTreeMap<String, f64>,
}

#[cfg(feature = "tch")]
#[test]
fn f32_adapters_beside_a_bf16_base_have_the_numbers_of_peft() {
    /// Kernels round to 8 bits in different places.
    const TOLERANCE: f64 = 2e-3;
    /// Adam makes steps of one size from gradients of any size, even from those that are mostly
    /// rounding.
    const NORM_TOLERANCE: f64 = 1e-2;
    for name in ["gpt2-bf16", "llama-bf16", "llama-dora-bf16"] {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/goldens/lora");
        let text = fs::read(path.join(format!("{name}.json"))).expect("the golden is there");
        let golden: NarrowGolden =
            serde_json::from_slice(&text).expect("the golden is as the script writes it");
        let base = Golden::read(&golden.base);
        let folder = tempdir().expect("a temporary folder");
        let case = base.case().with_lora(folder.path(), &golden.lora);
        let case = case.with("compute.backend", "tch").with("bf16", true);
        let start = start(&case, &base, folder.path());
        let case = case
            .with("resume_from_checkpoint", start.display())
            .with("finetune", true)
            .writing(&folder.path().join("run"));
        for degrees in [(1, 1, 1), (1, 2, 2)] {
            let run = case.clone().on(degrees).run(golden.losses.len());
            for (report, expected) in run.reports.iter().zip(&golden.losses) {
                let (step, loss) = (report.step, report.loss);
                let gap = (loss / expected - 1.0).abs();
                assert!(
                    gap < TOLERANCE,
                    "{name}, step {step}: {loss}, expected {expected}"
                );
            }
            for (param, expected) in &golden.norms {
                let squares = run.weights[param].iter().map(|&x| f64::from(x).powi(2));
                let norm = squares.sum::<f64>().sqrt();
                let gap = (norm / expected - 1.0).abs();
                assert!(
                    gap < NORM_TOLERANCE,
                    "{name}, {param}: {norm}, expected {expected}"
                );
            }
        }
        let saved = case.on_ranks(merak_trainer::MerakTrainer::save_checkpoint);
        let saved = Checkpoint::open(&saved[0]).expect("it was just saved");
        for tensor in saved.manifest().tensors_of(&Kind::Parameter) {
            let expected = match golden.dtypes[&tensor.name].as_str() {
                "bfloat16" => DType::BF16,
                _ => DType::F32,
            };
            assert_eq!(tensor.dtype, expected, "{name}: {}", tensor.name);
        }
    }
}
