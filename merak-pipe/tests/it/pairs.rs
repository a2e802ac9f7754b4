//! Forwards and backwards that run at once.

use crate::engine::{DEADLINE, Stages, modules, results, sequential};
use merak_pipe::{
    Action, AutoLimits, Costs, GridStyle, Pair, Schedule, ScheduleKind, Size, StageModule,
    UnitCosts, auto, grid, json, run_threads, simulate, simulate_on, svg, threads, trace,
};
use std::{collections::BTreeMap, thread};

fn dualpipe(ranks: usize, microbatches: usize) -> Schedule {
    let size = Size::new(ranks, microbatches).with_chunks(2);
    ScheduleKind::DualPipeV
        .generate(size)
        .expect("the size is legal")
}

fn costs(text: &str, schedule: &Schedule) -> Costs {
    let unit: UnitCosts = text.parse().expect("the costs are well formed");
    Costs::uniform(unit, schedule.size.stages())
}

#[test]
fn dualpipe_v_pairs_every_forward_of_its_steady_phase() {
    // Per rank: M - 2P + r + 1 turns of two pairs and P - r - 1 of one, less the one that the last
    // rank keeps apart.
    for (p, m) in [(2, 4), (4, 8), (4, 11), (8, 16)] {
        let schedule = dualpipe(p, m);
        let count = |rank| schedule.pairs.iter().filter(|pair| pair.0 == rank).count();
        for rank in 0..p {
            let turns = m + rank + 1 - 2 * p;
            let expected = 2 * turns + (p - rank - 1) - usize::from(rank + 1 == p);
            assert_eq!(count(rank), expected, "P {p}, M {m}, rank {rank}");
        }
        schedule.validate().unwrap();
    }
    let csv = dualpipe(2, 4).to_csv();
    insta::assert_snapshot!(csv, @"
    0F0,0F1,0F2,3F0,3I0,3W0,3F1,(0F3;3B1)OVERLAP_F_B,(3F2;0B0)OVERLAP_F_B,3B2,(3F3;0B1)OVERLAP_F_B,3B3,0I2,0W2,0I3,0W3
    1F0,2F0,1F1,2F1,1F2,2B0,(2F2;1B0)OVERLAP_F_B,(1F3;2B1)OVERLAP_F_B,(2F3;1B1)OVERLAP_F_B,2B2,1B2,2I3,1I3,2W3,1W3
    ");
}

#[test]
fn a_schedule_with_pairs_survives_text_and_back() {
    let schedule = dualpipe(3, 7);
    let read = Schedule::from_sized_csv("dualpipe_v", &schedule.to_csv()).unwrap();
    assert_eq!(read, schedule);
}

#[test]
fn a_pair_takes_its_share_of_the_sum_once_both_messages_are_there() {
    let csv = "0F0,0F1,(0F2;0B0)OVERLAP_F_B,0B1,0B2\n1F0,1B0,1F1,1B1,1F2,1B2\n";
    let schedule = Schedule::from_sized_csv("mine", csv).unwrap();
    schedule.validate().unwrap();
    let played = simulate(&schedule, &costs("R=0,O=0.5", &schedule)).unwrap();
    let spans: BTreeMap<_, _> = played.timeline.ranks[0]
        .iter()
        .map(|span| (span.action.to_string(), (span.start, span.end)))
        .collect();
    // The gradient of microbatch 0 comes at 4; half of 1 + 2 follows.
    assert_eq!(spans["0F2"], (4.0, 5.5));
    assert_eq!(spans["0B0"], (4.0, 5.5));
    assert!((played.timeline.busy_times()[0] - 7.5).abs() < 1e-9);
    let apart = simulate(&schedule, &costs("R=0", &schedule)).unwrap();
    let starts: Vec<_> = apart.timeline.ranks[0]
        .iter()
        .map(|span| span.start)
        .collect();
    assert_eq!(format!("{:?}", &starts[..4]), "[0.0, 1.0, 2.0, 4.0]");
    for wrong in ["O=1.5", "O=-1", "O=NaN"] {
        assert!(wrong.parse::<UnitCosts>().is_err());
    }
}

#[test]
fn pairs_that_gain_something_shorten_the_step() {
    for (p, m) in [(4, 8), (8, 16), (8, 32)] {
        let schedule = dualpipe(p, m);
        let makespan = |text| {
            simulate(&schedule, &costs(text, &schedule))
                .unwrap()
                .makespan
        };
        assert!((makespan("R=0") - (6 * m + p - 1) as f64).abs() < 1e-9);
        assert!(makespan("R=0,O=0.75") < 0.95 * makespan("R=0"));
    }
}

#[test]
fn ranks_that_share_cores_run_pairs_too() {
    let schedule = dualpipe(3, 6);
    for text in ["R=0,O=0.7,C=0.1", "R=0,C=0.1"] {
        let costs = costs(text, &schedule);
        let alone = simulate(&schedule, &costs).unwrap();
        let nearly = simulate_on(&schedule, &costs, 3.0 - 1e-12).unwrap();
        assert!((nearly.makespan - alone.makespan).abs() < 1e-6);
        let one = simulate_on(&schedule, &costs, 1.0).unwrap();
        let work: f64 = alone.timeline.busy_times().iter().sum();
        assert!((one.makespan - work).abs() < 1e-6);
    }
}

#[test]
fn the_search_makes_no_pairs_and_counts_on_none() {
    let size = Size::new(3, 6).with_chunks(2);
    let costs = Costs::uniform("R=0,O=0.5".parse().unwrap(), 6);
    let limits = AutoLimits {
        moves: 50,
        ..AutoLimits::default()
    };
    let found = auto(size, &costs, &limits).unwrap();
    let apart = Costs::uniform("R=0".parse().unwrap(), 6);
    let again = simulate(&found.schedule, &apart).unwrap();
    assert!((again.makespan - found.simulation.makespan).abs() < 1e-9);
    assert!(found.bound <= again.makespan + 1e-9);
}

#[test]
fn costs_measured_of_pairs_tell_what_they_save() {
    let schedule = dualpipe(3, 8);
    let costs = costs("F=1,I=1.5,W=0.5,R=0,O=0.75", &schedule);
    let played = simulate(&schedule, &costs).unwrap();
    let measured = Costs::measured(&schedule, &played.timeline).unwrap();
    assert!((measured.overlap - 0.75).abs() < 1e-9, "{measured:?}");
    assert_eq!(measured.forward, costs.forward);
}

#[test]
fn pairs_that_cannot_run_at_once_are_refused() {
    let refusal = |csv: &str| {
        let schedule = Schedule::from_sized_csv("mine", csv).unwrap();
        schedule.validate().unwrap_err().to_string()
    };
    insta::assert_snapshot!(refusal("0F0,0B0,0F1,0B1\n(1F0;1B0)OVERLAP_F_B,1F1,1B1\n"), @"rank 1, position 1: 1F0 runs at once with 1B0, which needs it");
    // Rank 1 sends the gradient of microbatch 0 only once it has the activation that the pair
    // makes.
    insta::assert_snapshot!(refusal("0F0,(0F1;0B0)OVERLAP_F_B,0B1\n1F0,1F1,1B0,1B1\n"), @"deadlock: rank 0 waits at position 2 ((0F1;0B0)OVERLAP_F_B) for the gradient of microbatch 0 from stage 1 to stage 0");
    let mut schedule = dualpipe(2, 4);
    schedule.pairs.insert((0, 0));
    insta::assert_snapshot!(schedule.validate().unwrap_err(), @"rank 0, position 1: 0F0 is to run at once with the next action, but the two are not a forward and a full backward");
    let error = Schedule::from_sized_csv("mine", "0F0,(0F1;0W0)OVERLAP_F_B\n").unwrap_err();
    assert_eq!(error.to_string(), "line 1, cell 2 is no action");
}

#[test]
fn a_pair_is_one_instruction_after_both_receives() {
    let schedule = dualpipe(2, 4);
    let document: serde_json::Value =
        serde_json::from_str(&json(&schedule, &costs("R=0", &schedule)).unwrap()).unwrap();
    let actions = document["actions"][0].as_array().unwrap();
    assert!(
        actions
            .iter()
            .any(|cell| cell.as_str().unwrap().ends_with(")OVERLAP_F_B"))
    );
    for (rank, stream) in schedule.instructions().unwrap().iter().enumerate() {
        let both = |i: &&merak_pipe::Instruction| i.name() == "ForwardBackwardPass";
        let pairs = schedule.pairs.iter().filter(|pair| pair.0 == rank).count();
        assert_eq!(stream.iter().filter(both).count(), pairs);
    }
    let text = document["instructions"][0].to_string();
    assert!(
        text.contains(r#"["ForwardBackwardPass",{"buffer_id":["#),
        "{text}"
    );
    assert!(text.contains(r#""chunk":[0,1]"#), "{text}");
}

#[test]
fn pairs_are_drawn_as_what_they_are() {
    let csv = "0F0,0F1,(0F2;0B0)OVERLAP_F_B,0B1,0B2\n1F0,1B0,1F1,1B1,1F2,1B2\n";
    let schedule = Schedule::from_sized_csv("mine", csv).unwrap();
    let at_once = simulate(&schedule, &costs("R=0,O=0.5", &schedule)).unwrap();
    insta::assert_snapshot!(grid(&at_once.timeline, GridStyle::default()), @"
    rank 0  F0 F1 .  .  F2+B0 .  B1--- .  B2---
    rank 1  .  F0 B0--- F1 B1--- F2 B2--- .  .
    ");
    let picture = svg(&schedule, &at_once);
    for action in schedule.actions.iter().flatten() {
        assert_eq!(
            picture.matches(&format!("<title>{action}: ")).count(),
            1,
            "{action}"
        );
    }
    let document: serde_json::Value = serde_json::from_str(&trace(&at_once.timeline)).unwrap();
    let events = document["traceEvents"].as_array().unwrap();
    let names: Vec<_> = events
        .iter()
        .filter_map(|event| event["name"].as_str())
        .collect();
    assert!(names.contains(&"(0F2;0B0)OVERLAP_F_B"), "{names:?}");
    assert!(!names.contains(&"0F2"), "{names:?}");
}

/// Stages that run a forward and a backward at once, and count how often.
#[derive(Debug)]
struct Overlapping(Stages, Vec<Pair>);

impl StageModule for Overlapping {
    type Payload = f64;
    type Error = String;

    fn forward(&mut self, action: Action, input: Option<f64>) -> Result<Option<f64>, String> {
        self.0.forward(action, input)
    }

    fn backward_input(&mut self, action: Action, grad: Option<f64>) -> Result<Option<f64>, String> {
        self.0.backward_input(action, grad)
    }

    fn backward_weight(&mut self, action: Action) -> Result<(), String> {
        self.0.backward_weight(action)
    }

    fn overlaps(&self) -> bool {
        true
    }

    fn forward_and_backward(
        &mut self,
        forward: Action,
        input: Option<f64>,
        backward: Action,
        grad: Option<f64>,
    ) -> Result<(Option<f64>, Option<f64>), String> {
        self.1.push(Pair { forward, backward });
        let input_grad = self.backward(backward, grad)?;
        Ok((self.forward(forward, input)?, input_grad))
    }
}

#[test]
fn a_backward_that_fails_at_once_with_a_forward_is_named_with_it() {
    let csv = "0F0,0F1,(0F2;0B0)OVERLAP_F_B,0B1,0B2\n1F0,1B0,1F1,1B1,1F2,1B2\n";
    let schedule = Schedule::from_sized_csv("mine", csv).unwrap();
    let wrap = |stages| Overlapping(stages, Vec::new());
    let mut both: Vec<_> = modules(&schedule).into_iter().map(wrap).collect();
    both[0].0.fault = Some("0B0".parse().unwrap());
    let links = threads(2, DEADLINE);
    let errors: Vec<String> = thread::scope(|scope| {
        let schedule = &schedule;
        let ranks = both.iter_mut().zip(links).enumerate();
        let spawned: Vec<_> = ranks
            .map(|(rank, (module, mut link))| {
                scope.spawn(move || merak_pipe::run(schedule, rank, module, &mut link))
            })
            .collect();
        let ended = spawned.into_iter().map(|thread| thread.join().unwrap());
        ended.map(|ended| ended.unwrap_err().to_string()).collect()
    });
    insta::assert_snapshot!(errors.join("\n"), @"
    rank 0 failed in 0F2 with 0B0 (stages 0 and 0, microbatches 2 and 0)
    rank 0 failed: 0F2 with 0B0: the loss is NaN
    ");
}

#[test]
fn the_engine_runs_pairs_at_once_where_the_module_can() {
    for (p, m) in [(1, 3), (2, 4), (3, 9), (4, 5)] {
        let schedule = dualpipe(p, m);
        let expected = sequential(2 * p, m, true);
        let mut plain = modules(&schedule);
        run_threads(&schedule, &mut plain, DEADLINE).unwrap();
        assert_eq!(results(&plain), expected);
        let wrap = |stages| Overlapping(stages, Vec::new());
        let mut both: Vec<_> = modules(&schedule).into_iter().map(wrap).collect();
        let timeline = run_threads(&schedule, &mut both, DEADLINE).unwrap();
        for (rank, module) in both.iter().enumerate() {
            let pairs = (0..schedule.actions[rank].len()).filter_map(|at| schedule.pair(rank, at));
            assert_eq!(module.1, pairs.collect::<Vec<_>>(), "rank {rank}");
            let actions = timeline.ranks[rank].iter().map(|span| span.action);
            assert_eq!(actions.collect::<Vec<_>>(), schedule.actions[rank]);
        }
        let both: Vec<_> = both.into_iter().map(|module| module.0).collect();
        assert_eq!(results(&both), expected);
    }
}
