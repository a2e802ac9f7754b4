//! What an optimizer step may touch.

use merak_trainer::{
    Result,
    data::{Dataset, IGNORED_LABEL, LABELS, Sample, SampleTensor},
};

use super::{divergence::NotNumbers, encoders::vit};
use crate::support::{Case, Run, Tensors, Tokens, assert_close_tensors, assert_same_tensors};

/// Samples in which no position has a label: the gradient is zero, so only decay moves a weight.
#[derive(Debug)]
struct NothingToLearn;

impl Dataset for NothingToLearn {
    fn len(&self) -> usize {
        20
    }

    fn get(&self, index: usize) -> Result<Sample> {
        let mut sample = Tokens { samples: 20 }.get(index)?;
        let none = vec![IGNORED_LABEL; sample[LABELS].ints().len()];
        sample.insert(LABELS.to_owned(), SampleTensor::vector(none));
        Ok(sample)
    }
}

#[test]
fn norms_and_biases_do_not_decay() {
    for (case, degrees) in [
        (Case::gpt2(), (1, 1, 1)),
        (Case::gpt2(), (1, 2, 2)),
        (Case::llama(), (2, 1, 2)),
    ] {
        let case = case
            .with_data(NothingToLearn)
            .with("lr_scheduler_type", "constant")
            .with("warmup_steps", 0)
            .with("learning_rate", 0.5)
            .with("weight_decay", 0.5)
            .on(degrees);
        let (before, after) = (case.run(0).weights, case.run(1));
        assert_eq!(
            (after.reports[0].loss, after.reports[0].grad_norm),
            (0.0, 0.0)
        );
        for (name, values) in &after.weights {
            let is_kept = name.ends_with("bias") || name.contains("ln_") || name.contains("norm");
            for (now, then) in values.iter().zip(&before[name]) {
                let expected = if is_kept { *then } else { then * 0.75 };
                assert!(
                    (now - expected).abs() <= 1e-6 * then.abs(),
                    "{name}: {then} became {now}"
                );
            }
        }
        assert!(
            after
                .weights
                .keys()
                .any(|name| name.contains("norm") || name.contains("ln_"))
        );
    }
}

/// The factors of learning rate and weight decay of a parameter of 4 layers in
/// [`groups_of_parameters_step_by_their_own_rates_and_decays_on_any_ranks`].
fn of_group(name: &str) -> (f64, f64) {
    let layer: Option<i32> = name.split('.').find_map(|part| part.parse().ok());
    let above = match layer {
        Some(layer) => 4 - layer,
        None if name.contains(".wte") || name.contains(".wpe") => 5,
        None => 0,
    };
    let scales = [("wpe", 0.0), ("h.1.mlp", 3.0), ("mlp", 0.5)];
    let named = scales.iter().find(|(part, _)| name.contains(part));
    let scale = named.map_or(1.0, |(_, scale)| *scale);
    let is_kept = ["bias", "ln_", "c_fc"]
        .iter()
        .any(|part| name.contains(part));
    let decay = if is_kept { 0.0 } else { 0.01 };
    (scale * 0.5_f64.powi(above), decay)
}

#[test]
fn groups_of_parameters_step_by_their_own_rates_and_decays_on_any_ranks() {
    let case = Case::gpt2()
        .with_tied(false)
        .with("optim", "sgd")
        .with("learning_rate", 10)
        .with("lr_scheduler_type", "constant")
        .with("warmup_steps", 0)
        .with("max_grad_norm", 0)
        .with("weight_decay", 0.01)
        .with("lr_scales", r#"{"mlp": 0.5, "h.1.mlp": 3, "wpe": 0}"#)
        .with("layerwise_lr_decay", 0.5)
        .with("no_decay_names", r#"["c_fc"]"#);
    let (start, alone) = (case.run(0), case.run(1));
    for (name, values) in &alone.weights {
        let (rate, decay) = of_group(name);
        if rate == 0.0 {
            assert_eq!(values, &start.weights[name]);
            assert!(!start.gradients.contains_key(name), "{name}");
            continue;
        }
        let before = start.weights[name].iter().zip(&start.gradients[name]);
        for (&now, (&then, &grad)) in values.iter().zip(before) {
            let then = f64::from(then);
            let step = 10.0 * rate * (f64::from(grad) + decay * then);
            let off = (f64::from(now) - (then - step)).abs();
            assert!(
                off <= 1e-6 * (then.abs() + step.abs()),
                "{name}: {then} became {now}"
            );
        }
    }
    let steps = |run: Run| -> Tensors {
        let step = |(name, values): (String, Vec<f32>)| {
            let pairs = values.iter().zip(&start.weights[&name]);
            let step: Vec<f32> = pairs.map(|(now, then)| now - then).collect();
            (name, step)
        };
        run.weights.into_iter().map(step).collect()
    };
    let divided = case.clone().on((2, 2, 2)).with("zero_stage", 3).run(1);
    // A step is the difference of rounded weights.
    assert_close_tensors(&steps(divided), &steps(alone), 1e-3, "divided");
}

#[test]
fn frozen_parameters_have_no_gradient_and_no_state_and_change_no_bit_of_the_others() {
    // All of the first stage of two, and a norm of the second.
    let frozen = ["wte", "wpe", "h.0.", "h.1.", "h.2.ln_1"];
    let scales = |scale: &str| {
        let scales = frozen.map(|part| format!("\"{part}\": {scale}"));
        format!("{{{}}}", scales.join(", "))
    };
    let case = Case::gpt2().with_tied(false).with("max_grad_norm", 0);
    let rests = |name: &str| frozen.iter().any(|part| name.contains(part));
    for (degrees, stage) in [
        ((1, 1, 1), 0),
        ((2, 1, 1), 1),
        ((2, 1, 1), 2),
        ((2, 1, 1), 3),
        ((1, 2, 1), 0),
        ((1, 1, 2), 0),
        ((2, 2, 2), 3),
    ] {
        let case = case.clone().on(degrees).with("zero_stage", stage);
        let [all, some] = ["1e-30", "0"].map(|scale| {
            let case = case.clone().with("lr_scales", scales(scale));
            case.run(3)
        });
        let start = case.run(0).weights;
        for (name, values) in &some.weights {
            // A bias of 0 moves even at the least rate.
            let expected = if rests(name) { &start } else { &all.weights };
            assert_eq!(
                values, &expected[name],
                "{name}: {degrees:?} in stage {stage}"
            );
        }
        let losses = |run: &Run| run.reports.iter().map(|r| r.loss).collect::<Vec<_>>();
        assert_eq!(losses(&some), losses(&all), "{degrees:?} in stage {stage}");
        assert!(some.reports[0].grad_norm < all.reports[0].grad_norm);
        assert!(!some.gradients.keys().any(|name| rests(name)));
    }
    let case = case.with("lr_scales", scales("0"));
    let memory = case.on_ranks(|trainer| Ok((trainer.memory(), trainer.parameters()?)));
    let (memory, params) = &memory[0];
    let trained = params.iter().filter(|(name, _)| !rests(name));
    let elements: usize = trained.map(|(_, values)| values.len()).sum();
    assert_eq!(
        (memory.gradients, memory.optimizer),
        (4 * elements, 8 * elements)
    );
}

#[test]
fn a_step_without_finite_gradients_leaves_weights_and_schedule_alone() {
    // The first update throws the weights so far out that no later gradient is finite.
    let case = Case::gpt2()
        .with("warmup_steps", 0)
        .with("lr_scheduler_type", "linear")
        .with("learning_rate", 1e30)
        .with("max_grad_norm", 0);
    for degrees in [(1, 1, 1), (2, 2, 2)] {
        let ranks = case.clone().on(degrees).on_ranks(|trainer| {
            let first = trainer.train_step()?;
            let weights = trainer.parameters()?;
            let reports = [trainer.train_step()?, trainer.train_step()?];
            Ok((
                trainer.mpu().coord(),
                first,
                reports,
                weights,
                trainer.parameters()?,
            ))
        });
        for (place, first, reports, before, after) in &ranks {
            assert_eq!(first.skipped, None);
            for report in reports {
                assert!(report.skipped.is_some(), "{report:?} on {place:?}");
                assert_eq!(report.skipped, ranks[0].2[0].skipped);
                assert_eq!(report.lr.to_bits(), reports[0].lr.to_bits());
            }
            assert!(reports[0].lr < first.lr);
            let (before, after) = (
                before.iter().cloned().collect(),
                after.iter().cloned().collect(),
            );
            assert_same_tensors(&after, &before, "skipped steps");
        }
    }
}

/// For each of twelve steps of every rank: why it was skipped, the bits of its learning rate, and
/// whether the weights stayed.
fn watched(case: &Case) -> Vec<Vec<(Option<String>, u64, bool)>> {
    case.on_ranks(|trainer| {
        let mut steps = Vec::new();
        let mut before = trainer.parameters()?;
        for _ in 0..12 {
            let report = trainer.train_step()?;
            let after = trainer.parameters()?;
            steps.push((report.skipped, report.lr.to_bits(), after == before));
            before = after;
        }
        Ok(steps)
    })
}

#[test]
fn a_replica_without_finite_gradients_skips_the_step_of_all_in_every_zero_stage() {
    // Each replica has one of the two samples of a step.
    let case = vit(0.0)
        .with_data(NotNumbers)
        .with("per_device_train_batch_size", 1)
        .with_microbatches(2)
        .with("warmup_steps", 0);
    let alone = watched(&case).swap_remove(0);
    let skipped = alone.iter().filter(|step| step.0.is_some()).count();
    assert!(0 < skipped && skipped < alone.len(), "{alone:?}");
    assert!(alone.iter().all(|step| step.0.is_some() == step.2));
    for pair in alone.windows(2) {
        // The schedule goes on with steps that were made.
        assert_eq!(pair[0].1 == pair[1].1, pair[0].0.is_some(), "{alone:?}");
    }
    for stage in 0..=3 {
        for bf16 in [false, true] {
            let case = case.clone().with("zero_stage", stage).with("bf16", bf16);
            for degrees in [(2, 1, 1), (2, 1, 2)] {
                for steps in watched(&case.clone().on(degrees)) {
                    assert_eq!(steps, alone, "stage {stage}, bf16 {bf16}, {degrees:?}");
                }
            }
        }
    }
}

#[test]
fn a_largest_norm_of_zero_or_less_clips_nothing() {
    let weights = |norm: f64| Case::gpt2().with("max_grad_norm", norm).run(2).weights;
    let free = weights(0.0);
    assert_same_tensors(&weights(-1.0), &free, "-1 as 0");
    assert_ne!(weights(1e-3), free);
}

#[test]
fn evaluation_reports_the_loss_without_label_smoothing() {
    let losses = |smoothing: f64| {
        let case = Case::gpt2().with("label_smoothing_factor", smoothing);
        let ranks = case.on_ranks(|trainer| {
            let evaluated = trainer.evaluate()?.eval_loss;
            Ok((evaluated, trainer.train_step()?.loss))
        });
        ranks[0]
    };
    let ((plain, trained), (evaluated, smoothed)) = (losses(0.0), losses(0.5));
    assert_eq!(plain.to_bits(), evaluated.to_bits());
    assert!(
        (smoothed - trained).abs() > 1e-6,
        "{smoothed} for {trained}"
    );
}
