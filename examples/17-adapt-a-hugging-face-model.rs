//! Trains a LoRA adapter beside the weights of a Hugging Face folder, whose layers are split over
//! tensor-parallel ranks, and writes it as a PEFT folder (merak-trainer, merak-ckpt).
//!
//! `cargo run -p merak-examples --example 17-adapt-a-hugging-face-model [DP [TP [PP]]]`, 1, 2 and 2
//! by default. The folder is made here from a short training, so that nothing is downloaded; any
//! folder of a known family serves.
#![expect(clippy::print_stdout, reason = "an example prints")]

use anyhow::{Result, ensure};
use merak_ckpt::{Checkpoint, ExportOptions, export_hf, extract_lora};
use merak_examples::count;
use merak_mpu::Mpu;
use merak_trace::models;
use merak_trainer::{
    InputPath, MerakArguments, MerakTrainer, Plan, PlanInputs, TrainerParts,
    data::{Dataset, TokenDataset, Tokens},
    run_world, threads_per_rank,
};
use std::{fs, path::Path, sync::Arc};

const VOCAB: u32 = 32;
const SEQ: usize = 16;
const CONFIG: &str = "config.json";

/// What a run trains on: each token is the one before plus `stride`.
fn tokens(stride: u32) -> Tokens {
    (0..4000).map(|i| i * stride % VOCAB).collect()
}

/// Trains in a folder, and returns the losses of the first and the last step.
fn train(args: &MerakArguments, config: &Path, tokens: Tokens) -> Result<[f64; 2]> {
    let args = args.check()?;
    let json = serde_json::from_slice(&fs::read(config)?)?;
    let inputs = PlanInputs::read(models::from_config(&json)?.into(), &args)?;
    let plan = Arc::new(Plan::new(&inputs, &args)?);
    let trained: usize = plan.trained_params().map(|param| param.full.numel()).sum();
    println!(
        "{trained} of {} parameters are trained",
        plan.graph.num_elements()
    );
    let data: Arc<dyn Dataset> = Arc::new(TokenDataset::new(tokens, SEQ, "training")?);
    let files = vec![(CONFIG.to_owned(), fs::read(config)?)];
    let losses = run_world(&args, |member| {
        let parts = TrainerParts {
            train_data: Some(Arc::clone(&data)),
            model_files: files.clone(),
            num_threads: threads_per_rank(&args),
            ..TrainerParts::default()
        };
        let mpu = Mpu::new(member, args.degrees())?;
        let mut trainer = MerakTrainer::new(Arc::clone(&plan), mpu, &args, parts)?;
        let first = trainer.train_step()?.loss;
        let mut last = first;
        while trainer.global_step() < trainer.total_steps() {
            last = trainer.train_step()?.loss;
        }
        trainer.save_checkpoint()?;
        Ok([first, last])
    })?;
    Ok(losses[0])
}

/// Arguments of a run that writes into `output`.
fn arguments(output: &Path, steps: i64, learning_rate: f64) -> MerakArguments {
    let mut args = MerakArguments::default();
    args.output_dir = Some(output.to_owned());
    args.seq_length = Some(SEQ.into());
    args.per_device_train_batch_size = 4;
    args.gradient_accumulation_steps = 4;
    (args.max_steps, args.learning_rate) = (steps, learning_rate);
    args
}

fn main() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let at = |name: &str| folder.path().join(name);

    // A Llama that counts by ones, as Hugging Face stores it.
    let config = serde_json::json!({
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": VOCAB, "hidden_size": 32,
        "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
        "max_position_embeddings": SEQ, "tie_word_embeddings": false,
    });
    fs::write(at(CONFIG), config.to_string())?;
    train(&arguments(&at("base"), 40, 5e-3), &at(CONFIG), tokens(1))?;
    export_hf(
        &Checkpoint::open(at("base"))?,
        at("hf"),
        &ExportOptions::default(),
    )?;

    // An adapter beside it that counts by threes. The base keeps its bits.
    let lora = serde_json::json!({ "r": 4, "lora_alpha": 8, "target_modules": "all-linear" });
    fs::write(at("lora.json"), lora.to_string())?;
    let mut args = arguments(&at("run"), 60, 1e-2);
    (args.dp, args.tp, args.pp) = (count(1, "DP", 1)?, count(2, "TP", 2)?, count(3, "PP", 2)?);
    args.model.hf_dir = Some(InputPath(at("hf")));
    args.lora_config = Some(InputPath(at("lora.json")));
    let [first, last] = train(&args, &at("hf").join(CONFIG), tokens(3))?;
    println!("loss {first:.4} -> {last:.4}");
    ensure!(last < 0.5 * first, "the adapter learns");

    // `PeftModel.from_pretrained` reads this folder.
    extract_lora(&Checkpoint::open(at("run"))?, at("adapter"))?;
    for entry in fs::read_dir(at("adapter"))? {
        println!("adapter/{}", entry?.file_name().display());
    }
    ensure!(at("adapter/adapter_model.safetensors").is_file());
    Ok(())
}
