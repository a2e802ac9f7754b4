//! L4: logits and losses equal those of `transformers` on the same weights and data.
//!
//! `goldens/families` has the numbers and the script that made them. Weights come in through a
//! folder as `transformers` writes it, so the names of parameters are compared with its own too.

#[cfg(feature = "tch")]
mod autocast;
pub(crate) mod formula;
mod generation;
mod imported;
mod lora;
mod search;

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
    sync::Arc,
};

use merak_ckpt::{
    Checkpoint, DType, Header, HfFolder, ImportOptions, Layout, Piece, ShardKind, Store, import_hf,
};
#[cfg(feature = "tch")]
use merak_trace::backend::tch::{Tch, TchDevice};
use merak_trace::{
    Graph, Interpreter, RunContext, SharedBackend, SingleRank, StageCuts, StageProgram,
    backend::candle::Candle,
    models::{self, Head, TraceOptions},
};
use merak_trainer::data::BatchShape;
use safetensors::tensor::TensorView;
use serde::Deserialize;
use serde_json::Value;
use tempfile::tempdir;

use self::formula::{Samples, weight};
use crate::support::Case;

/// Steps of a training.
const STEPS: usize = 10;

/// The backends of this build.
const BACKENDS: &[&str] = if cfg!(feature = "tch") {
    &["candle", "tch"]
} else {
    &["candle"]
};

/// Relative tolerance of law L4.
const TOLERANCE: f64 = 1e-4;

/// What `transformers` computed.
#[derive(Debug, Deserialize)]
struct Golden {
    config: Value,
    seq: usize,
    parameters: BTreeMap<String, Vec<usize>>,
    /// Logits of the first samples, at the positions that are not padding.
    logits: Vec<Vec<f64>>,
    losses: Vec<f64>,
}

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/goldens/families")
}

impl Golden {
    fn read(name: &str) -> Self {
        let text = fs::read(folder().join(format!("{name}.json"))).expect("the golden is there");
        serde_json::from_slice(&text).expect("the golden is as the script writes it")
    }

    fn samples(&self) -> Samples {
        let shape = BatchShape {
            batch: 2,
            microbatches: 2,
            dp: 1,
        };
        let pad = self.config["pad_token_id"].as_i64().unwrap_or(0);
        Samples::new(STEPS, shape, 1234, self.seq, pad)
    }

    /// The configuration without dropout: the script trains the model that evaluates.
    fn without_dropout(&self) -> Value {
        let mut config = self.config.clone();
        let fields = config
            .as_object_mut()
            .expect("a configuration is an object");
        for (name, value) in fields {
            if name.contains("drop") && value.is_number() {
                *value = 0.into();
            }
        }
        config
    }

    /// A training like the script's.
    fn case(&self) -> Case {
        Case::of(self.without_dropout())
            .with_data(self.samples())
            .with_microbatches(2)
            .with("seq_length", self.seq)
            .with("max_steps", STEPS + 1)
            .with("learning_rate", 3e-3)
            .with("lr_scheduler_type", "constant")
            .with("warmup_steps", 0)
    }

    /// Writes the weights as `transformers` would.
    fn write_hf(&self, to: &Path) {
        let bytes: Vec<_> = self
            .parameters
            .iter()
            .map(|(name, shape)| {
                let values = weight(name, shape.iter().product());
                (
                    name,
                    shape,
                    bytemuck::cast_slice::<f32, u8>(&values).to_vec(),
                )
            })
            .collect();
        let tensors = bytes.iter().map(|(name, shape, bytes)| {
            let view = TensorView::new(safetensors::Dtype::F32, (*shape).clone(), bytes);
            (*name, view.expect("the shape fits the values"))
        });
        fs::create_dir_all(to).expect("a folder can be made");
        let file = to.join("model.safetensors");
        safetensors::serialize_to_file(tensors, None, &file).expect("it can be written");
        fs::write(to.join("config.json"), self.config.to_string()).expect("it can be written");
    }

    /// A checkpoint of step 0 with these weights: what a fresh run writes, with other tensors.
    fn start(&self, folder: &Path) -> PathBuf {
        let fresh = folder.join("fresh");
        let case = self.case().writing(&fresh).with("no_save_optim", true);
        let saved = case.on_ranks(merak_trainer::MerakTrainer::save_checkpoint);
        let header = Checkpoint::open(&saved[0]).expect("it was just saved");
        let header = header.manifest().header.clone();

        self.write_hf(&folder.join("hf"));
        let hf = HfFolder::open(folder.join("hf")).expect("a Hugging Face folder");
        let imported = import_hf(&hf, folder.join("imported"), &ImportOptions::default());
        let imported = Checkpoint::open(imported.expect("it imports")).expect("it opens");

        let values = self.parameters.iter().map(|(name, shape)| {
            let layout = Layout::whole(shape);
            let piece = Piece::parameter(name, DType::F32, &layout);
            let mut bytes = vec![0; 4 * shape.iter().product::<usize>()];
            imported.read(&piece, &mut bytes).expect("it was imported");
            (name.clone(), shape.clone(), bytes)
        });
        let config = self.config.to_string();
        let files = [("config.json", config.as_bytes())];
        write_checkpoint(
            &folder.join("start"),
            header,
            &values.collect::<Vec<_>>(),
            &files,
        )
    }

    /// Logits of the first samples at their real positions, dropout off.
    fn own_logits(&self, backend: &SharedBackend) -> Vec<Vec<f64>> {
        let model = models::from_config(&self.config).expect("the configuration is known");
        let rows = self.logits.len();
        let options = TraceOptions::training(rows, self.seq).with_head(Head::Logits);
        let graph = model.trace(&options).expect("the model can be traced");
        let shapes = graph.params().iter();
        let shapes: BTreeMap<_, _> = shapes
            .map(|param| (param.name.clone(), param.full.shape.clone()))
            .collect();
        assert_eq!(
            shapes, self.parameters,
            "names and shapes of the parameters"
        );

        logits_of(backend, &graph, &self.samples(), self.seq, rows)
    }
}

/// Writes a checkpoint with these parameters.
fn write_checkpoint(
    folder: &Path,
    header: Header,
    values: &[(String, Vec<usize>, Vec<u8>)],
    files: &[(&str, &[u8])],
) -> PathBuf {
    let layouts: Vec<_> = values
        .iter()
        .map(|(_, shape, _)| Layout::whole(shape))
        .collect();
    let pieces = values
        .iter()
        .zip(&layouts)
        .map(|((name, _, bytes), layout)| {
            let piece = Piece::parameter(name, DType::F32, layout);
            (piece, bytes.as_slice())
        });
    let draft = Store::in_output_dir(folder).begin(0);
    let draft = draft.expect("a draft begins");
    let shard = draft.write_shard(ShardKind::Model, 0, &pieces.collect::<Vec<_>>());
    let shards = vec![shard.expect("it writes")];
    draft.commit(shards, header, files).expect("it commits")
}

/// Logits of the first samples at their real positions, of a model with the weights of the formula.
fn logits_of(
    backend: &SharedBackend,
    graph: &Graph,
    samples: &Samples,
    seq: usize,
    rows: usize,
) -> Vec<Vec<f64>> {
    let program = StageProgram::inference(graph, &StageCuts::whole(graph), 0);
    let runner = Interpreter::new(
        Arc::new(program.expect("the model can run")),
        Arc::clone(backend),
        Arc::new(SingleRank),
    );
    let (mut offsets, mut values) = (Vec::new(), Vec::new());
    for param in runner.program().params() {
        offsets.push(values.len());
        values.extend(weight(&param.name, param.full.numel()));
    }
    let params = backend.param_store(runner.program().params(), &offsets, values.len());
    let mut params = params.expect("the layout fits");
    params
        .flat
        .write(&mut |bytes| bytes.copy_from_slice(bytemuck::cast_slice(&values)));

    let ids: Vec<_> = (0..rows).flat_map(|row| samples.sample(row).0).collect();
    let port = &graph.inputs()[0];
    let ids = backend.from_bytes(graph.ty(port.value), bytemuck::cast_slice(&ids));
    let batch = [(port.name.clone(), ids.expect("the ids fit"))].into();
    let forwarded = runner.forward(&params.views, &batch, Vec::new(), RunContext::default());
    let logits = forwarded.expect("the model runs").outputs.swap_remove(0);
    let vocab = logits.ty().last_dim();
    let buffer = backend
        .into_buffer(logits)
        .expect("a value of this backend");
    let logits: Vec<f32> = merak_mpu::into_vec(buffer).expect("logits are f32");
    let row = |(row, logits): (usize, &[f32])| {
        let real = &logits[..samples.real(row) * vocab];
        real.iter().map(|&x| f64::from(x)).collect()
    };
    logits.chunks(seq * vocab).enumerate().map(row).collect()
}

/// The backends of this build, on the processor.
fn backends() -> Vec<SharedBackend> {
    vec![
        Arc::new(Candle::new(1).expect("threads start")),
        #[cfg(feature = "tch")]
        Arc::new(Tch::new(TchDevice::Cpu, 1).expect("threads start")),
    ]
}

/// Where the logits of a backend are not the expected ones.
fn logit_gaps(
    name: &str,
    own: &dyn Fn(&SharedBackend) -> Vec<Vec<f64>>,
    expected: &[Vec<f64>],
) -> Vec<String> {
    let mut gaps = Vec::new();
    for backend in backends() {
        let name = format!("{name} on {}", backend.name());
        let own = own(&backend);
        assert_eq!(own.len(), expected.len(), "samples of {name}");
        for (row, (own, expected)) in own.iter().zip(expected).enumerate() {
            assert_eq!(own.len(), expected.len(), "logits of {name}");
            let largest = expected.iter().fold(0.0, |max: f64, x| max.max(x.abs()));
            let gap = own.iter().zip(expected).map(|(a, b)| (a - b).abs());
            // `f64::max` would drop NaN.
            let gap = gap.fold(0.0, |max: f64, gap| if gap <= max { max } else { gap }) / largest;
            if gap > TOLERANCE || gap.is_nan() {
                gaps.push(format!("{name}: logits of sample {row} are off by {gap:e}"));
            }
        }
    }
    gaps
}

/// Where losses on one rank and on four are not the expected ones.
fn loss_gaps(name: &str, case: &Case, losses: &[f64]) -> Vec<String> {
    let mut gaps = Vec::new();
    let topologies = [(1, 1, 1), (1, 2, 2)];
    for (backend, degrees) in BACKENDS.iter().flat_map(|b| topologies.map(|d| (b, d))) {
        let case = case.clone().with("compute.backend", backend).on(degrees);
        let run = case.run(losses.len());
        assert_eq!(run.reports.len(), losses.len(), "steps of {name}");
        for (report, expected) in run.reports.iter().zip(losses) {
            let (step, loss) = (report.step, report.loss);
            if (loss / expected - 1.0).abs() > TOLERANCE {
                gaps.push(format!(
                    "{name} on {backend} {degrees:?}: loss {loss} in step {step}, expected {expected}"
                ));
            }
        }
    }
    gaps
}

/// Compares models with their goldens: names, logits, losses on one rank and on four.
fn check(names: &[&str]) {
    let gaps: Vec<_> = names.iter().flat_map(|name| gaps(name)).collect();
    assert!(gaps.is_empty(), "{}", gaps.join("\n"));
}

/// Where a model has other numbers than its golden.
fn gaps(name: &str) -> Vec<String> {
    let golden = Golden::read(name);
    let logits = |backend: &SharedBackend| golden.own_logits(backend);
    let mut gaps = logit_gaps(name, &logits, &golden.logits);
    let folder = tempdir().expect("a temporary folder");
    let start = golden.start(folder.path());
    let case = golden
        .case()
        .with("resume_from_checkpoint", start.display())
        .with("finetune", true);
    gaps.extend(loss_gaps(name, &case, &golden.losses));
    gaps
}

#[test]
fn every_golden_is_held_against() {
    let files = fs::read_dir(folder()).expect("the goldens are there");
    let mut found: Vec<_> = files
        .map(|entry| entry.expect("an entry").path())
        .filter(|path| path.extension().is_some_and(|end| end == "json"))
        .map(|path| {
            path.file_stem()
                .expect("a name")
                .to_string_lossy()
                .into_owned()
        })
        .collect();
    found.sort_unstable();
    let mut checked = [GPT2, GPT_NEOX, LLAMA, MISTRAL, OPT, QWEN].concat();
    checked.sort_unstable();
    assert_eq!(found, checked);
}

const GPT2: &[&str] = &["gpt2", "gpt2-variant"];
const GPT_NEOX: &[&str] = &["gpt_neox", "gpt_neox-longrope", "gpt_neox-sequential"];
const LLAMA: &[&str] = &[
    "llama",
    "llama-3",
    "llama-dynamic",
    "llama-linear",
    "llama-longrope",
    "llama-longrope-long",
    "llama-yarn",
];
const MISTRAL: &[&str] = &["mistral"];
const OPT: &[&str] = &["opt", "opt-post-norm"];
const QWEN: &[&str] = &["qwen2", "qwen3", "qwen3-windows"];

#[test]
fn gpt2_has_the_numbers_of_transformers() {
    check(GPT2);
}

#[test]
fn gpt_neox_has_the_numbers_of_transformers() {
    check(GPT_NEOX);
}

#[test]
fn llama_has_the_numbers_of_transformers_under_every_scaling_of_positions() {
    check(LLAMA);
}

#[test]
fn mistral_has_the_numbers_of_transformers() {
    check(MISTRAL);
}

#[test]
fn opt_has_the_numbers_of_transformers() {
    check(OPT);
}

#[test]
fn qwen_has_the_numbers_of_transformers() {
    check(QWEN);
}
