//! Runs that start from weights of another program.

use std::{fs, path::Path};

use merak_ckpt::{
    Checkpoint, DType, ExportOptions, HfFolder, ImportOptions, Kind, export_hf, extract_lora,
    import_dcp, import_hf, merge_lora, replace_lora,
};
use safetensors::Dtype;
use serde_json::{Value, json};

use super::{
    Workplace,
    families::{self, i64s, records, write_tensors},
    model, settings, text,
};
use crate::parity::formula::weight;

/// A trained model in `run`, and the same as a Hugging Face folder in `hf`.
pub(super) fn with_folder(dtype: Option<DType>) -> Workplace {
    let place = Workplace::new();
    place.succeed("train merak.toml");
    let options = ExportOptions {
        dtype,
        ..ExportOptions::default()
    };
    let checkpoint = Checkpoint::open(place.path("run")).expect("it opens");
    export_hf(&checkpoint, place.path("hf"), &options).expect("it exports");
    let config = fs::read_to_string(place.path("merak.toml")).expect("it is there");
    let config = config.replace("config = \"model.json\"", "hf_dir = \"hf\"");
    place.write("hf.toml", &config.replace("\"run\"", "\"tuned\""));
    place
}

#[test]
fn the_folder_of_a_run_in_place_of_a_model_is_named_with_the_ways_to_use_it() {
    let place = Workplace::new();
    fs::create_dir_all(place.path("run/checkpoints/step-00000001")).expect("a folder");
    fs::write(
        place.path("run/checkpoints/step-00000001/manifest.json"),
        "{}",
    )
    .expect("a file");
    let config = fs::read_to_string(place.path("merak.toml")).expect("it is there");
    let config = config.replace("config = \"model.json\"", "hf_dir = \"run\"");
    place.write("hf.toml", &config);
    insta::assert_snapshot!(place.mistake("train hf.toml"), @r#"error: cannot read run: it is the output folder of a run of Merak: `merak-ckpt export-hf DIR HF_DIR` makes a Hugging Face folder of its latest checkpoint, and `merak train --resume DIR` goes on from it ("model.hf_dir", hf.toml:12)"#);
    let step = "hf_dir = \"run/checkpoints/step-00000001\"";
    place.write("hf.toml", &config.replace("hf_dir = \"run\"", step));
    insta::assert_snapshot!(place.mistake("train hf.toml"), @r#"error: cannot read run/checkpoints/step-00000001: it is a checkpoint of Merak: `merak-ckpt export-hf DIR HF_DIR` makes a Hugging Face folder of it, and `merak train --resume DIR` goes on from it ("model.hf_dir", hf.toml:12)"#);
}

#[test]
fn training_starts_from_a_hugging_face_folder_on_any_topology() {
    let place = with_folder(None);
    let trained = records(&place, "run").last().expect("a record").1;
    place.succeed("train hf.toml");
    let tuned = records(&place, "tuned");
    assert_eq!(tuned[0].0, 1);
    assert!(tuned[0].1 < trained * 1.1, "{tuned:?} after {trained}");
    let saved = place.path("tuned/checkpoints/step-00000005");
    assert!(saved.join("tokenizer.json").is_file());
    for ranks in ["--tp 2 --pp 2", "--pp 4", "--sp 2"] {
        fs::remove_dir_all(place.path("tuned")).expect("a removable folder");
        place.succeed(&format!("train hf.toml {ranks}"));
        for ((_, loss), (_, expected)) in records(&place, "tuned").iter().zip(&tuned) {
            assert!(
                (loss / expected - 1.0).abs() < 1e-4,
                "{ranks}: {loss}, {expected}"
            );
        }
    }
    // An import of the folder, and the folder itself, are checkpoints with weights only.
    let source = HfFolder::open(place.path("hf")).expect("it opens");
    import_hf(&source, place.path("imported"), &ImportOptions::default()).expect("it imports");
    for from in ["imported", "hf"] {
        fs::remove_dir_all(place.path("tuned")).expect("a removable folder");
        let line = format!("train merak.toml --output_dir tuned --resume {from}");
        place.succeed(&line);
        assert_eq!(records(&place, "tuned"), tuned, "{from}");
    }
    // A resumed run does not start over.
    place.succeed("train hf.toml --max_steps 7 --resume auto");
    assert_eq!(records(&place, "tuned").last().expect("a record").0, 7);
    // The configuration may be another than the folder's.
    let keys = "--overwrite_output_dir --model.config model.json";
    place.succeed(&format!("train hf.toml {keys}"));
    assert_eq!(records(&place, "tuned"), tuned);
    let mut wider = model();
    wider["n_inner"] = 80.into();
    place.write("model.json", &wider.to_string());
    let both = place.mistake(&format!("train hf.toml {keys}"));
    insta::assert_snapshot!(both, @"error: the checkpoint hf is of another model: transformer.h.0.mlp.c_fc.weight has shape [16, 64] there, but [16, 80] in the model");
}

#[test]
fn text_is_generated_from_a_folder_as_from_its_checkpoint() {
    let place = with_folder(None);
    let greedy = |from: &str| {
        place.document(&format!(
            "generate {from} --prompt every --max-new-tokens 12 --temperature 0 --json"
        ))
    };
    assert_eq!(greedy("hf"), greedy("run"));
    let place = with_folder(Some(DType::BF16));
    place.succeed("generate hf --prompt every --max-new-tokens 3 --tp 2");
    place.succeed("train hf.toml --max_steps 1");
}

/// A golden, by its path from the root of the repository.
pub(super) fn golden(path: &str) -> Value {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let golden = fs::read(root.join(path)).expect("the golden is there");
    serde_json::from_slice(&golden).expect("the script wrote it")
}

/// Writes the model of a golden as a Hugging Face folder, `hf`, with the weights of the formula.
pub(super) fn write_model(place: &Workplace, golden: &Value) {
    place.write("hf/config.json", &golden["config"].to_string());
    let shapes = golden["parameters"].as_object().expect("an object");
    let size = |size: &Value| size.as_u64().and_then(|size| usize::try_from(size).ok());
    let tensors = shapes.iter().map(|(name, shape)| {
        let shape: Option<Vec<_>> = shape.as_array().expect("a list").iter().map(size).collect();
        let shape = shape.expect("sizes");
        let values = weight(name, shape.iter().product());
        let bytes = bytemuck::cast_slice::<f32, u8>(&values).to_vec();
        (name.as_str(), Dtype::F32, shape, bytes)
    });
    write_tensors(
        &place.path("hf/model.safetensors"),
        &tensors.collect::<Vec<_>>(),
    );
}

/// A T5 1.1 as transformers 5 saves it: a configuration that ties the head, and a head of its own;
/// with the loss of the first batch, which lies in `data.safetensors` twice.
fn t5_with_a_head_of_its_own(place: &Workplace) -> f64 {
    let golden = golden("merak-trace/tests/goldens/families/t5-gated.json");
    assert_eq!(golden["config"]["tie_word_embeddings"], true);
    write_model(place, &golden);

    // The samples of `make.py`, the second of which has padding after its tokens.
    let token = |index: usize, t: usize| i64::try_from((7 * index + (t + index) * t) % 31);
    let real = |index: usize| if index == 1 { 6 } else { 8 };
    let rows = |len: usize, at: &dyn Fn(usize, usize) -> i64| -> Vec<u8> {
        let rows = [0, 1, 2, 0, 1, 2].into_iter();
        rows.flat_map(|index| (0..len).map(move |t| at(index, t)))
            .flat_map(i64::to_le_bytes)
            .collect()
    };
    let token = |index, t| token(index, t).expect("a small number");
    let text = |index, t| if t < real(index) { token(index, t) } else { 0 };
    let labels = |index, t| match t {
        5 if index == 0 => -100,
        t => token(index + 3, t),
    };
    let seen = |index, t| i64::from(t < real(index));
    let data = [
        ("input_ids", Dtype::I64, vec![6, 8], rows(8, &text)),
        ("attention_mask", Dtype::I64, vec![6, 8], rows(8, &seen)),
        ("labels", Dtype::I64, vec![6, 6], rows(6, &labels)),
    ];
    write_tensors(&place.path("data.safetensors"), &data);
    golden["losses"][0].as_f64().expect("a number")
}

#[test]
fn a_head_that_differs_from_the_embedding_is_used_though_the_folder_ties_them() {
    let place = families::place(&Value::Null, "tensors", "data.safetensors");
    let loss = t5_with_a_head_of_its_own(&place);
    fs::copy(place.path("hf/config.json"), place.path("model.json")).expect("it can be copied");
    let config = fs::read_to_string(place.path("merak.toml")).expect("it is there");
    let config = config.replace("fraction = 0.3", "fraction = 0.5");
    place.write("merak.toml", &config);
    let config = config.replace("config = \"model.json\"", "hf_dir = \"hf\"");
    place.write("hf.toml", &config);

    let source = HfFolder::open(place.path("hf")).expect("it opens");
    let imported = import_hf(&source, place.path("imported"), &ImportOptions::default());
    let config = imported.expect("it imports").join("config.json");
    fs::copy(config, place.path("imported.json")).expect("the import has a configuration");
    place.succeed("train hf.toml --max_steps 1 --learning_rate 0 --gradient_accumulation_steps 3");
    for line in [
        "hf.toml hf",
        "merak.toml hf",
        "merak.toml hf --tp 2 --pp 2",
        "merak.toml imported --model.config imported.json",
        "hf.toml run",
    ] {
        let found = place.document(&format!("evaluate {line} --json"));
        let found = found["eval_loss"].as_f64().expect("a loss");
        assert!(
            (found / loss - 1.0).abs() < 1e-4,
            "{line}: {found}, expected {loss}"
        );
    }
    let ended = place.merak("evaluate hf.toml hf");
    assert_eq!(
        ended.stderr.matches("they stay apart").count(),
        1,
        "{}",
        ended.stderr
    );
}

#[test]
fn text_is_generated_with_a_head_that_differs_from_the_embedding() {
    let place = Workplace::new();
    place.succeed("train merak.toml --no_tie_modules true");
    let checkpoint = Checkpoint::open(place.path("run")).expect("it opens");
    export_hf(&checkpoint, place.path("hf"), &ExportOptions::default()).expect("it exports");
    let config = fs::read_to_string(place.path("hf/config.json")).expect("it is there");
    let mut config: Value = serde_json::from_str(&config).expect("it is JSON");
    assert_eq!(config["tie_word_embeddings"], false);
    config["tie_word_embeddings"] = true.into();
    place.write("hf/config.json", &config.to_string());
    let greedy = |from: &str| {
        place.document(&format!(
            "generate {from} --prompt every --max-new-tokens 12 --temperature 0 --json"
        ))
    };
    assert_eq!(greedy("hf"), greedy("run"));
}

/// A PEFT folder for the model, with factors that change its outputs.
fn write_adapter(place: &Workplace) {
    let (mut header, mut data) = (serde_json::Map::new(), Vec::new());
    for (module, into, out) in [
        ("transformer.h.0.attn.c_attn", 16, 48),
        ("transformer.h.2.mlp.c_proj", 64, 16),
        ("transformer.h.3.attn.c_proj", 16, 16),
    ] {
        for (factor, shape) in [("lora_A", [2, into]), ("lora_B", [out, 2])] {
            let begin = data.len();
            let values = (0..shape[0] * shape[1]).map(|n| ((n * n % 13) as f32 - 6.0) / 2.0);
            data.extend(values.flat_map(f32::to_le_bytes));
            let name = format!("base_model.model.{module}.{factor}.weight");
            let entry =
                json!({"dtype": "F32", "shape": shape, "data_offsets": [begin, data.len()]});
            header.insert(name, entry);
        }
    }
    let header = Value::Object(header).to_string();
    let length = (header.len() as u64).to_le_bytes();
    place.write(
        "adapter/adapter_config.json",
        r#"{"peft_type": "LORA", "r": 2, "lora_alpha": 3, "fan_in_fan_out": true}"#,
    );
    let file = place.path("adapter/adapter_model.safetensors");
    let bytes = [&length[..], header.as_bytes(), &data].concat();
    fs::write(file, bytes).expect("it can be written");
}

#[test]
fn an_adapter_generates_as_the_folder_that_it_is_merged_into() {
    let place = with_folder(None);
    write_adapter(&place);
    let options = ExportOptions::default();
    merge_lora(
        place.path("run"),
        place.path("adapter"),
        place.path("merged"),
        &options,
    )
    .expect("it merges");
    let greedy = |from: &str| {
        place.document(&format!(
            "generate {from} --prompt every --max-new-tokens 12 --temperature 0 --json"
        ))
    };
    let merged = greedy("merged");
    assert_ne!(merged, greedy("run"));
    for from in ["run", "hf", "run --tp 2", "hf --pp 2", "run --tp 2 --pp 4"] {
        assert_eq!(
            greedy(&format!("{from} --adapter adapter")),
            merged,
            "{from}"
        );
    }
    let refused = place.mistake("generate run --prompt-ids 1 --adapter hf");
    insta::assert_snapshot!(refused, @"error: cannot read hf: it is a Hugging Face folder and no checkpoint, and no adapter: expected a folder that `save_pretrained` of PEFT wrote, with adapter_config.json and adapter_model.safetensors");
}

#[test]
fn an_adapter_is_trained_saved_and_used_without_a_word_about_it() {
    let place = with_folder(None);
    place.write(
        "lora.json",
        r#"{"r": 2, "lora_alpha": 4, "target_modules": ["c_attn", "c_proj"]}"#,
    );
    place.succeed("train hf.toml --lora_config lora.json --tp 2 --learning_rate 0.1");
    // The run's own folder and the base with the adapter beside it generate the same.
    let line = "--prompt every --temperature 1 --seed 3 --max-new-tokens 12 --json";
    let own = place.document(&format!("generate tuned {line}"));
    let beside = place.document(&format!("generate hf --adapter tuned/adapter {line}"));
    assert_eq!(own, beside);
    let base = place.document(&format!("generate hf {line}"));
    assert_ne!(own, base);
    insta::assert_snapshot!(place.mistake("generate hf --prompt every --adapter tuned"), @r#"error: cannot read tuned: it is the output folder of a run of Merak, and no adapter: expected a folder that `save_pretrained` of PEFT wrote, with adapter_config.json and adapter_model.safetensors; did you mean "tuned/adapter"?"#);
    // Another adapter, or none, takes its place.
    write_adapter(&place);
    let with = |model: &str, adapter: &str| {
        place.document(&format!("generate {model} --adapter {adapter} {line}"))
    };
    assert_eq!(with("tuned", "none"), base);
    assert_eq!(with("tuned --tp 2", "tuned/adapter"), own);
    assert_eq!(with("tuned", "adapter"), with("hf", "adapter"));
    let greedy = "generate tuned --prompt every --max-new-tokens 9 --temperature 0 --json";
    let greedy = place.document(greedy);
    let text = greedy[0]["text"].as_str().expect("a text");
    let options = "--resume_from_checkpoint tuned --max_new_tokens 9";
    let ended = settings::answered(&place, options, "every\n");
    assert_eq!(ended.stdout, format!("{text}\n"), "{}", ended.stderr);
    let saved = Checkpoint::open(place.path("tuned")).expect("it opens");
    let config = assert_extracted(&place, &saved);
    let plan = place.succeed("train hf.toml --lora_config lora.json --dry-run");
    let model = plan.lines().next().expect("the model comes first");
    let numbers: Vec<usize> = model
        .split(' ')
        .filter_map(|word| word.parse().ok())
        .collect();
    assert!(
        model.contains(" parameters, ") && model.contains(" trained, "),
        "{model}"
    );
    assert!(numbers[1] * 10 < numbers[0], "{model}");
    assert_folded(&place, &saved);
    assert_eq!(own, place.document(&format!("generate whole {line}")));
    // Resumed, it goes on; under another name it is another adapter.
    place.succeed("train hf.toml --lora_config lora.json --max_steps 7 --resume auto");
    assert_eq!(records(&place, "tuned").last().expect("a record").0, 7);
    place.succeed("train hf.toml --lora_config lora.json --adapter_name mine --output_dir other");
    place.succeed("train hf.toml --lora_config lora.json --adapter_name yours --output_dir other --overwrite_output_dir");
    for name in ["mine", "yours"] {
        let folder = place.path("other/adapter").join(name);
        assert!(folder.join("adapter_config.json").is_file(), "{name}");
    }
    insta::assert_snapshot!(place.mistake("train hf.toml --lora_config lora.json --adapter_name a.b"), @r#"error: "adapter_name" expects 1 to 100 letters, digits, `-` and `_` that are no name of an adapter's own parts, such as `weight` and `lora_A`, found "a.b" (command line --adapter_name)"#);
    insta::assert_snapshot!(place.mistake("train hf.toml --lora_config nowhere.json"), @r#"error: cannot read nowhere.json: the file is missing ("lora_config", command line --lora_config)"#);
    assert_base_is_kept(&place, &config);
}

#[test]
fn an_adapter_that_trained_more_than_factors_is_not_taken_out_of_its_checkpoint() {
    let place = with_folder(None);
    write_adapter(&place);
    let line = "--prompt every --temperature 0 --max-new-tokens 9 --json";
    let lora = json!({ "r": 2, "lora_alpha": 4, "target_modules": ["c_attn"] });
    let cases = [
        (
            json!({ "modules_to_save": ["ln_f"] }),
            "`transformer.ln_f.bias`, `transformer.ln_f.weight` (`modules_to_save`",
        ),
        (
            json!({ "bias": "all" }),
            "`transformer.h.0.attn.c_attn.bias`, `transformer.h.0.attn.c_proj.bias`, `transformer.h.0.ln_1.bias` and 22 more (`modules_to_save`",
        ),
        (
            json!({ "bias": "lora_only" }),
            "`transformer.h.0.attn.c_attn.bias`, `transformer.h.1.attn.c_attn.bias`, `transformer.h.2.attn.c_attn.bias` and 1 more (`modules_to_save`",
        ),
    ];
    for (more, named) in cases {
        let mut lora = lora.clone();
        let fields = lora.as_object_mut().expect("an object");
        fields.extend(more.as_object().expect("an object").clone());
        place.write("lora.json", &lora.to_string());
        place.succeed(
            "train hf.toml --lora_config lora.json --learning_rate 0.1 --overwrite_output_dir",
        );
        for adapter in ["none", "adapter"] {
            let refused = place.mistake(&format!("generate tuned --adapter {adapter} {line}"));
            for told in [named, "the run started from, ", "hf"] {
                assert!(refused.contains(told), "{refused}");
            }
        }
        let [run, adapter, merged] = ["tuned", "adapter", "merged"].map(|name| place.path(name));
        let options = ExportOptions::default();
        let refused = merge_lora(&run, adapter, &merged, &options).expect_err("a chimera");
        assert!(
            refused.is_user_error() && refused.to_string().contains(named),
            "{refused}"
        );
        assert!(!merged.exists());
        // The run's own adapter has all that the run trained.
        let own = place.document(&format!("generate tuned {line}"));
        let with_own = format!("generate tuned --adapter tuned/adapter {line}");
        assert_eq!(place.document(&with_own), own);
        merge_lora(&run, run.join("adapter"), &merged, &options).expect("it merges");
        assert_eq!(place.document(&format!("generate merged {line}")), own);
        fs::remove_dir_all(merged).expect("a removable folder");
    }
}

/// The adapter of a checkpoint is that of the run's folder. Returns its description.
fn assert_extracted(place: &Workplace, saved: &Checkpoint) -> Value {
    // An unrelated hidden folder is kept, and the folder that a crash has left aside comes back.
    place.write(".old-extracted/mine", "");
    place.write(".merak-old-extracted/notes", "");
    replace_lora(saved, place.path("extracted")).expect("it has an adapter");
    for kept in [".old-extracted/mine", "extracted/notes"] {
        assert!(place.path(kept).exists(), "{kept}");
    }
    fs::remove_dir_all(place.path("extracted")).expect("it was written");
    extract_lora(saved, place.path("extracted")).expect("it has an adapter");
    let extracted = super::files(&place.path("extracted"));
    assert_eq!(extracted, super::files(&place.path("tuned/adapter")));
    let names: Vec<_> = extracted.iter().map(|(name, _)| name.as_str()).collect();
    assert_eq!(names, ["adapter_config.json", "adapter_model.safetensors"]);
    let config: Value = serde_json::from_slice(&extracted[0].1).expect("it is JSON");
    assert_eq!(config["fan_in_fan_out"], true);
    let base = config["base_model_name_or_path"].as_str().expect("a path");
    assert_eq!(Path::new(base).file_name(), Some("hf".as_ref()));
    config
}

/// As a Hugging Face folder, the model has the adapter in its weights and no trace of it besides.
fn assert_folded(place: &Workplace, saved: &Checkpoint) {
    export_hf(saved, place.path("whole"), &ExportOptions::default()).expect("it merges");
    let open = |folder: &str| HfFolder::open(place.path(folder)).expect("it opens");
    let names = |folder: &str| {
        let tensors = open(folder).tensors().to_vec();
        tensors
            .into_iter()
            .map(|tensor| tensor.name)
            .collect::<Vec<_>>()
    };
    assert_eq!(names("whole"), names("hf"));
    assert!(!place.path("whole/adapter_config.json").exists());
}

/// A run that goes on keeps the weights of its base, and so the name.
fn assert_base_is_kept(place: &Workplace, config: &Value) {
    fs::create_dir(place.path("elsewhere")).expect("a folder");
    for (name, content) in super::files(&place.path("hf")) {
        fs::write(place.path("elsewhere").join(name), content).expect("a copy");
    }
    let more = "train hf.toml --lora_config lora.json --tp 2 --resume latest --max_steps 9";
    let more = place.merak(&format!("{more} --model.hf_dir elsewhere"));
    assert_eq!(more.status, Some(0), "{}", more.stderr);
    assert!(
        more.stderr.contains("the one named here is not used"),
        "{}",
        more.stderr
    );
    let kept = fs::read(place.path("tuned/adapter/adapter_config.json")).expect("a file");
    let kept: Value = serde_json::from_slice(&kept).expect("it is JSON");
    assert_eq!(
        kept["base_model_name_or_path"],
        config["base_model_name_or_path"]
    );
}

#[test]
fn an_adapter_of_a_shared_table_leaves_a_folder_with_a_head_of_its_own() {
    let place = with_folder(None);
    let lora = r#"{"r": 2, "lora_alpha": 4, "target_modules": ["wte", "lm_head"], "init_lora_weights": false}"#;
    place.write("lora.json", lora);
    place.succeed("train hf.toml --lora_config lora.json");
    let saved = Checkpoint::open(place.path("tuned")).expect("it opens");
    let options = ExportOptions::default();
    export_hf(&saved, place.path("whole"), &options).expect("it merges");
    let [hf, adapter, merged] = ["hf", "tuned/adapter", "merged"].map(|name| place.path(name));
    merge_lora(hf, adapter, merged, &options).expect("it merges");
    let line = "--prompt every --temperature 1 --seed 3 --max-new-tokens 12 --json";
    let own = place.document(&format!("generate tuned {line}"));
    assert_ne!(own, place.document(&format!("generate hf {line}")));
    for folder in ["whole", "merged"] {
        assert_eq!(
            own,
            place.document(&format!("generate {folder} {line}")),
            "{folder}"
        );
    }
    let refused = place.mistake("generate hf --prompt every --adapter tuned/adapter");
    insta::assert_snapshot!(refused, @"error: the adapter changes `transformer.wte.weight`, which transformer.wte and lm_head share, for one of them: `merak-ckpt merge-lora` writes a model in which each has its own");
}

#[test]
fn a_run_that_was_imported_and_goes_on_with_another_optimizer_says_so() {
    let place = Workplace::new();
    let goldens = Path::new(env!("CARGO_MANIFEST_DIR")).join("../merak-ckpt/tests/goldens/dcp");
    let config = goldens.join("gpt2.json");
    let options = ImportOptions::default();
    let to = place.path("imported");
    import_dcp(goldens.join("gpt2"), to, &config, "model.", &options).expect("it imports");
    let tokens = i64s((0..64 * 8).map(|i| i * i % 31));
    let tensors = [("input_ids", Dtype::I64, vec![64, 8], tokens)];
    write_tensors(&place.path("data.safetensors"), &tensors);
    let warnings = |keys: &str| {
        let line = format!(
            "train merak.toml --resume imported --max_steps 9 --output_dir other --seq_length 8 --data.format tensors \
             --data.path data.safetensors --model.config {} {keys}",
            config.display()
        );
        let ended = place.merak(&line);
        assert_eq!(ended.status, Some(0), "{}", ended.stderr);
        let lines = ended
            .stderr
            .lines()
            .filter_map(|line| line.split_once("key="));
        let lines = lines.filter_map(|(_, rest)| rest.split_once(" path="));
        lines.map(|(said, _)| said.to_owned()).collect::<Vec<_>>()
    };
    let same = "--learning_rate 0.003 --weight_decay 0.1";
    assert!(warnings(&format!("{same} --dry-run")).is_empty());
    let others = "--learning_rate 0.003 --adam_beta2 0.95";
    let expected = [
        "\"weight_decay\" given=0.0 kept=[0.1]",
        "\"adam_beta2\" given=0.95 kept=[0.999]",
    ];
    assert_eq!(warnings(&format!("{others} --dry-run")), expected);
    assert_eq!(warnings(&format!("{others} --tp 2")), expected);
}

#[test]
fn what_other_programs_wrote_is_named_where_weights_or_an_adapter_are_expected() {
    let place = Workplace::new();
    place.succeed("train merak.toml --max_steps 1");
    let mut said = Vec::new();
    for (name, file) in [
        ("dcp", ".metadata"),
        ("megatron", "latest_checkpointed_iteration.txt"),
        ("deepspeed", "zero_to_fp32.py"),
        ("llama", "model.gguf"),
        ("torch", "model.pt"),
        ("torch/model.pt", ""),
    ] {
        if !file.is_empty() {
            place.write(&format!("{name}/{file}"), "bytes");
        }
        said.push(place.mistake(&format!(
            "train merak.toml --model.config none --model.hf_dir {name}"
        )));
        let line = format!("generate run --prompt-ids 1 --adapter {name}");
        said.push(place.mistake(&line));
    }
    insta::assert_snapshot!(said.join("\n"), @r#"
    error: cannot read dcp: it is a folder of torch.distributed.checkpoint: import it with `merak-ckpt import-dcp DIR DST --config config.json` ("model.hf_dir", command line --model.hf_dir)
    error: cannot read dcp: it is a folder of torch.distributed.checkpoint, and no adapter: expected a folder that `save_pretrained` of PEFT wrote, with adapter_config.json and adapter_model.safetensors
    error: cannot read megatron: it is a checkpoint of Megatron-LM: convert it to a Hugging Face folder with Megatron-Bridge or Megatron-LM's tools/checkpoint/convert.py, then use that ("model.hf_dir", command line --model.hf_dir)
    error: cannot read megatron: it is a checkpoint of Megatron-LM, and no adapter: expected a folder that `save_pretrained` of PEFT wrote, with adapter_config.json and adapter_model.safetensors
    error: cannot read deepspeed: it is a checkpoint of DeepSpeed: run the zero_to_fp32.py that lies in it, `zero_to_fp32.py DIR HF_DIR`, put the model's config.json beside the pytorch_model.bin, then use HF_DIR ("model.hf_dir", command line --model.hf_dir)
    error: cannot read deepspeed: it is a checkpoint of DeepSpeed, and no adapter: expected a folder that `save_pretrained` of PEFT wrote, with adapter_config.json and adapter_model.safetensors
    error: cannot read llama: it is GGUF, the format of llama.cpp, which cannot be read: use the Hugging Face folder that it was made of, or load it with transformers (`from_pretrained(DIR, gguf_file=FILE)`) and save it with `save_pretrained` ("model.hf_dir", command line --model.hf_dir)
    error: cannot read llama: it is GGUF, the format of llama.cpp, which cannot be read, and no adapter: expected a folder that `save_pretrained` of PEFT wrote, with adapter_config.json and adapter_model.safetensors
    error: cannot read torch: it is a lone file of torch.save: put it into a folder as pytorch_model.bin beside the model's config.json, and use that; it should hold the state_dict of the model ("model.hf_dir", command line --model.hf_dir)
    error: cannot read torch: it is a lone file of torch.save, and no adapter: expected a folder that `save_pretrained` of PEFT wrote, with adapter_config.json and adapter_model.safetensors
    error: cannot read torch/model.pt: it is a lone file of torch.save: put it into a folder as pytorch_model.bin beside the model's config.json, and use that; it should hold the state_dict of the model ("model.hf_dir", command line --model.hf_dir)
    error: cannot read torch/model.pt: it is a lone file of torch.save, and no adapter: expected a folder that `save_pretrained` of PEFT wrote, with adapter_config.json and adapter_model.safetensors
    "#);
}

/// A model of masked tokens as a Hugging Face folder `hf`, and texts with classes for one of
/// `classes.json`; with the keys of a training of these.
fn with_body(classes: &Value) -> (Workplace, &'static str) {
    let place = families::place(&families::bert("BertForMaskedLM"), "text", "text");
    place.write("text/a.txt", &text());
    place.succeed("train merak.toml --seq_length 24");
    let checkpoint = Checkpoint::open(place.path("run")).expect("it opens");
    export_hf(&checkpoint, place.path("hf"), &ExportOptions::default()).expect("it exports");
    place.write("classes.json", &classes.to_string());
    let labelled = (0..24).map(|i| json!({ "text": format!("text {i}"), "label": i % 3 }));
    let labelled: Vec<_> = labelled.map(|record| record.to_string()).collect();
    place.write("labelled.jsonl", &labelled.join("\n"));
    let keys = "--output_dir tuned --overwrite_output_dir --model.config classes.json --model.hf_dir hf \
        --data.format jsonl --data.path labelled.jsonl --seq_length 24";
    (place, keys)
}

#[test]
fn an_adapter_trains_a_new_classifier_among_its_modules_to_save() {
    let (place, keys) = with_body(&families::bert("BertForSequenceClassification"));
    let train = format!("train merak.toml {keys} --lora_config lora.json");
    place.write("lora.json", r#"{"r": 2, "target_modules": ["query"]}"#);
    let frozen = place.mistake(&train);
    let advice = "it has no parameter bert.pooler.dense.weight; its module in the adapter's `modules_to_save`";
    assert!(frozen.contains(advice), "{frozen}");
    place.write(
        "lora.json",
        r#"{"r": 2, "target_modules": ["query"], "modules_to_save": ["pooler", "classifier"]}"#,
    );
    place.succeed(&train);
}

#[test]
fn a_classifier_starts_on_the_weights_of_another_task() {
    let classes = families::bert("BertForSequenceClassification");
    let (place, keys) = with_body(&classes);
    let ended = place.merak(&format!("train merak.toml {keys}"));
    assert_eq!(ended.status, Some(0), "{}", ended.stderr);
    let names =
        "bert.pooler.dense.weight, bert.pooler.dense.bias, classifier.weight, classifier.bias";
    let warning = format!(
        "the weights have no classifier of this size: it starts at random path=hf names=\"{names}\""
    );
    assert!(ended.stderr.contains(&warning), "{}", ended.stderr);
    let alone = records(&place, "tuned");
    place.succeed(&format!("train merak.toml {keys} --pp 2"));
    assert_eq!(records(&place, "tuned"), alone);
    place.succeed(&format!("train merak.toml {keys} --tp 2"));
    for ((_, found), (_, expected)) in records(&place, "tuned").iter().zip(&alone) {
        assert!((found / expected - 1.0).abs() < 1e-4, "{found}, {expected}");
    }
    // The body is that of the folder: with no learning it stays so, and the classifier is drawn.
    place.succeed(&format!("train merak.toml {keys} --learning_rate 0"));
    let open = |run: &str| Checkpoint::open(place.path(run)).expect("it opens");
    let (checkpoint, tuned) = (open("run"), open("tuned"));
    let body = "bert.encoder.layer.1.output.dense.weight";
    let values = |checkpoint: &Checkpoint, name: &str| {
        let whole = checkpoint.read_whole(&Kind::Parameter, name);
        whole.expect("it is there")
    };
    assert_eq!(values(&tuned, body), values(&checkpoint, body));
    assert!(
        values(&tuned, "classifier.weight")
            .iter()
            .any(|&byte| byte != 0)
    );
    // Nothing is learned in an evaluation, so a random classifier is a mistake there.
    let line = format!("evaluate merak.toml hf {keys}");
    insta::assert_snapshot!(place.mistake(&line), @"error: the checkpoint hf is of another model: it has no parameter bert.pooler.dense.weight");
    // A classifier of another size is replaced where that is asked for.
    export_hf(&open("tuned"), place.path("hf3"), &ExportOptions::default()).expect("it exports");
    let mut more = classes;
    more["id2label"] = json!({ "0": "a", "1": "b", "2": "c", "3": "d" });
    more["label2id"] = json!({ "a": 0, "b": 1, "c": 2, "d": 3 });
    place.write("classes.json", &more.to_string());
    let keys = keys.replace("hf_dir hf", "hf_dir hf3");
    insta::assert_snapshot!(place.mistake(&format!("train merak.toml {keys}")), @r#"error: the checkpoint hf3 is of another model: classifier.weight has shape [3, 16] there, but [4, 16] in the model; "model.ignore_mismatched_sizes" starts it at random"#);
    let ended = place.merak(&format!(
        "train merak.toml {keys} --model.ignore_mismatched_sizes true"
    ));
    assert_eq!(ended.status, Some(0), "{}", ended.stderr);
    assert!(
        ended
            .stderr
            .contains("names=\"classifier.weight, classifier.bias\""),
        "{}",
        ended.stderr
    );
}
