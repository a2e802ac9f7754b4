//! Times collectives and messages between ranks, as processes or as threads: two, or the number
//! after the engine.
//!
//! ```text
//! cargo run --release -p merak-mpu --example time-collectives -- tcp 4
//! cargo run --release -p merak-mpu --example time-collectives -- sockets
//! cargo build --release -p merak-mpu --features mpi --example time-collectives
//! mpirun -n 2 target/release/examples/time-collectives mpi
//! ```
//!
//! prints one line for each operation and size: its name, bytes and seconds, where the seconds are
//! the median of some batches of operations that follow each other without a pause. Collectives
//! work in one buffer again and again, but for those that are named `new memory`. A message is
//! timed there and back, and half of it counts. Under `sockets` processes share no memory, as those
//! of several hosts. `docs/peers/collectives_peer.py` runs this beside gloo.
#![expect(clippy::print_stdout, reason = "an example reports on standard output")]

use merak_mpu::{Group, Member, Message, Packet, ReduceOp, Result, run_members, tcp, threads};
#[cfg(feature = "mpi")]
use std::time::Duration;
use std::{env, error::Error, process::Command, time::Instant};

const PORT: u16 = 29_700;

/// The engine tcp without shared memory.
const SOCKETS: &str = "sockets";

/// Batches of each operation and size.
const BATCHES: usize = 7;

/// Bytes that a batch moves, about.
const BATCH_BYTES: usize = 64 << 20;

fn main() -> std::result::Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = env::args().skip(1).collect();
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let (engine, ranks) = match words[..] {
        [engine] => (engine, 2),
        [engine, ranks] => (engine, ranks.parse()?),
        ["rank", engine, rank, ranks] => {
            return Ok(measure(&join(engine, rank.parse()?, ranks.parse()?)?)?);
        }
        _ => return Err("choose tcp, sockets or threads, and how many ranks".into()),
    };
    match engine {
        "tcp" | SOCKETS => {
            let own = env::current_exe()?;
            let start = |rank: usize| {
                let [rank, ranks] = [rank, ranks].map(|number| number.to_string());
                let words = ["rank", engine, &rank, &ranks];
                Command::new(&own).args(words).spawn()
            };
            let others: Vec<_> = (1..ranks).map(start).collect();
            measure(&join(engine, 0, ranks)?)?;
            for other in others {
                other?.wait()?;
            }
        }
        "threads" => {
            let options = threads::WorldOptions::default();
            let members = threads::world(ranks, options);
            run_members(members, options.stack_bytes, |member| measure(&member))?;
        }
        #[cfg(feature = "mpi")]
        "mpi" => {
            let launch = merak_mpu::Launch::from_env()?;
            let member = launch.join(merak_mpu::ChosenEngine::Mpi, Duration::from_mins(1))?;
            measure(&member)?;
        }
        _ => return Err("choose tcp, sockets, threads or, in builds with it, mpi".into()),
    }
    Ok(())
}

fn join(engine: &str, rank: usize, ranks: usize) -> Result<Member> {
    tcp::join(&tcp::JoinOptions {
        shared_memory: engine != SOCKETS,
        ..tcp::JoinOptions::new(rank, ranks, "127.0.0.1", PORT)
    })
}

fn measure(member: &Member) -> Result<()> {
    let world = member.world_group()?;
    for bytes in [4 << 10, 64 << 10, 1 << 20, 16 << 20, 64 << 20] {
        let data = vec![0.0_f32; bytes / 4];
        let time = |name: &str, op: &dyn Fn(Vec<f32>) -> Result<Vec<f32>>| {
            timed(&world, name, bytes, data.clone(), op)
        };
        time("all_reduce", &|data| {
            world.all_reduce_vec(data, ReduceOp::Sum)
        })?;
        time("all_to_all", &|data| world.all_to_all_vec(data))?;
        time("broadcast", &|data| world.broadcast_vec(data, 0))?;
        time("all_gather", &|data| world.all_gather_in_place_vec(data))?;
        time("reduce_scatter", &|data| {
            world.reduce_scatter_in_place_vec(data, ReduceOp::Sum)
        })?;
        time("gather", &|data| world.gather_in_place_vec(data, 0))?;
        time("all_gather, new memory", &|mut data| {
            data.truncate(bytes / 4 / world.world_size());
            world.all_gather_vec(data)
        })?;
        // As gloo's, these keep what was handed in, here by a copy.
        time("reduce_scatter, new memory", &|data| {
            world.reduce_scatter_vec(data.clone(), ReduceOp::Sum)?;
            Ok(data)
        })?;
        time("gather, new memory", &|data| {
            let part = data[..bytes / 4 / world.world_size()].to_vec();
            world.gather_vec(part, 0)?;
            Ok(data)
        })?;
        let packet = Packet {
            shape: vec![data.len()],
            data: Box::new(data),
        };
        timed(&world, "message", bytes, vec![packet], |message| {
            there_and_back(&world, message)
        })?;
    }
    member.end();
    Ok(())
}

/// Sends a message from rank 0 to rank 1 and back.
fn there_and_back(world: &Group, message: Message) -> Result<Message> {
    if world.rank() == 0 {
        world.send(1, 0, message)?;
        world.recv(1, 0)
    } else if world.rank() > 1 {
        Ok(message)
    } else {
        drop(message);
        let message = world.recv(0, 0)?;
        let shape = message[0].shape.clone();
        world.send(0, 0, message)?;
        // Rank 1 keeps nothing between the rounds.
        Ok(vec![Packet {
            shape,
            data: Box::new(Vec::<f32>::new()),
        }])
    }
}

fn timed<T>(
    world: &Group,
    name: &str,
    bytes: usize,
    mut value: T,
    op: impl Fn(T) -> Result<T>,
) -> Result<()> {
    let count = (BATCH_BYTES / bytes).clamp(3, 500);
    let mut times = Vec::new();
    for _ in 0..=BATCHES {
        world.barrier()?;
        let start = Instant::now();
        for _ in 0..count {
            value = op(value)?;
        }
        times.push(start.elapsed().as_secs_f64() / count as f64);
    }
    // The first batch only warms up.
    times.remove(0);
    times.sort_by(f64::total_cmp);
    if world.rank() == 0 {
        let halves = if name == "message" { 2.0 } else { 1.0 };
        println!("{name} {bytes} {:.9}", times[BATCHES / 2] / halves);
    }
    Ok(())
}
