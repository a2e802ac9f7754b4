//! Throughput of the threads engine beside plain copies on as many threads in the same run.
//!
//! `cargo bench -p merak-mpu` prints one line per operation and size: the median time, and how many
//! times as long as each thread's copy of that many bytes to a second buffer it took. Ratios travel
//! between hosts.
#![expect(clippy::print_stdout, reason = "a bench reports on standard output")]

use merak_mpu::{Group, ReduceOp, Result, threads};
use std::{hint::black_box, time::Instant};

const ROUNDS: usize = 101;

fn main() {
    // `cargo test --benches` only asks whether the bench starts.
    let rounds = if std::env::args().any(|arg| arg == "--bench") {
        ROUNDS
    } else {
        1
    };
    for n in [2, 4] {
        for len in [1 << 10, 1 << 18, 1 << 22] {
            measure(n, len, rounds);
        }
    }
}

fn measure(n: usize, len: usize, rounds: usize) {
    let times = threads::run(n, threads::WorldOptions::default(), |member| {
        let group = member.world_group()?;
        let copy = copies(&group, len, rounds)?;
        let reduce = median(&group, rounds, vec![0.0_f32; len], |group, data| {
            group.all_reduce_vec(data, ReduceOp::Sum)
        })?;
        let broadcast = median(&group, rounds, vec![1.0_f32; len], |group, data| {
            group.broadcast_vec(data, 0)
        })?;
        let exchange = median(&group, rounds, vec![1.0_f32; len], Group::all_to_all_vec)?;
        Ok::<_, merak_mpu::Error>([copy, reduce, broadcast, exchange])
    })
    .expect("no rank fails");
    let [copy, reduce, broadcast, exchange] = times[0];
    for (op, seconds) in [
        ("copy", copy),
        ("all_reduce", reduce),
        ("broadcast", broadcast),
        ("all_to_all", exchange),
    ] {
        println!(
            "{op:<12} {n} ranks {:>9} bytes {:>9.1} us {:>6.2} copies",
            len * 4,
            seconds * 1e6,
            seconds / copy
        );
    }
}

fn copies(group: &Group, len: usize, rounds: usize) -> Result<f64> {
    let source = vec![1.0_f32; len];
    median(group, rounds, vec![0.0_f32; len], |_, mut data| {
        data.copy_from_slice(black_box(&source));
        Ok(data)
    })
}

fn median(
    group: &Group,
    rounds: usize,
    mut data: Vec<f32>,
    op: impl Fn(&Group, Vec<f32>) -> Result<Vec<f32>>,
) -> Result<f64> {
    let mut times = Vec::with_capacity(rounds);
    for _ in 0..rounds {
        group.barrier()?;
        let start = Instant::now();
        data = op(group, data)?;
        times.push(start.elapsed().as_secs_f64());
        black_box(&data);
    }
    times.sort_by(f64::total_cmp);
    Ok(times[rounds / 2])
}
