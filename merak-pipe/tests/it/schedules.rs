//! The generated orders, instruction streams and figures, for many sizes.

use merak_pipe::{
    Action, Costs, Instruction, Kind, Schedule, ScheduleKind, Size, UnitCosts, simulate,
};
use std::collections::BTreeMap;

/// The schedules of one stage per rank and whole backwards; `shapes` is about the others.
const PLAIN: [ScheduleKind; 7] = [
    ScheduleKind::Gpipe,
    ScheduleKind::OneFOneB,
    ScheduleKind::DsDefault,
    ScheduleKind::PreRecompute,
    ScheduleKind::LastNoRecompute,
    ScheduleKind::ShiftedCriticalPath,
    ScheduleKind::Inference,
];

/// Every plain schedule for `P <= 10` and `M <= 20` that its conditions allow.
fn all_small() -> impl Iterator<Item = (ScheduleKind, Schedule)> {
    let sizes = (1..=10).flat_map(|p| (1..=20).map(move |m| Size::new(p, m)));
    let with_kinds = sizes.flat_map(|size| PLAIN.map(|kind| (kind, size)));
    with_kinds
        .filter(|(kind, size)| size.microbatches >= kind.min_microbatches(size.ranks))
        .map(|(kind, size)| (kind, kind.generate(size).expect("the size is legal")))
}

fn generate(kind: ScheduleKind, ranks: usize, microbatches: usize) -> Schedule {
    kind.generate(Size::new(ranks, microbatches))
        .expect("the size is legal")
}

fn makespan(schedule: &Schedule, costs: &str) -> f64 {
    let costs: UnitCosts = costs.parse().expect("the costs are well formed");
    let costs = Costs::uniform(costs, schedule.size.stages());
    simulate(schedule, &costs)
        .expect("the schedule is valid")
        .makespan
}

/// Actions without their stages, with `C` for a forward that is recomputed on its own, and `X` for
/// that.
fn compute_order(schedule: &Schedule) -> String {
    let mut text = String::new();
    for actions in &schedule.actions {
        let early: Vec<_> = actions
            .iter()
            .filter(|a| a.kind == Kind::Recompute)
            .map(|a| a.microbatch)
            .collect();
        let names = actions.iter().map(|action| {
            let letter = match action.kind {
                Kind::Forward if early.contains(&action.microbatch) => 'C',
                Kind::Recompute => 'X',
                kind => kind.letter(),
            };
            format!("{letter}{}", action.microbatch)
        });
        text += &names.collect::<Vec<_>>().join(" ");
        text.push('\n');
    }
    text
}

#[test]
fn the_orders_are_those_of_the_papers() {
    insta::assert_snapshot!(compute_order(&generate(ScheduleKind::Gpipe, 2, 3)), @"
    F0 F1 F2 B0 B1 B2
    F0 F1 F2 B0 B1 B2
    ");
    insta::assert_snapshot!(compute_order(&generate(ScheduleKind::OneFOneB, 4, 8)), @"
    F0 F1 F2 F3 B0 F4 B1 F5 B2 F6 B3 F7 B4 B5 B6 B7
    F0 F1 F2 B0 F3 B1 F4 B2 F5 B3 F6 B4 F7 B5 B6 B7
    F0 F1 B0 F2 B1 F3 B2 F4 B3 F5 B4 F6 B5 F7 B6 B7
    F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5 F6 B6 F7 B7
    ");
    insta::assert_snapshot!(compute_order(&generate(ScheduleKind::PreRecompute, 4, 8)), @"
    F0 F1 F2 F3 B0 F4 B1 C5 B2 C6 B3 C7 B4 X5 B5 X6 B6 X7 B7
    F0 F1 F2 B0 F3 B1 F4 B2 F5 B3 C6 B4 C7 B5 X6 B6 X7 B7
    F0 F1 B0 F2 B1 F3 B2 F4 B3 F5 B4 F6 B5 C7 B6 X7 B7
    F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5 F6 B6 F7 B7
    ");
    insta::assert_snapshot!(compute_order(&generate(ScheduleKind::LastNoRecompute, 4, 8)), @"
    F0 F1 F2 F3 B0 F4 B1 C5 B2 C6 B3 C7 B4 X5 B5 X6 B6 X7 B7
    F0 F1 F2 B0 F3 B1 F4 B2 F5 B3 C6 B4 C7 B5 X6 B6 X7 B7
    C0 F1 X0 B0 F2 B1 F3 B2 F4 B3 F5 B4 F6 B5 F7 B6 B7
    F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5 F6 B6 F7 B7
    ");
    insta::assert_snapshot!(compute_order(&generate(ScheduleKind::ShiftedCriticalPath, 4, 8)), @"
    F0 F1 F2 F3 B0 F4 B1 C5 B2 C6 B3 C7 B4 X5 B5 X6 B6 X7 B7
    C0 F1 F2 X0 B0 F3 B1 F4 B2 F5 B3 C6 B4 C7 B5 X6 B6 X7 B7
    C0 C1 F2 X0 B0 X1 B1 F3 B2 F4 B3 F5 B4 F6 B5 F7 B6 B7
    F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5 F6 B6 F7 B7
    ");
}

/// An instruction as letters and buffers.
fn short(instruction: &Instruction) -> String {
    let name = match instruction.name() {
        "LoadMicroBatch" => "L",
        "ForwardPass" => "F",
        "PreCheckpointForwardPass" => "C",
        "RecomputeRecvGrad" => "X",
        "BackwardPass" => "B",
        "SendActivation" => "SA",
        "RecvActivation" => "RA",
        "SendGrad" => "SG",
        "RecvGrad" => "RG",
        "SendActivationRecvGrad" => "SARG",
        "SendGradRecvActivation" => "SGRA",
        "RestoreRecomputeStatus" => "RST",
        other => other,
    };
    match instruction.slots() {
        (Some(sent), Some(received)) => format!("{name}({},{})", sent.buffer, received.buffer),
        (Some(slot), _) => format!("{name}{}", slot.buffer),
        (None, _) => name.into(),
    }
}

fn stream(kind: ScheduleKind, size: (usize, usize), stage: usize) -> String {
    let streams = generate(kind, size.0, size.1)
        .instructions()
        .expect("the schedule is valid");
    streams[stage]
        .iter()
        .map(short)
        .collect::<Vec<_>>()
        .join(" ")
}

#[test]
fn streams_merge_exchanges_where_both_ends_can() {
    insta::assert_snapshot!(stream(ScheduleKind::OneFOneB, (4, 4), 1), @"RA0 F0 SA0 RA1 F1 SA1 RA2 F2 SARG(2,0) B0 SGRA(0,3) F3 SARG(3,1) B1 SG1 RG2 B2 SG2 RG3 B3 SG3 ReduceTiedGrads ReduceGrads OptimizerStep");
    insta::assert_snapshot!(stream(ScheduleKind::DsDefault, (4, 4), 1), @"RA0 F0 SA0 RA1 F1 SA1 RA2 F2 SA2 RG0 B0 RA3 SG0 F3 SA3 RG1 B1 SG1 RG2 B2 SG2 RG3 B3 SG3 ReduceTiedGrads ReduceGrads OptimizerStep");
    // Too few microbatches for a steady phase: the one turn is a send, then a receive.
    insta::assert_snapshot!(stream(ScheduleKind::OneFOneB, (4, 2), 0), @"L0 F0 SA0 L1 F1 SA1 RG0 B0 RG1 B1 ReduceTiedGrads ReduceGrads OptimizerStep");
    insta::assert_snapshot!(stream(ScheduleKind::Gpipe, (2, 2), 0), @"L0 F0 SA0 L1 F1 SA1 RG0 B0 RG1 B1 ReduceTiedGrads ReduceGrads OptimizerStep");
}

#[test]
fn streams_hold_sends_back_until_after_an_early_recompute() {
    insta::assert_snapshot!(stream(ScheduleKind::ShiftedCriticalPath, (4, 4), 1), @"RA0 C0 RST SA0 RA1 F1 SA1 RA2 C2 SA2 X0 RST B0 SGRA(0,3) C3 SARG(3,1) B1 SG1 X2 B2 SG2 X3 B3 SG3 RST ReduceTiedGrads ReduceGrads OptimizerStep");
    insta::assert_snapshot!(stream(ScheduleKind::ShiftedCriticalPath, (4, 4), 2), @"RA0 C0 RST SA0 RA1 C1 RST RA2 F2 X0 SA1 RST B0 SG0 X1 SA2 RST B1 SGRA(1,0) F0 SARG(0,2) B2 SG2 RG0 B0 SG0 RST ReduceTiedGrads ReduceGrads OptimizerStep");
    insta::assert_snapshot!(stream(ScheduleKind::ShiftedCriticalPath, (4, 4), 3), @"RA0 L0 F0 B0 SG0 RA1 L1 F1 B1 SG1 RA0 L0 F0 B0 SGRA(0,1) L1 F1 B1 SG1 ReduceTiedGrads ReduceGrads OptimizerStep");
}

#[test]
fn forwards_alone_are_staggered() {
    insta::assert_snapshot!(stream(ScheduleKind::Inference, (3, 3), 0), @"L0 F0 L1 SA0 F1 L0 SA1 F0 SA0");
    insta::assert_snapshot!(stream(ScheduleKind::Inference, (3, 3), 1), @"RA0 F0 RA1 SA0 F1 RA0 SA1 F0 SA0");
    insta::assert_snapshot!(stream(ScheduleKind::Inference, (3, 3), 2), @"L0 RA0 F0 L1 RA1 F1 L0 RA0 F0");
}

/// See `tests/goldens/README.md` for where they come from.
#[test]
fn streams_equal_the_originals() {
    let goldens = include_str!("../goldens/original_streams.txt");
    for line in goldens.lines() {
        let (key, expected) = line.split_once(": ").expect("a key and a stream");
        let mut words = key.split(' ');
        let kind = words.next().expect("a name").parse().unwrap();
        let numbers: Vec<usize> = words.map(|n| n.parse().unwrap()).collect();
        assert_eq!(
            stream(kind, (numbers[0], numbers[1]), numbers[2]),
            expected,
            "{key}"
        );
    }
    assert_eq!(goldens.lines().count(), 60);
}

#[test]
fn every_generated_schedule_passes_the_validator() {
    for (_, schedule) in all_small() {
        let outcome = schedule.validate();
        assert!(
            outcome.is_ok(),
            "{} {:?}: {outcome:?}",
            schedule.name,
            schedule.size
        );
    }
}

#[test]
fn step_times_and_peaks_follow_the_closed_forms() {
    for (kind, schedule) in all_small().filter(|(kind, _)| kind.is_training()) {
        let Size {
            ranks: p,
            microbatches: m,
            ..
        } = schedule.size;
        let saved = match kind {
            // The only stage is the last one, which never recomputes.
            ScheduleKind::LastNoRecompute | ScheduleKind::ShiftedCriticalPath if p == 1 => m,
            _ if p == 1 => 0,
            ScheduleKind::PreRecompute => p - 1,
            ScheduleKind::LastNoRecompute => p + 1,
            ScheduleKind::ShiftedCriticalPath => p + 2,
            _ => 0,
        };
        let expected = (4 * (m + p - 1) - saved) as f64;
        let found = makespan(&schedule, "F=1,I=1,W=1,R=1,C=0");
        assert!(
            (found - expected).abs() < 1e-9,
            "{kind} {p} {m}: expected {expected}, found {found}"
        );
        if saved == 0 {
            assert!((makespan(&schedule, "R=0") - (3 * (m + p - 1)) as f64).abs() < 1e-9);
        }
        let costs = Costs::uniform(UnitCosts::default(), p);
        let simulation = simulate(&schedule, &costs).unwrap();
        for (s, peak) in simulation.peak_activations.iter().enumerate() {
            let expected = match kind {
                ScheduleKind::Gpipe if p > 1 => m,
                ScheduleKind::ShiftedCriticalPath if s + 2 == p => 3,
                _ => (p - s).min(m),
            };
            assert!(
                (peak - expected as f64).abs() < 1e-9,
                "{kind} {p} {m} stage {s}: {peak}"
            );
        }
    }
}

#[test]
fn figures_describe_the_timeline() {
    let schedule = generate(ScheduleKind::OneFOneB, 4, 8);
    let costs = Costs::uniform("R=0".parse().unwrap(), 4);
    let simulation = simulate(&schedule, &costs).unwrap();
    // (P-1)/(M+P-1) over the makespan; a rank's own time leaves out the ramps at its ends.
    assert!((simulation.bubble() - 3.0 / 11.0).abs() < 1e-12);
    assert!((simulation.longest_rank_time() - 33.0).abs() < 1e-12);
    let by_rank = simulation.timeline.bubble_by_rank();
    assert!(
        (by_rank[3] - 0.0).abs() < 1e-12 && (by_rank[0] - 9.0 / 33.0).abs() < 1e-12,
        "{by_rank:?}"
    );
}

#[test]
fn the_critical_path_explains_the_makespan() {
    for (kind, schedule) in
        all_small().filter(|(_, s)| s.size.ranks <= 5 && s.size.microbatches <= 9)
    {
        let costs = Costs::uniform(
            "F=1,I=1.5,W=0.75,R=1.25,C=0.5".parse().unwrap(),
            schedule.size.stages(),
        );
        let simulation = simulate(&schedule, &costs).unwrap();
        let spans = simulation.timeline.ranks.iter().flatten();
        let spans: BTreeMap<Action, (f64, f64)> =
            spans.map(|s| (s.action, (s.start, s.end))).collect();
        let path: Vec<_> = simulation
            .critical_path
            .iter()
            .map(|a| (a.stage, spans[a]))
            .collect();
        assert!(path[0].1.0.abs() < 1e-9, "{kind}: starts at {:?}", path[0]);
        assert!((path[path.len() - 1].1.1 - simulation.makespan).abs() < 1e-9);
        for pair in path.windows(2) {
            let hop = if pair[0].0 == pair[1].0 { 0.0 } else { 0.5 };
            assert!(
                (pair[0].1.1 + hop - pair[1].1.0).abs() < 1e-9,
                "{kind}: {pair:?}"
            );
        }
    }
}

#[test]
fn communication_delays_what_waits_for_it() {
    // One microbatch: every hop lies on the path.
    for ranks in 1..6 {
        let schedule = generate(ScheduleKind::Gpipe, ranks, 1);
        let expected = 3.0 * ranks as f64 + 2.0 * 0.25 * (ranks - 1) as f64;
        assert!((makespan(&schedule, "R=0,C=0.25") - expected).abs() < 1e-9);
    }
}

#[test]
fn stages_may_cost_differently() {
    let schedule = generate(ScheduleKind::OneFOneB, 2, 3);
    let mut costs = Costs::uniform("R=0".parse().unwrap(), 2);
    costs.forward[1] = 3.0;
    // The slow second stage is never idle after its first input.
    let simulation = simulate(&schedule, &costs).unwrap();
    assert!((simulation.makespan - (1.0 + 3.0 * 5.0 + 2.0)).abs() < 1e-9);
    costs.forward.pop();
    let error = simulate(&schedule, &costs).unwrap_err();
    assert_eq!(error.to_string(), "expected costs F of 2 stages, found 1");
    costs.forward.push(f64::NAN);
    let error = simulate(&schedule, &costs).unwrap_err();
    assert_eq!(
        error.to_string(),
        "the cost F must be from 0 to 1e15, found NaN"
    );
}

#[test]
fn a_hundred_thousand_actions_are_no_burden() {
    let schedule = generate(ScheduleKind::OneFOneB, 50, 1000);
    schedule.validate().unwrap();
    assert!((makespan(&schedule, "R=0") - 3.0 * 1049.0).abs() < 1e-6);
}

/// A buffer holds an activation from its receive or forward on until the backward, or until it was
/// sent.
#[test]
fn no_stream_overwrites_a_live_buffer_or_recomputes_without_a_checkpoint() {
    for (kind, schedule) in all_small() {
        for stream in schedule.instructions().unwrap() {
            let mut holds = BTreeMap::new();
            let mut checkpointed = Vec::new();
            for instruction in &stream {
                let (first, second) = instruction.slots();
                let Some(slot) = first else { continue };
                let fills = match instruction {
                    Instruction::SendGradRecvActivation { .. } => second,
                    Instruction::RecvActivation(_)
                    | Instruction::ForwardPass(_)
                    | Instruction::PreCheckpointForwardPass(_) => first,
                    _ => None,
                };
                if let Some(fills) = fills {
                    let held = *holds.entry(fills.buffer).or_insert(fills.microbatch);
                    assert_eq!(held, fills.microbatch, "{kind} {:?}", schedule.size);
                }
                match instruction {
                    Instruction::BackwardPass(_) => {
                        assert_eq!(holds.remove(&slot.buffer), Some(slot.microbatch));
                    }
                    Instruction::SendActivation(_) if kind == ScheduleKind::Inference => {
                        holds.remove(&slot.buffer);
                    }
                    Instruction::ForwardPass(_)
                        if kind == ScheduleKind::Inference
                            && slot.stage.0 + 1 == schedule.size.ranks =>
                    {
                        holds.remove(&slot.buffer);
                    }
                    Instruction::PreCheckpointForwardPass(_) => checkpointed.push(slot.microbatch),
                    Instruction::RecomputeRecvGrad(_) => {
                        assert!(checkpointed.contains(&slot.microbatch));
                    }
                    _ => {}
                }
            }
            assert!(holds.is_empty());
        }
    }
}
