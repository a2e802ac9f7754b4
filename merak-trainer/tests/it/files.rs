//! The graph of a family and `merak-ckpt`'s table of its files have the same parameters, cut in the
//! same way.
//!
//! `merak-ckpt/tests/goldens/hf/shapes.json` has what transformers saves of each family; tests of
//! merak-ckpt hold its table against the same.
//!
//! What ZeRO divides by its stage is the same in `merak-zero`, which runs, and in `merak-ckpt`. The
//! bytes that `merak-partition` counts by default are those that `merak-zero` keeps by default.

use std::{collections::BTreeMap, fs, path::Path};

use merak_ckpt::{Cut, HfFolder, ImportOptions, Kind, import_hf};
use merak_partition::ParamBytes;
use merak_trace::{Graph, models};
use merak_zero::{ZeroConfig, ZeroStage};
use safetensors::{Dtype, tensor::TensorView};
use serde_json::Value;

/// What transformers saves of a model: names and shapes.
type Saved = BTreeMap<String, Vec<usize>>;

/// The graph of a configuration's model, where it can be traced: classifiers of tokens and the like
/// cannot.
fn graph(config: &Value) -> Option<Graph> {
    let model = models::from_config(config).ok()?;
    let seq = match model.objective() {
        models::Objective::ImageClassification => model.info().max_seq,
        _ => 8,
    };
    let graph = model.trace(&models::TraceOptions::training(1, seq));
    Some(graph.expect("the sizes fit"))
}

/// The parameters of a graph: names and shapes.
fn parameters(graph: &Graph) -> Saved {
    let params = graph.params().iter();
    params
        .map(|param| (param.name.clone(), param.full.shape.clone()))
        .collect()
}

/// The graph of each model that can be traced, with its configuration and what transformers saves.
fn models() -> Vec<(Value, Graph, Saved)> {
    let path =
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../merak-ckpt/tests/goldens/hf/shapes.json");
    let text = fs::read(path).expect("the golden is there");
    let cases: BTreeMap<String, Value> = serde_json::from_slice(&text).expect("it is JSON");
    let mut all = Vec::new();
    for case in cases.into_values() {
        let mut config = case["config"].clone();
        if config.get("ffn_dim").is_some() {
            // The golden's script gives OPT a field of other families too.
            let fields = config.as_object_mut().expect("an object");
            fields.remove("intermediate_size");
        }
        if let Some(graph) = graph(&config) {
            let saved = serde_json::from_value(case["tensors"].clone());
            all.push((config, graph, saved.expect("names and shapes")));
        }
    }
    all
}

/// A folder of these tensors of zeros.
fn folder(config: &Value, tensors: &Saved) -> tempfile::TempDir {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let size = |shape: &[usize]| 4 * shape.iter().product::<usize>();
    let zeros = vec![0; tensors.values().map(|shape| size(shape)).max().unwrap_or(0)];
    let views = tensors.iter().map(|(name, shape)| {
        let view = TensorView::new(Dtype::F32, shape.clone(), &zeros[..size(shape)]);
        (name, view.expect("as many bytes as the shape says"))
    });
    let file = folder.path().join("model.safetensors");
    safetensors::serialize_to_file(views, None, &file).expect("it can be written");
    fs::write(folder.path().join("config.json"), config.to_string()).expect("it can be written");
    folder
}

#[test]
fn the_graph_of_every_family_has_the_parameters_of_its_files() {
    let models = models();
    let is_there = |family: &str| {
        let mut configs = models.iter().map(|(config, ..)| config);
        configs.any(|config| config["model_type"] == family)
    };
    // `gpt` is no model of transformers.
    for family in models::known_families().filter(|family| *family != "gpt") {
        assert!(is_there(family), "{family}");
    }
    for (config, graph, mut saved) in models {
        let own = "cls.predictions.decoder.bias";
        if saved.contains_key(own) {
            // Where the head is no embedding, transformers saves a bias that it does not use.
            saved.remove("cls.predictions.bias");
        }
        assert_eq!(parameters(&graph), saved, "{config}");
    }
}

#[test]
fn tensor_parallelism_cuts_files_as_it_cuts_the_graph() {
    for (config, graph, saved) in models() {
        let family = config["model_type"].as_str().expect("a name");
        let lists = merak_tp::default_lists(family).expect("every family has lists");
        let cuts = merak_tp::cuts(&graph, &lists).expect("the lists fit");
        let cuts = cuts.into_iter();
        let expected: BTreeMap<_, _> = cuts
            .map(|(name, shard)| (name, Cut::new(shard.dim, shard.parts)))
            .collect();
        let folder = folder(&config, &saved);
        let files = HfFolder::open(folder.path()).expect("it opens");
        let found = files.tensors().iter();
        let found = found.filter_map(|tensor| Some((tensor.name.clone(), tensor.cut.clone()?)));
        assert_eq!(found.collect::<BTreeMap<_, _>>(), expected, "{config}");
    }
}

#[test]
fn where_a_configuration_does_not_say_it_files_tie_the_head_as_the_graph_does() {
    for (mut config, ..) in models() {
        let fields = config.as_object_mut().expect("an object");
        fields.remove("tie_word_embeddings");
        let graph = graph(&config).expect("it has a default");
        let params = parameters(&graph);
        let folder = folder(&config, &params);
        let files = HfFolder::open(folder.path()).expect("it opens");
        let found = files.tensors().iter();
        let found = found.map(|tensor| (tensor.name.clone(), tensor.shape.clone()));
        assert_eq!(found.collect::<Saved>(), params, "{config}");
        let into = folder.path().join("imported");
        import_hf(&files, into, &ImportOptions::default()).expect("nothing is missing");
    }
}

#[test]
fn checkpoints_divide_from_the_stages_that_runs_divide_from() {
    for stage in 0..=3_u8 {
        let config = ZeroConfig {
            stage: ZeroStage::try_from(stage).expect("0 to 3 are stages"),
            ..ZeroConfig::default()
        };
        let kept = config.element_bytes(4);
        for (kind, ranks) in [
            (Kind::Parameter, kept.weight_ranks),
            (Kind::optimizer("adamw.exp_avg"), kept.state.ranks),
        ] {
            let divides = usize::from(stage) >= kind.divided_from();
            assert_eq!(
                ranks,
                if divides { 4 } else { 1 },
                "{kind:?} in stage {stage}"
            );
        }
    }
}

#[test]
fn plans_count_by_default_the_bytes_that_optimizers_keep_by_default() {
    let kept = ZeroConfig::default().element_bytes(1);
    let counted = ParamBytes::default();
    assert_eq!(counted.weight_ranks, kept.weight_ranks);
    for (counted, kept) in [
        (counted.master, kept.master),
        (counted.gradient, kept.gradient),
        (counted.state, kept.state),
    ] {
        assert_eq!((counted.bytes, counted.ranks), (kept.bytes, kept.ranks));
    }
}
