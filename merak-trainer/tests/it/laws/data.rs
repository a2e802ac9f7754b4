//! Samples: their order, their names, their evaluation.

use std::sync::{Arc, Mutex, PoisonError};

use insta::assert_snapshot;
use merak_trainer::{
    MerakTrainer, Result,
    data::{Dataset, LABELS, Names, Sample, SampleTensor},
};

use crate::support::{Case, Tokens, assert_close_losses, assert_same_bits, numbers};

/// Notes which samples are read.
#[derive(Debug, Clone, Default)]
struct Recorder(Arc<Mutex<Vec<usize>>>);

impl Recorder {
    fn take(&self) -> Vec<usize> {
        std::mem::take(&mut *self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl Dataset for Recorder {
    fn len(&self) -> usize {
        TOKENS.len()
    }

    fn get(&self, index: usize) -> Result<Sample> {
        self.0
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .push(index);
        TOKENS.get(index)
    }
}

const TOKENS: Tokens = Tokens { samples: 37 };

/// Samples of each step, one rank.
fn read_by(case: &Case, steps: usize) -> Vec<Vec<usize>> {
    let recorder = Recorder::default();
    let case = case.clone().with_data(recorder.clone());
    let mut read = case.on_ranks(|trainer| {
        let step = |_| {
            trainer.train_step()?;
            Ok(recorder.take())
        };
        (0..steps).map(step).collect::<Result<Vec<_>>>()
    });
    read.swap_remove(0)
}

#[test]
fn the_order_changes_with_epoch_and_seed() {
    let case = Case::gpt2();
    let steps = read_by(&case, 8);
    assert!(steps.iter().all(|samples| samples.len() == 8));
    // 37 samples are 4 global batches of 8; nothing is read twice in an epoch.
    for epoch in steps.chunks(4) {
        let mut samples = epoch.concat();
        samples.sort_unstable();
        samples.dedup();
        assert_eq!(samples.len(), 32);
    }
    assert_ne!(steps[..4], steps[4..]);
    assert_eq!(steps, read_by(&case, 8));
    assert_ne!(steps, read_by(&case.with("data_seed", 5), 8));
}

#[test]
fn replicas_share_out_the_samples_of_one_rank() {
    let case = Case::gpt2();
    let alone = read_by(&case, 3).concat();
    for degrees in [(2, 1, 1), (4, 1, 1)] {
        let recorder = Recorder::default();
        let case = case.clone().with_data(recorder.clone()).on(degrees);
        case.on_ranks(|trainer| (0..3).try_for_each(|_| trainer.train_step().map(|_| ())));
        let (mut shared, mut alone) = (recorder.take(), alone.clone());
        shared.sort_unstable();
        alone.sort_unstable();
        assert_eq!(shared, alone, "{degrees:?}");
    }
}

#[test]
fn middle_stages_read_no_data() {
    let recorder = Recorder::default();
    let case = Case::gpt2().with_data(recorder.clone()).on((1, 1, 4));
    case.on_ranks(MerakTrainer::train_step);
    // 8 samples on the first stage, which reads the inputs, and 8 on the last, which reads the
    // labels.
    assert_eq!(recorder.take().len(), 16);
}

/// Notes the tensors that are read.
#[derive(Debug, Clone, Default)]
struct Columns(Arc<Mutex<Vec<String>>>);

impl Columns {
    fn read(&self, sample: &Sample) {
        let mut read = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        read.extend(sample.keys().cloned());
    }
}

impl Dataset for Columns {
    fn len(&self) -> usize {
        TOKENS.len()
    }

    fn get(&self, index: usize) -> Result<Sample> {
        let sample = Crowded.get(index)?;
        self.read(&sample);
        Ok(sample)
    }

    fn get_tensors(&self, index: usize, _epoch: u64, names: &Names) -> Result<Option<Sample>> {
        let mut sample = Crowded.get(index)?;
        sample.retain(|name, _| names.contains(name));
        self.read(&sample);
        Ok(Some(sample))
    }
}

#[test]
fn stages_ask_for_the_tensors_that_they_read_alone() {
    let case = Case::gpt2().on((1, 1, 2));
    let whole = case.run(2);
    let columns = Columns::default();
    let split = case.with("split_inputs", true);
    let found = split.clone().with_data(columns.clone()).run(2);
    assert_same_bits(&found, &whole, "split inputs");
    let take = || std::mem::take(&mut *columns.0.lock().unwrap_or_else(PoisonError::into_inner));
    take();
    let stages = split.clone().with_data(columns.clone());
    stages.on_ranks(MerakTrainer::train_step);
    let read = take();
    let of = |name: &str| read.iter().filter(|read| *read == name).count();
    // Of 8 samples the first stage reads the tokens, the last the labels.
    assert_eq!((of("input_ids"), of("labels")), (8, 8));
    assert_eq!((of("hints"), of("zebra")), (0, 0));
    // A data set that reads whole samples gives the same.
    assert_same_bits(&split.with_data(Crowded).run(2), &whole, "whole samples");
}

/// The same samples with other tensors beside them.
#[derive(Debug)]
struct Crowded;

impl Dataset for Crowded {
    fn len(&self) -> usize {
        TOKENS.len()
    }

    fn get(&self, index: usize) -> Result<Sample> {
        let mut sample = TOKENS.get(index)?;
        for name in ["attention_mask", "hints", "zebra"] {
            let values = vec![7; 3];
            sample.insert(name.to_owned(), SampleTensor::vector(values));
        }
        Ok(sample)
    }
}

#[test]
fn tensors_are_bound_by_name_and_others_ignored() {
    for degrees in [(1, 1, 1), (1, 1, 2)] {
        let case = Case::gpt2().on(degrees);
        let crowded = case.clone().with_data(Crowded).run(2);
        assert_same_bits(&crowded, &case.run(2), "other tensors beside");
    }
}

/// Samples without labels.
#[derive(Debug)]
struct Unlabelled;

impl Dataset for Unlabelled {
    fn len(&self) -> usize {
        TOKENS.len()
    }

    fn get(&self, index: usize) -> Result<Sample> {
        let mut sample = TOKENS.get(index)?;
        sample.remove(LABELS);
        Ok(sample)
    }
}

#[test]
fn a_missing_tensor_is_named() {
    let case = Case::gpt2().with_data(Unlabelled);
    let fail = |case: Case| {
        let error = case.try_on_ranks(MerakTrainer::train_step);
        merak_trainer::chain(&error.expect_err("no labels"))
    };
    assert_snapshot!(fail(case.clone()), @r#"rank 0 (stage 0) failed in step 1: 0F0 failed (stage 0, microbatch 0): input "labels" of type i64[2, 8] was not given; the batch has input_ids"#);
    assert_snapshot!(fail(case.on((1, 1, 2))), @r#"rank 1 (stage 1) failed in step 1: 1F0 failed (stage 1, microbatch 0): input "labels" of type i64[2, 8] was not given; the batch has input_ids"#);
}

#[test]
fn prefetching_changes_no_bit() {
    let case = Case::gpt2().on((2, 1, 2));
    let expected = case.run(6);
    for workers in [1, 3] {
        let case = case.clone().with("dataloader_num_workers", workers);
        assert_same_bits(&case.run(6), &expected, &format!("{workers} workers"));
    }
}

#[test]
fn evaluation_takes_each_sample_once_on_every_topology() {
    let case = Case::gpt2()
        .with_dropout(0.1)
        .with_data(Tokens { samples: 13 });
    let evaluate = |case: &Case| {
        let metrics = case.on_ranks(MerakTrainer::evaluate);
        for other in &metrics {
            assert_eq!(other.eval_loss.to_bits(), metrics[0].eval_loss.to_bits());
        }
        (metrics[0].eval_loss, metrics[0].eval_samples)
    };
    let (alone, samples) = evaluate(&case);
    assert_eq!(samples, 13);
    // Samples one by one: nothing but the mean over all labels gives the same.
    let one_by_one = case
        .clone()
        .with("per_device_train_batch_size", 1)
        .with("per_device_eval_batch_size", 1)
        .with_microbatches(8);
    assert!((evaluate(&one_by_one).0 / alone - 1.0).abs() < 1e-6);
    for degrees in [(1, 1, 4), (2, 1, 1), (4, 1, 1), (1, 2, 2), (2, 2, 2)] {
        let (loss, samples) = evaluate(&case.clone().on(degrees));
        assert_eq!(samples, 13);
        assert!(
            (loss / alone - 1.0).abs() < 1e-6,
            "{degrees:?}: {loss} against {alone}"
        );
    }
}

#[test]
fn evaluation_and_generation_leave_training_as_it_was() {
    let case = Case::gpt2().with_dropout(0.1).on((1, 2, 2));
    let undisturbed = case.run(4);
    let disturbed = case.on_ranks(|trainer| {
        let mut reports = Vec::new();
        for _ in 0..4 {
            trainer.gradients()?;
            trainer.evaluate()?;
            trainer.generate(
                &[vec![1, 2, 3]],
                &merak_ckpt::GenerateOptions {
                    max_new_tokens: 2,
                    ..Default::default()
                },
            )?;
            reports.push(trainer.train_step()?);
        }
        Ok(reports)
    });
    assert_eq!(numbers(&disturbed[0]), numbers(&undisturbed.reports));
    assert_close_losses(&disturbed[3], &undisturbed.reports, 0.0, "the last rank");
}
