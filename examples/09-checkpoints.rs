//! Saves slices of four ranks, loads them as another topology, and finds a damaged byte
//! (merak-ckpt).
//!
//! `cargo run -p merak-examples --example 09-checkpoints [TP [DP]]`, the ranks that load, 4 and 2
//! by default.
#![expect(clippy::print_stdout, reason = "an example prints")]

use anyhow::{Context, Result, ensure};
use merak_ckpt::{Checkpoint, DType, Draft, Header, Kind, Layout, Piece, Shard, ShardKind, Store};
use merak_examples::count;
use merak_mpu::{Degrees, Mpu, threads};
use std::{fs, ops::Range};

/// A fused projection, `[q | k | v]` of four rows each: tensor parallelism cuts every part of it.
/// With it goes one optimizer moment, which ZeRO divides over replicas as flat ranges of the slice.
const SHAPE: [usize; 2] = [3 * ROWS, COLUMNS];
const ROWS: usize = 4;
const COLUMNS: usize = 6;

fn main() -> Result<()> {
    let (tp, dp) = (count(1, "TP", 4)?, count(2, "DP", 2)?);
    ensure!(ROWS.is_multiple_of(tp), "TP divides {ROWS}");
    let folder = tempfile::tempdir()?;
    let store = Store::in_output_dir(folder.path());

    let degrees = Degrees {
        dp: 2,
        tp: 2,
        ..Degrees::default()
    };
    for step in [10, 20] {
        threads::run(
            degrees.world_size(),
            threads::WorldOptions::default(),
            |member| save(&Mpu::new(member, degrees)?, &store, step),
        )?;
    }
    let checkpoint = Checkpoint::open(folder.path())?; // the latest one
    ensure!(checkpoint.manifest().header.step == 20);
    for file in &checkpoint.manifest().files {
        println!("{:<24} {:>4} bytes", file.name, file.length);
    }

    // Every rank of any other topology reads the byte ranges that it needs.
    for rank in 0..tp {
        let rows = rows(rank, tp);
        let layout = Layout::along(&SHAPE, 0, &rows)?;
        let len = layout.num_local_elements();
        let mut weight = vec![0; 4 * len];
        checkpoint.read(&piece(&Kind::Parameter, &layout, None), &mut weight)?;
        ensure!(weight == local(0.0, &rows));
        let kind = Kind::optimizer("exp_avg");
        for part in (0..dp).map(|replica| part(len, replica, dp)) {
            let expected = &local(0.5, &rows)[4 * part.start..4 * part.end];
            let mut moment = vec![0; expected.len()];
            checkpoint.read(&piece(&kind, &layout, Some(part)), &mut moment)?;
            ensure!(moment == expected);
        }
    }
    println!("written by {degrees}, read by dp {dp} x tp {tp}");

    let report = checkpoint.verify();
    ensure!(report.damage.is_empty());
    println!("verified {} bytes in {} files", report.bytes, report.files);
    damage(&checkpoint)
}

/// One rank's part in a save: rank 0 begins and commits, every rank writes what it owns.
fn save(mpu: &Mpu, store: &Store, step: u64) -> Result<()> {
    let world = mpu.world_group();
    let begun = mpu.is_rank_0().then(|| store.begin(step)).transpose()?;
    world.barrier()?;
    let draft = begun.unwrap_or_else(|| store.draft(step));
    let shard = serde_json::to_vec(&write(mpu, &draft)?)?;
    let shards = world.all_gather_bytes(shard)?;
    if mpu.is_rank_0() {
        let shards = shards.iter().map(|shard| serde_json::from_slice(shard));
        let shards = shards.collect::<Result<_, _>>()?;
        draft.commit(shards, Header::default(), &[("config.json", b"{}")])?;
    }
    Ok(world.barrier()?)
}

/// Replicas hold the same weights, so the first one writes them. Each has its own part of the
/// moment.
fn write(mpu: &Mpu, draft: &Draft) -> Result<Shard> {
    let (rank, replica) = (mpu.rank().0, mpu.data_parallel_rank());
    let rows = rows(mpu.tensor_parallel_rank(), mpu.degrees().tp);
    let layout = Layout::along(&SHAPE, 0, &rows)?;
    let kind = Kind::optimizer("exp_avg");
    let part = part(layout.num_local_elements(), replica, mpu.degrees().dp);
    let moment = &local(0.5, &rows)[4 * part.start..4 * part.end];
    let pieces = [(piece(&kind, &layout, Some(part)), moment)];
    let mut shard = draft.write_shard(ShardKind::Optimizer, rank, &pieces)?;
    if replica == 0 {
        let weight = local(0.0, &rows);
        let pieces = [(piece(&Kind::Parameter, &layout, None), weight.as_slice())];
        shard.append(draft.write_shard(ShardKind::Model, rank, &pieces)?);
    }
    Ok(shard)
}

/// The rows of one tensor rank: its share of q, of k and of v.
fn rows(rank: usize, tp: usize) -> Vec<Range<usize>> {
    let share = ROWS / tp;
    let first = [0, ROWS, 2 * ROWS].map(|part| part + rank * share);
    first.map(|first| first..first + share).to_vec()
}

/// The part of `len` elements that a replica keeps.
fn part(len: usize, replica: usize, dp: usize) -> Range<usize> {
    replica * len / dp..(replica + 1) * len / dp
}

/// The bytes of some rows of a tensor whose elements are their own index, plus `offset`.
fn local(offset: f32, rows: &[Range<usize>]) -> Vec<u8> {
    let rows = rows.iter().cloned().flatten();
    let elements = rows.flat_map(|row| row * COLUMNS..(row + 1) * COLUMNS);
    let elements = elements.map(|index| index as f32 + offset);
    elements.flat_map(f32::to_le_bytes).collect()
}

fn piece<'a>(kind: &'a Kind, layout: &'a Layout, range: Option<Range<usize>>) -> Piece<'a> {
    let (name, dtype) = ("attn.qkv.weight", DType::F32);
    Piece {
        kind,
        name,
        dtype,
        layout,
        range,
    }
}

/// Flips one bit on the disk: checking finds it, and reading says what still is good.
fn damage(checkpoint: &Checkpoint) -> Result<()> {
    let path = checkpoint.path().join("model-00000.safetensors");
    let mut bytes = fs::read(&path)?;
    *bytes.last_mut().context("the file has bytes")? ^= 1;
    fs::write(&path, bytes)?;
    let damaged = Checkpoint::open(checkpoint.path())?;
    let found = damaged.verify().damage;
    ensure!(!found.is_empty(), "every byte is under a checksum");
    let refused = damaged.read_whole(&Kind::Parameter, "attn.qkv.weight");
    let error = refused.err().context("a damaged slice is not handed out")?;
    println!("{error}");
    let older = damaged.older()?.context("step 10 is still there")?;
    ensure!(older.manifest().header.step == 10 && older.verify().damage.is_empty());
    Ok(())
}
