//! Every schedule gives the bits of a plain sequential run, and a fault ends all ranks.

use merak_pipe::{
    Action, Error, Kind, Observer, PipelineEngine, Schedule, ScheduleKind, Size, StageModule,
    run_threads, threads,
};
use proptest::prelude::*;
use std::{collections::BTreeMap, thread, time::Duration};

pub(crate) const DEADLINE: Duration = Duration::from_secs(20);

/// The stages of one rank: `y = tanh(w * x)`, where a recompute must happen at most once per
/// backward and activations are dropped after the forward, as with full recomputation.
#[derive(Debug)]
pub(crate) struct Stages {
    /// Stages of the whole model.
    depth: usize,
    weights: BTreeMap<usize, f64>,
    pub(crate) weight_grads: BTreeMap<usize, f64>,
    inputs: BTreeMap<(usize, usize), f64>,
    outputs: BTreeMap<(usize, usize), f64>,
    pending: BTreeMap<(usize, usize), f64>,
    pub(crate) losses: Vec<(usize, f64)>,
    /// The action that fails, if any.
    pub(crate) fault: Option<Action>,
}

impl Stages {
    pub(crate) fn new(stages: usize, own: impl Iterator<Item = usize>) -> Self {
        let weights: BTreeMap<usize, f64> = own.map(|s| (s, 0.3 + 0.1 * s as f64)).collect();
        Self {
            depth: stages,
            weight_grads: weights.keys().map(|s| (*s, 0.0)).collect(),
            weights,
            inputs: BTreeMap::new(),
            outputs: BTreeMap::new(),
            pending: BTreeMap::new(),
            losses: Vec::new(),
            fault: None,
        }
    }

    fn check(&self, action: Action) -> Result<(), String> {
        match self.fault {
            Some(fault) if fault == action => Err("the loss is NaN".into()),
            _ => Ok(()),
        }
    }

    fn run_forward(&self, key: (usize, usize)) -> f64 {
        self.output_for(key.0, self.inputs[&key])
    }

    fn output_for(&self, stage: usize, input: f64) -> f64 {
        (self.weights[&stage] * input).tanh()
    }

    /// What the next stage gets; the last one notes it as the loss.
    fn passed_on(&mut self, (stage, microbatch): (usize, usize), output: f64) -> Option<f64> {
        if stage + 1 < self.depth {
            return Some(output);
        }
        self.losses.push((microbatch, output));
        None
    }
}

fn first_input(action: Action) -> f64 {
    0.5 + action.microbatch.0 as f64
}

fn key(action: Action) -> (usize, usize) {
    (action.stage.0, action.microbatch.0)
}

impl StageModule for Stages {
    type Payload = f64;
    type Error = String;

    fn forward(&mut self, action: Action, input: Option<f64>) -> Result<Option<f64>, String> {
        self.check(action)?;
        let input = input.unwrap_or_else(|| first_input(action));
        if self.inputs.insert(key(action), input).is_some() {
            return Err("forward ran twice".into());
        }
        let output = self.run_forward(key(action));
        Ok(self.passed_on(key(action), output))
    }

    fn forward_only(&mut self, action: Action, input: Option<f64>) -> Result<Option<f64>, String> {
        self.check(action)?;
        let input = input.unwrap_or_else(|| first_input(action));
        let output = self.output_for(action.stage.0, input);
        Ok(self.passed_on(key(action), output))
    }

    fn backward_input(&mut self, action: Action, grad: Option<f64>) -> Result<Option<f64>, String> {
        self.check(action)?;
        let (stage, _) = key(action);
        if !self.outputs.contains_key(&key(action)) {
            self.outputs
                .insert(key(action), self.run_forward(key(action)));
        }
        let output = self.outputs.remove(&key(action)).ok_or("no output")?;
        let inner = grad.unwrap_or(1.0) * (1.0 - output * output);
        self.pending.insert(key(action), inner);
        Ok((stage > 0).then_some(inner * self.weights[&stage]))
    }

    fn backward_weight(&mut self, action: Action) -> Result<(), String> {
        self.check(action)?;
        let inner = self.pending.remove(&key(action)).ok_or("no gradient")?;
        let input = self.inputs.remove(&key(action)).ok_or("no input")?;
        *self.weight_grads.entry(key(action).0).or_default() += inner * input;
        Ok(())
    }

    fn recompute(&mut self, action: Action) -> Result<(), String> {
        self.check(action)?;
        match self
            .outputs
            .insert(key(action), self.run_forward(key(action)))
        {
            Some(_) => Err("recomputed twice".into()),
            None => Ok(()),
        }
    }

    fn reset(&mut self) {
        self.inputs.clear();
        self.outputs.clear();
        self.pending.clear();
        self.losses.clear();
        self.weight_grads.values_mut().for_each(|sum| *sum = 0.0);
    }
}

pub(crate) fn modules(schedule: &Schedule) -> Vec<Stages> {
    let placement = schedule.placement().expect("the schedule fits its size");
    let stages = placement.len();
    let module = |rank| {
        let own = (0..stages).filter(|stage| placement[*stage] == rank);
        Stages::new(stages, own)
    };
    (0..schedule.size.ranks).map(module).collect()
}

/// Losses by microbatch and weight gradients by stage, as bits.
pub(crate) fn results(modules: &[Stages]) -> (BTreeMap<usize, u64>, BTreeMap<usize, u64>) {
    let losses = modules
        .iter()
        .flat_map(|m| &m.losses)
        .map(|(m, x)| (*m, x.to_bits()));
    let grads = modules
        .iter()
        .flat_map(|m| &m.weight_grads)
        .map(|(s, g)| (*s, g.to_bits()));
    (losses.collect(), grads.collect())
}

/// The same model on one rank, microbatch after microbatch, by hand.
pub(crate) fn sequential(
    stages: usize,
    microbatches: usize,
    backward: bool,
) -> (BTreeMap<usize, u64>, BTreeMap<usize, u64>) {
    let mut model = Stages::new(stages, 0..stages);
    for m in 0..microbatches {
        let action =
            |s, kind| Action::new(merak_pipe::StageId(s), kind, merak_pipe::MicrobatchId(m));
        let mut value = None;
        for s in 0..stages {
            value = model
                .forward(action(s, Kind::Forward), value)
                .expect("no fault is set");
        }
        for s in (0..stages).rev().filter(|_| backward) {
            value = model
                .backward(action(s, Kind::Backward), value)
                .expect("no fault is set");
        }
    }
    results(&[model])
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]
    #[test]
    fn every_schedule_gives_the_bits_of_a_sequential_run(
        kind in proptest::sample::select(ScheduleKind::ALL.to_vec()), ranks in 1usize..=5, extra in 0usize..=7,
    ) {
        let microbatches = kind.min_microbatches(ranks) + extra;
        let size = Size::new(ranks, microbatches).with_chunks(kind.fixed_chunks().unwrap_or(3));
        let schedule = kind.generate(size).unwrap();
        let mut modules = modules(&schedule);
        let timeline = run_threads(&schedule, &mut modules, DEADLINE).unwrap();
        let ran: Vec<Vec<Action>> = timeline.ranks.iter().map(|r| r.iter().map(|s| s.action).collect()).collect();
        prop_assert_eq!(&ran, &schedule.actions);
        prop_assert_eq!(results(&modules), sequential(size.stages(), microbatches, kind.is_training()));
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]
    #[test]
    fn several_stages_per_rank_and_split_backwards_change_no_bit(schedule in crate::played::played()) {
        let mut modules = modules(&schedule);
        run_threads(&schedule, &mut modules, DEADLINE).unwrap();
        let expected = sequential(schedule.size.stages(), schedule.size.microbatches, true);
        prop_assert_eq!(results(&modules), expected);
    }
}

#[test]
fn a_schedule_without_backwards_keeps_no_input() {
    let schedule = v_shape();
    let mut modules = modules(&schedule);
    for _ in 0..2 {
        run_threads(&schedule.forwards(5).unwrap(), &mut modules, DEADLINE).unwrap();
        assert!(modules.iter().all(|module| module.inputs.is_empty()));
    }
    assert_eq!(results(&modules), sequential(4, 5, false));
    let [first, second] = [0, 5].map(|at| &modules[0].losses[at..at + 5]);
    assert_eq!(first, second);
}

/// Two chunks per rank, split backwards, and a hop between two stages of one rank (1 to 2, a V).
pub(crate) fn v_shape() -> Schedule {
    let csv = "0F0,0F1,3F0,3I0,3W0,3F1,3I1,3W1,0I0,0W0,0I1,0W1\n1F0,2F0,1F1,2F1,2I0,1I0,2W0,1W0,2B1,1B1\n";
    Schedule::from_csv("v", csv, Size::new(2, 2).with_chunks(2)).expect("the text is well formed")
}

#[test]
fn chunks_of_one_rank_pass_messages_without_the_link() {
    let schedule = v_shape();
    let mut modules = modules(&schedule);
    run_threads(&schedule, &mut modules, DEADLINE).unwrap();
    assert_eq!(results(&modules), sequential(4, 2, true));
}

#[test]
fn recorded_times_respect_every_dependency() {
    for kind in ScheduleKind::ALL {
        let size = Size::new(4, 6).with_chunks(kind.fixed_chunks().unwrap_or(2));
        let schedule = kind.generate(size).unwrap();
        let stages = size.stages();
        let timeline = run_threads(&schedule, &mut modules(&schedule), DEADLINE).unwrap();
        let sent = timeline
            .ranks
            .iter()
            .flatten()
            .filter_map(|span| Some((span.action.output(stages)?, span.end)));
        let sent: BTreeMap<_, _> = sent.collect();
        for spans in &timeline.ranks {
            assert!(spans.iter().all(|span| span.start <= span.end));
            assert!(spans.windows(2).all(|pair| pair[0].end <= pair[1].start));
            let inputs = spans
                .iter()
                .filter_map(|span| Some((span.action.input(stages)?, span.start)));
            for (tag, start) in inputs {
                assert!(sent[&tag] <= start, "{kind}: the {tag}");
            }
        }
    }
}

#[test]
fn an_engine_runs_step_after_step_over_the_same_links() {
    let schedule = ScheduleKind::OneFOneB.generate(Size::new(3, 4)).unwrap();
    let mut once = modules(&schedule);
    run_threads(&schedule, &mut once, DEADLINE).unwrap();
    let mut twice = modules(&schedule);
    let links = threads(3, DEADLINE);
    thread::scope(|scope| {
        for ((rank, module), mut link) in twice.iter_mut().enumerate().zip(links) {
            let engine = PipelineEngine::new(&schedule, rank).unwrap();
            scope.spawn(move || {
                engine.run(module, &mut link).unwrap();
                engine.run(module, &mut link).unwrap();
            });
        }
    });
    assert_eq!(twice[2].losses[..4], twice[2].losses[4..]);
    assert_eq!(twice[2].losses[..4], once[2].losses[..]);
}

/// Notes what begins and what ends.
#[derive(Default)]
struct Notes(Vec<(&'static str, Action)>);

impl Observer for Notes {
    fn begin(&mut self, action: Action) {
        self.0.push(("begin", action));
    }

    fn end(&mut self, action: Action) {
        self.0.push(("end", action));
    }
}

#[test]
fn an_observer_is_told_of_every_action_of_its_rank_until_one_fails() {
    let schedule = ScheduleKind::OneFOneB.generate(Size::new(2, 4)).unwrap();
    let fault: Action = "1F2".parse().unwrap();
    for fault in [None, Some(fault)] {
        let mut modules = modules(&schedule);
        modules[1].fault = fault;
        let links = threads(2, DEADLINE);
        thread::scope(|scope| {
            for ((rank, module), mut link) in modules.iter_mut().enumerate().zip(links) {
                let engine = PipelineEngine::new(&schedule, rank).unwrap();
                let actions = &schedule.actions[rank];
                scope.spawn(move || {
                    let mut notes = Notes::default();
                    let ended = engine.run_observed(module, &mut link, &mut notes);
                    assert_eq!(ended.is_ok(), fault.is_none());
                    let told = |action: &Action| [("begin", *action), ("end", *action)];
                    let all: Vec<_> = actions.iter().flat_map(told).collect();
                    if ended.is_ok() {
                        assert_eq!(notes.0, all);
                    } else {
                        assert!(all.starts_with(&notes.0), "{:?}", notes.0);
                    }
                    if rank == 1 {
                        assert_eq!(
                            notes.0.last().map(|last| last.1),
                            fault.or(actions.last().copied())
                        );
                    }
                });
            }
        });
    }
}

#[test]
fn a_fault_on_any_rank_ends_all_ranks_and_names_it() {
    let schedule = ScheduleKind::PreRecompute
        .generate(Size::new(4, 6))
        .unwrap();
    for fault in ["0F0", "1B2", "2R5", "3F4", "0B5"] {
        let fault: Action = fault.parse().unwrap();
        let mut modules = modules(&schedule);
        modules[fault.stage.0].fault = Some(fault);
        let error = run_threads(&schedule, &mut modules, DEADLINE).unwrap_err();
        assert!(
            matches!(&error, Error::Stage { rank, action, .. } if *rank == fault.stage.0 && *action == fault),
            "{error}"
        );
    }
}

#[test]
fn the_other_ranks_learn_the_culprit_and_its_reason() {
    let schedule = ScheduleKind::OneFOneB.generate(Size::new(3, 4)).unwrap();
    let mut modules = modules(&schedule);
    modules[1].fault = Some("1B0".parse().unwrap());
    let links = threads(3, DEADLINE);
    let errors: Vec<String> = thread::scope(|scope| {
        let schedule = &schedule;
        let ranks = modules.iter_mut().zip(links).enumerate();
        let spawned: Vec<_> = ranks
            .map(|(rank, (module, mut link))| {
                scope.spawn(move || merak_pipe::run(schedule, rank, module, &mut link))
            })
            .collect();
        spawned
            .into_iter()
            .map(|t| t.join().unwrap().unwrap_err().to_string())
            .collect()
    });
    insta::assert_snapshot!(errors.join("\n"), @"
    rank 1 failed: 1B0: the loss is NaN
    rank 1 failed in 1B0 (stage 1, microbatch 0)
    rank 1 failed: 1B0: the loss is NaN
    ");
}

/// A module that panics in its first forward.
#[derive(Debug)]
struct Panics(bool);

impl StageModule for Panics {
    type Payload = ();
    type Error = std::convert::Infallible;

    fn forward(&mut self, action: Action, _: Option<()>) -> Result<Option<()>, Self::Error> {
        assert!(!self.0, "out of luck");
        Ok((action.stage.0 == 0).then_some(()))
    }

    fn backward_input(&mut self, _: Action, _: Option<()>) -> Result<Option<()>, Self::Error> {
        Ok(None)
    }

    fn backward_weight(&mut self, _: Action) -> Result<(), Self::Error> {
        Ok(())
    }
}

#[test]
fn a_panic_ends_all_ranks_and_names_it() {
    let schedule = ScheduleKind::OneFOneB.generate(Size::new(2, 1)).unwrap();
    let error = run_threads(&schedule, &mut [Panics(false), Panics(true)], DEADLINE).unwrap_err();
    assert_eq!(error.to_string(), "rank 1 panicked: out of luck");
}

#[test]
fn a_stage_that_returns_nothing_is_named() {
    let schedule = ScheduleKind::OneFOneB.generate(Size::new(2, 1)).unwrap();
    let error = run_threads(&schedule, &mut [Panics(false), Panics(false)], DEADLINE).unwrap_err();
    assert_eq!(
        error.to_string(),
        "rank 1: 1B0 returned nothing, expected the gradient of microbatch 0 from stage 1 to stage 0"
    );
}

#[test]
fn a_schedule_that_deadlocks_ends_by_the_deadline() {
    // Rank 0 wants the gradient before it has sent the activation.
    let schedule = Schedule::from_csv("mine", "0B0,0F0\n1F0,1B0\n", Size::new(2, 1)).unwrap();
    let mut modules = modules(&schedule);
    let error = run_threads(&schedule, &mut modules, Duration::from_millis(50)).unwrap_err();
    assert!(matches!(error, Error::Timeout { .. }), "{error}");
}

#[test]
fn a_local_message_that_was_not_computed_is_an_error() {
    let size = Size::new(1, 1).with_chunks(2);
    let schedule = Schedule::from_csv("mine", "1F0,0F0,1B0,0B0\n", size).unwrap();
    let error = run_threads(&schedule, &mut modules(&schedule), DEADLINE).unwrap_err();
    assert!(matches!(error, Error::NotYetComputed { .. }), "{error}");
}

#[test]
fn a_rank_that_leaves_is_noticed_at_once() {
    let schedule = ScheduleKind::OneFOneB.generate(Size::new(2, 1)).unwrap();
    let mut modules = modules(&schedule);
    let mut links = threads(2, DEADLINE);
    drop(links.remove(0));
    let error = merak_pipe::run(&schedule, 1, &mut modules[1], &mut links[0]).unwrap_err();
    assert_eq!(
        error.to_string(),
        "rank 0 ended without sending the activation of microbatch 0 from stage 0 to stage 1, for which rank 1 waits"
    );
}

#[test]
fn a_module_runs_again_after_a_failure_as_if_nothing_had_been() {
    let schedule = ScheduleKind::ZbH1.generate(Size::new(3, 5)).unwrap();
    let mut fresh = modules(&schedule);
    run_threads(&schedule, &mut fresh, DEADLINE).unwrap();
    for fault in ["0I2", "1F4", "2W0"] {
        let fault: Action = fault.parse().unwrap();
        let mut modules = modules(&schedule);
        modules[fault.stage.0].fault = Some(fault);
        run_threads(&schedule, &mut modules, DEADLINE).unwrap_err();
        modules[fault.stage.0].fault = None;
        run_threads(&schedule, &mut modules, DEADLINE).unwrap();
        assert_eq!(results(&modules), results(&fresh), "{fault}");
        assert_eq!(modules[2].losses, fresh[2].losses, "{fault}");
    }
}

/// A module whose first forward on the last rank lasts until the run is cancelled.
struct Waits(merak_pipe::Cancel, usize);

impl StageModule for Waits {
    type Payload = ();
    type Error = std::convert::Infallible;

    fn forward(&mut self, action: Action, _: Option<()>) -> Result<Option<()>, Self::Error> {
        while action.stage.0 == 1 && self.0.check().is_ok() {
            thread::sleep(Duration::from_millis(1));
        }
        Ok((action.stage.0 == 0).then_some(()))
    }

    fn backward_input(&mut self, action: Action, _: Option<()>) -> Result<Option<()>, Self::Error> {
        Ok((action.stage.0 == 1).then_some(()))
    }

    fn backward_weight(&mut self, _: Action) -> Result<(), Self::Error> {
        Ok(())
    }

    fn reset(&mut self) {
        self.1 += 1;
    }
}

#[test]
fn a_handle_ends_a_run_from_outside_on_all_ranks() {
    let schedule = ScheduleKind::OneFOneB.generate(Size::new(2, 2)).unwrap();
    let cancel = merak_pipe::Cancel::new();
    let mut modules = [Waits(cancel.clone(), 0), Waits(cancel.clone(), 0)];
    let start = std::time::Instant::now();
    let error = thread::scope(|scope| {
        scope.spawn(|| {
            thread::sleep(Duration::from_millis(50));
            cancel.cancel("the user pressed a key");
        });
        // One rank computes and the other waits for its message, for longer than this test may
        // take.
        let minutes = Duration::from_mins(10);
        merak_pipe::run_threads_until(&schedule, &mut modules, minutes, &cancel).unwrap_err()
    });
    assert_eq!(
        error.to_string(),
        "the run was cancelled: the user pressed a key"
    );
    assert!(start.elapsed() < DEADLINE);
    assert!(modules.iter().all(|module| module.1 > 0), "each is reset");
    let error =
        merak_pipe::run_threads_until(&schedule, &mut modules, DEADLINE, &cancel).unwrap_err();
    assert!(
        matches!(error, Error::Cancelled { .. }),
        "a used handle stays used: {error}"
    );
}

#[test]
fn thread_links_keep_the_promises_of_a_link() {
    merak_pipe::testing::check_links(threads::<Vec<u8>>);
}

#[test]
#[should_panic(expected = "order: rank 1")]
fn a_link_that_mixes_up_messages_fails_its_checks() {
    /// Takes every message for the same one.
    struct Mixed(merak_pipe::ThreadLink<Vec<u8>>);
    const ONE: merak_pipe::Tag = merak_pipe::Tag {
        from: merak_pipe::StageId(0),
        to: merak_pipe::StageId(1),
        microbatch: merak_pipe::MicrobatchId(0),
    };
    impl merak_pipe::Link<Vec<u8>> for Mixed {
        fn send(
            &mut self,
            to: usize,
            _: merak_pipe::Tag,
            payload: Vec<u8>,
        ) -> merak_pipe::Result<()> {
            self.0.send(to, ONE, payload)
        }

        fn recv(&mut self, from: usize, _: merak_pipe::Tag) -> merak_pipe::Result<Vec<u8>> {
            self.0.recv(from, ONE)
        }

        fn abort(&mut self, reason: &str) {
            self.0.abort(reason);
        }
    }
    merak_pipe::testing::check_links(|ranks, deadline| {
        threads(ranks, deadline).into_iter().map(Mixed).collect()
    });
}
