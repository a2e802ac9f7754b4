//! Gradients are reduced while the backward goes on, and parameters gathered while the forward
//! does, told by the order in which a rank starts its collectives.

use merak_mpu::{
    Call, ReduceOp,
    testing::{Event, Moment, Record},
    threads,
};
use merak_trainer::run_on;

use crate::support::Case;

/// Microbatches of each replica.
const MICROBATCHES: usize = 3;

/// Buckets of which all can be under way at once.
const BUCKETS: usize = 4;

/// Elements of a bucket: the first one, which is complete last, has the embeddings and a layer.
const BUCKET: usize = 10_000;

/// What happens to the collectives of the first rank in its second step.
fn recorded(stage: u8) -> Vec<Event> {
    let case = Case::gpt2()
        .with_tied(false)
        .with_microbatches(2 * MICROBATCHES)
        .on((2, 2, 1))
        .with("zero_stage", stage)
        .with("zero_reduce_bucket_size", BUCKET);
    let plan = case.plan();
    let members = threads::world(4, threads::WorldOptions::default());
    let ranks = run_on(members, |member| {
        let record = Record::default();
        let mut trainer = case.trainer(&plan, record.of(&member))?;
        trainer.train_step()?;
        record.take();
        trainer.train_step()?;
        Ok(record.take())
    });
    ranks.expect("a healthy training").swap_remove(0)
}

/// For each microbatch of a step, the buckets whose reduction the first rank has started by the
/// last tensor-parallel sum of its backward, which is that of the first layer; then those of the
/// whole step.
fn started(stage: u8) -> Vec<usize> {
    let events = recorded(stage);
    let reduction = match stage {
        0 => Call::AllReduce(ReduceOp::Sum),
        _ => Call::ReduceScatterInPlace(ReduceOp::Sum),
    };
    let (mut sums, mut reduced) = (Vec::new(), 0);
    for event in events
        .iter()
        .filter(|event| event.moment == Moment::Started)
    {
        match event.group.as_str() {
            "tensor" => sums.push(reduced),
            "data_sequence" if event.call == reduction => reduced += 1,
            _ => {}
        }
    }
    let of_microbatch = sums.len() / MICROBATCHES;
    assert_eq!(sums.len() % MICROBATCHES, 0, "sums of microbatches alone");
    let last = sums
        .chunks(of_microbatch)
        .map(|sums| sums[of_microbatch - 1]);
    last.chain([reduced]).collect()
}

#[test]
fn all_buckets_but_the_first_are_reduced_before_the_backward_of_the_last_microbatch_ends() {
    for stage in [0, 1] {
        assert_eq!(
            started(stage),
            [0, 0, BUCKETS - 1, BUCKETS],
            "stage {stage}"
        );
    }
}

#[test]
fn divided_gradients_are_reduced_before_the_backward_of_each_microbatch_ends() {
    for stage in [2, 3] {
        let before = [0, 1, 2].map(|microbatch| microbatch * BUCKETS + BUCKETS - 1);
        let expected = [&before[..], &[MICROBATCHES * BUCKETS]].concat();
        assert_eq!(started(stage), expected, "stage {stage}");
    }
}

#[test]
fn each_bucket_of_divided_parameters_is_on_its_way_while_layers_before_it_run() {
    let (mut sums, mut begun, mut ended) = (0_usize, Vec::new(), Vec::new());
    for event in recorded(3) {
        let gathers = event.group == "data_sequence" && event.call == Call::AllGatherInPlace;
        match event.moment {
            Moment::Started if event.group == "tensor" => sums += 1,
            Moment::Started if gathers => begun.push(sums),
            Moment::Ended if gathers => ended.push(sums),
            _ => {}
        }
    }
    // The first forward gathers each bucket once, in order; the first one has nothing before it.
    let within = begun.iter().zip(&ended).map(|(begun, ended)| ended - begun);
    let within: Vec<usize> = within.take(BUCKETS).collect();
    assert_eq!(within[0], 0, "{within:?}");
    assert!(within[1..].iter().all(|&sums| sums > 0), "{within:?}");
}
