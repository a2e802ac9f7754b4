//! Losses, learning rates and collators of the caller's own.

use std::{collections::BTreeMap, sync::Arc};

use merak_mpu::Mpu;
use merak_trace::fx::{Module, Symbol};
use merak_trainer::{
    LossCount, LossFn, MerakTrainer, Plan, PredictionKind, Result, StepReport, TrainerParts,
    data::{IGNORED_LABEL, LABELS, Sample, SampleTensor},
    get_grid, get_topo, run_world,
};

use crate::support::Case;

/// Trains with a loss in place of the model's own.
fn reports(case: &Case, loss: &LossFn, count: LossCount) -> Vec<StepReport> {
    let args = case.arguments();
    let inputs = case.inputs().with_loss(Arc::clone(loss), count);
    let plan = Arc::new(Plan::new(&inputs, &args).expect("it can be planned"));
    let ranks = run_world(&args, |member| {
        let parts = TrainerParts {
            train_data: Some(Arc::clone(&case.data)),
            eval_data: Some(Arc::clone(&case.data)),
            num_threads: 1,
            ..TrainerParts::default()
        };
        let mpu = Mpu::new(member, plan.draft.degrees)?;
        let mut trainer = MerakTrainer::new(Arc::clone(&plan), mpu, &args, parts)?;
        trainer.evaluate()?;
        trainer.predict_as(&*case.data, PredictionKind::Embeddings)?;
        (0..4)
            .map(|_| trainer.train_step())
            .collect::<Result<Vec<_>>>()
    });
    ranks.expect("all ranks train").swap_remove(0)
}

fn losses(reports: &[StepReport]) -> Vec<f64> {
    reports.iter().map(|report| report.loss).collect()
}

#[test]
fn a_loss_of_ones_own_takes_the_place_of_the_cross_entropy() {
    let case = Case::gpt2().with_dropout(0.1);
    let same: LossFn = Arc::new(|module: &Module, logits: &Symbol, labels: &Symbol| {
        module.cross_entropy(logits, labels, 0.0)
    });
    let own = case.on_ranks(|trainer| {
        (0..4)
            .map(|_| trainer.train_step())
            .collect::<Result<Vec<_>>>()
    });
    let expected = losses(&own[0]);
    assert_eq!(losses(&reports(&case, &same, LossCount::Labels)), expected);
    // The penalty of large logits, and the mean of the microbatches' losses.
    let penalised: LossFn = Arc::new(|module: &Module, logits: &Symbol, labels: &Symbol| {
        let loss = module.cross_entropy(logits, labels, 0.0)?;
        let penalty = module.scale(&module.mul(logits, logits)?, 0.01)?;
        module.add(&loss, &module.sum(&penalty)?)
    });
    for count in [LossCount::Labels, LossCount::Microbatches] {
        let alone = losses(&reports(&case, &penalised, count));
        assert!(alone[0] > expected[0], "{alone:?} {expected:?}");
        for degrees in [(2, 1, 1), (1, 2, 1), (1, 1, 4)] {
            let many = losses(&reports(&case.clone().on(degrees), &penalised, count));
            for (found, expected) in many.iter().zip(&alone) {
                let gap = (found / expected - 1.0).abs();
                assert!(gap < 1e-4, "{degrees:?} {count:?}: {found} {expected}");
            }
        }
    }
}

#[test]
fn a_learning_rate_and_a_collator_of_ones_own_are_used() {
    let case = Case::gpt2().on((2, 1, 2)).with("dataloader_num_workers", 1);
    let change = |_: usize, parts: &mut TrainerParts| {
        parts.lr_scheduler = Some(Arc::new(|updates, total| {
            1e-3 * (1.0 - updates as f64 / total as f64)
        }));
        parts.data_collator = Some(Arc::new(|samples: &[Sample], rows| {
            let tensor = |name: &str, fill: i64| {
                let mut ints: Vec<i64> = samples
                    .iter()
                    .flat_map(|sample| sample[name].ints().to_vec())
                    .collect();
                ints.resize(rows * 8, fill);
                SampleTensor::new(vec![rows, 8], ints).expect("it is filled")
            };
            Ok(BTreeMap::from([
                ("input_ids".to_owned(), tensor("input_ids", 0)),
                (LABELS.to_owned(), tensor(LABELS, IGNORED_LABEL)),
            ]))
        }));
    };
    let trained = |trainer: &mut MerakTrainer| {
        assert_eq!(get_topo(trainer.mpu()).world_size(), 4);
        assert_eq!(get_grid(trainer.mpu()).len(), 4);
        assert!(!trainer.partition_report()?.to_text(None).is_empty());
        let reports = (0..3)
            .map(|_| trainer.train_step())
            .collect::<Result<Vec<_>>>()?;
        Ok((reports, trainer.evaluate()?.eval_loss))
    };
    let own = case
        .try_on_ranks_with(change, trained)
        .expect("all ranks train");
    let plain = case.on_ranks(trained);
    // The collator stacks as the trainer does; the first step has the same loss, the rates differ.
    assert_eq!(own[0].0[0].loss.to_bits(), plain[0].0[0].loss.to_bits());
    let rates: Vec<f64> = own[0].0.iter().map(|report| report.lr).collect();
    assert_eq!(
        rates,
        [0, 1, 2].map(|step| 1e-3 * (1.0 - f64::from(step) / 24.0))
    );
    assert!(plain[0].0[1].lr.to_bits() != rates[1].to_bits());
    let wrong = |_: usize, parts: &mut TrainerParts| {
        parts.lr_scheduler = Some(Arc::new(|_, _| f64::NAN));
    };
    let failed = case.try_on_ranks_with(wrong, trained).expect_err("no rate");
    let text = merak_trainer::chain(&failed);
    assert!(
        text.contains("the learning rate after 0 updates is NaN"),
        "{text}"
    );
}
