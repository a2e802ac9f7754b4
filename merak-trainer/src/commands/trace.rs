//! `merak trace`: the graph of a model.

use super::{
    Failure, Outcome,
    keys::Keys,
    model::{self, Loaded},
    output,
};
use clap::{Args as ClapArgs, ValueEnum};
use merak_ckpt::{cli::at_least_one, words::brief};
use merak_tp::Traffic;
use merak_trace::{Axis, StageCuts, StageProgram, render};
use merak_trainer::{Config, Given, Origin, Plan, PlanInputs};
use serde_json::{Value as Json, json};
use std::{fmt::Write as _, path::PathBuf, process::ExitCode};

/// Prints the graph of a model, as one rank runs it.
#[derive(Debug, ClapArgs)]
#[command(
    after_help = "Any configuration key may be given as --set KEY=VALUE or --KEY VALUE, for example --tp 2."
)]
pub(crate) struct Args {
    /// A configuration file, a Hugging Face config.json, or a folder with one.
    #[arg(value_name = "CONFIG|HF_DIR")]
    source: PathBuf,
    /// What to print.
    #[arg(long, value_enum, default_value_t = Format::Text)]
    format: Format,
    /// Tensor-parallel ranks.
    #[arg(long, value_parser = at_least_one)]
    tp: Option<usize>,
    /// Ranks that share each sequence.
    #[arg(long, value_parser = at_least_one)]
    sp: Option<usize>,
    /// Pipeline stages.
    #[arg(long, value_parser = at_least_one)]
    pp: Option<usize>,
    /// Prints one stage's program, forward and backward.
    #[arg(long, value_name = "K")]
    stage: Option<usize>,
    #[command(flatten)]
    keys: Keys,
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

pub(crate) fn run(mut args: Args) -> Outcome {
    args.take_own_options()?;
    let config = args.config()?;
    let checked = config.check()?;
    let is_cut_here = checked.num_stages() > 1
        && ["pp", "virtual_stages", "train_schedule"]
            .iter()
            .any(|key| matches!(config.origin(key), Origin::CommandLine { .. }));
    if is_cut_here && args.stage.is_none() {
        let (pp, last) = (checked.pp, checked.num_stages() - 1);
        return Err(format!(
            "--pp {pp} cuts the graph, but --stage does not say which part to print: add --stage K with K from 0 to {last}"
        )
        .into());
    }
    let plan = Loaded::of(&checked)
        .and_then(|loaded| Plan::new(&PlanInputs::read(loaded.model, &checked)?, &checked));
    let plan = plan.map_err(|error| config.locate(error))?;
    let program: StageProgram;
    let graph = match args.stage {
        None => &plan.graph,
        Some(stage) => {
            check_stage(stage, &plan.cuts, checked.pp)?;
            program = plan.training_program(stage)?;
            &program.graph
        }
    };
    output::print(match args.format {
        Format::Text => {
            let mut text = render::graph(graph, render::Format::Text);
            let split = &plan.draft.tensor;
            let choices = split.choices.iter().map(ToString::to_string);
            let lines = choices.chain(split.made_whole());
            for line in lines.chain(split.warnings()) {
                let _ = writeln!(text, "# {line}");
            }
            text += &as_comments(&traffic(&plan, args.stage)?);
            output::fitted(&text)
        }
        Format::Dot => render::graph(graph, render::Format::Dot),
        Format::Json => {
            let mut document = render::to_json(graph);
            let split = &plan.draft.tensor;
            document["choices"] = json!(split.choices);
            document["kept_whole"] = json!(split.kept_whole);
            document["gathers"] = json!(split.gathers);
            document["unmatched"] = json!(split.unmatched);
            document["traffic"] = as_object(&traffic(&plan, args.stage)?);
            format!("{document:#}")
        }
    })?;
    Ok(ExitCode::SUCCESS)
}

impl Args {
    /// Takes the command's own options from the keys, which hold all words after the first key.
    fn take_own_options(&mut self) -> Result<(), Failure> {
        if let Some(format) = self.keys.take_option("--format") {
            self.format = Format::from_str(&format, false).map_err(|_| {
                format!(
                    "--format expects text, dot or json, found \"{}\"",
                    brief(&format)
                )
            })?;
        }
        if let Some(stage) = self.keys.take_option("--stage") {
            let parsed = stage.parse();
            self.stage =
                Some(parsed.map_err(|_| {
                    format!("--stage expects a number, found \"{}\"", brief(&stage))
                })?);
        }
        for (key, value) in [("tp", self.tp), ("sp", self.sp), ("pp", self.pp)] {
            if let Some(value) = value {
                let given = Given::by(format!("--{key}"), key, value.to_string());
                self.keys.give(given);
            }
        }
        Ok(())
    }

    /// The configuration in the source, or one for the model that the source describes.
    fn config(&mut self) -> Result<Config, Failure> {
        let described = match &self.source {
            folder if folder.is_dir() => Some(folder.join("config.json")),
            file => model::read(model::CONFIG, file)
                .ok()
                .filter(|json| json.get("model_type").is_some())
                .map(|_| file.clone()),
        };
        Ok(match described {
            Some(path) => {
                let path = path.display().to_string();
                self.keys
                    .give(Given::by("CONFIG|HF_DIR", "model.config", path));
                self.keys.resolve(None)?
            }
            None => self.keys.load(&self.source)?,
        })
    }
}

/// The communication of a microbatch along each axis that has several ranks.
fn traffic(plan: &Plan, stage: Option<usize>) -> Result<Vec<(Axis, Traffic)>, Failure> {
    let stages = stage.map_or(0..plan.cuts.num_stages(), |stage| stage..stage + 1);
    let programs = stages.map(|stage| plan.training_program(stage));
    let programs = programs.collect::<Result<Vec<_>, _>>()?;
    let axes = [Axis::Tensor, Axis::Sequence].into_iter();
    let several = axes.filter(|&axis| plan.draft.degrees.get(axis) > 1);
    let of_axis = several.map(|axis| (axis, Traffic::of(&programs, axis)));
    Ok(of_axis.collect())
}

fn as_comments(traffic: &[(Axis, Traffic)]) -> String {
    let mut text = String::new();
    for (axis, traffic) in traffic {
        let _ = writeln!(
            text,
            "# communication of a microbatch between {axis}-parallel ranks"
        );
        for line in traffic.to_string().lines() {
            let _ = writeln!(text, "# {line}");
        }
    }
    text
}

/// By the name of the axis.
fn as_object(traffic: &[(Axis, Traffic)]) -> Json {
    let of_axis = traffic.iter().map(|(axis, traffic)| {
        let rows = json!({ "layers": traffic.layers, "total": traffic.total() });
        (axis.to_string(), rows)
    });
    of_axis.collect::<serde_json::Map<_, _>>().into()
}

fn check_stage(stage: usize, cuts: &StageCuts, pp: usize) -> Result<(), String> {
    let stages = cuts.num_stages();
    if stage < stages {
        Ok(())
    } else {
        Err(format!(
            "--stage {stage} does not exist: with --pp {pp} stages are 0 to {}",
            stages - 1
        ))
    }
}
