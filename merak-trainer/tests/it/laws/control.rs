//! Callbacks that act on the run: what one rank asks for, all ranks do.

use std::sync::{Arc, Mutex};

use merak_ckpt::Store;
use merak_pipe::{Action, Kind};
use merak_trainer::{
    Callback, EarlyStopping, EvaluationMetrics, MerakTrainer, StepReport, Stop, TrainerControl,
};
use tempfile::tempdir;

use crate::support::Case;

/// Asks for something after some steps.
struct Asks;

impl Callback for Asks {
    fn on_step(&mut self, report: &StepReport, control: &mut TrainerControl) {
        control.should_evaluate = report.step == 2;
        control.should_log = report.step == 3;
        control.should_save = report.step == 4;
        control.should_training_stop = report.step == 6;
    }

    fn on_evaluate(&mut self, _: &EvaluationMetrics, control: &mut TrainerControl) {
        control.should_save = true;
    }
}

/// Notes the steps of events.
#[derive(Clone, Default)]
struct Notes(Arc<Mutex<Vec<String>>>);

impl Notes {
    fn note(&self, event: &str, step: usize) {
        self.0
            .lock()
            .expect("nobody panics here")
            .push(format!("{event} {step}"));
    }
}

impl Callback for Notes {
    fn on_log(&mut self, report: &StepReport) {
        self.note("log", report.step);
    }

    fn on_evaluate(&mut self, metrics: &EvaluationMetrics, _: &mut TrainerControl) {
        self.note("evaluate", metrics.step);
    }

    fn on_save_start(&mut self, step: usize) {
        self.note("save", step);
    }
}

#[test]
fn what_a_callback_of_one_rank_asks_for_all_ranks_do() {
    for (degrees, asking) in [((1, 1, 1), 0), ((2, 1, 2), 3), ((1, 2, 2), 1)] {
        let folder = tempdir().expect("a temporary folder");
        let case = Case::gpt2().on(degrees).writing(folder.path());
        let case = case.with("max_steps", 9).with("save_steps", 100);
        let notes = Notes::default();
        let told = |rank| -> Vec<Box<dyn Callback>> {
            let asks = (rank == asking).then(|| Box::new(Asks) as Box<dyn Callback>);
            let notes = (rank == 0).then(|| Box::new(notes.clone()) as Box<dyn Callback>);
            asks.into_iter().chain(notes).collect()
        };
        let ends = case.try_on_ranks_told(told, MerakTrainer::train);
        for end in ends.expect("all ranks train") {
            assert_eq!((end.global_step, end.stopped_by), (6, Some(Stop::Asked)));
        }
        let noted = notes.0.lock().unwrap().clone();
        let expected = "log 1, evaluate 2, save 2, log 3, save 4, save 6";
        assert_eq!(noted.join(", "), expected, "{degrees:?}");
        let saved = Store::in_output_dir(folder.path()).steps();
        assert_eq!(saved.expect("a folder"), [2, 4, 6]);
    }
}

/// Asks for records of two steps, of which one is logged anyway.
struct AsksForRecords;

impl Callback for AsksForRecords {
    fn on_step(&mut self, report: &StepReport, control: &mut TrainerControl) {
        control.should_log = [3, 4].contains(&report.step);
    }
}

#[test]
fn logged_steps_are_told_to_callbacks_once() {
    let case = Case::gpt2().with("max_steps", 7).with("logging_steps", 2);
    for (asks, expected) in [
        (false, "log 1, log 2, log 4, log 6, log 7"),
        (true, "log 1, log 2, log 3, log 4, log 6, log 7"),
    ] {
        let notes = Notes::default();
        let told = |rank| -> Vec<Box<dyn Callback>> {
            let asking = (asks && rank == 1).then(|| Box::new(AsksForRecords) as Box<dyn Callback>);
            let notes = (rank == 0).then(|| Box::new(notes.clone()) as Box<dyn Callback>);
            asking.into_iter().chain(notes).collect()
        };
        let case = case.clone().on((2, 1, 1));
        let ends = case.try_on_ranks_told(told, MerakTrainer::train);
        assert_eq!(ends.expect("all ranks train")[0].steps, 7);
        assert_eq!(notes.0.lock().unwrap().join(", "), expected);
    }
}

/// More of the loss counts as better, so that no evaluation improves on the first.
fn impatient() -> Case {
    Case::gpt2()
        .with("do_eval", true)
        .with("eval_steps", 2)
        .with("save_steps", 3)
        .with("max_steps", 20)
        .with("greater_is_better", true)
        .with("early_stopping_patience", 3)
}

#[test]
fn early_stopping_ends_a_run_on_every_topology_and_goes_on_waiting_when_resumed() {
    for degrees in [(1, 1, 1), (2, 1, 1), (1, 2, 2)] {
        let folder = tempdir().expect("a temporary folder");
        let case = impatient().on(degrees).writing(folder.path());
        let ends = case.on_ranks(MerakTrainer::train);
        for end in &ends {
            assert_eq!((end.global_step, end.stopped_by), (8, Some(Stop::Asked)));
            assert_eq!(end.evaluation.as_ref().expect("of step 8").step, 8);
        }
    }
    let folder = tempdir().expect("a temporary folder");
    let case = impatient().writing(folder.path());
    // Two of the three evaluations without improvement come before the break.
    case.clone()
        .with("max_steps", 6)
        .on_ranks(MerakTrainer::train);
    let resumed = case.with("resume_from_checkpoint", "latest").on((1, 1, 2));
    let ends = resumed.on_ranks(MerakTrainer::train);
    assert_eq!((ends[0].global_step, ends[0].steps), (8, 2));
    // A run that has ended early has nothing left to do.
    let again = resumed.on_ranks(MerakTrainer::train);
    assert!(again[0].stopped_by == Some(Stop::Asked) && again[0].steps == 0);
    let patient = resumed.with("early_stopping_patience", 4);
    assert_eq!(patient.on_ranks(MerakTrainer::train)[0].global_step, 10);
}

#[test]
fn early_stopping_is_a_callback_too_and_then_the_best_model_is_loaded() {
    let folder = tempdir().expect("a temporary folder");
    let case = Case::gpt2()
        .with("do_eval", true)
        .with("eval_steps", 1)
        .with("load_best_model_at_end", true)
        .with("greater_is_better", true)
        .writing(folder.path());
    let told = |rank| {
        let stopping = || EarlyStopping::new("eval_loss", true, 2, 0.0);
        (rank == 1).then(|| Box::new(stopping()) as Box<dyn Callback>)
    };
    let ends = case
        .on((1, 1, 2))
        .try_on_ranks_told(told, MerakTrainer::train);
    for end in ends.expect("all ranks train") {
        assert_eq!(
            (end.global_step, end.best.map(|best| best.step)),
            (3, Some(1))
        );
    }
}

/// Notes the actions that begin and those that end.
#[derive(Clone, Default)]
struct Actions(Arc<Mutex<[Vec<Action>; 2]>>);

impl Callback for Actions {
    fn on_action_begin(&mut self, action: Action) {
        self.0.lock().expect("nobody panics here")[0].push(action);
    }

    fn on_action_end(&mut self, action: Action) {
        self.0.lock().expect("nobody panics here")[1].push(action);
    }
}

#[test]
fn callbacks_are_told_of_every_action_of_their_rank() {
    let notes = [(); 2].map(|()| Actions::default());
    let told = |rank: usize| [Box::new(notes[rank].clone()) as Box<dyn Callback>];
    let case = Case::gpt2().on((1, 1, 2));
    let ran = case.try_on_ranks_told(told, |trainer| {
        trainer.train_step()?;
        trainer.evaluate()?;
        Ok(trainer.plan().schedule.actions.clone())
    });
    let scheduled = ran.expect("all ranks train").swap_remove(0);
    for (notes, scheduled) in notes.iter().zip(scheduled) {
        let [begun, ended] = &*notes.0.lock().unwrap();
        assert_eq!(begun, ended);
        let (trained, evaluated) = begun.split_at(scheduled.len());
        assert_eq!(trained, scheduled);
        assert!(!evaluated.is_empty());
        assert!(evaluated.iter().all(|action| action.kind == Kind::Forward));
    }
}
