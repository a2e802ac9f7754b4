//! What other programs' folders and files are, told from their names, and the way in for each.

use std::fs;
use std::path::Path;

/// What to do with a folder that torchtitan wrote, whose models have names and rotary layouts of their own.
pub(super) const TORCHTITAN: &str = "it is a checkpoint of torchtitan, whose names are not those of transformers: convert it with \
     torchtitan's scripts/checkpoint_conversion/convert_to_hf.py, then use the Hugging Face folder";
const DCP: &str = "it is a folder of torch.distributed.checkpoint: import it with `merak-ckpt import-dcp DIR DST --config config.json`";
const MEGATRON: &str = "it is a checkpoint of Megatron-LM: convert it to a Hugging Face folder with \
     Megatron-Bridge or Megatron-LM's tools/checkpoint/convert.py, then use that";
const DEEPSPEED: &str = "it is a checkpoint of DeepSpeed: run the zero_to_fp32.py that lies in it, `zero_to_fp32.py DIR HF_DIR`, \
     put the model's config.json beside the pytorch_model.bin, then use HF_DIR";
const GGUF: &str = "it is GGUF, the format of llama.cpp, which cannot be read: use the Hugging Face folder that it was made of, or load \
     it with transformers (`from_pretrained(DIR, gguf_file=FILE)`) and save it with `save_pretrained`";
const TORCH: &str = "it is a lone file of torch.save: put it into a folder as pytorch_model.bin beside the model's config.json, and use \
     that; it should hold the state_dict of the model";
/// Names of a folder that are looked at.
const MAX_NAMES: usize = 4096;
/// Largest index in which names of torchtitan are looked for.
const MAX_INDEX_BYTES: u64 = 64 << 20;

/// What this folder or file is, where it is one that another program wrote, and how to get in.
pub(crate) fn what_it_is(path: &Path) -> Option<&'static str> {
    if path.is_file() {
        return file(path);
    }
    let names = names(path);
    let has = |is_one: &dyn Fn(&str) -> bool| names.iter().any(|name| is_one(name));
    let is_rank = |name: &str| name.starts_with("mp_rank_");
    let is_numbered = |name: &str, start: &str| {
        let rest = name.strip_prefix(start);
        rest.is_some_and(|rest| !rest.is_empty() && rest.bytes().all(|b| b.is_ascii_digit()))
    };
    if has(&|name| name == super::dcp::INDEX) {
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
    // A run's folder: the steps of torchtitan, or of a script of one's own.
    let mut steps = names
        .iter()
        .filter(|name| path.join(name).join(super::dcp::INDEX).is_file());
    if let Some(step) = steps.next() {
        return Some(match index(&path.join(step)) {
            DCP => {
                "it holds folders of torch.distributed.checkpoint: import one of them with `merak-ckpt import-dcp DIR/STEP DST --config config.json`"
            }
            other => other,
        });
    }
    let end = |end: &'static str| names.iter().any(|name| name.ends_with(end));
    if end(".gguf") {
        return Some(GGUF);
    }
    (end(".pt") || end(".pth")).then_some(TORCH)
}

/// The same of a file.
fn file(path: &Path) -> Option<&'static str> {
    let name = path.file_name()?.to_str()?;
    let beside = || path.parent().and_then(what_it_is);
    match name.rsplit_once('.').map_or(name, |(_, end)| end) {
        "gguf" => Some(GGUF),
        "metadata" | "distcp" | "latest" | "txt" => beside(),
        "pt" | "pth" | "bin" => beside().filter(|&found| found != GGUF).or(Some(TORCH)),
        _ => None,
    }
}

/// What the folder of this index is.
fn index(folder: &Path) -> &'static str {
    let path = folder.join(super::dcp::INDEX);
    let bytes = crate::disk::read_small(&path, MAX_INDEX_BYTES)
        .ok()
        .flatten();
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
