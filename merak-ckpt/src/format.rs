#![doc = include_str!("../FORMAT.md")]

/// Prefix of the name of what a process has not written whole yet; the name it gets then follows.
pub const DRAFT: &str = ".merak-tmp-";

/// Name of the format, in every manifest.
pub const NAME: &str = "merak-checkpoint";
/// The newest version that is read. Checkpoints with a base have it, those without one have
/// version 1.
pub const VERSION: u64 = 2;
/// File name of the manifest.
pub const MANIFEST: &str = "manifest.json";
/// File that names the latest checkpoint.
pub const LATEST: &str = "latest";
/// File that names the best checkpoint.
pub const BEST: &str = "best";
/// Folder of an output folder that holds the checkpoints.
pub const CHECKPOINTS: &str = "checkpoints";
/// File that describes the model, in folders of Hugging Face and beside the manifest.
pub const CONFIG: &str = "config.json";
/// File in which a run notes its configuration, in its output folder.
pub const RUN_CONFIG: &str = "config.resolved.toml";

/// Largest manifest that is read.
pub const MAX_MANIFEST_BYTES: u64 = 256 << 20;
/// Most bytes of `model` and of `state` in a manifest, as JSON without blanks.
pub const MAX_STATE_BYTES: usize = 1 << 20;
/// Largest header of a safetensors file (the safetensors library has the same limit).
pub const MAX_HEADER_BYTES: u64 = 100_000_000;
/// Longest tensor name.
pub const MAX_NAME_BYTES: usize = 1024;
/// Longest file name.
pub const MAX_FILE_NAME_BYTES: usize = 128;
/// Most dims of a tensor.
pub const MAX_NDIM: usize = 16;
/// Most files of a checkpoint.
pub const MAX_FILES: usize = 1 << 18;
/// Most tensors of a checkpoint.
pub const MAX_TENSORS: usize = 1 << 20;
/// Most slices of a checkpoint.
pub const MAX_SLICES: usize = 1 << 22;
/// Most distinct boxes that a tensor is cut into.
pub const MAX_BOXES_PER_TENSOR: usize = 1 << 12;
/// The first tensor of a file begins at a multiple of this many bytes.
pub const ALIGNMENT: usize = 64;

/// The one entry of a header's `__metadata__`, which `transformers` asks for.
pub(crate) const METADATA: [&str; 2] = ["format", "pt"];

/// Folder name of the checkpoint of a step: `step-00001000`.
///
/// ```
/// assert_eq!(merak_ckpt::format::step_name(1000), "step-00001000");
/// ```
pub fn step_name(step: u64) -> String {
    format!("step-{step:08}")
}

/// The step of a checkpoint's folder name.
pub fn parse_step_name(name: &str) -> Option<u64> {
    let step = name.strip_prefix("step-")?.parse().ok()?;
    (step_name(step) == name).then_some(step)
}

/// Folder name of a base: `base-00001`.
pub(crate) fn base_name(number: u64) -> String {
    format!("base-{number:05}")
}

/// The number in a base's folder name.
pub(crate) fn parse_base_name(name: &str) -> Option<u64> {
    let number = name.strip_prefix("base-")?.parse().ok()?;
    (base_name(number) == name).then_some(number)
}

/// Whether a file of this name, in the checkpoint's folder or in its base's, may hold tensors.
pub(crate) fn is_tensor_file(name: &str) -> bool {
    let name = name.rsplit('/').next().unwrap_or(name);
    name.strip_suffix(".safetensors")
        .and_then(|stem| stem.strip_prefix("model-").or(stem.strip_prefix("optim-")))
        .is_some_and(|index| index.len() >= 5 && index.bytes().all(|b| b.is_ascii_digit()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn step_names_parse_back_and_lookalikes_do_not() {
        assert_eq!(parse_step_name(&step_name(7)), Some(7));
        assert_eq!(
            parse_step_name(&step_name(1_234_567_890)),
            Some(1_234_567_890)
        );
        for name in [
            "step-7",
            "step-+0000007",
            "step-",
            "step-000000070x",
            ".tmp-step-00000007",
        ] {
            assert_eq!(parse_step_name(name), None, "{name}");
        }
    }
}
