//! Trains a ViT to tell pictures of stripes apart, and evaluates it (merak-trainer).
//!
//! `cargo run -p merak-examples --example 16-classify-images [DP [TP [PP]]]`, 2, 2 and 1 by
//! default.
#![expect(clippy::print_stdout, reason = "an example prints")]

use anyhow::{Context, Result, ensure};
use merak_examples::count;
use merak_mpu::Mpu;
use merak_trace::models;
use merak_trainer::{
    MerakArguments, MerakTrainer, Plan, PlanInputs, TrainerParts,
    data::{Dataset, LABELS, Sample, SampleTensor, Subset},
    run_world, threads_per_rank,
};
use std::sync::Arc;

/// Pixels of an edge.
const SIZE: usize = 16;
const CLASSES: [&str; 3] = ["level", "upright", "slanted"];

/// Noisy grey pictures of stripes, each of another width and place.
#[derive(Debug)]
struct Stripes;

impl Dataset for Stripes {
    fn len(&self) -> usize {
        240
    }

    fn get(&self, index: usize) -> merak_trainer::Result<Sample> {
        let class = index % CLASSES.len();
        let pixel = |place: usize| {
            let (row, column) = (place / SIZE, place % SIZE);
            let across = [row, column, row + column][class] + index / 3;
            let stripe = if (across / (2 + index % 2)).is_multiple_of(2) {
                1.0
            } else {
                -1.0
            };
            let noise = ((index * 7919 + place * 104_729) % 1000) as f32 / 1000.0 - 0.5;
            stripe + noise
        };
        let pixels = (0..SIZE * SIZE).map(pixel).collect();
        let picture = SampleTensor::floats(vec![1, SIZE, SIZE], pixels);
        let label = i64::try_from(class).ok();
        let label = label.and_then(|class| SampleTensor::new(vec![], vec![class]));
        let tensors = [("pixel_values", picture), (LABELS, label)];
        let tensors = tensors
            .into_iter()
            .filter_map(|(name, tensor)| Some((name.to_owned(), tensor?)));
        Ok(tensors.collect())
    }
}

fn main() -> Result<()> {
    let mut args = MerakArguments::default();
    (args.dp, args.tp, args.pp) = (count(1, "DP", 2)?, count(2, "TP", 2)?, count(3, "PP", 1)?);
    ensure!(8_usize.is_multiple_of(args.dp), "DP divides 8");
    args.per_device_train_batch_size = 8 / args.dp;
    args.per_device_eval_batch_size = 8 / args.dp;
    args.gradient_accumulation_steps = 2;
    (args.max_steps, args.learning_rate) = (150, 3e-3);
    let args = args.check()?;

    let config = serde_json::json!({
        "model_type": "vit", "architectures": ["ViTForImageClassification"], "image_size": SIZE, "patch_size": 4,
        "num_channels": 1, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
        "intermediate_size": 64, "id2label": { "0": CLASSES[0], "1": CLASSES[1], "2": CLASSES[2] },
    });
    let model = models::from_config(&config)?;
    let plan = Arc::new(Plan::new(&PlanInputs::read(model.into(), &args)?, &args)?);
    let pictures: Arc<dyn Dataset> = Arc::new(Stripes);
    let parts = Subset::split(&pictures, 0.2);
    let [train, held_out] = parts.map(|part| Arc::new(part) as Arc<dyn Dataset>);

    let by_rank = run_world(&args, |member| {
        let mpu = Mpu::new(member, args.degrees())?;
        let parts = TrainerParts {
            train_data: Some(Arc::clone(&train)),
            eval_data: Some(Arc::clone(&held_out)),
            num_threads: threads_per_rank(&args),
            ..TrainerParts::default()
        };
        let mut trainer = MerakTrainer::new(Arc::clone(&plan), mpu, &args, parts)?;
        trainer.train()?;
        trainer.evaluate()
    })?;

    let told = by_rank.first().context("there is a rank")?;
    println!("{} pictures, loss {:.4}", told.eval_samples, told.eval_loss);
    for (name, value) in &told.metrics {
        println!("{name}  {value:.3}");
    }
    let accuracy = told
        .metrics
        .get("eval_accuracy")
        .context("classes have an accuracy")?;
    ensure!(*accuracy > 0.9, "it tells them apart, found {accuracy}");
    Ok(())
}
