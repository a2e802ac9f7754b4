//! `merak predict`: what a checkpoint says of each sample.

use super::{Outcome, keys::Keys, output, prepared::Prepared, world};
use clap::{Args as ClapArgs, ValueEnum};
use merak_ckpt::words::file;
use merak_trainer::{
    Config, Error, Given, MerakTrainer, PredictionKind, PredictionOutput, Result,
    data::Dataset,
    metrics::{EvaluationProgress, Screen},
};
use serde_json::{Value, json};
use std::{
    fs::File,
    io::{BufWriter, Write},
    path::{Path, PathBuf},
    process::ExitCode,
    sync::Arc,
};

/// Writes what a checkpoint says of each sample of the data, as JSON lines.
#[derive(Debug, ClapArgs)]
pub(crate) struct Args {
    /// The configuration file (.toml, .yaml or .json).
    config: PathBuf,
    /// A checkpoint, or the output folder of a run.
    checkpoint: PathBuf,
    /// The file to write, one object a line.
    #[arg(short, long, value_name = "FILE")]
    output: Option<PathBuf>,
    /// What is written of each sample [default: probabilities of classes, losses of tokens].
    #[arg(long, value_name = "WHAT")]
    what: Option<What>,
    /// The samples: all of the data, or their validation part alone.
    #[arg(long, value_name = "PART", default_value = "all")]
    part: Part,
    #[command(flatten)]
    keys: Keys,
}

/// What is written of each sample.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum What {
    /// The probability of each class, or of each token at each position.
    Probabilities,
    /// The loss at each position.
    Losses,
    /// The inputs of the model's head, as a mean over positions.
    Embeddings,
    /// What the probabilities are made of.
    Logits,
}

impl From<What> for PredictionKind {
    fn from(what: What) -> Self {
        match what {
            What::Probabilities => Self::Probabilities,
            What::Losses => Self::Losses,
            What::Embeddings => Self::Embeddings,
            What::Logits => Self::Logits,
        }
    }
}

/// The samples of a prediction.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Part {
    /// All of the data, in their order.
    All,
    /// Their validation part.
    Validation,
}

impl Args {
    /// The configuration, and the file to write.
    fn load(&mut self) -> Result<(Config, PathBuf)> {
        self.take_own_options()?;
        let path = self.output.take().ok_or_else(|| {
            let missing = "-o FILE is missing: it names the file that the predictions go to";
            Error::CommandLine(missing.to_owned())
        })?;
        let checkpoint = self.checkpoint.display().to_string();
        let name = "resume_from_checkpoint";
        self.keys.give(Given::by("CHECKPOINT", name, checkpoint));
        self.keys.give(Given::always("finetune", "true"));
        self.keys.give(Given::always("do_predict", "true"));
        Ok((self.keys.load(&self.config)?, path))
    }

    /// Takes the command's own options from after the first key.
    fn take_own_options(&mut self) -> Result<()> {
        for name in ["-o", "--output"] {
            if let Some(path) = self.keys.take_option(name) {
                self.output = Some(path.into());
            }
        }
        if let Some(what) = self.keys.take_option("--what") {
            self.what = Some(parsed("--what", &what)?);
        }
        if let Some(part) = self.keys.take_option("--part") {
            self.part = parsed("--part", &part)?;
        }
        Ok(())
    }
}

/// A value of an option of the command, or the error that names the choices.
fn parsed<T: ValueEnum>(option: &str, word: &str) -> Result<T> {
    T::from_str(word, false).map_err(|_| {
        let values = T::value_variants().iter();
        let names =
            values.filter_map(|value| Some(value.to_possible_value()?.get_name().to_owned()));
        let names: Vec<_> = names.collect();
        Error::CommandLine(format!(
            "{option} is \"{word}\", expected one of {}",
            names.join(", ")
        ))
    })
}

pub(crate) fn run(mut args: Args, screen: &Screen) -> Outcome {
    let (config, path) = args.load().map_or_else(
        |error| (Err(error), PathBuf::new()),
        |(config, path)| (Ok(config), path),
    );
    let (config, world) = world::join_with(config, screen, true)?;
    let prepared = match args.part {
        Part::All => Prepared::to_predict(&config, &world),
        Part::Validation => Prepared::to_evaluate(&config, &world),
    }?;
    world.agree(prepared.check_memory())?;
    // A file that cannot be written is told before the work.
    let opened = world.has_first().then(|| open(&path)).transpose();
    world.agree(opened)?;
    let outcome = world.run(&prepared.args, |member| {
        let mpu = merak_mpu::Mpu::new(member, prepared.plan.draft.degrees)?;
        let mut parts = prepared.parts();
        if mpu.is_rank_0() {
            parts
                .callbacks
                .push(Box::new(EvaluationProgress::on(screen)));
        }
        let data = parts.eval_data.clone();
        let plan = Arc::clone(&prepared.plan);
        let mut trainer = MerakTrainer::new(plan, mpu, &prepared.args, parts)?;
        let kind = args
            .what
            .map_or_else(|| trainer.prediction_kind(), Into::into);
        let data = data.expect("a prediction has data");
        Ok((trainer.predict_as(&*data, kind)?, kind))
    });
    let (output, kind) = outcome.map_err(|error| config.locate(error))?;
    if !world.has_first() {
        return Ok(ExitCode::SUCCESS);
    }
    let data = prepared.parts().eval_data;
    write(&path, &output, kind, data.as_deref())?;
    output::print(format!(
        "wrote     {} of {} samples to {}\n",
        name_of(kind),
        output.predictions.len(),
        file(&path)
    ))?;
    Ok(ExitCode::SUCCESS)
}

/// Makes the file to write, where there is none.
fn open(path: &Path) -> Result<()> {
    let opened = File::options().append(true).create(true).open(path);
    opened.map(drop).map_err(|error| {
        let named = file(path);
        Error::CommandLine(format!("cannot write {named}, which -o names: {error}"))
    })
}

/// The field of a prediction in its line.
fn name_of(kind: PredictionKind) -> &'static str {
    match kind {
        PredictionKind::Probabilities => "probabilities",
        PredictionKind::Losses => "losses",
        PredictionKind::Embeddings => "embedding",
        PredictionKind::Logits => "logits",
    }
}

/// Writes predictions as JSON lines.
pub(super) fn write(
    path: &Path,
    output: &PredictionOutput,
    kind: PredictionKind,
    data: Option<&dyn Dataset>,
) -> Result<()> {
    let written = File::create(path).and_then(|file| {
        let mut file = BufWriter::new(file);
        let samples = output.predictions.iter().zip(&output.label_ids);
        for (sample, (values, labels)) in samples.enumerate() {
            let mut line = line(sample, values, labels, kind);
            if let Some(name) = data.and_then(|data| data.name(sample)) {
                line["file"] = name.into();
            }
            writeln!(file, "{line}")?;
        }
        file.flush()
    });
    written.map_err(Error::writing(path))
}

/// The object of a sample: its place, its prediction, and what is shorter than that.
fn line(sample: usize, values: &[f32], labels: &[i64], kind: PredictionKind) -> Value {
    // What is not finite is null.
    let mut object = json!({ "sample": sample, name_of(kind): values });
    let has_class = labels.len() == 1;
    if kind == PredictionKind::Losses {
        let finite: Vec<f64> = values
            .iter()
            .copied()
            .filter(|x| !x.is_nan())
            .map(f64::from)
            .collect();
        let mean = finite.iter().sum::<f64>() / finite.len().max(1) as f64;
        object["loss"] = (!finite.is_empty()).then_some(mean).into();
    }
    if has_class && kind != PredictionKind::Embeddings && kind != PredictionKind::Losses {
        let mut best = 0;
        for (class, value) in values.iter().enumerate() {
            if *value > values[best] {
                best = class;
            }
        }
        object["class"] = best.into();
    }
    if has_class {
        object["label"] = (labels[0] >= 0).then_some(labels[0]).into();
    }
    object
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_has_the_prediction_and_its_short_form() {
        let of = |values: &[f32], labels: &[i64], kind| line(3, values, labels, kind).to_string();
        assert_eq!(
            of(&[0.25, 0.75], &[0], PredictionKind::Probabilities),
            r#"{"sample":3,"probabilities":[0.25,0.75],"class":1,"label":0}"#
        );
        assert_eq!(
            of(&[0.5, f32::NAN, 1.5], &[1, -100, 2], PredictionKind::Losses),
            r#"{"sample":3,"losses":[0.5,null,1.5],"loss":1.0}"#
        );
        assert_eq!(
            of(&[0.5], &[-100], PredictionKind::Embeddings),
            r#"{"sample":3,"embedding":[0.5],"label":null}"#
        );
    }
}
