//! `merak bench collectives`: how fast ranks exchange.

use clap::Args as ClapArgs;
use merak_ckpt::{parse_byte_size, words::Bytes};
use merak_trainer::{Result, network::EXCHANGES};
use serde_json::{Value, json};

/// Times collectives and messages between ranks; prints one JSON line per operation and size.
/// `send_recv` ends when the receiver has copied the message into a buffer of its own.
#[derive(Debug, ClapArgs)]
pub(crate) struct Collectives {
    /// Ranks.
    #[arg(long, default_value_t = 2)]
    world: usize,
    /// Bytes that each rank hands in, as in 4096, 64KiB or 1M, rounded down to whole numbers for
    /// each rank.
    #[arg(long, value_delimiter = ',', default_value = "4KiB,256KiB,16MiB", value_parser = parse_byte_size)]
    bytes: Vec<u64>,
    /// Times that each is run; the median counts.
    #[arg(long, default_value_t = 21)]
    steps: usize,
}

/// Most ranks and bytes: larger values are typing mistakes.
const MAX_WORLD: usize = 256;
const MAX_BYTES: u64 = 1 << 32;

impl Collectives {
    /// One object per operation and size.
    pub(super) fn run(&self) -> Result<Vec<Value>, super::super::Failure> {
        if !(2..=MAX_WORLD).contains(&self.world) {
            let found = self.world;
            return Err(format!("--world is {found}, expected 2 to {MAX_WORLD} ranks").into());
        }
        if self.steps == 0 {
            return Err("--steps is 0, expected at least 1".into());
        }
        let unit = (self.world * size_of::<f32>()) as u64;
        let mut lines = Vec::new();
        for &bytes in &self.bytes {
            if !(unit..=MAX_BYTES).contains(&bytes) {
                let [found, least, most] = [bytes, unit, MAX_BYTES].map(Bytes);
                return Err(format!("--bytes has {found}, expected {least} to {most}").into());
            }
            let needed = bytes.saturating_mul(4 * self.world as u64);
            if needed > merak_trainer::available_bytes() {
                let [found, needed, most] =
                    [bytes, needed, merak_trainer::available_bytes()].map(Bytes);
                return Err(format!(
                    "--bytes has {found}, which take {needed} on {} ranks, but this process may use {most}: choose fewer \
                     bytes or a smaller --world",
                    self.world
                )
                .into());
            }
            // Whole numbers for every rank.
            let bytes = bytes / unit * unit;
            for exchange in EXCHANGES {
                let time = exchange
                    .median(self.world, bytes as usize, self.steps)?
                    .as_secs_f64();
                let passed = exchange.share(self.world) * bytes as f64;
                lines.push(json!({
                    "op": exchange.name,
                    "bytes": bytes,
                    "us": time * 1e6,
                    "bus_bytes_per_s": passed / time.max(f64::MIN_POSITIVE),
                }));
            }
        }
        Ok(lines)
    }
}
