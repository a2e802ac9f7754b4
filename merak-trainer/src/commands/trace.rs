//! `merak trace`: the graph of a model.

use super::{
    Outcome, environment,
    model::{self, Loaded},
    output,
};
use clap::{Args as ClapArgs, ValueEnum};
use merak_trace::{StageCuts, StageProgram, render};
use merak_trainer::{Config, Plan};
use std::{path::PathBuf, process::ExitCode};

/// Prints the graph of a model, as one rank runs it.
#[derive(Debug, ClapArgs)]
pub(crate) struct Args {
    /// A configuration file, a Hugging Face config.json, or a folder with one.
    #[arg(value_name = "CONFIG|HF_DIR")]
    source: PathBuf,
    /// What to print.
    #[arg(long, value_enum, default_value_t = Format::Text)]
    format: Format,
    /// Tensor-parallel ranks.
    #[arg(long)]
    tp: Option<usize>,
    /// Pipeline stages.
    #[arg(long)]
    pp: Option<usize>,
    /// Prints one stage's program, forward and backward.
    #[arg(long, value_name = "K")]
    stage: Option<usize>,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum Format {
    /// One line per node.
    Text,
    /// Graphviz.
    Dot,
    /// Objects.
    Json,
}

pub(crate) fn run(args: &Args) -> Outcome {
    if let (Some(stages), None) = (args.pp.filter(|&stages| stages > 1), args.stage) {
        let last = stages - 1;
        return Err(format!(
            "--pp {stages} cuts the graph, but --stage does not say which part to print: add --stage K with K from 0 to {last}"
        )
        .into());
    }
    let hf_config = match &args.source {
        folder if folder.is_dir() => Some(folder.join("config.json")),
        file => model::read(file)
            .ok()
            .filter(|json| json.get("model_type").is_some())
            .map(|_| file.clone()),
    };
    let mut keys = Vec::new();
    for (key, value) in [("--tp", args.tp), ("--pp", args.pp)] {
        if let Some(value) = value {
            keys.extend([key.to_owned(), value.to_string()]);
        }
    }
    let config = if let Some(path) = hf_config {
        keys.extend(["--model.config".to_owned(), path.display().to_string()]);
        Config::load(None, environment::variables(), &keys)?
    } else {
        Config::load(Some(&args.source), environment::variables(), &keys)?
    };
    let checked = config.check()?;
    let plan = Plan::new(Loaded::of(&checked)?.model, &checked)?;
    let program: StageProgram;
    let graph = match args.stage {
        None => &plan.graph,
        Some(stage) => {
            check_stage(stage, &plan.cuts)?;
            program = plan.training_program(stage)?;
            &program.graph
        }
    };
    let format = match args.format {
        Format::Text => render::Format::Text,
        Format::Dot => render::Format::Dot,
        Format::Json => render::Format::Json,
    };
    output::print(&render::graph(graph, format))?;
    Ok(ExitCode::SUCCESS)
}

fn check_stage(stage: usize, cuts: &StageCuts) -> Result<(), String> {
    let stages = cuts.num_stages();
    if stage < stages {
        Ok(())
    } else {
        Err(format!(
            "--stage {stage} does not exist: with --pp {stages} stages are 0 to {}",
            stages - 1
        ))
    }
}
