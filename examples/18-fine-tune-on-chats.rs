//! Trains a model on chats, of which it learns the answers alone, and asks it (merak-trainer).
//!
//! `cargo run -p merak-examples --example 18-fine-tune-on-chats [DP [TP [PP]]]`, 1, 2 and 1 by
//! default. `merak train` does the same for `data.format = "jsonl"`; docs/DATA.md explains the
//! records and templates.
#![expect(clippy::print_stdout, reason = "an example prints")]

use anyhow::{Context, Result, ensure};
use merak_examples::count;
use merak_mpu::Mpu;
use merak_trace::models;
use merak_trainer::{
    CheckedArguments, Config, GenerateOptions, MerakTrainer, Plan, PlanInputs, TrainerParts,
    data::{CrateSources, DataTokens, ModelInputs, Purpose, Source},
    run_world, threads_per_rank,
};
use std::{fs, path::Path, sync::Arc};

const SEQ: usize = 24;

/// Each message as one line that begins with its author's letter.
const TEMPLATE: &str = "{% for message in messages %}{{ message.role[0] }}:{{ message.content }}\n{% endfor %}\
                        {% if add_generation_prompt %}a:{% endif %}";

/// Sums of two digits, as chats.
fn chats() -> String {
    let chat = |n: usize| {
        let (a, b) = (n / 5 % 5, n % 5);
        let message =
            |role: &str, content: String| serde_json::json!({ "role": role, "content": content });
        let messages = [
            message("user", format!("{a}+{b}?")),
            message("assistant", (a + b).to_string()),
        ];
        format!("{}\n", serde_json::json!({ "messages": messages }))
    };
    (0..200).map(chat).collect()
}

/// Writes the chats and their template into a folder, and says how to train on them.
fn arguments(folder: &Path) -> Result<CheckedArguments> {
    let at = |name: &str| folder.join(name);
    fs::write(at("chats.jsonl"), chats())?;
    fs::write(at("template.jinja"), TEMPLATE)?;
    let (dp, tp, pp) = (count(1, "DP", 1)?, count(2, "TP", 2)?, count(3, "PP", 1)?);
    ensure!(4_usize.is_multiple_of(dp), "DP divides 4");
    let line = [
        format!("--dp={dp}"),
        format!("--tp={tp}"),
        format!("--pp={pp}"),
        format!("--per_device_train_batch_size={}", 4 / dp),
        format!("--data.path={}", at("chats.jsonl").display()),
        format!("--data.chat_template={}", at("template.jinja").display()),
        format!("--seq_length={SEQ}"),
        "--data.format=jsonl".to_owned(),
        "--gradient_accumulation_steps=4".to_owned(),
        "--max_steps=400".to_owned(),
        "--learning_rate=5e-3".to_owned(),
    ];
    Ok(Config::load(None, [], &line)?.check()?)
}

fn main() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let args = arguments(folder.path())?;

    let config = serde_json::json!({
        "model_type": "gpt2", "vocab_size": 260, "n_positions": SEQ, "n_embd": 48, "n_layer": 2, "n_head": 4,
        "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
    });
    let model: Arc<dyn models::Model> = models::from_config(&config)?.into();
    let source = Source::load(&args.data, &*model, &CrateSources::default())?;
    println!("{}", source.description);
    let tokenizer = source.tokenizer.clone().context("texts have a tokenizer")?;
    let inputs = ModelInputs::of(&*model, SEQ.into())?;
    let (data, _) = source.datasets(&inputs, &args, &DataTokens::default(), Purpose::Training)?;
    let plan = Arc::new(Plan::new(&PlanInputs::read(model, &args)?, &args)?);

    let questions = ["u:1+2?\na:", "u:4+4?\na:"];
    let prompts = questions.map(|text| tokenizer.encode_prompt(text));
    let prompts: Vec<_> = prompts.into_iter().collect::<Result<_, _>>()?;
    let options = GenerateOptions {
        max_new_tokens: 1,
        temperature: 0.0,
        ..GenerateOptions::default()
    };
    let answers = run_world(&args, |member| {
        let mpu = Mpu::new(member, args.degrees())?;
        let parts = TrainerParts {
            train_data: data.train.clone(),
            num_threads: threads_per_rank(&args),
            ..TrainerParts::default()
        };
        let mut trainer = MerakTrainer::new(Arc::clone(&plan), mpu, &args, parts)?;
        let trained = trainer.train()?;
        Ok((trained.training_loss, trainer.generate(&prompts, &options)?))
    })?;
    let (loss, completions) = &answers[0];
    let answers = completions
        .iter()
        .map(|answer| tokenizer.decode(&answer.ids));
    let answers: Vec<_> = answers.collect::<Result<_, _>>()?;
    println!(
        "mean loss {loss:.4}; 1+2? {}  4+4? {}",
        answers[0], answers[1]
    );
    ensure!(
        answers == ["3", "8"],
        "it has learnt to add, found {answers:?}"
    );
    Ok(())
}
