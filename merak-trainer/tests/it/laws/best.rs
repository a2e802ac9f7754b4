//! The best model of a run: judged after evaluations, kept, named, and loaded in the end.

use std::{fs, path::Path};

use merak_ckpt::{Checkpoint, Store, extract_lora};
use merak_trainer::{BestModel, MerakTrainer};
use serde_json::json;
use tempfile::tempdir;

use crate::support::Case;

/// Evaluates after every second step. The loss falls and a larger one counts as better, so the
/// first is the best.
fn judged() -> Case {
    Case::gpt2()
        .with("save", true)
        .with("do_eval", true)
        .with("eval_steps", 2)
        .with("save_steps", 5)
        .with("max_steps", 6)
        .with("load_best_model_at_end", true)
        .with("greater_is_better", true)
}

/// Trains and returns the best model; each rank's weights in the end must have its score.
fn train(case: &Case, folder: &Path) -> BestModel {
    let case = case.clone().writing(folder);
    let ends = case.on_ranks(|trainer| {
        let output = trainer.train()?;
        let last = output.evaluation.expect("the last step is evaluated");
        assert_eq!(last.step, output.global_step);
        let best = output.best.expect("losses are finite");
        assert!(best.score >= last.eval_loss, "the loss fell");
        let again = trainer.evaluate()?.eval_loss;
        // Another topology than that of the judged evaluation sums in another order.
        assert!((again / best.score - 1.0).abs() < 1e-6, "{again} {best:?}");
        Ok(best)
    });
    assert!(ends.iter().all(|end| *end == ends[0]), "{ends:?}");
    ends[0]
}

fn step_of(path: Option<std::path::PathBuf>) -> Option<u64> {
    Some(
        Checkpoint::open(path?)
            .expect("it is there")
            .manifest()
            .header
            .step,
    )
}

#[test]
fn the_best_model_is_kept_and_loaded_on_any_topology() {
    let mut scores = Vec::new();
    for (degrees, zero, is_async) in [
        ((1, 1, 1), 1, false),
        ((1, 1, 1), 1, true),
        ((2, 1, 1), 0, true),
        ((1, 2, 1), 1, false),
        ((1, 1, 4), 1, true),
        ((2, 2, 2), 1, true),
    ] {
        let folder = tempdir().expect("a temporary folder");
        let case = judged()
            .on(degrees)
            .with("zero_stage", zero)
            .with("async_save", is_async)
            .with("save_total_limit", 1);
        let best = train(&case, folder.path());
        assert_eq!(best.step, 2);
        scores.push(best.score);
        let store = Store::in_output_dir(folder.path());
        assert_eq!(
            store.steps().expect("a folder"),
            [2, 6],
            "the newest and the best"
        );
        assert_eq!(step_of(store.best().expect("a file")), Some(2));
        assert_eq!(step_of(store.latest().expect("a file")), Some(6));
    }
    for score in &scores {
        assert!((score / scores[0] - 1.0).abs() < 1e-4, "{scores:?}");
    }
}

#[test]
fn the_averages_of_the_best_model_are_loaded_with_its_weights() {
    for (degrees, zero) in [((1, 1, 1), 0), ((2, 1, 2), 1), ((2, 2, 1), 3)] {
        for lacks_state in [false, true] {
            let folder = tempdir().expect("a temporary folder");
            let case = judged()
                .on(degrees)
                .with("zero_stage", zero)
                .with("ema_decay", 0.5)
                .with("learning_rate", 3e-3)
                .with("no_save_optim", lacks_state)
                .writing(folder.path());
            let judged = case.on_ranks(|trainer| {
                trainer.train_step()?;
                trainer.train_step()?;
                trainer.evaluate()
            });
            let loaded = case.on_ranks(|trainer| {
                let best = trainer.train()?.best.expect("losses are finite");
                assert_eq!(best.step, 2);
                trainer.evaluate()
            });
            let (judged, loaded) = (&judged[0], &loaded[0]);
            assert_eq!(loaded.eval_loss.to_bits(), judged.eval_loss.to_bits());
            let average = judged.get("eval_ema_loss");
            assert_ne!(average, Some(judged.eval_loss));
            // Without the optimizer's state, averages begin as the weights.
            let expected = if lacks_state {
                Some(judged.eval_loss)
            } else {
                average
            };
            let what = format!("{degrees:?}, stage {zero}, lacks state: {lacks_state}");
            assert_eq!(loaded.get("eval_ema_loss"), expected, "{what}");
        }
    }
}

#[test]
fn a_resumed_run_knows_what_was_best_before() {
    let case = judged()
        .with("eval_steps", 1)
        .with("lr_scheduler_type", "constant");
    let (broken, elsewhere) = (tempdir().expect("a folder"), tempdir().expect("a folder"));
    let first = train(&case.clone().with("max_steps", 3), broken.path());
    assert_eq!(first.step, 1);
    let resumed = case
        .on((1, 2, 2))
        .with("resume_from_checkpoint", broken.path().display());
    // A run in another folder does not load the best model of this run.
    assert_eq!(train(&resumed, elsewhere.path()).step, 4);
    assert_eq!(train(&resumed, broken.path()), first);
    // A run without steps left ends with the best model as well.
    let again = resumed.writing(broken.path());
    let ends = again.on_ranks(MerakTrainer::train);
    assert!(
        ends.iter()
            .all(|end| end.best == Some(first) && end.evaluation.is_none())
    );
}

#[test]
fn best_names_one_of_the_saved_steps_and_nothing_once_that_is_deleted() {
    let case = judged()
        .with("load_best_model_at_end", false)
        .with("save_steps", 2);
    let named = |case: &Case| {
        let folder = tempdir().expect("a temporary folder");
        let ends = case
            .clone()
            .writing(folder.path())
            .on_ranks(MerakTrainer::train);
        assert!(ends.iter().all(|end| end.best.is_none()));
        step_of(
            Store::in_output_dir(folder.path())
                .best()
                .expect("it can be read"),
        )
    };
    assert_eq!(named(&case), Some(2));
    assert_eq!(named(&case.clone().with("save_steps", 4)), Some(4));
    assert_eq!(
        named(&case.clone().with("greater_is_better", false)),
        Some(6)
    );
    assert_eq!(named(&case.clone().with("save_total_limit", 1)), None);
    assert_eq!(named(&case.with("do_eval", false)), None);
}

#[test]
fn the_adapter_that_a_run_leaves_is_the_best_one() {
    let folder = tempdir().expect("a temporary folder");
    let lora = json!({"r": 2, "init_lora_weights": false});
    let case = judged()
        .with_lora(folder.path(), &lora)
        .with("learning_rate", 1e-2);
    let run = folder.path().join("run");
    assert_eq!(train(&case, &run).step, 2);
    let best = Store::in_output_dir(&run)
        .best()
        .expect("a file")
        .expect("a name");
    let best = Checkpoint::open(best).expect("it is there");
    extract_lora(&best, folder.path().join("best")).expect("it has an adapter");
    let left = |place: &Path| fs::read(place.join("adapter_model.safetensors")).expect("a file");
    assert!(left(&run.join("adapter")) == left(&folder.path().join("best")));
}

#[test]
fn another_checkpoint_of_the_best_step_is_not_taken_for_it() {
    let folder = tempdir().expect("a temporary folder");
    let (case, run) = (judged().with("eval_steps", 3), folder.path().join("run"));
    assert_eq!(train(&case, &run).step, 3);
    // Another run in the same folder saves that step too.
    train(&case.clone().with("seed", 7).with("max_steps", 4), &run);
    let resumed = |steps: usize| {
        let last = run.join("checkpoints/step-00000006");
        case.clone()
            .with("resume_from_checkpoint", last.display())
            .with("max_steps", steps)
    };
    let kept = resumed(6).writing(&run).on_ranks(MerakTrainer::train);
    assert!(kept.iter().all(|end| end.best.is_none()), "{kept:?}");
    let best = train(&resumed(9).with("greater_is_better", false), &run);
    assert_eq!(best.step, 9, "it is judged afresh");
}

#[test]
fn a_best_model_that_is_gone_is_told_once_training_is_done() {
    let folder = tempdir().expect("a temporary folder");
    let case = judged().writing(folder.path());
    case.on_ranks(MerakTrainer::train);
    let best = Store::in_output_dir(folder.path()).path_of(2);
    let weights = best.join("model-00000.safetensors");
    fs::write(&weights, &fs::read(&weights).expect("a file")[1..]).expect("it is cut");
    let resumed = case.on((1, 2, 1)).with("resume_from_checkpoint", "latest");
    let error = resumed
        .try_on_ranks(MerakTrainer::train)
        .expect_err("it is damaged");
    assert!(!error.is_user_error());
    let text = merak_trainer::chain(&error);
    for part in [
        "training is done, and step 6 is saved",
        "that of step 2",
        "is damaged",
    ] {
        assert!(text.contains(part), "{text}");
    }
}
