//! Opens hostile files and reads all that they seem to hold; see README.md.
#![no_main]

use libfuzzer_sys::fuzz_target;
use merak_ckpt::{
    Adapter, Checkpoint, Checksum, HfFolder, ImportOptions, Kind, Layout, Piece, TensorEntry, import_dcp,
};
use serde_json::json;
use std::fs;
use std::path::Path;
use std::sync::OnceLock;
use tempfile::TempDir;

/// What a file from before PyTorch 1.6 begins with: magic number, version, system.
const OLD_START: &[u8] = b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19.\x80\x02M\xe9\x03.\x80\x02}X\x0d\x00\x00\x00little_endian\x88s.";
/// The headers of a model of one weight and of an adapter for it.
const BASE: &str =
    r#"{"h.0.attn.c_attn.weight":{"dtype":"F32","shape":[8,24],"data_offsets":[0,768]}}"#;
const ADAPTER: &str = r#"{"base_model.model.h.0.attn.c_attn.lora_A.weight":{"dtype":"F32","shape":[2,8],"data_offsets":[0,64]},"base_model.model.h.0.attn.c_attn.lora_B.weight":{"dtype":"F32","shape":[24,2],"data_offsets":[64,256]}}"#;
/// A folder of torch.distributed.checkpoint: its index, and the file of its items.
const INDEX: &[u8] = include_bytes!("../../tests/goldens/dcp/sgd/.metadata");
const ITEMS: &[u8] = include_bytes!("../../tests/goldens/dcp/sgd/__0_0.distcp");
/// Most bytes of tensors that are read after opening.
const MAX_READ: usize = 1 << 20;

/// A folder for each kind of input, with what it needs beside it.
fn folders() -> &'static [TempDir; 9] {
    static FOLDERS: OnceLock<[TempDir; 9]> = OnceLock::new();
    FOLDERS.get_or_init(|| {
        std::array::from_fn(|_| {
            let folder = tempfile::tempdir().expect("a temporary folder");
            let config = json!({"model_type": "gpt2"}).to_string().into_bytes();
            let adapter = json!({
                "peft_type": "LORA", "r": 2, "lora_alpha": 4, "fan_in_fan_out": true,
                "target_modules": ["c_attn"],
            });
            let files = [
                ("config.json", config),
                ("model-00000.safetensors", vec![0; 4096]),
                ("unknown.json", b"{\"model_type\": \"unknown\"}".to_vec()),
                (".metadata", INDEX.to_vec()),
                ("__0_0.distcp", ITEMS.to_vec()),
                ("adapter_config.json", adapter.to_string().into_bytes()),
                (
                    "adapter_model.safetensors",
                    safetensors(ADAPTER.as_bytes(), 256),
                ),
            ];
            for (name, content) in files {
                fs::write(folder.path().join(name), content).expect("it can be written");
            }
            folder
        })
    })
}

/// A file with this header, after its right length, and this many bytes of values.
fn safetensors(header: &[u8], bytes: usize) -> Vec<u8> {
    let length = (header.len() as u64).to_le_bytes();
    [&length, header, &vec![0; bytes]].concat()
}

fuzz_target!(|input: &[u8]| {
    let Some((&kind, rest)) = input.split_first() else {
        return;
    };
    let kind = usize::from(kind % 9);
    let folder = folders()[kind].path();
    let (name, content) = match kind {
        0 => ("model.safetensors", safetensors(rest, 64)),
        1 => ("pytorch_model.bin", [OLD_START, rest].concat()),
        2 => ("pytorch_model.bin", rest.to_vec()),
        3 => ("manifest.json", with_checksum(rest)),
        4 => ("model.safetensors.index.json", rest.to_vec()),
        5 => ("adapter_config.json", rest.to_vec()),
        7 => (".metadata", rest.to_vec()),
        8 => ("__0_0.distcp", rest.to_vec()),
        _ => ("adapter_model.safetensors", safetensors(rest, 256)),
    };
    fs::write(folder.join(name), content).expect("it can be written");
    match kind {
        3 => read_checkpoint(folder),
        5 | 6 => read_adapter(folder),
        7 | 8 => import(folder),
        _ => read_folder(folder),
    }
});

fn with_checksum(text: &[u8]) -> Vec<u8> {
    let tail = format!("\"checksum\": \"{}\"\n}}\n", Checksum::of(text));
    [text, tail.as_bytes()].concat()
}

fn read_checkpoint(folder: &Path) {
    let Ok(checkpoint) = Checkpoint::open(folder) else {
        return;
    };
    checkpoint.verify();
    for tensor in &checkpoint.manifest().tensors {
        if tensor.num_bytes() <= MAX_READ {
            let _ = checkpoint.read_whole(&tensor.kind, &tensor.name);
        }
    }
}

fn import(folder: &Path) {
    let to = tempfile::tempdir().expect("a temporary folder");
    let options = ImportOptions {
        max_memory: 8 << 20,
        ..ImportOptions::default()
    };
    if let Ok(path) = import_dcp(folder, to.path(), folder.join("unknown.json"), "", &options) {
        let imported = Checkpoint::open(path).expect("what was imported opens");
        assert!(imported.verify().damage.is_empty(), "what was imported is whole");
    }
}

fn read_folder(folder: &Path) {
    let Ok(folder) = HfFolder::open(folder) else {
        return;
    };
    for tensor in folder.tensors() {
        let TensorEntry {
            name, dtype, shape, ..
        } = tensor;
        if tensor.num_bytes() > MAX_READ {
            continue;
        }
        let (layout, dtype) = (Layout::whole(shape), *dtype);
        let kind = &Kind::Parameter;
        let range = None;
        let piece = Piece {
            kind,
            name,
            dtype,
            layout: &layout,
            range,
        };
        let mut out = vec![0; tensor.num_bytes()];
        folder
            .read_as(&piece, &mut out)
            .expect("what opens can be read");
    }
}

fn read_adapter(folder: &Path) {
    static BASE_TENSORS: OnceLock<Vec<TensorEntry>> = OnceLock::new();
    let base = BASE_TENSORS.get_or_init(|| {
        let folder = tempfile::tempdir().expect("a temporary folder");
        fs::write(
            folder.path().join("config.json"),
            "{\"model_type\": \"gpt2\"}",
        )
        .expect("it can be written");
        fs::write(
            folder.path().join("model.safetensors"),
            safetensors(BASE.as_bytes(), 768),
        )
        .expect("it can be written");
        let base = HfFolder::open(folder.path()).expect("a valid folder opens");
        base.tensors().to_vec()
    });
    let Ok(adapter) = Adapter::open(folder, &json!({"model_type": "gpt2"}), base) else {
        return;
    };
    let weight = &base[0];
    let layout = Layout::whole(&weight.shape);
    let piece = Piece {
        kind: &weight.kind,
        name: &weight.name,
        dtype: weight.dtype,
        layout: &layout,
        range: None,
    };
    let _ = adapter.merge(&piece, &mut vec![0; weight.num_bytes()]);
}
