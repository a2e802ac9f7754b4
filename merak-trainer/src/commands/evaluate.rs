//! `merak evaluate`: the loss of a checkpoint on held-out data.

use super::{Outcome, keys::Keys, output, prepared::Prepared, world};
use clap::Args as ClapArgs;
use merak_ckpt::words::file;
use merak_trainer::{
    Config, Error, Given, MerakTrainer, Result,
    metrics::{EvaluationMetrics, EvaluationProgress, Screen},
};
use serde_json::{Value, json};
use std::{fmt::Write as _, path::PathBuf, process::ExitCode, sync::Arc};

/// Evaluates a checkpoint on the validation part of the data.
#[derive(Debug, ClapArgs)]
pub(crate) struct Args {
    /// The configuration file (.toml, .yaml or .json).
    config: PathBuf,
    /// A checkpoint, or the output folder of a run.
    checkpoint: PathBuf,
    /// Takes the averages of the weights, which a run with `ema_decay` keeps, in their place.
    #[arg(long)]
    ema: bool,
    /// Prints one JSON document.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    keys: Keys,
}

impl Args {
    /// The configuration.
    fn load(&mut self) -> Result<Config> {
        if self.config.is_dir() && self.checkpoint.is_file() {
            let [folder, config] = [&self.config, &self.checkpoint].map(|path| file(path));
            return Err(Error::CommandLine(format!(
                "{folder} is a folder and stands where CONFIG belongs: write merak evaluate {config} {folder}"
            )));
        }
        let checkpoint = self.checkpoint.display().to_string();
        let name = "resume_from_checkpoint";
        self.keys.give(Given::by("CHECKPOINT", name, checkpoint));
        self.keys.give(Given::always("finetune", "true"));
        self.keys.give(Given::always("do_eval", "true"));
        self.keys.give(Given::always("do_predict", "false"));
        self.keys.load(&self.config)
    }
}

pub(crate) fn run(mut args: Args, screen: &Screen) -> Outcome {
    let json = args.keys.take_flag("--json") || args.json;
    args.ema |= args.keys.take_flag("--ema");
    let (config, world) = world::join_with(args.load(), screen, true)?;
    let prepared = Prepared::to_evaluate(&config, &world)?;
    world.agree(prepared.check_memory())?;
    let metrics = world
        .run(&prepared.args, |member| {
            let mpu = merak_mpu::Mpu::new(member, prepared.plan.draft.degrees)?;
            let plan = Arc::clone(&prepared.plan);
            let mut parts = prepared.parts();
            parts.takes_averages = args.ema;
            if mpu.is_rank_0() {
                let progress = EvaluationProgress::on(screen);
                parts.callbacks.push(Box::new(progress));
            }
            MerakTrainer::new(plan, mpu, &prepared.args, parts)?.evaluate()
        })
        .map_err(|error| config.locate(error))?;
    if !world.has_first() {
        return Ok(ExitCode::SUCCESS);
    }
    let mut document = figures(&metrics, &prepared);
    // The loss of a bigram model stands beside that of a model of the next token.
    if let Some(corpus) = &prepared.corpus {
        document["bigram_loss"] = corpus.bigram_loss()?.into();
    }
    output::print(&if json {
        format!("{document:#}")
    } else {
        table(&document)
    })?;
    let loss = metrics.eval_loss;
    if !loss.is_finite() {
        return Err(Error::EvaluationLoss { loss }.into());
    }
    Ok(ExitCode::SUCCESS)
}

/// The measurements, with the perplexity of a language model.
pub(super) fn figures(metrics: &EvaluationMetrics, prepared: &Prepared) -> Value {
    let mut document = json!({ "eval_loss": metrics.eval_loss });
    if prepared.is_language_model() {
        document["perplexity"] = metrics.eval_loss.exp().into();
    }
    // The perplexity stands there already, without its prefix.
    let others = metrics.metrics.iter();
    for (name, value) in others.filter(|(name, _)| *name != "eval_perplexity") {
        document[name] = (*value).into();
    }
    let rest = json!({
        "eval_samples": metrics.eval_samples,
        "eval_runtime": metrics.eval_runtime,
        "eval_samples_per_second": metrics.eval_samples_per_second,
    });
    let rest = rest.as_object().into_iter().flatten();
    for (name, value) in rest {
        document[name] = value.clone();
    }
    document
}

/// The measurements a line each.
pub(super) fn table(document: &Value) -> String {
    let mut text = String::new();
    let rows = document.as_object().into_iter().flatten();
    for (name, value) in rows {
        let value = match value.as_f64().filter(|_| value.is_f64()) {
            Some(number) => format!("{number:.4}"),
            None => value.to_string(),
        };
        let _ = writeln!(text, "{name:24}  {value}");
    }
    text
}
