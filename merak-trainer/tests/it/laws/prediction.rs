//! Predictions: in the order of the data, each sample once, on every topology.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex},
};

use merak_trainer::{
    Error, MerakTrainer, PredictionKind, PredictionOutput, Result, TrainerParts,
    data::{Dataset, LABELS, Sample},
};

use super::encoders::models;
use crate::support::Case;

/// The first samples of other data: with two replicas, their last microbatch is not full.
#[derive(Debug)]
struct First(usize, Arc<dyn Dataset>);

impl Dataset for First {
    fn len(&self) -> usize {
        self.0
    }

    fn get(&self, index: usize) -> Result<Sample> {
        self.1.get(index)
    }
}

const SAMPLES: usize = 13;

const TOPOLOGIES: [(usize, usize, usize); 4] = [(2, 1, 1), (1, 2, 1), (1, 1, 4), (2, 2, 2)];

/// With slices of the vocabulary, and of sequences of a length that the ranks divide.
fn cut(model: &str, case: &Case) -> Vec<(Case, &'static str)> {
    let vocab = case.clone().on((2, 2, 2)).with("parallel_vocab", true);
    let mut cut = vec![(vocab.clone(), "vocabulary")];
    if model == "gpt2" {
        cut.push((vocab.clone().sharing(2), "vocabulary of shared sequences"));
    }
    if ["gpt2", "bert", "t5"].contains(&model) {
        cut.push((vocab.with("sequence_parallel", true), "both"));
    }
    cut
}

fn predict(case: &Case, kind: Option<PredictionKind>) -> PredictionOutput {
    let data = First(SAMPLES, Arc::clone(&case.data));
    let mut ranks = case.on_ranks(|trainer| match kind {
        Some(kind) => trainer.predict_as(&data, kind),
        None => trainer.predict(&data),
    });
    for other in &ranks[1..] {
        assert!(other.predictions.is_empty() && other.label_ids.is_empty());
        let loss = other.metrics.eval_loss.to_bits();
        assert_eq!(loss, ranks[0].metrics.eval_loss.to_bits());
        assert_eq!(other.metrics.metrics, ranks[0].metrics.metrics);
    }
    let first = ranks.swap_remove(0);
    let labels =
        (0..SAMPLES).map(|index| data.get(index).expect("a sample")[LABELS].ints().to_vec());
    assert_eq!(first.label_ids, labels.collect::<Vec<_>>());
    assert_eq!(
        (first.predictions.len(), first.metrics.eval_samples),
        (SAMPLES, SAMPLES)
    );
    first
}

fn assert_close(found: &PredictionOutput, expected: &PredictionOutput, what: &str) {
    for (sample, (found, expected)) in found
        .predictions
        .iter()
        .zip(&expected.predictions)
        .enumerate()
    {
        assert_eq!(found.len(), expected.len(), "{what}, sample {sample}");
        for (found, expected) in found.iter().zip(expected) {
            let is_close = (found - expected).abs() < 1e-4 || (found.is_nan() && expected.is_nan());
            assert!(is_close, "{what}, sample {sample}: {found} {expected}");
        }
    }
    for name in expected.metrics.names() {
        let [found, expected] = [found, expected].map(|output| output.metrics.get(name));
        let gap = found.expect("the same metrics") / expected.expect("a metric") - 1.0;
        assert!(
            gap.abs() < 1e-5 || gap.is_nan(),
            "{what}: {name} {found:?} {expected:?}"
        );
    }
}

#[test]
fn probabilities_and_losses_are_those_of_the_evaluation_on_every_topology() {
    let all = models().into_iter().chain([("gpt2", Case::gpt2())]);
    for (model, case) in all {
        let alone = predict(&case, None);
        let (metrics, is_class) = (&alone.metrics, alone.label_ids[0].len() == 1);
        let losses: Vec<f64> = if is_class {
            let pairs = alone.predictions.iter().zip(&alone.label_ids);
            pairs
                .map(|(probabilities, label)| {
                    let sum: f32 = probabilities.iter().sum();
                    assert!((sum - 1.0).abs() < 1e-5, "{model}: {sum}");
                    -f64::from(probabilities[usize::try_from(label[0]).expect("a class")].ln())
                })
                .collect()
        } else {
            let losses = alone
                .predictions
                .iter()
                .flatten()
                .filter(|loss| !loss.is_nan());
            losses.map(|&loss| f64::from(loss)).collect()
        };
        let mean = losses.iter().sum::<f64>() / losses.len() as f64;
        assert!(
            (mean / metrics.eval_loss - 1.0).abs() < 1e-5,
            "{model}: {mean} {metrics:?}"
        );
        let names = metrics.names();
        if is_class {
            let expected = [
                "eval_loss",
                "eval_accuracy",
                "eval_f1_macro",
                "eval_f1_weighted",
            ];
            assert_eq!(names, expected, "{model}");
        } else {
            assert_eq!(
                metrics.get("eval_perplexity"),
                Some(metrics.eval_loss.exp()),
                "{model}"
            );
        }
        for degrees in TOPOLOGIES {
            let many = predict(&case.clone().on(degrees), None);
            assert_close(&many, &alone, &format!("{model} on {degrees:?}"));
        }
        for (cut, how) in cut(model, &case) {
            assert_close(&predict(&cut, None), &alone, &format!("{model}, {how}"));
        }
    }
}

#[test]
fn embeddings_and_logits_have_the_shapes_of_the_model() {
    for (model, case) in models() {
        let alone = predict(&case, Some(PredictionKind::Embeddings));
        assert!(
            alone.predictions.iter().all(|row| row.len() == 32),
            "{model}"
        );
        let differs = alone.predictions.windows(2).any(|pair| pair[0] != pair[1]);
        assert!(differs, "{model}: samples differ");
        for degrees in [(2, 1, 2), (1, 2, 4)] {
            let many = predict(&case.clone().on(degrees), Some(PredictionKind::Embeddings));
            assert_close(&many, &alone, &format!("{model} on {degrees:?}"));
        }
        for (cut, how) in cut(model, &case) {
            let many = predict(&cut, Some(PredictionKind::Embeddings));
            assert_close(&many, &alone, &format!("{model}, {how}"));
        }
    }
    let (_, classes) = models().swap_remove(1);
    let logits = predict(&classes.with("return_logits", true), None);
    let is_probability = |row: &Vec<f32>| (row.iter().sum::<f32>() - 1.0).abs() < 1e-3;
    assert!(
        logits
            .predictions
            .iter()
            .all(|row| row.len() == 3 && !is_probability(row))
    );
}

#[test]
fn samples_are_taken_in_their_order_until_one_cannot_be_taken_which_ends_the_prediction() {
    let case = Case::gpt2().on((2, 1, 2));
    let data = First(SAMPLES, Arc::clone(&case.data));
    let taken = Mutex::new(Vec::new());
    let predicted = case.try_on_ranks(|trainer| {
        trainer.predict_each(&data, PredictionKind::Losses, &mut |prediction| {
            taken.lock().unwrap().push(prediction.sample);
            match prediction.sample {
                4 => Err(Error::CommandLine("no room".to_owned())),
                _ => Ok(()),
            }
        })
    });
    let refused = predicted.expect_err("sample 4 is refused");
    assert!(refused.to_string().contains("no room"), "{refused}");
    assert_eq!(*taken.lock().unwrap(), [0, 1, 2, 3, 4]);
}

/// A metric of a caller's own, and how many predictions it saw, on rank 0 alone.
fn own(parts: &mut TrainerParts, calls: &Arc<Mutex<Vec<usize>>>) {
    let calls = Arc::clone(calls);
    parts.compute_metrics = Some(Arc::new(move |output: &PredictionOutput| {
        calls
            .lock()
            .expect("nobody panics here")
            .push(output.predictions.len());
        let share = output
            .predictions
            .iter()
            .map(|row| f64::from(row[0]))
            .sum::<f64>();
        BTreeMap::from([
            ("first".to_owned(), share),
            ("eval_huge".to_owned(), f64::INFINITY),
        ])
    }));
}

#[test]
fn metrics_of_ones_own_see_all_predictions_on_rank_0_and_judge_models() {
    let (_, case) = models().swap_remove(1);
    let case = case
        .with("do_eval", true)
        .with("metric_for_best_model", "first");
    let mut values = Vec::new();
    for degrees in [(1, 1, 1), (2, 1, 2)] {
        let calls = Arc::default();
        let case = case.clone().on(degrees);
        let evaluated =
            case.try_on_ranks_with(|_, parts| own(parts, &calls), MerakTrainer::evaluate);
        let evaluated = evaluated.expect("all ranks evaluate");
        assert_eq!(*calls.lock().unwrap(), [37], "once");
        for metrics in &evaluated {
            assert_eq!(metrics.get("eval_huge"), Some(f64::INFINITY));
            assert_eq!(metrics.metrics, evaluated[0].metrics);
        }
        values.push(evaluated[0].get("eval_first").expect("it is computed"));
    }
    assert!((values[0] / values[1] - 1.0).abs() < 1e-5, "{values:?}");
    let refused = case
        .try_on_ranks(MerakTrainer::evaluate)
        .expect_err("nothing gives it");
    assert!(matches!(refused, Error::Config(_)), "{refused}");
}
