//! L1 to L3 of models whose weights are all bf16 on the default backend.

use merak_ckpt::{Checkpoint, DType, Kind};
use merak_trainer::Workload;

use super::{families, generation, sp::Long};
use crate::support::{Case, assert_close_losses, assert_close_tensors, assert_same_bits, numbers};

/// Half the distance from 1 to the next number of bf16: the relative error of one rounding.
const ROUNDING: f64 = 1.0 / 256.0;

/// A case whose linear layers are large enough for the processor's units for bf16.
fn wide() -> Case {
    let case = Case::gpt2().with_model("n_embd", 64);
    case.with("per_device_train_batch_size", 8)
        .with_microbatches(2)
}

/// A case whose attention is, too.
fn long() -> Case {
    let case = Case::gpt2()
        .with_model("n_embd", 64)
        .with_model("n_head", 2);
    let case = case.with_model("n_positions", 64);
    case.with_data(Long { len: 64 }).with("seq_length", 64)
}

#[test]
fn bf16_trains_close_to_f32_in_every_family_on_any_topology() {
    let wide = [("wide", wide().with_dropout(0.1)), ("long", long())];
    for (family, case) in families().into_iter().chain(wide) {
        let narrow = case.clone().with("bf16", true);
        let (first, wide) = (case.run(0), case.run(10));
        // A gradient passes some thirty products forward and back, which round twice each; where an
        // activation is near its corner, a rounding may put it on the other side.
        let gradients = narrow.run(0).gradients;
        assert_close_tensors(&gradients, &first.gradients, 32.0 * ROUNDING, family);
        let alone = narrow.run(10);
        assert_close_losses(&alone.reports, &wide.reports, 2.0 * ROUNDING, family);
        for degrees in [(2, 1, 1), (1, 2, 1), (2, 2, 2)] {
            let run = narrow.clone().on(degrees).run(10);
            let what = format!("{family} {degrees:?}");
            assert_close_losses(&run.reports, &alone.reports, 2.0 * ROUNDING, &what);
        }
        // The optimizer steps on f32 masters: they are no numbers of bf16.
        let masters = alone.weights.values().flatten();
        let kept = masters.filter(|&&x| half::bf16::from_f32(x).to_f32().to_bits() != x.to_bits());
        assert!(kept.count() > 0, "{family}");
    }
}

#[test]
fn stages_recomputation_threads_and_zero_change_no_bit_in_bf16() {
    for (name, case) in [("wide", wide()), ("long", long()), ("llama", Case::llama())] {
        let case = case.with("bf16", true).with_dropout(0.1);
        let alone = case.run(3);
        assert_same_bits(&case.clone().with_threads(3).run(3), &alone, name);
        for (stages, chunk) in [(1, 1), (2, 0), (2, 1), (4, 2)] {
            let case = case.clone().on((1, 1, stages));
            let run = case.with("checkpoint_num_layers", chunk).run(3);
            assert_same_bits(&run, &alone, &format!("{name}: {stages} stages, {chunk}"));
        }
        let replicas = case.clone().on((2, 1, 2)).with_microbatches(4);
        let whole = replicas.clone().with("zero_stage", 0).run(3);
        let divided = replicas.clone().with("zero_stage", 1);
        assert_same_bits(&divided.run(3), &whole, &format!("{name}: zero 1"));
        for stage in [2, 3] {
            let divided = replicas.clone().with("zero_stage", stage).run(3);
            let what = format!("{name}: zero {stage}");
            assert_close_losses(&divided.reports, &whole.reports, ROUNDING, &what);
        }
    }
}

#[test]
fn a_resumed_run_in_bf16_equals_the_unbroken_one_and_goes_on_in_f32() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    for stage in [1, 3] {
        let case = wide().on((2, 1, 1)).with("zero_stage", stage);
        let case = case.writing(&folder.path().join(stage.to_string()));
        let (wide, case) = (case.clone(), case.with("bf16", true));
        let unbroken = case.run(4);
        let saved = case.on_ranks(|trainer| {
            trainer.train_step()?;
            trainer.train_step()?;
            trainer.save_checkpoint()
        });
        let checkpoint = Checkpoint::open(&saved[0]).expect("it was saved");
        for tensor in checkpoint.manifest().tensors_of(&Kind::Parameter) {
            assert_eq!(tensor.dtype, DType::F32, "{}", tensor.name);
        }
        let from = |case: &Case| {
            let case = case.clone();
            case.with("resume_from_checkpoint", saved[0].display())
        };
        let run = from(&case).run(2);
        assert_eq!(numbers(&run.reports), numbers(&unbroken.reports[2..]));
        assert!(run.weights == unbroken.weights, "stage {stage}");
        let elsewhere = from(&wide).on((1, 1, 2)).with_microbatches(2).run(2);
        assert_close_losses(&elsewhere.reports, &unbroken.reports[2..], 2e-2, "in f32");
    }
}

#[test]
fn a_trained_parameter_takes_eighteen_bytes_and_one_that_is_only_read_takes_two() {
    // A tied weight has a second gradient.
    let case = wide().with_tied(false).with("zero_stage", 0);
    let case = case.with("bf16", true);
    let plan = case.plan();
    let elements = plan.graph.num_elements();
    let planned = plan.memory(&case.arguments(), &[]).expect("a legal plan")[0];
    let held = case.on_ranks(|trainer| {
        trainer.train_step()?;
        Ok(trainer.memory())
    })[0];
    for need in [planned, held] {
        let kept = (need.weights, need.gradients, need.optimizer);
        assert_eq!(kept, (6 * elements, 4 * elements, 8 * elements));
    }
    let reading = case.try_plan().expect("a legal plan").frozen();
    let needs = reading.memory(&case.arguments(), &[Workload::Evaluation { samples: 2 }]);
    assert_eq!(needs.expect("a legal plan")[0].weights, 2 * elements);
}

#[test]
fn amp_rounds_products_alone_and_keeps_weights_of_f32() {
    let wide = wide().with_tied(false).with_dropout(0.1);
    let amp = |case: &Case| {
        let case = case.clone().with("bf16", true);
        case.with("half_precision_backend", "amp")
    };
    let (full, alone) = (wide.run(6), amp(&wide).run(6));
    assert!(numbers(&alone.reports) != numbers(&full.reports));
    assert_close_losses(&alone.reports, &full.reports, 2.0 * ROUNDING, "amp");
    let in_stages = amp(&wide).on((1, 1, 2)).run(6);
    assert_same_bits(&in_stages, &alone, "two stages");
    let replicas = wide.clone().on((2, 2, 1));
    for stage in 0..=3 {
        let run = amp(&replicas).with("zero_stage", stage).run(6);
        let what = format!("zero {stage}");
        assert_close_losses(&run.reports, &alone.reports, 2.0 * ROUNDING, &what);
    }
    let case = amp(&wide).with("zero_stage", 0);
    let elements = case.plan().graph.num_elements();
    let held = case.on_ranks(|trainer| Ok(trainer.memory()))[0];
    let kept = (held.weights, held.gradients, held.optimizer);
    assert_eq!(kept, (4 * elements, 4 * elements, 8 * elements));
}

#[test]
fn replicas_have_the_same_bits_after_every_step_in_bf16() {
    for stage in 0..=3 {
        for (tp, pp) in [(1, 1), (2, 1), (2, 2)] {
            let case = wide().on((2, tp, pp)).with("zero_stage", stage);
            let case = case.with("bf16", true).with_dropout(0.1);
            let ranks = case.on_ranks(|trainer| {
                let mut steps = Vec::new();
                for _ in 0..4 {
                    trainer.train_step()?;
                    steps.push(trainer.parameters()?);
                }
                Ok((trainer.mpu().coord(), steps))
            });
            for (place, steps) in &ranks {
                let part = |place: &merak_mpu::Coord| (place.tp, place.pp);
                let of_replica = |other: &&(merak_mpu::Coord, _)| part(&other.0) == part(place);
                for (_, others) in ranks.iter().filter(of_replica) {
                    assert!(steps == others, "stage {stage}, tp {tp}, pp {pp}");
                }
            }
        }
    }
}

#[test]
fn the_mean_loss_of_a_longer_run_in_bf16_is_that_of_f32() {
    let case = wide().with("max_steps", 140).with("learning_rate", 3e-3);
    let last = |case: &Case| {
        let reports = case.run(120).reports;
        let mean = reports[100..].iter().map(|report| report.loss).sum::<f64>() / 20.0;
        assert!(
            mean < 0.8 * reports[0].loss,
            "{mean} of {}",
            reports[0].loss
        );
        mean
    };
    let (wide, narrow) = (last(&case), last(&case.clone().with("bf16", true)));
    assert!(
        (narrow - wide).abs() < 5e-3 * wide,
        "{narrow} instead of {wide}"
    );
}

#[test]
fn stages_generate_the_tokens_of_one_rank_in_bf16() {
    let (prompts, greedy) = generation::greedy();
    for case in [wide(), Case::llama()] {
        let case = case.with("bf16", true);
        let expected = generation::generate(&case, &prompts, &greedy);
        assert_eq!(expected.len(), prompts.len());
        for degrees in [(1, 1, 2), (1, 1, 4)] {
            let found = generation::generate(&case.clone().on(degrees), &prompts, &greedy);
            assert_eq!(found, expected, "{degrees:?}");
        }
        let whole = generation::generate(&case.with("use_cache", false), &prompts, &greedy);
        assert_eq!(whole, expected, "without a cache");
    }
}
