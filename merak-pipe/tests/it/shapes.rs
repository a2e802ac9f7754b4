//! Bubbles and memory of the schedules that split backwards or run several stages per rank.

use merak_pipe::{Costs, Schedule, ScheduleKind, Simulation, Size, UnitCosts, simulate};

/// One unit for each kind of action of a rank, so the ideal is three units for each microbatch.
fn play(kind: ScheduleKind, ranks: usize, microbatches: usize) -> (Schedule, Simulation) {
    let chunks = kind.fixed_chunks().unwrap_or(2);
    let size = Size::new(ranks, microbatches).with_chunks(chunks);
    let schedule = kind.generate(size).expect("the size is legal");
    let share = 1.0 / chunks as f64;
    let costs = UnitCosts {
        forward: share,
        input_grad: share,
        weight_grad: share,
        recompute: 0.0,
        ..UnitCosts::default()
    };
    let simulation = simulate(&schedule, &Costs::uniform(costs, size.stages())).expect("it runs");
    (schedule, simulation)
}

fn highest(values: &[f64]) -> f64 {
    values.iter().copied().fold(0.0, f64::max)
}

#[test]
fn bubbles_follow_the_closed_forms() {
    for p in 2..=16_usize {
        let hops = (p - 1) as f64;
        for m in [2 * p, 3 * p] {
            for (kind, expected) in [
                (ScheduleKind::Gpipe, 3.0 * hops),
                (ScheduleKind::OneFOneB, 3.0 * hops),
                (ScheduleKind::Interleaved, 1.5 * hops),
                (ScheduleKind::ZbH1, hops),
                (ScheduleKind::ZbH2, hops),
                (ScheduleKind::ZbV, 0.5 * hops),
                (ScheduleKind::DualPipeV, 0.5 * hops),
            ] {
                let extra = play(kind, p, m).1.makespan - 3.0 * m as f64;
                assert!(
                    (extra - expected).abs() < 1e-9,
                    "{kind} {p} {m}: expected {expected}, found {extra}"
                );
            }
            for (kind, bound) in [
                (
                    ScheduleKind::VHalf,
                    1.5 * hops - f64::from(u8::from(p % 4 == 0 && p <= 8)) * 2.0,
                ),
                (
                    ScheduleKind::VMin,
                    2.0 * hops - if p == 4 || p == 8 { 0.5 } else { 0.0 },
                ),
            ] {
                let extra = play(kind, p, m).1.makespan - 3.0 * m as f64;
                assert!(
                    extra <= bound + 1e-9,
                    "{kind} {p} {m}: at most {bound}, found {extra}"
                );
            }
        }
    }
}

#[test]
fn zero_bubble_schedules_keep_ranks_busy() {
    for p in 2..=16 {
        for m in [2 * p, 4 * p] {
            for kind in [ScheduleKind::ZbH2, ScheduleKind::ZbV] {
                let longest = play(kind, p, m).1.longest_rank_time();
                assert!(
                    (longest - 3.0 * m as f64).abs() < 1e-9,
                    "{kind} {p} {m}: {longest}"
                );
            }
        }
    }
}

#[test]
fn memory_keeps_its_bounds() {
    let chunk = |bound: f64| (bound * 2.0).ceil() / 2.0;
    for p in 1..=16_usize {
        for m in [1, p, 2 * p, 3 * p + 1] {
            let ranks = p as f64;
            for (kind, bound) in [
                (ScheduleKind::ZbH1, ranks),
                (ScheduleKind::ZbH2, 2.0 * ranks - 1.0),
                (ScheduleKind::ZbV, ranks),
                (ScheduleKind::VHalf, f64::midpoint(ranks, 2.0)),
                (ScheduleKind::VMin, chunk((ranks + 4.0) / 3.0)),
                (ScheduleKind::DualPipeV, ranks + 0.5),
            ] {
                let peak = highest(&play(kind, p, m).1.peak_activations);
                assert!(
                    peak <= bound + 1e-9,
                    "{kind} {p} {m}: at most {bound}, found {peak}"
                );
            }
        }
    }
}

#[test]
fn every_shape_passes_the_validator() {
    let kinds = ScheduleKind::ALL.into_iter();
    for kind in kinds.filter(|kind| !matches!(kind, ScheduleKind::ShiftedCriticalPath)) {
        for p in 1..=8 {
            for m in [kind.min_microbatches(p), p + 1, 2 * p, 3 * p + 1] {
                let outcome = play(kind, p, m.max(kind.min_microbatches(p))).0.validate();
                assert!(outcome.is_ok(), "{kind} {p} {m}: {outcome:?}");
            }
        }
    }
}

#[test]
fn interleaving_takes_any_number_of_chunks_and_a_smaller_last_round() {
    for chunks in 1..=4 {
        for (p, m) in [(2, 3), (3, 7), (4, 2), (4, 8), (5, 11)] {
            let size = Size::new(p, m).with_chunks(chunks);
            let schedule = ScheduleKind::Interleaved.generate(size).unwrap();
            let outcome = schedule.validate();
            assert!(outcome.is_ok(), "{size:?}: {outcome:?}");
        }
    }
    // One chunk is 1f1b.
    let size = Size::new(4, 8);
    let plain = ScheduleKind::OneFOneB.generate(size).unwrap();
    let one = ScheduleKind::Interleaved.generate(size).unwrap();
    assert_eq!(makespan(&one), makespan(&plain));
    let size = Size::new(2, 3).with_chunks(2);
    let schedule = ScheduleKind::Interleaved.generate(size).unwrap();
    insta::assert_snapshot!(schedule.to_csv(), @"
    0F0,0F1,2F0,2F1,0F2,2B0,2B1,2F2,0B0,0B1,2B2,0B2
    1F0,1F1,3F0,3B0,3F1,3B1,1F2,1B0,1B1,3F2,3B2,1B2
    ");
}

#[test]
fn a_smaller_last_round_waits_for_its_way_around_the_ranks() {
    for p in 2..=8_usize {
        for m in 2 * p..=4 * p {
            let missing = (p - m % p) % p;
            let expected = 3.0 * m as f64 + 1.5 * (p - 1) as f64 + missing as f64;
            let found = play(ScheduleKind::Interleaved, p, m).1.makespan;
            assert!(
                (found - expected).abs() < 1e-9,
                "{p} {m}: expected {expected}, found {found}"
            );
        }
    }
}

fn makespan(schedule: &Schedule) -> String {
    let costs = Costs::uniform(UnitCosts::default(), schedule.size.stages());
    simulate(schedule, &costs)
        .expect("it runs")
        .makespan
        .to_string()
}

#[test]
fn a_wrong_number_of_chunks_is_refused() {
    let error = ScheduleKind::ZbV.generate(Size::new(4, 8)).unwrap_err();
    assert_eq!(error.to_string(), "zb_v runs 2 chunks per rank, found 1");
    let error = ScheduleKind::ZbH1
        .generate(Size::new(4, 8).with_chunks(2))
        .unwrap_err();
    assert_eq!(error.to_string(), "zb_h1 runs 1 chunk per rank, found 2");
}

#[test]
fn forwards_alone_run_over_the_stages_of_any_schedule() {
    for kind in ScheduleKind::ALL {
        for (p, m) in [(1, 4), (2, 5), (4, 8), (5, 11)] {
            let trained = play(kind, p, m).0;
            for microbatches in [1, p, 2 * p + 1] {
                let forwards = trained.forwards(microbatches).unwrap();
                assert_eq!(
                    forwards.placement().unwrap(),
                    trained.placement().unwrap(),
                    "{kind} {p}"
                );
                let outcome = forwards.validate();
                assert!(outcome.is_ok(), "{kind} {p} {microbatches}: {outcome:?}");
            }
        }
    }
}

#[test]
fn live_microbatches_of_stages_add_up_to_no_less_than_the_peak_of_their_rank() {
    for kind in [
        ScheduleKind::OneFOneB,
        ScheduleKind::ZbV,
        ScheduleKind::Interleaved,
    ] {
        let (schedule, simulation) = play(kind, 4, 9);
        let live = schedule.live_microbatches();
        let placement = schedule.placement().unwrap();
        for (rank, peak) in simulation.peak_activations.iter().enumerate() {
            let own = live
                .iter()
                .zip(&placement)
                .filter(|(_, owner)| **owner == rank);
            let sum: usize = own.map(|(live, _)| live).sum();
            assert!(peak * schedule.size.chunks as f64 <= sum as f64 + 1e-9);
        }
    }
    assert_eq!(
        play(ScheduleKind::OneFOneB, 4, 8).0.live_microbatches(),
        [4, 3, 2, 1]
    );
}
