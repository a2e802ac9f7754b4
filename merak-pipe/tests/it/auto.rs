//! The searched schedule against the named ones.

use merak_pipe::{AutoLimits, Costs, ScheduleKind, Size, Stopped, UnitCosts, auto, simulate};
use proptest::prelude::*;

/// The makespan of the best named schedule that keeps the limit, by hand.
fn best_named(size: Size, costs: &Costs, limit: f64) -> Option<f64> {
    let fits = |kind: &ScheduleKind| {
        let schedule = kind.generate(size).ok()?;
        let simulation = simulate(&schedule, costs).ok()?;
        let kept = simulation
            .peak_activations
            .iter()
            .all(|peak| *peak <= limit + 1e-9);
        kept.then_some(simulation.makespan)
    };
    let kinds = ScheduleKind::ALL.iter().filter(|kind| kind.is_training());
    kinds.filter_map(fits).min_by(f64::total_cmp)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(32))]
    #[test]
    fn auto_is_valid_and_at_least_as_good_as_every_named_schedule(
        ranks in 1_usize..=8, extra in 0_usize..=12, chunks in 1_usize..=3, limit in 1_u8..=12,
        times in proptest::collection::vec(0.25_f64..3.0, 120),
    ) {
        let size = Size::new(ranks, 1 + extra).with_chunks(chunks);
        let stages = size.stages();
        let mut times = times.chunks(24).map(|list| list[..stages].to_vec());
        let mut next = || times.next().expect("five lists");
        let mut costs = Costs {
            forward: next(),
            input_grad: next(),
            weight_grad: next(),
            recompute: next(),
            hop: next(),
            overlap: 1.0,
        };
        costs.hop.truncate(stages - 1);
        let limits = AutoLimits { peak_activations: vec![f64::from(limit); ranks], moves: 60 };
        let best = best_named(size, &costs, f64::from(limit));
        match (auto(size, &costs, &limits), best) {
            (Ok(found), Some(best)) => {
                prop_assert!(found.schedule.validate().is_ok());
                prop_assert!(found.simulation.makespan <= best + 1e-9);
                prop_assert!(found.bound <= found.simulation.makespan + 1e-9);
                let again = simulate(&found.schedule, &costs).unwrap();
                prop_assert_eq!(&again, &found.simulation);
                prop_assert!(again.peak_activations.iter().all(|peak| *peak <= f64::from(limit) + 1e-9));
            }
            (Err(error), None) => prop_assert!(error.to_string().contains("keeps the limit"), "{}", error),
            (found, best) => prop_assert!(false, "{:?} {:?}", found.map(|f| f.start), best),
        }
    }
}

#[test]
fn the_search_improves_on_every_named_schedule_where_stages_differ() {
    let size = Size::new(4, 8);
    let mut costs = Costs::uniform("F=1,I=1,W=1,R=0,C=0.2".parse().unwrap(), 4);
    costs.forward[1] = 1.6;
    costs.weight_grad[2] = 0.5;
    let limits = AutoLimits {
        peak_activations: vec![4.0; 4],
        moves: 2000,
    };
    let found = auto(size, &costs, &limits).unwrap();
    assert!(
        found.simulation.makespan < found.start.1 - 0.05,
        "{found:?}"
    );
    let again = auto(size, &costs, &limits).unwrap();
    assert_eq!(found.schedule, again.schedule);
}

#[test]
fn the_search_says_why_it_stopped() {
    let costs = Costs::uniform("F=1,I=1,W=1,R=0".parse().unwrap(), 4);
    let found = auto(Size::new(4, 8), &costs, &AutoLimits::default()).unwrap();
    assert_eq!((found.stopped, found.moves), (Stopped::Optimal, 0));
    let tight = AutoLimits {
        peak_activations: vec![3.0; 4],
        moves: 5,
    };
    let error = auto(Size::new(4, 8), &costs, &tight).unwrap_err();
    assert_eq!(
        error.to_string(),
        "no schedule of this size keeps the limit of activations; the smallest one keeps 4 microbatches"
    );
    let costs = Costs::uniform(UnitCosts::default(), 8);
    let half = AutoLimits {
        peak_activations: vec![3.0; 4],
        moves: 5,
    };
    let found = auto(Size::new(4, 8).with_chunks(2), &costs, &half).unwrap();
    assert_eq!((found.stopped, found.moves), (Stopped::Budget, 5));
    assert_eq!(found.start.0, ScheduleKind::VHalf);
}

#[test]
fn random_costs_leave_much_to_gain_over_the_named_schedules() {
    // Where every stage costs something else, list scheduling alone finds shorter schedules most of the time.
    let mut state = 7_u64;
    let mut draw = || {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1);
        0.5 + (state >> 40) as f64 / f64::from(1_u32 << 24)
    };
    let (mut shorter, mut cases) = (0, 0);
    for ranks in 2..=8 {
        for chunks in [1, 2] {
            let size = Size::new(ranks, 2 * ranks).with_chunks(chunks);
            let mut list = |len: usize| (0..len).map(|_| draw()).collect::<Vec<f64>>();
            let stages = size.stages();
            let costs = Costs {
                forward: list(stages),
                input_grad: list(stages),
                weight_grad: list(stages),
                recompute: vec![0.0; stages],
                hop: vec![0.1; stages - 1],
                overlap: 1.0,
            };
            let limits = AutoLimits {
                peak_activations: vec![ranks as f64; ranks],
                moves: 0,
            };
            let found = auto(size, &costs, &limits).unwrap();
            assert!(found.simulation.makespan <= found.start.1);
            cases += 1;
            shorter += usize::from(found.simulation.makespan < 0.99 * found.start.1);
        }
    }
    assert!(2 * shorter >= cases, "{shorter} of {cases}");
}
