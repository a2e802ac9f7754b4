//! Trains a model of one's own, with a loss of one's own, over data x tensor x pipeline ranks
//! (merak-trainer).
//!
//! `cargo run -p merak-examples --example 14-train-your-own-model [DP [TP [PP]]]`, each 2 by
//! default; docs/OWN-MODEL.md explains the parts.
#![expect(clippy::print_stdout, reason = "an example prints")]

use anyhow::{Result, ensure};
use merak_examples::count;
use merak_mpu::Mpu;
use merak_trace::{
    Graph, Init, fx,
    models::{self, Head, Model, ModelInfo, TraceOptions},
    op::{Activation, Attention, WeightLayout},
};
use merak_trainer::{
    MerakArguments, MerakTrainer, Plan, PlanInputs, TrainerParts,
    data::{Dataset, LABELS, Sample, SampleTensor},
    run_world,
};
use std::sync::Arc;

const VOCAB: usize = 16;
const SEQ: usize = 12;
const WIDTH: usize = 32;
const HEADS: usize = 4;
const LAYERS: usize = 4;
const INIT: Init = Init::Normal(0.05);
const PENALTY: f64 = 1e-4;

/// Attention and an MLP side by side in each layer, and a penalty on large logits.
#[derive(Debug)]
struct SideBySide;

impl SideBySide {
    fn layer(layer: &fx::Module, x: &fx::Symbol) -> merak_trace::Result<fx::Symbol> {
        // A layer's name is its path: the lists below choose layers by a part of it.
        let linear = |name: &str, x: &fx::Symbol, out: usize| {
            let own = layer.sub(name);
            own.linear(x, out, WeightLayout::OutIn, false, INIT)
        };
        let normed = layer.sub("norm").rms_norm(x, 1e-6)?;
        let [q, k, v] = ["q", "k", "v"].map(|name| linear(name, &normed, WIDTH));
        let spec = Attention {
            causal: true,
            ..Attention::of_heads(HEADS, WIDTH / HEADS)
        };
        let mixed = layer.sub("attn").attention(&q?, &k?, &v?, &spec, 0.0)?;
        let bent = layer.activation(&linear("up", &normed, 4 * WIDTH)?, Activation::GeluTanh)?;
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
            num_heads: HEADS,
            num_kv_heads: HEADS,
            max_seq: SEQ,
            vocab_size: VOCAB,
            eos_token_id: None,
        }
    }

    fn trace(&self, options: &TraceOptions) -> merak_trace::Result<Graph> {
        fx::trace(options.dtype, |root| {
            let ids = models::input_ids(root, options);
            let (mut x, table) = root.sub("embed").embedding(&ids, VOCAB, WIDTH, INIT)?;
            for index in 0..LAYERS {
                x = Self::layer(&root.sub(&format!("layers.{index}")), &x)?;
            }
            let tied = (!options.untie).then_some(&table);
            let logits = models::lm_head(root, "head", &x, tied, VOCAB, 0.05)?;
            let Head::Loss { label_smoothing } = options.head else {
                return models::finish(root, &logits, options);
            };
            // A sum, not a mean: the trainer divides by the labels of the global batch.
            let labels = models::labels(root, options);
            let loss = root.cross_entropy(&logits, &labels, label_smoothing)?;
            let squares = root.scale(&root.mul(&logits, &logits)?, PENALTY)?;
            root.output("loss", &root.add(&loss, &root.sum(&squares)?)?);
            Ok(())
        })
    }
}

/// Sequences that count upwards in steps of 1, 2 or 3.
#[derive(Debug)]
struct Counting;

impl Dataset for Counting {
    fn len(&self) -> usize {
        3 * VOCAB
    }

    fn get(&self, index: usize) -> merak_trainer::Result<Sample> {
        let token = |at: usize| ((index / 3 + (index % 3 + 1) * at) % VOCAB).cast_signed() as i64;
        let tokens = |from: usize| SampleTensor::vector((from..from + SEQ).map(token).collect());
        Ok(Sample::from([
            ("input_ids".to_owned(), tokens(0)),
            (LABELS.to_owned(), tokens(1)),
        ]))
    }
}

/// The mean loss of a run with these degrees.
fn train(dp: usize, tp: usize, pp: usize) -> Result<f64> {
    let mut args = MerakArguments::default();
    (args.dp, args.tp, args.pp) = (dp, tp, pp);
    args.per_device_train_batch_size = 4 / dp;
    args.gradient_accumulation_steps = 4;
    (args.max_steps, args.learning_rate) = (30, 5e-3);
    // Known families have such lists; a model of one's own says which layers are split.
    let list = |names: &[&str]| Some(names.iter().map(|name| (*name).to_owned()).collect());
    args.tp_layer_lists.col_para_list = list(&["q", "k", "v", "up"]);
    args.tp_layer_lists.row_para_list = list(&["out", "down"]);
    let args = args.check()?;
    let inputs = PlanInputs::read(Arc::new(SideBySide), &args)?;
    let plan = Arc::new(Plan::new(&inputs, &args)?);
    println!("{}", plan.partition_report()?.to_text(Some(100)));
    let losses = run_world(&args, |member| {
        let parts = TrainerParts {
            train_data: Some(Arc::new(Counting)),
            ..TrainerParts::default()
        };
        let mpu = Mpu::new(member, args.degrees())?;
        let trained = MerakTrainer::new(Arc::clone(&plan), mpu, &args, parts)?.train()?;
        Ok(trained.training_loss)
    })?;
    Ok(losses[0])
}

fn main() -> Result<()> {
    let (dp, tp, pp) = (count(1, "DP", 2)?, count(2, "TP", 2)?, count(3, "PP", 2)?);
    ensure!(4_usize.is_multiple_of(dp), "DP divides 4");
    let (alone, split) = (train(1, 1, 1)?, train(dp, tp, pp)?);
    println!("mean loss {split:.4}, on one rank {alone:.4}");
    ensure!(split < 0.8 * (VOCAB as f64).ln(), "it learns");
    ensure!((alone - split).abs() < 1e-4, "ranks change nothing");
    Ok(())
}
