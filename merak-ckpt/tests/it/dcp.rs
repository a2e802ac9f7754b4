//! Folders of torch.distributed.checkpoint, weights and optimizer.
//!
//! `tests/goldens/dcp` has the folders and the script that made them with torch.

use crate::hf::{copy_of, json};
use crate::support::topology;
use merak_ckpt::{Checkpoint, DType, Error, ImportOptions, Kind, import_dcp};
use serde_json::Value;
use std::fs;
use std::path::{Path, PathBuf};

fn golden(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/goldens/dcp")
        .join(name)
}

/// A configuration of an unknown kind of model.
fn unknown(folder: &Path) -> PathBuf {
    let path = folder.join("unknown.json");
    fs::write(&path, r#"{"model_type": "grid"}"#).expect("it can be written");
    path
}

/// The golden folders with the prefixes of their weights, and configurations.
fn cases(folder: &Path) -> [(&'static str, &'static str, PathBuf); 7] {
    [
        ("gpt2", "model.", golden("gpt2.json")),
        ("llama", "app.net", golden("llama.json")),
        ("grid", "", unknown(folder)),
        ("sgd", "", unknown(folder)),
        ("tensors", "model", unknown(folder)),
        ("bare-sgd", "model", unknown(folder)),
        ("threads", "model", unknown(folder)),
    ]
}

fn import(
    folder: &Path,
    to: &Path,
    config: &Path,
    prefix: &str,
    options: &ImportOptions,
) -> Result<Checkpoint, Error> {
    import_dcp(folder, to, config, prefix, options).and_then(Checkpoint::open)
}

/// A golden folder with its prefix and configuration, imported below `folder`.
fn imported(folder: &Path, (name, prefix, config): &(&str, &str, PathBuf)) -> Checkpoint {
    let options = ImportOptions::default();
    import(&golden(name), &folder.join(name), config, prefix, &options).expect("it is imported")
}

/// The script's two sums over a tensor's values.
fn sums(checkpoint: &Checkpoint, kind: &Kind, name: &str) -> [f64; 2] {
    let bytes = checkpoint.read_whole(kind, name).expect("it reads");
    let values = bytes.chunks_exact(4);
    let values = values.map(|b| f64::from(f32::from_le_bytes(b.try_into().expect("four bytes"))));
    values
        .enumerate()
        .fold([0.0; 2], |[sum, weighted], (index, value)| {
            [sum + value, weighted + value * ((index * 7) % 11) as f64]
        })
}

#[test]
fn weights_and_optimizer_state_are_those_that_torch_saved() {
    let folder = tempfile::tempdir().unwrap();
    let all = json(&golden("expected.json"));
    for case in cases(folder.path()) {
        let (name, imported) = (case.0, imported(folder.path(), &case));
        let expected = all[name].as_object().unwrap();
        let mut compared = 0;
        for kind in imported.manifest().kinds() {
            let expected = expected[kind.as_str()].as_object().unwrap();
            for tensor in imported.manifest().tensors_of(kind) {
                assert_eq!(tensor.dtype, DType::F32);
                let found = sums(&imported, kind, &tensor.name);
                let expected = expected[&tensor.name].as_array().unwrap();
                for (found, expected) in found.iter().zip(expected) {
                    let expected = expected.as_f64().unwrap();
                    assert!(
                        (found - expected).abs() < 1e-9,
                        "{name} {kind} {}",
                        tensor.name
                    );
                }
                compared += 1;
            }
            assert_eq!(
                imported.manifest().tensors_of(kind).count(),
                expected.len(),
                "{name}"
            );
        }
        let tensors = |value: &Value| value.as_object().map_or(0, serde_json::Map::len);
        let kinds = expected
            .iter()
            .filter(|(kind, _)| !["step", "losses"].contains(&&***kind));
        assert_eq!(
            compared,
            kinds.map(|(_, value)| tensors(value)).sum::<usize>()
        );
    }
}

#[test]
fn step_and_numbers_of_parameter_groups_are_kept() {
    let folder = tempfile::tempdir().unwrap();
    let mut texts = Vec::new();
    for case in cases(folder.path()) {
        let (name, imported) = (case.0, imported(folder.path(), &case));
        let header = imported.manifest().header.clone();
        let mut state = header.state;
        if let Some(groups) = state["imported"]["param_groups"].as_object_mut() {
            let first = groups.keys().next().cloned();
            groups.retain(|name, _| Some(name) == first.as_ref());
        }
        texts.push(format!("{name}: step {}, {state}", header.step));
    }
    insta::assert_snapshot!(texts.join("\n"), @r#"
    gpt2: step 5, {"imported":{"optimizer":"adamw_torch","param_groups":{"0":{"amsgrad":false,"betas":[0.9,0.999],"capturable":false,"decoupled_weight_decay":true,"differentiable":false,"eps":1e-8,"lr":0.003,"maximize":false,"weight_decay":0.1}},"step":5}}
    llama: step 2, {"imported":{"optimizer":null,"param_groups":{"lm_head.weight":{"betas":[0.9,0.999],"lr":0.003}},"step":2}}
    grid: step 2, {"imported":{"optimizer":null,"param_groups":{},"step":2}}
    sgd: step 0, {"imported":{"optimizer":"sgd","param_groups":{"both.weight":{"dampening":0,"differentiable":false,"lr":0.1,"maximize":false,"momentum":0.9,"nesterov":false,"weight_decay":0}},"step":0}}
    tensors: step 4, {"imported":{"optimizer":"adamw_torch","param_groups":{"0":{"amsgrad":true,"betas":[0.75,0.5],"capturable":false,"decoupled_weight_decay":true,"differentiable":false,"eps":1e-8,"foreach":false,"lr":0.003,"maximize":false,"weight_decay":0.1}},"step":4}}
    bare-sgd: step 0, {"imported":{"optimizer":"sgd","param_groups":{"0":{"dampening":0,"differentiable":false,"lr":0.1,"maximize":false,"momentum":0,"nesterov":false,"weight_decay":0.1}},"step":0}}
    threads: step 3, {"imported":{"optimizer":"adamw_torch","param_groups":{"0":{"amsgrad":false,"betas":[0.9,0.999],"capturable":false,"decoupled_weight_decay":true,"differentiable":false,"eps":1e-8,"fused":true,"lr":0.25,"maximize":false,"weight_decay":0.1}},"step":3}}
    "#);
}

#[test]
fn numbers_that_are_tensors_are_kept_as_numbers() {
    let folder = tempfile::tempdir().unwrap();
    let config = unknown(folder.path());
    let to = folder.path().join("imported");
    let options = ImportOptions::default();
    let imported = import(&golden("tensors"), &to, &config, "model", &options).unwrap();
    let state = &imported.manifest().header.state["imported"];
    let groups = &state["param_groups"];
    assert_eq!(groups["0"]["lr"], 3e-3);
    assert_eq!(groups["1"]["lr"], 3e-3);
    // A list of tensors has keys of its own, a tuple is one item.
    assert_eq!(groups["0"]["betas"], serde_json::json!([0.75, 0.5]));
    assert_eq!(groups["1"]["betas"], serde_json::json!([0.75, 0.25]));
    assert_eq!(groups["0"]["weight_decay"], 0.1);
    assert_eq!(state["step"], 4);
    // A folder of two processes, which write two files each.
    let to = folder.path().join("threads");
    let imported = import(&golden("threads"), &to, &config, "model", &options).unwrap();
    let groups = &imported.manifest().header.state["imported"]["param_groups"];
    assert_eq!(
        (&groups["0"]["lr"], &groups["1"]["lr"]),
        (&0.25.into(), &0.25.into())
    );
    assert_eq!(groups["0"]["fused"], true);
}

#[test]
fn any_topology_may_be_written_for_within_the_least_memory() {
    let folder = tempfile::tempdir().unwrap();
    let to = |name: &str| folder.path().join(name);
    let config = golden("gpt2.json");
    let one = ImportOptions::default();
    let one = import(&golden("gpt2"), &to("one"), &config, "model", &one).unwrap();
    let options = ImportOptions {
        topology: topology(2, 2, 2),
        max_memory: 4 << 20,
        ..ImportOptions::default()
    };
    let eight = import(&golden("gpt2"), &to("eight"), &config, "model", &options).unwrap();
    let report = merak_ckpt::diff(&one, &eight, merak_ckpt::Tolerance::default()).unwrap();
    assert!(report.different.is_empty(), "{:?}", report.different);
    assert!(eight.verify().damage.is_empty());
}

fn refusal(folder: &Path, config: &Path, prefix: &str) -> String {
    let to = tempfile::tempdir().expect("a temporary folder");
    let error = import(folder, to.path(), config, prefix, &ImportOptions::default());
    let error = error.expect_err("it is refused");
    assert!(error.is_user_error(), "{error}");
    assert!(!to.path().join("checkpoints/latest").exists());
    error
        .to_string()
        .replace(&folder.display().to_string(), "DCP")
}

#[test]
fn prefixes_and_models_that_do_not_fit_are_refused_with_what_is_there() {
    let folder = tempfile::tempdir().unwrap();
    let (gpt2, llama) = (golden("gpt2.json"), golden("llama.json"));
    let messages = [
        refusal(&golden("gpt2"), &gpt2, ""),
        refusal(&golden("llama"), &llama, "net"),
        refusal(&golden("gpt2"), &llama, "model."),
        refusal(&golden("by-number"), &gpt2, "model."),
        refusal(&golden("whole"), &gpt2, "model."),
        refusal(&golden("safetensors"), &unknown(folder.path()), ""),
        refusal(&golden("parts"), &gpt2, ""),
        refusal(&golden("nowhere"), &gpt2, "model."),
        refusal(&golden("../hf/gpt2-zip"), &gpt2, ""),
    ];
    insta::assert_snapshot!(messages.join("\n"), @"
    cannot read DCP: the names of its weights begin with `model.`: name --prefix model.
    cannot read DCP: the names of its weights begin with `app.net.`: name --prefix app.net.
    cannot read DCP: it lacks tensor `model.embed_tokens.weight`
    cannot read DCP: it lacks tensor `transformer.wte.weight`
    cannot read DCP: it has no tensors, only the values `model`, `step`, as a planner with flatten_state_dict=False saves them: flatten it with `python -m torch.distributed.checkpoint.format_utils dcp_to_torch DIR FILE`, then `.. torch_to_dcp FILE DIR2`, then import DIR2
    cannot read DCP/__0_0.distcp: the item of 12 bytes at byte 0: it is safetensors and not what torch.save writes: save again without serialization_format=SerializationFormat.SAFETENSORS, or with HuggingFaceStorageWriter
    cannot read DCP: it is a folder of torch.distributed.checkpoint in its safetensors format, each file with a part of each tensor: save again with HuggingFaceStorageWriter(HF_DIR, save_distributed=True, enable_consolidation=True), or put the parts together with `consolidate_safetensors_files(DIR, HF_DIR, {name: 1 for name in model.state_dict()})` of torch.distributed.checkpoint._consolidate_hf_safetensors, put the model's config.json into HF_DIR, then use that
    cannot read DCP: the folder does not exist
    cannot read DCP: it is a Hugging Face folder and no checkpoint: `merak-ckpt import-hf DIR DST` makes one of it
    ");
}

#[test]
fn an_index_that_asks_for_anything_else_is_refused_and_runs_nothing() {
    let folder = copy_of(&golden("grid"));
    let index = folder.path().join(".metadata");
    let config = unknown(folder.path());
    let mut messages = Vec::new();
    for bytes in [
        &b"\x80\x02cos\nsystem\nX\x02\x00\x00\x00ls\x85R."[..],
        b"\x80\x04\x8c\x05torch\x8c\x04load\x93.",
        b"\x80\x04\x8c\x25torch.distributed.checkpoint.metadata\x8c\x08Metadata\x93)\x81.",
        b"N.",
        b"",
    ] {
        fs::write(&index, bytes).unwrap();
        messages.push(refusal(folder.path(), &config, ""));
    }
    insta::assert_snapshot!(messages.join("\n"), @"
    cannot read DCP/.metadata: it asks for `os.system`, which no index of a distributed checkpoint needs (byte 2 of the pickle)
    cannot read DCP/.metadata: it asks for `torch.load`, which no index of a distributed checkpoint needs (byte 15 of the pickle)
    cannot read DCP/.metadata: it has no table `state_dict_metadata`
    cannot read DCP/.metadata: it has no table `state_dict_metadata`
    cannot read DCP/.metadata: the pickle ends too early
    ");
}

#[test]
fn every_truncation_and_many_flipped_bits_give_an_error_or_a_checkpoint() {
    for (name, file, step) in [
        ("grid", ".metadata", 61),
        ("sgd", ".metadata", 67),
        ("grid", "__3_0.distcp", 313),
    ] {
        let folder = copy_of(&golden(name));
        let config = unknown(folder.path());
        let path = folder.path().join(file);
        let bytes = fs::read(&path).unwrap();
        let open = || {
            let to = tempfile::tempdir().unwrap();
            match import(
                folder.path(),
                to.path(),
                &config,
                "",
                &ImportOptions::default(),
            ) {
                Ok(imported) => assert!(imported.verify().damage.is_empty()),
                Err(error) => assert!(error.is_user_error(), "{error}"),
            }
        };
        for length in (0..bytes.len()).step_by(step) {
            fs::write(&path, &bytes[..length]).unwrap();
            refusal(folder.path(), &config, "");
        }
        for at in (0..bytes.len()).step_by(step) {
            let mut bytes = bytes.clone();
            bytes[at] ^= 1 << (at % 8);
            fs::write(&path, bytes).unwrap();
            open();
        }
    }
}

#[test]
fn places_and_boxes_that_lie_are_refused() {
    let folder = copy_of(&golden("sgd"));
    let config = unknown(folder.path());
    let index = folder.path().join(".metadata");
    let bytes = fs::read(&index).unwrap();
    let mut messages = Vec::new();
    // The last number of the first box becomes larger; an offset becomes one beyond 2^62; a file
    // lies elsewhere.
    let find = |what: &[u8]| {
        bytes
            .windows(what.len())
            .position(|w| w == what)
            .expect("it is there")
    };
    let replaced =
        |at: usize, old: usize, new: &[u8]| [&bytes[..at], new, &bytes[at + old..]].concat();
    let shape = find(b"K\x05K\x04\x86");
    let length = find(b"length");
    let number = length
        + bytes[length..]
            .iter()
            .position(|&b| b == b'M')
            .expect("a number");
    let name = find(b"__0_0.distcp");
    for spoilt in [
        replaced(shape, 4, b"K\x07K\x04"),
        replaced(number, 3, b"\x8a\x08\xff\xff\xff\xff\xff\xff\xff\x7f"),
        replaced(number, 3, b"J\xff\xff\xff\xff"),
        replaced(name, 12, b"../etc/passw"),
        replaced(name, 12, b"__9_9.distcp"),
    ] {
        fs::write(&index, spoilt).unwrap();
        messages.push(refusal(folder.path(), &config, ""));
    }
    insta::assert_snapshot!(messages.join("\n"), @"
    cannot read DCP: tensor `rows.weight` is not whole: the slices hold 20 of 28 elements
    cannot read DCP/.metadata: the items at the bytes 0 and 1261 of __0_0.distcp overlap
    cannot read DCP/.metadata: a size or offset is -1
    cannot read DCP/.metadata: invalid file name `../etc/passw`: expected 1 to 128 of the characters a-z, A-Z, 0-9, `.`, `_` and `-`, not starting with a dot, other than manifest.json
    cannot open DCP/__9_9.distcp
    ");
}

#[test]
fn a_changed_byte_of_an_item_is_refused_by_the_item_s_own_checksum() {
    let to = tempfile::tempdir().unwrap();
    let options = ImportOptions::default();
    // Only the item of one field of a group, which Merak has no use for, is not read.
    for (name, prefix, config) in cases(to.path()).into_iter().take(1) {
        let folder = copy_of(&golden(name));
        let mut files: Vec<_> = fs::read_dir(folder.path()).unwrap().collect();
        files.retain(|entry| {
            let path = entry.as_ref().unwrap().path();
            path.extension().is_some_and(|end| end == "distcp")
        });
        let (mut refused, mut all) = (0, 0);
        for entry in files {
            let path = entry.unwrap().path();
            let good = fs::read(&path).unwrap();
            for (member, at) in crate::hf_hostile::storages(&good) {
                let mut bad = good.clone();
                bad[at] ^= 1;
                fs::write(&path, bad).unwrap();
                let to = to.path().join(format!("{name}-{all}"));
                all += 1;
                let Err(error) = import(folder.path(), &to, &config, prefix, &options) else {
                    continue;
                };
                let message = error.to_string();
                let member = format!("member `{member}` has the checksum");
                assert!(message.contains(&member), "{message}");
                refused += 1;
            }
            fs::write(&path, good).unwrap();
        }
        assert_eq!((refused, all), (65, 66), "{name}");
    }
}
