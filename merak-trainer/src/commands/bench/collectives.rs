//! `merak bench collectives`: how fast ranks exchange.

use clap::Args as ClapArgs;
use merak_mpu::{Group, Packet, ReduceOp, threads};
use merak_trainer::{Error, Result};
use serde_json::{Value, json};
use std::time::{Duration, Instant};

/// Times collectives and messages between ranks; prints one JSON line per operation and size.
#[derive(Debug, ClapArgs)]
pub(crate) struct Collectives {
    /// Ranks.
    #[arg(long, default_value_t = 2)]
    world: usize,
    /// Bytes that each rank hands in, rounded down to whole numbers for each rank.
    #[arg(long, value_delimiter = ',', default_value = "4096,262144,16777216")]
    bytes: Vec<usize>,
    /// Times that each is run; the median counts.
    #[arg(long, default_value_t = 21)]
    steps: usize,
}

/// Most ranks and bytes: beyond them a slip of the keyboard is likelier than a machine.
const MAX_WORLD: usize = 256;
const MAX_BYTES: usize = 1 << 32;

/// Runs an operation on a rank's numbers, and gives numbers back for the next time.
type Operation = fn(&Group, Vec<f32>) -> merak_mpu::Result<Vec<f32>>;

/// The share of the handed-in bytes that passes the busiest link of a ring of so many ranks.
type Share = fn(f64) -> f64;

const OPERATIONS: [(&str, Operation, Share); 6] = [
    ("all_reduce", all_reduce, |n| 2.0 * (n - 1.0) / n),
    ("reduce_scatter", reduce_scatter, |n| (n - 1.0) / n),
    ("all_gather", all_gather, |n| n - 1.0),
    ("broadcast", broadcast, |_| 1.0),
    ("all_to_all", all_to_all, |n| (n - 1.0) / n),
    ("send_recv", send_recv, |_| 1.0),
];

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
        let unit = self.world * size_of::<f32>();
        let mut lines = Vec::new();
        for &bytes in &self.bytes {
            if !(unit..=MAX_BYTES).contains(&bytes) {
                return Err(format!("--bytes has {bytes}, expected {unit} to {MAX_BYTES}").into());
            }
            let needed = (bytes as u64).saturating_mul(4 * self.world as u64);
            if needed > merak_trainer::available_bytes() {
                return Err(format!(
                    "--bytes {bytes} on {} ranks do not fit into memory",
                    self.world
                )
                .into());
            }
            // Whole numbers for every rank.
            let bytes = bytes / unit * unit;
            for (name, operation, share) in OPERATIONS {
                let time = self.median(operation, bytes)?.as_secs_f64();
                lines.push(json!({
                    "op": name,
                    "bytes": bytes,
                    "us": time * 1e6,
                    "bus_bytes_per_s": share(self.world as f64) * bytes as f64 / time.max(f64::MIN_POSITIVE),
                }));
            }
        }
        Ok(lines)
    }

    /// The median time of an operation on rank 0, all ranks starting together.
    fn median(&self, operation: Operation, bytes: usize) -> Result<Duration> {
        let results = threads::run(self.world, threads::WorldOptions::default(), |member| {
            let group = member.world_group()?;
            let len = bytes / size_of::<f32>();
            let mut times = Vec::with_capacity(self.steps);
            let mut data = vec![1.0_f32; len];
            // The first time wakes threads and touches memory.
            for _ in 0..=self.steps {
                data.resize(len, 1.0);
                group.barrier()?;
                let start = Instant::now();
                data = operation(&group, data)?;
                times.push(start.elapsed());
            }
            times.remove(0);
            times.sort_unstable();
            Ok::<_, merak_mpu::Error>(times[times.len() / 2])
        });
        let failed = |error: merak_mpu::RunError<merak_mpu::Error>| Error::Rank {
            rank: error.rank().0,
            cause: error.to_string(),
        };
        Ok(results.map_err(failed)?[0])
    }
}

fn all_reduce(group: &Group, data: Vec<f32>) -> merak_mpu::Result<Vec<f32>> {
    group.all_reduce_vec(data, ReduceOp::Max)
}

fn reduce_scatter(group: &Group, data: Vec<f32>) -> merak_mpu::Result<Vec<f32>> {
    group.reduce_scatter_vec(data, ReduceOp::Max)
}

fn all_gather(group: &Group, data: Vec<f32>) -> merak_mpu::Result<Vec<f32>> {
    group.all_gather_vec(data)
}

fn broadcast(group: &Group, data: Vec<f32>) -> merak_mpu::Result<Vec<f32>> {
    group.broadcast_vec(data, 0)
}

fn all_to_all(group: &Group, data: Vec<f32>) -> merak_mpu::Result<Vec<f32>> {
    group.all_to_all_vec(data)
}

/// Every rank sends to the next one and receives from the one before.
fn send_recv(group: &Group, data: Vec<f32>) -> merak_mpu::Result<Vec<f32>> {
    let (rank, world) = (group.rank(), group.world_size());
    let packet = Packet {
        shape: vec![data.len()],
        data: Box::new(data),
    };
    group.send((rank + 1) % world, 0, vec![packet])?;
    let received = group.recv((rank + world - 1) % world, 0)?;
    let packet = received.into_iter().next();
    packet.map_or_else(|| Ok(Vec::new()), |packet| merak_mpu::into_vec(packet.data))
}
