//! What ranks ran when lies on one axis of time, whatever connects them.

use std::{thread, time::Duration};

use merak_mpu::{Member, tcp, threads};
use merak_pipe::Timeline;
use merak_trainer::run_on;

use crate::support::Case;

const STAGES: usize = 2;
const STEPS: usize = 3;

/// How much later the second rank begins than the first.
const LATE: Duration = Duration::from_millis(400);

/// How far the clocks of ranks may seem apart, on a machine that is busy.
const TOLERANCE: f64 = 0.2;

/// What the ranks of a world ran in some steps, as its first rank gathers it.
fn timeline(members: Vec<Member>) -> Timeline {
    let case = Case::gpt2().on((1, 1, STAGES));
    let plan = case.plan();
    let ranks = run_on(members, |member| {
        thread::sleep(LATE * member.rank().0 as u32);
        let mut trainer = case.trainer(&plan, member)?;
        (0..=STEPS).try_for_each(|_| trainer.train_step().map(drop))?;
        trainer.gather_timeline()
    });
    ranks.expect("a healthy training").swap_remove(0)
}

/// Checks that time goes on within each rank, and that no message arrives before it was sent.
fn expect_one_axis(timeline: &Timeline, tolerance: f64) {
    assert_eq!(timeline.ranks.len(), STAGES);
    for spans in &timeline.ranks {
        assert!(spans.iter().all(|span| span.start <= span.end));
        let ascends = spans.windows(2).all(|pair| pair[0].end <= pair[1].start);
        assert!(ascends, "{spans:?}");
    }
    let mut messages = 0;
    for (rank, spans) in timeline.ranks.iter().enumerate() {
        let other = &timeline.ranks[1 - rank];
        let sent = other
            .iter()
            .filter_map(|span| Some((span.action.output(STAGES)?, span.end)));
        let received = spans
            .iter()
            .filter_map(|span| Some((span.action.input(STAGES)?, span.start)));
        let (mut sent, mut received): (Vec<_>, Vec<_>) = (sent.collect(), received.collect());
        // The messages of a tag are those of one step each, in their order.
        sent.sort_by_key(|(tag, _)| *tag);
        received.sort_by_key(|(tag, _)| *tag);
        assert_eq!(sent.len(), received.len());
        for ((tag, end), (same, start)) in sent.into_iter().zip(received) {
            assert_eq!(tag, same);
            assert!(
                end <= start + tolerance,
                "{tag:?} left at {end} and was there at {start}"
            );
            messages += 1;
        }
    }
    assert_eq!(messages, 2 * 4 * STEPS, "four microbatches, there and back");
}

#[test]
fn the_spans_of_ranks_that_are_threads_lie_on_one_axis() {
    let members = threads::world(STAGES, threads::WorldOptions::default());
    expect_one_axis(&timeline(members), 0.0);
}

#[test]
fn the_spans_of_ranks_that_are_processes_lie_on_one_axis() {
    let members = tcp::world(STAGES, Duration::from_secs(20)).expect("sockets");
    expect_one_axis(&timeline(members), TOLERANCE);
}
