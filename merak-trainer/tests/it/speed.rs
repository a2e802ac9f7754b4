//! What a token costs, and where the time of a step goes.

use crate::support::{Case, SEQ, Tokens, VOCAB};
use merak_trainer::{
    Breakdown, Callback, Error, Result, StepProfile, StepReport,
    data::{Dataset, Sample},
    metrics::{METRICS_FILE, Progress, Reporter},
};
use serde_json::Value;
use std::{
    fs, io,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
    time::Duration,
};

/// By hand: width 32, 4 layers, sequences of 8 tokens.
const ATTENTION: f64 = 12.0 * 4.0 * 32.0 * SEQ as f64;

#[test]
fn a_token_costs_six_operations_a_parameter_besides_embeddings_and_attention() {
    let all = |case: &Case| case.plan().graph.num_elements();
    let positions = 2 * SEQ * 32;
    let tied = Case::gpt2().with_tied(true);
    let expected = 6.0 * (all(&tied) - positions) as f64 + ATTENTION;
    for degrees in [(1, 1, 1), (2, 2, 2)] {
        let found = tied.clone().on(degrees).plan().flops_per_token();
        assert!((found - expected).abs() < 1e-6, "{found}, not {expected}");
    }
    // The embedding of an untied model is only looked up.
    let untied = Case::gpt2().with_tied(false);
    assert_eq!(all(&untied), all(&tied) + VOCAB * 32);
    let found = untied.plan().flops_per_token();
    assert!((found - expected).abs() < 1e-6, "{found}, not {expected}");
}

#[test]
fn frozen_parameters_cost_four_operations() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let case = Case::gpt2().with_tied(true);
    let lora = serde_json::json!({ "target_modules": ["c_attn"], "r": 2 });
    let frozen = case.plan().graph.num_elements() - 2 * SEQ * 32;
    // A: [2, 32] and B: [96, 2] beside each of four layers.
    let trained = 4 * 2 * (32 + 96);
    let found = case
        .with_lora(folder.path(), &lora)
        .plan()
        .flops_per_token();
    let expected = (4 * frozen + 6 * trained) as f64 + ATTENTION;
    assert!((found - expected).abs() < 1e-6, "{found}, not {expected}");
}

/// Samples that take a while to read.
#[derive(Debug)]
struct Slow(Tokens);

/// How long a sample takes.
const READING: Duration = Duration::from_millis(5);

impl Dataset for Slow {
    fn len(&self) -> usize {
        self.0.len()
    }

    fn get(&self, index: usize) -> Result<Sample, Error> {
        thread::sleep(READING);
        self.0.get(index)
    }
}

#[test]
fn a_step_tells_how_long_it_waited_for_slow_data() {
    let slow = Case::gpt2().with_data(Slow(Tokens { samples: 37 }));
    let waits = slow.on((1, 1, 3)).on_ranks(|trainer| {
        let report = trainer.train_step()?;
        assert!(report.data_wait < report.time);
        Ok(report.data_wait)
    });
    // Eight samples a step; the middle stage reads none.
    assert!(
        waits[0] >= 8 * READING && waits[2] >= 8 * READING,
        "{waits:?}"
    );
    assert!(waits[1] < READING, "{waits:?}");
    // Each step may be the one in which other programs had the processor.
    let fast = Case::gpt2().on_ranks(|trainer| {
        let wait = |report: StepReport| report.data_wait;
        let waits = (0..8).map(|_| trainer.train_step().map(wait));
        waits.collect::<Result<Vec<_>>>()
    });
    let least = fast[0].iter().min().expect("there are steps");
    assert!(*least < 8 * READING, "{fast:?}");
}

#[test]
fn the_records_of_a_run_tell_how_long_its_steps_waited_for_slow_data() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let case = Case::gpt2()
        .with_data(Slow(Tokens { samples: 37 }))
        .with("max_steps", 2)
        .with("logging_steps", 1)
        .writing(folder.path());
    let (args, reporter) = (case.arguments(), Reporter::default());
    let told = |_| [Box::new(reporter.clone()) as Box<dyn Callback>];
    let trained = case.try_on_ranks_told(told, |trainer| {
        let progress = Progress::lines(trainer.total_steps(), Box::new(io::sink()));
        reporter.start(trainer, &args, folder.path(), None, progress)?;
        trainer.train().map(drop)
    });
    trained.expect("it trains");
    let records = fs::read_to_string(folder.path().join(METRICS_FILE)).expect("records");
    let waits: Vec<_> = records
        .lines()
        .filter_map(|line| serde_json::from_str::<Value>(line).ok()?["data_wait_s"].as_f64())
        .collect();
    // Eight samples a step.
    let least = (8 * READING).as_secs_f64();
    assert!(
        waits.len() == 2 && waits.iter().all(|wait| *wait >= least),
        "{records}"
    );
}

/// Counts what it is told.
#[derive(Debug, Default, Clone)]
struct Told {
    breakdowns: Arc<AtomicUsize>,
    profiles: Arc<AtomicUsize>,
}

impl Callback for Told {
    fn on_breakdown(&mut self, breakdown: &Breakdown) {
        assert_eq!(breakdown.ranks.len(), 2);
        let parts = &breakdown.ranks[1];
        assert!(parts.forward > 0.0 && parts.backward > 0.0 && parts.update > 0.0);
        assert!(parts.step >= parts.forward + parts.backward);
        self.breakdowns.fetch_add(1, Ordering::Relaxed);
    }

    fn on_profile(&mut self, profile: &StepProfile) {
        assert!(profile.to_trace().contains("\"1B3\""));
        self.profiles.fetch_add(1, Ordering::Relaxed);
    }
}

#[test]
fn callbacks_are_told_of_times_where_the_arguments_ask_for_them() {
    let case = Case::gpt2().on((1, 1, 2)).with("max_steps", 4);
    let case = case.with("logging_steps", 2);
    let asked = case
        .clone()
        .with("wall_clock_breakdown", true)
        .with("profile_start_step", 2)
        .with("profile_steps", 2);
    for (case, expected) in [(case, [0, 0]), (asked, [3, 1])] {
        let told = Told::default();
        let of_rank = |rank: usize| (rank == 0).then(|| Box::new(told.clone()) as Box<_>);
        let trained = case.try_on_ranks_told(of_rank, |trainer| trainer.train().map(drop));
        trained.expect("it trains");
        let counts = [&told.breakdowns, &told.profiles];
        assert_eq!(counts.map(|count| count.load(Ordering::Relaxed)), expected);
    }
}
