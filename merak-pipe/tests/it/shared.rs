//! Ranks that share cores: no core idles while an action could run.

use crate::played::played;
use merak_pipe::{Costs, Figure, ScheduleKind, Size, UnitCosts, simulate, simulate_on};
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
        overlap: 1.0,
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
fn two_ranks_on_one_core_compute_by_turns() {
    let schedule = ScheduleKind::Gpipe.generate(Size::new(2, 2)).unwrap();
    let costs = Costs::uniform("F=1,I=1,W=1,R=0".parse::<UnitCosts>().unwrap(), 2);
    let simulation = simulate_on(&schedule, &costs, 1.0).unwrap();
    let times = |rank: usize| {
        let spans = simulation.timeline.ranks[rank].iter();
        spans.map(|span| (span.start, span.end)).collect::<Vec<_>>()
    };
    // Rank 0 goes on with 0F1 before the message of 0F0 has come; 0B0 waits for 1B1 in the same
    // way.
    assert_eq!(
        times(0),
        [(0.0, 1.0), (1.0, 2.0), (8.0, 10.0), (10.0, 12.0)]
    );
    assert_eq!(times(1), [(2.0, 3.0), (3.0, 4.0), (4.0, 6.0), (6.0, 8.0)]);
    let path: Vec<_> = simulation
        .critical_path
        .iter()
        .map(ToString::to_string)
        .collect();
    assert_eq!(
        path,
        ["0F0", "0F1", "1F0", "1F1", "1B0", "1B1", "0B0", "0B1"]
    );
}

#[test]
fn on_a_share_of_a_core_time_passes_more_slowly() {
    let schedule = ScheduleKind::OneFOneB.generate(Size::new(3, 6)).unwrap();
    let costs = Costs::uniform("F=1,I=1,W=1,R=0".parse::<UnitCosts>().unwrap(), 3);
    let makespan = |cores: f64| simulate_on(&schedule, &costs, cores).unwrap().makespan;
    assert!((makespan(0.25) - 4.0 * makespan(1.0)).abs() < TINY);
    // Two at once, at three quarters of their speed.
    let bounds = (54.0 / 1.5)..(54.0 / 1.5 + makespan(3.0));
    assert!(bounds.contains(&makespan(1.5)), "{}", makespan(1.5));
}

#[test]
fn a_number_of_cores_is_more_than_next_to_none() {
    let schedule = ScheduleKind::Gpipe.generate(Size::new(2, 2)).unwrap();
    let costs = Costs::uniform(UnitCosts::default(), 2);
    for found in [0.0, -1.0, f64::NAN, 1e-320] {
        let error = simulate_on(&schedule, &costs, found).unwrap_err();
        assert_eq!(
            error.to_string(),
            format!(
                "ranks share 0.000001 cores or more, found {}",
                Figure(found)
            )
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
        // While a core is free, all that could run runs, and what is left of the longest chain gets
        // shorter.
        let most = work / cores + alone.makespan;
        prop_assert!(shared.makespan <= most + TINY * most, "{} {most}", shared.makespan);
        for (spans, actions) in shared.timeline.ranks.iter().zip(&schedule.actions) {
            let ran: Vec<_> = spans.iter().map(|span| span.action).collect();
            prop_assert_eq!(&ran, actions);
            prop_assert!(spans.windows(2).all(|pair| pair[0].end <= pair[1].start));
        }
        let mut starts: Vec<_> = shared.timeline.ranks.iter().flatten().map(|span| (span.start, 1)).collect();
        starts.extend(shared.timeline.ranks.iter().flatten().map(|span| (span.end, -1)));
        starts.sort_by(|a, b| a.0.total_cmp(&b.0).then(a.1.cmp(&b.1)));
        let running = starts.iter().scan(0, |running, (_, change)| { *running += change; Some(*running) });
        prop_assert!(running.max() <= Some(cores.ceil() as i32));
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
