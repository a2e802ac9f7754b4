//! The commands that write checkpoints and folders.

use crate::Outcome;
use clap::Args;
use merak_ckpt::{
    Checkpoint, DEFAULT_MAX_MEMORY, ReshardOptions, Result, Stages, Topology, reshard,
};
use std::path::{Path, PathBuf};

/// The degrees of the topology to write for.
#[derive(Args)]
pub(crate) struct Degrees {
    /// Data parallel degree
    #[arg(long, default_value_t = 1)]
    dp: usize,
    /// Tensor parallel degree
    #[arg(long, default_value_t = 1)]
    tp: usize,
    /// Pipeline parallel degree
    #[arg(long, default_value_t = 1)]
    pp: usize,
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
    #[arg(long, default_value_t = 0, value_name = "K")]
    zero: usize,
    /// Bytes of tensors in memory, as in 256MiB
    #[arg(long, default_value_t = DEFAULT_MAX_MEMORY as u64, value_parser = bytes, value_name = "BYTES")]
    max_memory: u64,
}

impl Degrees {
    fn topology(&self, zero_stage: usize) -> Topology {
        Topology {
            dp: self.dp,
            tp: self.tp,
            pp: self.pp,
            sp: 1,
            zero_stage,
        }
    }
}

impl Reshard {
    pub(crate) fn run(&self) -> Result<Outcome> {
        let options = ReshardOptions {
            topology: self.degrees.topology(self.zero),
            stages: Stages::Even,
            max_memory: usize::try_from(self.max_memory).unwrap_or(usize::MAX),
        };
        let path = reshard(&Checkpoint::open(&self.src)?, &self.dst, &options)?;
        Ok(written(&path))
    }
}

/// Says where the result is.
fn written(path: &Path) -> Outcome {
    Outcome {
        text: format!("{}\n", path.display()),
        status: 0,
    }
}

/// A number of bytes: `1000`, `5GB`, `256MiB`.
fn bytes(text: &str) -> Result<u64, String> {
    const UNITS: [(&str, u64); 9] = [
        ("KiB", 1 << 10),
        ("MiB", 1 << 20),
        ("GiB", 1 << 30),
        ("TiB", 1 << 40),
        ("KB", 1_000),
        ("MB", 1_000_000),
        ("GB", 1_000_000_000),
        ("TB", 1_000_000_000_000),
        ("B", 1),
    ];
    let unit = UNITS.iter().find_map(|(unit, size)| {
        let number = text.strip_suffix(unit)?;
        Some((number, *size))
    });
    let (number, size) = unit.unwrap_or((text, 1));
    number
        .trim()
        .parse::<u64>()
        .ok()
        .and_then(|number| number.checked_mul(size))
        .ok_or_else(|| {
            format!("expected a number of bytes as in 1000000, 5GB or 256MiB, found `{text}`")
        })
}

#[cfg(test)]
mod tests {
    use super::bytes;

    #[test]
    fn sizes_have_decimal_and_binary_units() {
        let sizes = ["7", "5GB", "256MiB", "3 KB", "0B"].map(|text| bytes(text).unwrap());
        assert_eq!(sizes, [7, 5_000_000_000, 256 << 20, 3_000, 0]);
        for text in ["", "GB", "-1", "1.5GB", "99999999999TB", "1gb"] {
            assert!(bytes(text).is_err(), "{text}");
        }
    }
}
