//! The commands that write checkpoints and folders.

use crate::Outcome;
use clap::Args;
use merak_ckpt::{
    Checkpoint, DType, ExportOptions, HfFolder, ImportOptions, ReshardOptions, Result, Stages,
    Topology, cli, export_hf, extract_lora, import_dcp, import_hf, import_merak, merge_lora,
    parse_byte_size, reshard,
};
use std::path::{Path, PathBuf};

/// The degrees of the topology to write for.
#[derive(Args)]
pub(crate) struct Degrees {
    /// Data parallel degree
    #[arg(long, allow_negative_numbers = true, default_value_t = 1, value_parser = cli::at_least_one)]
    dp: usize,
    /// Tensor parallel degree
    #[arg(long, allow_negative_numbers = true, default_value_t = 1, value_parser = cli::at_least_one)]
    tp: usize,
    /// Pipeline parallel degree
    #[arg(long, allow_negative_numbers = true, default_value_t = 1, value_parser = cli::at_least_one)]
    pp: usize,
}

/// [`DEFAULT_MAX_MEMORY`](merak_ckpt::DEFAULT_MAX_MEMORY), as a user would type it.
const MAX_MEMORY: &str = "256MiB";

/// How much memory to take.
#[derive(Args)]
pub(crate) struct Memory {
    /// Most memory to take for tensors, as in 256MiB, besides some MiB of tables and the program
    /// itself
    #[arg(long, allow_negative_numbers = true, default_value = MAX_MEMORY, value_parser = parse_byte_size, value_name = "BYTES")]
    max_memory: u64,
}

impl Memory {
    fn bytes(&self) -> usize {
        usize::try_from(self.max_memory).unwrap_or(usize::MAX)
    }
}

#[derive(Args)]
pub(crate) struct Reshard {
    /// Checkpoint or output folder
    src: PathBuf,
    /// Output folder for the new checkpoint, or its own folder (step-00001000)
    dst: PathBuf,
    #[command(flatten)]
    degrees: Degrees,
    /// ZeRO stage: from 1 on the optimizer state is divided over dp, at 3 the parameters as well
    #[arg(
        long,
        allow_negative_numbers = true,
        default_value_t = 0,
        value_name = "K"
    )]
    zero: usize,
    #[command(flatten)]
    memory: Memory,
}

impl Degrees {
    fn topology(&self, zero_stage: usize) -> Topology {
        Topology {
            dp: self.dp,
            tp: self.tp,
            pp: self.pp,
            zero_stage,
            ..Topology::default()
        }
    }
}

impl Reshard {
    pub(crate) fn run(&self) -> Result<Outcome> {
        let options = ReshardOptions {
            topology: self.degrees.topology(self.zero),
            stages: Stages::Even,
            max_memory: self.memory.bytes(),
        };
        let path = reshard(&Checkpoint::open(&self.src)?, &self.dst, &options)?;
        Ok(written(&path))
    }
}

/// How a checkpoint is made of a folder.
#[derive(Args)]
struct Import {
    #[command(flatten)]
    degrees: Degrees,
    /// Floating-point type of the checkpoint
    #[arg(long, default_value_t = DType::F32, value_parser = float, value_name = "D")]
    dtype: DType,
    #[command(flatten)]
    memory: Memory,
}

impl Import {
    fn options(&self) -> ImportOptions {
        ImportOptions {
            topology: self.degrees.topology(0),
            stages: Stages::Even,
            dtype: Some(self.dtype),
            max_memory: self.memory.bytes(),
        }
    }
}

#[derive(Args)]
pub(crate) struct ImportHf {
    /// Folder with config.json and weights, safetensors or PyTorch, one file or indexed
    hf_dir: PathBuf,
    /// Output folder for the checkpoint, which is that of step 0
    dst: PathBuf,
    #[command(flatten)]
    import: Import,
}

#[derive(Args)]
pub(crate) struct ImportDcp {
    /// Folder with .metadata and .distcp files
    dir: PathBuf,
    /// Output folder for the checkpoint, which is that of the optimizer's step
    dst: PathBuf,
    /// The model's config.json of Hugging Face, or the folder that it lies in with the files of the
    /// tokenizer
    #[arg(long, value_name = "FILE")]
    config: PathBuf,
    /// What the names of the model's weights begin with, as `model.` where a script saved {"model":
    /// .., "optim": ..}
    #[arg(long, default_value = "", hide_default_value = true, value_name = "P")]
    prefix: String,
    #[command(flatten)]
    import: Import,
}

impl ImportDcp {
    pub(crate) fn run(&self) -> Result<Outcome> {
        let options = self.import.options();
        let path = import_dcp(&self.dir, &self.dst, &self.config, &self.prefix, &options)?;
        Ok(written(&path))
    }
}

#[derive(Args)]
pub(crate) struct ImportMerak {
    /// Folder that its conversion to safetensors wrote, with the model's config.json beside the
    /// weights
    src: PathBuf,
    /// Output folder for the checkpoint, which is that of step 0
    dst: PathBuf,
    /// Tensor-parallel ranks that trained the model, which its files do not tell
    #[arg(long, default_value_t = 1, value_name = "N")]
    merak_tp: usize,
    #[command(flatten)]
    import: Import,
}

impl ImportMerak {
    pub(crate) fn run(&self) -> Result<Outcome> {
        let path = import_merak(&self.src, &self.dst, self.merak_tp, &self.import.options())?;
        Ok(written(&path))
    }
}

#[derive(Args)]
pub(crate) struct ExportHf {
    /// Checkpoint or output folder
    src: PathBuf,
    /// Folder to make
    hf_dir: PathBuf,
    /// Writes the averages of the weights, which a run with `ema_decay` keeps, in their place
    #[arg(long)]
    ema: bool,
    #[command(flatten)]
    files: HfFiles,
}

/// How the weights of a Hugging Face folder are written.
#[derive(Args)]
pub(crate) struct HfFiles {
    /// Floating-point type of the weights [default: as they are]
    #[arg(long, value_parser = float, value_name = "D")]
    dtype: Option<DType>,
    /// Most bytes in one file, as in 5GB
    #[arg(long, default_value = "5GB", value_parser = parse_byte_size, value_name = "S")]
    max_shard_size: u64,
    #[command(flatten)]
    memory: Memory,
}

impl HfFiles {
    fn options(&self) -> ExportOptions {
        ExportOptions {
            dtype: self.dtype,
            max_shard_size: self.max_shard_size,
            max_memory: self.memory.bytes(),
        }
    }
}

#[derive(Args)]
pub(crate) struct MergeLora {
    /// Hugging Face folder, checkpoint or output folder
    base: PathBuf,
    /// Folder of a PEFT adapter
    adapter: PathBuf,
    /// Hugging Face folder to make
    dst: PathBuf,
    #[command(flatten)]
    files: HfFiles,
}

#[derive(Args)]
pub(crate) struct ExtractLora {
    /// Checkpoint or output folder of a run that trained an adapter
    ckpt: PathBuf,
    /// PEFT folder to make
    dst: PathBuf,
}

impl ExtractLora {
    pub(crate) fn run(&self) -> Result<Outcome> {
        extract_lora(&Checkpoint::open(&self.ckpt)?, &self.dst)?;
        Ok(written(&self.dst))
    }
}

impl ImportHf {
    pub(crate) fn run(&self) -> Result<Outcome> {
        let options = self.import.options();
        options.check()?;
        let folder = HfFolder::open_within(&self.hf_dir, options.max_memory)?;
        let path = import_hf(&folder, &self.dst, &options)?;
        Ok(written(&path))
    }
}

impl ExportHf {
    pub(crate) fn run(&self) -> Result<Outcome> {
        let mut source = Checkpoint::open(&self.src)?;
        if self.ema {
            source = source.averaged()?;
        }
        export_hf(&source, &self.hf_dir, &self.files.options())?;
        Ok(written(&self.hf_dir))
    }
}

impl MergeLora {
    pub(crate) fn run(&self) -> Result<Outcome> {
        merge_lora(&self.base, &self.adapter, &self.dst, &self.files.options())?;
        Ok(written(&self.dst))
    }
}

/// Says where the result is.
fn written(path: &Path) -> Outcome {
    Outcome {
        text: format!("{}\n", path.display()),
        status: 0,
    }
}

/// A floating-point type.
fn float(text: &str) -> Result<DType, String> {
    let parsed = text.parse::<DType>().ok().filter(|dtype| dtype.is_float());
    parsed.ok_or_else(|| format!("expected f64, f32, bf16 or f16, found `{text}`"))
}

#[cfg(test)]
mod tests {
    use super::{MAX_MEMORY, float};
    use merak_ckpt::{DEFAULT_MAX_MEMORY, DType, parse_byte_size};

    #[test]
    fn the_default_memory_is_that_of_the_library() {
        assert_eq!(parse_byte_size(MAX_MEMORY), Ok(DEFAULT_MAX_MEMORY as u64));
    }

    #[test]
    fn an_unknown_type_is_answered_with_those_that_weights_may_have() {
        assert_eq!(float("bf16"), Ok(DType::BF16));
        for text in ["f33", "i32"] {
            let expected = format!("expected f64, f32, bf16 or f16, found `{text}`");
            assert_eq!(float(text), Err(expected));
        }
    }
}
