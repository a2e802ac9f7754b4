//! Opens hostile files and reads whatever they seem to hold; see README.md.
#![no_main]

use libfuzzer_sys::fuzz_target;
use merak_ckpt::{Checkpoint, Checksum, HfFolder, Kind, Layout, Piece, TensorEntry};
use std::fs;
use std::path::Path;
use std::sync::OnceLock;
use tempfile::TempDir;

/// What a file from before PyTorch 1.6 begins with: magic number, version, system.
const OLD_START: &[u8] = b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19.\x80\x02M\xe9\x03.\x80\x02}X\x0d\x00\x00\x00little_endian\x88s.";
/// Most bytes of tensors that are read after opening.
const MAX_READ: usize = 1 << 20;

/// A folder for each kind of input.
fn folders() -> &'static [TempDir; 5] {
    static FOLDERS: OnceLock<[TempDir; 5]> = OnceLock::new();
    FOLDERS.get_or_init(|| {
        std::array::from_fn(|_| {
            let folder = tempfile::tempdir().expect("a temporary folder");
            let config = folder.path().join("config.json");
            fs::write(config, "{\"model_type\": \"gpt2\"}").expect("it can be written");
            fs::write(folder.path().join("model-00000.safetensors"), [0; 4096])
                .expect("it can be written");
            folder
        })
    })
}

fuzz_target!(|input: &[u8]| {
    let Some((&kind, rest)) = input.split_first() else {
        return;
    };
    let kind = usize::from(kind % 5);
    let folder = folders()[kind].path();
    let length = (rest.len() as u64).to_le_bytes();
    let (name, content) = match kind {
        0 => ("model.safetensors", [&length, rest, &[0; 64][..]].concat()),
        1 => ("pytorch_model.bin", [OLD_START, rest].concat()),
        2 => ("pytorch_model.bin", rest.to_vec()),
        3 => ("manifest.json", with_checksum(rest)),
        _ => ("model.safetensors.index.json", rest.to_vec()),
    };
    fs::write(folder.join(name), content).expect("it can be written");
    if kind == 3 {
        read_checkpoint(folder);
    } else {
        read_folder(folder);
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
