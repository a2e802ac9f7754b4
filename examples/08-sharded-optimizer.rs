//! AdamW over data-parallel ranks, its state on every rank or divided among them (merak-zero).
//!
//! `cargo run -p merak-examples --example 08-sharded-optimizer [RANKS]`, 2 by default; a divisor
//! of 16.
#![expect(clippy::print_stdout, reason = "an example prints")]

use anyhow::{Result, ensure};
use merak_examples::count;
use merak_mpu::{Member, ReduceOp, threads};
use merak_zero::{
    GlobalParams, LrSchedule, LrSchedulerKwargs, LrSchedulerType, OptimizerConfig, ParamSpec,
    ZeroConfig, ZeroGroups, ZeroOptimizer, ZeroStage,
};

const INPUTS: usize = 128;
const OUTPUTS: usize = 512;
const GLOBAL_BATCH: usize = 16;
const STEPS: u64 = 60;

/// What a rank has at the end.
struct Trained {
    weights: Vec<f32>,
    losses: Vec<f64>,
    state_elements: usize,
}

fn main() -> Result<()> {
    let ranks = count(1, "RANKS", 2)?;
    ensure!(
        GLOBAL_BATCH.is_multiple_of(ranks),
        "RANKS divides {GLOBAL_BATCH}"
    );
    let run = |ranks, stage| -> Result<Vec<Trained>> {
        let options = threads::WorldOptions::default();
        Ok(threads::run(ranks, options, |member| {
            train(&member, stage)
        })?)
    };
    let alone = run(1, ZeroStage::Replicated)?;
    let replicated = run(ranks, ZeroStage::Replicated)?;
    let sharded = run(ranks, ZeroStage::OptimizerState)?;

    let owned = |trained: &[Trained]| -> Vec<usize> {
        trained.iter().map(|rank| 4 * rank.state_elements).collect()
    };
    println!(
        "bytes of each moment by rank, stage 0: {:?}",
        owned(&replicated)
    );
    println!(
        "bytes of each moment by rank, stage 1: {:?}",
        owned(&sharded)
    );
    let total: usize = owned(&sharded).iter().sum();
    ensure!(total == owned(&alone)[0], "stage 1 keeps each moment once");

    let all = replicated.iter().chain(&sharded);
    ensure!(
        all.clone().all(|rank| rank.weights == sharded[0].weights),
        "the same bits everywhere"
    );

    let (first, last) = (alone[0].losses[0], alone[0].losses[STEPS as usize - 1]);
    let last_of_many = sharded[0].losses[STEPS as usize - 1];
    println!(
        "loss {first:.4}, after {STEPS} steps {last:.6} on one rank, {last_of_many:.6} on {ranks}"
    );
    ensure!(last < 0.2 * first, "it learns");
    ensure!(
        (last - last_of_many).abs() < 1e-3 * last,
        "only the order of sums differs"
    );
    Ok(())
}

/// Fits a linear layer on this rank's share of every global batch.
fn train(member: &Member, stage: ZeroStage) -> Result<Trained> {
    let world = member.world_group()?;
    let groups = ZeroGroups {
        data_sequence: world.clone(),
        model: member.group("model", &[member.rank()])?, // a replica is one rank here
    };
    let params = vec![
        ParamSpec::new("weight", &[OUTPUTS, INPUTS], 0),
        ParamSpec::new("bias", &[OUTPUTS], 1).without_decay(),
    ];
    let model = GlobalParams::new([("weight", OUTPUTS * INPUTS), ("bias", OUTPUTS)]);
    let config = ZeroConfig {
        stage,
        optimizer: OptimizerConfig {
            weight_decay: 0.01,
            ..OptimizerConfig::default()
        },
        ..ZeroConfig::default()
    };
    let mut optimizer = ZeroOptimizer::new(params, model, config, groups)?;
    let kwargs = LrSchedulerKwargs::default();
    let schedule = LrSchedule::new(LrSchedulerType::Cosine, &kwargs, 0.05, 5, STEPS)?;

    let share = GLOBAL_BATCH / world.world_size();
    let mut weights = vec![0.0_f32; optimizer.layout().len()];
    let mut losses = Vec::new();
    for step in 0..STEPS {
        let first = step as usize * GLOBAL_BATCH + world.rank() * share;
        let (loss, mut grads) = gradients(&weights, first, share);
        optimizer.step(&mut weights, &mut grads, schedule.lr(step))?;
        let sum = world.all_reduce_scalar(loss, ReduceOp::Sum)?;
        losses.push(sum / world.world_size() as f64);
    }
    let state_elements = optimizer.state().num_owned();
    Ok(Trained {
        weights,
        losses,
        state_elements,
    })
}

/// Mean squared error over `count` samples, and its gradient in the layout of the optimizer.
fn gradients(weights: &[f32], first: usize, count: usize) -> (f64, Vec<f32>) {
    let (matrix, bias) = weights.split_at(OUTPUTS * INPUTS);
    let mut grads = vec![0.0; weights.len()];
    let mut loss = 0.0;
    let scale = 1.0 / (count * OUTPUTS) as f32;
    for sample in first..first + count {
        let x: Vec<f32> = (0..INPUTS).map(|i| noise(sample * INPUTS + i)).collect();
        for (output, row) in matrix.chunks_exact(INPUTS).enumerate() {
            let y = bias[output] + row.iter().zip(&x).map(|(w, x)| w * x).sum::<f32>();
            let error = y - (x[output % INPUTS] - x[(output + 1) % INPUTS] + 0.5);
            loss += f64::from(error * error * scale);
            let grad = 2.0 * error * scale;
            let of_row = &mut grads[output * INPUTS..][..INPUTS];
            of_row.iter_mut().zip(&x).for_each(|(g, x)| *g += grad * x);
            grads[OUTPUTS * INPUTS + output] += grad;
        }
    }
    (loss, grads)
}

/// A number in [-1, 1) that depends on the index alone.
fn noise(index: usize) -> f32 {
    let mut bits = (index as u32).wrapping_mul(0x9e37_79b1);
    bits = (bits ^ (bits >> 15)).wrapping_mul(0x85eb_ca77);
    bits ^= bits >> 13;
    (bits >> 8) as f32 / (1 << 23) as f32 - 1.0
}
