//! Several stages per rank: nothing changes but the order of the work.

use merak_ckpt::GenerateOptions;
use merak_trainer::{MerakTrainer, Result};
use tempfile::tempdir;

use crate::support::{Case, assert_close_losses, assert_same_bits, numbers};

/// Schedules with the stages of each rank, placed in turn or in the shape of a V. Two ranks of
/// three stages, and four of two, have fewer layers than stages: some cuts lie within a block.
const SCHEDULES: [(&str, usize, usize); 14] = [
    ("interleaved_1f1b", 1, 3),
    ("interleaved_1f1b", 2, 2),
    ("interleaved_1f1b", 2, 3),
    ("interleaved_1f1b", 4, 2),
    ("zb_v", 1, 2),
    ("zb_v", 2, 2),
    ("zb_v", 4, 2),
    ("v_half", 2, 2),
    ("v_half", 4, 2),
    ("v_min", 4, 2),
    ("dualpipe_v", 4, 2),
    ("auto", 2, 1),
    ("auto", 2, 2),
    ("auto", 4, 2),
];

const STEPS: usize = 3;

fn under(case: &Case, (schedule, pp, chunks): (&str, usize, usize)) -> Case {
    case.clone()
        .on((1, 1, pp))
        .with("train_schedule", schedule)
        .with("virtual_stages", chunks)
}

/// Five microbatches, which no number of ranks divides.
fn models() -> Vec<(String, Case)> {
    let mut models = Vec::new();
    for (family, case) in [("gpt2", Case::gpt2()), ("llama", Case::llama())] {
        for tied in [true, false] {
            let case = case.clone().with_dropout(0.1).with_tied(tied);
            models.push((format!("{family} tied {tied}"), case.with_microbatches(5)));
        }
    }
    models
}

#[test]
fn no_number_of_stages_per_rank_changes_a_bit() {
    for (model, case) in models() {
        let whole = case.clone().with("activation_checkpointing", false);
        let expected = whole.run(STEPS);
        for schedule in SCHEDULES {
            for recompute in [false, true] {
                let case = under(&case, schedule).with("activation_checkpointing", recompute);
                let what = format!("{model} {schedule:?} recompute {recompute}");
                assert_same_bits(&case.run(STEPS), &expected, &what);
            }
        }
    }
}

#[test]
fn replicas_and_slices_of_several_stages_follow_the_curve_of_one_rank() {
    let case = Case::gpt2().with_dropout(0.1);
    let expected = case.run(6);
    for degrees in [(2, 1, 2), (1, 2, 2), (2, 2, 2)] {
        let split = under(&case, ("zb_v", 2, 2)).on(degrees);
        let what = format!("{degrees:?}");
        assert_close_losses(&split.run(6).reports, &expected.reports, 1e-4, &what);
    }
}

#[test]
fn a_rank_runs_its_stages_as_planned() {
    for schedule in SCHEDULES {
        let case = under(&Case::gpt2(), schedule);
        let planned = &case.plan().schedule;
        let ran = case.on_ranks(|trainer| {
            trainer.train_step()?;
            let actions = trainer.timeline().iter().map(|span| span.action);
            Ok(actions.collect::<Vec<_>>())
        });
        assert_eq!(ran, planned.actions, "{schedule:?}");
    }
}

#[test]
fn a_tied_weight_lies_once_on_a_rank_that_has_both_its_stages() {
    // The first and the last stage of a V are on the first rank.
    let case = under(&Case::gpt2(), ("zb_v", 2, 2));
    let holders = case.on_ranks(|trainer| {
        let parameters = trainer.parameters()?;
        let tied = parameters
            .iter()
            .filter(|(name, _)| name == "transformer.wte.weight");
        Ok(tied.count())
    });
    assert_eq!(holders, [1, 0]);
    // In turn they are on different ranks, which each have a copy.
    let case = under(&Case::gpt2(), ("interleaved_1f1b", 2, 2));
    let copies = case.on_ranks(|trainer| {
        trainer.train_step()?;
        let parameters = trainer.parameters()?.into_iter();
        let tied = parameters.filter(|(name, _)| name == "transformer.wte.weight");
        Ok(tied.map(|(_, values)| values).collect::<Vec<_>>())
    });
    assert_eq!(copies[0].len(), 1);
    assert_eq!(copies[0], copies[1]);
}

#[test]
fn a_checkpoint_of_several_stages_per_rank_resumes_anywhere() {
    let case = Case::gpt2().with_dropout(0.1);
    let one = ("1f1b", 1, 1);
    let straight = case.run(6);
    for (from, to) in [
        (("zb_v", 2, 2), ("zb_v", 2, 2)),
        (("zb_v", 2, 2), one),
        (one, ("zb_v", 4, 2)),
        (("interleaved_1f1b", 2, 3), ("v_half", 4, 2)),
        (("1f1b", 4, 1), ("interleaved_1f1b", 2, 2)),
    ] {
        let folder = tempdir().expect("a temporary folder");
        let saved = under(&case, from).writing(folder.path());
        saved.on_ranks(|trainer| {
            (0..3).try_for_each(|_| trainer.train_step().map(drop))?;
            trainer.save_checkpoint()
        });
        let rest = under(&case, to)
            .writing(folder.path())
            .with("resume_from_checkpoint", "latest")
            .run(3);
        // Neither the cut nor the schedule changes a bit, so neither does a move.
        let what = format!("{from:?} to {to:?}");
        assert_eq!(
            numbers(&rest.reports),
            numbers(&straight.reports[3..]),
            "{what}"
        );
        assert_eq!(rest.weights, straight.weights, "{what}");
    }
}

#[test]
fn evaluation_and_generation_pass_all_stages_of_a_rank() {
    let prompts = vec![vec![5, 17, 3], vec![80], vec![9, 9, 4]];
    let options = GenerateOptions {
        max_new_tokens: 5,
        temperature: 0.0,
        ..GenerateOptions::default()
    };
    let outcome = |case: &Case| {
        let ranks = case.on_ranks(|trainer: &mut MerakTrainer| {
            trainer.train_step()?;
            let loss = trainer.evaluate()?.eval_loss;
            let completions = trainer.generate(&prompts, &options)?;
            let after = trainer.train_step()?.loss;
            Result::Ok((loss.to_bits(), completions, after.to_bits()))
        });
        assert!(ranks.iter().all(|rank| *rank == ranks[0]));
        ranks[0].clone()
    };
    for case in [Case::gpt2(), Case::llama()] {
        let expected = outcome(&case);
        for schedule in SCHEDULES {
            assert_eq!(outcome(&under(&case, schedule)), expected, "{schedule:?}");
        }
    }
}
