//! Training in f16, whose loss is scaled.

use std::path::Path;

use merak_trainer::{Error, MerakTrainer, StepReport};

use super::{TOPOLOGIES, on_tch};
use crate::laws::families;
use crate::support::{
    Case, Run, assert_close_losses, assert_close_tensors, assert_same_tensors, numbers,
};

/// Half the distance from 1 to the next number of f16: the relative error of one rounding.
const ROUNDING: f64 = 1.0 / 2048.0;

/// The case in f16, with a first scale of 2^power.
fn scaled(case: &Case, power: u32) -> Case {
    let case = on_tch(case).with("fp16", true);
    case.with("initial_scale_power", power)
}

fn scales(reports: &[StepReport]) -> Vec<f64> {
    let scale = |report: &StepReport| report.loss_scale.expect("f16 has a scale");
    reports.iter().map(scale).collect()
}

fn skips(reports: &[StepReport]) -> Vec<bool> {
    reports.iter().map(|r| r.skipped.is_some()).collect()
}

fn assert_same(run: &Run, expected: &Run, what: &str) {
    assert_eq!(numbers(&run.reports), numbers(&expected.reports), "{what}");
    assert_eq!(scales(&run.reports), scales(&expected.reports), "{what}");
    assert_eq!(skips(&run.reports), skips(&expected.reports), "{what}");
    assert_same_tensors(&run.weights, &expected.weights, what);
}

#[test]
fn f16_trains_close_to_f32_on_any_topology() {
    for (family, case) in families() {
        let (wide, narrow) = (on_tch(&case).run(6), scaled(&case, 14).run(6));
        assert_eq!(scales(&narrow.reports), [16384.0; 6], "{family}");
        // Roundings of four layers mostly cancel out in the mean over the tokens: two are left.
        assert_close_losses(&narrow.reports, &wide.reports, 2.0 * ROUNDING, family);
        let run = scaled(&case, 14).on((2, 2, 2)).run(6);
        assert_close_losses(&run.reports, &narrow.reports, 2.0 * ROUNDING, family);
        // The optimizer steps on f32 masters: they are no 16-bit numbers.
        let masters = narrow.weights.values().flatten();
        let kept = masters.filter(|&&x| half::f16::from_f32(x).to_f32().to_bits() != x.to_bits());
        assert!(kept.count() > 0, "{family}");
    }
}

#[test]
fn every_axis_alone_has_the_gradients_and_losses_of_one_rank() {
    for case in [Case::gpt2().with_tied(true), Case::llama()] {
        for power in [12, 16] {
            let case = scaled(&case.clone().with_dropout(0.1), power);
            let (first, all) = (case.run(0), case.run(6));
            for degrees in TOPOLOGIES.into_iter().chain([(2, 2, 1)]) {
                let case = case.clone().on(degrees);
                let what = format!("{degrees:?} from 2^{power}");
                let gradients = case.run(0).gradients;
                assert_close_tensors(&gradients, &first.gradients, 8.0 * ROUNDING, &what);
                let run = case.run(6);
                assert_close_losses(&run.reports, &all.reports, 2.0 * ROUNDING, &what);
                assert_eq!(scales(&run.reports), scales(&all.reports), "{what}");
                assert_eq!(skips(&run.reports), [false; 6], "{what}");
            }
        }
    }
}

#[test]
fn the_scale_is_not_in_weights_norms_or_gradients() {
    // A power of two changes exponents alone, where nothing is too small or too large for f16.
    let case = Case::gpt2().with("max_grad_norm", 0.5);
    let fixed = scaled(&case, 32).with("loss_scale", 16384).run(4);
    let dynamic = scaled(&case, 14).run(4);
    assert_same(&fixed, &dynamic, "a fixed scale");
    let wide = on_tch(&case).run(0);
    let narrow = scaled(&case, 14).run(0);
    assert_close_tensors(&narrow.gradients, &wide.gradients, 16.0 * ROUNDING, "f32");
}

/// What a rank saw of a step: whether its own gradients were finite, and the report.
fn watched_step(trainer: &mut MerakTrainer) -> merak_trainer::Result<(bool, bool, StepReport)> {
    let (_, own) = trainer.gradients()?;
    let is_finite = own.iter().flat_map(|(_, g)| g).all(|g| g.is_finite());
    let before = trainer.parameters()?;
    let report = trainer.train_step()?;
    let is_still = before == trainer.parameters()?;
    Ok((is_finite, is_still, report))
}

#[test]
fn an_overflow_on_one_stage_skips_the_step_on_both_with_one_sequence_of_scales() {
    // After each clean step the scale doubles, after each overflow it halves: it stays where the
    // largest gradients are near the limit of f16.
    let case = scaled(&Case::gpt2(), 20)
        .on((1, 1, 2))
        .with("max_steps", 60);
    let case = case.with("loss_scale_window", 1).with("hysteresis", 1);
    let case = case.with("warmup_steps", 0);
    let ranks = case.on_ranks(|trainer| {
        (0..40)
            .map(|_| watched_step(trainer))
            .collect::<merak_trainer::Result<Vec<_>>>()
    });
    let mut on_one_stage = 0;
    let mut scale = 2_f64.powi(20);
    for (first, last) in ranks[0].iter().zip(&ranks[1]) {
        let (is_finite, reports) = ([first.0, last.0], [&first.2, &last.2]);
        for report in reports {
            assert_eq!(report.skipped.is_some(), is_finite.contains(&false));
            assert_eq!(report.skipped, first.2.skipped);
            assert_eq!(report.loss_scale, Some(scale));
        }
        assert_eq!([first.1, last.1], [first.2.skipped.is_some(); 2], "weights");
        on_one_stage += usize::from(is_finite[0] != is_finite[1]);
        scale *= if first.2.skipped.is_some() { 0.5 } else { 2.0 };
    }
    assert!(on_one_stage > 0, "{ranks:?}");
    for pair in ranks[0].windows(2) {
        let [before, after] = [&pair[0].2, &pair[1].2];
        let is_same = before.lr.to_bits() == after.lr.to_bits();
        assert_eq!(is_same, before.skipped.is_some(), "the schedule waits");
    }
}

/// A case whose scale comes down from where gradients overflow, and rises again.
fn moving(folder: &Path) -> Case {
    let case = scaled(&Case::gpt2().with_dropout(0.1), 24).writing(folder);
    case.with("loss_scale_window", 3).with("hysteresis", 2)
}

#[test]
fn a_run_saved_amid_scaling_goes_on_bit_by_bit() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    for (number, degrees) in [(1, 1, 1), (1, 1, 2), (2, 1, 1)].into_iter().enumerate() {
        let case = moving(&folder.path().join(number.to_string())).on(degrees);
        let unbroken = case.run(10);
        let skips = skips(&unbroken.reports);
        assert!(skips.contains(&true) && skips.contains(&false), "{skips:?}");
        for cut in [1, 2, 5, 7] {
            let saved = case.on_ranks(|trainer| {
                for _ in 0..cut {
                    trainer.train_step()?;
                }
                trainer.save_checkpoint()
            });
            let from = saved[0].display();
            let resumed = case.clone().with("resume_from_checkpoint", from);
            let run = resumed.run(10 - cut);
            let expected = &unbroken.reports[cut..];
            let what = format!("{degrees:?} saved after {cut}");
            assert_eq!(numbers(&run.reports), numbers(expected), "{what}");
            assert_eq!(scales(&run.reports), scales(expected), "{what}");
            assert_same_tensors(&run.weights, &unbroken.weights, &what);
        }
    }
}

#[test]
fn a_checkpoint_without_a_scale_begins_with_the_first() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let case = Case::gpt2().writing(folder.path());
    let saved = on_tch(&case).with("bf16", true).on_ranks(|trainer| {
        trainer.train_step()?;
        trainer.save_checkpoint()
    });
    let resumed = scaled(&case, 13).with("resume_from_checkpoint", saved[0].display());
    assert_eq!(scales(&resumed.run(2).reports), [8192.0; 2]);
    // So does a run that takes weights alone, whatever scale they were saved with.
    let moved = moving(folder.path());
    let saved = moved.on_ranks(|trainer| {
        for _ in 0..4 {
            trainer.train_step()?;
        }
        trainer.save_checkpoint()
    });
    let resumed = moved.with("resume_from_checkpoint", saved[0].display());
    let first = |case: &Case| scales(&case.run(1).reports)[0];
    assert!(first(&resumed) < first(&resumed.clone().with("finetune", true)));
}

#[test]
fn a_run_whose_every_step_overflows_ends_with_the_key_of_the_scale() {
    let ended = |case: &Case| {
        let ended = case.try_on_ranks(|trainer| trainer.train().map(drop));
        ended.expect_err("nothing was trained")
    };
    // The default begins at 2^32, and four overflows bring it to 2^29.
    let short = scaled(&Case::gpt2(), 32).with("max_steps", 5);
    let error = ended(&short);
    let of = |error: &Error| match error {
        Error::SkippedSteps {
            steps, loss_scale, ..
        } => Some((*steps, *loss_scale)),
        _ => None,
    };
    let at = Some((2_f64.powi(29), "initial_scale_power"));
    assert_eq!(of(&error), Some((5, at)), "{error}");
    // A fixed scale cannot fall, so the limit counts.
    let fixed = short
        .with("loss_scale", 2_f64.powi(40))
        .with("max_steps", 9);
    let error = ended(&fixed.with("max_skipped_steps", 3).on((1, 1, 2)));
    assert_eq!(of(&error), Some((3, Some((2_f64.powi(40), "loss_scale")))));
    let message = error.to_string();
    let expected = "is not finite at the loss scale 1099511627776: look for numbers in the data or the starting weights \
         that are not finite or very large, or choose a smaller \"learning_rate\" or \"loss_scale\" \
         (\"max_skipped_steps\" is 3)";
    assert!(message.ends_with(expected), "{message}");
}

#[test]
fn adapters_train_beside_an_f16_base() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let lora =
        serde_json::json!({ "target_modules": ["c_attn"], "r": 2, "init_lora_weights": false });
    let wide = on_tch(&Case::gpt2().with_lora(folder.path(), &lora));
    let narrow = scaled(&wide, 14);
    let (wide, alone) = (wide.run(4), narrow.run(4));
    assert_close_losses(&alone.reports, &wide.reports, 8.0 * ROUNDING, "f32");
    let run = narrow.on((1, 2, 2)).run(4);
    assert_close_losses(&run.reports, &alone.reports, 8.0 * ROUNDING, "two axes");
}
