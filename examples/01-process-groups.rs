//! Ranks find their place on a mesh of data x tensor x pipeline and talk to their groups
//! (merak-mpu).
//!
//! `cargo run -p merak-examples --example 01-process-groups [DP [TP [PP]]]`, each 2 by default.
#![expect(clippy::print_stdout, reason = "an example prints")]

use merak_examples::count;
use merak_mpu::{
    Communicator, Degrees, GroupKind, Mpu, Rank, ReduceOp, Topology, into_vec, threads,
};

/// What one rank learns from its groups.
#[derive(Debug, PartialEq)]
struct Learnt {
    /// Sum of the ranks of its tensor group, by a collective that blocks.
    tensor_sum: u32,
    /// Largest rank of its data group, by a collective that was started and waited for later.
    data_max: u32,
    /// All ranks of its pipeline, in stage order.
    pipeline: Vec<u32>,
    /// The sum of the ranks that its activation passed on the way to this stage.
    activation: u32,
}

fn main() -> anyhow::Result<()> {
    let degrees = Degrees {
        dp: count(1, "DP", 2)?,
        tp: count(2, "TP", 2)?,
        pp: count(3, "PP", 2)?,
        ..Degrees::default()
    };

    // The place of each rank is arithmetic: it needs no running ranks.
    let topology = Topology::new(degrees)?;
    println!("{degrees}, a world of {}", topology.world_size());
    for kind in [GroupKind::Tensor, GroupKind::Data, GroupKind::Pipeline] {
        println!("  {kind:<8} groups {:?}", topology.groups(kind));
    }

    // The same on running ranks, each a thread. An error on one of them ends all, and names it.
    let options = threads::WorldOptions::default();
    let learnt = threads::run(degrees.world_size(), options, |member| {
        talk(&Mpu::new(member, degrees)?)
    })?;
    for (rank, found) in learnt.iter().enumerate() {
        println!("rank {rank}: {found:?}");
        anyhow::ensure!(*found == expected(&topology, Rank(rank))?);
    }
    Ok(())
}

/// What every rank says to its groups.
fn talk(mpu: &Mpu) -> merak_mpu::Result<Learnt> {
    let me = mpu.rank().0 as u32;

    // A started operation owns its buffer; others may run before it is waited for.
    let data = mpu.data_parallel_group();
    let pending = data.start_all_reduce(Box::new(vec![me]), ReduceOp::Max)?;
    let tensor_sum = mpu
        .tensor_parallel_group()
        .all_reduce_scalar(me, ReduceOp::Sum)?;
    let pipeline = mpu.pipeline_parallel_group().all_gather_vec(vec![me])?;
    let data_max = into_vec::<u32>(pending.wait()?)?[0];

    Ok(Learnt {
        tensor_sum,
        data_max,
        pipeline,
        activation: pass_on(mpu)?,
    })
}

/// Takes a number from the stage before, adds this rank's own and hands it to the next stage.
fn pass_on(mpu: &Mpu) -> merak_mpu::Result<u32> {
    const ACTIVATION: u64 = 0;
    let (stages, stage) = (mpu.pipeline_parallel_group(), mpu.pipeline_parallel_rank());
    let before = if mpu.is_first_stage() {
        0
    } else {
        let packet = stages.recv(stage - 1, ACTIVATION)?.remove(0);
        into_vec::<u32>(packet.data)?[0]
    };
    let sum = before + mpu.rank().0 as u32;
    if !mpu.is_last_stage() {
        let packet = merak_mpu::Packet {
            shape: vec![1],
            data: Box::new(vec![sum]),
        };
        stages.send(stage + 1, ACTIVATION, vec![packet])?;
    }
    Ok(sum)
}

/// The same, from the layout alone.
fn expected(topology: &Topology, rank: Rank) -> merak_mpu::Result<Learnt> {
    let group = |kind| -> merak_mpu::Result<Vec<u32>> {
        let ranks = topology.group_of(kind, rank)?;
        Ok(ranks.iter().map(|rank| rank.0 as u32).collect())
    };
    let pipeline = group(GroupKind::Pipeline)?;
    let passed = pipeline.iter().filter(|&&other| other <= rank.0 as u32);
    Ok(Learnt {
        tensor_sum: group(GroupKind::Tensor)?.iter().sum(),
        data_max: group(GroupKind::Data)?.into_iter().max().unwrap_or(0),
        activation: passed.sum(),
        pipeline,
    })
}
