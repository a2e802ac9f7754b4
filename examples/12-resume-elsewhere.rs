//! A run of dp 2 x tp 1 x pp 2 ranks is killed in the middle of its steps, and goes on from its
//! last checkpoint as another topology (merak-trainer).
//!
//! `cargo run -p merak-examples --example 12-resume-elsewhere [DP [TP [PP]]]`, the ranks that go
//! on, 1, 2 and 1 by default.
#![expect(clippy::print_stdout, reason = "an example prints")]

use anyhow::{Context, Result, ensure};
use merak_examples::count;
use merak_mpu::Mpu;
use merak_trace::models;
use merak_trainer::{
    CheckedArguments, MerakArguments, MerakTrainer, Plan, PlanInputs, TrainerParts,
    data::{TokenDataset, Tokens},
    run_world, threads_per_rank,
};
use std::{
    env,
    io::{BufRead, BufReader},
    path::Path,
    process::{Command, Stdio},
    sync::Arc,
};

/// Samples of a step, the same for every topology.
const GLOBAL_BATCH: usize = 8;
const MICROBATCHES: usize = 2;
const SAVED_AFTER: usize = 4;
/// The step that the killed run has told of when it is killed; it goes on meanwhile.
const KILLED_AFTER: usize = 6;
/// The last step that is compared, of a run that would go on for long.
const COMPARED: usize = 8;
const STEPS: i64 = 100_000;
/// The word before the folder of the run that is to be killed.
const VICTIM: &str = "--run-until-killed-in";

fn main() -> Result<()> {
    let here = [2, 1, 2];
    if env::args().nth(1).as_deref() == Some(VICTIM) {
        let folder = env::args_os().nth(2).context("a folder")?;
        return losses(&arguments(here, folder.as_ref())?.check()?, None).map(drop);
    }
    let elsewhere = [count(1, "DP", 1)?, count(2, "TP", 2)?, count(3, "PP", 1)?];
    let folder = tempfile::tempdir()?;
    let undisturbed = tempfile::tempdir()?;
    let uninterrupted = losses(
        &arguments(here, undisturbed.path())?.check()?,
        Some(COMPARED),
    )?;

    kill_a_run_in(folder.path())?;
    // Two runs then start from what it saved.
    let resumed = |degrees| -> Result<Vec<f64>> {
        let mut args = arguments(degrees, folder.path())?;
        args.resume_from_checkpoint = Some("latest".to_owned());
        losses(&args.check()?, Some(COMPARED))
    };
    let (same, other) = (resumed(here)?, resumed(elsewhere)?);
    println!("step  uninterrupted  resumed at {here:?}  resumed at {elsewhere:?}");
    let rest = &uninterrupted[SAVED_AFTER..];
    for (step, ((expected, same), other)) in rest.iter().zip(&same).zip(&other).enumerate() {
        let step = step + SAVED_AFTER + 1;
        println!("{step:>4}  {expected:<13.8}  {same:<20.8}  {other:.8}");
    }
    ensure!(same == rest, "the same topology goes on with the same bits");
    ensure!(other.len() == rest.len());
    for (expected, other) in rest.iter().zip(&other) {
        ensure!(
            (expected - other).abs() < 1e-4 * expected,
            "another one up to the order of sums"
        );
    }
    Ok(())
}

/// Starts this program again to train in a folder, and kills it some steps after its checkpoint.
fn kill_a_run_in(folder: &Path) -> Result<()> {
    let mut victim = Command::new(env::current_exe()?)
        .arg(VICTIM)
        .arg(folder)
        .stdout(Stdio::piped())
        .spawn()?;
    let mut told = victim.stdout.take().map(BufReader::new);
    let is_due = format!("step {KILLED_AFTER}");
    let mut lines = told.iter_mut().flat_map(BufRead::lines);
    let is_told = lines.any(|line| line.is_ok_and(|line| line == is_due));
    let killed = victim.kill();
    let status = victim.wait()?;
    killed?;
    ensure!(is_told && !status.success(), "not killed: {status}");
    println!("killed after {is_due} ({status})");
    Ok(())
}

/// The same global batch, however it is divided over replicas.
fn arguments([dp, tp, pp]: [usize; 3], output: &Path) -> Result<MerakArguments> {
    ensure!(
        (GLOBAL_BATCH / MICROBATCHES).is_multiple_of(dp),
        "DP divides the batch"
    );
    let mut args = MerakArguments::default();
    (args.dp, args.tp, args.pp) = (dp, tp, pp);
    args.per_device_train_batch_size = GLOBAL_BATCH / MICROBATCHES / dp;
    args.gradient_accumulation_steps = MICROBATCHES;
    args.output_dir = Some(output.to_owned());
    args.seq_length = Some(16.into());
    args.max_steps = STEPS;
    args.learning_rate = 3e-3;
    args.save_steps = SAVED_AFTER;
    Ok(args)
}

/// Trains on made-up tokens, with dropout, up to a step, and returns the losses; where there is no
/// such step, on and on, telling each one.
fn losses(args: &CheckedArguments, last: Option<usize>) -> Result<Vec<f64>> {
    let config = serde_json::json!({
        "model_type": "gpt2", "vocab_size": 32, "n_positions": 16, "n_embd": 32, "n_layer": 2, "n_head": 4,
        "resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1,
    });
    let model = models::from_config(&config)?;
    let plan = Arc::new(Plan::new(&PlanInputs::read(model.into(), args)?, args)?);
    let tokens: Tokens = (0..2000_u32).map(|i| i * i / 7 % 32).collect();
    let data = Arc::new(TokenDataset::new(tokens, 16, "training")?);
    let by_rank = run_world(args, |member| {
        let mpu = Mpu::new(member, args.degrees())?;
        let data = Arc::clone(&data);
        let parts = TrainerParts {
            train_data: Some(data),
            num_threads: threads_per_rank(args),
            ..TrainerParts::default()
        };
        let mut trainer = MerakTrainer::new(Arc::clone(&plan), mpu, args, parts)?;
        let mut losses = Vec::new();
        // `train` does the same and tells callbacks; here the loop is ours.
        while trainer.global_step() < last.unwrap_or(trainer.total_steps()) {
            losses.push(trainer.train_step()?.loss);
            let step = trainer.global_step();
            if step == args.save_steps {
                trainer.save_checkpoint()?;
            }
            if last.is_none() && trainer.mpu().is_rank_0() {
                println!("step {step}");
            }
        }
        Ok(losses)
    })?;
    Ok(by_rank.into_iter().next().unwrap_or_default())
}
