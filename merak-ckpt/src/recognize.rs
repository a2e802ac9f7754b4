//! Recognizes folders and files by their names, and says how to use each.

use crate::disk::read_small;
use crate::format::CONFIG;
use crate::weight_files::has_weights;
use crate::{Store, format};
use std::fs;
use std::path::Path;

/// The name of the file that describes an adapter, in its folder and in a checkpoint.
pub const ADAPTER_CONFIG: &str = "adapter_config.json";
/// The index of a folder of `torch.distributed.checkpoint`.
pub(crate) const DCP_INDEX: &str = ".metadata";

/// The message for a folder of torchtitan, whose models have names and rotary layouts of their own.
pub(crate) const TORCHTITAN: &str = "it is a checkpoint of torchtitan, whose names are not those of transformers: convert it with \
     torchtitan's scripts/checkpoint_conversion/convert_to_hf.py, then use the Hugging Face folder";
const DCP: &str = "it is a folder of torch.distributed.checkpoint: import it with `merak-ckpt import-dcp DIR DST --config config.json`";
const SHARDED: &str = "it is a folder of torch.distributed.checkpoint in its safetensors format, each file with a part of each tensor: \
     save again with HuggingFaceStorageWriter(HF_DIR, save_distributed=True, enable_consolidation=True), or put the parts together \
     with `consolidate_safetensors_files(DIR, HF_DIR, {name: 1 for name in model.state_dict()})` of \
     torch.distributed.checkpoint._consolidate_hf_safetensors, put the model's config.json into HF_DIR, then use that";
const HUGGING_FACE: &str =
    "it is a Hugging Face folder and no checkpoint: `merak-ckpt import-hf DIR DST` makes one of it";
const HUGGING_FACE_FILE: &str = "it is a file of a Hugging Face folder: name the folder, of which `merak-ckpt import-hf DIR DST` makes a checkpoint";
const BARE_WEIGHTS: &str = "it is a folder of weights without the model's config.json: put that beside them, then make a checkpoint of the \
     folder with `merak-ckpt import-hf DIR DST`";
const ADAPTER: &str = "it is an adapter of PEFT: fold it into its base model with `merak-ckpt merge-lora BASE DIR HF_DIR`";
const MEGATRON: &str = "it is a checkpoint of Megatron-LM: convert it to a Hugging Face folder with \
     Megatron-Bridge or Megatron-LM's tools/checkpoint/convert.py, then use that";
const DEEPSPEED: &str = "it is a checkpoint of DeepSpeed: run the zero_to_fp32.py that lies in it, `zero_to_fp32.py DIR HF_DIR`, \
     put the model's config.json beside the pytorch_model.bin, then use HF_DIR";
const GGUF: &str = "it is GGUF, the format of llama.cpp, which cannot be read: use the Hugging Face folder that it was made of, or load \
     it with transformers (`from_pretrained(DIR, gguf_file=FILE)`) and save it with `save_pretrained`";
const TORCH: &str = "it is a lone file of torch.save: put it into a folder as pytorch_model.bin beside the model's config.json, and use \
     that; it should hold the state_dict of the model";
const CHECKPOINT: &str = "it is a checkpoint of Merak: `merak-ckpt export-hf DIR HF_DIR` makes a Hugging Face folder of it";
const RUN: &str = "it is the output folder of a run of Merak: `merak-ckpt export-hf DIR HF_DIR` makes a Hugging Face folder \
     of its latest checkpoint";
/// Maximum number of a folder's names that are looked at.
const MAX_NAMES: usize = 4096;
/// Largest index in which names of torchtitan are looked for.
const MAX_INDEX_BYTES: u64 = 64 << 20;

/// What this folder or file is, and how to use or import it: a clause for an error that has named
/// the path. `None` for an unknown format, and for a path where nothing lies.
///
/// Looks only at names, and at the index of a folder of `torch.distributed.checkpoint`. Checkpoints
/// and output folders of this crate, and folders of Hugging Face, are told as well: callers that
/// take such folders ask only after failing to open one.
///
/// # Examples
/// ```
/// let folder = tempfile::tempdir()?;
/// std::fs::write(folder.path().join("model.gguf"), "")?;
/// let found = merak_ckpt::what_it_is(folder.path()).expect("it is known");
/// assert!(found.starts_with("it is GGUF"), "{found}");
/// # Ok::<(), std::io::Error>(())
/// ```
pub fn what_it_is(path: &Path) -> Option<&'static str> {
    own(path).or_else(|| what_of_others(path))
}

/// What this folder of a checkpoint or run of Merak is. Weights beside a manifest are a model's.
pub(crate) fn own(path: &Path) -> Option<&'static str> {
    if has_weights(path) {
        return None;
    }
    if path.join(format::MANIFEST).is_file() {
        return Some(CHECKPOINT);
    }
    let steps = Store::within(path).steps().unwrap_or_default();
    (!steps.is_empty()).then_some(RUN)
}

/// As [`what_it_is`], for what other programs wrote: `None` for a checkpoint or run of Merak.
pub(crate) fn what_of_others(path: &Path) -> Option<&'static str> {
    if path.is_file() {
        return file(path);
    }
    if path.join(format::MANIFEST).exists() {
        return None;
    }
    among(path, &names(path))
}

/// What a folder of another program is, by these of its names.
fn among(path: &Path, names: &[String]) -> Option<&'static str> {
    let has = |is_one: &dyn Fn(&str) -> bool| names.iter().any(|name| is_one(name));
    let is_rank = |name: &str| name.starts_with("mp_rank_");
    let is_numbered = |name: &str, start: &str| {
        let rest = name.strip_prefix(start);
        rest.is_some_and(|rest| !rest.is_empty() && rest.bytes().all(|b| b.is_ascii_digit()))
    };
    if has(&|name| name == DCP_INDEX) {
        return Some(index(path));
    }
    if has(&|name| {
        name.starts_with("zero_pp_rank_")
            || name.starts_with("bf16_zero_pp_rank_")
            || is_rank(name) && name.ends_with("_model_states.pt")
            || is_numbered(name, "global_step")
            || name == "zero_to_fp32.py"
    }) {
        return Some(DEEPSPEED);
    }
    if has(&|name| {
        name == "latest_checkpointed_iteration.txt"
            || is_numbered(name, "iter_")
            || is_rank(name)
            || name == "model_optim_rng.pt"
    }) {
        return Some(MEGATRON);
    }
    // A run's folder: the steps of torchtitan, or of a user's script.
    let mut steps = names
        .iter()
        .filter(|name| path.join(name).join(DCP_INDEX).is_file());
    if let Some(step) = steps.next() {
        return Some(match index(&path.join(step)) {
            DCP => {
                "it holds folders of torch.distributed.checkpoint: import one of them with `merak-ckpt import-dcp DIR/STEP DST --config config.json`"
            }
            other => other,
        });
    }
    if has_weights(path) {
        let has_config = path.join(CONFIG).is_file();
        return Some(if has_config {
            HUGGING_FACE
        } else {
            BARE_WEIGHTS
        });
    }
    if has(&|name| name == ADAPTER_CONFIG) {
        return Some(ADAPTER);
    }
    if has(&|name| name.starts_with("shard-") && name.ends_with(".safetensors")) {
        return Some(SHARDED);
    }
    let end = |end: &'static str| names.iter().any(|name| name.ends_with(end));
    if end(".gguf") {
        return Some(GGUF);
    }
    (end(".pt") || end(".pth")).then_some(TORCH)
}

/// What a file is, and how to import it.
fn file(path: &Path) -> Option<&'static str> {
    let name = path.file_name()?.to_str()?;
    let beside = || path.parent().and_then(what_of_others);
    // Folders that lie beside the file say nothing about it.
    let files_beside = || {
        let folder = path.parent()?;
        let mut names = names(folder);
        names.retain(|name| !folder.join(name).is_dir());
        among(folder, &names).filter(|_| !names.iter().any(|name| name == format::MANIFEST))
    };
    match name.rsplit_once('.').map_or(name, |(_, end)| end) {
        "gguf" => Some(GGUF),
        "metadata" | "distcp" | "latest" | "txt" => beside(),
        "safetensors" | "json" => match beside()? {
            HUGGING_FACE => Some(HUGGING_FACE_FILE),
            found => [BARE_WEIGHTS, ADAPTER, SHARDED]
                .into_iter()
                .find(|known| *known == found),
        },
        "pt" | "pth" | "bin" => match files_beside() {
            Some(HUGGING_FACE) => Some(HUGGING_FACE_FILE),
            Some(GGUF | BARE_WEIGHTS) | None => Some(TORCH),
            found => found,
        },
        _ => None,
    }
}

/// What the folder of this index is.
fn index(folder: &Path) -> &'static str {
    let path = folder.join(DCP_INDEX);
    let bytes = read_small(&path, MAX_INDEX_BYTES).ok().flatten();
    let bytes = bytes.unwrap_or_default();
    let has = |text: &[u8]| contains(&bytes, text);
    if has(b"tok_embeddings.weight") && has(b".attention.wq.weight") {
        TORCHTITAN
    } else if folder.join("common.pt").is_file() {
        // Its distributed format has the same index.
        MEGATRON
    } else {
        DCP
    }
}

fn contains(bytes: &[u8], text: &[u8]) -> bool {
    bytes.windows(text.len()).any(|window| window == text)
}

/// The first names of a folder; none where it cannot be listed.
fn names(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).into_iter().flatten().take(MAX_NAMES);
    let mut names: Vec<_> = entries
        .filter_map(|entry| entry.ok()?.file_name().into_string().ok())
        .collect();
    names.sort_unstable();
    names
}
