//! Limits of the memory of ranks.

use super::Failure;
use merak_ckpt::words::brief;
use merak_pipe::{ActivationBytes, PageOptions};

/// What `--memory` counts.
pub(super) enum MemoryLimits {
    Activations(Vec<f64>),
    Bytes(Vec<u64>),
}

impl MemoryLimits {
    /// Reads limits for `ranks` ranks: microbatches, or sizes with units where the bytes of a
    /// microbatch are known.
    pub(super) fn parse(text: &str, ranks: usize, knows_bytes: bool) -> Result<Self, Failure> {
        let texts: Vec<_> = text.split(':').map(str::trim).collect();
        let microbatches: Result<Vec<f64>, _> = texts.iter().map(|text| text.parse()).collect();
        if let Ok(limits) = microbatches {
            if let Some(rank) = limits
                .iter()
                .position(|limit| limit.is_nan() || *limit < 1.0)
            {
                let found = limits[rank];
                return Err(merak_pipe::Error::MemoryLimit { rank, found }.into());
            }
            return Ok(Self::Activations(for_each_rank(limits, ranks)?));
        }
        let sizes = texts.iter().map(|text| {
            let size = merak_ckpt::parse_byte_size(text).ok();
            size.filter(|_| text.parse::<f64>().is_err())
        });
        let Some(sizes) = sizes.collect::<Option<Vec<u64>>>() else {
            return Err(format!(
                "--memory expects numbers of microbatches such as 4 or 4:3:2:1, or sizes of whole units such as 96MiB:64MiB, found \"{}\"", brief(text)
            )
            .into());
        };
        if !knows_bytes {
            return Err(format!(
                "--memory {text} limits bytes: say with --bytes what a microbatch keeps on a stage, as in --bytes I=1MiB,W=512KiB"
            )
            .into());
        }
        Ok(Self::Bytes(for_each_rank(sizes, ranks)?))
    }
}

/// One limit for all ranks, or one for each.
fn for_each_rank<T: Clone>(limits: Vec<T>, ranks: usize) -> Result<Vec<T>, Failure> {
    match &limits[..] {
        [all] => Ok(vec![all.clone(); ranks]),
        list if list.len() == ranks => Ok(limits),
        list => Err(format!(
            "--memory has {} limits, expected one for all ranks or one for each of {ranks}",
            list.len()
        )
        .into()),
    }
}

pub(super) fn page_memory(
    bytes: Option<ActivationBytes>,
    limits: Option<MemoryLimits>,
) -> PageOptions {
    let memory = PageOptions {
        bytes,
        ..PageOptions::default()
    };
    match limits {
        None => memory,
        Some(MemoryLimits::Activations(peak_activations)) => PageOptions {
            peak_activations,
            ..memory
        },
        Some(MemoryLimits::Bytes(peak_bytes)) => PageOptions {
            peak_bytes,
            ..memory
        },
    }
}
