//! L2, L3: every rule of the optimizer divides over ranks and goes on elsewhere.

use std::path::Path;

use merak_zero::OptimizerKind;
use tempfile::tempdir;

use crate::support::{Case, assert_close_losses, assert_same_bits, assert_same_tensors, numbers};

/// Each rule, with a learning rate that it learns by.
fn cases() -> impl Iterator<Item = (OptimizerKind, Case)> {
    OptimizerKind::ALL.into_iter().map(|rule| {
        let lr = match rule {
            OptimizerKind::Sgd => 1e-2,
            OptimizerKind::Muon => 2e-3,
            OptimizerKind::Lion => 3e-4,
            _ => 1e-3,
        };
        let case = Case::gpt2().with_dropout(0.1).with_tied(false);
        let case = case
            .with("optim", rule.as_str())
            .with("sgd_momentum", 0.9)
            .with("weight_decay", 0.1)
            .with("warmup_steps", 0)
            .with("learning_rate", lr);
        (rule, case)
    })
}

#[test]
fn every_rule_trains_on_every_topology_like_one_rank() {
    for (rule, case) in cases() {
        let one = case.run(8);
        assert!(one.reports[7].loss < one.reports[0].loss, "{rule} learns");
        for degrees in [(2, 1, 1), (1, 2, 1), (2, 2, 2)] {
            let many = case.clone().on(degrees).run(8);
            let what = format!("{rule} on {degrees:?}");
            assert_close_losses(&many.reports, &one.reports, 1e-4, &what);
        }
    }
}

#[test]
fn every_zero_stage_has_the_bits_of_stage_0_under_every_rule() {
    for (rule, case) in cases() {
        let case = case.on((2, 2, 1)).with("zero_reduce_bucket_size", 1000);
        let case = case.with_microbatches(2);
        let whole = case.clone().with("zero_stage", 0).run(4);
        for stage in [1, 2, 3] {
            let divided = case.clone().with("zero_stage", stage).run(4);
            assert_same_bits(&divided, &whole, &format!("{rule}, stage {stage}"));
        }
    }
}

/// The rest of a run that another number of ranks began.
fn resumed(case: &Case, from: &Case, folder: &Path) -> Case {
    from.clone().writing(folder).on_ranks(|trainer| {
        for _ in 0..3 {
            trainer.train_step()?;
        }
        trainer.save_checkpoint()
    });
    let case = case.clone().writing(folder);
    case.with("resume_from_checkpoint", "latest")
}

#[test]
fn every_rule_goes_on_from_a_checkpoint_here_and_elsewhere() {
    for (rule, case) in cases() {
        let case = case.on((2, 2, 1));
        let straight = case.run(6);
        let folder = tempdir().expect("a temporary folder");
        let here = resumed(&case, &case, folder.path()).run(3);
        let what = rule.to_string();
        assert_eq!(
            numbers(&here.reports),
            numbers(&straight.reports[3..]),
            "{what}"
        );
        assert_same_tensors(&here.weights, &straight.weights, &what);
        for degrees in [(1, 1, 2), (4, 1, 1), (1, 2, 2)] {
            let folder = tempdir().expect("a temporary folder");
            let there = resumed(&case.clone().on(degrees), &case, folder.path()).run(3);
            let what = format!("{rule} on {degrees:?}");
            assert_close_losses(&there.reports, &straight.reports[3..], 1e-4, &what);
        }
    }
}
