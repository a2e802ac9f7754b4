//! Training under autocast: weights of `f32`, and operations in 16 bits or in `f32`.

use merak_trainer::StepReport;

use super::{TOPOLOGIES, on_tch};
use crate::laws::families;
use crate::support::{Case, assert_close_losses, assert_close_tensors, numbers};

/// The types of 16 bits, and the relative error of one rounding to each.
const TYPES: [(&str, f64); 2] = [("bf16", 1.0 / 256.0), ("fp16", 1.0 / 2048.0)];

fn amp(case: &Case, key: &str) -> Case {
    let case = on_tch(case).with("half_precision_backend", "amp");
    case.with(key, true).with("initial_scale_power", 14)
}

/// Whether a weight has more digits than its type of 16 bits.
fn has_more_digits(x: f32) -> bool {
    half::bf16::from_f32(x).to_f32().to_bits() != x.to_bits()
        && half::f16::from_f32(x).to_f32().to_bits() != x.to_bits()
}

#[test]
fn amp_trains_every_family_close_to_f32_on_any_topology() {
    for (key, rounding) in TYPES {
        for (family, case) in families() {
            let what = format!("{family} in {key}");
            let (first, wide) = (on_tch(&case).run(0), on_tch(&case).run(4));
            let case = amp(&case, key);
            // As in `laws::bf16`: a rounding may put an activation on the other side of its corner,
            // which changes a gradient as much however small it is.
            let gradients = case.run(0).gradients;
            let corners = 64.0 * rounding.max(1.0 / 1024.0);
            assert_close_tensors(&gradients, &first.gradients, corners, &what);
            let alone = case.run(4);
            assert!(numbers(&alone.reports) != numbers(&wide.reports), "{what}");
            assert_close_losses(&alone.reports, &wide.reports, 2.0 * rounding, &what);
            let run = case.clone().on((2, 2, 2)).run(4);
            assert_close_losses(&run.reports, &alone.reports, 2.0 * rounding, &what);
            let weights = alone.weights.values().flatten();
            assert!(
                weights.filter(|&&x| has_more_digits(x)).count() > 0,
                "{what}"
            );
        }
    }
}

#[test]
fn weights_that_replicas_divide_are_rounded_anew_after_each_step() {
    for (key, rounding) in TYPES {
        let case = Case::gpt2().with_dropout(0.1).with("learning_rate", 1e-2);
        let wide = on_tch(&case).run(6);
        for stage in 0..=3 {
            let case = amp(&case, key).on((2, 1, 1)).with("zero_stage", stage);
            let what = format!("{key}, stage {stage}");
            assert_close_losses(&case.run(6).reports, &wide.reports, 2.0 * rounding, &what);
        }
    }
}

/// Trap N7: under amp the scale is kept in step on all ranks, with clipping and without.
#[test]
fn amp_in_f16_has_one_scale_on_all_ranks_and_moves_weights_with_clipping_and_without() {
    let scales = |reports: &[StepReport]| -> Vec<_> {
        let scale = |report: &StepReport| report.loss_scale.expect("f16 has a scale");
        reports.iter().map(scale).collect()
    };
    for max_grad_norm in [0, 1] {
        // The first steps overflow, and the scale falls.
        let case = amp(&Case::gpt2().with_dropout(0.1), "fp16")
            .with("max_grad_norm", max_grad_norm)
            .with("warmup_steps", 0)
            .with("initial_scale_power", 30)
            .with("hysteresis", 1)
            .with("loss_scale_window", 4)
            .with("max_steps", 40);
        let alone = case.run(30);
        let skipped = alone.reports.iter().filter(|r| r.skipped.is_some());
        let skipped = skipped.count();
        assert!(0 < skipped && skipped < 25, "{skipped} steps were skipped");
        let case = case.on((1, 2, 2));
        let ranks = case.on_ranks(|trainer| {
            let mut reports = Vec::new();
            let mut moved = Vec::new();
            let mut before = trainer.parameters()?;
            for _ in 0..30 {
                reports.push(trainer.train_step()?);
                let after = trainer.parameters()?;
                moved.push(after != before);
                before = after;
            }
            Ok((reports, moved))
        });
        for (reports, moved) in &ranks {
            assert_eq!(scales(reports), scales(&alone.reports), "{max_grad_norm}");
            let trained: Vec<_> = reports.iter().map(|r| r.skipped.is_none()).collect();
            assert_eq!(moved, &trained, "{max_grad_norm}");
            let what = format!("max_grad_norm {max_grad_norm}");
            assert_close_losses(reports, &alone.reports, 2.0 / 2048.0, &what);
        }
    }
}

#[test]
fn amp_keeps_sixteen_bytes_a_weight_and_activations_of_fewer() {
    let case = Case::gpt2().with_tied(false).with("zero_stage", 0);
    let elements = case.plan().graph.num_elements();
    let held = |case: &Case| {
        case.on_ranks(|trainer| {
            trainer.train_step()?;
            Ok((trainer.memory(), trainer.peak_activation_bytes()))
        })[0]
    };
    let wide = held(&on_tch(&case)).1;
    for (key, _) in TYPES {
        let case = amp(&case, key);
        let (held, narrow) = held(&case);
        let kept = (held.weights, held.gradients, held.optimizer);
        assert_eq!(kept, (4 * elements, 4 * elements, 8 * elements), "{key}");
        let planned = case.plan().memory(&case.arguments(), &[]);
        assert_eq!(planned.expect("a legal plan")[0].weights, held.weights);
        assert!(narrow < wide, "{key}: {narrow} bytes, in f32 {wide}");
    }
}

#[test]
fn every_axis_alone_has_the_gradients_of_one_rank_under_amp() {
    for (key, rounding) in TYPES {
        for case in [Case::gpt2().with_tied(true), Case::llama()] {
            let case = amp(&case.with_dropout(0.1), key);
            let alone = case.run(0).gradients;
            for degrees in TOPOLOGIES {
                let gradients = case.clone().on(degrees).run(0).gradients;
                let what = format!("{key} {degrees:?}");
                assert_close_tensors(&gradients, &alone, 16.0 * rounding, &what);
            }
        }
    }
}
