//! Optimizer state and masters in files.

use crate::support::{Case, assert_same_bits, numbers};
use merak_trainer::MemoryNeed;
use std::path::Path;

/// The same training with its state in files of a folder.
fn on_disk(case: &Case, folder: &Path) -> Case {
    let case = case.clone().writing(folder);
    case.with("offload_optimizer", "disk")
}

#[test]
fn state_in_files_changes_no_bit_in_any_stage_and_type() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let case = Case::gpt2().with_model("n_embd", 64).on((2, 1, 1));
    for stage in 0..=3 {
        for bf16 in [false, true] {
            let case = case.clone().with("zero_stage", stage).with("bf16", bf16);
            let what = format!("stage {stage}, bf16 {bf16}");
            let (beside, files) = (case.run(3), on_disk(&case, folder.path()).run(3));
            assert_same_bits(&files, &beside, &what);
            let evaluated = |case: &Case| {
                let case = case.clone().with("ema_decay", 0.5);
                case.on_ranks(|trainer| {
                    trainer.train_step()?;
                    trainer.train_step()?;
                    Ok(trainer.evaluate()?.metrics)
                })
            };
            let files = evaluated(&on_disk(&case, folder.path()));
            assert_eq!(files, evaluated(&case), "{what}");
        }
    }
    let entries = folder.path().read_dir().expect("the run made the folder");
    assert_eq!(entries.count(), 0, "the files have no names");
}

#[test]
fn a_resumed_run_with_state_in_files_equals_the_unbroken_one_without() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    for (stage, bf16) in [(1, true), (3, false)] {
        let case = Case::gpt2().on((2, 1, 1)).with("zero_stage", stage);
        let case = case.with("bf16", bf16);
        let files = on_disk(&case, &folder.path().join(stage.to_string()));
        let unbroken = case.run(4);
        let saved = files.on_ranks(|trainer| {
            trainer.train_step()?;
            trainer.train_step()?;
            // The state goes on while a thread writes the snapshot.
            trainer.save_later()?;
            trainer.train_step()?;
            trainer.finish_save()
        });
        assert_eq!(saved.len(), 2);
        for resumed in [
            &files,
            &case.writing(&folder.path().join(stage.to_string())),
        ] {
            let run = resumed
                .clone()
                .with("resume_from_checkpoint", "latest")
                .run(2);
            assert_eq!(numbers(&run.reports), numbers(&unbroken.reports[2..]));
            assert!(run.weights == unbroken.weights, "stage {stage}");
        }
    }
}

#[test]
fn the_plan_says_what_lies_in_files_and_what_stays_in_memory() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let case = Case::gpt2().with_tied(false).with("zero_stage", 0);
    let elements = case.plan().graph.num_elements();
    let state = |need: &MemoryNeed| [need.weights, need.gradients, need.optimizer, need.files];
    for (bf16, bytes) in [(false, [4, 4, 0, 8]), (true, [2, 4, 0, 12])] {
        let case = on_disk(&case, folder.path()).with("bf16", bf16);
        let held = case.on_ranks(|trainer| {
            trainer.train_step()?;
            Ok(state(&trainer.memory()))
        });
        let (plan, args) = (case.plan(), case.arguments());
        let planned = plan.memory(&args, &[]).expect("a legal plan");
        let expected = bytes.map(|bytes| bytes * elements);
        assert_eq!([held[0], state(&planned[0])], [expected; 2], "bf16 {bf16}");
        let text = plan.run_memory(&args, &[], 0).expect("a legal plan");
        let text = text.to_string();
        let place = "of optimizer state and masters lie in files under \"output_dir\"";
        assert!(text.ends_with(place), "{text}");
    }
}

#[test]
fn host_memory_is_where_weights_of_the_processor_lie_already() {
    let case = Case::gpt2().on((2, 1, 1));
    let host = case.clone().with("offload_optimizer", "host");
    assert_same_bits(&host.run(2), &case.run(2), "host");
}
