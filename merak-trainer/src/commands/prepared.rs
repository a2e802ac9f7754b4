//! A run before its ranks start: everything that the configuration names, read, checked and
//! planned.

mod description;
mod unused;

use self::unused::check_unused;
use super::{
    environment,
    model::{Loaded, companions, read},
    planned::Planned,
    session::trained_tokenizer,
};
use merak_ckpt::{Checksum, HfFolder};
use merak_trace::models::{self, Objective};
use merak_trainer::{
    CheckedArguments, Config, DataArguments, Error, FolderError, MemoryNeed, MerakTrainer, Result,
    Room, RunFolder, TokenizerSource, TrainerParts, Workload, World,
    data::{Corpus, DataFingerprint, Datasets, ModelInputs, Purpose, Source, Tokenizer},
    metrics::{Page, Peak},
};
use std::{fmt::Write as _, ops::Deref};

/// The parts of a run that all ranks share.
pub(crate) struct Prepared {
    planned: Planned,
    /// The tokenizer, where there is text.
    pub(crate) tokenizer: Option<Tokenizer>,
    /// Whether the data are chats of a template.
    pub(crate) has_chats: bool,
    /// The text whose next tokens the model learns.
    pub(crate) corpus: Option<Corpus>,
    /// What the speed of the run is a share of, in the process of the first rank.
    pub(crate) peak: Option<Peak>,
    /// The data, for people.
    description: String,
    datasets: Datasets,
    /// What the process may use beside the data. Measuring costs leaves memory reserved, which the
    /// run takes.
    room: Room,
    fingerprint: DataFingerprint,
    /// Steps of the whole training.
    pub(crate) total_steps: usize,
    model_files: Vec<(String, Vec<u8>)>,
}

impl Deref for Prepared {
    type Target = Planned;

    fn deref(&self) -> &Planned {
        &self.planned
    }
}

/// The model's files beside its weights, by name.
fn model_files(
    model: &Loaded,
    args: &CheckedArguments,
    tokenizer: Option<&Tokenizer>,
) -> Result<Vec<(String, Vec<u8>)>> {
    // The configuration in use, overrides included, so that a checkpoint alone makes the model
    // again.
    let model_json = format!("{:#}\n", model.json).into_bytes();
    let mut model_files = vec![("config.json".to_owned(), model_json)];
    if let Some(tokenizer) = tokenizer {
        let json = tokenizer.to_json()?.into_bytes();
        model_files.push(("tokenizer.json".to_owned(), json));
    }
    model_files.extend(companions(args)?);
    if tokenizer.is_some() {
        // The templates in use and their special tokens alone, so that a checkpoint makes the same
        // prompts.
        model_files.retain(|(name, _)| !Source::PROMPT_FILES.contains(&&**name));
        model_files.extend(Source::prompt_files(&args.data)?);
    }
    Ok(model_files)
}

impl Prepared {
    /// Prepares a training, with validation where the data have a part for it.
    ///
    /// # Communication
    /// Between processes, what agrees on failures, and shares the measured costs.
    pub(crate) fn to_train(config: &Config, dry_run: bool, world: &World) -> Result<Self> {
        let begun = begin(config, world)?;
        let prepare = || {
            let prepared = Self::new(config, begun, Purpose::Training, world)?;
            // Checked before costs are measured, which takes a while. A dry run reports another run
            // below its plan.
            if world.has_first() {
                match RunFolder::check(&prepared.args) {
                    Err(Error::Folder(
                        FolderError::RunExists { .. } | FolderError::RunInUse { .. },
                    )) if dry_run => {}
                    other => other?,
                }
            }
            Ok(prepared)
        };
        let mut prepared = prepared_alike(prepare(), config, world)?;
        let measured = prepared.measure(!dry_run, world);
        measured.map_err(|error| config.locate(error))?;
        world.check_same("the plan", &prepared.plan.digest()?)?;
        Ok(prepared)
    }

    /// As [`Planned::measure`]. Does nothing for a run that does not fit into the memory of the
    /// first rank's machine.
    fn measure(&mut self, keeps: bool, world: &World) -> Result<()> {
        if !world.share(|| Ok(self.check_memory().is_ok()))? {
            return Ok(());
        }
        self.planned.measure(keeps, world)
    }

    /// Measures what the speed of the run is a share of, in the process of the first rank.
    ///
    /// # Communication
    /// Between processes, what agrees on failures.
    pub(crate) fn measure_peak(&mut self, config: &Config, world: &World) -> Result<()> {
        let measured = world.has_first().then(|| Peak::of(&self.args));
        let measured = measured.transpose().map_err(|error| config.locate(error));
        self.peak = world.agree(measured)?;
        Ok(())
    }

    /// Prepares an evaluation of the validation part alone.
    ///
    /// # Communication
    /// Between processes, what agrees on failures.
    pub(crate) fn to_evaluate(config: &Config, world: &World) -> Result<Self> {
        let prepared = Self::new(config, begin(config, world)?, Purpose::Evaluation, world);
        prepared_alike(prepared, config, world)
    }

    /// Prepares a forward of all the data, which then count as the validation part.
    ///
    /// # Communication
    /// As [`Prepared::to_evaluate`].
    pub(crate) fn to_predict(config: &Config, world: &World) -> Result<Self> {
        let prepared = Self::new(config, begin(config, world)?, Purpose::Prediction, world);
        prepared_alike(prepared, config, world)
    }

    fn new(
        config: &Config,
        (args, mut model): (CheckedArguments, Loaded),
        purpose: Purpose,
        world: &World,
    ) -> Result<Self> {
        let mut args = with_tokenizer(args)?;
        if purpose == Purpose::Prediction {
            args = all_once(args)?;
        }
        let crates = environment::crate_sources(config.file());
        let source = Source::load(&args.data, &*model.model, &crates)?;
        if purpose == Purpose::Prediction && !source.is_stream() {
            args = one_by_one(args)?;
        }
        if model.model.objective() == Objective::CausalLm {
            let visible = source.visible(&args.data)?;
            model.model = models::with_visible(model.model, visible);
        }
        let lengths = source.lengths(&args, &*model.model)?;
        let args = world.place(args.with_lengths(lengths)?);
        let inputs = ModelInputs::of(&*model.model, lengths)?;
        let (tokenizer, description) = (source.tokenizer.clone(), source.description.clone());
        let has_chats = source.is_of_chats();
        let tokens = model.data_tokens(&args);
        let (datasets, corpus) = source.datasets(&inputs, &args, &tokens, purpose)?;
        let total_steps = check_data(&args, &inputs, &datasets)?;
        let used = [&datasets.train, &datasets.validation];
        let samples = used
            .into_iter()
            .flatten()
            .next()
            .map_or(0, |data| if data.is_stream() { 0 } else { data.len() });
        let fingerprint = DataFingerprint::of(&args.data, &crates, tokenizer.as_ref(), samples)?;
        let model_files = model_files(&model, &args, tokenizer.as_ref())?;
        let planned = Planned::new(model, args)?;
        MerakTrainer::check_metric(&planned.plan, &planned.args)?;
        let planned = match purpose {
            Purpose::Training => planned,
            Purpose::Evaluation | Purpose::Prediction => planned.frozen(),
        };
        Ok(Self {
            corpus: corpus.filter(|_| planned.model.model.objective() == Objective::CausalLm),
            planned,
            tokenizer,
            has_chats,
            peak: None,
            description,
            datasets,
            room: Room::of_process(),
            fingerprint,
            total_steps,
            model_files,
        })
    }

    /// What the model's files hold, wherever they lie: the configuration in use, the adapter's, and
    /// checksums of the other files.
    fn model_content(&self) -> Result<String> {
        let json = &self.model.json;
        let mut text = format!("{json:#}\n");
        for (name, content) in &self.model_files {
            let _ = writeln!(text, "{name} {}", Checksum::of(content));
        }
        if let Some(folder) = &self.args.model.hf_dir {
            let names = HfFolder::open(&folder.0)?;
            let weights = DataFingerprint::of_files(&folder.0, &names.weight_files())?;
            let contents = weights.contents.map(|contents| contents.to_string());
            let _ = writeln!(
                text,
                "weights of {} bytes {} {}",
                weights.bytes,
                weights.names,
                contents.unwrap_or_default()
            );
        }
        if let Some(path) = &self.args.lora_config {
            let adapter = read("lora_config", &path.0)?;
            let _ = writeln!(text, "{adapter:#}");
        }
        Ok(text)
    }

    /// The parts of each rank's trainer.
    pub(crate) fn parts(&self) -> TrainerParts {
        TrainerParts {
            train_data: self.datasets.train.clone(),
            eval_data: self.datasets.validation.clone(),
            model_files: self.model_files.clone(),
            fingerprint: Some(self.fingerprint),
            ..TrainerParts::default()
        }
    }

    /// Whether the loss is one per token of text.
    pub(crate) fn is_language_model(&self) -> bool {
        use Objective as O;
        let objective = self.plan.draft.model.objective();
        matches!(objective, O::CausalLm | O::MaskedLm | O::SequenceToSequence)
    }

    /// Whether there is something to evaluate.
    pub(crate) fn validates(&self) -> bool {
        self.datasets.validation.is_some()
    }

    /// Refuses what this machine's memory cannot hold.
    pub(crate) fn check_memory(&self) -> Result<()> {
        let data = self.datasets.held_bytes as u64;
        let workloads = self.workloads();
        self.plan
            .check_memory_in(&self.args, &workloads, data, self.room)
    }

    /// The memory that the plan predicts of each rank of the pipeline.
    pub(crate) fn predicted_memory(&self) -> Result<Vec<MemoryNeed>> {
        self.plan.memory(&self.args, &self.workloads())
    }

    /// What `report.html` says whatever a run of so many steps records.
    pub(crate) fn page(&self, folder: &RunFolder, total_steps: usize) -> Result<Page> {
        let config = folder.resolved().to_owned();
        Ok(Page {
            peak: self.peak,
            total_steps: Some(total_steps),
            ..self.planned.page(&self.workloads(), config)?
        })
    }

    fn workloads(&self) -> Vec<Workload> {
        let Datasets {
            train, validation, ..
        } = &self.datasets;
        let training = train.as_ref().map(|_| Workload::Training);
        let evaluation = validation.as_ref().map(|data| Workload::Evaluation {
            samples: data.len(),
        });
        training.into_iter().chain(evaluation).collect()
    }
}

/// The complete arguments and their model, if every process has them. What is wrong with the model,
/// or with the checkpoint to go on from, is found before the data, which may take minutes to read.
///
/// # Communication
/// Between processes, as [`World::agree`]. The first rank looks for the checkpoint, as in the run.
fn begin(config: &Config, world: &World) -> Result<(CheckedArguments, Loaded)> {
    let read = || {
        let checked = config.check()?;
        let model = Loaded::of(&checked)?;
        let args = model.complete(checked)?;
        check_unused(config, &*model.model)?;
        if world.has_first() {
            MerakTrainer::expect_checkpoint(&args, &model.model.info())?;
        }
        Ok((args, model))
    };
    world.agree(read().map_err(|error| config.locate(error)))
}

/// What this process has prepared, if all processes have prepared the same.
fn prepared_alike(prepared: Result<Prepared>, config: &Config, world: &World) -> Result<Prepared> {
    let prepared = prepared.map_err(|error| config.locate(error));
    let prepared = world.agree(prepared)?;
    world.check_same("the configuration", &config.to_common_toml())?;
    let model = world.agree(prepared.model_content())?;
    world.check_same("the model", &model)?;
    world.check_same("the data", &prepared.fingerprint.to_string())?;
    Ok(prepared)
}

/// Checks the number of the samples, and the first one of each part: the others have the same
/// tensors. Returns the steps of the whole training.
fn check_data(args: &CheckedArguments, inputs: &ModelInputs, datasets: &Datasets) -> Result<usize> {
    let Datasets {
        train, validation, ..
    } = datasets;
    let parts = TrainerParts {
        train_data: train.clone(),
        eval_data: validation.clone(),
        ..TrainerParts::default()
    };
    let total_steps = MerakTrainer::check_data(args, &parts)?;
    for data in [train, validation].into_iter().flatten() {
        inputs.check(0, &data.get(0)?)?;
    }
    Ok(total_steps)
}

/// The arguments with the tokenizer of the checkpoint that they go on from, where it was trained.
fn with_tokenizer(args: CheckedArguments) -> Result<CheckedArguments> {
    let Some(file) = trained_tokenizer(&args) else {
        return Ok(args);
    };
    let mut args = args.into_arguments();
    args.data.tokenizer = TokenizerSource::File(file);
    args.check()
}

/// The arguments with all samples once.
fn all_once(args: CheckedArguments) -> Result<CheckedArguments> {
    let mut args = args.into_arguments();
    args.data.streaming = false;
    args.data.shuffle_buffer = DataArguments::default().shuffle_buffer;
    args.check()
}

/// The arguments with a chat for each sample, so that its line of predictions is its own.
fn one_by_one(args: CheckedArguments) -> Result<CheckedArguments> {
    let mut args = args.into_arguments();
    args.data.packing = false;
    args.check()
}
