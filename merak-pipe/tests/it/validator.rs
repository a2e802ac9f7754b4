//! What the validator proves, and what it refuses.

use crate::played::played;
use merak_pipe::{Action, Kind, Schedule, ScheduleKind, Size};
use proptest::prelude::*;

fn refusal(csv: &str, size: Size) -> String {
    let schedule = Schedule::from_csv("mine", csv, size).expect("the text is well formed");
    schedule
        .validate()
        .expect_err("the schedule is wrong")
        .to_string()
}

#[test]
fn every_rule_has_its_message() {
    let two = Size::new(2, 2);
    let good = "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n";
    Schedule::from_csv("mine", good, two)
        .unwrap()
        .validate()
        .unwrap();
    insta::assert_snapshot!(refusal("0F0,0F1,0B0\n1F0,1B0,1F1,1B1\n", two), @"rank 0 never runs 0B1");
    insta::assert_snapshot!(refusal("0F0,0F1,0I0,0W0,0I1\n1F0,1B0,1F1,1B1\n", two), @"rank 0 never runs 0W1");
    insta::assert_snapshot!(refusal("0F0,0F1,0B0,0B1,0B0\n1F0,1B0,1F1,1B1\n", two), @"rank 0, position 5: 0B0 comes a second time");
    insta::assert_snapshot!(refusal("0F0,0F1,0B0,0I0\n1F0,1B0,1F1,1B1\n", two), @"rank 0, position 4: 0I0 repeats a part of 0B0: a full backward is an input and a weight gradient");
    insta::assert_snapshot!(refusal("0F0,0W0,0I0,0F1,0B1\n1F0,1B0,1F1,1B1\n", two), @"rank 0, position 2: 0W0 comes before 0I0");
    insta::assert_snapshot!(refusal("0F0,0F1,0B0,0R0,0B1\n1F0,1B0,1F1,1B1\n", two), @"rank 0, position 4: 0R0 comes after 0B0, which needs it");
    insta::assert_snapshot!(refusal("0F0,0F1,0I0,0I1,0W1,0W0\n1F0,1B0,1F1,1B1\n", two), @"rank 0, position 6: 0W0 adds its weight gradients after those of microbatch 1; the order must ascend");
    insta::assert_snapshot!(refusal("0F1,0F0,0B0,0B1\n1F0,1B0,1F1,1B1\n", two), @"rank 1, position 1: 1F0 takes the activation of microbatch 0 from stage 0 to stage 1 where the other end sends the activation of microbatch 1 from stage 0 to stage 1");
    insta::assert_snapshot!(refusal("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1\n", two), @"deadlock: rank 0 waits at position 2 (0B0) for the gradient of microbatch 0 from stage 1 to stage 0");
    insta::assert_snapshot!(refusal("0F0,0F1,1F0,1B0,0B0,1F1,1B1,0B1\n2F0,2B0,2F1,2B1,3F0,3B0,3F1,3B1\n", two.with_chunks(2)), @"deadlock: rank 0 waits at position 4 (1B0) for the gradient of microbatch 0 from stage 2 to stage 1");
}

#[test]
fn the_first_action_of_a_rank_stands_at_position_1() {
    let size = Size::new(1, 1);
    assert_eq!(
        refusal("0B0,0F0\n", size),
        "rank 0, position 1: 0B0 comes before 0F0"
    );
}

#[test]
fn what_lies_outside_the_size_is_refused_when_read() {
    let read = |csv| {
        Schedule::from_csv("mine", csv, Size::new(2, 1))
            .unwrap_err()
            .to_string()
    };
    insta::assert_snapshot!(read("0F0,0B0\n2F0,2B0\n"), @"rank 1, position 1: 2F0 names a stage beyond the 2 of the schedule");
    insta::assert_snapshot!(read("0F0,0B0\n1F0,1B1\n"), @"rank 1, position 2: 1B1 names a microbatch beyond the 1 of the schedule");
    insta::assert_snapshot!(read("0F0,0B0\n0F0,1F0,1B0\n"), @"rank 1, position 1: 0F0 belongs to a stage that rank 0 runs");
    insta::assert_snapshot!(read("0F0,0B0\n1F0,1B0\n\n0F0"), @"expected one list of actions for each of 2 ranks, found 3");
    insta::assert_snapshot!(read("0F0,0B0\n,\n"), @"no rank runs stage 1");
}

#[test]
fn buffers_and_recomputation_are_the_schedules_own_promises() {
    let mut schedule = ScheduleKind::OneFOneB.generate(Size::new(2, 4)).unwrap();
    schedule.buffers[0] = 1;
    insta::assert_snapshot!(schedule.validate().unwrap_err(), @"rank 0, position 2: 0F1 overwrites microbatch 0 in buffer 0 of 1");
    schedule.buffers.clear();
    insta::assert_snapshot!(schedule.validate().unwrap_err(), @"rank 0, position 1: 0F0 runs on a stage without buffers");
    let mut schedule = ScheduleKind::ShiftedCriticalPath
        .generate(Size::new(2, 4))
        .unwrap();
    schedule.actions[1].insert(1, "1R0".parse().unwrap());
    insta::assert_snapshot!(schedule.validate().unwrap_err(), @"rank 1, position 2: 1R0 recomputes on a stage that keeps its activations in this schedule");
}

#[test]
fn stages_are_spread_evenly() {
    let csv = "0F0,1F0,2F0,2B0,1B0,0B0\n3F0,3B0\n";
    insta::assert_snapshot!(refusal(csv, Size::new(2, 1).with_chunks(2)), @"rank 0 runs 3 stages, expected 2: all ranks run as many");
}

/// Any generated schedule of moderate size.
fn schedules() -> impl Strategy<Value = Schedule> {
    let kinds = proptest::sample::select(ScheduleKind::ALL.to_vec());
    (kinds, 1_usize..=6, 0_usize..=8).prop_map(|(kind, ranks, extra)| {
        let microbatches = kind.min_microbatches(ranks) + extra;
        let chunks = kind.fixed_chunks().unwrap_or(2);
        kind.generate(Size::new(ranks, microbatches).with_chunks(chunks))
            .expect("the size is legal")
    })
}

/// The schedule with each full backward in two halves, the weight gradient `delay` actions later.
/// One that has halves already stays as it is.
fn split(schedule: &Schedule, delay: usize) -> Schedule {
    let mut all = schedule.actions.iter().flatten();
    if all.any(|action| action.kind == Kind::WeightGrad) {
        return schedule.clone();
    }
    let halves = |actions: &Vec<Action>| {
        let mut out = Vec::new();
        let mut waiting = std::collections::VecDeque::new();
        for (position, &action) in actions.iter().enumerate() {
            let with = |kind| Action { kind, ..action };
            if action.kind == Kind::Backward {
                out.push(with(Kind::InputGrad));
                waiting.push_back((position + delay, with(Kind::WeightGrad)));
            } else {
                out.push(action);
            }
            while let Some((_, action)) = waiting.pop_front_if(|(due, _)| *due <= position) {
                out.push(action);
            }
        }
        out.extend(waiting.into_iter().map(|(_, action)| action));
        out
    };
    let actions = schedule.actions.iter().map(halves).collect();
    Schedule::new("split", schedule.size, actions)
}

#[test]
fn a_recompute_may_come_long_before_its_gradient() {
    // Rank 0 recomputes microbatch 0 before it sends the activation that rank 1 needs before its
    // first backward.
    let csv = "0F0,0R0,0F1,0B0,0R1,0B1\n1F0,1F1,1B0,1B1\n";
    let schedule = Schedule::from_csv("mine", csv, Size::new(2, 2)).unwrap();
    schedule.validate().unwrap();
    let names = |rank: usize| {
        let streams = schedule.instructions().unwrap();
        let names: Vec<_> = streams[rank]
            .iter()
            .map(merak_pipe::Instruction::name)
            .collect();
        names.join(" ")
    };
    // The first recompute receives nothing; the second stands beside its backward and receives the
    // gradient.
    insta::assert_snapshot!(names(0), @"LoadMicroBatch PreCheckpointForwardPass RestoreRecomputeStatus SendActivation RecomputeForwardPass RestoreRecomputeStatus LoadMicroBatch PreCheckpointForwardPass SendActivation RecvGrad BackwardPass RecomputeRecvGrad BackwardPass RestoreRecomputeStatus ReduceTiedGrads ReduceGrads OptimizerStep");
    let costs = merak_pipe::UnitCosts::default();
    let costs = merak_pipe::Costs::uniform(costs, 2);
    let simulation = merak_pipe::simulate(&schedule, &costs).unwrap();
    let start = |text: &str| {
        let spans = simulation.timeline.ranks.iter().flatten();
        let mut spans = spans.filter(|span| span.action.to_string() == text);
        spans.next().expect("the action is there").start
    };
    assert!(start("0R0") < start("1F0") + 0.5, "nothing is waited for");
    assert!(
        merak_pipe::json(&schedule, &costs)
            .unwrap()
            .contains(r#"["RecomputeForwardPass",{"buffer_id":0}]"#)
    );
}

/// The schedule with an `R` at the chosen place between each forward and its backward.
fn with_recomputes(schedule: &Schedule, choices: &[prop::sample::Index]) -> Schedule {
    let mut choices = choices.iter().cycle();
    let mut schedule = schedule.clone();
    schedule.no_recompute.clear();
    // Pairs are told by places in the lists, which move.
    schedule.pairs.clear();
    for list in &mut schedule.actions {
        list.retain(|action| action.kind != Kind::Recompute);
        for forward in list.clone() {
            let of = |action: &Action| {
                (action.stage, action.microbatch) == (forward.stage, forward.microbatch)
            };
            let first = list.iter().position(|a| *a == forward);
            let last = list.iter().position(|a| of(a) && a.kind.moves_gradient());
            if let (Kind::Forward, Some(first), Some(last)) = (forward.kind, first, last) {
                let choice = choices.next().expect("a cycle does not end");
                let recompute = Action {
                    kind: Kind::Recompute,
                    ..forward
                };
                list.insert(first + 1 + choice.index(last - first), recompute);
            }
        }
    }
    schedule
}

proptest! {
    #[test]
    fn recomputes_are_valid_wherever_they_come_between_forward_and_backward(
        schedule in prop_oneof![schedules(), played()],
        choices in proptest::collection::vec(any::<prop::sample::Index>(), 1..40),
    ) {
        let outcome = with_recomputes(&schedule, &choices).validate();
        prop_assert!(outcome.is_ok(), "{:?}", outcome);
    }

    #[test]
    fn whatever_a_pipeline_can_play_is_valid(schedule in played()) {
        let outcome = schedule.validate();
        prop_assert!(outcome.is_ok(), "{}\n{:?}", schedule.to_csv(), outcome);
    }

    #[test]
    fn text_and_back_is_the_identity(schedule in schedules(), delay in 0_usize..4) {
        for schedule in [split(&schedule, delay), schedule] {
            let read = Schedule::from_csv("read", &schedule.to_csv(), schedule.size).unwrap();
            prop_assert_eq!(&read.actions, &schedule.actions);
            prop_assert!(read.validate().is_ok());
        }
    }

    #[test]
    fn split_backwards_are_valid_wherever_the_weight_gradients_go(schedule in schedules(), delay in 0_usize..20) {
        let outcome = split(&schedule, delay).validate();
        prop_assert!(outcome.is_ok(), "{:?}", outcome);
    }

    #[test]
    fn a_dropped_action_is_refused(mut schedule in schedules(), rank in any::<prop::sample::Index>(), at in any::<prop::sample::Index>()) {
        let rank = rank.index(schedule.size.ranks);
        let at = at.index(schedule.actions[rank].len());
        let dropped = schedule.actions[rank].remove(at);
        // A recompute is optional: without it the backward recomputes. Where nothing but forwards
        // is left, the schedule has become another one.
        let optional = dropped.kind == Kind::Recompute || schedule.is_forward_only();
        let complete = dropped.kind != Kind::Forward && optional;
        prop_assert_eq!(schedule.validate().is_ok(), complete);
    }

    #[test]
    fn a_duplicated_action_is_refused(mut schedule in schedules(), rank in any::<prop::sample::Index>(), at in any::<prop::sample::Index>(), to in any::<prop::sample::Index>()) {
        let rank = rank.index(schedule.size.ranks);
        let action = schedule.actions[rank][at.index(schedule.actions[rank].len())];
        let to = to.index(schedule.actions[rank].len() + 1);
        schedule.actions[rank].insert(to, action);
        prop_assert!(schedule.validate().is_err());
    }

    #[test]
    fn swapped_microbatches_of_one_kind_are_refused(mut schedule in schedules(), rank in any::<prop::sample::Index>(), at in any::<prop::sample::Index>()) {
        let rank = rank.index(schedule.size.ranks);
        let actions = &mut schedule.actions[rank];
        let at = at.index(actions.len());
        let alike = |a: Action, b: Action| (a.stage, a.kind) == (b.stage, b.kind);
        let next = (at + 1..actions.len()).find(|next| alike(actions[*next], actions[at]));
        let Some(next) = next.filter(|_| actions[at].kind != Kind::Recompute) else { return Ok(()) };
        actions.swap(at, next);
        // One rank may take forwards in any order, as no other rank has to agree.
        let alone = schedule.size.ranks == 1 && schedule.actions[rank][at].kind == Kind::Forward;
        prop_assert!(alone || schedule.validate().is_err());
    }

    #[test]
    fn no_order_of_actions_panics(mut schedule in schedules(), swaps in proptest::collection::vec((any::<prop::sample::Index>(), any::<prop::sample::Index>(), any::<prop::sample::Index>()), 1..6)) {
        for (rank, a, b) in swaps {
            let rank = rank.index(schedule.size.ranks);
            let len = schedule.actions[rank].len();
            schedule.actions[rank].swap(a.index(len), b.index(len));
        }
        let verdict = schedule.validate().is_ok();
        let costs = merak_pipe::Costs::uniform(merak_pipe::UnitCosts::default(), schedule.size.stages());
        let simulated = merak_pipe::simulate(&schedule, &costs).is_ok();
        prop_assert!(simulated || !verdict, "what is valid can be simulated");
        // The order of messages between ranks of several stages follows from an order of the
        // actions.
        let ordered = verdict || schedule.size.chunks == 1;
        prop_assert!(!ordered || schedule.instructions().is_ok());
    }
}
