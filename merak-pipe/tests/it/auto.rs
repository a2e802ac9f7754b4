//! The searched schedule against the named ones.

use crate::solved::Solved;
use merak_pipe::{
    Action, ActivationBytes, AutoLimits, ByteLimits, Costs, Kind, ScheduleKind, Size, StageBytes,
    Stopped, auto, simulate,
};
use proptest::prelude::*;
use std::collections::BTreeMap;

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
        let limits = AutoLimits { peak_activations: vec![f64::from(limit); ranks], moves: 60, ..AutoLimits::default() };
        let best = best_named(size, &costs, f64::from(limit));
        let found = auto(size, &costs, &limits).unwrap();
        prop_assert!(found.schedule.validate().is_ok());
        prop_assert!(best.is_none_or(|best| found.simulation.makespan <= best + 1e-9));
        prop_assert_eq!(found.start.is_some(), best.is_some());
        prop_assert!(found.bound <= found.simulation.makespan + 1e-9);
        let again = simulate(&found.schedule, &costs).unwrap();
        prop_assert_eq!(&again, &found.simulation);
        prop_assert!(again.peak_activations.iter().all(|peak| *peak <= f64::from(limit) + 1e-9));
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
        ..AutoLimits::default()
    };
    let found = auto(size, &costs, &limits).unwrap();
    let named = found.start.expect("1f1b keeps the limit").1;
    assert!(found.simulation.makespan < named - 0.05, "{found:?}");
    let again = auto(size, &costs, &limits).unwrap();
    assert_eq!(found.schedule, again.schedule);
}

#[test]
fn the_search_says_why_it_stopped() {
    let costs = Costs::uniform("F=1,I=1,W=1,R=0".parse().unwrap(), 4);
    let found = auto(Size::new(4, 8), &costs, &AutoLimits::default()).unwrap();
    assert_eq!((found.stopped, found.moves), (Stopped::Optimal, 0));
    let half = AutoLimits {
        peak_activations: vec![3.0; 4],
        moves: 5,
        ..AutoLimits::default()
    };
    let costs = Costs::uniform("F=1,I=1.5,W=1,R=0".parse().unwrap(), 8);
    let found = auto(Size::new(4, 8).with_chunks(2), &costs, &half).unwrap();
    assert_eq!(found.stopped, Stopped::Budget);
    assert!(found.moves <= 5, "{}", found.moves);
}

#[test]
fn every_limit_of_a_microbatch_or_more_is_kept() {
    for chunks in 1..=3 {
        let size = Size::new(4, 8).with_chunks(chunks);
        let costs = Costs::uniform("F=1,I=1,W=1,R=0".parse().unwrap(), size.stages());
        for limit in [1.0, 2.0, 2.5, 3.0] {
            let limits = AutoLimits {
                peak_activations: vec![limit; 4],
                moves: 200,
                ..AutoLimits::default()
            };
            let found = auto(size, &costs, &limits).unwrap();
            found.schedule.validate().unwrap();
            let peaks = &found.simulation.peak_activations;
            assert!(
                peaks.iter().all(|peak| *peak <= limit),
                "{limit}: {peaks:?}"
            );
        }
    }
    // One rank alone is short of memory.
    let limits = AutoLimits {
        peak_activations: vec![4.0, 1.0, 4.0, 4.0],
        moves: 200,
        ..AutoLimits::default()
    };
    let costs = Costs::uniform("F=1,I=1,W=1,R=0".parse().unwrap(), 4);
    let found = auto(Size::new(4, 8), &costs, &limits).unwrap();
    assert!(found.simulation.peak_activations[1] <= 1.0);
}

#[test]
fn limits_that_no_schedule_keeps_are_named() {
    let costs = Costs::uniform("F=1,I=1,W=1,R=0".parse().unwrap(), 2);
    let refusal = |limits: &[f64]| {
        let limits = AutoLimits {
            peak_activations: limits.to_vec(),
            ..AutoLimits::default()
        };
        auto(Size::new(2, 4), &costs, &limits)
            .unwrap_err()
            .to_string()
    };
    insta::assert_snapshot!(refusal(&[2.0, 0.5]), @"every rank keeps the activations of at least 1 microbatch, found a limit of 0.5 for rank 1");
    insta::assert_snapshot!(refusal(&[f64::NAN, 2.0]), @"every rank keeps the activations of at least 1 microbatch, found a limit of NaN for rank 0");
    insta::assert_snapshot!(refusal(&[-1.0, 2.0]), @"every rank keeps the activations of at least 1 microbatch, found a limit of -1 for rank 0");
    insta::assert_snapshot!(refusal(&[2.0]), @"expected a limit of memory for each of 2 ranks, found 1");
}

/// A walk over every order of actions of a small pipeline under a placement.
struct All<'a> {
    placement: &'a [usize],
    microbatches: usize,
    costs: &'a Costs,
    done: Vec<[usize; 3]>,
    /// When forwards and input gradients end, by stage and microbatch.
    ends: Vec<[Vec<f64>; 2]>,
    free: Vec<f64>,
    best: f64,
}

impl All<'_> {
    fn cost(&self, stage: usize, kind: usize) -> f64 {
        let lists = [
            &self.costs.forward,
            &self.costs.input_grad,
            &self.costs.weight_grad,
        ];
        lists[kind][stage]
    }

    /// When the next action of a kind can begin on a stage, as far as messages go.
    fn ready(&self, stage: usize, kind: usize) -> Option<f64> {
        let m = self.done[stage][kind];
        let last = self.placement.len() - 1;
        let hop = |other: usize| {
            if self.placement[other] == self.placement[stage] {
                0.0
            } else {
                self.costs.hop[stage.min(other)]
            }
        };
        (m < self.microbatches).then_some(())?;
        match kind {
            0 if stage == 0 => Some(0.0),
            0 => self.ends[stage - 1][0]
                .get(m)
                .map(|end| end + hop(stage - 1)),
            1 if stage == last => self.ends[last][0].get(m).copied(),
            1 => self.ends[stage + 1][1]
                .get(m)
                .map(|end| end + hop(stage + 1)),
            _ => self.ends[stage][1].get(m).copied(),
        }
    }

    /// Among the actions that can come next, the one that could end first decides on a rank;
    /// every order worth trying goes on with one of this rank's actions that can begin before
    /// that.
    fn descend(&mut self) {
        let stages = self.placement.len();
        let mut bound: f64 = 0.0;
        for rank in 0..self.free.len() {
            let own = (0..stages).filter(|s| self.placement[*s] == rank);
            let left: f64 = own
                .flat_map(|s| (0..3).map(move |k| (s, k)))
                .map(|(s, k)| (self.microbatches - self.done[s][k]) as f64 * self.cost(s, k))
                .sum();
            bound = bound.max(self.free[rank] + left);
        }
        if bound >= self.best - 1e-9 {
            return;
        }
        let open: Vec<_> = (0..stages)
            .flat_map(|s| (0..3).map(move |k| (s, k)))
            .filter_map(|(s, k)| Some((s, k, self.ready(s, k)?.max(self.free[self.placement[s]]))))
            .collect();
        let first = open
            .iter()
            .min_by(|a, b| (a.2 + self.cost(a.0, a.1)).total_cmp(&(b.2 + self.cost(b.0, b.1))));
        let Some(&(stage, kind, start)) = first else {
            self.best = self.best.min(bound);
            return;
        };
        let (rank, by) = (self.placement[stage], start + self.cost(stage, kind));
        for (s, k, start) in open {
            if self.placement[s] != rank || start >= by {
                continue;
            }
            let (end, before) = (start + self.cost(s, k), self.free[rank]);
            self.done[s][k] += 1;
            self.free[rank] = end;
            if k < 2 {
                self.ends[s][k].push(end);
            }
            self.descend();
            if k < 2 {
                self.ends[s][k].pop();
            }
            self.free[rank] = before;
            self.done[s][k] -= 1;
        }
    }
}

/// The shortest makespan of all orders of a small pipeline under a placement.
fn shortest(placement: &[usize], microbatches: usize, costs: &Costs) -> f64 {
    let stages = placement.len();
    let mut all = All {
        placement,
        microbatches,
        costs,
        done: vec![[0; 3]; stages],
        ends: vec![[Vec::new(), Vec::new()]; stages],
        free: vec![0.0; placement.iter().max().map_or(0, |last| last + 1)],
        best: f64::INFINITY,
    };
    all.descend();
    all.best
}

/// All ways to lay `chunks` stages on each of `ranks` ranks, up to the names of the ranks.
fn placements(ranks: usize, chunks: usize) -> Vec<Vec<usize>> {
    let mut heads = vec![Vec::new()];
    for _ in 0..ranks * chunks {
        let longer = heads.iter().flat_map(|head: &Vec<usize>| {
            let new = head.iter().max().map_or(0, |last| last + 1);
            let fits =
                move |rank: &usize| head.iter().filter(|other| *other == rank).count() < chunks;
            (0..=new.min(ranks - 1))
                .filter(fits)
                .map(|rank| [head.clone(), vec![rank]].concat())
        });
        heads = longer.collect();
    }
    heads
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]
    #[test]
    fn no_placement_has_a_schedule_below_the_bound_and_auto_is_within_a_percent_of_the_shortest(
        (ranks, microbatches, chunks) in prop_oneof![Just((2, 3, 1)), Just((3, 3, 1)), Just((2, 4, 1)), Just((2, 2, 2)), Just((3, 1, 2)), Just((2, 1, 3))],
        times in proptest::collection::vec(50_u32..200, 18),
        hop in 0_u32..40,
    ) {
        let size = Size::new(ranks, microbatches).with_chunks(chunks);
        let stages = size.stages();
        let of = |kind: usize| times[kind * stages..][..stages].iter().map(|time| f64::from(*time)).collect();
        let costs = Costs {
            forward: of(0),
            input_grad: of(1),
            weight_grad: of(2),
            recompute: vec![0.0; stages],
            overlap: 1.0,
            hop: vec![f64::from(hop); stages - 1],
        };
        let all = placements(ranks, chunks).into_iter().map(|placement| shortest(&placement, microbatches, &costs));
        let shortest = all.fold(f64::INFINITY, f64::min);
        let found = auto(size, &costs, &AutoLimits { moves: 20_000, ..AutoLimits::default() }).unwrap();
        let makespan = found.simulation.makespan;
        prop_assert!(found.bound <= shortest + 1e-6, "{} is not below {}", found.bound, shortest);
        prop_assert!(found.stopped != Stopped::Optimal || makespan <= shortest + 1e-6);
        prop_assert!(makespan <= 1.01 * shortest, "{} is too far above {}", makespan, shortest);
    }
}

/// A small pipeline whose shortest makespan is known; see `tests/goldens/README.md`.
#[test]
fn searched_schedules_are_within_a_percent_of_the_shortest_that_a_solver_finds() {
    let lines = include_str!("../goldens/optima.jsonl").lines();
    let mut above = Vec::new();
    // By chunks and ranks: the longest above the shortest known, cases, those known to be shortest.
    let mut worst = BTreeMap::<(usize, usize), (f64, usize, usize)>::default();
    for line in lines {
        let case: Solved = serde_json::from_str(line).unwrap();
        let (size, found) = (case.size(), case.search().unwrap());
        let makespan = found.simulation.makespan;
        assert!(
            found.bound <= case.optimum + 1e-6,
            "{line}: {}",
            found.bound
        );
        assert!(
            found.stopped != Stopped::Optimal || makespan <= case.optimum + 1e-6,
            "{line}"
        );
        let proven = case.bound + 0.5 > case.optimum;
        // Beyond six stages the solver tried two placements alone.
        assert!(
            !proven || size.stages() > 6 || makespan + 1e-6 > case.optimum,
            "{line}: {makespan}"
        );
        let gap = makespan / case.optimum - 1.0;
        let of_size = worst
            .entry((case.chunks, case.ranks))
            .or_insert((f64::NEG_INFINITY, 0, 0));
        *of_size = (
            of_size.0.max(gap),
            of_size.1 + 1,
            of_size.2 + usize::from(found.stopped == Stopped::Optimal),
        );
        if gap > 0.01 {
            above.push(format!("{makespan} for {line}"));
        }
    }
    println!("{worst:?}");
    assert_eq!(worst.values().map(|(_, cases, _)| cases).sum::<usize>(), 81);
    assert!(
        worst
            .iter()
            .all(|((chunks, _), (gap, ..))| *chunks > 1 || *gap < 1e-9),
        "{worst:?}"
    );
    assert!(above.is_empty(), "{worst:?}\n{above:#?}");
}

#[test]
fn a_search_over_32_ranks_and_128_microbatches_ends_in_time() {
    for chunks in [1, 2] {
        let size = Size::new(32, 128).with_chunks(chunks);
        let mut costs = Costs::uniform("F=1,I=1.1,W=0.9,R=0,C=0.1".parse().unwrap(), size.stages());
        costs.forward[5] = 1.3;
        let start = std::time::Instant::now();
        let found = auto(size, &costs, &AutoLimits::default()).unwrap();
        let took = start.elapsed();
        assert!(
            found
                .start
                .is_some_and(|(_, named)| found.simulation.makespan <= named)
        );
        assert!(took < std::time::Duration::from_mins(1), "{took:?}");
    }
}

#[test]
fn random_costs_leave_much_to_gain_over_the_named_schedules() {
    // Where the costs differ from stage to stage, list scheduling alone finds shorter schedules
    // most of the time.
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
                overlap: 1.0,
                hop: vec![0.1; stages - 1],
            };
            let limits = AutoLimits {
                peak_activations: vec![ranks as f64; ranks],
                moves: 0,
                ..AutoLimits::default()
            };
            let found = auto(size, &costs, &limits).unwrap();
            let named = found.start.expect("some keep the memory of 1f1b").1;
            assert!(found.simulation.makespan <= named);
            cases += 1;
            shorter += usize::from(found.simulation.makespan < 0.99 * named);
        }
    }
    assert!(2 * shorter >= cases, "{shorter} of {cases}");
}

#[test]
fn limits_in_bytes_are_kept_and_what_only_input_gradients_need_is_free_after_them() {
    let size = Size::new(4, 8);
    let costs = Costs::uniform("F=1,I=1,W=1,R=0".parse().unwrap(), 4);
    let search = |bytes: &str, peaks: &[u64]| {
        let kept = ActivationBytes::parse(bytes, 4).unwrap();
        let limits = AutoLimits {
            bytes: Some(ByteLimits::new(&kept, peaks.to_vec())),
            moves: 20_000,
            ..AutoLimits::default()
        };
        let found = auto(size, &costs, &limits).unwrap();
        let kept = found.schedule.peak_bytes(&kept).unwrap();
        assert!(
            kept.iter().zip(peaks).all(|(kept, limit)| kept <= limit),
            "{kept:?}"
        );
        assert!(found.bound <= found.simulation.makespan + 1e-9);
        found.simulation.makespan
    };
    // Where all bytes wait for weight gradients, a limit of bytes is a limit of counts.
    let counted = AutoLimits {
        peak_activations: vec![4.0, 3.0, 2.0, 1.0],
        moves: 20_000,
        ..AutoLimits::default()
    };
    let counted = auto(size, &costs, &counted).unwrap().simulation.makespan;
    let weights = search("W=400", &[1600, 1200, 800, 400]);
    assert!((weights - counted).abs() < 1e-9, "{weights} {counted}");
    // Where a quarter of them does, weight gradients may wait within the same bytes.
    let most_for_inputs = search("I=300,W=100", &[600; 4]);
    let all_for_weights = search("W=400", &[600; 4]);
    assert!(
        most_for_inputs < all_for_weights - 0.5,
        "{most_for_inputs} {all_for_weights}"
    );
    // One microbatch after the other, on stages that differ.
    search("I=1:2:3:4,W=4:3:2:9", &[5, 5, 5, 13]);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(16))]
    #[test]
    fn every_limit_of_bytes_into_which_a_microbatch_fits_is_kept(
        ranks in 1_usize..=4, microbatches in 1_usize..=6, chunks in 1_usize..=3,
        bytes in proptest::collection::vec(0_u64..50, 24), more in proptest::collection::vec(0_u64..100, 4),
    ) {
        let size = Size::new(ranks, microbatches).with_chunks(chunks);
        let stages = size.stages();
        let costs = Costs::uniform("F=1,I=1,W=1,R=0".parse().unwrap(), stages);
        let kept = ActivationBytes {
            until_input_grad: bytes[..stages].to_vec(),
            until_weight_grad: bytes[12..][..stages].to_vec(),
        };
        let needed = |rank: usize| -> u64 {
            let own = (rank..stages).step_by(ranks);
            own.map(|stage| bytes[stage] + bytes[12 + stage]).sum()
        };
        let peaks: Vec<_> = (0..ranks).map(|rank| needed(rank) + more[rank]).collect();
        let limits = ByteLimits::new(&kept, peaks.clone());
        let limits = AutoLimits { bytes: Some(limits), moves: 200, ..AutoLimits::default() };
        let found = auto(size, &costs, &limits).unwrap();
        let found_peaks = found.schedule.peak_bytes(&kept).unwrap();
        prop_assert!(found_peaks.iter().zip(&peaks).all(|(found, limit)| found <= limit));
        prop_assert!(found.bound <= found.simulation.makespan + 1e-9);
    }
}

#[test]
fn bytes_into_which_no_microbatch_fits_are_named() {
    let costs = Costs::uniform("F=1,I=1,W=1,R=0".parse().unwrap(), 2);
    let refusal = |peaks: &[u64]| {
        let limits = AutoLimits {
            bytes: Some(ByteLimits::new(
                &ActivationBytes::parse("I=3:4,W=1", 2).unwrap(),
                peaks.to_vec(),
            )),
            ..AutoLimits::default()
        };
        auto(Size::new(2, 4), &costs, &limits)
            .unwrap_err()
            .to_string()
    };
    insta::assert_snapshot!(refusal(&[9, 4]), @"for one microbatch the stages of rank 1 need 5 bytes, found a limit of 4 bytes");
    insta::assert_snapshot!(refusal(&[9]), @"expected a limit of memory for each of 2 ranks, found 1");
}

/// Bytes of a stage whose whole backward needs less than its halves.
fn recomputing() -> StageBytes {
    StageBytes {
        forward: 11,
        kept: 10,
        backward: 18,
        input_half: 24,
        between_halves: 22,
        weight_half: 22,
        recompute: 20,
        recomputed: 20,
        backward_after_recompute: 22,
        input_half_after_recompute: 24,
    }
}

fn within_bytes(bytes: ByteLimits, moves: usize) -> AutoLimits {
    AutoLimits {
        bytes: Some(bytes),
        moves,
        ..AutoLimits::default()
    }
}

#[test]
fn whole_backwards_and_halves_share_the_bytes_that_whole_backwards_need() {
    let size = Size::new(4, 8);
    let costs = Costs::uniform("F=1,I=1,W=1,R=0.5".parse().unwrap(), 4);
    let usual = ScheduleKind::OneFOneB.generate(size).unwrap();
    let bytes = vec![recomputing(); 4];
    let most = usual.peak_bytes_of(&bytes).unwrap()[0];
    let limits = ByteLimits {
        stages: bytes.clone(),
        without_recompute: Vec::new(),
        fixed: Vec::new(),
        peaks: vec![most; 4],
    };
    let found = auto(size, &costs, &within_bytes(limits, 20_000)).unwrap();
    let peaks = found.schedule.peak_bytes_of(&bytes).unwrap();
    assert!(peaks.iter().all(|peak| *peak <= most), "{peaks:?}");
    // No schedule of halves alone keeps as many microbatches, and whole backwards alone are slower.
    let has = |kind| {
        let mut actions = found.schedule.actions.iter().flatten();
        actions.any(|action| action.kind == kind)
    };
    assert!(has(Kind::Backward) && has(Kind::WeightGrad));
    found.schedule.validate().unwrap();
    let named = simulate(&usual, &costs).unwrap().makespan;
    assert!(
        found.simulation.makespan < 0.95 * named,
        "{} {named}",
        found.simulation.makespan
    );
    let halves = ByteLimits {
        stages: vec![
            StageBytes {
                backward: 24,
                ..recomputing()
            };
            4
        ],
        without_recompute: Vec::new(),
        fixed: Vec::new(),
        peaks: vec![most; 4],
    };
    let halves = auto(size, &costs, &within_bytes(halves, 20_000)).unwrap();
    assert!(found.simulation.makespan < halves.simulation.makespan - 0.1);
}

#[test]
fn with_room_for_all_halves_the_search_is_not_slower_than_zb_h2() {
    let size = Size::new(4, 8);
    let costs = Costs::uniform("F=1,I=1,W=1,R=0".parse().unwrap(), 4);
    let zb_h2 = ScheduleKind::ZbH2.generate(size).unwrap();
    let bytes = vec![recomputing(); 4];
    let limits = ByteLimits {
        peaks: zb_h2.peak_bytes_of(&bytes).unwrap(),
        stages: bytes,
        without_recompute: Vec::new(),
        fixed: Vec::new(),
    };
    let found = auto(size, &costs, &within_bytes(limits, 20_000)).unwrap();
    let named = simulate(&zb_h2, &costs).unwrap().makespan;
    assert!(found.simulation.makespan <= named);
}

#[test]
fn fixed_bytes_and_stages_that_recompute_nothing_count_against_the_limit() {
    let size = Size::new(2, 4);
    let costs = Costs::uniform("F=1,I=1,W=1,R=1".parse().unwrap(), 2);
    let search = |fixed: Vec<u64>, peak: u64| {
        let plain = StageBytes {
            kept: 20,
            forward: 20,
            backward: 20,
            ..recomputing()
        };
        let limits = ByteLimits {
            stages: vec![recomputing(); 2],
            without_recompute: vec![plain; 2],
            fixed,
            peaks: vec![peak; 2],
        };
        auto(size, &costs, &within_bytes(limits, 2_000))
    };
    let whole = search(Vec::new(), 28).unwrap();
    let same = search(vec![5, 3], 33).unwrap();
    assert_eq!(whole.schedule.actions, same.schedule.actions);
    // 18 bytes hold one microbatch, in which the last stage recomputes like the first.
    let one = search(Vec::new(), 18).unwrap();
    assert_eq!(one.simulation.peak_activations, [1.0, 1.0]);
    assert!(one.schedule.no_recompute.is_empty());
    insta::assert_snapshot!(search(vec![5, 3], 22).unwrap_err(), @"for one microbatch the stages of rank 0 need 23 bytes, found a limit of 22 bytes");
}

/// The peak of a rank, walked with one entry for each microbatch and stage.
fn walked_peak(actions: &[Action], stages: &[StageBytes]) -> u64 {
    let mut held = BTreeMap::new();
    let mut peak = 0;
    for action in actions {
        let bytes = &stages[action.stage.0];
        let place = (action.stage, action.microbatch);
        let is_ahead = held.get(&place).is_some_and(|(_, recomputed)| *recomputed);
        held.remove(&place);
        let others: u64 = held.values().map(|(bytes, _)| *bytes).sum();
        let (during, left) = match action.kind {
            Kind::Forward => (bytes.forward, bytes.kept),
            Kind::Recompute => (bytes.recompute, bytes.recomputed),
            Kind::Backward if is_ahead => (bytes.backward_after_recompute, 0),
            Kind::Backward => (bytes.backward, 0),
            Kind::InputGrad if is_ahead => (bytes.input_half_after_recompute, bytes.between_halves),
            Kind::InputGrad => (bytes.input_half, bytes.between_halves),
            Kind::WeightGrad => (bytes.weight_half, 0),
        };
        peak = peak.max(others + during);
        held.insert(place, (left, action.kind == Kind::Recompute));
    }
    peak
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]
    #[test]
    fn measured_bytes_of_each_action_stay_below_the_limits(
        ranks in 1_usize..=4, microbatches in 1_usize..=6, chunks in 1_usize..=2,
        bytes in proptest::collection::vec(proptest::collection::vec(0_u64..20, 7), 8),
        more in proptest::collection::vec(0_u64..100, 4),
    ) {
        let size = Size::new(ranks, microbatches).with_chunks(chunks);
        let of = |more: &Vec<u64>| StageBytes {
            kept: more[0],
            forward: more[0] + more[1],
            backward: more[0] + more[2],
            between_halves: more[3],
            input_half: more[0].max(more[3]) + more[4],
            weight_half: more[3] + more[5],
            recompute: more[0] + more[6],
            recomputed: more[0] + more[6],
            backward_after_recompute: more[0] + more[2].max(more[6]),
            input_half_after_recompute: more[0].max(more[3]) + more[4].max(more[6]),
        };
        let stages: Vec<_> = bytes[..size.stages()].iter().map(of).collect();
        let besides = |stage: &StageBytes| {
            let halves = stage.input_half.max(stage.weight_half);
            stage.forward.max(stage.backward.min(halves)) - stage.kept
        };
        let needed = |rank: usize| {
            let own = || stages.iter().skip(rank).step_by(ranks);
            own().map(|stage| stage.kept).sum::<u64>() + own().map(besides).max().unwrap_or(0)
        };
        let peaks: Vec<_> = (0..ranks).map(|rank| needed(rank) + more[rank]).collect();
        let limits = ByteLimits {
            stages: stages.clone(), without_recompute: Vec::new(), fixed: Vec::new(), peaks: peaks.clone(),
        };
        let costs = Costs::uniform("F=1,I=1,W=1,R=1".parse().unwrap(), size.stages());
        let found = auto(size, &costs, &within_bytes(limits, 400)).unwrap();
        found.schedule.validate().unwrap();
        prop_assert!(found.bound <= found.simulation.makespan + 1e-9);
        let found_peaks = found.schedule.peak_bytes_of(&stages).unwrap();
        prop_assert!(found_peaks.iter().zip(&peaks).all(|(found, limit)| found <= limit));
        for (actions, peak) in found.schedule.actions.iter().zip(found_peaks) {
            prop_assert_eq!(walked_peak(actions, &stages), peak);
        }
    }
}
