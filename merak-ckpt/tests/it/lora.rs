//! PEFT adapters: what is merged equals what PEFT merges.

use merak_ckpt::{
    Adapter, DType, Error, ExportOptions, HfFolder, ImportOptions, Kind, Layout, Piece, import_hf,
    merge_lora,
};
use proptest::prelude::*;
use serde_json::{Value, json};
use std::fs;
use std::path::{Path, PathBuf};

fn golden(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/goldens")
        .join(name)
}

/// The floats of a tensor in a safetensors file, any floating-point type.
fn floats(file: &Path, name: &str) -> Vec<f64> {
    let bytes = fs::read(file).expect("it is there");
    let tensors = safetensors::SafeTensors::deserialize(&bytes).expect("it is sound");
    let tensor = tensors.tensor(name).expect("it is there");
    match tensor.dtype() {
        safetensors::Dtype::F32 => {
            let values = tensor.data().chunks_exact(4);
            values
                .map(|b| f32::from_le_bytes(b.try_into().expect("four bytes")).into())
                .collect()
        }
        safetensors::Dtype::BF16 => {
            let values = tensor.data().chunks_exact(2);
            values
                .map(|b| half::bf16::from_le_bytes(b.try_into().expect("two bytes")).into())
                .collect()
        }
        other => unreachable!("{other:?}"),
    }
}

fn names(file: &Path) -> Vec<String> {
    let bytes = fs::read(file).expect("it is there");
    let tensors = safetensors::SafeTensors::deserialize(&bytes).expect("it is sound");
    let mut names: Vec<_> = tensors.names().into_iter().map(str::to_owned).collect();
    names.sort();
    names
}

/// Merges an adapter and compares every element with what PEFT made.
fn check(base: &Path, adapter: impl AsRef<Path>, tolerance: f64) {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let out = folder.path().join("merged");
    let adapter = golden("lora").join(adapter);
    merge_lora(base, &adapter, &out, &ExportOptions::default()).expect("it merges");
    let config = fs::read(out.join("config.json")).expect("it is there");
    let config: Value = serde_json::from_slice(&config).expect("it is JSON");
    let (ours, theirs) = (
        out.join("model.safetensors"),
        adapter.join("merged.safetensors"),
    );
    assert_eq!(names(&ours), names(&theirs));
    if config["model_type"] != "vit" {
        let has_head = names(&ours).contains(&"lm_head.weight".to_owned());
        assert_eq!(config["tie_word_embeddings"], !has_head);
    }
    for name in names(&ours) {
        let (ours, theirs) = (floats(&ours, &name), floats(&theirs, &name));
        assert_eq!(ours.len(), theirs.len(), "{name}");
        for (a, b) in ours.iter().zip(&theirs) {
            assert!(
                (a - b).abs() <= tolerance * b.abs().max(1.0),
                "{name}: {a}, {b}"
            );
        }
    }
}

#[test]
fn merged_weights_are_those_of_peft() {
    let gpt2 = golden("hf/gpt2-safetensors");
    check(&gpt2, "gpt2", 1e-6);
    // Head and embedding of the base are one tensor; each adapter is for one of them.
    check(&gpt2, "embedding", 1e-6);
    check(&gpt2, "head", 1e-6);
    // In bf16 PEFT rounds twice.
    let llama = golden("hf/llama-indexed");
    check(&llama, "llama", 1.6e-2);
    check(&llama, "tables", 1.6e-2);
    // For layers that are stored `[out, in]`, PEFT ignores a field that says otherwise.
    let transposed = changed("tables", |config| config["fan_in_fan_out"] = json!(true));
    check(&llama, transposed.path(), 1.6e-2);
    // The convolution of a vision transformer, and linear layers beside it.
    check(&golden("hf/vit"), "vit", 1e-6);
    check(&golden("hf/vit"), "vit-dora", 1e-6);
    // A bare model has shorter names; pickles are read as well.
    check(&golden("hf/gpt2-zip"), "gpt2", 1e-6);
    // A checkpoint of the base, cut for other ranks.
    let folder = tempfile::tempdir().unwrap();
    let options = ImportOptions {
        topology: merak_ckpt::Topology {
            tp: 2,
            ..merak_ckpt::Topology::default()
        },
        ..ImportOptions::default()
    };
    let source = HfFolder::open(&gpt2).unwrap();
    import_hf(&source, folder.path(), &options).unwrap();
    check(folder.path(), "gpt2", 1e-6);
}

proptest! {
    #[test]
    fn a_slice_merged_is_the_slice_of_the_merged(
        tensor in 0_usize..5,
        dim in 0_usize..2,
        ends in (0_usize..=8, 0_usize..=8),
        range in (0.0..1.0, 0.0..1.0),
    ) {
        let (name, base, adapter) = [
            ("transformer.h.0.attn.c_attn.weight", "gpt2-safetensors", "gpt2"),
            ("transformer.h.1.mlp.c_proj.weight", "gpt2-safetensors", "gpt2"),
            ("transformer.h.0.attn.c_proj.weight", "gpt2-safetensors", "gpt2"),
            ("transformer.wte.weight", "gpt2-safetensors", "embedding"),
            ("vit.embeddings.patch_embeddings.projection.weight", "vit", "vit"),
        ][tensor];
        let source = HfFolder::open(golden("hf").join(base)).expect("it opens");
        let entry = source.tensors().iter().find(|t| t.name == name).expect("it is there");
        let adapter = golden("lora").join(adapter);
        let adapter = Adapter::open(adapter, source.config(), source.tensors()).expect("it opens");
        let read = |layout: &Layout, range: Option<std::ops::Range<usize>>| {
            let count = range.as_ref().map_or(layout.num_local_elements(), ExactSizeIterator::len);
            let piece = Piece { kind: &Kind::Parameter, name: &entry.name, dtype: DType::F32, layout, range };
            let mut out = vec![0; count * 4];
            source.read_as(&piece, &mut out).and_then(|()| adapter.merge(&piece, &mut out)).expect("it reads");
            out
        };
        let whole = read(&Layout::whole(&entry.shape), None);
        let ends = [ends.0, ends.1].map(|end| end.min(entry.shape[dim]));
        let (begin, end) = (ends[0].min(ends[1]), ends[0].max(ends[1]));
        let layout = Layout::shard(&entry.shape, dim, begin..end).expect("it fits");
        let n = layout.num_local_elements();
        let [a, b] = [range.0, range.1].map(|share: f64| (share * n as f64) as usize);
        let range = a.min(b)..a.max(b);
        let part = read(&layout, Some(range.clone()));
        // A kernel's height and width are never cut.
        let inner: usize = entry.shape[2..].iter().product();
        let width = layout.local_shape()[1];
        for (out, flat) in part.chunks_exact(4).zip(range) {
            let (place, pixel) = (flat / inner, flat % inner);
            let mut index = [place / width, place % width];
            index[dim] += begin;
            let at = (index[0] * entry.shape[1] + index[1]) * inner + pixel;
            prop_assert_eq!(out, &whole[at * 4..at * 4 + 4]);
        }
    }
}

/// A copy of an adapter whose configuration has been changed.
fn changed(adapter: &str, change: impl FnOnce(&mut Value)) -> tempfile::TempDir {
    let folder = tempfile::tempdir().expect("a temporary folder");
    for entry in fs::read_dir(golden("lora").join(adapter)).expect("a folder") {
        let path = entry.expect("an entry").path();
        let name = path.file_name().expect("a name");
        fs::copy(&path, folder.path().join(name)).expect("it can be copied");
    }
    let file = folder.path().join("adapter_config.json");
    let text = fs::read(&file).expect("it is there");
    let mut config = serde_json::from_slice(&text).expect("it is JSON");
    change(&mut config);
    fs::write(&file, config.to_string()).expect("it can be written");
    folder
}

/// The weights of an adapter.
fn weights(folder: &tempfile::TempDir) -> PathBuf {
    folder.path().join("adapter_model.safetensors")
}

/// A copy of an adapter without the tensors that have this in their names.
fn without(part: &str) -> tempfile::TempDir {
    let folder = changed("gpt2", |_| ());
    let bytes = fs::read(weights(&folder)).expect("it is there");
    let tensors = safetensors::SafeTensors::deserialize(&bytes).expect("it is sound");
    let mut tensors = tensors.tensors();
    tensors.retain(|(name, _)| !name.contains(part));
    safetensors::serialize_to_file(tensors, None, &weights(&folder)).expect("it can be written");
    folder
}

#[test]
fn adapters_that_do_not_fit_are_refused_and_leave_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("merged");
    let refusal = |base: &str, adapter: &Path| {
        let base = golden("hf").join(base);
        let error = merge_lora(base, adapter, &out, &ExportOptions::default()).unwrap_err();
        assert!(error.is_user_error() && !out.exists(), "{error}");
        let text = error.to_string();
        text.replace(&adapter.display().to_string(), "LORA")
    };
    let gpt2 = "gpt2-safetensors";
    let enormous = changed("gpt2", |config| config["lora_alpha"] = json!(3e38));
    let beyond = changed("gpt2", |config| config["lora_alpha"] = json!(1e39));
    let lost = changed("gpt2", |_| ());
    fs::remove_file(weights(&lost)).unwrap();
    let cut = changed("gpt2", |_| ());
    let bytes = fs::read(weights(&cut)).unwrap();
    fs::write(weights(&cut), &bytes[..bytes.len() - 1]).unwrap();
    let unnamed = changed("gpt2", |config| config["target_modules"] = json!(["c_fc"]));
    let of_rank_7 = changed("gpt2", |config| config["r"] = json!(7));
    let without_magnitudes = changed("gpt2", |config| config["use_dora"] = json!(true));
    let empty = without("");
    let parts = ["h.1.attn.c_attn.lora", "ln_f.weight", "h.0.ln_1.bias"].map(without);
    let messages = [
        refusal(gpt2, &folder.path().join("nowhere")),
        refusal("llama-indexed", &golden("lora/gpt2")),
        refusal(gpt2, &golden("lora/llama")),
        refusal(gpt2, enormous.path()),
        refusal(gpt2, beyond.path()),
        refusal(gpt2, lost.path()),
        refusal(gpt2, cut.path()),
        refusal(gpt2, unnamed.path()),
        refusal(gpt2, of_rank_7.path()),
        refusal(gpt2, without_magnitudes.path()),
        refusal(gpt2, empty.path()),
        refusal(gpt2, parts[0].path()),
        refusal(gpt2, parts[1].path()),
        refusal(gpt2, parts[2].path()),
    ];
    insta::assert_snapshot!(messages.join("\n"), @"
    cannot read LORA/adapter_config.json: the file is missing; there is no folder LORA
    cannot read LORA/adapter_model.safetensors: the base has no parameter for `transformer.h.0.attn.c_attn.weight`
    cannot read LORA/adapter_model.safetensors: the base has no parameter for `model.layers.0.mlp.down_proj.weight`
    cannot read LORA: merged with it, `transformer.h.0.mlp.c_proj.weight` is not finite
    cannot read LORA/adapter_config.json: `lora_alpha` is 1e+39, expected a number that f32 can hold
    cannot read LORA: it has no adapter_model.safetensors or adapter_model.bin
    cannot read LORA/adapter_model.safetensors: it has 8327 bytes, by its header it should have 8328
    cannot read LORA/adapter_model.safetensors: it has factors for `transformer.h.0.attn.c_attn`, which is not among the `target_modules`
    cannot read LORA/adapter_model.safetensors: `base_model.model.transformer.h.0.attn.c_attn.lora_A.weight` has rank 4, in the configuration it is 7
    cannot read LORA/adapter_model.safetensors: `transformer.h.0.attn.c_attn` has no magnitude vector, but `use_dora` is true
    cannot read LORA/adapter_model.safetensors: it has no tensor
    cannot read LORA/adapter_model.safetensors: it has no factors for `transformer.h.1.attn.c_attn` of the `target_modules`
    cannot read LORA/adapter_model.safetensors: it has no `transformer.ln_f.weight`, which it has by its configuration
    cannot read LORA/adapter_model.safetensors: it has no `transformer.h.0.ln_1.bias`, which it has by its configuration
    ");
}

#[test]
fn the_folder_of_a_run_in_place_of_its_adapter_is_answered_with_the_adapter() {
    let run = tempfile::tempdir().unwrap();
    let refusal_with = |adapter: &str| {
        let folder = run.path().join(adapter);
        fs::create_dir_all(&folder).unwrap();
        fs::write(folder.join("adapter_config.json"), "{}").unwrap();
        let (base, out) = (golden("hf/gpt2-safetensors"), run.path().join("merged"));
        let error = merge_lora(base, run.path(), out, &ExportOptions::default()).unwrap_err();
        assert!(error.is_user_error(), "{error}");
        let text = error.to_string();
        text.replace(&run.path().display().to_string(), "RUN")
    };
    let messages = ["adapter/sums", "adapter/a", "adapter"].map(refusal_with);
    insta::assert_snapshot!(messages.join("\n"), @r#"
    cannot read RUN: it is the folder of a run, and no adapter: expected a folder that `save_pretrained` of PEFT wrote, with adapter_config.json and adapter_model.safetensors; did you mean "RUN/adapter/sums"?
    cannot read RUN: it is the folder of a run, and no adapter: expected a folder that `save_pretrained` of PEFT wrote, with adapter_config.json and adapter_model.safetensors; did you mean "RUN/adapter/a"?
    cannot read RUN: it is the folder of a run, and no adapter: expected a folder that `save_pretrained` of PEFT wrote, with adapter_config.json and adapter_model.safetensors; did you mean "RUN/adapter"?
    "#);
}

#[test]
fn a_folder_with_content_is_not_merged_into() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("merged");
    fs::create_dir(&out).unwrap();
    fs::write(out.join("mine"), "").unwrap();
    let taken = merge_lora(
        golden("hf/gpt2-safetensors"),
        golden("lora/gpt2"),
        &out,
        &ExportOptions::default(),
    );
    assert!(
        matches!(taken, Err(Error::AlreadyExists { .. })),
        "{taken:?}"
    );
}
