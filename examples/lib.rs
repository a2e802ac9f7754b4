//! What the numbered examples of this folder share: reading a number from the command line, data
//! to fit, and saving.
//!
//! Each file's first comment says what it shows and how to run it; README.md lists them in order.

use anyhow::{Context, Result, ensure};
use merak_ckpt::{Checkpoint, Draft, Header, Shard, Store, Tolerance, diff};
use merak_mpu::{Degrees, Mpu, threads};
use std::path::Path;

/// The `index`-th argument of the command line, a count of at least 1, or `default` where there is
/// none.
///
/// # Errors
/// When the argument is no number, or zero.
pub fn count(index: usize, name: &str, default: usize) -> Result<usize> {
    let Some(text) = std::env::args().nth(index) else {
        return Ok(default);
    };
    let count = text
        .parse()
        .with_context(|| format!("argument {index}, {name}, is a number, found {text:?}"))?;
    ensure!(count > 0, "argument {index}, {name}, is at least 1");
    Ok(count)
}

/// Rows of one microbatch of [`wave`].
pub const ROWS: usize = 16;

/// One microbatch of points of the plane `[ROWS, 2]`, and of a wave over them `[ROWS, 1]`.
pub fn wave(microbatch: usize) -> (Vec<f32>, Vec<f32>) {
    let coordinate = |i: usize| (0.37 * i as f32).sin() * 2.0;
    let rows = microbatch * ROWS..(microbatch + 1) * ROWS;
    let points = rows.map(|i| [coordinate(i), coordinate(3 * i + 1)]);
    let (points, wave): (Vec<_>, Vec<_>) = points.map(|[x, y]| ([x, y], (x * y).cos())).unzip();
    (points.concat(), wave)
}

/// Element `i` of a starting weight, which depends on the weight's name alone.
pub fn starting_weight(name: &str, i: usize) -> f32 {
    let seed: f32 = name.bytes().map(f32::from).sum();
    0.3 * (seed + 1.7 * i as f32).sin()
}

/// Saves a checkpoint of which each rank of the world writes a part.
///
/// # Errors
/// Those of the store, of `write` and of the other ranks.
pub fn save(
    mpu: &Mpu,
    folder: &Path,
    step: u64,
    write: impl FnOnce(&Draft) -> merak_ckpt::Result<Shard>,
) -> Result<()> {
    let (world, store) = (mpu.world_group(), Store::in_output_dir(folder));
    let begun = mpu.is_rank_0().then(|| store.begin(step)).transpose()?;
    world.barrier()?;
    let draft = begun.unwrap_or_else(|| store.draft(step));
    let shard = serde_json::to_vec(&write(&draft)?)?;
    let shards = world.all_gather_bytes(shard)?;
    if mpu.is_rank_0() {
        let shards = shards.iter().map(|shard| serde_json::from_slice(shard));
        draft.commit(shards.collect::<Result<_, _>>()?, Header::default(), &[])?;
    }
    Ok(world.barrier()?)
}

/// Trains on `pp x dp` ranks; returns the losses of the steps and the checkpoint.
///
/// `train` runs on every rank, saves into the folder and returns the losses.
///
/// # Errors
/// Those of `train`.
pub fn train_on(
    pp: usize,
    dp: usize,
    folder: &Path,
    train: impl Fn(&Mpu, &Path) -> Result<Vec<f64>> + Sync,
) -> Result<(Vec<f64>, Checkpoint)> {
    let degrees = Degrees {
        pp,
        dp,
        ..Degrees::default()
    };
    let options = threads::WorldOptions::default();
    let train = |member| train(&Mpu::new(member, degrees)?, folder);
    let mut losses = threads::run(degrees.world_size(), options, train)?;
    Ok((losses.remove(0), Checkpoint::open(folder)?))
}

/// Trains on one rank and on `PP x DP` ranks, which the command line has, and compares the losses
/// and the checkpoints; returns a line for the reader.
///
/// `train` is as for [`train_on`].
///
/// # Errors
/// Those of `train`; also where the model does not learn, or one rank gives other numbers.
pub fn compare_with_one_rank(
    train: impl Fn(&Mpu, &Path) -> Result<Vec<f64>> + Sync,
) -> Result<String> {
    let (pp, dp) = (count(1, "PP", 2)?, count(2, "DP", 2)?);
    let folder = tempfile::tempdir()?;
    let run = |pp, dp, name| train_on(pp, dp, &folder.path().join(name), &train);
    let (one, many) = (run(1, 1, "one")?, run(pp, dp, "many")?);
    let close = |(a, b): (&f64, &f64)| (a - b).abs() < 1e-4;
    ensure!(
        one.0.iter().zip(&many.0).all(close),
        "the losses of one rank, {:?}, found {:?}",
        one.0,
        many.0
    );
    let tolerance = Tolerance {
        rtol: 0.0,
        atol: 1e-3,
    };
    let report = diff(&one.1, &many.1, tolerance)?;
    ensure!(
        report.different.is_empty(),
        "the weights of one rank: {report:?}"
    );
    let (first, last) = (many.0[0], many.0[many.0.len() - 1]);
    ensure!(last < 0.5 * first, "the model learns: {:?}", many.0);
    Ok(format!(
        "pp {pp} x dp {dp}: loss {first:.4} -> {last:.4}, as on one rank"
    ))
}

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;

#[cfg(doctest)]
#[doc = include_str!("../docs/ONE-CRATE.md")]
struct OneCrate;

#[cfg(doctest)]
#[doc = include_str!("../docs/OWN-MODEL.md")]
struct OwnModel;
