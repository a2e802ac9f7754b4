//! Hugging Face folders: what comes in goes out again.
//!
//! `tests/goldens/hf` has the folders, the script that made them and the one that loads what we
//! export.

use crate::hf_whole::whole;
use crate::support::topology;
use merak_ckpt::{
    Checkpoint, Cut, DType, Error, ExportOptions, Header, HfFolder, ImportOptions, Layout, Piece,
    ShardKind, Store, TensorEntry, Topology, export_hf, import_hf,
};
use serde_json::Value;
use std::fs;
use std::path::{Path, PathBuf};

const FOLDERS: [&str; 6] = [
    "gpt2-safetensors",
    "gpt2-zip",
    "gpt2-old",
    "gpt2-strided",
    "llama-indexed",
    "vit",
];

pub(crate) fn golden(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/goldens/hf")
        .join(name)
}

pub(crate) fn json(path: &Path) -> Value {
    let text = fs::read(path).expect("it can be read");
    serde_json::from_slice(&text).expect("it is JSON")
}

/// The tensor's values, whole, in this type.
fn read(folder: &HfFolder, tensor: &TensorEntry, dtype: DType) -> Vec<u8> {
    let layout = Layout::whole(&tensor.shape);
    let mut out = vec![0; tensor.num_elements() * dtype.size_bytes()];
    let piece = Piece::parameter(&tensor.name, dtype, &layout);
    folder.read_as(&piece, &mut out).expect("it reads");
    out
}

/// Every tensor with its type, shape and bytes.
pub(crate) fn content(folder: &HfFolder) -> Vec<(String, DType, Vec<usize>, Vec<u8>)> {
    let all = folder.tensors().iter();
    all.map(|t| {
        let bytes = read(folder, t, t.dtype);
        (t.name.clone(), t.dtype, t.shape.clone(), bytes)
    })
    .collect()
}

/// A copy of a golden folder that a test may spoil.
pub(crate) fn copy(name: &str) -> tempfile::TempDir {
    copy_of(&golden(name))
}

/// A copy of a folder of files.
pub(crate) fn copy_of(golden: &Path) -> tempfile::TempDir {
    let folder = tempfile::tempdir().expect("a temporary folder");
    for entry in fs::read_dir(golden).expect("the goldens are there") {
        let path = entry.expect("an entry").path();
        let to = folder.path().join(path.file_name().expect("a name"));
        fs::copy(&path, to).expect("it can be copied");
    }
    folder
}

#[test]
fn every_format_gives_the_tensors_that_torch_saved() {
    let expected = json(&golden("expected.json"));
    for name in FOLDERS {
        let folder = HfFolder::open(golden(name)).unwrap();
        let expected = expected[name].as_object().unwrap();
        let names: Vec<_> = folder.tensors().iter().map(|t| &t.name).collect();
        assert_eq!(names, expected.keys().collect::<Vec<_>>(), "{name}");
        for tensor in folder.tensors() {
            let values: Vec<f64> = read(&folder, tensor, DType::F64)
                .chunks_exact(8)
                .map(|bytes| f64::from_le_bytes(bytes.try_into().unwrap()))
                .collect();
            let expected = &expected[&tensor.name];
            assert_eq!(serde_json::json!(tensor.shape), expected["shape"]);
            assert_eq!(values.last().copied(), expected["last"].as_f64());
            let (sum, expected) = (values.iter().sum::<f64>(), expected["sum"].as_f64());
            assert!((sum - expected.unwrap()).abs() < 1e-9, "{}", tensor.name);
        }
    }
    let old = HfFolder::open(golden("gpt2-old")).unwrap();
    assert_eq!(
        content(&old),
        content(&HfFolder::open(golden("gpt2-safetensors")).unwrap())
    );
    assert_eq!(
        old.left_out(),
        [
            "transformer.h.0.attn.bias",
            "transformer.h.0.attn.masked_bias",
            "transformer.h.1.attn.bias",
            "transformer.h.1.attn.masked_bias"
        ]
    );
}

#[test]
fn import_and_export_is_the_identity_for_any_topology() {
    let folder = tempfile::tempdir().unwrap();
    for (name, (dp, tp, pp)) in FOLDERS.into_iter().zip([
        (1, 1, 1),
        (2, 2, 2),
        (1, 4, 1),
        (2, 4, 1),
        (1, 2, 4),
        (2, 2, 1),
    ]) {
        let original = HfFolder::open(golden(name)).unwrap();
        let options = ImportOptions {
            topology: Topology {
                zero_stage: 3,
                ..topology(dp, tp, pp)
            },
            ..ImportOptions::default()
        };
        let imported = import_hf(&original, folder.path().join(name), &options).unwrap();
        let checkpoint = Checkpoint::open(&imported).unwrap();
        assert_eq!(checkpoint.verify().damage, []);
        let types = checkpoint.manifest().tensors.iter().map(|t| t.dtype);
        assert!(types.into_iter().all(|dtype| dtype == DType::F32));

        let exported = folder.path().join(format!("{name}-out"));
        let options = ExportOptions {
            dtype: Some(original.tensors()[0].dtype),
            max_shard_size: if tp > 1 { 1000 } else { u64::MAX },
            ..ExportOptions::default()
        };
        export_hf(&checkpoint, &exported, &options).unwrap();
        let back = HfFolder::open(&exported).unwrap();
        assert!(content(&back) == content(&original), "{name}");
        assert_eq!(back.config(), original.config());
        assert_eq!(back.companions(), original.companions());
        let is_indexed = exported.join("model.safetensors.index.json").exists();
        assert_eq!(is_indexed, tp > 1);
        if is_indexed {
            assert!(!exported.join("model.safetensors").exists());
            let index = json(&exported.join("model.safetensors.index.json"));
            let bytes: usize = original.tensors().iter().map(TensorEntry::num_bytes).sum();
            assert_eq!(index["metadata"]["total_size"], bytes);
        }
        let error = export_hf(&checkpoint, &exported, &options).unwrap_err();
        assert!(matches!(error, Error::AlreadyExists { .. }), "{error}");
    }
}

#[test]
fn fused_and_transposed_weights_are_cut_by_their_meaning() {
    let gpt2 = HfFolder::open(golden("gpt2-old")).unwrap();
    let llama = HfFolder::open(golden("llama-indexed")).unwrap();
    let cut = |folder: &HfFolder, name: &str| {
        let tensor = folder.tensors().iter().find(|t| t.name == name);
        tensor.expect("it is there").cut.clone()
    };
    let c_attn = cut(&gpt2, "transformer.h.1.attn.c_attn.weight");
    assert_eq!(c_attn, Some(Cut::new(1, [8, 8, 8])));
    let c_proj = cut(&gpt2, "transformer.h.1.mlp.c_proj.weight");
    assert_eq!(c_proj, Some(Cut::new(0, [32])));
    assert_eq!(cut(&gpt2, "transformer.ln_f.weight"), None);
    let down = cut(&llama, "model.layers.0.mlp.down_proj.weight");
    assert_eq!(down, Some(Cut::new(1, [12])));
}

/// A folder with these tensors of zeros.
pub(crate) fn written(config: &Value, tensors: &[(&str, &[usize])]) -> tempfile::TempDir {
    let zeros = tensors.iter().map(|&(name, shape)| (name, shape, 0.0));
    filled(config, &zeros.collect::<Vec<_>>())
}

/// A folder with these tensors, of zeros except for the last element.
pub(crate) fn filled(config: &Value, tensors: &[(&str, &[usize], f32)]) -> tempfile::TempDir {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let bytes: Vec<Vec<u8>> = tensors
        .iter()
        .map(|(_, shape, last)| {
            let mut values = vec![0.0; shape.iter().product()];
            *values.last_mut().expect("no tensor is empty") = *last;
            values.into_iter().flat_map(f32::to_le_bytes).collect()
        })
        .collect();
    let views = tensors.iter().zip(&bytes).map(|((name, shape, _), bytes)| {
        let view =
            safetensors::tensor::TensorView::new(safetensors::Dtype::F32, shape.to_vec(), bytes);
        (*name, view.expect("as many bytes as the shape says"))
    });
    let file = folder.path().join("model.safetensors");
    safetensors::serialize_to_file(views, None, &file).expect("it can be written");
    fs::write(folder.path().join("config.json"), config.to_string()).expect("it can be written");
    folder
}

#[test]
fn a_head_that_differs_from_the_embedding_is_kept_whatever_the_configuration_says() {
    let shape: &[usize] = &[5, 3];
    for (family, head, embedding) in [
        ("gpt2", "lm_head.weight", "transformer.wte.weight"),
        ("gpt2", "lm_head.weight", "wte.weight"),
        ("llama", "lm_head.weight", "model.embed_tokens.weight"),
        ("qwen2", "lm_head.weight", "model.embed_tokens.weight"),
        ("opt", "lm_head.weight", "model.decoder.embed_tokens.weight"),
        ("gpt_neox", "embed_out.weight", "gpt_neox.embed_in.weight"),
        (
            "bert",
            "cls.predictions.decoder.weight",
            "bert.embeddings.word_embeddings.weight",
        ),
        ("t5", "lm_head.weight", "shared.weight"),
    ] {
        let config = serde_json::json!({ "model_type": family, "tie_word_embeddings": true });
        let rest = whole(family);
        let is_bare = embedding == "wte.weight";
        let names = rest.tensors.iter().map(|(name, shape)| {
            let bare = name.trim_start_matches("transformer.");
            (if is_bare { bare } else { name.as_str() }, shape)
        });
        let rest = names.filter(|(name, _)| ![head, embedding].contains(name));
        let rest = rest.map(|(name, shape)| (name, shape.as_slice(), 0.0));
        let rest: Vec<_> = rest.collect();
        let with =
            |tensors: [(&str, &[usize], f32); 2]| filled(&config, &[&rest[..], &tensors].concat());
        let equal = with([(head, shape, 2.0), (embedding, shape, 2.0)]);
        let equal = HfFolder::open(equal.path()).unwrap();
        assert_eq!(equal.left_out(), [head], "{family}");
        assert_eq!(equal.config(), &config);
        assert!(!equal.correct(&mut config.clone()));

        let apart = with([(head, shape, 2.0), (embedding, shape, 3.0)]);
        let source = HfFolder::open(apart.path()).unwrap();
        assert_eq!(source.left_out(), [""; 0], "{family}");
        assert_eq!(source.config()["tie_word_embeddings"], false, "{family}");
        let mut corrected = config.clone();
        assert!(source.correct(&mut corrected));
        assert_eq!(&corrected, source.config());

        // The import and the export of the folder keep the correction.
        let into = apart.path().join("imported");
        let imported = import_hf(&source, &into, &ImportOptions::default()).unwrap();
        let imported = Checkpoint::open(imported).unwrap();
        assert_eq!(imported.verify().damage, []);
        assert_eq!(json(&imported.path().join("config.json")), corrected);
        let back = apart.path().join("back");
        export_hf(&imported, &back, &ExportOptions::default()).unwrap();
        let back = HfFolder::open(back).unwrap();
        let kept = content(&back);
        let kept = kept.into_iter().filter(|(name, ..)| name == head);
        let expected = content(&source);
        let expected = expected.into_iter().filter(|(name, ..)| name == head);
        assert!(kept.eq(expected), "{family}");
    }
}

#[test]
fn t5_scales_its_outputs_as_before_when_its_head_is_set_apart() {
    let shape: &[usize] = &[5, 3];
    for (stated, scales) in [(None, true), (Some(true), true), (Some(false), false)] {
        let mut config = serde_json::json!({ "model_type": "t5" });
        if let Some(stated) = stated {
            config["scale_decoder_outputs"] = stated.into();
        }
        let tensors = [
            ("lm_head.weight", shape, 2.0),
            ("shared.weight", shape, 3.0),
        ];
        let folder = HfFolder::open(filled(&config, &tensors).path()).unwrap();
        assert_eq!(folder.config()["tie_word_embeddings"], false);
        assert_eq!(folder.config()["scale_decoder_outputs"], scales);
    }
}

#[test]
fn bare_models_of_opt_and_gpt_neox_get_their_names_and_cuts() {
    let opt = written(
        &serde_json::json!({ "model_type": "opt" }),
        &[
            ("decoder.embed_tokens.weight", &[9, 4]),
            ("decoder.layers.0.self_attn.out_proj.weight", &[4, 4]),
            ("decoder.layers.0.fc1.bias", &[8]),
            ("lm_head.weight", &[9, 4]),
        ],
    );
    let opt = HfFolder::open(opt.path()).unwrap();
    let named = |folder: &HfFolder| -> Vec<_> {
        let all = folder.tensors().iter();
        all.map(|t| (t.name.clone(), t.cut.clone())).collect()
    };
    assert_eq!(
        named(&opt),
        [
            ("model.decoder.embed_tokens.weight".to_owned(), None),
            (
                "model.decoder.layers.0.fc1.bias".to_owned(),
                Some(Cut::new(0, [8]))
            ),
            (
                "model.decoder.layers.0.self_attn.out_proj.weight".to_owned(),
                Some(Cut::new(1, [4]))
            ),
        ]
    );
    assert_eq!(opt.left_out(), ["lm_head.weight"]);

    let neox = written(
        &serde_json::json!({ "model_type": "gpt_neox" }),
        &[
            ("embed_in.weight", &[9, 4]),
            ("layers.0.attention.bias", &[1, 1, 8, 8]),
            ("layers.0.attention.masked_bias", &[1]),
            ("layers.0.attention.query_key_value.bias", &[12]),
            ("layers.0.attention.rotary_emb.inv_freq", &[2]),
            ("embed_out.weight", &[9, 4]),
        ],
    );
    let neox = HfFolder::open(neox.path()).unwrap();
    assert_eq!(
        named(&neox),
        [
            ("embed_out.weight".to_owned(), None),
            ("gpt_neox.embed_in.weight".to_owned(), None),
            (
                "gpt_neox.layers.0.attention.query_key_value.bias".to_owned(),
                Some(Cut::new(0, [12]))
            ),
        ]
    );
    assert_eq!(neox.left_out().len(), 3);
}

/// A checkpoint with a GPT-2 configuration and these parameters, one value each.
fn checkpoint(folder: &Path, parameters: &[(&str, f32)], config: &[u8]) -> Checkpoint {
    let store = Store::in_output_dir(folder);
    let draft = store.begin(1).expect("it begins");
    let layout = Layout::whole(&[1]);
    let bytes: Vec<_> = parameters.iter().map(|(_, v)| v.to_le_bytes()).collect();
    let pieces: Vec<_> = parameters
        .iter()
        .zip(&bytes)
        .map(|((name, _), bytes)| {
            let piece = Piece::parameter(name, DType::F32, &layout);
            (piece, bytes.as_slice())
        })
        .collect();
    let shard = draft
        .write_shard(ShardKind::Model, 0, &pieces)
        .expect("it writes");
    let path = draft.commit(vec![shard], Header::default(), &[("config.json", config)]);
    Checkpoint::open(path.expect("it commits")).expect("it opens")
}

/// What the export of a checkpoint with these parameters has, and its configuration.
fn exported(parameters: &[(&str, f32)], config: &[u8]) -> (Vec<(String, f32)>, Value) {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let source = checkpoint(folder.path(), parameters, config);
    let out = folder.path().join("out");
    export_hf(&source, &out, &ExportOptions::default()).expect("it exports");
    let written = fs::read(out.join("model.safetensors")).expect("it is there");
    let tensors = safetensors::SafeTensors::deserialize(&written).expect("it is sound");
    let value = |bytes: &[u8]| f32::from_le_bytes(bytes.try_into().expect("one value"));
    let all = tensors.iter();
    let mut all: Vec<_> = all
        .map(|(name, view)| (name.to_owned(), value(view.data())))
        .collect();
    all.sort_by(|a, b| a.0.cmp(&b.0));
    (all, json(&out.join("config.json")))
}

#[test]
fn the_bias_of_a_bert_head_has_the_names_that_transformers_asks_for() {
    let (bias, decoder) = ("cls.predictions.bias", "cls.predictions.decoder.bias");
    let head = "cls.predictions.decoder.weight";
    let words = "bert.embeddings.word_embeddings.weight";
    // Where the head is untied, transformers creates both and reads the decoder's.
    let (tensors, config) = exported(
        &[(words, 1.0), (head, 2.0), (decoder, 3.0)],
        br#"{"model_type": "bert"}"#,
    );
    let expected = [(words, 1.0), (bias, 3.0), (decoder, 3.0), (head, 2.0)];
    assert_eq!(tensors, expected.map(|(name, x)| (name.to_owned(), x)));
    assert_eq!(config["tie_word_embeddings"], false);
    let (tensors, _) = exported(&[(words, 1.0), (bias, 3.0)], br#"{"model_type": "bert"}"#);
    assert_eq!(tensors.len(), 2);

    let imported = |tied: bool, names: &[&str]| {
        let config = serde_json::json!({ "model_type": "bert", "tie_word_embeddings": tied });
        let mut tensors: Vec<(&str, &[usize])> = vec![(words, &[4, 2])];
        tensors.extend(names.iter().map(|&name| (name, &[4][..])));
        let folder = HfFolder::open(written(&config, &tensors).path()).unwrap();
        let names: Vec<_> = folder.tensors().iter().map(|t| t.name.clone()).collect();
        (names[1..].to_vec(), folder.left_out().to_vec())
    };
    let both = &[bias, decoder][..];
    for (tied, used, unused) in [(true, bias, decoder), (false, decoder, bias)] {
        let with = imported(tied, both);
        assert_eq!(with, (vec![used.to_owned()], vec![unused.to_owned()]));
        // Version 4 of transformers writes one of the two.
        for only in both {
            assert_eq!(imported(tied, &[only]), (vec![used.to_owned()], vec![]));
        }
    }
}

#[test]
fn the_configuration_says_whether_there_is_a_head() {
    let config =
        br#"{"model_type": "gpt2", "torch_dtype": "bfloat16", "tie_word_embeddings": true}"#;
    let (wte, head) = ("transformer.wte.weight", "lm_head.weight");
    let export = |parameters: &[(&str, f32)], config: &[u8]| {
        let (tensors, config) = exported(parameters, config);
        let names: Vec<_> = tensors.into_iter().map(|(name, _)| name).collect();
        (names, config)
    };
    // Tied and equal: one tensor, as transformers has it.
    let (names, out) = export(&[(wte, 1.5), (head, 1.5)], config);
    assert_eq!(
        (names, &out["tie_word_embeddings"]),
        (vec![wte.to_owned()], &true.into())
    );
    assert_eq!(out["torch_dtype"], "float32");
    // Trained apart: two tensors, and the configuration no longer ties them.
    let (names, out) = export(&[(wte, 1.5), (head, 2.5)], config);
    assert_eq!(
        (names.len(), &out["tie_word_embeddings"]),
        (2, &false.into())
    );
    // A Llama without a head of its own is tied, which is not its default.
    let (_, out) = export(
        &[("model.embed_tokens.weight", 1.0)],
        br#"{"model_type": "llama"}"#,
    );
    assert_eq!(out["tie_word_embeddings"], true);
    // A model of another type is unknown.
    let (names, out) = export(&[(wte, 1.5), (head, 1.5)], br#"{"model_type": "gpt"}"#);
    assert_eq!((names.len(), out.get("tie_word_embeddings")), (2, None));
}

#[test]
fn an_untied_head_that_is_missing_is_not_exported_as_tied() {
    let folder = tempfile::tempdir().unwrap();
    let config = br#"{"model_type": "llama", "tie_word_embeddings": false}"#;
    let source = checkpoint(folder.path(), &[("model.embed_tokens.weight", 1.0)], config);
    let out = folder.path().join("out");
    let error = export_hf(&source, &out, &ExportOptions::default()).unwrap_err();
    let error = error.to_string();
    assert!(
        error.ends_with(
            "it lacks tensor `lm_head.weight`, which its config.json does not tie to the embedding"
        ),
        "{error}"
    );
    assert!(!out.exists());

    // A model without a head stays one.
    let config = br#"{"model_type": "llama", "architectures": ["LlamaModel"], "tie_word_embeddings": false}"#;
    let (_, out) = exported(&[("model.embed_tokens.weight", 1.0)], config);
    assert_eq!(out["tie_word_embeddings"], false);
}

#[test]
fn an_export_leaves_alone_what_lies_beside_it_and_takes_over_what_one_that_died_left() {
    let folder = tempfile::tempdir().unwrap();
    let config = br#"{"model_type": "gpt2"}"#;
    let source = checkpoint(folder.path(), &[("transformer.wte.weight", 1.0)], config);
    let beside = folder.path().join(".tmp-out");
    fs::create_dir(&beside).unwrap();
    fs::write(beside.join("thesis.tex"), "mine").unwrap();
    let left = folder.path().join(".merak-tmp-out");
    fs::create_dir(&left).unwrap();
    fs::write(left.join("model-00001-of-00002.safetensors"), "half of it").unwrap();
    let out = folder.path().join("out");
    export_hf(&source, &out, &ExportOptions::default()).unwrap();
    assert!(beside.join("thesis.tex").exists());
    assert!(!left.exists() && !out.join("model-00001-of-00002.safetensors").exists());
    assert!(out.join("model.safetensors").exists());
}

/// Why a folder with these tensors of zeros is not imported.
pub(crate) fn import_refusal(config: &Value, tensors: &[(&str, &[usize])]) -> String {
    let folder = written(config, tensors);
    let into = folder.path().join("imported");
    let outcome = HfFolder::open(folder.path())
        .and_then(|source| import_hf(&source, &into, &ImportOptions::default()));
    let error = outcome.expect_err("it is no whole model");
    assert!(error.is_user_error() && !into.exists(), "{error}");
    let text = error.to_string();
    text.replace(&folder.path().display().to_string(), "HF")
}

#[test]
fn a_configuration_says_which_model_it_is_of() {
    let mut messages = Vec::new();
    for config in ["[]", "null", "{}", r#"{"model_type": 5}"#] {
        let config = serde_json::from_str(config).unwrap();
        messages.push(import_refusal(&config, &[("wte.weight", &[5, 4])]));
    }
    let gpt2 = serde_json::json!({ "model_type": "gpt2" });
    messages.push(import_refusal(&gpt2, &[]));
    insta::assert_snapshot!(messages.join("\n"), @r#"
    cannot read HF/config.json: it is no object with a `model_type`, expected a name as in "gpt2"
    cannot read HF/config.json: it is no object with a `model_type`, expected a name as in "gpt2"
    cannot read HF/config.json: it is no object with a `model_type`, expected a name as in "gpt2"
    cannot read HF/config.json: it is no object with a `model_type`, expected a name as in "gpt2"
    cannot read HF: its weights hold no tensors
    "#);
}

#[test]
fn integers_are_no_parameters() {
    let folder = tempfile::tempdir().unwrap();
    let header = br#"{"wte.weight":{"dtype":"I32","shape":[2],"data_offsets":[0,8]}}"#;
    let file = [&(header.len() as u64).to_le_bytes()[..], header, &[0; 8]].concat();
    fs::write(folder.path().join("model.safetensors"), file).unwrap();
    fs::write(
        folder.path().join("config.json"),
        r#"{"model_type": "gpt2"}"#,
    )
    .unwrap();
    let source = HfFolder::open(folder.path()).unwrap();
    let into = folder.path().join("imported");
    let error = import_hf(&source, into, &ImportOptions::default()).unwrap_err();
    let error = error.to_string();
    assert!(error.ends_with("tensor `transformer.wte.weight` has elements of type i32, expected a floating-point type"), "{error}");
}

#[test]
fn what_an_architecture_has_beside_its_family_is_carried_along() {
    let (words, pairs) = (
        "bert.embeddings.word_embeddings.weight",
        "cls.seq_relationship.weight",
    );
    for (family, architecture, names, is_kept) in [
        ("bert", "BertForPreTraining", [words, pairs], true),
        (
            "bert",
            "BertForNextSentencePrediction",
            [words, pairs],
            true,
        ),
        ("bert", "BertForMaskedLM", [words, pairs], false),
        (
            "vit",
            "ViTModel",
            ["layernorm.weight", "pooler.dense.weight"],
            true,
        ),
        (
            "vit",
            "ViTForImageClassification",
            ["vit.layernorm.weight", "vit.pooler.dense.weight"],
            false,
        ),
    ] {
        let config = serde_json::json!({ "model_type": family, "architectures": [architecture] });
        let folder = written(&config, &names.map(|name| (name, &[2, 2][..])));
        let folder = HfFolder::open(folder.path()).unwrap();
        let found = (folder.tensors().len(), folder.left_out().len());
        let expected = if is_kept { (2, 0) } else { (1, 1) };
        assert_eq!(found, expected, "{architecture}");
    }
}

#[test]
fn a_vit_under_the_names_of_memory_is_the_model_that_files_have() {
    let folder = copy("vit");
    let expected = HfFolder::open(folder.path()).unwrap();
    let file = folder.path().join("model.safetensors");
    let bytes = fs::read(&file).unwrap();
    let data = 8 + bytes_of(&bytes);
    let mut header = String::from_utf8(bytes[8..data].to_vec()).unwrap();
    for (in_files, in_memory) in [
        ("attention.attention.query", "attention.q_proj"),
        ("attention.attention.key", "attention.k_proj"),
        ("attention.attention.value", "attention.v_proj"),
        ("attention.output.dense", "attention.o_proj"),
        ("intermediate.dense", "mlp.fc1"),
        ("output.dense", "mlp.fc2"),
        ("encoder.layer.", "layers."),
    ] {
        header = header.replace(in_files, in_memory);
    }
    let other = tempfile::tempdir().unwrap();
    for header in [
        header.clone(),
        header.replace("\"vit.", "\"").replace("classifier", "cls"),
    ] {
        let length = (header.len() as u64).to_le_bytes();
        let bytes = [&length[..], header.as_bytes(), &bytes[data..]].concat();
        fs::write(other.path().join("model.safetensors"), bytes).unwrap();
        fs::copy(
            folder.path().join("config.json"),
            other.path().join("config.json"),
        )
        .unwrap();
        let found = HfFolder::open(other.path()).unwrap();
        let of_layers = |folder: &HfFolder| {
            let all = content(folder).into_iter();
            all.filter(|(name, ..)| name.contains("layer"))
                .collect::<Vec<_>>()
        };
        assert_eq!(of_layers(&found), of_layers(&expected));
        assert_eq!(of_layers(&found).len(), 34);
    }
}

/// The length of the header of a safetensors file.
fn bytes_of(file: &[u8]) -> usize {
    u64::from_le_bytes(file[..8].try_into().expect("eight bytes")) as usize
}
