//! Weights of the original Merak: what its converter writes becomes the checkpoint of the same
//! model.

use merak_ckpt::{
    Checkpoint, DType, HfFolder, ImportOptions, Layout, Piece, Tolerance, Topology, diff,
    import_hf, import_merak,
};
use safetensors::tensor::TensorView;
use serde_json::json;
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

/// Ranks that share a column layer's outputs and a row layer's inputs.
const RANKS: usize = 2;

/// The files of two stages.
const FILES: [&str; 2] = [
    "model-00001-of-000002.safetensors",
    "model-00002-of-000002.safetensors",
];

fn golden() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/goldens/hf/gpt2-safetensors")
}

fn values(folder: &HfFolder, name: &str, shape: &[usize]) -> Vec<f32> {
    let layout = Layout::whole(shape);
    let mut bytes = vec![0; layout.num_local_elements() * 4];
    let piece = Piece::parameter(name, DType::F32, &layout);
    folder.read_as(&piece, &mut bytes).expect("it reads");
    let values = bytes.chunks_exact(4);
    values
        .map(|b| f32::from_le_bytes(b.try_into().expect("four bytes")))
        .collect()
}

/// The rows of a matrix `[out, in]` as two ranks leave them behind: each rank's part of q, of k, of
/// v.
fn interleaved(rows: &[Vec<f32>], parts: usize) -> Vec<Vec<f32>> {
    let part = rows.len() / parts;
    let slice = part / RANKS;
    let mut out = Vec::new();
    for rank in 0..RANKS {
        for which in 0..parts {
            out.extend_from_slice(&rows[which * part + rank * slice..][..slice]);
        }
    }
    out
}

/// Shape and bytes of a tensor.
type Stored = (Vec<usize>, Vec<u8>);

/// A tensor of a layer of this kind as the converter stores it.
fn as_stored(flat: Vec<f32>, shape: &[usize], kind: &str, parts: usize) -> (Vec<usize>, Vec<f32>) {
    match (kind, shape) {
        ("", _) => (shape.to_vec(), flat),
        (_, &[inputs, outputs]) => {
            let row = |o: usize| (0..inputs).map(|i| flat[i * outputs + o]).collect();
            let mut rows: Vec<Vec<f32>> = (0..outputs).map(row).collect();
            if kind == "col_linear" {
                rows = interleaved(&rows, parts);
            }
            (vec![outputs, inputs], rows.concat())
        }
        ("col_linear", _) => {
            let rows: Vec<Vec<f32>> = flat.iter().map(|&x| vec![x]).collect();
            (shape.to_vec(), interleaved(&rows, parts).concat())
        }
        _ => (shape.to_vec(), flat),
    }
}

/// Writes the model as the converter does with `RANKS` tensor-parallel ranks and two stages.
fn write(folder: &Path) {
    let source = HfFolder::open(golden()).expect("it opens");
    let mut files: BTreeMap<&str, BTreeMap<String, Stored>> = BTreeMap::new();
    let (mut weight_map, mut gathered) = (BTreeMap::new(), BTreeMap::new());
    for entry in source.tensors() {
        let (name, shape) = (entry.name.as_str(), &entry.shape);
        let kind = match name {
            _ if name.contains("c_attn") || name.contains("c_fc") => "col_linear",
            _ if name.contains("c_proj") => "row_linear",
            _ => "",
        };
        let parts = if name.contains("c_attn") { 3 } else { 1 };
        let flat = values(&source, name, shape);
        let (stored, flat) = as_stored(flat, shape, kind, parts);
        let (module, end) = name.rsplit_once('.').expect("a module's parameter");
        let is_whole = kind.is_empty() || kind == "row_linear" && end == "bias";
        if !is_whole {
            gathered.insert(format!("0.{module}.{kind}.{end}"), 0);
        }
        let place = if name.contains("wte") {
            format!("0.{name}")
        } else {
            name.to_owned()
        };
        let stage = if name.contains("h.1") {
            FILES[1]
        } else {
            FILES[0]
        };
        weight_map.insert(place.clone(), stage);
        let bytes = flat.iter().flat_map(|x| x.to_le_bytes()).collect();
        files
            .entry(stage)
            .or_default()
            .insert(place, (stored, bytes));
    }
    for (file, tensors) in &files {
        let views = tensors.iter().map(|(name, (shape, bytes))| {
            let view = TensorView::new(safetensors::Dtype::F32, shape.clone(), bytes);
            (name.as_str(), view.expect("the shape fits"))
        });
        safetensors::serialize_to_file(views, None, &folder.join(file)).expect("it can be written");
    }
    let index = json!({"metadata": {}, "tp_meta_data": gathered, "weight_map": weight_map});
    let index = index.to_string();
    fs::write(folder.join("model.safetensors.index.json"), index).expect("it can be written");
    fs::copy(golden().join("config.json"), folder.join("config.json")).expect("it can be copied");
}

#[test]
fn weights_of_two_ranks_become_the_model_they_came_from() {
    let folder = tempfile::tempdir().unwrap();
    let merak = folder.path().join("merak");
    fs::create_dir(&merak).unwrap();
    write(&merak);
    let (ours, theirs) = (folder.path().join("ours"), folder.path().join("theirs"));
    let hf = HfFolder::open(golden()).unwrap();
    import_hf(&hf, &theirs, &ImportOptions::default()).unwrap();
    let theirs = Checkpoint::open(&theirs).unwrap();
    for (index, tp) in [1, 2].into_iter().enumerate() {
        let options = ImportOptions {
            topology: Topology {
                tp,
                ..Topology::default()
            },
            ..ImportOptions::default()
        };
        let ours = ours.join(index.to_string());
        import_merak(&merak, &ours, RANKS, &options).unwrap();
        let ours = Checkpoint::open(&ours).unwrap();
        let report = diff(&ours, &theirs, Tolerance::default()).unwrap();
        assert!(report.different.is_empty(), "{report:?}");
    }
    // Taken for one rank's, the parts of the fused layer are in the wrong order.
    let wrong = folder.path().join("wrong");
    import_merak(&merak, &wrong, 1, &ImportOptions::default()).unwrap();
    let report = diff(
        &Checkpoint::open(&wrong).unwrap(),
        &theirs,
        Tolerance::default(),
    )
    .unwrap();
    assert!(!report.different.is_empty());

    let refusal = |tp| {
        let error = import_merak(
            &merak,
            folder.path().join("no"),
            tp,
            &ImportOptions::default(),
        );
        let text = error.expect_err("such ranks cannot be").to_string();
        text.replace(&merak.display().to_string(), "MERAK")
    };
    // The largest tensor that is turned is 8 x 32.
    let little = ImportOptions {
        max_memory: (4 << 20) + 1023,
        ..ImportOptions::default()
    };
    let error = import_merak(&merak, folder.path().join("no"), RANKS, &little).unwrap_err();
    insta::assert_snapshot!(error.to_string(), @"`max_memory` is 4195327 bytes, where a tensor of 1024 is turned, expected 4 MiB more than that tensor");
    insta::assert_snapshot!(refusal(0), @"`merak_tp` is 0, expected at least 1");
    insta::assert_snapshot!(refusal(7), @"cannot read MERAK: `transformer.h.0.attn.c_attn.bias` has 3 parts in 24 outputs, which 7 ranks cannot have shared");
    fs::remove_file(merak.join("model.safetensors.index.json")).unwrap();
    insta::assert_snapshot!(refusal(2), @"cannot read MERAK/model.safetensors.index.json: the file is missing");
}
