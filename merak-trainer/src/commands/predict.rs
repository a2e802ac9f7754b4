//! `merak predict`: what a checkpoint says of each sample.

mod lines;

pub(super) use self::lines::Lines;

use self::lines::{is_standard, name_of};
use super::{
    Outcome,
    evaluate::{figures, table},
    keys::Keys,
    output,
    prepared::Prepared,
    world,
};
use clap::{Args as ClapArgs, ValueEnum};
use merak_ckpt::{cli, words::file};
use merak_trainer::{
    Config, Error, Given, MerakTrainer, PredictionKind, Result,
    data::Dataset,
    metrics::{EvaluationMetrics, EvaluationProgress, Screen},
};
use serde_json::Value;
use std::{
    io::ErrorKind,
    path::{Path, PathBuf},
    process::ExitCode,
    sync::{Arc, Mutex},
};

/// Writes what a checkpoint says of each sample of the data, as JSON lines.
#[derive(Debug, ClapArgs)]
pub(crate) struct Args {
    /// The configuration file (.toml, .yaml or .json).
    config: PathBuf,
    /// A checkpoint, or the output folder of a run.
    checkpoint: PathBuf,
    /// The file to write, one object a line; `-` is standard output.
    #[arg(short, long, value_name = "FILE")]
    output: Option<PathBuf>,
    /// What is written of each sample [default: probabilities of classes, losses of tokens].
    #[arg(long, value_name = "WHAT")]
    what: Option<What>,
    /// The samples: all of the data, or their validation part alone.
    #[arg(long, value_name = "PART", default_value = "all")]
    part: Part,
    /// Takes the averages of the weights, which a run with `ema_decay` keeps, in their place.
    #[arg(long)]
    ema: bool,
    /// Prints the figures as one JSON document; for an output that is a file.
    #[arg(long)]
    json: bool,
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
    /// The configuration.
    fn load(&mut self) -> Result<Config> {
        self.take_own_options()?;
        let refused = |told: &str| Err(Error::CommandLine(told.to_owned()));
        let Some(path) = self.output.as_deref() else {
            return refused("-o FILE is missing: it names the file that the predictions go to");
        };
        if self.json && is_standard(path) {
            return refused(
                "--json prints one document to standard output, where -o - writes the lines: name a file",
            );
        }
        let checkpoint = self.checkpoint.display().to_string();
        let name = "resume_from_checkpoint";
        self.keys.give(Given::by("CHECKPOINT", name, checkpoint));
        self.keys.give(Given::always("finetune", "true"));
        self.keys.give(Given::always("do_predict", "true"));
        self.keys.give(Given::always("do_train", "false"));
        self.keys.load(&self.config)
    }

    /// Prints the figures: to standard error where the lines went to standard output.
    fn tell(&self, path: &Path, kind: PredictionKind, mut figures: Value) -> Result<()> {
        let what = name_of(kind);
        if self.json {
            figures["output"] = path.display().to_string().into();
            figures["what"] = what.into();
            return output::print(format!("{figures:#}"));
        }
        let samples = &figures["eval_samples"];
        let is_standard = is_standard(path);
        let to = if is_standard {
            "standard output".to_owned()
        } else {
            file(path)
        };
        let text = format!(
            "wrote     {what} of {samples} samples to {to}\n{}",
            table(&figures)
        );
        if is_standard {
            cli::report(text.trim_end());
            return Ok(());
        }
        output::print(text)
    }

    /// Takes the command's own options from after the first key.
    fn take_own_options(&mut self) -> Result<()> {
        self.json |= self.keys.take_flag("--json");
        self.ema |= self.keys.take_flag("--ema");
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
    let config = args.load();
    let (config, world) = world::join_with(config, screen, true)?;
    let prepared = match args.part {
        Part::All => Prepared::to_predict(&config, &world),
        Part::Validation => Prepared::to_evaluate(&config, &world),
    }?;
    world.agree(prepared.check_memory())?;
    let path = args.output.take().unwrap_or_default();
    let named = [("CONFIG", &*args.config), ("CHECKPOINT", &*args.checkpoint)];
    world.agree(output::refuse_input(
        "-o",
        &path,
        prepared.args.inputs(named),
    ))?;
    // A file that cannot be written is told before the work.
    let opened = world.has_first().then(|| open(&path)).transpose();
    let lines = Mutex::new(world.agree(opened)?);
    let outcome = world.run(&prepared.args, |member| {
        let mpu = merak_mpu::Mpu::new(member, prepared.plan.draft.degrees)?;
        let mut parts = prepared.parts();
        parts.takes_averages = args.ema;
        let mut own_lines = None;
        if mpu.is_rank_0() {
            let progress = EvaluationProgress::on(screen);
            parts.callbacks.push(Box::new(progress));
            own_lines = lines.lock().expect("no rank panics with it").take();
        }
        let data = parts.eval_data.clone();
        let plan = Arc::clone(&prepared.plan);
        let mut trainer = MerakTrainer::new(plan, mpu, &prepared.args, parts)?;
        let kind = args
            .what
            .map_or_else(|| trainer.prediction_kind(), Into::into);
        let data = data.expect("a prediction has data");
        let metrics = write(&mut trainer, &*data, kind, own_lines.as_mut())?;
        Ok((own_lines, kind, metrics))
    });
    let (lines, kind, metrics) = match outcome {
        Err(error) if has_reader_left(&error) => return Ok(ExitCode::SUCCESS),
        outcome => outcome.map_err(|error| config.locate(error))?,
    };
    if let Some(lines) = lines {
        let has_labels = lines.finish()?;
        args.tell(&path, kind, measured(&metrics, &prepared, has_labels))?;
    }
    Ok(ExitCode::SUCCESS)
}

/// The lines of a file that can be written.
fn open(path: &Path) -> Result<Lines> {
    Lines::begin(path).map_err(|error| {
        let named = file(path);
        Error::CommandLine(format!("cannot write {named}, which -o names: {error}"))
    })
}

/// Predicts every sample; rank 0 writes its lines as they come.
pub(super) fn write(
    trainer: &mut MerakTrainer,
    data: &dyn Dataset,
    kind: PredictionKind,
    mut lines: Option<&mut Lines>,
) -> Result<EvaluationMetrics> {
    trainer.predict_each(data, kind, &mut |prediction| match &mut lines {
        Some(lines) => lines.write(kind, &prediction, data.name(prediction.sample)),
        None => Ok(()),
    })
}

/// Whether the reader of standard output, such as `head`, went away.
fn has_reader_left(error: &Error) -> bool {
    match error {
        Error::Step { source, .. } => has_reader_left(source),
        Error::Write { path, source } => {
            path == Path::new(lines::STANDARD) && source.kind() == ErrorKind::BrokenPipe
        }
        _ => false,
    }
}

/// The measurements; without labels there is no loss, and nothing that follows from it.
fn measured(metrics: &EvaluationMetrics, prepared: &Prepared, has_labels: bool) -> Value {
    let mut document = figures(metrics, prepared);
    if let (false, Some(fields)) = (has_labels, document.as_object_mut()) {
        fields.retain(|name, _| name.starts_with("eval_samples") || name == "eval_runtime");
    }
    document
}
