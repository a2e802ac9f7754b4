//! Ranks that share cores: nothing is lost, nothing is gained.

use crate::played::played;
use merak_pipe::{Costs, ScheduleKind, Size, UnitCosts, simulate, simulate_on};
use proptest::prelude::*;

/// The worst that rounding does to a sum of a few hundred costs.
const TINY: f64 = 1e-9;

fn costs(stages: usize, seed: u64) -> Costs {
    let cost = |place: usize| ((seed >> (place % 48)) % 7 + 1) as f64;
    let list = |first: usize| (0..stages).map(|stage| cost(first + 3 * stage)).collect();
    Costs {
        forward: list(0),
        input_grad: list(1),
        weight_grad: list(2),
        recompute: vec![0.0; stages],
        hop: (1..stages).map(|hop| cost(hop) / 8.0).collect(),
    }
}

#[test]
fn one_core_does_all_work_one_after_the_other() {
    let costs = Costs::uniform("F=1,I=2,W=3,R=0".parse().unwrap(), 4);
    for kind in ScheduleKind::ALL {
        if kind.fixed_chunks() != Some(1) || !kind.is_training() {
            continue;
        }
        let schedule = kind.generate(Size::new(4, 8)).unwrap();
        let simulation = simulate_on(&schedule, &costs, 1.0).unwrap();
        let work = 4.0 * 8.0 * 6.0;
        assert!(
            (simulation.makespan - work).abs() < TINY,
            "{kind}: {}",
            simulation.makespan
        );
    }
}

#[test]
fn two_ranks_on_one_core_run_at_half_speed_while_both_compute() {
    let schedule = ScheduleKind::Gpipe.generate(Size::new(2, 2)).unwrap();
    let costs = Costs::uniform("F=1,I=1,W=1,R=0".parse::<UnitCosts>().unwrap(), 2);
    let simulation = simulate_on(&schedule, &costs, 1.0).unwrap();
    let times = |rank: usize| {
        let spans = simulation.timeline.ranks[rank].iter();
        spans.map(|span| (span.start, span.end)).collect::<Vec<_>>()
    };
    // 0F1 and 1F0 share the core from 1 to 3, 0B0 and 1B1 from 6 to 10.
    assert_eq!(
        times(0),
        [(0.0, 1.0), (1.0, 3.0), (6.0, 10.0), (10.0, 12.0)]
    );
    assert_eq!(times(1), [(1.0, 3.0), (3.0, 4.0), (4.0, 6.0), (6.0, 10.0)]);
}

#[test]
fn a_number_of_cores_is_more_than_none() {
    let schedule = ScheduleKind::Gpipe.generate(Size::new(2, 2)).unwrap();
    let costs = Costs::uniform(UnitCosts::default(), 2);
    for found in [0.0, -1.0, f64::NAN] {
        let error = simulate_on(&schedule, &costs, found).unwrap_err();
        assert_eq!(
            error.to_string(),
            format!("ranks run on more than 0 cores, found {found}")
        );
    }
}

proptest! {
    #[test]
    fn sharing_keeps_the_order_and_does_all_work_within_the_bounds(schedule in played(), cores in 0.3_f64..4.0, seed: u64) {
        let costs = costs(schedule.size.stages(), seed);
        let alone = simulate(&schedule, &costs).unwrap();
        let shared = simulate_on(&schedule, &costs, cores).unwrap();
        let work: f64 = alone.timeline.busy_times().iter().sum();
        let least = alone.makespan.max(work / cores);
        prop_assert!(shared.makespan >= least - TINY * least, "{} {least}", shared.makespan);
        // While anything runs, it runs no slower than on its share; while nothing does, a message is on its way.
        let most = alone.makespan * (schedule.size.ranks as f64 / cores).max(1.0);
        prop_assert!(shared.makespan <= most + TINY * most, "{} {most}", shared.makespan);
        for (spans, actions) in shared.timeline.ranks.iter().zip(&schedule.actions) {
            let ran: Vec<_> = spans.iter().map(|span| span.action).collect();
            prop_assert_eq!(&ran, actions);
            prop_assert!(spans.windows(2).all(|pair| pair[0].end <= pair[1].start));
        }
    }

    #[test]
    fn as_many_cores_as_ranks_are_as_good_as_any_number(schedule in played(), seed: u64) {
        let costs = costs(schedule.size.stages(), seed);
        let alone = simulate(&schedule, &costs).unwrap();
        let cores = schedule.size.ranks as f64;
        prop_assert_eq!(&simulate_on(&schedule, &costs, cores).unwrap(), &alone);
        // The other way of counting comes to the same.
        let nearly = simulate_on(&schedule, &costs, cores - 1e-12).unwrap();
        prop_assert!((nearly.makespan - alone.makespan).abs() <= 1e-6 * alone.makespan);
    }
}
