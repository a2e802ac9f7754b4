//! Averages of weights: their formula on every topology, their evaluation, and resumed ones.

use std::path::Path;

use merak_ckpt::{Checkpoint, ExportOptions, Kind, export_hf};
use merak_zero::EMA;
use tempfile::tempdir;

use super::resume::{resumed, train_and_save};
use crate::support::{Case, Tensors, assert_same_tensors, numbers};

/// Degrees, ZeRO stages, and whether weights have 16 bits. The first two differ in the cut of the
/// pipeline alone, the next two in the stage.
const RUNS: [((usize, usize, usize), u8, bool); 9] = [
    ((1, 1, 1), 1, false),
    ((1, 1, 2), 1, false),
    ((2, 1, 1), 0, false),
    ((2, 1, 1), 1, false),
    ((2, 1, 1), 2, true),
    ((2, 1, 1), 3, false),
    ((1, 2, 1), 1, false),
    ((1, 1, 1), 1, true),
    ((2, 2, 2), 3, true),
];

/// These runs, whose first updates change the loss already, with what they are.
fn runs() -> impl Iterator<Item = (Case, String)> {
    RUNS.into_iter().map(|(degrees, zero, bf16)| {
        let case = Case::gpt2().on(degrees).with("zero_stage", zero);
        let case = case.with("bf16", bf16).with("warmup_steps", 0);
        let what = format!("{degrees:?}, stage {zero}, bf16 {bf16}");
        (case.with("learning_rate", 3e-3), what)
    })
}

/// The averages of the newest checkpoint of a folder, by the names of the weights.
fn saved(folder: &Path) -> Tensors {
    let checkpoint = Checkpoint::open(folder).expect("it was saved");
    let kind = Kind::optimizer(EMA);
    let tensors = checkpoint.manifest().tensors_of(&kind);
    let values = tensors.map(|tensor| {
        let bytes = checkpoint.read_whole(&kind, &tensor.name);
        let bytes = bytes.expect("it is sound");
        let (numbers, _) = bytes.as_chunks::<4>();
        let numbers = numbers.iter().map(|bytes| f32::from_le_bytes(*bytes));
        (tensor.name.clone(), numbers.collect())
    });
    values.collect()
}

/// The averages, with a decay of 0.9, behind these weights, of which the first are those before any
/// step.
fn averaged(weights: &[Tensors]) -> Tensors {
    let mut averages = weights[0].clone();
    for weights in &weights[1..] {
        for (name, averages) in &mut averages {
            for (average, weight) in averages.iter_mut().zip(&weights[name]) {
                *average = 0.9_f32 * *average + (1.0 - 0.9_f32) * weight;
            }
        }
    }
    averages
}

#[test]
fn averages_follow_the_weights_of_each_step_on_every_topology() {
    let mut found = Vec::new();
    for (case, what) in runs() {
        let seen: Vec<_> = (0..4).map(|steps| case.run(steps).weights).collect();
        let folder = tempdir().expect("a temporary folder");
        train_and_save(&case.with("ema_decay", 0.9), 3, folder.path());
        let averages = saved(folder.path());
        assert_same_tensors(&averages, &averaged(&seen), &what);
        found.push(averages);
    }
    assert_same_tensors(&found[1], &found[0], "the cut of the pipeline");
    assert_same_tensors(&found[3], &found[2], "the stage of ZeRO");
}

#[test]
fn an_evaluation_is_of_the_averages_too_and_changes_no_bit_of_the_run() {
    let mut alone = None;
    for (case, what) in runs() {
        let folder = tempdir().expect("a temporary folder");
        let [run, hf] = ["run", "hf"].map(|name| folder.path().join(name));
        let averaging = case.clone().with("ema_decay", 0.5).writing(&run);
        let ranks = averaging.on_ranks(|trainer| {
            let first = trainer.evaluate()?;
            let mut reports = vec![trainer.train_step()?, trainer.train_step()?];
            // Threads may still copy weights while those are exchanged.
            trainer.save_later()?;
            let both = [trainer.evaluate()?, trainer.evaluate()?];
            trainer.finish_save()?;
            reports.push(trainer.train_step()?);
            Ok((first, both, reports))
        });
        let steps = numbers(&case.run(3).reports);
        for (first, [metrics, again], reports) in &ranks {
            assert_eq!(numbers(reports), steps, "{what}");
            assert_eq!(first.get("eval_ema_loss"), Some(first.eval_loss), "{what}");
            assert_eq!(metrics.metrics, again.metrics, "{what}");
            assert_eq!(metrics.metrics, ranks[0].1[0].metrics, "{what}");
        }
        let metrics = &ranks[0].1[0];
        let average = metrics.get("eval_ema_loss").expect("it is kept");
        assert!((average - metrics.eval_loss).abs() > 1e-3, "{what}");
        let checkpoint = Checkpoint::open(&run).expect("it was saved");
        // merak-ckpt has the name of averages of its own, since it stands without merak-zero.
        let weights = checkpoint
            .averaged()
            .expect("both crates call them the same");
        export_hf(&weights, &hf, &ExportOptions::default()).expect("an empty place");
        let exported = case.with("model.hf_dir", hf.display());
        for evaluated in exported.on_ranks(merak_trainer::MerakTrainer::evaluate) {
            assert_eq!(evaluated.eval_loss.to_bits(), average.to_bits(), "{what}");
            let perplexity = metrics.get("eval_ema_perplexity");
            assert_eq!(evaluated.get("eval_perplexity"), perplexity, "{what}");
        }
        let alone = *alone.get_or_insert(average);
        assert!((average / alone - 1.0).abs() < 2e-2, "{what}");
    }
}

#[test]
fn averages_go_on_from_a_checkpoint_here_and_elsewhere() {
    for (case, what) in runs() {
        let case = case.with("ema_decay", 0.9);
        let [straight, broken, moved] = [(); 3].map(|()| tempdir().expect("a temporary folder"));
        train_and_save(&case, 4, straight.path());
        train_and_save(&case, 2, broken.path());
        let elsewhere = case.clone().on((2, 2, 1)).with("zero_stage", 3);
        let from = broken.path().display();
        let elsewhere = elsewhere.with("resume_from_checkpoint", from);
        train_and_save(&elsewhere, 0, moved.path());
        assert_same_tensors(&saved(moved.path()), &saved(broken.path()), &what);
        train_and_save(&resumed(&case, broken.path()), 2, broken.path());
        assert_same_tensors(&saved(broken.path()), &saved(straight.path()), &what);
    }
}

#[test]
fn averages_that_a_checkpoint_lacks_start_as_its_weights_and_others_are_dropped() {
    let case = Case::gpt2().on((2, 1, 1));
    let [without, with, dropped] = [(); 3].map(|()| tempdir().expect("a temporary folder"));
    train_and_save(&case, 2, without.path());
    let from = |case: &Case, folder: &Path| {
        let case = case.clone();
        case.with("resume_from_checkpoint", folder.display())
    };
    let started = from(&case, without.path()).with("ema_decay", 0.9);
    train_and_save(&started, 0, with.path());
    let weights = from(&case, without.path()).run(0).weights;
    assert_same_tensors(&saved(with.path()), &weights, "weights");
    let plain = from(&case, with.path());
    let reports = plain.run(2).reports;
    let expected = from(&case, without.path()).run(2).reports;
    assert_eq!(numbers(&reports), numbers(&expected));
    train_and_save(&plain, 1, dropped.path());
    assert!(saved(dropped.path()).is_empty());
}

#[test]
fn averages_of_an_adapter_are_those_of_what_it_trains() {
    let folder = tempdir().expect("a temporary folder");
    let lora = serde_json::json!({ "r": 2, "target_modules": ["c_attn"], "bias": "lora_only" });
    let case = Case::gpt2()
        .with_lora(folder.path(), &lora)
        .on((2, 1, 2))
        .with("warmup_steps", 0);
    let seen: Vec<_> = (0..3).map(|steps| case.run(steps).weights).collect();
    let run = folder.path().join("run");
    train_and_save(&case.clone().with("ema_decay", 0.9), 2, &run);
    let plan = case.plan();
    let trained = |tensors: &Tensors| -> Tensors {
        let names = plan.trained_params().map(|param| param.name.clone());
        names
            .map(|name| (name.clone(), tensors[&name].clone()))
            .collect()
    };
    let expected = averaged(&seen.iter().map(trained).collect::<Vec<_>>());
    assert_same_tensors(&saved(&run), &expected, "an adapter");
}
