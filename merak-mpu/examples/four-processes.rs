//! Four processes that sum a vector.
//!
//! ```text
//! cargo run -p merak-mpu --example four-processes
//! ```
//!
//! The program starts itself four times, as a launcher does on each host of a cluster, and tells
//! each process its rank and where rank 0 is. Everything after [`tcp::join`] is what a rank that
//! is a thread would do too.
#![expect(clippy::print_stdout, reason = "an example reports on standard output")]

use merak_mpu::{ReduceOp, tcp};
use std::{
    env,
    error::Error,
    process::{Child, Command},
};

const PROCESSES: usize = 4;

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = env::args().skip(1).collect();
    match arguments.as_slice() {
        [] => start(),
        [rank, port] => sum(rank.parse()?, port.parse()?),
        _ => Err("give no arguments".into()),
    }
}

/// Starts the processes, and fails when one of them has.
fn start() -> Result<(), Box<dyn Error>> {
    // Where another program holds this port, the processes meet at one of the next.
    let port = 29_500;
    let program = env::current_exe()?;
    let start = |rank: usize| {
        let arguments = [rank.to_string(), port.to_string()];
        Command::new(&program).args(arguments).spawn()
    };
    let mut processes: Vec<Child> = (0..PROCESSES).map(start).collect::<Result<_, _>>()?;
    let ends: Vec<_> = processes.iter_mut().map(Child::wait).collect();
    for (rank, end) in ends.into_iter().enumerate() {
        if !end?.success() {
            return Err(format!("rank {rank} failed").into());
        }
    }
    Ok(())
}

/// What each process does.
fn sum(rank: usize, port: u16) -> Result<(), Box<dyn Error>> {
    let member = tcp::join(&tcp::JoinOptions::new(rank, PROCESSES, "127.0.0.1", port))?;
    let world = member.world_group()?;

    // Rank 2 brings [2, 20, 200].
    let own = [1.0_f32, 10.0, 100.0].map(|x| x * rank as f32).to_vec();
    let sum = world.all_reduce_vec(own, ReduceOp::Sum)?;
    assert_eq!(sum, [6.0, 60.0, 600.0]);

    let lines = world.gather_bytes(format!("rank {rank} got {sum:?}").into_bytes(), 0)?;
    for line in lines {
        println!("{}", String::from_utf8(line)?);
    }
    // The process waits until the others have what it sent.
    member.end();
    Ok(())
}
