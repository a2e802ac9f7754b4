//! Models, losses, learning rates and collators of the caller's own.

use std::{collections::BTreeMap, sync::Arc};

use merak_mpu::Mpu;
use merak_trace::{
    Graph, Init,
    fx::{self, Module, Symbol},
    models::{self, Model, ModelInfo, TraceOptions},
    op::{Activation, Attention, Op, WeightLayout},
};
use merak_trainer::{
    LossCount, LossFn, MerakTrainer, Plan, PlanInputs, PredictionKind, Result, StepReport,
    TrainerParts, chain,
    data::{IGNORED_LABEL, LABELS, Sample, SampleTensor},
    get_grid, get_topo, run_world,
};

use crate::support::{Case, SEQ, VOCAB};

/// Trains with a loss in place of the model's own.
fn reports(case: &Case, loss: &LossFn, count: LossCount) -> Vec<StepReport> {
    let inputs = case.inputs().with_loss(Arc::clone(loss), count);
    let plan = Plan::new(&inputs, &case.arguments());
    train_by(&Arc::new(plan.expect("it can be planned")), case)
}

/// Trains by a plan, with the keys and the data of a case.
fn train_by(plan: &Arc<Plan>, case: &Case) -> Vec<StepReport> {
    let args = case.arguments();
    let ranks = run_world(&args, |member| {
        let parts = TrainerParts {
            train_data: Some(Arc::clone(&case.data)),
            eval_data: Some(Arc::clone(&case.data)),
            num_threads: 1,
            ..TrainerParts::default()
        };
        let mpu = Mpu::new(member, plan.draft.degrees)?;
        let mut trainer = MerakTrainer::new(Arc::clone(plan), mpu, &args, parts)?;
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

/// Demands losses that differ by the order of summation only.
fn assert_close(reports: &[StepReport], expected: &[f64], what: &str) {
    for (found, expected) in losses(reports).iter().zip(expected) {
        let gap = (found / expected - 1.0).abs();
        assert!(gap < 1e-4, "{what}: {found} {expected}");
    }
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
            let many = reports(&case.clone().on(degrees), &penalised, count);
            assert_close(&many, &alone, &format!("{degrees:?} {count:?}"));
        }
    }
}

#[test]
fn a_loss_without_a_split_form_gets_whole_logits_of_a_split_vocabulary() {
    let squares: LossFn = Arc::new(|module: &Module, logits: &Symbol, labels: &Symbol| {
        let loss = module.cross_entropy(logits, labels, 0.0)?;
        let shares = module.apply(Op::Softmax, &[logits])?.swap_remove(0);
        let penalty = module.scale(&module.mul(&shares, &shares)?, 0.1)?;
        module.add(&loss, &module.sum(&penalty)?)
    });
    let case = Case::gpt2().with_dropout(0.1);
    let alone = losses(&reports(&case, &squares, LossCount::Labels));
    let case = case.on((1, 2, 1)).with("parallel_vocab", true);
    let inputs = case
        .inputs()
        .with_loss(Arc::clone(&squares), LossCount::Labels);
    let plan = Plan::new(&inputs, &case.arguments()).expect("it can be planned");
    let gathers = plan.draft.tensor.gathers.iter();
    let of_logits: Vec<_> = gathers.map(|gather| gather.is_logits).collect();
    assert_eq!(of_logits, [true]);
    assert_close(
        &train_by(&Arc::new(plan), &case),
        &alone,
        "split vocabulary",
    );
}

/// Attention and an MLP beside each other in each layer; no list of layers knows its family.
#[derive(Debug)]
struct SideBySide;

const WIDTH: usize = 32;
const LAYERS: usize = 4;
const INIT: Init = Init::Normal(0.05);

impl SideBySide {
    fn layer(layer: &Module, x: &Symbol) -> merak_trace::Result<Symbol> {
        let linear = |name: &str, x: &Symbol, out: usize| {
            let own = layer.sub(name);
            own.linear(x, out, WeightLayout::OutIn, true, INIT)
        };
        let normed = layer.sub("norm").rms_norm(x, 1e-6)?;
        let [q, k, v] = ["q", "k", "v"].map(|name| linear(name, &normed, WIDTH));
        let spec = Attention {
            heads: 4,
            kv_heads: 4,
            head_dim: WIDTH / 4,
            scale: 0.35,
            causal: true,
            ..Attention::default()
        };
        let mixed = layer.sub("attn").attention(&q?, &k?, &v?, &spec, 0.1)?;
        let bent = layer.activation(&linear("up", &normed, 2 * WIDTH)?, Activation::Silu)?;
        let (out, down) = (linear("out", &mixed, WIDTH), linear("down", &bent, WIDTH));
        layer.add(x, &layer.add(&out?, &down?)?)
    }
}

impl Model for SideBySide {
    fn info(&self) -> ModelInfo {
        ModelInfo {
            family: "side-by-side",
            num_layers: LAYERS,
            hidden_size: WIDTH,
            num_heads: 4,
            num_kv_heads: 4,
            max_seq: SEQ,
            vocab_size: VOCAB,
            eos_token_id: None,
        }
    }

    fn trace(&self, options: &TraceOptions) -> merak_trace::Result<Graph> {
        fx::trace(options.dtype, |root| {
            let ids = models::input_ids(root, options);
            let (mut x, _) = root.sub("embed").embedding(&ids, VOCAB, WIDTH, INIT)?;
            for index in 0..LAYERS {
                x = Self::layer(&root.sub(&format!("layers.{index}")), &x)?;
            }
            let logits = models::lm_head(root, "head", &x, None, VOCAB, 0.05)?;
            models::finish(root, &logits, options)
        })
    }
}

#[test]
fn layers_of_a_model_of_ones_own_are_chosen_where_no_list_names_them() {
    let planned = |case: &Case| {
        let args = case.arguments();
        let inputs = PlanInputs::read(Arc::new(SideBySide), &args)?;
        Plan::new(&inputs, &args).map(Arc::new)
    };
    let on = |degrees| Case::gpt2().on(degrees);
    let unnamed = planned(&on((1, 2, 1))).expect_err("nothing says what is split");
    let unnamed = chain(&unnamed);
    assert!(unnamed.contains("no default layer lists"), "{unnamed}");

    let auto = |degrees| on(degrees).with("tp_layer_lists", "auto");
    let one = auto((1, 1, 1));
    let plan = planned(&one).expect("it can be planned");
    let alone = losses(&train_by(&plan, &one));
    let sliced = auto((1, 2, 1)).with("sequence_parallel", true);
    for case in [
        auto((1, 2, 1)),
        auto((1, 4, 1)),
        auto((2, 2, 2)),
        sliced.with("parallel_vocab", true),
    ] {
        let plan = planned(&case).expect("it can be planned");
        let choices = plan.draft.tensor.choices.iter();
        let choices: Vec<_> = choices.map(ToString::to_string).collect();
        insta::allow_duplicates! {
            insta::assert_snapshot!(choices.join("\n"), @"
            auto col layers.{i}.q: each rank goes on with its part
            auto col layers.{i}.k: each rank goes on with its part
            auto col layers.{i}.v: each rank goes on with its part
            auto col layers.{i}.up: each rank goes on with its part
            auto row layers.{i}.out: its input comes split
            auto row layers.{i}.down: its input comes split
            ");
        }
        assert_close(&train_by(&plan, &case), &alone, &format!("{case:?}"));
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
    let text = chain(&failed);
    assert!(
        text.contains("the learning rate after 0 updates is NaN"),
        "{text}"
    );
}
