//! Searches for the shortest step.
#![expect(
    clippy::float_cmp,
    reason = "both sides compute the same sums of small integers"
)]

use insta::assert_snapshot;
use merak_partition::{
    Counted, Error, ExactOptions, OneFOneB, ParamBytes, ParamSums, Partition, PhaseCosts, Pipeline,
    PipelineOptions, RankMemory, Recompute, ScheduleChoice, Scheduled, SegmentBytes, SegmentCosts,
    SegmentOptions, StageLayout, StageLoad, StepTime, Stopped, ValueWidth, autopipe, exact,
    lay_out, segment,
};
use merak_pipe::{ActivationBytes, Costs, ScheduleKind, Size, simulate};
use merak_trace::models::{self, TraceOptions};
use proptest::prelude::*;
use serde_json::json;

/// All partitions into nonempty stages.
fn all_partitions(num_segments: usize, num_stages: usize) -> Vec<Vec<usize>> {
    if num_stages == 1 {
        return vec![vec![0, num_segments]];
    }
    let shorter =
        (num_stages - 1..num_segments).flat_map(|last| all_partitions(last, num_stages - 1));
    shorter
        .map(|mut bounds| {
            bounds.push(num_segments);
            bounds
        })
        .collect()
}

fn step(num_microbatches: usize, comm_cost: f64) -> OneFOneB {
    OneFOneB {
        num_microbatches,
        comm_cost,
    }
}

fn costs(times: &[(u32, u32)]) -> SegmentCosts {
    let (forward, backward) = times
        .iter()
        .map(|&(f, b)| (f64::from(f), f64::from(b)))
        .unzip();
    SegmentCosts::new(forward, backward).expect("costs are not negative")
}

fn shortest(costs: &SegmentCosts, num_stages: usize, objective: &impl StepTime) -> Option<f64> {
    let times = all_partitions(costs.len(), num_stages)
        .into_iter()
        .filter_map(|bounds| objective.step_time(&costs.loads(&bounds)));
    times.reduce(f64::min)
}

/// 1F1B on ranks that hold at most this number of segments.
struct Limited(OneFOneB, usize);

impl StepTime for Limited {
    fn step_time(&self, stages: &[StageLoad]) -> Option<f64> {
        let fits = stages.iter().all(|stage| stage.segments.len() <= self.1);
        fits.then(|| self.0.step_time(stages)).flatten()
    }

    fn num_microbatches(&self) -> usize {
        self.0.num_microbatches
    }
}

proptest! {
    #[test]
    fn autopipe_equals_trying_all_partitions(
        times in prop::collection::vec((0_u32..9, 0_u32..9), 1..10),
        num_stages in 1_usize..6,
        num_microbatches in 1_usize..9,
        comm in 0_u32..4,
    ) {
        prop_assume!(times.len() >= num_stages);
        let (costs, step) = (costs(&times), step(num_microbatches, f64::from(comm)));
        let found = autopipe(&costs, num_stages, &step).unwrap();
        prop_assert_eq!(Some(found.step_time), shortest(&costs, num_stages, &step));
        prop_assert_eq!(step.step_time(&costs.loads(&found.bounds)), Some(found.step_time));
        prop_assert_eq!(found.bounds.len(), num_stages + 1);
        prop_assert!(found.bounds.is_sorted_by(|a, b| a < b), "{:?}", found.bounds);
        prop_assert_eq!(found.stopped, Stopped::Proven);
    }

    #[test]
    fn exact_keeps_the_limits_of_the_objective(
        times in prop::collection::vec((0_u32..9, 0_u32..9), 2..9),
        num_stages in 1_usize..5,
        most in 1_usize..5,
    ) {
        prop_assume!(times.len() >= num_stages);
        let (costs, step) = (costs(&times), Limited(step(6, 0.5), most));
        let found = exact(&costs, num_stages, &step, &ExactOptions::default());
        match shortest(&costs, num_stages, &step) {
            Some(shortest) => prop_assert_eq!(found.unwrap().step_time, shortest),
            None => prop_assert!(found.unwrap_err().to_string().ends_with("partitions is within the limits")),
        }
    }

    #[test]
    fn the_step_of_1f1b_is_that_of_the_simulator(
        times in prop::collection::vec((0_u32..9, 0_u32..9), 1..7),
        num_microbatches in 1_usize..12,
        comm in 0_u32..4,
    ) {
        let stages = times.len();
        let schedule = ScheduleKind::OneFOneB.generate(Size::new(stages, num_microbatches)).unwrap();
        let backward = |&(_, b): &(u32, u32)| f64::from(b);
        let expected = simulate(&schedule, &Costs {
            forward: times.iter().map(|&(f, _)| f64::from(f)).collect(),
            input_grad: times.iter().map(backward).collect(),
            weight_grad: vec![0.0; stages],
            recompute: vec![0.0; stages],
            overlap: 1.0,
            hop: vec![f64::from(comm); stages - 1],
        });
        let each: Vec<_> = (0..=stages).collect();
        let loads = costs(&times).loads(&each);
        let found = step(num_microbatches, f64::from(comm)).step_time(&loads);
        prop_assert_eq!(found, Some(expected.unwrap().makespan));
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(8))]

    #[test]
    fn searches_that_cannot_try_all_are_no_worse_than_even_stages(
        times in prop::collection::vec((0_u32..100, 0_u32..200), 120..200),
        num_stages in 5_usize..20,
    ) {
        let (costs, step) = (costs(&times), step(2 * num_stages, 3.0));
        let found = autopipe(&costs, num_stages, &step).unwrap();
        let uniform: Vec<_> = (0..=num_stages).map(|stage| stage * times.len() / num_stages).collect();
        prop_assert!(Some(found.step_time) <= step.step_time(&costs.loads(&uniform)));
        prop_assert!(found.bounds.is_sorted_by(|a, b| a < b), "{:?}", found.bounds);
        prop_assert!(found.tried > 1);
    }
}

#[test]
fn a_large_vocabulary_moves_layers_off_the_last_stage() {
    let config = json!({ "model_type": "gpt2", "n_layer": 4, "n_embd": 64, "n_head": 4, "vocab_size": 20_000 });
    let model = models::from_config(&config).unwrap();
    let graph = model.trace(&TraceOptions::training(2, 32)).unwrap();
    let segments = segment(&graph, &SegmentOptions::for_model(&model.info(), 2)).unwrap();
    let costs = SegmentCosts::counted(&graph, &segments, false).unwrap();
    let found = autopipe(&costs, 2, &step(8, 0.0)).unwrap();
    let partition = Partition::found(segments, "autopipe", found);
    assert_eq!(partition.stage_bounds, [0, 9, 10]);
    assert_snapshot!(partition.method, @"autopipe (2 tried, no partition is better)");
}

#[test]
fn costs_that_are_none_are_refused() {
    let message = |forward: &[f64], backward: &[f64]| {
        let costs = SegmentCosts::new(forward.to_vec(), backward.to_vec());
        costs.unwrap_err().to_string()
    };
    assert_snapshot!(message(&[1.0, 2.0], &[1.0]), @"expected 2 backward costs, one per segment, found 1");
    assert_snapshot!(message(&[1.0, f64::NAN], &[1.0, 1.0]), @"the forward cost of segment 1 is NaN, expected a number from 0 to 1e100");
    assert_snapshot!(message(&[1.0], &[-1.0]), @"the backward cost of segment 0 is -1.0, expected a number from 0 to 1e100");
    assert_snapshot!(message(&[1e308], &[1.0]), @"the forward cost of segment 0 is 1e308, expected a number from 0 to 1e100");
    let few = autopipe(&costs(&[(1, 1)]), 2, &step(4, 0.0)).unwrap_err();
    assert_snapshot!(few, @"the split method cuts the model into 1 segments, which is fewer than the 2 stages of all ranks; use at most 1");
}

#[test]
fn searches_refuse_an_objective_that_makes_no_sense_and_say_what_they_found() {
    let six = costs(&[(1, 2); 6]);
    let message = |step: OneFOneB| {
        let all = [
            autopipe(&six, 2, &step),
            exact(&six, 2, &step, &ExactOptions::default()),
        ];
        let [one, other] = all.map(|found| found.unwrap_err().to_string());
        assert_eq!(one, other);
        one
    };
    assert_snapshot!(message(step(0, 0.0)), @"expected 1 to 33554432 microbatches for 2 stages, found 0");
    assert_snapshot!(message(step(usize::MAX, 0.0)), @"expected 1 to 33554432 microbatches for 2 stages, found 18446744073709551615");
    assert_snapshot!(message(step(4, f64::NAN)), @"the communication cost is NaN, expected a number from 0 to 1e100");
    assert_snapshot!(message(step(4, -1.0)), @"the communication cost is -1.0, expected a number from 0 to 1e100");
    assert_snapshot!(message(step(4, f64::INFINITY)), @"the communication cost is inf, expected a number from 0 to 1e100");
    assert_eq!(step(4, f64::NAN).step_time(&six.loads(&[0, 3, 6])), None);
    assert_eq!(step(0, 0.0).step_time(&six.loads(&[0, 3, 6])), None);
}

/// An objective that returns a given number.
struct Says(f64);

impl StepTime for Says {
    fn step_time(&self, _: &[StageLoad]) -> Option<f64> {
        Some(self.0)
    }

    fn num_microbatches(&self) -> usize {
        4
    }
}

#[test]
fn searches_end_for_the_largest_costs_and_for_objectives_that_give_no_time() {
    // 200 segments have too many partitions to try all.
    let largest = SegmentCosts::new(vec![1e100; 200], vec![1e100; 200]).unwrap();
    let found = autopipe(&largest, 8, &step(16, 1e100)).unwrap();
    assert!(found.step_time.is_finite(), "{found:?}");
    for (costs, stages) in [(&largest, 8), (&costs(&[(1, 1); 4]), 2)] {
        for told in [f64::NAN, f64::INFINITY, -1.0] {
            let error = autopipe(costs, stages, &Says(told)).unwrap_err();
            assert!(
                error
                    .to_string()
                    .contains(&format!("is {told:?}, expected a finite number")),
                "{error}"
            );
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn laying_out_several_stages_per_rank_equals_trying_all_partitions_that_fit(
        times in prop::collection::vec((1_u32..9, 1_u32..9), 6..11),
        kind in prop::sample::select(vec![ScheduleKind::Interleaved, ScheduleKind::ZbV, ScheduleKind::VHalf]),
        num_microbatches in 1_usize..6,
        limit in 4_usize..40,
    ) {
        let size = Size::new(2, num_microbatches).with_chunks(2);
        let step = scheduled(&times, kind, size)
            .with_hops(vec![0.5; times.len()])
            .with_memory(RankMemory::new(limit, ParamBytes::default(), small(times.len())));
        let found = lay_out(&step);
        let costs = step.segment_costs().unwrap();
        if let Some(shortest) = shortest(&costs, size.stages(), &step) { prop_assert_eq!(found.unwrap().step_time, shortest) } else {
            let refused = matches!(found, Err(Error::NoPartition { .. }));
            prop_assert!(refused, "a partition was found where none fits");
        }
    }
}

/// The step of a schedule over segments with these forwards and backwards, half of which are weight
/// gradients.
fn scheduled(times: &[(u32, u32)], kind: ScheduleKind, size: Size) -> Scheduled {
    let phases = times.iter().map(|&(forward, backward)| PhaseCosts {
        forward: f64::from(forward),
        recompute: 0.0,
        input_grad: f64::from(backward) / 2.0,
        weight_grad: f64::from(backward) / 2.0,
    });
    let schedule = kind.generate(size).expect("the size is legal");
    Scheduled::new(schedule, phases.collect()).expect("the schedule is valid")
}

/// Segments that each have a byte of weights, and two for each microbatch, one of which waits for
/// the weight gradients.
fn small(segments: usize) -> Vec<SegmentBytes> {
    let kept = ActivationBytes {
        until_input_grad: vec![1],
        until_weight_grad: vec![1],
    };
    let segment = SegmentBytes {
        params: ParamSums {
            frozen_bytes: 1,
            ..ParamSums::default()
        },
        values: kept.by_stage()[0],
        ..SegmentBytes::default()
    };
    vec![segment; segments]
}

#[test]
fn stages_of_a_v_are_laid_so_that_ranks_have_even_work() {
    // Too many partitions to try all; the output head takes as long as eight layers.
    let mut times = vec![(2, 4); 66];
    times[65] = (16, 32);
    for kind in [ScheduleKind::ZbV, ScheduleKind::Interleaved] {
        let step = scheduled(&times, kind, Size::new(4, 8).with_chunks(2));
        let costs = step.segment_costs().unwrap();
        let found = lay_out(&step).unwrap();
        let loads = step.rank_loads(&costs.loads(&found.bounds));
        let (longest, mean) = (
            loads.iter().copied().fold(0.0, f64::max),
            loads.iter().sum::<f64>() / 4.0,
        );
        assert!(longest <= 1.06 * mean, "{kind}: {loads:?}");
        let even = autopipe(&costs, 8, &step).unwrap();
        assert!(found.step_time <= even.step_time);
    }
}

#[test]
fn a_cut_keeps_a_limit_under_autocast_that_no_cut_keeps_without() {
    let config =
        json!({ "model_type": "gpt2", "n_layer": 4, "n_embd": 16, "n_head": 2, "vocab_size": 101 });
    let model = models::from_config(&config).unwrap();
    let graph = model.trace(&TraceOptions::training(4, 32)).unwrap();
    let segments = segment(&graph, &SegmentOptions::for_model(&model.info(), 2)).unwrap();
    for layout in [StageLayout::Exact, StageLayout::Autopipe] {
        let laid = |value_width, limit| {
            let options = PipelineOptions {
                size: Size::new(2, 4),
                virtual_stages: 1,
                schedule: ScheduleChoice::Named(ScheduleKind::OneFOneB),
                layout: layout.clone(),
                search_microbatches: None,
                comm_cost: None,
                memory_limit: Some(limit),
                param_bytes: ParamBytes::default(),
                value_width,
                recompute: Recompute::Nothing,
            };
            Pipeline::new(graph.clone(), segments.clone(), options, &Counted)
        };
        let least = |width| match laid(width, 1000) {
            Err(Error::StageMemory { least, .. }) => least,
            _ => unreachable!("no stage fits into a thousand bytes"),
        };
        let limit = least(ValueWidth::Autocast);
        assert!(limit < least(ValueWidth::Typed), "{layout:?}");
        let refused = laid(ValueWidth::Typed, limit).unwrap_err();
        assert!(matches!(refused, Error::StageMemory { .. }), "{refused}");
        let cut = laid(ValueWidth::Autocast, limit).unwrap();
        for rank in 0..2 {
            let needed = cut.training_bytes(rank).unwrap().total();
            assert!(needed <= limit, "{layout:?}: {needed} of {limit}");
        }
    }
}

#[test]
fn what_does_not_fit_the_segments_of_a_schedule_is_named() {
    let size = Size::new(2, 4).with_chunks(2);
    let step = || scheduled(&[(1, 2); 6], ScheduleKind::ZbV, size);
    let memory = |segments| RankMemory::new(100, ParamBytes::default(), small(segments));
    let message = |step: Scheduled| lay_out(&step).unwrap_err().to_string();
    assert_snapshot!(message(step().with_memory(memory(5))), @"expected 6 bytes, one per segment, found 5");
    assert_snapshot!(message(step().with_hops(vec![0.0; 7])), @"expected 6 messages, one per segment, found 7");
    assert_snapshot!(message(step().with_hops(vec![f64::NAN; 6])), @"the communication cost is NaN, expected a number from 0 to 1e100");
}

#[test]
fn times_that_no_step_can_have_are_refused_and_not_taken_for_a_lack_of_memory() {
    let costs = PhaseCosts {
        forward: 1e20,
        ..PhaseCosts::default()
    };
    let schedule = ScheduleKind::OneFOneB.generate(Size::new(2, 4)).unwrap();
    let step = Scheduled::new(schedule, vec![costs; 4]).unwrap();
    let refused = lay_out(&step).unwrap_err();
    assert!(matches!(refused, Error::Schedule(_)), "{refused}");
}
