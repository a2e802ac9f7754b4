//! `merak bench collectives`: how fast ranks exchange.

use super::{super::Failure, world};
use clap::Args as ClapArgs;
use merak_ckpt::{parse_byte_size, words::Bytes};
use merak_mpu::{ChosenEngine, EngineKind, Launch, Member};
use merak_trainer::{
    Error, Result,
    metrics::Screen,
    network::{EXCHANGES, Exchange},
    run_on,
};
use serde_json::{Value, json};
use std::time::Duration;

/// Times collectives and messages between ranks; prints one JSON line per operation and size.
/// `send_recv` ends when the receiver has copied the message into memory of its own. The engine
/// nccl moves memory of the ranks' devices, any other one memory of the host.
///
/// Started alone, it runs all ranks; started by a launcher, each process is one, and the first
/// prints.
#[derive(Debug, ClapArgs)]
pub(crate) struct Collectives {
    /// What connects the ranks: auto, threads, tcp, mpi or nccl; unset: as `distributed.engine` in
    /// the environment says.
    #[arg(long, value_parser = engine)]
    engine: Option<EngineKind>,
    /// Ranks; unset: as many as there are processes, and 2 where there is one, but for nccl.
    #[arg(long, allow_negative_numbers = true)]
    world: Option<usize>,
    /// Bytes that each rank hands in, as in 4096, 64KiB or 1M, rounded down to whole numbers for
    /// each rank.
    #[arg(long, value_delimiter = ',', default_value = "4KiB,256KiB,16MiB", value_parser = parse_byte_size)]
    bytes: Vec<u64>,
    /// Times that each is run, after a barrier; the median of the slowest rank's times counts.
    #[arg(long, default_value_t = 21, allow_negative_numbers = true)]
    steps: usize,
}

/// Most ranks and bytes: larger values are typing mistakes.
const MAX_WORLD: usize = 256;
const MAX_BYTES: u64 = 1 << 32;

fn engine(name: &str) -> Result<EngineKind, String> {
    serde_json::from_value(json!(name)).map_err(|error| error.to_string())
}

/// An exchange, and the bytes that each rank hands in.
type Case = (Exchange, usize);

impl Collectives {
    /// One object per operation and size, in the process of the first rank.
    pub(super) fn run(&self, screen: &Screen) -> Result<Vec<Value>, Failure> {
        let launch = world::launch(screen)?;
        let (engine, config) = world::engine(self.engine, &launch)?;
        let checked = self.check(&launch, engine).map_err(Error::CommandLine);
        let (ranks, cases) = world::told_once(&launch, checked)?;
        let members = world::members(engine, &config, &launch, ranks)?;
        let has_first = members.first().is_some_and(|first| first.rank().0 == 0);
        let times = run_on(members, |member| self.times(engine, &member, &cases))?;
        let first = times.into_iter().next().filter(|_| has_first);
        let line = |((exchange, bytes), time): (Case, Duration)| {
            let time = time.as_secs_f64();
            let passed = exchange.share(ranks) * bytes as f64;
            json!({
                "engine": engine.as_str(),
                "world": ranks,
                "op": exchange.name,
                "bytes": bytes,
                "us": time * 1e6,
                "bus_bytes_per_s": passed / time.max(f64::MIN_POSITIVE),
            })
        };
        let timed = cases.into_iter().zip(first.unwrap_or_default());
        Ok(timed.map(line).collect())
    }

    fn times(
        &self,
        engine: ChosenEngine,
        member: &Member,
        cases: &[Case],
    ) -> Result<Vec<Duration>> {
        let (group, make) = world::timed(engine, member)?;
        let time = |(exchange, bytes): &Case| {
            exchange.median_of_slowest(&group, *bytes, self.steps, &*make)
        };
        cases.iter().map(time).collect()
    }

    /// The number of ranks, and what they exchange.
    fn check(&self, launch: &Launch, engine: ChosenEngine) -> Result<(usize, Vec<Case>), String> {
        let processes = launch.world_size;
        // A rank alone moves nothing, and finds out whether its library and device are there.
        let on_devices = engine == ChosenEngine::Nccl;
        let least = if on_devices { 1 } else { 2 };
        let ranks = match self.world {
            None => processes.max(least),
            Some(world) if processes > 1 && world != processes => {
                return Err(format!(
                    "--world is {world}, but {processes} processes were started: leave it out"
                ));
            }
            Some(world) => world,
        };
        if !(least..=MAX_WORLD).contains(&ranks) {
            return Err(format!(
                "--world is {ranks}, expected {least} to {MAX_WORLD} ranks"
            ));
        }
        if self.steps == 0 {
            return Err("--steps is 0, expected at least 1".to_owned());
        }
        let here = if processes > 1 {
            launch.local_size.unwrap_or(processes)
        } else {
            ranks
        };
        let unit = (ranks * size_of::<f32>()) as u64;
        let mut cases = Vec::new();
        for &bytes in &self.bytes {
            if !(unit..=MAX_BYTES).contains(&bytes) {
                let [found, least, most] = [bytes, unit, MAX_BYTES].map(Bytes);
                return Err(format!("--bytes has {found}, expected {least} to {most}"));
            }
            let needed = bytes.saturating_mul(4 * here as u64);
            if !on_devices && needed > merak_trainer::available_bytes() {
                let [found, needed, most] =
                    [bytes, needed, merak_trainer::available_bytes()].map(Bytes);
                return Err(format!(
                    "--bytes has {found}, which take {needed} on {here} ranks, but this process may use {most}: choose fewer \
                     bytes or a smaller --world"
                ));
            }
            // Whole numbers for every rank.
            let bytes = (bytes / unit * unit) as usize;
            cases.extend(EXCHANGES.map(|exchange| (exchange, bytes)));
        }
        Ok((ranks, cases))
    }
}
