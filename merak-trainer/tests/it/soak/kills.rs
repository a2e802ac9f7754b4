//! A run whose ranks are killed again and again ends on the curve of an uninterrupted one, bit for
//! bit.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex},
};

use merak_trainer::{Callback, StepReport, TrainerControl};
use tempfile::tempdir;

use crate::support::Case;

/// Numbers that look random and are the same in every run.
pub(crate) struct Dice(u64);

impl Dice {
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// A number below `bound`.
    pub(crate) fn below(&mut self, bound: usize) -> usize {
        self.0 = self
            .0
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as usize % bound
    }
}

/// The bits of the loss of each step, of the last run that made it.
type Losses = Arc<Mutex<BTreeMap<usize, u64>>>;

/// Notes losses.
struct Notes(Losses);

impl Callback for Notes {
    fn on_step(&mut self, report: &StepReport, _: &mut TrainerControl) {
        let mut losses = self.0.lock().expect("nobody panics here");
        losses.insert(report.step, report.loss.to_bits());
    }
}

/// Kills its rank, after a step or while the next checkpoint is written.
#[derive(Debug, Clone, Copy)]
struct Killer {
    rank: usize,
    step: usize,
    within_save: bool,
}

// A thread cannot be killed, but it can panic.
impl Callback for Killer {
    fn on_step(&mut self, report: &StepReport, _: &mut TrainerControl) {
        let is_due = !self.within_save && report.step >= self.step;
        assert!(!is_due, "killed after step {}", report.step);
    }

    fn on_save_start(&mut self, step: usize) {
        let is_due = self.within_save && step >= self.step;
        assert!(!is_due, "killed while saving step {step}");
    }
}

/// Trains to the end unless a rank is killed; returns each rank's weights.
fn train(case: &Case, losses: &Losses, killer: Option<Killer>) -> Option<Vec<Vec<u32>>> {
    let told = |rank| {
        let notes = (rank == 0).then(|| Box::new(Notes(Arc::clone(losses))) as Box<dyn Callback>);
        let killer = killer.filter(|killer| killer.rank == rank);
        let killer = killer.map(|killer| Box::new(killer) as Box<dyn Callback>);
        notes.into_iter().chain(killer)
    };
    let ranks = case.try_on_ranks_told(told, |trainer| {
        trainer.train()?;
        let parameters = trainer.parameters()?.into_iter();
        let values = parameters.flat_map(|(_, values)| values);
        Ok(values.map(f32::to_bits).collect())
    });
    ranks.ok()
}

/// Trains for `steps` steps, with a kill in each `interval` of them but the last.
fn soak(case: &Case, steps: usize, interval: usize) {
    let ranks = case.arguments().world_size();
    let folders = [(); 2].map(|()| tempdir().expect("a temporary folder"));
    let [whole, broken] = folders.each_ref().map(|folder| {
        case.clone()
            .writing(folder.path())
            .with("max_steps", steps)
            .with("save_total_limit", 2)
            .with("resume_from_checkpoint", "auto")
    });
    let (expected, found) = (Losses::default(), Losses::default());
    let weights = train(&whole, &expected, None).expect("nobody is killed");
    let mut dice = Dice::new(7);
    for start in (0..steps - interval).step_by(interval) {
        let killer = Killer {
            rank: dice.below(ranks),
            step: start + 1 + dice.below(interval),
            within_save: dice.below(3) == 0,
        };
        let ended = train(&broken, &found, Some(killer));
        assert!(ended.is_none(), "{killer:?} kills");
    }
    let last = train(&broken, &found, None).expect("nobody is killed any more");
    let [found, expected] =
        [found, expected].map(|losses| losses.lock().expect("it ended").clone());
    assert_eq!(found, expected);
    assert!(last == weights, "the same weights");
}

fn small() -> Case {
    Case::gpt2()
        .with_model("n_embd", 16)
        .with_dropout(0.1)
        .with("per_device_train_batch_size", 1)
}

#[test]
fn a_run_with_three_kills_ends_on_its_curve() {
    let case = small().with("save_steps", 6);
    for (degrees, is_async) in [((1, 1, 2), false), ((2, 1, 1), true)] {
        let case = case.clone().on(degrees).with("async_save", is_async);
        soak(&case, 60, 15);
    }
}

/// Takes minutes: `cargo test -p merak-trainer --test it -- --ignored soak::kills`.
#[test]
#[ignore = "takes minutes"]
fn two_thousand_steps_with_a_kill_every_hundred_end_on_their_curve() {
    let case = small().with("save_steps", 30);
    soak(&case.on((2, 1, 2)).with("async_save", true), 2000, 100);
}
